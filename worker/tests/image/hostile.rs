//! Images made to do harm: refused with a clear error, and nothing of them is left.

use std::io::Write;
use std::path::Path;

use volley_worker::image::layer::Budget;
use volley_worker::image::{Limits, Source, Store, import};

use super::made::{Made, Packing, tar};
use super::{imported, layout};

/// Imports an image of one layer; says why it was refused.
async fn refused(layers: Vec<Vec<u8>>, limits: Limits) -> String {
    let made = Made::of(layers);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let why = import(&store, layout(&made.layout(Packing::Gzip)), None, limits).await.unwrap_err().to_string();
    nothing_is_left(dir.path());
    why
}

/// No disk, no note, nothing half-done.
fn nothing_is_left(dir: &Path) {
    for part in ["roots", "images", "tmp"] {
        assert_eq!(std::fs::read_dir(dir.join(part)).unwrap().count(), 0, "{part}");
    }
}

fn link(kind: tar::EntryType, name: &str, target: &str) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(0o777);
    header.set_size(0);
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
    header.set_cksum();
    header.as_bytes().to_vec()
}

#[tokio::test]
async fn names_that_lead_out_are_refused() {
    for (name, want) in [("../../etc/cron.d/x", "`..`"), ("a/../../x", "`..`"), ("etc/.wh.", "whiteout of nothing")] {
        let why = refused(vec![tar(&[(name, "x")])], Limits::default()).await;
        assert!(why.starts_with("layer 1 of the image: ") && why.contains(want) && why.contains(name), "{why}");
    }
    let why = refused(vec![tar(&[("a", "x")]), link(tar::EntryType::Link, "b", "../../etc/shadow")], Limits::default()).await;
    assert!(why.starts_with("layer 2 of the image: ") && why.contains("etc/shadow"), "{why}");
    let why = refused(vec![link(tar::EntryType::Link, "b", "/etc/shadow")], Limits::default()).await;
    assert!(why.contains("no file of it"), "{why}");
}

#[tokio::test]
async fn a_link_and_a_file_below_it_stay_in_the_image() {
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().to_str().unwrap();
    let made = Made::of(vec![[link(tar::EntryType::Symlink, "out", target), tar(&[("out/file", "x")])].concat()]);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let note = imported(&store, layout(&made.layout(Packing::Gzip))).await;
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
    assert!(store.root_note(&note.root).unwrap().is_some());
}

#[tokio::test]
async fn bombs_end_at_their_limits() {
    let limits = Limits { unpacked_bytes: 1 << 20, ..Limits::default() };
    // A few kilobytes packed, many megabytes unpacked.
    let why = refused(vec![tar(&[("zeros", &"\0".repeat(64 << 20))])], limits).await;
    assert!(why.contains("more than 1048576 bytes"), "{why}");
    // The limit is for all layers together.
    let half = tar(&[("half", &"\0".repeat(600 << 10))]);
    let why = refused(vec![half.clone(), half], limits).await;
    assert!(why.starts_with("layer 2") && why.contains("more than 1048576 bytes"), "{why}");
    let names: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    let many = tar(&names.iter().map(|name| (name.as_str(), "")).collect::<Vec<_>>());
    let budget = Budget { entries_max: 50, ..Budget::default() };
    let why = refused(vec![many.clone()], Limits { budget, ..Limits::default() }).await;
    assert!(why.contains("more than 50 files"), "{why}");
    let why = refused(vec![many], Limits { inodes: 50, ..Limits::default() }).await;
    assert!(why.contains("more than 50 files and directories"), "{why}");
}

#[tokio::test]
async fn what_is_no_image_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("images")).unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "something else").unwrap();
    let why = |source| {
        let store = store.clone();
        async move { import(&store, source, None, Limits::default()).await.unwrap_err().to_string() }
    };
    let said = why(layout(&file)).await;
    assert!(said.contains("/file: the layer ends at byte 14"), "{said}");
    let said = why(layout(dir.path())).await;
    assert!(said.contains("has no index.json; is it an OCI image layout?"), "{said}");
    let said = why(Source::Tarball(dir.path().join("none"))).await;
    assert!(said.contains("/none"), "{said}");
    let said = why(Source::Directory(file)).await;
    assert!(said.contains("it is no directory"), "{said}");
    nothing_is_left(&dir.path().join("images"));
}

#[tokio::test]
async fn a_damaged_layout_is_seen() {
    for packed in [true, false] {
        let made = Made::layers(&[&[("a", "hello")]]);
        let path = made.layout(Packing::Gzip);
        // A layer, or the manifest.
        let blob = if packed { made.packed(Packing::Gzip).remove(0) } else { made.manifest(Packing::Gzip) };
        let name = super::made::sha256(&blob);
        let mut file = std::fs::OpenOptions::new().write(true).open(path.join("blobs/sha256").join(&name[7..])).unwrap();
        file.write_all(b"\0").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let why = import(&store, layout(&path), None, Limits::default()).await.unwrap_err().to_string();
        assert!(why.contains(&name) && why.contains("was damaged"), "{why}");
        nothing_is_left(dir.path());
    }
}

#[tokio::test]
async fn a_configuration_of_other_layers_is_seen() {
    for packing in [Packing::Gzip, Packing::Plain] {
        let (made, other) = (Made::layers(&[&[("a", "1")]]), Made::layers(&[&[("a", "2")]]));
        let path = made.layout(packing);
        let text = String::from_utf8(made.manifest(packing)).unwrap();
        let forged = text.replace(&super::made::sha256(&made.config()), &super::made::sha256(&other.config()));
        let put = |bytes: &[u8]| std::fs::write(path.join("blobs/sha256").join(&super::made::sha256(bytes)[7..]), bytes).unwrap();
        put(forged.as_bytes());
        put(&other.config());
        let index = std::fs::read_to_string(path.join("index.json")).unwrap();
        std::fs::write(
            path.join("index.json"),
            index.replace(&super::made::sha256(text.as_bytes()), &super::made::sha256(forged.as_bytes())),
        )
        .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let why = import(&store, layout(&path), None, Limits::default()).await.unwrap_err().to_string();
        assert!(why.contains("the image's configuration says"), "{why}");
        nothing_is_left(dir.path());
    }
}
