//! The coordinator: one log, applied in order by pure code; the leader decides by records and acts on what the state wants.
//!
//! Owns jobs, tasks, workers as the log knows them, placement, and the HTTP API. Does not own running anything (worker) or the
//! words on the wire (jobspecs).

pub mod accept;
pub mod api;
pub mod apply;
pub mod assign;
pub mod checkpoint;
pub mod config;
pub mod control;
pub mod core;
pub mod driver;
pub mod explain;
pub mod figures;
pub mod finish;
pub mod garbage;
pub mod io;
pub mod items;
pub mod leader;
pub mod metrics;
pub mod place;
pub mod retry;
pub mod run;
pub mod send;
pub mod show;
pub mod split;
pub mod state;
#[cfg(test)]
mod testing;
pub mod timers;
pub mod trace;
pub mod track;
pub mod trail;
pub mod uploads;
pub mod volumes;
