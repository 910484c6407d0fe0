//! The end of an attempt's volumes.
//!
//! Owns its order, and what it makes of the attempt: everything written out while the machine is there, the machine's end, then the last commit; a
//! would-be success of which that fails is none. Does not own what becomes of which volume (`mounts`).

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::AttemptName;

use super::{Collected, Executor, keeping};
use crate::attempt::{Outcome, Progress};
use crate::execute::Executed;
use crate::mounts::{End, MountError};
use crate::ports::{Bus, Objects};
use crate::prepare::Prepared;
use crate::runtime::Exit;

impl<B: Bus, O: Objects> Executor<B, O> {
    /// Has everything on its volumes that is wanted of them, and ends a machine that is not going to be kept. None: it has no volumes. And the volume
    /// that it lost while it ran, if it did.
    pub(super) async fn settle(
        &mut self,
        prepared: &Prepared,
        executed: &mut Executed,
        collected: &Collected,
    ) -> (Option<Result<(), MountError>>, Option<MountError>) {
        let lost = executed.lost.take();
        let settled = match self.mounts.is_empty() {
            true => None,
            false => {
                let end = match (&executed.exit, self.stop.timed_out(), &lost, collected) {
                    (Ok(Exit { code: Some(0), oom: false, .. }), None, None, Collected::Here(_)) => End::Succeeded,
                    (Ok(_), None | Some(true), None, Collected::Here(_) | Collected::Lost(_)) => End::Failed,
                    _ => End::Unsound,
                };
                // Also what a failed try keeps: a would-be success may fail yet.
                let settled = match end {
                    End::Unsound => Ok(()),
                    End::Succeeded | End::Failed if !self.mounts.wants(end) => Ok(()),
                    End::Succeeded | End::Failed => tokio::select! {
                        biased;
                        _ = self.stop.next() => Ok(()),
                        settled = self.machine.settle(&self.mounts, end) => settled,
                    },
                };
                Some(settled)
            }
        };
        if prepared.task.keep_failed_ms.is_none() {
            self.machine.end();
        }
        (settled, lost)
    }

    /// Commits, keeps or lets go, by what the attempt came to so far, and says what that makes of it.
    pub(super) async fn end_volumes(
        &mut self,
        name: &AttemptName,
        prepared: &Prepared,
        (settled, lost): (Result<(), MountError>, Option<MountError>),
        mut outcome: Outcome,
    ) -> Outcome {
        self.say(name, Progress::Exited).await;
        self.say(name, Progress::Volumes(true)).await;
        let end = match (outcome.failure, self.stop.timed_out(), &lost) {
            (None, None, None) => End::Succeeded,
            (Some(class), None | Some(true), None) if is_verdict(class) => End::Failed,
            (None, Some(true), None) => End::Failed,
            _ => End::Unsound,
        };
        let succeeds = end == End::Succeeded;
        let stays = prepared.task.keep_failed_ms.is_some() && keeping::is_kept(outcome.failure, self.stop.timed_out());
        if stays && self.machine.is_apart() && lost.is_none() {
            self.machine.take_volumes(&self.mounts).await;
            outcome = with(outcome, "its volumes were let go before");
        } else if self.machine.is_apart() {
            // Nothing writes any more, whatever the guest would.
            self.machine.release().await;
        }
        if let Some(why) = lost {
            self.mounts.forget().await;
            outcome.failure = Some(why.class());
            outcome.blameless = why.is_blameless();
            return with(outcome, &format!("it was killed, as it lost a volume: {why}"));
        }
        let ended = match settled {
            Err(why) => Some(Err(why)),
            Ok(()) if end == End::Unsound => None,
            Ok(()) => tokio::select! {
                biased;
                _ = self.stop.next() => None,
                ended = self.mounts.end(end) => Some(ended),
            },
        };
        self.mounts.forget().await;
        match ended {
            Some(Ok((left, kept))) => Outcome { volumes: left, kept, ..outcome },
            Some(Err(why)) => {
                let class = if succeeds { Some(why.class()) } else { outcome.failure };
                let blameless = if succeeds { why.is_blameless() } else { outcome.blameless };
                with(Outcome { failure: class, blameless, ..outcome }, &why.to_string())
            }
            // Told to end: without what it wrote it is no success.
            None if outcome.failure.is_none() => Outcome { failure: Some(FailureClass::Cancelled), ..outcome },
            None => outcome,
        }
    }
}

/// Is it a verdict on the task, in a machine and on storage that were sound?
fn is_verdict(class: FailureClass) -> bool {
    matches!(
        class,
        FailureClass::ExitCode | FailureClass::Signal | FailureClass::Oom | FailureClass::RunTimeout | FailureClass::PolicyDenied
    )
}

fn with(mut outcome: Outcome, words: &str) -> Outcome {
    outcome.message = Some(match outcome.message {
        Some(message) => format!("{message}; {words}"),
        None => words.to_owned(),
    });
    outcome
}
