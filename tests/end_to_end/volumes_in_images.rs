//! Volumes in containers and in machines of their own: the same as in processes, and what is different there.

use serde_json::{Value, json};

use crate::microvm::with_image_in;
use crate::support::Cluster;
use crate::task_volumes::{ready, submit, submit_as, succeeds};

/// A cluster with this tier, and what its image is called.
fn cluster(tier: &str) -> Option<(Cluster, String)> {
    let tiers = format!("process,{tier}");
    let (cluster, imported) = with_image_in(&["--isolation", &tiers, "--slots", "1", "--template-memory", "1GiB"])?;
    ready(&cluster);
    Some((cluster, imported[0]["digest"].as_str().unwrap().to_owned()))
}

fn task(tier: &str, image: &str, volumes: Value, command: &str) -> Value {
    json!({
        "isolation": tier, "image": image, "command": command, "volumes": volumes, "resources": { "memory": "64MiB" },
        "timeouts": { "start": "3m" }, "retry": { "attempts": 2, "infraAttempts": 1, "backoff": { "initial": "100ms" } },
    })
}

fn state(path: &str, size: &str) -> Value {
    json!([{ "volume": "state", "path": path, "access": "rw", "size": size }])
}

/// What every tier with an image does.
fn as_in_processes(cluster: &Cluster, tier: &str, image: &str) {
    let run = |volumes: Value, command: &str| succeeds(cluster, &submit_as(cluster, 1, task(tier, image, volumes, command)));
    run(state("/data", "32MiB"), "echo one > /data/lines; echo out > $VOLLEY_OUTPUT_DIR/file");
    // Appended twice, kept once; somewhere in the task's own directory; with a process that is left and has a file open.
    let again = "(exec 9>>data/held; busybox sleep 600 >&9 2>/dev/null </dev/null & ); echo two >> data/lines; [ $VOLLEY_ATTEMPT -gt 1 ]";
    run(state("/volley/work/data", "32MiB"), again);
    assert_eq!(run(state("/a/b/c", "32MiB"), "cat /a/b/c/lines"), ["one\ntwo\n"]);
    // Grown, and written by whoever is root there.
    let grown = "busybox df -m /data | busybox tail -1 | busybox awk '{ print ($2 > 80) }'; busybox dd if=/dev/zero of=/data/large bs=1M count=20 2>/dev/null";
    assert_eq!(run(state("/data", "96MiB"), grown), ["1\n"]);
    let read = json!([{ "volume": "state", "path": "/s" }, { "volume": "state", "path": "/c", "access": "clone", "keep": { "name": format!("kept-{tier}-${{index}}") } }]);
    let command = "cat /s/lines; echo x 2>/dev/null > /s/lines || echo refused; echo three >> /c/lines; busybox wc -c < /c/large";
    assert_eq!(run(read, command), ["one\ntwo\nrefused\n20971520\n"]);
    let kept = json!([{ "volume": format!("kept-{tier}-0"), "path": "/k" }]);
    assert_eq!(run(kept, "cat /k/lines"), ["one\ntwo\nthree\n"]);
}

#[test]
fn a_container_has_volumes_and_processes_have_what_it_wrote() {
    let Some((cluster, image)) = cluster("container") else { return };
    // What a process wrote is there, and its owner's: root of both.
    succeeds(&cluster, &submit(&cluster, 1, state("s", "32MiB"), "mkdir s/dir; echo p > s/dir/file"));
    let command = "cat /data/dir/file; echo c >> /data/dir/file; rm -r /data/dir 2>/dev/null || busybox rm -r /data/dir";
    let seen = succeeds(&cluster, &submit_as(&cluster, 1, task("container", &image, state("/data", "32MiB"), command)));
    assert_eq!(seen, ["p\n"]);
    as_in_processes(&cluster, "container", &image);
    assert_eq!(
        succeeds(&cluster, &submit(&cluster, 1, state("s", "32MiB"), "cat s/lines; rm s/large; ls s")),
        ["one\ntwo\nheld\nlines\nlost+found\n"]
    );
}

#[test]
fn a_machine_has_volumes_and_no_host_mounts_what_it_wrote() {
    let Some((cluster, image)) = cluster("microvm") else { return };
    as_in_processes(&cluster, "microvm", &image);
    // A task that is root in its machine mounts it a second time, hides it and leaves it so: nothing is lost.
    let twice = "busybox mkdir /m; busybox mount --bind /data /m; echo twice >> /m/lines; busybox mount -t tmpfs none /data";
    succeeds(&cluster, &submit_as(&cluster, 1, task("microvm", &image, state("/data", "96MiB"), twice)));
    let away = "echo away >> /data/lines; busybox umount /data";
    succeeds(&cluster, &submit_as(&cluster, 1, task("microvm", &image, state("/data", "96MiB"), away)));
    // What a guest could have made is nothing for a host's kernel.
    let job = submit_as(&cluster, 1, json!({ "volumes": state("s", "96MiB"), "command": "cat s/lines", "retry": { "attempts": 1 } }));
    cluster.ended(&job);
    let row = &cluster.results(&job)[0];
    assert_eq!(row["class"], "policy_denied", "{row}");
    // A machine that is kept has its volumes no more, and nothing of what was written there.
    let mut failing = task("microvm", &image, state("/data", "96MiB"), "echo lost >> /data/lines; exit 3");
    failing["keepFailed"] = json!("10m");
    failing["retry"] = json!({ "attempts": 1 });
    let job = submit_as(&cluster, 1, failing);
    cluster.ended(&job);
    let message = cluster.results(&job)[0]["message"].to_string();
    assert!(message.contains("its volumes were let go before") && message.contains("its machine was kept"), "{message}");
    let seen = cluster.volley(&["exec", &job, "0", "--", "busybox", "ls", "/data"]).exits(0).stdout;
    assert!(!seen.contains("lines"), "{seen}");
    cluster.volley(&["exec", &job, "0", "--end"]);
    let seen = succeeds(&cluster, &submit_as(&cluster, 1, task("microvm", &image, state("/data", "96MiB"), "cat /data/lines")));
    assert_eq!(seen, ["one\ntwo\ntwice\naway\n"]);
}
