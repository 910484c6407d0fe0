//! What all slots with containers share: the runtime, the first program of every container, images as mounted disks.
//!
//! Owns finding out at the start whether containers can be made here at all, and an image's device for as long as a slot uses it. Does not
//! own any container (`runtime/container`) or how its root is put together (`spawner/container`).

mod disk;
mod runtime;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use volley_guest::agent::users::{self, Ids};
use volley_guest::initramfs::{self, InitramfsError};

use crate::config::{ContainerConfig, MachineConfig};
use crate::image::Store;
use crate::image::find::{FindError, find};
use crate::image::oci::{Config as ImageConfig, Digest};
use crate::spawner::{Spawner, SpawnerError};

pub use disk::ImageDisk;
pub use runtime::{Kind, Runtime};

/// What can't stand in a path that is an overlay's: it separates or escapes its options.
const NOT_IN_PATHS: [char; 4] = [',', ':', '\\', '"'];

/// Why a worker can't offer containers. Each says what helps.
#[derive(Debug, thiserror::Error)]
pub enum ContainersError {
    /// Only root may mount.
    #[error("containers need a worker that runs as root: it mounts images")]
    NotRoot,
    /// There is no runtime.
    #[error("no {wanted} in PATH to run containers; install it (Debian: apt install crun) or name another runtime")]
    NoRuntime {
        /// What was looked for.
        wanted: String,
    },
    /// The runtime is no runtime, or none that is known.
    #[error("{} does not say that it is crun, runc or runsc: {said}", .path.display())]
    Unknown {
        /// Which.
        path: PathBuf,
        /// What it said.
        said: String,
    },
    /// A path that can't be mounted over.
    #[error("containers can't be made in {}: the path has one of , : \\ \" in it; choose another directory for the worker", .0.display())]
    Path(PathBuf),
    /// The first program is not there.
    #[error(transparent)]
    Init(#[from] InitramfsError),
    /// A directory or file.
    #[error("{what} {}: {source}", .path.display())]
    Io {
        /// What it is.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Nobody to run them as.
    #[error(transparent)]
    Users(#[from] crate::users::UsersError),
    /// Nothing can be started.
    #[error(transparent)]
    Spawner(#[from] SpawnerError),
    /// A container that was tried did not run.
    #[error("a container that was tried did not run: {0}")]
    Trial(String),
}

/// Why a task has no image to run in.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// The task names none.
    #[error("the task names no image; isolation \"container\" needs one: task.image")]
    NoImage,
    /// It is not here.
    #[error(transparent)]
    Find(#[from] FindError),
    /// Its disk can't be used.
    #[error("mounting the image {image}: {source}")]
    Disk {
        /// Which.
        image: String,
        /// What the system says.
        source: io::Error,
    },
    /// Its user is nobody.
    #[error("the image runs as user {user:?}, whom its /etc/passwd and /etc/group don't have")]
    NoUser {
        /// Whom.
        user: String,
    },
}

/// What a task runs in.
#[derive(Debug, Clone)]
pub struct Found {
    /// The image's disk.
    pub disk: Arc<ImageDisk>,
    /// What the image says of its programs.
    pub image: ImageConfig,
    /// As whom they run.
    pub user: Ids,
}

/// What slots with containers share.
#[derive(Debug)]
pub struct Containers {
    /// The runtime.
    pub runtime: Runtime,
    /// The first program of every container.
    pub init: PathBuf,
    /// Where slots have their containers' directories.
    pub dir: PathBuf,
    store: Store,
    disks: Mutex<BTreeMap<Digest, Weak<ImageDisk>>>,
}

impl Containers {
    /// Opens everything, and tries a container with nothing in it. `dir` is emptied; it is the worker's alone.
    ///
    /// # Errors
    /// [`ContainersError`], one line that says what is missing.
    pub async fn open(
        config: &ContainerConfig,
        shared: &MachineConfig,
        dir: &Path,
        spawner: &Spawner,
        user: (u32, u32),
    ) -> Result<Self, ContainersError> {
        if !rustix::process::geteuid().is_root() {
            return Err(ContainersError::NotRoot);
        }
        if dir.to_string_lossy().contains(NOT_IN_PATHS) {
            return Err(ContainersError::Path(dir.to_owned()));
        }
        let runtime = Runtime::find(config.runtime.as_deref())?;
        let at = |what, path: &Path| {
            let path = path.to_owned();
            move |source| ContainersError::Io { what, path, source }
        };
        crate::dirs::remove_all(dir).map_err(at("clearing", dir))?;
        std::fs::create_dir_all(dir).map_err(at("making", dir))?;
        let mode = |path: &Path, mode| std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode));
        // A runtime passes through as the container's user.
        mode(dir, 0o711).map_err(at("opening", dir))?;
        let agent = match &shared.agent {
            Some(agent) => agent.clone(),
            None => initramfs::find_agent()?,
        };
        initramfs::check_static(&agent)?;
        let init = dir.join("init");
        std::fs::copy(&agent, &init).and_then(|_| mode(&init, 0o555)).map_err(at("copying the first program of containers to", &init))?;
        let store = Store::open(&shared.images).map_err(at("opening the images in", &shared.images))?;
        let containers = Self { runtime, init, dir: dir.to_owned(), store, disks: Mutex::default() };
        crate::runtime::container::trial(&containers, spawner, user).await.map_err(ContainersError::Trial)?;
        Ok(containers)
    }

    /// Its images.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The image that a task runs in, its disk attached if it isn't.
    ///
    /// # Errors
    /// [`RootError`]. Blocks.
    pub fn find(&self, image: Option<&str>) -> Result<Found, RootError> {
        let text = image.ok_or(RootError::NoImage)?;
        let (note, _content) = find(&self.store, text)?;
        // Nothing that can panic happens under the lock. Others wait until a disk is attached: it takes a millisecond.
        let mut disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        disks.retain(|_, disk| disk.strong_count() > 0);
        let disk = match disks.get(&note.root).and_then(Weak::upgrade) {
            Some(disk) => disk,
            None => {
                let attached = ImageDisk::attach(&self.store.root(&note.root));
                let disk = Arc::new(attached.map_err(|source| RootError::Disk { image: text.to_owned(), source })?);
                disks.insert(note.root.clone(), Arc::downgrade(&disk));
                disk
            }
        };
        drop(disks);
        let user = match note.config.user.as_str() {
            "" => Ids { uid: 0, gid: 0, groups: Vec::new() },
            name => users::look_up(name, &disk.passwd, &disk.group).ok_or_else(|| RootError::NoUser { user: name.to_owned() })?,
        };
        Ok(Found { disk, image: note.config, user })
    }
}
