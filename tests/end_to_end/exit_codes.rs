//! What `volley` exits with.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::support::Cluster;
use crate::support::cluster::{VOLLEY, nats_server, open_dir};
use crate::support::process::{self, Ran};

#[test]
fn a_run_exits_as_its_job_ended() {
    let Some(cluster) = Cluster::up() else { return };
    let run = |items, command: &str, more| cluster.volley(&["run", &cluster.spec(items, json!({ "command": command }), more)]);
    let good = run(json!({ "count": 20 }), "true", json!({})).exits(0);
    assert!(good.stdout.contains("20 tasks"), "{}", good.stdout);
    let bad = run(json!({ "count": 20 }), "exit $((VOLLEY_TASK_INDEX % 2 * 7))", json!({})).exits(1);
    assert!(bad.stdout.contains("exit_code"), "{}", bad.stdout);
    // No worker has the label, so nothing can be said about the tasks' own work.
    let spec = cluster.spec(
        json!({ "count": 2 }),
        json!({ "command": "true", "timeouts": { "queue": "1s" } }),
        json!({ "placement": { "labels": { "no": "such" } } }),
    );
    let waited = cluster.volley(&["run", &spec]).exits(3);
    assert!(waited.stdout.contains("queue_timeout"), "{}", waited.stdout);
    let spec = cluster.spec(json!({ "count": 4 }), json!({ "command": "sleep 60" }), json!({}));
    let running = cluster.begin(["run", &spec]);
    let found = || cluster.ask(&["jobs", "--state", "running"]).to_string();
    crate::support::process::until("it runs", || found().contains("\"j"));
    let job = cluster.ask(&["jobs", "--state", "running"])["rows"][0]["job"].as_str().unwrap().to_owned();
    cluster.volley(&["cancel", &job, "--now"]).exits(0);
    running.wait().exits(4);
}

#[test]
fn what_cannot_be_done_has_a_code_of_its_own() {
    let Some(cluster) = Cluster::up() else { return };
    let spec = cluster.spec(json!({ "count": 0 }), json!({ "command": "true", "isolaton": "process" }), json!({}));
    let bad = cluster.volley(&["run", &spec]).exits(2);
    assert!(bad.stderr.contains("$.task.isolaton") && bad.stderr.contains("isolation"), "{}", bad.stderr);
    assert!(bad.stderr.contains("$.items.count"), "all problems at once: {}", bad.stderr);
    assert_eq!(cluster.ask(&["jobs"])["rows"], json!([]), "a bad spec creates nothing");
    cluster.volley(&["tenant", "add", "small", "--active-tasks", "3"]).exits(0);
    let of_small = |count: u32| {
        let spec = cluster.spec(json!({ "count": count }), json!({ "command": "sleep 60" }), json!({}));
        cluster.volley(&["--tenant", "small", "submit", &spec])
    };
    let never = of_small(4).exits(2);
    assert!(never.stderr.contains("this job alone brings 4"), "{}", never.stderr);
    of_small(3).exits(0);
    // Waiting helps here.
    of_small(1).exits(75);
    cluster.volley(&["job", "j999999"]).exits(66);
    cluster.volley(&["run", "/no/such/spec.json"]).exits(74);
    cluster.volley(&["--url", "http://127.0.0.1:9", "jobs"]).exits(69);
}

/// `volley up` in a directory, with no cluster of the user's in its way; it ends by itself.
fn up(dir: &Path, args: &[&str], nats_server: &Path) -> Ran {
    let mut command = Command::new(VOLLEY);
    command.args(["up", "--dir"]).arg(dir.join("cluster")).args(args);
    command.env("VOLLEY_CONFIG", dir.join("cluster.json")).env("VOLLEY_NATS_SERVER", nats_server);
    process::start(command).wait()
}

#[test]
fn a_cluster_that_cannot_start_says_why_with_its_code() {
    let Some(nats_server) = nats_server() else { return };
    let dir = open_dir();
    let (dir, free) = (dir.path(), ["--listen", "127.0.0.1:0"]);
    up(dir, &["--slots", "0"], &nats_server).exits(2);
    let missing = up(dir, &free, Path::new("/no/such/nats-server")).exits(69);
    assert!(missing.stderr.contains("/no/such/nats-server"), "{missing:?}");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = up(dir, &["--listen", &listener.local_addr().unwrap().to_string()], &nats_server).exits(69);
    assert!(taken.stderr.contains("can't listen on") && taken.stderr.contains("choose another address or port"), "{taken:?}");
    std::fs::write(dir.join("cluster").join("secrets.json"), "{").unwrap();
    let damaged = up(dir, &free, &nats_server).exits(65);
    assert!(damaged.stderr.contains("secrets.json is damaged"), "{damaged:?}");
    std::fs::remove_dir_all(dir.join("cluster")).unwrap();
    std::fs::write(dir.join("cluster"), "").unwrap();
    let file = up(dir, &free, &nats_server).exits(74);
    assert!(file.stderr.contains("--dir"), "{file:?}");
}

/// Where nobody can be asked, whoever interrupts leaves; the job goes on.
#[test]
fn a_run_that_is_interrupted_leaves_its_job_running() {
    let Some(cluster) = Cluster::up() else { return };
    let spec = cluster.spec(json!({ "count": 2 }), json!({ "command": "sleep 4" }), json!({}));
    let running = cluster.begin(["run", &spec]);
    process::until("the job runs", || cluster.ask(&["jobs", "--state", "running"])["rows"].as_array().is_some_and(|rows| !rows.is_empty()));
    let job = cluster.ask(&["jobs"])["rows"][0]["job"].as_str().unwrap().to_owned();
    process::signal(running.pid(), rustix::process::Signal::INT);
    let left = running.wait().exits(130);
    assert!(left.stderr.contains(&format!("volley wait {job}")), "{}", left.stderr);
    assert_eq!(cluster.ended(&job)["state"], "succeeded");
}
