//! quota: how much a tenant's volumes may be.
//!
//! Owns both limits. `volume_bytes_max` counts sizes of volumes, whether anything was written on them or not: it is known at each record, and holds. What a job
//! would make is counted when it is submitted, so that two jobs which wait at the same time may make a little more together. `stored_bytes_max`
//! counts bytes in the bucket, as the last collection has measured them: beyond it nothing new is made, and what runs goes on.

use volley_jobspecs::ids::TenantId;
use volley_jobspecs::wire::plan::JobPlan;
use volley_jobspecs::wire::report::AttemptEnd;

use super::written;
use crate::state::State;
use crate::state::effects::Refusal;

/// Bytes of a tenant's volumes, by their sizes; of those that grow, by what they are to have.
#[must_use]
pub fn size_of_all(state: &State, tenant: &TenantId) -> u64 {
    let from = state.volumes.range((tenant.clone(), String::new())..);
    let of = from.take_while(|((whose, _), _)| whose == tenant);
    of.fold(0, |all, (_, volume)| all.saturating_add(volume.growth.unwrap_or(volume.size_bytes)))
}

/// Bytes that a tenant's volumes have in the bucket, as far as that was measured.
#[must_use]
pub fn stored(state: &State, tenant: &TenantId) -> Option<u64> {
    state.head.volumes_stored.as_ref()?.get(tenant).copied()
}

/// May a tenant's volumes become larger by so many bytes? A new one counts with its size; 0 only asks about what is stored.
///
/// # Errors
/// Which limit it would be above.
pub fn room(state: &State, tenant: &TenantId, brings: u64) -> Result<(), Refusal> {
    let Some(policy) = state.tenants.get(tenant).map(|tenant| &tenant.policy) else { return Ok(()) };
    let refuse = |what, max, has, brings| Err(Refusal::VolumeQuota { tenant: tenant.clone(), what, max, has, brings });
    if let Some(max) = policy.volume_bytes_max.filter(|_| brings > 0) {
        let has = size_of_all(state, tenant);
        if has.saturating_add(brings) > max {
            return refuse("of volumes", max, has, brings);
        }
    }
    match policy.stored_bytes_max.zip(stored(state, tenant)) {
        Some((max, has)) if has > max => refuse("stored in volumes", max, has, 0),
        _ => Ok(()),
    }
}

/// The same for all that a job would make. A job that writes nothing, or only what is there, may always come.
///
/// # Errors
/// As [`room`].
pub fn job(state: &State, tenant: &TenantId, plan: &JobPlan) -> Result<(), Refusal> {
    let mut brings = 0_u64;
    for (_, wanted) in written(plan) {
        let there = state.volumes.contains_key(&(tenant.clone(), wanted.name.clone()));
        let tasks = if wanted.name.contains("${index}") { u64::from(plan.tasks) } else { 1 };
        let made = wanted.size_bytes.filter(|_| !there).unwrap_or_default();
        brings = brings.saturating_add(made.saturating_mul(tasks));
    }
    if brings == 0 { Ok(()) } else { room(state, tenant, brings) }
}

