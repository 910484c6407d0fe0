//! Volumes in tasks: what one job writes the next one reads, and nothing of a try that failed is ever seen.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::parts::{Parts, TOKEN, ask, free_port, nats, s3};
use crate::support::Cluster;
use crate::support::cluster::{nats_server, open_dir, write};
use crate::support::http::request;
use crate::support::process::{signal, until};

/// A cluster whose tasks can have volumes; none where that takes what this host does not have.
pub fn cluster(args: &[&str]) -> Option<Cluster> {
    if !rustix::process::geteuid().is_root() || !std::path::Path::new("/dev/fuse").exists() {
        eprintln!("skipped: volumes of processes take root and /dev/fuse");
        return None;
    }
    let cluster = Cluster::up_with(args)?;
    ready(&cluster);
    Some(cluster)
}

/// Waits until it is recorded that the worker has volumes.
pub fn ready(cluster: &Cluster) {
    let explained = || cluster.http("GET", "/v1/cluster", b"").json()["level"].as_u64() >= Some(7);
    until("the level is raised", explained);
    until("the worker is known to have volumes", || cluster.workers().iter().any(|worker| worker["volumes"] == "yes"));
}

/// A job of `count` tasks with these volumes, whose command is run by a shell; its id.
pub fn submit(cluster: &Cluster, count: u32, volumes: Value, command: &str) -> String {
    submit_as(cluster, count, json!({ "volumes": volumes, "command": command }))
}

/// The same with all of `task`.
pub fn submit_as(cluster: &Cluster, count: u32, task: Value) -> String {
    cluster.submit(&cluster.spec(json!({ "count": count }), task, json!({ "limits": { "concurrency": 4 } })))
}

/// Waits for a job in which everything succeeds; what its tasks wrote.
#[track_caller]
pub fn succeeds(cluster: &Cluster, job: &str) -> Vec<String> {
    let ended = cluster.ended(job);
    assert_eq!(ended["state"], "succeeded", "{:#?}", cluster.results(job));
    cluster.results(job).iter().map(|row| row["stdoutTail"].as_str().unwrap_or_default().to_owned()).collect()
}

fn state(path: &str) -> Value {
    json!([{ "volume": "state", "path": path, "access": "rw", "size": "64MiB" }])
}

#[test]
fn what_one_job_writes_the_next_one_reads() {
    let Some(mut cluster) = cluster(&[]) else { return };
    let job = submit(&cluster, 1, state("data"), "echo one > data/lines; mkdir data/sub; echo deep > data/sub/file; ls -la data >&2");
    succeeds(&cluster, &job);
    until("what was accepted is promoted", || cluster.ask(&["volume", "show", "state"])["generation"] == 1);
    // Under another path, in another slot as it may be, and after a restart of everything.
    cluster.stop();
    cluster.start();
    ready(&cluster);
    let job = submit(&cluster, 1, state("here/there"), "cat here/there/lines here/there/sub/file; echo two >> here/there/lines");
    assert_eq!(succeeds(&cluster, &job), ["one\ndeep\n"]);
    let job = submit(&cluster, 3, json!([{ "volume": "state", "path": "s" }]), "cat s/lines; ! echo x 2>/dev/null > s/lines");
    assert_eq!(succeeds(&cluster, &job), ["one\ntwo\n", "one\ntwo\n", "one\ntwo\n"], "read-only is read-only");
    let slots = cluster.path("cluster/worker/slots");
    assert!(std::fs::read_to_string("/proc/self/mountinfo").unwrap().lines().all(|line| !line.contains(slots.to_str().unwrap())));
}

#[test]
fn a_try_that_failed_leaves_no_trace_in_one_volume_or_two() {
    let Some(cluster) = cluster(&[]) else { return };
    let two = json!([
        { "volume": "a", "path": "a", "access": "rw", "size": "32MiB" }, { "volume": "b", "path": "b", "access": "rw", "size": "32MiB", "flush": "s3" },
    ]);
    for (volumes, dirs, count) in [(state("a"), &["a"][..], 1), (two.clone(), &["a", "b"], 2)] {
        let append: Vec<String> = dirs.iter().map(|dir| format!("echo $VOLLEY_JOB >> {dir}/lines")).collect();
        let retry = json!({ "attempts": 3, "backoff": { "initial": "100ms" } });
        let command = format!("{}; sync; [ $VOLLEY_ATTEMPT -gt 2 ]", append.join("; "));
        let job = submit_as(&cluster, 1, json!({ "volumes": volumes.clone(), "command": command, "retry": retry }));
        succeeds(&cluster, &job);
        assert_eq!(cluster.results(&job)[0]["attempts"], 3);
        let read: Vec<String> = dirs.iter().map(|dir| format!("cat {dir}/lines")).collect();
        let seen = succeeds(&cluster, &submit(&cluster, 1, volumes, &read.join("; ")));
        assert_eq!(seen, [format!("{job}\n").repeat(count)]);
    }
    // What everything of a job that fails wrote is gone.
    let job = submit_as(&cluster, 1, json!({ "volumes": two.clone(), "command": "rm a/lines; exit 1", "retry": { "attempts": 1 } }));
    assert_eq!(cluster.ended(&job)["state"], "failed");
    assert_eq!(succeeds(&cluster, &submit(&cluster, 1, two, "wc -l < a/lines"))[0].trim(), "1");
}

