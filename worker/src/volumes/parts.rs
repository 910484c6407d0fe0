//! What there is of a volume that is open, from its opening on the server to its end.
//!
//! Owns its directory, how it is shown and hidden, and clearing up behind it. Does not own the order in which that is done (`volumes`).

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;
use volley_jobspecs::ids::VolumeId;
use volley_volume::server::protocol::{Opened, Request, Serve};

use super::entry::{Entry, PATIENCE};
use super::file::ShownFile;
use super::mount::{self, MountError, Tree};
use super::programs::Shown as ShownAs;
use super::{Show, Top, VolumeError, Volumes, blank, link};
use crate::users;

/// The socket of a volume, in its directory.
pub const SOCKET: &str = "s";
/// The export on it.
pub const EXPORT: &str = "v";
/// The file that shows it, in its directory.
const FILE: &str = "file";
/// Where that is mounted, in its directory.
pub const TREE: &str = "tree";
/// The image of a new file system, in its directory.
const IMAGE: &str = "image";
/// Mode of what others pass through and see nothing of.
pub const PASSED: u32 = 0o711;
/// Mode of the directory of a volume that only one user's programs reach.
const CLOSED: u32 = 0o710;
/// How often a server is told to forget a volume, when it ends before it says that it has.
const FORGET_TRIES: u32 = 3;

