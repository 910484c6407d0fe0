//! QEMU with the real agent as a guest's first process, and saving and restoring it.
//!
//! Owns the process, its control socket (QMP) and its files. The processor is emulated in software.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use volley_guest::initramfs::{self, Archive};
use volley_jobspecs::wire::guest::Hello;
use volley_worker::guest::{Guest, GuestError, Stream};

use crate::host::{self, Host};

/// Memory of a guest.
const MEMORY: &str = "192M";
/// The port's name.
const PORT: &str = "volley";
/// Boot takes 5 seconds on an idle machine.
pub const BOOT_TIME: Duration = Duration::from_secs(120);
/// What guests call busybox by.
const TOOLS: [&str; 24] = [
    "sh", "cat", "sleep", "true", "head", "tail", "yes", "id", "ls", "hostname", "date", "stat", "sync", "wc", "od", "setsid", "cp", "rm",
    "mkdir", "echo", "env", "kill", "readlink", "stty",
];
/// For one command of QMP.
const QMP_TIME: Duration = Duration::from_secs(60);

/// What machines are made from.
pub struct Parts {
    host: Host,
    dir: TempDir,
}

impl Parts {
    /// Finds everything and builds the RAM disk; or says what is missing.
    pub fn find() -> Result<Arc<Self>, String> {
        let host = Host::find()?;
        let modules =
            host::part("VOLLEY_GUEST_MODULES", "modules").filter(|dir| dir.is_dir()).ok_or("no guest modules (VOLLEY_GUEST_MODULES)")?;
        let agent = initramfs::find_agent().map_err(|e| e.to_string())?;
        // Besides what machines have: vsock to oneself, for the test of vsock.
        let names = [&initramfs::MODULES[..], &["vsock_loopback"]].concat();
        let mut disk = initramfs::build(&agent, Some(&modules), &names).unwrap();
        // The kernel takes several archives, one behind the other.
        let mut more = Archive::new();
        host::add_program(&mut more, &host.busybox, "/bin/busybox");
        let tests = std::env::current_exe().unwrap();
        host::add_program(&mut more, &tests.parent().unwrap().parent().unwrap().join("examples/vsock"), "/bin/vsock");
        for name in TOOLS {
            more.symlink(&Path::new("/bin").join(name), "/bin/busybox");
        }
        more.file(Path::new("/etc/passwd"), b"root:x:0:0:root:/:/bin/sh\nann:x:1000:1001:Ann:/:/bin/sh\n", 0o644);
        more.file(Path::new("/etc/group"), b"root:x:0:\nann:x:1001:\nstaff:x:50:ann\n", 0o644);
        disk.extend_from_slice(&more.finish());
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("initrd"), disk).unwrap();
        Ok(Arc::new(Self { host, dir }))
    }

    /// Busybox and its names, for a directory that becomes a disk.
    pub fn busybox_into(&self, dir: &Path) {
        std::fs::copy(&self.host.busybox, dir.join("busybox")).unwrap();
        for name in TOOLS {
            std::os::unix::fs::symlink("busybox", dir.join(name)).unwrap();
        }
    }
}

/// A saved machine.
#[derive(Clone)]
pub struct Saved {
    dir: Arc<TempDir>,
}

/// A machine.
pub struct Machine {
    qemu: Child,
    qmp: BufReader<UnixStream>,
    dir: Arc<TempDir>,
    agent: PathBuf,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Machine {
    /// Boots one. `more`: further arguments of QEMU, and words for the kernel.
    pub fn boot(parts: &Parts, more: &[&str], words: &str) -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let line = format!("console=ttyS0 loglevel=4 panic=-1 tsc=reliable volley.port={PORT} {words}");
        let (kernel, disk) = (parts.host.kernel.to_str().unwrap().to_owned(), parts.dir.path().join("initrd"));
        let mut arguments = vec!["-kernel", &kernel, "-initrd", disk.to_str().unwrap(), "-append", &line];
        arguments.extend_from_slice(more);
        Self::start(parts, dir.clone(), dir.path().join("memory"), true, &arguments)
    }

