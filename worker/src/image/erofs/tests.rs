//! Disks read back by a reader of the tests' own, which checks what Linux's driver relies on. That tools and a kernel read them too is
//! shown by the integration tests.

use proptest::prelude::*;

use super::super::entry::{Entry, What};
use super::super::merge::{INODES_MAX, Merge};
use super::*;

/// One layer whose byte at each place follows from the place.
struct Pattern;

fn pattern(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9) >> 13) as u8
}

impl Contents for Pattern {
    fn read(&mut self, _layer: usize, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.iter_mut().zip(at..).for_each(|(byte, at)| *byte = pattern(at));
        Ok(())
    }
}

fn disk(entries: Vec<Entry>) -> Vec<u8> {
    let mut merge = Merge::new(INODES_MAX);
    merge.layer(0, entries).unwrap();
    let mut bytes = Vec::new();
    let totals = write(&merge.finish().0, &mut Pattern, &mut bytes).unwrap();
    assert_eq!(totals.bytes, bytes.len() as u64);
    bytes
}

fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    bytes[at..at + size].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// What a reader finds at an inode.
#[derive(Debug, PartialEq)]
struct Found {
    mode: u64,
    owner: (u64, u64),
    mtime: u64,
    links: u64,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    bytes: Vec<u8>,
}

fn inode_at(disk: &[u8], number_of_it: u64) -> Found {
    let at = (number_of_it * SLOT) as usize;
    let layout = number(disk, at, 2);
    assert_eq!(layout & 1, 1, "the long kind");
    let count = number(disk, at + 2, 2) as usize;
    let xattr_bytes = if count == 0 { 0 } else { XATTR_HEAD + 4 * (count - 1) };
    let size = number(disk, at + 8, 8) as usize;
    let block = number(disk, at + 16, 4) as usize * BLOCK as usize;
    let behind = at + INODE as usize + xattr_bytes;
    let bytes = if layout >> 1 == u64::from(INLINE) {
        let tail = size % BLOCK as usize;
        assert!(tail > 0 && at / BLOCK as usize == (behind + tail - 1) / BLOCK as usize, "the tail leaves its block");
        [&disk[block..block + size - tail], &disk[behind..behind + tail]].concat()
    } else if size == 0 {
        Vec::new()
    } else {
        disk[block..block + size].to_vec()
    };
    assert_eq!(at / BLOCK as usize, (behind - 1) / BLOCK as usize, "the inode leaves its block");
    let mut xattrs = BTreeMap::new();
    let mut next = at + INODE as usize + XATTR_HEAD;
    while next < behind {
        let (name, value) = (number(disk, next, 1) as usize, number(disk, next + 2, 2) as usize);
        let prefix: &[u8] = if disk[next + 1] == 1 { b"user." } else { b"security." };
        let text = next + 4;
        xattrs.insert([prefix, &disk[text..text + name]].concat(), disk[text + name..text + name + value].to_vec());
        next = (text + name + value).next_multiple_of(4);
    }
    let owner = (number(disk, at + 24, 4), number(disk, at + 28, 4));
    Found { mode: number(disk, at + 4, 2), owner, mtime: number(disk, at + 32, 8), links: number(disk, at + 44, 4), xattrs, bytes }
}

/// The names in a directory's contents, which must be in order.
fn names(bytes: &[u8]) -> Vec<(Vec<u8>, u64, u8)> {
    let mut found: Vec<(Vec<u8>, u64, u8)> = Vec::new();
    for block in bytes.chunks(BLOCK as usize) {
        let count = number(block, 8, 2) as usize / DIRENT;
        for index in 0..count {
            let at = index * DIRENT;
            let begin = number(block, at + 8, 2) as usize;
            let end = if index + 1 < count { number(block, at + DIRENT + 8, 2) as usize } else { block.len() };
            // The last name of a block that is not full ends at a zero.
            let name: Vec<u8> = block[begin..end].iter().copied().take_while(|byte| *byte != 0).collect();
            found.push((name, number(block, at, 8), block[at + 10]));
        }
    }
    assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0), "names are searched in order");
    found
}

/// Every path of a disk.
fn paths(disk: &[u8]) -> BTreeMap<String, Found> {
    let word = |at| number(disk, SUPER_AT + at, 4);
    assert_eq!((word(0), word(36) * BLOCK), (u64::from(MAGIC), disk.len() as u64));
    let mut found = BTreeMap::new();
    let root = number(disk, SUPER_AT + 14, 2);
    let (mut left, mut inodes) = (vec![(root, root, String::new())], BTreeSet::new());
    while let Some((at, parent, path)) = left.pop() {
        inodes.insert(at);
        let inode = inode_at(disk, at);
        if inode.mode & 0o170_000 == u64::from(S_IFDIR) {
            for (name, next, kind) in names(&inode.bytes) {
                let kinds = [(1, S_IFREG), (2, S_IFDIR), (5, S_IFIFO), (7, S_IFLNK)];
                let of_inode = inode_at(disk, next).mode & 0o170_000;
                assert!(kinds.contains(&(kind, of_inode as u16)), "kind {kind} of {name:?}");
                match name.as_slice() {
                    b"." => assert_eq!(next, at),
                    b".." => assert_eq!(next, parent),
                    _ => left.push((next, at, format!("{path}/{}", String::from_utf8(name).unwrap()))),
                }
            }
        }
        found.insert(path, inode);
    }
    assert_eq!(number(disk, SUPER_AT + 16, 8), inodes.len() as u64);
    found
}

