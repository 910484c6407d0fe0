//! Tests of the spawner with real processes.

use super::proto::{Exited, MakeShim, Step};
use super::*;
use minicbor::bytes::ByteVec;
use std::io::Read;
use std::time::{Duration, Instant};

fn words(list: &[&str]) -> Vec<ByteVec> {
    list.iter().map(|word| ByteVec::from(word.as_bytes().to_vec())).collect()
}

fn command(list: &[&str]) -> Spawn {
    Spawn {
        argv: words(list),
        env: words(&["PATH=/usr/bin:/bin", "A=b"]),
        path: words(&["/usr/bin", "/bin"]),
        cwd: ByteVec::from(b"/tmp".to_vec()),
        uid: None,
        gid: None,
        container: None,
        mounts: Vec::new(),
        top: None,
    }
}

async fn run(shim: &Shim, spawn: Spawn, stdin: Option<&OwnedFd>) -> (Reply, String, String) {
    let pipe = || std::io::pipe().expect("a pipe");
    let ((mut out, out_w), (mut err, err_w)) = (pipe(), pipe());
    shim.spawn(&spawn, out_w.as_fd(), err_w.as_fd(), stdin.map(|fd| fd.as_fd()), &[]).await.expect("sent");
    drop((out_w, err_w));
    let reply = shim.reply().await.expect("a reply");
    let (mut o, mut e) = (String::new(), String::new());
    out.read_to_string(&mut o).expect("stdout");
    err.read_to_string(&mut e).expect("stderr");
    (reply, o, e)
}

fn exited(reply: Reply) -> Exited {
    match reply {
        Reply::Exited(exited) => exited,
        other => panic!("{other:?}"),
    }
}

fn alive(pid: i32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat.contains(") Z "),
        Err(_) => false,
    }
}

async fn shim() -> (Spawner, Shim) {
    let spawner = Spawner::start().expect("a zygote");
    let shim = spawner
        .shim(&MakeShim { join: Vec::new(), oom_file: None, containers: false, enters: true, mounts: false, hidden: None })
        .await
        .expect("a shim");
    (spawner, shim)
}

#[tokio::test]
async fn exit_codes_signals_streams_environment_and_directory_arrive() {
    let (_spawner, shim) = shim().await;
    let (reply, out, err) = run(&shim, command(&["sh", "-c", "echo $A $(pwd); echo e >&2; exit 3"]), None).await;
    assert_eq!((exited(reply).code, out.as_str(), err.as_str()), (Some(3), "b /tmp\n", "e\n"));
    let (reply, ..) = run(&shim, command(&["sh", "-c", "kill -SEGV $$"]), None).await;
    assert_eq!(exited(reply).signal, Some(libc::SIGSEGV));
    let (_, out, _) = run(&shim, command(&["env"]), None).await;
    assert_eq!(out, "PATH=/usr/bin:/bin\nA=b\n", "nothing of the worker's own environment");
    let (_, out, _) = run(&shim, command(&["sh", "-c", "ls -l /proc/$$/fd | wc -l"]), None).await;
    // Four lines: "total", 0, 1, 2; the shell itself may hold one more.
    assert!(out.trim().parse::<u32>().is_ok_and(|lines| lines <= 5), "{out}");
    let stdin = memory_file("in", b"hello").expect("a file");
    let (_, out, _) = run(&shim, command(&["cat"]), Some(&stdin)).await;
    assert_eq!(out, "hello");
}

#[tokio::test]
async fn what_can_not_be_started_says_at_which_step() {
    let (_spawner, shim) = shim().await;
    let not_started = |reply| match reply {
        Reply::NotStarted { step, errno } => (step, errno),
        other => panic!("{other:?}"),
    };
    let (reply, ..) = run(&shim, command(&["no-such-program"]), None).await;
    assert_eq!(not_started(reply), (Step::Exec, libc::ENOENT));
    let (reply, ..) = run(&shim, command(&["/etc/passwd"]), None).await;
    assert_eq!(not_started(reply), (Step::Exec, libc::EACCES));
    let mut nowhere = command(&["true"]);
    nowhere.cwd = ByteVec::from(b"/no/such/place".to_vec());
    let (reply, ..) = run(&shim, nowhere, None).await;
    assert_eq!(not_started(reply), (Step::Directory, libc::ENOENT));
    let (reply, ..) = run(&shim, command(&["true"]), None).await;
    assert_eq!(exited(reply).code, Some(0), "the shim goes on");
}

