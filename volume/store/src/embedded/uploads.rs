//! Multipart uploads on the disk: parts until they are put together or forgotten.
//!
//! Owns `uploads/<id>/`: `upload.json` says for which object, `<number>.part` are object files of their own.
//! Blocking. The finished object is `disk`'s to commit.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::disk::{Condition, Disk, DiskError, TempFile, is_missing, now_ms, sync_dir};
use super::object_file::{self, Trailer};
use crate::retry::random_tag;

/// Every part but the last has at least this many bytes: the protocol's rule, kept so that tests against this server hold elsewhere.
const PART_BYTES_MIN: u64 = 5 * 1024 * 1024;
/// Part numbers run from 1 to this.
pub(super) const PART_NUMBER_MAX: i32 = 10_000;

/// What an upload will become.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Upload {
    pub(super) bucket: String,
    pub(super) key: String,
    pub(super) began_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) content_type: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) metadata: BTreeMap<String, String>,
}

impl Disk {
    fn upload_dir(&self, id: &str) -> Result<PathBuf, DiskError> {
        // Ids are ours: anything else cannot exist, and must not become a path.
        let ours = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        if ours { Ok(self.uploads_dir().join(id)) } else { Err(DiskError::NoUpload) }
    }

    /// Begins an upload; returns its id.
    pub(super) fn begin_upload(&self, upload: &Upload) -> Result<String, DiskError> {
        self.bucket(&upload.bucket)?;
        let id = random_tag();
        let dir = self.upload_dir(&id)?;
        DirBuilder::new().mode(0o700).create(&dir)?;
        let mut file = self.temp_file()?;
        file.write_all(&serde_json::to_vec(upload).map_err(io::Error::from)?)?;
        file.place(&dir.join("upload.json"))?;
        sync_dir(&self.uploads_dir())?;
        Ok(id)
    }

    /// The upload, if it is for this object.
    pub(super) fn upload(&self, id: &str, bucket: &str, key: &str) -> Result<Upload, DiskError> {
        let upload = self.read_upload(id)?;
        if upload.bucket == bucket && upload.key == key { Ok(upload) } else { Err(DiskError::NoUpload) }
    }

    fn read_upload(&self, id: &str) -> Result<Upload, DiskError> {
        match fs::read(self.upload_dir(id)?.join("upload.json")) {
            Ok(json) => Ok(serde_json::from_slice(&json).map_err(io::Error::from)?),
            Err(error) if is_missing(&error) => Err(DiskError::NoUpload),
            Err(error) => Err(error.into()),
        }
    }

    /// Open uploads of a bucket whose keys begin with `prefix`, by key and id, after `after`; at most `limit`, and whether there are more.
    pub(super) fn list_uploads(
        &self,
        bucket: &str,
        prefix: &str,
        after: &(String, String),
        limit: usize,
    ) -> Result<(Vec<(String, Upload)>, bool), DiskError> {
        let mut found = BTreeMap::new();
        let mut more = false;
        for entry in fs::read_dir(self.uploads_dir())? {
            let Ok(id) = entry?.file_name().into_string() else { continue };
            let Ok(upload) = self.read_upload(&id) else { continue };
            let at = (upload.key.clone(), id);
            if upload.bucket != bucket || !upload.key.starts_with(prefix) || at <= *after {
                continue;
            }
            found.insert(at, upload);
            if found.len() > limit {
                found.pop_last();
                more = true;
            }
        }
        Ok((found.into_iter().map(|((_, id), upload)| (id, upload)).collect(), more))
    }

    /// Keeps a part, replacing an earlier one of the same number.
    pub(super) fn commit_part(&self, mut temp: TempFile, bucket: &str, id: &str, number: i32, trailer: &Trailer) -> Result<(), DiskError> {
        object_file::write_trailer(&mut temp.file, trailer)?;
        // The slow part of making it durable, outside the lock.
        temp.file.sync_all()?;
        let _upload = self.lock_upload(id);
        self.upload(id, bucket, &trailer.key)?;
        Ok(temp.place(&self.upload_dir(id)?.join(part_name(number)))?)
    }

