//! A rerun: what failed runs once more, successes stay.

use serde_json::json;

use crate::support::Cluster;
use crate::support::cluster::write;

#[test]
fn a_rerun_runs_only_what_failed() {
    let Some(cluster) = Cluster::up() else { return };
    let flag = cluster.path("fixed");
    let command = format!("date +%s%N; [ $VOLLEY_TASK_INDEX -lt 3 ] || [ -e {} ]", flag.display());
    let job = cluster.submit(&cluster.spec(json!({ "count": 5 }), json!({ "command": command }), json!({})));
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["tasks"]["failed"]), (&json!("failed"), &json!(2)));
    let before = cluster.results(&job);
    write(&flag, "");
    cluster.volley(&["rerun", &job]).exits(0);
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["round"], &ended["exitCode"]), (&json!("succeeded"), &json!(2), &json!(0)), "{ended}");
    let after = cluster.results(&job);
    assert_eq!(after.len(), 5, "one row a task: {after:#?}");
    for index in 0..3 {
        assert_eq!(before[index]["stdoutTail"], after[index]["stdoutTail"], "task {index} was not run again");
    }
    assert!(after[3..].iter().all(|row| row["state"] == "succeeded" && row["attempts"] == 2), "{after:#?}");
}
