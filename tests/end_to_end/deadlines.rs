//! Timeouts of a task and of a job.

use serde_json::json;

use crate::support::Cluster;

#[test]
fn a_task_that_runs_too_long_is_killed_with_all_it_started() {
    let Some(cluster) = Cluster::up() else { return };
    let command = "trap '' TERM; sleep 601 & sleep 601 & echo begun; wait; sleep 601";
    let task = json!({ "command": command, "timeouts": { "run": "1s", "grace": "500ms" } });
    let job = cluster.submit(&cluster.spec(json!({ "count": 2 }), task, json!({})));
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["exitCode"], &ended["failures"]), (&json!("failed"), &json!(1), &json!({ "run_timeout": 2 })));
    for row in cluster.results(&job) {
        assert_eq!((&row["valid"], &row["stdoutTail"]), (&json!(true), &json!("begun\n")), "{row}");
        assert!((1_000..6_000).contains(&row["runMs"].as_u64().unwrap()), "{row}");
    }
    crate::support::process::until("nothing of it is left", || cluster.left().iter().all(|(_, line)| !line.starts_with("sleep 601")));
}

#[test]
fn a_job_past_its_deadline_is_ended() {
    let Some(cluster) = Cluster::up() else { return };
    let spec = cluster.spec(
        json!({ "count": 100 }),
        json!({ "command": "sleep 1", "timeouts": { "grace": "1s" } }),
        json!({ "limits": { "deadline": "3s" } }),
    );
    let job = cluster.submit(&spec);
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["tasks"]["failed"]), (&json!("failed"), &json!(0)), "{ended}");
    assert!(ended["tasks"]["cancelled"].as_u64().unwrap() > 80, "{ended}");
    assert!(ended["reason"].as_str().unwrap().contains("deadline"), "{ended}");
}