#[test]
fn the_second_writer_waits_and_is_told_for_whom() {
    let Some(cluster) = cluster(&[]) else { return };
    let go = cluster.path("go");
    let wait = format!("until [ -e {} ]; do sleep 0.1; done; echo first >> s/lines", go.display());
    let first = submit(&cluster, 1, state("s"), &wait);
    cluster.until_tasks(&first, "running", 1);
    let second = submit(&cluster, 1, state("s"), "echo second >> s/lines; cat s/lines");
    let said = cluster.ask(&["explain", &second, "0"])["summary"].as_str().unwrap().to_owned();
    assert!(said.contains(&format!("it writes volume state, and task 0 of job {first}, in try 1, writes it on worker local")), "{said}");
    let listed = cluster.volley(&["volume", "ls"]).exits(0).stdout;
    assert!(listed.contains(&first), "{listed}");
    cluster.volley(&["volume", "rm", "state"]).exits(65);
    std::fs::write(go, "").unwrap();
    assert_eq!(succeeds(&cluster, &second), ["first\nsecond\n"]);
}

#[test]
fn each_task_has_a_clone_of_its_own_and_two_are_kept() {
    let Some(cluster) = cluster(&["--slots", "4"]) else { return };
    succeeds(&cluster, &submit(&cluster, 1, state("s"), "echo base > s/lines"));
    let clones = |keep: Value| {
        json!([
            { "volume": "state", "path": "mine", "access": "clone", "keep": keep }, { "volume": "state", "path": "base" },
        ])
    };
    let append = "echo $VOLLEY_TASK_INDEX >> mine/lines; cat mine/lines base/lines";
    let seen = succeeds(&cluster, &submit(&cluster, 20, clones(Value::Null), append));
    assert_eq!(seen, (0..20).map(|index| format!("base\n{index}\nbase\n")).collect::<Vec<_>>());
    let keep = json!({ "name": "kept-${index}" });
    succeeds(&cluster, &submit(&cluster, 2, clones(keep.clone()), append));
    let names: Vec<Value> = cluster.ask(&["volume", "ls"]).as_array().unwrap().iter().map(|volume| volume["name"].clone()).collect();
    assert_eq!(names, ["kept-0", "kept-1", "state"]);
    let read = json!([{ "volume": "kept-0", "path": "a" }, { "volume": "kept-1", "path": "b", "access": "clone" }, { "volume": "state", "path": "c" }]);
    assert_eq!(succeeds(&cluster, &submit(&cluster, 1, read, "cat a/lines b/lines c/lines")), ["base\n0\nbase\n1\nbase\n"]);
    // Those names are taken.
    let job = submit_as(&cluster, 1, json!({ "volumes": clones(keep), "command": "true", "retry": { "attempts": 1 } }));
    cluster.ended(&job);
    let row = &cluster.results(&job)[0];
    assert_eq!(row["class"], "policy_denied", "{row}");
    assert!(row["message"].as_str().unwrap().contains("another volume's name"), "{row}");
    // With `always` also what a try that failed left.
    let always = clones(json!({ "name": "try-${index}-${attempt}", "when": "always" }));
    let retry = json!({ "attempts": 2, "backoff": { "initial": "100ms" } });
    let command = "echo try $VOLLEY_ATTEMPT >> mine/lines; [ $VOLLEY_ATTEMPT -gt 1 ]";
    succeeds(&cluster, &submit_as(&cluster, 1, json!({ "volumes": always, "command": command, "retry": retry })));
    let read = json!([{ "volume": "try-0-1", "path": "a" }, { "volume": "try-0-2", "path": "b" }]);
    assert_eq!(succeeds(&cluster, &submit(&cluster, 1, read, "cat a/lines b/lines")), ["base\ntry 1\nbase\ntry 2\n"]);
}

