//! Workers and the bundles they hold.
//!
//! Owns what the log knows of a worker. Does not own what only the leader knows (beats, silence, what was sent): `leader`.

use std::collections::BTreeMap;

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::{BundleId, Incarnation, JobId, WorkerId};
use volley_jobspecs::machine;
use volley_jobspecs::units;
use volley_jobspecs::wire::plan::{Isolation, Needs};
use volley_jobspecs::wire::record::Run;
use volley_jobspecs::wire::work::{HasVolumes, WorkerInfo};

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
    #[error("{} isolation \"{tier}\"{}", if .why.is_some() { "can't offer" } else { "doesn't offer" }, because(.why.as_deref()))]
    Isolation {
        /// Which.
        tier: &'static str,
        /// Why not, where it was to.
        why: Option<String>,
    },
    /// A machine is larger than all its room for templates.
    #[error(
        "has room for machines of {}, the task's has {} (a machine is saved once, as its template: `volley worker --template-memory`)",
        units::different_bytes(*has, *needs).0, units::different_bytes(*has, *needs).1
    )]
    Templates {
        /// Bytes of room.
        has: u64,
        /// Bytes of the machine.
        needs: u64,
    },
    /// It has no image of that name.
    #[error("has no image that is called as $.task.image says (`volley image import` on its host puts it there)")]
    Image,
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
    /// Its tasks can't have volumes.
    #[error("can't have volumes{}", because(.0.as_deref()))]
    Volumes(Option<String>),
}

fn because(why: Option<&str>) -> String {
    why.map_or_else(String::new, |why| format!(": {why}"))
}

/// Could this worker, when idle, run such a task? Every reason why not, but for its image ([`lacks_image`]): that may come any time.
#[must_use]
pub fn unfit(info: &WorkerInfo, needs: &Needs) -> Vec<Unfit> {
    let mut reasons = Vec::new();
    if !info.isolation.contains(&needs.isolation) {
        let why = info.why_not(needs.isolation).map(str::to_owned);
        reasons.push(Unfit::Isolation { tier: needs.isolation.as_str(), why });
    }
    // What another one builds it may well have room for: of a machine's memory only what was written is fetched.
    reasons.extend(lacks_room(info, needs).filter(|_| !info.fetches));
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
    match &info.volumes {
        _ if needs.volumes != Some(true) => {}
        Some(HasVolumes::Yes) => {}
        Some(HasVolumes::No(why)) => reasons.push(Unfit::Volumes(Some(why.clone()))),
        None => reasons.push(Unfit::Volumes(None)),
    }
    reasons
}

/// Too little room to build the template of such a task's machine.
fn lacks_room(info: &WorkerInfo, needs: &Needs) -> Option<Unfit> {
    let has = info.template_bytes.filter(|_| needs.isolation == Isolation::Microvm)?;
    let needs = needs.memory_bytes.saturating_sub(machine::VMM_BYTES);
    (needs > has).then_some(Unfit::Templates { has, needs })
}

/// Is there no worker that could build the template of such a task's machine? Then none fetches it either.
#[must_use]
pub fn is_too_large(workers: &Workers, needs: &Needs) -> bool {
    let builds = |worker: &Worker| worker.info.isolation.contains(&needs.isolation) && lacks_room(&worker.info, needs).is_none();
    needs.isolation == Isolation::Microvm && !workers.values().any(builds)
}

/// Does such a task need more room than this worker has, for a template that nobody else builds either (`nobody`: [`is_too_large`])?
#[must_use]
pub fn too_large_here(info: &WorkerInfo, needs: &Needs, nobody: bool) -> bool {
    nobody && lacks_room(info, needs).is_some()
}

/// The same as [`unfit`], and what depends on the other workers and on what may come any time: a template's room, and its image.
#[must_use]
pub fn obstacles(workers: &Workers, info: &WorkerInfo, needs: &Needs) -> Vec<Unfit> {
    let mut reasons = unfit(info, needs);
    if info.fetches && is_too_large(workers, needs) {
        reasons.extend(lacks_room(info, needs));
    }
    reasons.extend(lacks_image(info, needs).then_some(Unfit::Image));
    reasons
}

/// Is it known that this worker has no image for such tasks? One that doesn't say what it has may have it.
#[must_use]
pub fn lacks_image(info: &WorkerInfo, needs: &Needs) -> bool {
    needs.image.is_some_and(|key| has_image(info, key) == Some(false))
}

/// Has it an image of this key? None: it doesn't say.
fn has_image(info: &WorkerInfo, key: u64) -> Option<bool> {
    info.images.as_ref().map(|images| images.binary_search(&key).is_ok())
}

/// Is there a worker that could run such tasks and has their image, or may have it? Then no other one is asked.
#[must_use]
pub fn image_is_somewhere(workers: &Workers, needs: &Needs) -> bool {
    needs.image.is_some() && workers.values().any(|worker| !lacks_image(&worker.info, needs) && unfit(&worker.info, needs).is_empty())
}

/// Is it known of every worker that offers this tier that it has no such image?
#[must_use]
pub fn image_is_nowhere(workers: &Workers, tier: Isolation, key: u64) -> bool {
    let mut offer = workers.values().filter(|worker| worker.info.isolation.contains(&tier));
    offer.all(|worker| has_image(&worker.info, key) == Some(false))
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
