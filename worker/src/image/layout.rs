//! An OCI image layout, as a directory or as one archive:
//! <https://github.com/opencontainers/image-spec/blob/main/image-layout.md>. `docker save` of Docker 25 and later makes such an archive.
//!
//! Owns finding documents and blobs in it. Does not own what they say (`oci`) or keeping them (`store`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::entry::{What, parts};
use super::layer::{self, Budget, LayerError};
use super::oci::{DOCUMENT_BYTES_MAX, Digest, DocumentError, Named, digest_of_bytes};

/// Most files of an archive: an image has a few dozen, and an archive may hold several.
const FILES_MAX: u64 = 100_000;
/// Most bytes of their names.
const NAMES_BYTES_MAX: u64 = 16 << 20;

/// A layout that can't be read.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// It can't be read.
    #[error("{}: {source}", .path.display())]
    Io {
        /// What can't.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The archive can't be read.
    #[error("{}: {source}", .path.display())]
    Archive {
        /// The archive.
        path: PathBuf,
        /// Why.
        source: LayerError,
    },
    /// Something is not there.
    #[error("{} has no {name}; is it an OCI image layout?", .path.display())]
    Missing {
        /// The layout.
        path: PathBuf,
        /// What it lacks.
        name: String,
    },
    /// A document in it.
    #[error("{}: {source}", .path.display())]
    Document {
        /// The layout.
        path: PathBuf,
        /// What is wrong with it.
        source: DocumentError,
    },
}

/// A layout that is open.
#[derive(Debug)]
pub enum Layout {
    /// Files of a directory.
    Dir(PathBuf),
    /// Files of an archive.
    Archive {
        /// Its path, for people.
        path: PathBuf,
        /// It.
        file: File,
        /// Where each file of it begins, and its size.
        files: BTreeMap<Vec<u8>, (u64, u64)>,
    },
}

impl Layout {
    /// Opens a layout: a directory, or an archive that is not packed.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn open(path: &Path) -> Result<Self, LayoutError> {
        let io_error = |source| LayoutError::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(io_error)?;
        if file.metadata().map_err(io_error)?.is_dir() {
            return Ok(Self::Dir(path.to_owned()));
        }
        let mut budget = Budget { entries_max: FILES_MAX, metadata_max: NAMES_BYTES_MAX, ..Budget::default() };
        let entries = layer::entries(&mut file, &mut budget);
        let mut files = BTreeMap::new();
        for entry in entries.map_err(|source| LayoutError::Archive { path: path.to_owned(), source })? {
            if let (What::File { at, size }, Ok(parts)) = (entry.what, parts(&entry.path)) {
                files.insert(parts.join(&b'/'), (at, size));
            }
        }
        Ok(Self::Archive { path: path.to_owned(), file, files })
    }

    fn path(&self) -> &Path {
        match self {
            Self::Dir(path) | Self::Archive { path, .. } => path,
        }
    }

    /// Its list of images.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn index(&self) -> Result<Vec<u8>, LayoutError> {
        self.small("index.json")
    }

    /// A document in it, whose digest is right.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn document(&self, named: &Named) -> Result<Vec<u8>, LayoutError> {
        let bytes = self.small(&blob_name(&named.digest))?;
        if digest_of_bytes(&bytes) != named.digest {
            let source = DocumentError::Bad(format!("{} was damaged", named.digest));
            return Err(LayoutError::Document { path: self.path().to_owned(), source });
        }
        Ok(bytes)
    }

    /// A blob in it, to be checked by whoever reads it.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn blob(&self, digest: &Digest) -> Result<Box<dyn Read + '_>, LayoutError> {
        self.open_file(&blob_name(digest))
    }

    fn small(&self, name: &str) -> Result<Vec<u8>, LayoutError> {
        let mut bytes = Vec::new();
        let file = self.open_file(name)?;
        let read = file.take(DOCUMENT_BYTES_MAX + 1).read_to_end(&mut bytes);
        let read = read.map_err(|source| LayoutError::Io { path: self.path().join(name), source })? as u64;
        if read > DOCUMENT_BYTES_MAX {
            return Err(LayoutError::Document { path: self.path().to_owned(), source: DocumentError::Large { bytes: read } });
        }
        Ok(bytes)
    }

    fn open_file(&self, name: &str) -> Result<Box<dyn Read + '_>, LayoutError> {
        let missing = || LayoutError::Missing { path: self.path().to_owned(), name: name.to_owned() };
        match self {
            Self::Dir(dir) => match File::open(dir.join(name)) {
                Ok(file) => Ok(Box::new(file)),
                Err(why) if why.kind() == io::ErrorKind::NotFound => Err(missing()),
                Err(source) => Err(LayoutError::Io { path: dir.join(name), source }),
            },
            Self::Archive { path, file, files } => {
                let (at, size) = files.get(name.as_bytes()).copied().ok_or_else(missing)?;
                let mut file = file;
                file.seek(SeekFrom::Start(at)).map_err(|source| LayoutError::Io { path: path.clone(), source })?;
                Ok(Box::new(file.take(size)))
            }
        }
    }
}

fn blob_name(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}