#[test]
fn a_worker_that_is_killed_leaves_nothing_half_written() {
    let Some(mut cluster) = cluster(&[]) else { return };
    succeeds(&cluster, &submit(&cluster, 1, state("s"), "echo base > s/lines"));
    let go = cluster.path("go");
    let command = format!("echo $VOLLEY_ATTEMPT >> s/lines; sync; until [ -e {} ]; do sleep 0.1; done", go.display());
    let job = submit_as(&cluster, 1, json!({ "volumes": state("s"), "command": command }));
    cluster.until_tasks(&job, "running", 1);
    let written = || std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains("volumes/at");
    until("it is mounted", written);
    signal(cluster.pid(), Signal::KILL);
    until("it is gone", || cluster.has_ended());
    cluster.stop();
    std::fs::write(go, "").unwrap();
    cluster.start();
    succeeds(&cluster, &job);
    let tries = cluster.results(&job)[0]["attempts"].as_u64().unwrap();
    assert!(tries > 1);
    assert_eq!(succeeds(&cluster, &submit(&cluster, 1, state("s"), "cat s/lines")), [format!("base\n{tries}\n")]);
}

#[test]
fn what_is_still_open_at_the_end_is_killed_and_written_out() {
    let Some(cluster) = cluster(&[]) else { return };
    let leave = "(cd s; exec 9>>held; setsid sleep 600 >&9 & ); echo whole > s/file; mv s/file s/moved; sleep 0.2";
    let job = submit(&cluster, 1, state("s"), leave);
    succeeds(&cluster, &job);
    let message = cluster.results(&job)[0]["message"].to_string();
    assert!(message.contains("still running at its end and was killed"), "{message}");
    assert_eq!(succeeds(&cluster, &submit(&cluster, 1, state("s"), "cat s/moved; ls s/held")), ["whole\ns/held\n"]);
}

#[test]
fn a_task_with_a_volume_that_nobody_has_is_told_so() {
    let Some(cluster) = cluster(&[]) else { return };
    let spec = cluster.spec(json!({ "count": 1 }), json!({ "command": "true", "volumes": [{ "volume": "none", "path": "s" }] }), json!({}));
    let refused = cluster.volley(&["submit", &spec]).exits(2);
    assert!(refused.stderr.contains("$.task.volumes[0].volume"), "{refused:?}");
    let volume = json!([{ "volume": "of-${index}", "path": "s", "access": "rw" }]);
    let job = submit(&cluster, 1, volume, "true");
    let said = cluster.ask(&["explain", &job, "0"])["summary"].as_str().unwrap().to_owned();
    assert!(said.contains("it writes volume of-0, which is not there: make it (`volley volume create of-0 SIZE`)"), "{said}");
    cluster.ask(&["volume", "create", "of-0", "16MiB"]);
    succeeds(&cluster, &job);
}

#[test]
fn the_nightly_pipeline_of_the_examples_runs() {
    let Some(cluster) = cluster(&["--slots", "4"]) else { return };
    let example = |name: &str| format!("{}/jobspecs/examples/accepted/nightly-volume-{name}.json", env!("CARGO_MANIFEST_DIR"));
    let sum = |job: &str, field: &str| cluster.results(job).iter().map(|row| row["result"][field].as_u64().unwrap()).sum::<u64>();
    let said = succeeds(&cluster, &cluster.submit(&example("fill")));
    let modules: u64 = said[0].split(' ').next().unwrap().parse().unwrap();
    assert!(modules > 100, "{said:?}");
    cluster.ask(&["volume", "snapshot", "library@tonight"]);
    let check = cluster.submit(&example("check"));
    succeeds(&cluster, &check);
    assert_eq!((cluster.results(&check).len(), sum(&check, "modules")), (100, modules));
    let keep = cluster.submit(&example("keep"));
    succeeds(&cluster, &keep);
    assert_eq!(sum(&keep, "functions"), sum(&check, "functions"));
    let names: Vec<Value> = cluster.ask(&["volume", "ls"]).as_array().unwrap().iter().map(|volume| volume["name"].clone()).collect();
    assert_eq!(names, ["library", "library-checked-0", "library-checked-1"]);
    // The volume itself is as it was, and both copies have what their task wrote.
    let read = json!([{ "volume": "library", "path": "a" }, { "volume": "library-checked-0", "path": "b" }, { "volume": "library-checked-1", "path": "c" }]);
    let seen = succeeds(
        &cluster,
        &submit(&cluster, 1, read, "grep -l checkedBy a/modules/* | wc -l; grep -l checkedBy b/modules/* c/modules/* | wc -l"),
    );
    assert_eq!(seen, [format!("0\n{modules}\n")]);
    // The next night goes on from there.
    succeeds(&cluster, &cluster.submit(&example("fill")));
    let nights = json!([{ "volume": "library", "path": "a" }]);
    assert_eq!(succeeds(&cluster, &submit(&cluster, 1, nights, "wc -l < a/nights"))[0].trim(), "2");
}

