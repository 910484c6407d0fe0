//! The client against a server that breaks: every retry and every resumption, on real sockets.

mod fake;

use std::time::Duration;

use base64::Engine as _;
use fake::{Fake, Reply, chunk, cut_off, json, not_ready, refusal, whole};
use serde_json::{Value, json};
use volley_sdk::jobspecs::ids::JobId;
use volley_sdk::{Client, Config, Error, ResultsQuery, Retry, TaskLogsQuery};

const JOB: JobId = JobId(7);

fn client(fakes: &[&Fake]) -> Client {
    let mut config = Config::new(fakes.iter().map(|fake| fake.url()).collect(), Some("vt_a_secret".into()));
    config.retry = Retry {
        first_contact: Duration::from_secs(5),
        budget: Duration::from_secs(5),
        backoff_first: Duration::from_millis(1),
        backoff_max: Duration::from_millis(5),
        silence_max: Duration::from_millis(400),
    };
    Client::new(config).unwrap_or_else(|e| panic!("{e}"))
}

fn row(index: u32) -> String {
    let row = json!({ "index": index, "state": "succeeded", "class": null, "valid": false, "code": null, "message": null, "attempts": 1,
        "runMs": 1, "result": null, "stdoutTail": null, "stderrTail": null, "outputFiles": 0, "objects": null, "cursor": format!("c{index}") });
    format!("{row}\n")
}

fn job(state: &str) -> Value {
    json!({ "job": "j7", "name": "n", "tenant": "t", "state": state, "reason": null, "failures": {}, "labels": {}, "priority": 0,
        "round": 1, "submitted": "2026-01-01T00:00:00Z", "started": null, "ended": null, "exitCode": null, "objects": "s3://b/jobs/j7/",
        "tasks": { "total": 3, "waiting": 0, "running": 0, "backoff": 0, "succeeded": 3, "failed": 0, "infraFailed": 0, "cancelled": 0 } })
}

fn event(sequence: u64, state: &str) -> String {
    format!("id: {sequence}\ndata: {}\n\n", json!({ "sequence": sequence, "kind": "job", "job": job(state), "task": null }))
}

async fn indexes(client: &Client, query: ResultsQuery) -> Vec<u32> {
    let mut results = client.results(JOB, query);
    let mut indexes = Vec::new();
    while let Some(row) = results.next().await {
        indexes.push(row.unwrap_or_else(|e| panic!("{e}")).index);
    }
    indexes
}

fn piece(attempt: u32, offset: u64, text: &str, end: bool) -> String {
    let encoded = base64::engine::general_purpose::STANDARD.encode(text);
    let cursor = format!("{attempt}.{}.0", offset + text.len() as u64);
    format!("{}\n", json!({ "attempt": attempt, "stream": "stdout", "offset": offset, "base64": encoded, "cursor": cursor, "end": end }))
}

#[tokio::test]
async fn a_followed_task_goes_on_behind_the_last_piece_over_silence_and_breaks() {
    let fake = Fake::start(vec![
        // Keep-alives, so that it is not silent for too long; then it is.
        Reply::Slow(Duration::from_millis(250), vec![piece(1, 0, "a→", false), "\n".into(), "\n".into(), piece(1, 4, "b", false)]),
        not_ready(),
        cut_off(&[&piece(1, 5, "c", false), &piece(1, 6, "d", false)[..20]]),
        // What was written meanwhile is missing, and told.
        whole(&[&piece(1, 16, "e", false), &piece(2, 0, "f", false), &piece(2, 1, "", true)]),
    ])
    .await;
    let query = TaskLogsQuery { follow: true, ..TaskLogsQuery::default() };
    let mut logs = client(&[&fake]).task_logs(JOB, 0, &query).await.unwrap_or_else(|e| panic!("{e}"));
    let (mut text, mut missed) = (Vec::new(), Vec::new());
    while let Some(bytes) = logs.chunk().await.unwrap_or_else(|e| panic!("{e}")) {
        text.extend_from_slice(&bytes);
        missed.push(logs.missed());
    }
    assert_eq!(String::from_utf8_lossy(&text), "a→bcef");
    assert_eq!(missed, [0, 0, 0, 10, 0]);
    let targets: Vec<String> = fake.requests().iter().map(fake::Request::target).collect();
    assert!(targets[0].ends_with("logs?follow=true&form=pieces"), "{targets:?}");
    assert!(
        targets[1].ends_with("&after=1.5.0") && targets[2].ends_with("&after=1.5.0") && targets[3].ends_with("&after=1.6.0"),
        "{targets:?}"
    );
}

