//! An image from wherever it is into the store, with its root disk.
//!
//! Owns the order: documents, blobs, root disk, note; each is there whole before the next one speaks of it, and what is there already is
//! not made again. Does not own any of them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::erofs::{self, Contents};
use super::layer::{self, Budget, LayerError};
use super::layout::{Layout, LayoutError};
use super::merge::{INODES_MAX, Merge, MergeError};
use super::oci::{self, Config, DOCUMENT_BYTES_MAX, Digest, Document, DocumentError, Manifest, Named, digest_of_bytes};
use super::pack;
use super::registry::{Credentials, Registry, RegistryError};
use super::store::{ImageNote, PutError, RootNote, Store};
use super::unpack::{UNPACKED_BYTES_MAX, UnpackError, Unpacked, unpack};
use volley_jobspecs::image::{Reference, Wanted};

/// Where an image is.
#[derive(Debug, Clone)]
pub enum Source {
    /// An OCI image layout: a directory or an archive.
    Layout {
        /// Where.
        path: PathBuf,
        /// Which of its images, by name or digest, if there are several.
        name: Option<String>,
    },
    /// An image in a registry.
    Registry {
        /// Its name.
        reference: Reference,
        /// Without encryption; this machine's own registries speak so anyway.
        plain_http: bool,
        /// Who asks.
        credentials: Option<Credentials>,
    },
    /// One archive with all files.
    Tarball(PathBuf),
    /// A directory with all files.
    Directory(PathBuf),
}

impl Source {
    /// For people.
    fn shown(&self) -> String {
        match self {
            Self::Layout { path, name } => match name {
                Some(name) => format!("oci:{}:{name}", path.display()),
                None => format!("oci:{}", path.display()),
            },
            Self::Registry { reference, .. } => match &reference.wanted {
                Wanted::Tag(tag) => format!("{}/{}:{tag}", reference.registry, reference.repository),
                Wanted::Digest(digest) => format!("{}/{}@{digest}", reference.registry, reference.repository),
            },
            Self::Tarball(path) => format!("tar:{}", path.display()),
            Self::Directory(path) => format!("dir:{}", path.display()),
        }
    }
}

/// What an image may be at most.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Entries and names of its layers.
    pub budget: Budget,
    /// Inodes that it makes.
    pub inodes: usize,
    /// Bytes of its layers, unpacked.
    pub unpacked_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { budget: Budget::default(), inodes: INODES_MAX, unpacked_bytes: UNPACKED_BYTES_MAX }
    }
}

/// An image that can't be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The store.
    #[error("the images in {}: {source}", .dir.display())]
    Store {
        /// Where it is.
        dir: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file of the image.
    #[error("{}: {source}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// What should be an archive.
    #[error("{path} is a directory, no archive; dir:{path} imports what is in it", path = .path.display())]
    Directory {
        /// Which.
        path: PathBuf,
    },
    /// The layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A document of the image.
    #[error("{image}: {source}")]
    Document {
        /// The image.
        image: String,
        /// What is wrong.
        source: DocumentError,
    },
    /// A blob.
    #[error("{image}: {source}")]
    Put {
        /// The image.
        image: String,
        /// What is wrong.
        source: PutError,
    },
    /// A layer that can't be unpacked.
    #[error("layer {layer} of the image: {source}")]
    Unpack {
        /// Which, from 1.
        layer: usize,
        /// Why.
        source: UnpackError,
    },
    /// A layer that can't be read.
    #[error("layer {layer} of the image: {source}")]
    Layer {
        /// Which, from 1.
        layer: usize,
        /// Why.
        source: LayerError,
    },
    /// Layers that make no root.
    #[error("layer {layer} of the image: {source}")]
    Merge {
        /// Which, from 1.
        layer: usize,
        /// Why.
        source: MergeError,
    },
    /// Stopped with the runtime.
    #[error("importing was stopped: {0}")]
    Stopped(String),
}

/// What was found of an image, all of it in the store.
struct Found {
    digest: Digest,
    config: Config,
    layers: Vec<Named>,
    /// What each layer is unpacked, if the image says it.
    diffs: Vec<Digest>,
    config_blob: Option<Named>,
}

