//! A job on which nothing moves.
//!
//! Owns noticing it, and asking the cluster why. Does not own the reasons (the cluster's), or saying them (`follow`).

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use volley_jobspecs::api::{Explanation, TaskCounts};
use volley_jobspecs::ids::JobId;
use volley_sdk::{Client, Error};

use crate::clean;
use crate::progress::ended;

/// How long nothing may move before the cluster is asked why, and asked again: longer than a task takes to start on an idle cluster.
const STALLED_AFTER: Duration = Duration::from_secs(5);
/// Longest reason said, in characters; the whole of it is in `volley explain`.
const REASON_CHARS: usize = 240;

type Asking = Pin<Box<dyn Future<Output = Result<Explanation, Error>> + Send>>;

/// Watches the counts of one job.
pub struct Stall {
    /// When something moved last, or the cluster was asked last.
    since: Instant,
    ended: u32,
    asking: Option<Asking>,
    said: Option<String>,
}

impl Stall {
    /// From now on.
    #[must_use]
    pub fn start(now: Instant) -> Self {
        Self { since: now, ended: 0, asking: None, said: None }
    }

    /// Takes the counts; true when tasks have waited and nothing has moved for too long: time to `ask`.
    pub fn observe(&mut self, now: Instant, counts: &TaskCounts) -> bool {
        let ended = ended(counts);
        if counts.running > 0 || counts.waiting == 0 || ended != self.ended {
            (self.since, self.ended) = (now, ended);
        }
        self.asking.is_none() && now.duration_since(self.since) >= STALLED_AFTER
    }

    /// Asks the cluster; the answer comes through `next`.
    pub fn ask(&mut self, now: Instant, client: &Client, job: JobId) {
        self.since = now;
        let client = client.clone();
        self.asking = Some(Box::pin(async move { client.explain_job(job).await }));
    }

    /// A reason that was not said before; waits for ever when nothing is asked. Cancel safe.
    pub async fn next(&mut self) -> String {
        loop {
            let Some(asking) = &mut self.asking else { return std::future::pending().await };
            let answer = asking.await;
            self.asking = None;
            // A cluster that doesn't answer is told about by whoever follows the events.
            if let Some(reason) = answer.ok().and_then(|explanation| self.news(&explanation)) {
                return reason;
            }
        }
    }

    /// The reason, unless it is the one that was said last: numbers in it move while it stays the same.
    fn news(&mut self, explanation: &Explanation) -> Option<String> {
        let reason = reason(explanation);
        let kind: String = reason.chars().filter(|c| !c.is_ascii_digit()).collect();
        let same = self.said.as_ref() == Some(&kind);
        self.said = Some(kind);
        (!same).then_some(reason)
    }
}

/// The summary, with what is in the way at the first worker that has something.
fn reason(explanation: &Explanation) -> String {
    let summary = explanation.summary.trim_end_matches("; see each worker's reasons");
    let first = explanation.workers.iter().find_map(|worker| Some((&worker.worker, worker.reasons.first()?)));
    let text = match first {
        Some((worker, reason)) if summary.len() < explanation.summary.len() => format!("{summary} (worker {worker}: {reason})"),
        _ => summary.to_owned(),
    };
    clean::line(&text, REASON_CHARS)
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::api::WorkerExplanation;

    use super::*;

    #[test]
    fn it_stalls_when_tasks_wait_and_nothing_moves() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let counts = |running, succeeded| TaskCounts { total: 9, waiting: 3, running, succeeded, ..TaskCounts::default() };
        let mut stall = Stall::start(start);
        assert!(!stall.observe(at(4), &counts(0, 0)));
        assert!(stall.observe(at(5), &counts(0, 0)));
        assert!(!stall.observe(at(6), &counts(1, 0)), "something runs");
        assert!(!stall.observe(at(12), &counts(0, 1)), "something ended");
        assert!(stall.observe(at(17), &counts(0, 1)));
        let none = TaskCounts { total: 9, backoff: 8, succeeded: 1, ..TaskCounts::default() };
        assert!(!stall.observe(at(60), &none), "nothing waits for a worker");
    }

    #[test]
    fn a_reason_is_said_once_until_it_is_another_one() {
        let worker = WorkerExplanation { worker: "w1".into(), reasons: vec!["it has no label gpu=a".into()] };
        let mut why = Explanation {
            summary: "no worker could ever run this task, as it is; see each worker's reasons".into(),
            details: Vec::new(),
            next: Vec::new(),
            workers: vec![worker],
        };
        let mut stall = Stall::start(Instant::now());
        let said = stall.news(&why);
        assert_eq!(said.as_deref(), Some("no worker could ever run this task, as it is (worker w1: it has no label gpu=a)"));
        assert_eq!(stall.news(&why), None);
        why.summary = "a worker would take it (7 tasks wait)".into();
        assert_eq!(stall.news(&why).as_deref(), Some("a worker would take it (7 tasks wait)"));
        why.summary = "a worker would take it (6 tasks wait)".into();
        assert_eq!(stall.news(&why), None);
    }
}