#[tokio::test]
async fn a_large_environment_travels_in_a_file() {
    let (_spawner, shim) = shim().await;
    let mut spawn = command(&["sh", "-c", "echo ${#BIG0} ${#BIG9}"]);
    spawn.env.extend((0..10).map(|n| ByteVec::from(format!("BIG{n}={}", "x".repeat(100_000)).into_bytes())));
    let (_, out, _) = run(&shim, spawn, None).await;
    assert_eq!(out, "100000 100000\n");
}

#[tokio::test]
async fn daemons_that_left_the_session_are_killed_with_the_task() {
    let (_spawner, shim) = shim().await;
    let script = "(setsid sh -c 'sleep 300 & echo $! ; exec sleep 300' & ) ; sleep 0.2; exit 0";
    let pipe = || std::io::pipe().expect("a pipe");
    let ((mut out, out_w), (_err, err_w)) = (pipe(), pipe());
    shim.spawn(&command(&["sh", "-c", script]), out_w.as_fd(), err_w.as_fd(), None, &[]).await.expect("sent");
    drop((out_w, err_w));
    let exited = exited(shim.reply().await.expect("a reply"));
    assert_eq!((exited.code, exited.strays, exited.stuck), (Some(0), 2, false));
    let mut text = String::new();
    out.read_to_string(&mut text).expect("every writer is gone");
    assert!(!alive(text.trim().parse().expect("a pid")));
}

