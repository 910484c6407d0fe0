//! A record in the log that no coordinator can read: all stop at it, say so, and go on when they are told to pass over it.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::{Cluster, Plan};

/// A kind of record that no build knows: `[99, []]`.
const UNKNOWN: [u8; 4] = [0x82, 0x18, 0x63, 0x80];

fn nats_url(cluster: &Cluster) -> String {
    let config = std::fs::read_to_string(cluster.dir.path().join("nats.conf")).unwrap();
    let port = config.lines().find_map(|line| line.strip_prefix("port: ")).unwrap();
    format!("nats://127.0.0.1:{port}")
}

fn log(url: &str, args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_volley"));
    let ran = command.args(["log", "--nats", url, "--nats-user", "volley", "--nats-password", "faults"]).args(args).output().unwrap();
    assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_nobody_can_read_stops_all_until_it_is_passed_over() {
    let cluster = Cluster::start(Plan { workers: vec![4], ..Plan::default() }).await;
    let spec =
        json!({ "version": "volley/v1", "name": "before", "items": { "count": 50 }, "task": { "isolation": "null", "command": "x" } });
    let job = cluster.submit(&spec).await;
    cluster.wait(job, Duration::from_secs(60)).await;
    let url = nats_url(&cluster);
    let client = async_nats::ConnectOptions::with_user_and_password("volley".into(), "faults".into()).connect(&url).await.unwrap();
    let jetstream = async_nats::jetstream::new(client);
    let published = jetstream.publish("volley.log.report.w0", UNKNOWN.to_vec().into()).await.unwrap();
    let bad = published.await.unwrap().sequence;

    let command = format!("volley log skip {bad}");
    for coordinator in &cluster.coordinators {
        assert!(
            coordinator.says(&command, Duration::from_secs(30)).await,
            "{} stops and says what to do\n{}",
            coordinator.name,
            cluster.logs(20)
        );
        assert!(coordinator.log_text().contains(&format!("record {bad} can't be read")), "{}", cluster.logs(20));
    }
    // Started again and again, they come no further.
    let starts: Vec<u32> = cluster.coordinators.iter().map(|coordinator| coordinator.starts()).collect();
    tokio::time::sleep(Duration::from_secs(4)).await;
    for (coordinator, before) in cluster.coordinators.iter().zip(starts) {
        assert!(coordinator.starts() > before, "{} was not started again", coordinator.name);
    }
    let shown = log(&url, &["show", "--from", &bad.to_string(), "--limit", "1"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((&shown["sequence"], &shown["bytes"]), (&json!(bad), &json!("82186380")), "{shown}");
    assert!(shown["unreadable"].as_str().is_some_and(|why| why.contains("newer build")), "{shown}");

    let said = log(&url, &["skip", &bad.to_string()]);
    assert!(said.contains("from its next start on"), "{said}");
    cluster.ready().await;
    cluster.all_succeeded(job, 50).await;
    let after = cluster
        .submit(
            &json!({ "version": "volley/v1", "name": "after", "items": { "count": 50 }, "task": { "isolation": "null", "command": "x" } }),
        )
        .await;
    cluster.wait(after, Duration::from_secs(60)).await;
    cluster.all_succeeded(after, 50).await;
    cluster.at_rest().await;
    cluster.stop().await;
}
