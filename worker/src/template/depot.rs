//! Templates in the bucket: looked for, fetched whole and verified, published.
//!
//! Owns the order of reads and writes, and what a trouble means for whoever wants a template. What the bytes are is in `chunks` and
//! `manifest`. Does not own who builds when (`share`), nor the list of what is there (`index`).
//!
//! Nothing is restored from bytes that were not checked: the manifest's signature before it is read, each chunk's seal and hash as it
//! arrives, and the hash of each whole file after it was sealed against every change.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use minicbor::bytes::ByteArray;
use rustix::fs::SeekFrom;
use volley_jobspecs::keys as names;
use volley_store::{GetError, HeadError, PutOutcome, Retry, Store};

use super::chunks::{self, CHUNK_BYTES, ChunkError, ChunkName};
use super::keys::{Keys, OwnerKey};
use super::manifest::{Built, ChunkNote, FileHash, FileNote, MANIFEST_BYTES_MAX, Manifest, ManifestError, RecipeNote};
use super::recipe::{Owner, Recipe, TemplateName};
use crate::vmm::files::{self, Frozen, FrozenError};

/// Chunks on their way at once: enough to hide a request's latency, and 8 times a chunk and its object in memory.
const PARALLEL: usize = 8;
/// How long one request may be tried again. A task that waits has its own deadline, and another try.
const BUDGET: Duration = Duration::from_secs(60);
/// Most bytes of the state of a machine's devices: 0.6 MiB were measured.
const STATE_BYTES_MAX: u64 = 256 << 20;

/// Why the bucket was of no help.
#[derive(Debug, thiserror::Error)]
pub enum DepotError {
    /// It does not answer, or does not let us.
    #[error("{0}")]
    Away(String),
    /// A chunk or a file is missing, damaged, or not what the manifest says, also after it was read again.
    #[error("{0}")]
    Broken(String),
    /// A file in this host's memory.
    #[error(transparent)]
    Local(#[from] FrozenError),
    /// The same.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// A chunk can't be made here.
    #[error(transparent)]
    Make(ChunkError),
    /// A mistake of ours.
    #[error("a thread of the transfer ended: {0}")]
    Ended(String),
}

/// What is known of a template in the bucket.
#[derive(Debug)]
pub enum Look {
    /// It is not there.
    Missing,
    /// It is there.
    Found(Box<Stored>),
    /// What lies there is none: it is built anew and replaced.
    Bad {
        /// The object.
        etag: String,
        /// Why.
        why: ManifestError,
    },
    /// What lies there is for other builds of Volley, or for those who have another key.
    Foreign(ManifestError),
}

/// A manifest that was verified.
#[derive(Debug)]
pub struct Stored {
    /// It.
    pub manifest: Manifest,
    /// Its object.
    pub etag: String,
    /// What its chunks are sealed with.
    pub key: OwnerKey,
}

/// What publishing a template came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Published {
    /// Does our manifest stand? Else another worker's does.
    pub stands: bool,
    /// Chunks.
    pub chunks: usize,
    /// Those that were not there yet.
    pub new_chunks: usize,
    /// Plain bytes of all of them.
    pub data_bytes: u64,
    /// Bytes of all their objects.
    pub stored_bytes: u64,
    /// Bytes that were sent.
    pub sent_bytes: u64,
}

/// The bucket's part that holds templates.
#[derive(Debug, Clone)]
pub struct Depot {
    store: Store,
    keys: Arc<Keys>,
    prefix: String,
    chunk_bytes: u32,
}

impl Depot {
    /// Below a prefix ("templates/" by default) of the cluster's bucket.
    #[must_use]
    pub fn new(store: &Store, keys: Keys, prefix: &str) -> Self {
        let store = store.with_retry(Retry { budget: BUDGET, ..Retry::default() });
        Self { store, keys: Arc::new(keys), prefix: prefix.to_owned(), chunk_bytes: CHUNK_BYTES }
    }

    /// The same with another rule for trying again.
    #[must_use]
    pub fn with_retry(mut self, retry: Retry) -> Self {
        self.store = self.store.with_retry(retry);
        self
    }

