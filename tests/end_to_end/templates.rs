//! What a person sees of templates and stock images: the image that `deploy/stock_image` makes, and the step of the job that builds a template.
//!
//! Wants what `microvm` wants.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::microvm::with_image;
use crate::support::Cluster;

/// Makes a stock image as the README says, and gives what the import said.
fn stock_image(cluster: &Cluster, name: &str) -> Value {
    let volley = cluster.command(["--version"]);
    let images = cluster.path("cluster").join("worker/images");
    let mut script = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/stock_image"));
    script.args([name, "--images", images.to_str().unwrap(), "-o", "json"]).env("VOLLEY", volley.get_program());
    let made = script.output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    serde_json::from_slice(&made.stdout).unwrap()
}

#[test]
fn a_stock_image_is_the_same_each_time_and_its_template_is_a_step_of_the_job() {
    let Some((cluster, _)) = with_image() else { return };
    let first = stock_image(&cluster, "busybox");
    assert_eq!(first[0]["digest"], stock_image(&cluster, "busybox")[0]["digest"], "{first}");
    let task = json!({
        "isolation": "microvm", "image": "busybox", "command": "cat /warm; ls / | head -n 1", "resources": { "memory": "64MiB" },
        "timeouts": { "start": "2m" }, "warmUp": [{ "command": ["sh", "-c", "sleep 1; echo warm > /warm"] }],
    });
    let job = cluster.submit(&cluster.spec(json!({ "count": 3 }), task, json!({})));
    let begin = Instant::now();
    // What `volley job` has of machines, as it changes; for how long is left out.
    let mut told = Vec::new();
    loop {
        let shown = cluster.volley(&["job", &job]).exits(0).stdout;
        let line = shown.lines().find_map(|line| line.strip_prefix("machines ")).and_then(|line| line.split(" for ").next());
        let line = line.unwrap_or_default().trim().to_owned();
        if told.last() != Some(&line) {
            told.push(line);
        }
        if cluster.job(&job)["ended"].is_string() {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(150), "{told:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let rows = cluster.results(&job);
    assert!(rows.iter().all(|row| row["stdoutTail"] == "warm\nbin\n"), "{rows:?}");
    assert_eq!(told.iter().filter(|line| line.contains("building template")).count(), 1, "one step, and not one a task: {told:?}");
    assert_eq!(told.last().map(String::as_str), Some(""), "when it is there nothing is said of it: {told:?}");
}
