//! Taking a worker out of use, and ending a cluster.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;

use crate::support::Cluster;
use crate::support::process::{signal, until};

#[test]
fn a_drained_worker_gets_nothing_more() {
    let Some(cluster) = Cluster::up() else { return };
    let worker = cluster.workers()[0]["worker"].as_str().unwrap().to_owned();
    cluster.volley(&["workers", "drain", &worker]).exits(0);
    until("it drains", || cluster.workers()[0]["state"] == "draining");
    let job = cluster.submit(&cluster.spec(json!({ "count": 3 }), json!({ "command": "true" }), json!({})));
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(cluster.job(&job)["tasks"]["waiting"], 3);
    let why = cluster.ask(&["explain", &job, "0"]);
    assert!(why["workers"][0]["reasons"].to_string().contains("drain"), "{why}");
    cluster.volley(&["workers", "resume", &worker]).exits(0);
    assert_eq!(cluster.ended(&job)["state"], "succeeded");
}

#[test]
fn the_first_signal_lets_tasks_end_and_nothing_is_left() {
    let Some(mut cluster) = Cluster::up() else { return };
    let job = cluster.submit(&cluster.spec(json!({ "count": 1 }), json!({ "command": "echo begun; sleep 6; echo whole" }), json!({})));
    // Given out is not begun: a worker to which it is still on its way ends at once, and rightly so.
    until("it has begun", || cluster.volley(&["logs", &job, "0"]).stdout.contains("begun"));
    signal(cluster.pid(), Signal::TERM);
    until("it is said to drain", || cluster.workers().iter().any(|worker| worker["state"] == "draining"));
    until("everything has ended", || {
        cluster.left().iter().all(|(_, line)| line.contains("volley-test") && line.contains("end_to_end")) || cluster.left().is_empty()
    });
    cluster.stop();
    cluster.start();
    let row = cluster.results(&job).remove(0);
    assert_eq!((&row["state"], &row["stdoutTail"], &row["attempts"]), (&json!("succeeded"), &json!("begun\nwhole\n"), &json!(1)), "{row}");
}

/// A drain is nobody's failure: what waits is handed back and is not given to the same worker again.
#[test]
fn what_waits_at_a_worker_that_ends_is_no_lost_attempt() {
    let Some(mut cluster) = Cluster::up_with(&["--slots", "1"]) else { return };
    // A cluster raises its level some seconds after its first start.
    until("the newest level", || cluster.ask(&["cluster"])["level"] == volley_cli::sdk::jobspecs::wire::LEVEL);
    // Short first, so that the next bundle may wait behind the long one.
    let command = "[ $VOLLEY_TASK_INDEX -lt 20 ] || sleep 4";
    let job = cluster.submit(&cluster.spec(json!({ "count": 24 }), json!({ "command": command }), json!({})));
    cluster.until_tasks(&job, "succeeded", 20);
    signal(cluster.pid(), Signal::TERM);
    until("it has ended", || cluster.has_ended());
    cluster.stop();
    cluster.start();
    assert_eq!(cluster.ended(&job)["state"], "succeeded");
    let tries: Vec<_> = cluster.results(&job).iter().map(|row| row["attempts"].as_u64()).collect();
    assert_eq!(tries, vec![Some(1); 24], "what was handed back is no try, and nothing was lost");
}
