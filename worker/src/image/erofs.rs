//! A tree as an EROFS image: <https://docs.kernel.org/filesystems/erofs.html>, format as in Linux's `fs/erofs/erofs_fs.h`.
//!
//! Owns where everything lies on the disk and its bytes. Nothing is compressed, so that a guest reads its pages as they are; short
//! tails of files lie beside their inodes. The same tree gives the same bytes. Pure: contents come in and the disk goes out in order.
//! Does not own what is in the tree (`merge`) or where the disk is kept (`store`).

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use super::entry::Attrs;
use super::merge::{Content, Id, Inode, Kind, ROOT, Tree};

/// Of everything that follows: another value for every change of what the same tree gives.
pub const FORMAT: u32 = 1;
/// Bytes of a block: pages of the guest, and the only size that every kernel with EROFS reads.
pub const BLOCK: u64 = 4096;
/// Where the superblock begins, and its size.
const SUPER_AT: usize = 1024;
const SUPER_BYTES: usize = 128;
const MAGIC: u32 = 0xE0F5_E1E2;
/// Feature: times of inodes are those of their last change.
const FEATURE_MTIME: u32 = 2;
/// Disks are told apart by where they are plugged in; one name for all makes them the same bytes for the same tree.
const UUID: [u8; 16] = *b"volley-root-disk";
/// An inode's number is its place in units of this.
const SLOT: u64 = 32;
/// Bytes of an inode of the long kind, with 32 bits for owners and 64 for times.
const INODE: u64 = 64;
const DIRENT: usize = 12;
/// Layouts of contents: blocks only; blocks and a tail beside the inode.
const PLAIN: u16 = 0;
const INLINE: u16 = 2;
const S_IFIFO: u16 = 0o010_000;
const S_IFDIR: u16 = 0o040_000;
const S_IFREG: u16 = 0o100_000;
const S_IFLNK: u16 = 0o120_000;
/// Bytes copied at once.
const COPY_BYTES: usize = 128 * 1024;

/// Where files' contents come from.
pub trait Contents {
    /// Fills `buffer` with the bytes of `layer` from `at` on.
    ///
    /// # Errors
    /// What the system says; also when the layer ends before.
    fn read(&mut self, layer: usize, at: u64, buffer: &mut [u8]) -> io::Result<()>;
}

/// What a disk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Totals {
    /// Files, directories and links.
    pub inodes: u64,
    /// Bytes of the disk: whole blocks.
    pub bytes: u64,
}

/// Where an inode and its contents lie.
#[derive(Debug, Clone)]
struct Place {
    id: Id,
    parent: Id,
    names: u32,
    /// Where the inode begins.
    at: u64,
    /// Bytes of its contents, and how many of them lie behind the inode.
    size: u64,
    tail: u64,
    /// The first block of the rest.
    block: u64,
}

/// Where everything lies.
#[derive(Debug)]
struct Plan {
    /// Every inode once, level by level; their blocks lie in this order.
    places: Vec<Place>,
    /// Which place an inode has, by its id.
    by_id: Vec<Option<u32>>,
    blocks: u64,
}

impl Plan {
    fn place(&self, id: Id) -> io::Result<&Place> {
        let at = self.by_id.get(id.index()).copied().flatten();
        at.and_then(|at| self.places.get(at as usize)).ok_or_else(|| io::Error::other("a name of an inode that was not placed"))
    }

    fn number(&self, id: Id) -> io::Result<u64> {
        Ok(self.place(id)?.at / SLOT)
    }
}

