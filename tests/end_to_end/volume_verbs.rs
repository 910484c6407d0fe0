//! What people do with volumes beside tasks, on a cluster as it runs: every byte is compared, and what is wrong makes nothing.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::support::Cluster;
use crate::support::process::until;
use crate::task_volumes::{cluster, submit, succeeds};

/// Files below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(files(&entry.path())),
            _ => found.push(entry.path()),
        }
    }
    found
}

/// Takes every stored pack of a volume away; how many that were.
fn damage(cluster: &Cluster, volume: &str) -> usize {
    let id = cluster.ask(&["volume", "show", volume])["id"].as_str().unwrap().to_owned();
    // The embedded server has a directory for each part of a key, with an ending of its own.
    let of_packs = |path: &Path| path.parent().and_then(Path::file_name).is_some_and(|name| name.to_string_lossy().starts_with("p."));
    let all = files(&cluster.path("cluster"));
    let packs: Vec<_> = all.iter().filter(|path| path.to_string_lossy().contains(&id) && of_packs(path)).collect();
    packs.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    packs.len()
}

fn generation(cluster: &Cluster, volume: &str) -> u64 {
    cluster.ask(&["volume", "show", volume])["generation"].as_u64().unwrap()
}

#[test]
fn a_volume_is_verified_and_damage_is_told() {
    let Some(cluster) = cluster(&[]) else { return };
    cluster.ask(&["volume", "create", "state", "64MiB"]);
    let empty = cluster.ask(&["volume", "verify", "state", "--deep"]);
    assert_eq!((&empty["blocks"], &empty["damage"]), (&json!(0), &json!(null)), "{empty}");
    let job = submit(&cluster, 1, json!([{ "volume": "state", "path": "s", "access": "rw" }]), "head -c 9000000 /dev/urandom > s/noise");
    succeeds(&cluster, &job);
    until("it is promoted", || generation(&cluster, "state") == 1);
    cluster.ask(&["volume", "snapshot", "state@monday"]);
    for name in ["state", "state@monday"] {
        let map = cluster.ask(&["volume", "verify", name]);
        let deep = cluster.ask(&["volume", "verify", name, "--deep"]);
        assert!(map["blocks"].as_u64() > Some(2_000) && map["bytes"] == 0 && map["deep"] == false, "{map}");
        assert!(deep["bytes"].as_u64() > Some(9_000_000) && deep["blocks"] == map["blocks"], "{deep}");
    }
    let said = cluster.volley(&["volume", "verify", "state"]).exits(0).stdout;
    assert!(said.contains("the map is undamaged"), "{said}");
    for (args, code, wanted) in [
        (&["volume", "verify", "other"][..], 66, "there is no volume other"),
        (&["volume", "verify", "state@tuesday"], 66, "has no snapshot tuesday"),
        (&["volume", "verify", "a@b@c"], 2, "names no volume"),
    ] {
        let ran = cluster.volley(args).exits(code);
        assert!(ran.stderr.contains(wanted), "{args:?}: {ran:?}");
    }
    assert!(damage(&cluster, "state") > 0);
    let told = cluster.volley(&["volume", "verify", "state", "--deep"]).exits(5);
    assert!(told.stdout.contains("DAMAGED") && told.stdout.contains("/p/") && told.stdout.contains("next: "), "{told:?}");
    let told = cluster.volley(&["volume", "verify", "state@monday", "--deep", "-o", "json"]).exits(5).json();
    assert!(told["damage"]["object"].as_str().is_some_and(|object| object.contains("/p/")), "{told}");
}

