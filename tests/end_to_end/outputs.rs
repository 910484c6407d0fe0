//! Results as they finish, output files, logs.

use serde_json::json;

use crate::support::Cluster;

#[test]
fn results_outputs_and_logs_are_there() {
    let Some(cluster) = Cluster::up() else { return };
    let command = "echo \"said $VOLLEY_TASK_INDEX\"; echo oops >&2; mkdir -p $VOLLEY_OUTPUT_DIR/sub; \
                   echo \"{\\\"n\\\": $VOLLEY_TASK_INDEX}\" > $VOLLEY_OUTPUT_DIR/result.json; \
                   head -c 100000 /dev/zero > $VOLLEY_OUTPUT_DIR/sub/zeros; echo kept > declared.txt";
    let spec = cluster.spec(json!({ "count": 6 }), json!({ "command": command, "outputs": ["declared.txt"] }), json!({}));
    let job = cluster.submit(&spec);
    let mut followed = cluster.volley(&["results", &job, "--follow", "-o", "json"]).exits(0).lines();
    followed.sort_by_key(|row| row["index"].as_u64());
    assert_eq!(followed.len(), 6);
    assert_eq!(followed, cluster.results(&job), "following and reading afterwards give the same rows");
    for (index, row) in followed.iter().enumerate() {
        assert_eq!((&row["state"], &row["result"]), (&json!("succeeded"), &json!({ "n": index })), "{row}");
        assert_eq!((&row["stdoutTail"], &row["stderrTail"]), (&json!(format!("said {index}\n")), &json!("oops\n")), "{row}");
    }
    let listed = cluster.ask(&["outputs", "ls", &job, "3"]);
    let mut names: Vec<&str> = listed.as_array().unwrap().iter().map(|file| file["path"].as_str().unwrap()).collect();
    names.sort_unstable();
    // A small result.json rides in the result itself.
    assert_eq!(names, ["declared.txt", "sub/zeros"]);
    let dir = cluster.path("fetched");
    cluster.volley(&["outputs", "get", &job, "--dir", dir.to_str().unwrap()]).exits(0);
    assert_eq!(std::fs::read(dir.join("5/sub/zeros")).unwrap(), vec![0; 100_000]);
    assert_eq!(std::fs::read_to_string(dir.join("0/declared.txt")).unwrap(), "kept\n");
    let log = cluster.volley(&["logs", &job, "4", "--stream", "stdout"]).exits(0);
    assert_eq!(log.stdout, "said 4\n");
}

#[test]
fn a_large_file_and_a_long_log_come_back_whole() {
    let Some(cluster) = Cluster::up() else { return };
    let command = "head -c 20000000 /dev/urandom > $VOLLEY_OUTPUT_DIR/big; sha256sum < $VOLLEY_OUTPUT_DIR/big; \
                   i=0; while [ $i -lt 20000 ]; do echo \"line $i\"; i=$((i+1)); done >&2";
    let job = cluster.submit(&cluster.spec(json!({ "count": 1 }), json!({ "command": command }), json!({})));
    assert_eq!(cluster.ended(&job)["state"], "succeeded");
    let sum = cluster.results(&job)[0]["stdoutTail"].as_str().unwrap()[..64].to_owned();
    let listed = cluster.ask(&["outputs", "ls", &job, "0"]);
    assert_eq!((&listed[0]["bytes"], &listed[0]["sha256"]), (&json!(20_000_000), &json!(sum)));
    // `get` checks the sum itself.
    cluster.volley(&["outputs", "get", &job, "0", "big", "--dir", cluster.path("got").to_str().unwrap()]).exits(0);
    let log = cluster.volley(&["logs", &job, "0", "--stream", "stderr"]).exits(0);
    assert_eq!(log.stdout.lines().count() + log.stderr.lines().count(), 20_000);
}

#[test]
fn successes_with_something_to_be_said_are_found() {
    let Some(cluster) = Cluster::up() else { return };
    // Task 2 leaves a process behind that its end has to kill.
    let command = "[ $VOLLEY_TASK_INDEX -ne 2 ] || { sleep 600 & }; true";
    let ran = cluster.volley(&["run", &cluster.spec(json!({ "count": 4 }), json!({ "command": command }), json!({}))]).exits(0);
    let job = ran.stdout.split_whitespace().next().unwrap().to_owned();
    let hint = format!("with remarks  1 (`volley results {job} --remarks`)");
    assert!(ran.stdout.contains(&hint), "{ran:?}");
    assert!(cluster.volley(&["job", &job]).exits(0).stdout.contains(&hint));
    let rows = cluster.volley(&["results", &job, "--remarks", "-o", "json"]).exits(0).lines();
    assert_eq!(rows.len(), 1, "{rows:?}");
    assert!(
        rows[0]["index"] == 2 && rows[0]["message"].as_str().unwrap().contains("1 process was still running at its end and was killed"),
        "{rows:?}"
    );
}
