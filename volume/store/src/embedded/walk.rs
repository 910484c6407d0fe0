//! Listings: a bucket's tree → keys in byte order, from any point, with bounded memory.
//!
//! Owns order, prefix, delimiter and truncation. Blocking. A page costs one scan of each directory on the
//! way (names only, the smallest kept in a heap as large as the page), so listing a directory of a million
//! names from end to end is quadratic in pages: fine for `volley up`, not for a large cluster's bucket.

use std::collections::BinaryHeap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::disk::is_missing;
use super::layout::{self, Name, SEGMENT_FILE, Segment};
use super::object_file::{self, Trailer};

/// Names kept per scan of a directory, at most: bounds memory whatever page size a client asks for.
const SCAN_MAX: usize = 1001;

/// What is asked of a listing.
#[derive(Clone, Debug, Default)]
pub(super) struct Query {
    /// Keys begin with this.
    pub(super) prefix: Vec<u8>,
    /// Keys (and groups) come after this.
    pub(super) after: After,
    /// Keys with this past the prefix are grouped by what precedes it, itself included.
    pub(super) delimiter: Option<Vec<u8>>,
    /// Keys and groups together, at most.
    pub(super) limit: usize,
}

/// Where a listing goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum After {
    #[default]
    Start,
    /// After this key.
    Key(Vec<u8>),
    /// After every key that begins so.
    Group(Vec<u8>),
}

impl After {
    fn passed(&self, key: &[u8]) -> bool {
        match self {
            Self::Start => false,
            Self::Key(after) => key <= after.as_slice(),
            Self::Group(group) => key <= group.as_slice() || key.starts_with(group),
        }
    }

    /// Whether every key below directory `dir` (ending in `/`) is passed.
    fn passed_all(&self, dir: &[u8]) -> bool {
        match self {
            Self::Start => false,
            Self::Key(after) => dir < after.as_slice() && !after.starts_with(dir),
            Self::Group(group) => dir.starts_with(group) || (dir < group.as_slice() && !group.starts_with(dir)),
        }
    }
}

/// One page.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) objects: Vec<Trailer>,
    pub(super) groups: Vec<Vec<u8>>,
    /// Where the next page goes on; `None` at the end.
    pub(super) next: Option<After>,
}

/// Lists a bucket.
pub(super) fn list(bucket: &Path, query: &Query) -> io::Result<Page> {
    let mut walk = Walk { query, page: Page::default(), last: After::Start };
    if query.limit > 0 {
        let (dir, base) = layout::directory_of(bucket, &query.prefix);
        walk.directory(&dir, &base)?;
    }
    Ok(walk.page)
}

/// Whether there is an object anywhere below `dir`.
pub(super) fn has_object(dir: &Path) -> io::Result<bool> {
    for entry in read_dir(dir)? {
        let entry = entry?;
        match entry.file_name().to_str().map(layout::read_name) {
            Some(Name::Object(_)) => return Ok(true),
            Some(Name::Directory(_)) if has_object(&entry.path())? => return Ok(true),
            _ => {}
        }
    }
    Ok(false)
}

/// A child of a directory, by what it sorts by: its key for an object, its keys' common beginning (with the `/`)
/// for a directory. Only an object's segment lacks the `/`, so no two are equal and the order is that of the keys below.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Child {
    key: Vec<u8>,
    is_directory: bool,
    path: PathBuf,
}

#[derive(PartialEq, Eq)]
enum Flow {
    On,
    Full,
}

struct Walk<'a> {
    query: &'a Query,
    page: Page,
    /// The last thing put on the page.
    last: After,
}

