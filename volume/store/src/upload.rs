//! `upload_stream`: a reader → one object, with bounded memory and its hash.
//!
//! Owns the choice between one put and a multipart upload, part sizes, parts in flight, and that a
//! failed or dropped upload is aborted. Uploads orphaned by a killed process are `abort_stale_uploads`'.

use std::time::Duration;

use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::{Bytes, BytesMut};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinSet;

use crate::config::Retry;
use crate::connect::Store;
use crate::error::{ErrorKind, Failure, Place, answers};
use crate::put::WRITE_TAG;
use crate::retry::{Refusal, classify, random_tag};

/// Smallest part we make, and the size under which a body is one put. Above the protocol's 5 MiB; large
/// enough that a request's fixed cost does not show, small enough that four of them fit any worker.
pub const PART_BYTES_MIN: u64 = 8 * 1024 * 1024;
/// Largest part the protocol takes.
const PART_BYTES_MAX: u64 = 5 * 1024 * 1024 * 1024;
/// Parts in one upload: the protocol's limit.
pub const PARTS_MAX: u32 = 10_000;
/// Without a size hint this many parts have the smallest size. (Stores that want equal parts, like R2, are served up to
/// 7.8 GiB without a hint.)
const PARTS_EQUAL_MIN: u32 = 1_000;
/// A hint sizes parts so that it fills this many.
const PARTS_HINTED: u64 = 4_000;
/// After the equal parts, sizes double this many times over the numbers that are left: from 8 MiB to 4 GiB, which
/// reaches the protocol's 5 TiB per object even where a hint was far too small.
const DOUBLINGS: u32 = 9;
/// Parts sent at once: enough to fill a link whose round trip is a good part of a request's time.
const PARTS_IN_FLIGHT_MAX: u64 = 4;
/// Bytes of parts in flight beyond the first, whatever their size.
const BYTES_IN_FLIGHT_MAX: u64 = PARTS_IN_FLIGHT_MAX * PART_BYTES_MIN;
/// First buffer of a body of unknown size: most outputs are small.
const READ_BYTES: usize = 64 * 1024;
/// An abort is tidying up: it may not hold up the error that caused it.
const ABORT_BUDGET: Duration = Duration::from_secs(5);

/// What is known of a body before it is read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UploadOptions {
    /// Expected size in bytes, for equal parts of a good size. The body may be longer or shorter.
    pub bytes_hint: Option<u64>,
    /// A body with more bytes than this is an error, and nothing is written.
    pub bytes_max: Option<u64>,
    /// MIME type to store with the object.
    pub content_type: Option<String>,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uploaded {
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the body, lower-case hex.
    pub sha256: String,
    /// Quoted entity tag.
    pub etag: String,
}

/// Why a stream was not stored. Nothing is left at the key but what was there before, except after
/// `Unavailable`, when the object may have been written after all.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// The reader failed.
    #[error("{place}: reading the body failed after {bytes} bytes: {source}")]
    Read {
        /// Where.
        place: Box<Place>,
        /// Bytes read before.
        bytes: u64,
        /// The reader's error.
        source: std::io::Error,
    },
    /// The body is longer than allowed.
    #[error("{place}: the body has more than the {bytes_max} bytes allowed; raise the limit or write less")]
    TooLarge {
        /// Where.
        place: Box<Place>,
        /// The caller's limit in bytes.
        bytes_max: u64,
    },
    /// The store forgot the multipart upload, by someone's abort or a lifecycle rule.
    #[error("{place}: the store dropped the unfinished upload; check its lifecycle rules, then upload again")]
    Dropped {
        /// Where.
        place: Box<Place>,
    },
    /// Anything that went wrong on the way to the store.
    #[error(transparent)]
    Store(#[from] Failure),
}

impl UploadError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Read { .. } => ErrorKind::Local,
            Self::TooLarge { .. } => ErrorKind::TooLarge,
            // A fresh upload of the same body may well succeed.
            Self::Dropped { .. } => ErrorKind::Unavailable,
            Self::Store(failure) => failure.kind(),
        }
    }
}
answers!(UploadError);

