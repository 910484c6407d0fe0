//! Timers of what is kept, over removals, reruns and restarts: what is loaded is what applying gave.

use volley_jobspecs::ids::Term;
use volley_jobspecs::wire;
use volley_jobspecs::wire::plan::{JobPlan, Retention, SpecRef};
use volley_jobspecs::wire::record::{Actor, Control, Decided, Decision, Lead, Record, Submit, Verb};

use super::*;
use crate::core::{Core, CoreError, Mark, Message, RECORDS_PER_DIGEST};
use crate::state::rows::MapRows;
use crate::testing::plan;

const DAY: u64 = 86_400_000;

/// A coordinator that is restarted beside itself after every record.
struct Kept {
    rows: MapRows,
    core: Core,
    round: u64,
}

impl Kept {
    fn new() -> Self {
        let rows = MapRows::default();
        let core = Core::open(&rows).unwrap();
        let mut kept = Self { rows, core, round: 0 };
        kept.lead(0);
        kept
    }

    fn try_apply(&mut self, sequence: u64, record: &Record) -> Result<(), CoreError> {
        self.core.apply(&self.rows, &[Message { sequence, bytes: wire::encode(record), mark: Mark::Fenced }]).map(|_| ())
    }

    fn apply(&mut self, record: &Record) {
        let sequence = self.core.state().head.sequence + 1;
        self.try_apply(sequence, record).unwrap();
        assert_eq!(Core::open(&self.rows).unwrap().state(), self.core.state(), "after {record:?}");
    }

    fn restart(&mut self) {
        self.core = Core::open(&self.rows).unwrap();
    }

    fn lead(&mut self, now_ms: u64) {
        let term = Term(self.core.state().head.term.0 + 1);
        self.round = 0;
        self.apply(&Record::Lead(Lead { term, coordinator: "c".into(), now_ms }));
    }

    fn decided(&mut self, decision: Decision) -> Record {
        self.round += 1;
        Record::Decided(Decided { term: self.core.state().head.term, round: self.round, decisions: vec![decision] })
    }

    fn decide(&mut self, decision: Decision) {
        let record = self.decided(decision);
        self.apply(&record);
    }

    fn control(&mut self, verb: Verb) {
        self.apply(&Record::Control(Control { actor: actor(), verb }));
    }

    /// A job that has ended at `now_ms`, with its manifest.
    fn ended(&mut self, retention: Retention, now_ms: u64) -> JobId {
        let submit = Submit {
            actor: actor(),
            idempotency_key: self.core.state().head.sequence.to_string(),
            spec_hash: "h".to_owned(),
            plan: JobPlan { retention, ..plan(3) },
            spec: SpecRef::Inline(Vec::new().into()),
            trace: None,
            uploads: Vec::new(),
        };
        self.apply(&Record::Submit(Box::new(submit)));
        let job = JobId(self.core.state().head.sequence);
        self.control(Verb::Cancel { job, stop_running: true, reason: String::new() });
        self.decide(Decision::Tick(now_ms));
        self.decide(Decision::Done { job, what: Trailing::Manifest });
        job
    }

    fn timers(&self, job: JobId) -> usize {
        let of = |timer: &Timer| matches!(timer, Timer::FailedObjects(id) | Timer::Forget(id) if *id == job);
        self.core.state().timers.iter().filter(|(_, timer)| of(timer)).count()
    }
}

fn actor() -> Actor {
    Actor { tenant: "default".parse().unwrap(), principal: "person".to_owned(), request_id: "r".to_owned() }
}

const BOTH: Retention = Retention { job_ms: Some(30 * DAY), failed_objects_ms: Some(7 * DAY) };

