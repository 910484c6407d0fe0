//! What happens to a worker and its host, and what is left of its machines.

use std::collections::BTreeSet;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::Ending;
use volley_worker::{Config, MachineConfig};

use crate::groups::groups_of;
use crate::support::{World, text};
use crate::{children, failed, image, is_running, message, spawner, task, world};

/// Machines of the worker that is killed.
const MACHINES: u32 = 20;

/// Everything of a directory.
pub fn files(dir: &Path) -> BTreeSet<PathBuf> {
    let (mut all, mut stack) = (BTreeSet::new(), vec![dir.to_owned()]);
    while let Some(dir) = stack.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                stack.push(entry.path());
            }
            all.insert(entry.path());
        }
    }
    all
}

/// A worker with twenty machines; says where it is and who they are, and waits to be killed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by the test below"]
async fn a_worker_with_twenty_machines() {
    if std::env::var_os("VOLLEY_TEST_KILLED").is_none() {
        return;
    }
    let Some(spawner) = spawner() else { return };
    let (ours, mut dir) = (spawner.clone(), PathBuf::new());
    let started = world(|config| {
        config.slots = MACHINES;
        // Their disks are sparse.
        (config.memory_bytes, config.disk_bytes) = (64 << 30, 1 << 40);
        config.machines.spawner = Some(ours);
        config.machines.standby_of_one_max = Some(2);
        config.cgroups = true;
        dir = config.dir.clone();
    });
    let Some((mut w, image)) = started.await else { return };
    let long = r#""command":"echo on; dd if=/dev/zero of=big bs=1M count=4 2>/dev/null; sleep 1000""#;
    let (job, _) = w.job(&format!(r#"{{"count":{MACHINES}}}"#), &task(&image, long));
    let orders = (0..MACHINES).map(|index| w.bundle(job, index, 1).1).collect();
    w.order(orders).await;
    let all = |w: &mut World| w.last_beat().at.iter().filter(|at| at.stage == volley_jobspecs::wire::work::AtStage::Running).count();
    w.until("twenty commands", |w| is_running(w, job) && all(w) == MACHINES as usize).await;
    let pids: Vec<String> = children(spawner.pid()).iter().chain([&spawner.pid()]).map(u32::to_string).collect();
    println!("killed {} {image} {}", dir.display(), pids.join(" "));
    tokio::time::sleep(Duration::from_secs(600)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_killed_leaves_nothing_that_the_next_one_does_not_take_away() {
    let mounts = || std::fs::read_to_string("/proc/self/mounts").unwrap();
    let before = mounts();
    let mut worker = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "bad_days::a_worker_with_twenty_machines", "--ignored", "--nocapture"])
        .env("VOLLEY_TEST_KILLED", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufReader::new(worker.stdout.take().unwrap()).lines();
    let said = lines.map_while(Result::ok).find_map(|line| Some(line.split_once("killed ")?.1.to_owned()));
    worker.kill().unwrap();
    worker.wait().unwrap();
    let Some(said) = said else { return eprintln!("skipped: it had no machines") };
    let begin = Instant::now();
    let mut words = said.split(' ').map(str::to_owned);
    let (dir, image) = (PathBuf::from(words.next().unwrap()), words.next().unwrap());
    let pids: Vec<String> = words.collect();
    assert!(pids.len() > MACHINES as usize, "{pids:?}");
    while pids.iter().any(|pid| Path::new("/proc").join(pid).exists()) {
        assert!(begin.elapsed() < Duration::from_secs(30), "{pids:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    eprintln!("{} processes are gone {:?} after the worker", pids.len(), begin.elapsed());
    let groups = groups_of(&dir);
    eprintln!("it left {} files, cgroups {groups:?}", files(&dir).len());
    assert_eq!(mounts(), before, "no mount is the host's");
    // The next one finds the directory, and nothing in it that is not its own.
    let begin = Instant::now();
    let old = dir.clone();
    let mut w = World::start_in(tempfile::tempdir().unwrap(), move |config: &mut Config| {
        config.isolation = vec![Isolation::Microvm];
        config.machines = MachineConfig::new(&old);
        config.dir = old;
        config.cgroups = true;
    })
    .await;
    eprintln!("the next one is there after {:?}", begin.elapsed());
    let left: Vec<PathBuf> = files(&dir).into_iter().filter(|path| !path.starts_with(dir.join("images"))).collect();
    let expected =
        ["cache", "lock", "machines", "machines/initrd", "machines/scratch", "machines/vmlinuz", "slots"].map(|name| dir.join(name));
    assert_eq!(left, expected, "scratch disks and slots of the first are gone");
    let inner = |group: &PathBuf| {
        let all =
            std::fs::read_dir(group).into_iter().flatten().flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        all.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    for group in groups_of(&dir) {
        assert_eq!(inner(&group), ["templates"], "{}", group.display());
    }
    let end = w.run_one(&task(&image, r#""command":"echo again""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "again\n"), "{end:?}");
    w.finish().await;
    assert_eq!(groups_of(&dir), Vec::<PathBuf>::new());
    std::fs::remove_dir_all(&dir).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_was_killed_while_it_waited_costs_its_task_nothing() {
    let Some(spawner) = spawner() else { return };
    let ours = spawner.clone();
    let change = |config: &mut Config| {
        config.machines.spawner = Some(ours);
        config.machines.standby_of_one_max = Some(1);
    };
    let Some((mut w, image)) = world(change).await else { return };
    assert_eq!(w.run_one(&task(&image, r#""command":["true"]"#)).await.ending, Ending::Succeeded);
    for signal in [libc::SIGKILL, libc::SIGSEGV] {
        w.until("one that waits", |_| children(spawner.pid()).len() == 1).await;
        tokio::time::sleep(Duration::from_millis(700)).await;
        let waits = children(spawner.pid())[0];
        // SAFETY: a plain system call, on a process of this test's own spawner.
        assert_eq!(unsafe { libc::kill(waits.cast_signed(), signal) }, 0);
        let end = w.run_one(&task(&image, r#""command":"echo fine""#)).await;
        assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "fine\n"), "{end:?}");
    }
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gibibyte_of_output_is_counted_and_its_ends_are_kept() {
    let Some((mut w, image)) = world(|config| config.stream_bytes_max = 1 << 20).await else { return };
    let begin = Instant::now();
    let command = r#""command":"echo first; dd if=/dev/zero bs=1M count=1024 2>/dev/null; echo last""#;
    let (job, _) = w.job(r#"{"count":1}"#, &task(&image, command));
    let (_, order) = w.bundle(job, 0, 1);
    w.order(vec![order]).await;
    let mut ended = None;
    while ended.is_none() {
        assert!(begin.elapsed() < Duration::from_secs(300));
        tokio::time::sleep(Duration::from_millis(50)).await;
        ended = w.ends().into_iter().find(|end| end.name.job == job);
    }
    let end = ended.unwrap();
    eprintln!("1 GiB of output: {:?}", begin.elapsed());
    let stdout = end.stdout.clone().unwrap();
    assert_eq!((end.ending, stdout.bytes, stdout.truncated), (Ending::Succeeded, (1 << 30) + 11, true), "{:?}", end.message);
    assert!(stdout.tail.ends_with(b"\0last\n"));
    w.finish().await;
}

/// A file system in memory, of a size, until this is dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn mount(mib: u32) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={mib}m,mode=0755")).unwrap();
        match rustix::mount::mount("tmpfs", dir.path(), "tmpfs", MountFlags::empty(), options.as_c_str()) {
            Ok(()) => Some(Self(dir)),
            Err(why) => {
                eprintln!("skipped: mounting a tmpfs: {why}");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_disk_that_is_full_is_no_verdict_on_a_task_and_no_success_either() {
    let Some(small) = Small::mount(256) else { return };
    let images = small.0.path().join("worker/images");
    let image = match image::busybox(&images).await {
        Ok(image) => image,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let worker = small.0.path().join("worker");
    let dir = worker.clone();
    let mut w = World::start_in(tempfile::tempdir().unwrap(), move |config: &mut Config| {
        config.isolation = vec![Isolation::Microvm];
        config.machines = MachineConfig::new(&dir);
        config.machines.standby_bytes_max = 0;
        config.dir = dir;
    })
    .await;
    let run = |rest: &str| task(&image, rest).replacen(r#""start":"80s""#, r#""start":"80s","run":"60s""#, 1);
    let end = w.run_one(&run(r#""command":"dd if=/dev/zero of=big bs=1M count=20 conv=fsync 2>/dev/null; echo fits""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "fits\n"), "{end:?}");
    // More than the host has: the task is told of errors, or of nothing, and fails or succeeds. Neither is its verdict.
    for (script, code) in [
        ("dd if=/dev/zero of=big bs=1M count=600 conv=fsync || exit 3", Some(3)),
        ("dd if=/dev/zero of=/volley/out/big bs=1M count=600; sync; exit 0", Some(0)),
    ] {
        let begin = Instant::now();
        let end = w.run_one(&run(&format!(r#""command":"{script}""#))).await;
        eprintln!("{script}: {:?}, {}, after {:?}", end.ending, message(&end), begin.elapsed());
        assert_eq!((end.ending, end.code), (failed(FailureClass::StorageFailed), code), "{end:?}");
        assert!(message(&end).contains("of the machine's disk failed on the host; the worker's disk is full or broken"), "{end:?}");
        assert!(begin.elapsed() < Duration::from_secs(55), "it did not stand still until its time was over");
    }
    // So full that there is not even an empty disk.
    let filler = std::fs::File::create(small.0.path().join("filler")).unwrap();
    let mut bytes = 256 << 20;
    while bytes > 4096 {
        bytes = match rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, filler.metadata().unwrap().len() + bytes) {
            Ok(()) => bytes,
            Err(_) => bytes / 2,
        };
    }
    let begin = Instant::now();
    let end = w
        .run_one(&run(r#""command":"echo never","resources":{"memory":"64MiB","disk":"64MiB"}"#).replacen(
            r#""resources":{"memory":"64MiB"},"#,
            "",
            1,
        ))
        .await;
    eprintln!("no room at all: {}, after {:?}", message(&end), begin.elapsed());
    assert_eq!(end.ending, failed(FailureClass::StorageFailed), "{end:?}");
    assert!(message(&end).contains("disk"), "{end:?}");
    drop(filler);
    std::fs::remove_file(small.0.path().join("filler")).unwrap();
    let end = w.run_one(&run(r#""command":"echo fine""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "fine\n"), "{end:?}");
    w.finish().await;
}
