//! A cluster of real processes on loopback: nats-server, an S3 server, coordinators and workers, each its own process.
//!
//! Owns their configuration, readiness, and the checks that hold after any trouble. Does not own the trouble.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use volley_cli::sdk::jobspecs::api::{JobState, JobView, TaskState};
use volley_cli::sdk::jobspecs::ids::JobId;
use volley_cli::sdk::{Client, Config, ResultsQuery, Retry};

use crate::process::{Process, Recipe, free_port, running_in};

/// The bucket of a test cluster.
pub const BUCKET: &str = "faults";
/// Keys of its S3 server.
pub const KEYS: (&str, &str) = ("faults-key", "faults-secret-0123456789");
const TOKEN_SECRET: &str = "0123456789abcdef0123456789abcdef";
/// How long a cluster on a busy machine may take to be ready.
const READY: Duration = Duration::from_secs(60);

/// What a cluster is made of.
#[derive(Clone)]
pub struct Plan {
    pub coordinators: usize,
    /// Slots of each worker.
    pub workers: Vec<u32>,
    /// Start nats-server at once?
    pub nats: bool,
    /// Reach S3 here instead of at its own port.
    pub s3_via: Option<u16>,
    pub s3_port: Option<u16>,
    /// Data directory of the first coordinator, when not the default one.
    pub data_dir: Option<PathBuf>,
    /// Work directory of the first worker.
    pub work_dir: Option<PathBuf>,
}

impl Default for Plan {
    fn default() -> Self {
        Self { coordinators: 2, workers: vec![8, 8], nats: true, s3_via: None, s3_port: None, data_dir: None, work_dir: None }
    }
}

pub struct Cluster {
    pub dir: tempfile::TempDir,
    pub nats: Process,
    pub s3: Process,
    pub coordinators: Vec<Process>,
    pub workers: Vec<Process>,
    pub endpoints: Vec<String>,
    pub token: String,
    pub client: Client,
}

/// Where nats-server is, if anywhere.
pub fn nats_server() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("VOLLEY_NATS_SERVER") {
        return Some(path.into());
    }
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&dirs).map(|dir| dir.join("nats-server")).find(|path| path.is_file())
}

fn args(words: &[&str]) -> Vec<OsString> {
    words.iter().map(Into::into).collect()
}

impl Cluster {
    /// Starts everything; waits until a coordinator leads and every worker is ready.
    pub async fn start(plan: Plan) -> Self {
        let cluster = Self::begin(plan).await;
        cluster.ready().await;
        cluster
    }

