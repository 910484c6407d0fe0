//! The same submit twice is one job.

use serde_json::json;

use crate::support::Cluster;

#[test]
fn a_key_names_one_submit() {
    let Some(cluster) = Cluster::up() else { return };
    let spec = cluster.spec(json!({ "count": 3 }), json!({ "command": "true" }), json!({}));
    let first = cluster.ask(&["submit", &spec, "--key", "nightly-7"]);
    let second = cluster.ask(&["submit", &spec, "--key", "nightly-7"]);
    assert_eq!((&first["existed"], &second["existed"]), (&json!(false), &json!(true)));
    assert_eq!(first["job"], second["job"]);
    let other = cluster.spec(json!({ "count": 4 }), json!({ "command": "true" }), json!({}));
    let refused = cluster.volley(&["submit", &other, "--key", "nightly-7"]).exits(65);
    assert!(refused.stderr.contains("nightly-7") || refused.stderr.contains("key"), "{}", refused.stderr);
    let fresh = cluster.ask(&["submit", &spec]);
    assert_ne!(fresh["job"], first["job"]);
}
