//! Tasks in machines of their own, from the command line: an image is imported, a worker offers `microvm`, a job runs there.
//!
//! Wants QEMU, a guest kernel and busybox, which `tests/run` installs; without one of them the test says that it was skipped.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::support::Cluster;
use crate::support::process::until;

/// The files of an image with busybox; or what is missing here.
fn busybox(files: &Path) -> Result<(), String> {
    let program = |name: &str| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
        found.ok_or_else(|| format!("no {name} in PATH"))
    };
    program("qemu-system-x86_64")?;
    let busybox = program("busybox")?;
    for variable in ["VOLLEY_GUEST_KERNEL", "VOLLEY_GUEST_MODULES"] {
        std::env::var_os(variable).map(PathBuf::from).filter(|path| path.exists()).ok_or(format!("no {variable}"))?;
    }
    if !rustix::process::geteuid().is_root() {
        return Err("machines have users of their own only where the worker is root".to_owned());
    }
    for name in ["bin", "etc", "proc", "sys", "dev", "run", "tmp"] {
        std::fs::create_dir_all(files.join(name)).unwrap();
    }
    std::fs::copy(&busybox, files.join("bin/busybox")).unwrap();
    // One that is linked statically has no libraries.
    let listed = Command::new("ldd").arg(&busybox).output().unwrap();
    for library in String::from_utf8_lossy(&listed.stdout).split_whitespace().filter(|word| word.starts_with('/')) {
        let to = files.join(&library[1..]);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(library, to).unwrap();
    }
    for name in ["sh", "cat", "echo", "uname", "hostname"] {
        std::os::unix::fs::symlink("busybox", files.join("bin").join(name)).unwrap();
    }
    Ok(())
}

/// A cluster with one slot for machines, and what was said of the image that was imported for them.
pub fn with_image() -> Option<(Cluster, Value)> {
    with_image_in(&["--isolation", "process,microvm", "--slots", "1", "--template-memory", "1GiB"])
}

/// The same, of a cluster that is started with these arguments.
pub fn with_image_in(args: &[&str]) -> Option<(Cluster, Value)> {
    let files = tempfile::tempdir().unwrap();
    if let Err(why) = busybox(files.path()) {
        eprintln!("skipped: {why}");
        return None;
    }
    let cluster = Cluster::up_with(args)?;
    let (images, from) = (cluster.path("cluster").join("worker/images"), format!("dir:{}", files.path().display()));
    let imported = cluster.ask(&["image", "--images", images.to_str().unwrap(), "import", &from]);
    Some((cluster, imported))
}

#[test]
fn a_job_runs_in_machines_made_from_an_imported_image() {
    let Some((cluster, imported)) = with_image() else { return };
    let images = cluster.path("cluster").join("worker/images");
    let (images, digest) = (images.to_str().unwrap(), imported[0]["digest"].as_str().unwrap().to_owned());
    assert_eq!(cluster.ask(&["image", "--images", images, "ls"]), imported);
    cluster.volley(&["image", "--images", images, "import", "dir:/no/such/place"]).exits(74);
    cluster.volley(&["image", "--images", images, "rm", "sha256:x"]).exits(66);
    let command = "echo \"$VOLLEY_TASK_INDEX in $(hostname)\"; cat /proc/sys/kernel/random/boot_id >&2; \
                   echo \"{\\\"n\\\": $VOLLEY_TASK_INDEX}\" > $VOLLEY_OUTPUT_DIR/result.json; echo kept > $VOLLEY_OUTPUT_DIR/file; \
                   [ $VOLLEY_TASK_INDEX -ne 1 ]";
    let task = json!({
        "isolation": "microvm", "image": digest, "command": command, "resources": { "memory": "64MiB" }, "timeouts": { "start": "2m" },
    });
    let job = cluster.submit(&cluster.spec(json!({ "count": 2 }), task, json!({})));
    assert_eq!(cluster.ended(&job)["state"], "failed");
    let mut rows = cluster.results(&job);
    rows.sort_by_key(|row| row["index"].as_u64());
    assert_eq!((&rows[0]["state"], &rows[1]["class"], &rows[1]["code"]), (&json!("succeeded"), &json!("exit_code"), &json!(1)), "{rows:?}");
    for (index, row) in rows.iter().enumerate() {
        assert_eq!((&row["result"], &row["outputFiles"]), (&json!({ "n": index }), &json!(1)), "{row}");
        assert!(row["stdoutTail"].as_str().unwrap().starts_with(&format!("{index} in {job}-")), "{row}");
    }
    assert_ne!(rows[0]["stderrTail"], rows[1]["stderrTail"], "two machines, two boots");
    let missing = json!({ "isolation": "microvm", "image": "dir:/nothing", "command": "true", "retry": { "infraAttempts": 0 } });
    let job = cluster.submit(&cluster.spec(json!({ "count": 1 }), missing, json!({})));
    cluster.ended(&job);
    assert!(cluster.results(&job)[0]["message"].as_str().unwrap().contains("this worker has no image"), "{:?}", cluster.results(&job));
    what_a_warm_up_does_to_its_machine(&cluster, &digest);
    an_image_that_nobody_has(&cluster);
    a_machine_that_is_too_large(&cluster, &digest);
    cluster.volley(&["image", "--images", images, "rm", &digest]).exits(0);
    assert_eq!(cluster.ask(&["image", "--images", images, "ls"]), json!([]));
}

