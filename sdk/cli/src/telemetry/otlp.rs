//! Spans and figures by OTLP over HTTP.
//!
//! Owns the exporters, batches, and the translation into the library's types. Does not own what is told (`volley_jobspecs::observe`)
//! or which variables say so (`settings`).

use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use opentelemetry::metrics::{Meter, MeterProvider as _};
use opentelemetry::trace::{SpanContext, SpanKind as Kind, Status, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, SpanId, TraceFlags, TraceId};
use opentelemetry_otlp::{WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::metrics::data::ResourceMetrics;
use opentelemetry_sdk::metrics::exporter::PushMetricExporter;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider, Temporality};
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanEvents, SpanExporter, SpanLinks, SpanProcessor as _};
use tokio::runtime::Handle;
use volley_jobspecs::observe::{Figure, FigureKind, Observer, Span, SpanKind, Value};

use super::TelemetryError;
use super::settings::{Sampler, Settings, Var};

/// Spans that may wait to be sent, unless `OTEL_BSP_MAX_QUEUE_SIZE` says: one full report of nothing but failures is some 1,300 attempts
/// with seven spans each, told of at once. Taken at the start: 5 MiB.
const SPANS_WAITING: usize = 16_384;
/// Least time between two complaints that nothing can be sent.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);
/// How long sending what is left may take at the end.
const LAST: Duration = Duration::from_secs(3);

/// Sends what it is told.
#[derive(Debug)]
pub struct Otlp {
    spans: Option<BatchSpanProcessor>,
    board: Option<Board>,
    settings: Settings,
    scope: InstrumentationScope,
}

impl Otlp {
    /// Starts the exporters; none when everything is off. Call it within the runtime that the process runs on.
    ///
    /// # Errors
    /// [`TelemetryError`].
    pub fn start(service: &'static str, settings: Settings, var: Var) -> Result<Option<Arc<Self>>, TelemetryError> {
        if settings.traces.is_none() && settings.metrics.is_none() {
            return Ok(None);
        }
        let runtime = Handle::try_current().map_err(|error| TelemetryError::Exporter(error.to_string()))?;
        let resource = resource(service, var);
        let spans = match &settings.traces {
            Some(endpoint) => {
                let exporter = OnRuntime::new(span_exporter(endpoint)?, runtime.clone());
                let mut batches = BatchConfigBuilder::default();
                if var("OTEL_BSP_MAX_QUEUE_SIZE").is_none() {
                    batches = batches.with_max_queue_size(SPANS_WAITING);
                }
                let mut spans = BatchSpanProcessor::builder(exporter).with_batch_config(batches.build()).build();
                spans.set_resource(&resource);
                Some(spans)
            }
            None => None,
        };
        let board = match &settings.metrics {
            Some(endpoint) => {
                let exporter = OnRuntime::new(metric_exporter(endpoint)?, runtime);
                Some(Board::new(PeriodicReader::builder(exporter).with_interval(settings.interval).build(), resource))
            }
            None => None,
        };
        Ok(Some(Arc::new(Self { spans, board, settings, scope: scope() })))
    }

    /// Sends what is left. Takes a few seconds at most when nobody takes it.
    pub fn shutdown(&self) {
        // Nobody is left who could be told.
        if let Some(spans) = &self.spans {
            let _ = spans.shutdown_with_timeout(LAST);
        }
        if let Some(board) = &self.board {
            let _ = board.provider.shutdown_with_timeout(LAST);
        }
    }
}

impl Observer for Otlp {
    fn takes_spans(&self) -> bool {
        self.spans.is_some()
    }

    fn records(&self, trace: [u8; 16], parent: Option<bool>) -> bool {
        // Who sends no spans decides nothing for those who do.
        if self.spans.is_some() { self.settings.sampler.records(trace, parent) } else { Sampler::default().records(trace, parent) }
    }

    fn spans(&self, spans: Vec<Span>) {
        if let Some(processor) = &self.spans {
            for span in spans {
                processor.on_end(data(span, &self.scope));
            }
        }
    }

    fn figures_every(&self) -> Option<Duration> {
        self.settings.figures_every()
    }

    fn figures(&self, figures: Vec<Figure>) {
        if let Some(board) = &self.board {
            board.show(figures);
        }
    }
}

/// Who tells. The environment's own words come first.
pub(super) fn resource(service: &'static str, var: Var) -> Resource {
    let mut resource = Resource::builder();
    if var("OTEL_SERVICE_NAME").is_none() && !var("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|all| all.contains("service.name=")) {
        resource = resource.with_service_name(service);
    }
    if !var("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|all| all.contains("service.instance.id=")) {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        resource = resource.with_attribute(KeyValue::new("service.instance.id", format!("{}-{}", host.trim(), std::process::id())));
    }
    resource.with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))).build()
}

