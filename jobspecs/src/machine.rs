//! What a microVM takes of its host.
//!
//! Owns the sizes of machines: what a task asks for, what its machine has beyond that, and what of the host is set aside for both.
//! Coordinator and worker ask here, so that a worker is never given more machines than it has room for. Does not own which machines
//! there are (the worker's `machines`).

use crate::spec::Resources;

/// Memory of a task that doesn't say, in bytes: a machine has to have some.
pub const TASK_MEMORY_BYTES_DEFAULT: u64 = 512 << 20;
/// Disk of a machine whose task doesn't say, in bytes. It holds work, output and temporary directories.
pub const DISK_BYTES_DEFAULT: u64 = 2 << 30;
/// What a machine has beyond its task's memory, in bytes: the kernel and what it keeps (some 45 MiB), the agent with what it sets aside for
/// itself (24 MiB), and what is written outside the scratch disk.
const OVERHEAD_BYTES: u64 = 96 << 20;
/// Machines come in steps of this many bytes of memory: each size is a template of its own.
const MEMORY_STEP_BYTES: u64 = 64 << 20;
/// The host's memory that the VMM itself takes, in bytes: 24 to 39 MB were measured with QEMU, shared pages divided.
pub const VMM_BYTES: u64 = 40 << 20;
/// Most virtual processors of a machine.
const VCPUS_MAX: u32 = 32;

/// Virtual processors of the machine for a task: whole ones.
#[must_use]
pub fn vcpus(resources: &Resources) -> u8 {
    let vcpus = resources.cpus.map_or(1, |cpus| cpus.0.div_ceil(1_000)).clamp(1, VCPUS_MAX);
    u8::try_from(vcpus).unwrap_or(u8::MAX)
}

/// Memory of the machine for a task, in bytes.
#[must_use]
pub fn memory_bytes(resources: &Resources) -> u64 {
    let memory = resources.memory.map_or(TASK_MEMORY_BYTES_DEFAULT, |memory| memory.0).saturating_add(OVERHEAD_BYTES);
    memory.div_ceil(MEMORY_STEP_BYTES).saturating_mul(MEMORY_STEP_BYTES)
}

/// The host's memory that is set aside for it, in bytes.
#[must_use]
pub fn host_memory_bytes(resources: &Resources) -> u64 {
    memory_bytes(resources).saturating_add(VMM_BYTES)
}

/// Its disk, in bytes.
#[must_use]
pub fn disk_bytes(resources: &Resources) -> u64 {
    resources.disk.map_or(DISK_BYTES_DEFAULT, |disk| disk.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ByteSize, MilliCpus};

    #[test]
    fn a_machine_holds_its_task_and_what_it_needs_itself() {
        let of = |cpus, mib: u64| {
            let task = Resources { cpus: Some(MilliCpus(cpus)), memory: Some(ByteSize(mib << 20)), ..Resources::default() };
            (vcpus(&task), memory_bytes(&task) >> 20, host_memory_bytes(&task) >> 20)
        };
        assert_eq!(of(1, 32), (1, 128, 168));
        assert_eq!(of(1_001, 33), (2, 192, 232));
        assert_eq!(of(1_000_000, 1_024), (32, 1_152, 1_192));
        let silent = Resources::default();
        assert_eq!((vcpus(&silent), memory_bytes(&silent), disk_bytes(&silent)), (1, 640 << 20, 2 << 30));
        let all = Resources { memory: Some(ByteSize(u64::MAX)), ..Resources::default() };
        assert_eq!(host_memory_bytes(&all), u64::MAX);
    }
}
