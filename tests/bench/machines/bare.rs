//! The same steps by hand: a VMM's process with the same arguments and descriptors, without spawner, view, users and checks.
//!
//! Owns starting it, loading a snapshot into it and reaching its agent. What it is started with is read off a machine of the driver's, so
//! that both do the same.

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use volley_worker::guest::Stream;
use volley_worker::vmm::{PORT_NUMBER, Snapshot, Vm};

/// Descriptors that are handed on lie above this until they are put in their places.
const HIGH: i32 = 64;

/// A process of a VMM. Dropped, it is killed.
pub struct Bare {
    child: Child,
    /// How the agent is reached.
    agent: Agent,
    control: Control,
}

enum Agent {
    Connected(UnixStream),
    Socket(PathBuf),
}

enum Control {
    Qmp(BufReader<UnixStream>),
    Api(UnixStream),
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A descriptor of a machine of the driver's, opened again.
fn again(vm: &dyn Vm, fd: i32) -> OwnedFd {
    File::open(format!("/proc/{}/fd/{fd}", vm.pid())).unwrap().into()
}

fn start(program: &Path, arguments: &[String], dir: Option<&Path>, fds: Vec<OwnedFd>) -> Child {
    let high: Vec<OwnedFd> = fds.iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, HIGH).unwrap()).collect();
    let places: Vec<i32> = high.iter().map(AsRawFd::as_raw_fd).collect();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Some(dir) = dir {
        command.current_dir(dir);
    }
    // SAFETY: only system calls that may be made after a fork, on descriptors that live until the process has started.
    unsafe {
        command.pre_exec(move || {
            for (fd, place) in places.iter().zip(3..) {
                if libc::dup2(*fd, place) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    command.spawn().unwrap()
}

/// What a bare QEMU is started with.
pub struct QemuParts {
    program: PathBuf,
    arguments: Vec<String>,
    memory: OwnedFd,
    root: OwnedFd,
    state: File,
}

impl QemuParts {
    pub fn of(vm: &dyn Vm, snapshot: &Snapshot) -> Self {
        let line = std::fs::read_to_string(format!("/proc/{}/cmdline", vm.pid())).unwrap();
        let arguments = line.trim_end_matches('\0').split('\0').skip(1).map(str::to_owned).collect();
        let program = std::fs::read_link(format!("/proc/{}/exe", vm.pid())).unwrap();
        // QEMU closes what it has opened again, so these are no longer to be read off it.
        let root = snapshot.root.as_ref().unwrap().try_clone().unwrap().into();
        let memory = snapshot.memory.open().unwrap().into();
        Self { program, arguments, memory, root, state: snapshot.state.open().unwrap() }
    }

    /// Starts one and loads the snapshot; it stands still.
    pub fn restore(&self) -> Bare {
        let ((control, its_control), (agent, its_agent)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
        let fds = vec![its_control.into(), its_agent.into(), copy(&self.memory), copy(&self.root)];
        let child = start(&self.program, &self.arguments, None, fds);
        let mut bare = Bare { child, agent: Agent::Connected(agent), control: Control::Qmp(BufReader::new(control)) };
        assert!(bare.line()["QMP"].is_object());
        bare.qmp("qmp_capabilities", json!({}), None);
        let on = |name: &str| json!({"capability": name, "state": true});
        bare.qmp("migrate-set-capabilities", json!({"capabilities": [on("x-ignore-shared"), on("events")]}), None);
        rustix::fs::seek(&self.state, rustix::fs::SeekFrom::Start(0)).unwrap();
        bare.qmp("getfd", json!({"fdname": "state"}), Some(self.state.as_fd()));
        bare.qmp("migrate-incoming", json!({"uri": "fd:state"}), None);
        while bare.line()["data"]["status"] != "completed" {}
        bare
    }
}

/// What a bare Firecracker is started with.
pub struct FirecrackerParts {
    program: PathBuf,
    dir: tempfile::TempDir,
    fds: Vec<OwnedFd>,
    count: std::sync::atomic::AtomicU64,
}

impl FirecrackerParts {
    pub fn of(vm: &dyn Vm, program: &Path) -> Self {
        let fds = (3..=6).map(|fd| again(vm, fd)).collect();
        Self { program: program.to_owned(), dir: tempfile::tempdir().unwrap(), fds, count: Default::default() }
    }

    /// Starts one and loads the snapshot; it stands still.
    pub fn restore(&self) -> Bare {
        let number = self.count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir = self.dir.path().join(number.to_string());
        std::fs::create_dir(&dir).unwrap();
        let fds = self.fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let arguments = ["--api-sock", "api", "--level", "Error"].map(str::to_owned);
        let child = start(&self.program, &arguments, Some(&dir), fds);
        let api = loop {
            match UnixStream::connect(dir.join("api")) {
                Ok(api) => break api,
                Err(_) => std::thread::sleep(Duration::from_micros(500)),
            }
        };
        let mut bare = Bare { child, agent: Agent::Socket(dir.join("vsock")), control: Control::Api(api) };
        let backend = json!({"backend_type": "File", "backend_path": "/proc/self/fd/5"});
        let load = json!({"snapshot_path": "/proc/self/fd/6", "mem_backend": backend, "resume_vm": false});
        bare.api("PUT", "/snapshot/load", &load);
        bare
    }
}

impl Bare {
    pub fn resume(&mut self) {
        match self.control {
            Control::Qmp(_) => self.qmp("cont", json!({}), None),
            Control::Api(_) => self.api("PATCH", "/vm", &json!({"state": "Resumed"})),
        }
    }

    /// The agent's stream; asked for until it is there.
    pub fn connect(&self) -> Box<dyn Stream> {
        let stream = match &self.agent {
            Agent::Connected(stream) => stream.try_clone().unwrap(),
            Agent::Socket(path) => loop {
                let mut stream = UnixStream::connect(path).unwrap();
                stream.write_all(format!("CONNECT {PORT_NUMBER}\n").as_bytes()).unwrap();
                let (mut answer, mut byte) = (Vec::new(), [0]);
                while answer.last() != Some(&b'\n') && stream.read(&mut byte).unwrap_or(0) > 0 {
                    answer.push(byte[0]);
                }
                if answer.starts_with(b"OK ") {
                    break stream;
                }
                std::thread::sleep(Duration::from_millis(1));
            },
        };
        stream.set_nonblocking(true).unwrap();
        Box::new(tokio::net::UnixStream::from_std(stream).unwrap())
    }

    fn line(&mut self) -> Value {
        let Control::Qmp(control) = &mut self.control else { panic!("no QEMU") };
        let mut line = String::new();
        control.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"))
    }

    fn qmp(&mut self, name: &str, arguments: Value, fd: Option<BorrowedFd<'_>>) {
        let Control::Qmp(control) = &mut self.control else { panic!("no QEMU") };
        let line = format!("{}\n", json!({"execute": name, "arguments": arguments}));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fd.into_iter().collect();
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        rustix::net::sendmsg(control.get_ref(), &[IoSlice::new(line.as_bytes())], &mut ancillary, SendFlags::empty()).unwrap();
        loop {
            let answer = self.line();
            assert!(answer.get("error").is_none(), "{name}: {answer}");
            if answer.get("return").is_some() {
                return;
            }
        }
    }

    fn api(&mut self, method: &str, path: &str, body: &Value) {
        let Control::Api(api) = &mut self.control else { panic!("no Firecracker") };
        let body = body.to_string();
        let head =
            format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
        api.write_all(format!("{head}{body}").as_bytes()).unwrap();
        let mut answer = [0; 4_096];
        let len = api.read(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer[..len]);
        assert!(answer.starts_with("HTTP/1.1 204"), "{path}: {answer}");
    }
}
