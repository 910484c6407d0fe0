//! Volumes over whole histories: nothing is written by two, and what is accepted is all of a task's volumes or none.

use volley_jobspecs::ids::{Incarnation, Term, WorkerId};
use volley_jobspecs::wire::LEVEL;
use volley_jobspecs::wire::plan::{Isolation, SpecRef};
use volley_jobspecs::wire::record::{Assignment, Control, Decided, Decision, Lead, Record, Run, Submit};
use volley_jobspecs::wire::report::Report;
use volley_jobspecs::wire::volume::{Kept, Left};

use super::*;
use crate::leader::volumes::Works;
use crate::state::effects::Answer;
use crate::state::rows::MapRows;
use crate::state::task::Phase;
use crate::state::{invariants, rows};
use crate::testing::{plan, worker_info};

/// A cluster of one worker with four slots.
struct World {
    state: State,
    rows: MapRows,
    works: Works,
    sequence: u64,
    round: u64,
    reports: u64,
    worker: WorkerId,
}

fn tenant() -> TenantId {
    "default".parse().unwrap()
}

fn actor(id: u64) -> Actor {
    Actor { tenant: tenant(), principal: "p".to_owned(), request_id: id.to_string() }
}

fn rw(name: &str, size_bytes: Option<u64>) -> VolumePlan {
    VolumePlan { name: name.to_owned(), snapshot: None, access: Access::Rw, size_bytes }
}

fn read(name: &str, snapshot: Option<&str>) -> VolumePlan {
    VolumePlan { name: name.to_owned(), snapshot: snapshot.map(str::to_owned), access: Access::Clone, size_bytes: None }
}

impl World {
    fn new() -> Self {
        let worker: WorkerId = "w".parse().unwrap();
        let (rows, state) = (MapRows::default(), State::default());
        let mut world = Self { works: Works::new(&state), state, rows, sequence: 0, round: 0, reports: 0, worker };
        world.apply(&Record::Lead(Lead { term: Term(1), coordinator: "c".into(), now_ms: 1_000 }));
        world.state.tenants.insert(tenant(), crate::state::Tenant { policy: Default::default() });
        world.decide(Decision::Level(LEVEL));
        world.joins(1);
        world
    }

    fn apply(&mut self, record: &Record) -> Vec<Answer> {
        self.sequence += 1;
        let mut fx = Effects::default();
        crate::apply::apply(&mut self.state, self.sequence, record, &mut fx).unwrap();
        rows::Rows::write(&self.rows, rows::batch(&self.state, &fx)).unwrap();
        assert_eq!(invariants::broken(&self.state), Vec::<String>::new(), "after record {}", self.sequence);
        self.works.applied(&self.state, &fx);
        assert_eq!(self.works.broken(&self.state), None, "after record {}", self.sequence);
        fx.answers.into_iter().map(|(_, answer)| answer).collect()
    }

    /// A coordinator that opens these rows has the same volumes.
    fn reopened(&self) {
        let opened = rows::load(&self.rows).unwrap();
        assert_eq!((&opened.volumes, &opened.head), (&self.state.volumes, &self.state.head));
    }

    fn decide(&mut self, decision: Decision) {
        self.round += 1;
        self.apply(&Record::Decided(Decided { term: Term(1), round: self.round, decisions: vec![decision] }));
    }

    fn joins(&mut self, life: u64) {
        let info = worker_info(4, Isolation::Null);
        self.decide(Decision::WorkerJoined { worker: self.worker.clone(), incarnation: Incarnation(life), info });
    }

