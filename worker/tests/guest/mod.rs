//! A small Linux guest for one test: Debian's kernel under QEMU, with an initial RAM disk that holds busybox and what the test adds.
//!
//! Owns the disk, QEMU, its deadline, and what came over the serial console. Does not own what runs in the guest. The processor is
//! emulated in software, so no KVM is wanted: a boot takes about 4 seconds, and what runs is ten times slower than outside.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use volley_guest::initramfs::Archive;

#[expect(dead_code, reason = "shared with tests of images")]
mod host;

pub use host::Host;

/// Memory of the guest where nothing is said: the disk lies in it, twice while it is unpacked.
const MEMORY_MIB: u32 = 768;
/// What is done before the script and after it.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mkdir /dev/shm
mount -t tmpfs shm /dev/shm
/bin/sh /script </dev/null
poweroff -f
";

/// What is put into a guest.
pub struct Guest {
    host: Host,
    disk: Archive,
    boot_options: String,
    /// Its memory.
    pub memory_mib: u32,
}

impl Guest {
    /// A guest with busybox. `boot_options` are added to the kernel's command line.
    pub fn new(host: Host, boot_options: &str) -> Self {
        let mut guest = Self { host, disk: Archive::new(), boot_options: boot_options.to_owned(), memory_mib: MEMORY_MIB };
        for dir in ["/proc", "/sys", "/dev", "/tmp"] {
            guest.disk.dir(Path::new(dir));
        }
        let busybox = guest.host.busybox.clone();
        guest.program(&busybox, "/bin/busybox");
        guest.file("/init", INIT.as_bytes(), 0o755);
        guest.file("/etc/passwd", b"root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n", 0o644);
        guest
    }

    /// Adds a program of this machine, with the libraries it loads.
    pub fn program(&mut self, from: &Path, to: &str) {
        host::add_program(&mut self.disk, from, to);
    }

    /// Adds a file, with the directories it lies in.
    pub fn file(&mut self, to: &str, bytes: &[u8], mode: u32) {
        self.disk.file(Path::new(to), bytes, mode);
    }

    /// Boots, runs the shell script as root, and returns what came over the console by the time it was off, or by the deadline.
    pub fn run(mut self, script: &str, time_max: Duration) -> Console {
        self.file("/script", script.as_bytes(), 0o644);
        let dir = tempfile::tempdir().expect("a directory");
        let disk = dir.path().join("initrd");
        std::fs::write(&disk, std::mem::take(&mut self.disk).finish()).expect("the disk is written");
        std::fs::set_permissions(&disk, PermissionsExt::from_mode(0o600)).expect("its mode");
        let begin = Instant::now();
        let mut qemu = Qemu(self.command(&disk).spawn().expect("QEMU starts"));
        let mut stdout = qemu.0.stdout.take().expect("a pipe");
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stdout.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).replace('\r', "")
        });
        let off = loop {
            match qemu.0.try_wait().expect("QEMU is our child") {
                Some(_) => break true,
                None if begin.elapsed() > time_max => break false,
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        drop(qemu);
        Console { text: reader.join().expect("the console is read"), off, took: begin.elapsed() }
    }

    fn command(&self, disk: &Path) -> Command {
        let mut command = Command::new(&self.host.qemu);
        command.args(["-accel", "tcg", "-cpu", "max", "-machine", "q35", "-smp", "1", "-m", &format!("{}M", self.memory_mib)]);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"]);
        command.arg("-kernel").arg(&self.host.kernel).arg("-initrd").arg(disk);
        // Only what stops the kernel is printed by it: the console is for the script.
        command.args(["-append", &format!("console=ttyS0 loglevel=1 panic=-1 tsc=reliable {}", self.boot_options)]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        // SAFETY: one plain system call between fork and exec: the guest ends with the test, however that ends.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
                Ok(())
            });
        }
        command
    }
}

/// Killed when it goes.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a guest said.
pub struct Console {
    /// All of it.
    pub text: String,
    /// Did it switch itself off? Otherwise it was killed at its deadline.
    pub off: bool,
    /// From start to end.
    pub took: Duration,
}

#[test]
fn a_guest_that_does_not_end_is_killed_at_its_deadline() {
    let host = match Host::find() {
        Ok(host) => host,
        Err(why) => {
            eprintln!("skipped: {why}");
            return;
        }
    };
    let console = Guest::new(host, "").run("sleep 600", Duration::from_secs(1));
    assert!(!console.off && console.took < Duration::from_secs(20), "{:?}", console.took);
}
