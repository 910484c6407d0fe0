//! Where images lie: blobs by their digests, root disks by what they are made of, and a note for each image.
//!
//! Owns the names, and that a file is there whole or not at all: written under another name, flushed, then renamed. Does not own what is
//! in them, or who may use an image. One process at a time has a store; whoever calls it blocks.
//!
//! `blobs/<digest>`, `roots/<digest>.erofs` with `roots/<digest>.json` ([`RootNote`]), `images/<digest>.json` ([`ImageNote`]), and
//! `tmp/`, which is emptied at the start.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::RwLock;

use super::erofs::{self, Totals};
use super::merge::LeftOut;
use super::oci::{Config, Digest, Named, digest_of};

/// A root disk that is there: written last, so that a disk without it is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootNote {
    /// What it holds.
    pub totals: Totals,
    /// Its SHA-256.
    pub digest: Digest,
    /// What the image has and the root doesn't.
    pub left_out: LeftOut,
}

/// An image that is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageNote {
    /// Its digest: of its manifest, or for a tarball or directory of what its one layer says.
    pub digest: Digest,
    /// What it is called: where it came from, or the name that it was given.
    pub source: String,
    /// What else it is called: the same content came from elsewhere too, or was given another name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<String>,
    /// What its programs start with.
    pub config: Config,
    /// Its blobs, configuration included.
    pub blobs: Vec<Named>,
    /// Its root disk's name in the store.
    pub root: Digest,
}

impl ImageNote {
    /// All that it is called.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.source).chain(&self.also).map(String::as_str)
    }

    /// The same, not called `name` any more. One that has no name is called by its digest.
    #[must_use]
    pub fn without_name(mut self, name: &str) -> Self {
        self.also.retain(|other| other != name);
        if self.source == name {
            self.source = if self.also.is_empty() { self.digest.to_string() } else { self.also.remove(0) };
        }
        self
    }
}

/// A blob that is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// It can't be written.
    #[error("it can't be kept in {}: {source}", .dir.display())]
    Io {
        /// The store.
        dir: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Another size.
    #[error("{wanted} has {found} bytes; {bytes} were announced")]
    Size {
        /// Its digest.
        wanted: Digest,
        /// Its size.
        found: u64,
        /// What was announced.
        bytes: u64,
    },
    /// Other bytes.
    #[error("{wanted} was damaged: what came has the digest {found}")]
    Digest {
        /// What it should be.
        wanted: Digest,
        /// What it is.
        found: Digest,
    },
}

/// A directory with images.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
    /// Read while something is imported, written while something is removed: what is imported is nobody's until it is noted.
    pub(super) busy: Arc<RwLock<()>>,
}