/// Imports an image: afterwards its blobs, root disk and note are in `store`.
///
/// # Errors
/// [`ImportError`]. What was fetched stays until the store is opened again or an image is removed, so that another try finds it.
pub async fn import(store: &Store, source: Source, name: Option<String>, limits: Limits) -> Result<ImageNote, ImportError> {
    let busy = store.busy.clone().read_owned().await;
    let shown = source.shown();
    let name = name.unwrap_or_else(|| shown.clone());
    let found = match source {
        Source::Registry { reference, plain_http, credentials } => {
            let mut registry = Registry::new(&reference, plain_http, credentials)?;
            from_registry(&mut registry, &reference.wanted, &shown, store).await?
        }
        local => {
            let (store, shown) = (store.clone(), shown.clone());
            blocking(move || from_disk(local, &shown, &store)).await?
        }
    };
    let store = store.clone();
    blocking(move || {
        // Until it is done, also if nobody waits for it any more.
        let _busy = busy;
        let io_error = |source| ImportError::Store { dir: store.dir().to_owned(), source };
        let root = Store::root_name(&found.layers);
        if store.root_note(&root).map_err(io_error)?.is_none() {
            build(&store, &root, &found, &limits)?;
        }
        let blobs = found.config_blob.into_iter().chain(found.layers).collect();
        let also = other_names(&store, &found.digest, &name).map_err(io_error)?;
        let note = ImageNote { digest: found.digest, source: name, also, config: found.config, blobs, root };
        store.note_image(&note).map_err(io_error)?;
        take_name(&store, &note).map_err(io_error)?;
        Ok(note)
    })
    .await
}

/// What an image that is here already is called, besides `name`.
fn other_names(store: &Store, digest: &Digest, name: &str) -> io::Result<Vec<String>> {
    let Some(before) = store.image(digest)? else { return Ok(Vec::new()) };
    let nameless = digest.to_string();
    Ok(before.names().filter(|other| *other != name && *other != nameless).map(str::to_owned).collect())
}

/// A name is the newest image's: an older one that had no other is called by its digest from now on.
fn take_name(store: &Store, newest: &ImageNote) -> io::Result<()> {
    let had_it = |image: &ImageNote| image.digest != newest.digest && image.names().any(|name| name == newest.source);
    for older in store.images()?.into_iter().filter(had_it) {
        store.note_image(&older.without_name(&newest.source))?;
    }
    Ok(())
}

/// Removes an image, and what no other one uses, when nothing is being imported. Was it there?
///
/// # Errors
/// [`ImportError`].
pub async fn remove(store: &Store, digest: Digest) -> Result<bool, ImportError> {
    let _alone = store.busy.clone().write_owned().await;
    let store = store.clone();
    blocking(move || store.remove(&digest).map_err(|source| ImportError::Store { dir: store.dir().to_owned(), source })).await
}

/// Takes a name from an image that has others.
///
/// # Errors
/// [`ImportError`].
pub async fn remove_name(store: &Store, image: ImageNote, name: String) -> Result<ImageNote, ImportError> {
    let _alone = store.busy.clone().write_owned().await;
    let store = store.clone();
    let remove = move || {
        let image = image.without_name(&name);
        store.note_image(&image).map_err(|source| ImportError::Store { dir: store.dir().to_owned(), source })?;
        Ok(image)
    };
    blocking(remove).await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, ImportError> + Send + 'static) -> Result<T, ImportError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(ImportError::Stopped(e.to_string())))
}

async fn from_registry(registry: &mut Registry, wanted: &Wanted, shown: &str, store: &Store) -> Result<Found, ImportError> {
    let document = |source| ImportError::Document { image: shown.to_owned(), source };
    let (mut bytes, mut digest) = registry.manifest(wanted).await?;
    if let Document::Index(named) = oci::document(&bytes).map_err(document)? {
        (bytes, digest) = registry.manifest(&Wanted::Digest(named.digest)).await?;
    }
    let manifest = one_manifest(&bytes).map_err(document)?;
    small(&manifest.config).map_err(document)?;
    let config_bytes = registry.config(&manifest.config).await?;
    let (config, diffs) = oci::config(&config_bytes, manifest.layers.len()).map_err(document)?;
    keep(store, &manifest.config, &config_bytes[..], shown)?;
    for layer in &manifest.layers {
        registry.blob(layer, store).await?;
    }
    Ok(Found { digest, config, layers: manifest.layers, diffs, config_blob: Some(manifest.config) })
}

fn keep(store: &Store, named: &Named, from: impl io::Read, shown: &str) -> Result<(), ImportError> {
    store.take_blob(named, from).map_err(|source| ImportError::Put { image: shown.to_owned(), source })
}

/// A manifest, where an index can't be: one index is enough.
fn one_manifest(bytes: &[u8]) -> Result<Manifest, DocumentError> {
    match oci::document(bytes)? {
        Document::Manifest(manifest) => Ok(manifest),
        Document::Index(_) => Err(DocumentError::Bad("an index within an index".to_owned())),
    }
}

fn small(named: &Named) -> Result<(), DocumentError> {
    if named.bytes > DOCUMENT_BYTES_MAX { Err(DocumentError::Large { bytes: named.bytes }) } else { Ok(()) }
}

