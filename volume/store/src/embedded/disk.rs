//! Buckets and objects on the disk: every change durable before it is answered, conditions kept.
//!
//! Owns locks, temporary files, syncing and renames. Blocking: callers use `spawn_blocking`.
//! Multipart uploads are `uploads`', listings `walk`'s.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::StartError;
use super::layout::{self, SEGMENT_FILE};
use super::object_file::{self, Trailer};
use super::walk;
use crate::retry::random_tag;

/// Locks that keys share: enough that 64 writers seldom meet, small enough to forget about.
const LOCK_STRIPES: usize = 256;
/// A directory may be removed as empty between being made and being used; that cannot go on.
const PLACE_TRIES: usize = 16;
/// Unfinished uploads older than this are removed at start: no client is still sending them.
const UPLOAD_AGE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long a directory may be another's at start: one that was killed a moment ago holds its lock until the kernel has taken it apart,
/// which takes a large process some hundred milliseconds.
const GOING_WAIT: Duration = Duration::from_secs(3);
/// Between looks.
const GOING_LOOK: Duration = Duration::from_millis(20);

/// Why a disk operation did not do what it was asked.
#[derive(Debug)]
pub(super) enum DiskError {
    NoBucket,
    BucketExists,
    BucketNotEmpty,
    NoKey,
    NoUpload,
    Precondition,
    /// A part is missing, differs, or is out of order.
    BadPart(String),
    Io(io::Error),
}

impl From<io::Error> for DiskError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// What must hold for a write. Tags are unquoted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Condition {
    /// The object must exist, with this tag if one is given.
    pub(super) exists: Option<Wanted>,
    /// The object must not exist, or not with this tag.
    pub(super) absent: Option<Wanted>,
}

/// A tag or any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Any,
    Tag(String),
}

impl Wanted {
    pub(super) fn matches(&self, etag: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Tag(tag) => tag == etag,
        }
    }
}

pub(super) struct Disk {
    root: PathBuf,
    reserve_bytes: u64,
    keys: Vec<Mutex<()>>,
    uploads: Vec<Mutex<()>>,
    /// Held for writing while a bucket goes away, for reading while anything is put into one.
    buckets: RwLock<()>,
    /// Locked for as long as this value lives.
    _lock: File,
}