/// A file that is being written.
#[derive(Debug)]
pub struct Incoming {
    /// Where bytes go, from its beginning.
    pub file: File,
    path: PathBuf,
    kept: bool,
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.kept {
            // What can't be removed now is removed at the next start.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Store {
    /// Opens the store in `dir`, or makes it, with nothing half-done in it.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let store = Self { dir: dir.to_owned(), busy: Arc::default() };
        match fs::remove_dir_all(store.dir.join("tmp")) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
            _ => {}
        }
        for part in ["blobs", "roots", "images", "tmp"] {
            fs::create_dir_all(store.dir.join(part))?;
        }
        store.collect()?;
        Ok(store)
    }

    /// Where it is.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a blob is, or would be.
    #[must_use]
    pub fn blob(&self, digest: &Digest) -> PathBuf {
        self.dir.join("blobs").join(digest.hex())
    }

    /// Where a root disk is, or would be.
    #[must_use]
    pub fn root(&self, name: &Digest) -> PathBuf {
        self.dir.join("roots").join(format!("{}.erofs", name.hex()))
    }

    fn root_note_path(&self, name: &Digest) -> PathBuf {
        self.dir.join("roots").join(format!("{}.json", name.hex()))
    }

    fn image_note_path(&self, digest: &Digest) -> PathBuf {
        self.dir.join("images").join(format!("{}.json", digest.hex()))
    }

    /// When an image came, went or got another name last, if the file system tells.
    ///
    /// # Errors
    /// What the system says.
    pub fn changed(&self) -> io::Result<Option<SystemTime>> {
        Ok(fs::metadata(self.dir.join("images"))?.modified().ok())
    }

    /// The name of the root disk that `layers` make.
    #[must_use]
    pub fn root_name(layers: &[Named]) -> Digest {
        let mut hash = Sha256::new();
        hash.update(b"volley root disk ");
        hash.update(erofs::FORMAT.to_le_bytes());
        for layer in layers {
            hash.update(layer.digest.hex());
        }
        digest_of(hash)
    }

    /// Is a blob there?
    ///
    /// # Errors
    /// What the system says.
    pub fn has_blob(&self, blob: &Named) -> io::Result<bool> {
        match fs::metadata(self.blob(&blob.digest)) {
            Ok(meta) => Ok(meta.len() == blob.bytes),
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(why) => Err(why),
        }
    }

    /// A new file, for a blob or a disk.
    ///
    /// # Errors
    /// What the system says.
    pub fn incoming(&self) -> io::Result<Incoming> {
        let mut name = [0; 16];
        getrandom::fill(&mut name).map_err(|why| io::Error::other(why.to_string()))?;
        let path = self.dir.join("tmp").join(hex::encode(name));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        Ok(Incoming { file, path, kept: false })
    }

    /// A new file without a name, which is gone when it is closed.
    ///
    /// # Errors
    /// What the system says.
    pub fn scratch(&self) -> io::Result<File> {
        // Its name goes when `incoming` does.
        self.incoming()?.file.try_clone()
    }

    /// Keeps `incoming` as `wanted`; `found` and `bytes` say what is in it.
    ///
    /// # Errors
    /// [`PutError`].
    pub fn keep_blob(&self, incoming: Incoming, wanted: &Named, found: Digest, bytes: u64) -> Result<(), PutError> {
        if bytes != wanted.bytes {
            return Err(PutError::Size { wanted: wanted.digest.clone(), found: bytes, bytes: wanted.bytes });
        }
        if found != wanted.digest {
            return Err(PutError::Digest { wanted: wanted.digest.clone(), found });
        }
        self.keep(incoming, &self.blob(&wanted.digest)).map_err(|source| PutError::Io { dir: self.dir.clone(), source })
    }

    /// Takes a blob from `from`, unless it is there. At most one byte more than announced is read.
    ///
    /// # Errors
    /// [`PutError`].
    pub fn take_blob(&self, wanted: &Named, from: impl io::Read) -> Result<(), PutError> {
        let io_error = |source| PutError::Io { dir: self.dir.clone(), source };
        if self.has_blob(wanted).map_err(io_error)? {
            return Ok(());
        }
        let mut incoming = self.incoming().map_err(io_error)?;
        let mut hashing = Hashing { out: &mut incoming.file, hash: Sha256::new(), bytes: 0 };
        io::copy(&mut from.take(wanted.bytes.saturating_add(1)), &mut hashing).map_err(io_error)?;
        let (found, bytes) = (digest_of(hashing.hash), hashing.bytes);
        self.keep_blob(incoming, wanted, found, bytes)
    }

    /// Takes a blob whose digest is not known before: `write` makes it.
    ///
    /// # Errors
    /// What `write` and the system say.
    pub fn make_blob(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<Named> {
        let incoming = self.incoming()?;
        let mut hashing = Hashing { out: io::BufWriter::new(incoming.file.try_clone()?), hash: Sha256::new(), bytes: 0 };
        write(&mut hashing)?;
        hashing.flush()?;
        let named = Named { digest: digest_of(hashing.hash), bytes: hashing.bytes };
        if !self.has_blob(&named)? {
            self.keep(incoming, &self.blob(&named.digest))?;
        }
        Ok(named)
    }

    /// A root disk's note, if the disk is there.
    ///
    /// # Errors
    /// What the system says.
    pub fn root_note(&self, name: &Digest) -> io::Result<Option<RootNote>> {
        let note: Option<RootNote> = read_note(&self.root_note_path(name))?;
        let Some(note) = note else { return Ok(None) };
        match fs::metadata(self.root(name)) {
            Ok(meta) if meta.len() == note.totals.bytes => Ok(Some(note)),
            Ok(_) => Ok(None),
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// Makes a root disk: `write` writes it and says what it is.
    ///
    /// # Errors
    /// What `write` says; and the system, which `failed` turns into the same error.
    pub fn make_root<E>(
        &self,
        name: &Digest,
        write: impl FnOnce(&mut dyn Write) -> Result<(Totals, LeftOut), E>,
        failed: impl Fn(io::Error) -> E,
    ) -> Result<RootNote, E> {
        let incoming = self.incoming().map_err(&failed)?;
        let out = io::BufWriter::with_capacity(1 << 18, incoming.file.try_clone().map_err(&failed)?);
        let mut hashing = Hashing { out, hash: Sha256::new(), bytes: 0 };
        let (totals, left_out) = write(&mut hashing)?;
        hashing.flush().map_err(&failed)?;
        let note = RootNote { totals, digest: digest_of(hashing.hash), left_out };
        let rest = || {
            // Nobody writes it again.
            rustix::fs::fchmod(&incoming.file, rustix::fs::Mode::from_raw_mode(0o444))?;
            self.keep(incoming, &self.root(name))?;
            self.write_note(&self.root_note_path(name), &note)
        };
        rest().map_err(failed)?;
        Ok(note)
    }

    /// Notes an image.
    ///
    /// # Errors
    /// What the system says.
    pub fn note_image(&self, note: &ImageNote) -> io::Result<()> {
        self.write_note(&self.image_note_path(&note.digest), note)
    }

    /// An image's note, if its root disk is there too.
    ///
    /// # Errors
    /// What the system says.
    pub fn image(&self, digest: &Digest) -> io::Result<Option<ImageNote>> {
        let note: Option<ImageNote> = read_note(&self.image_note_path(digest))?;
        Ok(match note {
            Some(note) if self.root_note(&note.root)?.is_some() => Some(note),
            _ => None,
        })
    }

    /// All images, in the order of their digests.
    ///
    /// # Errors
    /// What the system says.
    pub fn images(&self) -> io::Result<Vec<ImageNote>> {
        let mut found = Vec::new();
        for name in self.names("images")? {
            found.extend(read_note::<ImageNote>(&self.dir.join("images").join(name))?);
        }
        found.sort_by(|a, b| a.digest.cmp(&b.digest));
        Ok(found)
    }

    /// Removes an image, and what no other one uses. Was it there? Only while nothing is imported ([`super::import::remove`]).
    pub(super) fn remove(&self, digest: &Digest) -> io::Result<bool> {
        let was = remove_file(&self.image_note_path(digest))?;
        sync_dir(&self.dir.join("images"))?;
        self.collect()?;
        Ok(was)
    }

    /// Removes root disks and blobs that no image uses.
    fn collect(&self) -> io::Result<()> {
        let images = self.images()?;
        let blobs: BTreeSet<&str> = images.iter().flat_map(|image| &image.blobs).map(|blob| blob.digest.hex()).collect();
        let roots: BTreeSet<&str> = images.iter().map(|image| image.root.hex()).collect();
        for (part, used) in [("blobs", &blobs), ("roots", &roots)] {
            for name in self.names(part)? {
                if !used.contains(name.split('.').next().unwrap_or_default()) {
                    remove_file(&self.dir.join(part).join(name))?;
                }
            }
        }
        Ok(())
    }

    /// Bytes of everything in it.
    ///
    /// # Errors
    /// What the system says.
    pub fn bytes(&self) -> io::Result<u64> {
        let mut bytes = 0;
        for part in ["blobs", "roots", "images"] {
            for name in self.names(part)? {
                bytes += fs::metadata(self.dir.join(part).join(name))?.len();
            }
        }
        Ok(bytes)
    }

    fn names(&self, part: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.dir.join(part))? {
            // Ours are all of plain letters.
            names.extend(entry?.file_name().into_string());
        }
        names.sort();
        Ok(names)
    }

    fn write_note<T: Serialize>(&self, path: &Path, note: &T) -> io::Result<()> {
        let mut incoming = self.incoming()?;
        incoming.file.write_all(&serde_json::to_vec_pretty(note)?)?;
        self.keep(incoming, path)
    }

    fn keep(&self, mut incoming: Incoming, path: &Path) -> io::Result<()> {
        incoming.file.sync_all()?;
        fs::rename(&incoming.path, path)?;
        incoming.kept = true;
        path.parent().map_or(Ok(()), sync_dir)
    }
}

fn read_note<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        // What is not understood was written by another version: it is made again.
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(why) => Err(why),
    }
}

fn remove_file(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(why) => Err(why),
    }
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Hashes what goes through it.
struct Hashing<W> {
    out: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
