//! Volumes on a worker's host: opened for an attempt, shown to it, and let go when it has ended.
//!
//! Owns the seam between an attempt and its volumes, and the order in which one is opened, shown, hidden and let go. Does not own what is stored (`volley-volume`), the
//! process that serves it (`supervise`), nor when an attempt opens or ends anything.
//!
//! In the worker's directory: `volumes/store` is the server's; `volumes/at/<number>` is of one volume that is open: `s`, its socket, which only the user it is for can
//! connect to; `file`, on which it is shown; `tree`, where that is mounted.

mod blank;
mod entry;
mod error;
mod file;
mod link;
mod mount;
mod parts;
pub mod programs;
mod supervise;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, PoisonError, Weak};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::JoinHandle;
use volley_jobspecs::ids::{AttemptName, SnapshotId, TenantId, VolumeId};
use volley_jobspecs::wire::volume::Left;
use volley_store::StoreConfig;
use volley_volume::Limits;
use volley_volume::format::head::FlushMode;
use volley_volume::server::protocol::{self, Bounds, Open, Reply, Request, Setup};

use crate::vmm::Source;
use entry::Entry;
pub use error::VolumeError;
use parts::{EXPORT, PASSED, Parts, SOCKET, Shown, TREE, host, make_dir, remove};
use programs::Programs;
use supervise::{State, Supervised};

/// How long an attempt waits for a volume that another one has open here: it is being let go, or the log has given it out twice.
const TURN_WAIT: Duration = Duration::from_secs(60);
/// What volumes are made of.
#[derive(Clone)]
pub struct VolumesConfig {
    /// The cluster's keys for volumes, as the file has them (`volley_volume::format::seal::ClusterKeys`).
    pub keys: String,
    /// The bucket.
    pub store: StoreConfig,
    /// May this host mount what a machine's guest could have written? Its kernel then reads file systems that anybody may have made.
    pub allow_host_mount: bool,
    /// What they may use.
    pub limits: Limits,
    /// The server, and what shows a volume as a file.
    pub programs: Programs,
}

impl VolumesConfig {
    /// With the defaults.
    #[must_use]
    pub fn new(keys: String, store: StoreConfig) -> Self {
        Self { keys, store, allow_host_mount: false, limits: Limits::default(), programs: Programs::default() }
    }
}

/// No secret is ever shown.
impl std::fmt::Debug for VolumesConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolumesConfig")
            .field("store", &self.store)
            .field("allow_host_mount", &self.allow_host_mount)
            .finish_non_exhaustive()
    }
}

/// What an attempt wants of one slot.
#[derive(Debug, Clone)]
pub struct Want {
    /// The attempt.
    pub name: AttemptName,
    /// The slot.
    pub slot: u8,
    /// Whose it is.
    pub tenant: TenantId,
    /// Which bytes.
    pub what: What,
    /// At least so many bytes.
    pub size_bytes: Option<u64>,
    /// What a flush promises, of a volume that is made and of a copy.
    pub flush: FlushMode,
    /// A disk that nothing was ever written to gets a file system (ext4) first, with this top directory.
    pub top: Top,
    /// How it is shown.
    pub show: Show,
}

/// Which bytes an attempt gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// A volume that it writes, as it was given (`wire::volume::Given`).
    Write {
        /// Which.
        volume: VolumeId,
        /// The generation it begins with; 0: there may be none yet, and it is made then.
        generation: u64,
    },
    /// A copy of its own of a snapshot.
    Copy {
        /// Of which.
        snapshot: SnapshotId,
        /// What it is called, on this host and for good if it is kept: it follows from job, stage, index, attempt and slot.
        volume: VolumeId,
    },
}

/// The top directory of a new file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Top {
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its mode: the twelve bits of permissions.
    pub mode: u32,
}

/// How a volume is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// On a unix socket, for a VMM that runs as this user.
    Nbd {
        /// Its uid.
        uid: u32,
        /// Its gid.
        gid: u32,
    },
    /// As a file, for a VMM that takes files.
    File {
        /// Its uid.
        uid: u32,
        /// Its gid.
        gid: u32,
    },
    /// Mounted on this host, with a file system as large as the disk.
    Mount {
        /// Nothing can be written.
        read_only: bool,
    },
}

