//! A small Linux guest for one test: Debian's kernel under QEMU, with an initial RAM disk that holds busybox and what the test adds.
//!
//! Owns the disk, QEMU, its deadline, and what came over the serial console. Does not own what runs in the guest. The processor is
//! emulated in software, so no KVM is wanted: a boot takes about 4 seconds, and what runs is ten times slower than outside.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Memory of the guest: the disk lies in it, twice while it is unpacked.
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
/// In an archive of the "newc" form: a directory, a file.
const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_000;

/// The programs of this machine that make a guest.
pub struct Host {
    qemu: PathBuf,
    busybox: PathBuf,
    kernel: PathBuf,
}

impl Host {
    /// Finds them, or says what is missing. `tests/run` installs all of them.
    pub fn find() -> Result<Self, String> {
        let program = |name: &str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
            found.ok_or_else(|| format!("no {name} in PATH"))
        };
        let kernel = std::env::var_os("VOLLEY_GUEST_KERNEL").map(PathBuf::from).or_else(|| {
            let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
            Some(cache.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")))?.join("volley/guest/vmlinuz"))
        });
        Ok(Self {
            qemu: program("qemu-system-x86_64")?,
            busybox: program("busybox")?,
            kernel: kernel.filter(|file| file.is_file()).ok_or("no guest kernel (VOLLEY_GUEST_KERNEL)")?,
        })
    }
}

/// What is put into a guest.
pub struct Guest {
    host: Host,
    disk: Vec<u8>,
    known: BTreeSet<PathBuf>,
    boot_options: String,
}

impl Guest {
    /// A guest with busybox. `boot_options` are added to the kernel's command line.
    pub fn new(host: Host, boot_options: &str) -> Self {
        let mut guest = Self { host, disk: Vec::new(), known: BTreeSet::new(), boot_options: boot_options.to_owned() };
        for dir in ["/proc", "/sys", "/dev", "/tmp"] {
            guest.folder(Path::new(dir));
        }
        let busybox = guest.host.busybox.clone();
        guest.program(&busybox, "/bin/busybox");
        guest.file("/init", INIT.as_bytes(), 0o755);
        guest.file("/etc/passwd", b"root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n", 0o644);
        guest
    }

    /// Adds a program of this machine, with the libraries it loads.
    pub fn program(&mut self, from: &Path, to: &str) {
        self.file(to, &std::fs::read(from).unwrap_or_else(|e| panic!("{}: {e}", from.display())), 0o755);
        // One that is linked statically has none, and says so on stderr.
        let listed = Command::new("ldd").arg(from).output().expect("ldd");
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        for library in listed.split_whitespace().filter(|word| word.starts_with('/')) {
            if !self.known.contains(Path::new(library)) {
                self.file(library, &std::fs::read(library).unwrap_or_else(|e| panic!("{library}: {e}")), 0o755);
            }
        }
    }

    /// Adds a file, with the directories it lies in.
    pub fn file(&mut self, to: &str, bytes: &[u8], mode: u32) {
        let to = Path::new(to);
        self.folder(to.parent().expect("an absolute path"));
        self.entry(to, FILE | mode, bytes);
    }

    fn folder(&mut self, path: &Path) {
        if let Some(parent) = path.parent() {
            self.folder(parent);
            if !self.known.contains(path) {
                self.entry(path, DIRECTORY, &[]);
            }
        }
    }

    /// Appends one entry: a head of 13 numbers, the name, the bytes; name and bytes end at multiples of 4.
    fn entry(&mut self, path: &Path, mode: u32, bytes: &[u8]) {
        let name = path.to_str().expect("a plain name").trim_start_matches('/');
        let (name_len, len) = (name.len() + 1, u32::try_from(bytes.len()).expect("at most 4 GiB"));
        let number = self.known.len() + 1;
        let head = format!("070701{number:08x}{mode:08x}{:016x}{:08x}{:08x}{len:08x}{:032x}{name_len:08x}{:08x}", 0, 1, 0, 0, 0);
        self.disk.extend_from_slice(head.as_bytes());
        self.disk.extend_from_slice(name.as_bytes());
        self.disk.push(0);
        self.disk.resize(self.disk.len().next_multiple_of(4), 0);
        self.disk.extend_from_slice(bytes);
        self.disk.resize(self.disk.len().next_multiple_of(4), 0);
        self.known.insert(path.to_owned());
    }

    /// Boots, runs the shell script as root, and returns what came over the console by the time it was off, or by the deadline.
    pub fn run(mut self, script: &str, time_max: Duration) -> Console {
        self.file("/script", script.as_bytes(), 0o644);
        self.entry(Path::new("/TRAILER!!!"), 0, &[]);
        let dir = tempfile::tempdir().expect("a directory");
        let disk = dir.path().join("initrd");
        std::fs::write(&disk, &self.disk).expect("the disk is written");
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
        command.args(["-accel", "tcg", "-cpu", "max", "-machine", "q35", "-smp", "1", "-m", &format!("{MEMORY_MIB}M")]);
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
