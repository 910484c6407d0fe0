//! The trace of one verb that submits a job.
//!
//! Owns where the trace comes from (the variable `TRACEPARENT`, as CI systems set it, or a new one) and sending the verb's span. A
//! verb never fails for its telemetry. Does not own what is sent to the cluster: the verb hands the context to the SDK.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_sdk::trace::SpanExporter as _;
use volley_jobspecs::ids::JobId;
use volley_jobspecs::observe::{Span, SpanKind, Value};
use volley_jobspecs::wire::trace::TraceContext;

use super::TelemetryError;
use super::otlp::{data, resource, scope, span_exporter};
use super::settings::{Settings, Var};
use crate::exit::Exit;

/// How long sending the span may keep a person waiting.
const SEND: Duration = Duration::from_secs(3);

/// A verb's trace.
#[derive(Debug)]
pub struct ClientTrace {
    context: TraceContext,
    parent: Option<TraceContext>,
    name: &'static str,
    start_us: u64,
    job: OnceLock<JobId>,
    exporter: Option<opentelemetry_otlp::SpanExporter>,
}

impl ClientTrace {
    /// Begins it; none when there is no trace to go on with and spans are off.
    ///
    /// # Errors
    /// [`TelemetryError`]: the variables can't be followed.
    pub fn begin(name: &'static str, var: Var) -> Result<Option<Self>, TelemetryError> {
        let settings = Settings::read(var)?;
        let parent: Option<TraceContext> = var("TRACEPARENT").and_then(|text| text.parse().ok());
        let (context, exporter) = match (&settings.traces, parent) {
            (None, None) => return Ok(None),
            // Without a span of our own, the job hangs below the caller's.
            (None, Some(parent)) => (parent, None),
            (Some(endpoint), parent) => {
                let context = fresh(parent, &settings)?;
                let mut exporter = span_exporter(endpoint)?;
                exporter.set_resource(&resource("volley-cli", var));
                (context, context.sampled().then_some(exporter))
            }
        };
        Ok(Some(Self { context, parent, name, start_us: now_us(), job: OnceLock::new(), exporter }))
    }

    /// What the job is to hang below.
    #[must_use]
    pub fn context(&self) -> TraceContext {
        self.context
    }

    /// The job was submitted.
    pub fn submitted(&self, job: JobId) {
        // A verb submits one job.
        let _ = self.job.set(job);
    }

    /// The verb has ended; sends its span. `why` says what it failed with, if it did.
    pub async fn end(&self, exit: Exit, why: Option<String>) {
        let Some(exporter) = &self.exporter else { return };
        let mut attributes = vec![("process.exit.code", Value::Number(i64::from(exit.code())))];
        attributes.extend(self.job.get().map(|job| ("volley.job", Value::Text(job.to_string()))));
        let span = Span {
            context: self.context,
            parent: self.parent.map(|parent| parent.span()),
            remote: self.parent.is_some(),
            kind: SpanKind::Client,
            name: self.name,
            start_us: self.start_us,
            end_us: now_us(),
            attributes,
            error: why,
        };
        // A collector that doesn't take it is nobody's loss but the watcher's.
        let _ = tokio::time::timeout(SEND, exporter.export(vec![data(span, &scope())])).await;
    }
}

fn fresh(parent: Option<TraceContext>, settings: &Settings) -> Result<TraceContext, TelemetryError> {
    let mut ids = ([0; 16], [0; 8]);
    let random = |bytes: &mut [u8]| getrandom::fill(bytes).map_err(|error| TelemetryError::Exporter(error.to_string()));
    random(&mut ids.0)?;
    random(&mut ids.1)?;
    let trace = parent.map_or(ids.0, |parent| parent.trace());
    let sampled = settings.sampler.records(trace, parent.map(|parent| parent.sampled()));
    TraceContext::new(trace, ids.1, sampled).ok_or_else(|| TelemetryError::Exporter("the system's randomness is all zeros".to_owned()))
}

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn begin(vars: &[(&'static str, &str)]) -> Option<ClientTrace> {
        let var = |name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        ClientTrace::begin("volley run", &var).unwrap_or_else(|e| panic!("{e}"))
    }

    #[tokio::test]
    async fn a_trace_is_gone_on_with_or_begun_or_there_is_none() {
        let on = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1");
        assert!(begin(&[]).is_none());
        assert!(begin(&[("TRACEPARENT", "nonsense")]).is_none());
        let handed_on = begin(&[("TRACEPARENT", CALLER)]).map(|trace| trace.context().to_string());
        assert_eq!(handed_on.as_deref(), Some(CALLER));
        let below = begin(&[("TRACEPARENT", CALLER), on]).unwrap_or_else(|| panic!("a trace"));
        assert_eq!(below.context().trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(below.context().to_string() != CALLER && below.exporter.is_some());
        let quiet = begin(&[("TRACEPARENT", &CALLER.replace("-01", "-00")), on]).unwrap_or_else(|| panic!("a trace"));
        assert!(!quiet.context().sampled() && quiet.exporter.is_none());
        let (a, b) = (begin(&[on]), begin(&[on]));
        assert_ne!(a.map(|trace| trace.context().trace_id()), b.map(|trace| trace.context().trace_id()));
    }
}