/// The same for the clones that an attempt would keep.
///
/// # Errors
/// As [`room`].
pub fn kept(state: &State, tenant: &TenantId, end: &AttemptEnd) -> Result<(), Refusal> {
    let new = end.kept.iter().filter(|kept| !state.volumes.contains_key(&(tenant.clone(), kept.name.clone())));
    let brings = new.fold(0_u64, |all, kept| all.saturating_add(kept.size_bytes));
    if brings == 0 { Ok(()) } else { room(state, tenant, brings) }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::ids::{AttemptName, JobId, VolumeId};
    use volley_jobspecs::wire::plan::Isolation;
    use volley_jobspecs::wire::record::{Actor, Control, Decided, Decision, Lead, Record, TenantPolicy, Verb};
    use volley_jobspecs::wire::report::Ending;
    use volley_jobspecs::wire::volume::{Access, Kept, VolumePlan};

    use super::*;
    use crate::state::Tenant;
    use crate::state::effects::{Answer, Effects};
    use crate::state::volume::Volume;
    use crate::testing::plan;

    const MIB: u64 = 1 << 20;

    fn red() -> TenantId {
        "red".parse().unwrap()
    }

    /// Ten MiB for `red`, four used; `redder` has others.
    fn state() -> State {
        let mut state = State::default();
        let policy = TenantPolicy { volume_bytes_max: Some(10 * MIB), stored_bytes_max: Some(5 * MIB), ..TenantPolicy::default() };
        state.tenants.insert(red(), Tenant { policy });
        state.volumes.insert((red(), "a".to_owned()), Volume::new(VolumeId([1; 16]), 4 * MIB, 0));
        state.volumes.insert(("redder".parse().unwrap(), "a".to_owned()), Volume::new(VolumeId([2; 16]), 400 * MIB, 0));
        state
    }

    fn rw(name: &str, mib: Option<u64>) -> VolumePlan {
        VolumePlan { name: name.to_owned(), snapshot: None, access: Access::Rw, size_bytes: mib.map(|mib| mib * MIB) }
    }

    #[test]
    fn what_is_made_fits_or_is_refused() {
        let state = state();
        assert_eq!(room(&state, &red(), 6 * MIB), Ok(()));
        assert!(matches!(room(&state, &red(), 6 * MIB + 1), Err(Refusal::VolumeQuota { has, .. }) if has == 4 * MIB));
        assert_eq!(room(&state, &"redder".parse().unwrap(), u64::MAX), Ok(()), "no limit");
        let jobs = |tasks, volumes: Vec<VolumePlan>| job(&state, &red(), &JobPlan { volumes, ..plan(tasks) });
        assert_eq!(jobs(3, vec![rw("n-${index}", Some(2))]), Ok(()));
        assert!(jobs(4, vec![rw("n-${index}", Some(2))]).is_err());
        assert_eq!(jobs(400, vec![rw("n", Some(6))]), Ok(()), "one for all");
        assert!(jobs(1, vec![rw("n", Some(3)), rw("m", Some(4))]).is_err());
        // One that is there brings nothing, whatever the spec says.
        assert_eq!(jobs(1, vec![rw("a", Some(400)), rw("n", None)]), Ok(()));
        let name = AttemptName { job: JobId(1), stage: 0, index: 0, number: 1, sequence: 1 };
        let keeps = |name_of: &str, mib: u64| {
            let kept = vec![Kept { slot: 0, name: name_of.to_owned(), volume: VolumeId([3; 16]), size_bytes: mib * MIB }];
            kept_of(&state, AttemptEnd { kept, ..AttemptEnd::bare(name, Ending::Succeeded, Isolation::Process) })
        };
        assert!(keeps("k", 6).is_ok() && keeps("k", 7).is_err() && keeps("a", 7).is_ok());
    }

    fn kept_of(state: &State, end: AttemptEnd) -> Result<(), Refusal> {
        kept(state, &red(), &end)
    }

    #[test]
    fn records_keep_to_it_and_what_is_stored_counts_as_measured() {
        let mut state = state();
        let mut sequence = 0;
        let mut apply = |state: &mut State, record: Record| {
            sequence += 1;
            let mut fx = Effects::default();
            crate::apply::apply(state, sequence, &record, &mut fx).unwrap();
            fx.answers.into_iter().map(|(_, answer)| answer).next()
        };
        apply(&mut state, Record::Lead(Lead { term: volley_jobspecs::ids::Term(1), coordinator: "c".into(), now_ms: 0 }));
        let put = |byte: u8, mib: u64| {
            let actor = Actor { tenant: red(), principal: "p".to_owned(), request_id: format!("{byte}-{mib}") };
            let verb = Verb::PutVolume { name: format!("v{byte}"), volume: VolumeId([byte; 16]), size_bytes: mib * MIB };
            Record::Control(Control { actor, verb })
        };
        let refused = |answer: Option<Answer>| matches!(answer, Some(Answer::Refused(Refusal::VolumeQuota { .. })));
        assert!(refused(apply(&mut state, put(7, 7))));
        assert!(!refused(apply(&mut state, put(8, 6))));
        assert!(!refused(apply(&mut state, put(8, 6))), "the same once more");
        let mut round = 0;
        let mut measured = |mib: u64| {
            round += 1;
            let decisions = vec![Decision::VolumesStored { bytes: [(red(), mib * MIB)].into() }];
            Record::Decided(Decided { term: volley_jobspecs::ids::Term(1), round, decisions })
        };
        state.volumes.remove(&(red(), "v8".to_owned()));
        apply(&mut state, measured(6));
        assert_eq!(stored(&state, &red()), Some(6 * MIB));
        assert!(refused(apply(&mut state, put(9, 1))));
        apply(&mut state, measured(5));
        assert!(!refused(apply(&mut state, put(10, 1))));
    }
}