#[test]
fn a_removed_job_leaves_no_timer_whoever_restarts() {
    for restart in [false, true] {
        let mut kept = Kept::new();
        let job = kept.ended(BOTH, 1_000);
        assert_eq!(kept.timers(job), 2);
        kept.control(Verb::Remove { job });
        assert_eq!(kept.timers(job), 0);
        if restart {
            kept.restart();
        }
        // A second one loads the job again.
        kept.control(Verb::Remove { job });
        kept.decide(Decision::Done { job, what: Trailing::Objects });
        kept.decide(Decision::Tick(40 * DAY));
        assert!(kept.core.state().head.sweep.is_empty() && kept.core.state().timers.is_empty(), "{:?}", kept.core.state());
    }
}

#[test]
fn what_is_kept_goes_when_its_time_is_over() {
    let mut kept = Kept::new();
    let job = kept.ended(BOTH, 1_000);
    kept.decide(Decision::Tick(8 * DAY));
    assert!(kept.core.state().head.sweep.contains(&job));
    kept.decide(Decision::Done { job, what: Trailing::FailedObjects });
    assert_eq!(kept.timers(job), 1);
    kept.decide(Decision::Tick(31 * DAY));
    assert!(kept.core.state().head.forget.contains(&job));
    kept.decide(Decision::Done { job, what: Trailing::Objects });
    assert_eq!(
        *kept.core.state(),
        State { head: kept.core.state().head.clone(), tenants: kept.core.state().tenants.clone(), ..State::default() }
    );
}

#[test]
fn a_job_that_goes_first_takes_its_failed_objects_with_it() {
    let mut kept = Kept::new();
    let short = kept.ended(Retention { job_ms: Some(DAY), failed_objects_ms: Some(7 * DAY) }, 1_000);
    let at_once = kept.ended(Retention { job_ms: Some(0), failed_objects_ms: None }, 1_000);
    assert_eq!(kept.timers(short), 1);
    kept.decide(Decision::Tick(2_000));
    assert!(kept.core.state().head.forget.contains(&at_once));
    kept.decide(Decision::Tick(2 * DAY));
    assert!(kept.core.state().head.forget.contains(&short));
}

#[test]
fn a_leader_that_comes_late_forgets_no_timer() {
    let mut kept = Kept::new();
    let job = kept.ended(BOTH, 1_000);
    kept.lead(8 * DAY);
    kept.restart();
    kept.decide(Decision::Tick(8 * DAY));
    assert!(kept.core.state().head.sweep.contains(&job));
    kept.lead(31 * DAY);
    kept.restart();
    kept.control(Verb::Rerun { job });
    assert_eq!(kept.timers(job), 0);
    kept.decide(Decision::Tick(31 * DAY));
    assert!(kept.core.state().head.forget.is_empty(), "its day had come, but it runs again");
}

#[test]
fn a_tick_that_fires_no_more_leaves_nothing_a_restart_would_lose() {
    let mut kept = Kept::new();
    let job = kept.ended(Retention { job_ms: Some(9 * DAY), failed_objects_ms: Some(7 * DAY) }, 1_000);
    for n in 0..=timers::TIMERS_PER_TICK {
        let sequence = kept.core.state().head.sequence + 1;
        kept.try_apply(sequence, &Record::Control(Control { actor: actor(), verb: Verb::Uploaded { id: n.to_string() } })).unwrap();
    }
    kept.decide(Decision::Tick(8 * DAY));
    assert!(!kept.core.state().timers.is_empty() && kept.core.state().head.sweep.contains(&job));
}

#[test]
fn a_state_that_differs_names_the_record_that_says_so() {
    let mut kept = Kept::new();
    kept.decide(Decision::Level(wire::LEVEL));
    let record = kept.decided(Decision::Tick(5));
    kept.try_apply(RECORDS_PER_DIGEST, &record).unwrap();
    let hash = kept.core.state().digest();
    let same = kept.decided(Decision::Digest { sequence: RECORDS_PER_DIGEST, hash });
    kept.apply(&same);
    let other = kept.decided(Decision::Digest { sequence: RECORDS_PER_DIGEST, hash: [7; 16] });
    let error = kept.try_apply(RECORDS_PER_DIGEST + 2, &other).unwrap_err().to_string();
    assert!(error.contains("volley log skip 10002") && error.contains("after record 10000"), "{error}");
}
