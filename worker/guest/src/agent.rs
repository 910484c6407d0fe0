//! The agent: takes the host's calls and carries them out.
//!
//! Owns which thread does what. One thread moves bytes (`channel`); each call has a thread to itself that may block (`verbs`), and a
//! command has one more for each of its streams (`exec`), all of which come from `threads`; one thread reaps (`children`). They meet in `session`. There is no async
//! runtime and no hash map, so the agent draws no randomness of its own. Does not own how the machine came up (`boot`).

pub mod boot;
mod cgroup;
mod channel;
mod children;
mod disks;
mod exec;
mod identity;
mod session;
mod spawn;
mod stats;
mod threads;
mod tty;
pub mod users;
mod verbs;

use std::convert::Infallible;
use std::sync::Arc;

pub use channel::Transport;

use cgroup::Cgroups;
use children::Children;
use session::Session;
use threads::Threads;

/// Stack of a thread. The deepest call is into the tar reader, which holds its blocks elsewhere.
const STACK_BYTES: usize = 256 * 1024;

/// What the agent is told at its start.
#[derive(Debug)]
pub struct Options {
    /// How the host reaches it.
    pub transport: Transport,
    /// Is this the machine's first process? Only then it changes the machine: its clock, names, disks, generator.
    pub machine: bool,
}

/// Why the agent ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Something it can't do without.
    #[error("{what}: {source}")]
    Start {
        /// What it was doing.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
}

/// What every call needs.
#[derive(Debug)]
struct Agent {
    session: Arc<Session>,
    children: Arc<Children>,
    cgroups: Option<Cgroups>,
    threads: Threads,
    machine: bool,
    /// The kernel's release.
    kernel: String,
}

/// Serves the host, for ever.
///
/// # Errors
/// [`AgentError`]: it can't begin, or can't wait for its channel.
pub fn run(options: Options) -> Result<Infallible, AgentError> {
    let session = Session::new().map_err(|source| AgentError::Start { what: "making an event counter", source })?;
    let session = Arc::new(session);
    let cgroups = if options.machine {
        match Cgroups::open() {
            Ok(cgroups) => Some(cgroups),
            Err(e) => {
                eprintln!("volley-guest: commands have no limits: {e}");
                None
            }
        }
    } else {
        None
    };
    let no_thread = |source| AgentError::Start { what: "starting a thread", source };
    let children = Children::start(session.clone()).map_err(no_thread)?;
    let threads = Threads::start().map_err(no_thread)?;
    // It stays the same, and is asked for at the beginning of every session.
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    let agent = Arc::new(Agent { session: session.clone(), children, cgroups, threads, machine: options.machine, kernel });
    let served = channel::serve(options.transport, &session, || verbs::start(&agent));
    served.map_err(|source| AgentError::Start { what: "serving the channel", source })
}

/// Starts a thread. Without memory for one there is nothing to be done but to say so.
fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(run)
}
