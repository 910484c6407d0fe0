//! Objects on S3, through the store all of Volley uses.
//!
//! Owns the choice of the bucket and what a store's error means for a task. Does not own retries (`volley-store`).

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Mutex;
use volley_store::{ErrorKind, Store, StoreConfig, UploadOptions};

use crate::ports::{Moved, ObjectError, ObjectName, Objects};

/// How long one request of a task may be tried again when its caller doesn't say otherwise: a store that is in trouble for minutes
/// makes tasks wait, not fail.
pub const BUDGET_DEFAULT: Duration = Duration::from_secs(300);
/// Other buckets kept connected.
const BUCKETS_KEPT: usize = 32;

/// The cluster's bucket, and others that inputs name, all on one endpoint with one set of credentials.
#[derive(Clone)]
pub struct S3Objects {
    own: Store,
    config: StoreConfig,
    others: Arc<Mutex<BTreeMap<String, Store>>>,
}

impl std::fmt::Debug for S3Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("S3Objects").field("config", &self.config).finish_non_exhaustive()
    }
}

impl S3Objects {
    /// On a store made from `config`, which is kept to reach other buckets. `budget` is how long each request may be tried again
    /// ([`BUDGET_DEFAULT`]); after it, the attempt has failed as `storage_failed`.
    #[must_use]
    pub fn new(own: &Store, mut config: StoreConfig, budget: Duration) -> Self {
        config.retry.budget = budget;
        Self { own: own.with_retry(config.retry), config, others: Arc::default() }
    }

    /// The cluster's own bucket.
    #[must_use]
    pub fn own(&self) -> &Store {
        &self.own
    }

    async fn store(&self, bucket: Option<&str>) -> Result<Store, ObjectError> {
        let Some(bucket) = bucket.filter(|bucket| *bucket != self.own.bucket() || !self.own.prefix().is_empty()) else {
            return Ok(self.own.clone());
        };
        let mut others = self.others.lock().await;
        if let Some(store) = others.get(bucket) {
            return Ok(store.clone());
        }
        let mut config = self.config.clone();
        bucket.clone_into(&mut config.bucket);
        config.prefix.clear();
        let store = Store::connect(&config).await.map_err(|e| ObjectError::Failed(e.to_string()))?;
        while others.len() >= BUCKETS_KEPT {
            others.pop_first();
        }
        others.insert(bucket.to_owned(), store.clone());
        Ok(store)
    }
}

fn object_error(kind: ErrorKind, error: &dyn std::fmt::Display) -> ObjectError {
    match kind {
        // Denied is the spec's mistake as well: the bucket it names isn't one the cluster may read.
        ErrorKind::NotFound | ErrorKind::Denied => ObjectError::Missing(error.to_string()),
        ErrorKind::Corrupt => ObjectError::Mismatch(error.to_string()),
        ErrorKind::Precondition | ErrorKind::Unavailable | ErrorKind::TooLarge | ErrorKind::Local | ErrorKind::Rejected => {
            ObjectError::Failed(error.to_string())
        }
    }
}

impl Objects for S3Objects {
    async fn get(&self, key: &str, bytes_max: u64) -> Result<Bytes, ObjectError> {
        self.own.get(key, bytes_max).await.map_err(|e| object_error(e.kind(), &e))
    }

    async fn download(&self, object: &ObjectName, path: &Path, sha256: Option<&str>) -> Result<Moved, ObjectError> {
        let store = self.store(object.bucket.as_deref()).await?;
        let done = store.download_to(&object.key, path, sha256).await.map_err(|e| object_error(e.kind(), &e))?;
        Ok(Moved { bytes: done.bytes, sha256: done.sha256 })
    }

    fn own_prefix(&self, object: &ObjectName) -> Option<&str> {
        object.bucket.as_deref().is_none_or(|bucket| bucket == self.own.bucket()).then(|| self.own.prefix())
    }

    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), ObjectError> {
        self.own.put(key, bytes).await.map(|_| ()).map_err(|e| ObjectError::Failed(e.to_string()))
    }

    async fn upload(&self, key: &str, file: File) -> Result<Moved, ObjectError> {
        let bytes_hint = file.metadata().ok().map(|meta| meta.len());
        let options = UploadOptions { bytes_hint, ..UploadOptions::default() };
        let done =
            self.own.upload_stream(key, tokio::fs::File::from_std(file), &options).await.map_err(|e| ObjectError::Failed(e.to_string()))?;
        Ok(Moved { bytes: done.bytes, sha256: done.sha256 })
    }
}
