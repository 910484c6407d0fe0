//! RocksDB can be deleted: it is built again from the log.

use serde_json::json;

use crate::support::Cluster;

#[test]
fn a_deleted_state_directory_is_built_again() {
    let Some(mut cluster) = Cluster::up() else { return };
    let command = "echo $VOLLEY_TASK_INDEX > $VOLLEY_OUTPUT_DIR/n; exit $((VOLLEY_TASK_INDEX % 3 == 2))";
    let first = cluster.submit(&cluster.spec(json!({ "count": 30 }), json!({ "command": command }), json!({})));
    cluster.ended(&first);
    // Half done when everything is stopped.
    let second = cluster.submit(&cluster.spec(json!({ "count": 20 }), json!({ "command": "sleep 0.3" }), json!({})));
    cluster.until_tasks(&second, "succeeded", 3);
    let before = (cluster.job(&first), cluster.results(&first));
    cluster.stop();
    std::fs::remove_dir_all(cluster.path("cluster/coordinator")).unwrap();
    cluster.start();
    assert_eq!((cluster.job(&first), cluster.results(&first)), before);
    let ended = cluster.ended(&second);
    assert_eq!((&ended["state"], &ended["tasks"]["succeeded"]), (&json!("succeeded"), &json!(20)), "{ended}");
    let got = cluster.volley(&["outputs", "get", &first, "7", "n", "--stdout"]).exits(0);
    assert_eq!(got.stdout, "7\n");
}