/// What shows volumes as files on the host ends: nothing that was written since can be relied on, and the next try begins anew.
#[test]
fn a_task_that_loses_its_volume_is_killed_and_tried_again() {
    let Some(cluster) = cluster(&[]) else { return };
    succeeds(&cluster, &submit(&cluster, 1, state("s"), "echo base > s/lines"));
    let command = "echo $VOLLEY_ATTEMPT >> s/lines; sync; [ $VOLLEY_ATTEMPT -gt 1 ] || sleep 600";
    let job = submit_as(&cluster, 1, json!({ "volumes": state("s"), "command": command }));
    cluster.until_tasks(&job, "running", 1);
    let shown = || cluster.left().into_iter().find(|(_, words)| words.contains("volume-file"));
    until("it is shown", || shown().is_some());
    until("the task sleeps", || cluster.ask(&["explain", &job, "0"])["summary"].as_str().unwrap().contains("runs"));
    signal(shown().unwrap().0, Signal::KILL);
    succeeds(&cluster, &job);
    assert_eq!(cluster.results(&job)[0]["attempts"], 2);
    let rows = cluster.volley(&["results", &job, "--all", "-o", "json"]).exits(0).lines();
    let first = rows.iter().find(|row| row["attempts"] == 1 || row["class"] == "storage_failed");
    if let Some(first) = first {
        assert!(first["message"].as_str().unwrap().contains("it was killed, as it lost a volume"), "{first}");
    }
    assert_eq!(succeeds(&cluster, &submit(&cluster, 1, state("s"), "cat s/lines")), ["base\n2\n"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_a_key_is_given_no_task_with_volumes_and_says_why() {
    if nats_server().is_none() {
        return;
    }
    let dir = open_dir();
    let (nats_port, port) = (free_port(), free_port());
    let (s3, _nats) = (s3(dir.path()).await, nats(dir.path(), nats_port));
    let parts = Parts { dir: dir.path(), nats: format!("nats://127.0.0.1:{nats_port}"), s3: s3.endpoint(), env: Vec::new() };
    until("NATS is up", || std::net::TcpStream::connect(("127.0.0.1", nats_port)).is_ok());
    let keys = write(&dir.path().join("keys"), &"ab".repeat(32));
    std::fs::set_permissions(&keys, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let keyed = Parts { env: vec![("VOLLEY_VOLUME_KEYS", keys)], dir: dir.path(), nats: parts.nats.clone(), s3: parts.s3.clone() };
    let (_coordinator, _worker) = (keyed.coordinator("c1", port), parts.worker("w1", &["--isolation", "process"]));
    let url = format!("http://127.0.0.1:{port}");
    let told = || ask(&url, "/v1/workers").and_then(|page| page[0]["volumes"].as_str().map(str::to_owned));
    tokio::task::block_in_place(|| {
        until("the worker says what it lacks", || told().is_some());
        assert_eq!(told().unwrap(), "it has no key for volumes; start it with --volume-keys");
        let task = json!({ "isolation": "process", "command": "true", "volumes": state("s") });
        let spec = json!({ "version": "volley/v1", "name": "n", "task": task }).to_string();
        let answer = request(&url, "POST", "/v1/jobs", Some(TOKEN), spec.as_bytes());
        assert!(answer.body.contains("w1 can't have volumes: it has no key for volumes"), "{}", answer.body);
        let job = answer.json()["job"].as_str().unwrap().to_owned();
        let explained = ask(&url, &format!("/v1/jobs/{job}/tasks/0/explain")).unwrap();
        let why = "can't have volumes: it has no key for volumes; start it with --volume-keys";
        assert_eq!(explained["workers"][0]["reasons"], json!([why]), "{explained}");
        assert!(explained["next"][0].as_str().unwrap().contains("start a worker that runs as root with --volume-keys"), "{explained}");
    });
}
