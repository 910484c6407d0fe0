//! Round trips of everything odd, and streams that nobody should have made.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use proptest::prelude::*;
use tar::{EntryType, Header};
use tempfile::TempDir;

use super::*;

const LIMITS: FileLimits = FileLimits { bytes: 1 << 30, entries: 1000, path_bytes: 1000 };
const HOW: Unpack = Unpack { owner: None, mode_mask: 0o777, limits: LIMITS };

fn dir() -> (TempDir, OwnedFd) {
    let dir = tempfile::tempdir().unwrap();
    let opened = OwnedFd::from(fs::File::open(dir.path()).unwrap());
    (dir, opened)
}

fn packed(path: &Path) -> (Vec<u8>, Files) {
    let mut stream = Vec::new();
    let files = pack(path, &mut stream, LIMITS).unwrap();
    (stream, files)
}

fn skipped(files: &Files) -> Vec<(&str, SkipReason)> {
    files.skipped.iter().map(|skipped| (skipped.path.as_str(), skipped.why)).collect()
}

#[test]
fn a_tree_comes_out_as_it_went_in() {
    let ((from, _), (to, opened)) = (dir(), dir());
    let at = |name: &str| from.path().join(name);
    let deep = "d/".repeat(60) + "deep";
    fs::create_dir_all(at(&deep)).unwrap();
    fs::create_dir(at("empty")).unwrap();
    fs::write(at("plain"), "hello").unwrap();
    fs::write(at(&format!("{deep}/{}", "n".repeat(255))), "long").unwrap();
    fs::write(at("run"), "#!/bin/sh").unwrap();
    fs::set_permissions(at("run"), PermissionsExt::from_mode(0o751)).unwrap();
    fs::hard_link(at("plain"), at("second")).unwrap();
    symlink("/etc/passwd", at("absolute")).unwrap();
    symlink("t".repeat(300), at("long link")).unwrap();
    let odd = OsStr::from_bytes(b"a\xff\n\\\"b ");
    fs::write(from.path().join(odd), "odd").unwrap();
    for name in ["..odd", "-x", "./. ", "100"] {
        fs::write(at(name), name).unwrap();
    }
    fs::write(at(&"e".repeat(100)), "exactly").unwrap();
    let (stream, sent) = packed(from.path());
    let taken = unpack(stream.as_slice(), &opened, HOW).unwrap();
    assert_eq!((sent.skipped_total, taken.skipped_total), (0, 0), "{taken:?}");
    assert_eq!((sent.entries, sent.bytes), (taken.entries, taken.bytes));
    let of = |name: &str| to.path().join(name);
    assert_eq!(fs::read(of("plain")).unwrap(), b"hello");
    assert_eq!(fs::read(of(&format!("{deep}/{}", "n".repeat(255)))).unwrap(), b"long");
    assert_eq!(fs::metadata(of("run")).unwrap().mode() & 0o7777, 0o751);
    assert_eq!(fs::metadata(of("plain")).unwrap().ino(), fs::metadata(of("second")).unwrap().ino());
    assert_eq!(fs::read_link(of("absolute")).unwrap(), Path::new("/etc/passwd"));
    assert_eq!(fs::read_link(of("long link")).unwrap().as_os_str().len(), 300);
    assert_eq!(fs::read(to.path().join(odd)).unwrap(), b"odd");
    assert_eq!(fs::read(of(&"e".repeat(100))).unwrap(), b"exactly");
    assert!(of("empty").is_dir() && of("..odd").is_file() && of("-x").is_file());
    let (again, _) = packed(to.path());
    let entries =
        |stream: &[u8]| tar::Archive::new(stream).entries().unwrap().map(|e| e.unwrap().path_bytes().into_owned()).collect::<Vec<_>>();
    assert_eq!(entries(&again), entries(&stream), "in order of names");
}

#[test]
fn holes_stay_holes() {
    let ((from, _), (to, opened)) = (dir(), dir());
    let file = fs::File::create(from.path().join("sparse")).unwrap();
    file.set_len(100 << 20).unwrap();
    for at in 0..40u64 {
        file.write_all_at(&[7; 4096], at << 21).unwrap();
    }
    file.write_all_at(b"end", (100 << 20) - 3).unwrap();
    let all_hole = fs::File::create(from.path().join("hole")).unwrap();
    all_hole.set_len(50 << 20).unwrap();
    let (stream, files) = packed(from.path());
    assert!(stream.len() < 1 << 20, "{} bytes", stream.len());
    assert_eq!(files.bytes, 150 << 20);
    let taken = unpack(stream.as_slice(), &opened, HOW).unwrap();
    assert_eq!(taken.bytes, 150 << 20);
    let back = to.path().join("sparse");
    assert!(fs::read(&back).unwrap() == fs::read(from.path().join("sparse")).unwrap());
    assert!(fs::metadata(&back).unwrap().blocks() * 512 < 8 << 20);
    assert_eq!(fs::metadata(to.path().join("hole")).unwrap().blocks(), 0);
    // And GNU tar reads the same.
    let mut tar = std::process::Command::new("tar");
    tar.args(["-xf", "-", "--to-stdout", "sparse"]).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let Ok(mut tar) = tar.spawn() else { return eprintln!("skipped: no tar in PATH") };
    let mut input = tar.stdin.take().unwrap();
    std::thread::spawn(move || std::io::Write::write_all(&mut input, &stream));
    assert!(tar.wait_with_output().unwrap().stdout == fs::read(back).unwrap());
}

