//! The processes the agent started, and those that became its own when their parents ended.
//!
//! Owns starting and reaping. A status belongs to whoever started the process; every other one is dropped. Does not know commands (`exec`).

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use volley_jobspecs::wire::guest::Exit;

use super::session::Session;
use super::spawn::Plan;

/// Wait after an error that should not be: the loop must not spin.
const ERROR_WAIT: Duration = Duration::from_millis(100);

/// How a process ended, and what it used.
#[derive(Debug, Clone, Copy)]
pub struct Status {
    pub exit: Exit,
    pub user_us: u64,
    pub system_us: u64,
    pub memory_peak_bytes: u64,
}

/// All of them.
#[derive(Debug)]
pub struct Children {
    known: Mutex<Known>,
    started: Condvar,
    session: Arc<Session>,
}

/// What is known of them. Held for moments only: whoever waits for a command asks here, with the session's lock.
#[derive(Debug, Default)]
struct Known {
    /// Started and not yet asked for; with a status once they have ended.
    started: BTreeMap<u32, Option<Status>>,
    /// Starts that are under way.
    starting: u32,
    /// What ended meanwhile and is nobody's: it may be one of those.
    early: BTreeMap<u32, Status>,
}

impl Known {
    /// A process has ended and waits to be reaped.
    fn ended(&mut self, pid: i32) {
        let (Some(status), pid) = (reap(pid), pid.cast_unsigned()) else { return };
        if let Some(place) = self.started.get_mut(&pid) {
            *place = Some(status);
        } else if self.starting > 0 {
            self.early.insert(pid, status);
        }
    }

    /// A start is over. What it made, and whatever it may have been taken for, is known now.
    fn over(&mut self, pid: Option<u32>) {
        self.starting = self.starting.saturating_sub(1);
        if let Some(pid) = pid {
            let status = self.early.remove(&pid);
            self.started.insert(pid, status);
        }
        if self.starting == 0 {
            self.early.clear();
        }
    }
}

impl Children {
    /// Begins to reap.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(session: Arc<Session>) -> io::Result<Arc<Self>> {
        let children = Arc::new(Self { known: Mutex::default(), started: Condvar::new(), session });
        let reaper = children.clone();
        super::thread("reaper", move || reaper.reap())?;
        Ok(children)
    }

    /// Starts a process.
    ///
    /// # Errors
    /// What the system says.
    pub fn spawn(&self, plan: &Plan) -> io::Result<u32> {
        self.known().starting += 1;
        let spawned = plan.spawn();
        let mut known = self.known();
        known.over(spawned.as_ref().ok().copied());
        let ended = spawned.as_ref().is_ok_and(|pid| known.started.get(pid).is_some_and(Option::is_some));
        drop(known);
        // Also one that failed leaves a process to be reaped.
        self.started.notify_all();
        if ended {
            self.tell();
        }
        spawned
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        // With the lock of those who wait, so that none misses it between its look and its wait.
        drop(self.session.lock());
        self.session.notify();
    }

    /// The status of a process that has ended; it is given once.
    pub fn status(&self, pid: u32) -> Option<Status> {
        let mut known = self.known();
        let status = known.started.get(&pid).copied().flatten()?;
        known.started.remove(&pid);
        Some(status)
    }

    /// Whoever started it wants to know nothing more.
    pub fn forget(&self, pid: u32) {
        self.known().started.remove(&pid);
    }

    fn reap(&self) {
        loop {
            match wait_for_any() {
                Ok(pid) => {
                    self.known().ended(pid);
                    self.tell();
                }
                Err(e) if e.raw_os_error() == Some(libc::ECHILD) => {
                    let known = self.known();
                    if known.started.values().all(Option::is_some) {
                        // Nothing runs: the next child comes from `spawn`, which tells when it has begun.
                        drop(self.started.wait_timeout(known, ERROR_WAIT * 10));
                    }
                }
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                Err(_) => std::thread::sleep(ERROR_WAIT),
            }
        }
    }
}

/// Waits until some child has ended, and leaves it to be reaped.
fn wait_for_any() -> io::Result<i32> {
    // SAFETY: `siginfo_t` is plain data, and the call fills it.
    let (result, pid) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let result = libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOWAIT);
        (result, info.si_pid())
    };
    if result == 0 { Ok(pid) } else { Err(io::Error::last_os_error()) }
}

/// Reaps one that has ended. None when somebody else did.
fn reap(pid: i32) -> Option<Status> {
    let mut status = 0;
    // SAFETY: `rusage` is plain data, and the call fills it.
    let (reaped, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut usage), usage)
    };
    if reaped != pid {
        return None;
    }
    let exit = if libc::WIFSIGNALED(status) { Exit::Signal(libc::WTERMSIG(status)) } else { Exit::Code(libc::WEXITSTATUS(status)) };
    let micros = |time: libc::timeval| u64::try_from(time.tv_sec * 1_000_000 + time.tv_usec).unwrap_or_default();
    let memory_peak_bytes = u64::try_from(usage.ru_maxrss).unwrap_or_default() * 1024;
    Some(Status { exit, user_us: micros(usage.ru_utime), system_us: micros(usage.ru_stime), memory_peak_bytes })
}
