//! What all volumes of a host share: the bucket, the cluster's keys, the directory, the cache, limits.
//!
//! Owns waiting for requests, and the snapshots that clones are made of. Does not own any volume.

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::runtime::Handle;
use volley_jobspecs::ids::VolumeId;

use crate::clone::Bases;
use crate::format::FormatError;
use crate::format::content::Content;
use crate::format::extent::PackRef;
use crate::format::object::{Frame, slice};
use crate::format::pack::open_table;
use crate::format::page::{Page, Root};
use crate::format::seal::{ClusterKeys, FamilyKey};
use crate::io::cache::Cache;
use crate::io::index::Index;
use crate::io::s3::{Objects, ObjectsError, Put};
use crate::io::slab::Slab;
use crate::state::map::{Map, Missing};

/// How often an object is sent when nobody answers; the client below has tried each for a minute.
const PUT_TRIES: u32 = 10;
/// Pause before the second try; it doubles up to [`PAUSE_MAX`].
const PAUSE_FIRST: Duration = Duration::from_millis(100);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What volumes may use.
#[derive(Debug, Clone)]
pub struct Limits {
    /// A commit begins this long after the first change that S3 lacks: what the loss of a host may cost.
    pub commit_every: Duration,
    /// Or when this many bytes wait.
    pub commit_bytes: u64,
    /// Writes wait while more bytes than these lie in the log alone.
    pub dirty_bytes_max: u64,
    /// So long; then the disk is full, until commits go through again.
    pub stall_max: Duration,
    /// Bytes of its log that a volume keeps beside what S3 lacks: what was written lately is read from there.
    pub log_keep_bytes: u64,
    /// Bytes of its log that an ephemeral clone may have in all.
    pub ephemeral_bytes_max: u64,
    /// Bytes of extents in memory, all volumes together.
    pub cache_bytes: usize,
    /// Bytes of extents on the disk, all volumes together; 0: none.
    pub cache_disk_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            commit_every: Duration::from_secs(5),
            commit_bytes: 64 << 20,
            // Four commits: one under way, and time for a slow one.
            dirty_bytes_max: 256 << 20,
            // As long as the cluster waits for S3 elsewhere.
            stall_max: Duration::from_secs(600),
            log_keep_bytes: 256 << 20,
            ephemeral_bytes_max: 16 << 30,
            cache_bytes: 256 << 20,
            // A file with holes, which grows as it is used.
            cache_disk_bytes: 4 << 30,
        }
    }
}

/// A frame that is being fetched.
struct Wanted {
    key: String,
    frame: Frame,
    /// As the index has it.
    kept: Option<Vec<u8>>,
    request: Option<mpsc::Receiver<Result<Bytes, ObjectsError>>>,
}

/// A host with volumes.
pub struct Host {
    objects: Arc<dyn Objects>,
    runtime: Handle,
    pub(crate) keys: ClusterKeys,
    pub(crate) dir: PathBuf,
    pub(crate) cache: Cache,
    pub(crate) slab: Option<Slab>,
    pub(crate) limits: Limits,
    pub(crate) bases: Bases,
}

/// Why something that is stored could not be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The request failed.
    #[error(transparent)]
    Objects(#[from] ObjectsError),
    /// What came is not what it should be.
    #[error("{key}: {error}")]
    Format {
        /// The object.
        key: String,
        /// What is wrong with it.
        error: FormatError,
    },
}

/// Says where a record was that does not read.
pub(crate) fn at(key: &str) -> impl Fn(FormatError) -> FetchError {
    move |error| FetchError::Format { key: key.to_owned(), error }
}

impl Host {
    /// `dir`: for logs, on a disk that lasts. `runtime`: where requests run; volumes are used from other threads than its own.
    #[must_use]
    pub fn new(objects: Arc<dyn Objects>, keys: ClusterKeys, dir: PathBuf, runtime: Handle, limits: Limits) -> Arc<Self> {
        let (cache, bases) = (Cache::new(limits.cache_bytes), Mutex::default());
        let slab = Slab::open(&dir, &keys, limits.cache_disk_bytes);
        Arc::new(Self { objects, runtime, keys, dir, cache, slab, limits, bases })
    }

    /// The directory of a volume.
    pub(crate) fn dir_of(&self, volume: VolumeId) -> PathBuf {
        self.dir.join(volume.to_string())
    }

