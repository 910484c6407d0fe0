//! split: which tasks of a job come next, lazily: those that wait again first, then those never given out, in order.
//!
//! Owns the cursor of one placement round. Does not own items: a worker resolves its task's item (DESIGN §5).

use std::collections::btree_set;
use std::iter::Peekable;

use volley_jobspecs::wire::record::Run;

use crate::state::job::Job;

/// A cursor over the waiting tasks of one job; what it gave out it doesn't give again.
#[derive(Debug)]
pub struct Waiting<'a> {
    ready: Peekable<std::iter::Copied<btree_set::Iter<'a, u32>>>,
    ready_left: u32,
    next_fresh: u32,
    fresh_end: u32,
}

impl<'a> Waiting<'a> {
    /// A cursor at the beginning.
    #[must_use]
    pub fn new(job: &'a Job) -> Self {
        Self {
            ready: job.ready.iter().copied().peekable(),
            ready_left: job.ready.len() as u32,
            next_fresh: job.progress.next_fresh,
            fresh_end: job.progress.next_fresh + job.fresh(),
        }
    }

    /// How many are left.
    #[must_use]
    pub fn left(&self) -> u32 {
        self.ready_left + (self.fresh_end - self.next_fresh)
    }

    /// The next one, left where it is.
    #[must_use]
    pub fn peek(&mut self) -> Option<u32> {
        self.ready.peek().copied().or((self.next_fresh < self.fresh_end).then_some(self.next_fresh))
    }

    /// Takes up to `count` tasks, stopping before a task of the first kind that `single` says must go alone.
    pub fn take(&mut self, count: u32, single: impl Fn(u32) -> bool) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut taken = 0;
        while taken < count {
            let Some(index) = self.ready.next_if(|index| taken == 0 || !single(*index)) else { break };
            self.ready_left -= 1;
            taken += 1;
            match runs.last_mut() {
                Some(last) if last.first + last.count == index => last.count += 1,
                Some(_) | None => runs.push(Run { first: index, count: 1 }),
            }
            if single(index) {
                return runs;
            }
        }
        let fresh = (count - taken).min(self.fresh_end - self.next_fresh);
        if fresh > 0 && self.ready.peek().is_none() {
            runs.push(Run { first: self.next_fresh, count: fresh });
            self.next_fresh += fresh;
        }
        runs
    }
}
