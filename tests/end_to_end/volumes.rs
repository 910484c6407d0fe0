//! Volumes and their snapshots, as people make them.

use serde_json::{Value, json};

use crate::support::Cluster;
use crate::support::process::until;

fn cluster() -> Option<Cluster> {
    let cluster = Cluster::up()?;
    until("the level is raised", || cluster.http("GET", "/v1/cluster", b"").json()["level"].as_u64() >= Some(7));
    Some(cluster)
}

fn names(cluster: &Cluster) -> Vec<Value> {
    cluster.ask(&["volume", "ls"]).as_array().unwrap().iter().map(|volume| volume["name"].clone()).collect()
}

#[test]
fn volumes_are_made_snapshotted_cloned_and_removed() {
    let Some(mut cluster) = cluster() else { return };
    let made = cluster.ask(&["volume", "create", "state", "10GiB"]);
    assert_eq!((&made["name"], &made["sizeBytes"], &made["generation"]), (&json!("state"), &json!(10_u64 << 30), &json!(0)), "{made}");
    let again = cluster.volley(&["volume", "create", "state", "1GiB"]).exits(65);
    assert!(again.stderr.contains("there is a volume state already"), "{again:?}");
    let snapshot = cluster.ask(&["volume", "snapshot", "state@monday"]);
    assert_eq!((&snapshot["snapshots"][0]["name"], &snapshot["snapshots"][0]["sizeBytes"]), (&json!("monday"), &json!(10_u64 << 30)));
    cluster.volley(&["volume", "snapshot", "state@monday"]).exits(65);
    let clone = cluster.ask(&["volume", "clone", "state@monday", "trial"]);
    assert_eq!((&clone["name"], &clone["sizeBytes"]), (&json!("trial"), &json!(10_u64 << 30)), "{clone}");
    assert_ne!(clone["id"], made["id"]);
    assert_eq!(names(&cluster), [json!("state"), json!("trial")]);

    // They are there after a restart, from the log and the bucket.
    cluster.stop();
    cluster.start();
    assert_eq!(cluster.ask(&["volume", "show", "state"])["id"], made["id"]);
    cluster.ask(&["volume", "snapshot", "trial@later"]);

    cluster.volley(&["volume", "rm", "state@monday", "trial"]).exits(0);
    assert_eq!(names(&cluster), [json!("state")]);
    assert_eq!(cluster.ask(&["volume", "show", "state"])["snapshots"], json!([]));
    // The name is free, and is another volume's from now on.
    let other = cluster.ask(&["volume", "create", "trial", "1MiB", "--flush", "s3"]);
    assert_ne!(other["id"], clone["id"]);
}

#[test]
fn what_is_wrong_is_said_and_makes_nothing() {
    let Some(cluster) = cluster() else { return };
    for (args, code, wanted) in [
        (&["volume", "create", "a/b", "1GiB"][..], 2, "is no name for a volume"),
        (&["volume", "create", "a", "10KiB"], 2, "1 MiB to 16 TiB"),
        (&["volume", "create", "a", "much"], 2, "allowed"),
        (&["volume", "snapshot", "a"], 2, "VOLUME@SNAPSHOT"),
        (&["volume", "snapshot", "a@b"], 66, "there is no volume a"),
        (&["volume", "clone", "a@b", "c"], 66, "there is no volume a"),
        (&["volume", "show", "a"], 66, "there is no volume a"),
        (&["volume", "rm", "a"], 66, "there is no volume a"),
        (&["volume", "rm", "a@b@c"], 2, "names no volume"),
    ] {
        let ran = cluster.volley(args).exits(code);
        assert!(ran.stderr.contains(wanted), "{args:?}: {ran:?}");
    }
    cluster.ask(&["volume", "create", "a", "1MiB"]);
    let ran = cluster.volley(&["volume", "clone", "a@b", "c"]).exits(66);
    assert!(ran.stderr.contains("has no snapshot b"), "{ran:?}");
    assert_eq!(names(&cluster), [json!("a")]);
}

#[test]
fn what_is_left_is_counted_and_nothing_goes_at_once() {
    let Some(cluster) = cluster() else { return };
    cluster.ask(&["volume", "create", "state", "1MiB"]);
    cluster.ask(&["volume", "snapshot", "state@monday"]);
    cluster.ask(&["volume", "create", "gone", "1MiB"]);
    cluster.volley(&["volume", "rm", "gone"]).exits(0);
    let gone = || cluster.ask(&["volume", "gc", "--dry-run"])["condemnedObjects"] == 1;
    until("its head says that it is deleted", gone);
    for _ in 0..2 {
        let done = cluster.ask(&["volume", "gc"]);
        assert_eq!((&done["volumes"], &done["snapshots"], &done["objects"]), (&json!(2), &json!(1), &json!(3)), "{done}");
        assert_eq!((&done["condemnedObjects"], &done["deletedObjects"]), (&json!(1), &json!(0)), "{done}");
        assert!(done["storedBytes"]["default"].as_u64() > Some(0), "{done}");
    }
    let said = cluster.volley(&["volume", "gc"]).exits(0).stdout;
    assert!(said.contains("to be deleted when that is so for a day: 1 object,"), "{said}");
    cluster.ask(&["tenant", "add", "red"]);
    let token = cluster.ask(&["token", "create", "--tenant", "red"]);
    let secret = cluster.path("red-token");
    std::fs::write(&secret, token["secret"].as_str().or(token["token"].as_str()).unwrap()).unwrap();
    let refused = cluster.volley(&["--token-file", secret.to_str().unwrap(), "volume", "gc"]).exits(77);
    assert!(refused.stderr.contains("operator"), "{refused:?}");
}

#[test]
fn a_tenants_volumes_are_its_own() {
    let Some(cluster) = cluster() else { return };
    cluster.ask(&["tenant", "add", "red"]);
    cluster.ask(&["volume", "create", "state", "1MiB"]);
    assert_eq!(cluster.ask(&["--tenant", "red", "volume", "ls"]), json!([]));
    cluster.volley(&["--tenant", "red", "volume", "show", "state"]).exits(66);
    cluster.volley(&["--tenant", "red", "volume", "rm", "state"]).exits(66);
    let own = cluster.ask(&["--tenant", "red", "volume", "create", "state", "2MiB"]);
    assert_eq!(own["sizeBytes"], json!(2 << 20));
    assert_eq!(cluster.ask(&["volume", "show", "state"])["sizeBytes"], json!(1 << 20));
}
