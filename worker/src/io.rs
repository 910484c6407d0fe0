//! The adapters: NATS, S3, HTTP.
//!
//! Owns nothing but translation; what is asked and what follows is decided elsewhere.

pub mod http;
pub mod nats;
pub mod objects;
pub mod shells;