    /// The same with chunks of another size, to measure them.
    #[must_use]
    pub fn with_chunk_bytes(mut self, chunk_bytes: u32) -> Self {
        self.chunk_bytes = chunk_bytes;
        self
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// What all of an owner's objects begin with.
    pub(super) fn place(&self, owner: &Owner) -> String {
        let tenant = match owner {
            Owner::Public => None,
            Owner::Tenant(tenant) => Some(tenant),
        };
        names::templates_of(&self.prefix, tenant)
    }

    pub(super) fn manifest_key(&self, owner: &Owner, name: &TemplateName) -> String {
        names::template_manifest(&self.place(owner), &name.to_string())
    }

    pub(super) fn chunk_key(&self, owner: &Owner, name: &ChunkName) -> String {
        names::template_chunk(&self.place(owner), &name.to_string())
    }

    /// Reads and verifies the manifest that lies under a name. None: there is none.
    ///
    /// # Errors
    /// [`DepotError::Away`].
    pub(super) async fn read(
        &self,
        owner: &Owner,
        name: &TemplateName,
    ) -> Result<Option<(Result<Stored, ManifestError>, String)>, DepotError> {
        let (bytes, etag) = match self.store.get_with_etag(&self.manifest_key(owner, name), MANIFEST_BYTES_MAX).await {
            Ok(read) => read,
            Err(GetError::NotFound { .. }) => return Ok(None),
            // It has no size that could be a manifest's, and its tag is not known: read as if it were empty, and replaced unseen.
            Err(GetError::TooLarge { bytes, .. }) => {
                let why = ManifestError::Form(usize::try_from(bytes).unwrap_or(usize::MAX));
                let etag = self.store.head(&self.manifest_key(owner, name)).await.map_err(|why| DepotError::Away(why.to_string()))?.etag;
                return Ok(Some((Err(why), etag)));
            }
            Err(why) => return Err(DepotError::Away(why.to_string())),
        };
        let read = Manifest::verify(&self.keys, owner, &bytes);
        Ok(Some((read.map(|(manifest, key)| Stored { manifest, etag: etag.clone(), key }), etag)))
    }

    /// Is the template of a recipe there?
    ///
    /// # Errors
    /// [`DepotError::Away`].
    pub async fn look(&self, recipe: &Recipe) -> Result<Look, DepotError> {
        let Some((read, etag)) = self.read(&recipe.owner, &recipe.name()).await? else { return Ok(Look::Missing) };
        let read = read.and_then(|stored| stored.manifest.is_of(recipe).map(|()| stored));
        Ok(match read {
            Ok(stored) => Look::Found(Box::new(stored)),
            Err(why) if why.is_foreign() => Look::Foreign(why),
            Err(why) => Look::Bad { etag, why },
        })
    }

    /// Fetches a template's memory and state, whole and verified. `moved` is told of plain bytes as they come.
    ///
    /// # Errors
    /// [`DepotError`]; nothing is left.
    pub async fn fetch(&self, owner: &Owner, stored: &Stored, moved: &(dyn Fn(u64) + Sync)) -> Result<(Frozen, Frozen), DepotError> {
        let Manifest { recipe, memory, state, .. } = &stored.manifest;
        if memory.bytes != recipe.memory_bytes || state.bytes > STATE_BYTES_MAX {
            return Err(DepotError::Broken(format!(
                "its files have {} and {} bytes, which no machine of its size has",
                memory.bytes, state.bytes
            )));
        }
        let memory = self.fetch_file(owner, &stored.key, "memory", memory, moved).await?;
        let state = self.fetch_file(owner, &stored.key, "state", state, moved).await?;
        Ok((memory, state))
    }

    async fn fetch_file(
        &self,
        owner: &Owner,
        key: &OwnerKey,
        what: &'static str,
        note: &FileNote,
        moved: &(dyn Fn(u64) + Sync),
    ) -> Result<Frozen, DepotError> {
        let file = files::in_memory(&format!("volley-{what}"))?;
        file.set_len(note.bytes).map_err(|source| DepotError::Io { what: "making room in memory for a template", source })?;
        let file = Arc::new(file);
        let all = futures::stream::iter(note.chunks.clone()).map(|chunk| {
            let file = file.clone();
            async move {
                let range = chunks::range(note.bytes, note.chunk_bytes, chunk.piece);
                let bytes = range.end - range.start;
                self.fetch_chunk(owner, key, chunk, range, file).await.map_err(|why| named(why, what, chunk.piece))?;
                moved(bytes);
                Ok::<_, DepotError>(())
            }
        });
        all.buffer_unordered(PARALLEL).try_collect::<()>().await?;
        let file = Arc::into_inner(file).ok_or_else(|| DepotError::Ended("a chunk is still being written".to_owned()))?;
        let (frozen, key, chunk_bytes, wanted) = (Frozen::seal(file)?, key.clone(), note.chunk_bytes, *note.hash);
        blocking(move || {
            let found = hash_file(&frozen, &key, chunk_bytes)?;
            if found != wanted {
                return Err(DepotError::Broken(format!("its {what} as a whole is not what its manifest says")));
            }
            Ok(frozen)
        })
        .await
    }

    /// Reads a chunk into its place; once more if it is missing or damaged: what was read may be, and not what is stored.
    async fn fetch_chunk(
        &self,
        owner: &Owner,
        key: &OwnerKey,
        chunk: ChunkNote,
        range: Range<u64>,
        file: Arc<File>,
    ) -> Result<(), DepotError> {
        match self.try_chunk(owner, key, chunk, range.clone(), file.clone()).await {
            Err(DepotError::Broken(why)) => {
                tracing::warn!(chunk = %chunk.name(), "a chunk of a template, which is read once more: {why}");
                self.try_chunk(owner, key, chunk, range, file).await
            }
            done => done,
        }
    }

    async fn try_chunk(
        &self,
        owner: &Owner,
        key: &OwnerKey,
        chunk: ChunkNote,
        range: Range<u64>,
        file: Arc<File>,
    ) -> Result<(), DepotError> {
        let name = chunk.name();
        let plain_bytes = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let object = match self.store.get(&self.chunk_key(owner, &name), chunks::object_bytes_max(plain_bytes)).await {
            Ok(object) => object,
            Err(why @ (GetError::NotFound { .. } | GetError::TooLarge { .. })) => return Err(DepotError::Broken(why.to_string())),
            Err(why) => return Err(DepotError::Away(why.to_string())),
        };
        let key = key.clone();
        blocking(move || {
            let plain =
                chunks::open(&key, name, plain_bytes, &object).map_err(|why| DepotError::Broken(format!("the chunk {name}: {why}")))?;
            for part in chunks::written(&plain) {
                let at = range.start + part.start as u64;
                file.write_all_at(plain.get(part).unwrap_or_default(), at)
                    .map_err(|source| DepotError::Io { what: "writing a template into memory", source })?;
            }
            Ok(())
        })
        .await
    }

    /// Publishes a template: chunks first, the manifest last. `over`: the object of a manifest that is of no use; that one is replaced, and
    /// chunks are written also where some are, as they may be damaged.
    ///
    /// # Errors
    /// [`DepotError`]; chunks may be left, which belong to no manifest until somebody builds the same.
    pub async fn publish(&self, source: &Source<'_>, over: Option<&str>, moved: &(dyn Fn(u64) + Sync)) -> Result<Published, DepotError> {
        let Source { recipe, memory, state, kept_processes, built } = source;
        let key = self.keys.current(&recipe.owner);
        let mut published = Published::default();
        let memory = self.publish_file(&recipe.owner, &key, memory, over.is_some(), &mut published, moved).await?;
        let state = self.publish_file(&recipe.owner, &key, state, over.is_some(), &mut published, moved).await?;
        let name = recipe.name();
        let manifest = Manifest {
            name: ByteArray::from(name.0),
            recipe: RecipeNote::from(*recipe),
            kept_processes: *kept_processes,
            memory,
            state,
            built: built.clone(),
        };
        let (at, bytes) = (self.manifest_key(&recipe.owner, &name), Bytes::from(manifest.sign(&key)));
        let put = match over {
            Some(etag) => self.store.put_if_match(&at, bytes, etag).await,
            None => self.store.put_if_absent(&at, bytes).await,
        };
        published.stands = put.map_err(|why| DepotError::Away(why.to_string()))?.is_written();
        Ok(published)
    }

    async fn publish_file(
        &self,
        owner: &Owner,
        key: &OwnerKey,
        file: &Arc<Frozen>,
        overwrite: bool,
        published: &mut Published,
        moved: &(dyn Fn(u64) + Sync),
    ) -> Result<FileNote, DepotError> {
        let (bytes, chunk_bytes) = (file.bytes()?, self.chunk_bytes);
        let pieces = chunks::cut(bytes, chunk_bytes, &data(file)?);
        // The hash of the whole is made beside the chunks: it is one thread's work.
        let (whole, its_key) = (file.clone(), key.clone());
        let hash = tokio::task::spawn_blocking(move || hash_file(&whole, &its_key, chunk_bytes));
        let sent = futures::stream::iter(pieces).map(|piece| async move {
            let range = chunks::range(bytes, chunk_bytes, piece);
            let plain_bytes = range.end - range.start;
            let sent = self.publish_chunk(owner, key, file.clone(), piece, range, overwrite).await;
            moved(plain_bytes);
            sent.map(|sent| sent.map(|(note, is_new)| (note, is_new, plain_bytes)))
        });
        let sent: Vec<_> = sent.buffer_unordered(PARALLEL).try_collect().await?;
        let mut notes = Vec::new();
        for (note, is_new, plain_bytes) in sent.into_iter().flatten() {
            published.chunks += 1;
            published.data_bytes += plain_bytes;
            published.stored_bytes += u64::from(note.stored);
            if is_new {
                published.new_chunks += 1;
                published.sent_bytes += u64::from(note.stored);
            }
            notes.push(note);
        }
        notes.sort_by_key(|note| note.piece);
        let hash = hash.await.map_err(|e| DepotError::Ended(e.to_string()))??;
        Ok(FileNote { bytes, chunk_bytes, hash: ByteArray::from(hash), chunks: notes })
    }

    /// Puts a piece where it is not there yet. None: it is zeros.
    async fn publish_chunk(
        &self,
        owner: &Owner,
        key: &OwnerKey,
        file: Arc<Frozen>,
        piece: u32,
        range: Range<u64>,
        overwrite: bool,
    ) -> Result<Option<(ChunkNote, bool)>, DepotError> {
        let its_key = key.clone();
        let read = blocking(move || {
            let mut plain = vec![0; usize::try_from(range.end - range.start).unwrap_or(0)];
            file.read_at(&mut plain, range.start)?;
            Ok((!chunks::is_zero(&plain)).then(|| (chunks::name(&its_key, &plain), plain)))
        });
        let Some((name, plain)) = read.await? else { return Ok(None) };
        let at = self.chunk_key(owner, &name);
        let note = |stored: u64| ChunkNote { piece, name: ByteArray::from(name.0), stored: u32::try_from(stored).unwrap_or(u32::MAX) };
        if !overwrite {
            match self.store.head(&at).await {
                Ok(there) => return Ok(Some((note(there.bytes), false))),
                Err(HeadError::NotFound { .. }) => {}
                Err(why) => return Err(DepotError::Away(why.to_string())),
            }
        }
        let its_key = key.clone();
        let object = blocking(move || {
            let mut nonce = [0; 24];
            getrandom::fill(&mut nonce).map_err(|e| DepotError::Ended(format!("the system gives no random bytes: {e}")))?;
            chunks::seal(&its_key, name, &plain, nonce).map_err(DepotError::Make)
        });
        let object = object.await?;
        let stored = object.len() as u64;
        let put = if overwrite {
            self.store.put(&at, object.into()).await.map(|_etag| true)
        } else {
            self.store.put_if_absent(&at, object.into()).await.map(|put| matches!(put, PutOutcome::Written { .. }))
        };
        let is_new = put.map_err(|why| DepotError::Away(why.to_string()))?;
        Ok(Some((note(stored), is_new)))
    }
}

/// What is published.
#[derive(Debug)]
pub struct Source<'a> {
    /// What it was made of.
    pub recipe: &'a Recipe,
    /// Its machine's memory.
    pub memory: &'a Arc<Frozen>,
    /// The state of its devices.
    pub state: &'a Arc<Frozen>,
    /// Processes of the warm-up that live on.
    pub kept_processes: u32,
    /// Who built it.
    pub built: Built,
}

