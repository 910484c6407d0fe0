//! `volley up` starts the nats-server it brings along again when that ends.

use rustix::process::Signal;
use serde_json::json;

use crate::support::Cluster;
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
