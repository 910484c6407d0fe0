//! Layers added up to one tree, as the OCI image specification says: <https://github.com/opencontainers/image-spec/blob/main/layer.md>.
//!
//! Owns what an entry does to the tree: whiteouts first, then what is added; directories that meet, links, names that must not be.
//! Pure: names of an image are never names on this machine, so nothing can lead out of the root. Does not own reading layers (`layer`)
//! or writing the tree (`erofs`).

use std::collections::BTreeMap;

use super::entry::{Attrs, Entry, Left, NAME_BYTES_MAX, NameError, PATH_BYTES_MAX, What, parts};

/// Most inodes that an image may make in all its layers. The largest images known have a few hundred thousand files.
pub const INODES_MAX: usize = 2 << 20;
/// Most symbolic links followed on one way, as in Linux.
const LINKS_MAX: usize = 40;
/// Most names walked for a whole image. A million files twenty deep need a third of it; chains of links made for it could need days.
const STEPS_MAX: u64 = 64 << 20;
/// Most names told of what was left out. The rest is a number.
const LEFT_NAMES_MAX: usize = 20;
/// How names begin that say: what has the rest of this name is gone.
const WHITEOUT: &[u8] = b".wh.";
/// The whiteout of all that lower layers have in a directory.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// How a storage driver's own notes begin; they are no files.
const NOTES: &[u8] = b".wh..wh.";

/// An inode of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id(u32);

/// The root's.
pub const ROOT: Id = Id(0);

impl Id {
    /// Its place in a list with one place for each of [`Tree::count`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a file's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Content {
    /// In which layer, from 0.
    pub layer: usize,
    /// From where on, in bytes.
    pub at: u64,
    /// How many.
    pub size: u64,
}

/// What an inode is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A directory, with its names in the order of their bytes.
    Dir(BTreeMap<Vec<u8>, Id>),
    /// A plain file.
    File(Content),
    /// A symbolic link, with its target.
    Symlink(Vec<u8>),
    /// A named pipe.
    Fifo,
}

/// A file, directory or link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inode {
    /// What it is.
    pub kind: Kind,
    /// Its attributes.
    pub attrs: Attrs,
}

/// What lies in a root. Only what can be reached from [`ROOT`] belongs to it.
#[derive(Debug, Clone)]
pub struct Tree {
    inodes: Vec<Inode>,
}

impl Tree {
    /// The inode of an id, which must be of this tree.
    #[must_use]
    pub fn get(&self, id: Id) -> &Inode {
        &self.inodes[id.index()]
    }

    /// Inodes ever made, the unreachable ones included.
    #[must_use]
    pub fn count(&self) -> usize {
        self.inodes.len()
    }
}

/// What was left out of a root.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct LeftOut {
    /// How many of each kind.
    pub counts: BTreeMap<Left, u64>,
    /// The first of their paths.
    pub names: Vec<String>,
}

impl LeftOut {
    fn add(&mut self, kind: Left, count: u64, path: &[u8]) {
        *self.counts.entry(kind).or_default() += count;
        if self.names.len() < LEFT_NAMES_MAX {
            self.names.push(shown(path));
        }
    }
}

/// An entry that can't be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// Its name can't be.
    #[error("the image has a file named {path:?}: {source}; it was not made by a usual tool")]
    Name {
        /// The name.
        path: String,
        /// What is wrong with it.
        source: NameError,
    },
    /// Something on the way to it is no directory.
    #[error("the image has {path:?}, but something on the way to it is no directory")]
    NotDirectory {
        /// The entry's path.
        path: String,
    },
    /// Too many symbolic links on the way.
    #[error("the image has {path:?}, with more than {LINKS_MAX} symbolic links on the way to it")]
    Links {
        /// The entry's path.
        path: String,
    },
    /// The target of a symbolic link can't be.
    #[error("the image has a symbolic link {path:?} whose target is empty, too long or has a zero byte")]
    Link {
        /// The link's path.
        path: String,
    },
    /// A hard link to something that is not there, or to a directory.
    #[error("the image has {path:?} as a hard link to {target:?}, which is no file of it")]
    Target {
        /// The entry's path.
        path: String,
        /// What it links to.
        target: String,
    },
    /// The root is something else than a directory.
    #[error("the image says that its root is no directory")]
    Root,
    /// Too many files.
    #[error("the image makes more than {max} files and directories; make it smaller")]
    TooMany {
        /// The most there may be.
        max: usize,
    },
    /// Too long ways.
    #[error("the ways to the image's files are too long together (more than {STEPS_MAX} names)")]
    TooLong,
}

