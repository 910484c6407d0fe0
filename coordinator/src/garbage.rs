//! garbage: objects that no job names any more, and how that is told.
//!
//! Owns which of the stored specs, item pages and uploads nobody needs; all follows from the jobs' facts and from what lies in the
//! bucket. Does not own listing and deleting (`io/garbage.rs`) or what a job takes with it when it is removed (`io/objects.rs`).
//!
//! Names are never used twice, so what is old and named by nobody stays so: a leader that was frozen in the middle of a deletion takes
//! nothing away from a job that was submitted meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use volley_jobspecs::ids::{JobId, TenantId};
use volley_jobspecs::wire::plan::SpecRef;

use crate::state::job::Facts;

/// How often the leader looks for garbage: it costs a listing, and garbage is rare.
pub const EVERY: Duration = Duration::from_secs(60 * 60);
/// Age from which an object that nobody names was left by a submit that failed, in milliseconds: no submit takes a day.
pub const ORPHAN_MS: i64 = 24 * 60 * 60 * 1000;
/// Age from which an upload in parts that was not finished was left by a process that died, in milliseconds: none takes a week.
pub const UNFINISHED_MS: i64 = 7 * 24 * 60 * 60 * 1000;

/// When garbage is looked for. Tests shorten it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collect {
    /// See [`EVERY`].
    pub every: Duration,
    /// See [`ORPHAN_MS`].
    pub orphan_ms: i64,
}

impl Default for Collect {
    fn default() -> Self {
        Self { every: EVERY, orphan_ms: ORPHAN_MS }
    }
}

/// Which jobs name what.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Named {
    /// Item pages.
    pub items: BTreeSet<String>,
    /// Stored specs.
    pub specs: BTreeSet<String>,
    /// Of the uploads that were asked about: the jobs that may name them.
    pub uploads: BTreeMap<(TenantId, String), BTreeSet<JobId>>,
}

impl Named {
    /// Nothing so far; `uploads` are those that are asked about.
    #[must_use]
    pub fn new(uploads: impl IntoIterator<Item = (TenantId, String)>) -> Self {
        Self { uploads: uploads.into_iter().map(|upload| (upload, BTreeSet::new())).collect(), ..Self::default() }
    }

    /// Adds what a job names.
    pub fn job(&mut self, id: JobId, facts: &Facts) {
        self.items.extend(facts.plan.items.clone());
        self.specs.extend(facts.spec.name().map(str::to_owned));
        for ((tenant, upload), jobs) in &mut self.uploads {
            if *tenant == facts.tenant && may_name(&facts.spec, upload) {
                jobs.insert(id);
            }
        }
    }
}

/// Might a spec name this upload? One that is in the bucket is not read for it, and a template may become any name.
fn may_name(spec: &SpecRef, upload: &str) -> bool {
    match spec {
        SpecRef::Inline(bytes) => {
            let text = String::from_utf8_lossy(bytes);
            text.contains(upload) || text.contains("upload:${") || text.contains("\"from\":\"${")
        }
        SpecRef::Stored { .. } => true,
    }
}

/// Objects seen in an area of the bucket: the newest write of each name, in milliseconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen(BTreeMap<String, i64>);

impl Seen {
    /// Adds an object below `area`, such as `items/`; what is no name there is left alone.
    pub fn object(&mut self, area: &str, key: &str, modified_ms: i64) {
        let Some(rest) = key.strip_prefix(area) else { return };
        let name = rest.split('/').next().unwrap_or(rest);
        if !name.is_empty() {
            let newest = self.0.entry(name.to_owned()).or_insert(modified_ms);
            *newest = (*newest).max(modified_ms);
        }
    }

    /// Names that are old.
    #[must_use]
    pub fn old(self, before_ms: i64) -> Vec<String> {
        self.0.into_iter().filter(|(_, newest)| *newest < before_ms).map(|(name, _)| name).collect()
    }
}

/// The tenant and the id of an upload, by its key.
#[must_use]
pub fn upload_of(key: &str) -> Option<(TenantId, String)> {
    let (tenant, id) = key.strip_prefix("uploads/")?.split_once('/')?;
    (!id.is_empty() && !id.contains('/')).then_some(())?;
    Some((TenantId::new(tenant).ok()?, id.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::parse::parse_and_validate;
    use volley_jobspecs::validate::Features;

    fn facts(tenant: &str, items: Option<&str>, spec: SpecRef) -> Facts {
        let job =
            parse_and_validate(br#"{"version":"volley/v1","name":"x","task":{"isolation":"process","command":"true"}}"#, &Features::all());
        let plan = volley_jobspecs::plan::plan(&job.unwrap_or_else(|e| panic!("{e}")), 1);
        let plan = volley_jobspecs::wire::plan::JobPlan { items: items.map(str::to_owned), ..plan };
        Facts { tenant: TenantId::new(tenant).unwrap(), principal: "p".into(), key: "k".into(), plan, spec, trace: None, submitted_ms: 0 }
    }

    fn inline(text: &str) -> SpecRef {
        SpecRef::Inline(text.as_bytes().to_vec().into())
    }

    #[test]
    fn what_a_job_names_is_no_garbage() {
        let upload = |tenant: &str, id: &str| (TenantId::new(tenant).unwrap(), id.to_owned());
        let mut named = Named::new([upload("a", "u1"), upload("a", "u2"), upload("b", "u1")]);
        named.job(JobId(1), &facts("a", Some("h-1"), inline(r#"{"from":"upload:u1"}"#)));
        named.job(JobId(2), &facts("a", None, SpecRef::Stored { hash: "s".into(), len: 1, name: Some("s-2".into()) }));
        named.job(JobId(3), &facts("b", None, inline(r#"{"from":"${item.file}"}"#)));
        assert_eq!(named.items, BTreeSet::from(["h-1".to_owned()]));
        assert_eq!(named.specs, BTreeSet::from(["s-2".to_owned()]));
        let of = |tenant: &str, id: &str| named.uploads[&upload(tenant, id)].iter().map(|job| job.0).collect::<Vec<_>>();
        assert_eq!((of("a", "u1"), of("a", "u2"), of("b", "u1")), (vec![1, 2], vec![2], vec![3]));
    }

    #[test]
    fn only_what_is_wholly_old_goes() {
        let mut seen = Seen::default();
        for (key, modified_ms) in
            [("items/a/index.json", 5), ("items/a/000000.jsonl", 1), ("items/b/000000.jsonl", 2), ("specs/c", 0), ("items/", 0)]
        {
            seen.object("items/", key, modified_ms);
        }
        assert_eq!(seen.clone().old(5), ["b"]);
        assert_eq!(seen.old(6), ["a", "b"]);
    }

    #[test]
    fn uploads_are_told_by_their_keys() {
        assert_eq!(upload_of("uploads/acme/u1"), Some((TenantId::new("acme").unwrap(), "u1".to_owned())));
        for other in ["uploads/acme", "uploads/acme/", "uploads/acme/a/b", "uploads//x", "jobs/acme/u1"] {
            assert_eq!(upload_of(other), None, "{other}");
        }
    }
}
