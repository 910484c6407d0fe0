//! `volley explain`: why a task does not run.

use serde_json::json;

use crate::support::Cluster;
use crate::support::process::until;

#[test]
fn explain_names_what_is_in_the_way() {
    let Some(cluster) = Cluster::up_with(&["--slots", "2"]) else { return };
    let spec = cluster.spec(json!({ "count": 2 }), json!({ "command": "true" }), json!({ "placement": { "labels": { "gpu": "a100" } } }));
    let job = cluster.submit(&spec);
    let why = cluster.ask(&["explain", &job, "0"]);
    assert!(why["summary"].as_str().is_some_and(|text| !text.is_empty()), "{why}");
    let reasons = why["workers"][0]["reasons"].to_string();
    assert!(reasons.contains("gpu") && reasons.contains("a100"), "{why}");
    let next = "next: start a worker that has the label gpu=a100 (`volley worker --help`), or change $.placement.labels and submit again\n";
    for args in [&["explain", &job][..], &["explain", &job, "0"]] {
        let text = cluster.volley(args).exits(0).stdout;
        assert!(text.contains(next), "{text}");
    }
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

#[test]
fn explain_says_why_something_failed() {
    let Some(cluster) = Cluster::up() else { return };
    let retry = json!({ "attempts": 5, "backoff": { "initial": "10ms" }, "rules": [{ "match": { "exitCodes": [7] }, "action": "fail" }] });
    let task = json!({ "command": "exit $((VOLLEY_TASK_INDEX * 7))", "retry": retry });
    let job = cluster.submit(&cluster.spec(json!({ "count": 2 }), task, json!({})));
    cluster.ended(&job);
    let text = cluster.volley(&["explain", &job, "1"]).exits(0).stdout;
    for part in
        ["failed in try 1 on worker local: exit_code", "$.task.retry.rules[0] says that this is not tried again", "next: `volley rerun"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = cluster.volley(&["explain", &job]).exits(0).stdout;
    assert!(
        text.contains("1 of 2 tasks succeeded") && text.contains("1 task ended as exit_code") && text.contains("exit code 1"),
        "{text}"
    );
}

#[test]
fn explain_says_what_a_task_is_at() {
    let Some(cluster) = Cluster::up_with(&["--slots", "1"]) else { return };
    let retry = json!({ "attempts": 2, "backoff": { "initial": "10m", "cap": "10m" } });
    let backing = cluster.submit(&cluster.spec(json!({ "count": 1 }), json!({ "command": "exit 3", "retry": retry }), json!({})));
    cluster.until_tasks(&backing, "backoff", 1);
    let said = |job: &str, task: &str| cluster.volley(&["explain", job, task]).exits(0).stdout;
    let backs_off = said(&backing, "0");
    assert!(
        backs_off.starts_with("the task backs off until 20") && backs_off.contains("failed 1 time, the last time as exit_code"),
        "{backs_off}"
    );
    let running = cluster.submit(&cluster.spec(json!({ "count": 2 }), json!({ "command": "sleep 60" }), json!({})));
    cluster.until_tasks(&running, "running", 1);
    // Said by the next beat.
    until("it is known to run", || said(&running, "0").starts_with("the task runs, on worker local, since 20"));
    assert!(said(&running, "0").contains(", in try 1"), "{}", said(&running, "0"));
    assert!(said(&running, "1").starts_with("the task waits "), "{}", said(&running, "1"));
}

#[test]
fn who_submits_what_no_worker_could_run_is_warned_and_not_refused() {
    let Some(cluster) = Cluster::up() else { return };
    let large = cluster.spec(json!({ "count": 9 }), json!({ "command": "true", "resources": { "cpus": 1000 } }), json!({}));
    let warned = |ran: &crate::support::process::Ran| {
        let lines: Vec<&str> = ran.stderr.lines().filter(|line| line.starts_with("warning: ")).collect();
        assert!(lines.len() == 1 && lines[0].contains("could ever run its tasks: local has") && lines[0].contains("cores"), "{ran:?}");
    };
    let planned = cluster.volley(&["plan", "--server", "--show", "1", &large]).exits(0);
    warned(&planned);
    assert!(
        planned.stdout.contains("task 0\n") && planned.stdout.contains("task 8\n") && !planned.stdout.contains("task 1\n"),
        "{planned:?}"
    );
    let submitted = cluster.volley(&["submit", &large, "--key", "k"]).exits(0);
    warned(&submitted);
    let again = cluster.volley(&["submit", &large, "--key", "k"]).exits(0);
    assert!(!again.stderr.contains("warning") && again.stdout == submitted.stdout, "once is enough: {again:?}");
    let small = cluster.spec(json!({ "count": 9 }), json!({ "command": "true" }), json!({}));
    let planned = cluster.volley(&["plan", "--server", "--show", "4", &small]).exits(0);
    assert!(planned.stderr.is_empty() && planned.stdout.contains("task 3\n") && !planned.stdout.contains("task 4\n"), "{planned:?}");
    cluster.volley(&["run", &small]).exits(0);
}
