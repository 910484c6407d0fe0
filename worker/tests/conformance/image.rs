//! An image with busybox and nothing else.

use std::path::Path;

use volley_worker::image::oci::{Config, Digest};
use volley_worker::image::{self, ImageNote, Limits, Source, Store};

/// The same image with a user and an environment of its own.
pub const OF_USER: &str = "sha256:2222222222222222222222222222222222222222222222222222222222222222";

/// The same image with a user that it does not know.
pub const OF_NOBODY: &str = "sha256:3333333333333333333333333333333333333333333333333333333333333333";

/// Puts all of them into a store. The first one's name; or what is missing here.
pub async fn make(images: &Path) -> Result<String, String> {
    let store = Store::open(images).unwrap();
    let note = import(&store, |_| ()).await?;
    let config = Config { user: "ann".to_owned(), env: vec!["FROM=image".to_owned(), "PATH=/bin".to_owned()], ..Config::default() };
    let other = Config { user: "bob".to_owned(), ..Config::default() };
    for (name, config) in [(OF_USER, config), (OF_NOBODY, other)] {
        let image = ImageNote { digest: Digest::parse(name).unwrap(), source: format!("dir:/{name}"), config, ..note.clone() };
        store.note_image(&image).unwrap();
    }
    Ok(format!("sha256:{}", note.digest.hex()))
}

/// An image whose directories are links out of it.
pub async fn make_hostile(images: &Path) -> Result<String, String> {
    let store = Store::open(images).unwrap();
    let links = |files: &Path| {
        for (name, to) in [("tmp", "/etc"), ("proc", "/etc"), ("dev", "/"), ("sys", "../../.."), ("volley", "/etc"), ("etc", "/root")] {
            std::fs::remove_dir_all(files.join(name)).or_else(|_| std::fs::remove_file(files.join(name))).ok();
            std::os::unix::fs::symlink(to, files.join(name)).unwrap();
        }
    };
    import(&store, links).await.map(|note| format!("sha256:{}", note.digest.hex()))
}

/// Imports busybox, with changes.
async fn import(store: &Store, change: impl FnOnce(&Path)) -> Result<ImageNote, String> {
    let files = tempfile::tempdir().unwrap();
    crate::host::busybox_files(files.path())?;
    change(files.path());
    image::import(store, Source::Directory(files.path().to_owned()), None, Limits::default()).await.map_err(|e| e.to_string())
}
