//! Machines that wait for a task: restored and standing still, some for each template that tasks want.
//!
//! Owns the machines and the restores under way. How many there should be is decided by `standby/pools` (pure). A machine is taken once,
//! serves one attempt, and is destroyed by whoever took it.

mod pools;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures::future::join_all;

use crate::machines::groups::{Group, Groups};
use crate::template::{Template, TemplateName};
use crate::vmm::{Vm, Vmm, VmmError};
use pools::{Action, MachineId, Pools};

pub use pools::Limits;

/// Between looks at what has waited for too long.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A machine that waits, or waited until now.
#[derive(Debug)]
pub struct Standing {
    /// The machine. Before `group`: when both are dropped, it is killed before what it left is.
    pub vm: Box<dyn Vm>,
    /// Where it is on the host; without limits so far.
    pub group: Group,
}

impl Standing {
    /// Restores one. It stands still and has its template's disks.
    ///
    /// # Errors
    /// [`VmmError`].
    pub async fn restore(vmm: &dyn Vmm, groups: &Groups, template: &Template) -> Result<Self, VmmError> {
        let group = groups.take().map_err(|why| VmmError::Io { what: "its cgroup".to_owned(), source: std::io::Error::other(why) })?;
        let vm = vmm.restore(&template.snapshot, &group.join_files()).await?;
        Ok(Self { vm, group })
    }

    /// Kills it and waits until nothing is left of it.
    pub async fn end(self) {
        let Self { vm, group } = self;
        if let Err(why) = vm.kill().await {
            tracing::error!("a machine's end: {}", crate::chain(&why));
        }
        group.clear();
    }
}

#[derive(Debug)]
struct State {
    pools: Pools,
    templates: BTreeMap<TemplateName, Arc<Template>>,
    machines: BTreeMap<MachineId, Standing>,
    /// No more are made.
    closed: bool,
}

#[derive(Debug)]
struct Inner {
    vmm: Arc<dyn Vmm>,
    groups: Groups,
    begin: Instant,
    state: Mutex<State>,
}

/// The machines that wait on a host. When it is dropped they are killed.
#[derive(Debug, Clone)]
pub struct Standby {
    inner: Arc<Inner>,
}

impl Standby {
    /// None yet. `groups`: where they get their cgroups.
    #[must_use]
    pub fn new(vmm: Arc<dyn Vmm>, limits: Limits, groups: Groups) -> Self {
        let state = State { pools: Pools::new(limits), templates: BTreeMap::new(), machines: BTreeMap::new(), closed: false };
        let inner = Arc::new(Inner { vmm, groups, begin: Instant::now(), state: Mutex::new(state) });
        tokio::spawn(look(Arc::downgrade(&inner)));
        Self { inner }
    }

    /// Takes a machine that waits, if one does. It stands still and has its template's disks. Others are made when [`Standby::refill`] says
    /// so.
    #[must_use]
    pub fn take(&self, template: &Arc<Template>) -> Option<Standing> {
        let mut state = self.inner.lock();
        state.templates.entry(template.name).or_insert_with(|| template.clone());
        let now_ms = self.inner.now_ms();
        let id = state.pools.take(now_ms, template.name);
        id.and_then(|id| state.machines.remove(&id))
    }

    /// Makes those that are wanted. Called when a machine that was taken is ready, so that theirs is not in its way; at the latest it is done
    /// within half a second.
    pub fn refill(&self) {
        self.inner.carry_out(&mut self.inner.lock());
    }

    /// Leaves so many bytes of what is set aside for machines that wait to others: as many of these as it takes go.
    pub fn leave(&self, bytes: u64) {
        let machines = u32::try_from(bytes.div_ceil(self.inner.vmm.capabilities().standing_bytes.max(1))).unwrap_or(u32::MAX);
        let mut state = self.inner.lock();
        state.pools.leave(machines);
        self.inner.carry_out(&mut state);
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.inner.lock().machines.len()
    }

    /// Kills all that wait, and lets go of their templates. How many there were.
    pub async fn clear(&self) -> usize {
        let machines = self.inner.lock().empty();
        let count = machines.len();
        join_all(machines.into_values().map(Standing::end)).await;
        count
    }

    /// The same, for good: no machine is made any more.
    pub async fn close(&self) {
        self.inner.lock().closed = true;
        self.clear().await;
    }
}

impl State {
    /// Forgets everything. The machines that waited.
    fn empty(&mut self) -> BTreeMap<MachineId, Standing> {
        self.pools.clear();
        self.templates.clear();
        std::mem::take(&mut self.machines)
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A change that a panic cut short leaves a machine out, which is then killed at the end.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Does what the pools want.
    fn carry_out(self: &Arc<Self>, state: &mut State) {
        if state.closed {
            return;
        }
        for action in state.pools.plan(self.now_ms()) {
            match action {
                Action::Start(name) => {
                    if let Some(template) = state.templates.get(&name) {
                        tokio::spawn(start(Arc::downgrade(self), self.vmm.clone(), self.groups.clone(), template.clone()));
                    }
                }
                // Dropped, it is killed.
                Action::Kill(id) => drop(state.machines.remove(&id)),
                Action::Forget(name) => drop(state.templates.remove(&name)),
            }
        }
    }
}

/// Restores a machine that then waits.
async fn start(inner: Weak<Inner>, vmm: Arc<dyn Vmm>, groups: Groups, template: Arc<Template>) {
    let restored = Standing::restore(&*vmm, &groups, &template).await;
    let Some(inner) = inner.upgrade() else { return };
    let mut state = inner.lock();
    let now_ms = inner.now_ms();
    match restored {
        Ok(standing) => {
            // One that is not wanted any more is dropped, which kills it.
            if let Some(id) = state.pools.restored(now_ms, template.name) {
                state.machines.insert(id, standing);
            }
        }
        Err(why) => {
            tracing::warn!(template = %template.name, "no machine for the standby pool: {}", crate::chain(&why));
            state.pools.failed(now_ms, template.name);
        }
    }
    inner.carry_out(&mut state);
}

async fn look(inner: Weak<Inner>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(inner) = inner.upgrade() else { return };
        inner.carry_out(&mut inner.lock());
    }
}
