//! Values for this crate's tests.

use volley_jobspecs::api::{JobState, JobView, ResultRow, TaskCounts, TaskState};
use volley_jobspecs::failure::FailureClass;

pub fn job(state: JobState, tasks: TaskCounts, exit_code: Option<u8>) -> JobView {
    JobView {
        job: "j7".into(),
        name: "evals".into(),
        tenant: "main".into(),
        state,
        trouble: None,
        reason: None,
        tasks,
        failures: [("exit_code".to_owned(), 2)].into(),
        labels: [("team".to_owned(), "a".to_owned())].into(),
        priority: 0,
        round: 1,
        submitted: "2026-01-01T00:00:00Z".into(),
        started: Some("2026-01-01T00:00:01Z".into()),
        ended: Some("2026-01-01T00:01:06Z".into()),
        exit_code,
        objects: "s3://volley/jobs/j7/".into(),
        trace_id: Some("4bf92f3577b34da6a3ce929d0e0e4736".into()),
        templates: Vec::new(),
    }
}

pub fn row(index: u32, class: Option<FailureClass>, message: Option<&str>) -> ResultRow {
    ResultRow {
        index,
        state: if class.is_some() { TaskState::Failed } else { TaskState::Succeeded },
        class,
        valid: true,
        code: class.map(|_| 1),
        message: message.map(Into::into),
        attempts: 1,
        run_ms: 120,
        result: None,
        stdout_tail: Some("out\n".into()),
        stderr_tail: Some(String::new()),
        output_files: 0,
        objects: None,
        superseded: false,
        cursor: format!("c{index}"),
    }
}
