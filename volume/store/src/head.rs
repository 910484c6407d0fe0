//! `head`: whether an object is there, and what is known of it without reading it.
//!
//! Owns [`ObjectMeta`]. Does not read bodies.

use std::collections::BTreeMap;

use crate::connect::Store;
use crate::error::{ErrorKind, Failure, Place, answers};
use crate::retry::{Refusal, classify};

/// What the store knows of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Size in bytes.
    pub bytes: u64,
    /// Quoted entity tag, as the store gave it.
    pub etag: String,
    /// Last write, in milliseconds since the Unix epoch, by the store's clock; most stores count whole seconds.
    pub modified_ms: i64,
    /// MIME type, if one was given at upload.
    pub content_type: Option<String>,
    /// User metadata, lower-case names.
    pub metadata: BTreeMap<String, String>,
}

/// Why an object's metadata could not be read.
#[derive(Debug, thiserror::Error)]
pub enum HeadError {
    /// No such object.
    #[error("{place}: no such object; check the key")]
    NotFound {
        /// Where.
        place: Box<Place>,
    },
    /// Anything that is not about this object.
    #[error(transparent)]
    Store(#[from] Failure),
}

impl HeadError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::Store(failure) => failure.kind(),
        }
    }
}
answers!(HeadError);

impl Store {
    /// The object's metadata.
    pub async fn head(&self, key: &str) -> Result<ObjectMeta, HeadError> {
        let run = self.run("head", key, 0, || {
            let request = self.client().head_object().bucket(self.bucket()).key(self.full_key(key));
            async move { request.send().await.map_err(classify) }
        });
        let output = run.await.result.map_err(|refusal| {
            let place = self.place("head", key);
            match refusal {
                Refusal::NotFound => HeadError::NotFound { place: Box::new(place) },
                other => HeadError::Store(other.into_failure(place)),
            }
        })?;
        Ok(ObjectMeta {
            bytes: output.content_length.and_then(|len| u64::try_from(len).ok()).unwrap_or(0),
            etag: output.e_tag.unwrap_or_default(),
            modified_ms: output.last_modified.and_then(|at| at.to_millis().ok()).unwrap_or(0),
            content_type: output.content_type,
            metadata: output.metadata.into_iter().flatten().collect(),
        })
    }
}
