//! `volley volume-server` and `volley volume-file`: what a worker starts beside itself, and nobody types.
//!
//! Owns the way from their arguments to what they do, before there is a runtime or a second thread. Does not own what they do.

use std::ffi::OsString;
use std::process::ExitCode;

use volley_cli::{Exit, telemetry};
use volley_worker::volumes::programs;

/// Threads that carry out requests to S3; what volumes do has threads of its own.
const THREADS: usize = 2;

/// Carries out one of the two verbs, if it is one: how it ended.
pub fn of_a_worker() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let verb = arguments.next().filter(|verb| programs::is_ours(verb))?;
    let arguments: Vec<OsString> = arguments.collect();
    let done = if verb == programs::SERVER { server() } else { programs::file(&arguments) };
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(line) => {
            eprintln!("error: {line}");
            Exit::Internal.into()
        }
    })
}

fn server() -> Result<(), String> {
    let connection = programs::connection().map_err(|e| e.to_string())?;
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(THREADS).enable_all().build().map_err(|e| format!("can't start: {e}"))?;
    let telemetry = {
        let _inside = runtime.enter();
        telemetry::init("volley-volume-server", telemetry::FILTER_DEFAULT).map_err(|e| e.to_string())?
    };
    // This thread is none of the runtime's.
    let served = volley_volume::server::run(&connection, runtime.handle());
    runtime.block_on(async { telemetry.shutdown() });
    // What is under way ends with the process, as if it had been killed: its worker is gone.
    runtime.shutdown_background();
    served.map_err(|e| e.to_string())
}
