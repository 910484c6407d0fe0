//! What counts as a try: an attempt that began, or may have.

use volley_jobspecs::ids::{BundleId, Term};
use volley_jobspecs::wire::plan::SpecRef;
use volley_jobspecs::wire::record::{Actor, Assignment, Control, Decided, Decision, Lead, Record, Run, Submit, Verb};

use super::*;
use crate::state::invariants;
use crate::state::task::Page;
use crate::testing::{plan, worker_info};

const JOB: JobId = JobId(2);

/// A worker with one slot, and a job of so many tasks.
struct World {
    state: State,
    sequence: u64,
    round: u64,
    worker: WorkerId,
    rows: Vec<(u32, FailureClass)>,
    /// The page of its tasks, once nothing changes it any more.
    settled: Option<Page>,
}

impl World {
    fn new(level: u32, tasks: u32) -> Self {
        let worker = "w".parse().unwrap();
        let mut world = Self { state: State::default(), sequence: 0, round: 0, worker, rows: Vec::new(), settled: None };
        world.apply(&Record::Lead(Lead { term: Term(1), coordinator: "c".into(), now_ms: 1_000 }));
        world.state.tenants.insert("default".parse().unwrap(), crate::state::Tenant { policy: Default::default() });
        let submit = Submit {
            actor: actor(),
            idempotency_key: "k".to_owned(),
            spec_hash: "h".to_owned(),
            plan: plan(tasks),
            spec: SpecRef::Inline(Vec::new().into()),
            trace: None,
            uploads: Vec::new(),
        };
        world.apply(&Record::Submit(Box::new(submit)));
        world.decide(Decision::Level(level));
        world.joins(1);
        world
    }

    fn apply(&mut self, record: &Record) {
        self.sequence += 1;
        let mut fx = Effects::default();
        crate::apply::apply(&mut self.state, self.sequence, record, &mut fx).unwrap();
        self.rows.extend(fx.attempts.iter().filter_map(|(name, row)| match row.end.ending {
            Ending::Failed(class) => Some((name.index, class)),
            Ending::Succeeded | Ending::Returned => None,
        }));
        self.settled = fx.settled.pop().map(|(_, _, page)| page).or(self.settled.take());
        assert_eq!(invariants::broken(&self.state), Vec::<String>::new(), "after record {}", self.sequence);
    }

    fn decide(&mut self, decision: Decision) {
        self.round += 1;
        self.apply(&Record::Decided(Decided { term: Term(1), round: self.round, decisions: vec![decision] }));
    }

    fn joins(&mut self, life: u64) {
        let info = worker_info(1, Isolation::Null);
        self.decide(Decision::WorkerJoined { worker: self.worker.clone(), incarnation: Incarnation(life), info });
    }

    /// Gives the worker a bundle of these tasks.
    fn assign(&mut self, life: u64, first: u32, count: u32) -> BundleId {
        let tasks = vec![Run { first, count }];
        let assignment = Assignment { worker: self.worker.clone(), incarnation: Incarnation(life), job: JOB, tasks };
        self.decide(Decision::Assign(vec![assignment]));
        BundleId { sequence: self.sequence, place: 0 }
    }

    fn lost(&mut self, left: bool) {
        self.decide(Decision::WorkerLost { worker: self.worker.clone(), incarnation: Incarnation(1), left });
    }

    /// The number, failures and infra failures of each task.
    fn tries(&self) -> Vec<(u16, u16, u16)> {
        let job = &self.state.jobs[&JOB];
        let cell = |index| self.settled.as_ref().map_or_else(|| job.cell(index), |page| page.get(index as u16).copied());
        let cell = |index| cell(index).map_or((0, 0, 0), |cell| (cell.number, cell.failures, cell.infra));
        (0..job.facts.plan.tasks).map(cell).collect()
    }
}

fn actor() -> Actor {
    Actor { tenant: "default".parse().unwrap(), principal: "p".into(), request_id: "r".into() }
}

#[test]
fn a_worker_that_leaves_had_begun_nothing_of_what_it_still_was_given() {
    let tried = |level| {
        let mut world = World::new(level, 3);
        world.assign(1, 0, 2);
        world.lost(true);
        (world.tries(), world.rows)
    };
    let charged = (1, 0, 1);
    assert_eq!(tried(LEVEL_UNCOUNTED), (vec![charged, (1, 0, 0), (0, 0, 0)], vec![(0, FailureClass::HostLost)]));
    assert_eq!(tried(LEVEL_BEGUN), (vec![(0, 0, 0); 3], Vec::new()));
}

#[test]
fn of_a_lost_bundle_only_the_first_task_was_tried() {
    let tried = |level| {
        let mut world = World::new(level, 3);
        world.assign(1, 0, 3);
        world.lost(false);
        (world.tries(), world.rows)
    };
    let row = vec![(0, FailureClass::HostLost)];
    assert_eq!(tried(LEVEL_UNCOUNTED), (vec![(1, 0, 1), (1, 0, 0), (1, 0, 0)], row.clone()));
    assert_eq!(tried(LEVEL_BEGUN), (vec![(1, 0, 1), (0, 0, 0), (0, 0, 0)], row));
    let mut world = World::new(LEVEL_BEGUN, 2);
    world.assign(1, 0, 2);
    world.joins(2);
    assert_eq!(world.tries(), [(1, 0, 1), (0, 0, 0)], "a new life ends what the old one held");
    world.decide(Decision::Tick(100_000));
    world.assign(2, 0, 2);
    assert_eq!(world.tries(), [(2, 0, 1), (1, 0, 0)]);
}

