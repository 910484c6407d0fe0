//! Tasks and their attempts.
//!
//! Owns these requests. Does not own results (`results`), logs (`logs`) or outputs (`fetch`).

use volley_jobspecs::api::{AttemptView, Explanation, Page, TaskState, TaskView};
use volley_jobspecs::ids::JobId;

use crate::client::Client;
use crate::error::Error;
use crate::http::Call;
use crate::jobs::word;

/// Which tasks to list, by index.
#[derive(Debug, Clone, Default)]
pub struct TasksQuery {
    /// Only in this state.
    pub state: Option<TaskState>,
    /// Most rows of the page, 1 to 1000; the server's default is 100.
    pub limit: Option<u32>,
    /// `next` of the page before.
    pub after: Option<String>,
}

fn path(job: JobId, index: u32, rest: Option<&str>) -> Vec<String> {
    let mut path = vec!["jobs".to_owned(), job.to_string(), "tasks".to_owned(), index.to_string()];
    path.extend(rest.map(ToOwned::to_owned));
    path
}

impl Client {
    /// A page of a job's tasks.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job.
    pub async fn tasks(&self, job: JobId, query: &TasksQuery) -> Result<Page<TaskView>, Error> {
        let call = Call::get(&["jobs", &job.to_string(), "tasks"], format!("list the tasks of {job}"))
            .query_if("state", query.state.as_ref().map(word))
            .query_if("limit", query.limit)
            .query_if("after", query.after.as_ref());
        self.json(&call).await
    }

    /// One task.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job or task.
    pub async fn task(&self, job: JobId, index: u32) -> Result<TaskView, Error> {
        self.json(&Call::get(&path(job, index, None), format!("read task {index} of {job}"))).await
    }

    /// Every try of a task so far, oldest first.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job or task.
    pub async fn attempts(&self, job: JobId, index: u32) -> Result<Vec<AttemptView>, Error> {
        self.json(&Call::get(&path(job, index, Some("attempts")), format!("read the attempts of task {index} of {job}"))).await
    }

    /// Why a task does not run, or ended as it did.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job or task.
    pub async fn explain(&self, job: JobId, index: u32) -> Result<Explanation, Error> {
        self.json(&Call::get(&path(job, index, Some("explain")), format!("explain task {index} of {job}"))).await
    }

    /// Why a job does not go on, or ended as it did.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job.
    pub async fn explain_job(&self, job: JobId) -> Result<Explanation, Error> {
        self.json(&Call::get(&["jobs", &job.to_string(), "explain"], format!("explain {job}"))).await
    }
}
