//! A whole cluster on this machine for one test, and the `volley` binary as a person would call it.
//!
//! Owns starting, stopping and calling. Does not own what is tested. Everything lies in a temporary directory; nothing outlives a test.

pub mod cluster;
pub mod disk;
pub mod http;
pub mod otlp;
pub mod process;

pub use cluster::Cluster;