pub(super) fn scope() -> InstrumentationScope {
    InstrumentationScope::builder("volley").with_version(env!("CARGO_PKG_VERSION")).build()
}

fn failed(error: impl fmt::Display) -> TelemetryError {
    TelemetryError::Exporter(error.to_string())
}

/// An exporter of spans, to where the environment says; `endpoint` is only looked at for how to get there.
pub(super) fn span_exporter(endpoint: &str) -> Result<opentelemetry_otlp::SpanExporter, TelemetryError> {
    let client = volley_sdk::http_client_for(endpoint).map_err(failed)?;
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_http().with_http_client(client);
    exporter.with_protocol(opentelemetry_otlp::Protocol::HttpBinary).build().map_err(failed)
}

fn metric_exporter(endpoint: &str) -> Result<opentelemetry_otlp::MetricExporter, TelemetryError> {
    let client = volley_sdk::http_client_for(endpoint).map_err(failed)?;
    let exporter = opentelemetry_otlp::MetricExporter::builder().with_http().with_http_client(client);
    exporter.with_protocol(opentelemetry_otlp::Protocol::HttpBinary).build().map_err(failed)
}

/// A span in the library's form.
pub(super) fn data(span: Span, scope: &InstrumentationScope) -> SpanData {
    let at = |us| UNIX_EPOCH.checked_add(Duration::from_micros(us)).unwrap_or_else(SystemTime::now);
    let ids = (TraceId::from_bytes(span.context.trace()), SpanId::from_bytes(span.context.span()));
    SpanData {
        // It would not be sent if it were not sampled.
        span_context: SpanContext::new(ids.0, ids.1, TraceFlags::SAMPLED, false, TraceState::default()),
        parent_span_id: span.parent.map_or(SpanId::INVALID, SpanId::from_bytes),
        parent_span_is_remote: span.remote,
        span_kind: match span.kind {
            SpanKind::Internal => Kind::Internal,
            SpanKind::Server => Kind::Server,
            SpanKind::Client => Kind::Client,
        },
        name: span.name.into(),
        start_time: at(span.start_us),
        end_time: at(span.end_us),
        attributes: span.attributes.into_iter().map(|(name, value)| KeyValue::new(name, value_of(value))).collect(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: span.error.map_or(Status::Unset, Status::error),
        instrumentation_scope: scope.clone(),
    }
}

fn value_of(value: Value) -> opentelemetry::Value {
    match value {
        Value::Text(text) => text.into(),
        Value::Number(number) => number.into(),
    }
}

type Shown = BTreeMap<String, Vec<(Vec<KeyValue>, f64)>>;

/// The latest figures. Each name has an instrument that reads them when metrics are sent.
struct Board {
    provider: SdkMeterProvider,
    meter: Meter,
    shown: Arc<Mutex<Shown>>,
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Board").finish_non_exhaustive()
    }
}

impl Board {
    fn new(reader: PeriodicReader<impl PushMetricExporter>, resource: Resource) -> Self {
        let provider = SdkMeterProvider::builder().with_reader(reader).with_resource(resource).build();
        let meter = provider.meter_with_scope(scope());
        Self { provider, meter, shown: Arc::default() }
    }

    fn show(&self, figures: Vec<Figure>) {
        let mut named: BTreeMap<String, (String, FigureKind, Vec<(Vec<KeyValue>, f64)>)> = BTreeMap::new();
        for figure in figures {
            let labels = figure.labels.into_iter().map(|(name, value)| KeyValue::new(name, value)).collect();
            let entry = named.entry(figure.name).or_insert_with(|| (figure.help, figure.kind, Vec::new()));
            entry.2.push((labels, figure.value));
        }
        for (name, (help, kind, values)) in named {
            // The lock is not held while an instrument is made: the library calls back under locks of its own.
            let known = self.shown.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), values).is_some();
            if !known {
                self.add(name, help, kind);
            }
        }
    }

    fn add(&self, name: String, help: String, kind: FigureKind) {
        let (shown, key) = (self.shown.clone(), name.clone());
        let read = move |instrument: &dyn opentelemetry::metrics::AsyncInstrument<f64>| {
            let shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
            for (labels, value) in shown.get(&key).into_iter().flatten() {
                instrument.observe(*value, labels);
            }
        };
        // The provider keeps the callback; the instrument itself is only its name.
        match kind {
            FigureKind::Counter => _ = self.meter.f64_observable_counter(name).with_description(help).with_callback(read).build(),
            FigureKind::Gauge => _ = self.meter.f64_observable_gauge(name).with_description(help).with_callback(read).build(),
        }
    }
}