#[test]
fn a_volume_grows_and_the_next_task_sees_it() {
    let Some(mut cluster) = cluster(&[]) else { return };
    let rw = json!([{ "volume": "state", "path": "s", "access": "rw", "size": "32MiB" }]);
    let job = submit(&cluster, 1, rw.clone(), "echo kept > s/file");
    succeeds(&cluster, &job);
    until("it is promoted", || generation(&cluster, "state") == 1);
    let grown = cluster.ask(&["volume", "resize", "state", "128MiB"]);
    assert_eq!(
        (&grown["sizeBytes"], &grown["generation"], &grown["growingToBytes"]),
        (&json!(128 << 20), &json!(2), &json!(null)),
        "{grown}"
    );
    let same = cluster.ask(&["volume", "resize", "state", "128MiB"]);
    assert_eq!(same["generation"], 2);
    // From the log, after a restart.
    cluster.stop();
    cluster.start();
    crate::task_volumes::ready(&cluster);
    let job = submit(&cluster, 1, rw, "cat s/file; head -c 64000000 /dev/zero | tr '\\0' x > s/large; wc -c < s/large");
    assert_eq!(succeeds(&cluster, &job), ["kept\n64000000\n"]);
    until("it is promoted", || generation(&cluster, "state") == 3);
    assert_eq!(cluster.ask(&["volume", "show", "state"])["sizeBytes"], 128 << 20);
    for (args, code, wanted) in [
        (&["volume", "resize", "state", "64MiB"][..], 65, "can't shrink"),
        (&["volume", "resize", "state", "99TiB"], 2, "1 MiB to 16 TiB"),
        (&["volume", "resize", "other", "1GiB"], 66, "there is no volume other"),
    ] {
        let ran = cluster.volley(args).exits(code);
        assert!(ran.stderr.contains(wanted), "{args:?}: {ran:?}");
    }
    let job = submit(&cluster, 1, json!([{ "volume": "state", "path": "s", "access": "rw" }]), "sleep 600");
    cluster.until_tasks(&job, "running", 1);
    let ran = cluster.volley(&["volume", "resize", "state", "256MiB"]).exits(65);
    assert!(ran.stderr.contains("is in use: task 0"), "{ran:?}");
    cluster.volley(&["cancel", &job]).exits(0);
}

#[test]
fn a_tenants_volumes_keep_to_its_limits() {
    let Some(cluster) = cluster(&[]) else { return };
    let tenant = cluster.ask(&["volume", "create", "state", "1GiB"]);
    assert_eq!(tenant["sizeBytes"], 1_u64 << 30);
    until("limits are known", || cluster.volley(&["tenant", "add", "default", "--volume-bytes", "2GiB"]).code == 0);
    let refused = |args: &[&str], wanted: &str| {
        let ran = cluster.volley(args);
        assert!(ran.code != 0 && ran.stderr.contains(wanted), "{args:?}: {ran:?}");
    };
    refused(&["volume", "create", "other", "2GiB"], "may have 2147483648 bytes of volumes and has 1073741824");
    refused(&["volume", "resize", "state", "3GiB"], "bytes of volumes");
    let volumes = json!([{ "volume": "n-${index}", "path": "s", "access": "rw", "size": "600MiB" }]);
    let spec = cluster.spec(json!({ "count": 2 }), json!({ "volumes": volumes, "command": "true" }), json!({}));
    refused(&["submit", &spec], "bytes of volumes");
    let left = cluster.ask(&["volume", "ls"]);
    assert_eq!(left.as_array().unwrap().len(), 1, "nothing was made: {left}");
    cluster.ask(&["volume", "create", "other", "1GiB"]);

    // What is stored counts as a collection has measured it.
    cluster.volley(&["tenant", "add", "default", "--volume-bytes", "none", "--stored-bytes", "1MiB"]).exits(0);
    let rw = json!([{ "volume": "state", "path": "s", "access": "rw" }]);
    succeeds(&cluster, &submit(&cluster, 1, rw.clone(), "head -c 9000000 /dev/urandom > s/noise"));
    until("it is promoted", || generation(&cluster, "state") == 1);
    cluster.volley(&["volume", "gc"]).exits(0);
    let stored = || {
        let all = cluster.ask(&["tenant", "ls"]);
        let of = all.as_array().unwrap().iter().find(|tenant| tenant["tenant"] == "default").unwrap().clone();
        of["storedBytes"].as_u64().unwrap_or_default()
    };
    until("it is measured", || stored() > 9_000_000);
    refused(&["volume", "create", "third", "1MiB"], "bytes stored in volumes");
    // What is there may be written all the same.
    succeeds(&cluster, &submit(&cluster, 1, rw, "rm s/noise"));
}
