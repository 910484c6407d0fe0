//! The removal of a job, on the core alone: its objects go when nothing writes any more, and it is not rerun.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

use std::collections::BTreeMap;

use volley_coordinator::core::{Core, Mark, Message};
use volley_coordinator::leader::{Action, Tuning};
use volley_coordinator::state::effects::{Answer, Refusal};
use volley_coordinator::state::invariants;
use volley_coordinator::state::rows::MapRows;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, Incarnation, JobId, TenantId, Term, WorkerId};
use volley_jobspecs::parse::parse_and_validate;
use volley_jobspecs::validate::Features;
use volley_jobspecs::wire;
use volley_jobspecs::wire::plan::{Isolation, SpecRef};
use volley_jobspecs::wire::record::{Actor, Control, Decision, Lead, Record, Submit, Trailing, Verb};
use volley_jobspecs::wire::report::{AttemptEnd, Ending, Report};
use volley_jobspecs::wire::work::WorkerInfo;

struct World {
    core: Core,
    rows: MapRows,
    sequence: u64,
    now_ms: u64,
}

impl World {
    fn new() -> Self {
        let rows = MapRows::default();
        let mut world = Self { core: Core::open(&rows).unwrap(), rows, sequence: 0, now_ms: 0 };
        world.apply(Record::Lead(Lead { term: Term(1), coordinator: "c".into(), now_ms: 1_000 }));
        world.core.take_office(1_000, 0, Tuning::default());
        world
    }

    /// Applies a record; gives its sequence and the answers to requests.
    fn apply(&mut self, record: Record) -> (u64, Vec<Answer>) {
        self.sequence += 1;
        let effects =
            self.core.apply(&self.rows, &[Message { sequence: self.sequence, bytes: wire::encode(&record), mark: Mark::Fenced }]).unwrap();
        let state = self.core.state();
        let mut broken = invariants::broken(state);
        broken.extend(self.core.leader_ref().map(|leader| leader.broken(state)).unwrap_or_default());
        assert!(broken.is_empty(), "after record {}: {broken:?}", self.sequence);
        (self.sequence, effects.into_iter().flat_map(|fx| fx.answers).map(|(_, answer)| answer).collect())
    }

    fn ask(&mut self, verb: Verb) -> Answer {
        let actor = Actor { tenant: TenantId::new("default").unwrap(), principal: "p".into(), request_id: format!("r{}", self.sequence) };
        self.apply(Record::Control(Control { actor, verb })).1.remove(0)
    }

    /// What the leader has done beside its rounds, once it has come to rest.
    fn trails(&mut self) -> Vec<(JobId, Trailing)> {
        let mut trails = Vec::new();
        for _ in 0..20 {
            self.now_ms += 10;
            let (leader, state) = self.core.leader().unwrap();
            for action in leader.poll(state, self.now_ms) {
                match action {
                    Action::Publish { decided, .. } => _ = self.apply(Record::Decided(decided)),
                    Action::Trail(job, what) => trails.push((job, what)),
                    Action::Send(..) | Action::Work(_) | Action::StepDown => {}
                }
            }
        }
        trails
    }
}

#[test]
fn a_job_is_forgotten_when_no_worker_holds_anything_of_it_any_more() {
    let mut world = World::new();
    let worker = WorkerId::new("w").unwrap();
    let info = WorkerInfo {
        slots: 1,
        cpu_milli: 1_000,
        memory_bytes: 1 << 30,
        disk_bytes: 1 << 30,
        isolation: vec![Isolation::Process],
        labels: BTreeMap::new(),
        limits: true,
        build: String::new(),
        host: String::new(),
        lacks: Vec::new(),
        template_bytes: None,
        images: None,
        fetches: false,
        volumes: None,
    };
    let (leader, _) = world.core.leader().unwrap();
    leader.record(Decision::Level(wire::LEVEL));
    leader.record(Decision::WorkerJoined { worker: worker.clone(), incarnation: Incarnation(1), info });
    assert_eq!(world.trails(), []);
    let spec = br#"{"version":"volley/v1","name":"x","task":{"isolation":"process","command":"true"}}"#;
    let plan = volley_jobspecs::plan::plan(&parse_and_validate(spec, &Features::all()).unwrap_or_else(|e| panic!("{e}")), 1);
    let actor = Actor { tenant: TenantId::new("default").unwrap(), principal: "p".into(), request_id: "s".into() };
    let spec = SpecRef::Inline(spec.to_vec().into());
    let submit = Submit { actor, idempotency_key: "k".into(), spec_hash: "h".into(), plan, spec, trace: None, uploads: Vec::new() };
    let job = JobId(world.apply(Record::Submit(Box::new(submit))).0);
    assert_eq!(world.trails(), []);
    let sequence = world.core.state().job(job).unwrap().open[&0].bundle.sequence;
    assert_eq!(world.core.state().bundles_of(&TenantId::new("default").unwrap()), 1);

    assert_eq!(world.ask(Verb::Cancel { job, stop_running: true, reason: String::new() }), Answer::Done);
    assert_eq!(world.ask(Verb::Remove { job }), Answer::Done);
    assert_eq!(world.trails(), [], "its worker may still write objects");
    assert_eq!(world.ask(Verb::Rerun { job }), Answer::Refused(Refusal::Removed(job)));

    let name = AttemptName { job, stage: 0, index: 0, number: 1, sequence };
    let end = AttemptEnd::bare(name, Ending::Failed(FailureClass::Cancelled), Isolation::Process);
    world.apply(Record::Report(Report { worker, incarnation: Incarnation(1), number: 1, ends: vec![end] }));
    assert_eq!(world.trails(), [(job, Trailing::Objects)], "and no manifest beside it");
    let (leader, _) = world.core.leader().unwrap();
    leader.trailed(job, Trailing::Objects, true);
    assert_eq!(world.trails(), []);
    assert!(world.core.state().job(job).is_none() && world.core.state().head.forget.is_empty());
    assert!(world.core.state().tenant_bundles.is_empty());
}
