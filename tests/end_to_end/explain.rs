//! `volley explain`: why a task does not run.

use serde_json::json;

use crate::support::Cluster;

#[test]
fn explain_names_what_is_in_the_way() {
    let Some(cluster) = Cluster::up_with(&["--slots", "2"]) else { return };
    let spec = cluster.spec(json!({ "count": 2 }), json!({ "command": "true" }), json!({ "placement": { "labels": { "gpu": "a100" } } }));
    let job = cluster.submit(&spec);
    let why = cluster.ask(&["explain", &job, "0"]);
    assert!(why["summary"].as_str().is_some_and(|text| !text.is_empty()), "{why}");
    let reasons = why["workers"][0]["reasons"].to_string();
    assert!(reasons.contains("gpu") && reasons.contains("a100"), "{why}");
    let spec = cluster.spec(json!({ "count": 1 }), json!({ "command": "true", "resources": { "cpus": 1000 } }), json!({}));
    let why = cluster.ask(&["explain", &cluster.submit(&spec), "0"]);
    assert!(why["workers"][0]["reasons"].to_string().contains("core"), "{why}");
    let spec = cluster.spec(json!({ "count": 4 }), json!({ "command": "true" }), json!({}));
    let job = cluster.submit(&spec);
    cluster.volley(&["pause", &job]);
    let paused = cluster.ask(&["explain", &job, "3"]);
    let state = cluster.job(&job);
    assert!(state["state"] != "paused" || paused["summary"].as_str().unwrap().contains("paused"), "{paused}");
}
