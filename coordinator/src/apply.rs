//! `apply`: one record in, the next state and its effects out.
//!
//! Owns the order of things within a record and what is refused as stale. Pure: no I/O, no clock, no randomness, so that every
//! coordinator gets the same state from the same log. Does not own the stages themselves.

use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::LEVEL;
use volley_jobspecs::wire::record::{Decided, Decision, Lead, Record, Verb};

use crate::state::State;
use crate::state::effects::Effects;
use crate::{accept, assign, control, finish, timers, track, uploads, volumes};

/// Why a record can't be applied. It stops the coordinator: it never skips.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// A newer build has raised the level.
    #[error("record {sequence} raises the level to {level}, this build knows {LEVEL}; install the newer build")]
    Level {
        /// Which record.
        sequence: u64,
        /// What it asks for.
        level: u32,
    },
}

/// What must be in memory before `record` is applied: a job, and whether its settled pages are needed too.
#[must_use]
pub fn needs(record: &Record) -> Option<(JobId, bool)> {
    let Record::Control(control) = record else { return None };
    Some((job_of(&control.verb)?, matches!(control.verb, Verb::Rerun { .. })))
}

/// The job a verb is about.
#[must_use]
pub fn job_of(verb: &Verb) -> Option<JobId> {
    match verb {
        Verb::Cancel { job, .. } | Verb::Pause { job } | Verb::Resume { job } | Verb::Rerun { job } | Verb::Remove { job } => Some(*job),
        Verb::Drain { .. }
        | Verb::PutTenant { .. }
        | Verb::RemoveTenant { .. }
        | Verb::CreateToken { .. }
        | Verb::RevokeToken { .. }
        | Verb::Uploaded { .. }
        | Verb::PutVolume { .. }
        | Verb::RemoveVolume { .. }
        | Verb::PutSnapshot { .. }
        | Verb::RemoveSnapshot { .. }
        | Verb::HoldVolume { .. }
        | Verb::GrowVolume { .. } => None,
    }
}

/// Applies the record with log sequence `sequence`.
///
/// # Errors
/// [`ApplyError`] when this build can't go on; the state is then not to be used any more.
pub fn apply(state: &mut State, sequence: u64, record: &Record, fx: &mut Effects) -> Result<(), ApplyError> {
    state.head.sequence = sequence;
    match record {
        Record::Submit(submit) => accept::accept(state, sequence, submit, fx),
        Record::Control(control) => control::control(state, sequence, control, fx),
        Record::Lead(lead) => apply_lead(state, sequence, lead),
        Record::Decided(decided) => apply_decided(state, sequence, decided, fx)?,
        Record::Report(report) => track::track(state, sequence, report, fx),
    }
    finish::evict(state, fx);
    Ok(())
}

fn apply_lead(state: &mut State, sequence: u64, lead: &Lead) {
    // The server's fence lets only one Lead follow another, so a term that doesn't rise is an operator's hand in the log.
    if lead.term <= state.head.term {
        return;
    }
    state.head.term = lead.term;
    state.head.leader.clone_from(&lead.coordinator);
    state.head.round = 0;
    state.head.leader_sequence = sequence;
    state.head.now_ms = state.head.now_ms.max(lead.now_ms);
    timers::sweep_due(state);
}

fn apply_decided(state: &mut State, sequence: u64, decided: &Decided, fx: &mut Effects) -> Result<(), ApplyError> {
    if decided.term == state.head.term {
        state.head.leader_sequence = sequence;
    }
    if decided.term != state.head.term || decided.round <= state.head.round {
        return Ok(());
    }
    state.head.round = decided.round;
    for (place, decision) in decided.decisions.iter().enumerate() {
        match decision {
            Decision::Tick(now_ms) => timers::tick(state, sequence, *now_ms, fx),
            Decision::Assign(assignments) => assign::assign(state, sequence, place as u32, assignments, fx),
            Decision::WorkerJoined { worker, incarnation, info } => track::joined(state, sequence, worker, *incarnation, info, fx),
            Decision::WorkerLost { worker, incarnation, left } => {
                let lost = track::lost(state, sequence, worker, *incarnation, *left, fx);
                fx.workers_lost += u64::from(lost && !left);
            }
            Decision::AttemptsLost(names) => track::attempts_lost(state, sequence, names, fx),
            Decision::Done { job, what } => finish::done(state, *job, *what, fx),
            Decision::Level(level) if *level > LEVEL => return Err(ApplyError::Level { sequence, level: *level }),
            Decision::Level(level) => state.head.level = state.head.level.max(*level),
            // Compared by `core`, which remembers the hashes of its own states.
            Decision::Digest { .. } => {}
            Decision::Checkpointed { sequence } => state.head.checkpointed(*sequence),
            Decision::UploadFound { tenant, id, jobs } => uploads::found(state, tenant, id, jobs, fx),
            Decision::UploadGone { tenant, id } => uploads::gone(state, tenant, id, fx),
            Decision::VolumePromoted { tenant, name, volume, generation, why } => {
                volumes::promoted(state, tenant, name, *volume, *generation, why.as_deref(), fx);
            }
            Decision::VolumeGrown { tenant, name, volume, generation, why } => {
                volumes::grown(state, tenant, name, *volume, *generation, why.as_deref(), fx);
            }
            Decision::VolumePinned { job, slot, snapshot } => volumes::pinned(state, *job, *slot, *snapshot, fx),
            Decision::VolumesStored { bytes } => state.head.volumes_stored = Some(bytes.clone()),
            Decision::VolumeGone { tenant, volume } => volumes::gone(state, tenant, *volume),
            Decision::Quarantine { worker, incarnation, until_ms } => {
                if let Some(found) = state.workers.get_mut(worker).filter(|w| w.incarnation == *incarnation) {
                    found.quarantined_until_ms = *until_ms;
                    fx.workers.insert(worker.clone());
                }
            }
        }
    }
    Ok(())
}
