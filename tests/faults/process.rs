//! Processes and who keeps them running.
//!
//! Owns spawning, restarting what ended (as a supervisor such as systemd would), signals and logs. Only processes started here are
//! ever signalled, each by its own id. Does not own what a cluster is made of (`cluster`).

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::sync::watch;

/// Pause before what ended is started again: systemd's RestartSec, shortened.
const RESTART_PAUSE: Duration = Duration::from_millis(300);
/// How long a process may take to end before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(15);

/// How to start a process.
#[derive(Clone)]
pub struct Recipe {
    pub name: String,
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub env: Vec<(OsString, OsString)>,
    pub log: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wanted {
    Up,
    Away,
    Gone,
}

/// An end nobody asked for.
#[derive(Clone, Debug)]
pub struct Exit {
    pub after: Duration,
    pub status: String,
}

/// A process that is started again whenever it ends.
pub struct Process {
    pub name: String,
    pub log: PathBuf,
    pid: Arc<AtomicI32>,
    starts: Arc<AtomicU32>,
    exits: Arc<Mutex<Vec<Exit>>>,
    expected: Arc<AtomicU32>,
    wanted: watch::Sender<Wanted>,
    task: Option<tokio::task::JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        _ = kill_process(pid, signal);
    }
}

impl Process {
    /// Starts it and keeps it running.
    pub fn keep(recipe: Recipe) -> Self {
        Self::begin(recipe, Wanted::Up)
    }

    /// Starts it once [`Process::back`] is called.
    pub fn later(recipe: Recipe) -> Self {
        Self::begin(recipe, Wanted::Away)
    }

    fn begin(recipe: Recipe, wanted: Wanted) -> Self {
        let (wanted, watching) = watch::channel(wanted);
        let mut process = Self {
            name: recipe.name.clone(),
            log: recipe.log.clone(),
            pid: Arc::default(),
            starts: Arc::default(),
            exits: Arc::default(),
            expected: Arc::default(),
            wanted,
            task: None,
        };
        let (pid, starts, exits, expected) = (process.pid.clone(), process.starts.clone(), process.exits.clone(), process.expected.clone());
        process.task = Some(tokio::spawn(supervise(recipe, watching, pid, starts, exits, expected)));
        process
    }

    /// The id of the process that runs now; 0: none does.
    pub fn pid(&self) -> i32 {
        self.pid.load(Ordering::SeqCst)
    }

    /// How often it was started.
    pub fn starts(&self) -> u32 {
        self.starts.load(Ordering::SeqCst)
    }

    /// Ends nobody asked for.
    pub fn exits(&self) -> Vec<Exit> {
        lock(&self.exits).clone()
    }

    /// kill -9. The supervisor starts it again.
    pub fn kill(&self) {
        let pid = self.pid();
        if pid > 0 {
            self.expected.fetch_add(1, Ordering::SeqCst);
            signal(pid, Signal::KILL);
        }
    }

    /// kill -9 of the helper processes it started, but not of itself.
    pub fn kill_helpers(&self) {
        let pid = self.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        children.split_whitespace().filter_map(|id| id.parse().ok()).for_each(|id| signal(id, Signal::KILL));
    }

    /// kill -9, and it stays away until [`Process::back`].
    pub fn away(&self) {
        _ = self.wanted.send_replace(Wanted::Away);
        self.kill();
    }

    /// The supervisor may start it again.
    pub fn back(&self) {
        _ = self.wanted.send_replace(Wanted::Up);
    }

    /// Freezes it for a while; what was killed meanwhile is not touched.
    pub async fn freeze(&self, duration: Duration) {
        let pid = self.pid();
        signal(pid, Signal::STOP);
        tokio::time::sleep(duration).await;
        if self.pid() == pid {
            signal(pid, Signal::CONT);
        }
    }

    /// Ends it for good.
    pub async fn stop(&mut self) {
        _ = self.wanted.send_replace(Wanted::Gone);
        signal(self.pid(), Signal::CONT);
        signal(self.pid(), Signal::TERM);
        if let Some(task) = self.task.take() {
            _ = task.await;
        }
    }

    /// Everything it wrote so far.
    pub fn log_text(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until it wrote `text`, in its current or an earlier life.
    pub async fn says(&self, text: &str, patience: Duration) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < patience {
            if self.log_text().contains(text) {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        false
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Reached with something still running only when a test failed on the way.
        _ = self.wanted.send_replace(Wanted::Gone);
        signal(self.pid(), Signal::KILL);
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

async fn supervise(
    recipe: Recipe,
    mut wanted: watch::Receiver<Wanted>,
    pid: Arc<AtomicI32>,
    starts: Arc<AtomicU32>,
    exits: Arc<Mutex<Vec<Exit>>>,
    expected: Arc<AtomicU32>,
) {
    loop {
        if wanted.wait_for(|wanted| *wanted != Wanted::Away).await.is_err() || wanted.borrow().eq(&Wanted::Gone) {
            return;
        }
        let mut child = spawn(&recipe);
        let begun = Instant::now();
        pid.store(child.id().and_then(|id| i32::try_from(id).ok()).unwrap_or(0), Ordering::SeqCst);
        starts.fetch_add(1, Ordering::SeqCst);
        let status = tokio::select! {
            status = child.wait() => status,
            () = async { _ = wanted.wait_for(|wanted| *wanted == Wanted::Gone).await.map(drop) } => match tokio::time::timeout(STOP_PATIENCE, child.wait()).await {
                Ok(status) => status,
                Err(_) => {
                    eprintln!("{} did not end within {STOP_PATIENCE:?} of SIGTERM; killed", recipe.name);
                    _ = child.start_kill();
                    child.wait().await
                }
            },
        };
        pid.store(0, Ordering::SeqCst);
        let asked = expected.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        if *wanted.borrow() == Wanted::Gone {
            return;
        }
        if !asked {
            let status = status.map_or_else(|e| e.to_string(), |s| s.to_string());
            lock(&exits).push(Exit { after: begun.elapsed(), status });
        }
        tokio::time::sleep(RESTART_PAUSE).await;
    }
}

fn spawn(recipe: &Recipe) -> tokio::process::Child {
    let log = std::fs::File::options().append(true).create(true).open(&recipe.log).expect("a log file");
    let other = log.try_clone().expect("a second handle");
    Command::new(&recipe.program)
        .args(&recipe.args)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .envs(recipe.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(other)
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .unwrap_or_else(|e| panic!("{}: {e}", recipe.program.display()))
}

/// Processes that stand in `dir` or were started with it among their arguments: what a cluster there left running.
pub fn running_in(dir: &Path) -> Vec<String> {
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let id = entry.file_name().to_string_lossy().into_owned();
        if id == own || !id.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        let stands = std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(dir));
        if stands || command.contains(&*dir.to_string_lossy()) {
            found.push(format!("{id}: {command}"));
        }
    }
    found
}

/// A port that nobody listens on now.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}