impl Walk<'_> {
    fn directory(&mut self, dir: &Path, base: &[u8]) -> io::Result<Flow> {
        let mut from: Option<Vec<u8>> = None;
        loop {
            let (children, more) = self.children(dir, base, from.as_deref())?;
            for child in &children {
                let flow = if child.is_directory { self.below(child)? } else { self.object(child)? };
                if flow == Flow::Full {
                    return Ok(Flow::Full);
                }
            }
            match children.into_iter().next_back() {
                Some(last) if more => from = Some(last.key),
                _ => return Ok(Flow::On),
            }
        }
    }

    /// The smallest children after `from` that can matter, in order, and whether there are more.
    fn children(&self, dir: &Path, base: &[u8], from: Option<&[u8]>) -> io::Result<(Vec<Child>, bool)> {
        let room = self.query.limit.saturating_sub(self.taken()).saturating_add(1).min(SCAN_MAX);
        let mut smallest = BinaryHeap::new();
        let mut more = false;
        for entry in read_dir(dir)? {
            let entry = entry?;
            let Some(child) = child(base, &entry)? else { continue };
            if from.is_some_and(|from| child.key.as_slice() <= from) || !self.matters(&child) {
                continue;
            }
            smallest.push(child);
            if smallest.len() > room {
                smallest.pop();
                more = true;
            }
        }
        Ok((smallest.into_sorted_vec(), more))
    }

    fn matters(&self, child: &Child) -> bool {
        let prefix = &self.query.prefix;
        let key = &child.key;
        if child.is_directory {
            (key.starts_with(prefix) || prefix.starts_with(key)) && !self.query.after.passed_all(key)
        } else {
            key.starts_with(prefix) && !self.query.after.passed(key)
        }
    }

    fn below(&mut self, child: &Child) -> io::Result<Flow> {
        // A directory past the prefix is one group: no need to look at what is in it, only that something is.
        let grouped = self.query.delimiter.as_deref() == Some(b"/")
            && child.key.len() > self.query.prefix.len()
            && child.key.starts_with(&self.query.prefix);
        if !grouped {
            return self.directory(&child.path, &child.key);
        }
        let begun = matches!(&self.query.after, After::Key(after) if after.starts_with(&child.key));
        // The listing begins inside this group: only keys after the beginning count.
        let any = if begun { self.any_after(child)? } else { has_object(&child.path)? };
        if any { Ok(self.group(child.key.clone())) } else { Ok(Flow::On) }
    }

    fn any_after(&self, child: &Child) -> io::Result<bool> {
        let query = Query { prefix: child.key.clone(), after: self.query.after.clone(), delimiter: None, limit: 1 };
        let mut walk = Walk { query: &query, page: Page::default(), last: After::Start };
        walk.directory(&child.path, &child.key)?;
        Ok(!walk.page.objects.is_empty())
    }

    fn object(&mut self, child: &Child) -> io::Result<Flow> {
        if let Some(group) = self.group_of(&child.key) {
            return Ok(self.group(group));
        }
        let trailer = match File::open(&child.path) {
            Ok(file) => object_file::read_trailer(&file)?,
            // Deleted since the directory was read.
            Err(error) if is_missing(&error) => return Ok(Flow::On),
            Err(error) => return Err(error),
        };
        if self.is_full() {
            return Ok(Flow::Full);
        }
        self.last = After::Key(child.key.clone());
        self.page.objects.push(trailer);
        Ok(Flow::On)
    }

    fn group_of(&self, key: &[u8]) -> Option<Vec<u8>> {
        let delimiter = self.query.delimiter.as_deref().filter(|delimiter| !delimiter.is_empty())?;
        let start = self.query.prefix.len();
        let at = key.get(start..)?.windows(delimiter.len()).position(|window| window == delimiter)?;
        Some(key[..start + at + delimiter.len()].to_vec())
    }

    fn group(&mut self, group: Vec<u8>) -> Flow {
        if self.page.groups.last() == Some(&group) {
            return Flow::On;
        }
        if self.is_full() {
            return Flow::Full;
        }
        self.last = After::Group(group.clone());
        self.page.groups.push(group);
        Flow::On
    }

    fn taken(&self) -> usize {
        self.page.objects.len() + self.page.groups.len()
    }

    /// Asked when there is one more to put on the page.
    fn is_full(&mut self) -> bool {
        let full = self.taken() >= self.query.limit;
        if full {
            self.page.next = Some(self.last.clone());
        }
        full
    }
}

fn child(base: &[u8], entry: &fs::DirEntry) -> io::Result<Option<Child>> {
    let name = entry.file_name();
    let (segment, is_directory) = match name.to_str().map(layout::read_name) {
        Some(Name::Object(segment)) => (segment, false),
        Some(Name::Directory(segment)) => (segment, true),
        Some(Name::Other) | None => return Ok(None),
    };
    let path = entry.path();
    let mut key = base.to_vec();
    match segment {
        Segment::Plain(bytes) => key.extend(bytes),
        Segment::Hashed if is_directory => match fs::read(path.join(SEGMENT_FILE)) {
            Ok(bytes) => key.extend(bytes),
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(error),
        },
        Segment::Hashed => match File::open(&path) {
            Ok(file) => key = object_file::read_trailer(&file)?.key.into_bytes(),
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(error),
        },
    }
    if is_directory {
        key.push(b'/');
    }
    Ok(Some(Child { key, is_directory, path }))
}

