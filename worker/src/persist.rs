//! Stage *persist*: what a command left, into the bucket under the attempt's own prefix.
//!
//! Owns finding outputs, the small result, the order (files, logs, then the list of files) and what is said of each. A task that left
//! nothing costs no request. Does not own retries (`io/objects`).

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use serde::Serialize;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::AttemptName;
use volley_jobspecs::keys;
use volley_jobspecs::wire::report::{Outputs, RESULT_BYTES_MAX, Stream};

use crate::beneath;
use crate::capture::Capture;
use crate::dirs::Dirs;
use crate::ports::{ObjectError, Objects};

/// Most output files of one attempt: their list is read whole.
const FILES_MAX: usize = 100_000;
/// Deepest value of a result. Readers commonly stop at 128 levels, and the result is itself within a row, and that in a page.
const RESULT_DEPTH_MAX: usize = 100;
/// Deepest directory below the output directory.
const DEPTH_MAX: usize = 64;
/// Longest path of an output, in bytes: with the attempt's prefix it must fit the 1,024 of an S3 key.
const PATH_BYTES_MAX: usize = 880;
/// Files uploaded at once for one attempt.
const UPLOADS_AT_ONCE: usize = 4;
/// Skipped entries named in the message; the others are counted.
const SKIPPED_NAMED: usize = 5;
/// The file whose content rides in the report.
const RESULT_FILE: &str = "result.json";

/// Why something is not kept.
#[derive(Debug, thiserror::Error)]
pub enum PersistError {
    /// The bucket doesn't take it.
    #[error("keeping {what}: {source}")]
    Storage {
        /// What.
        what: String,
        /// Why.
        source: ObjectError,
    },
    /// The output directory can't be read.
    #[error("reading outputs at {}: {source}", .path.display())]
    Read {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// They do not get out of their machine.
    #[error("fetching outputs from the machine: {why}")]
    Machine {
        /// What it means for a task that ended well.
        class: FailureClass,
        /// Why.
        why: String,
    },
    /// What a task wrote in its machine did not reach the host's disk, so that nothing it left can be relied on.
    #[error("{} of the machine's disk failed on the host; the worker's disk is full or broken", volley_jobspecs::units::counted(*count, "operation", "operations"))]
    Disk {
        /// Reads, writes and flushes that failed.
        count: u64,
    },
    /// There are too many.
    #[error("more than {FILES_MAX} output files; pack them into an archive")]
    TooMany,
}

/// What is kept of an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Kept {
    /// The small result.
    pub result: Option<Vec<u8>>,
    /// Stdout.
    pub stdout: Option<Stream>,
    /// Stderr.
    pub stderr: Option<Stream>,
    /// Output files.
    pub outputs: Option<Outputs>,
    /// What was not kept, and why; for people.
    pub notes: Vec<String>,
}

/// A directory of a task, held open: whatever is put in its place, what is found is what was in it.
#[derive(Debug)]
struct Root {
    dir: OwnedFd,
    path: PathBuf,
    owner: Option<(u32, u32)>,
}

impl Root {
    /// None when it isn't there: the task removed it.
    fn open(path: PathBuf, owner: Option<(u32, u32)>) -> Result<Option<Arc<Self>>, PersistError> {
        match beneath::root(&path) {
            Ok(dir) => Ok(Some(Arc::new(Self { dir, path, owner }))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(PersistError::Read { path, source }),
        }
    }

    fn failed(&self, below: &Path, source: io::Error) -> PersistError {
        PersistError::Read { path: self.path.join(below), source }
    }
}

/// A file that was found.
#[derive(Debug, Clone)]
struct Place {
    root: Arc<Root>,
    path: PathBuf,
}

impl Place {
    fn open(&self) -> io::Result<File> {
        beneath::open_plain(&self.root.dir, &self.path, self.root.owner)
    }
}

type Files = Vec<(String, Place)>;

/// What a command left, found but not yet kept.
#[derive(Debug, Default)]
pub struct Left {
    kept: Kept,
    files: Files,
    logs: Vec<(&'static str, Vec<u8>)>,
}

impl Left {
    /// With something more to be said.
    #[must_use]
    pub fn with_note(mut self, note: Option<String>) -> Self {
        self.kept.notes.extend(note);
        self
    }