/// Sends on a runtime. The library's threads have none, and the HTTP client needs one. Says when nothing can be sent.
#[derive(Debug)]
pub(super) struct OnRuntime<E> {
    exporter: E,
    runtime: Handle,
    complained: Mutex<Option<Instant>>,
}

impl<E> OnRuntime<E> {
    pub(super) fn new(exporter: E, runtime: Handle) -> Self {
        Self { exporter, runtime, complained: Mutex::new(None) }
    }

    async fn run(&self, export: impl Future<Output = OTelSdkResult>) -> OTelSdkResult {
        let mut export = pin!(export);
        let sent = poll_fn(|context| {
            let _entered = self.runtime.enter();
            export.as_mut().poll(context)
        });
        let sent = sent.await;
        if let Err(error) = &sent {
            self.complain(error);
        }
        sent
    }

    fn complain(&self, error: &dyn fmt::Display) {
        let mut last = self.complained.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() > COMPLAIN_EVERY) {
            *last = Some(Instant::now());
            tracing::warn!(%error, "spans or metrics were not taken and are lost; look at the collector and at OTEL_EXPORTER_OTLP_ENDPOINT");
        }
    }
}

impl<E: SpanExporter> SpanExporter for OnRuntime<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.run(self.exporter.export(batch)).await
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

impl<E: PushMetricExporter> PushMetricExporter for OnRuntime<E> {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        self.run(self.exporter.export(metrics)).await
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn temporality(&self) -> Temporality {
        self.exporter.temporality()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use opentelemetry_sdk::metrics::exporter::PushMetricExporter;

    use super::*;

    /// Remembers the names and values it was given.
    #[derive(Debug, Clone, Default)]
    struct Memory(Arc<Mutex<String>>);

    impl PushMetricExporter for Memory {
        async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = format!("{metrics:?}");
            Ok(())
        }
        fn force_flush(&self) -> OTelSdkResult {
            Ok(())
        }
        fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
            Ok(())
        }
        fn temporality(&self) -> Temporality {
            Temporality::Cumulative
        }
    }

    #[test]
    fn figures_are_sent_as_they_are_at_that_moment() {
        let memory = Memory::default();
        let board = Board::new(PeriodicReader::builder(memory.clone()).build(), Resource::builder_empty().build());
        let figure = |value| Figure {
            name: "volley_x_seconds".to_owned(),
            help: "X".to_owned(),
            kind: FigureKind::Counter,
            labels: vec![("stage".to_owned(), "execute".to_owned())],
            value,
        };
        board.show(vec![figure(1.5)]);
        board.show(vec![figure(42.25)]);
        assert!(board.provider.force_flush().is_ok());
        let sent = memory.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert!(sent.contains("volley_x_seconds") && sent.contains("execute") && sent.contains("42.25"), "{sent}");
    }

    /// The exporter reads its endpoint from the process's environment, which tests share; so it is made by hand here.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn spans_arrive_from_a_thread_without_a_runtime() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}/v1/traces", listener.local_addr().expect("an address"));
        let received = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().expect("a connection");
            let mut bytes = vec![0; 65_536];
            let mut length = 0;
            while !String::from_utf8_lossy(&bytes[..length]).contains("a-span") {
                length += socket.read(&mut bytes[length..]).expect("a request");
            }
            socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").expect("an answer");
        });
        let client = volley_sdk::http_client_for(&url).expect("a client");
        let exporter = opentelemetry_otlp::SpanExporter::builder().with_http().with_http_client(client).with_endpoint(url).build();
        let exporter = OnRuntime::new(exporter.expect("an exporter"), Handle::current());
        let processor = BatchSpanProcessor::builder(exporter).build();
        let span = Span {
            context: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00".parse().expect("a context"),
            parent: None,
            remote: false,
            kind: SpanKind::Internal,
            name: "a-span",
            start_us: 1,
            end_us: 2,
            attributes: vec![("n", 1u32.into())],
            error: Some("no".to_owned()),
        };
        processor.on_end(data(span, &scope()));
        let flushed = tokio::task::spawn_blocking(move || processor.shutdown_with_timeout(LAST)).await.expect("a flush");
        assert!(flushed.is_ok(), "{flushed:?}");
        received.join().expect("a span");
    }
}