/// All volumes of a worker. There are none in a worker that has no key for them.
#[derive(Debug)]
pub struct Volumes {
    at: PathBuf,
    mke2fs: PathBuf,
    allow_host_mount: bool,
    programs: Programs,
    next: AtomicU64,
    /// Of volumes that are open, or are being let go.
    turns: StdMutex<BTreeMap<VolumeId, Weak<Mutex<()>>>>,
    supervised: Arc<Supervised>,
    keeping: JoinHandle<()>,
}

impl Drop for Volumes {
    fn drop(&mut self) {
        // The server ends with its connection.
        self.keeping.abort();
    }
}

impl Volumes {
    /// Clears what a worker before this one left, and starts the server. `dir`: the worker's own. One that can't be started is tried again for ever; until it is there,
    /// what is opened says why not.
    ///
    /// # Errors
    /// What the system says of the directory.
    pub async fn start(config: VolumesConfig, dir: &Path, host: &str, mke2fs: PathBuf) -> io::Result<Arc<Self>> {
        let dir = dir.join("volumes");
        let at = dir.join("at");
        let clearing = (dir.clone(), at.clone());
        tokio::task::spawn_blocking(move || clear(&clearing.0, &clearing.1)).await.map_err(io::Error::other)??;
        let VolumesConfig { keys, store, allow_host_mount, limits, programs } = config;
        let text = |path: &Path| path.to_str().map(str::to_owned).ok_or_else(|| io::Error::other(format!("{} is no text", path.display())));
        let setup = Setup {
            endpoint: store.endpoint,
            region: store.region,
            bucket: store.bucket,
            prefix: store.prefix,
            credentials: store.credentials,
            path_style: store.force_path_style,
            keys,
            dir: text(&dir.join("store"))?,
            host: host.to_owned(),
            fresh: true,
            bounds: Bounds::from(&limits),
        };
        let (supervised, keeping) = Supervised::start(programs.clone(), setup);
        if let State::Down(why) = supervised.begun().await {
            tracing::warn!("volumes can't be used on this worker until its volume server can be started: {why}");
        }
        Ok(Arc::new(Self {
            at,
            mke2fs,
            allow_host_mount,
            programs,
            next: AtomicU64::new(1),
            turns: StdMutex::default(),
            supervised,
            keeping,
        }))
    }

    /// Opens a volume and shows it. Whoever waits for it no longer leaves nothing behind.
    ///
    /// # Errors
    /// [`VolumeError`]; nothing of it is left then.
    pub async fn open(self: &Arc<Self>, want: Want) -> Result<OpenVolume, VolumeError> {
        let (volumes, slot) = (Arc::clone(self), want.slot);
        whole(slot, async move { volumes.open_whole(want).await }).await
    }

    async fn open_whole(self: Arc<Self>, want: Want) -> Result<OpenVolume, VolumeError> {
        if let Some(why) = self.lack() {
            return Err(VolumeError::Off(why));
        }
        let Want { name, slot, tenant, what, size_bytes, flush, top, show } = want;
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let guest = !matches!(show, Show::Mount { .. });
        let what = match what {
            What::Write { volume, generation } => {
                let mut attach = [0; 16];
                getrandom::fill(&mut attach).map_err(|e| host(slot, "drawing a random number", &e))?;
                protocol::What::Write { volume, tenant, generation, attempt: name, attach }
            }
            What::Copy { snapshot, volume } => protocol::What::Copy { snapshot, volume },
        };
        let write = matches!(what, protocol::What::Write { .. });
        let volume = what.volume();
        let turn = self.turn(slot, volume).await?;
        let entry = Arc::new(Entry::new(Open { handle, what, size_bytes, flush, guest, again: false }, slot));
        let dir = self.at.join(handle.to_string());
        let tree = dir.join(TREE);
        let parts =
            Parts { volumes: Arc::clone(&self), entry, volume, dir, shown: Shown::Nothing, bytes: 0, grown: false, made: false, turn };
        // From here on it is forgotten, whatever happens.
        let mut open = OpenVolume { parts: Some(parts), tree };
        let parts = open.parts_mut()?;
        let opened = parts.bring_up().await?;
        if !guest && opened.guest_written && !self.allow_host_mount {
            return Err(VolumeError::GuestWritten { slot, volume: volume.to_string() });
        }
        make_dir(&parts.dir, show).map_err(|e| host(slot, "making its directory", &e))?;
        if opened.blank {
            parts.pour(opened.bytes, top).await?;
        }
        (parts.bytes, parts.made) = (opened.bytes, opened.blank);
        parts.grown = opened.grown || (write && !opened.blank);
        parts.show(show, opened.grown).await?;
        Ok(open)
    }

