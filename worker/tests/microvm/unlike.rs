//! What is left of machines, and how unlike they are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use volley_jobspecs::keys;
use volley_jobspecs::wire::report::Ending;

use crate::groups::groups_of;
use crate::support::text;
use crate::{children, spawner, task, world};

/// Machines in a row, each with a scratch disk. A thousand are run by `tests/bench/run restore-leaks`.
const MACHINES: usize = 31;

/// What this process holds: descriptors by kind, the machines' processes, and files of its directory.
#[derive(Debug, PartialEq, Eq)]
pub struct Held {
    files: BTreeMap<String, usize>,
    processes: usize,
    paths: BTreeSet<PathBuf>,
    /// Cgroups of the worker, with what is in them.
    groups: BTreeMap<PathBuf, String>,
}

impl Held {
    pub fn now(spawner: u32, dir: &Path) -> Self {
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
            let name = std::fs::read_link(entry.path()).unwrap_or_default().to_string_lossy().into_owned();
            *files.entry(name.split('[').next().unwrap_or_default().to_owned()).or_default() += 1;
        }
        let mut paths = BTreeSet::new();
        let mut stack = vec![dir.to_owned()];
        while let Some(dir) = stack.pop() {
            for entry in std::fs::read_dir(dir).unwrap().flatten() {
                if entry.file_type().unwrap().is_dir() {
                    stack.push(entry.path());
                }
                paths.insert(entry.path());
            }
        }
        let mut groups = BTreeMap::new();
        let mut stack = groups_of(dir);
        while let Some(group) = stack.pop() {
            let inner = std::fs::read_dir(&group).into_iter().flatten().flatten();
            stack.extend(inner.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()));
            let members = std::fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
            groups.insert(group, members);
        }
        Self { files, processes: children(spawner).len(), paths, groups }
    }
}

const WHO: &str = "head -c 16 /dev/urandom | od -A n -t x1 | tr -d ' '; cat /proc/sys/kernel/random/boot_id /proc/sys/kernel/random/uuid \
                   /etc/machine-id; hostname; grep stack /proc/self/maps";

#[tokio::test(flavor = "multi_thread")]
async fn thirty_machines_leave_nothing_and_are_unlike_each_other() {
    let Some(spawner) = spawner() else { return };
    let (ours, mut dir) = (spawner.clone(), PathBuf::new());
    let started = world(|config| {
        config.machines.spawner = Some(ours);
        // None waits, so that what is left is left by tasks.
        config.machines.standby_bytes_max = 0;
        config.cgroups = true;
        dir = config.dir.clone();
    });
    let Some((mut w, image)) = started.await else { return };
    let (mut before, mut seen, mut runs) = (None, BTreeSet::new(), Vec::new());
    for number in 0..MACHINES {
        let begin = Instant::now();
        let end = w.run_one(&task(&image, &format!(r#""command":"{WHO}""#))).await;
        runs.push(begin.elapsed());
        assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
        let out = text(&end.stdout);
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(lines.len(), 6, "{out}");
        for (kind, line) in lines.iter().enumerate() {
            assert!(seen.insert((kind, (*line).to_owned())), "machine {number} repeats line {kind}: {out}");
        }
        let begin = Instant::now();
        loop {
            let now = Held::now(spawner.pid(), &dir);
            // The first run made the slot and the template.
            let first: &Held = before.get_or_insert_with(|| Held::now(spawner.pid(), &dir));
            if *first == now {
                break;
            }
            assert!(begin.elapsed() < Duration::from_secs(5), "after {number}: {now:?} and at first {first:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    assert_eq!(before.unwrap().processes, 0);
    runs.remove(0);
    runs.sort();
    eprintln!("a task with a restored machine, from order to report: median {:?}, all {runs:?}", runs[runs.len() / 2]);
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_waits_is_taken_and_another_one_waits_then() {
    let Some(spawner) = spawner() else { return };
    let ours = spawner.clone();
    let Some((mut w, image)) = world(|config| config.machines.spawner = Some(ours)).await else { return };
    let mut runs = Vec::new();
    for _ in 0..6 {
        let begin = Instant::now();
        let end = w.run_one(&task(&image, r#""command":["true"]"#)).await;
        runs.push((begin.elapsed(), end.timing));
        assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
        let begin = Instant::now();
        while children(spawner.pid()).is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(20), "none waits");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // It stands still some moments after its process began.
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    eprintln!("a task with a machine that waited, from order to report: {runs:?}");
    // Both slots at once, one task behind the other in each.
    let begin = Instant::now();
    let (job, _) = w.job(r#"{"count":8}"#, &task(&image, r#""command":"echo $VOLLEY_TASK_INDEX > /volley/out/index; hostname""#));
    let orders = [0, 4].map(|first| w.bundle(job, first, 4).1);
    w.order(orders.to_vec()).await;
    w.until("eight ends", |w| w.ends().iter().filter(|end| end.name.job == job).count() == 8).await;
    eprintln!("eight tasks in two slots: {:?}", begin.elapsed());
    for end in w.ends().into_iter().filter(|end| end.name.job == job) {
        assert_eq!((end.ending, text(&end.stdout)), (Ending::Succeeded, format!("{job}-{}-1\n", end.name.index)), "{:?}", end.message);
        let index = w.objects.read(&keys::attempt_output(&end.name, "index")).unwrap();
        assert_eq!(String::from_utf8(index).unwrap(), format!("{}\n", end.name.index));
    }
    w.finish().await;
    assert_eq!(children(spawner.pid()), Vec::<u32>::new(), "they go with the worker");
}