#[test]
fn what_waited_when_its_job_was_cancelled_was_not_tried() {
    for (returned, left) in [(true, false), (false, true), (false, false)] {
        let mut world = World::new(LEVEL_BEGUN, 2);
        let bundle = world.assign(1, 0, 2);
        world.apply(&Record::Control(Control {
            actor: actor(),
            verb: Verb::Cancel { job: JOB, stop_running: true, reason: String::new() },
        }));
        if returned {
            let name = |index| AttemptName { job: JOB, stage: 0, index, number: 1, sequence: bundle.sequence };
            let ends = (0..2).map(|index| AttemptEnd::bare(name(index), Ending::Returned, Isolation::Null)).collect();
            world.apply(&Record::Report(Report { worker: world.worker.clone(), incarnation: Incarnation(1), number: 1, ends }));
        } else {
            world.lost(left);
        }
        assert!(world.settled.is_some());
        let first = if returned || left { 0 } else { 1 };
        assert_eq!(world.tries(), [(first, 0, 0), (0, 0, 0)], "{returned} {left}");
        assert_eq!(world.rows.len(), usize::from(first));
    }
}

/// The end of a first task that met no image of this key.
fn no_image(world: &World, bundle: BundleId, number: u32) -> Record {
    let name = AttemptName { job: JOB, stage: 0, index: 0, number, sequence: bundle.sequence };
    let bare = AttemptEnd::bare(name, Ending::Failed(FailureClass::RestoreFailed), Isolation::Null);
    let ends = vec![AttemptEnd { cause: Some(Cause::NoImage(7)), ..bare }];
    Record::Report(Report { worker: world.worker.clone(), incarnation: Incarnation(1), number: number.into(), ends })
}

#[test]
fn an_image_that_no_worker_has_is_the_jobs_own_fault_after_some_tries() {
    for (level, images, own) in [
        (LEVEL_OFFERS, Some(vec![1, 2]), true),
        (LEVEL_OFFERS, Some(vec![7]), false),
        (LEVEL_OFFERS, None, false),
        (LEVEL_BEGUN, Some(vec![1, 2]), false),
    ] {
        let mut world = World::new(level, 1);
        world.state.workers.get_mut(&world.worker).unwrap().info.images = images.clone();
        for number in 1..=u32::from(IMAGE_TRIES) {
            assert_eq!(world.tries(), [(number as u16 - 1, 0, number as u16 - 1)], "{level} {images:?}");
            let bundle = world.assign(1, 0, 1);
            let end = no_image(&world, bundle, number);
            world.apply(&end);
            world.decide(Decision::Tick(u64::from(number) * 1_000_000));
        }
        assert_eq!((world.tries(), world.settled.is_some()), (vec![if own { (5, 1, 4) } else { (5, 0, 5) }], own), "{level} {images:?}");
    }
}

#[test]
fn what_a_worker_offers_is_recorded_anew_in_the_same_life() {
    for level in [LEVEL_BEGUN, LEVEL_OFFERS] {
        let mut world = World::new(level, 2);
        world.assign(1, 0, 1);
        let mut info = world.state.workers[&world.worker].info.clone();
        info.images = Some(vec![9]);
        world.decide(Decision::WorkerJoined { worker: world.worker.clone(), incarnation: Incarnation(1), info: info.clone() });
        let now = &world.state.workers[&world.worker];
        assert_eq!((now.info == info, now.bundles.len()), (level >= LEVEL_OFFERS, 1), "{level}");
    }
}

#[test]
fn what_keeps_tasks_from_beginning_is_kept_once_with_their_job() {
    for level in [LEVEL_BEGUN, LEVEL_OFFERS] {
        let mut world = World::new(level, 3);
        let end = |world: &World, bundle: BundleId, index, ending, text: &str| {
            let name = AttemptName { job: JOB, stage: 0, index, number: 1, sequence: bundle.sequence };
            let bare = AttemptEnd::bare(name, ending, Isolation::Null);
            let cause = (ending != Ending::Succeeded).then_some(Cause::Build);
            let ends = vec![AttemptEnd { cause, message: Some(text.to_owned()), ..bare }];
            Record::Report(Report { worker: world.worker.clone(), incarnation: Incarnation(1), number: 1, ends })
        };
        let bundle = world.assign(1, 0, 3);
        for (index, text) in [(0, "the console said: panic"), (1, "in short")] {
            let report = end(&world, bundle, index, Ending::Failed(FailureClass::RestoreFailed), text);
            world.apply(&report);
        }
        let trouble = world.state.jobs[&JOB].progress.trouble.clone();
        let wanted = (level >= LEVEL_OFFERS).then_some(("the console said: panic", 2));
        assert_eq!(trouble.as_ref().map(|trouble| (trouble.text.as_str(), trouble.attempts)), wanted);
        if let Some(trouble) = trouble {
            let said = crate::api::views::trouble(&trouble);
            assert_eq!(said, "2 attempts could not begin, the first on worker w at 1970-01-01T00:00:01Z: the console said: panic");
        }
        let report = end(&world, bundle, 2, Ending::Succeeded, "");
        world.apply(&report);
        assert_eq!(world.state.jobs[&JOB].progress.trouble, None);
    }
}
