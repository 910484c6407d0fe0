//! Pausing: nothing more starts until the job is resumed.

use std::time::Duration;

use serde_json::json;

use crate::support::Cluster;

#[test]
fn a_paused_job_starts_nothing_until_it_is_resumed() {
    let Some(cluster) = Cluster::up_with(&["--slots", "2"]) else { return };
    let job = cluster.submit(&cluster.spec(json!({ "count": 12 }), json!({ "command": "sleep 0.5" }), json!({})));
    cluster.until_tasks(&job, "succeeded", 2);
    cluster.volley(&["pause", &job]).exits(0);
    crate::support::process::until("what ran has ended", || cluster.job(&job)["tasks"]["running"] == 0);
    let paused = cluster.job(&job);
    assert_eq!(paused["state"], "paused");
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(cluster.job(&job)["tasks"], paused["tasks"], "nothing moves");
    cluster.volley(&["resume", &job]).exits(0);
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["tasks"]["succeeded"]), (&json!("succeeded"), &json!(12)));
    assert!(cluster.results(&job).iter().all(|row| row["attempts"] == 1), "handing back costs no attempt");
}
