//! A host that can't make machines offers the rest, and says once and everywhere why.

use std::process::Command;

use serde_json::json;

use crate::support::Cluster;
use crate::support::cluster::{VOLLEY, nats_server, open_dir};
use crate::support::process::{start, until};

/// What no host has.
const MISSING: [&str; 4] = ["--qemu", "/nowhere/qemu", "--guest-kernel", "/nowhere/vmlinuz"];

#[test]
fn a_worker_without_a_vmm_offers_the_rest_and_tells_why() {
    let args: Vec<&str> = ["--isolation", "process,microvm"].into_iter().chain(MISSING).collect();
    let Some(cluster) = Cluster::up_with(&args) else { return };
    let log = cluster.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("isolation \"microvm\" is not offered")).collect();
    assert!(lines.len() == 1 && lines[0].contains("/nowhere/"), "{log}");
    assert!(log.find("is not offered") < log.find("Volley is up"), "{log}");

    // Until the level of a cluster that has just begun is raised, it is not recorded.
    let lacks = || cluster.workers().first().and_then(|worker| Some(worker["lacks"]["microvm"].as_str()?.to_owned()));
    until("the worker says what it lacks", || lacks().is_some());
    let why = lacks().unwrap();
    assert!(why.contains("/nowhere/"), "{why}");
    let shown = cluster.volley(&["workers"]).exits(0).stdout;
    assert!(shown.contains(&format!("local can't offer microvm: {why}")), "{shown}");
    let shown = cluster.volley(&["cluster"]).exits(0).stdout;
    assert!(shown.contains(&format!("microvm on local: {why}")), "{shown}");

    // A job that wants machines waits, as one may come that has them, and is told so with the same words; one that doesn't runs.
    let spec = cluster.spec(json!({ "count": 1 }), json!({ "isolation": "microvm", "image": "x", "command": "true" }), json!({}));
    let waits = cluster.volley(&["submit", &spec]).exits(0);
    assert!(waits.stderr.contains(&format!("local can't offer isolation \"microvm\": {why}")), "{}", waits.stderr);
    let explained = cluster.volley(&["explain", waits.stdout.trim(), "0"]).exits(0).stdout;
    assert!(explained.contains(&why), "{explained}");
    let job = cluster.submit(&cluster.spec(json!({ "count": 1 }), json!({ "command": "true" }), json!({})));
    assert_eq!(cluster.ended(&job)["state"], "succeeded");
}

#[test]
fn what_was_asked_for_alone_or_by_name_ends_the_process_before_it_says_that_it_is_up() {
    let Some(nats) = nats_server() else { return };
    for args in [&["--isolation", "microvm"][..], &["--isolation", "process,microvm", "--vmm", "qemu"]] {
        let dir = open_dir();
        let mut up = Command::new(VOLLEY);
        up.args(["up", "--listen", "127.0.0.1:0", "--dir"]).arg(dir.path().join("cluster")).args(args).args(MISSING);
        up.env("VOLLEY_CONFIG", dir.path().join("cluster.json")).env("VOLLEY_NATS_SERVER", &nats);
        let ended = start(up).wait();
        assert!(ended.stderr.contains("/nowhere/") && !ended.stderr.contains("Volley is up"), "{args:?}: {}", ended.stderr);
        ended.exits(78);
    }
}
