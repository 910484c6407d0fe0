//! What every verb gets: where to write, and how to reach the cluster.
//!
//! Owns the flags that all verbs share. Does not own the verbs (`verbs`).

use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use volley_sdk::config::Given;
use volley_sdk::{Client, Config, Error};

use crate::error::CliError;
use crate::out::{Format, Out};
use crate::telemetry::client::ClientTrace;
use crate::telemetry::var;

/// Least time between two notes that the cluster doesn't answer.
const NOTE_EVERY: Duration = Duration::from_secs(5);
/// How long verbs that follow a job wait for a cluster that went away: tasks run on meanwhile, so there is no hurry to give up.
const FOLLOW_BUDGET: Duration = Duration::from_secs(30 * 60);

/// Flags of every verb.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// `table` for people, `json` for programs. JSON is one value a command, one a line for streams.
    #[arg(
        short = 'o',
        long = "output",
        global = true,
        value_enum,
        default_value = "table",
        value_name = "FORMAT",
        hide_possible_values = true,
        help_heading = "Global"
    )]
    pub format: Format,
    /// Nothing on standard error but errors.
    #[arg(short, long, global = true, help_heading = "Global")]
    pub quiet: bool,
    /// Coordinators, separated by commas. Default: what `volley up` wrote.
    #[arg(long, global = true, env = "VOLLEY_URL", value_name = "URL", help_heading = "Global")]
    pub url: Option<String>,
    /// A file with nothing but the token in it. The variable VOLLEY_TOKEN holds the token itself.
    #[arg(long, global = true, env = "VOLLEY_TOKEN_FILE", value_name = "FILE", help_heading = "Global")]
    pub token_file: Option<PathBuf>,
    /// The cluster file. Default: ~/.config/volley/cluster.json.
    #[arg(long, global = true, env = "VOLLEY_CONFIG", value_name = "FILE", help_heading = "Global")]
    pub config: Option<PathBuf>,
    /// Acts for this tenant (operators only).
    #[arg(long, global = true, env = "VOLLEY_TENANT", value_name = "NAME", help_heading = "Global")]
    pub tenant: Option<String>,
}

/// What every verb gets.
#[derive(Debug, Clone)]
pub struct Ctx {
    /// Where to write.
    pub out: Out,
    /// The verb's trace, when it has one.
    pub trace: Option<Arc<ClientTrace>>,
    global: Global,
}

impl Ctx {
    /// From the flags.
    #[must_use]
    pub fn new(global: Global) -> Self {
        Self { out: Out { format: global.format, quiet: global.quiet }, trace: None, global }
    }

    /// Begins the verb's trace. One that can't begin is said and done without.
    pub fn begin_trace(&mut self, verb: &'static str) {
        match ClientTrace::begin(verb, &var) {
            Ok(trace) => self.trace = trace.map(Arc::new),
            Err(error) => self.out.note(&format!("no trace: {error}")),
        }
    }

    /// The tenant that `--tenant` names.
    #[must_use]
    pub fn tenant(&self) -> Option<&str> {
        self.global.tenant.as_deref()
    }

    /// A client of the cluster.
    ///
    /// # Errors
    /// When no cluster is known or a setting can't be used. Nothing is sent.
    pub fn client(&self) -> Result<Client, CliError> {
        Ok(Client::new(self.config()?)?)
    }

    /// A client for following a job: more patient once the cluster has answered.
    ///
    /// # Errors
    /// As [`Ctx::client`].
    pub fn patient_client(&self) -> Result<Client, CliError> {
        let mut config = self.config()?;
        config.retry.budget = FOLLOW_BUDGET;
        Ok(Client::new(config)?)
    }

    fn config(&self) -> Result<Config, CliError> {
        let token = match &self.global.token_file {
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(CliError::file(path, "read the token file"))?;
                Some(text.trim().to_owned())
            }
            None => Given::from_env().token,
        };
        let given = Given { url: self.global.url.clone(), token, file: self.global.config.clone() };
        let mut config = Config::resolve(given)?;
        config.tenant.clone_from(&self.global.tenant);
        let (noted, quiet) = (Mutex::new(None), self.out.quiet);
        config.on_retry = Some(Arc::new(move |error, _| note_retry(&noted, quiet, error)));
        Ok(config)
    }
}

fn note_retry(noted: &Mutex<Option<Instant>>, quiet: bool, error: &Error) {
    let mut last = noted.lock().unwrap_or_else(PoisonError::into_inner);
    if quiet || last.is_some_and(|last| last.elapsed() < NOTE_EVERY) {
        return;
    }
    *last = Some(Instant::now());
    let mut stderr = io::stderr();
    // A progress line may stand there; it is drawn again.
    let clear = if stderr.is_terminal() { "\r\x1b[2K" } else { "" };
    // A standard error that is gone is nobody's loss.
    let _ = writeln!(stderr, "{clear}waiting: {error}");
}