    /// Waits until nobody on this host has the volume: an attempt that tries again may have to wait until what it tried before is let go.
    async fn turn(&self, slot: u8, volume: VolumeId) -> Result<OwnedMutexGuard<()>, VolumeError> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|_, turn| turn.strong_count() > 0);
            match turns.get(&volume).and_then(Weak::upgrade) {
                Some(turn) => turn,
                None => {
                    let turn = Arc::<Mutex<()>>::default();
                    turns.insert(volume, Arc::downgrade(&turn));
                    turn
                }
            }
        };
        let waited = tokio::time::timeout(TURN_WAIT, turn.lock_owned()).await;
        waited.map_err(|_| host(slot, "opening it", &format!("{volume} has been open on this host for {} s", TURN_WAIT.as_secs())))
    }

    /// Why no volume can be opened now, if so.
    #[must_use]
    pub fn lack(&self) -> Option<String> {
        self.supervised.lack()
    }

    /// The volume server's process, while there is one.
    #[must_use]
    pub fn server(&self) -> Option<u32> {
        self.supervised.pid()
    }

    /// Ends the server, and leaves all else as it is: as if the worker had been killed. For tests.
    pub fn abandon(&self) {
        self.keeping.abort();
    }

    /// The server's figures.
    ///
    /// # Errors
    /// There is no server.
    pub async fn stats(&self) -> Result<protocol::Stats, VolumeError> {
        let link = self.supervised.link().await.map_err(VolumeError::Off)?;
        match link.ask(Request::Stats).await {
            Ok(Reply::Stats(stats)) => Ok(stats),
            _ => Err(VolumeError::Off("the volume server has just ended".to_owned())),
        }
    }
}

/// What a worker before this one left goes: mounts, sockets, directories.
fn clear(dir: &Path, at: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(PASSED))?;
    mount::clear_below(at)?;
    match fs::remove_dir_all(at) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    fs::create_dir(at)?;
    fs::set_permissions(at, fs::Permissions::from_mode(PASSED))?;
    let store = dir.join("store");
    fs::create_dir_all(&store)?;
    fs::set_permissions(&store, fs::Permissions::from_mode(0o700))
}

/// A volume that is open and shown. Dropped, it is forgotten ([`OpenVolume::forget`]) in the background.
#[derive(Debug)]
pub struct OpenVolume {
    parts: Option<Parts>,
    tree: PathBuf,
}

impl Drop for OpenVolume {
    fn drop(&mut self) {
        // Without a runtime the process ends, and its next start clears it.
        if let (Some(parts), Ok(runtime)) = (self.parts.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(parts.forget());
        }
    }
}

/// Does all of something, also when whoever asked for it waits no longer: half of a mount would stay for ever.
async fn whole<T: Send + 'static>(slot: u8, f: impl Future<Output = Result<T, VolumeError>> + Send + 'static) -> Result<T, VolumeError> {
    tokio::spawn(f).await.unwrap_or_else(|e| Err(host(slot, "waiting for it", &e)))
}

fn gone() -> VolumeError {
    VolumeError::Off("it was let go".to_owned())
}