    /// Starts everything and waits for nothing.
    pub async fn begin(plan: Plan) -> Self {
        let dir = tempfile::Builder::new().prefix("volley-faults-").tempdir().expect("a directory");
        // Tasks of a worker that runs as root are other users, who must pass.
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711)).expect("its mode");
        let root = dir.path().to_owned();
        let token = format!("vt_bootstrap_{TOKEN_SECRET}");
        std::fs::write(root.join("token"), &token).expect("the token file");
        let (nats_port, s3_port) = (free_port(), plan.s3_port.unwrap_or_else(free_port));
        let nats = nats_recipe(&root, nats_port);
        let nats = if plan.nats { Process::keep(nats) } else { Process::later(nats) };
        let s3 = Process::keep(s3_recipe(&root, s3_port));
        // Both are made before anybody asks for them; a worker does not wait for S3.
        wait_port(s3_port).await;
        wait_file(&root.join("s3-ready")).await;
        let nats_url = format!("nats://127.0.0.1:{nats_port}");
        let s3_url = format!("http://127.0.0.1:{}", plan.s3_via.unwrap_or(s3_port));
        let common =
            ["--nats", &nats_url, "--nats-user", "volley", "--nats-password", "faults", "--s3-endpoint", &s3_url, "--s3-bucket", BUCKET];
        let mut endpoints = Vec::new();
        let mut coordinators = Vec::new();
        for i in 0..plan.coordinators {
            let name = format!("c{i}");
            let listen = format!("127.0.0.1:{}", free_port());
            endpoints.push(format!("http://{listen}"));
            let data = plan.data_dir.clone().filter(|_| i == 0).unwrap_or_else(|| root.join(&name));
            let mut words = args(&["coordinator"]);
            words.extend(args(&common));
            words.extend(args(&["--listen", &listen, "--name", &name, "--operator-token-file"]));
            words.extend([root.join("token").into(), "--data-dir".into(), data.into()]);
            coordinators.push(Process::keep(volley(&root, &name, words)));
        }
        let mut workers = Vec::new();
        for (i, slots) in plan.workers.iter().enumerate() {
            let name = format!("w{i}");
            let work = plan.work_dir.clone().filter(|_| i == 0).unwrap_or_else(|| root.join(&name));
            let mut words = args(&["worker"]);
            words.extend(args(&common));
            words.extend(args(&[
                "--name",
                &name,
                "--slots",
                &slots.to_string(),
                "--cpus",
                "1000",
                "--memory",
                "64GiB",
                "--disk",
                "64GiB",
                "--null",
                "--work-dir",
            ]));
            words.push(work.into());
            workers.push(Process::keep(volley(&root, &name, words)));
        }
        let retry = Retry { first_contact: Duration::from_secs(60), budget: Duration::from_secs(240), ..Retry::default() };
        let client = Client::new(Config { retry, ..Config::new(endpoints.clone(), Some(token.clone())) }).expect("a client");
        Self { dir, nats, s3, coordinators, workers, endpoints, token, client }
    }

    /// Waits until a coordinator leads and every worker is ready.
    pub async fn ready(&self) {
        let begun = Instant::now();
        loop {
            let workers = tokio::time::timeout(Duration::from_secs(5), self.client.workers()).await;
            let ready = match workers {
                Ok(Ok(workers)) => workers.iter().filter(|w| w.state == "ready").count() == self.workers.len(),
                _ => false,
            };
            if ready && self.leader().await.is_some() {
                return;
            }
            assert!(begun.elapsed() < READY, "the cluster is not ready after {READY:?}:\n{}", self.logs(40));
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Which coordinator leads, as far as anybody that answers knows.
    pub async fn leader(&self) -> Option<usize> {
        let mut newest = None;
        for endpoint in &self.endpoints {
            let asked = self.get(endpoint, "/v1/cluster");
            let Ok(Some(view)) = tokio::time::timeout(Duration::from_secs(1), asked).await else { continue };
            let leader = view["leader"].as_str().and_then(|name| name.get(1..2)).and_then(|i| i.parse::<usize>().ok());
            newest = newest.max(view["term"].as_u64().zip(leader));
        }
        newest.map(|(_, leader)| leader)
    }

    /// Asks one coordinator; none: no answer, or an error.
    pub async fn get(&self, endpoint: &str, path: &str) -> Option<serde_json::Value> {
        let answer = http().get(format!("{endpoint}{path}")).bearer_auth(&self.token).send().await.ok()?;
        answer.error_for_status().ok()?.json().await.ok()
    }

    /// Submits a spec; gives the job.
    pub async fn submit(&self, spec: &serde_json::Value) -> JobId {
        self.client.submit(spec.to_string().into_bytes()).await.unwrap_or_else(|e| panic!("submit: {e}\n{}", self.logs(20))).job
    }

    /// Follows a job's results to their end: how often each index came, and its row's state.
    pub fn follow(&self, job: JobId) -> tokio::task::JoinHandle<Result<BTreeMap<u32, Vec<TaskState>>, String>> {
        let client = self.client.clone();
        tokio::spawn(async move { read_results(&client, job, ResultsQuery::follow()).await })
    }

    /// Waits for a job's end.
    pub async fn wait(&self, job: JobId, patience: Duration) -> JobView {
        let begun = Instant::now();
        loop {
            let found = tokio::time::timeout(Duration::from_secs(10), self.client.job(job)).await;
            match found {
                Ok(Ok(view)) if view.state.ended() => return view,
                other if begun.elapsed() > patience => {
                    let explained = tokio::time::timeout(Duration::from_secs(5), self.client.workers()).await;
                    panic!("{job} has not ended after {patience:?}: {other:?}\nworkers: {explained:#?}\n{}", self.logs(40))
                }
                _ => tokio::time::sleep(Duration::from_millis(250)).await,
            }
        }
    }

    /// Everything that must hold of a job whose tasks can't fail: all succeeded, each index exactly one row, from every coordinator.
    pub async fn all_succeeded(&self, job: JobId, total: u32) {
        let view = self.wait(job, Duration::from_secs(10)).await;
        if view.state != JobState::Succeeded {
            let (mut failed, mut results) = (Vec::new(), self.client.results(job, ResultsQuery::now()));
            while let Some(Ok(row)) = results.next().await {
                failed.extend(row.class.is_some().then_some(row));
            }
            panic!("{view:?}\nfailed: {failed:#?}\n{}", self.logs(20));
        }
        assert_eq!((view.tasks.total, view.tasks.succeeded), (total, total), "{view:?}");
        for endpoint in &self.endpoints {
            let client = Client::new(Config::new(vec![endpoint.clone()], Some(self.token.clone()))).expect("a client");
            client.observe_sequence(self.client.sequence());
            let rows = read_results(&client, job, ResultsQuery::now()).await.unwrap_or_else(|e| panic!("results from {endpoint}: {e}"));
            exactly_once(&rows, total, endpoint);
        }
    }

    /// Nobody holds anything any more, and every worker that should be there is.
    pub async fn at_rest(&self) {
        let begun = Instant::now();
        loop {
            let workers = self.client.workers().await.unwrap_or_else(|e| panic!("workers: {e}"));
            let rests = workers.len() == self.workers.len() && workers.iter().all(|w| w.bundles == 0 && w.tasks == 0 && w.state == "ready");
            if rests {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "workers are not at rest: {workers:#?}\n{}", self.logs(30));
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        // Every coordinator has come to the same place.
        for endpoint in &self.endpoints {
            let begun = Instant::now();
            while self.get(endpoint, "/v1/cluster").await.is_none_or(|view| view["sequence"].as_u64() < Some(self.client.sequence())) {
                assert!(begun.elapsed() < Duration::from_secs(30), "{endpoint} has not caught up\n{}", self.logs(30));
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }

    /// Panics in anybody's log, ends that should never happen, and ends nobody asked for of processes that had been up for a while.
    pub fn complaints(&self) -> Vec<String> {
        let mut found = Vec::new();
        for process in self.processes() {
            let text = process.log_text();
            found.extend(text.lines().filter(|line| line.contains("panicked at")).map(|line| format!("{}: {line}", process.name)));
            let broken = |status: &str| ["exit status: 101", "SIGABRT", "SIGSEGV"].iter().any(|sign| status.contains(sign));
            let late = process.exits().into_iter().filter(|exit| exit.after > START || broken(&exit.status));
            found.extend(late.map(|exit| format!("{} ended by itself after {:?}: {}", process.name, exit.after, exit.status)));
        }
        found
    }

    fn processes(&self) -> impl Iterator<Item = &Process> {
        [&self.nats, &self.s3].into_iter().chain(&self.coordinators).chain(&self.workers)
    }

    /// The last lines of every log.
    pub fn logs(&self, lines: usize) -> String {
        let tail = |process: &Process| {
            let text = process.log_text();
            let all: Vec<&str> = text.lines().collect();
            let last = all[all.len().saturating_sub(lines)..].join("\n  ");
            format!("== {} (started {} times, ended by itself: {:?})\n  {last}\n", process.name, process.starts(), process.exits())
        };
        self.processes().map(tail).collect()
    }

    /// Ends everything; nothing may be left running.
    pub async fn stop(mut self) {
        let complaints = self.complaints();
        for worker in &mut self.workers {
            worker.stop().await;
        }
        for coordinator in &mut self.coordinators {
            coordinator.stop().await;
        }
        self.s3.stop().await;
        self.nats.stop().await;
        let begun = Instant::now();
        while !running_in(self.dir.path()).is_empty() && begun.elapsed() < Duration::from_secs(10) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let left = running_in(self.dir.path());
        let logs = self.logs(30);
        if std::env::var_os("VOLLEY_FAULTS_KEEP").is_some() {
            self.dir.disable_cleanup(true);
        }
        assert!(left.is_empty(), "left running: {left:#?}\n{logs}");
        assert!(complaints.is_empty(), "{complaints:#?}\n{logs}");
    }
}

/// An end this soon is a start that did not succeed, for example without S3: it says why and is tried again.
const START: Duration = Duration::from_secs(75);

/// An HTTP client without the SDK's kindness.
pub fn http() -> &'static reqwest::Client {
    static CLIENT: std::sync::OnceLock<reqwest::Client> = std::sync::OnceLock::new();
    CLIENT.get_or_init(|| volley_cli::sdk::http_client_for("http://127.0.0.1:1").expect("an HTTP client"))
}

async fn read_results(client: &Client, job: JobId, query: ResultsQuery) -> Result<BTreeMap<u32, Vec<TaskState>>, String> {
    let mut rows: BTreeMap<u32, Vec<TaskState>> = BTreeMap::new();
    let mut results = client.results(job, query);
    while let Some(row) = results.next().await {
        let row = row.map_err(|e| e.to_string())?;
        rows.entry(row.index).or_default().push(row.state);
    }
    Ok(rows)
}

/// Each index of `0..total` has exactly one row, which says that it succeeded.
pub fn exactly_once(rows: &BTreeMap<u32, Vec<TaskState>>, total: u32, from: &str) {
    let wrong: Vec<_> = rows.iter().filter(|(_, states)| **states != [TaskState::Succeeded]).take(10).collect();
    assert!(wrong.is_empty(), "{from}: rows that are not one success: {wrong:?}");
    let missing: Vec<u32> = (0..total).filter(|index| !rows.contains_key(index)).take(10).collect();
    assert!(missing.is_empty() && rows.len() == total as usize, "{from}: {} rows of {total}; missing {missing:?}", rows.len());
}

async fn wait_port(port: u16) {
    let begun = Instant::now();
    while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        assert!(begun.elapsed() < READY, "nobody listens on port {port}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn wait_file(path: &Path) {
    let begun = Instant::now();
    while !path.exists() {
        assert!(begun.elapsed() < READY, "{} does not appear", path.display());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn volley(root: &Path, name: &str, args: Vec<OsString>) -> Recipe {
    let env = [
        ("AWS_ACCESS_KEY_ID", KEYS.0),
        ("AWS_SECRET_ACCESS_KEY", KEYS.1),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("VOLLEY_LOG", "info,async_nats=warn"),
        ("RUST_BACKTRACE", "1"),
        ("NO_COLOR", "1"),
    ];
    Recipe {
        name: name.to_owned(),
        program: std::env::var_os("VOLLEY_FAULTS_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_volley").into()).into(),
        args,
        env: env.iter().map(|(k, v)| (k.into(), v.into())).collect(),
        log: root.join(format!("{name}.log")),
    }
}

fn nats_recipe(root: &Path, port: u16) -> Recipe {
    let config = root.join("nats.conf");
    let text = format!(
        "host: 127.0.0.1\nport: {port}\nmax_payload: 1MB\njetstream {{ store_dir: \"{}\", sync_interval: always }}\n\
         authorization {{ user: volley, password: faults }}\n",
        root.join("nats").display()
    );
    std::fs::write(&config, text).expect("nats.conf");
    let program = nats_server().expect("nats-server on PATH");
    Recipe { name: "nats".to_owned(), program, args: vec!["-c".into(), config.into()], env: Vec::new(), log: root.join("nats.log") }
}

/// The embedded S3 server as a process of its own: this very test binary, asked to run `s3::serve`.
fn s3_recipe(root: &Path, port: u16) -> Recipe {
    let env = [("VOLLEY_FAULTS_S3_DIR", root.as_os_str().to_owned()), ("VOLLEY_FAULTS_S3_PORT", port.to_string().into())];
    Recipe {
        name: "s3".to_owned(),
        program: std::env::current_exe().expect("this binary"),
        args: args(&["--exact", "s3::serve", "--ignored", "--nocapture", "--test-threads=1"]),
        env: env.iter().map(|(k, v)| (k.into(), v.clone())).collect(),
        log: root.join("s3.log"),
    }
}
