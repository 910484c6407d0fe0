//! Where bytes go: the objects in S3, the log's files, and what is kept of S3 in memory and on the disk.
//!
//! Owns requests and files. Does not own what is in them (`format`), nor when they are made (the volume's operations).

pub mod cache;
pub mod fake;
pub mod index;
pub mod log;
pub mod s3;
pub mod slab;
