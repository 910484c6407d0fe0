//! A bucket, and workers with volumes on it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use volley_jobspecs::ids::{AttemptName, JobId, SnapshotId, VolumeId};
use volley_jobspecs::wire::volume::Left;
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_store::{Store, StoreConfig};
use volley_volume::format::head::FlushMode;
use volley_volume::format::seal::ClusterKeys;
use volley_volume::{Host, Limits, Promotion};
use volley_worker::VolumesConfig;
use volley_worker::volumes::{OpenVolume, Show, Top, VolumeError, Volumes, Want, What};

pub const MIB: u64 = 1 << 20;
const KEY: &str = "0101010101010101010101010101010101010101010101010101010101010101";

pub struct World {
    dir: tempfile::TempDir,
    server: EmbeddedServer,
    pub limits: Limits,
    pub allow: bool,
    /// Another program for the server than this one.
    pub program: Option<PathBuf>,
}

/// The `n`th attempt of a task.
pub fn attempt(n: u32) -> AttemptName {
    AttemptName { job: JobId(1), stage: 0, index: 0, number: n, sequence: 100 + u64::from(n) }
}

pub fn volume(id: u8) -> VolumeId {
    VolumeId([id; 16])
}

/// What attempt `n` wants of volume `id`.
pub fn write(n: u32, id: u8, generation: u64, show: Show) -> Want {
    Want {
        name: attempt(n),
        slot: 2,
        tenant: "t".parse().unwrap(),
        what: What::Write { volume: volume(id), generation },
        size_bytes: Some(64 * MIB),
        flush: FlushMode::Local,
        top: Top { uid: 0, gid: 0, mode: 0o755 },
        show,
    }
}

/// A copy of a snapshot.
pub fn copy(n: u32, snapshot: SnapshotId, id: u8, show: Show) -> Want {
    Want { what: What::Copy { snapshot, volume: volume(id) }, size_bytes: None, ..write(n, id, 0, show) }
}

pub const MOUNT: Show = Show::Mount { read_only: false };

impl World {
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Programs that show files become another user.
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let config = EmbeddedConfig {
            root: dir.path().join("s3"),
            bind: "127.0.0.1:0".parse().unwrap(),
            access_key: "k".into(),
            secret_key: "s".into(),
            reserve_bytes: 0,
        };
        let server = EmbeddedServer::start(config).await.unwrap();
        let limits = Limits { commit_every: Duration::from_millis(300), cache_disk_bytes: 64 * MIB, ..Limits::default() };
        let world = Self { dir, server, limits, allow: false, program: None };
        Store::connect(&world.store()).await.unwrap().ensure_bucket().await.unwrap();
        world
    }

    fn store(&self) -> StoreConfig {
        StoreConfig::new(&self.server.endpoint(), "volley", "k", "s")
    }

    /// The directory of a worker.
    pub fn of(&self, worker: &str) -> PathBuf {
        self.dir.path().join(worker)
    }

    /// A worker; the same name is the same directory.
    pub async fn worker(&self, name: &str) -> Arc<Volumes> {
        let mut programs = crate::programs::ours();
        programs.path = self.program.clone().unwrap_or(programs.path);
        let config = VolumesConfig {
            allow_host_mount: self.allow,
            limits: self.limits.clone(),
            programs,
            ..VolumesConfig::new(KEY.to_owned(), self.store())
        };
        std::fs::create_dir_all(self.of(name)).unwrap();
        Volumes::start(config, &self.of(name), name, "/sbin/mke2fs".into()).await.unwrap()
    }

    /// Does something with a host of the coordinator's, on a thread that may block.
    pub async fn host<T: Send + 'static>(&self, f: impl FnOnce(Arc<Host>) -> T + Send + 'static) -> T {
        let store = Store::connect(&self.store()).await.unwrap();
        let (dir, runtime) = (self.of("coordinator"), tokio::runtime::Handle::current());
        std::fs::create_dir_all(&dir).unwrap();
        let limits = Limits { cache_disk_bytes: 0, ..Limits::default() };
        let host = Host::new(Arc::new(store), ClusterKeys::parse(KEY).unwrap(), dir, runtime, limits);
        tokio::task::spawn_blocking(move || f(host)).await.unwrap()
    }

    /// What an attempt left is accepted.
    pub async fn promote(&self, n: u32, left: Left) {
        let what = Promotion { volume: left.volume, attempt: Some(attempt(n)), base: left.generation, root: left.root };
        self.host(move |host| host.promote(&what)).await.unwrap();
    }

    /// A snapshot of what was accepted.
    pub async fn snapshot(&self, id: u8) -> SnapshotId {
        let snapshot = SnapshotId([id; 16]);
        self.host(move |host| host.snapshot_accepted(volume(id), snapshot)).await.unwrap();
        snapshot
    }

    /// Nothing of an attempt is left on a worker: no mount, no socket, no program, no clone.
    #[track_caller]
    pub fn nothing_left(&self, worker: &str) {
        let at = self.of(worker).join("volumes").join("at");
        let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap().matches(at.to_str().unwrap()).count();
        let entries = || std::fs::read_dir(&at).unwrap().count();
        let loops = || loops_below(&at).len();
        let showing = || programs_with(at.to_str().unwrap()).len();
        soon("an end of all", || (mounts(), entries(), loops(), showing()) == (0, 0, 0, 0));
    }
}

