//! What a VMM's process can and can't do, tried as one: this very program, started by the spawner.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use volley_worker::cgroup::Cgroups;
use volley_worker::vmm::console::Tail;
use volley_worker::vmm::files::{Frozen, in_memory};
use volley_worker::vmm::kvm::{self, Kvm};
use volley_worker::vmm::spawner::proto::{Exited, Step};
use volley_worker::vmm::spawner::{Launch, MachineSpawner, Process, Program, SpawnError, USERS_FIRST};

use crate::{SOON, children, median, spawner};

const MEMORY: i32 = 3;
const STATE: i32 = 4;
const ROOT: i32 = 5;

/// Starts `/usr/bin/busybox` or another program with streams that go nowhere.
async fn start(spawner: &MachineSpawner, words: &[&str], cgroups: &[String]) -> Result<Process, SpawnError> {
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    let argv = words.iter().map(Into::into).collect();
    let launch =
        Launch { program: Program::Path(words[0].as_ref()), argv, cgroups, inherits: vec![null.as_fd(), null.as_fd(), null.as_fd()] };
    spawner.launch(&launch).await
}

/// Runs an ignored test of this program as a VMM's process, with these descriptors behind the standard streams. What it said, and its end.
async fn run_inside(spawner: &MachineSpawner, name: &str, more: &[BorrowedFd<'_>], cgroups: &[String]) -> (String, Exited) {
    let null = File::open("/dev/null").unwrap();
    let program = File::open(std::env::current_exe().unwrap()).unwrap();
    let (said, write) = Tail::follow().unwrap();
    let mut inherits = vec![null.as_fd(), write.as_fd(), write.as_fd()];
    inherits.extend_from_slice(more);
    let argv = ["test", "--exact", name, "--ignored", "--nocapture", "--test-threads=1"].map(Into::into).to_vec();
    let launch = Launch { program: Program::File(program.as_fd()), argv, cgroups, inherits };
    let process = spawner.launch(&launch).await.unwrap();
    drop(launch);
    drop(write);
    let exited = tokio::time::timeout(SOON, process.exited()).await.unwrap().unwrap();
    (said.ended(SOON).await, exited)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_can_change_nothing_and_reach_nobody() {
    let Some(spawner) = spawner() else { return };
    let dir = tempfile::tempdir().unwrap();
    let frozen = |bytes: &[u8]| {
        let file = in_memory("test").unwrap();
        file.write_all_at(bytes, 0).unwrap();
        Frozen::seal(file).unwrap()
    };
    let (memory, state) = (frozen(&[1; 8192]), frozen(b"state"));
    let root = dir.path().join("root");
    fs::write(&root, "root").unwrap();
    fs::set_permissions(&root, PermissionsExt::from_mode(0o444)).unwrap();
    let root = File::open(root).unwrap();
    // A sibling with a socket that anybody could connect to who reached it; it has the first user.
    let sibling = start(&spawner, &["/usr/bin/sleep", "600"], &[]).await.unwrap();
    assert_eq!(sibling.user(), Some(USERS_FIRST));
    let socket = sibling.dir().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    fs::set_permissions(&socket, PermissionsExt::from_mode(0o777)).unwrap();
    let cgroups = Cgroups::open(&format!("volley-test-vmm-{}", std::process::id()));
    let cgroups = cgroups.map_err(|why| eprintln!("without cgroups: {why}")).ok();
    let slot = cgroups.as_ref().map(|cgroups| cgroups.slot("0").unwrap());
    let joins = slot.as_ref().map(|slot| slot.join_files()).unwrap_or_default();
    let (memory_fd, state_fd) = (memory.open().unwrap(), state.open().unwrap());
    let more = [memory_fd.as_fd(), state_fd.as_fd(), root.as_fd()];
    let (said, exited) = run_inside(&spawner, "confined::inside", &more, &joins).await;
    assert_eq!(exited.code, Some(0), "{said}");
    assert!(said.contains("1 passed"), "{said}");
    if slot.is_some() {
        assert!(said.contains("volley-test-vmm-"), "it is in its cgroup: {said}");
    }
    assert!(said.lines().find_map(|line| line.strip_prefix("mounts ")?.parse::<u32>().ok()).is_some_and(|mounts| mounts < 10), "{said}");
    // Nor can it have the worker connect to anything but its own: a link, a file, somebody else's socket.
    std::os::unix::fs::symlink(&socket, sibling.dir().join("link")).unwrap();
    fs::write(sibling.dir().join("file"), "").unwrap();
    for name in ["link", "file", "none", "socket", "../socket"] {
        assert!(sibling.connect(name).await.is_err(), "{name}");
    }
    std::os::unix::fs::chown(&socket, sibling.user(), None).unwrap();
    sibling.connect("socket").await.unwrap();
    assert!(sibling.connect("link").await.is_err());
    drop(sibling);
    if let Some(cgroups) = cgroups {
        cgroups.sweep().unwrap();
    }
}

/// Runs as a VMM's process, with the user behind its sibling's. Prints what is compared outside.
#[test]
#[ignore = "started by the test above"]
fn inside() {
    // SAFETY: a plain system call.
    let user = unsafe { libc::getuid() };
    if user != USERS_FIRST + 1 {
        eprintln!("not started by the spawner");
        return;
    }
    for name in ["cgroup", "mounts"] {
        let text = fs::read_to_string(format!("/proc/self/{name}")).unwrap();
        println!("{}", if name == "mounts" { format!("mounts {}", text.lines().count()) } else { text });
    }
    nothing_of_a_template_can_be_changed();
    nothing_of_the_host_is_there(user);
    nobody_can_be_reached(user);
}

fn errno(result: Result<impl Sized, io::Error>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

fn nothing_of_a_template_can_be_changed() {
    for fd in [MEMORY, STATE] {
        let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{fd}")).unwrap();
        assert_eq!(errno(file.write_at(b"x", 0)), Some(libc::EPERM));
        assert_eq!(errno(file.set_len(0)), Some(libc::EPERM));
        assert_eq!(errno(file.set_len(1 << 20)), Some(libc::EPERM));
        // SAFETY: a plain system call, whose map is never touched.
        let shared =
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_eq!(shared, libc::MAP_FAILED);
        // SAFETY: a plain system call.
        assert!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, 0) } < 0);
        assert!(fs::set_permissions(format!("/proc/self/fd/{fd}"), PermissionsExt::from_mode(0o777)).is_err());
    }
    let path = format!("/proc/self/fd/{ROOT}");
    assert_eq!(errno(File::options().write(true).open(&path)), Some(libc::EACCES));
    assert!(fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).is_err());
    // SAFETY: plain system calls.
    unsafe {
        assert!(libc::write(ROOT, c"x".as_ptr().cast(), 1) < 0);
        assert!(libc::ftruncate(ROOT, 0) < 0);
    }
    // Its name is nowhere here, so another file can't take its place.
    assert!(!fs::read_link(&path).is_ok_and(|path| path.exists()));
}

