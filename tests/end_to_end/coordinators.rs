//! Separate processes, as in production: nats-server with the shipped configuration, an S3 server, two coordinators, two workers.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_store::{Store, StoreConfig};

use crate::support::cluster::{VOLLEY, nats_server, open_dir, write};
use crate::support::http::request;
use crate::support::process::{start, until};

const TOKEN: &str = "vt_bootstrap_00112233445566778899aabbccddeeff";

/// Killed when dropped.
struct Part(Child);

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

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The shipped configuration, with only address and directory changed.
fn nats(dir: &Path, port: u16) -> Part {
    let shipped = std::fs::read_to_string("deploy/nats/nats-server.conf").unwrap();
    let text =
        shipped.replace("127.0.0.1:4222", &format!("127.0.0.1:{port}")).replace("/var/lib/nats", &dir.join("nats").display().to_string());
    assert!(text.contains(&port.to_string()) && text.contains("sync_interval: always"));
    let mut command = Command::new(nats_server().unwrap());
    command.args(["-c", &write(&dir.join("nats.conf"), &text)]);
    command.env("VOLLEY_COORDINATOR_PASSWORD", "c-secret").env("VOLLEY_WORKER_PASSWORD", "w-secret");
    spawn(command, &dir.join("nats.log"))
}

struct Parts<'a> {
    dir: &'a Path,
    nats: String,
    s3: String,
}

impl Parts<'_> {
    fn part(&self, verb: &str, name: &str, user: (&str, &str), args: &[&str]) -> Part {
        let mut command = Command::new(VOLLEY);
        command.args([verb, "--name", name, "--nats", &self.nats, "--s3-endpoint", &self.s3, "--s3-bucket", "volley"]).args(args);
        command
            .env("NATS_USER", user.0)
            .env("NATS_PASSWORD", user.1)
            .env("AWS_ACCESS_KEY_ID", "key")
            .env("AWS_SECRET_ACCESS_KEY", "secret");
        spawn(command, &self.dir.join(format!("{name}.log")))
    }

    fn coordinator(&self, name: &str, port: u16) -> Part {
        let (data, token) = (self.dir.join(name), write(&self.dir.join("token"), TOKEN));
        let listen = format!("127.0.0.1:{port}");
        let args = ["--data-dir", data.to_str().unwrap(), "--listen", &listen, "--operator-token-file", &token];
        self.part("coordinator", name, ("coordinator", "c-secret"), &args)
    }

    fn worker(&self, name: &str) -> Part {
        let work = self.dir.join(name);
        let mut args = vec!["--work-dir", work.to_str().unwrap(), "--slots", "2", "--cpus", "2"];
        if rustix::process::geteuid().is_root() {
            args.extend(["--task-user", "65534:65534"]);
        }
        self.part("worker", name, ("worker", "w-secret"), &args)
    }

    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.join(format!("{name}.log"))).unwrap_or_default()
    }
}

fn ask(url: &str, path: &str) -> Option<Value> {
    std::net::TcpStream::connect(url.strip_prefix("http://").unwrap()).ok()?;
    let answer = request(url, "GET", path, Some(TOKEN), b"");
    (answer.status == 200).then(|| answer.json())
}

#[tokio::test(flavor = "multi_thread")]
async fn another_coordinator_leads_when_the_leader_is_killed() {
    if nats_server().is_none() {
        return;
    }
    let dir = open_dir();
    let s3 = EmbeddedConfig {
        root: dir.path().join("s3"),
        bind: ([127, 0, 0, 1], 0).into(),
        access_key: "key".into(),
        secret_key: "secret".into(),
    };
    let s3 = EmbeddedServer::start(s3).await.unwrap();
    let store = StoreConfig::new(&s3.endpoint(), "volley", "key", "secret");
    Store::connect(&store).await.unwrap().ensure_bucket().await.unwrap();
    let (port, ports) = (free_port(), [free_port(), free_port()]);
    let _nats = nats(dir.path(), port);
    until("NATS is up", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let parts = Parts { dir: dir.path(), nats: format!("nats://127.0.0.1:{port}"), s3: s3.endpoint() };
    let urls = ports.map(|port| format!("http://127.0.0.1:{port}"));
    let mut first = parts.coordinator("c1", ports[0]);
    until("the first coordinator leads", || {
        assert!(first.0.try_wait().unwrap().is_none(), "{}", parts.log("c1"));
        ask(&urls[0], "/v1/cluster").is_some_and(|view| view["leader"].as_str().unwrap().starts_with("c1"))
    });
    let _second = parts.coordinator("c2", ports[1]);
    let _workers = [parts.worker("w1"), parts.worker("w2")];
    until("both workers are ready", || {
        let ready = |workers: Value| workers.as_array().unwrap().iter().filter(|worker| worker["state"] == "ready").count() == 2;
        ask(&urls[1], "/v1/workers").is_some_and(ready)
    });
    let task = json!({ "isolation": "process", "command": "sleep 0.3; echo $VOLLEY_TASK_INDEX" });
    let spec = json!({ "version": "volley/v1", "name": "lead", "items": { "count": 60 }, "task": task }).to_string();
    let spec = write(&dir.path().join("spec.json"), &spec);
    let mut command = Command::new(VOLLEY);
    command.args(["run", &spec, "--results", "-", "--url", &urls.join(",")]).env("VOLLEY_TOKEN", TOKEN);
    let run = start(command);
    until("a third is done", || {
        ask(&urls[1], "/v1/jobs").is_some_and(|jobs| jobs["rows"][0]["tasks"]["succeeded"].as_u64().unwrap_or(0) >= 10)
    });
    first.0.kill().unwrap();
    let ran = run.wait().exits(0);
    let mut said: Vec<u32> = ran.lines().iter().map(|row| row["stdoutTail"].as_str().unwrap().trim().parse().unwrap()).collect();
    said.sort_unstable();
    assert_eq!(said, (0..60).collect::<Vec<_>>(), "every result, each once");
    let view = ask(&urls[1], "/v1/cluster").unwrap();
    assert!(view["leader"].as_str().unwrap().starts_with("c2"), "{view}\n{}", parts.log("c2"));
    let workers = ask(&urls[1], "/v1/workers").unwrap();
    assert_eq!(workers.as_array().unwrap().len(), 2, "no worker was given up: {workers}");
}