/// A test that fails leaves nothing mounted either.
impl Drop for World {
    fn drop(&mut self) {
        use rustix::mount::{UnmountFlags, unmount};
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let dir = self.dir.path().to_str().unwrap();
        let below: Vec<&str> = table.lines().filter_map(|line| line.split(' ').nth(4)).filter(|path| path.starts_with(dir)).collect();
        for path in below.iter().filter(|path| path.ends_with("/file")) {
            let _ = unmount(*path, UnmountFlags::FORCE);
        }
        for path in below.iter().rev() {
            let _ = unmount(*path, UnmountFlags::DETACH);
        }
    }
}

/// Loop devices on files below a directory.
fn loops_below(dir: &Path) -> Vec<String> {
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
    let file = |device: &std::fs::DirEntry| std::fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
    devices.map(|device| file(&device)).filter(|file| file.starts_with(dir.to_str().unwrap())).collect()
}

/// Processes that have a text in their arguments.
pub fn programs_with(text: &str) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
    let has = |pid: &u32| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| String::from_utf8_lossy(&line).contains(text));
    pids.filter(|pid| *pid != std::process::id() && has(pid)).collect()
}

#[track_caller]
pub fn soon(what: &str, mut there: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !there() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Can this host mount volumes?
pub fn possible() -> bool {
    let there = |path: &str| Path::new(path).exists();
    let may = rustix::process::geteuid().is_root() && there("/dev/fuse") && there("/dev/loop-control") && there("/sbin/mke2fs");
    if !may {
        eprintln!("skipped: it takes root, FUSE, loop devices and e2fsprogs");
    }
    may
}

/// Is the program here?
pub fn have(program: &str) -> bool {
    let found = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|dir| dir.join(program).exists());
    if !found {
        eprintln!("skipped: no {program} here");
    }
    found
}

/// Kills the volume server. Waits until there is another one if `wait`.
pub fn kill_server(volumes: &Volumes, wait: bool) {
    let mut pid = None;
    soon("a server", || {
        pid = volumes.server();
        pid.is_some()
    });
    let pid = pid.unwrap();
    let _ = rustix::process::kill_process(rustix::process::Pid::from_raw(pid.cast_signed()).unwrap(), rustix::process::Signal::KILL);
    if wait {
        soon("another server", || volumes.server().is_some_and(|other| other != pid));
    }
}

/// Bytes that tell what they are of.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend(state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// An open volume that is expected not to be.
pub fn refused(opened: Result<OpenVolume, VolumeError>) -> VolumeError {
    match opened {
        Err(why) => why,
        Ok(open) => panic!("it was opened: {open:?}"),
    }
}