    fn submit(&mut self, tasks: u32, volumes: Vec<VolumePlan>) -> Result<JobId, Refusal> {
        let mut plan = plan(tasks);
        plan.volumes = volumes;
        plan.retry.attempts = 3;
        let submit = Submit {
            actor: actor(self.sequence),
            idempotency_key: self.sequence.to_string(),
            spec_hash: "h".to_owned(),
            plan,
            spec: SpecRef::Inline(Vec::new().into()),
            trace: None,
            uploads: Vec::new(),
        };
        match self.apply(&Record::Submit(Box::new(submit))).remove(0) {
            Answer::Submitted { job, .. } => Ok(job),
            Answer::Refused(refusal) => Err(refusal),
            Answer::Done => panic!("no answer to a submit"),
        }
    }

    fn ask(&mut self, verb: Verb) -> Result<(), Refusal> {
        match self.apply(&Record::Control(Control { actor: actor(self.sequence), verb })).remove(0) {
            Answer::Refused(refusal) => Err(refusal),
            Answer::Done | Answer::Submitted { .. } => Ok(()),
        }
    }

    /// Gives a task out; None when that is void.
    fn assign(&mut self, job: JobId, index: u32) -> Option<AttemptName> {
        let tasks = vec![Run { first: index, count: 1 }];
        let life = self.state.workers[&self.worker].incarnation;
        self.decide(Decision::Assign(vec![Assignment { worker: self.worker.clone(), incarnation: life, job, tasks }]));
        let open = self.state.jobs[&job].open.get(&index)?;
        (open.bundle.sequence == self.sequence).then_some(AttemptName {
            job,
            stage: 0,
            index,
            number: u32::from(open.number),
            sequence: self.sequence,
        })
    }

    /// What the scheduler would give out now.
    fn placed(&mut self) -> Vec<(JobId, u32)> {
        let mut scheduler = crate::place::Scheduler::new(100, 256);
        let assignments = crate::place::place(&mut scheduler, &self.state, 0, &Default::default());
        assignments.iter().flat_map(|a| a.tasks.iter().map(|run| (a.job, run.first))).collect()
    }

    fn end(&mut self, end: AttemptEnd) {
        self.reports += 1;
        let (worker, incarnation) = (self.worker.clone(), self.state.workers[&self.worker].incarnation);
        self.apply(&Record::Report(Report { worker, incarnation, number: self.reports, ends: vec![end] }));
    }

    /// An end with what its task's volumes were left as.
    fn left(&self, name: AttemptName, ending: Ending, root: u8) -> AttemptEnd {
        let given = given(&self.state.volumes, &self.state.jobs[&name.job], name.index);
        let left =
            |given: Given| Left { slot: given.slot, volume: given.volume, generation: given.generation, root: [root; 32], size_bytes: 7 };
        let volumes = given.into_iter().map(left).collect();
        AttemptEnd { volumes, ..AttemptEnd::bare(name, ending, Isolation::Null) }
    }

    fn volume(&self, name: &str) -> &Volume {
        &self.state.volumes[&(tenant(), name.to_owned())]
    }

    fn works(&mut self) -> Vec<Work> {
        self.works.begin(&self.state, &[])
    }

    fn promote(&mut self, name: &str, why: Option<&str>) {
        let (volume, generation) = (self.volume(name).id, self.volume(name).promotion.unwrap().generation);
        self.decide(Decision::VolumePromoted { tenant: tenant(), name: name.to_owned(), volume, generation, why: why.map(str::to_owned) });
    }

    fn phase(&self, name: AttemptName) -> Option<Phase> {
        self.state.jobs.get(&name.job)?.cell(name.index).map(|cell| cell.phase)
    }
}

const FAILED: Ending = Ending::Failed(FailureClass::ExitCode);

