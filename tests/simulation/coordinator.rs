//! A coordinator: the real core over rows in a map, with a driver as dumb as the real one.

use volley_coordinator::core::{Core, Message};
use volley_coordinator::leader::{Action, Tuning};
use volley_coordinator::state::rows::{MapRows, Rows as _, Table, Write};
use volley_coordinator::volumes::Work;
use volley_jobspecs::ids::{SnapshotId, WorkerId};
use volley_jobspecs::wire::record::{Decided, Decision, Record};
use volley_jobspecs::wire::work::{Beat, BeatAnswer, WorkAnswer};
use volley_jobspecs::wire::{self};

use super::demands;

/// How long a lease holds from when its renewal was sent.
pub const GIVE_UP_MS: u64 = 4_000;

/// Every row of a coordinator between two batches.
pub type Checkpoint = std::collections::BTreeMap<(Table, Vec<u8>), Vec<u8>>;

pub struct Coordinator {
    pub name: String,
    pub core: Core,
    pub rows: MapRows,
    pub up: bool,
    /// It does nothing until then (SIGSTOP).
    pub frozen_until: u64,
    /// Its monotonic clock runs this far off the world's.
    pub clock_offset: u64,
    /// Its wall clock steps.
    pub wall_offset: i64,
    pub tuning: Tuning,
    pub lease_until: u64,
    pub asked_to_lead_at: Option<u64>,
    /// The publish that is not known to be written or refused yet.
    pub publishing: Option<(Decided, u64)>,
    pub life: u64,
}

impl Coordinator {
    pub fn new(name: String, tuning: Tuning) -> Self {
        let rows = MapRows::default();
        let core = Core::open(&rows).unwrap();
        Self {
            name,
            core,
            rows,
            up: true,
            frozen_until: 0,
            clock_offset: 0,
            wall_offset: 0,
            tuning,
            lease_until: 0,
            asked_to_lead_at: None,
            publishing: None,
            life: 0,
        }
    }

    pub fn now(&self, world_ms: u64) -> u64 {
        world_ms + self.clock_offset
    }

    pub fn wall(&self, world_ms: u64) -> u64 {
        (1_700_000_000_000_i64 + world_ms as i64 + self.wall_offset) as u64
    }

    pub fn runs(&self, world_ms: u64) -> bool {
        self.up && self.frozen_until <= world_ms
    }

    /// What a restart would load is what is there.
    pub fn reloads(&self) {
        demands::same_state(Core::open(&self.rows).unwrap().state(), self.core.state());
    }

    /// kill -9 and a restart: only the rows stay.
    pub fn restart(&mut self, clock_offset: u64) {
        self.reloads();
        self.begin(clock_offset);
    }

    fn begin(&mut self, clock_offset: u64) {
        self.core = Core::open(&self.rows).unwrap();
        self.up = true;
        self.clock_offset = clock_offset;
        self.lease_until = 0;
        self.asked_to_lead_at = None;
        self.publishing = None;
        self.life += 1;
        self.name = format!("{}-{}", self.name.split('-').next().unwrap(), self.life);
    }

    /// Its next record was trimmed: it starts anew from a checkpoint.
    pub fn load(&mut self, checkpoint: &Checkpoint, clock_offset: u64) {
        self.rows = MapRows::default();
        let rows = checkpoint.iter().map(|((table, key), value)| Write::Put(*table, key.clone(), value.clone()));
        self.rows.write(rows.collect()).unwrap();
        self.begin(clock_offset);
    }

    pub fn step_down(&mut self) {
        self.core.leave_office();
        self.publishing = None;
        self.lease_until = 0;
    }

    pub fn next(&self) -> u64 {
        self.core.state().head.sequence + 1
    }

    pub fn apply(&mut self, records: &[Message], world_ms: u64) {
        self.core.apply(&self.rows, records).unwrap_or_else(|e| panic!("{} can't apply: {e}", self.name));
        let head = &self.core.state().head;
        if !self.core.leads() && self.asked_to_lead_at.is_some() && head.leader == self.name {
            self.core.take_office(self.wall(world_ms), self.now(world_ms), self.tuning);
        }
    }

    pub fn beat(&mut self, beat: Beat, world_ms: u64) -> Option<BeatAnswer> {
        let now = self.now(world_ms);
        let (leader, state) = self.core.leader()?;
        let answer = leader.beat(state, beat, now);
        if answer.is_none() {
            self.step_down();
        }
        answer
    }

    pub fn answered(&mut self, worker: &WorkerId, answer: &WorkAnswer) {
        if let Some((leader, _)) = self.core.leader()
            && leader.answered(worker, answer).is_some()
        {
            self.step_down();
        }
    }

    pub fn poll(&mut self, world_ms: u64) -> Vec<Action> {
        let now = self.now(world_ms);
        let actions = self.core.leader().map(|(leader, state)| leader.poll(state, now)).unwrap_or_default();
        for action in &actions {
            match action {
                Action::Publish { decided, after } => self.publishing = Some((decided.clone(), *after)),
                Action::Trail(job, what) => {
                    if let Some((leader, _)) = self.core.leader() {
                        leader.trailed(*job, *what, true);
                    }
                }
                // The bucket does at once what is asked of it.
                Action::Work(work) => {
                    if let Some((leader, _)) = self.core.leader() {
                        leader.worked(work, Some(worked(work)));
                    }
                }
                Action::StepDown => self.step_down(),
                Action::Send(..) => {}
            }
        }
        actions
    }
}

/// What is recorded when work for a volume is done.
fn worked(work: &Work) -> Decision {
    match work {
        Work::Promote { tenant, name, volume, promotion } => Decision::VolumePromoted {
            tenant: tenant.clone(),
            name: name.clone(),
            volume: *volume,
            generation: promotion.generation,
            why: None,
        },
        Work::Grow { tenant, name, volume, generation, .. } => {
            Decision::VolumeGrown { tenant: tenant.clone(), name: name.clone(), volume: *volume, generation: generation + 1, why: None }
        }
        Work::Pin { job, pin, .. } => {
            let snapshot = pin.snapshot.unwrap_or(SnapshotId([1; 16]));
            Decision::VolumePinned { job: *job, slot: pin.slot, snapshot }
        }
        Work::Remove { tenant, volume } => Decision::VolumeGone { tenant: tenant.clone(), volume: *volume },
    }
}

/// Is this message of the leader's subject the round we published?
pub fn is_ours(bytes: &[u8], decided: &Decided) -> bool {
    matches!(wire::decode("record", bytes), Ok(Record::Decided(d)) if d.term == decided.term && d.round == decided.round)
}
