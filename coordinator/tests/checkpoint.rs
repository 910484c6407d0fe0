//! Checkpoints on real parts: made, trimmed by, loaded from; databases that are damaged or differ; records passed over; uploads that go.

mod support;

use std::path::Path;
use std::time::Duration;

use axum::http::Method;
use serde_json::json;
use support::{BOOTSTRAP, Cluster, World, success, worker};
use tokio_util::sync::CancellationToken;
use volley_coordinator::checkpoint::Every;
use volley_coordinator::config::CoordinatorConfig;
use volley_coordinator::io::checkpoint::manifests;
use volley_coordinator::io::rocks::RocksRows;
use volley_coordinator::run::{Running, run};
use volley_coordinator::state::Head;
use volley_coordinator::state::rows::{self, Rows as _, Table, Write};
use volley_jobspecs::ids::{JobId, TenantId};
use volley_jobspecs::wire::encode;
use volley_jobspecs::wire::record::{Actor, Control, Decision, Record, Verb};
use volley_jobspecs::wire::{LEVEL, LEVEL_KEEPING};
use volley_jobspecs::{keys, subjects};
use volley_store::ErrorKind;

fn every(records: u64) -> Every {
    Every { records, bytes: u64::MAX, look: Duration::from_millis(50) }
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..600 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("never: {what}");
}

async fn head(running: &Running) -> Head {
    running.handle.read(|state, _, _| state.head.clone()).await.expect("it runs")
}

/// Jobs that end, one after another, until the log is trimmed.
async fn work_until_trimmed(cluster: &Cluster) {
    let spec =
        json!({ "version": "volley/v1", "name": "small", "items": { "count": 40 }, "task": { "isolation": "process", "command": "true" } });
    until("the log is trimmed", async || {
        let job = cluster.submit(&spec).await;
        cluster.ended(&job).await;
        let (first, ..) = cluster.running.handle.log().bounds().await.expect("bounds");
        first > 1 && head(&cluster.running).await.checkpoints.len() == 3
    })
    .await;
}

