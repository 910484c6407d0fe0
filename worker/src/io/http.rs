//! Fetching a file over HTTP.
//!
//! Owns which answers are tried again, the checksum, and that a file is whole or not there.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use crate::error::chain;
use crate::ports::{Moved, ObjectError};

/// How long a server may take to accept a connection.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// How long nothing may come before a transfer counts as broken.
const READ_TIME: Duration = Duration::from_secs(30);
/// Tries of one download, with pauses from 200 ms doubling. Few: they hold a slot, which the pause before the next attempt does not.
const TRIES: usize = 4;

/// Fetches `url` into a new file at `path`.
///
/// # Errors
/// [`ObjectError::Missing`] for 4xx answers, [`ObjectError::Mismatch`] for another checksum, [`ObjectError::Failed`] for a server or
/// network that stays in trouble, or a disk that can't be written.
pub async fn download(url: &str, path: &Path, sha256: Option<&str>) -> Result<Moved, ObjectError> {
    let client = client()?;
    let backoff = ExponentialBuilder::default().with_min_delay(Duration::from_millis(200)).with_max_times(TRIES - 1).with_jitter();
    let fetched = (|| fetch(client, url, path)).retry(backoff).when(|e| matches!(e, ObjectError::Failed(_))).await;
    match (fetched, sha256) {
        (Ok(moved), Some(wanted)) if moved.sha256 != wanted => {
            let _ = tokio::fs::remove_file(path).await;
            Err(ObjectError::Mismatch(format!("{url}: its SHA-256 is {}, {wanted} was expected", moved.sha256)))
        }
        (Ok(moved), _) => Ok(moved),
        (Err(why), _) => {
            let _ = tokio::fs::remove_file(path).await;
            Err(why)
        }
    }
}

async fn fetch(client: &reqwest::Client, url: &str, path: &Path) -> Result<Moved, ObjectError> {
    let failed = |e: &dyn std::fmt::Display| ObjectError::Failed(format!("{url}: {e}"));
    let mut answer = client.get(url).send().await.map_err(|e| failed(&chain(&e)))?;
    let status = answer.status();
    if status.is_client_error() && status != reqwest::StatusCode::TOO_MANY_REQUESTS {
        return Err(ObjectError::Missing(format!("{url}: the server answered {status}")));
    }
    if !status.is_success() {
        return Err(failed(&format!("the server answered {status}")));
    }
    let mut file = tokio::fs::File::create(path).await.map_err(|e| failed(&format!("{}: {e}", path.display())))?;
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    while let Some(piece) = answer.chunk().await.map_err(|e| failed(&chain(&e)))? {
        hash.update(&piece);
        bytes += piece.len() as u64;
        file.write_all(&piece).await.map_err(|e| failed(&format!("{}: {e}", path.display())))?;
    }
    file.flush().await.map_err(|e| failed(&format!("{}: {e}", path.display())))?;
    Ok(Moved { bytes, sha256: hex::encode(hash.finalize()) })
}

fn client() -> Result<&'static reqwest::Client, ObjectError> {
    static CLIENT: OnceLock<Result<reqwest::Client, String>> = OnceLock::new();
    CLIENT
        .get_or_init(|| {
            // Whoever came first has set the same one.
            let _ = rustls::crypto::ring::default_provider().install_default();
            reqwest::Client::builder()
                .connect_timeout(CONNECT_TIME)
                .read_timeout(READ_TIME)
                .user_agent(concat!("volley/", env!("CARGO_PKG_VERSION")))
                .build()
                .map_err(|e| e.to_string())
        })
        .as_ref()
        .map_err(|why| ObjectError::Failed(format!("no HTTP client: {why}")))
}
