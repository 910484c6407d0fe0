//! The objects of a bucket, as volumes use them: seven requests.
//!
//! Owns the trait, so that a simulation can stand in for a bucket, and its implementation over `volley-store`, which tries again what may be tried again.

use bytes::Bytes;
use futures::future::BoxFuture;
use volley_store::{ErrorKind, GetError, PutError, PutOutcome, Store};

/// How a conditional write ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a conditional write may have been refused"]
pub enum Put {
    /// Our bytes are there, with this tag.
    Written(String),
    /// The condition did not hold. After an earlier try without an answer the object may be ours all the same.
    Refused,
    /// Nobody knows: it may have been written, or be written later. The words say why.
    Unknown(String),
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectsError {
    /// No such object.
    #[error("{key}: no such object")]
    NotFound {
        /// Its key.
        key: String,
    },
    /// The store does not answer; later it may.
    #[error("{key}: {why}")]
    Unavailable {
        /// The key.
        key: String,
        /// The store's words.
        why: String,
    },
    /// The store refuses, or gives something else than was asked for: trying again does not help.
    #[error("{key}: {why}")]
    Refused {
        /// The key.
        key: String,
        /// The store's words.
        why: String,
    },
}

/// An object that was listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: String,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The answer to a request.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, ObjectsError>>;

/// The objects of one bucket. Keys are relative to whatever prefix the cell has.
pub trait Objects: Send + Sync {
    /// An object of at most `bytes_max` bytes, and its tag.
    fn get<'a>(&'a self, key: &'a str, bytes_max: u64) -> Answer<'a, (Bytes, String)>;
    /// Exactly `len` bytes from `start`.
    fn get_range<'a>(&'a self, key: &'a str, start: u64, len: u64) -> Answer<'a, Bytes>;
    /// Writes an object if none is there.
    fn put_if_absent<'a>(&'a self, key: &'a str, body: Bytes) -> Answer<'a, Put>;
    /// Replaces an object if it has this tag.
    fn put_if_match<'a>(&'a self, key: &'a str, body: Bytes, tag: &'a str) -> Answer<'a, Put>;
    /// Objects whose keys begin with `prefix` and come after `after`, in order; an empty list is the end.
    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> Answer<'a, Vec<Listed>>;
    /// Deletes an object; one that is not there is deleted.
    fn delete<'a>(&'a self, key: &'a str) -> Answer<'a, ()>;
}

fn error(key: &str, kind: ErrorKind, why: String) -> ObjectsError {
    let key = key.to_owned();
    match kind {
        ErrorKind::NotFound => ObjectsError::NotFound { key },
        kind if kind.is_retryable() => ObjectsError::Unavailable { key, why },
        _ => ObjectsError::Refused { key, why },
    }
}

fn got<T>(key: &str, answer: Result<T, GetError>) -> Result<T, ObjectsError> {
    answer.map_err(|e| match e {
        GetError::NotFound { .. } => ObjectsError::NotFound { key: key.to_owned() },
        // The bucket itself is missing: that is no missing object.
        e if e.kind() == ErrorKind::NotFound => ObjectsError::Refused { key: key.to_owned(), why: e.to_string() },
        e => error(key, e.kind(), e.to_string()),
    })
}

fn put(key: &str, answer: Result<PutOutcome, PutError>) -> Result<Put, ObjectsError> {
    match answer {
        Ok(PutOutcome::Written { etag }) => Ok(Put::Written(etag)),
        Ok(PutOutcome::Refused) => Ok(Put::Refused),
        Err(e) if e.is_retryable() => Ok(Put::Unknown(e.to_string())),
        Err(e) => Err(ObjectsError::Refused { key: key.to_owned(), why: e.to_string() }),
    }
}

impl Objects for Store {
    fn get<'a>(&'a self, key: &'a str, bytes_max: u64) -> Answer<'a, (Bytes, String)> {
        Box::pin(async move { got(key, self.get_with_etag(key, bytes_max).await) })
    }

    fn get_range<'a>(&'a self, key: &'a str, start: u64, len: u64) -> Answer<'a, Bytes> {
        Box::pin(async move {
            let bytes = got(key, Store::get_range(self, key, start, len).await)?;
            if bytes.len() as u64 == len {
                return Ok(bytes);
            }
            let why = format!("{} of {len} bytes from {start}: the object is too short", bytes.len());
            Err(ObjectsError::Refused { key: key.to_owned(), why })
        })
    }

    fn put_if_absent<'a>(&'a self, key: &'a str, body: Bytes) -> Answer<'a, Put> {
        Box::pin(async move { put(key, Store::put_if_absent(self, key, body).await) })
    }

    fn put_if_match<'a>(&'a self, key: &'a str, body: Bytes, tag: &'a str) -> Answer<'a, Put> {
        Box::pin(async move { put(key, Store::put_if_match(self, key, body, tag).await) })
    }

    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> Answer<'a, Vec<Listed>> {
        Box::pin(async move {
            let page = Store::list(self, prefix, after, volley_store::LIST_LIMIT_MAX).await;
            let page = page.map_err(|e| ObjectsError::Unavailable { key: prefix.to_owned(), why: e.to_string() })?;
            Ok(page.objects.into_iter().map(|object| Listed { key: object.key, bytes: object.bytes }).collect())
        })
    }

    fn delete<'a>(&'a self, key: &'a str) -> Answer<'a, ()> {
        Box::pin(async move { Store::delete(self, key).await.map_err(|e| error(key, e.kind(), e.to_string())) })
    }
}