    /// Begins a request; the receiver waits for its end. A thread of the runtime would wait for itself: none may.
    pub(crate) fn begin<T, F>(&self, request: impl FnOnce(Arc<dyn Objects>) -> F) -> mpsc::Receiver<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let (done, end) = mpsc::sync_channel(1);
        let request = request(Arc::clone(&self.objects));
        self.runtime.spawn(async move { drop(done.send(request.await)) });
        end
    }

    /// Waits for the end of a request.
    pub(crate) fn end<T>(key: &str, request: &mpsc::Receiver<Result<T, ObjectsError>>) -> Result<T, ObjectsError> {
        let gone = |_| ObjectsError::Unavailable { key: key.to_owned(), why: "the process ends".to_owned() };
        request.recv().map_err(gone)?
    }

    pub(crate) fn get(&self, key: &str, bytes_max: usize) -> Result<(Bytes, String), ObjectsError> {
        let name = key.to_owned();
        let request = self.begin(|objects| async move { objects.get(&name, bytes_max as u64).await });
        Self::end(key, &request)
    }

    pub(crate) fn begin_range(&self, key: String, start: u64, len: u64) -> mpsc::Receiver<Result<Bytes, ObjectsError>> {
        self.begin(|objects| async move { objects.get_range(&key, start, len).await })
    }

    pub(crate) fn put_if_match(&self, key: &str, body: Bytes, tag: &str) -> Result<Put, ObjectsError> {
        let (name, tag) = (key.to_owned(), tag.to_owned());
        let request = self.begin(|objects| async move { objects.put_if_match(&name, body, &tag).await });
        Self::end(key, &request)
    }

    /// Begins writing an object whose name only this writer uses, once.
    pub(crate) fn begin_put(&self, key: String, body: Bytes) -> mpsc::Receiver<Result<String, ObjectsError>> {
        self.begin(|objects| async move { put_new(&*objects, &key, body).await })
    }

    /// Begins to fetch a frame of a map or a table, if the host's index has it not.
    fn begin_frame(&self, key: String, frame: Frame) -> Wanted {
        let kept = self.index().and_then(|index| index.frame(&key, frame.offset)).filter(|kept| kept.len() == frame.stored as usize);
        let request = kept.is_none().then(|| self.begin_range(key.clone(), frame.offset.into(), frame.stored.into()));
        Wanted { key, frame, kept, request }
    }

    /// Waits for a frame, and opens it. One of the index that does not open is fetched.
    fn end_frame<T>(&self, wanted: &Wanted, open: impl Fn(&[u8]) -> Result<T, FormatError>) -> Result<T, FetchError> {
        if let Some(opened) = wanted.kept.as_deref().and_then(|kept| open(kept).ok()) {
            return Ok(opened);
        }
        let (key, frame) = (&wanted.key, wanted.frame);
        let bytes = match &wanted.request {
            Some(request) => Self::end(key, request)?,
            None => Self::end(key, &self.begin_range(key.clone(), frame.offset.into(), frame.stored.into()))?,
        };
        let opened = open(&bytes).map_err(at(key))?;
        if let Some(index) = self.index() {
            index.keep_frame(key, frame.offset, &bytes);
        }
        Ok(opened)
    }

    fn index(&self) -> Option<&Index> {
        self.slab.as_ref().and_then(Slab::index)
    }

    /// Would a page come without a request?
    pub(crate) fn has_page(&self, missing: &Missing) -> bool {
        self.cache.page(missing.at.object, missing.at.frame.offset).is_some()
    }

    /// Is an extent on the disk?
    pub(crate) fn on_disk(&self, pack: PackRef, offset: u32) -> bool {
        self.slab.as_ref().is_some_and(|slab| slab.has(pack, offset))
    }

    /// The disk is full: the cache on it, which nobody needs, leaves its room. Tells whether it had any.
    pub(crate) fn leave_room(&self) -> bool {
        self.slab.as_ref().is_some_and(Slab::leave_room)
    }

    /// Keeps an extent that was fetched.
    pub(crate) fn keep_extent(&self, pack: PackRef, offset: u32, plain: &Arc<Vec<u8>>) {
        self.cache.keep_extent(pack, offset, Arc::clone(plain));
        if let Some(slab) = &self.slab {
            slab.keep(pack, offset, plain);
        }
    }

    pub(crate) fn page(&self, family: &FamilyKey, missing: &Missing) -> Result<Arc<Page>, FetchError> {
        let place = (missing.at.object, missing.at.frame.offset);
        if let Some(page) = self.cache.page(place.0, place.1) {
            return Ok(page);
        }
        let wanted = self.begin_frame(missing.at.object.key(), missing.at.frame);
        let page = Arc::new(self.end_frame(&wanted, |bytes| Page::open(family, missing.number, &missing.at, bytes))?);
        self.cache.keep_page(place.0, place.1, Arc::clone(&page));
        Ok(page)
    }

    /// The map of a state, and the packs that lie in its head: one request for the root and one for each table, all at once.
    pub(crate) fn map(&self, family: &FamilyKey, content: &Content) -> Result<(Map, HashMap<PackRef, Arc<Vec<u8>>>), FetchError> {
        let root = content.root.map(|root| (root, self.begin_frame(root.object.key(), root.frame)));
        let tables: Vec<_> = content
            .deltas
            .iter()
            .map(|delta| (delta, delta.body.is_none().then(|| self.begin_frame(delta.pack.key(), delta.table))))
            .collect();
        let mut map = match root {
            Some((root, wanted)) => Map::new(&self.end_frame(&wanted, |bytes| Root::open(family, &root, bytes))?),
            None => Map::default(),
        };
        let mut bodies = HashMap::new();
        for (delta, wanted) in tables {
            let table = match (&delta.body, wanted) {
                (None, Some(wanted)) => self.end_frame(&wanted, |bytes| open_table(family, delta, bytes))?,
                (body, _) => {
                    let body = body.as_deref().unwrap_or_default();
                    bodies.insert(delta.pack, Arc::new(body.to_vec()));
                    let table = slice(body, delta.table).unwrap_or_default();
                    open_table(family, delta, table).map_err(at(&delta.pack.key()))?
                }
            };
            map.apply(delta.pack, &table);
        }
        Ok((map, bodies))
    }
}

