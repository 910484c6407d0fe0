//! Which of the cluster's own objects a task may be given as an input.
//!
//! Owns the rule only; it is the coordinator's for files of items. It is asked with a task's values put in, as those may complete any
//! key. A worker's credentials open the whole bucket, so it is the worker that must refuse. Does not own other buckets: which of those
//! the credentials open is the operator's choice.

use volley_jobspecs::ids::{JobId, TenantId};
use volley_jobspecs::keys;

/// What Volley itself keeps below its prefix.
const OWN_AREAS: [&str; 6] = [keys::JOBS, keys::UPLOADS, keys::SPECS, keys::ITEMS, keys::CHECKPOINTS, "volley/"];

/// Where a key of the cluster's bucket belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// To the tenant, or to nobody in particular.
    Free,
    /// To a job; the tenant must be that job's.
    Job(JobId),
    /// To Volley or to another tenant.
    Closed,
}

/// Whose a key of the cluster's bucket is. `prefix` is the cluster's: empty, or ending in `/`.
#[must_use]
pub fn reach(key: &str, prefix: &str, tenant: &TenantId) -> Reach {
    // Some servers take such a key for another one.
    if key.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Reach::Closed;
    }
    let Some(own) = key.strip_prefix(prefix) else { return Reach::Free };
    if own.strip_prefix(keys::UPLOADS).and_then(|rest| rest.split_once('/')).is_some_and(|(owner, _)| owner == tenant.as_str()) {
        return Reach::Free;
    }
    let job = own.strip_prefix(keys::JOBS).and_then(|rest| rest.split_once('/')).and_then(|(job, _)| job.parse().ok());
    match job {
        Some(job) => Reach::Job(job),
        None if OWN_AREAS.iter().any(|area| own.starts_with(area)) => Reach::Closed,
        None => Reach::Free,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_reaches_its_own_and_nothing_of_others() {
        let tenant = TenantId::new("acme").expect("a name");
        let of = |key: &str| reach(key, "v/", &tenant);
        assert_eq!(of("v/uploads/acme/u1"), Reach::Free);
        assert_eq!(of("v/lists/a"), Reach::Free);
        assert_eq!(of("elsewhere/a"), Reach::Free);
        assert_eq!(of("v/jobs/j7/main/0/1-9/out/a"), Reach::Job(JobId(7)));
        for closed in ["uploads/beta/u1", "uploads/u1", "specs/x", "items/x/0.jsonl", "checkpoints/1", "volley/cluster.json", "jobs/x"] {
            assert_eq!(of(&format!("v/{closed}")), Reach::Closed, "{closed}");
        }
        for odd in ["v/lists/../specs/x", "/v/specs/x", "v//specs/x", "x/./y", "x/../v/specs/x"] {
            assert_eq!(of(odd), Reach::Closed, "{odd}");
        }
        assert_eq!(reach("specs/x", "", &tenant), Reach::Closed);
    }
}
