//! `volley up` for one test.
//!
//! Owns its directory and its end: SIGTERM twice, and SIGKILL for what is left.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::disk::Disk;
use super::http::{self, Answer};
use super::process::{self, Ran, Running, until};

/// How long a cluster may take to end after the second signal.
const STOP_PATIENCE: Duration = Duration::from_secs(20);

/// The binary under test.
pub const VOLLEY: &str = env!("CARGO_BIN_EXE_volley");

/// Is there a nats-server? Says that the test is skipped when not.
pub fn nats_server() -> Option<PathBuf> {
    let named = ["VOLLEY_NATS_SERVER", "NATS_SERVER"].iter().find_map(std::env::var_os).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = named.or_else(|| std::env::split_paths(&path).map(|dir| dir.join("nats-server")).find(|file| file.is_file()));
    if found.is_none() {
        eprintln!("skipped: no nats-server on PATH or in VOLLEY_NATS_SERVER");
    }
    found
}

/// A directory that tasks running as another user can pass through.
pub fn open_dir() -> tempfile::TempDir {
    let dir = tempfile::Builder::new().prefix("volley-test-").tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    dir
}

/// A cluster in a directory of its own.
pub struct Cluster {
    /// What it keeps its things on, if not the disk of the test.
    pub disk: Option<Disk>,
    dir: tempfile::TempDir,
    args: Vec<String>,
    up: Option<Child>,
}

impl Cluster {
    /// Starts one; none where there is no nats-server.
    pub fn up() -> Option<Self> {
        Self::up_with(&[])
    }

    /// Starts one with further arguments for `volley up`.
    pub fn up_with(args: &[&str]) -> Option<Self> {
        let mut cluster = Self::new(args)?;
        cluster.start();
        Some(cluster)
    }

    /// Starts one that keeps everything on a disk of `size`, as mount takes it; none where that can't be mounted.
    pub fn up_on(size: &str) -> Option<Self> {
        let mut cluster = Self::new(&[])?;
        cluster.disk = Some(Disk::mount(&cluster.path("cluster"), size)?);
        cluster.start();
        Some(cluster)
    }

    fn new(args: &[&str]) -> Option<Self> {
        nats_server()?;
        Some(Self { disk: None, dir: open_dir(), args: args.iter().map(|arg| (*arg).to_owned()).collect(), up: None })
    }

    /// Starts it (again), and waits until its worker is ready.
    pub fn start(&mut self) {
        let _ = std::fs::remove_file(self.config());
        let log = std::fs::File::options().create(true).append(true).open(self.path("up.log")).unwrap();
        let mut command = Command::new(VOLLEY);
        command.args(["up", "--listen", "127.0.0.1:0", "--dir"]).arg(self.path("cluster")).args(&self.args);
        command.env("VOLLEY_CONFIG", self.config()).env("VOLLEY_NATS_SERVER", nats_server().unwrap());
        self.up = Some(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap());
        until("the cluster is up", || {
            let ended = self.up.as_mut().is_some_and(|up| up.try_wait().unwrap().is_some());
            assert!(!ended, "volley up ended:\n{}", self.log());
            self.config().exists()
        });
        until("the worker is ready", || self.workers().iter().any(|worker| worker["state"] == "ready"));
    }