    /// Does keeping it take any request?
    #[must_use]
    pub fn wants_storage(&self) -> bool {
        !self.files.is_empty() || !self.logs.is_empty()
    }

    /// Is there a file to keep in a directory of the task's?
    #[must_use]
    pub fn lies_in(&self, dir: &Path) -> bool {
        self.files.iter().any(|(_, place)| place.root.path == dir)
    }

    /// Everything that rides inline, for when the rest can't be kept.
    #[must_use]
    pub fn inline_only(mut self) -> Kept {
        for stream in [&mut self.kept.stdout, &mut self.kept.stderr].into_iter().flatten() {
            // Only the tail is left of it.
            stream.truncated |= stream.stored;
            stream.stored = false;
        }
        self.kept
    }

    /// A copy of what rides inline.
    #[must_use]
    pub fn inline(&self) -> Self {
        Self { kept: self.kept.clone(), files: Vec::new(), logs: Vec::new() }
    }
}

#[derive(Serialize)]
struct Entry {
    path: String,
    bytes: u64,
    sha256: String,
}

/// Finds what a command left in its directories and on its streams. Everything it started must be dead, so that nothing changes under
/// our hands.
///
/// # Errors
/// [`PersistError`].
pub fn find(dirs: &Dirs, declared: &[String], stdout: &Capture, stderr: &Capture) -> Result<Left, PersistError> {
    let mut left = find_streams(stdout, stderr);
    let mut skipped = Vec::new();
    if let Some(out) = Root::open(dirs.out(), dirs.owner())? {
        walk(&out, PathBuf::new(), "", &mut left.files, &mut skipped)?;
    }
    if !declared.is_empty()
        && let Some(work) = Root::open(dirs.work(), dirs.owner())?
    {
        for path in declared {
            find_declared(&work, path, &mut left.files, &mut skipped)?;
        }
    }
    // Of two with one name, the one in the output directory counts: it came first.
    let mut seen = std::collections::BTreeSet::new();
    left.files.retain(|(path, _)| {
        let first = seen.insert(path.clone());
        if !first {
            skipped.push(format!("{path} of the work directory (there is one of that name in the output directory)"));
        }
        first
    });
    take_result(&mut left, declared.iter().any(|path| path == RESULT_FILE));
    if !skipped.is_empty() {
        let more = skipped.len().saturating_sub(SKIPPED_NAMED);
        let named = skipped.iter().take(SKIPPED_NAMED).cloned().collect::<Vec<_>>().join(", ");
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        left.kept.notes.push(format!("not kept: {named}{more}"));
    }
    Ok(left)
}

/// What a command left whose directories are known to be empty.
#[must_use]
pub fn find_streams(stdout: &Capture, stderr: &Capture) -> Left {
    let mut left = Left::default();
    for (name, capture) in [("stdout", stdout), ("stderr", stderr)] {
        if capture.wants_object() {
            left.logs.push((name, capture.kept()));
        }
        if let Some(cut) = capture.cut() {
            left.kept.notes.push(format!("{name} is cut: {cut}"));
        }
    }
    left.kept.stdout = stdout.stream(stdout.wants_object());
    left.kept.stderr = stderr.stream(stderr.wants_object());
    left
}

/// Keeps what a command left.
///
/// # Errors
/// [`PersistError`]: something is not kept, so the attempt can't be a success.
pub async fn persist<O: Objects>(objects: &O, name: &AttemptName, left: Left) -> Result<Kept, PersistError> {
    let Left { mut kept, files, logs } = left;
    let storage = |what: &str| {
        let what = what.to_owned();
        move |source| PersistError::Storage { what, source }
    };
    for (stream, bytes) in logs {
        objects.put(&keys::attempt_log(name, stream), Bytes::from(bytes)).await.map_err(storage(stream))?;
    }
    if files.is_empty() {
        return Ok(kept);
    }
    let uploads = files.into_iter().map(|(path, place)| async move {
        let file = place.open().map_err(|source| place.root.failed(&place.path, source))?;
        let moved = objects.upload(&keys::attempt_output(name, &path), file).await.map_err(storage(&path))?;
        Ok(Entry { path, bytes: moved.bytes, sha256: moved.sha256 })
    });
    let mut list: Vec<Entry> = futures::stream::iter(uploads).buffer_unordered(UPLOADS_AT_ONCE).try_collect().await?;
    list.sort_by(|a, b| a.path.cmp(&b.path));
    let json = serde_json::to_vec(&list)
        .map_err(|e| PersistError::Storage { what: "the list of outputs".into(), source: ObjectError::Failed(e.to_string()) })?;
    // Last: whoever finds the list finds everything in it.
    objects.put(&keys::attempt_manifest(name), Bytes::from(json)).await.map_err(storage("the list of outputs"))?;
    kept.outputs =
        Some(Outputs { files: u32::try_from(list.len()).unwrap_or(u32::MAX), bytes: list.iter().map(|entry| entry.bytes).sum() });
    Ok(kept)
}

/// Takes the small result out of the files; a `declared` one stays there as well.
fn take_result(left: &mut Left, declared: bool) {
    let Some(at) = left.files.iter().position(|(path, _)| path == RESULT_FILE) else { return };
    let Some((_, place)) = left.files.get(at) else { return };
    let mut bytes = Vec::new();
    let read = place.open().and_then(|file| file.take(RESULT_BYTES_MAX as u64 + 1).read_to_end(&mut bytes));
    let why = match read {
        Err(e) => format!("can't be read: {e}"),
        Ok(_) if bytes.len() > RESULT_BYTES_MAX => format!("has more than {RESULT_BYTES_MAX} bytes"),
        Ok(_) => match result_of(bytes) {
            Ok(bytes) => {
                left.kept.result = Some(bytes);
                if !declared {
                    left.files.remove(at);
                }
                return;
            }
            Err(e) => format!("is no JSON that can be carried: {e}"),
        },
    };
    left.kept.notes.push(format!("{RESULT_FILE} {why}; it is kept as an output file and is not the task's result"));
}

/// The JSON as everybody after us can read it. Halves of surrogate pairs, which Python writes and no Unicode text can hold, become U+FFFD;
/// what then can't be read (numbers out of range, values nested too deep) is found here, where there is still a file to keep.
fn result_of(bytes: Vec<u8>) -> Result<Vec<u8>, serde_json::Error> {
    let read = |bytes: &[u8]| match serde_json::from_slice::<serde_json::Value>(bytes) {
        Ok(value) if depth(&value) > RESULT_DEPTH_MAX => {
            Err(serde::de::Error::custom(format!("nested deeper than {RESULT_DEPTH_MAX} levels")))
        }
        read => read.map(drop),
    };
    if read(&bytes).is_ok() {
        return Ok(bytes);
    }
    let whole = without_half_pairs(&bytes);
    read(&whole).map(|()| whole)
}

/// How deep values lie in each other.
fn depth(value: &serde_json::Value) -> usize {
    let of_all = |values: &mut dyn Iterator<Item = &serde_json::Value>| 1 + values.map(depth).max().unwrap_or(0);
    match value {
        serde_json::Value::Array(values) => of_all(&mut values.iter()),
        serde_json::Value::Object(fields) => of_all(&mut fields.values()),
        _ => 0,
    }
}

/// Replaces `\uD800` to `\uDFFF` that are no half of a pair.
fn without_half_pairs(json: &[u8]) -> Vec<u8> {
    let unit = |at: usize| -> Option<u16> {
        let digits = json.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let mut whole = Vec::with_capacity(json.len());
    let mut at = 0;
    while let Some(byte) = json.get(at) {
        // A backslash and what it escapes are taken together: `\\u` is no escape of a character.
        let (take, half) = match (byte, unit(at)) {
            (b'\\', Some(0xD800..=0xDBFF)) if matches!(unit(at + 6), Some(0xDC00..=0xDFFF)) => (12, false),
            (b'\\', Some(0xD800..=0xDFFF)) => (6, true),
            (b'\\', _) => (2, false),
            _ => (1, false),
        };
        match half {
            true => whole.extend_from_slice(b"\\ufffd"),
            false => whole.extend_from_slice(json.get(at..(at + take).min(json.len())).unwrap_or_default()),
        }
        at += take;
    }
    whole
}

fn find_declared(work: &Arc<Root>, declared: &str, files: &mut Files, skipped: &mut Vec<String>) -> Result<(), PersistError> {
    let path = PathBuf::from(declared);
    let found = beneath::open(&work.dir, &path, OFlags::PATH).and_then(|open| Ok(rustix::fs::fstat(open)?));
    let kind = match found {
        Ok(stat) => beneath::kind(&stat),
        // No part of the way may be a link: it would lead out of the task's directory.
        Err(e) if is_link(&e) => {
            skipped.push(format!("{declared} (symbolic link)"));
            return Ok(());
        }
        // One that isn't there is left out.
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(()),
        Err(source) => return Err(work.failed(&path, source)),
    };
    let name = declared.trim_end_matches('/');
    if kind == FileType::Directory {
        return walk(work, path, &format!("{name}/"), files, skipped);
    }
    add(name.to_owned(), kind, Place { root: Arc::clone(work), path }, files, skipped)
}

/// Did the kernel meet a link where none may be?
fn is_link(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::LOOP.raw_os_error())
}

fn add(name: String, kind: FileType, place: Place, files: &mut Files, skipped: &mut Vec<String>) -> Result<(), PersistError> {
    let why = match kind {
        FileType::RegularFile if name.len() > PATH_BYTES_MAX => "path too long",
        FileType::RegularFile => "",
        FileType::Symlink => "symbolic link",
        FileType::Socket => "socket",
        FileType::Fifo => "pipe",
        _ => "device",
    };
    if !why.is_empty() {
        skipped.push(format!("{name} ({why})"));
        return Ok(());
    }
    if files.len() >= FILES_MAX {
        return Err(PersistError::TooMany);
    }
    files.push((name, place));
    Ok(())
}

/// Lists the plain files below a directory, in order of their names.
fn walk(root: &Arc<Root>, from: PathBuf, prefix: &str, files: &mut Files, skipped: &mut Vec<String>) -> Result<(), PersistError> {
    let mut stack = vec![(from, prefix.to_owned(), 0)];
    while let Some((dir, prefix, depth)) = stack.pop() {
        let listed = beneath::open(&root.dir, &dir, OFlags::RDONLY | OFlags::DIRECTORY).and_then(|open| beneath::list(&open));
        let mut entries = match listed {
            Ok(entries) => entries,
            // It was one a moment ago: somebody else under the same user changes it.
            Err(e) if is_link(&e) || matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                skipped.push(format!("{prefix} (changed while it was read)"));
                continue;
            }
            Err(e) if e.raw_os_error() == Some(Errno::NAMETOOLONG.raw_os_error()) => {
                skipped.push(format!("{prefix} (path too long)"));
                continue;
            }
            Err(source) => return Err(root.failed(&dir, source)),
        };
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (file_name, kind) in entries {
            let Some(name) = file_name.to_str() else {
                skipped.push(format!("{prefix}{} (name is not UTF-8)", file_name.to_string_lossy()));
                continue;
            };
            let path = dir.join(name);
            if kind != FileType::Directory {
                add(format!("{prefix}{name}"), kind, Place { root: Arc::clone(root), path }, files, skipped)?;
            } else if depth >= DEPTH_MAX {
                skipped.push(format!("{prefix}{name} (too deep)"));
            } else {
                stack.push((path, format!("{prefix}{name}/"), depth + 1));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