/// Writes the disk of `tree` to `out`, in order and whole.
///
/// # Errors
/// What `contents` or `out` say; also when the disk would be larger than EROFS can say (16 TiB).
pub fn write<C: Contents, W: Write>(tree: &Tree, contents: &mut C, out: W) -> io::Result<Totals> {
    let plan = plan(tree)?;
    let mut disk = Disk { out, at: 0 };
    disk.zeros_to(SUPER_AT as u64)?;
    disk.put(&superblock(&plan)?)?;
    let mut inodes: Vec<&Place> = plan.places.iter().collect();
    inodes.sort_unstable_by_key(|place| place.at);
    for place in inodes {
        disk.zeros_to(place.at)?;
        disk.put(&inode(tree, &plan, place)?)?;
        disk.contents(tree, &plan, place, contents, place.size - place.tail, place.size)?;
    }
    for place in plan.places.iter().filter(|place| place.size > place.tail) {
        disk.zeros_to(place.block * BLOCK)?;
        disk.contents(tree, &plan, place, contents, 0, place.size - place.tail)?;
    }
    disk.zeros_to(plan.blocks * BLOCK)?;
    disk.out.flush()?;
    Ok(Totals { inodes: plan.places.len() as u64, bytes: plan.blocks * BLOCK })
}

/// Finds every inode and lays it out: all inodes first, with their tails, then all whole blocks.
fn plan(tree: &Tree) -> io::Result<Plan> {
    let mut plan = Plan { places: Vec::new(), by_id: vec![None; tree.count()], blocks: 0 };
    // Level by level, in the order of names.
    see(&mut plan, ROOT, ROOT)?;
    let mut next = 0;
    while let Some(place) = plan.places.get(next) {
        let id = place.id;
        if let Kind::Dir(names) = &tree.get(id).kind {
            for child in names.values() {
                see(&mut plan, *child, id)?;
            }
        }
        next += 1;
    }
    let blocks = place_inodes(tree, &mut plan.places)?;
    let mut block = blocks;
    for place in &mut plan.places {
        place.block = block;
        block = (place.size - place.tail).div_ceil(BLOCK).checked_add(block).ok_or_else(too_large)?;
    }
    plan.blocks = block;
    u32::try_from(block).map_err(|_| too_large())?;
    Ok(plan)
}

/// Places all inodes with their tails; says how many blocks they take. None of them leaves its block: each goes where it leaves the
/// least room, which lets a disk of small files be a fifth smaller than one after the other would.
fn place_inodes(tree: &Tree, places: &mut [Place]) -> io::Result<u64> {
    let begin = (SUPER_AT + SUPER_BYTES) as u64;
    // Blocks that have room left, the fullest first.
    let mut rooms = BTreeSet::from([(BLOCK - begin, 0)]);
    let mut blocks = 1;
    for place in places {
        let inode = tree.get(place.id);
        let head = INODE + xattrs(&inode.attrs)?.len() as u64;
        place.size = match &inode.kind {
            Kind::Dir(names) => directory_size(names),
            Kind::File(content) => content.size,
            Kind::Symlink(target) => target.len() as u64,
            Kind::Fifo => 0,
        };
        place.tail = if head + place.size % BLOCK <= BLOCK { place.size % BLOCK } else { 0 };
        let need = (head + place.tail).next_multiple_of(SLOT);
        let found = rooms.range((need, 0)..).next().copied();
        let (room, block) = found.unwrap_or((BLOCK, blocks));
        if found.is_some() {
            rooms.remove(&(room, block));
        } else {
            blocks += 1;
        }
        place.at = (block + 1) * BLOCK - room;
        if room - need >= INODE {
            rooms.insert((room - need, block));
        }
    }
    Ok(blocks)
}

/// One more name of an inode.
fn see(plan: &mut Plan, id: Id, parent: Id) -> io::Result<()> {
    let slot = plan.by_id.get_mut(id.index()).ok_or_else(|| io::Error::other("a name of an inode that is not there"))?;
    if let Some(place) = slot.and_then(|at| plan.places.get_mut(at as usize)) {
        place.names += 1;
        return Ok(());
    }
    *slot = Some(u32::try_from(plan.places.len()).map_err(|_| too_large())?);
    plan.places.push(Place { id, parent, names: 1, at: 0, size: 0, tail: 0, block: 0 });
    Ok(())
}

fn too_large() -> io::Error {
    io::Error::other("the root disk would be larger than 16 TiB")
}

