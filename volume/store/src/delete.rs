//! `delete`, `delete_many`: objects → gone. Deleting what is not there succeeds.
//!
//! Owns batching. Does not decide what may be deleted.

use aws_sdk_s3::types::{Delete, ObjectIdentifier};

use crate::connect::Store;
use crate::error::{ErrorKind, Failure, Place, answers};
use crate::retry::{Attempt, Refusal, Verdict, classify};

/// Keys in one DeleteObjects request: the protocol's limit.
pub const DELETE_BATCH_MAX: usize = 1000;

/// Why objects could not be deleted. Some of a batch may be gone; the same call may be repeated.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// The store named keys that it would not delete.
    #[error("{place}: {failed} of {asked} objects were not deleted, the first with {code}: {message}; check the bucket's policy and locks")]
    Some {
        /// The first key that failed.
        place: Box<Place>,
        /// Keys that failed.
        failed: usize,
        /// Keys in the batch.
        asked: usize,
        /// The store's error code for the first.
        code: String,
        /// The store's words for the first.
        message: String,
    },
    /// Anything that is not about single objects.
    #[error(transparent)]
    Store(#[from] Failure),
}

impl DeleteError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Some { code, .. } if code == "AccessDenied" => ErrorKind::Denied,
            Self::Some { .. } => ErrorKind::Rejected,
            Self::Store(failure) => failure.kind(),
        }
    }
}
answers!(DeleteError);

/// A key that DeleteObjects refused.
struct Kept {
    key: String,
    code: String,
    message: String,
}

impl Store {
    /// Deletes one object.
    pub async fn delete(&self, key: &str) -> Result<(), DeleteError> {
        let run = self.run("delete", key, 0, || {
            let request = self.client().delete_object().bucket(self.bucket()).key(self.full_key(key));
            async move { request.send().await.map_err(classify) }
        });
        match run.await.result {
            Ok(_) | Err(Refusal::NotFound) => Ok(()),
            Err(refusal) => Err(DeleteError::Store(refusal.into_failure(self.place("delete", key)))),
        }
    }

    /// Deletes many objects, [`DELETE_BATCH_MAX`] to a request, one request after another.
    pub async fn delete_many<K: AsRef<str>>(&self, keys: &[K]) -> Result<(), DeleteError> {
        for batch in keys.chunks(DELETE_BATCH_MAX) {
            self.delete_batch(batch).await?;
        }
        Ok(())
    }

    async fn delete_batch<K: AsRef<str>>(&self, batch: &[K]) -> Result<(), DeleteError> {
        let Some(first) = batch.first().map(AsRef::as_ref) else { return Ok(()) };
        let run = self.run("delete many", first, 0, || {
            let request = self.delete_objects(batch);
            async move {
                let output = request?.send().await.map_err(classify)?;
                let kept: Vec<Kept> = output.errors.into_iter().flatten().filter_map(kept).collect();
                match kept.iter().find(|kept| is_passing(&kept.code)) {
                    Some(kept) => Err(Attempt::Again(format!("{} for {}: {}", kept.code, kept.key, kept.message))),
                    None => Ok(kept),
                }
            }
        });
        let kept = run.await.result.map_err(|refusal| refusal.into_failure(self.place("delete many", first)))?;
        match kept.first() {
            None => Ok(()),
            Some(one) => Err(DeleteError::Some {
                place: Box::new(Place { key: one.key.clone(), ..self.place("delete many", first) }),
                failed: kept.len(),
                asked: batch.len(),
                code: one.code.clone(),
                message: one.message.clone(),
            }),
        }
    }

    fn delete_objects<K: AsRef<str>>(
        &self,
        batch: &[K],
    ) -> Result<aws_sdk_s3::operation::delete_objects::builders::DeleteObjectsFluentBuilder, Attempt> {
        let refused = |error: aws_sdk_s3::error::BuildError| {
            Attempt::Final(Verdict::Rejected { status: 0, code: "request not sent".to_owned(), message: error.to_string() })
        };
        let mut delete = Delete::builder().quiet(true);
        for key in batch {
            let object = ObjectIdentifier::builder().key(self.full_key(key.as_ref())).build();
            delete = delete.objects(object.map_err(refused)?);
        }
        let delete = delete.build().map_err(refused)?;
        Ok(self.client().delete_objects().bucket(self.bucket()).delete(delete))
    }
}

/// A per-key error, unless it only says that the key was not there.
fn kept(error: aws_sdk_s3::types::Error) -> Option<Kept> {
    let code = error.code.unwrap_or_default();
    if matches!(code.as_str(), "NoSuchKey" | "NotFound") {
        return None;
    }
    Some(Kept { key: error.key.unwrap_or_default(), code, message: error.message.unwrap_or_default() })
}

fn is_passing(code: &str) -> bool {
    matches!(code, "InternalError" | "SlowDown" | "ServiceUnavailable" | "RequestTimeout" | "OperationAborted")
}