#[tokio::test]
async fn results_go_on_behind_the_last_row_whatever_breaks() {
    let fake = Fake::start(vec![
        // Broken within a row: that row is not given twice and not lost.
        cut_off(&[&row(0), &row(1)[..20]]),
        not_ready(),
        // Ended regularly, but the job goes on.
        whole(&[&row(1)]),
        json(200, 40, &job("running")),
        whole(&["\n", &row(2)]),
        json(200, 41, &job("succeeded")),
        // What came between the end of the stream and the end of the job.
        whole(&[&row(3)]),
    ])
    .await;
    assert_eq!(indexes(&client(&[&fake]), ResultsQuery::follow()).await, [0, 1, 2, 3]);
    let asked: Vec<String> = fake.requests().iter().map(|r| r.target()).collect();
    let results = |query: &str| format!("/v1/jobs/j7/results?{query}");
    assert_eq!(
        asked,
        [
            results("follow=true"),
            results("follow=true&after=c0"),
            results("follow=true&after=c0"),
            "/v1/jobs/j7".into(),
            results("follow=true&after=c1"),
            "/v1/jobs/j7".into(),
            results("follow=false&after=c2"),
        ]
    );
}

#[tokio::test]
async fn results_that_do_not_follow_end_at_what_is_there() {
    let fake = Fake::start(vec![whole(&[&row(4)])]).await;
    assert_eq!(indexes(&client(&[&fake]), ResultsQuery::now().after("c3")).await, [4]);
    assert_eq!(fake.requests()[0].target(), "/v1/jobs/j7/results?follow=false&after=c3");
}

#[tokio::test]
async fn a_refusal_for_good_ends_the_stream_at_once() {
    let fake = Fake::start(vec![refusal(404, "not_found", false)]).await;
    let mut results = client(&[&fake]).results(JOB, ResultsQuery::follow());
    let first = results.next().await;
    assert!(matches!(&first, Some(Err(error)) if error.code() == "not_found" && !error.is_retryable()), "{first:?}");
    assert!(results.next().await.is_none());
    assert_eq!(fake.requests().len(), 1);
}

