//! What the driver tells of jobs: the trace that goes along with messages, and the span of a job when it has ended.
//!
//! Owns when that is. Does not own what spans say (`trace`). Nothing here decides anything, and nothing is counted on to arrive.

use std::collections::BTreeMap;

use async_nats::HeaderMap;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;
use volley_jobspecs::observe::{self, Observing};
use volley_jobspecs::wire::record::Trailing;
use volley_jobspecs::wire::report::Ending;
use volley_jobspecs::wire::trace::{self as context, TraceContext};
use volley_jobspecs::wire::work::WorkMessage;

use crate::state::State;
use crate::state::effects::{AttemptRow, Effects};
use crate::trace;

/// Jobs whose later round's begin is remembered: as many as anybody runs again at once. Beyond, a round's span has no length.
const ROUNDS_KEPT: usize = 1_024;

/// What is remembered for spans.
#[derive(Debug, Default)]
pub struct Watching {
    observer: Observing,
    /// When the present round of jobs that were run again began, in milliseconds since 1970: the state doesn't keep it.
    rounds: BTreeMap<JobId, u64>,
}

impl Watching {
    /// Tells `observer`, if there is one.
    #[must_use]
    pub fn new(observer: Observing) -> Self {
        Self { observer, rounds: BTreeMap::new() }
    }

    /// Records were applied. The leader tells of attempts that were lost; of all others their workers do.
    pub fn applied(&mut self, state: &State, fx: &Effects, leading: bool) {
        let Some(observer) = self.observer.as_ref().filter(|observer| observer.takes_spans()) else { return };
        let is_lost = |row: &AttemptRow| leading && row.end.ending == Ending::Failed(FailureClass::HostLost);
        let lost = fx.attempts.iter().filter(|(_, row)| is_lost(row)).filter_map(|(name, row)| {
            let job = trace::of_job(name.job, &state.jobs.get(&name.job)?.facts)?;
            let span = trace::lost_span(&job, name, row);
            observe::is_recorded(&self.observer, &span.context).then_some(span)
        });
        let lost: Vec<_> = lost.collect();
        if !lost.is_empty() {
            observer.spans(lost);
        }
        for id in &fx.jobs {
            let Some(job) = state.jobs.get(id) else {
                self.rounds.remove(id);
                continue;
            };
            if job.progress.round > 1 && job.progress.ended_ms.is_none() && self.rounds.len() < ROUNDS_KEPT {
                self.rounds.entry(*id).or_insert(state.head.now_ms);
            }
        }
    }

    /// What trails a job's end was done by this leader, and is not recorded yet: the job is still in the state. A leader that
    /// fails before it is recorded leaves this to the next, who tells the same span again.
    pub fn trailed(&mut self, state: &State, id: JobId, what: Trailing) {
        let (Trailing::Manifest, Some(job), Some(observer)) = (what, state.jobs.get(&id), &self.observer) else { return };
        let round_ms = self.rounds.get(&id).copied();
        if let Some(span) = trace::job_span(id, &job.facts, &job.progress, round_ms)
            && observe::is_recorded(&self.observer, &span.context)
        {
            observer.spans(vec![span]);
            self.rounds.remove(&id);
        }
    }
}

/// A header with this context.
#[must_use]
pub fn header(context: &TraceContext) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(context::HEADER, context.to_string().as_str());
    headers
}

/// The header of a work message: its job's context, when all its bundles are of one job.
#[must_use]
pub fn header_of_work(state: &State, message: &WorkMessage) -> Option<HeaderMap> {
    let id = message.only_job()?;
    trace::of_job(id, &state.jobs.get(&id)?.facts).as_ref().map(header)
}
