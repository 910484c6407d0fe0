//! What the leader has done in the bucket for volumes: changes, growth, pins, removals.
//!
//! Owns which of it is wanted and under way. All of it follows from the state, so a new leader finds what is left by looking; each work is safe to repeat.
//! Does not own the work itself (`io/volumes.rs`).

use std::collections::BTreeSet;

use volley_jobspecs::ids::{JobId, TenantId};
use volley_jobspecs::wire::record::Decision;

use crate::state::State;
use crate::state::effects::Effects;
use crate::state::job::Job;
use crate::state::volume::Volume;
use crate::volumes::{Work, change, pinning};

/// Works under way at once: each is some requests to the bucket, and nobody's task waits behind more than a few of them.
const WORKS_MAX: usize = 32;

/// What is wanted and under way.
#[derive(Debug, Default)]
pub struct Works {
    /// Volumes with something that their heads do not say yet. Follows from the state, as the next; kept so that no event costs a walk over all volumes.
    changes: BTreeSet<(TenantId, String)>,
    /// Jobs that wait for a pin.
    unpinned: BTreeSet<JobId>,
    doing: BTreeSet<Work>,
}

fn is_unpinned(job: &Job) -> bool {
    pinning(job).next().is_some()
}

impl Works {
    /// What the state wants.
    pub fn new(state: &State) -> Self {
        let changes = state.volumes.iter().filter(|(_, volume)| volume.is_changing()).map(|(key, _)| key.clone()).collect();
        let unpinned = state.jobs.values().filter(|job| is_unpinned(job)).map(|job| job.id).collect();
        Self { changes, unpinned, doing: BTreeSet::new() }
    }

    /// Records were applied.
    pub fn applied(&mut self, state: &State, fx: &Effects) {
        for key in &fx.volumes {
            match state.volumes.get(key).is_some_and(Volume::is_changing) {
                true => _ = self.changes.insert(key.clone()),
                false => _ = self.changes.remove(key),
            }
        }
        for id in &fx.jobs {
            match state.jobs.get(id).is_some_and(is_unpinned) {
                true => _ = self.unpinned.insert(*id),
                false => _ = self.unpinned.remove(id),
            }
        }
    }

    /// What to begin now. `pending` is decided and not yet in the log.
    pub fn begin(&mut self, state: &State, pending: &[Decision]) -> Vec<Work> {
        let changes = self.changes.iter().filter_map(|key| change(state, key));
        let pins = self.unpinned.iter().filter_map(|id| state.jobs.get(id)).flat_map(pinning);
        let going = state.head.volumes_going.iter().flatten();
        let removals = going.map(|(tenant, volume)| Work::Remove { tenant: tenant.clone(), volume: *volume });
        let free = WORKS_MAX.saturating_sub(self.doing.len());
        let new = |work: &Work| !self.doing.contains(work) && !pending.iter().any(|decision| answers(work, decision));
        let begun: Vec<Work> = changes.chain(pins).chain(removals).filter(new).take(free).collect();
        self.doing.extend(begun.iter().cloned());
        begun
    }

    /// One has ended, however it did.
    pub fn ended(&mut self, work: &Work) {
        self.doing.remove(work);
    }

    /// What is noted and is not so, for tests.
    pub fn broken(&self, state: &State) -> Option<String> {
        let now = Self::new(state);
        let same = (&self.changes, &self.unpinned) == (&now.changes, &now.unpinned);
        (!same).then(|| format!("the leader has {self:?} to do for volumes, the state {now:?}"))
    }
}

/// Does this decision say that the work is done?
fn answers(work: &Work, decision: &Decision) -> bool {
    match (work, decision) {
        (Work::Promote { volume, promotion, .. }, Decision::VolumePromoted { volume: done, generation, .. }) => {
            (volume, promotion.generation) == (done, *generation)
        }
        (Work::Grow { volume, generation, .. }, Decision::VolumeGrown { volume: done, generation: now, .. }) => {
            volume == done && generation.checked_add(1) == Some(*now)
        }
        (Work::Pin { job, pin, .. }, Decision::VolumePinned { job: done, slot, .. }) => (*job, pin.slot) == (*done, *slot),
        (Work::Remove { volume, .. }, Decision::VolumeGone { volume: done, .. }) => volume == done,
        _ => false,
    }
}