#[test]
fn one_writes_at_a_time_and_the_next_begins_with_what_was_accepted() {
    let mut w = World::new();
    let job = w.submit(3, vec![rw("state", Some(1 << 20)), rw("own-${index}", Some(1 << 20))]).unwrap();
    assert_eq!(w.placed(), [(job, 0)], "of all that write one volume, one is given out");
    let first = w.assign(job, 0).unwrap();
    assert_eq!((w.volume("state").size_bytes, w.volume("own-0").generation), (1 << 20, 0));
    assert_ne!(w.volume("state").id, w.volume("own-0").id);
    assert_eq!((w.assign(job, 1), w.placed()), (None, vec![]), "the other task's volume is free, but both are needed");
    assert!(!w.state.volumes.contains_key(&(tenant(), "own-1".to_owned())), "nothing is made for what is void");
    w.reopened();

    w.end(w.left(first, Ending::Succeeded, 1));
    assert_eq!(w.assign(job, 1), None, "its head does not say yet what was accepted");
    let wanted = |name: &str, w: &World| {
        let promotion = Promotion { generation: 1, attempt: first, root: [1; 32], size_bytes: 7 };
        Work::Promote { tenant: tenant(), name: name.to_owned(), volume: w.volume(name).id, promotion }
    };
    let works = [wanted("own-0", &w), wanted("state", &w)];
    assert_eq!(w.works(), works);
    assert_eq!(w.works(), [], "what is under way is not begun again");
    w.reopened();
    w.promote("state", None);
    assert_eq!((w.volume("state").generation, w.volume("state").size_bytes), (1, 7));

    let second = w.assign(job, 1).unwrap();
    let begins_with: Vec<u64> = given(&w.state.volumes, &w.state.jobs[&job], 1).iter().map(|given| given.generation).collect();
    assert_eq!(begins_with, [1, 0]);
    w.end(w.left(second, FAILED, 2));
    assert_eq!((w.volume("state").generation, w.volume("state").promotion, w.volume("state").is_free()), (1, None, true));
    w.reopened();
}

#[test]
fn all_of_an_attempts_volumes_are_accepted_or_none() {
    let mut w = World::new();
    let job = w.submit(1, vec![rw("a", Some(1 << 20)), rw("b", Some(1 << 20))]).unwrap();
    let name = w.assign(job, 0).unwrap();
    let mut end = w.left(name, Ending::Succeeded, 1);
    end.volumes.pop();
    w.end(end);
    assert_eq!((w.volume("a").promotion, w.volume("b").promotion), (None, None));
    assert_ne!(w.phase(name), Some(Phase::Succeeded));
    assert!(w.volume("a").is_free() && w.volume("b").is_free());
}

#[test]
fn a_lost_attempts_late_success_promotes_nothing() {
    let mut w = World::new();
    let job = w.submit(1, vec![rw("a", Some(1 << 20))]).unwrap();
    let lost = w.assign(job, 0).unwrap();
    let late = w.left(lost, Ending::Succeeded, 1);
    w.joins(2);
    assert!(w.volume("a").is_free());
    w.end(late.clone());
    assert_eq!(w.volume("a").promotion, None);
    let due = w.state.timers.iter().map(|(due, _)| *due).max().unwrap();
    w.decide(Decision::Tick(due));
    let again = w.assign(job, 0).unwrap();
    w.end(late);
    assert_eq!(w.volume("a").holder, Some(Holder::Attempt(again)));
    w.end(w.left(again, Ending::Succeeded, 2));
    assert_eq!(w.volume("a").promotion.map(|promotion| promotion.root), Some([2; 32]));
    // A head in which another state is accepted: a person forced it meanwhile.
    w.promote("a", Some("another state is accepted"));
    assert_eq!((w.volume("a").generation, w.volume("a").is_free()), (0, true));
}

#[test]
fn a_cancelled_task_leaves_its_volume_as_it_was() {
    let mut w = World::new();
    let job = w.submit(1, vec![rw("a", Some(1 << 20))]).unwrap();
    let name = w.assign(job, 0).unwrap();
    let end = w.left(name, Ending::Succeeded, 1);
    w.ask(Verb::Cancel { job, stop_running: true, reason: String::new() }).unwrap();
    assert!(!w.volume("a").is_free(), "it may still write");
    w.end(end);
    assert_eq!((w.volume("a").promotion, w.volume("a").is_free()), (None, true));
}

