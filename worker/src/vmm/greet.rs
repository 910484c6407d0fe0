//! The beginning of a session with a machine's agent.
//!
//! Owns asking again where a connection can be lost through nobody's fault: a guest that was saved learns from Firecracker that it was
//! restored, and ends every connection it has then. One that the host made in the moment before, which is the moment of the resume, is among
//! them. Does not own connections (`vmm`) or what is said on them (`guest`).

use std::time::Duration;

use tokio::time::Instant;
use volley_jobspecs::wire::guest::Hello;
use volley_jobspecs::wire::guest::resync::NONCE_BYTES;

use super::{Capabilities, Vm, VmmError};
use crate::guest::{Guest, GuestError};

/// Between a connection that was lost and the next one: the guest's kernel is through with it within a millisecond.
const AGAIN: Duration = Duration::from_millis(1);

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum GreetError {
    /// There is no connection.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The agent does not answer, or not as one.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The host has no randomness.
    #[error("the system gives no random bytes: {0}")]
    Random(String),
}

/// Connects to a machine that runs and begins a session, each time with a nonce of its own. `reseed` as [`Guest::connect`] has it.
///
/// # Errors
/// [`GreetError`], at the latest at the deadline.
pub async fn greet(vm: &dyn Vm, capabilities: &Capabilities, reseed: bool, deadline: Instant) -> Result<(Guest, Hello), GreetError> {
    let begin = Instant::now();
    loop {
        let late = |_| GuestError::Silent { what: "a connection", after: begin.elapsed() };
        let stream = tokio::time::timeout_at(deadline, vm.connect()).await.map_err(late)??;
        let mut nonce = [0; NONCE_BYTES];
        getrandom::fill(&mut nonce).map_err(|e| GreetError::Random(e.to_string()))?;
        let left = deadline.saturating_duration_since(Instant::now());
        match Guest::connect(stream, nonce, reseed, left).await {
            // One that was made while the machine stood still is not lost that way.
            Err(GuestError::Lost(why)) if !capabilities.connects_paused && Instant::now() < deadline => {
                tracing::debug!("a machine ended the connection to its agent ({why}); it is made again");
                tokio::time::sleep(AGAIN).await;
            }
            greeted => return Ok(greeted?),
        }
    }
}
