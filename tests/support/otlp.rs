//! A collector of spans and metrics, as OTLP over HTTP brings them.
//!
//! Owns taking requests and decoding them. Keeps everything it got.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{metric, number_data_point};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message as _;

/// A span.
#[derive(Debug, Clone)]
pub struct Span {
    /// Whose.
    pub service: String,
    /// Its name.
    pub name: String,
    /// Ids in hex; the parent's is empty for a root.
    pub trace: String,
    pub id: String,
    pub parent: String,
    /// In nanoseconds since 1970.
    pub start: u64,
    pub end: u64,
    /// Text and numbers as text.
    pub attributes: BTreeMap<String, String>,
    /// Is its status an error?
    pub failed: bool,
}

/// Metrics: (service, name, labels) and the last value.
pub type Figures = BTreeMap<(String, String, BTreeMap<String, String>), f64>;

#[derive(Debug, Default)]
struct Got {
    spans: Vec<Span>,
    figures: Figures,
}

/// A collector; listens until the test ends.
#[derive(Debug, Clone)]
pub struct Collector {
    /// Its endpoint.
    pub url: String,
    got: Arc<Mutex<Got>>,
}

impl Collector {
    /// Starts one.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let collector = Self { url: format!("http://{}", listener.local_addr().unwrap()), got: Arc::default() };
        let got = collector.got.clone();
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let got = got.clone();
                std::thread::spawn(move || serve(&socket, &got));
            }
        });
        collector
    }

    /// Spans so far.
    pub fn spans(&self) -> Vec<Span> {
        self.got.lock().unwrap().spans.clone()
    }

    /// Metrics so far.
    pub fn figures(&self) -> Figures {
        self.got.lock().unwrap().figures.clone()
    }
}

/// Answers requests of one connection until it is closed.
fn serve(socket: &TcpStream, got: &Mutex<Got>) -> Option<()> {
    let mut reader = BufReader::new(socket);
    loop {
        let (mut line, mut length) = (String::new(), 0);
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        let path = line.split(' ').nth(1)?.to_owned();
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok().filter(|read| *read > 0)?;
            if header.trim().is_empty() {
                break;
            }
            if let Some(value) = header.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        match path.as_str() {
            "/v1/traces" => take_spans(ExportTraceServiceRequest::decode(body.as_slice()).unwrap(), got),
            "/v1/metrics" => take_figures(ExportMetricsServiceRequest::decode(body.as_slice()).unwrap(), got),
            other => panic!("nobody sends to {other}"),
        }
        (&mut &*socket).write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n").ok()?;
    }
}

fn take_spans(request: ExportTraceServiceRequest, got: &Mutex<Got>) {
    for resource in request.resource_spans {
        let service = service(resource.resource);
        for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            got.lock().unwrap().spans.push(Span {
                service: service.clone(),
                name: span.name,
                trace: hex::encode(span.trace_id),
                id: hex::encode(span.span_id),
                parent: hex::encode(span.parent_span_id),
                start: span.start_time_unix_nano,
                end: span.end_time_unix_nano,
                attributes: texts(span.attributes),
                failed: span.status.is_some_and(|status| status.code == 2),
            });
        }
    }
}

fn take_figures(request: ExportMetricsServiceRequest, got: &Mutex<Got>) {
    for resource in request.resource_metrics {
        let service = service(resource.resource);
        for metric in resource.scope_metrics.into_iter().flat_map(|scope| scope.metrics) {
            let points = match metric.data {
                Some(metric::Data::Gauge(gauge)) => gauge.data_points,
                Some(metric::Data::Sum(sum)) => sum.data_points,
                other => panic!("nobody sends {other:?}"),
            };
            for point in points {
                let Some(number_data_point::Value::AsDouble(value)) = point.value else { panic!("no number: {point:?}") };
                got.lock().unwrap().figures.insert((service.clone(), metric.name.clone(), texts(point.attributes)), value);
            }
        }
    }
}

fn service(resource: Option<Resource>) -> String {
    texts(resource.unwrap_or_default().attributes).remove("service.name").unwrap_or_default()
}

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |value| match value {
        Some(any_value::Value::StringValue(text)) => text,
        Some(any_value::Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    attributes.into_iter().map(|pair| (pair.key, text(pair.value.and_then(|any| any.value)))).collect()
}
