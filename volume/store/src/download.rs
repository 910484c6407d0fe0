//! `download`, `download_to`: an object → a writer or a file, resumed where it broke off, hash checked.
//!
//! Owns resuming and the atomic file. Does not decompress or unpack.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::Instant;

use crate::connect::Store;
use crate::error::{ErrorKind, Failure, Place, answers};
use crate::retry::{Refusal, random_tag};

/// Bytes moved at a time: one system call each way.
const COPY_BYTES: usize = 256 * 1024;
/// Pause before a broken download is resumed; opening has the full backoff.
const RESUME_PAUSE: Duration = Duration::from_millis(200);

/// What was fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Downloaded {
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256, lower-case hex.
    pub sha256: String,
    /// Quoted entity tag.
    pub etag: String,
}

/// Why an object was not fetched.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// No such object.
    #[error("{place}: no such object; check the key")]
    NotFound {
        /// Where.
        place: Box<Place>,
    },
    /// The object was replaced while it was being read.
    #[error("{place}: the object was replaced during the download; download it again")]
    Changed {
        /// Where.
        place: Box<Place>,
    },
    /// The hash is not the expected one.
    #[error("{place}: sha256 is {found}, expected {expected}; the object was replaced or damaged")]
    Corrupt {
        /// Where.
        place: Box<Place>,
        /// As fetched, lower-case hex.
        found: String,
        /// As expected.
        expected: String,
    },
    /// The writer or file on this side failed.
    #[error("{place}: writing to {} failed: {source}; check its disk and permissions", .target.display())]
    Write {
        /// Where.
        place: Box<Place>,
        /// The file, or `stream`.
        target: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Anything that is not about this object.
    #[error(transparent)]
    Store(#[from] Failure),
}

impl DownloadError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::Changed { .. } => ErrorKind::Precondition,
            Self::Corrupt { .. } => ErrorKind::Corrupt,
            Self::Write { .. } => ErrorKind::Local,
            Self::Store(failure) => failure.kind(),
        }
    }
}
answers!(DownloadError);

impl Store {
    /// Copies the object into `writer` and flushes it. With `expected_sha256` (hex) a wrong hash is an error, after all
    /// bytes were written: the writer's owner must discard them.
    pub async fn download<W>(&self, key: &str, writer: &mut W, expected_sha256: Option<&str>) -> Result<Downloaded, DownloadError>
    where
        W: AsyncWrite + Unpin + Send,
    {
        self.copy(key, writer, Path::new("stream"), expected_sha256).await
    }

    /// Fetches the object into the file `path`, which appears whole and synced, or not at all.
    pub async fn download_to(&self, key: &str, path: &Path, expected_sha256: Option<&str>) -> Result<Downloaded, DownloadError> {
        let failed = |source| self.write_error(key, path, source);
        let part = PartFile { path: part_path(path) };
        let mut file = tokio::fs::File::create_new(&part.path).await.map_err(failed)?;
        let done = self.copy(key, &mut file, path, expected_sha256).await?;
        file.sync_all().await.map_err(failed)?;
        tokio::fs::rename(&part.path, path).await.map_err(failed)?;
        Ok(done)
    }

    async fn copy<W>(&self, key: &str, writer: &mut W, target: &Path, expected: Option<&str>) -> Result<Downloaded, DownloadError>
    where
        W: AsyncWrite + Unpin + Send,
    {
        let mut hasher = Sha256::new();
        let mut buffer = vec![0_u8; COPY_BYTES];
        let mut stream = self.open_stream(key, 0, None).await.map_err(|refusal| self.download_error(key, refusal))?;
        let (total, etag) = (stream.bytes, stream.etag.clone());
        let mut at = 0;
        let mut progress = Instant::now();
        let mut breaks = 0;
        while at < total {
            let broken = match stream.read(&mut buffer).await {
                Ok(0) => format!("the body ended after {at} of {total} bytes"),
                Ok(read) => {
                    hasher.update(&buffer[..read]);
                    writer.write_all(&buffer[..read]).await.map_err(|source| self.write_error(key, target, source))?;
                    at += read as u64;
                    progress = Instant::now();
                    continue;
                }
                Err(error) => format!("the body broke off after {at} of {total} bytes: {error}"),
            };
            breaks += 1;
            let waited = progress.elapsed();
            if waited >= self.retry().budget {
                let place = Box::new(self.place("download", key));
                return Err(DownloadError::Store(Failure::Unavailable { place, attempts: breaks, waited, last: broken }));
            }
            tracing::debug!(key, broken, "s3: resuming a download");
            tokio::time::sleep(RESUME_PAUSE).await;
            stream = self.open_stream(key, at, Some(&etag)).await.map_err(|refusal| self.download_error(key, refusal))?;
        }
        writer.flush().await.map_err(|source| self.write_error(key, target, source))?;
        let sha256 = hex::encode(hasher.finalize());
        match expected {
            Some(expected) if !expected.eq_ignore_ascii_case(&sha256) => {
                Err(DownloadError::Corrupt { place: Box::new(self.place("download", key)), found: sha256, expected: expected.to_owned() })
            }
            _ => Ok(Downloaded { bytes: total, sha256, etag }),
        }
    }

    fn download_error(&self, key: &str, refusal: Refusal) -> DownloadError {
        let place = Box::new(self.place("download", key));
        match refusal {
            Refusal::NotFound => DownloadError::NotFound { place },
            Refusal::Precondition | Refusal::BadRange => DownloadError::Changed { place },
            other => DownloadError::Store(other.into_failure(*place)),
        }
    }

    fn write_error(&self, key: &str, target: &Path, source: std::io::Error) -> DownloadError {
        DownloadError::Write { place: Box::new(self.place("download", key)), target: target.to_owned(), source }
    }
}

/// A file not yet complete, beside its final place so that the rename stays on one file system. Removed when dropped.
struct PartFile {
    path: PathBuf,
}

impl Drop for PartFile {
    fn drop(&mut self) {
        // After the rename there is nothing left to remove.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn part_path(path: &Path) -> PathBuf {
    // Not the target's own name with a suffix: that may be as long as a name can be.
    path.with_file_name(format!(".volley-part-{}", random_tag()))
}