fn superblock(plan: &Plan) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(SUPER_BYTES);
    let root = u16::try_from(plan.number(ROOT)?).map_err(|_| too_large())?;
    put32(&mut bytes, MAGIC);
    put32(&mut bytes, 0); // No checksum: what is read is verified as a whole before.
    put32(&mut bytes, FEATURE_MTIME);
    bytes.extend_from_slice(&[BLOCK.trailing_zeros() as u8, 0]);
    put16(&mut bytes, root);
    put64(&mut bytes, plan.places.len() as u64);
    put64(&mut bytes, 0); // Built in 1970.
    put32(&mut bytes, 0);
    put32(&mut bytes, u32::try_from(plan.blocks).map_err(|_| too_large())?);
    put32(&mut bytes, 0); // Inodes are counted from block 0.
    put32(&mut bytes, 0); // No shared extended attributes.
    bytes.extend_from_slice(&UUID);
    bytes.resize(SUPER_BYTES, 0);
    Ok(bytes)
}

/// An inode with its extended attributes.
fn inode(tree: &Tree, plan: &Plan, place: &Place) -> io::Result<Vec<u8>> {
    let Inode { attrs, kind } = tree.get(place.id);
    let xattrs = xattrs(attrs)?;
    let (kind, names) = match kind {
        // Its own `.`, its name, and the `..` of each directory in it.
        Kind::Dir(children) => {
            let dirs = children.values().filter(|id| matches!(tree.get(**id).kind, Kind::Dir(_))).count();
            (S_IFDIR, u32::try_from(dirs).map_err(|_| too_large())?.saturating_add(2))
        }
        Kind::File(_) => (S_IFREG, place.names),
        Kind::Symlink(_) => (S_IFLNK, place.names),
        Kind::Fifo => (S_IFIFO, place.names),
    };
    let layout = if place.tail > 0 { INLINE } else { PLAIN };
    // The head of the attributes is counted as one, each 4 bytes behind it as another.
    let xattr_count = if xattrs.is_empty() { 0 } else { (xattrs.len() - XATTR_HEAD) / 4 + 1 };
    let mut bytes = Vec::with_capacity(INODE as usize + xattrs.len());
    put16(&mut bytes, 1 | layout << 1);
    put16(&mut bytes, u16::try_from(xattr_count).map_err(|_| too_large())?);
    put16(&mut bytes, kind | attrs.mode & 0o7777);
    put16(&mut bytes, 0);
    put64(&mut bytes, place.size);
    put32(&mut bytes, u32::try_from(place.block).map_err(|_| too_large())?);
    put32(&mut bytes, plan.by_id[place.id.index()].unwrap_or_default() + 1);
    put32(&mut bytes, attrs.uid);
    put32(&mut bytes, attrs.gid);
    put64(&mut bytes, attrs.mtime);
    put32(&mut bytes, 0);
    put32(&mut bytes, names);
    bytes.resize(INODE as usize, 0);
    bytes.extend_from_slice(&xattrs);
    Ok(bytes)
}

/// Bytes of the head of extended attributes.
const XATTR_HEAD: usize = 12;

