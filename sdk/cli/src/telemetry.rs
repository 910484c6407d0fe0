//! Logs and traces of this process.
//!
//! Owns setting them up from the environment, and sending what is left at the end. Does not own spans or log lines: every crate
//! writes its own with `tracing`.
//!
//! Logs go to standard error: `VOLLEY_LOG` (else `RUST_LOG`) filters them as `info` or `volley_worker=debug,warn`, and
//! `VOLLEY_LOG_FORMAT=json` makes each line a JSON object. Traces go out by OTLP over HTTP when `OTEL_EXPORTER_OTLP_ENDPOINT` or
//! `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set; sampling and resource follow the other standard `OTEL_*` variables.

use std::future::{Future, poll_fn};
use std::io::{self, IsTerminal as _};
use std::pin::pin;
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tokio::runtime::Handle;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

/// Why telemetry can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// A filter that isn't one.
    #[error("{variable}={value:?} is no log filter: {why}; one looks like info or volley_worker=debug,warn")]
    Filter {
        /// Which variable.
        variable: &'static str,
        /// What it says.
        value: String,
        /// What is wrong.
        why: String,
    },
    /// A format that isn't one.
    #[error("VOLLEY_LOG_FORMAT={0:?} is no format: it is text or json")]
    Format(String),
    /// The OTLP exporter doesn't start.
    #[error("traces can't be sent as the OTEL_… variables say: {0}")]
    Exporter(String),
    /// Somebody set it up before.
    #[error("logging is set up already: {0}")]
    Twice(String),
}

/// What was set up; keep it until the end.
#[derive(Debug)]
pub struct Telemetry {
    traces: Option<SdkTracerProvider>,
}

impl Telemetry {
    /// Sends what is left. Takes a few seconds at most when nobody takes it.
    pub fn shutdown(self) {
        if let Some(traces) = self.traces {
            // Nobody is left who could be told.
            let _ = traces.shutdown_with_timeout(Duration::from_secs(3));
        }
    }
}

/// Sets logs and traces up for a process that serves, such as `worker`. Call it within the runtime that the process runs on.
///
/// # Errors
/// [`TelemetryError`] names the variable.
pub fn init(service: &'static str) -> Result<Telemetry, TelemetryError> {
    let var = |name: &'static str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let given = ["VOLLEY_LOG", "RUST_LOG"].into_iter().find_map(|name| Some((name, var(name)?)));
    let (variable, text) = given.unwrap_or(("VOLLEY_LOG", "info".to_owned()));
    let filter = filter(variable, &text)?;
    let traces = tracer(service, &var)?;
    let spans = traces.as_ref().map(|traces| tracing_opentelemetry::layer().with_tracer(traces.tracer("volley")));
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    let lines = match var("VOLLEY_LOG_FORMAT").as_deref() {
        None | Some("text") => lines.boxed(),
        Some("json") => lines.json().flatten_event(true).boxed(),
        Some(other) => return Err(TelemetryError::Format(other.to_owned())),
    };
    let registry = tracing_subscriber::registry().with(lines.and_then(spans).with_filter(filter));
    registry.try_init().map_err(|error| TelemetryError::Twice(error.to_string()))?;
    Ok(Telemetry { traces })
}

fn filter(variable: &'static str, text: &str) -> Result<EnvFilter, TelemetryError> {
    EnvFilter::builder().parse(text).map_err(|error| TelemetryError::Filter {
        variable,
        value: text.to_owned(),
        why: error.to_string(),
    })
}

fn tracer(
    service: &'static str,
    var: &dyn Fn(&'static str) -> Option<String>,
) -> Result<Option<SdkTracerProvider>, TelemetryError> {
    let disabled = var("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let endpoint = var("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or_else(|| var("OTEL_EXPORTER_OTLP_ENDPOINT"));
    let (Some(endpoint), false) = (endpoint, disabled) else {
        return Ok(None);
    };
    let failed = |error: &dyn std::fmt::Display| TelemetryError::Exporter(error.to_string());
    let client = volley_sdk::http_client_for(&endpoint).map_err(|error| failed(&error))?;
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
        .with_http_client(client)
        .build()
        .map_err(|error| failed(&error))?;
    let runtime = Handle::try_current().map_err(|error| failed(&error))?;
    // The environment's own service name comes first.
    let resource = match var("OTEL_SERVICE_NAME") {
        Some(_) => Resource::builder().build(),
        None => Resource::builder().with_service_name(service).build(),
    };
    let provider =
        SdkTracerProvider::builder().with_batch_exporter(OnRuntime { exporter, runtime }).with_resource(resource).build();
    Ok(Some(provider))
}

/// Sends spans on a runtime. The batch processor has a thread of its own, which has none, and the HTTP client needs one.
#[derive(Debug)]
struct OnRuntime<E> {
    exporter: E,
    runtime: Handle,
}

impl<E: SpanExporter> SpanExporter for OnRuntime<E> {
    fn export(&self, batch: Vec<SpanData>) -> impl Future<Output = OTelSdkResult> + Send {
        async move {
            let mut export = pin!(self.exporter.export(batch));
            poll_fn(|context| {
                let _entered = self.runtime.enter();
                export.as_mut().poll(context)
            })
            .await
        }
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use opentelemetry::trace::{Span as _, Tracer as _};

    use super::*;

    #[test]
    fn a_filter_that_is_none_is_named() {
        let error = filter("VOLLEY_LOG", "volley=loud").err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.starts_with("VOLLEY_LOG=\"volley=loud\" is no log filter"), "{error}");
        assert!(filter("VOLLEY_LOG", "volley_worker=debug,warn").is_ok());
    }

    #[tokio::test]
    async fn without_an_endpoint_nothing_is_sent() {
        assert!(tracer("s", &|_| None).is_ok_and(|tracer| tracer.is_none()));
        let disabled = |name| match name {
            "OTEL_SDK_DISABLED" => Some("true".to_owned()),
            _ => Some("http://127.0.0.1:1".to_owned()),
        };
        assert!(tracer("s", &disabled).is_ok_and(|tracer| tracer.is_none()));
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
        let exporter = OnRuntime { exporter: exporter.expect("an exporter"), runtime: Handle::current() };
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).build();
        provider.tracer("t").start("a-span").end();
        let flushed = tokio::task::spawn_blocking(move || provider.shutdown()).await.expect("a flush");
        assert!(flushed.is_ok(), "{flushed:?}");
        received.join().expect("a span");
    }
}
