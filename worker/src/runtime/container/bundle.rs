//! A bundle: what an OCI runtime is told of a container, as
//! <https://github.com/opencontainers/runtime-spec/blob/main/config.md> has it.
//!
//! Owns `config.json`. Its root is put together elsewhere (`spawner/container`), so nothing in it names a path of the image's.

use std::io;
use std::path::Path;

use serde_json::{Value, json};
use volley_guest::container::{PLAIN, REPORT, WORD};

use super::seccomp;
use crate::containers::Containers;

/// Where the container's first program is shown: in a directory that is the runtime's, out of the image's way.
pub const INIT: &str = "/dev/volley-init";
/// Version of the specification that is written.
const VERSION: &str = "1.0.2";
/// What root in a container may beyond others, in its own namespace of users, in which there are two at most: its own files whatever their
/// modes, its own processes, and the low ports of its empty network.
const CAPABILITIES: [&str; 6] = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_NET_BIND_SERVICE"];
/// Files of the kernel's that tell of the host, or of other containers, and are not shown.
const MASKED: [&str; 10] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/firmware",
];
/// Those through which a kernel is changed.
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// What is different from task to task.
#[derive(Debug)]
pub struct Bundle<'a> {
    /// What slots share.
    pub containers: &'a Containers,
    /// Its directory.
    pub dir: &'a Path,
    /// The command.
    pub argv: &'a [String],
    /// Its environment.
    pub env: Vec<(String, String)>,
    /// Where it starts.
    pub cwd: &'a str,
    /// As whom it runs, in the container.
    pub user: (u32, u32),
    /// Who is who: in the container, on the host.
    pub users: &'a [(u32, u32)],
    /// The same of groups.
    pub groups: &'a [(u32, u32)],
    /// The container's name.
    pub hostname: &'a str,
    /// How many cgroups it enters.
    pub cgroups: usize,
}

impl Bundle<'_> {
    /// Writes it, and makes its directory.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self) -> io::Result<()> {
        if !self.dir.is_dir() {
            std::fs::create_dir_all(self.dir)?;
            // The runtime passes as the container's user.
            std::fs::set_permissions(self.dir, std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
        }
        std::fs::write(self.dir.join("config.json"), self.config().to_string())
    }

    fn config(&self) -> Value {
        let how = if self.containers.runtime.hands_over() { format!("{REPORT}{}", self.cgroups) } else { PLAIN.to_owned() };
        let before = [INIT, WORD, &how, self.cwd].map(str::to_owned);
        let args: Vec<&String> = before.iter().chain(self.argv).collect();
        let env: Vec<String> = self.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        // Another user than root has nothing to give away.
        let capabilities: &[&str] = if self.user.0 == 0 { &CAPABILITIES } else { &[] };
        let namespaces: Vec<Value> = ["pid", "mount", "ipc", "uts", "network", "user"].iter().map(|kind| json!({ "type": kind })).collect();
        json!({
            "ociVersion": VERSION,
            "hostname": self.hostname,
            "root": { "path": self.dir.join("root"), "readonly": false },
            "process": {
                "terminal": false,
                "user": { "uid": self.user.0, "gid": self.user.1 },
                "args": args,
                "env": env,
                // The first program goes where the command is to start, and says so when it can't.
                "cwd": "/",
                "noNewPrivileges": true,
                "capabilities": { "bounding": capabilities, "effective": capabilities, "permitted": capabilities },
            },
            "mounts": mounts(&self.containers.init),
            "linux": {
                "namespaces": namespaces,
                "uidMappings": mappings(self.users),
                "gidMappings": mappings(self.groups),
                "maskedPaths": MASKED,
                "readonlyPaths": READ_ONLY,
                "seccomp": seccomp::profile(),
            },
        })
    }
}

fn mappings(pairs: &[(u32, u32)]) -> Value {
    pairs.iter().map(|(inside, outside)| json!({ "containerID": inside, "hostID": outside, "size": 1 })).collect()
}

fn mounts(init: &Path) -> Value {
    json!([
        { "destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"] },
        { "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755", "size=1m"] },
        {
            "destination": "/dev/pts", "type": "devpts", "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
        },
        {
            "destination": "/dev/shm", "type": "tmpfs", "source": "shm",
            "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=64m"],
        },
        { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"] },
        { "destination": INIT, "type": "bind", "source": init, "options": ["bind", "ro", "nosuid", "nodev"] },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_its_slots_user_and_another_user_leaves_root_to_nobody() {
        assert_eq!(mappings(&super::super::users(0, 80_000)), json!([{ "containerID": 0, "hostID": 80_000, "size": 1 }]));
        let two = mappings(&super::super::users(1_000, 80_000));
        assert_eq!(two[0], json!({ "containerID": 0, "hostID": 65_534, "size": 1 }));
        assert_eq!(two[1], json!({ "containerID": 1_000, "hostID": 80_000, "size": 1 }));
    }
}
