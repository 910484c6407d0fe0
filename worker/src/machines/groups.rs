//! The cgroups of machines on the host, one each.
//!
//! Owns when one is made, its limits, and that nothing is left in it behind its machine. A machine's VMM begins in its own and stays there,
//! whether it waits, serves or is kept: to move it from one to another holds up everything of the worker for some 10 ms. Only its limits
//! change: while it waits it has none. Does not own how cgroups are written (`cgroup`), nor the limits of commands inside a machine, which
//! are the guest's.
//!
//! These limits hold whatever becomes of the guest and of its VMM. The guest's memory can't outgrow them by itself: they have room for all
//! of it, for the pages of its template that it is the first to touch, for what the VMM needs, and some more ([`BESIDE_BYTES`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use volley_jobspecs::machine;
use volley_jobspecs::spec::Resources;

use crate::cgroup::{CgroupError, Cgroups, Limits, SlotCgroup};
use crate::vmm::Capabilities;

/// Threads and processes of a VMM: one a processor, some for disks and a handful else. What its user may have at most (`vmm/spawner`).
const PIDS_MAX: u32 = 256;
/// CPU beside a machine's processors where its task names none, in thousandths of a core: disks and channels are served beside them.
const BESIDE_MILLI: u32 = 1_000;
/// Memory beside what is set aside for a machine: pages of its disk that are being written and can't be given back at once, page tables, and
/// what an emulating VMM keeps beside its translations. It is a limit and not set aside: without it a guest that used all of its own memory
/// and much of its disk was ended now and then.
const BESIDE_BYTES: u64 = 96 << 20;

#[derive(Debug)]
struct Inner {
    cgroups: Arc<Cgroups>,
    /// Counts those that were made.
    made: AtomicU64,
}

/// Where machines get their cgroups, if this worker has any. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Groups(Option<Arc<Inner>>);

/// A machine's cgroup. Dropped, whatever is in it is killed.
#[derive(Debug)]
pub struct Group {
    cgroup: Option<SlotCgroup>,
    memory_bytes: u64,
}

impl Groups {
    /// None were made yet. `cgroups`: the worker's.
    #[must_use]
    pub fn new(cgroups: Option<Arc<Cgroups>>) -> Self {
        Self(cgroups.map(|cgroups| Arc::new(Inner { cgroups, made: AtomicU64::new(0) })))
    }

    /// One for a machine that is about to begin, without limits. Each is fresh: pages of a template that a machine was the first to touch are
    /// charged to its cgroup for as long as the template lives, and would be taken from what the next one may use.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn take(&self) -> Result<Group, CgroupError> {
        let Some(inner) = &self.0 else { return Ok(Group { cgroup: None, memory_bytes: 0 }) };
        let number = inner.made.fetch_add(1, Ordering::Relaxed);
        Ok(Group { cgroup: Some(inner.cgroups.slot(&format!("machine-{number}"))?), memory_bytes: 0 })
    }
}

impl Group {
    /// The files into which a machine's VMM is written before it begins.
    #[must_use]
    pub fn join_files(&self) -> Vec<String> {
        self.cgroup.as_ref().map(SlotCgroup::join_files).unwrap_or_default()
    }

    /// From now on its machine has these.
    ///
    /// # Errors
    /// [`CgroupError`], also when it has more than that already.
    pub fn limit(&mut self, limits: Limits) -> Result<(), CgroupError> {
        self.memory_bytes = limits.memory_bytes.unwrap_or(0);
        self.cgroup.as_mut().map_or(Ok(()), |cgroup| cgroup.set_limits(limits))
    }

    /// Did the host's kernel end something in it for want of memory? The limit, in bytes.
    #[must_use]
    pub fn killed_at(&self) -> Option<u64> {
        let kills = self.cgroup.as_ref().map_or(0, SlotCgroup::oom_kills);
        (kills > 0).then_some(self.memory_bytes)
    }

    /// Once its machine is gone: kills what that left, if it left anything, and removes it.
    pub fn clear(self) {
        let left = self.cgroup.as_ref().map_or(0, SlotCgroup::kill);
        if left > 0 {
            tracing::error!(left, "processes were left of a machine and were killed");
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(cgroup) = self.cgroup.take() {
            remove(cgroup);
        }
    }
}

/// Waits for processes to die, which may take long when they hang in the kernel. What is left when the worker ends is removed then.
fn remove(cgroup: SlotCgroup) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn_blocking(move || cgroup.remove());
    }
}

/// The memory that a machine takes of its host when its guest has used all of its own, in bytes.
#[must_use]
pub fn memory_bytes(resources: &Resources, capabilities: &Capabilities) -> u64 {
    machine::host_memory_bytes(resources).saturating_add(capabilities.beside_bytes)
}

/// What a machine may use of its host.
#[must_use]
pub fn limits(resources: &Resources, capabilities: &Capabilities) -> Limits {
    let processors = u32::from(machine::vcpus(resources)).saturating_mul(1_000);
    Limits {
        // A page of the guest that its template has no content for costs two when it is first written: one of the template's, one of its own.
        memory_bytes: Some(
            memory_bytes(resources, capabilities).saturating_add(machine::memory_bytes(resources)).saturating_add(BESIDE_BYTES),
        ),
        cpu_milli: Some(resources.cpus.map_or(processors.saturating_add(BESIDE_MILLI), |cpus| cpus.0)),
        pids: Some(PIDS_MAX),
    }
}
