//! volumes: who is given what, what an accepted result makes of it, and what people do to it.
//!
//! Owns the changes of the state's volumes: they follow the log. All volumes that an attempt wrote become what it left in the record that accepts its result, or
//! none does; the next writer is given one only when its head says the same (`VolumePromoted`). Does not own heads, snapshots and bytes (crate `volume`).

use std::borrow::Cow;

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, JobId, SnapshotId, TenantId, VolumeId};
use volley_jobspecs::wire::plan::JobPlan;
use volley_jobspecs::wire::record::{Actor, Verb};
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::volume::{Access, Given, Pin, VolumePlan, made_by};

use crate::state::State;
use crate::state::effects::{Effects, Refusal};
use crate::state::job::Job;
use crate::state::volume::{Holder, Promotion, Snapshot, Volume, Volumes};

/// What a job's tasks read and copy, as of now. None: nothing.
///
/// # Errors
/// A volume or a snapshot that is not there.
pub fn pins(state: &State, tenant: &TenantId, plan: &JobPlan) -> Result<Option<Vec<Pin>>, Refusal> {
    let mut pins = Vec::new();
    for (slot, wanted) in (0..).zip(&plan.volumes) {
        let found = state.volumes.get(&(tenant.clone(), wanted.name.clone()));
        match (wanted.access, found) {
            // Made when the first task is given out; or named for each task, which is seen then.
            (Access::Rw, None) if wanted.size_bytes.is_some() || wanted.name.contains("${") => {}
            (Access::Rw, Some(_)) => {}
            (_, None) => return Err(Refusal::NoVolume { slot, name: wanted.name.clone() }),
            (Access::Ro | Access::Clone, Some(volume)) => {
                let snapshot = wanted.snapshot.as_ref().map(|name| match volume.snapshots.get(name) {
                    Some(snapshot) => Ok(snapshot.id),
                    None => Err(Refusal::NoSnapshot { slot, name: wanted.name.clone(), snapshot: name.clone() }),
                });
                pins.push(Pin { slot, volume: volume.id, snapshot: snapshot.transpose()?, held: false });
            }
        }
    }
    Ok((!pins.is_empty()).then_some(pins))
}

/// The volumes that a job's tasks write, by slot.
pub fn written(plan: &JobPlan) -> impl Iterator<Item = (u8, &VolumePlan)> {
    (0..).zip(&plan.volumes).filter(|(_, volume)| volume.access == Access::Rw)
}

/// Do all tasks of a job write one and the same volume, so that only one can run at a time?
#[must_use]
pub fn one_at_a_time(plan: &JobPlan) -> bool {
    written(plan).any(|(_, volume)| !volume.name.contains("${index}"))
}

/// Can a task be given all that it writes?
#[must_use]
pub fn are_free(volumes: &Volumes, job: &Job, index: u32) -> bool {
    written(&job.facts.plan).all(|(_, wanted)| {
        let name = (job.facts.tenant.clone(), wanted.name_of(job.id, index));
        volumes.get(&name).map_or(wanted.size_bytes.is_some(), Volume::is_free)
    })
}

/// Gives an attempt what it writes; what is not there yet is made. The caller has seen that all of it is free.
pub fn give(volumes: &mut Volumes, now_ms: u64, job: &Job, name: AttemptName, fx: &mut Effects) {
    for (slot, wanted) in written(&job.facts.plan) {
        let key = (job.facts.tenant.clone(), wanted.name_of(job.id, name.index));
        let made = || Volume::new(made_by(&name, slot), wanted.size_bytes.unwrap_or_default(), now_ms);
        let volume = volumes.entry(key.clone()).or_insert_with(made);
        volume.holder = Some(Holder::Attempt(name));
        fx.volumes.insert(key);
    }
}

/// What a task of a bundle was given, for its worker.
#[must_use]
pub fn given(volumes: &Volumes, job: &Job, index: u32) -> Vec<Given> {
    let one = |(slot, wanted): (u8, &VolumePlan)| {
        let volume = volumes.get(&(job.facts.tenant.clone(), wanted.name_of(job.id, index)))?;
        Some(Given { index, slot, volume: volume.id, generation: volume.generation })
    };
    written(&job.facts.plan).filter_map(one).collect()
}

