//! Fanning out over a file: JSON lines, CSV, lines; inputs from uploads.

use serde_json::{Value, json};

use crate::support::Cluster;
use crate::support::cluster::write;

fn outputs(cluster: &Cluster, file: &str, text: &str, task: Value) -> Vec<String> {
    let file = write(&cluster.path(file), text);
    let spec = cluster.spec(Value::Null, task, json!({}));
    cluster.volley(&["run", &spec, "--items", &file]).exits(0);
    let jobs = cluster.ask(&["jobs"]);
    let job = jobs["rows"][0]["job"].as_str().unwrap();
    cluster.results(job).iter().map(|row| row["stdoutTail"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn items_come_from_files() {
    let Some(cluster) = Cluster::up() else { return };
    let jsonl = "{\"name\":\"a b\",\"n\":{\"x\":1}}\n\n{\"name\":\"$HOME\",\"n\":{\"x\":2}}\n";
    let task = json!({ "command": ["printf", "%s=%s", "${item.name}", "${item.n.x}"] });
    assert_eq!(outputs(&cluster, "items.jsonl", jsonl, task), ["a b=1", "$HOME=2"]);
    let task = json!({ "command": ["printf", "%s", "${item.city} of ${item.country}"] });
    assert_eq!(
        outputs(&cluster, "items.csv", "city,country\nLyon,France\n\"Köln, Süd\",Germany\n", task),
        ["Lyon of France", "Köln, Süd of Germany"]
    );
    let task = json!({ "command": "cat", "stdin": "${index}: ${item}" });
    assert_eq!(outputs(&cluster, "items.txt", "one\ntwo\nthree", task), ["0: one", "1: two", "2: three"]);
}

#[test]
fn inputs_are_there_and_read_only() {
    let Some(cluster) = Cluster::up() else { return };
    let file = write(&cluster.path("tool.sh"), "#!/bin/sh\necho \"ran $1\"\n");
    let command = "./bin/tool.sh x && ! { echo more >> bin/tool.sh; } 2>/dev/null";
    // Root may write everywhere, but tasks do not run as root.
    let task = json!({ "command": command, "inputs": [{ "from": "upload:tool", "path": "bin/tool.sh", "executable": true }] });
    let spec = cluster.spec(json!({ "count": 2 }), task, json!({}));
    cluster.volley(&["run", &spec, "--upload", &format!("tool={file}")]).exits(0);
    let task = json!({ "command": "true", "inputs": [{ "from": "upload:u0123456789abcdef01234567", "path": "x" }], "retry": { "infraAttempts": 0 } });
    let missing = cluster.volley(&["run", &cluster.spec(json!({ "count": 1 }), task, json!({}))]);
    assert_ne!(missing.code, 0, "{missing:?}");
}