    /// Starts one from what was saved, not yet running. `more` must be what it was booted with.
    pub fn restore(parts: &Parts, saved: &Saved, more: &[&str]) -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let mut arguments = vec!["-S", "-incoming", "defer"];
        arguments.extend_from_slice(more);
        Self::start(parts, dir, saved.dir.path().join("memory"), false, &arguments)
    }

    /// Loads the state; the machine is still not running.
    pub fn load(&mut self, saved: &Saved) {
        self.capability();
        let state = saved.dir.path().join("state");
        self.command("migrate-incoming", &format!(r#"{{"uri":"exec:cat {}"}}"#, state.display()));
        self.wait_for("query-status", r#""status": "paused""#);
    }

    fn start(parts: &Parts, dir: Arc<TempDir>, memory: PathBuf, share: bool, arguments: &[&str]) -> Self {
        let (agent, qmp) = (dir.path().join("agent"), dir.path().join("qmp"));
        let mut command = Command::new(&parts.host.qemu);
        command.args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", MEMORY, "-nodefaults", "-no-user-config", "-no-reboot"]);
        command.args(["-display", "none", "-serial", "stdio", "-machine", "q35,memory-backend=memory"]);
        let share = if share { "on" } else { "off" };
        command.args(["-object", &format!("memory-backend-file,id=memory,size={MEMORY},mem-path={},share={share}", memory.display())]);
        command.args(["-chardev", &format!("socket,id=agent,path={},server=on,wait=off", agent.display())]);
        command.args(["-device", "virtio-serial-pci", "-device", &format!("virtserialport,chardev=agent,name={PORT}")]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", qmp.display())]);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::inherit()).stderr(Stdio::inherit());
        // SAFETY: one plain system call between fork and exec: the machine ends with the test, however that ends.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
                Ok(())
            });
        }
        let qemu = command.spawn().unwrap();
        let qmp = connect(&qmp);
        qmp.set_read_timeout(Some(QMP_TIME)).unwrap();
        let mut machine = Self { qemu, qmp: BufReader::new(qmp), dir, agent };
        machine.line();
        machine.command("qmp_capabilities", "{}");
        machine
    }

    /// A connection to the agent's port.
    pub async fn stream(&self) -> Box<dyn Stream> {
        Box::new(tokio::net::UnixStream::connect(&self.agent).await.unwrap())
    }

    /// A session.
    pub async fn guest(&self, nonce: u8, reseed: bool) -> Result<(Guest, Hello), GuestError> {
        Guest::connect(self.stream().await, [nonce; 32], reseed, BOOT_TIME).await
    }

    /// Lets it run.
    pub fn resume(&mut self) {
        self.command("cont", "{}");
    }

    /// Stops it and saves it; it is killed as soon as that is done.
    pub fn save(mut self) -> Saved {
        self.command("stop", "{}");
        self.capability();
        let state = self.dir.path().join("state");
        self.command("migrate", &format!(r#"{{"uri":"exec:cat > {}"}}"#, state.display()));
        self.wait_for("query-migrate", r#""status": "completed""#);
        Saved { dir: self.dir.clone() }
    }

    /// Waits until it is off.
    pub async fn off(&mut self, time_max: Duration) -> bool {
        let deadline = Instant::now() + time_max;
        while Instant::now() < deadline {
            if self.qemu.try_wait().unwrap().is_some() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    }

    /// CPU time of its processor and its process, in milliseconds.
    pub fn cpu_ms(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.qemu.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap() * 10).sum()
    }

    fn capability(&mut self) {
        self.command("migrate-set-capabilities", r#"{"capabilities":[{"capability":"x-ignore-shared","state":true}]}"#);
    }

    fn command(&mut self, name: &str, arguments: &str) -> String {
        writeln!(self.qmp.get_mut(), r#"{{"execute":"{name}","arguments":{arguments}}}"#).unwrap();
        loop {
            let line = self.line();
            assert!(!line.starts_with(r#"{"error""#), "{name}: {line}");
            if line.starts_with(r#"{"return""#) {
                return line;
            }
        }
    }

    fn wait_for(&mut self, name: &str, wanted: &str) {
        let deadline = Instant::now() + QMP_TIME;
        loop {
            let answer = self.command(name, "{}");
            if answer.contains(wanted) {
                return;
            }
            assert!(Instant::now() < deadline && !answer.contains("failed"), "{name}: {answer}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.qmp.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "QEMU has ended");
        line
    }
}

fn connect(path: &Path) -> UnixStream {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return stream,
            Err(e) if Instant::now() > deadline => panic!("{}: {e}", path.display()),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
