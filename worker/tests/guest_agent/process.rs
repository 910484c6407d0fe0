//! The agent as an ordinary process: everything that needs no machine of its own.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use volley_guest::files::Unpack;
use volley_guest::initramfs;
use volley_jobspecs::wire::guest::mux::{Channel, WINDOW_BYTES};
use volley_jobspecs::wire::guest::resync::{FRAME_BYTES, From, Resync, Scanner};
use volley_jobspecs::wire::guest::{Exec, Exit, FileLimits, Get, GetNamed, Identity, Limits, Order, Put, RefusalKind, Tty, User};
use volley_worker::guest::{FilesError, Guest, GuestError, Stream};

use crate::{LIMITS, SOON, finish, run, shell};

/// An agent that listens.
struct Agent {
    process: Child,
    dir: TempDir,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Agent {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = initramfs::find_agent().expect("a build of the whole workspace makes it");
        let process = Process::new(program).arg("--listen").arg(dir.path().join("socket")).stdin(Stdio::null()).spawn().unwrap();
        Self { process, dir }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    async fn stream(&self) -> UnixStream {
        let deadline = Instant::now() + SOON;
        loop {
            match UnixStream::connect(self.path()).await {
                Ok(stream) => return stream,
                Err(e) => assert!(Instant::now() < deadline, "{e}"),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    async fn guest(&self) -> Guest {
        Guest::connect(Box::new(self.stream().await), [1; 32], false, SOON).await.unwrap().0
    }
}

fn refusal<T>(result: Result<T, GuestError>) -> RefusalKind {
    match result {
        Err(GuestError::Refused(refusal)) => refusal.kind,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was done"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_are_told_apart() {
    let agent = Agent::start();
    let guest = agent.guest().await;
    let end = run(&guest, &shell("echo out; echo err >&2; exit 3")).await;
    assert_eq!((end.output.as_str(), end.errors.as_str()), ("out\n", "err\n"));
    assert_eq!((end.ended.exit, end.ended.timed_out, end.ended.oom_kills, end.ended.survivors), (Exit::Code(3), false, 0, 0));
    let end = run(&guest, &shell("kill -SEGV $$")).await;
    assert_eq!(end.ended.exit, Exit::Signal(11));
    let begin = Instant::now();
    let end = run(&guest, &Exec { timeout_ms: Some(100), grace_ms: 60_000, ..shell("exec sleep 60") }).await;
    assert_eq!((end.ended.exit, end.ended.timed_out), (Exit::Signal(15), true));
    let end = run(&guest, &Exec { timeout_ms: Some(100), grace_ms: 100, ..shell("trap '' TERM; while :; do sleep 1; done") }).await;
    assert_eq!((end.ended.exit, end.ended.timed_out), (Exit::Signal(9), true));
    assert!(begin.elapsed() < SOON);
    let command = guest.exec(&shell("trap 'echo usr; exit 5' USR1; echo ready; while :; do sleep 0.01; done")).await.unwrap();
    let mut buffer = [0; 10];
    assert_eq!(command.read(Channel::Output, &mut buffer).await.unwrap(), 6);
    command.signal(10).unwrap();
    let end = finish(&command).await;
    assert_eq!((end.output.as_str(), end.ended.exit), ("usr\n", Exit::Code(5)));
    let command = guest.exec(&shell("sleep 60")).await.unwrap();
    command.kill().unwrap();
    assert_eq!(finish(&command).await.ended.exit, Exit::Signal(9));
}

/// With a terminal of this size.
fn on_tty(rows: u16, cols: u16, script: &str) -> Exec {
    Exec { input: true, tty: Some(Tty { rows, cols }), ..shell(script) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_has_a_terminal_of_its_own() {
    let agent = Agent::start();
    let guest = agent.guest().await;
    // It is all three streams, it is controlled, and it has a size.
    let end =
        run(&guest, &on_tty(33, 77, "for i in 0 1 2; do [ -t $i ] && echo $i; done; echo err >&2; echo ctl >/dev/tty; stty size")).await;
    assert_eq!((end.output.as_str(), end.errors.as_str()), ("0\r\n1\r\n2\r\nerr\r\nctl\r\n33 77\r\n", ""));
    assert_eq!(end.ended.exit, Exit::Code(0));
    // What is typed is echoed, another size is told, ^C interrupts, and the end of the input is the terminal's.
    // A trap ends a shell's read early.
    let script = "trap 'stty size' WINCH; trap 'echo int' INT; echo ready; until read line; do :; done; echo got $line; cat; exit 4";
    let command = guest.exec(&on_tty(24, 80, script)).await.unwrap();
    let read = async |until: &str| {
        let (mut all, mut buffer) = (String::new(), [0; 4096]);
        while !all.contains(until) {
            let read = tokio::time::timeout(SOON, command.read(Channel::Output, &mut buffer)).await;
            let len = read.unwrap_or_else(|_| panic!("{until:?} does not come: {all:?}")).unwrap();
            assert!(len > 0, "{until}: {all}");
            all.push_str(&String::from_utf8_lossy(&buffer[..len]));
        }
        all
    };
    read("ready\r\n").await;
    // However many there are: they wait until the agent takes them, and the last one counts.
    for cols in 0..200 {
        command.order(&Order::Resize(Tty { rows: 50, cols })).await.unwrap();
    }
    command.order(&Order::Resize(Tty { rows: 50, cols: 220 })).await.unwrap();
    // Before anything is typed: input may overtake what waits for room, and a trap waits for whatever runs in front.
    read("50 220\r\n").await;
    command.write(b"hel\x7fllo\n").await.unwrap();
    read("got ").await;
    command.write(b"to cat\n").await.unwrap();
    read("to cat\r\nto cat\r\n").await;
    command.end_input();
    let end = finish(&command).await;
    assert_eq!(end.ended.exit, Exit::Code(4), "{:?}", end.output);
    // ^C reaches what is in the foreground.
    let command = guest.exec(&on_tty(24, 80, "echo up; exec sleep 60")).await.unwrap();
    let mut buffer = [0; 64];
    assert!(command.read(Channel::Output, &mut buffer).await.unwrap() > 0);
    command.write(b"\x03").await.unwrap();
    assert_eq!(finish(&command).await.ended.exit, Exit::Signal(2));
    // What is left behind does not hold it up, and what writes much is not cut.
    let end = run(&guest, &on_tty(24, 80, "seq 20000")).await;
    assert!(end.output.ends_with("19999\r\n20000\r\n") && end.output.lines().count() == 20_000);
    // The first to go, where that is asked for.
    let end = run(&guest, &Exec { expendable: true, ..shell("cat /proc/self/oom_score_adj") }).await;
    assert_eq!(end.output, "1000\n");
    assert_eq!(refusal(guest.exec(&Exec { argv: vec!["/none/such".into()], ..on_tty(1, 1, "") }).await), RefusalKind::CannotExec);
    assert_eq!(run(&guest, &shell("tty || true")).await.output, "not a tty\n", "others have none");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_started_says_why() {
    let agent = Agent::start();
    let guest = agent.guest().await;
    let exec = |argv: &[&str]| Exec { argv: argv.iter().map(|arg| (*arg).to_owned()).collect(), ..Exec::default() };
    assert_eq!(refusal(guest.exec(&exec(&["/none/such"])).await), RefusalKind::CannotExec);
    assert_eq!(refusal(guest.exec(&exec(&["/etc/passwd"])).await), RefusalKind::CannotExec);
    assert_eq!(refusal(guest.exec(&exec(&[])).await), RefusalKind::BadRequest);
    assert_eq!(refusal(guest.exec(&Exec { cwd: Some("/none".into()), ..shell("true") }).await), RefusalKind::NotFound);
    assert_eq!(refusal(guest.exec(&Exec { user: Some(User::Named("nobody-knows".into())), ..shell("true") }).await), RefusalKind::NotFound);
    assert_eq!(refusal(guest.exec(&Exec { env: vec![("A=B".into(), "c".into())], ..shell("true") }).await), RefusalKind::BadRequest);
    let limits = Limits { memory_bytes: Some(1 << 20), ..Limits::default() };
    assert_eq!(refusal(guest.exec(&Exec { limits, ..shell("true") }).await), RefusalKind::BadRequest, "this agent has no cgroups");
    assert_eq!(refusal(guest.set_clock(1).await), RefusalKind::BadRequest, "nor a machine of its own");
    assert_eq!(refusal(guest.set_identity(Identity { hostname: Some("x".into()), ..Identity::default() }).await), RefusalKind::BadRequest);
    assert_eq!(run(&guest, &shell("true")).await.ended.exit, Exit::Code(0), "and it goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn environment_directory_user_and_input() {
    let agent = Agent::start();
    let guest = agent.guest().await;
    let env = vec![("PATH".to_owned(), "/usr/bin:/bin".to_owned()), ("A".to_owned(), "ä b".to_owned())];
    let end = run(&guest, &Exec { env, cwd: Some("/usr".into()), ..shell("echo $A; pwd; env | wc -l; cat") }).await;
    assert_eq!(end.output.lines().take(2).collect::<Vec<_>>(), ["ä b", "/usr"]);
    let limits = Limits { open_files: Some(33), ..Limits::default() };
    assert_eq!(run(&guest, &Exec { limits, ..shell("ulimit -n") }).await.output, "33\n");
    if rustix::process::geteuid().is_root() {
        let user = Some(User::Ids { uid: 65534, gid: 65533, groups: vec![7, 8] });
        assert_eq!(run(&guest, &Exec { user, ..shell("id -u; id -g; id -G") }).await.output, "65534\n65533\n65533 7 8\n");
    }
    // Three times the window, through a command that copies it.
    let command = guest.exec(&Exec { input: true, ..shell("cat; echo done >&2") }).await.unwrap();
    let bytes: Vec<u8> = (0..3 * WINDOW_BYTES).map(|at| (at % 251) as u8).collect();
    let write = async {
        command.write(&bytes).await.unwrap();
        command.end_input();
    };
    let (end, ()) = tokio::join!(read_bytes(&command, Channel::Output), write);
    assert!(end == bytes);
    assert_eq!(finish(&command).await.errors, "done\n");
    // A command that reads nothing holds nobody up.
    let command = guest.exec(&Exec { input: true, ..shell("exit 4") }).await.unwrap();
    let _ = tokio::time::timeout(SOON, command.write(&bytes)).await.unwrap();
    assert_eq!(finish(&command).await.ended.exit, Exit::Code(4));
}

async fn read_bytes(command: &volley_worker::guest::Command, channel: Channel) -> Vec<u8> {
    let (mut all, mut buffer) = (Vec::new(), vec![0; 50_000]);
    loop {
        match command.read(channel, &mut buffer).await.unwrap() {
            0 => return all,
            len => all.extend_from_slice(&buffer[..len]),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn output_nobody_reads_stops_its_command_alone() {
    let agent = Agent::start();
    let guest = agent.guest().await;
    let noisy = guest.exec(&shell("echo here >&2; exec yes")).await.unwrap();
    let mut buffer = [0; 100];
    // Its errors come through although its output is full, and so does another command.
    assert_eq!(noisy.read(Channel::Errors, &mut buffer).await.unwrap(), 5);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(run(&guest, &shell("echo other")).await.output, "other\n");
    let cpu = fs::read_to_string(format!("/proc/{}/stat", agent.process.id())).unwrap();
    let ticks =
        |stat: &str| stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11).take(2).map(|t| t.parse::<u64>().unwrap()).sum::<u64>();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let later = fs::read_to_string(format!("/proc/{}/stat", agent.process.id())).unwrap();
    assert!(ticks(&later) - ticks(&cpu) < 10, "a full channel costs no CPU");
    noisy.kill().unwrap();
    assert_eq!(finish(&noisy).await.ended.exit, Exit::Signal(9));
    // Dropped, a command ends too.
    let command = guest.exec(&shell("echo $$; exec yes >&2")).await.unwrap();
    let len = command.read(Channel::Output, &mut buffer).await.unwrap();
    let pid: u32 = String::from_utf8_lossy(&buffer[..len]).trim().parse().unwrap();
    drop(command);
    wait_for(|| !PathBuf::from(format!("/proc/{pid}")).exists()).await;
}

async fn wait_for(done: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_go_in_and_come_out() {
    let agent = Agent::start();
    let guest = agent.guest().await;
    let (from, inside, back) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir(from.path().join("d")).unwrap();
    fs::write(from.path().join("d/big"), vec![5; 3 << 20]).unwrap();
    std::os::unix::fs::symlink("big", from.path().join("d/link")).unwrap();
    let dir = inside.path().join("made/here").to_str().unwrap().to_owned();
    let put = Put { dir: dir.clone(), owner: None, limits: LIMITS };
    let (here, there) = guest.put(put.clone(), from.path().to_owned(), SOON).await.unwrap();
    assert_eq!((here.entries, here.bytes, &here), (3, 3 << 20, &there));
    run(&guest, &Exec { cwd: Some(dir.clone()), ..shell("echo new > d/new; mkfifo d/pipe") }).await;
    let how = Unpack { owner: None, mode_mask: 0o777, limits: LIMITS };
    let open = |dir: &TempDir| OwnedFd::from(fs::File::open(dir.path()).unwrap());
    let get = Get { path: dir.clone(), limits: LIMITS };
    let (here, there) = guest.get(get.clone(), open(&back), how, SOON).await.unwrap();
    assert_eq!((here.entries, here.skipped_total, there.skipped_total), (4, 0, 1));
    assert!(fs::read(back.path().join("d/big")).unwrap() == vec![5; 3 << 20]);
    assert_eq!(fs::read_to_string(back.path().join("d/new")).unwrap(), "new\n");
    assert_eq!(fs::read_link(back.path().join("d/link")).unwrap(), PathBuf::from("big"));
    // One file by its name.
    let one = tempfile::tempdir().unwrap();
    guest.get(Get { path: format!("{dir}/d/new"), limits: LIMITS }, open(&one), how, SOON).await.unwrap();
    assert_eq!(fs::read_to_string(one.path().join("new")).unwrap(), "new\n");

    // Some of them, by their paths; what is not there gives nothing, and no link is followed.
    let some = tempfile::tempdir().unwrap();
    let names = ["d/new", "none/at/all", "d/link", "d/big/below", "../out"].map(str::to_owned).to_vec();
    let get_named = GetNamed { dir: dir.clone(), names, limits: LIMITS };
    let (here, there) = guest.get_named(get_named.clone(), open(&some), how, SOON).await.unwrap();
    assert_eq!((here.entries, there.skipped_total), (2, 2), "{there:?}");
    assert_eq!(fs::read_to_string(some.path().join("d/new")).unwrap(), "new\n");
    assert_eq!(fs::read_link(some.path().join("d/link")).unwrap(), PathBuf::from("big"));
    let whole = GetNamed { names: vec!["./d/".to_owned()], ..get_named };
    let (here, _) = guest.get_named(whole, open(&some), how, SOON).await.unwrap();
    assert_eq!((here.entries, fs::metadata(some.path().join("d/big")).unwrap().len()), (4, 3 << 20));

    let refused = |result: Result<_, FilesError>| match result {
        Err(FilesError::Guest(GuestError::Refused(refusal))) => refusal.kind,
        other => panic!("{other:?}"),
    };
    let small = FileLimits { bytes: 1 << 20, ..LIMITS };
    assert_eq!(refused(guest.get(Get { limits: small, ..get.clone() }, open(&back), how, SOON).await), RefusalKind::TooMuch);
    assert_eq!(refused(guest.get(Get { path: "/none".into(), limits: LIMITS }, open(&back), how, SOON).await), RefusalKind::NotFound);
    let put_small = guest.put(Put { dir: "/proc/none".into(), ..put.clone() }, from.path().to_owned(), SOON).await;
    assert_eq!(refused(put_small), RefusalKind::NotFound, "it says so, although the stream is not through");
    // The host's own limits hold whatever the guest does.
    let mine = guest.get(get, open(&back), Unpack { limits: small, ..how }, SOON).await;
    assert!(matches!(mine, Err(FilesError::Unpack(_))), "{mine:?}");
    assert_eq!(run(&guest, &shell("echo on")).await.output, "on\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn before_a_reseed_nothing_is_run() {
    let agent = Agent::start();
    let (guest, hello) = Guest::connect(Box::new(agent.stream().await), [2; 32], true, SOON).await.unwrap();
    assert!(hello.reseed_due && hello.boot_id.is_none());
    assert_eq!(refusal(guest.exec(&shell("true")).await), RefusalKind::NotReseeded);
    drop(guest);
    // A session that does not ask for it does not lift it.
    let (guest, hello) = Guest::connect(Box::new(agent.stream().await), [3; 32], false, SOON).await.unwrap();
    assert!(hello.reseed_due);
    assert_eq!(refusal(guest.exec(&shell("true")).await), RefusalKind::NotReseeded);
    match guest.reseed([7; 64]).await {
        Ok(proof) => {
            assert_ne!(proof, [0; 32]);
            assert_eq!(run(&guest, &shell("true")).await.ended.exit, Exit::Code(0));
            assert!(!guest.hello().await.unwrap().reseed_due);
        }
        Err(why) => eprintln!("skipped: the generator of this machine can't be reseeded: {why}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ends_with_its_connection_and_another_begins() {
    let agent = Agent::start();
    let guest = agent.guest().await;
    let command = guest.exec(&shell("echo $$; exec sleep 600")).await.unwrap();
    let mut buffer = [0; 20];
    let len = command.read(Channel::Output, &mut buffer).await.unwrap();
    let pid: u32 = String::from_utf8_lossy(&buffer[..len]).trim().parse().unwrap();
    // The newer connection takes the older one's place, and what ran in that session is killed.
    let next = agent.guest().await;
    assert!(matches!(command.ended().await, Err(GuestError::Lost(_))));
    assert!(matches!(guest.hello().await, Err(GuestError::Lost(_))));
    wait_for(|| !PathBuf::from(format!("/proc/{pid}")).exists()).await;
    assert_eq!(run(&next, &shell("echo again")).await.output, "again\n");
}

/// Reads until an echo; what it echoed.
async fn echo(stream: &mut UnixStream) -> Resync {
    let mut scanner = Scanner::new(From::Guest);
    let mut byte = [0];
    loop {
        stream.read_exact(&mut byte).await.unwrap();
        if let (_, Some(found)) = scanner.feed(&byte) {
            return found;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_begun_from_any_state() {
    let agent = Agent::start();
    let mut stream = agent.stream().await;
    let resync = |byte: u8| Resync { nonce: [byte; 32], attempt: 1, reseed: false };
    let frames = |byte: u8| resync(byte).encode(From::Host).to_vec();
    // Noise, half a frame, another one's echo; then in the middle of a session, at the end of a frame.
    stream
        .write_all(&[&b"noise\xf7"[..], &frames(1)[..FRAME_BYTES - 9], &resync(9).encode(From::Guest), &frames(2)].concat())
        .await
        .unwrap();
    assert_eq!(echo(&mut stream).await, resync(2));
    stream.write_all(&frames(3)).await.unwrap();
    assert_eq!(echo(&mut stream).await, resync(3));
    // Inside a frame that never ends it is taken for the frame; the host's repeats get through.
    stream.write_all(&[1, 0, 0xff, 0x3f, 1, 0, 0, 0, 7]).await.unwrap();
    let (guest, _) = tokio::time::timeout(SOON, Guest::connect(Box::new(stream), [4; 32], false, SOON)).await.unwrap().unwrap();
    assert_eq!(run(&guest, &shell("echo in")).await.output, "in\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_of_a_host_is_answered_before_the_next_session() {
    let agent = Agent::start();
    let mut stream = agent.stream().await;
    stream.write_all(&Resync { nonce: [1; 32], attempt: 1, reseed: false }.encode(From::Host)).await.unwrap();
    echo(&mut stream).await;
    // Input of a call that was never opened.
    stream.write_all(&[3, 1, 1, 0, 9, 0, 0, 0, b'x']).await.unwrap();
    let (mut came, mut byte) = (Vec::new(), [0]);
    while !came.ends_with(b"which is not open") {
        tokio::time::timeout(SOON, stream.read_exact(&mut byte)).await.unwrap().unwrap();
        came.push(byte[0]);
    }
    assert_eq!(came.first(), Some(&8), "a frame of its own: {came:?}");
    let (guest, _) = tokio::time::timeout(SOON, Guest::connect(Box::new(stream), [4; 32], false, SOON)).await.unwrap().unwrap();
    assert_eq!(run(&guest, &shell("echo in")).await.output, "in\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_prepared_while_everything_is_full() {
    let agent = Agent::start();
    let guest = agent.guest().await;
    let noisy = guest.exec(&shell("exec yes")).await.unwrap();
    let fed = guest.exec(&Exec { input: true, ..shell("exec sleep 600") }).await.unwrap();
    let _ = tokio::time::timeout(Duration::from_millis(300), fed.write(&vec![0; 2 << 20])).await;
    let (kept, mut stream) = guest.prepare_snapshot(false).await.unwrap();
    assert_eq!(kept, 0);
    assert!(matches!(noisy.ended().await, Err(GuestError::Lost(_))));
    // From here on a snapshot may be taken: nothing comes, whatever is sent but a resync.
    stream.write_all(b"\x01\x00\x01\x00\x09\x00\x00\x00x").await.unwrap();
    let silent = tokio::time::timeout(Duration::from_millis(200), stream.read_u8()).await;
    assert!(silent.is_err(), "{silent:?}");
    let (guest, hello) = Guest::connect(stream, [5; 32], false, SOON).await.unwrap();
    assert!(hello.reseed_due, "what was saved may be a clone now");
    drop(guest);
    let stream: Box<dyn Stream> = Box::new(agent.stream().await);
    assert!(Guest::connect(stream, [6; 32], false, SOON).await.unwrap().1.reseed_due);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_answers_and_ends() {
    let mut agent = Agent::start();
    let guest = agent.guest().await;
    guest.shutdown().await.unwrap();
    let deadline = Instant::now() + SOON;
    while agent.process.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_calls_at_once() {
    let agent = Agent::start();
    let guest = agent.guest().await;
    let calls = (0..60).map(|number| {
        let guest = &guest;
        async move { (run(guest, &shell(&format!("head -c 100000 /dev/zero; echo {number} >&2"))).await, number) }
    });
    for (end, number) in futures::future::join_all(calls).await {
        assert_eq!((end.output.len(), end.errors), (100_000, format!("{number}\n")));
    }
    let stats = guest.stats().await.unwrap();
    assert!(stats.memory_total_bytes > stats.memory_available_bytes && stats.processes > 0 && stats.root_bytes > 0, "{stats:?}");
}
