//! What is said to Firecracker: the bodies of its API's requests.
//!
//! Owns them as pure functions, and which descriptors the process has. Source: `src/firecracker/swagger/firecracker.yaml` of its
//! releases 1.12.1 and 1.16.1.

use serde_json::{Value, json};

use super::super::{Size, Slot, Version};

/// Descriptors Firecracker inherits, behind the standard streams. Paths name them: they are part of a snapshot, the same in all clones.
pub const ROOT_FD: u32 = 3;
/// What lies in an empty slot.
pub const EMPTY_FD: u32 = 4;
/// A kernel at boot; memory at a restore.
pub const KERNEL_FD: u32 = 5;
/// See [`KERNEL_FD`].
pub const MEMORY_FD: u32 = 5;
/// Where memory is saved, after a boot; a state at a restore.
pub const STATE_FD: u32 = 6;
/// See [`STATE_FD`].
pub const SAVE_MEMORY_FD: u32 = 6;
/// Where metrics go, at a restore.
pub const METRICS_FD: u32 = 7;
/// Where the state is saved.
pub const SAVE_STATE_FD: u32 = 7;
/// The initial RAM disk, at boot.
pub const INITRD_FD: u32 = 8;

/// The control socket, in the machine's directory.
pub const API_SOCKET: &str = "api";
/// The agent's socket, there too. It is part of a snapshot, so it is relative and each process has its own directory.
pub const VSOCK: &str = "vsock";
/// The guest's address; it reaches nobody but the host's socket.
const GUEST_CID: u32 = 3;

/// The oldest version that can be used.
pub const OLDEST: Version = Version(1, 12, 0);
/// From here on the guest's clock is set at a restore.
const SETS_CLOCK: Version = Version(1, 16, 0);

/// Does this version set the clock?
#[must_use]
pub fn sets_clock(version: Version) -> bool {
    version >= SETS_CLOCK
}

/// A descriptor's path.
#[must_use]
pub fn path(fd: u32) -> String {
    format!("/proc/self/fd/{fd}")
}

/// One request.
pub type Call = (&'static str, String, Value);

/// Everything that is said before a machine is booted, in order.
#[must_use]
pub fn boot(size: Size, root: bool, initrd: bool, line: &str) -> Vec<Call> {
    let put = |path: String, body| ("PUT", path, body);
    let mut source = json!({"kernel_image_path": path(KERNEL_FD), "boot_args": line});
    if let Some(source) = source.as_object_mut()
        && initrd
    {
        source.insert("initrd_path".to_owned(), json!(path(INITRD_FD)));
    }
    let drive = |name: &str, fd, root: bool| {
        let body = json!({
            "drive_id": name, "path_on_host": path(fd), "is_root_device": root, "is_read_only": root, "cache_type": "Writeback",
        });
        put(format!("/drives/{name}"), body)
    };
    let mut calls = vec![
        put("/machine-config".to_owned(), json!({"vcpu_count": size.vcpus, "mem_size_mib": size.memory_bytes >> 20})),
        put("/boot-source".to_owned(), source),
    ];
    calls.extend(root.then(|| drive("root", ROOT_FD, true)));
    calls.extend(Slot::all().into_iter().map(|slot| drive(slot.name(), EMPTY_FD, false)));
    calls.push(put("/vsock".to_owned(), json!({"guest_cid": GUEST_CID, "uds_path": VSOCK})));
    calls.push(put("/actions".to_owned(), json!({"action_type": "InstanceStart"})));
    calls
}

/// Loads a snapshot; the machine stands still.
#[must_use]
pub fn load(version: Version) -> Call {
    let backend = json!({"backend_type": "File", "backend_path": path(MEMORY_FD)});
    let mut body = json!({"snapshot_path": path(STATE_FD), "mem_backend": backend, "resume_vm": false});
    if let Some(body) = body.as_object_mut()
        && sets_clock(version)
    {
        body.insert("clock_realtime".to_owned(), json!(true));
    }
    ("PUT", "/snapshot/load".to_owned(), body)
}

/// Has it count into its pipe; before anything is loaded.
#[must_use]
pub fn metrics() -> Call {
    ("PUT", "/metrics".to_owned(), json!({"metrics_path": path(METRICS_FD)}))
}

/// Has it tell what it counted since it told last.
#[must_use]
pub fn tell_metrics() -> Call {
    ("PUT", "/actions".to_owned(), json!({"action_type": "FlushMetrics"}))
}

/// Saves a machine that stands still.
#[must_use]
pub fn save() -> Call {
    let body = json!({"snapshot_type": "Full", "snapshot_path": path(SAVE_STATE_FD), "mem_file_path": path(SAVE_MEMORY_FD)});
    ("PUT", "/snapshot/create".to_owned(), body)
}

/// Stops a machine's processors, or lets them go on.
#[must_use]
pub fn state(running: bool) -> Call {
    ("PATCH", "/vm".to_owned(), json!({"state": if running { "Resumed" } else { "Paused" }}))
}

/// Puts another file into a slot.
#[must_use]
pub fn swap(slot: Slot, file: &str) -> Call {
    ("PATCH", format!("/drives/{}", slot.name()), json!({"drive_id": slot.name(), "path_on_host": file}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_all_slots_and_only_its_root_is_read_only() {
        let calls = boot(Size { vcpus: 1, memory_bytes: 64 << 20 }, true, false, "line");
        let paths: Vec<&str> = calls.iter().map(|(_, path, _)| path.as_str()).collect();
        let drives = ["/drives/root", "/drives/vol0", "/drives/vol1", "/drives/vol2", "/drives/vol3", "/drives/scratch"];
        assert_eq!(paths, [&["/machine-config", "/boot-source"], &drives[..], &["/vsock", "/actions"]].concat());
        for (_, path, body) in calls.iter().filter(|(_, path, _)| path.starts_with("/drives")) {
            assert_eq!(body["is_read_only"], json!(path.ends_with("root")));
        }
        assert_eq!(calls[0].2, json!({"vcpu_count": 1, "mem_size_mib": 64}));
    }

    #[test]
    fn what_a_version_does_not_know_is_not_said() {
        assert!(load(Version(1, 12, 1)).2.get("clock_realtime").is_none());
        assert_eq!(load(Version(1, 16, 1)).2["clock_realtime"], json!(true));
    }
}
