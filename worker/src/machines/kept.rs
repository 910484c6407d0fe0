//! Machines of attempts that failed, kept for a while so that somebody can look into them.
//!
//! Owns how long each lives, how much memory all of them may take, and that none outlives its time, its worker or the room it has. They share
//! the room of machines that wait (`standby`), which give way. Does not own which attempts' machines are kept (`executor`), nor what is done
//! in them (`shells`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use volley_jobspecs::ids::AttemptName;
use volley_jobspecs::wire::work::{KEPT_TOLD_MAX, KeptMachine};

use crate::guest::Guest;
use crate::shells::{Entered, Gone};
use crate::standby::{Standby, Standing};
use crate::template::Template;

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
    /// Cancelled when somebody wants it to end.
    pub asked: CancellationToken,
    /// All the memory it can take of its host, in bytes.
    pub bytes: u64,
    /// What it was restored from: that does not go before the machine.
    pub template: Arc<Template>,
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
    /// Its agent does not let it go on.
    #[error("its machine could not be kept: {0}")]
    Guest(crate::guest::GuestError),
}

#[derive(Debug)]
struct Entry {
    /// What others are told of it.
    told: KeptMachine,
    bytes: u64,
    /// Told why, or dropped, the machine is killed.
    end: oneshot::Sender<Gone>,
    /// Until nothing is left of it.
    gone: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct State {
    /// The oldest first.
    machines: BTreeMap<u64, Entry>,
    next: u64,
    closed: bool,
    /// Whoever wants to know which there are.
    told: watch::Sender<Vec<KeptMachine>>,
}

impl State {
    fn tell(&self) {
        let all: Vec<KeptMachine> = self.machines.values().rev().take(KEPT_TOLD_MAX).map(|entry| entry.told).collect();
        self.told.send_if_modified(|told| std::mem::replace(told, all.clone()) != all);
    }

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
                // One that ended by itself meanwhile hears nothing.
                let _ = oldest.end.send(Gone::Room);
                ended.push(oldest.gone);
            }
            state.tell();
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

    /// Which there are, as it changes: the newest, as many as are told.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Vec<KeptMachine>> {
        lock(&self.state).told.subscribe()
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
            let machines = std::mem::take(&mut state.machines);
            state.tell();
            machines
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
        let (number, bytes, (end, over)) = (state.next, machine.bytes, oneshot::channel());
        let (all, standby) = (self.kept.state.clone(), self.kept.standby.clone());
        let until = SystemTime::now().checked_add(time).and_then(|until| until.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        let until_ms = u64::try_from(until.as_millis()).unwrap_or(u64::MAX);
        let told = KeptMachine { name: machine.name, until_ms, memory_bytes: bytes };
        let gone = tokio::spawn(async move {
            hold(machine, time, over).await;
            let bytes = {
                let mut state = lock(&all);
                state.machines.remove(&number);
                state.tell();
                state.bytes()
            };
            standby.leave(bytes);
        });
        state.machines.insert(number, Entry { told, bytes, end, gone });
        state.tell();
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
async fn hold(machine: Machine, time: Duration, over: oneshot::Receiver<Gone>) {
    let Machine { name, guest, machine, mut entered, asked, template: _template, .. } = machine;
    let why = tokio::select! {
        why = over => why.unwrap_or(Gone::Leaves),
        () = asked.cancelled() => Gone::Asked,
        () = tokio::time::sleep(time) => Gone::Time,
        _ended = machine.vm.ended() => Gone::Died,
    };
    tracing::info!(job = %name.job, task = name.index, attempt = name.number, "a machine that was kept goes: {}", why.as_str());
    entered.goes(why);
    drop((entered, guest));
    machine.end().await;
}
