//! `connect`: configuration → [`Store`], the handle every operation hangs on.
//!
//! Owns the SDK client and its settings. Does not speak to the bucket: `probe` does that.

use std::sync::Arc;
use std::time::Duration;

use aws_config::BehaviorVersion;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::{
    Credentials, ProvideCredentials, Region, RequestChecksumCalculation, ResponseChecksumValidation, SharedCredentialsProvider,
    StalledStreamProtectionConfig, retry::RetryConfig, timeout::TimeoutConfig,
};
use aws_smithy_http_client::{Builder as HttpBuilder, tls};
use aws_smithy_runtime_api::client::http::SharedHttpClient;

use crate::config::{Retry, StoreConfig};
use crate::retry::causes;

/// A peer in the same region answers a SYN in milliseconds; 5 s covers a lost packet or two.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle connections kept per endpoint: a worker's slots and the coordinator's uploads reuse them.
const IDLE_CONNECTIONS_MAX: usize = 64;
/// The slowest link of the standard credentials chain (IMDS on a host that has none) gives up in about 2 s.
const CREDENTIALS_TIMEOUT: Duration = Duration::from_secs(10);

/// A bucket, ready for operations. Clones share one connection pool.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    client: Client,
    endpoint: String,
    region: String,
    bucket: String,
    /// Empty, or ends in `/`.
    prefix: String,
    retry: Retry,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store(s3://{}/{} at {})", self.inner.bucket, self.inner.prefix, self.inner.endpoint)
    }
}

/// Why no [`Store`] could be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The endpoint is not a URL that can be used.
    #[error("S3 endpoint `{endpoint}` is not a URL of the form http://host:port or https://host; correct the endpoint")]
    BadEndpoint {
        /// As configured.
        endpoint: String,
    },
    /// A name is empty or has a form no store accepts.
    #[error("S3 bucket name `{bucket}` is not valid: 3 to 63 lower-case letters, digits, dots and hyphens; correct the bucket")]
    BadBucket {
        /// As configured.
        bucket: String,
    },
    /// The prefix would not survive URL handling.
    #[error("S3 key prefix `{prefix}` may not start with `/` nor contain `//`, `.` or `..` segments; correct the prefix")]
    BadPrefix {
        /// As configured.
        prefix: String,
    },
    /// The standard chain came up empty.
    #[error(
        "no S3 credentials: none configured, and the standard chain (environment, profile, web identity, instance metadata) found none: {reason}; \
         set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the keys in the configuration"
    )]
    NoCredentials {
        /// What the chain said.
        reason: String,
    },
}

impl Store {
    /// Makes a client for the bucket. Only the credentials chain may use the network here.
    pub async fn connect(config: &StoreConfig) -> Result<Self, ConnectError> {
        check(config)?;
        let plain_http = config.endpoint.as_deref().is_some_and(|url| url.starts_with("http://"));
        let http = http_client(plain_http);
        let credentials = match &config.credentials {
            Some((access_key, secret)) => {
                SharedCredentialsProvider::new(Credentials::new(access_key, secret, None, None, "volley configuration"))
            }
            None => from_chain(&config.region).await?,
        };

        let mut builder = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new(config.region.clone()))
            .credentials_provider(credentials)
            .http_client(http)
            .force_path_style(config.force_path_style)
            // Checksums in trailers are refused by many stores; integrity is ours (sha256 of what was streamed) and SigV4's.
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            // One retry rule and one set of time limits: ours.
            .retry_config(RetryConfig::disabled())
            .timeout_config(TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).build())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled());
        if let Some(endpoint) = &config.endpoint {
            builder = builder.endpoint_url(endpoint);
        }
        let prefix = match config.prefix.trim_end_matches('/') {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        Ok(Self {
            inner: Arc::new(Inner {
                client: Client::from_conf(builder.build()),
                endpoint: config.endpoint.clone().unwrap_or_else(|| format!("AWS {}", config.region)),
                region: config.region.clone(),
                bucket: config.bucket.clone(),
                prefix,
                retry: config.retry,
            }),
        })
    }

    /// The same bucket with another retry rule, sharing the connection pool.
    pub fn with_retry(&self, retry: Retry) -> Self {
        let inner = &self.inner;
        Self {
            inner: Arc::new(Inner {
                client: inner.client.clone(),
                endpoint: inner.endpoint.clone(),
                region: inner.region.clone(),
                bucket: inner.bucket.clone(),
                prefix: inner.prefix.clone(),
                retry,
            }),
        }
    }

    /// The bucket's name.
    pub fn bucket(&self) -> &str {
        &self.inner.bucket
    }

    /// The endpoint as configured, or `AWS <region>`.
    pub fn endpoint(&self) -> &str {
        &self.inner.endpoint
    }

    /// What stands before every key: empty, or ending in `/`.
    pub fn prefix(&self) -> &str {
        &self.inner.prefix
    }

    /// `s3://bucket/prefix/key`, for people.
    pub fn url(&self, key: &str) -> String {
        format!("s3://{}/{}{key}", self.inner.bucket, self.inner.prefix)
    }

    pub(crate) fn client(&self) -> &Client {
        &self.inner.client
    }

    pub(crate) fn region(&self) -> &str {
        &self.inner.region
    }

    pub(crate) fn retry(&self) -> &Retry {
        &self.inner.retry
    }

    pub(crate) fn full_key(&self, key: &str) -> String {
        format!("{}{key}", self.inner.prefix)
    }
}

fn check(config: &StoreConfig) -> Result<(), ConnectError> {
    if let Some(endpoint) = &config.endpoint {
        let usable = endpoint
            .parse::<hyper::Uri>()
            .is_ok_and(|uri| uri.host().is_some_and(|host| !host.is_empty()) && matches!(uri.scheme_str(), Some("http" | "https")));
        if !usable {
            return Err(ConnectError::BadEndpoint { endpoint: endpoint.clone() });
        }
    }
    let bucket = &config.bucket;
    let letters = bucket.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'.' || b == b'-');
    if !(3..=63).contains(&bucket.len()) || !letters {
        return Err(ConnectError::BadBucket { bucket: bucket.clone() });
    }
    let prefix = config.prefix.strip_suffix('/').unwrap_or(&config.prefix);
    if !prefix.is_empty() && prefix.split('/').any(|segment| matches!(segment, "" | "." | "..")) {
        return Err(ConnectError::BadPrefix { prefix: config.prefix.clone() });
    }
    Ok(())
}

/// TLS loads the system's root certificates, which a bare machine may not have: only when it is needed.
fn http_client(plain: bool) -> SharedHttpClient {
    let builder = HttpBuilder::new().pool_max_idle_per_host(IDLE_CONNECTIONS_MAX);
    if plain {
        builder.build_http()
    } else {
        builder.tls_provider(tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring)).build_https()
    }
}

async fn from_chain(region: &str) -> Result<SharedCredentialsProvider, ConnectError> {
    let none = |reason: String| ConnectError::NoCredentials { reason };
    let loaded =
        aws_config::defaults(BehaviorVersion::latest()).region(Region::new(region.to_owned())).http_client(http_client(false)).load().await;
    let provider = loaded.credentials_provider().ok_or_else(|| none("the chain is empty".to_owned()))?;
    match tokio::time::timeout(CREDENTIALS_TIMEOUT, provider.provide_credentials()).await {
        Ok(Ok(_)) => Ok(provider),
        Ok(Err(error)) => Err(none(causes(&error))),
        Err(_elapsed) => Err(none(format!("no answer within {} s", CREDENTIALS_TIMEOUT.as_secs()))),
    }
}
