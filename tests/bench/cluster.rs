//! A cluster for a bench: nats-server with `sync_interval: always`, the embedded S3 server, a coordinator and workers, each a
//! process of its own but S3; all in a temporary directory, all ended on drop.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use volley_sdk::{Client, Config};
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};

pub const TOKEN: &str = "vt_bootstrap_0123456789abcdef0123456789abcdef";
const KEY: &str = "benchkey";
const SECRET: &str = "benchsecret0123456789";

pub struct Cluster {
    pub dir: tempfile::TempDir,
    nats: Child,
    pub nats_url: String,
    s3: Option<EmbeddedServer>,
    s3_url: String,
    pub coordinator: Child,
    pub api: String,
    workers: Vec<Child>,
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn binary() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("volley")
}

fn start_nats(dir: &Path, port: u16) -> Child {
    let conf = dir.join("nats.conf");
    let text =
        format!("host: 127.0.0.1\nport: {port}\njetstream {{ store_dir: \"{}\", sync_interval: always }}\n", dir.join("nats").display());
    std::fs::write(&conf, text).unwrap();
    let server = std::env::var_os("VOLLEY_NATS_SERVER").unwrap_or_else(|| "nats-server".into());
    let log = std::fs::File::create(dir.join("nats.log")).unwrap();
    Command::new(server)
        .arg("-c")
        .arg(conf)
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("nats-server on PATH or in VOLLEY_NATS_SERVER")
}

impl Cluster {
    /// NATS, S3 and a coordinator.
    pub async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let nats = start_nats(dir.path(), port);
        let root = dir.path().join("s3");
        let config =
            EmbeddedConfig { root, bind: ([127, 0, 0, 1], 0).into(), access_key: KEY.into(), secret_key: SECRET.into(), reserve_bytes: 0 };
        let s3 = EmbeddedServer::start(config).await.unwrap();
        let s3_url = s3.endpoint();
        let store = volley_store::Store::connect(&volley_store::StoreConfig::new(&s3_url, "bench", KEY, SECRET)).await.unwrap();
        store.ensure_bucket().await.unwrap();
        let api_port = free_port();
        let nats_url = format!("nats://127.0.0.1:{port}");
        let token = dir.path().join("token");
        std::fs::write(&token, TOKEN).unwrap();
        let mut command = Command::new(binary());
        command.arg("coordinator").arg("--data-dir").arg(dir.path().join("c")).arg("--listen").arg(format!("127.0.0.1:{api_port}"));
        command.arg("--operator-token-file").arg(token);
        let coordinator = spawn(&mut command, &nats_url, &s3_url, &dir.path().join("coordinator.log"));
        let cluster = Self {
            dir,
            nats,
            nats_url,
            s3: Some(s3),
            s3_url,
            coordinator,
            api: format!("http://127.0.0.1:{api_port}"),
            workers: Vec::new(),
        };
        cluster.ready().await;
        cluster
    }

    async fn ready(&self) {
        let client = self.client();
        let started = Instant::now();
        while client.cluster().await.ok().is_none_or(|view| view.leader.is_empty()) {
            let log = || std::fs::read_to_string(self.dir.path().join("coordinator.log")).unwrap_or_default();
            assert!(started.elapsed() < Duration::from_secs(30), "no leader: {}", log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn client(&self) -> Client {
        Client::new(Config::new(vec![self.api.clone()], Some(TOKEN.to_owned()))).unwrap()
    }

    pub fn store_config(&self) -> volley_store::StoreConfig {
        volley_store::StoreConfig::new(&self.s3_url, "bench", KEY, SECRET)
    }

    /// Starts a worker process and waits until it has joined.
    pub async fn worker(&mut self, slots: u32, flags: &[&str]) {
        let name = format!("w{}", self.workers.len());
        let mut command = Command::new(binary());
        command.arg("worker").arg("--work-dir").arg(self.dir.path().join(&name)).arg("--name").arg(&name);
        command.arg("--slots").arg(slots.to_string()).args(flags);
        self.workers.push(spawn(&mut command, &self.nats_url, &self.s3_url, &self.dir.path().join(format!("{name}.log"))));
        self.joined(self.workers.len()).await;
    }

    /// Waits until so many workers have joined.
    pub async fn joined(&self, count: usize) {
        let started = Instant::now();
        let client = self.client();
        while client.workers().await.map_or(0, |workers| workers.len()) < count {
            assert!(started.elapsed() < Duration::from_secs(120), "workers don't join; see {}", self.dir.path().display());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Kills nats-server and starts it again.
    pub fn restart_nats(&mut self) {
        self.nats.kill().unwrap();
        self.nats.wait().unwrap();
        let port = self.nats_url.rsplit(':').next().unwrap().parse().unwrap();
        self.nats = start_nats(self.dir.path(), port);
    }
}

fn spawn(command: &mut Command, nats: &str, s3: &str, log: &Path) -> Child {
    command.env("NATS_URL", nats).env("VOLLEY_S3_ENDPOINT", s3).env("VOLLEY_S3_BUCKET", "bench");
    command.env("AWS_ACCESS_KEY_ID", KEY).env("AWS_SECRET_ACCESS_KEY", SECRET).env("VOLLEY_LOG", "warn");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(log).unwrap()).spawn().unwrap()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.workers.iter_mut().chain([&mut self.coordinator, &mut self.nats]) {
            let _ = child.kill();
            let _ = child.wait();
        }
        // The server's task ends with the runtime.
        drop(self.s3.take());
    }
}

/// Resident memory of a process, in bytes.
pub fn resident(child: &Child) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{}/statm", child.id())).unwrap();
    text.split(' ').nth(1).unwrap().parse::<f64>().unwrap() * 4_096.0
}

/// CPU time a process has used, in seconds.
pub fn cpu_seconds(child: &Child) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
