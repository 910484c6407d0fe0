//! Identifiers. Each is its own type, so that a job can't be handed where a worker is wanted.
//!
//! Owns their text forms and limits. Does not own how they are chosen.

use std::fmt;
use std::str::FromStr;

use minicbor::{Decode, Encode};
use serde::{Serialize, Serializer};

/// Longest name of a worker, tenant, job or label, in bytes: each ends up in subjects and keys, which have their own limits.
pub const NAME_LEN_MAX: usize = 64;

/// A job: the log sequence of the `Submit` record that created it, so it is unique in a cluster and orders by age.
/// Written `j` and the decimal number: `j1042`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
#[cbor(transparent)]
pub struct JobId(#[n(0)] pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "j{}", self.0)
    }
}

impl Serialize for JobId {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

/// Why a text is no identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// A job id is `j` and a decimal number.
    #[error("{0:?} is no job id: one looks like j1042 (`volley jobs` lists them)")]
    Job(String),
    /// A name has characters or a length that subjects and keys can't carry.
    #[error("{0:?} is no name: use 1 to 64 of a-z A-Z 0-9 _ -, beginning with a letter or digit")]
    Name(String),
    /// A volume id is `v` and 32 digits in hex.
    #[error("{0:?} is no volume id: one is v and 32 digits in hex (`volley volume ls` lists them)")]
    Volume(String),
    /// A snapshot id is `s` and 32 digits in hex.
    #[error("{0:?} is no snapshot id: one is s and 32 digits in hex (`volley volume ls` lists them)")]
    Snapshot(String),
}

impl FromStr for JobId {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        text.strip_prefix('j')
            .filter(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|digits| digits.parse().ok())
            .map(JobId)
            .ok_or_else(|| IdError::Job(text.to_owned()))
    }
}

/// Checks that `text` can be one token of a NATS subject and one segment of an S3 key.
///
/// # Errors
/// [`IdError::Name`] when it can't.
pub fn check_name(text: &str) -> Result<(), IdError> {
    let mut bytes = text.bytes();
    let first = bytes.next().is_some_and(|b| b.is_ascii_alphanumeric());
    if first && text.len() <= NAME_LEN_MAX && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
        Ok(())
    } else {
        Err(IdError::Name(text.to_owned()))
    }
}

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
        #[cbor(transparent)]
        pub struct $name(#[n(0)] String);

        impl $name {
            /// Checks and wraps a name.
            ///
            /// # Errors
            /// [`IdError::Name`] when subjects and keys can't carry it.
            pub fn new(text: &str) -> Result<Self, IdError> {
                check_name(text).map(|()| Self(text.to_owned()))
            }

            /// The name itself.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(&self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::new(text)
            }
        }
    };
}

name_id!(
    /// A worker: the name its host keeps over restarts.
    WorkerId
);
name_id!(
    /// A tenant: whose quota a job counts against and whose token may see it.
    TenantId
);

/// One start of a worker process: random, so that a restarted worker is never taken for the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode, Serialize)]
#[cbor(transparent)]
pub struct Incarnation(#[n(0)] pub u64);

/// A leader's time in office, rising.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode, Serialize, Default)]
#[cbor(transparent)]
pub struct Term(#[n(0)] pub u64);

/// One try of one task. The sequence is that of the `Assign` record, so no two attempts of a cluster share a name even when a
/// rerun starts counting afresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode, Serialize)]
pub struct AttemptName {
    /// The job.
    #[n(0)]
    pub job: JobId,
    /// The stage, 0 until a job has several.
    #[n(1)]
    pub stage: u16,
    /// The task, counted from 0.
    #[n(2)]
    pub index: u32,
    /// Which try of the task this is, counted from 1 over all rounds.
    #[n(3)]
    pub number: u32,
    /// The log sequence of the record that assigned it.
    #[n(4)]
    pub sequence: u64,
}

impl fmt::Display for AttemptName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}/{}-{}", self.job, self.stage, self.index, self.number, self.sequence)
    }
}

/// A bundle: the record that assigned it and its place in that record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode, Serialize)]
pub struct BundleId {
    /// The log sequence of the record that assigned it.
    #[n(0)]
    pub sequence: u64,
    /// Its place among the record's assignments, counted from 0.
    #[n(1)]
    pub place: u32,
}

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident, $letter:literal, $error:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
        #[cbor(transparent)]
        pub struct $name(#[cbor(n(0), with = "minicbor::bytes")] pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{:032x}"), u128::from_be_bytes(self.0))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                // One text for one id: no capital letters, no sign.
                let plain = |digits: &&str| digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'a'..=b'f'));
                let digits = text.strip_prefix($letter).filter(plain);
                let number = digits.and_then(|digits| u128::from_str_radix(digits, 16).ok());
                number.map(|number| Self(number.to_be_bytes())).ok_or_else(|| IdError::$error(text.to_owned()))
            }
        }
    };
}

random_id!(
    /// A volume: 128 bits, drawn at random or, where a task's clone is kept, computed from the attempt and the slot, so that keeping it
    /// twice is one volume. Written `v` and 32 digits in hex. Never used again.
    VolumeId,
    "v",
    Volume
);
random_id!(
    /// A snapshot of a volume: 128 bits drawn at random. Written `s` and 32 digits in hex. Never used again.
    SnapshotId,
    "s",
    Snapshot
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_ids_round_trip_and_refuse_other_text() {
        assert_eq!("j1042".parse(), Ok(JobId(1042)));
        assert_eq!(JobId(7).to_string(), "j7");
        for bad in ["", "j", "1042", "j-1", "j1 ", "jx", "j99999999999999999999999"] {
            assert!(bad.parse::<JobId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_that_subjects_can_not_carry_are_refused() {
        assert!(WorkerId::new("host-1").is_ok());
        for bad in ["", "a.b", "a b", "*", ">", "-x", &"x".repeat(65), "é"] {
            assert!(WorkerId::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn volumes_and_snapshots_have_one_text_each() {
        let id = VolumeId([0xAB; 16]);
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(SnapshotId([0; 16]).to_string(), format!("s{}", "0".repeat(32)));
        for bad in
            ["", "v", &"0".repeat(33), &format!("s{}", "0".repeat(32)), &format!("v+{}", "0".repeat(31)), &id.to_string().to_uppercase()]
        {
            assert!(bad.parse::<VolumeId>().is_err(), "{bad:?}");
        }
    }
}
