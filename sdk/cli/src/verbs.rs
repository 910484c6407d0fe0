//! The verbs, one a file: its arguments and what it does.

pub mod cancel;
pub mod cluster;
pub mod completions;
pub mod exec;
pub mod explain;
pub mod job;
pub mod jobs;
pub mod logs;
pub mod outputs;
pub mod pause;
pub mod plan;
pub mod rerun;
pub mod results;
pub mod resume;
pub mod rm;
pub mod run;
pub mod schema;
pub mod submit;
pub mod task;
pub mod tasks;
pub mod template;
pub mod tenant;
pub mod token;
pub mod upload;
pub mod wait;
pub mod workers;
