//! Where bytes go: the objects in S3, the log's files, and what is kept in memory of both.
//!
//! Owns requests and files. Does not own what is in them (`format`), nor when they are made (the volume's operations).

pub mod cache;
pub mod fake;
pub mod log;
pub mod s3;