#[test]
fn a_job_reads_what_was_pinned_for_it_and_begins_then() {
    let mut w = World::new();
    assert!(matches!(w.submit(1, vec![read("a", None)]), Err(Refusal::NoVolume { slot: 0, .. })));
    assert!(matches!(w.submit(1, vec![rw("a", None)]), Err(Refusal::NoVolume { slot: 0, .. })));
    let (a, s) = (VolumeId([1; 16]), SnapshotId([2; 16]));
    w.ask(Verb::PutVolume { name: "a".into(), volume: a, size_bytes: 5 }).unwrap();
    assert!(matches!(w.submit(1, vec![read("a", Some("s"))]), Err(Refusal::NoSnapshot { .. })));
    w.ask(Verb::PutSnapshot { name: "a".into(), volume: a, snapshot: "s".into(), id: s, size_bytes: 5 }).unwrap();
    let job = w.submit(2, vec![read("a", Some("s")), read("a", None)]).unwrap();
    assert_eq!((w.placed(), w.assign(job, 0)), (vec![], None));
    let pin = |slot, snapshot| Work::Pin { job, tenant: tenant(), pin: Pin { slot, volume: a, snapshot, held: false } };
    assert_eq!(w.works(), [pin(0, Some(s)), pin(1, None)]);
    w.decide(Decision::VolumePinned { job, slot: 0, snapshot: SnapshotId([9; 16]) });
    assert!(!w.state.jobs[&job].is_pinned(), "another snapshot than the one that was asked for");
    w.decide(Decision::VolumePinned { job, slot: 0, snapshot: s });
    w.decide(Decision::VolumePinned { job, slot: 1, snapshot: SnapshotId([3; 16]) });
    assert!(w.assign(job, 0).is_some() && w.assign(job, 1).is_some(), "those that read share it");
    // Named no more, and still the job's.
    w.ask(Verb::RemoveSnapshot { name: "a".into(), snapshot: "s".into() }).unwrap();
    w.ask(Verb::RemoveVolume { name: "a".into() }).unwrap();
    let pins = w.state.jobs[&job].progress.pins.clone().unwrap();
    assert_eq!(pins.iter().map(|pin| pin.snapshot).collect::<Vec<_>>(), [Some(s), Some(SnapshotId([3; 16]))]);
    assert_eq!(w.works(), [Work::Remove { tenant: tenant(), volume: a }]);
    w.reopened();
    w.decide(Decision::VolumeGone { tenant: tenant(), volume: a });
    assert_eq!((w.state.head.volumes_going.clone(), w.works()), (None, vec![]));
}

#[test]
fn a_name_is_never_taken_from_its_volume() {
    let mut w = World::new();
    let (a, b) = (VolumeId([1; 16]), VolumeId([2; 16]));
    let put = |volume| Verb::PutVolume { name: "a".into(), volume, size_bytes: 5 };
    w.ask(put(a)).unwrap();
    w.ask(put(a)).unwrap();
    assert_eq!(w.ask(put(b)), Err(Refusal::VolumeExists("a".into())));
    let job = w.submit(2, vec![]).unwrap();
    let kept = |name: AttemptName, ending, to: &str, volume| {
        let kept = vec![Kept { slot: 0, volume, name: to.to_owned(), size_bytes: 5 }];
        AttemptEnd { kept, ..AttemptEnd::bare(name, ending, Isolation::Null) }
    };
    // The job names no volume to clone; that is `validate`'s, and names are judged all the same.
    let name = w.assign(job, 0).unwrap();
    w.end(kept(name, Ending::Succeeded, "a", b));
    assert_eq!((w.volume("a").id, w.phase(name)), (a, Some(Phase::Failed)));
}

