//! `list`: a prefix → the keys under it, in order, page by page.
//!
//! Owns paging and decoding of keys. Does not group by delimiter: no caller needs it.

use aws_sdk_s3::types::EncodingType;

use crate::connect::Store;
use crate::error::{ErrorKind, Failure, answers};
use crate::retry::classify;

/// Keys in one page: the protocol's limit.
pub const LIST_LIMIT_MAX: usize = 1000;

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Key, relative to the store's prefix.
    pub key: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Quoted entity tag.
    pub etag: String,
    /// Last write, in milliseconds since the Unix epoch, by the store's clock.
    pub modified_ms: i64,
}

/// One page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    /// Objects in the byte order of their keys.
    pub objects: Vec<ListedObject>,
    /// Pass it as `start_after` for the next page; `None` after the last.
    pub next: Option<String>,
}

/// Why a listing failed.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// Anything that went wrong on the way to the store.
    #[error(transparent)]
    Store(#[from] Failure),
}

impl ListError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Store(failure) => failure.kind(),
        }
    }
}
answers!(ListError);

impl Store {
    /// Up to `limit` objects (at most [`LIST_LIMIT_MAX`]) whose keys begin with `prefix` and come after `start_after`.
    pub async fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<ListPage, ListError> {
        let limit = limit.clamp(1, LIST_LIMIT_MAX) as i32;
        let run = self.run("list", prefix, 0, || {
            let request = self
                .client()
                .list_objects_v2()
                .bucket(self.bucket())
                .prefix(self.full_key(prefix))
                .set_start_after(start_after.map(|key| self.full_key(key)))
                // Keys may hold characters that XML cannot.
                .encoding_type(EncodingType::Url)
                .max_keys(limit);
            async move { request.send().await.map_err(classify) }
        });
        let output = run.await.result.map_err(|refusal| refusal.into_failure(self.place("list", prefix)))?;
        let encoded = output.encoding_type == Some(EncodingType::Url);
        let own_prefix = self.prefix();
        let mut page = ListPage::default();
        for object in output.contents.unwrap_or_default() {
            let key = object.key.unwrap_or_default();
            let key = if encoded { decode(&key) } else { key };
            // A server that ignores the prefix must not make us see other people's objects as ours.
            let Some(key) = key.strip_prefix(own_prefix) else { continue };
            page.objects.push(ListedObject {
                key: key.to_owned(),
                bytes: object.size.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0),
                etag: object.e_tag.unwrap_or_default(),
                modified_ms: object.last_modified.and_then(|at| at.to_millis().ok()).unwrap_or(0),
            });
        }
        if output.is_truncated == Some(true) {
            page.next = page.objects.last().map(|object| object.key.clone());
        }
        Ok(page)
    }
}

/// Undoes URL encoding as S3 does it for keys in listings (a space is `+`).
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = match bytes[at] {
            b'%' => text.get(at + 1..at + 3).and_then(|hex| u8::from_str_radix(hex, 16).ok()),
            _ => None,
        };
        match escaped {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(if bytes[at] == b'+' { b' ' } else { bytes[at] });
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_keys_and_leaves_broken_escapes() {
        assert_eq!(decode("a%2Fb+c%2B%C3%A9"), "a/b c+é");
        assert_eq!(decode("100%"), "100%");
        assert_eq!(decode("%zz%é"), "%zz%é");
    }
}
