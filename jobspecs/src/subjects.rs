//! NATS subjects and the names of streams and buckets.
//!
//! Owns who speaks where; the permissions in `deploy/nats/` follow this file. Does not own what is said.

use crate::ids::{JobId, TenantId, WorkerId};
use crate::wire::shell::SessionId;

/// The one stream.
pub const LOG_STREAM: &str = "VOLLEY_LOG";
/// All its subjects.
pub const LOG_ALL: &str = "volley.log.>";
/// Leader records; each is conditional on the last message of this subject.
pub const LOG_LEADER: &str = "volley.log.leader";
/// The bucket that holds the leader's lease.
pub const LEASE_BUCKET: &str = "VOLLEY_LEASE";
/// KV bucket in which coordinators say which level of records they support.
pub const LEVELS_BUCKET: &str = "VOLLEY_LEVELS";
/// KV bucket in which workers say who builds which template; its keys are templates' names.
pub const TEMPLATES_BUCKET: &str = "VOLLEY_TEMPLATES";
/// How long that bucket keeps an entry that is not written anew, in milliseconds: those of workers that died, and failed builds, which
/// stand for as long as on one host. Two minutes: most tries of a job's tasks, with the default backoff, meet the answer that the first one got,
/// and what failed by a moment's trouble of a host is built again while there are tries left. Longer than a lease.
pub const TEMPLATES_KEPT_MS: u64 = 120_000;
/// The key of the lease.
pub const LEASE_KEY: &str = "leader";
/// Beats of all workers.
pub const BEATS_ALL: &str = "volley.beat.*";
/// Requests of workers for a job's spec.
pub const JOBS_ALL: &str = "volley.job.*";
/// Watches of all jobs, for workers.
pub const WATCH_ALL: &str = "volley.watch.*";
/// How long one watch message lasts, in milliseconds: two repeats, so that one may be lost.
pub const WATCH_MS: u64 = 10_000;
/// How often whoever watches says so, in milliseconds.
pub const WATCH_REPEAT_MS: u64 = 5_000;

/// Where a tenant's submits enter the log.
#[must_use]
pub fn log_submit(tenant: &TenantId) -> String {
    format!("volley.log.submit.{tenant}")
}

/// Where a tenant's controls enter the log.
#[must_use]
pub fn log_control(tenant: &TenantId) -> String {
    format!("volley.log.control.{tenant}")
}

/// Where a worker's reports enter the log.
#[must_use]
pub fn log_report(worker: &WorkerId) -> String {
    format!("volley.log.report.{worker}")
}

/// Where a worker hears of its work.
#[must_use]
pub fn work(worker: &WorkerId) -> String {
    format!("volley.work.{worker}")
}

/// Where a worker's beats go.
#[must_use]
pub fn beat(worker: &WorkerId) -> String {
    format!("volley.beat.{worker}")
}

/// Where a worker asks for a job's spec.
#[must_use]
pub fn job(job: JobId) -> String {
    format!("volley.job.{job}")
}

/// Live output of a job's tasks.
#[must_use]
pub fn live(job: JobId, index: u32) -> String {
    format!("volley.live.{job}.{index}")
}

/// Somebody watches a job: its workers publish its tasks' output on [`live`] for [`WATCH_MS`] after each such message, which is
/// empty or a `wire::live::Watch`. No fact, no order: whoever watches repeats it every [`WATCH_REPEAT_MS`].
#[must_use]
pub fn watch(job: JobId) -> String {
    format!("volley.watch.{job}")
}

/// Live output of all tasks of a job.
#[must_use]
pub fn live_all(job: JobId) -> String {
    format!("volley.live.{job}.*")
}

/// Where a worker hears that somebody wants a shell in one of its tasks' machines. The answer goes to the message's reply subject, which is
/// [`shell_answer`].
#[must_use]
pub fn shell(worker: &WorkerId) -> String {
    format!("volley.shell.{worker}")
}

/// Where the answer to such a wish goes.
#[must_use]
pub fn shell_answer(session: &SessionId) -> String {
    format!("volley.ack.shell.{session}")
}

/// What is said in a session to its worker.
#[must_use]
pub fn shell_to_worker(worker: &WorkerId, session: &SessionId) -> String {
    format!("volley.shell.{worker}.{session}")
}

/// What the worker says in it.
#[must_use]
pub fn shell_from_worker(worker: &WorkerId, session: &SessionId) -> String {
    format!("volley.shown.{worker}.{session}")
}
