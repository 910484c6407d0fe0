//! Live output of tasks, followed over HTTP: whole characters, kept alive, gone on with, and to the end.

mod support;

use std::time::Duration;

use axum::http::Method;
use serde_json::{Value, json};
use support::{BOOTSTRAP, World, id, success, worker};
use tokio_util::sync::CancellationToken;
use volley_coordinator::config::CoordinatorConfig;
use volley_jobspecs::wire::live::Live;
use volley_jobspecs::wire::report::Stream;
use volley_jobspecs::{subjects, wire};

fn one_task() -> Value {
    json!({ "version": "volley/v1", "name": "live", "items": { "count": 1 }, "task": { "isolation": "process", "command": ["echo"] } })
}

#[tokio::test(flavor = "multi_thread")]
async fn live_output_is_followed_to_the_end() {
    let Some(world) = World::new().await else { return };
    let cluster = world.cluster().await;
    let (stop, (names, mut begun)) = (CancellationToken::new(), tokio::sync::mpsc::unbounded_channel());
    worker(&cluster.world.nats.url, "w1", 1, stop, move |name| {
        _ = names.send(name);
        None
    })
    .await;
    let client = async_nats::connect(&cluster.world.nats.url).await.expect("NATS");
    let mut watched = client.subscribe(subjects::WATCH_ALL).await.expect("a subscription");
    let job = cluster.submit(&one_task()).await;
    let name = begun.recv().await.expect("an attempt");
    let publish = async {
        use futures::StreamExt;
        assert_eq!(watched.next().await.map(|m| m.subject.to_string()), Some(subjects::watch(id(&job))));
        // A second stream may watch too; pieces go to both.
        for (offset, bytes) in [(0u64, &b"one\n"[..]), (0, b"one\n"), (4, b"two\n")] {
            let piece = Live { name, stderr: false, offset, bytes: bytes.to_vec().into(), held: None };
            client.publish(subjects::live(id(&job), 0), wire::encode(&piece).into()).await.expect("published");
        }
        client.flush().await.expect("flushed");
        tokio::time::sleep(Duration::from_millis(300)).await;
        // Something of the attempt's end was not seen live: the report brings it.
        let mut end = success(name);
        end.stdout = Some(Stream { bytes: 14, tail: b"one\ntwo\nthree\n".to_vec().into(), stored: false, truncated: false });
        cluster.report(end).await;
    };
    let (task, all) = (format!("/v1/jobs/{job}/tasks/0/logs?follow=true"), format!("/v1/jobs/{job}/logs?follow=true"));
    let (_, task, all) =
        tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(publish, cluster.get(&task), cluster.get(&all)) })
            .await
            .expect("in time");
    assert_eq!(task.expect(200).text(), "one\ntwo\nthree\n");
    let lines = all.expect(200).lines();
    assert!(lines.iter().all(|line| line["index"] == 0 && line["stream"] == "stdout"), "{lines:?}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_followed_task_is_kept_alive_gone_on_with_and_of_whole_characters() {
    use futures::StreamExt;
    let Some(world) = World::new().await else { return };
    let config = CoordinatorConfig { keep_alive: Duration::from_millis(200), ..world.config() };
    let cluster = world.cluster_with(config).await;
    let (names, mut begun) = tokio::sync::mpsc::unbounded_channel();
    worker(&cluster.world.nats.url, "w1", 1, CancellationToken::new(), move |name| {
        _ = names.send(name);
        None
    })
    .await;
    let client = async_nats::connect(&cluster.world.nats.url).await.expect("NATS");
    let job = cluster.submit(&one_task()).await;
    let name = begun.recv().await.expect("an attempt");
    let send = async |offset: u64, bytes: &[u8]| {
        let piece = Live { name, stderr: false, offset, bytes: bytes.to_vec().into(), held: None };
        client.publish(subjects::live(id(&job), 0), wire::encode(&piece).into()).await.expect("published");
        client.flush().await.expect("flushed");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let path = format!("/v1/jobs/{job}/tasks/0/logs?follow=true&form=pieces");
    let mut first = cluster.stream(&path).await;
    let mut all = cluster.stream(&format!("/v1/jobs/{job}/logs?follow=true")).await;
    // Until the server knows of both.
    tokio::time::sleep(Duration::from_millis(200)).await;
    // A character lies across the border of two pieces.
    send(0, b"a\xe2\x86").await;
    send(3, b"\x92b").await;
    let (mut kept_alive, mut texts) = (false, String::new());
    while texts != "a→b" {
        let bytes = all.next().await.expect("a line").expect("a line");
        match serde_json::from_slice::<Value>(&bytes) {
            Ok(line) => texts.push_str(line["text"].as_str().expect("text")),
            Err(_) => kept_alive = true,
        }
        assert!("a→b".starts_with(&texts), "{texts}");
    }
    let (mut cursor, mut pieces) = (String::new(), 0);
    while pieces < 2 || !kept_alive {
        let bytes = first.next().await.expect("a line").expect("a line");
        match serde_json::from_slice::<Value>(&bytes) {
            Ok(line) => (cursor, pieces) = (line["cursor"].as_str().expect("a cursor").to_owned(), pieces + 1),
            Err(_) => kept_alive = true,
        }
    }
    assert_eq!(cursor, "1.5.0");
    drop(first);
    // It comes back: what it has is not sent again, what the report has is sent, and the end is told.
    let again = cluster.stream(&format!("{path}&after={cursor}")).await;
    let again = tokio::spawn(again.fold(Vec::new(), async |mut all, bytes| {
        all.extend_from_slice(&bytes.expect("bytes"));
        all
    }));
    tokio::time::sleep(Duration::from_millis(300)).await;
    send(3, b"\x92bc").await;
    let mut end = success(name);
    end.stdout = Some(Stream { bytes: 7, tail: "a→bcd".as_bytes().to_vec().into(), stored: false, truncated: false });
    cluster.report(end).await;
    let again = tokio::time::timeout(Duration::from_secs(20), again).await.expect("in time").expect("no panic");
    let lines: Vec<Value> = again.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    let shown: Vec<_> = lines.iter().map(|line| (line["offset"].as_u64(), line["base64"].as_str(), line["end"] == true)).collect();
    assert_eq!(shown, [(Some(5), Some("Yw=="), false), (Some(6), Some("ZA=="), false), (Some(0), Some(""), true)]);
    for bad in ["form=x", "follow=true&form=x", "form=pieces", "follow=true&after=1.0.0", "follow=true&form=pieces&after=x"] {
        cluster.get(&format!("/v1/jobs/{job}/tasks/0/logs?{bad}")).await.expect(400);
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn open_streams_end_with_their_token() {
    let Some(world) = World::new().await else { return };
    let config = CoordinatorConfig { keep_alive: Duration::from_millis(200), ..world.config() };
    let cluster = world.cluster_with(config).await;
    cluster.post("/v1/tenants", json!({ "tenant": "acme" }).to_string()).await.expect(201);
    let token = cluster.post("/v1/tokens", json!({ "tenant": "acme" }).to_string()).await.expect(201).json();
    let (secret, id) = (token["token"].as_str().expect("a token"), token["id"].as_str().expect("an id"));
    let submitted = cluster.call(Method::POST, "/v1/jobs", Some(secret), &[], one_task().to_string()).await.expect(201).json();
    let job = submitted["job"].as_str().expect("a job").to_owned();
    // No worker is there, so none of them would end by itself.
    let paths = ["events", "results?follow=true", "logs?follow=true", "tasks/0/logs?follow=true", "tasks/0/logs?follow=true&form=pieces"];
    let paths = paths.map(|path| format!("/v1/jobs/{job}/{path}"));
    let open = futures::future::join_all(paths.iter().map(|path| cluster.call(Method::GET, path, Some(secret), &[], "")));
    let revoke = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        cluster.call(Method::DELETE, &format!("/v1/tokens/{id}"), Some(BOOTSTRAP), &[], "").await.expect(204);
    };
    let both = async { tokio::join!(open, revoke) };
    let (answers, ()) = tokio::time::timeout(Duration::from_secs(20), both).await.expect("each stream ends");
    assert!(answers.into_iter().all(|answer| answer.status == 200));
    cluster.stop().await;
}
