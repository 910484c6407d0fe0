//! What a task of the process tier sees, and how its end is told, on this machine.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod cgroup_v2;
mod guest;
mod live;
mod memory;
mod support;

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use support::{World, sha256, state, text};
use volley_jobspecs::expand::ItemPlan;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{Incarnation, JobId};
use volley_jobspecs::keys;
use volley_jobspecs::observe::{Figure, Observer, Span};
use volley_jobspecs::pages::PageCutter;
use volley_jobspecs::wire::plan::SpecRef;
use volley_jobspecs::wire::record::Run;
use volley_jobspecs::wire::report::Ending;
use volley_jobspecs::wire::trace::TraceContext;
use volley_jobspecs::wire::work::Order;

/// A command that wants 200 MiB of memory, in a process of its own.
const HOG: &str = "dd if=/dev/zero of=/dev/null bs=200M count=1";

fn failed(class: FailureClass) -> Ending {
    Ending::Failed(class)
}

fn task(rest: &str) -> String {
    format!(r#"{{"isolation":"process",{rest}}}"#)
}

fn alive(pid: &str) -> bool {
    assert!(!pid.trim().is_empty(), "a process number");
    std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_sees_its_item_its_directories_and_nothing_of_the_worker() {
    let mut w = World::start(|_| {}).await;
    let end = w.run_one(&task(r#""command":"env | sort; pwd","env":{"MINE":"${item.a} ${index}"}"#)).await;
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    let out = text(&end.stdout);
    let names: Vec<&str> = out.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name).collect();
    let mut wanted = vec![
        "HOME",
        "LANG",
        "MINE",
        "PATH",
        "PWD",
        "TMPDIR",
        "VOLLEY_ATTEMPT",
        "VOLLEY_ITEM",
        "VOLLEY_JOB",
        "VOLLEY_OUTPUT_DIR",
        "VOLLEY_TASK_COUNT",
        "VOLLEY_TASK_INDEX",
    ];
    // Some shells set these for what they start.
    wanted.extend(["OLDPWD", "SHLVL", "_"].iter().filter(|name| names.contains(name)));
    wanted.sort_unstable();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, wanted);
    assert!(out.contains("MINE=item value 0") && out.contains(r#"VOLLEY_ITEM={"a":"item value"}"#), "{out}");
    assert!(out.lines().last().unwrap().ends_with("/slots/0/work"), "{out}");
    let usage = end.usage.unwrap();
    assert!(usage.memory_bytes_max > 100_000);
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_are_told_apart() {
    let mut w = World::start(|_| {}).await;
    let end = w.run_one(&task(r#""command":"echo out; echo err >&2; exit 7""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(7)));
    assert_eq!((text(&end.stdout).as_str(), text(&end.stderr).as_str()), ("out\n", "err\n"));
    let end = w.run_one(&task(r#""command":"kill -SEGV $$""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::Signal), Some(11)));
    assert!(end.message.unwrap().contains("SIGSEGV"));
    let end = w.run_one(&task(r#""command":["no-such-program"]"#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(127)));
    assert!(end.message.unwrap().contains("no-such-program: command not found"));
    let end = w.run_one(&task(r#""command":["/etc/passwd"]"#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(126)));
    let end = w.run_one(&task(r#""command":"sleep 60","timeouts":{"run":"300ms","grace":"1s"}"#)).await;
    assert_eq!(end.ending, failed(FailureClass::RunTimeout));
    assert!(end.timing.run_ms >= 300 && end.timing.run_ms < 900, "{:?}", end.timing);
    let end = w.run_one(&task(r#""command":"trap '' TERM; while :; do :; done","timeouts":{"run":"200ms","grace":"300ms"}"#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::RunTimeout), Some(9)));
    assert!(end.timing.run_ms >= 500, "{:?}", end.timing);
    let end = w.run_one(&task(r#""command":["cat"],"stdin":"${item.a}!""#)).await;
    assert_eq!(text(&end.stdout), "item value!");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_end_as_what_they_are() {
    let mut w = World::start(|config| config.cgroups = true).await;
    if !w.last_beat().info.limits {
        eprintln!("skipped: no cgroups here");
        return;
    }
    let end = w.run_one(&task(&format!(r#""command":"{HOG}; exit 3","resources":{{"memory":"64MiB"}}"#))).await;
    assert_eq!(end.ending, failed(FailureClass::Oom), "{end:?}");
    assert!(end.message.unwrap().contains("64 MiB"));
    // The same slot, other limits: none, and none of the earlier verdict.
    let end = w.run_one(&task(&format!(r#""command":"{HOG}""#))).await;
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    let forks = r#"for i in 1 2 3 4 5 6 7 8; do sleep 1 & done; wait"#;
    let end = w.run_one(&task(&format!(r#""command":"{forks}","resources":{{"pids":4}}"#))).await;
    assert!(matches!(end.ending, Ending::Failed(FailureClass::ExitCode)), "{end:?}");
    assert!(text(&end.stderr).contains("fork"), "{end:?}");
    let spin = r#""command":"while :; do :; done","resources":{"cpus":"200m"},"timeouts":{"run":"2s"}"#;
    let end = w.run_one(&task(spin)).await;
    assert_eq!(end.ending, failed(FailureClass::RunTimeout), "{end:?}");
    let used = end.usage.unwrap().cpu_us;
    assert!(used > 0 && used < u64::from(end.timing.run_ms) * 400, "at most a fifth of a core, and some for start and end: {end:?}");
    let end = w.run_one(&task(r#""command":["true"],"resources":{"memory":"4MiB"}"#)).await;
    assert_eq!(end.ending, Ending::Succeeded, "the smallest limit still runs the smallest program: {end:?}");
    let script = "(setsid sleep 300 & echo $! ; setsid sleep 301 & ) ; exit 0";
    let end = w.run_one(&task(&format!(r#""command":"{script}""#))).await;
    assert_eq!(end.ending, Ending::Succeeded);
    assert!(!alive(&text(&end.stdout)), "a stray is dead before the end is told");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_cgroups_limits_are_refused() {
    let mut w = World::start(|_| {}).await;
    let end = w.run_one(&task(r#""command":["true"],"resources":{"memory":"64MiB"}"#)).await;
    assert_eq!(end.ending, failed(FailureClass::PolicyDenied));
    assert!(end.message.unwrap().contains("cgroup"));
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn results_outputs_and_logs_are_kept() {
    let mut w = World::start(|config| config.stream_bytes_max = 10_000).await;
    let script = r#"cd $VOLLEY_OUTPUT_DIR; echo '{\"score\": 1}' > result.json; mkdir d; echo hello > d/f; : > empty;
        ln -s /etc/passwd link; mkfifo pipe; mkdir -p ~/made/x; echo declared > ~/made/x/y; seq 100000; echo e >&2"#
        .replace('\n', " ");
    let end = w.run_one(&task(&format!(r#""command":"{script}","outputs":["made","not-there"]"#))).await;
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    assert_eq!(end.result.as_ref().map(|r| r.to_vec()), Some(b"{\"score\": 1}\n".to_vec()));
    let message = end.message.clone().unwrap();
    assert!(message.contains("link (symbolic link)") && message.contains("pipe (pipe)"), "{message}");
    let outputs = end.outputs.unwrap();
    assert_eq!((outputs.files, outputs.bytes), (3, 6 + 9));
    let list: serde_json::Value = serde_json::from_slice(&w.objects.read(&keys::attempt_manifest(&end.name)).unwrap()).unwrap();
    assert_eq!(list[0]["path"], "d/f");
    assert_eq!(list[0]["sha256"], sha256(b"hello\n"));
    assert_eq!(list[1]["path"], "empty");
    assert_eq!(list[2]["path"], "made/x/y");
    assert_eq!(w.objects.read(&keys::attempt_output(&end.name, "d/f")).unwrap(), b"hello\n");
    let stdout = end.stdout.unwrap();
    assert!(stdout.stored && stdout.truncated && stdout.bytes == 588_895);
    assert!(stdout.tail.ends_with(b"99999\n100000\n"));
    let log = w.objects.read(&keys::attempt_log(&end.name, "stdout")).unwrap();
    assert!(log.starts_with(b"1\n2\n") && log.ends_with(b"100000\n") && log.len() < 11_000);
    assert!(String::from_utf8_lossy(&log).contains("bytes left out here"));
    assert!(!end.stderr.unwrap().stored);
    // Nothing of one attempt is there for the next.
    let end = w.run_one(&task(r#""command":"ls -A . $TMPDIR $VOLLEY_OUTPUT_DIR | grep -v :$; exit 0""#)).await;
    assert_eq!(text(&end.stdout).trim(), "");
    let end = w.run_one(&task(r#""command":"echo no > $VOLLEY_OUTPUT_DIR/result.json""#)).await;
    assert!(end.result.is_none() && end.message.unwrap().contains("result.json is no JSON"));
    assert_eq!(end.outputs.map(|o| o.files), Some(1));
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn storage_in_trouble_is_no_verdict_on_a_success_and_does_not_hide_one_on_a_failure() {
    let mut w = World::start(|_| {}).await;
    w.objects.broken.store(true, Ordering::SeqCst);
    let end = w.run_one(&task(r#""command":"echo x > $VOLLEY_OUTPUT_DIR/f""#)).await;
    assert_eq!(end.ending, failed(FailureClass::StorageFailed));
    assert!(end.message.unwrap().contains("503"));
    let end = w.run_one(&task(r#""command":"echo x > $VOLLEY_OUTPUT_DIR/f; exit 2""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(2)));
    let end = w.run_one(&task(r#""command":["true"]"#)).await;
    assert_eq!(end.ending, Ending::Succeeded, "a task that leaves nothing needs no storage");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn inputs_are_there_checked_read_only_and_fetched_once() {
    let mut w = World::start(|_| {}).await;
    let digest = sha256(b"data!");
    w.objects.put_now("in/data", b"data!");
    w.objects.put_now("uploads/public/u1", b"#!/bin/sh\necho ran\n");
    let inputs = format!(
        r#""inputs":[{{"from":"s3://other/in/data","path":"a/b/data","sha256":"{digest}"}},
                     {{"from":"upload:u1","path":"tool","executable":true}}]"#
    );
    let spec = task(&format!(r#""command":"cat a/b/data; ./tool; stat -c %a a/b/data tool",{inputs}"#));
    let (job, _) = w.job(r#"{"count":8}"#, &spec);
    let (_, order) = w.bundle(job, 0, 8);
    w.order(vec![order]).await;
    w.until("8 ends", |w| w.ends().len() == 8).await;
    for end in w.ends() {
        assert_eq!(text(&end.stdout), "data!ran\n444\n555\n", "{end:?}");
    }
    assert_eq!(w.objects.downloads.load(Ordering::SeqCst), 2);
    let end = w.run_one(&task(r#""command":["true"],"inputs":[{"from":"s3://other/none","path":"x"}]"#)).await;
    assert_eq!(end.ending, failed(FailureClass::InputMissing));
    let wrong = "0".repeat(64);
    let spec = format!(r#""command":["true"],"inputs":[{{"from":"s3://b00/in/data","path":"x","sha256":"{wrong}"}}]"#);
    let end = w.run_one(&task(&spec)).await;
    assert_eq!(end.ending, failed(FailureClass::InputMissing), "{end:?}");
    assert!(end.message.unwrap().contains("sha256"));
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_belongs_to_others_is_no_input() {
    let mut w = World::start(|_| {}).await;
    for key in ["specs/x", "uploads/acme/u1", "jobs/j999/main/0/1-1/out/f", "checkpoints/1", "lists/a", "uploads/public/u1"] {
        w.objects.put_now(key, b"data!");
    }
    for (key, denied) in [
        ("specs/x", true),
        ("uploads/acme/u1", true),
        ("jobs/j999/main/0/1-1/out/f", true),
        ("checkpoints/1", true),
        ("lists/../specs/x", true),
        ("lists/a", false),
        ("uploads/public/u1", false),
    ] {
        let spec = task(&format!(r#""command":["cat","x"],"inputs":[{{"from":"s3://cell/{key}","path":"x"}}]"#));
        let end = w.run_one(&spec).await;
        if denied {
            assert_eq!(end.ending, failed(FailureClass::PolicyDenied), "{key}: {end:?}");
            assert!(end.message.unwrap().contains("another tenant"));
        } else {
            assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "data!"), "{key}");
        }
    }
    let (other, _) = w.job(r#"{"count":1}"#, &task(r#""command":["true"]"#));
    let key = format!("jobs/{other}/main/0/1-1/out/f");
    w.objects.put_now(&key, b"data!");
    let end = w.run_one(&task(&format!(r#""command":["cat","x"],"inputs":[{{"from":"s3://cell/{key}","path":"x"}}]"#))).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "data!"), "outputs of the tenant's other jobs");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_hand_back_and_forget() {
    let mut w = World::start(|config| config.slots = 1).await;
    let (job, _) = w.job(r#"{"count":4}"#, &task(r#""command":"echo $$; exec sleep 100""#));
    let (id, order) = w.bundle(job, 0, 4);
    w.order(vec![order]).await;
    w.until("one runs", |w| w.handle.status().running == 1).await;
    w.order(vec![Order::HandBack { bundle: id, tasks: vec![Run { first: 3, count: 1 }] }]).await;
    w.until("one end", |w| w.ends().len() == 1).await;
    // Long enough for the shell to say its number.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!((w.ends()[0].name.index, w.ends()[0].ending), (3, Ending::Returned));
    w.order(vec![Order::Stop { bundle: id, tasks: vec![Run { first: 0, count: 1 }] }]).await;
    w.until("another end", |w| w.ends().len() == 2).await;
    let end = w.ends()[1].clone();
    assert_eq!((end.name.index, end.ending), (0, failed(FailureClass::Cancelled)));
    assert!(!alive(&text(&end.stdout)));
    w.until("the next runs", |w| w.handle.status().running == 1).await;
    w.order(vec![Order::Forget { bundle: id }]).await;
    w.until("nothing is held", |w| w.handle.status().bundles == 0).await;
    assert_eq!(w.ends().len(), 2, "what is forgotten is not reported");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_is_away_loses_nothing_and_beats_say_what_is_held() {
    let mut w = World::start(|_| {}).await;
    let bus = w.bus.clone();
    let (job, _) = w.job(r#"{"count":20}"#, &task(r#""command":["true"]"#));
    let (_, order) = w.bundle(job, 0, 20);
    state(&bus).down.store(true, Ordering::SeqCst);
    w.order(vec![order]).await;
    w.until("all ran", |w| w.handle.status().running == 0 && w.handle.status().bundles == 1).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(w.ends().is_empty());
    state(&bus).down.store(false, Ordering::SeqCst);
    w.until("all reported", |w| w.ends().len() == 20).await;
    w.until("nothing held", |w| w.last_beat().held.is_empty() && w.last_beat().reported > 0).await;
    let mut seen: Vec<u32> = w.ends().iter().map(|end| end.name.index).collect();
    seen.dedup();
    assert_eq!(seen, (0..20).collect::<Vec<_>>());
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_life_declared_lost_ends_and_another_begins() {
    let mut w = World::start(|_| {}).await;
    let before = w.incarnation();
    let (job, _) = w.job(r#"{"count":1}"#, &task(r#""command":"echo $$ > /tmp/volley-lost-$VOLLEY_JOB-test; exec sleep 100""#));
    let (_, order) = w.bundle(job, 0, 1);
    w.order(vec![order]).await;
    let file = format!("/tmp/volley-lost-{job}-test");
    w.until("it runs", |_| std::fs::read_to_string(&file).is_ok_and(|pid| !pid.is_empty())).await;
    let pid = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    state(&w.bus).lost.store(true, Ordering::SeqCst);
    w.until("a new life", |w| w.incarnation() != before).await;
    assert!(!alive(&pid), "nothing of the old life runs when the new one beats");
    assert!(w.last_beat().held.is_empty());
    assert!(w.ends().is_empty());
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_finishes_what_runs_and_stop_does_not_wait() {
    let mut w = World::start(|config| config.slots = 1).await;
    let (job, _) = w.job(r#"{"count":3}"#, &task(r#""command":["sleep","0.5"]"#));
    let (_, order) = w.bundle(job, 0, 3);
    w.order(vec![order]).await;
    w.until("it runs", |w| w.handle.status().running == 1).await;
    let bus = w.bus.clone();
    w.finish().await;
    let mut endings: Vec<(u32, Ending)> =
        state(&bus).reports.lock().unwrap().concat().iter().map(|end| (end.name.index, end.ending)).collect();
    endings.sort_by_key(|(index, _)| *index);
    assert_eq!(endings, vec![(0, Ending::Succeeded), (1, Ending::Returned), (2, Ending::Returned)]);

    let mut w = World::start(|_| {}).await;
    let (job, _) = w.job(r#"{"count":1}"#, &task(r#""command":"trap '' TERM; echo > /tmp/volley-stop-$VOLLEY_JOB-test; sleep 100""#));
    let (_, order) = w.bundle(job, 0, 1);
    w.order(vec![order]).await;
    // One that is still made ready would be handed back.
    let file = PathBuf::from(format!("/tmp/volley-stop-{job}-test"));
    w.until("it runs", |_| file.exists()).await;
    std::fs::remove_file(&file).unwrap();
    let begin = Instant::now();
    w.handle.drain();
    w.handle.stop();
    tokio::time::timeout(Duration::from_secs(10), &mut w.running).await.unwrap().unwrap().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(3));
    assert_eq!(w.ends()[0].ending, failed(FailureClass::HostLost));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_beat_arrives_also_when_the_one_before_is_answered_late() {
    for begun_ms in [0, 40, 80, 120, 160] {
        let w = World::start(|_| {}).await;
        state(&w.bus).beat_takes_ms.store(100, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(begun_ms)).await;
        // Looks at the last beat.
        w.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_for_each_slot_when_configured() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: not root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut w = World::start_in(dir, |config| {
        config.slots = 2;
        config.task_user = Some((60_001, 60_001));
        config.task_user_per_slot = true;
    })
    .await;
    let script = "echo x > f; chmod 777 . f; sleep 1; id -u; id -g; id -G; cat ../../0/work/f ../../1/work/f 2>/dev/null | wc -l";
    let (job, _) = w.job(r#"{"count":2}"#, &task(&format!(r#""command":{script:?}"#)));
    let orders = [w.bundle(job, 0, 1).1, w.bundle(job, 1, 1).1];
    w.order(orders.into()).await;
    w.until("2 ends", |w| w.ends().len() == 2).await;
    let mut said: Vec<String> = w.ends().iter().map(|end| text(&end.stdout)).collect();
    said.sort();
    assert_eq!(said, ["60001\n60001\n60001\n1\n", "60002\n60002\n60002\n1\n"]);
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_user_when_configured() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: not root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut w = World::start_in(dir, |config| config.task_user = Some((65_534, 65_534))).await;
    w.objects.put_now("in/data", b"data!");
    let script = "id -u; id -g; id -G; echo x > f; echo y > $VOLLEY_OUTPUT_DIR/o; cat sub/data; echo z > sub/other; touch sub/data";
    let inputs = r#""inputs":[{"from":"s3://other/in/data","path":"sub/data"}]"#;
    let end = w.run_one(&task(&format!(r#""command":"{script}; exit 0",{inputs}"#))).await;
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    assert_eq!(text(&end.stdout), "65534\n65534\n65534\ndata!", "{end:?}");
    assert!(text(&end.stderr).contains("Permission denied"), "{end:?}");
    assert_eq!(end.outputs.map(|o| o.files), Some(1));
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_nobody_knows_is_given_up_and_another_life_is_ignored() {
    let mut w = World::start(|_| {}).await;
    let (_, order) = w.bundle(JobId(999), 0, 1);
    w.order(vec![order]).await;
    let end = w.end_of(JobId(999)).await;
    assert_eq!(end.ending, failed(FailureClass::HostLost));
    assert_ne!(w.incarnation(), Incarnation(0));
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn items_come_from_pages_and_a_large_spec_from_the_bucket() {
    let mut w = World::start(|_| {}).await;
    let plan = ItemPlan::new(&serde_json::from_str(r#"{"lines":{"upload":"u1"}}"#).unwrap()).unwrap();
    let mut cutter = PageCutter::new(plan.file().unwrap());
    let mut pages = Vec::new();
    let lines: String = (0..2_500).map(|n| format!("line {n}\n")).collect();
    cutter.feed(lines.as_bytes(), &mut pages).unwrap();
    let index = cutter.finish(&mut pages).unwrap();
    for (number, page) in (0..).zip(&pages) {
        w.objects.put_now(&keys::items_page(&index.hash(), number), &page.bytes);
    }
    w.objects.put_now(&keys::items_index(&index.hash()), &index.to_json());
    let (job, _) = w.job(r#"{"count":2500}"#, &task(r#""command":["echo","${item}"]"#));
    let mut offered = w.offered(job);
    let SpecRef::Inline(spec) = &offered.spec else { panic!() };
    let spec = String::from_utf8(spec.to_vec()).unwrap().replace(r#"{"count":2500}"#, r#"{"lines":{"upload":"u1"}}"#);
    let hash = blake3::hash(spec.as_bytes()).to_hex().to_string();
    w.objects.put_now(&keys::spec(&hash), spec.as_bytes());
    offered.spec = SpecRef::Stored { hash, len: spec.len() as u64, name: None };
    offered.plan.items = Some(index.hash());
    w.offer(offered);
    let orders = vec![w.bundle(job, 0, 1).1, w.bundle(job, 1_000, 1).1, w.bundle(job, 2_499, 1).1];
    w.order(orders).await;
    w.until("3 ends", |w| w.ends().len() == 3).await;
    for end in w.ends() {
        assert_eq!(text(&end.stdout), format!("line {}\n", end.name.index), "{end:?}");
    }
    w.finish().await;
}

/// The other half of the next test: a worker in a process of its own, until it is killed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by the test below"]
async fn a_worker_that_will_be_killed() {
    let Some(dir) = std::env::var_os("VOLLEY_TEST_DIR").map(PathBuf::from) else { return };
    let world = tempfile::Builder::new().disable_cleanup(true).tempdir_in(&dir).unwrap();
    std::fs::write(dir.join("world"), world.path().as_os_str().as_encoded_bytes()).unwrap();
    let mut w = World::start_in(world, |config| config.cgroups = true).await;
    let script = format!("setsid sh -c 'echo $$ > {0}/daemon; exec sleep 300' & echo $$ > {0}/main; wait", dir.display());
    w.run_one(&task(&format!(r#""command":"{script}""#))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_killed_worker_runs_when_the_next_one_joins() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_worker_that_will_be_killed", "--ignored"])
        .env("VOLLEY_TEST_DIR", dir.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap_or_default();
    while read("daemon").is_empty() || read("main").is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (daemon, main, world) = (read("daemon"), read("main"), read("world"));
    assert!(alive(&daemon) && alive(&main));
    child.kill().unwrap();
    child.wait().unwrap();
    // The next worker has the directory only once the last one's processes are gone.
    let (handle, control) = volley_worker::control();
    let w = World::start(|_| {}).await;
    let mut config = volley_worker::Config::new(volley_jobspecs::ids::WorkerId::new("w1").unwrap(), world.into());
    config.beat_ms = 100;
    let running = tokio::spawn(volley_worker::run(config, w.bus.clone(), w.objects.clone(), None, control));
    while !handle.status().joined {
        assert!(begin.elapsed() < Duration::from_secs(40));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!alive(&daemon) && !alive(&main));
    handle.stop();
    running.await.unwrap().unwrap();
}

/// `cargo test -p volley-worker --test process_tier rates -- --ignored --nocapture`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, not a check"]
async fn rates() {
    for (isolation, cgroups, slots, tasks) in
        [("null", false, 64, 200_000_u32), ("process", false, 8, 5_000), ("process", true, 8, 5_000), ("process", true, 64, 5_000)]
    {
        let mut w = World::start(|config| {
            config.slots = slots;
            config.cgroups = cgroups;
        })
        .await;
        let command = if isolation == "null" { "" } else { r#","command":["/bin/true"]"# };
        let spec = match isolation {
            "null" => r#"{"isolation":"null","command":["true"]}"#.to_owned(),
            _ => format!(r#"{{"isolation":"{isolation}"{command}}}"#),
        };
        let (job, _) = w.job(&format!(r#"{{"count":{tasks}}}"#), &spec);
        let begin = Instant::now();
        let (mut sent, size) = (0, if isolation == "null" { 256 } else { 20 });
        let reported = |w: &World| state(&w.bus).reports.lock().unwrap().iter().map(Vec::len).sum::<usize>() as u32;
        while sent < tasks {
            // As a leader does: never more than two bundles per slot that aren't reported.
            let mut open = 0;
            w.until("room", |w| {
                let mut left: std::collections::BTreeMap<u32, u32> = (0..sent / size).map(|b| (b, size)).collect();
                for end in w.ends() {
                    left.entry(end.name.index / size).and_modify(|n| *n -= 1);
                }
                open = left.values().filter(|n| **n > 0).count() as u32;
                open < slots + slots / 2 || slots == 1
            })
            .await;
            let mut orders = Vec::new();
            for _ in open..slots * 2 {
                let count = size.min(tasks - sent);
                if count > 0 {
                    orders.push(w.bundle(job, sent, count).1);
                    sent += count;
                }
            }
            w.order(orders).await;
        }
        w.until("all ends", |w| reported(w) == tasks).await;
        assert!(w.ends().iter().all(|end| end.ending == Ending::Succeeded));
        println!("{isolation}, {slots} slots, cgroups {cgroups}: {:.0} tasks a second", f64::from(tasks) / begin.elapsed().as_secs_f64());
        w.finish().await;
    }
}

/// Remembers what it is told.
#[derive(Debug, Default)]
struct Watcher {
    spans: Mutex<Vec<Span>>,
    figures: Mutex<Vec<Figure>>,
}

impl Observer for Watcher {
    fn takes_spans(&self) -> bool {
        true
    }
    fn records(&self, _trace: [u8; 16], parent: Option<bool>) -> bool {
        parent.unwrap_or(true)
    }
    fn spans(&self, spans: Vec<Span>) {
        self.spans.lock().unwrap().extend(spans);
    }
    fn figures_every(&self) -> Option<Duration> {
        Some(Duration::from_secs(3_600))
    }
    fn figures(&self, figures: Vec<Figure>) {
        *self.figures.lock().unwrap() = figures;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_attempt_is_told_of_with_its_stages_and_its_trace_goes_along() {
    let watcher = Arc::new(Watcher::default());
    let mut w = World::start(|config| config.observer = Some(watcher.clone())).await;
    w.run_one(&task(r#""command":"sleep 0.05; exit 7""#)).await;
    w.run_one(&task(r#""command":"touch $VOLLEY_OUTPUT_DIR/x; exit 8""#)).await;
    w.until("both are told of", |_| watcher.spans.lock().unwrap().iter().filter(|span| span.name == "report").count() == 2).await;
    let spans = std::mem::take(&mut *watcher.spans.lock().unwrap());
    let job: TraceContext = support::TRACE.parse().unwrap();
    let attempts: Vec<&Span> = spans.iter().filter(|span| span.name == "attempt").collect();
    for (attempt, code) in attempts.iter().zip([7, 8]) {
        assert_eq!((attempt.context.trace(), attempt.parent), (job.trace(), Some(job.span())));
        assert!(attempt.attributes.contains(&("volley.code", code.into())), "{attempt:?}");
    }
    let execute = spans.iter().find(|span| span.name == "execute").unwrap();
    assert!((50_000..5_000_000).contains(&(execute.end_us - execute.start_us)), "{execute:?}");
    assert!(spans.iter().any(|span| span.name == "reclaim"), "{spans:#?}");
    assert!(state(&w.bus).traces.lock().unwrap().iter().all(|trace| *trace == job));
    // Two questions for jobs and two reports.
    assert_eq!(state(&w.bus).traces.lock().unwrap().len(), 4);
    w.finish().await;
    let figures = watcher.figures.lock().unwrap();
    let failed = figures.iter().find(|figure| figure.name == "volley_worker_attempts" && figure.labels[0].1 == "exit_code");
    assert_eq!(failed.map(|figure| figure.value), Some(2.0));
}
