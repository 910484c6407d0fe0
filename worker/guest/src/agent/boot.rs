//! From the first instruction of a machine's first process to an agent that can be called.
//!
//! Owns the machine's own mounts, its modules, its root and the channel, as the kernel's command line says:
//!
//! | word | meaning |
//! |---|---|
//! | `volley.port=NAME` | the virtio port of this name is the channel |
//! | `volley.vsock=PORT` | a vsock listener on this port is the channel |
//! | `volley.root=DISK` | this disk (`vda`) is the root, read-only, under an overlay in memory; without it the RAM disk is the root |
//! | `volley.rootfs=KIND` | its file system; `erofs` when not given |

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::mount::MountFlags;

use super::Transport;
use super::disks::make_place;

/// Where the modules lie in the RAM disk, and the file that lists them in the order in which they are loaded.
pub const MODULES_DIR: &str = "/modules";
/// That file's name.
pub const MODULES_LIST: &str = "list";
/// How long a device may take to appear. A driver that was loaded finds its devices within milliseconds; an emulated machine is slow.
const DEVICE_WAIT: Duration = Duration::from_secs(10);
/// Between looks.
const DEVICE_LOOK: Duration = Duration::from_millis(2);
/// The flags of what never holds programs.
const PLAIN: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
/// Where the root is put together.
const LOWER: &str = "/volley/lower";
const UPPER: &str = "/volley/upper";
const ROOT: &str = "/volley/root";

/// Why the machine can't be used.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What it said.
        source: io::Error,
    },
    /// The kernel's command line names no channel.
    #[error("the kernel's command line names no channel (volley.port or volley.vsock)")]
    NoChannel,
    /// A device did not appear.
    #[error("{0} did not appear; is its driver in the RAM disk?")]
    NoDevice(String),
}

fn at(what: impl Into<String>) -> impl FnOnce(io::Error) -> BootError {
    let what = what.into();
    move |source| BootError::System { what, source }
}

/// Brings the machine up.
///
/// # Errors
/// [`BootError`].
pub fn boot() -> Result<Transport, BootError> {
    mount_own()?;
    take_console();
    load_modules();
    let line = fs::read_to_string("/proc/cmdline").map_err(at("reading the kernel's command line"))?;
    let word = |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    if let Some(disk) = word("volley.root") {
        let disk = device(&format!("disk {disk}"), || Some(Path::new("/dev").join(disk)).filter(|path| path.exists()))?;
        enter_root(&disk, word("volley.rootfs").unwrap_or("erofs"))?;
    }
    mount_cgroups();
    // Whoever takes more than there is is ended for it, as in the other tiers, where a limit knows nothing of what was only asked for.
    if let Err(e) = fs::write("/proc/sys/vm/overcommit_memory", "1") {
        eprintln!("volley-guest: letting more memory be asked for than there is: {e}");
    }
    if let Err(e) = raise_loopback() {
        eprintln!("volley-guest: raising the loopback: {e}");
    }
    match (word("volley.port"), word("volley.vsock").and_then(|port| port.parse().ok())) {
        (Some(name), _) => open_port(name),
        (None, Some(port)) => listen_vsock(port).map(Transport::Listener).map_err(at("listening on vsock")),
        (None, None) => Err(BootError::NoChannel),
    }
}

fn mount_own() -> Result<(), BootError> {
    let mounts = [
        ("proc", "/proc", PLAIN, c""),
        ("sysfs", "/sys", PLAIN, c""),
        ("devtmpfs", "/dev", MountFlags::NOSUID, c"mode=0755"),
        ("tmpfs", "/run", MountFlags::NOSUID.union(MountFlags::NODEV), c"mode=0755"),
    ];
    for (kind, target, flags, options) in mounts {
        fs::create_dir_all(target).map_err(at(target))?;
        match rustix::mount::mount(kind, target, kind, flags, options) {
            // The kernel may have mounted /dev itself.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(e) => return Err(at(format!("mounting {target}"))(e.into())),
        }
    }
    for (kind, target, options) in [("devpts", "/dev/pts", c"mode=0620,gid=5,ptmxmode=0666"), ("tmpfs", "/dev/shm", c"mode=1777")] {
        let mounted = fs::create_dir_all(target).and_then(|()| Ok(rustix::mount::mount(kind, target, kind, MountFlags::NOSUID, options)?));
        mounted.map_err(at(format!("mounting {target}")))?;
    }
    for (name, to) in [("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")]
    {
        // One that is there is as good.
        let _ = std::os::unix::fs::symlink(to, Path::new("/dev").join(name));
    }
    // A RAM disk has none; an image brings its own.
    let _ = fs::create_dir("/tmp").and_then(|()| fs::set_permissions("/tmp", std::os::unix::fs::PermissionsExt::from_mode(0o1777)));
    Ok(())
}

/// The console becomes the standard streams; the kernel could not open it before /dev was there.
fn take_console() {
    let open = |path| OpenOptions::new().read(true).write(true).open(path);
    if let Ok(console) = open("/dev/console").or_else(|_| open("/dev/null")) {
        for stream in 0..=2 {
            // SAFETY: a plain system call on descriptors that nothing else uses yet.
            unsafe { libc::dup2(console.as_raw_fd(), stream) };
        }
        if console.as_raw_fd() <= 2 {
            std::mem::forget(console);
        }
    }
}

