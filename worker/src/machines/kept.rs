//! Machines of attempts that failed, kept for a while so that somebody can look into them.
//!
//! Owns how long each lives, how much memory all of them may take, and that none outlives its time, its worker or the room it has. They share
//! the room of machines that wait (`standby`), which give way. Does not own which attempts' machines are kept (`executor`), nor what is done
//! in them (`shells`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use volley_jobspecs::ids::AttemptName;

use crate::guest::Guest;
use crate::shells::Entered;
use crate::standby::{Standby, Standing};

/// A machine that is to be kept.
#[derive(Debug)]
pub struct Machine {
    /// Whose it was.
    pub name: AttemptName,
    /// Its agent; it goes before the machine.
    pub guest: Arc<Guest>,
    /// The machine, with its task's limits on the host.
    pub machine: Standing,
    /// It can be entered.
    pub entered: Entered,
    /// All the memory it can take of its host, in bytes.
    pub bytes: u64,
}

/// Why a machine is not kept.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// It is larger than all the room there is.
    #[error(
        "its machine of {} MiB could not be kept: this worker has {} MiB for machines that wait or are kept (an eighth of its memory)",
        .bytes >> 20, .bytes_max >> 20
    )]
    NoRoom {
        /// How much it can take.
        bytes: u64,
        /// How much there is.
        bytes_max: u64,
    },
    /// The worker is leaving.
    #[error("its machine could not be kept: the worker is leaving")]
    Closed,
    /// It is not there any more.
    #[error("its machine could not be kept: it has ended")]
    Gone,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    /// Dropped, the machine is killed.
    end: DropGuard,
    /// Until nothing is left of it.
    gone: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct State {
    /// The oldest first.
    machines: BTreeMap<u64, Entry>,
    next: u64,
    closed: bool,
}

impl State {
    fn bytes(&self) -> u64 {
        self.machines.values().map(|entry| entry.bytes).sum()
    }
}

/// The machines that are kept on a host. When it is dropped they are killed.
#[derive(Debug)]
pub struct Kept {
    state: Arc<Mutex<State>>,
    /// One at a time makes room and takes it.
    gate: tokio::sync::Mutex<()>,
    standby: Standby,
    bytes_max: u64,
}

/// Room for one machine.
#[derive(Debug)]
pub struct Room<'a> {
    kept: &'a Kept,
    _gate: tokio::sync::MutexGuard<'a, ()>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A change that a panic cut short leaves a machine out, which is then killed.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kept {
    /// None yet. `bytes_max`: for these and for those of `standby` together.
    #[must_use]
    pub fn new(standby: Standby, bytes_max: u64) -> Self {
        Self { state: Arc::default(), gate: tokio::sync::Mutex::default(), standby, bytes_max }
    }

    /// Makes room for so many bytes: the oldest machines go, as many as it takes.
    ///
    /// # Errors
    /// [`KeepError`]: none was killed.
    pub async fn room(&self, bytes: u64) -> Result<Room<'_>, KeepError> {
        let gate = self.gate.lock().await;
        if bytes > self.bytes_max {
            return Err(KeepError::NoRoom { bytes, bytes_max: self.bytes_max });
        }
        let mut ended = Vec::new();
        {
            let mut state = lock(&self.state);
            if state.closed {
                return Err(KeepError::Closed);
            }
            while state.bytes().saturating_add(bytes) > self.bytes_max {
                let Some((_, oldest)) = state.machines.pop_first() else { break };
                drop(oldest.end);
                ended.push(oldest.gone);
            }
        }
        for gone in ended {
            let _ = gone.await;
        }
        self.standby.leave(lock(&self.state).bytes().saturating_add(bytes));
        Ok(Room { kept: self, _gate: gate })
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.state).machines.len()
    }

    /// Keeps none from now on: the worker is about to leave. Those that there are stay until it does.
    pub fn refuse(&self) {
        lock(&self.state).closed = true;
    }

    /// Kills all of them, and keeps none from now on.
    pub async fn close(&self) {
        let machines = {
            let mut state = lock(&self.state);
            state.closed = true;
            std::mem::take(&mut state.machines)
        };
        let all: Vec<_> = machines.into_values().map(|Entry { gone, .. }| gone).collect();
        for gone in all {
            let _ = gone.await;
        }
    }
}

impl Room<'_> {
    /// Keeps a machine, of as many bytes as were asked for.
    ///
    /// # Errors
    /// [`KeepError::Closed`]: it was killed.
    pub fn keep(self, machine: Machine, time: Duration) -> Result<(), KeepError> {
        let mut state = lock(&self.kept.state);
        if state.closed {
            return Err(KeepError::Closed);
        }
        state.next += 1;
        let (number, bytes, end) = (state.next, machine.bytes, CancellationToken::new());
        let (all, standby, over) = (self.kept.state.clone(), self.kept.standby.clone(), end.clone());
        let gone = tokio::spawn(async move {
            hold(machine, time, over).await;
            let bytes = {
                let mut state = lock(&all);
                state.machines.remove(&number);
                state.bytes()
            };
            standby.leave(bytes);
        });
        state.machines.insert(number, Entry { bytes, end: end.drop_guard(), gone });
        Ok(())
    }
}

impl Drop for Room<'_> {
    /// What was not taken is theirs again who left it.
    fn drop(&mut self) {
        self.kept.standby.leave(lock(&self.kept.state).bytes());
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        lock(&self.state).machines.clear();
    }
}

/// Holds a machine until its time is over, or nobody wants it, or it ended.
async fn hold(machine: Machine, time: Duration, over: CancellationToken) {
    let Machine { name, guest, machine, entered, .. } = machine;
    let why = tokio::select! {
        () = over.cancelled() => "its room is needed, or the worker leaves",
        () = tokio::time::sleep(time) => "its time is over",
        _ended = machine.vm.ended() => "it ended by itself",
    };
    tracing::info!(job = %name.job, task = name.index, attempt = name.number, why, "a machine that was kept goes");
    drop((entered, guest));
    machine.end().await;
}