/// Something that is to be done in the bucket for a volume. Safe to repeat.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// Have a volume's head say what the log accepted.
    Promote {
        /// Whose.
        tenant: TenantId,
        /// Its name.
        name: String,
        /// Which.
        volume: VolumeId,
        /// What was accepted.
        promotion: Promotion,
    },
    /// Have a volume's head say the size that the log wants.
    Grow {
        /// Whose.
        tenant: TenantId,
        /// Its name.
        name: String,
        /// Which.
        volume: VolumeId,
        /// The generation it has.
        generation: u64,
        /// The size it is to have, in bytes.
        size_bytes: u64,
    },
    /// Keep what a job reads or copies from collection; make a snapshot of what the volume is, where none is named.
    Pin {
        /// Which job.
        job: JobId,
        /// Whose.
        tenant: TenantId,
        /// What.
        pin: Pin,
    },
    /// Have a removed volume's head say so.
    Remove {
        /// Whose.
        tenant: TenantId,
        /// Which.
        volume: VolumeId,
    },
}

/// What the state wants done for one volume.
#[must_use]
pub fn change(state: &State, key: &(TenantId, String)) -> Option<Work> {
    let volume = state.volumes.get(key)?;
    let (tenant, name, id) = (key.0.clone(), key.1.clone(), volume.id);
    match (volume.promotion, volume.growth) {
        (Some(promotion), _) => Some(Work::Promote { tenant, name, volume: id, promotion }),
        (None, Some(size_bytes)) => Some(Work::Grow { tenant, name, volume: id, generation: volume.generation, size_bytes }),
        (None, None) => None,
    }
}

/// What the state wants done before a job begins.
pub fn pinning(job: &Job) -> impl Iterator<Item = Work> {
    let over = job.progress.ended_ms.is_some();
    let wanted = job.progress.pins.iter().flatten().filter(move |pin| !pin.held && !over);
    wanted.map(|pin| Work::Pin { job: job.id, tenant: job.facts.tenant.clone(), pin: *pin })
}

/// What is wrong with a success that can't be accepted as it was reported: it becomes a failure. All other ends stay as they are.
#[must_use]
pub fn judge<'a>(state: &State, end: &'a AttemptEnd) -> Cow<'a, AttemptEnd> {
    let Some(job) = state.jobs.get(&end.name.job).filter(|_| end.ending == Ending::Succeeded) else { return Cow::Borrowed(end) };
    let fails = |class, why: String| Cow::Owned(AttemptEnd { ending: Ending::Failed(class), message: Some(why), ..end.clone() });
    for (slot, wanted) in written(&job.facts.plan) {
        let name = wanted.name_of(job.id, end.name.index);
        let volume = state.volumes.get(&(job.facts.tenant.clone(), name.clone()));
        let holds = volume.filter(|volume| volume.holder == Some(Holder::Attempt(end.name)));
        let left = end.volumes.iter().find(|left| left.slot == slot);
        if holds.zip(left).is_none_or(|(volume, left)| (left.volume, left.generation) != (volume.id, volume.generation)) {
            return fails(FailureClass::StorageFailed, format!("what was written to volume {name} was not reported with the result"));
        }
    }
    for kept in &end.kept {
        let other = state.volumes.get(&(job.facts.tenant.clone(), kept.name.clone())).is_some_and(|volume| volume.id != kept.volume);
        if other {
            let why =
                format!("a clone was to be kept as volume {}, which is another volume's name; choose another in keep.name", kept.name);
            return fails(FailureClass::PolicyDenied, why);
        }
    }
    if let Err(refusal) = quota::kept(state, &job.facts.tenant, end) {
        return fails(FailureClass::PolicyDenied, format!("a clone was to be kept, and {refusal}"));
    }
    Cow::Borrowed(end)
}

/// An attempt has ended: what it wrote is promoted if its result was `accepted`, and free otherwise.
pub fn ended(state: &mut State, end: &AttemptEnd, accepted: bool, fx: &mut Effects) {
    let Some(job) = state.jobs.get(&end.name.job).filter(|job| !job.facts.plan.volumes.is_empty()) else { return };
    let now_ms = state.head.now_ms;
    for (slot, wanted) in written(&job.facts.plan) {
        let key = (job.facts.tenant.clone(), wanted.name_of(job.id, end.name.index));
        let Some(volume) = state.volumes.get_mut(&key).filter(|volume| volume.holder == Some(Holder::Attempt(end.name))) else { continue };
        volume.holder = None;
        if let Some(left) = end.volumes.iter().find(|left| left.slot == slot).filter(|_| accepted) {
            volume.promotion = Some(Promotion {
                generation: left.generation.saturating_add(1),
                attempt: end.name,
                root: left.root,
                size_bytes: left.size_bytes,
            });
        }
        fx.volumes.insert(key);
    }
    // With `always` also a try that failed keeps its clones.
    for kept in &end.kept {
        let key = (job.facts.tenant.clone(), kept.name.clone());
        if !state.volumes.contains_key(&key) {
            state.volumes.insert(key.clone(), Volume::new(kept.volume, kept.size_bytes, now_ms));
            fx.volumes.insert(key);
        }
    }
}