/// It is its job's own: the tasks begin all the same, or the job is at fault, and nothing of it speaks against the worker, which others need.
fn what_a_warm_up_does_to_its_machine(cluster: &Cluster, image: &str) {
    let job = |warm_up: &str, count: u32| {
        let task = json!({
            "isolation": "microvm", "image": image, "command": "echo hi", "resources": { "memory": "64MiB" }, "timeouts": { "start": "2m" },
            "warmUp": [{ "command": ["sh", "-c", warm_up] }], "retry": { "infraAttempts": 2, "backoff": { "initial": "100ms", "cap": "200ms" } },
        });
        let job = cluster.submit(&cluster.spec(json!({ "count": count }), task, json!({})));
        cluster.ended(&job);
        assert_eq!(cluster.workers()[0]["state"], "ready", "{warm_up}");
        cluster.results(&job)
    };
    let odd = "cd /; busybox rm -rf etc/hosts tmp; busybox mkdir etc/hosts; echo > tmp; busybox mkfifo etc/hostname; echo > volley";
    for row in job(odd, 2) {
        assert_eq!((&row["state"], &row["stdoutTail"]), (&json!("succeeded"), &json!("hi\n")), "{row}");
    }
    for row in job("echo c > /proc/sysrq-trigger; busybox sleep 9", 1) {
        assert_eq!((&row["class"], &row["attempts"]), (&json!("input_missing"), &json!(1)), "{row}");
        assert!(row["message"].as_str().unwrap().contains("ended its machine"), "{row}");
    }
    // Whatever becomes of them: what a full root disk hinders is not the worker's fault.
    job("busybox cat /dev/zero > /fill; exit 0", 6);
}

/// Told when it is submitted, and after five tries the job's own fault.
fn an_image_that_nobody_has(cluster: &Cluster) {
    let task = json!({ "isolation": "microvm", "image": "dir:/nothing", "command": "true" });
    let spec = cluster.spec(json!({ "count": 2 }), task, json!({}));
    let warned = || cluster.ask(&["plan", "--server", &spec])["warnings"].to_string();
    // What images a worker has is recorded once the level of a cluster that has just begun is raised.
    until("it is known that nobody has it", || warned().contains("has no image"));
    let job = cluster.submit(&spec);
    let ended = cluster.ended(&job);
    assert_eq!((&ended["state"], &ended["exitCode"]), (&json!("failed"), &json!(1)), "{ended}");
    assert!(ended["trouble"].as_str().unwrap().contains("this worker has no image \"dir:/nothing\""), "{ended}");
    for row in cluster.results(&job) {
        assert_eq!((&row["class"], &row["attempts"]), (&json!("input_missing"), &json!(5)), "{row}");
    }
    let said = cluster.ask(&["explain", &job, "0"]);
    assert!(said["summary"].as_str().unwrap().ends_with("no other worker that was there had it either"), "{said}");
    assert!(said["next"][0].as_str().unwrap().contains("volley image import"), "{said}");
}

/// Waits, and says for what, with the numbers.
fn a_machine_that_is_too_large(cluster: &Cluster, image: &str) {
    let task = json!({ "isolation": "microvm", "image": image, "command": "true", "resources": { "memory": "2GiB" } });
    let job = cluster.submit(&cluster.spec(json!({ "count": 1 }), task, json!({})));
    let said = cluster.ask(&["explain", &job, "0"]);
    let reasons = said["workers"][0]["reasons"].as_array().unwrap();
    assert!(
        reasons.iter().any(|reason| reason.as_str().unwrap().contains("has room for machines of 1.0 GiB, the task's has 2.1 GiB")),
        "{said}"
    );
    assert!(said["summary"].as_str().unwrap().contains("no worker could ever run this task"), "{said}");
    cluster.volley(&["cancel", &job]).exits(0);
}