impl Store {
    /// Stores all that `reader` gives. Holds at most [four parts](PART_BYTES_MIN) in flight and one being filled:
    /// 40 MiB for bodies under 8 GiB, or with a size hint under 31 GiB; two parts where parts are larger.
    pub async fn upload_stream<R>(&self, key: &str, reader: R, options: &UploadOptions) -> Result<Uploaded, UploadError>
    where
        R: AsyncRead + Send + Unpin,
    {
        let plan = Plan::new(options.bytes_hint);
        let mut body = Body { reader, hasher: Sha256::new(), bytes: 0, bytes_max: options.bytes_max };
        let first = body.part(plan.part_bytes(1), READ_BYTES).await.map_err(|end| self.body_error(key, end))?;
        let whole = (first.len() as u64) < plan.part_bytes(1);
        let etag = if whole {
            self.put_typed(key, first, options.content_type.as_deref()).await?
        } else {
            self.multipart(key, &plan, &mut body, first, options.content_type.as_deref()).await?
        };
        Ok(Uploaded { bytes: body.bytes, sha256: hex::encode(body.hasher.finalize()), etag })
    }

    async fn multipart<R>(
        &self,
        key: &str,
        plan: &Plan,
        body: &mut Body<R>,
        first: Bytes,
        content_type: Option<&str>,
    ) -> Result<String, UploadError>
    where
        R: AsyncRead + Send + Unpin,
    {
        let tag = random_tag();
        let mut upload = self.begin(key, content_type, &tag).await?;
        let mut parts = JoinSet::new();
        let end = self.send_parts(&upload, plan, body, first, &mut parts).await;
        // Parts still on their way would outlive an abort and cost storage until a lifecycle rule finds them.
        parts.shutdown().await;
        let end = match end {
            Ok(parts) => self.complete(&upload, parts, body.bytes, &tag).await,
            Err(error) => Err(error),
        };
        match end {
            Ok(etag) => {
                upload.open = false;
                Ok(etag)
            }
            Err(error) => {
                upload.abort().await;
                Err(error)
            }
        }
    }

    async fn begin(&self, key: &str, content_type: Option<&str>, tag: &str) -> Result<OpenUpload, UploadError> {
        let run = self.run("upload", key, 0, || {
            let request = self
                .client()
                .create_multipart_upload()
                .bucket(self.bucket())
                .key(self.full_key(key))
                .metadata(WRITE_TAG, tag)
                .set_content_type(content_type.map(str::to_owned));
            async move { request.send().await.map_err(classify) }
        });
        let output = run.await.result.map_err(|refusal| refusal.into_failure(self.place("upload", key)))?;
        let id = output.upload_id.unwrap_or_default();
        Ok(OpenUpload { store: self.clone(), key: key.to_owned(), id, open: true })
    }

    async fn send_parts<R>(
        &self,
        upload: &OpenUpload,
        plan: &Plan,
        body: &mut Body<R>,
        first: Bytes,
        sending: &mut JoinSet<Result<CompletedPart, UploadError>>,
    ) -> Result<Vec<CompletedPart>, UploadError>
    where
        R: AsyncRead + Send + Unpin,
    {
        let mut sent = Vec::new();
        let mut number = 1;
        let mut part = first;
        while !part.is_empty() {
            let (store, key, id) = (self.clone(), upload.key.clone(), upload.id.clone());
            let full = part.len() as u64 == plan.part_bytes(number);
            sending.spawn(async move { store.send_part(&key, &id, number, part).await });
            if !full {
                break;
            }
            number += 1;
            while sending.len() as u64 >= plan.in_flight(number) {
                sent.extend(next_part(sending).await?);
            }
            let bytes = plan.part_bytes(number);
            part = body.part(bytes, bytes as usize).await.map_err(|end| self.body_error(&upload.key, end))?;
        }
        while let Some(part) = next_part(sending).await? {
            sent.push(part);
        }
        sent.sort_by_key(|part| part.part_number);
        Ok(sent)
    }

    async fn send_part(&self, key: &str, id: &str, number: u32, part: Bytes) -> Result<CompletedPart, UploadError> {
        let run = self.run("upload", key, part.len() as u64, || {
            let request = self
                .client()
                .upload_part()
                .bucket(self.bucket())
                .key(self.full_key(key))
                .upload_id(id)
                .part_number(number as i32)
                .body(ByteStream::from(part.clone()));
            async move { request.send().await.map_err(classify) }
        });
        let output = run.await.result.map_err(|refusal| self.upload_error(key, refusal))?;
        Ok(CompletedPart::builder().part_number(number as i32).set_e_tag(output.e_tag).build())
    }

