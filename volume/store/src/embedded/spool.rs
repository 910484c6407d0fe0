//! A request's body → a file in `tmp/`, with its hash.
//!
//! Owns the crossing from async to blocking: bodies are gathered and written in large pieces.

use bytes::Bytes;
use futures::StreamExt;
use s3s::dto::{Metadata, StreamingBlob};
use s3s::{S3Result, s3_error};

use super::disk::{Disk, DiskError, TempFile, now_ms};
use super::object_file::Trailer;
use super::service::Service;

/// Body bytes gathered before they go to a blocking thread; smaller bodies cross over once.
const SPOOL_BYTES: usize = 1024 * 1024;

impl Service {
    /// Takes in a body: all but the last bytes are in the spool's file when it returns.
    pub(super) async fn receive(&self, body: Option<StreamingBlob>, announced: Option<i64>) -> S3Result<Spool> {
        let mut spool = Spool { temp: None, hasher: blake3::Hasher::new(), bytes: 0, pending: Vec::new() };
        let mut gathered = 0;
        if let Some(mut body) = body {
            while let Some(chunk) = body.next().await {
                let chunk = chunk.map_err(|error| s3_error!(IncompleteBody, "The body broke off or is not what was signed: {error}"))?;
                gathered += chunk.len();
                spool.pending.push(chunk);
                if gathered >= SPOOL_BYTES {
                    gathered = 0;
                    spool = self.blocking(move |disk| spool.flushed(disk)).await?;
                }
            }
        }
        let total = spool.bytes + gathered as u64;
        match announced {
            Some(announced) if u64::try_from(announced) != Ok(total) => {
                Err(s3_error!(IncompleteBody, "The body has {total} bytes, Content-Length said {announced}."))
            }
            _ => Ok(spool),
        }
    }
}

/// A body on its way to the disk.
pub(super) struct Spool {
    temp: Option<TempFile>,
    hasher: blake3::Hasher,
    /// Bytes written to the file.
    bytes: u64,
    pending: Vec<Bytes>,
}

impl Spool {
    /// Writes what is pending.
    fn flushed(mut self, disk: &Disk) -> Result<Self, DiskError> {
        disk.check_room(self.pending.iter().map(|chunk| chunk.len() as u64).sum())?;
        let mut temp = match self.temp.take() {
            Some(temp) => temp,
            None => disk.temp_file()?,
        };
        for chunk in self.pending.drain(..) {
            self.hasher.update(&chunk);
            temp.write_all(&chunk)?;
            self.bytes += chunk.len() as u64;
        }
        self.temp = Some(temp);
        Ok(self)
    }

    /// The file with the whole body, and a trailer for it.
    pub(super) fn finished(
        self,
        disk: &Disk,
        key: String,
        content_type: Option<String>,
        metadata: Option<Metadata>,
    ) -> Result<(TempFile, Trailer), DiskError> {
        let spool = self.flushed(disk)?;
        let temp = match spool.temp {
            Some(temp) => temp,
            None => disk.temp_file()?,
        };
        let etag = spool.hasher.finalize().to_hex().to_string();
        let metadata = metadata.into_iter().flatten().collect();
        Ok((temp, Trailer { key, bytes: spool.bytes, etag, modified_ms: now_ms(), content_type, metadata }))
    }
}
