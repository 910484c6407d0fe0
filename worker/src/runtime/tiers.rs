//! The tiers of one slot: which machine an attempt gets.
//!
//! Owns the choice, by what the task asks for and never by what is at hand. Does not own any tier.

use super::microvm::MicrovmMachine;
use super::process::ProcessMachine;
use super::{Exit, Machine, Streams};
use crate::attempt::Force;
use crate::dirs::Dirs;
use crate::execute::ExecuteError;
use crate::persist::PersistError;
use crate::prepare::Prepared;
use crate::restore::RestoreError;

/// A slot's machines, each made when the first attempt wants it.
#[derive(Debug)]
pub struct Tiers {
    process: Option<ProcessMachine>,
    /// Boxed, as slots of most workers have none.
    microvm: Option<Box<MicrovmMachine>>,
    /// What runs now is a machine.
    in_machine: bool,
}

impl Tiers {
    /// The tiers that this worker offers.
    #[must_use]
    pub fn new(process: Option<ProcessMachine>, microvm: Option<MicrovmMachine>) -> Self {
        Self { process, microvm: microvm.map(Box::new), in_machine: false }
    }

    /// After an attempt whose end leaves the slot in doubt: nothing of it is used again.
    pub fn distrust(&mut self) {
        match (self.in_machine, &mut self.process, &mut self.microvm) {
            (true, _, Some(machine)) => machine.kill(),
            (false, Some(machine), _) => machine.distrust(),
            _ => {}
        }
    }

    /// Are outputs somewhere else than in the slot's directories?
    #[must_use]
    pub fn is_apart(&self) -> bool {
        self.in_machine
    }

    /// Brings outputs into the slot's directories, and ends the machine. What was left out, in words, if anything.
    ///
    /// # Errors
    /// [`PersistError`].
    pub async fn collect(&mut self, prepared: &Prepared, dirs: &Dirs) -> Result<Option<String>, PersistError> {
        let (true, Some(machine)) = (self.in_machine, &mut self.microvm) else { return Ok(None) };
        let collected = machine.collect(prepared, dirs).await;
        machine.kill();
        collected
    }

    /// Waits until nothing is left of what served one attempt only.
    pub async fn release(&mut self) {
        if let (true, Some(machine)) = (self.in_machine, &mut self.microvm) {
            Box::pin(machine.release()).await;
        }
    }

    /// What results must say of how they came about.
    #[must_use]
    pub fn label(&self) -> Option<String> {
        self.microvm.as_ref().filter(|_| self.in_machine).and_then(|machine| machine.label())
    }
}

impl Machine for Tiers {
    async fn restore(&mut self, prepared: &Prepared) -> Result<(), RestoreError> {
        self.in_machine = prepared.inside.is_some();
        match (self.in_machine, &mut self.process, &mut self.microvm) {
            (true, _, Some(machine)) => Box::pin(machine.restore(prepared)).await,
            (false, Some(machine), _) => machine.restore(prepared).await,
            _ => Err(RestoreError::NoTier(prepared.task.isolation.as_str())),
        }
    }

    async fn start(&mut self, prepared: &Prepared) -> Result<Streams, ExecuteError> {
        match (self.in_machine, &mut self.process, &mut self.microvm) {
            (true, _, Some(machine)) => Box::pin(machine.start(prepared)).await,
            (false, Some(machine), _) => machine.start(prepared).await,
            _ => Err(ExecuteError::Lost),
        }
    }

    async fn wait(&self) -> Result<Exit, ExecuteError> {
        match (self.in_machine, &self.process, &self.microvm) {
            (true, _, Some(machine)) => Box::pin(machine.wait()).await,
            (false, Some(machine), _) => machine.wait().await,
            _ => Err(ExecuteError::Lost),
        }
    }

    async fn stop(&self, force: Force) {
        match (self.in_machine, &self.process, &self.microvm) {
            (true, _, Some(machine)) => machine.stop(force).await,
            (false, Some(machine), _) => machine.stop(force).await,
            _ => {}
        }
    }
}
