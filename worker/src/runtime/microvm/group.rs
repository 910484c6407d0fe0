//! The cgroup of a slot's machines on the host.
//!
//! Owns when it is made, its limits, and that nothing is left in it between two attempts. A machine's VMM is moved into it while the machine
//! is made ready. Does not own how cgroups are written (`cgroup`), nor the limits of commands inside a machine, which are the guest's.
//!
//! These limits hold whatever becomes of the guest and of its VMM. The guest's memory can't outgrow them by itself: they have room for all
//! of it and for what the VMM needs.

use std::sync::Arc;

use volley_jobspecs::machine;
use volley_jobspecs::spec::Resources;

use crate::cgroup::{CgroupError, Cgroups, Limits, SlotCgroup};
use crate::vmm::Capabilities;

/// Threads and processes of a VMM: one a processor, some for disks and a handful else. What its user may have at most (`vmm/spawner`).
const PIDS_MAX: u32 = 256;
/// CPU beside a machine's processors where its task names none, in thousandths of a core: disks and channels are served beside them.
const BESIDE_MILLI: u32 = 1_000;

/// A slot's cgroup, if this worker has cgroups.
#[derive(Debug)]
pub struct Group {
    cgroups: Option<Arc<Cgroups>>,
    slot: u32,
    /// Counts the cgroups that were given up.
    generation: u32,
    now: Option<SlotCgroup>,
    kills_before: u64,
    memory_bytes: u64,
}

impl Group {
    /// None yet.
    #[must_use]
    pub fn new(slot: u32, cgroups: Option<Arc<Cgroups>>) -> Self {
        Self { cgroups, slot, generation: 0, now: None, kills_before: 0, memory_bytes: 0 }
    }

    /// Makes it ready for a machine. The files into which that one's VMM is written.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn ready(&mut self, limits: Limits) -> Result<Vec<String>, CgroupError> {
        let Some(cgroups) = self.cgroups.clone() else { return Ok(Vec::new()) };
        if let Some(now) = &mut self.now
            && let Err(why) = now.set_limits(limits)
        {
            tracing::info!(slot = self.slot, %why, "the slot's machines get a fresh cgroup");
            self.give_up();
        }
        if self.now.is_none() {
            let name = match self.generation {
                0 => format!("machine-{}", self.slot),
                n => format!("machine-{}-{n}", self.slot),
            };
            let mut made = cgroups.slot(&name)?;
            made.set_limits(limits)?;
            self.now = Some(made);
        }
        self.memory_bytes = limits.memory_bytes.unwrap_or(0);
        self.kills_before = self.kills();
        Ok(self.now.as_ref().map(SlotCgroup::join_files).unwrap_or_default())
    }

    /// Did the host's kernel end something in it for want of memory since it was made ready? The limit, in bytes.
    #[must_use]
    pub fn killed_at(&self) -> Option<u64> {
        (self.kills() > self.kills_before).then_some(self.memory_bytes)
    }

    /// Once the machine is gone: kills what it left, if it left anything, and is not used again then.
    pub fn clear(&mut self) {
        let left = self.now.as_ref().map_or(0, SlotCgroup::kill);
        if left > 0 {
            tracing::error!(slot = self.slot, left, "processes were left of a machine and were killed");
            self.give_up();
        }
    }

    /// Once its machine was moved elsewhere and lives on: what that took here stays charged here, so the next one gets a fresh cgroup.
    pub fn leave(&mut self) {
        if self.now.is_some() {
            self.give_up();
        }
    }

    fn kills(&self) -> u64 {
        self.now.as_ref().map_or(0, SlotCgroup::oom_kills)
    }

    fn give_up(&mut self) {
        self.generation += 1;
        if let Some(old) = self.now.take() {
            // Waits for processes to die, which may take long when they hang in the kernel.
            tokio::task::spawn_blocking(move || old.remove());
        }
    }
}

/// What a machine may use of its host.
#[must_use]
pub fn limits(resources: &Resources, capabilities: &Capabilities) -> Limits {
    let processors = u32::from(machine::vcpus(resources)).saturating_mul(1_000);
    Limits {
        memory_bytes: Some(machine::host_memory_bytes(resources).saturating_add(capabilities.beside_bytes)),
        cpu_milli: Some(resources.cpus.map_or(processors.saturating_add(BESIDE_MILLI), |cpus| cpus.0)),
        pids: Some(PIDS_MAX),
    }
}
