//! What a person gets: the real binary, a real nats-server, a whole cluster, one behaviour a file.
//!
//! Wants nats-server on PATH or in VOLLEY_NATS_SERVER; without it each test says that it was skipped.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

#[path = "../support/mod.rs"]
mod support;

mod access;
mod alien;
mod api;
mod bad_specs;
mod cancel;
mod coordinators;
mod deadlines;
mod disk_full;
mod drain;
mod exec;
mod exit_codes;
mod explain;
mod fail_fast;
mod files;
mod idempotency;
mod lacks;
mod limits;
mod logs;
mod microvm;
mod outputs;
mod parts;
mod pause;
mod poison;
mod recovery;
mod remove;
mod rerun;
mod restarts;
mod retry;
mod task_volumes;
mod telemetry;
mod templates;
mod users;
mod volume_kills;
mod volume_verbs;
mod volumes;
mod volumes_in_images;
