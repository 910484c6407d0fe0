//! Images from every kind of source, read back from their disks without mounting them.
//!
//! Wants `fsck.erofs` and `dump.erofs` (erofs-utils) to read a disk, `busybox` to have something in it, `docker-registry` for one test,
//! and QEMU with a kernel and its modules for another; what is missing is named, and its test passes. `tests/run` installs all of them.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

#[path = "../guest/mod.rs"]
mod guest;
mod hostile;
mod made;
mod measured;
mod mounted;
mod registry;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use made::{Made, Packing};
use volley_worker::image::find::{find, name_of};
use volley_worker::image::oci::Config;
use volley_worker::image::{ImageNote, Limits, Source, Store, import, remove, remove_name};

/// A program of this machine.
fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).map(|dir| dir.join(name)).find(|file| file.is_file());
    if found.is_none() {
        eprintln!("skipped: no {name} in PATH");
    }
    found
}

/// Every file of a directory: its kind, attributes and contents, as one line each.
fn listed(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(path) = left.pop() {
        let meta = std::fs::symlink_metadata(&path).unwrap();
        let what = if meta.is_dir() {
            left.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            "dir".to_owned()
        } else if meta.is_symlink() {
            format!("-> {}", std::fs::read_link(&path).unwrap().display())
        } else if meta.is_file() {
            format!("file {} {}", meta.len(), sha256(&std::fs::read(&path).unwrap()))
        } else {
            "other".to_owned()
        };
        // The mode of a link is nobody's. fsck.erofs sets owners last, and with that the kernel takes set-user-id away.
        let attrs = if meta.is_symlink() { String::new() } else { format!("{:o} {} {}", meta.mode() & 0o1777, meta.uid(), meta.gid()) };
        found.insert(path.strip_prefix(dir).unwrap().to_owned(), format!("{what} {attrs}"));
    }
    found
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    hex::encode(sha2::Sha256::digest(bytes))
}

/// What dump.erofs says of a file.
fn dumped(disk: &Path, path: &str) -> Option<String> {
    let output = Command::new(program("dump.erofs")?).arg(format!("--path={path}")).arg(disk).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads a disk back: checks it, and writes what is in it below a new directory.
fn extracted(store: &Store, note: &ImageNote) -> Option<tempfile::TempDir> {
    let fsck = program("fsck.erofs")?;
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(fsck);
    command.arg(format!("--extract={}", dir.path().join("root").display())).arg("--preserve").arg(store.root(&note.root));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(dir)
}

async fn imported(store: &Store, source: Source) -> ImageNote {
    import(store, source, None, Limits::default()).await.unwrap()
}

fn layout(path: &Path) -> Source {
    Source::Layout { path: path.to_owned(), name: None }
}

#[tokio::test]
async fn the_same_files_make_the_same_disk_from_every_source() {
    let Some(made) = Made::busybox() else { return };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("images")).unwrap();
    let (gzip, zstd) = (made.layout(Packing::Gzip), made.layout(Packing::Zstd));
    let archive = made.archive(&gzip);
    let tarball = made.tarball();
    let plain = made.layout(Packing::Plain);
    let local = [Source::Tarball(tarball), Source::Directory(made.root())];
    let sources = [&gzip, &zstd, &archive, &plain].map(|path| layout(path)).into_iter().chain(local);
    let mut disks = Vec::new();
    for source in sources {
        let shown = format!("{source:?}");
        let note = imported(&store, source).await;
        let root = store.root_note(&note.root).unwrap().unwrap();
        assert_eq!(root.digest.hex(), sha256(&std::fs::read(store.root(&note.root)).unwrap()), "{shown}");
        disks.push((shown, note, root));
    }
    for (shown, _, root) in &disks {
        assert_eq!(root.digest, disks[0].2.digest, "{shown} is another disk than {}", disks[0].0);
        assert_eq!(root.left_out, disks[0].2.left_out);
    }
    // The archive of the layout is the same image, and has the same disk; so has every image of one plain layer.
    assert_eq!(disks[0].1.digest, disks[2].1.digest);
    assert_eq!(disks[4].1.config, Config::default());
    let config = &disks[0].1.config;
    assert_eq!(
        (config.env.as_slice(), config.user.as_str(), config.working_dir.as_str()),
        (["A=b c".to_owned()].as_slice(), "7:8", "/etc")
    );
    assert_eq!(
        (config.entrypoint.as_slice(), config.cmd.as_slice()),
        (["/bin/busybox".to_owned()].as_slice(), ["sh".to_owned()].as_slice())
    );

    let Some(back) = extracted(&store, &disks[0].1) else { return };
    let (want, found) = (listed(&made.root()), listed(&back.path().join("root")));
    assert_eq!(found, want);
    // And writes each name as a file of its own; the disk itself says that they are one.
    let disk = store.root(&disks[0].1.root);
    let (Some(busybox), Some(ls)) = (dumped(&disk, "/bin/busybox"), dumped(&disk, "/bin/ls")) else { return };
    assert!(busybox.contains("Links: 2"), "{busybox}");
    assert_eq!(busybox, ls);
}