    /// Parts after number `after`, in order.
    pub(super) fn parts(&self, id: &str, after: i32) -> Result<Vec<(i32, Trailer)>, DiskError> {
        let mut parts = Vec::new();
        for entry in fs::read_dir(self.upload_dir(id)?)? {
            let entry = entry?;
            let number = entry.file_name().to_str().and_then(|name| name.strip_suffix(".part")?.parse::<i32>().ok());
            if let Some(number) = number.filter(|number| *number > after) {
                parts.push((number, object_file::read_trailer(&File::open(entry.path())?)?));
            }
        }
        parts.sort_by_key(|(number, _)| *number);
        Ok(parts)
    }

    /// Puts the named parts together and makes them the object, if the condition holds.
    pub(super) fn complete_upload(
        &self,
        bucket: &str,
        key: &str,
        id: &str,
        parts: &[(i32, String)],
        when: &Condition,
    ) -> Result<Trailer, DiskError> {
        let _upload = self.lock_upload(id);
        let upload = self.upload(id, bucket, key)?;
        let dir = self.upload_dir(id)?;
        let checked = check_parts(&dir, parts)?;
        self.check_room(checked.iter().map(|(_, part)| part.bytes).sum())?;
        let mut temp = self.temp_file()?;
        let mut bytes = 0;
        let mut tags = blake3::Hasher::new();
        for (number, part) in checked {
            let file = File::open(dir.join(part_name(number)))?;
            let copied = io::copy(&mut file.take(part.bytes), &mut temp.file)?;
            if copied != part.bytes {
                return Err(DiskError::Io(io::Error::new(io::ErrorKind::UnexpectedEof, "a part is shorter than it was")));
            }
            bytes += copied;
            tags.update(part.etag.as_bytes());
        }
        let trailer = Trailer {
            key: upload.key,
            bytes,
            etag: format!("{}-{}", tags.finalize().to_hex(), parts.len()),
            modified_ms: now_ms(),
            content_type: upload.content_type,
            metadata: upload.metadata,
        };
        self.commit(temp, bucket, &trailer, when)?;
        // From here a repeated request finds no upload, and the client sees by the object that it was done.
        fs::remove_dir_all(&dir)?;
        Ok(trailer)
    }

    /// Forgets an upload and its parts.
    pub(super) fn abort_upload(&self, bucket: &str, key: &str, id: &str) -> Result<(), DiskError> {
        let _upload = self.lock_upload(id);
        self.upload(id, bucket, key)?;
        fs::remove_dir_all(self.upload_dir(id)?)?;
        Ok(sync_dir(&self.uploads_dir())?)
    }
}

fn part_name(number: i32) -> String {
    format!("{number:05}.part")
}

/// The named parts' trailers, if the parts are in order, there, and as they were when their tags were given.
fn check_parts(dir: &Path, parts: &[(i32, String)]) -> Result<Vec<(i32, Trailer)>, DiskError> {
    let bad = |words: String| Err(DiskError::BadPart(words));
    if parts.is_empty() {
        return bad("no parts are named".to_owned());
    }
    let mut checked = Vec::with_capacity(parts.len());
    let mut before = 0;
    for (at, (number, etag)) in parts.iter().enumerate() {
        if *number <= before {
            return bad(format!("part {number} follows part {before}: numbers must ascend"));
        }
        before = *number;
        let file = match File::open(dir.join(part_name(*number))) {
            Ok(file) => file,
            Err(error) if is_missing(&error) => return bad(format!("part {number} was not uploaded")),
            Err(error) => return Err(error.into()),
        };
        let trailer = object_file::read_trailer(&file)?;
        if trailer.etag != *etag {
            return bad(format!("part {number} has another entity tag"));
        }
        if at + 1 < parts.len() && trailer.bytes < PART_BYTES_MIN {
            return bad(format!("part {number} has {} bytes: all but the last have at least {PART_BYTES_MIN}", trailer.bytes));
        }
        checked.push((*number, trailer));
    }
    Ok(checked)
}