    async fn complete(&self, upload: &OpenUpload, parts: Vec<CompletedPart>, bytes: u64, tag: &str) -> Result<String, UploadError> {
        let key = &upload.key;
        let parts = CompletedMultipartUpload::builder().set_parts(Some(parts)).build();
        // Some stores copy the parts together before they answer: the time limit grows with the size.
        let run = self.run("upload", key, bytes, || {
            let request = self
                .client()
                .complete_multipart_upload()
                .bucket(self.bucket())
                .key(self.full_key(key))
                .upload_id(&upload.id)
                .multipart_upload(parts.clone());
            async move { request.send().await.map_err(classify) }
        });
        let run = run.await;
        match run.result {
            Ok(output) => Ok(output.e_tag.unwrap_or_default()),
            // The try whose answer was lost may have completed it.
            Err(Refusal::NoSuchUpload | Refusal::NotFound) if run.ambiguous => match self.head(key).await {
                Ok(meta) if meta.metadata.get(WRITE_TAG).is_some_and(|found| found == tag) => Ok(meta.etag),
                _ => Err(self.upload_error(key, Refusal::NoSuchUpload)),
            },
            Err(refusal) => Err(self.upload_error(key, refusal)),
        }
    }

    fn upload_error(&self, key: &str, refusal: Refusal) -> UploadError {
        let place = self.place("upload", key);
        match refusal {
            Refusal::NoSuchUpload | Refusal::NotFound => UploadError::Dropped { place: Box::new(place) },
            other => UploadError::Store(other.into_failure(place)),
        }
    }

    fn body_error(&self, key: &str, end: BodyEnd) -> UploadError {
        let place = Box::new(self.place("upload", key));
        match end {
            BodyEnd::Read { bytes, source } => UploadError::Read { place, bytes, source },
            BodyEnd::TooLarge { bytes_max } => UploadError::TooLarge { place, bytes_max },
        }
    }

    /// Forgets an unfinished upload. Failure only costs storage until `abort_stale_uploads` finds it.
    pub(crate) async fn abort_upload(&self, key: &str, id: &str) {
        let store = self.with_retry(Retry { budget: ABORT_BUDGET, attempt_timeout: ABORT_BUDGET, ..*self.retry() });
        let run = store.run("abort upload", key, 0, || {
            let request = store.client().abort_multipart_upload().bucket(store.bucket()).key(store.full_key(key)).upload_id(id);
            async move { request.send().await.map_err(classify) }
        });
        match run.await.result {
            Ok(_) | Err(Refusal::NoSuchUpload | Refusal::NotFound) => {}
            Err(refusal) => tracing::warn!(key, ?refusal, "s3: an unfinished upload could not be aborted"),
        }
    }
}

async fn next_part(sending: &mut JoinSet<Result<CompletedPart, UploadError>>) -> Result<Option<CompletedPart>, UploadError> {
    match sending.join_next().await {
        None => Ok(None),
        Some(Ok(part)) => part.map(Some),
        Some(Err(join)) if join.is_panic() => std::panic::resume_unwind(join.into_panic()),
        // Only our own shutdown cancels parts, and nobody waits for them then.
        Some(Err(_cancelled)) => Ok(None),
    }
}

/// A multipart upload at the store. Dropped while open, it is aborted in the background.
struct OpenUpload {
    store: Store,
    key: String,
    id: String,
    open: bool,
}

impl OpenUpload {
    async fn abort(mut self) {
        self.open = false;
        self.store.abort_upload(&self.key, &self.id).await;
    }
}

impl Drop for OpenUpload {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (store, key, id) = (self.store.clone(), std::mem::take(&mut self.key), std::mem::take(&mut self.id));
            runtime.spawn(async move { store.abort_upload(&key, &id).await });
        }
    }
}

/// How large each part is. Pure.
struct Plan {
    base: u64,
    /// Parts that keep the base size.
    equal: u32,
    /// Parts of each size after that.
    step: u32,
}