    /// Everything that it and its parts wrote.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("up.log")).unwrap_or_default()
    }

    /// A file or directory of the test.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn config(&self) -> PathBuf {
        self.path("cluster.json")
    }

    /// Its address and the operator's token.
    pub fn access(&self) -> (String, String) {
        let file: Value = serde_json::from_slice(&std::fs::read(self.config()).unwrap()).unwrap();
        (file["url"].as_str().unwrap().to_owned(), file["token"].as_str().unwrap().to_owned())
    }

    /// Asks its API with the operator's token.
    #[track_caller]
    pub fn http(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        let (url, token) = self.access();
        http::request(&url, method, path, Some(&token), body)
    }

    /// Has `volley up` ended by itself?
    pub fn has_ended(&mut self) -> bool {
        self.up.as_mut().is_none_or(|up| up.try_wait().unwrap().is_some())
    }

    /// Process number of `volley up`.
    pub fn pid(&self) -> u32 {
        self.up.as_ref().unwrap().id()
    }

    /// `volley` as a client.
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(VOLLEY);
        command.args(args).env("VOLLEY_CONFIG", self.config()).current_dir(self.dir.path());
        for name in ["VOLLEY_URL", "VOLLEY_TOKEN", "VOLLEY_TENANT"] {
            command.env_remove(name);
        }
        command
    }

    /// Begins to run `volley` as a client.
    pub fn begin<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Running {
        process::start(self.command(args))
    }

    /// Runs `volley` as a client.
    #[track_caller]
    pub fn volley(&self, args: &[&str]) -> Ran {
        self.begin(args).wait()
    }

    /// Runs `volley … -o json`, which must exit with 0, and gives its answer.
    #[track_caller]
    pub fn ask(&self, args: &[&str]) -> Value {
        let mut args = args.to_vec();
        args.extend(["-o", "json", "--quiet"]);
        self.volley(&args).exits(0).json()
    }

    /// Writes a spec with `items`, `task` (its isolation is filled in) and whatever `more` has; gives its path.
    pub fn spec(&self, items: Value, task: Value, more: Value) -> String {
        let mut spec = json!({ "version": "volley/v1", "name": "test", "items": items, "task": { "isolation": "process" } });
        merge(&mut spec["task"], task);
        merge(&mut spec, more);
        let path = self.path(&format!("spec-{}.json", fresh()));
        std::fs::write(&path, serde_json::to_vec_pretty(&spec).unwrap()).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Submits a spec; gives the job's id.
    #[track_caller]
    pub fn submit(&self, spec: &str) -> String {
        self.ask(&["submit", spec])["job"].as_str().unwrap().to_owned()
    }

    /// A job.
    #[track_caller]
    pub fn job(&self, job: &str) -> Value {
        self.ask(&["job", job])
    }

    /// Waits until a job has ended; gives it.
    #[track_caller]
    pub fn ended(&self, job: &str) -> Value {
        self.volley(&["wait", job, "--quiet"]);
        self.job(job)
    }

    /// Waits until a number of `tasks` of a job (`running`, `succeeded`, …) is at least `least`.
    #[track_caller]
    pub fn until_tasks(&self, job: &str, state: &str, least: u64) {
        until(&format!("{least} tasks of {job} are {state}"), || self.job(job)["tasks"][state].as_u64().unwrap() >= least);
    }

    /// Results of a job, in the order of the tasks.
    #[track_caller]
    pub fn results(&self, job: &str) -> Vec<Value> {
        let mut rows = self.volley(&["results", job, "-o", "json"]).exits(0).lines();
        rows.sort_by_key(|row| row["index"].as_u64());
        rows
    }

    /// The workers, as the API names them.
    pub fn workers(&self) -> Vec<Value> {
        let answer = self.http("GET", "/v1/workers", b"");
        let body: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        body["rows"].as_array().or(body.as_array()).cloned().unwrap_or_default()
    }

    /// Ends it as Ctrl-C does, the second time at once.
    pub fn stop(&mut self) {
        let Some(mut up) = self.up.take() else { return };
        process::signal(up.id(), Signal::TERM);
        let started = Instant::now();
        let mut again = false;
        while up.try_wait().unwrap().is_none() && started.elapsed() < STOP_PATIENCE {
            if started.elapsed() > Duration::from_secs(1) && !again {
                again = true;
                process::signal(up.id(), Signal::TERM);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = up.kill();
        let _ = up.wait();
    }

    /// Everything of the cluster that still runs.
    pub fn left(&self) -> Vec<(u32, String)> {
        process::naming(self.dir.path().to_str().unwrap())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the cluster:\n{}", tail(&self.log(), 60));
        }
        self.stop();
        for (pid, _) in self.left() {
            process::signal(pid, Signal::KILL);
        }
    }
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn merge(into: &mut Value, from: Value) {
    let Value::Object(from) = from else { return };
    for (key, value) in from {
        into[key] = value;
    }
}

fn fresh() -> u32 {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Writes a file of the test.
pub fn write(path: &Path, text: &str) -> String {
    std::fs::write(path, text).unwrap();
    path.to_str().unwrap().to_owned()
}