/// The entries of a directory; none if it is not there.
fn read_dir(dir: &Path) -> io::Result<impl Iterator<Item = io::Result<fs::DirEntry>> + use<>> {
    match fs::read_dir(dir) {
        Ok(entries) => Ok(Some(entries).into_iter().flatten()),
        Err(error) if is_missing(&error) => Ok(None.into_iter().flatten()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::embedded::disk::{Condition, Disk};

    fn put(disk: &Disk, key: &str) {
        let trailer =
            Trailer { key: key.to_owned(), bytes: 0, etag: "e".to_owned(), modified_ms: 0, content_type: None, metadata: BTreeMap::new() };
        disk.commit(disk.temp_file().unwrap(), "bucket", &trailer, &Condition::default()).unwrap();
    }

    /// The rule, on a sorted list of keys.
    fn model(keys: &[String], query: &Query) -> (Vec<Vec<u8>>, Vec<Vec<u8>>, bool) {
        let (mut objects, mut groups): (Vec<Vec<u8>>, Vec<Vec<u8>>) = (Vec::new(), Vec::new());
        for key in keys.iter().map(|key| key.as_bytes()) {
            if !key.starts_with(&query.prefix) || query.after.passed(key) {
                continue;
            }
            let group = query.delimiter.as_deref().and_then(|delimiter| {
                let at = key[query.prefix.len()..].windows(delimiter.len()).position(|window| window == delimiter)?;
                Some(key[..query.prefix.len() + at + delimiter.len()].to_vec())
            });
            if group.is_some() && groups.last() == group.as_ref() {
                continue;
            }
            if objects.len() + groups.len() == query.limit {
                return (objects, groups, true);
            }
            match group {
                Some(group) => groups.push(group),
                None => objects.push(key.to_vec()),
            }
        }
        (objects, groups, false)
    }

    fn key() -> impl Strategy<Value = String> {
        // Characters on both sides of `/`, ones that are encoded, and a segment too long for a file name.
        let segment = prop_oneof![
            6 => "[ab!0~.é]{0,3}",
            1 => Just("x".repeat(250)),
            1 => Just("é".repeat(70)),
        ];
        prop::collection::vec(segment, 1..4).prop_map(|segments| segments.join("/")).prop_filter("not empty", |key| !key.is_empty())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn listings_agree_with_a_sorted_list(
            keys in prop::collection::btree_set(key(), 0..24),
            gone in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
            prefix in prop_oneof![3 => Just(String::new()), 2 => "[ab]/?", 1 => key()],
            after in prop_oneof![Just(None), key().prop_map(Some)],
            delimiter in prop_oneof![2 => Just(None), 3 => Just(Some("/")), 1 => Just(Some("b"))],
            limit in 1_usize..8,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let disk = Disk::open(dir.path().to_owned(), 0).unwrap();
            disk.create_bucket("bucket").unwrap();
            keys.iter().for_each(|key| put(&disk, key));
            let mut keys: Vec<String> = keys.into_iter().collect();
            for index in gone {
                if !keys.is_empty() {
                    let key = keys.remove(index.index(keys.len()));
                    disk.delete("bucket", &key, &Condition::default()).unwrap();
                }
            }
            let mut query = Query {
                prefix: prefix.into_bytes(),
                after: after.map_or(After::Start, |after| After::Key(after.into_bytes())),
                delimiter: delimiter.map(|delimiter| delimiter.as_bytes().to_vec()),
                limit,
            };
            for _page in 0..100 {
                let page = list(&disk.bucket_dir("bucket"), &query).unwrap();
                let objects: Vec<Vec<u8>> = page.objects.into_iter().map(|object| object.key.into_bytes()).collect();
                prop_assert_eq!((objects, page.groups, page.next.is_some()), model(&keys, &query));
                match page.next {
                    Some(next) => query.after = next,
                    None => return Ok(()),
                }
            }
            prop_assert!(false, "the listing never ends");
        }
    }
}