/// Extended attributes as they lie behind an inode: nothing, or a head and each of them, padded to 4.
fn xattrs(attrs: &Attrs) -> io::Result<Vec<u8>> {
    if attrs.xattrs.is_empty() {
        return Ok(Vec::new());
    }
    let mut bytes = vec![0; XATTR_HEAD];
    for (name, value) in &attrs.xattrs {
        let prefixes: [(u8, &[u8]); 2] = [(1, b"user."), (6, b"security.")];
        let split = prefixes.into_iter().find_map(|(index, prefix)| Some((index, name.strip_prefix(prefix)?)));
        let (index, rest) = split.ok_or_else(|| io::Error::other("an extended attribute of a kind that is not kept"))?;
        bytes.push(u8::try_from(rest.len()).map_err(|_| too_large())?);
        bytes.push(index);
        put16(&mut bytes, u16::try_from(value.len()).map_err(|_| too_large())?);
        bytes.extend_from_slice(rest);
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    Ok(bytes)
}

/// A directory's names with `.` and `..`, in the order in which they are searched.
fn directory_names(names: &BTreeMap<Vec<u8>, Id>) -> Vec<(&[u8], Option<Id>)> {
    let mut all: Vec<(&[u8], Option<Id>)> = names.iter().map(|(name, id)| (name.as_slice(), Some(*id))).collect();
    all.extend([(b".".as_slice(), None), (b"..".as_slice(), None)]);
    all.sort_unstable_by(|a, b| a.0.cmp(b.0));
    all
}

/// How names are split into blocks: the first of each block, and where the last one ends.
fn directory_blocks(names: &[(&[u8], Option<Id>)]) -> (Vec<usize>, u64) {
    let (mut firsts, mut used) = (vec![0], 0);
    for (index, (name, _)) in names.iter().enumerate() {
        let bytes = DIRENT + name.len();
        if used + bytes > BLOCK as usize {
            firsts.push(index);
            used = 0;
        }
        used += bytes;
    }
    (firsts, used as u64)
}

fn directory_size(names: &BTreeMap<Vec<u8>, Id>) -> u64 {
    let (firsts, last) = directory_blocks(&directory_names(names));
    (firsts.len() as u64 - 1) * BLOCK + last
}

/// A directory's contents.
fn directory(tree: &Tree, plan: &Plan, place: &Place, names: &BTreeMap<Vec<u8>, Id>) -> io::Result<Vec<u8>> {
    let names = directory_names(names);
    let (firsts, _) = directory_blocks(&names);
    let mut bytes = Vec::new();
    for (block, first) in firsts.iter().enumerate() {
        bytes.resize(block * BLOCK as usize, 0);
        let end = firsts.get(block + 1).copied().unwrap_or(names.len());
        let names = &names[*first..end];
        let mut name_at = DIRENT * names.len();
        for (name, id) in names {
            let id = id.unwrap_or(if *name == b"." { place.id } else { place.parent });
            put64(&mut bytes, plan.number(id)?);
            put16(&mut bytes, u16::try_from(name_at).map_err(|_| too_large())?);
            bytes.push(match tree.get(id).kind {
                Kind::File(_) => 1,
                Kind::Dir(_) => 2,
                Kind::Fifo => 5,
                Kind::Symlink(_) => 7,
            });
            bytes.push(0);
            name_at += name.len();
        }
        for (name, _) in names {
            bytes.extend_from_slice(name);
        }
    }
    Ok(bytes)
}

/// What is written so far.
struct Disk<W> {
    out: W,
    at: u64,
}

impl<W: Write> Disk<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.at += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn zeros_to(&mut self, at: u64) -> io::Result<()> {
        const ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];
        while self.at < at {
            let bytes = (at - self.at).min(BLOCK) as usize;
            self.put(&ZEROS[..bytes])?;
        }
        Ok(())
    }

    /// The bytes `from..to` of an inode's contents.
    fn contents<C: Contents>(&mut self, tree: &Tree, plan: &Plan, place: &Place, contents: &mut C, from: u64, to: u64) -> io::Result<()> {
        if from == to {
            return Ok(());
        }
        match &tree.get(place.id).kind {
            Kind::File(content) => self.copy(*content, contents, from, to),
            Kind::Dir(names) => self.put(part(&directory(tree, plan, place, names)?, from, to)?),
            Kind::Symlink(target) => self.put(part(target, from, to)?),
            Kind::Fifo => Ok(()),
        }
    }

    fn copy<C: Contents>(&mut self, content: Content, contents: &mut C, mut from: u64, to: u64) -> io::Result<()> {
        let mut buffer = vec![0; COPY_BYTES.min((to - from) as usize)];
        while from < to {
            let bytes = buffer.len().min((to - from) as usize);
            contents.read(content.layer, content.at + from, &mut buffer[..bytes])?;
            self.put(&buffer[..bytes])?;
            from += bytes as u64;
        }
        Ok(())
    }
}

fn part(bytes: &[u8], from: u64, to: u64) -> io::Result<&[u8]> {
    bytes.get(from as usize..to as usize).ok_or_else(|| io::Error::other("contents are shorter than was planned"))
}

fn put16(bytes: &mut Vec<u8>, value: u16) {
    bytes.extend_from_slice(&value.to_le_bytes());
}

fn put32(bytes: &mut Vec<u8>, value: u32) {
    bytes.extend_from_slice(&value.to_le_bytes());
}

fn put64(bytes: &mut Vec<u8>, value: u64) {
    bytes.extend_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests;
