//! Workers and the bundles they hold.
//!
//! Owns what the log knows of a worker. Does not own what only the leader knows (beats, silence, what was sent): `leader`.

use std::collections::BTreeMap;

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::{BundleId, Incarnation, JobId, WorkerId};
use volley_jobspecs::units;
use volley_jobspecs::wire::plan::Needs;
use volley_jobspecs::wire::record::Run;
use volley_jobspecs::wire::work::WorkerInfo;

/// One bundle may wait at a worker for each one that runs (DESIGN §5), so that a slot never idles for a round trip.
pub const BUNDLES_PER_SLOT: u32 = 2;

/// A worker that has joined and was not lost.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Worker {
    /// Its present life.
    #[n(0)]
    pub incarnation: Incarnation,
    /// What it has.
    #[n(1)]
    pub info: WorkerInfo,
    /// An operator wants it to take nothing more.
    #[n(2)]
    pub draining: bool,
    /// It gets nothing until then, in milliseconds since 1970; 0: it is trusted.
    #[n(3)]
    pub quarantined_until_ms: u64,
    /// What it holds.
    #[n(4)]
    pub bundles: BTreeMap<BundleId, Bundle>,
    /// What is promised to those bundles together.
    #[n(5)]
    pub promised: Promised,
}

/// Resources promised to bundles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub struct Promised {
    /// CPU in thousandths of a core.
    #[n(0)]
    pub cpu_milli: u64,
    /// Memory in bytes.
    #[n(1)]
    pub memory_bytes: u64,
    /// Disk in bytes.
    #[n(2)]
    pub disk_bytes: u64,
}

impl Promised {
    /// Adds what one bundle needs.
    pub fn add(&mut self, needs: &Needs) {
        self.cpu_milli += u64::from(needs.cpu_milli);
        self.memory_bytes += needs.memory_bytes;
        self.disk_bytes += needs.disk_bytes;
    }

    /// Gives back what one bundle needed.
    pub fn remove(&mut self, needs: &Needs) {
        self.cpu_milli = self.cpu_milli.saturating_sub(u64::from(needs.cpu_milli));
        self.memory_bytes = self.memory_bytes.saturating_sub(needs.memory_bytes);
        self.disk_bytes = self.disk_bytes.saturating_sub(needs.disk_bytes);
    }

    /// Would one more bundle fit into `times` of what the worker has?
    #[must_use]
    pub fn fits(&self, needs: &Needs, info: &WorkerInfo, times: u32) -> bool {
        let times = u64::from(times);
        self.cpu_milli + u64::from(needs.cpu_milli) <= u64::from(info.cpu_milli) * times
            && self.memory_bytes + needs.memory_bytes <= info.memory_bytes.saturating_mul(times)
            && self.disk_bytes + needs.disk_bytes <= info.disk_bytes.saturating_mul(times)
    }
}

/// Tasks one slot runs one after another.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Bundle {
    /// Of which job.
    #[n(0)]
    pub job: JobId,
    /// The tasks it was given, in order; which of them are still open is in the job.
    #[n(1)]
    pub tasks: Vec<Run>,
    /// How many of them are still open.
    #[n(2)]
    pub left: u32,
    /// When it was assigned, in milliseconds since 1970.
    #[n(3)]
    pub assigned_ms: u64,
    /// What it needs, as promised.
    #[n(4)]
    pub needs: Needs,
}

impl Bundle {
    /// Its tasks in order.
    pub fn indices(&self) -> impl Iterator<Item = u32> + '_ {
        self.tasks.iter().flat_map(|run| run.first..run.first + run.count)
    }
}

/// Why a worker can't take a task.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// It doesn't offer the tier.
    #[error("doesn't offer isolation \"{0}\"")]
    Isolation(&'static str),
    /// It has less than one task needs, even when idle.
    #[error("has {} {what} in all, the task needs {}", units::different_bytes(*has, *needs).0, units::different_bytes(*has, *needs).1)]
    TooSmall {
        /// Of what.
        what: &'static str,
        /// Bytes it has.
        has: u64,
        /// Bytes the task needs.
        needs: u64,
    },
    /// It has less CPU than one task needs, even when idle.
    #[error("has {} cores in all, the task needs {}", units::cores((*has).into()), units::cores((*needs).into()))]
    FewCores {
        /// It has, in thousandths of a core.
        has: u32,
        /// The task needs, in thousandths of a core.
        needs: u32,
    },
    /// It lacks a label.
    #[error("has no label {0}={1}")]
    Label(String, String),
    /// It can't enforce limits.
    #[error("can't enforce cpu, memory or pids limits (it has no permission on cgroups)")]
    Limits,
}

/// Could this worker, when idle, run such a task? Every reason why not.
#[must_use]
pub fn unfit(info: &WorkerInfo, needs: &Needs) -> Vec<Unfit> {
    let mut reasons = Vec::new();
    if !info.isolation.contains(&needs.isolation) {
        reasons.push(Unfit::Isolation(needs.isolation.as_str()));
    }
    if needs.cpu_milli > info.cpu_milli {
        reasons.push(Unfit::FewCores { has: info.cpu_milli, needs: needs.cpu_milli });
    }
    let sizes = [("of memory", info.memory_bytes, needs.memory_bytes), ("of disk", info.disk_bytes, needs.disk_bytes)];
    reasons.extend(sizes.into_iter().filter(|(_, has, needs)| needs > has).map(|(what, has, needs)| Unfit::TooSmall { what, has, needs }));
    let missing = needs.labels.iter().filter(|(key, value)| info.labels.get(*key) != Some(value));
    reasons.extend(missing.map(|(key, value)| Unfit::Label(key.clone(), value.clone())));
    if needs.limits && !info.limits {
        reasons.push(Unfit::Limits);
    }
    reasons
}

/// May the worker be given one more bundle at `now_ms`?
#[must_use]
pub fn takes_more(worker: &Worker, now_ms: u64) -> bool {
    !worker.draining
        && worker.quarantined_until_ms <= now_ms
        && (worker.bundles.len() as u64) < u64::from(worker.info.slots) * u64::from(BUNDLES_PER_SLOT)
}

/// All workers, by name.
pub type Workers = BTreeMap<WorkerId, Worker>;
