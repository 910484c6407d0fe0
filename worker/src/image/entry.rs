//! What a layer says: one file, directory or link with its attributes, or that something of the layers below is gone.
//!
//! Owns the words and the check of names. Does not own reading them (`layer`) or what they add up to (`merge`).

use std::collections::BTreeMap;

/// Longest path of a file or target of a link, in bytes: Linux's PATH_MAX without its terminating zero.
pub const PATH_BYTES_MAX: usize = 4095;
/// Longest name in a directory, in bytes: Linux's NAME_MAX.
pub const NAME_BYTES_MAX: usize = 255;
/// Most bytes of extended attributes of one file, names included. They lie beside its inode, which may not leave its block of 4 KiB.
pub const XATTR_BYTES_MAX: usize = 1536;

/// One thing that a layer says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its path as written: relative to the root, `/` between names; not checked.
    pub path: Vec<u8>,
    /// What is there.
    pub what: What,
    /// Its attributes.
    pub attrs: Attrs,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A directory.
    Dir,
    /// A plain file: its bytes lie in the unpacked layer.
    File {
        /// Where they begin, in bytes from the layer's beginning.
        at: u64,
        /// How many.
        size: u64,
    },
    /// A symbolic link with its target.
    Symlink(Vec<u8>),
    /// Another name of the file at this path.
    HardLink(Vec<u8>),
    /// A named pipe.
    Fifo,
    /// Something that a root does not get.
    Left(Left),
}

/// Why something is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Left {
    /// A device: a guest has its own.
    Device,
    /// A socket, which is nothing without its process.
    Socket,
    /// A kind of entry that is not known here.
    Unknown,
    /// An extended attribute that is not kept; the file itself is there.
    Xattr,
}

/// Attributes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Attrs {
    /// Permissions with set-user-id, set-group-id and sticky bit: 12 bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change, in seconds since 1970. Parts of a second are dropped: archives differ in whether they have them.
    pub mtime: u64,
    /// Extended attributes by full name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Extended attributes that were not kept.
    pub xattrs_left: u32,
}

impl Attrs {
    /// Those of a directory that no layer describes.
    #[must_use]
    pub fn implied() -> Self {
        Self { mode: 0o755, ..Self::default() }
    }

    /// Keeps an extended attribute, if it is of a kind that a root holds: those of users, and capabilities of programs. Labels of
    /// security modules and what overlay file systems note for themselves mean something only where they were written.
    pub fn put_xattr(&mut self, name: &[u8], value: &[u8]) {
        let kind = name.starts_with(b"user.") && name.len() > b"user.".len() || name == b"security.capability";
        let used: usize = self.xattrs.iter().map(|(name, value)| xattr_bytes(name, value)).sum();
        if kind && name.len() <= NAME_BYTES_MAX && used + xattr_bytes(name, value) <= XATTR_BYTES_MAX {
            self.xattrs.insert(name.to_vec(), value.to_vec());
        } else {
            self.xattrs_left += 1;
        }
    }
}

/// What one extended attribute costs at most where it is stored: a head, and padding to 4.
fn xattr_bytes(name: &[u8], value: &[u8]) -> usize {
    name.len() + value.len() + 8
}

/// A name that no file can have or that leads out of the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A part of it is `..`.
    #[error("it has a part `..`")]
    Up,
    /// It has a zero byte.
    #[error("it has a zero byte")]
    Zero,
    /// It is too long.
    #[error("it is longer than {PATH_BYTES_MAX} bytes")]
    Long,
    /// A part of it is too long.
    #[error("a part of it is longer than {NAME_BYTES_MAX} bytes")]
    LongPart,
    /// It says that something is gone, but not what.
    #[error("it is a whiteout of nothing")]
    Whiteout,
}

/// The names on the way to `path`, from the root. `.` and doubled slashes mean nothing, and a leading slash is the root's.
///
/// # Errors
/// [`NameError`].
pub fn parts(path: &[u8]) -> Result<Vec<&[u8]>, NameError> {
    if path.len() > PATH_BYTES_MAX {
        return Err(NameError::Long);
    }
    if path.contains(&0) {
        return Err(NameError::Zero);
    }
    let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&b"..".as_slice()) {
        return Err(NameError::Up);
    }
    if parts.iter().any(|part| part.len() > NAME_BYTES_MAX) {
        return Err(NameError::LongPart);
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let good = |path: &str, want: &[&str]| {
            let want: Vec<&[u8]> = want.iter().map(|part| part.as_bytes()).collect();
            assert_eq!(parts(path.as_bytes()), Ok(want), "{path}");
        };
        good("", &[]);
        good("./", &[]);
        good("/etc//passwd", &["etc", "passwd"]);
        good("./a/./b/", &["a", "b"]);
        good("a/..b/...", &["a", "..b", "..."]);
        assert_eq!(parts(b"a/../b"), Err(NameError::Up));
        assert_eq!(parts(b"/.."), Err(NameError::Up));
        assert_eq!(parts(b"a\0b"), Err(NameError::Zero));
        assert_eq!(parts(&[b'x'; 256]), Err(NameError::LongPart));
        assert_eq!(parts(&b"x/".repeat(2048)), Err(NameError::Long));
    }

    #[test]
    fn extended_attributes() {
        let mut attrs = Attrs::default();
        for (name, size) in
            [("user.a", 3), ("security.capability", 20), ("security.selinux", 3), ("trusted.overlay.opaque", 1), ("user.", 1)]
        {
            attrs.put_xattr(name.as_bytes(), &vec![7; size]);
        }
        attrs.put_xattr(b"user.big", &[0; XATTR_BYTES_MAX]);
        assert_eq!(attrs.xattrs.len(), 2);
        assert_eq!(attrs.xattrs_left, 4);
    }
}
