//! Where this process's cgroups are: reading /proc.
//!
//! Owns parsing of mountinfo and cgroup lists, v1, v2 and both at once. Pure. Does not touch the cgroup file systems.

use std::path::{Path, PathBuf};

/// A controller we use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Controller {
    /// Memory limit and out-of-memory counts.
    Memory,
    /// CPU quota.
    Cpu,
    /// Limit on processes.
    Pids,
}

impl Controller {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Cpu, Self::Pids];

    /// The kernel's name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
        }
    }
}

/// This process's own cgroups.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Own {
    /// v1: the directory of each controller that has a hierarchy there.
    pub v1: Vec<(Controller, PathBuf)>,
    /// v2: the directory in the unified hierarchy, if it is mounted.
    pub v2: Option<PathBuf>,
    /// v2: the top of what this process sees of that hierarchy.
    pub v2_top: Option<PathBuf>,
}

/// Reads /proc/self/mountinfo and /proc/self/cgroup.
#[must_use]
pub fn own(mountinfo: &str, cgroups: &str) -> Own {
    let mut own = Own::default();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let mut left = left.split(' ').skip(3);
        let (Some(root), Some(mount)) = (left.next(), left.next()) else { continue };
        let mut right = right.split(' ');
        let (kind, options) = (right.next(), right.nth(1).unwrap_or_default());
        match kind {
            Some("cgroup2") if own.v2.is_none() => {
                own.v2 = place(cgroups, "", mount, root);
                own.v2_top = Some(PathBuf::from(mount));
            }
            Some("cgroup") => {
                for controller in Controller::ALL {
                    if options.split(',').any(|option| option == controller.as_str())
                        && own.v1.iter().all(|(known, _)| *known != controller)
                        && let Some(place) = place(cgroups, controller.as_str(), mount, root)
                    {
                        own.v1.push((controller, place));
                    }
                }
            }
            _ => {}
        }
    }
    own
}

/// The directory of this process in one hierarchy; `controller` is empty for v2.
fn place(cgroups: &str, controller: &str, mount: &str, root: &str) -> Option<PathBuf> {
    let path = cgroups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        controllers.split(',').any(|listed| listed == controller).then_some(path)
    })?;
    // In a container the mount shows a part of the hierarchy only.
    let below = Path::new(path).strip_prefix(root).or_else(|_| Path::new(path).strip_prefix("/")).ok()?;
    Some(Path::new(mount).join(below))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hybrid_host_has_both() {
        let mounts = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                      32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
        let cgroups = "4:memory:/a/b\n2:cpu,cpuacct:/\n0::/x";
        let own = own(mounts, cgroups);
        assert_eq!(
            own.v1,
            vec![
                (Controller::Memory, PathBuf::from("/sys/fs/cgroup/memory/a/b")),
                (Controller::Cpu, PathBuf::from("/sys/fs/cgroup/cpu,cpuacct")),
            ]
        );
        assert_eq!(own.v2, Some(PathBuf::from("/sys/fs/cgroup/unified/x")));
    }

    #[test]
    fn a_v2_host_has_one() {
        let mounts = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        let own = own(mounts, "0::/system.slice/volley.service\n");
        assert_eq!(own.v1, vec![]);
        assert_eq!(own.v2, Some(PathBuf::from("/sys/fs/cgroup/system.slice/volley.service")));
    }

    #[test]
    fn a_container_sees_its_part_as_the_root() {
        let mounts = "29 23 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";
        assert_eq!(own(mounts, "9:memory:/docker/abc/x").v1[0].1, PathBuf::from("/sys/fs/cgroup/memory/x"));
    }
}
