//! A rerun: what failed runs once more, successes stay.

use serde_json::{Value, json};

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
    // A task that was run again has a row for each time; the last one counts.
    let rows = cluster.results(&job);
    assert_eq!(rows.len(), 7, "{rows:#?}");
    let last = |index: u64| rows.iter().rfind(|row| row["index"] == index).unwrap();
    for row in &before[..3] {
        assert_eq!(row, last(row["index"].as_u64().unwrap()), "was not run again");
    }
    for index in [3, 4] {
        let row = last(index);
        assert_eq!((&row["state"], &row["class"]), (&json!("succeeded"), &Value::Null), "{row}");
    }
}