/// A volume's head says what the log says; or can't, and then the volume stays what it was.
pub fn promoted(state: &mut State, tenant: &TenantId, name: &str, id: VolumeId, generation: u64, why: Option<&str>, fx: &mut Effects) {
    let key = (tenant.clone(), name.to_owned());
    let Some(volume) = state.volumes.get_mut(&key).filter(|volume| volume.id == id) else { return };
    let Some(promotion) = volume.promotion.take_if(|promotion| promotion.generation == generation) else { return };
    if why.is_none() {
        volume.generation = generation;
        volume.size_bytes = promotion.size_bytes;
    }
    fx.volumes.insert(key);
}

/// A volume's head has the size it was to have; or can't have it, and then the volume stays what it was.
pub fn grown(state: &mut State, tenant: &TenantId, name: &str, id: VolumeId, generation: u64, why: Option<&str>, fx: &mut Effects) {
    let key = (tenant.clone(), name.to_owned());
    let found = state.volumes.get_mut(&key).filter(|volume| volume.id == id && volume.generation.checked_add(1) == Some(generation));
    let Some((volume, size_bytes)) = found.and_then(|volume| volume.growth.take().map(|size_bytes| (volume, size_bytes))) else { return };
    if why.is_none() {
        volume.generation = generation;
        volume.size_bytes = size_bytes;
    }
    fx.volumes.insert(key);
}

/// What a job reads or copies in a slot is there and stays.
pub fn pinned(state: &mut State, id: JobId, slot: u8, snapshot: SnapshotId, fx: &mut Effects) {
    let Some(job) = state.jobs.get_mut(&id) else { return };
    let pins = job.progress.pins.iter_mut().flatten();
    for pin in pins.filter(|pin| pin.slot == slot && pin.snapshot.is_none_or(|known| known == snapshot)) {
        pin.snapshot = Some(snapshot);
        pin.held = true;
    }
    fx.touched_jobs.insert(id);
}

/// A removed volume's head says so.
pub fn gone(state: &mut State, tenant: &TenantId, id: VolumeId) {
    if let Some(going) = &mut state.head.volumes_going {
        going.remove(&(tenant.clone(), id));
        if going.is_empty() {
            state.head.volumes_going = None;
        }
    }
}

/// Applies what somebody asks of a volume. A verb about something else asks nothing here.
///
/// # Errors
/// Why it can't be had.
pub fn verb(state: &mut State, actor: &Actor, verb: &Verb, fx: &mut Effects) -> Result<(), Refusal> {
    let (name, done) = match verb {
        Verb::PutVolume { name, volume, size_bytes } => (name, put(state, actor, name, *volume, *size_bytes)),
        Verb::RemoveVolume { name } => (name, remove(state, actor, name)),
        Verb::PutSnapshot { name, volume, snapshot, id, size_bytes } => {
            let made = Snapshot { id: *id, size_bytes: *size_bytes, created_ms: state.head.now_ms };
            (name, put_snapshot(state, actor, name, *volume, snapshot, made))
        }
        Verb::RemoveSnapshot { name, snapshot } => {
            let found = of(state, actor, name).and_then(|volume| {
                let gone = volume.snapshots.remove(snapshot).map(drop);
                gone.ok_or_else(|| Refusal::SnapshotMissing { name: name.clone(), snapshot: snapshot.clone() })
            });
            (name, found)
        }
        Verb::HoldVolume { name, volume, hold, size_bytes } => (name, hold_volume(state, actor, name, *volume, *hold, *size_bytes)),
        Verb::GrowVolume { name, volume, size_bytes } => (name, grow(state, actor, name, *volume, *size_bytes)),
        _ => return Ok(()),
    };
    if done.is_ok() {
        fx.volumes.insert((actor.tenant.clone(), name.clone()));
    }
    done
}

fn of<'a>(state: &'a mut State, actor: &Actor, name: &str) -> Result<&'a mut Volume, Refusal> {
    state.volumes.get_mut(&(actor.tenant.clone(), name.to_owned())).ok_or_else(|| Refusal::VolumeMissing(name.to_owned()))
}

