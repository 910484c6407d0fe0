//! The contract: everything that crosses a process.
//!
//! Owns the job spec as a person writes it, its checks and its lazy expansion; the words on the wire (log records, work
//! messages, beats, calls to a machine's agent); names of S3 keys and NATS subjects; failure classes and backoff; what a process
//! tells about itself. Pure: no clock, no I/O, no runtime. Does not own any decision about a job: those are the coordinator's and the worker's.

pub mod api;
pub mod backoff;
mod check;
pub mod expand;
pub mod failure;
pub mod ids;
pub mod image;
pub mod keys;
pub mod machine;
pub mod observe;
pub mod pages;
pub mod parse;
pub mod plan;
pub mod problem;
pub mod resolve;
pub mod schema;
pub mod spec;
pub mod subjects;
pub mod template;
pub mod units;
pub mod utf8;
pub mod validate;
pub mod wire;
