//! A rerun: what failed runs once more, successes stay.

use serde_json::{Value, json};

use crate::support::Cluster;
use crate::support::cluster::write;
use crate::support::process::until;

#[test]
fn a_rerun_runs_only_what_failed() {
    let Some(cluster) = Cluster::up() else { return };
    let flag = cluster.path("fixed");
    let command = format!("date +%s%N; [ $VOLLEY_TASK_INDEX -lt 3 ] || [ -e {} ]", flag.display());
    let job = cluster.submit(&cluster.spec(json!({ "count": 5 }), json!({ "command": command }), json!({})));
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["tasks"]["failed"]), (&json!("failed"), &json!(2)));
    let before = cluster.results(&job);
    // Only from this level on a round notes where it began.
    until("the level is raised", || cluster.http("GET", "/v1/cluster", b"").json()["level"].as_u64() >= Some(3));
    write(&flag, "");
    cluster.volley(&["rerun", &job]).exits(0);
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["round"], &ended["exitCode"]), (&json!("succeeded"), &json!(2), &json!(0)), "{ended}");
    let rows = cluster.results(&job);
    assert_eq!(rows.len(), 5, "each task has its present row only: {rows:#?}");
    assert_eq!(rows[..3], before[..3], "were not run again");
    for row in &rows[3..] {
        assert_eq!((&row["state"], &row["class"]), (&json!("succeeded"), &Value::Null), "{row}");
    }
    let failed = cluster.volley(&["results", &job, "--failed", "-o", "json"]).exits(0);
    assert_eq!(failed.stdout, "", "nothing has failed any more");
    let all = cluster.volley(&["results", &job, "--all", "-o", "json"]).exits(0).lines();
    let superseded: Vec<&Value> = all.iter().filter(|row| row["superseded"] == true).collect();
    assert_eq!((all.len(), superseded.len()), (7, 2), "{all:#?}");
    assert!(
        superseded.iter().all(|row| row["state"] == "failed" && before.iter().any(|old| old["cursor"] == row["cursor"])),
        "{superseded:#?}"
    );
}
