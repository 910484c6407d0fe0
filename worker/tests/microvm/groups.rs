//! Where machines are on their host: a cgroup for each, with limits that hold whatever becomes of them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::report::Ending;
use volley_worker::Config;

use crate::support::text;
use crate::{begin, children, failed, message, spawner, world};

/// The cgroups of the worker whose directory this is, in each hierarchy. None where it could make none.
pub fn groups_of(dir: &Path) -> Vec<PathBuf> {
    let hash = blake3::hash(dir.canonicalize().unwrap().as_os_str().as_encoded_bytes()).to_hex();
    let (name, mut found, mut stack) = (format!("volley-{}", &hash[..12]), Vec::new(), vec![PathBuf::from("/sys/fs/cgroup")]);
    while let Some(dir) = stack.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.file_name() == name.as_str() {
                    found.push(entry.path());
                }
                stack.push(entry.path());
            }
        }
    }
    found
}

/// The names of the cgroups for machines that there are.
pub fn names(groups: &[PathBuf]) -> BTreeSet<String> {
    let entries = groups.iter().flat_map(|group| std::fs::read_dir(group).into_iter().flatten().flatten());
    entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name.starts_with("machine-")).collect()
}

/// The one that a machine is in, the same in all hierarchies in which the worker has any.
pub fn name_of(pid: u32, groups: &[PathBuf]) -> String {
    let is_in = |name: &String| groups.iter().all(|group| pids(&group.join(name)).contains(&pid));
    names(groups).into_iter().find(is_in).unwrap_or_else(|| panic!("{pid} is in none of {groups:?}"))
}