/// Loads what the RAM disk brings. One that fails is named, and what needs it will say so.
fn load_modules() {
    let list = fs::read_to_string(Path::new(MODULES_DIR).join(MODULES_LIST)).unwrap_or_default();
    for name in list.lines() {
        let loaded = File::open(Path::new(MODULES_DIR).join(name)).and_then(|file| Ok(rustix::system::finit_module(&file, c"", 0)?));
        match loaded {
            Err(e) if e.raw_os_error() != Some(libc::EEXIST) => eprintln!("volley-guest: module {name}: {e}"),
            _ => {}
        }
    }
    // They take memory as long as they lie there, when no other root takes their place.
    let _ = fs::remove_dir_all(MODULES_DIR);
}

/// Waits for something to appear.
fn device(what: &str, find: impl Fn() -> Option<PathBuf>) -> Result<PathBuf, BootError> {
    let deadline = Instant::now() + DEVICE_WAIT;
    loop {
        if let Some(path) = find() {
            return Ok(path);
        }
        if Instant::now() >= deadline {
            return Err(BootError::NoDevice(what.to_owned()));
        }
        std::thread::sleep(DEVICE_LOOK);
    }
}

/// Puts a read-only disk under a writable layer in memory, and makes that the root.
fn enter_root(disk: &Path, kind: &str) -> Result<(), BootError> {
    for dir in [LOWER, UPPER, ROOT] {
        fs::create_dir_all(dir).map_err(at(dir))?;
    }
    let mount = |source: &Path, target: &str, kind: &str, flags: MountFlags, options: &str| {
        let options = CString::new(options).map_err(|e| at(target)(e.into()))?;
        rustix::mount::mount(source, target, kind, flags, options.as_c_str())
            .map_err(|e| at(format!("mounting {} as {kind}", source.display()))(e.into()))
    };
    mount(disk, LOWER, kind, MountFlags::RDONLY, "")?;
    mount(Path::new("tmpfs"), UPPER, "tmpfs", MountFlags::empty(), "mode=0755")?;
    for dir in ["upper", "work"] {
        fs::create_dir_all(Path::new(UPPER).join(dir)).map_err(at("making the upper layer"))?;
    }
    let layers = format!("lowerdir={LOWER},upperdir={UPPER}/upper,workdir={UPPER}/work");
    mount(Path::new("overlay"), ROOT, "overlay", MountFlags::empty(), &layers)?;
    for dir in ["/dev", "/proc", "/sys", "/run"] {
        let target = format!("{ROOT}{dir}");
        make_place(Path::new(&target)).map_err(at(target.clone()))?;
        rustix::mount::mount_move(dir, &target).map_err(|e| at(format!("moving {dir}"))(e.into()))?;
    }
    let moved = rustix::process::chdir(ROOT)
        .and_then(|()| rustix::mount::mount_move(".", "/"))
        .and_then(|()| rustix::process::chroot("."))
        .and_then(|()| rustix::process::chdir("/"));
    moved.map_err(|e| at("entering the root")(e.into()))?;
    let _ = fs::create_dir_all("/tmp").and_then(|()| fs::set_permissions("/tmp", std::os::unix::fs::PermissionsExt::from_mode(0o1777)));
    Ok(())
}

/// Programs speak to themselves over it. It is the only network a machine has.
fn raise_loopback() -> io::Result<()> {
    // SAFETY: plain data, of which zeros are an empty name and no flags.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(b"lo") {
        *place = byte.cast_signed();
    }
    // SAFETY: plain system calls; the requests read and write an `ifreq` with a name, which lives over them; the descriptor is nobody else's.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = OwnedFd::from_raw_fd(socket);
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) < 0 {
            return Err(io::Error::last_os_error());
        }
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn mount_cgroups() {
    if let Err(e) = rustix::mount::mount("cgroup2", super::cgroup::TOP, "cgroup2", PLAIN, c"") {
        eprintln!("volley-guest: mounting cgroups: {e}");
    }
}

/// Opens the virtio port of this name.
fn open_port(name: &str) -> Result<Transport, BootError> {
    let path = device(&format!("virtio port {name}"), || {
        let ports = fs::read_dir("/sys/class/virtio-ports").ok()?.flatten();
        let mut named = ports.filter(|port| fs::read_to_string(port.path().join("name")).is_ok_and(|text| text.trim() == name));
        Some(Path::new("/dev").join(named.next()?.file_name())).filter(|path| path.exists())
    })?;
    let port = rustix::fs::open(&path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
    port.map(Transport::Port).map_err(|e| at(format!("opening {}", path.display()))(e.into()))
}

/// Listens on a vsock port.
///
/// # Errors
/// What the system says.
pub fn listen_vsock(port: u32) -> io::Result<OwnedFd> {
    /// One host connects; a second one while the first is being taken up is its own retry.
    const BACKLOG: libc::c_int = 4;
    let check = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
    // SAFETY: plain system calls; the address is plain data that lives over the call; the descriptor is nobody else's.
    unsafe {
        let socket = check(libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0))?;
        let socket = OwnedFd::from_raw_fd(socket);
        let mut address: libc::sockaddr_vm = std::mem::zeroed();
        address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).map_err(io::Error::other)?;
        address.svm_cid = libc::VMADDR_CID_ANY;
        address.svm_port = port;
        let len = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
        check(libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len))?;
        check(libc::listen(socket.as_raw_fd(), BACKLOG))?;
        Ok(socket)
    }
}