#[tokio::test]
async fn term_reaches_the_whole_tree_and_kill_ends_what_ignores_it() {
    let (_spawner, shim) = shim().await;
    let script = "trap '' TERM; setsid sh -c 'trap \"\" TERM; echo; sleep 300' & sleep 300";
    let pipe = || std::io::pipe().expect("a pipe");
    let ((mut out, out_w), (_err, err_w)) = (pipe(), pipe());
    shim.spawn(&command(&["sh", "-c", script]), out_w.as_fd(), err_w.as_fd(), None, &[]).await.expect("sent");
    assert_eq!(out.read(&mut [0; 1]).ok(), Some(1), "both ignore TERM now");
    shim.term().await.expect("sent");
    let early = tokio::time::timeout(Duration::from_millis(300), shim.reply()).await;
    assert!(early.is_err(), "{early:?}");
    let begin = Instant::now();
    shim.kill().await.expect("sent");
    let exited = exited(shim.reply().await.expect("a reply"));
    assert!(exited.signal.is_some() || exited.code.is_some_and(|code| code != 0), "{exited:?}");
    assert!(begin.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn nothing_outlives_the_worker_however_it_dies() {
    let (spawner, shim) = shim().await;
    let pipe = || std::io::pipe().expect("a pipe");
    let ((mut out, out_w), (_err, err_w)) = (pipe(), pipe());
    let script = "setsid sh -c 'echo $$; exec sleep 300' & echo $$; wait";
    shim.spawn(&command(&["sh", "-c", script]), out_w.as_fd(), err_w.as_fd(), None, &[]).await.expect("sent");
    drop((out_w, err_w));
    let mut text = [0; 64];
    let mut len = 0;
    while text[..len].iter().filter(|b| **b == b'\n').count() < 2 {
        len += out.read(&mut text[len..]).expect("pids");
    }
    let pids: Vec<i32> = String::from_utf8_lossy(&text[..len]).lines().map(|line| line.parse().expect("a pid")).collect();
    let zygote = spawner.pid().cast_signed();
    // What the kernel does when the worker is killed: its ends of the sockets close.
    drop((shim, spawner));
    let begin = Instant::now();
    while pids.iter().any(|pid| alive(*pid)) || alive(zygote) {
        assert!(begin.elapsed() < Duration::from_secs(5), "{pids:?} {zygote}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // SAFETY: takes the status of our own child.
    unsafe { libc::waitpid(zygote, std::ptr::null_mut(), 0) };
}

/// `cargo test … spawn_rate -- --ignored --nocapture`: how many /bin/true a second, beside plain posix_spawn and wait on two threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, not a check"]
async fn spawn_rate() {
    const TASKS: u32 = 4_000;
    for slots in [1_u32, 2, 4, 16, 64] {
        let spawner = Spawner::start().expect("a zygote");
        let mut shims = Vec::new();
        for _ in 0..slots {
            shims.push(
                spawner
                    .shim(&MakeShim { join: Vec::new(), oom_file: None, containers: false, enters: true, mounts: false, hidden: None })
                    .await
                    .expect("a shim"),
            );
        }
        let begin = Instant::now();
        let runs = shims.into_iter().map(|shim| {
            tokio::spawn(async move {
                for _ in 0..TASKS / slots {
                    let (reply, ..) = run(&shim, command(&["/bin/true"]), None).await;
                    assert_eq!(exited(reply).code, Some(0));
                }
            })
        });
        futures::future::join_all(runs).await;
        println!("{slots} slots: {:.0} a second", f64::from(TASKS) / begin.elapsed().as_secs_f64());
    }
    let begin = Instant::now();
    let threads: Vec<_> = (0..2)
        .map(|_| {
            std::thread::spawn(|| {
                for _ in 0..TASKS / 2 {
                    let _ = std::process::Command::new("/bin/true").status();
                }
            })
        })
        .collect();
    for thread in threads {
        let _ = thread.join();
    }
    println!("std Command on two threads: {:.0} a second", f64::from(TASKS) / begin.elapsed().as_secs_f64());
}

#[tokio::test]
async fn a_killed_zygote_is_replaced_and_a_killed_shim_noticed() {
    let (spawner, shim) = shim().await;
    let zygote = spawner.pid().cast_signed();
    // SAFETY: kills and reaps our own child.
    unsafe {
        libc::kill(zygote, libc::SIGKILL);
        libc::waitpid(zygote, std::ptr::null_mut(), 0);
    }
    assert!(matches!(shim.reply().await, Err(SpawnerError::ShimGone)));
    let shim = spawner
        .shim(&MakeShim { join: Vec::new(), oom_file: None, containers: false, enters: true, mounts: false, hidden: None })
        .await
        .expect("another");
    assert_ne!(spawner.pid().cast_signed(), zygote);
    let (reply, out, _) = run(&shim, command(&["sh", "-c", "cat /proc/$PPID/environ | tr -d '\\0'"]), None).await;
    assert_eq!((exited(reply).code, out.as_str()), (Some(0), ""), "a task sees nothing of the worker through its parent");
}

#[tokio::test]
async fn orphans_that_ended_are_no_strays() {
    let (_spawner, shim) = shim().await;
    let (reply, ..) = run(&shim, command(&["sh", "-c", "(true &) ; (true &) ; sleep 0.1"]), None).await;
    let exited = exited(reply);
    assert_eq!((exited.code, exited.strays), (Some(0), 0));
}

#[tokio::test]
async fn a_command_that_is_to_end_before_it_began_ends() {
    let (_spawner, shim) = shim().await;
    for round in 0..100 {
        let null = || OwnedFd::from(std::fs::File::options().write(true).open("/dev/null").expect("/dev/null"));
        let (out, err) = (null(), null());
        shim.spawn(&command(&["sleep", "60"]), out.as_fd(), err.as_fd(), None, &[]).await.expect("sent");
        shim.term().await.expect("sent");
        let reply = tokio::time::timeout(Duration::from_secs(20), shim.reply()).await.expect("TERM was lost").expect("a reply");
        assert_eq!(exited(reply).signal, Some(libc::SIGTERM), "round {round}");
    }
}

#[tokio::test]
async fn orphans_that_end_are_reaped_while_their_task_runs() {
    let (_spawner, shim) = shim().await;
    // Each subshell is an orphan at once; the last line counts who is below the shim and dead.
    let script = "for i in 1 2 3 4 5 6 7 8; do (sleep 0.1 & ); done; sleep 1; cat /proc/[0-9]*/stat 2>/dev/null | \
        awk -v p=$(awk '/^PPid/{print $2}' /proc/$$/status) '{ sub(/.*\\) /, \"\"); if ($1 == \"Z\" && $2 == p) n++ } END { print n + 0 }'";
    let (reply, out, err) = run(&shim, command(&["sh", "-c", script]), None).await;
    assert_eq!((exited(reply).code, out.trim(), err.as_str()), (Some(0), "0", ""));
}

/// A directory with a file system of its own, unmounted when this goes.
struct Mounted(std::path::PathBuf);

impl Mounted {
    fn at(dir: &std::path::Path) -> Self {
        std::fs::create_dir_all(dir).expect("made");
        rustix::mount::mount("tmpfs", dir, "tmpfs", rustix::mount::MountFlags::empty(), c"mode=755").expect("mounted");
        Self(dir.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test]
async fn a_volume_is_shown_to_its_command_alone_as_its_own_and_nothing_is_left() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can mount");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).expect("opened");
    let (volumes, work) = (dir.path().join("volumes"), dir.path().join("work"));
    let (ours, others) = (Mounted::at(&volumes.join("ours")), Mounted::at(&volumes.join("others")));
    std::fs::write(ours.0.join("old"), "old").expect("written");
    std::fs::create_dir(&work).expect("made");
    for (path, user) in [(&ours.0, 1_234), (&ours.0.join("old"), 1_234), (&work, 54_321)] {
        chown(path, Some(user), Some(user)).expect("changed");
    }
    let spawner = Spawner::start().expect("a zygote");
    let hidden = Some(volumes.to_string_lossy().into_owned());
    let make = MakeShim { join: Vec::new(), oom_file: None, containers: false, enters: true, mounts: true, hidden };
    let shim = spawner.shim(&make).await.expect("a shim");
    let show =
        |read_only| proto::ShowMount { path: "a/data".into(), read_only, users: vec![(1_234, 54_321)], groups: vec![(1_234, 54_321)] };
    let script = |script: &str, read_only| Spawn {
        cwd: ByteVec::from(work.to_string_lossy().as_bytes().to_vec()),
        uid: Some(54_321),
        gid: Some(54_321),
        mounts: vec![show(read_only)],
        top: Some(work.to_string_lossy().into_owned()),
        ..command(&["sh", "-c", script])
    };
    let (_errors, write) = std::io::pipe().expect("a pipe");
    let run = async |spawn: Spawn, trees: &[OwnedFd]| {
        let (mut out, out_w) = std::io::pipe().expect("a pipe");
        shim.spawn(&spawn, out_w.as_fd(), write.as_fd(), None, trees).await.expect("sent");
        drop(out_w);
        let reply = shim.reply().await.expect("a reply");
        let mut text = String::new();
        out.read_to_string(&mut text).expect("stdout");
        (reply, text)
    };
    let tree = || vec![mounts::copy_of(&ours.0).expect("a copy")];
    // It also moves what the volume lies in, and leaves a process behind that is in it.
    let words = "stat -c %u a/data/old; echo new > a/data/new; mv a b; cat b/data/new; (cd b/data; sleep 60 &)";
    let (reply, text) = run(script(words, false), &tree()).await;
    assert_eq!((exited(reply).code, text.as_str()), (Some(0), "54321\nnew\n"));
    assert_eq!(std::fs::metadata(ours.0.join("new")).expect("there").uid(), 1_234);
    assert_eq!(std::fs::read_dir(work.join("b/data")).expect("there").count(), 0, "the worker finds none of its files among the task's");
    let listed = Spawn { cwd: ByteVec::from(b"/".to_vec()), ..command(&["cat", "/proc/self/mountinfo"]) };
    let (_, text) = run(listed, &[]).await;
    let name = volumes.to_string_lossy();
    assert!(!text.contains(&*name) && !text.contains("b/data"), "{text}");
    let (reply, text) = run(script("cat a/data/old; echo x > a/data/old || echo refused", true), &tree()).await;
    assert_eq!((exited(reply).code, text.as_str()), (Some(0), "oldrefused\n"));
    // A link on the way leads nowhere.
    std::fs::remove_dir(work.join("a/data")).expect("empty");
    std::os::unix::fs::symlink(&others.0, work.join("a/data")).expect("linked");
    let (reply, _) = run(script("true", false), &tree()).await;
    assert!(matches!(&reply, Reply::Refused(why) if why.starts_with("showing a volume at a/data: making the directory: ")), "{reply:?}");
}