/// Waits until a machine has a memory limit, which it has once a task has it. Its cgroup's name.
async fn limited(groups: &[PathBuf]) -> String {
    let begun = Instant::now();
    loop {
        let found = names(groups).into_iter().find(|name| limit(groups, name).is_some() && !pids(&groups[0].join(name)).is_empty());
        if let Some(found) = found {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "no machine has a limit");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Its memory limit, in bytes.
pub fn limit(groups: &[PathBuf], name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(memory(groups, name)?.0).ok()?;
    // In the older kind of cgroups no limit is the largest number of pages.
    text.trim().parse().ok().filter(|limit| *limit < 1 << 50)
}

fn pids(group: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// The memory limit of a cgroup: its file, and what is in use.
fn memory(groups: &[PathBuf], name: &str) -> Option<(PathBuf, u64)> {
    let number = |path: PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    groups.iter().map(|group| group.join(name)).find_map(|group| {
        let v1 = number(group.join("memory.usage_in_bytes")).map(|used| (group.join("memory.limit_in_bytes"), used));
        v1.or_else(|| number(group.join("memory.current")).map(|used| (group.join("memory.max"), used)))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn each_machine_is_in_a_cgroup_of_its_own_and_nothing_is_left_there() {
    let Some(spawner) = spawner() else { return };
    let (ours, mut dir) = (spawner.clone(), PathBuf::new());
    let started = world(|config: &mut Config| {
        config.machines.spawner = Some(ours);
        config.machines.standby_of_one_max = Some(1);
        config.cgroups = true;
        dir = config.dir.clone();
    });
    let Some((mut w, image)) = started.await else { return };
    let groups = groups_of(&dir);
    if groups.is_empty() {
        w.finish().await;
        return eprintln!("skipped: no writable cgroups");
    }
    let task = |rest: &str| {
        let resources = r#""resources":{"memory":"64MiB","cpus":"500m"}"#;
        format!(r#"{{"isolation":"microvm","image":"{image}",{resources},"timeouts":{{"start":"80s"}},{rest}}}"#)
    };
    // The first is restored for its task, the second waited: both are where they should be while they run.
    for round in 0..2 {
        let job = begin(&mut w, &task(r#""command":"sleep 4; echo done""#)).await;
        w.until("one that waits", |_| children(spawner.pid()).len() == 2).await;
        let all = children(spawner.pid());
        let mine = limited(&groups).await;
        let of_both: BTreeSet<String> = all.iter().map(|pid| name_of(*pid, &groups)).collect();
        let waits: Vec<&String> = of_both.iter().filter(|name| **name != mine).collect();
        assert_eq!((of_both.len(), waits.len()), (2, 1), "round {round}: {of_both:?}");
        assert_eq!(limit(&groups, waits[0]), None, "round {round}");
        // A machine of 192 MiB, as much of its template's, 40 MiB for its VMM, 128 MiB for what is translated where it is emulated, 96 MiB.
        let limit = limit(&groups, &mine).unwrap();
        assert!([520 << 20, 648 << 20].contains(&limit), "{limit}");
        let quota = groups.iter().map(|group| group.join(&mine)).find_map(|group| {
            let v1 = std::fs::read_to_string(group.join("cpu.cfs_quota_us")).ok();
            v1.or_else(|| std::fs::read_to_string(group.join("cpu.max")).ok())
        });
        assert!(quota.as_deref().is_some_and(|quota| quota.starts_with("50000")), "{quota:?}");
        let end = w.end_of(job).await;
        assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "done\n"), "{end:?}");
    }
    // Those of machines that are gone go too.
    let begun = Instant::now();
    while names(&groups).len() > 2 {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", names(&groups));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // What a VMM left, whoever it runs as, is killed with the machine, and the next one gets a fresh cgroup.
    let job = begin(&mut w, &task(r#""command":"sleep 2""#)).await;
    let mine = limited(&groups).await;
    let mut stray = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    for group in &groups {
        std::fs::write(group.join(&mine).join("cgroup.procs"), stray.id().to_string()).unwrap();
    }
    assert_eq!(w.end_of(job).await.ending, Ending::Succeeded);
    assert!(!stray.wait().unwrap().success(), "it was killed");
    let end = w.run_one(&task(r#""command":"echo fine""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "fine\n"), "{end:?}");
    let begun = Instant::now();
    while groups.iter().any(|group| group.join(&mine).exists()) {
        assert!(begun.elapsed() < Duration::from_secs(20), "the old one stays");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    w.finish().await;
    assert!(groups.iter().all(|group| !group.exists()), "none is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_outgrows_its_host_share_is_ended_and_the_result_says_so() {
    let mut dir = PathBuf::new();
    let started = world(|config: &mut Config| {
        config.machines.standby_bytes_max = 0;
        config.cgroups = true;
        dir = config.dir.clone();
    });
    let Some((mut w, image)) = started.await else { return };
    let groups = groups_of(&dir);
    if groups.is_empty() {
        w.finish().await;
        return eprintln!("skipped: no writable cgroups");
    }
    let resources = r#""resources":{"memory":"256MiB"},"timeouts":{"start":"80s","run":"60s"}"#;
    let task = |command: &str| format!(r#"{{"isolation":"microvm","image":"{image}",{resources},"command":"{command}"}}"#);
    // A guest may use all of its memory, twice in a row, and its whole disk, without that.
    let end = w.run_one(&task("dd if=/dev/zero of=big bs=1M count=900 && echo all")).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "all\n"), "{end:?}");
    let end = w.run_one(&task("dd if=/dev/zero of=/dev/null bs=230M count=1 && dd if=/dev/zero of=big bs=1M count=600 && echo all")).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "all\n"), "{end:?}");
    let job = begin(&mut w, &task("sleep 3; dd if=/dev/zero of=/dev/null bs=200M count=1; sleep 60")).await;
    let (file, used) = memory(&groups, &limited(&groups).await).unwrap();
    std::fs::write(file, (used + (24 << 20)).to_string()).unwrap();
    let end = w.end_of(job).await;
    assert_eq!(end.ending, failed(FailureClass::GuestLost), "{end:?}");
    assert!(message(&end).contains("the host's kernel ended the machine, which took more than the "), "{end:?}");
    w.finish().await;
}
