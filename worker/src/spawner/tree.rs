//! Who is below this process.
//!
//! Owns reading that from a cgroup or, without one, from /proc. Does not own what is done to them.

use std::fs;
use std::path::Path;

/// Everything else in the cgroup whose `cgroup.procs` is given, or else every descendant of this process.
pub fn others(procs: Option<&str>) -> Vec<libc::pid_t> {
    let own = std::process::id().cast_signed();
    let listed = procs.map(|file| listed(Path::new(file))).unwrap_or_default();
    // Also below us but elsewhere: a task with the rights may have moved itself to another cgroup.
    listed.into_iter().filter(|pid| *pid != own).chain(descendants(own)).collect()
}

/// The processes in a `cgroup.procs`. One outside our pid namespace stands there as 0, which to `kill` means our own process group.
pub fn listed(procs: &Path) -> Vec<libc::pid_t> {
    let text = fs::read_to_string(procs).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect()
}

/// Every process below `root` that still runs: a zombie has nothing below it and can't be killed again.
pub fn descendants(root: libc::pid_t) -> Vec<libc::pid_t> {
    let Ok(folder) = fs::read_dir("/proc") else { return Vec::new() };
    let pairs: Vec<(libc::pid_t, libc::pid_t)> = folder
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid: libc::pid_t| Some((pid, running(&stat(pid)?)?)))
        .collect();
    let mut found = vec![root];
    let mut at = 0;
    while let Some(parent) = found.get(at).copied() {
        found.extend(pairs.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        at += 1;
    }
    found.remove(0);
    found
}

/// The process group of a process.
pub fn group_of(pid: libc::pid_t) -> Option<libc::pid_t> {
    stat(pid)?.split_ascii_whitespace().nth(2)?.parse().ok()
}

/// What stands behind the name in /proc/PID/stat: state, parent, process group, …
fn stat(pid: libc::pid_t) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in parentheses and may itself hold spaces and parentheses.
    text.rsplit_once(')').map(|(_, rest)| rest.to_owned())
}

/// The parent, unless the process is a zombie.
fn running(stat: &str) -> Option<libc::pid_t> {
    let mut fields = stat.split_ascii_whitespace();
    if fields.next()? == "Z" { None } else { fields.next()?.parse().ok() }
}

/// The number behind `oom_kill` in memory.events (v2) or memory.oom_control (v1).
pub fn oom_kills(text: &[u8]) -> u64 {
    String::from_utf8_lossy(text).lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_found_below_us() {
        let mut child = std::process::Command::new("sleep").arg("5").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        assert!(descendants(std::process::id().cast_signed()).contains(&pid));
        let _ = child.kill();
        let _ = child.wait();
    }

    #[test]
    fn both_forms_of_the_oom_count_are_read() {
        assert_eq!(oom_kills(b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), 3);
        assert_eq!(oom_kills(b"low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 0\n"), 2);
    }
}