/// A path for people, cut to what a line can hold.
#[must_use]
pub fn shown(path: &[u8]) -> String {
    const BYTES: usize = 200;
    let mut text = String::from_utf8_lossy(&path[..path.len().min(BYTES)]).into_owned();
    if path.len() > BYTES {
        text.push('…');
    }
    text
}

/// A tree that grows by layers.
#[derive(Debug)]
pub struct Merge {
    tree: Tree,
    left: LeftOut,
    inodes_max: usize,
    steps: u64,
}

impl Merge {
    /// An empty root, to grow to at most `inodes_max` inodes.
    #[must_use]
    pub fn new(inodes_max: usize) -> Self {
        let root = Inode { kind: Kind::Dir(BTreeMap::new()), attrs: Attrs::implied() };
        Self { tree: Tree { inodes: vec![root] }, left: LeftOut::default(), inodes_max, steps: 0 }
    }

    /// The result, and what it doesn't have.
    #[must_use]
    pub fn finish(self) -> (Tree, LeftOut) {
        (self.tree, self.left)
    }

    /// Adds a layer, the `layer`-th from 0, on top.
    ///
    /// # Errors
    /// [`MergeError`]; the tree is of no use then.
    pub fn layer(&mut self, layer: usize, entries: Vec<Entry>) -> Result<(), MergeError> {
        // A whiteout hides what lies below its layer, wherever it stands in it.
        for entry in &entries {
            if is_whiteout(&entry.path) {
                self.whiteout(&entry.path)?;
            }
        }
        for entry in entries {
            if !is_whiteout(&entry.path) {
                self.add(layer, entry)?;
            }
        }
        Ok(())
    }

    fn whiteout(&mut self, path: &[u8]) -> Result<(), MergeError> {
        let bad = |source| MergeError::Name { path: shown(path), source };
        let parts = parts(path).map_err(bad)?;
        let Some((mark, way)) = parts.split_last() else { return Ok(()) };
        let gone = mark.strip_prefix(WHITEOUT).unwrap_or_default();
        if matches!(gone, b"" | b"." | b"..") {
            return Err(bad(NameError::Whiteout));
        }
        let dir = match self.dir(path, way, false) {
            Ok(Some(dir)) => dir,
            // What is not there is hidden well.
            Ok(None) | Err(MergeError::NotDirectory { .. }) => return Ok(()),
            Err(why) => return Err(why),
        };
        if let Kind::Dir(names) = &mut self.tree.inodes[dir.index()].kind {
            if *mark == OPAQUE {
                names.clear();
            } else if !mark.starts_with(NOTES) {
                names.remove(gone);
            }
        }
        Ok(())
    }

    fn add(&mut self, layer: usize, entry: Entry) -> Result<(), MergeError> {
        let Entry { path, what, attrs } = entry;
        let parts = parts(&path).map_err(|source| MergeError::Name { path: shown(&path), source })?;
        if attrs.xattrs_left > 0 {
            self.left.add(Left::Xattr, u64::from(attrs.xattrs_left), &path);
        }
        let Some((name, way)) = parts.split_last() else {
            return match what {
                What::Dir => {
                    self.tree.inodes[ROOT.index()].attrs = attrs;
                    Ok(())
                }
                _ => Err(MergeError::Root),
            };
        };
        let kind = match what {
            What::Left(why) => {
                self.left.add(why, 1, &path);
                // It would have stood in the place of what was there.
                if let Some(dir) = self.dir(&path, way, false)? {
                    self.unlink(dir, name);
                }
                return Ok(());
            }
            What::HardLink(target) => return self.hard_link(&path, &target),
            What::Dir => Kind::Dir(BTreeMap::new()),
            What::File { at, size } => Kind::File(Content { layer, at, size }),
            What::Symlink(target) => {
                if target.is_empty() || target.len() > PATH_BYTES_MAX || target.contains(&0) {
                    return Err(MergeError::Link { path: shown(&path) });
                }
                Kind::Symlink(target)
            }
            What::Fifo => Kind::Fifo,
        };
        let dir = self.way(&path, way)?;
        if let (Kind::Dir(_), Some(old)) = (&kind, self.child(dir, name)) {
            let old = &mut self.tree.inodes[old.index()];
            if matches!(old.kind, Kind::Dir(_)) {
                old.attrs = attrs;
                return Ok(());
            }
        }
        let id = self.make(kind, attrs)?;
        self.link(dir, name, id);
        Ok(())
    }

