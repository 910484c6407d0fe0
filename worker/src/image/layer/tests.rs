//! Archives of the tar crate and of hand-made blocks.

use std::io::Cursor;

use proptest::prelude::*;

use super::*;

fn read(bytes: &[u8]) -> Result<Vec<Entry>, LayerError> {
    entries(&mut Cursor::new(bytes), &mut Budget::default())
}

fn header(kind: u8, name: &[u8], size: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.as_old_mut().linkflag = [kind];
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.set_mode(0o100_4755);
    header.set_uid(3);
    header.set_gid(4);
    header.set_mtime(5);
    header.set_size(size);
    header.set_cksum();
    header
}

fn block(kind: u8, name: &[u8], contents: &[u8]) -> Vec<u8> {
    let mut bytes = header(kind, name, contents.len() as u64).as_bytes().to_vec();
    bytes.extend_from_slice(contents);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (rest..).find(|length| length.to_string().len() + rest == *length).unwrap();
        body.extend([format!("{length} {key}=").as_bytes(), value, b"\n"].concat());
    }
    block(b'x', b"pax", &body)
}

#[test]
fn kinds_of_entries() {
    let mut bytes = Vec::new();
    for (kind, name) in [(b'5', "d/"), (b'0', "d/f"), (0, "old/"), (b'6', "p"), (b'3', "c"), (b'V', "v")] {
        bytes.extend(block(kind, name.as_bytes(), if name == "d/f" { b"hello" } else { b"" }));
    }
    let found = read(&bytes).unwrap();
    let what: Vec<&What> = found.iter().map(|entry| &entry.what).collect();
    let file = What::File { at: 1024, size: 5 };
    assert_eq!(what, [&What::Dir, &file, &What::Dir, &What::Fifo, &What::Left(Left::Device), &What::Left(Left::Unknown)]);
    assert_eq!(found[1].attrs, Attrs { mode: 0o4755, uid: 3, gid: 4, mtime: 5, ..Attrs::default() });
    assert_eq!(&bytes[1024..1029], b"hello");
}

#[test]
fn long_names_of_both_kinds() {
    let (long, target) = ("n/".repeat(300) + "x", "t".repeat(500));
    let gnu =
        [block(b'L', b"././@LongLink", format!("{long}\0").as_bytes()), block(b'K', b"", target.as_bytes()), block(b'2', b"short", b"")]
            .concat();
    let extended = [pax(&[("path", long.as_bytes()), ("linkpath", target.as_bytes())]), block(b'2', b"short", b"")].concat();
    for bytes in [gnu, extended] {
        let found = read(&bytes).unwrap();
        assert_eq!((found.len(), &found[0].path), (1, &long.clone().into_bytes()));
        assert_eq!(found[0].what, What::Symlink(target.clone().into_bytes()));
    }
    // The prefix of a header, and names that are no text.
    let mut split = header(b'0', b"b\xff", 0);
    split.as_ustar_mut().unwrap().prefix[..1].copy_from_slice(b"a");
    split.set_cksum();
    assert_eq!(read(split.as_bytes()).unwrap()[0].path, b"a/b\xff");
}

#[test]
fn extended_headers() {
    let records: [(&str, &[u8]); 6] = [
        ("uid", b"4000000000"),
        ("mtime", b"77.9"),
        ("SCHILY.xattr.security.capability", b"\x01\n\0=\n"),
        ("SCHILY.xattr.user.a", b""),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ("size", b"3"),
    ];
    let mut bytes = pax(&records);
    bytes.extend(block(b'0', b"f", b"abc"));
    bytes.extend(block(b'0', b"g", b""));
    let found = read(&bytes).unwrap();
    let attrs = &found[0].attrs;
    assert_eq!((attrs.uid, attrs.mtime, attrs.xattrs_left), (4_000_000_000, 77, 1));
    assert_eq!(attrs.xattrs[b"security.capability".as_slice()], b"\x01\n\0=\n");
    // They hold for one entry.
    assert_eq!((found[1].attrs.uid, found[1].attrs.xattrs.len()), (3, 0));
    let old = [pax(&[("mtime", b"-5")]), block(b'0', b"f", b"")].concat();
    assert_eq!(read(&old).unwrap()[0].attrs.mtime, 0);
}

