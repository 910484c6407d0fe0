//! An image with busybox.

use std::path::Path;

use volley_guest::initramfs;
use volley_worker::image::oci::{Config, Digest};
use volley_worker::image::{self, ImageNote, Limits, Source, Store};

use crate::host::{self, Host};

/// The same image with a user and an environment of its own.
pub const OF_USER: &str = "sha256:2222222222222222222222222222222222222222222222222222222222222222";

/// Puts an image into a store. Its name; or what is missing here.
pub async fn busybox(images: &Path) -> Result<String, String> {
    Ok(format!("sha256:{}", noted(images).await?.digest.hex()))
}

/// The same; its note.
pub async fn noted(images: &Path) -> Result<ImageNote, String> {
    Host::find()?;
    host::part("VOLLEY_GUEST_MODULES", "modules").filter(|dir| dir.is_dir()).ok_or("no guest modules (VOLLEY_GUEST_MODULES)")?;
    initramfs::find_agent().map_err(|e| e.to_string())?;
    if !Path::new("/sbin/mke2fs").is_file() {
        return Err("no /sbin/mke2fs".to_owned());
    }
    if !rustix::process::geteuid().is_root() {
        return Err("machines have users of their own only where the worker is root".to_owned());
    }
    let files = tempfile::tempdir().unwrap();
    host::busybox_files(files.path())?;
    let store = Store::open(images).unwrap();
    let note =
        image::import(&store, Source::Directory(files.path().to_owned()), None, Limits::default()).await.map_err(|e| e.to_string())?;
    let config = Config { user: "ann".to_owned(), env: vec!["FROM=image".to_owned(), "PATH=/bin".to_owned()], ..Config::default() };
    let other = ImageNote { digest: Digest::parse(OF_USER).unwrap(), source: "dir:/other".to_owned(), config, ..note.clone() };
    store.note_image(&other).unwrap();
    Ok(note)
}
