//! Durable block volumes: a log on the host's disk, packs of extents in S3, and one small head that decides.
//!
//! Owns the format of all that is stored (`format`), the pure rules (`state`), the volume itself, and serving it (`serve`, through the seam [`device`]).
//! Does not own the S3 client (`volley-store`).

mod change;
mod clean;
mod clone;
mod collect;
mod commit;
pub mod device;
mod discard;
mod flush;
pub mod format;
mod host;
pub mod io;
mod open;
mod pin;
mod promote;
mod read;
mod remove;
mod resize;
pub mod serve;
pub mod server;
mod snapshot;
pub mod state;
mod verify;
mod volume;
mod write;

pub use collect::{CollectError, Collected, Collection};
pub use commit::CommitError;
pub use host::{FetchError, Host, Limits};
pub use open::{NewVolume, OpenError, Opener};
pub use pin::Pinned;
pub use promote::Promotion;
pub use state::garbage::Known;
pub use verify::{Verified, VerifyError, Verifying, Whole};
pub use volume::{Failure, Volume};

/// Does it hold nothing but zeros?
#[must_use]
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().all(|word| u64::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}
