//! NBD, the protocol in which a volume is served: newstyle fixed, as
//! <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md> has it.
//!
//! `wire` (layouts), `handshake` (the server's half of the negotiation) and `request` (what is asked, and whether it may be) are pure:
//! bytes in, bytes out. `connection` moves them for one client of a [`Device`](crate::device::Device); what may wait for the network
//! is done by its `waiting` threads. `client` is the other end, which the FUSE shim uses.

pub mod client;
mod connection;
pub mod handshake;
pub(crate) mod incoming;
mod outgoing;
pub mod request;
mod waiting;
pub mod wire;

pub use connection::{ServeError, serve};