#[tokio::test]
async fn a_submit_is_repeated_under_the_same_key_and_reads_ask_for_its_sequence() {
    let answer = json!({ "job": "j7", "tasks": 3, "existed": true });
    let fake = Fake::start(vec![Reply::Drop, not_ready(), json(200, 55, &answer), json(200, 56, &job("running"))]).await;
    let client = client(&[&fake]);
    let submitted = client.submit("{}".to_owned()).await.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((submitted.job, submitted.existed, client.sequence()), (JOB, true, 55));
    client.job(JOB).await.unwrap_or_else(|e| panic!("{e}"));

    let requests = fake.requests();
    let keys: Vec<Option<String>> = requests[..3].iter().map(|r| r.header("idempotency-key")).collect();
    assert!(keys[0].is_some() && keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    assert_eq!(requests[0].header("authorization").as_deref(), Some("Bearer vt_a_secret"));
    assert_eq!(requests[0].header("volley-sequence"), None);
    assert_eq!(requests[3].header("volley-sequence").as_deref(), Some("55"));
    assert_eq!(client.sequence(), 56);
}

#[tokio::test]
async fn what_must_not_happen_twice_is_not_repeated_after_a_lost_answer() {
    let fake = Fake::start(vec![Reply::Drop, json(200, 1, &job("running"))]).await;
    let lost = client(&[&fake]).rerun(JOB).await;
    assert!(matches!(lost, Err(Error::Broken { .. })), "{lost:?}");
    assert_eq!(fake.requests().len(), 1);

    // A refusal says that it was not carried out.
    let fake = Fake::start(vec![not_ready(), json(200, 1, &job("running"))]).await;
    assert!(client(&[&fake]).rerun(JOB).await.is_ok());
}

#[tokio::test]
async fn another_coordinator_is_asked_when_one_is_gone() {
    let (gone, fake) = (Fake::start(vec![]).await, Fake::start(vec![json(200, 1, &job("running"))]).await);
    let client = client(&[&gone, &fake]);
    gone.stop().await;
    assert!(client.job(JOB).await.is_ok());
    assert_eq!(client.endpoint(), fake.url());
}

#[tokio::test]
async fn a_watch_comes_back_and_never_shows_an_older_state() {
    let fake = Fake::start(vec![
        cut_off(&[": hello\n\n", &event(10, "queued"), &event(12, "running")]),
        // A coordinator that is behind.
        cut_off(&[&event(11, "queued"), &event(12, "running")]),
        whole(&[&event(15, "succeeded")]),
    ])
    .await;
    let mut watch = client(&[&fake]).watch(JOB);
    let mut sequences = Vec::new();
    while let Some(event) = watch.next().await {
        sequences.push(event.unwrap_or_else(|e| panic!("{e}")).sequence);
    }
    assert_eq!(sequences, [10, 12, 12, 15]);
    assert_eq!(fake.requests()[1].header("last-event-id").as_deref(), Some("12"));
}

#[tokio::test]
async fn waiting_ends_with_a_job_that_ended_while_nobody_watched() {
    let fake = Fake::start(vec![whole(&[&event(10, "running")]), json(200, 11, &job("failed"))]).await;
    let ended = client(&[&fake]).wait(JOB).await.unwrap_or_else(|e| panic!("{e}"));
    assert!(ended.state.ended());
}

#[tokio::test]
async fn an_answer_of_something_else_is_named_as_that() {
    let fake = Fake::start(vec![Reply::Bytes(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>".to_vec())]).await;
    let answer = client(&[&fake]).job(JOB).await;
    assert!(matches!(&answer, Err(Error::Unexpected { .. })), "{answer:?}");
    let fake = Fake::start(vec![Reply::Bytes(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope".to_vec())]).await;
    let answer = client(&[&fake]).job(JOB).await;
    assert!(matches!(&answer, Err(error) if error.code() == "http_404"), "{answer:?}");
}

#[tokio::test]
async fn an_output_is_fetched_again_until_it_is_whole_and_right() {
    let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let right = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"; // "hello\n"
    let fake = Fake::start(vec![cut_off(&["hel"]), whole(&["jello\n"]), whole(&["hello\n"])]).await;
    let file = volley_sdk::jobspecs::api::OutputFile { path: "a b/c.txt".into(), bytes: 6, sha256: right.into() };
    let path = client(&[&fake]).fetch_output(JOB, 3, None, &file, dir.path(), &|_| {}).await.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(std::fs::read_to_string(&path).ok().as_deref(), Some("hello\n"));
    assert_eq!(std::fs::read_dir(dir.path().join("a b")).map(Iterator::count).ok(), Some(1));
    assert_eq!(fake.requests()[0].target(), "/v1/jobs/j7/tasks/3/outputs/a%20b/c.txt");
}

#[tokio::test]
async fn an_upload_is_sent_whole_and_its_checksum_compared() {
    let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let path = dir.path().join("items.jsonl");
    std::fs::write(&path, "hello\n").unwrap_or_else(|e| panic!("{e}"));
    let answer = |sha256: &str| json(201, 1, &json!({ "id": "u1", "bytes": 6, "sha256": sha256 }));
    let right = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
    let fake = Fake::start(vec![answer("00"), answer(right)]).await;
    let uploaded = client(&[&fake]).upload(&path, std::sync::Arc::new(|_| {})).await.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(uploaded.id, "u1");
    let request = &fake.requests()[1];
    assert_eq!((request.header("content-length").as_deref(), request.body.as_slice()), (Some("6"), &b"hello\n"[..]));
}

#[test]
fn replies_are_well_formed() {
    assert_eq!(chunk("ab"), "2\r\nab\r\n");
}
