//! A bundle a worker holds, from receipt until the last of its ends is in the log.
//!
//! Owns which of its tasks wait, run, ended or are done. Pure. Does not own its slot (`slots`) or its attempts (`attempt`).

use volley_jobspecs::ids::{AttemptName, BundleId, JobId};
use volley_jobspecs::wire::record::Run;
use volley_jobspecs::wire::volume::Given;
use volley_jobspecs::wire::work::{Bundle, Held};

/// Most tasks taken from one bundle: the leader's limit is 256, and a place must fit 16 bits. What is above is not held, so the
/// leader sees it lost and says so.
pub const BUNDLE_TASKS_MAX: usize = 4_096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TaskState {
    Waiting,
    Running,
    /// Its end waits to be in the log.
    Ended,
    Done,
}

#[derive(Debug, Clone, Copy)]
struct Task {
    index: u32,
    number: u32,
    state: TaskState,
}

/// A bundle the worker holds.
#[derive(Debug, Clone)]
pub struct HeldBundle {
    /// Its id.
    pub id: BundleId,
    /// Its job.
    pub job: JobId,
    /// When it was received, in milliseconds of the worker's clock.
    pub received_ms: u64,
    tasks: Vec<Task>,
    /// What its tasks may write.
    volumes: Vec<Given>,
    /// No task before this place waits.
    cursor: usize,
    not_done: usize,
}

impl HeldBundle {
    /// Takes a bundle.
    #[must_use]
    pub fn new(bundle: &Bundle, now_ms: u64) -> Self {
        let tasks: Vec<Task> = bundle
            .tasks
            .iter()
            .flat_map(|run| {
                (0..run.count).map_while(|at| {
                    let index = run.first.checked_add(at)?;
                    Some(Task { index, number: run.number, state: TaskState::Waiting })
                })
            })
            .take(BUNDLE_TASKS_MAX)
            .collect();
        let not_done = tasks.len();
        Self { id: bundle.id, job: bundle.job, received_ms: now_ms, tasks, volumes: bundle.volumes.clone(), cursor: 0, not_done }
    }

    /// The volumes that a task may write.
    #[must_use]
    pub fn given(&self, index: u32) -> Vec<Given> {
        self.volumes.iter().filter(|given| given.index == index).cloned().collect()
    }

    /// The name of the attempt at a place.
    #[must_use]
    pub fn name(&self, place: u16) -> Option<AttemptName> {
        self.tasks.get(usize::from(place)).map(|task| AttemptName {
            job: self.job,
            stage: 0,
            index: task.index,
            number: task.number,
            sequence: self.id.sequence,
        })
    }

    /// Begins the next task that waits. Returns its place.
    pub fn begin_next(&mut self) -> Option<u16> {
        let place = self.next_waiting()?;
        if let Some(task) = self.tasks.get_mut(usize::from(place)) {
            task.state = TaskState::Running;
        }
        Some(place)
    }

    fn next_waiting(&mut self) -> Option<u16> {
        while self.tasks.get(self.cursor)?.state != TaskState::Waiting {
            self.cursor += 1;
        }
        u16::try_from(self.cursor).ok()
    }

    /// Is there still a task that waits?
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        self.tasks.iter().skip(self.cursor).any(|task| task.state == TaskState::Waiting)
    }

    /// Takes the waiting tasks in `runs` (all of them without) out, as ended. Returns their places.
    pub fn end_waiting(&mut self, runs: Option<&[Run]>) -> Vec<u16> {
        let mut places = Vec::new();
        for (place, task) in self.tasks.iter_mut().enumerate() {
            let meant = runs.is_none_or(|runs| runs.iter().any(|run| contains(run, task.index)));
            if meant && task.state == TaskState::Waiting {
                task.state = TaskState::Ended;
                places.extend(u16::try_from(place));
            }
        }
        places
    }

    /// Is the task at a place among `runs`?
    #[must_use]
    pub fn is_among(&self, place: u16, runs: &[Run]) -> bool {
        self.tasks.get(usize::from(place)).is_some_and(|task| runs.iter().any(|run| contains(run, task.index)))
    }

    /// The task at a place has ended; its end is not in the log yet.
    pub fn ended(&mut self, place: u16) {
        if let Some(task) = self.tasks.get_mut(usize::from(place))
            && task.state == TaskState::Running
        {
            task.state = TaskState::Ended;
        }
    }

    /// The end of the task at a place is in the log, or nobody wants it.
    pub fn done(&mut self, place: u16) {
        if let Some(task) = self.tasks.get_mut(usize::from(place))
            && task.state != TaskState::Done
        {
            task.state = TaskState::Done;
            self.not_done -= 1;
        }
    }

    /// Nobody wants to hear of it: everything that doesn't run is done.
    pub fn forget(&mut self) {
        for task in &mut self.tasks {
            if matches!(task.state, TaskState::Waiting | TaskState::Ended) {
                task.state = TaskState::Done;
                self.not_done -= 1;
            }
        }
    }

    /// Is every task done?
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.not_done == 0
    }

    /// What a beat says of it.
    #[must_use]
    pub fn held(&self) -> Held {
        let mut tasks: Vec<Run> = Vec::new();
        for task in self.tasks.iter().filter(|task| task.state != TaskState::Done) {
            match tasks.last_mut() {
                Some(run) if run.first.checked_add(run.count) == Some(task.index) => run.count += 1,
                _ => tasks.push(Run { first: task.index, count: 1 }),
            }
        }
        Held { bundle: self.id, job: self.job, tasks }
    }
}

fn contains(run: &Run, index: u32) -> bool {
    index.checked_sub(run.first).is_some_and(|at| at < run.count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::wire::work::Try;

    fn bundle() -> HeldBundle {
        let tasks = vec![Try { first: 4, count: 3, number: 1 }, Try { first: 9, count: 1, number: 2 }];
        HeldBundle::new(&Bundle { id: BundleId { sequence: 5, place: 0 }, job: JobId(1), tasks, volumes: Vec::new() }, 0)
    }

    #[test]
    fn beats_name_what_is_not_done_as_runs() {
        let mut b = bundle();
        assert_eq!(b.held().tasks, vec![Run { first: 4, count: 3 }, Run { first: 9, count: 1 }]);
        assert_eq!(b.begin_next(), Some(0));
        b.ended(0);
        assert_eq!(b.held().tasks.len(), 2, "held until its report is in the log");
        b.done(0);
        assert_eq!(b.held().tasks, vec![Run { first: 5, count: 2 }, Run { first: 9, count: 1 }]);
        assert_eq!(b.name(3).map(|n| (n.index, n.number, n.sequence)), Some((9, 2, 5)));
    }

    #[test]
    fn what_runs_is_not_handed_back() {
        let mut b = bundle();
        b.begin_next();
        assert_eq!(b.end_waiting(Some(&[Run { first: 0, count: 6 }])), vec![1]);
        assert_eq!(b.begin_next(), Some(2));
        assert_eq!(b.end_waiting(None), vec![3]);
        assert!(!b.has_waiting());
    }

    #[test]
    fn a_bundle_that_overflows_the_index_is_cut() {
        let tasks = vec![Try { first: u32::MAX, count: 5, number: 1 }];
        let b = HeldBundle::new(&Bundle { id: BundleId { sequence: 5, place: 0 }, job: JobId(1), tasks, volumes: Vec::new() }, 0);
        assert_eq!(b.held().tasks, vec![Run { first: u32::MAX, count: 1 }]);
    }
}