impl OpenVolume {
    fn parts_mut(&mut self) -> Result<&mut Parts, VolumeError> {
        self.parts.as_mut().ok_or_else(gone)
    }

    /// The disk's size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.as_ref().map_or(0, |parts| parts.bytes)
    }

    /// Was nothing ever written on the disk, so that this opening made its file system?
    #[must_use]
    pub fn made(&self) -> bool {
        self.parts.as_ref().is_some_and(|parts| parts.made)
    }

    /// May the file system be smaller than the disk? Then whoever mounts it is to grow it.
    #[must_use]
    pub fn grown(&self) -> bool {
        self.parts.as_ref().is_some_and(|parts| parts.grown)
    }

    /// For a machine's slot ([`Show::Nbd`], [`Show::File`]).
    ///
    /// # Errors
    /// What the system says; `Unsupported` for what is mounted.
    pub fn source(&self) -> io::Result<Source> {
        let parts = self.parts.as_ref().ok_or(io::ErrorKind::NotFound)?;
        match &parts.shown {
            Shown::Nbd => {
                let dir = rustix::fs::open(&parts.dir, OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
                Ok(Source::Nbd { dir, socket: SOCKET.to_owned(), export: EXPORT.to_owned() })
            }
            Shown::File(file) => Ok(Source::File(fs::File::options().read(true).write(true).open(file.path())?.into())),
            Shown::Nothing | Shown::Mount(..) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Where it is mounted ([`Show::Mount`]).
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.tree
    }

    /// Ends when the volume takes nothing more, for good: whoever uses it is to be killed.
    pub async fn failed(&self) -> VolumeError {
        match &self.parts {
            Some(parts) => parts.entry.failed().await,
            None => gone(),
        }
    }

    /// Of a volume that was written, at the end of an attempt that may be a success: unmounts, flushes, commits the last and lets go. Nobody may use it any more.
    ///
    /// # Errors
    /// [`VolumeError`]: what was written is not kept, and the attempt no success.
    pub async fn finish(self) -> Result<Left, VolumeError> {
        whole(self.slot(), self.finish_whole()).await
    }

    async fn finish_whole(mut self) -> Result<Left, VolumeError> {
        let parts = self.parts_mut()?;
        parts.hide().await?;
        let handle = parts.entry.open.handle;
        let Reply::Left(left) = parts.entry.ask("committing what was written", Request::Finish { handle }).await? else {
            return Err(parts.host("committing what was written", &"the volume server answered something else"));
        };
        let (slot, volume) = (parts.entry.slot, parts.volume);
        self.close();
        Ok(Left { slot, volume, generation: left.generation, root: left.root, size_bytes: left.size_bytes })
    }

    /// Of a copy: unmounts, uploads it and makes it a volume. Its size in bytes.
    ///
    /// # Errors
    /// [`VolumeError`]: it is not kept.
    pub async fn keep(self) -> Result<u64, VolumeError> {
        whole(self.slot(), self.keep_whole()).await
    }

    async fn keep_whole(mut self) -> Result<u64, VolumeError> {
        let parts = self.parts_mut()?;
        parts.hide().await?;
        let handle = parts.entry.open.handle;
        let Reply::Kept(bytes) = parts.entry.ask("keeping the copy", Request::Keep { handle }).await? else {
            return Err(parts.host("keeping the copy", &"the volume server answered something else"));
        };
        self.close();
        Ok(bytes)
    }

    /// Nothing of it is wanted. Of a volume that was written what was accepted stays.
    pub async fn forget(mut self) {
        if let Some(parts) = self.parts.take() {
            let forgetting = async move {
                parts.forget().await;
                Ok(())
            };
            // It says nothing that anybody could do something about.
            let _ = whole(0, forgetting).await;
        }
    }

    fn slot(&self) -> u8 {
        self.parts.as_ref().map_or(0, |parts| parts.entry.slot)
    }

    /// The server has let it go.
    fn close(&mut self) {
        if let Some(parts) = self.parts.take() {
            parts.volumes.supervised.remove(parts.entry.open.handle);
            remove(&parts.dir);
        }
    }
}