#[tokio::test]
async fn layers_add_up_on_the_disk() {
    let made = Made::layers(&[
        &[("etc/", ""), ("etc/keep", "1"), ("etc/gone", "2"), ("opt/old/a", "3"), ("opt/old/b", "4")],
        &[("etc/.wh.gone", ""), ("etc/new", "5"), ("opt/old/.wh..wh..opq", ""), ("opt/old/c", "6")],
        &[("etc/keep", "7")],
    ]);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let note = imported(&store, layout(&made.layout(Packing::Gzip))).await;
    let Some(back) = extracted(&store, &note) else { return };
    let files: Vec<(String, String)> = listed(&back.path().join("root"))
        .into_iter()
        .filter(|(_, what)| what.starts_with("file"))
        .map(|(path, _)| (path.display().to_string(), std::fs::read_to_string(back.path().join("root").join(&path)).unwrap()))
        .collect();
    let want = [("etc/keep", "7"), ("etc/new", "5"), ("opt/old/c", "6")];
    assert_eq!(files, want.map(|(path, text)| (path.to_owned(), text.to_owned())));
}

/// Makes a directory of files of every size and with many names.
fn odd_files(root: &Path) {
    std::fs::create_dir_all(root.join("many")).unwrap();
    // Around the sizes at which the layout changes.
    for size in [0, 1, 63, 1900, 1984, 1985, 2048, 4031, 4032, 4033, 4095, 4096, 4097, 8191, 8192, 10_000, 300_001] {
        let bytes: Vec<u8> = (0..size).map(|n: usize| (n * 7 + n / 251) as u8).collect();
        std::fs::write(root.join(format!("f{size}")), bytes).unwrap();
    }
    // A directory of several blocks, with names before and after `.`, long ones and odd ones.
    for n in 0..700 {
        std::fs::write(root.join("many").join(format!("{n}-{}", "x".repeat(n % 200))), n.to_string()).unwrap();
    }
    for name in ["!", "-dash", "..two", "...", " ", "new\nline", "ü", &"y".repeat(255)] {
        std::fs::write(root.join("many").join(name), name).unwrap();
    }
    for length in [1, 100, 2000, 3000, 4000] {
        std::os::unix::fs::symlink("t".repeat(length), root.join(format!("l{length}"))).unwrap();
    }
    let deep: PathBuf = (0..60).map(|n| format!("deep{n}")).collect();
    std::fs::create_dir_all(root.join(&deep)).unwrap();
    std::fs::write(root.join(&deep).join("end"), "here").unwrap();
}

#[tokio::test]
async fn files_of_every_size_and_many_names_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    odd_files(&root);
    let store = Store::open(&dir.path().join("images")).unwrap();
    let note = imported(&store, Source::Directory(root.clone())).await;
    let Some(back) = extracted(&store, &note) else { return };
    assert_eq!(listed(&back.path().join("root")), listed(&root));
}