#[test]
fn broken_archives_say_where() {
    let good = block(b'0', b"f", b"abc");
    assert!(matches!(read(&good[..100]), Err(LayerError::Cut { at: 100 })));
    assert!(matches!(read(&good[..513]), Err(LayerError::Cut { at: 513 })));
    let mut wrong = good.clone();
    wrong[0] ^= 1;
    assert!(matches!(read(&wrong), Err(LayerError::Bad { at: 0, .. })));
    assert!(matches!(read(b"PK\x03\x04 something else entirely"), Err(LayerError::Cut { .. })));
    // Cut after the last file's bytes, or after its padding, is whole.
    assert_eq!(read(&good[..515]).unwrap().len(), 1);
    assert_eq!(read(&[good.clone(), vec![0; 1024]].concat()).unwrap().len(), 1);
    for records in [vec![("uid", b"x".as_slice())], vec![("size", b"-1")], vec![("gid", b"4294967296")], vec![("mtime", b"now")]] {
        let bytes = [pax(&records), good.clone()].concat();
        assert!(matches!(read(&bytes), Err(LayerError::Bad { .. })), "{records:?}");
    }
    for body in [b"x".as_slice(), b"5 a=b", b"99 a=b\n", b"0 a=b\n", b"6 aaa\n", b"18446744073709551615 a=b\n"] {
        assert!(matches!(read(&block(b'x', b"", body)), Err(LayerError::Bad { .. })), "{body:?}");
    }
}

#[test]
fn giant_sizes_are_seen_before_anything_is_read() {
    for size in [1 << 40, u64::MAX / 2, u64::MAX] {
        assert!(matches!(read(header(b'0', b"f", size).as_bytes()), Err(LayerError::Cut { .. })));
        let said = read(header(b'L', b"f", size).as_bytes());
        assert!(matches!(said, Err(LayerError::Header { bytes, .. }) if bytes == size), "{said:?}");
        let said = read(&[pax(&[("size", size.to_string().as_bytes())]), block(b'0', b"f", b"")].concat());
        assert!(matches!(said, Err(LayerError::Cut { .. })), "{said:?}");
    }
    // A link's own size says nothing of bytes that follow.
    let bytes = [header(b'1', b"l", 1 << 40).as_bytes().to_vec(), block(b'0', b"f", b"")].concat();
    assert_eq!(read(&bytes).unwrap().len(), 2);
}

#[test]
fn sparse_files_are_refused() {
    let gnu = block(b'S', b"f", b"");
    let extended = [pax(&[("GNU.sparse.major", b"1")]), block(b'0', b"f", b"")].concat();
    for bytes in [gnu, extended] {
        let why = read(&bytes).unwrap_err().to_string();
        assert!(why.contains("\"f\"") && why.contains("--sparse"), "{why}");
    }
}

#[test]
fn too_much_is_refused() {
    let bytes = block(b'0', b"name", b"").repeat(10);
    let mut budget = Budget { entries_max: 15, ..Budget::default() };
    assert_eq!(entries(&mut Cursor::new(&bytes), &mut budget).unwrap().len(), 10);
    // It counts over all layers.
    assert!(matches!(entries(&mut Cursor::new(&bytes), &mut budget), Err(LayerError::Entries { max: 15 })));
    let mut budget = Budget { metadata_max: 39, ..Budget::default() };
    assert!(matches!(entries(&mut Cursor::new(&bytes), &mut budget), Err(LayerError::Metadata { max: 39 })));
}

proptest! {
    #[test]
    fn nothing_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..3000), at in 0usize..2000, byte in any::<u8>()) {
        let _ = read(&bytes);
        // One wrong byte in an archive, with its checksum made right.
        let mut archive = [pax(&[("path", b"p"), ("size", b"3"), ("SCHILY.xattr.user.a", b"b")]), block(b'0', b"f", b"abc")].concat();
        let at = at % archive.len();
        archive[at] = byte;
        for begin in [0, 1024] {
            let mut header = tar::Header::new_old();
            header.as_mut_bytes().copy_from_slice(&archive[begin..begin + 512]);
            header.set_cksum();
            archive[begin..begin + 512].copy_from_slice(header.as_bytes());
        }
        let _ = read(&archive);
    }
}
