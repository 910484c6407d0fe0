//! Logs of the serving verbs.
//!
//! Owns the subscriber: text on stderr by default, JSON with `VOLLEY_LOG_FORMAT=json`, filtered by `VOLLEY_LOG` (default `info`).

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

/// What must be ended at the end.
pub struct Telemetry;

impl Telemetry {
    /// Sends what is left.
    pub fn stop(self) {}
}

/// Starts it.
pub fn start(_role: &str) -> Telemetry {
    let filter = EnvFilter::try_from_env("VOLLEY_LOG").unwrap_or_else(|_| EnvFilter::new("info,async_nats=warn"));
    let json = std::env::var("VOLLEY_LOG_FORMAT").is_ok_and(|format| format == "json");
    let builder = fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let set = if json { builder.json().try_init() } else { builder.try_init() };
    if let Err(error) = set {
        eprintln!("warning: no logs: {error}");
    }
    Telemetry
}
