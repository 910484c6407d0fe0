//! Full disks: the coordinator's data directory and a worker's work directory, each on a small file system of its own.

use std::time::{Duration, Instant};

use serde_json::json;
use volley_cli::sdk::jobspecs::api::{JobState, TaskState};

use crate::cluster::{Cluster, Plan, exactly_once};
use crate::disk::Disk;

/// A coordinator whose disk is full says so and ends; another leads, and it is back by itself when there is room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_coordinators_disk_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::mount(dir.path(), "48m") else { return };
    let plan = Plan { coordinators: 2, workers: vec![8], data_dir: Some(dir.path().join("data")), ..Plan::default() };
    let cluster = Cluster::start(plan).await;
    let spec = json!({
        "version": "volley/v1", "name": "many", "items": { "count": 200_000 }, "task": { "isolation": "null", "command": "true" },
    });
    let job = cluster.submit(&spec).await;
    let follow = cluster.follow(job);
    while cluster.client.job(job).await.unwrap().tasks.succeeded < 2_000 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    disk.fill();
    let first = &cluster.coordinators[0];
    assert!(first.says("No space left on device", Duration::from_secs(60)).await, "{}", cluster.logs(20));
    cluster.wait(job, Duration::from_secs(180)).await;
    disk.empty();
    cluster.all_succeeded(job, 200_000).await;
    exactly_once(&follow.await.unwrap().unwrap(), 200_000, "the followed stream");
    cluster.at_rest().await;
    let said = first.log_text();
    let line = said.lines().find(|line| line.starts_with("error: ") && line.contains("No space left on device"));
    println!("it said: {line:?}; started {} times", first.starts());
    assert!(line.is_some(), "{said}");
    cluster.stop().await;
}

/// A single coordinator whose disk is full at its start, and then has room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_coordinators_disk_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::mount(dir.path(), "48m") else { return };
    disk.fill();
    let plan = Plan { coordinators: 1, workers: vec![4], data_dir: Some(dir.path().join("data")), ..Plan::default() };
    let cluster = Cluster::begin(plan).await;
    let first = &cluster.coordinators[0];
    assert!(first.says("No space left on device", Duration::from_secs(60)).await, "{}", cluster.logs(20));
    disk.empty();
    cluster.ready().await;
    let spec =
        json!({ "version": "volley/v1", "name": "few", "items": { "count": 100 }, "task": { "isolation": "null", "command": "true" } });
    let job = cluster.submit(&spec).await;
    cluster.wait(job, Duration::from_secs(60)).await;
    cluster.all_succeeded(job, 100).await;
    cluster.stop().await;
}

/// A worker whose disk is full fails its tasks as the cluster's fault, not theirs, with words that name the disk; when there is room
/// again they succeed, without a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_workers_disk_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::mount(dir.path(), "16m") else { return };
    let plan = Plan { coordinators: 1, workers: vec![4], work_dir: Some(dir.path().join("work")), ..Plan::default() };
    let cluster = Cluster::start(plan).await;
    let spec = json!({
        "version": "volley/v1", "name": "writers", "items": { "count": 40 },
        "task": {
            "isolation": "process", "command": "head -c 300000 /dev/zero; sleep 0.2; echo ${index} > \"$VOLLEY_OUTPUT_DIR/n\"",
            "retry": { "attempts": 1, "infraAttempts": 100, "backoff": { "initial": "500ms", "cap": "2s" } }
        },
    });
    let job = cluster.submit(&spec).await;
    let begun = Instant::now();
    while cluster.client.job(job).await.unwrap().tasks.succeeded < 4 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", cluster.logs(20));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    disk.fill();
    // Until one has failed of it, which takes as long as the host's own disk does, and then some more.
    let filled = Instant::now();
    while cluster.client.job(job).await.unwrap().tasks.backoff == 0 {
        assert!(filled.elapsed() < Duration::from_secs(60), "{}", cluster.logs(20));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    let during = cluster.client.job(job).await.unwrap();
    disk.empty();
    let view = cluster.wait(job, Duration::from_secs(120)).await;
    println!("with a full disk: {during:?}\nat the end: {view:?}");
    let mut messages: std::collections::BTreeMap<_, u32> = std::collections::BTreeMap::new();
    for index in 0..40 {
        for attempt in cluster.client.attempts(job, index).await.unwrap() {
            if attempt.state == TaskState::Failed {
                let words = attempt.message.clone().unwrap_or_default();
                *messages.entry((attempt.class, words, attempt.stderr_tail)).or_insert(0) += 1;
            }
        }
    }
    println!("failed attempts: {messages:#?}");
    assert_eq!(cluster.workers[0].starts(), 1, "the worker goes on\n{}", cluster.logs(20));
    assert!(!messages.is_empty(), "the disk was full for seconds");
    for (class, words, _) in messages.keys() {
        assert!(class.is_some_and(|class| class.is_infra()), "{class:?} says {words:?}");
        assert!(words.contains("No space left") || words.contains("the worker's disk is full"), "{class:?} says {words:?}");
    }
    assert_eq!(view.state, JobState::Succeeded, "{view:?}");
    cluster.at_rest().await;
    cluster.stop().await;
}
