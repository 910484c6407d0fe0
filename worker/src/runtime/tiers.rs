//! The tiers of one slot: which machine an attempt gets.
//!
//! Owns the choice, by what the task asks for and never by what is at hand. Does not own any tier.

use std::time::Duration;

use tokio::sync::watch;
use volley_jobspecs::spec::Isolation;
use volley_jobspecs::wire::work::TemplateStage;

use super::container::ContainerMachine;
use super::microvm::MicrovmMachine;
use super::process::ProcessMachine;
use super::{Exit, Machine, Streams};
use crate::attempt::Force;
use crate::dirs::Dirs;
use crate::execute::ExecuteError;
use crate::machines::kept::KeepError;
use crate::mounts::{End, MountError, Mounts};
use crate::persist::PersistError;
use crate::prepare::Prepared;
use crate::restore::RestoreError;

/// A slot's machines, each made when the first attempt wants it.
#[derive(Debug)]
pub struct Tiers {
    process: Option<ProcessMachine>,
    /// Boxed, as slots of most workers have none.
    container: Option<Box<ContainerMachine>>,
    /// The same.
    microvm: Option<Box<MicrovmMachine>>,
    /// What runs now.
    now: Now,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Now {
    Process,
    Container,
    Microvm,
}

impl Tiers {
    /// The tiers that this worker offers.
    #[must_use]
    pub fn new(process: Option<ProcessMachine>, container: Option<ContainerMachine>, microvm: Option<MicrovmMachine>) -> Self {
        Self { process, container: container.map(Box::new), microvm: microvm.map(Box::new), now: Now::Process }
    }

    /// After an attempt whose end leaves the slot in doubt: nothing of it is used again.
    pub fn distrust(&mut self) {
        match self.now {
            Now::Process => self.process.as_mut().map(ProcessMachine::distrust),
            Now::Container => self.container.as_mut().map(|machine| machine.distrust()),
            Now::Microvm => self.microvm.as_mut().map(|machine| machine.kill()),
        };
    }

    fn machine(&mut self) -> Option<&mut MicrovmMachine> {
        self.microvm.as_deref_mut().filter(|_| self.now == Now::Microvm)
    }

    /// What the template of a machine that is being restored for this task still needs, as it changes; none where there are no templates.
    #[must_use]
    pub fn stages(&self, prepared: &Prepared) -> Option<watch::Receiver<Option<TemplateStage>>> {
        let machine = self.microvm.as_ref().filter(|_| prepared.task.isolation == Isolation::Microvm);
        machine.map(|machine| machine.stages())
    }

    /// Are outputs somewhere else than in the slot's directories?
    #[must_use]
    pub fn is_apart(&self) -> bool {
        self.now == Now::Microvm
    }

    /// Brings outputs into the slot's directories. What was left out, in words, if anything.
    ///
    /// # Errors
    /// [`PersistError`].
    pub async fn collect(&mut self, prepared: &Prepared, dirs: &Dirs) -> Result<Option<String>, PersistError> {
        match self.machine() {
            Some(machine) => machine.collect(prepared, dirs).await,
            None => Ok(None),
        }
    }

    /// Has everything on volumes that was written to them and is wanted at such an end. Nothing of the task runs any more.
    ///
    /// # Errors
    /// [`MountError`]: what was written can't be relied on.
    pub async fn settle(&mut self, mounts: &Mounts, end: End) -> Result<(), MountError> {
        match self.machine() {
            Some(machine) => Box::pin(machine.settle(mounts, end)).await,
            // What is mounted on the host is written out where it is unmounted.
            None => Ok(()),
        }
    }

    /// Takes volumes from a machine that lives on without them.
    pub async fn take_volumes(&mut self, mounts: &Mounts) {
        if let Some(machine) = self.machine() {
            Box::pin(machine.unmount(mounts)).await;
        }
    }

    /// Ends a machine that is not going to be kept.
    pub fn end(&mut self) {
        if let Some(machine) = self.machine() {
            machine.kill();
        }
    }

    /// Ends what people run in the machine beside the task, and lets nothing more begin there until it is kept.
    pub fn end_shells(&mut self) {
        if let Some(machine) = self.machine() {
            machine.end_shells();
        }
    }

    /// Lets nothing in the machine run until it is kept or ends.
    pub async fn hold(&mut self) {
        if let Some(machine) = self.machine() {
            Box::pin(machine.hold()).await;
        }
    }

    /// Keeps the machine for a time. Only one that was restored for this task.
    ///
    /// # Errors
    /// [`KeepError`].
    pub async fn keep(&mut self, prepared: &Prepared, time: Duration) -> Result<(), KeepError> {
        match self.machine() {
            Some(machine) => Box::pin(machine.keep(&prepared.task.resources, time)).await,
            None => Err(KeepError::Gone),
        }
    }

    /// Waits until nothing is left of what served one attempt only.
    pub async fn release(&mut self) {
        if let Some(machine) = self.machine() {
            Box::pin(machine.release()).await;
        }
    }

    /// What results must say of how they came about.
    #[must_use]
    pub fn label(&self) -> Option<String> {
        self.microvm.as_ref().filter(|_| self.is_apart()).and_then(|machine| machine.label())
    }
}

impl Machine for Tiers {
    async fn restore(&mut self, prepared: &Prepared, mounts: &mut Mounts) -> Result<(), RestoreError> {
        self.now = match prepared.task.isolation {
            Isolation::Null | Isolation::Process => Now::Process,
            Isolation::Container => Now::Container,
            Isolation::Microvm => Now::Microvm,
        };
        match (self.now, &mut self.process, &mut self.container, &mut self.microvm) {
            (Now::Process, Some(machine), ..) => machine.restore(prepared, mounts).await,
            (Now::Container, _, Some(machine), _) => Box::pin(machine.restore(prepared, mounts)).await,
            (Now::Microvm, .., Some(machine)) => Box::pin(machine.restore(prepared, mounts)).await,
            _ => Err(RestoreError::NoTier(prepared.task.isolation.as_str())),
        }
    }

    async fn start(&mut self, prepared: &Prepared) -> Result<Streams, ExecuteError> {
        match (self.now, &mut self.process, &mut self.container, &mut self.microvm) {
            (Now::Process, Some(machine), ..) => machine.start(prepared).await,
            (Now::Container, _, Some(machine), _) => Box::pin(machine.start(prepared)).await,
            (Now::Microvm, .., Some(machine)) => Box::pin(machine.start(prepared)).await,
            _ => Err(ExecuteError::Lost),
        }
    }

    async fn wait(&self) -> Result<Exit, ExecuteError> {
        match (self.now, &self.process, &self.container, &self.microvm) {
            (Now::Process, Some(machine), ..) => machine.wait().await,
            (Now::Container, _, Some(machine), _) => Box::pin(machine.wait()).await,
            (Now::Microvm, .., Some(machine)) => Box::pin(machine.wait()).await,
            _ => Err(ExecuteError::Lost),
        }
    }

    async fn stop(&self, force: Force) {
        match (self.now, &self.process, &self.container, &self.microvm) {
            (Now::Process, Some(machine), ..) => machine.stop(force).await,
            (Now::Container, _, Some(machine), _) => machine.stop(force).await,
            (Now::Microvm, .., Some(machine)) => machine.stop(force).await,
            _ => {}
        }
    }
}