#[test]
fn special_files_are_left_out_and_named() {
    let ((from, _), (to, opened)) = (dir(), dir());
    rustix::fs::mknodat(rustix::fs::CWD, from.path().join("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(from.path().join("socket")).unwrap();
    let (stream, files) = packed(from.path());
    assert_eq!(skipped(&files), [("pipe", SkipReason::Special), ("socket", SkipReason::Special)]);
    assert_eq!(unpack(stream.as_slice(), &opened, HOW).unwrap(), Files::default());
    let stream = raw(&[("disk", EntryType::Block, "", b""), ("null", EntryType::Char, "", b""), ("f", EntryType::Fifo, "", b"")]);
    let files = unpack(stream.as_slice(), &opened, HOW).unwrap();
    assert_eq!((files.entries, files.skipped_total), (0, 3));
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
}

/// A stream with these entries, whatever they say.
fn raw(entries: &[(&str, EntryType, &str, &[u8])]) -> Vec<u8> {
    let mut out = tar::Builder::new(Vec::new());
    for (name, kind, target, bytes) in entries {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o7777);
        header.set_size(bytes.len() as u64);
        header.set_cksum();
        out.append(&header, *bytes).unwrap();
    }
    out.into_inner().unwrap()
}

#[test]
fn nothing_is_written_outside() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("kept"), "kept").unwrap();
    let there = outside.path().to_str().unwrap();
    let (inner, file) = (format!("{there}/new"), format!("{there}/kept"));
    let cases: [(&str, Vec<(&str, EntryType, &str, &[u8])>, SkipReason); 8] = [
        ("up", vec![("../new", EntryType::Regular, "", b"x")], SkipReason::Outside),
        ("up in the middle", vec![("a/../../new", EntryType::Regular, "", b"x")], SkipReason::Outside),
        ("through a link", vec![("l", EntryType::Symlink, there, b""), ("l/new", EntryType::Regular, "", b"x")], SkipReason::InTheWay),
        (
            "a directory that is a link",
            vec![("l", EntryType::Symlink, there, b""), ("l", EntryType::Directory, "", b"")],
            SkipReason::InTheWay,
        ),
        ("a hard link up", vec![("h", EntryType::Link, "../kept", b"")], SkipReason::Outside),
        (
            "a hard link through a link",
            vec![("l", EntryType::Symlink, there, b""), ("h", EntryType::Link, "l/kept", b"")],
            SkipReason::InTheWay,
        ),
        ("a file below a file", vec![("f", EntryType::Regular, "", b"x"), ("f/g", EntryType::Regular, "", b"x")], SkipReason::InTheWay),
        ("a hard link to nothing", vec![("h", EntryType::Link, "none", b"")], SkipReason::NoTarget),
    ];
    for (what, entries, why) in cases {
        let (to, opened) = dir();
        let files = unpack(raw(&entries).as_slice(), &opened, HOW).unwrap();
        assert_eq!(files.skipped.iter().map(|skipped| skipped.why).collect::<Vec<_>>(), [why], "{what}");
        drop(to);
    }
    // A link that was there is replaced, not followed; an absolute name is one below.
    let (to, opened) = dir();
    symlink(&file, to.path().join("kept")).unwrap();
    let stream = raw(&[("kept", EntryType::Regular, "", b"theirs"), (&inner[..inner.len().min(99)], EntryType::Regular, "", b"x")]);
    assert_eq!(unpack(stream.as_slice(), &opened, HOW).unwrap().skipped_total, 0);
    assert_eq!(fs::read(to.path().join("kept")).unwrap(), b"theirs");
    assert!(to.path().join(&inner[1..]).is_file());
    let names: Vec<_> = fs::read_dir(outside.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!((names.len(), fs::read(&file).unwrap().as_slice()), (1, b"kept".as_slice()));
}

#[test]
fn modes_are_masked() {
    let (to, opened) = dir();
    unpack(raw(&[("f", EntryType::Regular, "", b"x"), ("d", EntryType::Directory, "", b"")]).as_slice(), &opened, HOW).unwrap();
    for name in ["f", "d"] {
        assert_eq!(fs::metadata(to.path().join(name)).unwrap().mode() & 0o7777, 0o777);
    }
}

