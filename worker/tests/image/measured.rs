//! How long a root disk takes, for decision record 15. Not run with the others.

use std::path::PathBuf;
use std::time::Instant;

use volley_worker::image::{Source, Store};

use super::imported;

#[tokio::test]
#[ignore = "a measurement: VOLLEY_IMAGE_TARBALL names an archive"]
async fn a_root_disk_is_measured() {
    let tarball = PathBuf::from(std::env::var_os("VOLLEY_IMAGE_TARBALL").unwrap());
    // Beside it, so that both are on the same disk.
    let dir = tempfile::tempdir_in(tarball.parent().unwrap()).unwrap();
    let store = Store::open(dir.path()).unwrap();
    let begun = Instant::now();
    let note = imported(&store, Source::Tarball(tarball)).await;
    let took = begun.elapsed();
    let root = store.root_note(&note.root).unwrap().unwrap();
    println!("{} inodes, {} MiB, {took:?}, left out {:?}", root.totals.inodes, root.totals.bytes >> 20, root.left_out.counts);
}
