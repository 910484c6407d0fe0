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

#[test]
fn what_a_task_wrote_so_far_is_shown_while_it_runs() {
    let Some(cluster) = Cluster::up() else { return };
    // Writes on and on, so that there is no pause between what was written before and what follows.
    let command = "echo early; echo wrong >&2; i=0; while [ $i -lt 500 ]; do i=$((i+1)); echo $i; sleep 0.01; done; echo end";
    let job = cluster.submit(&cluster.spec(json!({ "count": 1 }), json!({ "command": command }), json!({})));
    cluster.until_tasks(&job, "running", 1);
    std::thread::sleep(Duration::from_secs(1));
    let so_far = cluster.volley(&["logs", &job, "0"]).exits(0);
    assert!(so_far.stdout.starts_with("early\n1\n2\n") && !so_far.stdout.contains("end"), "{so_far:?}");
    assert!(so_far.stdout.ends_with("wrong\n") && so_far.took < Duration::from_secs(2), "stderr comes behind: {so_far:?}");
    let all = cluster.volley(&["logs", &job]).exits(0);
    assert!(all.stderr.contains("1 task is with workers still"), "{all:?}");
    let (one, tagged) = (cluster.begin(["logs", "-f", &job, "0", "--stream", "stdout"]), cluster.begin(["logs", "-f", &job, "-o", "json"]));
    let (one, tagged) = (one.wait().exits(0), tagged.wait().exits(0));
    let whole = format!("early\n{}end\n", (1..=500).map(|n| format!("{n}\n")).collect::<String>());
    assert_eq!(one.stdout, whole, "from the first byte, with no gap and nothing twice");
    let rows = tagged.lines();
    let stdout: String = rows.iter().filter(|row| row["stream"] == "stdout").filter_map(|row| row["text"].as_str()).collect();
    assert!(whole.starts_with(&stdout) && stdout.len() > 1_000, "{stdout:?}");
    assert_eq!(cluster.volley(&["logs", &job, "0"]).exits(0).stdout, format!("{whole}wrong\n"));
}

#[test]
fn the_end_of_much_output_reaches_who_was_too_slow_for_it() {
    let Some(cluster) = Cluster::up() else { return };
    let spec = cluster.spec(json!({ "count": 1 }), json!({ "command": "sleep 1; seq 1000000 2499999" }), json!({}));
    let job = cluster.submit(&spec);
    let mut follower = std::process::Command::new(crate::support::cluster::VOLLEY);
    follower.args(["logs", "-f", &job, "0"]).env("VOLLEY_CONFIG", cluster.path("cluster.json"));
    let mut follower = follower.stdout(std::process::Stdio::piped()).spawn().unwrap();
    cluster.ended(&job);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut follower.stdout.take().unwrap(), &mut said).unwrap();
    assert!(follower.wait().unwrap().success());
    let end = said.get(said.len().saturating_sub(200)..).unwrap_or_default();
    assert!(said.ends_with("2499998\n2499999\n"), "ends with {end:?}");
}