#[test]
fn limits_hold() {
    let too_much = |stream: &[u8], limits: FileLimits| {
        let (_to, opened) = dir();
        match unpack(stream, &opened, Unpack { limits, ..HOW }) {
            Err(UnpackError::TooMuch(what)) => what.what,
            other => panic!("{other:?}"),
        }
    };
    let stream = raw(&[("a", EntryType::Regular, "", &[1; 600]), ("bbbb", EntryType::Regular, "", &[1; 600])]);
    assert_eq!(too_much(&stream, FileLimits { bytes: 1199, ..LIMITS }), "bytes");
    assert_eq!(too_much(&stream, FileLimits { entries: 1, ..LIMITS }), "files, directories and links");
    assert_eq!(too_much(&stream, FileLimits { path_bytes: 3, ..LIMITS }), "bytes in a path");
    // A head that claims 2^40 bytes costs nothing.
    let mut huge = raw(&[("a", EntryType::Regular, "", b"")]);
    let mut header = Header::new_gnu();
    header.as_old_mut().name[0] = b'a';
    header.set_size(1 << 40);
    header.set_entry_type(EntryType::Regular);
    header.set_cksum();
    huge[..512].copy_from_slice(header.as_bytes());
    assert_eq!(too_much(&huge, LIMITS), "bytes");
    // Nor does a name of 2^40 bytes.
    header.set_entry_type(EntryType::GNULongName);
    header.set_cksum();
    let endless = std::io::Read::chain(header.as_bytes().as_slice(), std::io::repeat(b'x'));
    let (_to, opened) = dir();
    assert!(matches!(unpack(endless, &opened, HOW), Err(UnpackError::TooMuch(_))));
    let from = tempfile::tempdir().unwrap();
    fs::write(from.path().join("a"), [1; 600]).unwrap();
    for limits in [FileLimits { bytes: 599, ..LIMITS }, FileLimits { entries: 0, ..LIMITS }, FileLimits { path_bytes: 0, ..LIMITS }] {
        assert!(matches!(pack(from.path(), std::io::sink(), limits), Err(PackError::TooMuch(_))));
    }
}

#[test]
fn a_stream_that_is_cut_is_an_error_wherever_it_is_cut() {
    let stream = raw(&[("a", EntryType::Regular, "", &[1; 600]), ("b", EntryType::Symlink, "a", b"")]);
    // One block of the two that end a stream is enough.
    for cut in (0..stream.len() - 1024).step_by(64) {
        let (_to, opened) = dir();
        assert!(matches!(unpack(&stream[..cut], &opened, HOW), Err(UnpackError::Stream(_))), "{cut}");
    }
}

#[test]
fn a_file_that_changes_while_it_is_read_leaves_the_stream_whole() {
    let (from, _) = dir();
    for name in ["a", "b", "c"] {
        fs::write(from.path().join(name), vec![7; 100_000]).unwrap();
    }
    /// Cuts and extends the files when the first bytes arrive.
    struct Meddler<'a>(&'a Path, Vec<u8>);
    impl std::io::Write for Meddler<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.1.is_empty() {
                fs::write(self.0.join("a"), "short")?;
                fs::write(self.0.join("b"), vec![8; 300_000])?;
            }
            self.1.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut meddler = Meddler(from.path(), Vec::new());
    pack(from.path(), &mut meddler, LIMITS).unwrap();
    let (to, opened) = dir();
    assert_eq!(unpack(meddler.1.as_slice(), &opened, HOW).unwrap().entries, 3);
    assert!(fs::read(to.path().join("c")).unwrap() == vec![7; 100_000]);
    assert_eq!(fs::metadata(to.path().join("a")).unwrap().len(), 100_000);
}

proptest! {
    #[test]
    fn noise_neither_panics_nor_escapes(noise: Vec<u8>, changes in proptest::collection::vec((0usize..3, 0usize..512, any::<u8>()), 1..6)) {
        let (_to, opened) = dir();
        let limits = FileLimits { bytes: 1 << 20, entries: 10, path_bytes: 200 };
        let _ = unpack(noise.as_slice(), &opened, Unpack { limits, ..HOW });
        // Heads with fields that say anything, and a sum that is right.
        let mut stream = raw(&[("a/b", EntryType::Regular, "", &[1; 512]), ("b", EntryType::Symlink, "a", b""), ("c", EntryType::GNUSparse, "", b"")]);
        for (entry, at, byte) in changes {
            let from = [0, 1024, 1536][entry];
            let mut header = Header::from_byte_slice(&stream[from..from + 512]).clone();
            header.as_mut_bytes()[at] = byte;
            header.set_cksum();
            stream[from..from + 512].copy_from_slice(header.as_bytes());
        }
        let _ = unpack(stream.as_slice(), &opened, Unpack { limits, ..HOW });
    }
}
