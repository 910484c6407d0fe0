//! The coordinator: one log, applied in order by pure code; the leader decides by records and acts on what the state wants.
//!
//! Owns jobs, tasks, workers as the log knows them, placement, and the HTTP API. Does not own running anything (worker) or the
//! words on the wire (jobspecs).

pub mod accept;
pub mod apply;
pub mod assign;
pub mod control;
pub mod finish;
pub mod retry;
pub mod state;
pub mod timers;
pub mod track;
