//! `volley logs -f`: what a task writes, while it writes it.

use std::time::Duration;

use serde_json::json;

use crate::support::Cluster;

#[test]
fn output_is_seen_before_the_task_ends() {
    let Some(cluster) = Cluster::up() else { return };
    // Long enough that a client is there before the first line; the arrows are written in halves.
    let command = "sleep 2; for i in 1 2 3; do printf 'a\\342\\206'; sleep 0.3; printf '\\222b\\n'; sleep 0.3; done; sleep 5; echo end";
    let job = cluster.submit(&cluster.spec(json!({ "count": 1 }), json!({ "command": command }), json!({})));
    cluster.until_tasks(&job, "running", 1);
    let (one, all) = (cluster.begin(["logs", "-f", &job, "0"]), cluster.begin(["logs", "-f", &job, "-o", "json"]));
    let (one, all) = (one.wait().exits(0), all.wait().exits(0));
    assert_eq!(one.stdout, "a→b\na→b\na→b\nend\n", "{one:?}");
    let texts: Vec<String> = all.lines().iter().map(|line| line["text"].as_str().unwrap().to_owned()).collect();
    assert!(texts.len() > 3 && texts.concat().starts_with("a→b\na→b\na→b\n"), "pieces come as they are written: {texts:?}");
    assert!(!texts.concat().contains('\u{fffd}'), "{texts:?}");
    assert!(one.took > Duration::from_secs(3));
}
