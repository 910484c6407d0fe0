//! Another coordinator takes over when the leader is killed: two coordinators, two workers, each a process of its own.

use std::process::Command;

use serde_json::{Value, json};

use crate::parts::{Parts, TOKEN, ask, free_port, nats, s3};
use crate::support::cluster::{VOLLEY, nats_server, open_dir, write};
use crate::support::process::{start, until};

#[tokio::test(flavor = "multi_thread")]
async fn another_coordinator_leads_when_the_leader_is_killed() {
    if nats_server().is_none() {
        return;
    }
    let dir = open_dir();
    let s3 = s3(dir.path()).await;
    let (port, ports) = (free_port(), [free_port(), free_port()]);
    let _nats = nats(dir.path(), port);
    until("NATS is up", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let parts = Parts { dir: dir.path(), nats: format!("nats://127.0.0.1:{port}"), s3: s3.endpoint(), env: Vec::new() };
    let urls = ports.map(|port| format!("http://127.0.0.1:{port}"));
    let mut first = parts.coordinator("c1", ports[0]);
    until("the first coordinator leads", || {
        assert!(first.0.try_wait().unwrap().is_none(), "{}", parts.log("c1"));
        ask(&urls[0], "/v1/cluster").is_some_and(|view| view["leader"].as_str().unwrap().starts_with("c1"))
    });
    let _second = parts.coordinator("c2", ports[1]);
    let _workers = [parts.worker("w1", &[]), parts.worker("w2", &[])];
    until("both workers are ready", || {
        let ready = |workers: Value| workers.as_array().unwrap().iter().filter(|worker| worker["state"] == "ready").count() == 2;
        ask(&urls[1], "/v1/workers").is_some_and(ready)
    });
    until("the records are at the newest level, which the shipped rights of NATS must allow", || {
        ask(&urls[0], "/v1/cluster").is_some_and(|view| view["level"] == volley_cli::sdk::jobspecs::wire::LEVEL)
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
