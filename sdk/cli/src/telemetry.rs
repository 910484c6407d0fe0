//! Logs, spans and metrics of this process.
//!
//! Owns setting them up from the environment, and sending what is left at the end. Does not own what is logged (every crate writes its
//! lines with `tracing`), or what is told (coordinator and worker tell it to the observer they are given, `volley_jobspecs::observe`).
//!
//! Logs go to standard error: `VOLLEY_LOG` (else `RUST_LOG`) filters them as `info` or `volley_worker=debug,warn`, and
//! `VOLLEY_LOG_FORMAT=json` makes each line a JSON object. Spans and metrics go out by OTLP over HTTP when
//! `OTEL_EXPORTER_OTLP_ENDPOINT`, or the one of their own, is set; see `settings` for the other standard variables.

pub mod client;
mod otlp;
mod settings;

use std::io::{self, IsTerminal as _};
use std::sync::Arc;

use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};
use volley_jobspecs::observe::{Observer, Observing};

use otlp::Otlp;
use settings::Settings;

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
    /// A variable of the standard's says what this build can't do.
    #[error("{variable}={value:?} can't be followed; this build knows {allowed}")]
    Value {
        /// Which variable.
        variable: &'static str,
        /// What it says.
        value: String,
        /// What it may say.
        allowed: &'static str,
    },
    /// The OTLP exporter doesn't start.
    #[error("spans or metrics can't be sent as the OTEL_… variables say: {0}")]
    Exporter(String),
    /// Somebody set it up before.
    #[error("logging is set up already: {0}")]
    Twice(String),
}

/// What was set up; keep it until the end.
#[derive(Debug)]
pub struct Telemetry {
    otlp: Option<Arc<Otlp>>,
}

impl Telemetry {
    /// Whom coordinator and worker tell; none when nothing is sent.
    #[must_use]
    pub fn observer(&self) -> Observing {
        self.otlp.clone().map(|otlp| otlp as Arc<dyn Observer>)
    }

    /// Sends what is left. Takes a few seconds at most when nobody takes it.
    pub fn shutdown(self) {
        if let Some(otlp) = self.otlp {
            otlp.shutdown();
        }
    }
}

/// What is logged unless the environment says otherwise. The library below the embedded S3 server logs each answer that is no success as an
/// error, and the client tries those again; what matters of them our own lines say.
pub const FILTER_DEFAULT: &str = "info,s3s=off";

/// The same of a verb that answers a person: what a library does on the way is not what was asked for.
pub const FILTER_QUIET: &str = "warn,async_nats=error,s3s=off";

/// A variable of the environment; one that is empty counts as unset.
#[must_use]
pub fn var(name: &'static str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Sets everything up for a process that serves, such as `volley-worker`. Call it within the runtime that the process runs on. `default`: what
/// is logged unless the environment says otherwise.
///
/// # Errors
/// [`TelemetryError`] names the variable.
pub fn init(service: &'static str, default: &str) -> Result<Telemetry, TelemetryError> {
    let given = ["VOLLEY_LOG", "RUST_LOG"].into_iter().find_map(|name| Some((name, var(name)?)));
    let (variable, text) = given.unwrap_or(("VOLLEY_LOG", default.to_owned()));
    let filter = filter(variable, &text)?;
    let otlp = Otlp::start(service, Settings::read(&var)?, &var)?;
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    let lines = match var("VOLLEY_LOG_FORMAT").as_deref() {
        None | Some("text") => lines.boxed(),
        Some("json") => lines.json().flatten_event(true).boxed(),
        Some(other) => return Err(TelemetryError::Format(other.to_owned())),
    };
    let registry = tracing_subscriber::registry().with(lines.with_filter(filter));
    registry.try_init().map_err(|error| TelemetryError::Twice(error.to_string()))?;
    Ok(Telemetry { otlp })
}

fn filter(variable: &'static str, text: &str) -> Result<EnvFilter, TelemetryError> {
    EnvFilter::builder().parse(text).map_err(|error| TelemetryError::Filter { variable, value: text.to_owned(), why: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_is_none_is_named() {
        let error = filter("VOLLEY_LOG", "volley=loud").err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.starts_with("VOLLEY_LOG=\"volley=loud\" is no log filter"), "{error}");
        assert!(filter("VOLLEY_LOG", "volley_worker=debug,warn").is_ok());
    }
}