/// The directory of a volume: who must pass through it may.
pub fn make_dir(dir: &Path, show: Show) -> io::Result<()> {
    fs::create_dir(dir)?;
    let (gid, mode) = match show {
        Show::Nbd { gid, .. } => (gid, CLOSED),
        // A task does not see what is mounted by its path here, but where the task is.
        Show::File { .. } | Show::Mount { .. } => (users::OF_FILES, CLOSED),
    };
    if is_root() {
        chown(dir, Some(0), Some(gid))?;
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(mode))
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Something of this host that failed.
pub fn host(slot: u8, what: &'static str, why: &dyn std::fmt::Display) -> VolumeError {
    VolumeError::Host { slot, what, words: why.to_string() }
}

/// How it is shown now.
#[derive(Debug)]
pub enum Shown {
    Nothing,
    Nbd,
    File(ShownFile),
    Mount(ShownFile, Box<Tree>),
}

/// What there is of a volume that is open.
#[derive(Debug)]
pub struct Parts {
    pub volumes: Arc<Volumes>,
    pub entry: Arc<Entry>,
    pub volume: VolumeId,
    pub dir: PathBuf,
    pub shown: Shown,
    pub bytes: u64,
    pub grown: bool,
    pub made: bool,
    /// Nobody else on this host opens the volume until this is dropped.
    pub turn: OwnedMutexGuard<()>,
}

impl Parts {
    /// Something of this host that failed.
    pub fn host(&self, what: &'static str, why: &dyn std::fmt::Display) -> VolumeError {
        host(self.entry.slot, what, why)
    }

    fn mount_error(&self, what: &'static str, why: MountError) -> VolumeError {
        match why {
            MountError::Busy { .. } => VolumeError::Busy { slot: self.entry.slot, words: why.to_string() },
            why => self.host(what, &why),
        }
    }

    /// Opens it on the server, and on the next one where that ends.
    pub async fn bring_up(&self) -> Result<Opened, VolumeError> {
        loop {
            let link = self.volumes.supervised.link().await.map_err(VolumeError::Off)?;
            match self.entry.bring_up(&link).await {
                Ok(Some(opened)) => {
                    self.volumes.supervised.add(Arc::clone(&self.entry));
                    return Ok(opened);
                }
                // It failed, and says so.
                Ok(None) => return Err(self.entry.failed().await),
                Err(link::Lost) => {}
            }
        }
    }

    /// Writes a file system on it.
    pub async fn pour(&self, bytes: u64, top: Top) -> Result<(), VolumeError> {
        let path = self.dir.join(IMAGE);
        let made = blank::make(&self.volumes.mke2fs, &path, bytes, top).await;
        made.map_err(|e| self.host("making its file system", &e))?;
        let file = self.text(&path)?;
        self.entry.ask("writing its file system", Request::Pour { handle: self.entry.open.handle, file }).await?;
        fs::remove_file(&path).map_err(|e| self.host("removing the image of its file system", &e))
    }

    fn text(&self, path: &Path) -> Result<String, VolumeError> {
        path.to_str().map(str::to_owned).ok_or_else(|| self.host("naming it", &format!("{} is no text", path.display())))
    }

    /// Shows it. `grown`: it has just become larger.
    pub async fn show(&mut self, show: Show, grown: bool) -> Result<(), VolumeError> {
        let (mut owner, group, peers) = match show {
            Show::Nbd { uid, gid } => (uid, gid, vec![uid]),
            // Whoever shows it as a file is still root when it connects first.
            Show::File { .. } | Show::Mount { .. } => (users::OF_FILES, users::OF_FILES, vec![0, users::OF_FILES]),
        };
        if !is_root() {
            owner = rustix::process::geteuid().as_raw();
        }
        let dir = self.text(&self.dir)?;
        let (file, export) = (SOCKET.to_owned(), EXPORT.to_owned());
        self.entry.serve(Serve { handle: self.entry.open.handle, dir, file, owner, group, peers, export }).await?;
        match show {
            Show::Nbd { .. } => self.shown = Shown::Nbd,
            Show::File { uid, gid } => self.shown = Shown::File(self.show_file((uid, gid)).await?),
            Show::Mount { read_only } => {
                self.shown = Shown::File(self.show_file((0, 0)).await?);
                self.mount(read_only, grown).await?;
            }
        }
        Ok(())
    }

    async fn show_file(&self, owner: (u32, u32)) -> Result<ShownFile, VolumeError> {
        if !is_root() {
            return Err(self.host("showing it as a file", &"that takes a worker that runs as root"));
        }
        let (socket, file) = (self.dir.join(SOCKET), self.dir.join(FILE));
        let run_as = (users::OF_FILES, users::OF_FILES);
        let as_file = ShownAs { socket: &socket, export: EXPORT, file: &file, owner, run_as, patience: PATIENCE };
        let mut shown = ShownFile::show(&self.volumes.programs, &as_file).await.map_err(|why| self.host("showing it as a file", &why))?;
        let (entry, slot) = (Arc::clone(&self.entry), self.entry.slot);
        shown.watch(move |why| entry.fail(host(slot, "showing it as a file", &why)));
        Ok(shown)
    }

    /// Mounts what is shown as a file. `grown`: the disk has just become larger.
    async fn mount(&mut self, read_only: bool, grown: bool) -> Result<(), VolumeError> {
        let (path, bytes) = (self.dir.join(FILE), self.bytes);
        fs::create_dir(self.dir.join(TREE)).map_err(|e| self.host("making a directory", &e))?;
        let smaller = {
            let path = path.clone();
            self.blocking(move || blank::is_smaller(&path, bytes)).await?.map_err(|e| self.host("looking at its file system", &e))?
        };
        let mut tree = self.mounted(read_only).await?;
        if smaller && !read_only {
            let done;
            (tree, done) = self.blocking(move || (tree.grow(bytes), tree)).await.map(|(done, tree)| (tree, done))?;
            match done {
                Ok(()) => {}
                Err(MountError::NotMounted) => {
                    self.unmounted(tree).await?;
                    let done = blank::grow(&self.volumes.mke2fs, &path, bytes).await;
                    done.map_err(|e| self.host("growing its file system", &e))?;
                    tree = self.mounted(read_only).await?;
                }
                Err(why) if grown => {
                    self.unmounted(tree).await?;
                    return Err(self.mount_error("growing its file system", why));
                }
                // What is left over at the end of a disk may be too little for anything.
                Err(why) => tracing::debug!(volume = %self.volume, %why, "a file system is as large as it was"),
            }
        }
        if let Shown::File(file) = std::mem::replace(&mut self.shown, Shown::Nothing) {
            self.shown = Shown::Mount(file, Box::new(tree));
        }
        Ok(())
    }

    async fn mounted(&self, read_only: bool) -> Result<Tree, VolumeError> {
        let (file, tree) = (self.dir.join(FILE), self.dir.join(TREE));
        let mounted = self.blocking(move || Tree::mount(&file, &tree, read_only)).await?;
        mounted.map_err(|why| self.mount_error("mounting it", why))
    }

    async fn unmounted(&self, tree: Tree) -> Result<(), VolumeError> {
        let unmounted = self.blocking(move || tree.unmount()).await?;
        unmounted.map_err(|why| self.mount_error("unmounting it", why))
    }

    /// On a thread that may wait for a disk.
    async fn blocking<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> Result<T, VolumeError> {
        tokio::task::spawn_blocking(f).await.map_err(|e| self.host("waiting for its disk", &e))
    }

    /// Shows it no more, when everything that was written has reached the volume.
    pub async fn hide(&mut self) -> Result<(), VolumeError> {
        match std::mem::replace(&mut self.shown, Shown::Nothing) {
            // The server ends the socket with the volume.
            Shown::Nothing | Shown::Nbd => Ok(()),
            Shown::File(file) => file.hide(true).await.map_err(|why| self.mount_error("hiding it", why)),
            Shown::Mount(file, tree) => {
                let unmounted = tokio::task::spawn_blocking(move || tree.unmount()).await;
                let unmounted = unmounted.map_err(|e| self.host("unmounting it", &e))?;
                // Also where something uses it: it is told of errors, and can't keep it from being let go.
                let hidden = file.hide(unmounted.is_ok()).await;
                unmounted.and(hidden).map_err(|why| self.mount_error("unmounting it", why))
            }
        }
    }

    /// Hides it and has it let go: nothing of it is wanted.
    pub async fn forget(self) {
        let Self { volumes, entry, volume, dir, shown, turn: _turn, .. } = self;
        // No new server opens it.
        volumes.supervised.remove(entry.open.handle);
        let file = dir.join(FILE);
        let hiding = async {
            match shown {
                Shown::File(file) => drop(file.hide(false).await),
                Shown::Mount(file, tree) => {
                    if entry.is_stuck() {
                        // What it waits for does not come.
                        let path = file.path().to_owned();
                        let _ = tokio::task::spawn_blocking(move || mount::abort_file(&path)).await;
                    }
                    let _ = tokio::task::spawn_blocking(move || tree.drop_it()).await;
                    drop(file.hide(false).await);
                }
                // It may have been about to be shown.
                Shown::Nothing => drop(tokio::task::spawn_blocking(move || mount::abort_file(&file)).await),
                Shown::Nbd => {}
            }
        };
        hiding.await;
        for _ in 0..FORGET_TRIES {
            let Ok(link) = volumes.supervised.link().await else { break };
            if link.ask(Request::Forget { handle: entry.open.handle, volume }).await.is_ok() {
                break;
            }
        }
        remove(&dir);
    }
}

/// Removes a volume's directory, if nothing is mounted below it any more.
pub fn remove(dir: &Path) {
    for name in [SOCKET, FILE, IMAGE] {
        let _ = fs::remove_file(dir.join(name));
    }
    for dir in [&dir.join(TREE), dir] {
        if let Err(e) = fs::remove_dir(dir)
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(dir = %dir.display(), error = %e, "what a volume left can't be removed; the next start of the worker tries again");
        }
    }
}
