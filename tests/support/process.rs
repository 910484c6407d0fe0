//! Running `volley` with a deadline.
//!
//! Owns that no test hangs: what takes longer than it may is killed, and the test fails with what it printed.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long a command may take: far more than any does, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a command came to.
#[derive(Debug)]
pub struct Ran {
    /// Its exit code.
    pub code: i32,
    /// What it wrote.
    pub stdout: String,
    /// What it wrote there.
    pub stderr: String,
    /// How long it took.
    pub took: Duration,
}

impl Ran {
    /// Fails unless it exited with `code`.
    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Its standard output as one JSON value.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}\n{}", self.stdout, self.stderr))
    }

    /// Its standard output as one JSON value a line.
    #[track_caller]
    pub fn lines(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
    }
}

/// A command that runs.
pub struct Running {
    child: Child,
    stdout: JoinHandle<String>,
    stderr: JoinHandle<String>,
    started: Instant,
}

fn reader(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Starts a command with nothing on its standard input.
pub fn start(mut command: Command) -> Running {
    let started = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (stdout, stderr) = (reader(child.stdout.take().unwrap()), reader(child.stderr.take().unwrap()));
    Running { child, stdout, stderr, started }
}

impl Running {
    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(mut self) -> Ran {
        let late = loop {
            if self.child.try_wait().unwrap().is_some() {
                break false;
            }
            if self.started.elapsed() > PATIENCE {
                let _ = self.child.kill();
                break true;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let code = self.child.wait().unwrap().code().unwrap_or(-1);
        let took = self.started.elapsed();
        let ran = Ran { code, stdout: self.stdout.join().unwrap(), stderr: self.stderr.join().unwrap(), took };
        assert!(!late, "it did not end within {PATIENCE:?}: {ran:?}");
        ran
    }
}

/// Sends a signal.
pub fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Every process whose command line or working directory names `text`.
pub fn naming(text: &str) -> Vec<(u32, String)> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let command = |pid: u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        let named = line.contains(text) || cwd.to_string_lossy().contains(text);
        (named && pid != std::process::id()).then_some((pid, line))
    };
    pids.filter_map(command).collect()
}

/// Waits until something is so.
#[track_caller]
pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
