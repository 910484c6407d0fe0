//! The disk of a whole `volley up` is full: it says so, and goes on by itself when there is room.

use std::time::Duration;

use serde_json::json;

use crate::support::Cluster;
use crate::support::process::until;

/// How long the disk stays full: long enough that every part meets it.
const FULL: Duration = Duration::from_secs(6);

#[test]
fn a_full_disk_stops_nothing_for_good() {
    let Some(mut cluster) = Cluster::up_on("192m") else { return };
    let retry = json!({ "attempts": 1, "infraAttempts": 100, "backoff": { "initial": "500ms", "cap": "2s" } });
    let command = "sleep 0.1; head -c 20000 /dev/zero > \"$VOLLEY_OUTPUT_DIR/n\"";
    let job = cluster.submit(&cluster.spec(json!({ "count": 300 }), json!({ "command": command, "retry": retry }), json!({})));
    cluster.until_tasks(&job, "succeeded", 20);
    cluster.disk.as_ref().unwrap().fill();
    until("it says that its disk is full", || cluster.log().contains("The disk is full"));
    std::thread::sleep(FULL);
    cluster.disk.as_ref().unwrap().empty();
    until("it says that there is room", || cluster.log().contains("There is room on the disk again."));
    until("the job goes on", || {
        assert!(!cluster.has_ended(), "{}", cluster.log());
        cluster.volley(&["wait", &job, "--timeout", "5s", "--quiet"]).code == 0
    });
    assert_eq!(cluster.job(&job)["tasks"]["succeeded"], json!(300));
    assert_eq!(cluster.results(&job).len(), 300);
    println!("{}", cluster.log());
}

#[test]
fn objects_leave_room_for_the_log() {
    let Some(mut cluster) = Cluster::up_on("192m") else { return };
    // More than the disk holds.
    let retry = json!({ "attempts": 1, "infraAttempts": 0 });
    let command = "head -c 60000000 /dev/urandom > \"$VOLLEY_OUTPUT_DIR/n\"";
    let more = json!({ "limits": { "concurrency": 1 } });
    let job = cluster.submit(&cluster.spec(json!({ "count": 6 }), json!({ "command": command, "retry": retry }), more));
    until("the log says that objects find no room", || cluster.log().contains("embedded S3: the disk is full"));
    let small = cluster.submit(&cluster.spec(json!({ "count": 20 }), json!({ "command": "echo $VOLLEY_TASK_INDEX" }), json!({})));
    cluster.volley(&["cancel", &job]).exits(0);
    assert_eq!(cluster.ended(&small)["tasks"]["succeeded"], json!(20), "what needs no object goes on");
    assert!(!cluster.has_ended(), "{}", cluster.log());
}
