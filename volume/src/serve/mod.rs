//! Serving a volume on this host: as NBD on a unix socket, and as one file.
//!
//! Owns the protocols. Knows a volume only as a [`Device`](crate::device::Device): no log, no S3.

pub mod fuse;
pub mod nbd;
pub mod socket;