    fn hard_link(&mut self, path: &[u8], target: &[u8]) -> Result<(), MergeError> {
        let none = || MergeError::Target { path: shown(path), target: shown(target) };
        let parts_of = |path: &[u8]| -> Result<Vec<Vec<u8>>, MergeError> {
            let parts = parts(path).map_err(|source| MergeError::Name { path: shown(path), source })?;
            Ok(parts.into_iter().map(<[u8]>::to_vec).collect())
        };
        let (to, from) = (parts_of(target)?, parts_of(path)?);
        let (to, from): (Vec<&[u8]>, Vec<&[u8]>) = (to.iter().map(Vec::as_slice).collect(), from.iter().map(Vec::as_slice).collect());
        let (Some((to_name, to_way)), Some((name, way))) = (to.split_last(), from.split_last()) else { return Err(none()) };
        let found = match self.dir(path, to_way, false) {
            Ok(dir) => dir.and_then(|dir| self.child(dir, to_name)),
            Err(MergeError::NotDirectory { .. }) => None,
            Err(why) => return Err(why),
        };
        let id = found.filter(|id| !matches!(self.tree.get(*id).kind, Kind::Dir(_))).ok_or_else(none)?;
        let dir = self.way(path, way)?;
        self.link(dir, name, id);
        Ok(())
    }

    /// The directory at the end of `way`; what is missing on it is made.
    fn way(&mut self, path: &[u8], way: &[&[u8]]) -> Result<Id, MergeError> {
        // With `make` there is always one.
        self.dir(path, way, true)?.ok_or_else(|| MergeError::NotDirectory { path: shown(path) })
    }

    /// The directory at the end of `way`, which belongs to the entry at `path`. Symbolic links on it are followed inside the tree: its
    /// root is the root, and `..` leads no further. With `make`, what is missing is made.
    fn dir(&mut self, path: &[u8], way: &[&[u8]], make: bool) -> Result<Option<Id>, MergeError> {
        let mut stack = vec![ROOT];
        let mut left: Vec<Vec<u8>> = way.iter().rev().map(|part| part.to_vec()).collect();
        let mut links = 0;
        while let Some(name) = left.pop() {
            self.steps += 1;
            if self.steps > STEPS_MAX {
                return Err(MergeError::TooLong);
            }
            let here = stack.last().copied().unwrap_or(ROOT);
            if name == b".." {
                if stack.len() > 1 {
                    stack.pop();
                }
                continue;
            }
            let Some(next) = self.child(here, &name) else {
                if !make {
                    return Ok(None);
                }
                // A name out of a link was not checked with the entry's.
                if name.len() > NAME_BYTES_MAX {
                    return Err(MergeError::Name { path: shown(path), source: NameError::LongPart });
                }
                let made = self.make(Kind::Dir(BTreeMap::new()), Attrs::implied())?;
                self.link(here, &name, made);
                stack.push(made);
                continue;
            };
            match &self.tree.get(next).kind {
                Kind::Dir(_) => stack.push(next),
                Kind::Symlink(target) => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(MergeError::Links { path: shown(path) });
                    }
                    if target.starts_with(b"/") {
                        stack.truncate(1);
                    }
                    let parts = target.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
                    left.extend(parts.rev().map(<[u8]>::to_vec));
                }
                Kind::File(_) | Kind::Fifo => return Err(MergeError::NotDirectory { path: shown(path) }),
            }
        }
        Ok(stack.last().copied())
    }

    fn child(&self, dir: Id, name: &[u8]) -> Option<Id> {
        match &self.tree.get(dir).kind {
            Kind::Dir(names) => names.get(name).copied(),
            Kind::File(_) | Kind::Symlink(_) | Kind::Fifo => None,
        }
    }

    fn make(&mut self, kind: Kind, attrs: Attrs) -> Result<Id, MergeError> {
        let too_many = MergeError::TooMany { max: self.inodes_max };
        if self.tree.inodes.len() >= self.inodes_max {
            return Err(too_many);
        }
        let id = Id(u32::try_from(self.tree.inodes.len()).map_err(|_| too_many)?);
        self.tree.inodes.push(Inode { kind, attrs });
        Ok(id)
    }

    /// Puts `id` at `name`, whatever was there.
    fn link(&mut self, dir: Id, name: &[u8], id: Id) {
        if let Kind::Dir(names) = &mut self.tree.inodes[dir.index()].kind {
            names.insert(name.to_vec(), id);
        }
    }

    fn unlink(&mut self, dir: Id, name: &[u8]) {
        if let Kind::Dir(names) = &mut self.tree.inodes[dir.index()].kind {
            names.remove(name);
        }
    }
}

fn is_whiteout(path: &[u8]) -> bool {
    let mut names = path.rsplit(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".");
    names.next().is_some_and(|name| name.starts_with(WHITEOUT))
}

#[cfg(test)]
mod tests;
