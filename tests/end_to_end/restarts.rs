//! `volley up` starts the nats-server it brings along again when that ends, and does not take over another cluster's clients.

use rustix::process::Signal;
use serde_json::json;

use crate::support::Cluster;
use crate::support::cluster::{VOLLEY, nats_server, open_dir};
use crate::support::process::{self, until};

fn nats(cluster: &Cluster) -> Vec<u32> {
    cluster.left().into_iter().filter(|(_, args)| args.contains("server.conf")).map(|(pid, _)| pid).collect()
}

#[test]
fn a_killed_nats_server_is_started_again() {
    let Some(mut cluster) = Cluster::up() else { return };
    let job = cluster.submit(&cluster.spec(json!({ "count": 200 }), json!({ "command": "sleep 0.1" }), json!({})));
    cluster.until_tasks(&job, "succeeded", 10);
    let first = nats(&cluster);
    assert_eq!(first.len(), 1, "{:?}", cluster.left());
    process::signal(first[0], Signal::KILL);
    until("another runs", || nats(&cluster).iter().any(|pid| *pid != first[0]));
    let ended = cluster.ended(&job);
    assert_eq!(ended["tasks"]["succeeded"], json!(200), "{ended}");
    assert!(!cluster.has_ended(), "{}", cluster.log());
    assert!(cluster.log().contains("starting it again"), "{}", cluster.log());
}

#[test]
fn a_second_cluster_leaves_the_clients_of_the_first() {
    let Some(first) = Cluster::up() else { return };
    let other = open_dir();
    let dir = other.path().join("other");
    let mut second = std::process::Command::new(VOLLEY);
    second.args(["up", "--listen", "127.0.0.1:0", "--dir"]).arg(&dir);
    second.env("VOLLEY_CONFIG", first.path("cluster.json")).env("VOLLEY_NATS_SERVER", nats_server().unwrap());
    let mut second = second.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    until("the second has a file of its own", || dir.join("cluster.json").exists());
    let (mine, others) = (first.access(), std::fs::read_to_string(dir.join("cluster.json")).unwrap());
    assert!(!others.contains(&mine.0), "{others}");
    first.volley(&["jobs"]).exits(0);
    process::signal(second.id(), Signal::TERM);
    second.wait().unwrap();
}