fn entry(path: &str, what: What, attrs: Attrs) -> Entry {
    Entry { path: path.as_bytes().to_vec(), what, attrs }
}

#[test]
fn attributes_and_links_are_on_the_disk() {
    let mut attrs = Attrs { mode: 0o4711, uid: 70_000, gid: u32::MAX, mtime: 5_000_000_000, ..Attrs::default() };
    attrs.put_xattr(b"user.name", b"value");
    attrs.put_xattr(b"security.capability", &[1, 0, 255]);
    let found = paths(&disk(vec![
        entry("d/f", What::File { at: 9, size: 5000 }, attrs.clone()),
        entry("d/g", What::HardLink(b"d/f".to_vec()), Attrs::default()),
        entry("d/e", What::Dir, Attrs { mode: 0o1777, ..Attrs::default() }),
        entry("d/p", What::Fifo, Attrs::default()),
        entry("l", What::Symlink(b"d/f".to_vec()), Attrs::default()),
    ]));
    let file = &found["/d/f"];
    assert_eq!((file.mode, file.owner, file.mtime), (0o104_711, (70_000, u64::from(u32::MAX)), 5_000_000_000));
    assert_eq!((file.links, &file.xattrs), (2, &attrs.xattrs));
    assert_eq!(file.bytes, (9..5009).map(pattern).collect::<Vec<u8>>());
    assert_eq!(file, &found["/d/g"]);
    assert_eq!((found[""].links, found["/d"].links, found["/d/e"].links, found["/d/e"].mode), (3, 3, 2, 0o041_777));
    assert_eq!((found["/d/p"].mode, found["/l"].bytes.as_slice()), (0o010_000, b"d/f".as_slice()));
}

#[test]
fn an_empty_tree_is_a_disk() {
    let bytes = disk(Vec::new());
    assert_eq!((bytes.len() as u64, paths(&bytes).len()), (BLOCK, 1));
}

#[test]
fn contents_that_end_early_are_an_error() {
    struct Short;
    impl Contents for Short {
        fn read(&mut self, _layer: usize, _at: u64, _buffer: &mut [u8]) -> io::Result<()> {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }
    let mut merge = Merge::new(10);
    merge.layer(0, vec![entry("f", What::File { at: 0, size: 1 }, Attrs::default())]).unwrap();
    assert!(write(&merge.finish().0, &mut Short, io::sink()).is_err());
    // Nothing is read of a disk that can't be.
    let mut merge = Merge::new(10);
    merge.layer(0, vec![entry("f", What::File { at: 0, size: u64::MAX - 5 }, Attrs::default())]).unwrap();
    let why = write(&merge.finish().0, &mut Short, io::sink()).unwrap_err().to_string();
    assert!(why.contains("16 TiB"), "{why}");
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        files in prop::collection::btree_map("[!-.0-~]{1,40}(/[a-z]{1,250}){0,2}", (0u64..20_000, 0usize..700), 0..60),
    ) {
        let what = |size: u64, xattr: usize, path: &str| {
            let mut attrs = Attrs { mode: 0o640, ..Attrs::default() };
            if xattr > 0 {
                attrs.put_xattr(format!("user.{}", path.len()).as_bytes(), &vec![b'v'; xattr]);
            }
            // Some short, where layouts change.
            let size = if size.is_multiple_of(3) { size % 4200 } else { size };
            (What::File { at: size, size }, attrs)
        };
        // A directory is not also a file.
        let is_dir = |path: &str| files.keys().any(|other| other.starts_with(&format!("{path}/")));
        let plain = files.iter().filter(|(path, _)| !path.starts_with(".wh.") && !path.split('/').any(|name| name == "." || name == "..") && !is_dir(path));
        let plain: BTreeMap<String, (What, Attrs)> = plain.map(|(path, (size, xattr))| (path.clone(), what(*size, *xattr, path))).collect();
        let entries = || plain.iter().map(|(path, (what, attrs))| entry(path, what.clone(), attrs.clone())).collect();
        let bytes = disk(entries());
        let found = paths(&bytes);
        let mut seen = 0;
        for (path, (what, attrs)) in &plain {
            let What::File { at, size } = what else { continue };
            let file = &found[&format!("/{path}")];
            prop_assert_eq!(&file.bytes, &(*at..*at + *size).map(pattern).collect::<Vec<u8>>());
            prop_assert_eq!(&file.xattrs, &attrs.xattrs);
            seen += 1;
        }
        prop_assert_eq!(found.values().filter(|inode| inode.mode & 0o170_000 == u64::from(S_IFREG)).count(), seen);
        prop_assert!(bytes == disk(entries()), "the same tree gives the same bytes");
    }
}
