//! Retrying, by rules and with backoff.

use serde_json::json;

use crate::support::Cluster;

#[test]
fn a_task_is_tried_again_after_a_wait() {
    let Some(cluster) = Cluster::up() else { return };
    let retry = json!({ "attempts": 5, "backoff": { "initial": "400ms", "factor": 2, "cap": "1s" } });
    let task = json!({ "command": "echo try ${attempt}; [ $VOLLEY_ATTEMPT -ge 3 ]", "retry": retry });
    let job = cluster.submit(&cluster.spec(json!({ "count": 4 }), task, json!({})));
    assert_eq!(cluster.ended(&job)["state"], "succeeded");
    for row in cluster.results(&job) {
        assert_eq!((&row["attempts"], &row["stdoutTail"]), (&json!(3), &json!("try 3\n")), "{row}");
    }
    let task = cluster.http("GET", &format!("/v1/jobs/{job}/tasks/2/attempts"), b"").json();
    let attempts = task["rows"].as_array().or(task.as_array()).unwrap().clone();
    let states: Vec<_> = attempts.iter().map(|attempt| attempt["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["failed", "failed", "succeeded"], "{attempts:#?}");
}

#[test]
fn the_first_rule_that_matches_decides() {
    let Some(cluster) = Cluster::up() else { return };
    let rules = json!([
        { "match": { "exitCodes": [75, "80-82"] }, "action": "retry" },
        { "match": { "signals": ["SIGSEGV"] }, "action": "retry" },
        { "match": {}, "action": "fail" },
    ]);
    let retry = json!({ "attempts": 3, "backoff": { "initial": "10ms", "cap": "50ms" }, "rules": rules });
    let ends = ["exit 75", "exit 81", "exit 1", "kill -SEGV $$", "kill -ABRT $$"];
    let job = cluster.submit(&cluster.spec(json!({ "inline": ends }), json!({ "command": "${item}", "retry": retry }), json!({})));
    let ended = cluster.ended(&job);
    assert_eq!(ended["failures"], json!({ "exit_code": 3, "signal": 2 }), "{ended}");
    let attempts: Vec<_> = cluster.results(&job).iter().map(|row| row["attempts"].as_u64().unwrap()).collect();
    assert_eq!(attempts, [3, 3, 1, 3, 1]);
}
