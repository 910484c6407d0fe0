//! The worker's directory: one worker at a time, and nothing left of the one before.
//!
//! Owns the lock and the note about helpers. Does not own cgroups (`cgroup`).

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use crate::dirs;
use crate::error::RunError;
use crate::spawner::tree;

/// How long a predecessor's zygote may take to kill what it started before we do it.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long we try.
const KILL_TIME: Duration = Duration::from_secs(15);

/// Mode of the directory of the slots' directories: tasks' users may pass, and see nothing, whatever the worker's umask.
const SLOTS_MODE: u32 = 0o711;

/// A worker's directory, locked.
#[derive(Debug)]
pub struct Place {
    /// Where it is, absolute.
    pub dir: PathBuf,
    lock: File,
}

impl Place {
    /// Makes, locks and clears a directory; kills what a worker before left running in its name.
    ///
    /// # Errors
    /// [`RunError`]: it can't be used.
    pub fn take(dir: &Path) -> Result<Self, RunError> {
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |source| RunError::Dir { path, what, source }
        };
        fs::create_dir_all(dir).map_err(failed("making it", dir))?;
        let dir = dir.canonicalize().map_err(failed("finding it", dir))?;
        let path = dir.join("lock");
        let mut lock =
            File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed("opening its lock", &dir))?;
        let mut note = String::new();
        let _ = lock.read_to_string(&mut note);
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            let pid = note.split_whitespace().next().unwrap_or("unknown").to_owned();
            return Err(RunError::Locked { path: dir, pid });
        }
        if let Some((_, zygote)) = note.split_once(' ') {
            end_predecessor(zygote.trim())?;
        }
        for inner in ["slots", "cache"] {
            dirs::remove_all(&dir.join(inner)).map_err(failed("clearing it", &dir.join(inner)))?;
        }
        let slots = dir.join("slots");
        fs::create_dir(&slots).map_err(failed("making it", &slots))?;
        fs::set_permissions(&slots, fs::Permissions::from_mode(SLOTS_MODE)).map_err(failed("letting tasks through it", &slots))?;
        Ok(Self { dir, lock })
    }

    /// Notes who we are and which zygote is ours, for the worker after us.
    ///
    /// # Errors
    /// [`RunError::Dir`].
    pub fn note(&mut self, zygote: Option<u32>) -> Result<(), RunError> {
        let zygote = zygote.and_then(|pid| Some(format!("{pid}/{}", started(pid.cast_signed())?))).unwrap_or_default();
        let text = format!("{} {zygote}\n", std::process::id());
        let write = |lock: &mut File| {
            lock.set_len(0)?;
            lock.seek(SeekFrom::Start(0))?;
            lock.write_all(text.as_bytes())
        };
        write(&mut self.lock).map_err(|source| RunError::Dir { path: self.dir.clone(), what: "writing its lock", source })
    }
}

/// When a process was started, in ticks since boot: with its number, that names it for good.
fn started(pid: libc::pid_t) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    // Field 3 of the whole is the state, 22 the start; a zombie runs no more.
    let state = fields.next()?;
    if state == "Z" { None } else { fields.nth(18)?.parse().ok() }
}

/// The zygote of a worker that died kills everything by itself; if it is stuck or stopped, we do.
fn end_predecessor(note: &str) -> Result<(), RunError> {
    let Some((pid, start)) = note.split_once('/') else { return Ok(()) };
    let (Ok(pid), Ok(start)) = (pid.parse::<libc::pid_t>(), start.parse::<u64>()) else { return Ok(()) };
    let begin = Instant::now();
    while started(pid) == Some(start) {
        if begin.elapsed() > KILL_TIME {
            return Err(RunError::Predecessor(format!("helper process {pid} and its tasks; look at the host")));
        }
        if begin.elapsed() > PATIENCE {
            // The zygote last: as long as it lives, what its children leave becomes its own and is found below it.
            let below = tree::descendants(pid);
            let last = below.is_empty();
            for pid in below.into_iter().chain(last.then_some(pid)) {
                // SAFETY: plain system call, on processes found a moment ago below one we know by number and start.
                unsafe {
                    libc::kill(pid, libc::SIGKILL);
                }
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_workers_can_not_share_a_directory() {
        let place = tempfile::tempdir().expect("a directory");
        let mut first = Place::take(place.path()).expect("taken");
        first.note(None).expect("noted");
        let error = Place::take(place.path()).expect_err("locked").to_string();
        assert!(error.contains(&std::process::id().to_string()), "{error}");
        drop(first);
        assert!(Place::take(place.path()).is_ok());
    }

    #[test]
    fn what_a_predecessor_left_is_killed() {
        let place = tempfile::tempdir().expect("a directory");
        let mut child = std::process::Command::new("sh").args(["-c", "sleep 100 & exec sleep 101"]).spawn().expect("a process");
        let mut first = Place::take(place.path()).expect("taken");
        first.note(Some(child.id())).expect("noted");
        drop(first);
        let reaper = std::thread::spawn(move || child.wait());
        assert!(Place::take(place.path()).is_ok());
        assert!(reaper.join().is_ok_and(|status| status.is_ok_and(|status| !status.success())));
    }
}