async fn put_new(objects: &dyn Objects, key: &str, body: Bytes) -> Result<String, ObjectsError> {
    let (mut pause, mut last) = (PAUSE_FIRST, String::new());
    for _ in 0..PUT_TRIES {
        match objects.put_if_absent(key, body.clone()).await? {
            Put::Written(tag) => return Ok(tag),
            // An earlier try had no answer, or an earlier commit got as far as this: then the very same bytes are there. Each writing has a salt of its
            // own, so nobody else's are.
            Put::Refused => match objects.get(key, body.len() as u64).await {
                Ok((found, tag)) if found == body => return Ok(tag),
                Ok(_) => {
                    let why = "somebody has written another object of this name".to_owned();
                    return Err(ObjectsError::Refused { key: key.to_owned(), why });
                }
                Err(error) => last = error.to_string(),
            },
            Put::Unknown(why) => last = why,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
    Err(ObjectsError::Unavailable { key: key.to_owned(), why: last })
}

/// Random bytes.
///
/// # Errors
/// The system gives none: nothing may be sealed then.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], FormatError> {
    let mut bytes = [0; N];
    let why = |e: getrandom::Error| FormatError::Make { what: "a random number", why: e.to_string() };
    getrandom::fill(&mut bytes).map_err(why)?;
    Ok(bytes)
}

/// What the kernel calls this start of the host. None: it does not say.
///
/// Linux: `/proc/sys/kernel/random/boot_id`, a UUID that is drawn at each start (random(4)).
pub(crate) fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let mut id = [0; 16];
    hex::decode_to_slice(text.trim().replace('-', ""), &mut id).ok()?;
    Some(id)
}

/// Now, in milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// A lock that a thread which panicked held: what it guards is as it was between two steps.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a file as a whole: it has the old bytes or the new ones. `lasts`: whatever happens to the host, too.
pub(crate) fn replace_file(path: &Path, bytes: &[u8], lasts: bool) -> std::io::Result<()> {
    let new = path.with_extension("new");
    let mut file = std::fs::File::create(&new)?;
    std::io::Write::write_all(&mut file, bytes)?;
    if lasts {
        file.sync_all()?;
    }
    std::fs::rename(&new, path)?;
    path.parent().filter(|_| lasts).map_or(Ok(()), crate::io::log::sync_dir)
}