fn from_disk(source: Source, shown: &str, store: &Store) -> Result<Found, ImportError> {
    let layer = match source {
        Source::Layout { path, name } => return from_layout(&Layout::open(&path)?, name.as_deref(), shown, store),
        Source::Directory(path) => store.make_blob(|out| pack::pack(&path, out)).map_err(|source| ImportError::Read { path, source })?,
        Source::Tarball(path) => tarball(path, store)?,
        Source::Registry { reference, .. } => return Err(ImportError::Stopped(format!("{} is not on this disk", reference.registry))),
    };
    let digest = digest_of_bytes(format!("volley image of one layer {}", layer.digest).as_bytes());
    Ok(Found { digest, config: Config::default(), layers: vec![layer], diffs: Vec::new(), config_blob: None })
}

/// Takes an archive over as it is.
fn tarball(path: PathBuf, store: &Store) -> Result<Named, ImportError> {
    let failed = |source| ImportError::Read { path: path.clone(), source };
    let file = File::open(&path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_dir() {
        return Err(ImportError::Directory { path });
    }
    let mut archive = Archive { file, failed: false };
    let made = store.make_blob(|out| io::copy(&mut archive, out).map(drop));
    made.map_err(|source| match archive.failed {
        true => ImportError::Read { path, source },
        false => ImportError::Store { dir: store.dir().to_owned(), source },
    })
}

/// A file that is read, and whether that failed: else it was the writing.
struct Archive {
    file: File,
    failed: bool,
}

impl io::Read for Archive {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer);
        self.failed |= read.as_ref().is_err_and(|why| why.kind() != io::ErrorKind::Interrupted);
        read
    }
}

fn from_layout(layout: &Layout, name: Option<&str>, shown: &str, store: &Store) -> Result<Found, ImportError> {
    let document = |source| ImportError::Document { image: shown.to_owned(), source };
    let named = oci::pick(&layout.index()?, name).map_err(document)?;
    let (mut bytes, mut digest) = (layout.document(&named)?, named.digest);
    if let Document::Index(named) = oci::document(&bytes).map_err(document)? {
        (bytes, digest) = (layout.document(&named)?, named.digest);
    }
    let manifest = one_manifest(&bytes).map_err(document)?;
    let config_bytes = layout.document(&manifest.config)?;
    let (config, diffs) = oci::config(&config_bytes, manifest.layers.len()).map_err(document)?;
    keep(store, &manifest.config, &config_bytes[..], shown)?;
    for layer in &manifest.layers {
        keep(store, layer, layout.blob(&layer.digest)?, shown)?;
    }
    Ok(Found { digest, config, layers: manifest.layers, diffs, config_blob: Some(manifest.config) })
}

/// Makes the root disk of an image whose layers are in the store.
fn build(store: &Store, root: &Digest, found: &Found, limits: &Limits) -> Result<RootNote, ImportError> {
    let io_error = |source| ImportError::Store { dir: store.dir().to_owned(), source };
    let (mut merge, mut budget, mut left) = (Merge::new(limits.inodes), limits.budget, limits.unpacked_bytes);
    let mut layers = Layers(Vec::new());
    for (index, named) in found.layers.iter().enumerate() {
        let layer = index + 1;
        let scratch = store.scratch().map_err(io_error)?;
        let unpacked = unpack(&store.blob(&named.digest), &named.digest, scratch, found.diffs.get(index), left, limits.unpacked_bytes);
        let mut unpacked = unpacked.map_err(|source| ImportError::Unpack { layer, source })?;
        left -= unpacked.bytes;
        let entries = layer::entries(&mut unpacked.file, &mut budget).map_err(|source| ImportError::Layer { layer, source })?;
        merge.layer(index, entries).map_err(|source| ImportError::Merge { layer, source })?;
        layers.0.push(unpacked);
    }
    let (tree, left_out) = merge.finish();
    store.make_root(root, |out| Ok((erofs::write(&tree, &mut layers, out).map_err(io_error)?, left_out)), io_error)
}

/// The unpacked layers of an image.
struct Layers(Vec<Unpacked>);

impl Contents for Layers {
    fn read(&mut self, layer: usize, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        let unpacked = self.0.get(layer).ok_or_else(|| io::Error::other("a file of a layer that is not there"))?;
        unpacked.file.read_exact_at(buffer, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_archive_is_not_the_stores_fault() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let files = dir.path().join("files");
        std::fs::create_dir(&files).unwrap();
        let said = tarball(files.clone(), &store).unwrap_err().to_string();
        assert_eq!(said, format!("{0} is a directory, no archive; dir:{0} imports what is in it", files.display()));
        let said = tarball(dir.path().join("none"), &store).unwrap_err().to_string();
        assert!(said.starts_with(&dir.path().join("none").display().to_string()), "{said}");
    }
}
