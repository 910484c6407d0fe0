//! The Rust SDK: submit jobs to a Volley cluster, watch them, read their results as tasks finish, fetch their outputs.
//!
//! Owns the HTTP client, its retries, and where a client finds the cluster. Does not own the shapes of the API
//! (`volley_jobspecs::api`) or of a job spec (`volley_jobspecs::spec`), nor anything that the command line shows.
//!
//! ```no_run
//! use volley_sdk::{Client, ResultsQuery};
//!
//! # async fn example() -> Result<(), volley_sdk::Error> {
//! let client = Client::from_env()?;
//! let spec = br#"{ "version": "volley/v1", "name": "hello", "items": { "count": 10 },
//!                  "task": { "isolation": "process", "command": "echo task ${index}" } }"#;
//! let job = client.submit(spec.to_vec()).await?.job;
//! let mut results = client.results(job, ResultsQuery::follow());
//! while let Some(row) = results.next().await {
//!     let row = row?;
//!     println!("{} {:?}", row.index, row.stdout_tail);
//! }
//! # Ok(())
//! # }
//! ```

mod admin;
mod client;
pub mod config;
mod error;
mod exec;
mod fetch;
mod http;
mod jobs;
mod lines;
mod logs;
mod results;
mod sse;
mod submit;
mod tasks;
mod upload;
mod volumes;
mod watch;

pub use bytes::Bytes;
pub use client::{Client, http_client_for};
pub use config::{ClusterFile, Config, Retry};
pub use error::Error;
pub use exec::{ExecEvent, ExecInput, ExecRequest, ExecSession};
pub use fetch::Output;
pub use jobs::JobsQuery;
pub use logs::{JobLogs, LogStream, TaskLogsQuery};
pub use results::{Results, ResultsQuery};
pub use submit::{IdempotencyKey, Spec, SubmitOptions, Submitted};
pub use tasks::TasksQuery;
pub use volley_jobspecs as jobspecs;
pub use volley_jobspecs::wire::shell::{Ended as ExecEnded, Tty};
pub use watch::Watch;