/// Locks, with a wait for one who is going.
fn lock_soon(lock: &File) -> Result<(), fs::TryLockError> {
    let deadline = Instant::now() + GOING_WAIT;
    loop {
        match lock.try_lock() {
            Err(fs::TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(GOING_LOOK),
            other => return other,
        }
    }
}

impl Disk {
    /// Makes the directories, takes the lock, removes what an earlier process left half written.
    pub(super) fn open(root: PathBuf, reserve_bytes: u64) -> Result<Self, StartError> {
        let failed = |path: &Path, source| StartError::Root { path: path.to_owned(), source };
        for dir in [root.clone(), root.join("buckets"), root.join("uploads"), root.join("tmp")] {
            DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(|error| failed(&dir, error))?;
        }
        let path = root.join("lock");
        let lock = File::create(&path).map_err(|error| failed(&path, error))?;
        match lock_soon(&lock) {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(StartError::InUse { root }),
            Err(fs::TryLockError::Error(error)) => return Err(failed(&path, error)),
        }
        let stripes = || (0..LOCK_STRIPES).map(|_| Mutex::new(())).collect();
        let disk = Self { root, reserve_bytes, keys: stripes(), uploads: stripes(), buckets: RwLock::new(()), _lock: lock };
        disk.clean().map_err(|error| failed(&disk.root, error))?;
        sync_dir(&disk.root).map_err(|error| failed(&disk.root, error))?;
        Ok(disk)
    }

    fn clean(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.root.join("tmp"))? {
            remove_any(&entry?.path())?;
        }
        let now = SystemTime::now();
        for entry in fs::read_dir(self.uploads_dir())? {
            let entry = entry?;
            let age = now.duration_since(entry.metadata()?.modified()?).unwrap_or_default();
            if age > UPLOAD_AGE_MAX {
                remove_any(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Is there room for `bytes` more?
    pub(super) fn check_room(&self, bytes: u64) -> io::Result<()> {
        let stat = rustix::fs::statvfs(&self.root)?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free < self.reserve_bytes.saturating_add(bytes) {
            let words = format!("{free} bytes are free, and {} are kept for the log and the state", self.reserve_bytes);
            return Err(io::Error::new(io::ErrorKind::StorageFull, words));
        }
        Ok(())
    }

    pub(super) fn uploads_dir(&self) -> PathBuf {
        self.root.join("uploads")
    }

    pub(super) fn bucket_dir(&self, bucket: &str) -> PathBuf {
        self.root.join("buckets").join(bucket)
    }

    /// The bucket's directory, if there is such a bucket.
    pub(super) fn bucket(&self, bucket: &str) -> Result<PathBuf, DiskError> {
        let dir = self.bucket_dir(bucket);
        if dir.is_dir() { Ok(dir) } else { Err(DiskError::NoBucket) }
    }

    /// Bucket names in order, with when each was made.
    pub(super) fn buckets(&self) -> Result<Vec<(String, SystemTime)>, DiskError> {
        let mut buckets = Vec::new();
        for entry in fs::read_dir(self.root.join("buckets"))? {
            let entry = entry?;
            if let Ok(name) = entry.file_name().into_string() {
                buckets.push((name, entry.metadata()?.modified()?));
            }
        }
        buckets.sort();
        Ok(buckets)
    }

    pub(super) fn create_bucket(&self, bucket: &str) -> Result<(), DiskError> {
        let dir = self.bucket_dir(bucket);
        match DirBuilder::new().mode(0o700).create(&dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(DiskError::BucketExists),
            Err(error) => return Err(error.into()),
        }
        Ok(sync_dir(&self.root.join("buckets"))?)
    }

    pub(super) fn delete_bucket(&self, bucket: &str) -> Result<(), DiskError> {
        let _all = self.buckets.write().unwrap_or_else(PoisonError::into_inner);
        let dir = self.bucket(bucket)?;
        if walk::has_object(&dir)? {
            return Err(DiskError::BucketNotEmpty);
        }
        let gone = self.temp_path();
        fs::rename(&dir, &gone)?;
        sync_dir(&self.root.join("buckets"))?;
        Ok(remove_any(&gone)?)
    }

    /// An empty file in `tmp/`, removed when dropped unless it was moved away.
    pub(super) fn temp_file(&self) -> io::Result<TempFile> {
        let path = self.temp_path();
        let file = File::create_new(&path)?;
        Ok(TempFile { path, file, moved: false })
    }

    pub(super) fn temp_path(&self) -> PathBuf {
        self.root.join("tmp").join(random_tag())
    }

    /// Opens an object for reading. The file stays whole while it is open, whatever happens to the key.
    pub(super) fn read(&self, bucket: &str, key: &str) -> Result<(File, Trailer), DiskError> {
        let dir = self.bucket(bucket)?;
        match File::open(layout::object_path(&dir, key)) {
            Ok(file) => {
                let trailer = object_file::read_trailer(&file)?;
                Ok((file, trailer))
            }
            Err(error) if is_missing(&error) => Err(DiskError::NoKey),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes `temp`, which holds the object's bytes, the object, if the condition holds. On return it is durable.
    pub(super) fn commit(&self, mut temp: TempFile, bucket: &str, trailer: &Trailer, when: &Condition) -> Result<(), DiskError> {
        object_file::write_trailer(&mut temp.file, trailer)?;
        temp.file.sync_all()?;
        let _present = self.buckets.read().unwrap_or_else(PoisonError::into_inner);
        let dir = self.bucket(bucket)?;
        let path = layout::object_path(&dir, &trailer.key);
        let _key = self.lock_key(bucket, &trailer.key);
        self.check(bucket, &trailer.key, when)?;
        for _ in 0..PLACE_TRIES {
            self.make_directories(&dir, &trailer.key)?;
            match fs::rename(&temp.path, &path) {
                Ok(()) => {
                    temp.moved = true;
                    return Ok(sync_dir(parent(&path))?);
                }
                // Another key's delete removed the directory as empty.
                Err(error) if is_missing(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(DiskError::Io(vanishing()))
    }

    /// Removes an object; one that is not there is no error. On return it is durable.
    pub(super) fn delete(&self, bucket: &str, key: &str, when: &Condition) -> Result<(), DiskError> {
        let dir = self.bucket(bucket)?;
        let path = layout::object_path(&dir, key);
        let _key = self.lock_key(bucket, key);
        if *when != Condition::default() {
            self.check(bucket, key, when)?;
        }
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if is_missing(&error) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        match sync_dir(parent(&path)) {
            Ok(()) => {}
            // Removed as empty by another delete, whose removal of the directory covers ours.
            Err(error) if is_missing(&error) => {}
            Err(error) => return Err(error.into()),
        }
        remove_empty(&dir, parent(&path));
        Ok(())
    }

    fn check(&self, bucket: &str, key: &str, when: &Condition) -> Result<(), DiskError> {
        if *when == Condition::default() {
            return Ok(());
        }
        let current = match self.read(bucket, key) {
            Ok((_, trailer)) => Some(trailer.etag),
            Err(DiskError::NoKey) => None,
            Err(error) => return Err(error),
        };
        match (&when.exists, &current) {
            (Some(_), None) => return Err(DiskError::NoKey),
            (Some(wanted), Some(etag)) if !wanted.matches(etag) => return Err(DiskError::Precondition),
            _ => {}
        }
        match (&when.absent, &current) {
            (Some(wanted), Some(etag)) if wanted.matches(etag) => Err(DiskError::Precondition),
            _ => Ok(()),
        }
    }

    fn lock_key(&self, bucket: &str, key: &str) -> MutexGuard<'_, ()> {
        lock_stripe(&self.keys, &[bucket.as_bytes(), b"/", key.as_bytes()])
    }

    pub(super) fn lock_upload(&self, id: &str) -> MutexGuard<'_, ()> {
        lock_stripe(&self.uploads, &[id.as_bytes()])
    }

    /// Makes the directories that a key's file lies in. Journalling file systems persist a new directory's own entry when
    /// the directory is synced; the one above is synced too where we made the entry ourselves.
    fn make_directories(&self, bucket: &Path, key: &str) -> io::Result<()> {
        let Some((segments, _)) = key.rsplit_once('/') else { return Ok(()) };
        'again: for _ in 0..PLACE_TRIES {
            let mut dir = bucket.to_owned();
            for segment in segments.split('/') {
                let above = dir.clone();
                dir.push(layout::directory_name(segment.as_bytes()));
                if dir.is_dir() {
                    continue;
                }
                match self.make_directory(&dir, segment).and_then(|()| sync_dir(&above)) {
                    Ok(()) => {}
                    // Someone else made it at the same time.
                    Err(_) if dir.is_dir() => {}
                    // The one above was removed as empty: begin again, unless the bucket itself is gone.
                    Err(error) if is_missing(&error) && bucket.is_dir() => continue 'again,
                    Err(error) => return Err(error),
                }
            }
            return Ok(());
        }
        Err(vanishing())
    }

    /// A hashed directory appears with its segment inside, or a listing could not name its keys.
    fn make_directory(&self, dir: &Path, segment: &str) -> io::Result<()> {
        let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !layout::is_hashed(name) {
            return DirBuilder::new().mode(0o700).create(dir);
        }
        let temp = self.temp_path();
        DirBuilder::new().mode(0o700).create(&temp)?;
        let made = File::create_new(temp.join(SEGMENT_FILE))
            .and_then(|mut file| file.write_all(segment.as_bytes()).and_then(|()| file.sync_all()))
            .and_then(|()| sync_dir(&temp))
            .and_then(|()| fs::rename(&temp, dir));
        if made.is_err() {
            // What cannot be removed now is removed at the next start.
            let _ = fs::remove_dir_all(&temp);
        }
        made
    }
}

fn vanishing() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "the key's directory keeps vanishing")
}

fn lock_stripe<'a>(stripes: &'a [Mutex<()>], name: &[&[u8]]) -> MutexGuard<'a, ()> {
    let mut hasher = crc32fast::Hasher::new();
    for part in name {
        hasher.update(part);
    }
    // The guarded value is empty: a panic while it was held broke nothing.
    stripes[hasher.finalize() as usize % stripes.len()].lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file in `tmp/`.
pub(super) struct TempFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    moved: bool,
}

impl TempFile {
    /// Syncs the file, gives it its name, and syncs the directory.
    pub(super) fn place(mut self, path: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, path)?;
        self.moved = true;
        sync_dir(parent(path))
    }

    pub(super) fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.moved {
            // What cannot be removed now is removed at the next start.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes a directory's entries durable.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Removes directories that a delete left empty, up to the bucket. Whatever fails is not empty, or in use.
fn remove_empty(bucket: &Path, mut dir: &Path) {
    while dir != bucket && fs::remove_dir(dir).is_ok() {
        dir = parent(dir);
    }
}

fn remove_any(path: &Path) -> io::Result<()> {
    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Paths in the tree always have a parent; the root's own would be itself.
fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// No such file, or a file where a directory was looked for.
pub(super) fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// The wall clock in Unix milliseconds; 0 before 1970.
pub(super) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0))
}
