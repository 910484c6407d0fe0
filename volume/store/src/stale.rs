//! `abort_stale_uploads`: multipart uploads that a killed process left behind → gone.
//!
//! Owns finding them. Who calls it and how old is stale is the caller's.

use crate::connect::Store;
use crate::error::{ErrorKind, Failure, answers};
use crate::retry::classify;

/// Pages looked at in one call: 100,000 uploads. What remains is found by the next call.
const PAGES_MAX: usize = 100;

/// Why stale uploads could not be found.
#[derive(Debug, thiserror::Error)]
pub enum StaleUploadsError {
    /// Anything that went wrong on the way to the store.
    #[error(transparent)]
    Store(#[from] Failure),
}

impl StaleUploadsError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Store(failure) => failure.kind(),
        }
    }
}
answers!(StaleUploadsError);

impl Store {
    /// Aborts uploads under `prefix` that began before `before_ms` (Unix milliseconds). Returns how many.
    pub async fn abort_stale_uploads(&self, prefix: &str, before_ms: i64) -> Result<usize, StaleUploadsError> {
        let mut aborted = 0;
        let (mut key_marker, mut id_marker) = (None::<String>, None::<String>);
        for _page in 0..PAGES_MAX {
            let run = self.run("list uploads", prefix, 0, || {
                let request = self
                    .client()
                    .list_multipart_uploads()
                    .bucket(self.bucket())
                    .prefix(self.full_key(prefix))
                    .set_key_marker(key_marker.clone())
                    .set_upload_id_marker(id_marker.clone());
                async move { request.send().await.map_err(classify) }
            });
            let page = run.await.result.map_err(|refusal| refusal.into_failure(self.place("list uploads", prefix)))?;
            for upload in page.uploads.unwrap_or_default() {
                let began = upload.initiated.and_then(|at| at.to_millis().ok());
                let (Some(key), Some(id)) = (upload.key, upload.upload_id) else { continue };
                // Ours only, and only when its age is known.
                let Some(key) = key.strip_prefix(self.prefix()) else { continue };
                if began.is_some_and(|began| began < before_ms) {
                    self.abort_upload(key, &id).await;
                    aborted += 1;
                }
            }
            if page.is_truncated != Some(true) || page.next_key_marker.is_none() {
                break;
            }
            (key_marker, id_marker) = (page.next_key_marker, page.next_upload_id_marker);
        }
        Ok(aborted)
    }
}
