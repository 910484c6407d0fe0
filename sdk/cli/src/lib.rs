//! The command line: every verb, its flags, its tables and progress.
//!
//! Owns what people type and see. Does not own starting a coordinator, a worker or a whole cluster: for those verbs it only reads the
//! flags and hands them to the composition root as a [`ServeCommand`]. Everything else goes through the SDK, so that nothing the
//! command line can do is closed to programs.
//!
//! ```no_run
//! # async fn example() -> std::process::ExitCode {
//! use volley_cli::{Outcome, ServeCommand};
//!
//! match volley_cli::run(std::env::args_os()).await {
//!     Outcome::Done(exit) => exit.into(),
//!     Outcome::Serve { command: ServeCommand::Up(args), .. } => { /* start a cluster */ 0.into() }
//!     Outcome::Serve { .. } => 70.into(),
//! }
//! # }
//! ```

pub mod clean;
mod cli;
mod ctx;
mod each;
mod error;
mod exit;
mod failures;
mod follow;
mod help;
mod interrupt;
mod out;
mod progress;
pub mod serve;
mod spec_file;
mod stall;
mod summary;
mod table;
mod tag;
pub mod telemetry;
mod terminal;
#[cfg(test)]
mod testing;
mod units;
mod verbs;

pub use cli::{Cli, Outcome, ServeCommand, command, execute, parse, run};
pub use error::{CliError, failure};
pub use exit::{EXIT_CODES_HELP, Exit};
pub use out::{Format, Out};
pub use volley_sdk as sdk;
