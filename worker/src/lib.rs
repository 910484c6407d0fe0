//! The agent of a host: takes bundles, runs their tasks, keeps what they leave, and reports how they ended.
//!
//! Owns the road of an attempt from receipt to report. Does not own any decision about a job: those are the coordinator's.

pub mod attempt;
pub mod bundle;
pub mod claim;
pub mod core;
pub mod report;
pub mod slots;
pub mod spawner;