impl Plan {
    fn new(bytes_hint: Option<u64>) -> Self {
        const MIB: u64 = 1024 * 1024;
        let hint = bytes_hint.unwrap_or(0);
        let base = hint.div_ceil(PARTS_HINTED).next_multiple_of(MIB).clamp(PART_BYTES_MIN, PART_BYTES_MAX);
        let planned = u32::try_from(hint.div_ceil(base)).unwrap_or(PARTS_MAX);
        let equal = planned.clamp(PARTS_EQUAL_MIN, PARTS_MAX - DOUBLINGS);
        Self { base, equal, step: (PARTS_MAX - equal) / DOUBLINGS }
    }

    /// Size of part `number` (from 1) in bytes.
    fn part_bytes(&self, number: u32) -> u64 {
        let doublings = match number.checked_sub(self.equal + 1) {
            None => 0,
            Some(past) => past / self.step + 1,
        };
        self.base.saturating_mul(1_u64.checked_shl(doublings).unwrap_or(u64::MAX)).min(PART_BYTES_MAX)
    }

    /// Parts that may be on their way while part `number` is filled.
    fn in_flight(&self, number: u32) -> u64 {
        (BYTES_IN_FLIGHT_MAX / self.part_bytes(number)).clamp(1, PARTS_IN_FLIGHT_MAX)
    }
}

struct Body<R> {
    reader: R,
    hasher: Sha256,
    bytes: u64,
    bytes_max: Option<u64>,
}

enum BodyEnd {
    Read { bytes: u64, source: std::io::Error },
    TooLarge { bytes_max: u64 },
}

impl<R: AsyncRead + Unpin> Body<R> {
    /// Fills one part; it is shorter than `size` only where the body ends.
    async fn part(&mut self, size: u64, first_buffer: usize) -> Result<Bytes, BodyEnd> {
        let size = size as usize;
        let mut part = BytesMut::with_capacity(first_buffer.min(size));
        while part.len() < size {
            let room = (size - part.len()).min(part.len().max(READ_BYTES));
            part.reserve(room.min(READ_BYTES));
            let had = part.len();
            let mut limited = (&mut self.reader).take((size - had) as u64);
            let read = limited.read_buf(&mut part).await;
            let read = read.map_err(|source| BodyEnd::Read { bytes: self.bytes, source })?;
            if read == 0 {
                break;
            }
            self.hasher.update(&part[had..]);
            self.bytes += read as u64;
            if let Some(bytes_max) = self.bytes_max.filter(|max| self.bytes > *max) {
                return Err(BodyEnd::TooLarge { bytes_max });
            }
        }
        Ok(part.freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIB: u64 = 1 << 40;

    fn reach(plan: &Plan) -> u64 {
        (1..=PARTS_MAX).map(|number| plan.part_bytes(number)).sum()
    }

    #[test]
    fn every_plan_reaches_the_largest_object() {
        assert!(reach(&Plan::new(None)) >= 5 * TIB);
        for hint in [0, 1, PART_BYTES_MIN, 63 << 30, TIB, 5 * TIB] {
            let plan = Plan::new(Some(hint));
            assert!(reach(&plan) >= 5 * TIB, "hint {hint}");
            let planned = hint.div_ceil(plan.base) as u32;
            assert!((1..=planned).all(|number| plan.part_bytes(number) == plan.base), "a hinted body has equal parts");
        }
    }

    #[test]
    fn memory_is_bounded() {
        let plan = Plan::new(None);
        for number in 1..=PARTS_MAX {
            let bytes = plan.part_bytes(number);
            assert!(plan.in_flight(number) * bytes <= BYTES_IN_FLIGHT_MAX.max(bytes));
        }
    }

    #[tokio::test]
    async fn a_part_holds_exactly_its_size() {
        let data: Vec<u8> = (0..300_000_u32).map(|n| n as u8).collect();
        let mut body = Body { reader: &data[..], hasher: Sha256::new(), bytes: 0, bytes_max: None };
        let first = body.part(200_000, READ_BYTES).await.ok().unwrap();
        let second = body.part(200_000, READ_BYTES).await.ok().unwrap();
        assert_eq!((&first[..], &second[..]), (&data[..200_000], &data[200_000..]));
        assert_eq!(hex::encode(body.hasher.finalize()), hex::encode(Sha256::digest(&data)));
    }
}