fn put(state: &mut State, actor: &Actor, name: &str, id: VolumeId, size_bytes: u64) -> Result<(), Refusal> {
    // The same request, once more, brings nothing.
    if !state.volumes.contains_key(&(actor.tenant.clone(), name.to_owned())) {
        quota::room(state, &actor.tenant, size_bytes)?;
    }
    let made = Volume::new(id, size_bytes, state.head.now_ms);
    let volume = state.volumes.entry((actor.tenant.clone(), name.to_owned())).or_insert(made);
    if volume.id == id { Ok(()) } else { Err(Refusal::VolumeExists(name.to_owned())) }
}

fn remove(state: &mut State, actor: &Actor, name: &str) -> Result<(), Refusal> {
    let volume = of(state, actor, name)?;
    if !volume.is_free() {
        return Err(held(name, volume));
    }
    let id = volume.id;
    state.volumes.remove(&(actor.tenant.clone(), name.to_owned()));
    state.head.volumes_going.get_or_insert_default().insert((actor.tenant.clone(), id));
    Ok(())
}

fn put_snapshot(state: &mut State, actor: &Actor, name: &str, id: VolumeId, snapshot: &str, made: Snapshot) -> Result<(), Refusal> {
    let volume = of(state, actor, name)?;
    if volume.id != id {
        return Err(Refusal::VolumeMissing(name.to_owned()));
    }
    let found = volume.snapshots.entry(snapshot.to_owned()).or_insert(made);
    if found.id == made.id { Ok(()) } else { Err(Refusal::SnapshotExists { name: name.to_owned(), snapshot: snapshot.to_owned() }) }
}

fn hold_volume(state: &mut State, actor: &Actor, name: &str, id: VolumeId, hold: bool, size: Option<u64>) -> Result<(), Refusal> {
    let since_ms = state.head.now_ms;
    let volume = of(state, actor, name)?;
    if volume.id != id {
        return Err(Refusal::VolumeMissing(name.to_owned()));
    }
    match (&volume.holder, hold) {
        (None, true) if !volume.is_changing() => {
            volume.holder = Some(Holder::Person { principal: actor.principal.clone(), since_ms });
            Ok(())
        }
        // Again, perhaps from another terminal: its epoch says which one writes.
        (Some(Holder::Person { principal, .. }), true) if *principal == actor.principal => Ok(()),
        (None | Some(_), true) | (Some(Holder::Attempt(_)), false) => Err(held(name, volume)),
        (Some(Holder::Person { .. }), false) => {
            volume.holder = None;
            volume.generation = volume.generation.saturating_add(1);
            volume.size_bytes = size.unwrap_or(volume.size_bytes);
            Ok(())
        }
        (None, false) => Ok(()),
    }
}

fn grow(state: &mut State, actor: &Actor, name: &str, id: VolumeId, size_bytes: u64) -> Result<(), Refusal> {
    let volume = of(state, actor, name)?;
    if volume.id != id {
        return Err(Refusal::VolumeMissing(name.to_owned()));
    }
    // The same request, once more.
    if volume.growth == Some(size_bytes) || (volume.is_free() && volume.size_bytes == size_bytes) {
        return Ok(());
    }
    if !volume.is_free() {
        return Err(held(name, volume));
    }
    if size_bytes < volume.size_bytes {
        return Err(Refusal::VolumeShrinks { name: name.to_owned(), now: volume.size_bytes, asked: size_bytes });
    }
    let brings = size_bytes - volume.size_bytes;
    quota::room(state, &actor.tenant, brings)?;
    of(state, actor, name)?.growth = Some(size_bytes);
    Ok(())
}

fn held(name: &str, volume: &Volume) -> Refusal {
    Refusal::VolumeHeld { name: name.to_owned(), by: holder(volume) }
}

/// Who has a volume, for people.
#[must_use]
pub fn holder(volume: &Volume) -> String {
    match (&volume.holder, &volume.promotion) {
        (Some(Holder::Attempt(name)), _) => format!("task {} of job {}, in try {}, writes it", name.index, name.job, name.number),
        (Some(Holder::Person { principal, .. }), _) => format!("{principal} has it attached"),
        (None, Some(promotion)) => {
            format!("what task {} of job {} wrote is being accepted", promotion.attempt.index, promotion.attempt.job)
        }
        (None, None) if volume.growth.is_some() => "it is growing".to_owned(),
        (None, None) => "nobody writes it".to_owned(),
    }
}

pub mod quota;
#[cfg(test)]
mod tests;
