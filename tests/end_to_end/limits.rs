//! Resource limits, concurrency and rate.

use std::time::Duration;

use serde_json::json;

use crate::support::Cluster;

#[test]
fn a_memory_limit_is_enforced_or_refused_in_words() {
    let Some(cluster) = Cluster::up() else { return };
    let command = "head -c 200000000 /dev/zero | tail -c 200000000 | wc -c";
    let task = json!({ "command": command, "resources": { "memory": "32MiB" }, "timeouts": { "queue": "5s" } });
    let job = cluster.submit(&cluster.spec(json!({ "count": 1 }), task, json!({})));
    let ended = cluster.ended(&job);
    let row = cluster.results(&job).remove(0);
    match row["class"].as_str() {
        Some("oom") => assert_eq!((&ended["exitCode"], &row["valid"]), (&json!(1), &json!(true)), "{row}"),
        // This host gives the worker no cgroups.
        other => {
            assert!(ended["exitCode"] == 3, "not run without its limit: {other:?} {row}");
            eprintln!("skipped: no cgroups here; the task was refused");
        }
    }
}

#[test]
fn concurrency_and_rate_hold() {
    let Some(cluster) = Cluster::up_with(&["--slots", "4"]) else { return };
    let spec = cluster.spec(json!({ "count": 6 }), json!({ "command": "sleep 0.4" }), json!({ "limits": { "concurrency": 1 } }));
    let job = cluster.submit(&spec);
    let mut most = 0;
    crate::support::process::until("it has ended", || {
        let job = cluster.job(&job);
        most = most.max(job["tasks"]["running"].as_u64().unwrap());
        job["ended"].is_string()
    });
    assert_eq!(most, 1);
    let spec = cluster.spec(json!({ "count": 7 }), json!({ "command": "true" }), json!({ "limits": { "rate": "2/s" } }));
    let ran = cluster.volley(&["run", &spec]).exits(0);
    assert!(ran.took > Duration::from_secs(2), "7 starts at 2 a second: {:?}", ran.took);
}
