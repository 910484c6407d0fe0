//! uploads: files that were uploaded for items or inputs, and when they go.
//!
//! Owns which jobs an upload is kept for. An upload that no job names goes after a day: a record says so, its object is deleted, and
//! another record forgets it. Does not own storing and deleting objects (`api/uploads.rs`, `io/checkpoint.rs`).

use volley_jobspecs::ids::{JobId, TenantId};

use crate::state::effects::Effects;
use crate::state::{State, Timer, UPLOAD_MS, Upload};

/// In a submit's list: the job may name any upload of its tenant, so all are kept that are there now.
pub const ANY: &str = "*";

/// A file was uploaded.
pub fn uploaded(state: &mut State, tenant: &TenantId, id: &str, fx: &mut Effects) {
    let name = (tenant.clone(), id.to_owned());
    // The same request published twice is applied once.
    if state.uploads.contains_key(&name) {
        return;
    }
    let until_ms = state.head.now_ms.saturating_add(UPLOAD_MS);
    let upload = Upload { until_ms, jobs: std::collections::BTreeSet::new(), expired: false, going: false };
    state.timers.extend(timer(tenant, id, &upload));
    state.uploads.insert(name.clone(), upload);
    fx.uploads.insert(name);
}

/// An upload was found in the bucket that no record spoke of: its day is long over.
pub fn found(state: &mut State, tenant: &TenantId, id: &str, jobs: &[JobId], fx: &mut Effects) {
    let name = (tenant.clone(), id.to_owned());
    if state.uploads.contains_key(&name) {
        return;
    }
    let upload = Upload { until_ms: state.head.now_ms, jobs: jobs.iter().copied().collect(), expired: true, going: jobs.is_empty() };
    state.uploads.insert(name.clone(), upload);
    fx.uploads.insert(name);
}

/// A new job names uploads: they are kept as long as it.
pub fn named(state: &mut State, tenant: &TenantId, job: JobId, ids: &[String], fx: &mut Effects) {
    let any = ids.iter().any(|id| id == ANY);
    for ((owner, id), upload) in &mut state.uploads {
        if owner == tenant && !upload.going && (any || ids.contains(id)) {
            upload.jobs.insert(job);
            fx.uploads.insert((owner.clone(), id.clone()));
        }
    }
}

/// A job was forgotten: what only it named goes, if its day is over.
pub fn forgotten(state: &mut State, job: JobId, fx: &mut Effects) {
    for ((tenant, id), upload) in &mut state.uploads {
        if upload.jobs.remove(&job) {
            upload.going |= upload.jobs.is_empty() && upload.expired;
            fx.uploads.insert((tenant.clone(), id.clone()));
        }
    }
}

/// The day of an upload is over.
pub fn expired(state: &mut State, tenant: TenantId, id: String, fx: &mut Effects) {
    if let Some(upload) = state.uploads.get_mut(&(tenant.clone(), id.clone())) {
        upload.expired = true;
        upload.going |= upload.jobs.is_empty();
        fx.uploads.insert((tenant, id));
    }
}

/// The object of an upload is deleted.
pub fn gone(state: &mut State, tenant: &TenantId, id: &str, fx: &mut Effects) {
    let name = (tenant.clone(), id.to_owned());
    if state.uploads.get(&name).is_some_and(|upload| upload.going) {
        state.uploads.remove(&name);
        fx.uploads.insert(name);
    }
}

/// The timer of an upload, until it has fired.
#[must_use]
pub fn timer(tenant: &TenantId, id: &str, upload: &Upload) -> Option<(u64, Timer)> {
    (!upload.expired).then(|| (upload.until_ms, Timer::Upload(tenant.clone(), id.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::rows::{self, MapRows, Rows as _};
    use crate::timers;

    fn tenant() -> TenantId {
        TenantId::new("default").unwrap()
    }

    fn going(state: &State) -> Vec<&str> {
        state.uploads.iter().filter(|(_, upload)| upload.going).map(|((_, id), _)| id.as_str()).collect()
    }

    #[test]
    fn an_upload_goes_after_its_day_unless_a_job_names_it() {
        let (mut state, mut fx) = (State::default(), Effects::default());
        state.head.now_ms = 1_000;
        ["a", "b", "c"].iter().for_each(|id| uploaded(&mut state, &tenant(), id, &mut fx));
        named(&mut state, &tenant(), JobId(7), &["b".to_owned()], &mut fx);
        timers::tick(&mut state, 1, 1_000 + UPLOAD_MS - 1, &mut fx);
        assert!(going(&state).is_empty());
        timers::tick(&mut state, 2, 1_000 + UPLOAD_MS, &mut fx);
        assert_eq!(going(&state), ["a", "c"]);
        // Too late to be named.
        named(&mut state, &tenant(), JobId(8), &[ANY.to_owned()], &mut fx);
        gone(&mut state, &tenant(), "a", &mut fx);
        gone(&mut state, &tenant(), "b", &mut fx);
        assert_eq!(state.uploads.keys().map(|(_, id)| id.as_str()).collect::<Vec<_>>(), ["b", "c"]);
        forgotten(&mut state, JobId(7), &mut fx);
        assert_eq!(going(&state), ["c"]);
        forgotten(&mut state, JobId(8), &mut fx);
        assert_eq!(going(&state), ["b", "c"]);
    }

    #[test]
    fn an_upload_that_was_found_goes_with_the_last_job_that_may_name_it() {
        let (mut state, mut fx) = (State::default(), Effects::default());
        found(&mut state, &tenant(), "a", &[], &mut fx);
        found(&mut state, &tenant(), "b", &[JobId(3), JobId(4)], &mut fx);
        uploaded(&mut state, &tenant(), "c", &mut fx);
        found(&mut state, &tenant(), "c", &[], &mut fx);
        assert_eq!(going(&state), ["a"], "one that is known is left alone");
        forgotten(&mut state, JobId(3), &mut fx);
        assert_eq!(going(&state), ["a"]);
        forgotten(&mut state, JobId(4), &mut fx);
        assert_eq!(going(&state), ["a", "b"]);
    }

    #[test]
    fn uploads_and_their_timers_survive_a_restart() {
        let (mut state, mut fx, store) = (State::default(), Effects::default(), MapRows::default());
        uploaded(&mut state, &tenant(), "a", &mut fx);
        uploaded(&mut state, &tenant(), "b", &mut fx);
        named(&mut state, &tenant(), JobId(7), &[ANY.to_owned()], &mut fx);
        store.write(rows::batch(&state, &fx)).unwrap();
        assert_eq!(rows::load(&store).unwrap(), state);
        timers::tick(&mut state, 1, UPLOAD_MS, &mut fx);
        forgotten(&mut state, JobId(7), &mut fx);
        gone(&mut state, &tenant(), "a", &mut fx);
        store.write(rows::batch(&state, &fx)).unwrap();
        assert_eq!(rows::load(&store).unwrap(), state);
    }
}
