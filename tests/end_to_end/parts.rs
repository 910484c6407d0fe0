//! Separate processes, as in production: nats-server with the shipped configuration, coordinators, workers.
//!
//! Owns starting them and reading what they wrote. Does not own the S3 server, which runs within the test.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_store::{Store, StoreConfig};

use crate::support::cluster::{VOLLEY, nats_server, write};
use crate::support::http::request;

/// The operator's token.
pub const TOKEN: &str = "vt_bootstrap_00112233445566778899aabbccddeeff";

/// Killed when dropped.
pub struct Part(pub Child);

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(mut command: Command, log: &Path) -> Part {
    let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
    Part(command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The shipped configuration, with only address and directory changed.
pub fn nats(dir: &Path, port: u16) -> Part {
    let shipped = std::fs::read_to_string("deploy/nats/nats-server.conf").unwrap();
    let text =
        shipped.replace("127.0.0.1:4222", &format!("127.0.0.1:{port}")).replace("/var/lib/nats", &dir.join("nats").display().to_string());
    assert!(text.contains(&port.to_string()) && text.contains("sync_interval: always"));
    let mut command = Command::new(nats_server().unwrap());
    command.args(["-c", &write(&dir.join("nats.conf"), &text)]);
    command.env("VOLLEY_COORDINATOR_PASSWORD", "c-secret").env("VOLLEY_WORKER_PASSWORD", "w-secret");
    spawn(command, &dir.join("nats.log"))
}

/// What coordinators and workers are started with.
pub struct Parts<'a> {
    /// The test's directory.
    pub dir: &'a Path,
    /// Address of NATS.
    pub nats: String,
    /// Address of S3.
    pub s3: String,
    /// Further variables.
    pub env: Vec<(&'static str, String)>,
}

impl Parts<'_> {
    fn part(&self, verb: &str, name: &str, user: (&str, &str), args: &[&str]) -> Part {
        let mut command = Command::new(VOLLEY);
        command.args([verb, "--name", name, "--nats", &self.nats, "--s3-endpoint", &self.s3, "--s3-bucket", "volley"]).args(args);
        command
            .env("NATS_USER", user.0)
            .env("NATS_PASSWORD", user.1)
            .env("AWS_ACCESS_KEY_ID", "key")
            .env("AWS_SECRET_ACCESS_KEY", "secret")
            .envs(self.env.iter().map(|(name, value)| (name, value)));
        spawn(command, &self.dir.join(format!("{name}.log")))
    }

    /// Starts a coordinator.
    pub fn coordinator(&self, name: &str, port: u16) -> Part {
        let (data, token) = (self.dir.join(name), write(&self.dir.join("token"), TOKEN));
        let listen = format!("127.0.0.1:{port}");
        let args = ["--data-dir", data.to_str().unwrap(), "--listen", &listen, "--operator-token-file", &token];
        self.part("coordinator", name, ("coordinator", "c-secret"), &args)
    }

    /// Starts a worker with two slots.
    pub fn worker(&self, name: &str, more: &[&str]) -> Part {
        let work = self.dir.join(name);
        let mut args = vec!["--work-dir", work.to_str().unwrap(), "--slots", "2", "--cpus", "2"];
        if rustix::process::geteuid().is_root() {
            args.extend(["--task-user", "65534:65534"]);
        }
        args.extend(more);
        self.part("worker", name, ("worker", "w-secret"), &args)
    }

    /// What one of them wrote.
    pub fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.join(format!("{name}.log"))).unwrap_or_default()
    }
}

/// Asks a coordinator; none: it isn't there, or says no.
pub fn ask(url: &str, path: &str) -> Option<Value> {
    std::net::TcpStream::connect(url.strip_prefix("http://").unwrap()).ok()?;
    let answer = request(url, "GET", path, Some(TOKEN), b"");
    (answer.status == 200).then(|| answer.json())
}

/// An S3 server with the bucket that the parts use.
pub async fn s3(dir: &Path) -> EmbeddedServer {
    let config = EmbeddedConfig {
        root: dir.join("s3"),
        bind: ([127, 0, 0, 1], 0).into(),
        access_key: "key".into(),
        secret_key: "secret".into(),
        reserve_bytes: 0,
    };
    let server = EmbeddedServer::start(config).await.unwrap();
    let store = StoreConfig::new(&server.endpoint(), "volley", "key", "secret");
    Store::connect(&store).await.unwrap().ensure_bucket().await.unwrap();
    server
}