fn nothing_of_the_host_is_there(user: u32) {
    let mut names: Vec<String> = fs::read_dir("/").unwrap().flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names.retain(|name| !["bin", "lib", "lib32", "lib64", "sbin"].contains(&name.as_str()));
    assert_eq!(names, ["dev", "etc", "m", "proc", "usr"]);
    let devices: Vec<_> = fs::read_dir("/dev").unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap()).collect();
    assert!(devices.iter().all(|name| ["null", "zero", "urandom", "kvm"].contains(&name.as_str())), "{devices:?}");
    assert!(fs::read_dir("/etc").unwrap().flatten().all(|entry| entry.file_name() == "ld.so.cache"));
    for dir in ["/", "/usr", "/etc", "/dev", "/m", "/proc"] {
        assert!(File::create(format!("{dir}/new")).is_err(), "{dir}");
    }
    File::create("mine").unwrap();
    assert_eq!((fs::metadata(".").unwrap().uid(), fs::metadata(".").unwrap().mode() & 0o777), (user, 0o700));
    // Descriptors: those it was given, and the directory that lists them.
    let mut open: Vec<i32> =
        fs::read_dir("/proc/self/fd").unwrap().flatten().map(|e| e.file_name().to_str().unwrap().parse().unwrap()).collect();
    open.sort_unstable();
    assert_eq!(open[..6], [0, 1, 2, 3, 4, 5]);
    assert!(open.len() <= 8, "{open:?}");
    let status = fs::read_to_string("/proc/self/status").unwrap();
    for line in ["CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1", "Groups:\t \n"] {
        assert!(status.contains(line), "{line:?}: {status}");
    }
    assert_eq!(std::env::vars_os().count(), 0, "no variables, so no secrets in them");
}

