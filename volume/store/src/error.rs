//! What can go wrong with any request: [`Failure`], the place it happened, and the kind it is.
//!
//! Owns the variants that all operations share and their wording. Operation errors add their own
//! variants around it. Does not decide what is tried again (`retry.rs`).

use std::fmt;
use std::time::Duration;

/// The question a caller asks of any error of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The object (or the bucket) does not exist.
    NotFound,
    /// A condition did not hold; the object is as someone else left it.
    Precondition,
    /// Credentials are wrong or not allowed to do this.
    Denied,
    /// The store did not answer usefully within the budget. A write may or may not have happened.
    Unavailable,
    /// More bytes than the caller allowed.
    TooLarge,
    /// The bytes are not the ones that were expected.
    Corrupt,
    /// A file or stream on this side failed.
    Local,
    /// The store refused the request for good.
    Rejected,
}

impl ErrorKind {
    /// Whether the same call may succeed later with nothing changed on this side.
    pub fn is_retryable(self) -> bool {
        match self {
            Self::Unavailable => true,
            Self::NotFound | Self::Precondition | Self::Denied | Self::TooLarge | Self::Corrupt | Self::Local | Self::Rejected => false,
        }
    }
}

/// Where an operation was going when it failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The operation, as an infinitive: `get`, `put`, `list`.
    pub operation: &'static str,
    /// The endpoint as configured, or `AWS <region>`.
    pub endpoint: String,
    /// Bucket name.
    pub bucket: String,
    /// Full key, prefix included; empty for the bucket itself.
    pub key: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s3://{}/{} at {}", self.operation, self.bucket, self.key, self.endpoint)
    }
}

/// A failure that any operation can meet.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// 401, 403 or an answer that means the same.
    #[error("{place}: access denied ({code}: {message}); check the access key, the secret and the bucket's policy")]
    Denied {
        /// Where.
        place: Box<Place>,
        /// The store's error code.
        code: String,
        /// The store's own words.
        message: String,
    },
    /// The bucket is not there.
    #[error("{place}: the bucket does not exist; create it, or correct the bucket name")]
    NoBucket {
        /// Where.
        place: Box<Place>,
    },
    /// The budget ran out. A write may or may not have happened.
    #[error(
        "{place}: no success within {:.1} s ({attempts} attempts), last: {last}; check that the endpoint is up and reachable, then try again",
        .waited.as_secs_f32()
    )]
    Unavailable {
        /// Where.
        place: Box<Place>,
        /// Attempts made.
        attempts: u32,
        /// Time from the first attempt to the last answer.
        waited: Duration,
        /// What the last attempt ended with.
        last: String,
    },
    /// The store will not do this, however often it is asked.
    #[error("{place}: the store refused with {status} {code}: {message}; trying again will not help")]
    Rejected {
        /// Where.
        place: Box<Place>,
        /// HTTP status, 0 when the request never left this process.
        status: u16,
        /// The store's error code.
        code: String,
        /// The store's own words.
        message: String,
    },
}

impl Failure {
    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Denied { .. } => ErrorKind::Denied,
            Self::NoBucket { .. } => ErrorKind::NotFound,
            Self::Unavailable { .. } => ErrorKind::Unavailable,
            Self::Rejected { .. } => ErrorKind::Rejected,
        }
    }

    /// Whether the same call may succeed later with nothing changed on this side.
    pub fn is_retryable(&self) -> bool {
        self.kind().is_retryable()
    }
}

/// An error of any operation: its kind, and whether to try again later.
macro_rules! answers {
    ($error:ty) => {
        impl $error {
            /// Whether the same call may succeed later with nothing changed on this side.
            pub fn is_retryable(&self) -> bool {
                self.kind().is_retryable()
            }
        }
    };
}
pub(crate) use answers;