#[test]
fn a_person_has_a_volume_as_a_task_has_it() {
    let mut w = World::new();
    let a = VolumeId([1; 16]);
    w.ask(Verb::PutVolume { name: "a".into(), volume: a, size_bytes: 5 }).unwrap();
    let hold = |hold, size_bytes| Verb::HoldVolume { name: "a".into(), volume: a, hold, size_bytes };
    w.ask(hold(true, None)).unwrap();
    let job = w.submit(1, vec![rw("a", None)]).unwrap();
    assert_eq!((w.placed(), w.assign(job, 0)), (vec![], None));
    assert!(matches!(w.ask(Verb::RemoveVolume { name: "a".into() }), Err(Refusal::VolumeHeld { .. })));
    w.ask(hold(false, Some(9))).unwrap();
    assert_eq!((w.volume("a").generation, w.volume("a").size_bytes), (1, 9));
    let name = w.assign(job, 0).unwrap();
    assert!(matches!(w.ask(hold(true, None)), Err(Refusal::VolumeHeld { .. })));
    assert!(matches!(w.ask(hold(false, None)), Err(Refusal::VolumeHeld { .. })), "nobody takes a task's volume away");
    assert_eq!(given(&w.state.volumes, &w.state.jobs[&job], 0)[0].generation, 1);
    w.end(w.left(name, Ending::Succeeded, 3));
    assert!(matches!(w.ask(hold(true, None)), Err(Refusal::VolumeHeld { .. })), "first it is what the task made of it");
    w.promote("a", None);
    w.ask(hold(true, None)).unwrap();
    let ids = [made_by(&name, 0), made_by(&name, 1), made_by(&AttemptName { index: 1, ..name }, 0)];
    assert!(ids[0] != ids[1] && ids[0] != ids[2]);
}

#[test]
fn a_volume_grows_while_nobody_has_it_and_nobody_is_given_it_meanwhile() {
    let mut w = World::new();
    let a = VolumeId([1; 16]);
    w.ask(Verb::PutVolume { name: "a".into(), volume: a, size_bytes: 5 }).unwrap();
    let grow = |size_bytes| Verb::GrowVolume { name: "a".into(), volume: a, size_bytes };
    assert!(matches!(w.ask(grow(4)), Err(Refusal::VolumeShrinks { now: 5, asked: 4, .. })));
    w.ask(grow(5)).unwrap();
    assert!(w.works().is_empty(), "it has that size");
    w.ask(grow(9)).unwrap();
    w.ask(grow(9)).unwrap();
    assert!(matches!(w.ask(grow(10)), Err(Refusal::VolumeHeld { .. })), "one after the other");
    let work = Work::Grow { tenant: tenant(), name: "a".into(), volume: a, generation: 0, size_bytes: 9 };
    assert_eq!((w.works(), w.works()), (vec![work], vec![]), "once");
    // The next leader finds it too.
    assert_eq!(Works::new(&w.state).begin(&w.state, &[]).len(), 1);
    let job = w.submit(1, vec![rw("a", None)]).unwrap();
    assert_eq!((w.placed(), w.assign(job, 0)), (vec![], None));
    let grown = |generation, why: Option<&str>| Decision::VolumeGrown {
        tenant: tenant(),
        name: "a".into(),
        volume: a,
        generation,
        why: why.map(str::to_owned),
    };
    w.decide(grown(7, None));
    assert_eq!(w.volume("a").growth, Some(9), "another generation's");
    w.decide(grown(1, None));
    w.decide(grown(1, None));
    assert_eq!((w.volume("a").generation, w.volume("a").size_bytes, w.volume("a").growth), (1, 9, None));
    let name = w.assign(job, 0).unwrap();
    assert!(matches!(w.ask(grow(12)), Err(Refusal::VolumeHeld { .. })), "a task writes it");
    w.end(w.left(name, FAILED, 1));
    w.ask(grow(12)).unwrap();
    w.decide(grown(2, Some("no")));
    assert_eq!((w.volume("a").generation, w.volume("a").size_bytes, w.volume("a").growth), (1, 9, None));
}
