//! The two programs beside the worker: the volume server, and the one that shows a volume as a file. Both are this program, with other arguments.
//!
//! Owns their arguments, how they are started, and what they do first. Does not own what they do then (`volley_volume`).

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, Command};
use volley_volume::serve::fuse::{self, Options, Owner};

/// The verb of the volume server, which nobody types.
pub const SERVER: &str = "volume-server";
/// The verb of the program that shows a volume as a file, which nobody types.
pub const FILE: &str = "volume-file";
/// What that one says when the file can be opened: the control character ACK, which no text has in it.
pub const READY: u8 = 6;

/// The program that both are.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Where it is.
    pub path: PathBuf,
    /// Before the verb.
    pub arguments: Vec<OsString>,
}

impl Default for Programs {
    /// This program, even if its file has been replaced since.
    fn default() -> Self {
        Self { path: PathBuf::from("/proc/self/exe"), arguments: Vec::new() }
    }
}

impl Programs {
    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.path);
        // A group of its own: what is typed at the worker's terminal is for the worker.
        command.args(&self.arguments).arg(verb).process_group(0);
        command
    }

    /// Starts a server that speaks to its worker on `connection`.
    ///
    /// # Errors
    /// What the system says.
    pub fn start_server(&self, connection: OwnedFd) -> io::Result<Child> {
        self.command(SERVER).stdin(Stdio::from(connection)).stdout(Stdio::null()).kill_on_drop(true).spawn()
    }

    /// Starts what shows a volume as a file. It ends when the file is unmounted, and must not be ended before.
    ///
    /// # Errors
    /// What the system says.
    pub fn start_file(&self, shown: &Shown<'_>) -> io::Result<Child> {
        let mut command = self.command(FILE);
        command.args(shown.arguments()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    }
}

/// What is to be shown as a file.
#[derive(Debug)]
pub struct Shown<'a> {
    /// The volume's socket.
    pub socket: &'a Path,
    /// The export's name.
    pub export: &'a str,
    /// The file.
    pub file: &'a Path,
    /// Who may open it.
    pub owner: (u32, u32),
    /// Who the program is once it has mounted.
    pub run_as: (u32, u32),
    /// How long users of the file wait for a server that is away.
    pub patience: Duration,
}

impl Shown<'_> {
    fn arguments(&self) -> [OsString; 8] {
        let number = |number: u32| OsString::from(number.to_string());
        let ((uid, gid), (as_uid, as_gid)) = (self.owner, self.run_as);
        let patience = OsString::from(self.patience.as_millis().to_string());
        [self.socket.into(), self.export.into(), self.file.into(), number(uid), number(gid), number(as_uid), number(as_gid), patience]
    }
}

fn options(arguments: &[OsString]) -> Option<Options> {
    let [socket, export, file, numbers @ ..] = arguments else { return None };
    let numbers: Vec<u64> = numbers.iter().map(|number| number.to_str().and_then(|number| number.parse().ok())).collect::<Option<_>>()?;
    let [uid, gid, as_uid, as_gid, patience] = numbers.try_into().ok()?;
    let owner = |uid: u64, gid: u64| Some(Owner { uid: u32::try_from(uid).ok()?, gid: u32::try_from(gid).ok()? });
    Some(Options {
        socket: socket.into(),
        export: export.to_str()?.to_owned(),
        file: file.into(),
        owner: owner(uid, gid)?,
        run_as: Some(owner(as_uid, as_gid)?),
        patience: Duration::from_millis(patience),
    })
}

/// Shows a volume as a file until that is unmounted; `arguments` are those behind the verb. Call it from the process's only thread.
///
/// # Errors
/// One line for people.
pub fn file(arguments: &[OsString]) -> Result<(), String> {
    let options = options(arguments).ok_or("this is for workers: it shows one of their volumes as a file")?;
    stay();
    let mut said = io::stdout();
    // Whoever waits for it may be gone: then the file is unmounted soon.
    let ready = move || drop(said.write_all(&[READY]).and_then(|()| said.flush()));
    fuse::run(&options, ready).map_err(|e| e.to_string())
}

/// The connection of a volume server to its worker.
///
/// # Errors
/// It was started by something else.
pub fn connection() -> io::Result<UnixStream> {
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    rustix::net::sockopt::socket_type(&input)
        .map_err(|_| io::Error::other("this is for workers: they speak to it on its standard input"))?;
    stay();
    Ok(input.into())
}

/// Only the worker ends it: what a service manager tells all processes of a worker is for the worker, whose tasks may go on for a while.
fn stay() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: it replaces what a signal does by nothing.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // Its memory has the cluster's keys, and its environment may have S3's.
    if let Err(e) = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable) {
        tracing::warn!(error = %e, "other processes of this user can look into one that has keys");
    }
}

/// Is this one of the two verbs?
#[must_use]
pub fn is_ours(verb: &OsStr) -> bool {
    verb == SERVER || verb == FILE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_come_back() {
        let shown = Shown {
            socket: Path::new("/a/s"),
            export: "v",
            file: Path::new("/a/f"),
            owner: (1, 2),
            run_as: (3, 4),
            patience: Duration::from_secs(5),
        };
        let arguments = shown.arguments();
        let options = options(&arguments).unwrap();
        let user = |owner: Owner| (owner.uid, owner.gid);
        assert_eq!((options.socket.as_path(), options.file.as_path(), &options.export[..]), (shown.socket, shown.file, "v"));
        assert_eq!((user(options.owner), options.run_as.map(user), options.patience), ((1, 2), Some((3, 4)), shown.patience));
        assert!(super::options(&arguments[..7]).is_none() && super::options(&[]).is_none());
        assert!(is_ours(OsStr::new("volume-file")) && !is_ours(OsStr::new("volume")));
    }
}
