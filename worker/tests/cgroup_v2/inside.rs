//! What is tested in the guest. Each test is a process of its own, in a cgroup of its own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::report::Ending;
use volley_worker::cgroup::{Cgroups, Limits, SlotCgroup};

use crate::support::{World, text};
use crate::{HOG, alive, failed, task};

const TOP: &str = "/sys/fs/cgroup";

/// The cgroup this process is in, as a path from the top.
fn own() -> String {
    let text = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    text.trim().strip_prefix("0::").expect("v2 alone").to_owned()
}

/// The worker's cgroup among those in `folder`.
fn worker_folder(folder: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(Path::new(TOP).join(folder.trim_start_matches('/'))).unwrap();
    let mut found = entries.flatten().map(|entry| entry.path());
    found.find(|path| path.file_name().unwrap().to_str().is_some_and(|n| n.starts_with("volley-") && !n.ends_with("-agent")))
}

async fn limited(slots: u32) -> World {
    let w = World::start(|config| {
        config.cgroups = true;
        config.slots = slots;
    })
    .await;
    assert!(w.last_beat().info.limits, "this worker enforces limits");
    w
}

/// A task has all limits, in a slot's cgroup below `folder`; afterwards nothing is left there. Returns where the worker was.
async fn limits_below(folder: &str) -> String {
    let mut w = limited(2).await;
    let now = own();
    let script = format!("g=$(cut -d: -f3 /proc/self/cgroup); echo $g; cd {TOP}$g; cat memory.max memory.swap.max cpu.max pids.max");
    let resources = r#""resources":{"memory":"64MiB","cpus":"500m","pids":20}"#;
    let end = w.run_one(&task(&format!(r#""command":"{script}",{resources}"#))).await;
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    let out = text(&end.stdout);
    let (group, limits) = out.split_once('\n').unwrap();
    // One more process than the task may have: the slot's helper.
    assert_eq!(limits, "67108864\n0\n50000 100000\n21\n");
    assert!(group.starts_with(&format!("{folder}volley-")) && group.contains("/slot-"), "{group}");
    let end = w.run_one(&task(&format!(r#""command":"{HOG}; exit 3",{resources}"#))).await;
    assert_eq!(end.ending, failed(FailureClass::Oom), "{end:?}");
    assert!(worker_folder(folder).is_some());
    w.finish().await;
    assert_eq!(worker_folder(folder), None);
    now
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn from_a_session_to_the_top() {
    assert_eq!(limits_below("/").await, "/session", "the worker stays");
    let members = std::fs::read_to_string(format!("{TOP}/session/cgroup.procs")).unwrap();
    let name = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    assert!(members.lines().any(|pid| name(pid) == "sleep\n"), "and so does the other program");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn from_the_top() {
    assert_eq!(limits_below("/").await, "/");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn from_a_session_without_cpu_to_the_top() {
    let handed = std::fs::read_to_string(format!("{TOP}/slice/session/cgroup.controllers")).unwrap();
    assert_eq!(handed.trim(), "memory pids");
    assert_eq!(limits_below("/").await, "/slice/session");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn a_service_to_a_leaf() {
    let leaf = limits_below("/service/").await;
    assert!(leaf.starts_with("/service/volley-") && leaf.ends_with("-agent"), "{leaf}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn a_service_of_another_user_to_a_leaf() {
    assert!(!rustix::process::geteuid().is_root());
    let leaf = limits_below("/delegated/").await;
    assert!(leaf.starts_with("/delegated/volley-") && leaf.ends_with("-agent"), "{leaf}");
}

#[test]
#[ignore = "run in a guest"]
fn one_leaf_is_enough() {
    for _ in 0..2 {
        let cgroups = Cgroups::open("volley-again").unwrap();
        assert_eq!(own(), "/twice/volley-again-agent");
        assert!(cgroups.slot("0").unwrap().join_files()[0].starts_with("/sys/fs/cgroup/twice/volley-again/0/"));
        cgroups.sweep().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn a_process_lost_to_memory_is_oom_also_with_exit_code_0() {
    let mut w = limited(1).await;
    let end = w.run_one(&task(&format!(r#""command":"{HOG}; exit 0","resources":{{"memory":"64MiB"}}"#))).await;
    assert_eq!(end.ending, failed(FailureClass::Oom), "{end:?}");
    let end = w.run_one(&task(r#""command":["true"],"resources":{"memory":"64MiB"}"#)).await;
    assert_eq!(end.ending, Ending::Succeeded, "the next task in the slot has no part in it: {end:?}");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn what_a_task_leaves_in_memory_is_not_charged_to_the_next() {
    let mut w = limited(1).await;
    // Files in a memory file system can't be given back.
    let end = w.run_one(&task(r#""command":"dd if=/dev/zero of=/dev/shm/left bs=1M count=100""#)).await;
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    for _ in 0..2 {
        let end = w.run_one(&task(r#""command":["true"],"resources":{"memory":"64MiB"}"#)).await;
        assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    }
    w.finish().await;
    std::fs::remove_file("/dev/shm/left").unwrap();
    assert_eq!(worker_folder("/"), None);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn a_stray_in_a_group_of_its_own_dies_and_the_group_goes() {
    let mut w = limited(1).await;
    let script = format!(
        "g={TOP}$(cut -d: -f3 /proc/self/cgroup)/mine; mkdir $g $g/deeper; setsid sleep 300 & echo $! > $g/deeper/cgroup.procs; echo $!"
    );
    let end = w.run_one(&task(&format!(r#""command":"{script}""#))).await;
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    assert!(text(&end.stderr).is_empty(), "it moved: {end:?}");
    assert!(!alive(&text(&end.stdout)));
    w.finish().await;
    assert_eq!(worker_folder("/"), None);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn what_ignores_term_and_what_forks_is_killed() {
    let mut w = limited(1).await;
    let script = "trap '' TERM; setsid sleep 300 & echo $!; while :; do sleep 1; done";
    let end = w.run_one(&task(&format!(r#""command":"{script}","timeouts":{{"run":"500ms","grace":"300ms"}}"#))).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::RunTimeout), Some(9)), "{end:?}");
    assert!(!alive(&text(&end.stdout)));
    let bomb = "b() { b & b & }; trap '' TERM; b; while :; do b; done 2>/dev/null";
    let bounds = r#""resources":{"pids":40},"timeouts":{"run":"1s","grace":"300ms"}"#;
    let end = w.run_one(&task(&format!(r#""command":"{bomb}",{bounds}"#))).await;
    assert!(matches!(end.ending, Ending::Failed(FailureClass::RunTimeout | FailureClass::ExitCode)), "{end:?}");
    let members = std::fs::read_to_string(worker_folder("/").unwrap().join("slot-0/cgroup.procs")).unwrap();
    assert_eq!(members.lines().count(), 1, "the slot's helper alone: {members}");
    w.finish().await;
    assert_eq!(worker_folder("/"), None);
}

#[test]
#[ignore = "run in a guest"]
fn a_predecessors_tasks_are_killed() {
    let sleeper = |slot: &SlotCgroup, below: &str| -> Child {
        let folder = Path::new(&slot.join_files()[0]).parent().unwrap().join(below);
        std::fs::create_dir_all(&folder).unwrap();
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        std::fs::write(folder.join("cgroup.procs"), child.id().to_string()).unwrap();
        child
    };
    let slot = Cgroups::open("volley-before").unwrap().slot("0").unwrap();
    let left = [sleeper(&slot, "."), sleeper(&slot, "made/by/it")];
    let after = Cgroups::open("volley-before").unwrap();
    for mut child in left {
        assert!(!alive(&child.id().to_string()));
        child.wait().unwrap();
    }
    assert!(!Path::new(&slot.join_files()[0]).exists());
    after.sweep().unwrap();
    assert_eq!(worker_folder("/"), None);
}

/// As machines' VMMs are: moved from one group to another while they run, and not below a helper.
#[test]
#[ignore = "run in a guest"]
fn what_is_moved_has_the_limits_and_dies_with_the_group() {
    let cgroups = Cgroups::open("volley-moved").unwrap();
    let (waiting, mut slot) = (cgroups.slot("machines").unwrap(), cgroups.slot("machine-0").unwrap());
    slot.set_limits(Limits { memory_bytes: Some(64 << 20), cpu_milli: Some(500), pids: Some(9) }).unwrap();
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let group = || std::fs::read_to_string(format!("/proc/{}/cgroup", child.id())).unwrap();
    for (files, name) in [(waiting.join_files(), "/volley-moved/machines"), (slot.join_files(), "/volley-moved/machine-0")] {
        assert_eq!(files.len(), 1, "one hierarchy");
        std::fs::write(&files[0], child.id().to_string()).unwrap();
        assert_eq!(group().trim(), format!("0::{name}"));
    }
    let folder = PathBuf::from(format!("{TOP}/volley-moved/machine-0"));
    let limit = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap().trim().to_owned();
    assert_eq!((limit("memory.max"), limit("cpu.max"), limit("pids.max")), ("67108864".into(), "50000 100000".into(), "10".into()));
    assert_eq!((waiting.kill(), slot.kill()), (0, 1));
    assert!(!child.wait().unwrap().success());
    assert_eq!(slot.kill(), 0);
    cgroups.sweep().unwrap();
    assert_eq!(worker_folder("/"), None);
}
