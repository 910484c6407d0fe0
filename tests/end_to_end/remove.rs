//! `volley rm`: nothing of a job is left in the bucket.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::json;

use crate::support::Cluster;
use crate::support::cluster::write;
use crate::support::process::until;

/// Every object of the embedded store, as its path below the bucket; without checkpoints.
fn objects(cluster: &Cluster) -> BTreeSet<String> {
    fn walk(dir: &Path, root: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, root, found);
            } else if path.extension().is_some_and(|end| end == "o") {
                found.insert(path.strip_prefix(root).unwrap().display().to_string());
            }
        }
    }
    let root = cluster.path("cluster/s3");
    let mut found = BTreeSet::new();
    walk(&root, &root, &mut found);
    found.retain(|path| !path.contains("checkpoints.d"));
    found
}

#[test]
fn a_removed_job_leaves_no_object() {
    let Some(cluster) = Cluster::up() else { return };
    until("the level is raised", || cluster.http("GET", "/v1/cluster", b"").json()["level"].as_u64() >= Some(3));
    let items = write(&cluster.path("items.txt"), "a\nb\nc\n");
    let command = "echo ${item} > $VOLLEY_OUTPUT_DIR/f; head -c 100000 /dev/zero | tr '\\0' x; exit $((VOLLEY_TASK_INDEX == 1))";
    let env = json!({ "LARGE": "x".repeat(70_000) });
    let spec = cluster.spec(json!({ "lines": { "upload": "x" } }), json!({ "command": command, "env": env }), json!({}));
    let before = objects(&cluster);
    let answer = cluster.ask(&["submit", &spec, "--items", &items]);
    let job = answer["job"].as_str().unwrap().to_owned();
    let ended = cluster.ended(&job);
    assert_eq!((&ended["tasks"]["succeeded"], &ended["tasks"]["failed"]), (&json!(2), &json!(1)), "{ended}");
    let own = format!("/{job}.d/");
    let of_own = |path: &String| path.contains(&own);
    let of_job = |path: &str| !before.contains(path) && !path.contains("uploads.d");
    until("everything of the job is there", || {
        let all = objects(&cluster);
        ["jobs.d", "items.d", "specs.d", "manifest-1.json", "stdout.o"]
            .iter()
            .all(|part| all.iter().any(|path| path.contains(part) && of_job(path)))
    });
    let removed = cluster.volley(&["rm", &job]).exits(0);
    assert_eq!(removed.stdout, format!("{job} is removed\n"));
    cluster.volley(&["job", &job]).exits(66);
    assert!(!cluster.volley(&["jobs"]).exits(0).stdout.contains(&job), "it is not listed any more");
    assert!(!objects(&cluster).iter().any(of_own), "nothing of the job's own is left");
    until("nothing of the job is left", || !objects(&cluster).iter().any(|path| of_job(path)));

    let other = cluster.submit(&cluster.spec(json!({ "count": 1 }), json!({ "command": "true" }), json!({})));
    cluster.ended(&other);
    let begun = cluster.volley(&["rm", "--no-wait", &other, "j999999"]).exits(66);
    assert_eq!(begun.stdout, format!("{other} is being removed\n"), "{begun:?}");
    until("it is gone", || cluster.volley(&["job", &other]).code == 66);
}
