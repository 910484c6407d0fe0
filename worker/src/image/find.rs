//! From what a task calls an image to an image of this host.
//!
//! Owns which words name which image. Does not own who may use it.

use std::io;

use volley_jobspecs::image::{self, Name, Reference, ReferenceError, Wanted};
use volley_jobspecs::wire::work::IMAGES_TOLD_MAX;

use super::oci::Digest;
use super::store::{ImageNote, Store};

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The words are no name.
    #[error("task.image: {0}")]
    Name(#[from] ReferenceError),
    /// It is not here.
    #[error("this worker has no image {text:?}; import it there (`volley image import`)")]
    Missing {
        /// What was asked for.
        text: String,
    },
    /// Several have that name.
    #[error("{count} images of this worker are called {text:?}; name one by its digest")]
    Several {
        /// What was asked for.
        text: String,
        /// How many.
        count: usize,
    },
    /// The store can't be read.
    #[error("reading the worker's images: {0}")]
    Store(#[source] io::Error),
}

/// Finds an image, and what its root disk holds: by its digest (`sha256:…`), by where it came from as `volley` shows it (`dir:/srv/x`), or by
/// a registry's name for it.
///
/// # Errors
/// [`FindError`].
pub fn find(store: &Store, text: &str) -> Result<(ImageNote, Digest), FindError> {
    let missing = || FindError::Missing { text: text.to_owned() };
    let note = match Name::parse(text)? {
        Name::Digest(digest) | Name::Registry(Reference { wanted: Wanted::Digest(digest), .. }) => {
            store.image(&digest).map_err(FindError::Store)?.ok_or_else(missing)?
        }
        name => by_name(store, text, &name)?,
    };
    let root = store.root_note(&note.root).map_err(FindError::Store)?.ok_or_else(missing)?;
    Ok((note, root.digest))
}

/// What all images are called, as `image::key`, in order. None: they have more names than are told.
///
/// # Errors
/// The store can't be read. Blocks.
pub fn keys(store: &Store) -> io::Result<Option<Vec<u64>>> {
    let mut keys = Vec::new();
    for note in store.images()? {
        // One whose disk is gone is of no use.
        if store.root_note(&note.root)?.is_some() {
            keys.extend(image::key(&note.digest.to_string()));
            keys.extend(note.names().filter_map(image::key));
        }
    }
    keys.sort_unstable();
    keys.dedup();
    Ok((keys.len() <= IMAGES_TOLD_MAX).then_some(keys))
}

/// Which of its names `text` is, if it is one: a registry's name may be written in several ways.
#[must_use]
pub fn name_of<'a>(image: &'a ImageNote, text: &str) -> Option<&'a str> {
    let name = Name::parse(text).ok()?;
    image.names().find(|called| is(&name, called))
}

/// Is what is called `called` also called `name`?
fn is(name: &Name<'_>, called: &str) -> bool {
    Name::parse(called).is_ok_and(|called| called == *name)
}

fn by_name(store: &Store, text: &str, name: &Name<'_>) -> Result<ImageNote, FindError> {
    let mut all = store.images().map_err(FindError::Store)?;
    all.retain(|image| image.names().any(|called| is(name, called)));
    let count = all.len();
    match (all.pop(), count) {
        (Some(image), 1) => Ok(image),
        (None, _) => Err(FindError::Missing { text: text.to_owned() }),
        (Some(_), count) => Err(FindError::Several { text: text.to_owned(), count }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::erofs::Totals;
    use crate::image::merge::LeftOut;

    #[test]
    fn an_image_is_found_by_what_it_is_called() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let digest = |byte: u8| Digest::parse(&format!("sha256:{}", hex::encode([byte; 32]))).unwrap();
        let sources =
            ["dir:/srv/one", "docker.io/library/busybox:1.36", "docker.io/library/busybox:latest", "docker.io/library/busybox:latest"];
        for (number, source) in (1..).zip(sources) {
            let write = |_: &mut dyn io::Write| Ok::<_, io::Error>((Totals { inodes: 1, bytes: 0 }, LeftOut::default()));
            store.make_root(&digest(number), write, |e| e).unwrap();
            let (digest, root) = (digest(number), digest(number));
            store
                .note_image(&ImageNote {
                    digest,
                    source: source.to_owned(),
                    also: Vec::new(),
                    config: Default::default(),
                    blobs: Vec::new(),
                    root,
                })
                .unwrap();
        }
        let found = |text: &str| find(&store, text).map(|(note, _)| note.digest).map_err(|why| why.to_string());
        let told = keys(&store).unwrap().unwrap();
        for name in ["dir:/srv/one", "busybox", "busybox:1.36", &digest(3).to_string()] {
            assert!(told.binary_search(&image::key(name).unwrap()).is_ok(), "{name}");
        }
        assert!(told.binary_search(&image::key("busybox:2").unwrap()).is_err() && told.len() == 7, "{told:?}");
        assert_eq!(found("dir:/srv/one"), Ok(digest(1)));
        assert_eq!(found("busybox:1.36"), Ok(digest(2)));
        assert_eq!(found(&format!("sha256:{}", digest(3).hex())), Ok(digest(3)));
        assert_eq!(found(&format!("busybox@sha256:{}", digest(3).hex())), Ok(digest(3)));
        assert!(found("busybox").unwrap_err().starts_with("2 images"));
        assert!(found("busybox:2").unwrap_err().contains("no image"));
        assert!(found("dir:/srv/two").unwrap_err().contains("no image"));
        assert!(found("Not A Name").unwrap_err().contains("names no image"));
    }
}
