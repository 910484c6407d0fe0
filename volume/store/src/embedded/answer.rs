//! Disk errors → S3 errors.
//!
//! Owns the codes and the words. A full disk is an answer of its own: 507, which clients try again, so
//! that freeing space is all it takes to go on.

use std::io;

use s3s::{S3Error, S3ErrorCode, s3_error};

use super::disk::DiskError;

/// Status of an answer for which the disk has no room. `s3s` has no code for it.
const INSUFFICIENT_STORAGE: u16 = 507;

impl From<DiskError> for S3Error {
    fn from(error: DiskError) -> Self {
        match error {
            DiskError::NoBucket => s3_error!(NoSuchBucket, "The bucket does not exist."),
            DiskError::BucketExists => s3_error!(BucketAlreadyOwnedByYou, "The bucket exists already and is yours."),
            DiskError::BucketNotEmpty => s3_error!(BucketNotEmpty, "The bucket holds objects; delete them first."),
            DiskError::NoKey => s3_error!(NoSuchKey, "The object does not exist."),
            DiskError::NoUpload => {
                s3_error!(NoSuchUpload, "The multipart upload does not exist, or was completed or aborted.")
            }
            DiskError::Precondition => s3_error!(PreconditionFailed, "A condition of the request does not hold."),
            DiskError::BadPart(words) => s3_error!(InvalidPart, "{words}"),
            DiskError::Io(error) => io_error(error),
        }
    }
}

/// What a failed system call is to a client.
pub(super) fn io_error(error: io::Error) -> S3Error {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            tracing::warn!(%error, "embedded S3: the disk is full");
            let words = "The disk of the embedded S3 server is full; free space or move it to a larger disk.";
            let mut answer = S3Error::with_message(S3ErrorCode::Custom("InsufficientStorage".into()), words);
            if let Ok(status) = hyper::StatusCode::from_u16(INSUFFICIENT_STORAGE) {
                answer.set_status_code(status);
            }
            answer
        }
        io::ErrorKind::InvalidFilename => {
            s3_error!(KeyTooLongError, "The key's path is too long for this server's disk.")
        }
        _ => {
            tracing::error!(%error, "embedded S3: a request failed on the disk");
            s3_error!(InternalError, "The server's disk failed: {error}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_507_and_says_so() {
        let answer = io_error(io::Error::from(io::ErrorKind::StorageFull));
        assert_eq!(answer.status_code().map(|status| status.as_u16()), Some(507));
        assert!(answer.message().is_some_and(|words| words.contains("full")));
        assert_eq!(io_error(io::Error::other("x")).status_code().map(|status| status.as_u16()), Some(500));
    }
}
