//! Uploading files for items and inputs.
//!
//! Owns streaming a file to the cluster and checking that it arrived as it was. Does not own where a spec names it.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::Stream;
use reqwest::Body;
use sha2::{Digest as _, Sha256};
use tokio::fs::File;
use tokio::io::AsyncReadExt as _;
use volley_jobspecs::api::UploadAnswer;

use crate::client::Client;
use crate::error::Error;
use crate::http::{Call, Repeat};

/// Bytes read from the file at once: large enough that the system calls don't count.
const READ_BYTES: usize = 256 * 1024;

impl Client {
    /// Uploads a file. `progress` is told of the bytes of each piece; a retry begins anew.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Checksum`] when it arrived changed, code `too_large`.
    pub async fn upload(&self, path: &Path, progress: Arc<dyn Fn(u64) + Send + Sync>) -> Result<UploadAnswer, Error> {
        // An upload that nobody got to hear of is removed by the cluster after a while.
        self.retry(Repeat::Always, || self.upload_once(path, progress.clone())).await
    }

    async fn upload_once(&self, path: &Path, progress: Arc<dyn Fn(u64) + Send + Sync>) -> Result<UploadAnswer, Error> {
        let file = |source| Error::File { path: path.to_owned(), doing: "read", source };
        let open = File::open(path).await.map_err(file)?;
        let length = open.metadata().await.map_err(file)?.len();
        let hash = Arc::new(Mutex::new(Sha256::new()));
        let call = Call::post(&["uploads"], format!("upload {}", path.display())).header("content-length", length);
        let body = Body::wrap_stream(pieces(open, hash.clone(), progress));
        let answer = self.send_body(&call, Some(("application/octet-stream", body)), None).await?;
        let answer: UploadAnswer = answer.json().await?;
        let found = hex::encode(hash.lock().unwrap_or_else(PoisonError::into_inner).clone().finalize());
        if answer.sha256 == found {
            Ok(answer)
        } else {
            Err(Error::Checksum { what: path.display().to_string(), wanted: found, found: answer.sha256 })
        }
    }
}

fn pieces(
    file: File,
    hash: Arc<Mutex<Sha256>>,
    progress: Arc<dyn Fn(u64) + Send + Sync>,
) -> impl Stream<Item = std::io::Result<Bytes>> + Send {
    futures::stream::try_unfold(file, move |mut file| {
        let (hash, progress) = (hash.clone(), progress.clone());
        async move {
            let mut piece = bytes::BytesMut::with_capacity(READ_BYTES);
            if file.read_buf(&mut piece).await? == 0 {
                return Ok(None);
            }
            // The lock is only ever held here and after the end, so it is never waited for.
            hash.lock().unwrap_or_else(PoisonError::into_inner).update(&piece);
            progress(piece.len() as u64);
            Ok(Some((piece.freeze(), file)))
        }
    })
}
