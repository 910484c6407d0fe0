//! Keys ↔ paths: one directory per `/`-separated segment, so that a listing walks only what it needs.
//!
//! Owns the encoding, which is pure. A key's last segment is a file `<segment>.o`, the others are
//! directories `<segment>.d`; so `a` and `a/b` live side by side, empty segments have names, and no
//! segment (`..` included) can name a path outside. Bytes other than letters, digits, `-`, `_` and `.`
//! are `%XX`. A segment whose encoding would pass a file name's length is `~<hash>`; a directory so
//! named keeps its segment in a file inside, a file so named in its trailer.

use std::path::{Path, PathBuf};

/// Encoded names longer than this are hashed: file systems allow 255 bytes, and a suffix follows.
const NAME_BYTES_MAX: usize = 200;
/// Suffix of an object's file.
pub(super) const OBJECT: &str = ".o";
/// Suffix of a segment's directory.
pub(super) const DIRECTORY: &str = ".d";
/// File in a hashed directory that holds its segment.
pub(super) const SEGMENT_FILE: &str = "~segment";

/// What a name in a bucket's tree stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// An object whose last segment this is.
    Object(Segment),
    /// A directory for this segment.
    Directory(Segment),
    /// Not ours, or [`SEGMENT_FILE`].
    Other,
}

/// A segment as its name tells it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// Its bytes.
    Plain(Vec<u8>),
    /// The name is a hash; the bytes are stored elsewhere.
    Hashed,
}

/// The file of an object, under its bucket's directory.
pub(super) fn object_path(bucket: &Path, key: &str) -> PathBuf {
    let (directories, last) = match key.rsplit_once('/') {
        Some((directories, last)) => (Some(directories), last),
        None => (None, key),
    };
    let mut path = bucket.to_owned();
    for segment in directories.into_iter().flat_map(|text| text.split('/')) {
        path.push(directory_name(segment.as_bytes()));
    }
    path.push(encode(last.as_bytes()) + OBJECT);
    path
}

/// The directory that holds every key beginning with `prefix`, and the part of the prefix that it stands for.
pub(super) fn directory_of(bucket: &Path, prefix: &[u8]) -> (PathBuf, Vec<u8>) {
    let end = prefix.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    let base = &prefix[..end];
    let mut path = bucket.to_owned();
    for segment in base.split(|byte| *byte == b'/').take(base.iter().filter(|byte| **byte == b'/').count()) {
        path.push(directory_name(segment));
    }
    (path, base.to_vec())
}

pub(super) fn directory_name(segment: &[u8]) -> String {
    encode(segment) + DIRECTORY
}

/// Whether a directory's name is a hash, and so needs a [`SEGMENT_FILE`].
pub(super) fn is_hashed(name: &str) -> bool {
    name.starts_with('~')
}

fn encode(segment: &[u8]) -> String {
    let mut name = String::with_capacity(segment.len());
    for byte in segment {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => name.push(char::from(*byte)),
            other => {
                name.push('%');
                name.push_str(&hex::encode_upper([*other]));
            }
        }
    }
    if name.len() > NAME_BYTES_MAX {
        return format!("~{}", blake3::hash(segment).to_hex());
    }
    name
}

/// Reads a name of the tree.
pub(super) fn read_name(name: &str) -> Name {
    let (stem, directory) = match (name.strip_suffix(OBJECT), name.strip_suffix(DIRECTORY)) {
        (Some(stem), _) => (stem, false),
        (None, Some(stem)) => (stem, true),
        (None, None) => return Name::Other,
    };
    let segment = match decode(stem) {
        Some(segment) => segment,
        None => return Name::Other,
    };
    if directory { Name::Directory(segment) } else { Name::Object(segment) }
}

fn decode(stem: &str) -> Option<Segment> {
    if is_hashed(stem) {
        return Some(Segment::Hashed);
    }
    let mut bytes = Vec::with_capacity(stem.len());
    let mut rest = stem.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        if *byte == b'%' {
            let (code, after) = after.split_at_checked(2)?;
            bytes.extend(hex::decode(code).ok()?);
            rest = after;
        } else {
            bytes.push(*byte);
            rest = after;
        }
    }
    Some(Segment::Plain(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside_and_differ() {
        let bucket = Path::new("/b");
        let at = |key: &str| object_path(bucket, key).display().to_string();
        assert_eq!(at("a"), "/b/a.o");
        assert_eq!(at("a/b"), "/b/a.d/b.o");
        assert_eq!(at("a/"), "/b/a.d/.o");
        assert_eq!(at("/a//b"), "/b/.d/a.d/.d/b.o");
        assert_eq!(at("../.."), "/b/...d/...o");
        assert_eq!(at("a b~%"), "/b/a%20b%7E%25.o");
        assert!(at(&"x".repeat(1000)).len() < 80);
    }

    #[test]
    fn names_read_back() {
        for segment in ["", "a", "..", "a b", "é/%"] {
            let name = encode(segment.as_bytes());
            assert_eq!(read_name(&(name.clone() + OBJECT)), Name::Object(Segment::Plain(segment.into())));
            assert_eq!(read_name(&(name + DIRECTORY)), Name::Directory(Segment::Plain(segment.into())));
        }
        assert_eq!(read_name(&directory_name(&[b'x'; 300])), Name::Directory(Segment::Hashed));
        assert_eq!(read_name(SEGMENT_FILE), Name::Other);
    }

    #[test]
    fn a_prefix_leads_to_its_directory() {
        let at = |prefix: &str| {
            let (path, base) = directory_of(Path::new("/b"), prefix.as_bytes());
            (path.display().to_string(), String::from_utf8(base).unwrap())
        };
        assert_eq!(at(""), ("/b".into(), "".into()));
        assert_eq!(at("jo"), ("/b".into(), "".into()));
        assert_eq!(at("jobs/1/x"), ("/b/jobs.d/1.d".into(), "jobs/1/".into()));
        assert_eq!(at("/"), ("/b/.d".into(), "/".into()));
    }
}
