//! Giving a job up after too many failures.

use serde_json::json;

use crate::support::Cluster;

#[test]
fn one_failure_too_many_ends_the_job() {
    let Some(cluster) = Cluster::up_with(&["--slots", "2"]) else { return };
    let more = json!({ "limits": { "maxFailures": 2, "failFast": "now" } });
    let job = cluster.submit(&cluster.spec(json!({ "count": 200 }), json!({ "command": "sleep 0.2; exit 1" }), more));
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["exitCode"]), (&json!("failed"), &json!(1)), "{ended}");
    let (failed, cancelled) = (ended["tasks"]["failed"].as_u64().unwrap(), ended["tasks"]["cancelled"].as_u64().unwrap());
    assert!((3..20).contains(&failed) && failed + cancelled == 200, "{ended}");
    assert!(ended["reason"].as_str().is_some_and(|why| why.contains("fail")), "{ended}");
    let few = json!({ "limits": { "maxFailures": "50%" } });
    let job = cluster.submit(&cluster.spec(json!({ "count": 20 }), json!({ "command": "[ ${index} -ge 5 ]" }), few));
    let ended = cluster.ended(&job);
    assert_eq!((&ended["tasks"]["failed"], &ended["tasks"]["succeeded"]), (&json!(5), &json!(15)), "below the limit every task is run");
}
