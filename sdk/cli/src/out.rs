//! Where a verb writes.
//!
//! Owns the two formats, standard output with its failures, and notes on standard error. Does not own progress (`progress`).

use std::io::{self, IsTerminal as _, Write as _};

use clap::ValueEnum;
use serde::Serialize;

use crate::error::CliError;

/// For whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For programs: one JSON value a command, one a line for streams.
    Json,
}

/// Where a verb writes.
#[derive(Debug, Clone, Copy)]
pub struct Out {
    /// For whom.
    pub format: Format,
    /// Nothing on standard error but errors.
    pub quiet: bool,
}

impl Out {
    /// Is it for programs?
    #[must_use]
    pub fn json(&self) -> bool {
        self.format == Format::Json
    }

    /// Writes one value: as JSON, or as the table says it.
    ///
    /// # Errors
    /// [`CliError::Output`].
    pub fn show<T: Serialize + ?Sized>(&self, value: &T, table: impl FnOnce() -> String) -> Result<(), CliError> {
        let text = if self.json() { pretty(value)? } else { table() };
        self.raw(text.as_bytes())
    }

    /// Writes one line of a stream of JSON values.
    ///
    /// # Errors
    /// [`CliError::Output`].
    pub fn row<T: Serialize + ?Sized>(&self, value: &T) -> Result<(), CliError> {
        self.raw(&json_line(value)?)
    }

    /// Writes bytes as they are.
    ///
    /// # Errors
    /// [`CliError::Output`].
    pub fn raw(&self, bytes: &[u8]) -> Result<(), CliError> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(CliError::Output)
    }

    /// Tells people something beside the result. A standard error that is gone is nobody's loss.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    /// Does somebody look at standard output?
    #[must_use]
    pub fn stdout_is_terminal(&self) -> bool {
        io::stdout().is_terminal()
    }
}

fn pretty<T: Serialize + ?Sized>(value: &T) -> Result<String, CliError> {
    serde_json::to_string_pretty(value).map(|text| text + "\n").map_err(|error| CliError::Output(io::Error::other(error)))
}

/// A JSON value as a line.
///
/// # Errors
/// [`CliError::Output`] when it can't be JSON.
pub fn json_line<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, CliError> {
    let mut line = serde_json::to_vec(value).map_err(|error| CliError::Output(io::Error::other(error)))?;
    line.push(b'\n');
    Ok(line)
}
