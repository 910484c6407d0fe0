//! `get`, `get_range`, `get_stream`: objects → bytes.
//!
//! Owns reading into memory, bounded by the caller, and the raw stream. Resuming a broken download and
//! checking its hash are `download`'s.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use aws_sdk_s3::operation::get_object::GetObjectOutput;
use aws_sdk_s3::primitives::ByteStream;
use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::{Instant, Sleep};

use crate::connect::Store;
use crate::error::{ErrorKind, Failure, Place, answers};
use crate::retry::{Attempt, Refusal, causes, classify};

/// Why an object could not be read.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    /// No such object.
    #[error("{place}: no such object; check the key")]
    NotFound {
        /// Where.
        place: Box<Place>,
    },
    /// The object is larger than the caller allowed.
    #[error("{place}: the object has {bytes} bytes, {bytes_max} are allowed here; stream it instead")]
    TooLarge {
        /// Where.
        place: Box<Place>,
        /// The object's size in bytes.
        bytes: u64,
        /// The caller's limit in bytes.
        bytes_max: u64,
    },
    /// The range begins at or past the object's end.
    #[error("{place}: byte {start} lies past the object's end; check the offset")]
    PastEnd {
        /// Where.
        place: Box<Place>,
        /// First byte asked for.
        start: u64,
    },
    /// Anything that is not about this object.
    #[error(transparent)]
    Store(#[from] Failure),
}

impl GetError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::TooLarge { .. } => ErrorKind::TooLarge,
            Self::PastEnd { .. } => ErrorKind::Rejected,
            Self::Store(failure) => failure.kind(),
        }
    }
}
answers!(GetError);

/// An object's bytes as they arrive. A silence of one attempt timeout ends it with `TimedOut`.
pub struct ObjectStream {
    /// Bytes this stream gives in all.
    pub bytes: u64,
    /// Quoted entity tag, as the store gave it.
    pub etag: String,
    body: Pin<Box<dyn AsyncRead + Send>>,
    silence_max: Duration,
    silence: Pin<Box<Sleep>>,
}

impl AsyncRead for ObjectStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let this = &mut *self;
        match this.body.as_mut().poll_read(cx, buf) {
            Poll::Ready(end) => {
                this.silence.as_mut().reset(Instant::now() + this.silence_max);
                Poll::Ready(end)
            }
            Poll::Pending if this.silence.as_mut().poll(cx).is_ready() => {
                let words = format!("the store sent nothing for {} s", this.silence_max.as_secs());
                Poll::Ready(Err(std::io::Error::new(std::io::ErrorKind::TimedOut, words)))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl std::fmt::Debug for ObjectStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectStream").field("bytes", &self.bytes).field("etag", &self.etag).finish_non_exhaustive()
    }
}

impl Store {
    /// The whole object, if it has at most `bytes_max` bytes. A body that breaks off is fetched again.
    pub async fn get(&self, key: &str, bytes_max: u64) -> Result<Bytes, GetError> {
        Ok(self.get_with_etag(key, bytes_max).await?.0)
    }

    /// Like [`get`](Self::get), with the quoted entity tag that `put_if_match` takes.
    pub async fn get_with_etag(&self, key: &str, bytes_max: u64) -> Result<(Bytes, String), GetError> {
        self.fetch("get", key, None, bytes_max).await
    }

    /// `len` bytes from `start`; fewer where the object ends. A `start` at or past the end is an error.
    pub async fn get_range(&self, key: &str, start: u64, len: u64) -> Result<Bytes, GetError> {
        if len == 0 {
            return Ok(Bytes::new());
        }
        let range = format!("bytes={start}-{}", start.saturating_add(len - 1));
        Ok(self.fetch("get range", key, Some((range, start)), len).await?.0)
    }

    /// The object as a stream. Only the opening is tried again; [`download`](Self::download) resumes.
    pub async fn get_stream(&self, key: &str) -> Result<ObjectStream, GetError> {
        self.open_stream(key, 0, None).await.map_err(|refusal| self.get_error("get", key, 0, refusal))
    }

    /// A stream from byte `start`, on the condition that the object still is `etag`.
    pub(crate) async fn open_stream(&self, key: &str, start: u64, etag: Option<&str>) -> Result<ObjectStream, Refusal> {
        let run = self.run("get", key, 0, || {
            let request = self.client().get_object().bucket(self.bucket()).key(self.full_key(key));
            let request = if start > 0 { request.range(format!("bytes={start}-")) } else { request };
            let request = request.set_if_match(etag.map(str::to_owned));
            async move { request.send().await.map_err(classify) }
        });
        let output = run.await.result?;
        let silence_max = self.retry().attempt_timeout;
        Ok(ObjectStream {
            bytes: length(&output),
            etag: output.e_tag.unwrap_or_default(),
            body: Box::pin(output.body.into_async_read()),
            silence_max,
            silence: Box::pin(tokio::time::sleep(silence_max)),
        })
    }

    async fn fetch(
        &self,
        operation: &'static str,
        key: &str,
        range: Option<(String, u64)>,
        bytes_max: u64,
    ) -> Result<(Bytes, String), GetError> {
        let start = range.as_ref().map_or(0, |(_, start)| *start);
        let run = self.run(operation, key, bytes_max, || {
            let request = self.client().get_object().bucket(self.bucket()).key(self.full_key(key));
            let request = request.set_range(range.as_ref().map(|(header, _)| header.clone()));
            async move {
                let output = request.send().await.map_err(classify)?;
                let bytes = length(&output);
                let etag = output.e_tag.unwrap_or_default();
                if bytes > bytes_max {
                    return Ok((Err(bytes), etag));
                }
                let body = collect(output.body, bytes, bytes_max).await?;
                Ok((Ok(body), etag))
            }
        });
        match run.await.result.map_err(|refusal| self.get_error(operation, key, start, refusal))? {
            (Ok(body), etag) => Ok((body, etag)),
            (Err(bytes), _) => Err(GetError::TooLarge { place: Box::new(self.place(operation, key)), bytes, bytes_max }),
        }
    }

    fn get_error(&self, operation: &'static str, key: &str, start: u64, refusal: Refusal) -> GetError {
        let place = self.place(operation, key);
        match refusal {
            Refusal::NotFound => GetError::NotFound { place: Box::new(place) },
            Refusal::BadRange => GetError::PastEnd { place: Box::new(place), start },
            other => GetError::Store(other.into_failure(place)),
        }
    }
}

fn length(output: &GetObjectOutput) -> u64 {
    output.content_length.and_then(|len| u64::try_from(len).ok()).unwrap_or(0)
}

/// Reads a body whose length was announced; one that breaks off or runs over is as good as none.
async fn collect(mut body: ByteStream, bytes: u64, bytes_max: u64) -> Result<Bytes, Attempt> {
    let mut all = BytesMut::new();
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(|error| Attempt::Again(format!("the body broke off: {}", causes(&error))))?;
        if (all.len() + chunk.len()) as u64 > bytes_max {
            return Err(Attempt::Again(format!("the body is longer than the {bytes} bytes announced")));
        }
        // The common small object arrives as one chunk and is not copied.
        if all.is_empty() && chunk.len() as u64 == bytes {
            return Ok(chunk);
        }
        all.extend_from_slice(&chunk);
    }
    if all.len() as u64 != bytes {
        return Err(Attempt::Again(format!("the body broke off after {} of {bytes} bytes", all.len())));
    }
    Ok(all.freeze())
}
