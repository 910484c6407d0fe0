//! The processes the agent started, and those that became its own when their parents ended.
//!
//! Owns starting and reaping. A status belongs to whoever started the process; every other one is dropped. Does not know commands (`exec`).

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use volley_jobspecs::wire::guest::Exit;

use super::session::Session;
use super::spawn::{Plan, Stack};

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
    /// Started and not yet asked for; with a status once they have ended.
    known: Mutex<BTreeMap<u32, Option<Status>>>,
    /// What new ones stand on; it is taken after `known`.
    stack: Mutex<Stack>,
    started: Condvar,
    session: Arc<Session>,
}

impl Children {
    /// Begins to reap.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(session: Arc<Session>) -> io::Result<Arc<Self>> {
        let children = Arc::new(Self { known: Mutex::default(), stack: Mutex::default(), started: Condvar::new(), session });
        let reaper = children.clone();
        super::thread("reaper", move || reaper.reap())?;
        Ok(children)
    }

    /// Starts a process.
    ///
    /// # Errors
    /// What the system says.
    pub fn spawn(&self, plan: &Plan) -> io::Result<u32> {
        // Held over the start: the process may end at once.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let spawned = plan.spawn(&mut self.stack.lock().unwrap_or_else(PoisonError::into_inner));
        // Also one that failed has left a process to be reaped.
        self.started.notify_all();
        let pid = spawned?;
        known.insert(pid, None);
        Ok(pid)
    }

    /// The status of a process that has ended; it is given once.
    pub fn status(&self, pid: u32) -> Option<Status> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let status = known.get(&pid).copied().flatten()?;
        known.remove(&pid);
        Some(status)
    }

    /// Whoever started it wants to know nothing more.
    pub fn forget(&self, pid: u32) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
    }

    fn reap(&self) {
        loop {
            match wait_for_any() {
                Ok(pid) => {
                    let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(status) = reap(pid)
                        && let Some(place) = known.get_mut(&pid.cast_unsigned())
                    {
                        *place = Some(status);
                    }
                    drop(known);
                    // With the lock of those who wait, so that none misses it between its look and its wait.
                    drop(self.session.lock());
                    self.session.notify();
                }
                Err(e) if e.raw_os_error() == Some(libc::ECHILD) => {
                    let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                    if known.values().all(Option::is_some) {
                        // Nothing runs: the next child comes from `spawn`.
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