fn nobody_can_be_reached(user: u32) {
    let sibling = format!("/m/{}", user - 1);
    assert_eq!(errno(fs::read_dir("/m")), Some(libc::EACCES));
    assert_eq!(errno(fs::read_dir(&sibling)), Some(libc::EACCES));
    assert_eq!(errno(UnixStream::connect(format!("{sibling}/socket"))), Some(libc::EACCES));
    // Other processes can't be seen, and the spawner can't be touched.
    let seen: Vec<u32> = fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    assert_eq!(seen, [std::process::id()]);
    // SAFETY: plain system calls.
    unsafe {
        assert_eq!((libc::kill(1, 0), io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EPERM)));
        assert!(libc::setuid(0) < 0);
        assert!(libc::setgid(0) < 0);
        assert!(libc::unshare(libc::CLONE_NEWNET) < 0);
        assert!(libc::chroot(c"/usr".as_ptr()) < 0);
    }
    assert_eq!(std::net::TcpStream::connect("127.0.0.1:4222").unwrap_err().kind(), ErrorKind::NetworkUnreachable);
    assert!(fs::read_to_string("/proc/self/net/dev").unwrap().lines().skip(2).all(|line| line.trim_start().starts_with("lo:")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_lives_as_long_as_what_holds_it() {
    let Some(spawner) = spawner() else { return };
    let missing = start(&spawner, &["/usr/bin/no-such-program"], &[]).await.unwrap_err();
    assert!(matches!(missing, SpawnError::NotStarted { step: Step::Exec, errno: libc::ENOENT, .. }), "{missing}");
    let ended = start(&spawner, &["/usr/bin/env", "false"], &[]).await.unwrap();
    assert_eq!(ended.exited().await.unwrap().code, Some(1));
    assert_eq!(ended.exited().await.unwrap().code, Some(1), "asked again");
    assert!(!ended.dir().exists());
    let one = start(&spawner, &["/usr/bin/sleep", "600"], &[]).await.unwrap();
    one.kill();
    assert_eq!(one.exited().await.unwrap().signal, Some(9));
    // Dropped before it is asked for, and with a child of its own that left its session.
    let script = "setsid sleep 600 & setsid sleep 600 & sleep 600";
    let other = start(&spawner, &["/bin/sh", "-c", script], &[]).await.unwrap();
    let begin = Instant::now();
    while children(other.pid()).len() < 3 {
        assert!(begin.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Something of everybody's: a file that is shown, and a directory.
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "shown").unwrap();
    let (file, shown) = (File::open(dir.path().join("file")).unwrap(), File::open(dir.path()).unwrap());
    other.attach("one", file.as_fd()).await.unwrap();
    other.attach("dir-1", shown.as_fd()).await.unwrap();
    assert!(matches!(other.attach("one", file.as_fd()).await, Err(SpawnError::Attach { .. })));
    assert!(matches!(other.attach("../one", file.as_fd()).await, Err(SpawnError::Attach { .. })));
    let root = format!("/proc/{}/root/m/{}", other.pid(), other.user().unwrap());
    assert_eq!(fs::read_to_string(format!("{root}/one")).unwrap(), "shown");
    assert_eq!(fs::read_to_string(format!("{root}/dir-1/file")).unwrap(), "shown");
    let own = other.dir();
    drop(other);
    let begin = Instant::now();
    while !children(spawner.pid()).is_empty() || own.exists() {
        assert!(begin.elapsed() < SOON, "{:?}", children(spawner.pid()));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(fs::read_to_string(dir.path().join("file")).unwrap(), "shown", "what was shown stays");
    let status = fs::read_to_string(format!("/proc/{}/mounts", spawner.pid())).unwrap();
    assert!(status.lines().count() < 10, "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_begins_in_its_cgroup_and_ends_with_it() {
    let Some(spawner) = spawner() else { return };
    let cgroups = match Cgroups::open(&format!("volley-test-vmm-{}", std::process::id())) {
        Ok(cgroups) => cgroups,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let files = cgroups.slot("one").unwrap().join_files();
    let process = start(&spawner, &["/usr/bin/sleep", "600"], &files).await.unwrap();
    for file in &files {
        assert_eq!(fs::read_to_string(file).unwrap(), format!("{}\n", process.pid()), "{file}");
    }
    assert!(start(&spawner, &["/usr/bin/true"], &["/nowhere/cgroup.procs".to_owned()]).await.is_err());
    // What is killed through its cgroup has ended as any other.
    cgroups.sweep().unwrap();
    assert_eq!(process.exited().await.unwrap().signal, Some(9));
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_are_started_at_once() {
    let Some(spawner) = spawner() else { return };
    let one = async || {
        let begin = Instant::now();
        let process = start(&spawner, &["/usr/bin/true"], &[]).await.unwrap();
        let started = begin.elapsed();
        assert_eq!(process.exited().await.unwrap().code, Some(0));
        started
    };
    let mut alone = Vec::new();
    for _ in 0..64 {
        alone.push(one().await);
    }
    let begin = Instant::now();
    let mut all = futures::future::join_all((0..64).map(|_| one())).await;
    all.sort();
    eprintln!(
        "one after another: median {:?}; 64 at once: all ended after {:?}, last started after {:?}",
        median(alone),
        begin.elapsed(),
        all[63]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn kvm_is_looked_at_for_a_second_at_most() {
    let Some(spawner) = spawner() else { return };
    let begin = Instant::now();
    let kvm = kvm::probe(&spawner).await;
    eprintln!("{}, after {:?}", kvm.as_str(), begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert_eq!(kvm == Kvm::Missing, !std::path::Path::new("/dev/kvm").exists());
}

/// Twenty processes of a worker; says who they are, and waits to be killed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by the test below"]
async fn a_worker_with_twenty_machines() {
    if std::env::var_os("VOLLEY_TEST_KILLED").is_none() {
        return;
    }
    let spawner = MachineSpawner::start().unwrap();
    let mut all = Vec::new();
    for _ in 0..20 {
        all.push(start(&spawner, &["/usr/bin/sleep", "600"], &[]).await.unwrap());
    }
    let pids: Vec<String> = all.iter().map(|process| process.pid().to_string()).collect();
    println!("pids {} {}", spawner.pid(), pids.join(" "));
    tokio::time::sleep(10 * SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_killed_leaves_nothing() {
    if spawner().is_none() {
        return;
    }
    let mut worker = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "confined::a_worker_with_twenty_machines", "--ignored", "--nocapture"])
        .env("VOLLEY_TEST_KILLED", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = io::BufRead::lines(io::BufReader::new(worker.stdout.take().unwrap()));
    let pids = lines.find_map(|line| Some(line.unwrap().strip_prefix("pids ")?.to_owned())).unwrap();
    let pids: Vec<u32> = pids.split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(pids.len(), 21);
    let lives = |pid: &u32| std::path::Path::new(&format!("/proc/{pid}")).exists();
    assert!(pids.iter().all(lives));
    worker.kill().unwrap();
    worker.wait().unwrap();
    let begin = Instant::now();
    while pids.iter().any(lives) {
        assert!(begin.elapsed() < SOON, "{:?}", pids.iter().filter(|pid| lives(pid)).collect::<Vec<_>>());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    eprintln!("all gone after {:?}", begin.elapsed());
}

/// Runs as a user without rights. What can't be shut off then is named, and the rest is.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by the test below"]
async fn as_nobody() {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != NOBODY {
        return;
    }
    let spawner = match MachineSpawner::start() {
        Ok(spawner) => spawner,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    println!("missing: {}", spawner.missing().join("; "));
    let (said, write) = Tail::follow().unwrap();
    let null = File::open("/dev/null").unwrap();
    let script = "cd /; echo /*; cat /proc/self/status; cd -; echo x > mine && echo own; umount /usr || echo stays";
    let argv = ["sh", "-c", script].map(Into::into).to_vec();
    let inherits = vec![null.as_fd(), write.as_fd(), write.as_fd()];
    let launch = Launch { program: Program::Path("/usr/bin/sh".as_ref()), argv, cgroups: &[], inherits };
    let process = spawner.launch(&launch).await.unwrap();
    drop(launch);
    drop(write);
    assert_eq!(process.user(), None);
    let exited = tokio::time::timeout(SOON, process.exited()).await.unwrap().unwrap();
    let said = said.ended(SOON).await;
    assert!(exited.code == Some(0), "{said}");
    for line in ["/m /proc ", "CapEff: 0000000000000000", "NoNewPrivs: 1", "own\n", "stays\n"] {
        assert!(said.contains(line) && !said.contains("/home"), "{line}: {said}");
    }
}

const NOBODY: u32 = 65_534;

#[test]
fn without_root_the_rest_is_shut_off() {
    use std::os::unix::process::CommandExt;
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can start somebody else's process");
        return;
    }
    // Where it was built may be shut to others.
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("test");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let ran = Command::new(program)
        .args(["--exact", "confined::as_nobody", "--ignored", "--nocapture"])
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    if let Some(why) = said.lines().find(|line| line.starts_with("skipped: ")) {
        eprintln!("{why}");
        return;
    }
    eprintln!("{said}");
    assert!(ran.status.success(), "{said} {}", String::from_utf8_lossy(&ran.stderr));
}