/// Starts a second coordinator in `dir` and waits until its rows are the first one's.
async fn joins(cluster: &Cluster, dir: &Path) {
    let config = CoordinatorConfig {
        data_dir: dir.to_owned(),
        listen: ([127, 0, 0, 1], 0).into(),
        checkpoints: every(u64::MAX),
        ..cluster.world.config()
    };
    let stop = CancellationToken::new();
    let second = run(config, stop.clone()).await.unwrap_or_else(|e| panic!("{e}"));
    until("the rows are the same", async || {
        let (one, two) = (cluster.running.handle.rows().dump().expect("rows"), second.handle.rows().dump().expect("rows"));
        one == two
    })
    .await;
    stop.cancel();
    second.join.await.expect("no panic").expect("a clean end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_without_rows_or_with_damaged_ones_starts_from_a_checkpoint() {
    let Some(world) = World::new().await else { return };
    let config = CoordinatorConfig { checkpoints: every(30), ..world.config() };
    let cluster = world.cluster_with(config).await;
    let stop = CancellationToken::new();
    worker(&cluster.world.nats.url, "w1", 2, stop.clone(), |name| Some(success(name))).await;
    work_until_trimmed(&cluster).await;
    until("old manifests go", async || manifests(&cluster.store).await.expect("a list").len() <= 3).await;

    let dir = cluster.world.dir.path().join("second");
    joins(&cluster, &dir).await;
    // Again, as it was left.
    joins(&cluster, &dir).await;
    let files = |suffix: &str| -> Vec<_> {
        let names = std::fs::read_dir(&dir).expect("the directory").map(|file| file.expect("a file").path());
        names.filter(|path| path.to_string_lossy().ends_with(suffix)).collect()
    };
    for sst in files(".sst") {
        let half = sst.metadata().expect("a file").len() / 2;
        std::fs::OpenOptions::new().write(true).open(&sst).expect("a file").set_len(half).expect("cut");
    }
    joins(&cluster, &dir).await;
    std::fs::remove_file(files(".sst").first().expect("a table")).expect("removed");
    joins(&cluster, &dir).await;
    std::fs::remove_file(dir.join("CURRENT")).expect("removed");
    joins(&cluster, &dir).await;
    for manifest in std::fs::read_dir(&dir).expect("the directory").map(|file| file.expect("a file")) {
        if manifest.file_name().to_string_lossy().starts_with("MANIFEST") {
            std::fs::write(manifest.path(), b"nonsense that is long enough to be read as something").expect("written");
        }
    }
    joins(&cluster, &dir).await;

    // A newest checkpoint that is damaged is passed over.
    let newest = *manifests(&cluster.store).await.expect("a list").last().expect("one");
    let manifest = cluster.store.get(&keys::checkpoint(newest), 1 << 20).await.expect("a manifest");
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).expect("JSON");
    let key = manifest["files"].as_array().expect("files").iter().rev().find_map(|file| {
        let theirs = file["key"].as_str().expect("a key");
        theirs.contains(&format!("-{newest}-")).then(|| theirs.to_owned())
    });
    cluster.store.put(&key.expect("a new file"), "damage".into()).await.expect("put");
    std::fs::remove_dir_all(&dir).expect("removed");
    joins(&cluster, &dir).await;
    stop.cancel();
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_differs_is_built_again() {
    let Some(world) = World::new().await else { return };
    let config = CoordinatorConfig { checkpoints: every(2_000), ..world.config() };
    let cluster = world.cluster_with(config).await;
    let dir = cluster.world.dir.path().join("second");
    joins(&cluster, &dir).await;
    let ghost = b"tenant/ghost".to_vec();
    let tampered = RocksRows::open(&dir).expect("rows");
    let row = tampered.get(Table::Meta, &ghost).expect("a read");
    assert!(row.is_none());
    let tenant = volley_coordinator::state::Tenant { policy: Default::default() };
    tampered.write(vec![Write::Put(Table::Meta, ghost.clone(), encode(&tenant))]).expect("written");
    drop(tampered);

    let config = CoordinatorConfig { data_dir: dir.clone(), checkpoints: every(u64::MAX), ..cluster.world.config() };
    let stop = CancellationToken::new();
    let Running { join, .. } = run(config, stop.clone()).await.unwrap_or_else(|e| panic!("{e}"));
    let jetstream = cluster.running.handle.log().context().clone();
    let subject = subjects::log_control(&TenantId::new("default").expect("a name"));
    let mut acks = Vec::new();
    for number in 0..10_100 {
        let actor = Actor { tenant: TenantId::new("default").expect("a name"), principal: "p".into(), request_id: format!("r{number}") };
        let record = Record::Control(Control { actor, verb: Verb::Pause { job: JobId(1) } });
        acks.push(jetstream.publish(subject.clone(), encode(&record).into()).await.expect("sent"));
        if acks.len() == 500 {
            for ack in acks.drain(..) {
                ack.await.expect("acknowledged");
            }
        }
    }
    until("the second is built again", async || {
        let Ok(rows) = RocksRows::read_only(&dir) else { return false };
        let ghost = rows.get(Table::Meta, &ghost).ok().flatten();
        let head = rows::load_head(&rows).ok().flatten().unwrap_or_default();
        ghost.is_none() && head.sequence > 10_000
    })
    .await;
    assert!(!join.is_finished());
    stop.cancel();
    join.await.expect("no panic").expect("a clean end");
    joins(&cluster, &dir).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_nobody_can_read_is_named_and_passed_over() {
    let Some(world) = World::new().await else { return };
    let config = CoordinatorConfig { checkpoints: every(u64::MAX), ..world.config() };
    let cluster = world.cluster_with(config.clone()).await;
    let log = cluster.running.handle.log().clone();
    let bad = log.publish("volley.log.control.default", vec![0xff, 0x00].into(), Duration::from_secs(5)).await.expect("published");
    // On the leader's subject, too: it moves the fence.
    let (leader, _) = log.last_leader().await.expect("a read").expect("a leader");
    let fenced = log.publish_fenced(vec![0xff, 0x01].into(), leader).await;
    let Cluster { running, router, world, .. } = cluster;
    let error = running.join.await.expect("no panic").expect_err("it can't be read").to_string();
    assert!(error.contains(&format!("volley log skip {bad}")), "{error}");
    drop((running.handle, running.app, router));
    log.skip(bad).await.expect("noted");
    if let volley_coordinator::io::log::Fenced::Written(sequence) = fenced {
        log.skip(sequence).await.expect("noted");
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let cluster = world.cluster_with(config).await;
    until("it leads", async || {
        head(&cluster.running).await.skipped.contains(&bad)
            && cluster.running.handle.read(|_, leader, _| leader.is_some()).await.expect("it runs")
    })
    .await;
    let spec =
        json!({ "version": "volley/v1", "name": "after", "items": { "count": 1 }, "task": { "isolation": "process", "command": "true" } });
    cluster.submit(&spec).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_is_older_than_what_was_applied_is_refused() {
    let Some(world) = World::new().await else { return };
    let config = world.config();
    let cluster = world.cluster().await;
    until("something was applied", async || cluster.running.handle.sequence() > 0).await;
    cluster.stop.cancel();
    let Cluster { running, router, store, world, .. } = cluster;
    running.join.await.expect("no panic").expect("a clean end");
    drop((running.handle, running.app, router));
    tokio::time::sleep(Duration::from_millis(500)).await;
    let rows = RocksRows::open(&config.data_dir).expect("rows");
    let found = rows::load_head(&rows).expect("a read").expect("a head");
    rows.write(vec![Write::Put(Table::Meta, b"head".to_vec(), encode(&Head { sequence: 5_000, ..found }))]).expect("written");
    drop(rows);
    let line = run(config.clone(), CancellationToken::new()).await.map(|_| ()).expect_err("refused").to_string();
    assert!(line.contains("the log is older than this coordinator") && line.contains("5000"), "{line}");
    store.put(&keys::checkpoint(7_000), "{}".into()).await.expect("put");
    let fresh = CoordinatorConfig { data_dir: world.dir.path().join("fresh"), ..config };
    let line = run(fresh, CancellationToken::new()).await.map(|_| ()).expect_err("refused").to_string();
    assert!(line.contains("the log is older than the bucket") && line.contains("7000"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_no_job_names_goes_after_a_day() {
    let Some(world) = World::new().await else { return };
    let config = CoordinatorConfig { checkpoints: every(u64::MAX), ..world.config() };
    let cluster = world.cluster_with(config).await;
    until("the level is raised", async || head(&cluster.running).await.level == LEVEL).await;
    const { assert!(LEVEL >= LEVEL_KEEPING) };
    let mut ids = Vec::new();
    for _ in 0..2 {
        let answer = cluster.call(Method::POST, "/v1/uploads", Some(BOOTSTRAP), &[], "text").await.expect(201).json();
        ids.push(answer["id"].as_str().expect("an id").to_owned());
    }
    let spec = json!({ "version": "volley/v1", "name": "keeps", "items": { "count": 1 },
        "task": { "isolation": "process", "command": "true", "inputs": [{ "from": format!("upload:{}", ids[1]), "path": "in" }] } });
    cluster.submit(&spec).await;
    let now_ms = head(&cluster.running).await.now_ms;
    cluster.running.handle.record(Decision::Tick(now_ms + 25 * 60 * 60 * 1000)).await.expect("it runs");
    until("one is forgotten", async || cluster.running.handle.read(|state, _, _| state.uploads.len()).await.expect("it runs") == 1).await;
    let tenant = TenantId::new("default").expect("a name");
    let gone = cluster.store.head(&keys::upload(&tenant, &ids[0])).await.expect_err("it is deleted");
    assert_eq!(gone.kind(), ErrorKind::NotFound);
    cluster.store.head(&keys::upload(&tenant, &ids[1])).await.expect("the job's upload is kept");
    cluster.stop().await;
}
