//! `put`, `put_if_absent`, `put_if_match`: bytes → one object, replaced or created as a whole.
//!
//! Owns conditional writes and telling a lost answer from a lost race. Larger bodies go through `upload`.

use bytes::Bytes;

use aws_sdk_s3::primitives::ByteStream;

use crate::connect::Store;
use crate::error::{ErrorKind, Failure, answers};
use crate::head::HeadError;
use crate::retry::{Refusal, Run, classify, random_tag};

/// User metadata that names the call which wrote the object. When an answer was lost and the next try is
/// refused, it tells "we wrote it" from "someone else did".
pub(crate) const WRITE_TAG: &str = "volley-write";

/// How a conditional write ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a conditional write may have been refused"]
pub enum PutOutcome {
    /// The object now holds our bytes.
    Written {
        /// Quoted entity tag of what was written.
        etag: String,
    },
    /// The condition did not hold: someone else's object stands.
    Refused,
}

impl PutOutcome {
    /// Whether our bytes stand.
    pub fn is_written(&self) -> bool {
        matches!(self, Self::Written { .. })
    }
}

/// Why a write failed. After `Unavailable` the object may or may not have been written.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// Anything that went wrong on the way to the store.
    #[error(transparent)]
    Store(#[from] Failure),
}

impl PutError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Store(failure) => failure.kind(),
        }
    }
}
answers!(PutError);

#[derive(Clone, Copy)]
enum Condition<'a> {
    None,
    Absent,
    Match(&'a str),
}

impl Store {
    /// Writes the object whatever was there; returns its quoted entity tag.
    pub async fn put(&self, key: &str, body: Bytes) -> Result<String, PutError> {
        let run = self.send_put("put", key, body, Condition::None, &random_tag(), None).await;
        run.result.map_err(|refusal| PutError::Store(refusal.into_failure(self.place("put", key))))
    }

    /// Writes the object if none is there (`If-None-Match: *`).
    pub async fn put_if_absent(&self, key: &str, body: Bytes) -> Result<PutOutcome, PutError> {
        self.conditional("put if absent", key, body, Condition::Absent).await
    }

    /// Writes the object if it still is `etag` (quoted, as the store gave it). A missing object counts as refused.
    ///
    /// Most stores derive the tag from the bytes: an object that was changed and changed back has its old tag again. Where
    /// that matters, put something into the body that never repeats, such as an epoch and a sequence.
    /// After a lost answer `Refused` may also mean that our write was made and then replaced by a later one.
    pub async fn put_if_match(&self, key: &str, body: Bytes, etag: &str) -> Result<PutOutcome, PutError> {
        self.conditional("put if match", key, body, Condition::Match(etag)).await
    }

    /// An unconditional put with a content type, for `upload`.
    pub(crate) async fn put_typed(&self, key: &str, body: Bytes, content_type: Option<&str>) -> Result<String, Failure> {
        let run = self.send_put("upload", key, body, Condition::None, &random_tag(), content_type).await;
        run.result.map_err(|refusal| refusal.into_failure(self.place("upload", key)))
    }

    async fn conditional(&self, operation: &'static str, key: &str, body: Bytes, condition: Condition<'_>) -> Result<PutOutcome, PutError> {
        let tag = random_tag();
        let run = self.send_put(operation, key, body, condition, &tag, None).await;
        match run.result {
            Ok(etag) => Ok(PutOutcome::Written { etag }),
            // AWS answers 404 to If-Match on a key that is gone.
            Err(Refusal::Precondition | Refusal::NotFound) if run.ambiguous => self.whose(operation, key, &tag).await,
            Err(Refusal::Precondition | Refusal::NotFound) => Ok(PutOutcome::Refused),
            Err(refusal) => Err(PutError::Store(refusal.into_failure(self.place(operation, key)))),
        }
    }

    /// After a refused try that followed one without an answer: did the first one write the object after all?
    async fn whose(&self, operation: &'static str, key: &str, tag: &str) -> Result<PutOutcome, PutError> {
        match self.head(key).await {
            Ok(meta) if meta.metadata.get(WRITE_TAG).is_some_and(|found| found == tag) => {
                tracing::debug!(operation, key, "s3: the write whose answer was lost had been done");
                Ok(PutOutcome::Written { etag: meta.etag })
            }
            Ok(_) | Err(HeadError::NotFound { .. }) => Ok(PutOutcome::Refused),
            Err(HeadError::Store(failure)) => Err(PutError::Store(failure)),
        }
    }

    async fn send_put(
        &self,
        operation: &'static str,
        key: &str,
        body: Bytes,
        condition: Condition<'_>,
        tag: &str,
        content_type: Option<&str>,
    ) -> Run<String> {
        self.run(operation, key, body.len() as u64, || {
            let mut request = self
                .client()
                .put_object()
                .bucket(self.bucket())
                .key(self.full_key(key))
                .metadata(WRITE_TAG, tag)
                .set_content_type(content_type.map(str::to_owned))
                .body(ByteStream::from(body.clone()));
            request = match condition {
                Condition::None => request,
                Condition::Absent => request.if_none_match("*"),
                Condition::Match(etag) => request.if_match(etag),
            };
            async move { Ok(request.send().await.map_err(classify)?.e_tag.unwrap_or_default()) }
        })
        .await
    }
}
