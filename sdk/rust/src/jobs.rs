//! Jobs as a whole: read, list, cancel, pause, resume, rerun, remove.
//!
//! Owns these requests. Does not own what is inside a job (`tasks`, `results`, `fetch`).

use serde_json::Value;
use volley_jobspecs::api::{CancelRequest, JobState, JobView, Page};
use volley_jobspecs::ids::JobId;

use crate::client::Client;
use crate::error::Error;
use crate::http::Call;

/// Which jobs to list, newest first.
#[derive(Debug, Clone, Default)]
pub struct JobsQuery {
    /// Only in this state.
    pub state: Option<JobState>,
    /// Only of this name.
    pub name: Option<String>,
    /// Only with all of these labels.
    pub labels: Vec<(String, String)>,
    /// Most rows of the page, 1 to 1000; the server's default is 100.
    pub limit: Option<u32>,
    /// `next` of the page before.
    pub after: Option<String>,
}

/// A state's word in queries: the one its JSON has.
pub(crate) fn word<T: serde::Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(word)) => word,
        Ok(other) => other.to_string(),
        Err(_) => String::new(),
    }
}

impl Client {
    /// One job.
    ///
    /// # Errors
    /// Code `not_found` when there is none, or it is another tenant's.
    pub async fn job(&self, job: JobId) -> Result<JobView, Error> {
        self.json(&Call::get(&["jobs", &job.to_string()], format!("read {job}"))).await
    }

    /// A page of jobs.
    ///
    /// # Errors
    /// What the cluster refused, or no connection.
    pub async fn jobs(&self, query: &JobsQuery) -> Result<Page<JobView>, Error> {
        let mut call = Call::get(&["jobs"], "list the jobs")
            .query_if("state", query.state.as_ref().map(word))
            .query_if("name", query.name.as_ref())
            .query_if("limit", query.limit)
            .query_if("after", query.after.as_ref());
        for (key, value) in &query.labels {
            call = call.query("label", format!("{key}={value}"));
        }
        self.json(&call).await
    }

    /// The spec of a job in canonical form: sorted fields, defaults written out.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job.
    pub async fn job_spec(&self, job: JobId) -> Result<Value, Error> {
        self.json(&Call::get(&["jobs", &job.to_string(), "spec"], format!("read the spec of {job}"))).await
    }

    /// Starts nothing more of a job; with `now`, stops what runs too.
    ///
    /// # Errors
    /// Code `not_found` or `conflict` (it has ended).
    pub async fn cancel(&self, job: JobId, request: &CancelRequest) -> Result<JobView, Error> {
        self.json(&Call::post(&["jobs", &job.to_string(), "cancel"], format!("cancel {job}")).json(request)).await
    }

    /// Starts nothing more of a job until it is resumed. What runs goes on.
    ///
    /// # Errors
    /// Code `not_found` or `conflict` (it has ended).
    pub async fn pause(&self, job: JobId) -> Result<JobView, Error> {
        self.json(&Call::post(&["jobs", &job.to_string(), "pause"], format!("pause {job}"))).await
    }

    /// Goes on with a paused job.
    ///
    /// # Errors
    /// Code `not_found` or `conflict` (it has ended).
    pub async fn resume(&self, job: JobId) -> Result<JobView, Error> {
        self.json(&Call::post(&["jobs", &job.to_string(), "resume"], format!("resume {job}"))).await
    }

    /// Runs the tasks of an ended job that did not succeed once more, with fresh budgets.
    ///
    /// # Errors
    /// Code `not_found` or `conflict` (it has not ended, or nothing failed).
    pub async fn rerun(&self, job: JobId) -> Result<JobView, Error> {
        // Twice could be two rounds.
        self.json(&Call::post(&["jobs", &job.to_string(), "rerun"], format!("rerun {job}")).once()).await
    }

    /// Removes an ended job with its results, logs and outputs.
    ///
    /// # Errors
    /// Code `not_found` or `conflict` (it has not ended).
    pub async fn remove(&self, job: JobId) -> Result<(), Error> {
        // The second time it would be an error: not found.
        self.done(&Call::delete(&["jobs", &job.to_string()], format!("remove {job}")).once()).await
    }
}