/// Says which piece of which file it is.
fn named(why: DepotError, what: &str, piece: u32) -> DepotError {
    match why {
        DepotError::Broken(why) => DepotError::Broken(format!("piece {piece} of its {what}: {why}")),
        other => other,
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, DepotError> + Send + 'static) -> Result<T, DepotError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(DepotError::Ended(e.to_string())))
}

/// The hash of a whole file, from what it really holds.
fn hash_file(file: &Frozen, key: &OwnerKey, chunk_bytes: u32) -> Result<[u8; 32], DepotError> {
    let bytes = file.bytes()?;
    let mut hash = FileHash::new(key, bytes);
    let mut plain = vec![0; usize::try_from(chunk_bytes).unwrap_or(0)];
    for piece in chunks::cut(bytes, chunk_bytes, &data(file)?) {
        let range = chunks::range(bytes, chunk_bytes, piece);
        let part = plain.get_mut(..usize::try_from(range.end - range.start).unwrap_or(0)).unwrap_or_default();
        file.read_at(part, range.start)?;
        if !chunks::is_zero(part) {
            hash.add(piece, part);
        }
    }
    Ok(hash.end())
}

/// Where a file has data, in order.
fn data(file: &Frozen) -> Result<Vec<Range<u64>>, DepotError> {
    let (file, bytes) = (file.open()?, file.bytes()?);
    let failed = |source: rustix::io::Errno| DepotError::Io { what: "looking for data in a template's file", source: source.into() };
    let (mut parts, mut at) = (Vec::new(), 0);
    while at < bytes {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Nothing but a hole up to the end.
            Err(rustix::io::Errno::NXIO) => break,
            Err(why) => return Err(failed(why)),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(start)).map_err(failed)?;
        parts.push(start..end);
        at = end.max(start + 1);
    }
    Ok(parts)
}
