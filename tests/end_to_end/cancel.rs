//! Cancelling: what runs may end, or is stopped.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::Cluster;

#[test]
fn a_soft_cancel_lets_running_tasks_end() {
    let Some(cluster) = Cluster::up_with(&["--slots", "2"]) else { return };
    let job = cluster.submit(&cluster.spec(json!({ "count": 50 }), json!({ "command": "sleep 2" }), json!({})));
    cluster.until_tasks(&job, "running", 1);
    cluster.volley(&["cancel", &job, "--reason", "not needed"]).exits(0);
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["exitCode"]), (&json!("cancelled"), &json!(4)), "{ended}");
    assert!(ended["reason"].as_str().unwrap().contains("not needed"), "{ended}");
    assert!(ended["tasks"]["succeeded"].as_u64().unwrap() >= 1, "what ran has ended by itself: {ended}");
    assert!(ended["tasks"]["cancelled"].as_u64().unwrap() >= 40, "{ended}");
}

#[test]
fn a_cancel_now_stops_running_tasks() {
    let Some(cluster) = Cluster::up() else { return };
    let task = json!({ "command": "sleep 600 & echo $! > $VOLLEY_OUTPUT_DIR/pid; wait", "timeouts": { "grace": "1s" } });
    let job = cluster.submit(&cluster.spec(json!({ "count": 3 }), task, json!({})));
    cluster.until_tasks(&job, "running", 1);
    std::thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    cluster.volley(&["cancel", &job, "--now"]).exits(0);
    let ended = cluster.ended(&job);
    assert_eq!(ended["state"], "cancelled");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    // The whole tree is gone, not only the shell.
    crate::support::process::until("the tasks' processes are gone", || {
        cluster.left().iter().all(|(_, line)| !line.starts_with("sleep 600"))
    });
}
