//! A message on the leader's subject that no leader wrote: it is passed over, and everything goes on.

use std::time::Duration;

use async_nats::jetstream::{self, message::PublishMessage};
use serde_json::{Value, json};
use volley_cli::sdk::jobspecs::ids::Incarnation;
use volley_cli::sdk::jobspecs::wire::{self, record::Record, report::Report};

use crate::parts::{Parts, TOKEN, ask, free_port, nats, s3};
use crate::support::cluster::{VOLLEY, nats_server, open_dir, write};
use crate::support::http::request;
use crate::support::process::{start, until};

const LEADER: &str = "volley.log.leader";

async fn connect(port: u16, user: &str, password: &str) -> async_nats::Client {
    let options = async_nats::ConnectOptions::with_user_and_password(user.into(), password.into());
    options.connect(format!("nats://127.0.0.1:{port}")).await.unwrap()
}

/// The last message on the leader's subject, with the fence it bears.
async fn last(context: &jetstream::Context) -> (u64, bool, Vec<u8>) {
    let stream = context.get_stream("VOLLEY_LOG").await.unwrap();
    let message = stream.get_last_raw_message_by_subject(LEADER).await.unwrap();
    (message.sequence, message.headers.get("Nats-Expected-Last-Subject-Sequence").is_some(), message.payload.to_vec())
}

fn cluster(url: &str) -> Value {
    ask(url, "/v1/cluster").unwrap_or_default()
}

/// Has three answers of NATS and one message of somebody else lie on the leader's subject; gives the sequence of the last.
async fn disturb(port: u16) -> u64 {
    // As a worker, who may not publish there, but may have NATS answer there.
    let worker = connect(port, "worker", "w-secret").await;
    let of_coordinator = jetstream::new(connect(port, "coordinator", "c-secret").await);
    let before = last(&of_coordinator).await;
    assert!(before.1, "what a leader writes bears the fence");
    worker.publish(LEADER, "not allowed".into()).await.unwrap();
    let report = Report { worker: "nobody".parse().unwrap(), incarnation: Incarnation(1), number: 1, ends: Vec::new() };
    let report = wire::encode(&Record::Report(report));
    for _ in 0..3 {
        worker.publish_with_reply("volley.log.report.nobody", LEADER, report.clone().into()).await.unwrap();
        worker.flush().await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    // As whoever may publish there, without the fence.
    let sent = of_coordinator.send_publish(LEADER, PublishMessage::build().payload(vec![0xff, 0x00].into())).await.unwrap();
    let alien = sent.await.unwrap().sequence;

    let mut all = of_coordinator.get_stream("VOLLEY_LOG").await.unwrap();
    let (mut answers, mut nothing) = (0, 0);
    for sequence in before.0..=all.info().await.unwrap().state.last_sequence {
        let Ok(message) = all.get_raw_message(sequence).await else { continue };
        answers += u32::from(message.subject.as_str() == LEADER && message.payload.starts_with(b"{\"stream\""));
        nothing += u32::from(message.payload.as_ref() == b"not allowed");
    }
    assert_eq!((answers, nothing), (3, 0), "NATS answers where it was told to");
    alien
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_leader_wrote_stops_no_coordinator() {
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
    let first = parts.coordinator("c1", ports[0]);
    until("the first coordinator leads", || cluster(&urls[0])["leader"].as_str().is_some_and(|leader| leader.starts_with("c1")));
    let mut second = parts.coordinator("c2", ports[1]);
    let _worker = parts.worker("w1", &[]);
    until("the worker is ready", || ask(&urls[1], "/v1/workers").is_some_and(|workers| workers[0]["state"] == "ready"));

    let task = json!({ "isolation": "process", "command": "sleep 0.2; echo $VOLLEY_TASK_INDEX" });
    let spec = json!({ "version": "volley/v1", "name": "alien", "items": { "count": 60 }, "task": task }).to_string();
    let spec = write(&dir.path().join("spec.json"), &spec);
    let mut command = std::process::Command::new(VOLLEY);
    command.args(["run", &spec, "--results", "-", "--url", &urls.join(",")]).env("VOLLEY_TOKEN", TOKEN);
    let run = start(command);
    until("some are done", || {
        ask(&urls[0], "/v1/jobs").is_some_and(|jobs| jobs["rows"][0]["tasks"]["succeeded"].as_u64().unwrap_or(0) >= 5)
    });

    let alien = disturb(port).await;
    let ran = run.wait().exits(0);
    let mut said: Vec<u32> = ran.lines().iter().map(|row| row["stdoutTail"].as_str().unwrap().trim().parse().unwrap()).collect();
    said.sort_unstable();
    assert_eq!(said, (0..60).collect::<Vec<_>>(), "every result, each once");
    for (name, url) in ["c1", "c2"].iter().zip(&urls) {
        until("it has come past it", || cluster(url)["sequence"].as_u64() > Some(alien));
        let passed = parts.log(name).matches("that no leader wrote").count();
        assert_eq!(passed, 4, "{}", parts.log(name));
        let metrics = request(url, "GET", "/metrics", Some(TOKEN), b"").body;
        assert!(metrics.contains("volley_apply_aliens_total 4\n"), "{metrics}");
    }

    // Who comes later, or again, passes over it as well; and leads behind it.
    second.0.kill().unwrap();
    second.0.wait().unwrap();
    std::fs::remove_dir_all(dir.path().join("c2")).unwrap();
    let _second = parts.coordinator("c2", ports[1]);
    until("it has come past it again", || cluster(&urls[1])["sequence"].as_u64() > Some(alien));
    drop(first);
    until("the second leads", || cluster(&urls[1])["leader"].as_str().is_some_and(|leader| leader.starts_with("c2")));
    let mut command = std::process::Command::new(VOLLEY);
    command.args(["run", &spec, "--url", &urls[1]]).env("VOLLEY_TOKEN", TOKEN);
    start(command).wait().exits(0);
}
