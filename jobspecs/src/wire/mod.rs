//! The words on the wire, in CBOR with numbered fields.
//!
//! Owns encoding, decoding and how both may grow: a field is added with a new number and `Option` or `#[cbor(default)]`; a
//! number is never used again; a new kind of record is a new variant, behind a new [`LEVEL`]. An old reader skips fields it does
//! not know, and refuses a variant it does not know. Tests below hold old and new readers against each other.
//!
//! | level | what came |
//! |---|---|
//! | 1 | everything but what follows |
//! | 2 | `Checkpointed`, `UploadGone`, `Uploaded`, and the uploads a submit names |
//! | 3 | a job notes which record opened its round; a queue deadline says what was waited for; items and stored specs are named for one job; `UploadFound`; a removed job is not rerun |
//! | 4 | a token says when it was made; `RemoveTenant`; an attempt that is handed back is no try |
//! | 5 | an attempt that ends without having begun is no try, however it ends; nothing that a worker leaves behind of its own will had begun; an attempt that is lost has the isolation its job asks for |
//! | 6 | what a worker records says which tiers it lacks and why, its room for templates and its images, and is recorded anew when it changes; what a task needs has its image in it; an image that no worker has is an input that is missing |
//! | 7 | volumes: what jobs ask for, who writes, what is promoted, pinned, kept and removed |
//! | 8 | volumes grow by request; how much a tenant's volumes may be, and what of them is stored |

pub mod guest;
pub mod live;
pub mod plan;
pub mod record;
pub mod report;
pub mod shell;
pub mod trace;
pub mod volume;
pub mod work;

use minicbor::{Decode, Encode};

/// The newest record level this build can apply.
pub const LEVEL: u32 = 8;
/// From this level on there are records of checkpoints and uploads.
pub const LEVEL_KEEPING: u32 = 2;
/// From this level on a job notes which record opened its round, a queue deadline says what was waited for, and what a job stored goes
/// with it.
pub const LEVEL_ROUNDS: u32 = 3;
/// From this level on a token says when it was made, and tenants can be removed.
pub const LEVEL_TENANTS: u32 = 4;
/// From this level on an attempt that was handed back before it began has not used up a number.
pub const LEVEL_UNCOUNTED: u32 = 4;
/// From this level on no attempt that ended before it began has used up a number: not of a task that was cancelled meanwhile, nor one that
/// waited in the bundle of a lost worker; and a worker that leaves of its own will has begun nothing of what it still was given.
pub const LEVEL_BEGUN: u32 = 5;
/// From this level on it is recorded what a worker can't offer and why, how large its machines may be and which images it has; and an image
/// that no worker has is the job's own fault.
pub const LEVEL_OFFERS: u32 = 6;
/// From this level on there are volumes.
pub const LEVEL_VOLUMES: u32 = 7;
/// From this level on a tenant's volumes may have limits.
pub const LEVEL_QUOTAS: u32 = 8;
/// From this level on volumes grow without anybody who writes them.
pub const LEVEL_GROWTH: u32 = 8;

/// Largest message we publish, in bytes: NATS refuses more than 1 MiB by default, and headers need room too.
pub const MESSAGE_BYTES_MAX: usize = 1_000_000;

/// Why bytes could not be read.
#[derive(Debug, thiserror::Error)]
#[error("can't read a {what} of {len} bytes: {source}; it was written by a newer build, or is not ours")]
pub struct DecodeError {
    what: &'static str,
    len: usize,
    source: minicbor::decode::Error,
}

/// Encodes a message.
#[must_use]
pub fn encode<T: Encode<()>>(message: &T) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(256);
    // Writing to a Vec has no failing path; an encoder error could only come from a hand-written Encode, of which there is none.
    if minicbor::encode(message, &mut bytes).is_err() {
        bytes.clear();
    }
    bytes
}

/// Decodes a message. `what` names it in the error.
///
/// # Errors
/// [`DecodeError`] when the bytes are no such message.
pub fn decode<'b, T: Decode<'b, ()>>(what: &'static str, bytes: &'b [u8]) -> Result<T, DecodeError> {
    minicbor::decode(bytes).map_err(|source| DecodeError { what, len: bytes.len(), source })
}

/// Bytes as text, for people; what is no UTF-8 is replaced.
fn text<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&String::from_utf8_lossy(bytes))
}

fn text_or_none<S: serde::Serializer>(bytes: &Option<minicbor::bytes::ByteVec>, to: S) -> Result<S::Ok, S::Error> {
    match bytes {
        Some(bytes) => text(bytes, to),
        None => to.serialize_none(),
    }
}

/// Bytes in hex, for people.
fn hex<S: serde::Serializer, const N: usize>(bytes: &[u8; N], to: S) -> Result<S::Ok, S::Error> {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    to.serialize_str(&digits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use minicbor::{Decode, Encode};

    #[derive(Debug, PartialEq, Encode, Decode)]
    #[cbor(map)]
    struct Old {
        #[n(0)]
        a: u32,
        #[n(1)]
        b: Option<u32>,
    }

    #[derive(Debug, PartialEq, Encode, Decode)]
    #[cbor(map)]
    struct New {
        #[n(0)]
        a: u32,
        #[n(1)]
        b: Option<u32>,
        #[n(2)]
        c: Option<String>,
        #[n(3)]
        #[cbor(default)]
        d: u64,
    }

    #[derive(Debug, PartialEq, Encode, Decode)]
    enum OldKind {
        #[n(0)]
        A(#[n(0)] u32),
    }

    #[derive(Debug, PartialEq, Encode, Decode)]
    enum NewKind {
        #[n(0)]
        A(#[n(0)] u32),
        #[n(1)]
        B,
    }

    #[test]
    fn an_old_reader_skips_new_fields_and_a_new_one_fills_them() {
        let new = New { a: 1, b: None, c: Some("x".into()), d: 9 };
        assert_eq!(decode::<Old>("t", &encode(&new)).ok(), Some(Old { a: 1, b: None }));
        let old = Old { a: 1, b: Some(2) };
        assert_eq!(decode::<New>("t", &encode(&old)).ok(), Some(New { a: 1, b: Some(2), c: None, d: 0 }));
    }

    #[test]
    fn a_stored_spec_without_a_name_of_its_own_is_named_by_its_hash() {
        #[derive(Debug, PartialEq, Encode, Decode)]
        enum OldRef {
            #[n(1)]
            Stored {
                #[n(0)]
                hash: String,
                #[n(1)]
                len: u64,
            },
        }
        let (old, none) = (OldRef::Stored { hash: "h".into(), len: 3 }, plan::SpecRef::Stored { hash: "h".into(), len: 3, name: None });
        assert_eq!(decode::<plan::SpecRef>("t", &encode(&old)).ok(), Some(none.clone()));
        assert_eq!(none.name(), Some("h"));
        let named = plan::SpecRef::Stored { hash: "h".into(), len: 3, name: Some("h-1".into()) };
        assert_eq!(decode::<plan::SpecRef>("t", &encode(&named)).ok(), Some(named.clone()));
        assert_eq!((decode::<OldRef>("t", &encode(&named)).ok(), named.name()), (Some(old), Some("h-1")));
    }

    #[test]
    fn an_old_reader_refuses_a_kind_it_does_not_know() {
        assert!(decode::<OldKind>("t", &encode(&NewKind::B)).is_err());
        assert!(decode::<OldKind>("t", &encode(&NewKind::A(3))).is_ok());
    }
}
