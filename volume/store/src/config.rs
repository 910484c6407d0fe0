//! What a [`Store`](crate::Store) is told: where the bucket is, who asks, how long to keep trying.
//!
//! Owns the values and their defaults. Does not read flags or files: the composition root does.

use std::fmt;
use std::time::Duration;

/// Where the bucket is and how to speak to it.
#[derive(Clone)]
pub struct StoreConfig {
    /// `http://host:port` or `https://host`; `None` means AWS in `region`.
    pub endpoint: Option<String>,
    /// Region to sign for. Stores that have none accept any, `us-east-1` by custom.
    pub region: String,
    /// Bucket name.
    pub bucket: String,
    /// Put before every key, with a `/` between; empty means the bucket's root.
    pub prefix: String,
    /// Access key and secret. `None` means the standard chain: environment, profile, web identity, IMDS.
    pub credentials: Option<(String, String)>,
    /// `endpoint/bucket/key` instead of `bucket.endpoint/key`. Most self-hosted stores need it.
    pub force_path_style: bool,
    /// How long and how fast to try again.
    pub retry: Retry,
}

impl StoreConfig {
    /// A bucket on a self-hosted endpoint: path style, region `us-east-1`, no prefix.
    pub fn new(endpoint: &str, bucket: &str, access_key: &str, secret_key: &str) -> Self {
        Self {
            endpoint: Some(endpoint.to_owned()),
            region: "us-east-1".to_owned(),
            bucket: bucket.to_owned(),
            prefix: String::new(),
            credentials: Some((access_key.to_owned(), secret_key.to_owned())),
            force_path_style: true,
            retry: Retry::default(),
        }
    }
}

// Written by hand so that no log line can ever show the secret.
impl fmt::Debug for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreConfig")
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .field("bucket", &self.bucket)
            .field("prefix", &self.prefix)
            .field("access_key", &self.credentials.as_ref().map(|(key, _)| key))
            .field("force_path_style", &self.force_path_style)
            .field("retry", &self.retry)
            .finish_non_exhaustive()
    }
}

/// How one operation is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// From the first attempt's start, no attempt begins later than this. A multipart upload has one budget per
    /// request, not one for all: it may rightly last hours.
    pub budget: Duration,
    /// One attempt may last this long, plus the time its bytes need at [`MIN_BYTES_PER_SECOND`].
    pub attempt_timeout: Duration,
    /// The first pause is drawn from zero to this; it doubles each time.
    pub backoff_first: Duration,
    /// Pauses are never drawn from more than this.
    pub backoff_max: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            // A store that restarts, or a load balancer that moves, is back within a minute.
            budget: Duration::from_secs(60),
            attempt_timeout: Duration::from_secs(20),
            backoff_first: Duration::from_millis(100),
            // Short enough that recovery is noticed at once, long enough that 1,000 workers do not hammer.
            backoff_max: Duration::from_secs(5),
        }
    }
}

/// A link slower than this counts as broken. 128 KiB/s moves an 8 MiB part in about a minute.
pub const MIN_BYTES_PER_SECOND: u64 = 128 * 1024;

impl Retry {
    /// The time limit of one attempt that moves `bytes`.
    pub(crate) fn attempt_limit(&self, bytes: u64) -> Duration {
        self.attempt_timeout + Duration::from_secs(bytes / MIN_BYTES_PER_SECOND)
    }
}