#[tokio::test]
async fn one_content_has_as_many_names_as_it_was_given_and_a_name_is_its_newest_contents() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    std::fs::write(root.join("a"), "1").unwrap();
    let store = Store::open(&dir.path().join("images")).unwrap();
    let call = async |name: &str| import(&store, Source::Directory(root.clone()), Some(name.to_owned()), Limits::default()).await.unwrap();
    let found = |text: &str| find(&store, text).ok().map(|(note, _)| note.digest);
    let one = call("app:1").await;
    assert_eq!(call("app:stable").await.digest, one.digest);
    // Once more is nothing new, however it is written.
    let again = call("app:1").await;
    assert_eq!(again.names().collect::<Vec<_>>(), ["app:1", "app:stable"]);
    assert_eq!((found("app:1"), found("docker.io/library/app:stable")), (Some(one.digest.clone()), Some(one.digest.clone())));

    std::fs::write(root.join("a"), "2").unwrap();
    let two = call("app:stable").await;
    assert_eq!((found("app:stable"), found("app:1")), (Some(two.digest.clone()), Some(one.digest.clone())));
    let three = call("app:1").await;
    assert_eq!((three.digest, found("app:1")), (two.digest.clone(), Some(two.digest.clone())));
    // It has lost all its names and is there still.
    assert_eq!(found(&one.digest.to_string()), Some(one.digest.clone()));

    let note = store.image(&two.digest).unwrap().unwrap();
    let name = name_of(&note, "docker.io/library/app:1").unwrap().to_owned();
    remove_name(&store, note, name).await.unwrap();
    assert_eq!((found("app:1"), found("app:stable")), (None, Some(two.digest)));
}

#[tokio::test]
async fn what_is_there_is_not_made_again_and_goes_with_its_last_image() {
    let base: &[(&str, &str)] = &[("a", "1")];
    let (one, two) = (Made::layers(&[base, &[("b", "2")]]), Made::layers(&[base, &[("c", "3")]]));
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let first = imported(&store, layout(&one.layout(Packing::Gzip))).await;
    let made = std::fs::metadata(store.root(&first.root)).unwrap().ino();
    let again = imported(&store, layout(&one.layout(Packing::Gzip))).await;
    assert_eq!((again.digest.clone(), std::fs::metadata(store.root(&first.root)).unwrap().ino()), (first.digest.clone(), made));
    let second = imported(&store, layout(&two.layout(Packing::Gzip))).await;
    let shared: Vec<_> = first.blobs.iter().filter(|blob| second.blobs.contains(blob)).collect();
    assert_eq!(shared.len(), 1, "the lowest layer");
    // Nobody may write to a disk that machines share.
    assert_eq!(std::fs::metadata(store.root(&first.root)).unwrap().mode() & 0o777, 0o444);

    // What a worker left half-done is gone at its next start; what is whole stays.
    std::fs::write(dir.path().join("tmp/half"), "x").unwrap();
    std::fs::write(store.root(&first.digest), "a disk without a note").unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert!(!dir.path().join("tmp/half").exists() && !store.root(&first.digest).exists());
    assert_eq!(store.images().unwrap().len(), 2);

    assert!(remove(&store, first.digest.clone()).await.unwrap());
    assert!(!remove(&store, first.digest.clone()).await.unwrap());
    assert!(store.image(&first.digest).unwrap().is_none() && !store.root(&first.root).exists());
    assert!(store.blob(&shared[0].digest).exists(), "the other image has it too");
    assert!(store.image(&second.digest).unwrap().is_some());
    remove(&store, second.digest).await.unwrap();
    assert_eq!(store.bytes().unwrap(), 0);
    assert_eq!(std::fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
}

#[tokio::test]
async fn importing_and_removing_at_once_leaves_whole_images() {
    let made = Made::layers(&[&[("a", "1")], &[("b", "2")]]);
    let path = made.layout(Packing::Gzip);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let digest = imported(&store, layout(&path)).await.digest;
    for round in 0..20 {
        let imports: Vec<_> = (0..4)
            .map(|_| {
                let (store, source) = (store.clone(), layout(&path));
                tokio::spawn(async move { import(&store, source, None, Limits::default()).await })
            })
            .collect();
        tokio::task::yield_now().await;
        // Nobody waits for one of them any more.
        imports[round % 4].abort();
        remove(&store, digest.clone()).await.unwrap();
        for (index, import) in imports.into_iter().enumerate() {
            match import.await {
                Ok(note) => assert_eq!(note.unwrap().digest, digest),
                Err(stopped) => assert!(stopped.is_cancelled() && index == round % 4, "{stopped}"),
            }
        }
    }
    // Whatever came last: what is listed is whole, and what is not is gone at the next start.
    let note = imported(&store, layout(&path)).await;
    assert_eq!(store.image(&digest).unwrap(), Some(note));
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
    remove(&store, digest).await.unwrap();
    assert_eq!(store.bytes().unwrap(), 0);
}
