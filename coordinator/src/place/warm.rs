//! What the scheduler remembers of workers that have blocks of a volume in their caches.
//!
//! Owns that memory. It is learnt from where tasks ended, and costs a little speed where it is lost or wrong. Leader only; never part of the state.

use std::collections::{BTreeMap, VecDeque};

use volley_jobspecs::ids::{VolumeId, WorkerId};

use crate::state::State;
use crate::state::job::Job;
use crate::volumes::written;

/// Volumes that are remembered: some megabytes. Beyond that one goes for each that comes.
const VOLUMES_MAX: usize = 20_000;
/// Workers of each, the latest. With more a volume is warm nearly everywhere.
const WORKERS_MAX: usize = 16;

/// Which workers have used which volumes.
#[derive(Debug, Default)]
pub struct Warm {
    workers: BTreeMap<VolumeId, VecDeque<WorkerId>>,
}

/// The volumes whose blocks a task reads: those that it copies or reads, and those that it writes and that are there.
fn volumes_of(state: &State, job: &Job, index: u32) -> Vec<VolumeId> {
    let pins = job.progress.pins.iter().flatten().map(|pin| pin.volume);
    let written = written(&job.facts.plan).filter_map(|(_, wanted)| {
        let name = (job.facts.tenant.clone(), wanted.name_of(job.id, index));
        state.volumes.get(&name).map(|volume| volume.id)
    });
    pins.chain(written).collect()
}

impl Warm {
    /// A task has run on a worker.
    pub fn ran(&mut self, state: &State, job: &Job, index: u32, worker: &WorkerId) {
        for volume in volumes_of(state, job, index) {
            if self.workers.len() >= VOLUMES_MAX && !self.workers.contains_key(&volume) {
                self.workers.pop_first();
            }
            let workers = self.workers.entry(volume).or_default();
            workers.retain(|known| known != worker);
            workers.push_front(worker.clone());
            workers.truncate(WORKERS_MAX);
        }
    }

    /// Who has used what a task reads, the latest first.
    pub fn workers<'a>(&'a self, state: &State, job: &Job, index: u32) -> Vec<&'a WorkerId> {
        let volumes = volumes_of(state, job, index);
        volumes.iter().filter_map(|volume| self.workers.get(volume)).flatten().collect()
    }
}
