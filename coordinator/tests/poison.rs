//! A record that makes `apply` panic: the coordinator stops at it, nothing of it is kept, and it goes on when the record is passed over.

mod support;

use std::time::Duration;

use serde_json::json;
use support::{Cluster, World};
use volley_coordinator::core::Message;
use volley_coordinator::io::log::Log;
use volley_coordinator::state::rows::{self, Rows, Table};
use volley_jobspecs::wire;
use volley_jobspecs::wire::record::{Decision, Record};

/// The sequence of the record that moved time to its end.
async fn tick(log: &Log) -> u64 {
    let mut records = log.read(1);
    while let Some(Ok(batch)) = records.recv().await {
        for Message { sequence, bytes, .. } in batch {
            if let Ok(Record::Decided(decided)) = wire::decode("record", &bytes)
                && decided.decisions.contains(&Decision::Tick(u64::MAX))
            {
                return sequence;
            }
        }
    }
    panic!("no such record");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_panics_is_named_undone_and_passed_over() {
    let Some(world) = World::new().await else { return };
    let config = world.config();
    let cluster = world.cluster_with(config.clone()).await;
    let log = cluster.running.handle.log().clone();
    let spec =
        json!({ "version": "volley/v1", "name": "x", "items": { "count": 1 }, "task": { "isolation": "process", "command": "true" } });
    let good = cluster.submit(&spec).await;
    // Time comes to its end; the instant at which the next submit's key is forgotten is more than a number can hold.
    cluster.running.handle.record(Decision::Tick(u64::MAX)).await.expect("it runs");
    let moved = tick(&log).await;
    assert!(cluster.running.handle.wait_for(moved, Duration::from_secs(10)).await);
    _ = cluster.post("/v1/jobs", spec.to_string()).await;
    let Cluster { running, router, store, world, .. } = cluster;
    let error = running.join.await.expect("no panic").expect_err("a record panics").to_string();
    let (_, last, _, _) = log.bounds().await.expect("bounds");
    let bad = (moved + 1..=last).find(|sequence| error.contains(&format!("applying record {sequence} panicked")));
    let bad = bad.unwrap_or_else(|| panic!("{error}"));
    assert!(error.contains(&format!("`volley log skip {bad}`")), "{error}");
    {
        let rows = running.handle.rows();
        let head = rows::load_head(rows).expect("rows").expect("a head");
        assert!(head.sequence < bad, "{} is stored, {bad} panicked", head.sequence);
        assert!(rows.get(Table::Facts, &rows::job_key(volley_jobspecs::ids::JobId(bad))).expect("rows").is_none(), "nothing of it is kept");
    }
    drop((running.handle, running.app, router, store));
    // The first was applied; passed over later, the state is built anew without it.
    for sequence in [moved, bad] {
        log.skip(sequence).await.expect("noted");
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let cluster = world.cluster_with(config).await;
    assert!(cluster.running.handle.wait_for(bad, Duration::from_secs(10)).await, "it goes on behind {bad}");
    let head = cluster.running.handle.read(|state, _, _| state.head.clone()).await.expect("it runs");
    assert!(head.skipped.contains(&moved) && head.skipped.contains(&bad) && head.now_ms < u64::MAX / 2, "{head:?}");
    assert_eq!(cluster.get(&format!("/v1/jobs/{good}")).await.expect(200).json()["tasks"]["total"], 1);
    assert_ne!(cluster.submit(&spec).await, format!("j{bad}"));
    cluster.stop().await;
}
