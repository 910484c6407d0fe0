//! Where the items of a job come from, and whether its tenant may read them there.
//!
//! Owns the decision only. Does not own reading and cutting the file (`io/items.rs`) or the formats (`volley_jobspecs::pages`).

use volley_jobspecs::expand::{FileFormat, ItemFile};
use volley_jobspecs::ids::{JobId, TenantId};
use volley_jobspecs::keys;
use volley_jobspecs::resolve::s3_uri;

/// A file to read items from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A key of the cluster's bucket, relative to its prefix.
    Own {
        /// The key.
        key: String,
        /// The job it belongs to: the reader's tenant must be that job's.
        job: Option<JobId>,
    },
    /// An object outside the cluster's prefix.
    Other {
        /// Its bucket.
        bucket: String,
        /// Its key.
        key: String,
    },
}

/// Why a file is not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Neither an upload nor an object.
    #[error("names neither an upload nor an s3:// object")]
    Nothing,
    /// Not a URI of an object.
    #[error("{0:?} is no object; one looks like s3://bucket/key")]
    BadUri(String),
    /// The bucket is not among those that may be read.
    #[error(
        "bucket {bucket:?} is not among those this cluster reads items from; upload the file instead, or ask an operator to allow the bucket"
    )]
    Bucket {
        /// Which.
        bucket: String,
    },
    /// Volley's own objects, or another tenant's.
    #[error("{key:?} belongs to Volley or to another tenant; items are read from your own uploads, your jobs' objects and your own files")]
    NotYours {
        /// Which.
        key: String,
    },
}

/// What the cluster reads from.
#[derive(Debug, Clone)]
pub struct Readable<'a> {
    /// The cluster's bucket.
    pub bucket: &'a str,
    /// Its prefix: empty, or ending in `/`.
    pub prefix: &'a str,
    /// Other buckets that tenants may read; `*` is any.
    pub others: &'a [String],
}

/// What Volley itself keeps below its prefix. A tenant reads its own uploads and its own jobs there and nothing else.
const OWN_AREAS: [&str; 6] = ["jobs/", "uploads/", "specs/", "items/", "checkpoints/", "volley/"];

/// Where `file` lies, if `tenant` may read it.
///
/// # Errors
/// [`SourceError`]; its words fit behind the path from [`path`].
pub fn source(file: &ItemFile, tenant: &TenantId, readable: &Readable<'_>) -> Result<Source, SourceError> {
    if let Some(id) = &file.source.upload {
        return Ok(Source::Own { key: keys::upload(tenant, id), job: None });
    }
    let uri = file.source.s3.as_deref().ok_or(SourceError::Nothing)?;
    let (bucket, key) = s3_uri(uri).ok_or_else(|| SourceError::BadUri(uri.to_owned()))?;
    if bucket != readable.bucket {
        let allowed = readable.others.iter().any(|other| other == bucket || other == "*");
        let found = Source::Other { bucket: bucket.to_owned(), key: key.to_owned() };
        return if allowed { Ok(found) } else { Err(SourceError::Bucket { bucket: bucket.to_owned() }) };
    }
    let Some(own) = key.strip_prefix(readable.prefix) else {
        return Ok(Source::Other { bucket: bucket.to_owned(), key: key.to_owned() });
    };
    if own.strip_prefix("uploads/").and_then(|rest| rest.split_once('/')).is_some_and(|(owner, _)| owner == tenant.as_str()) {
        return Ok(Source::Own { key: own.to_owned(), job: None });
    }
    let job = own.strip_prefix("jobs/").and_then(|rest| rest.split_once('/')).and_then(|(job, _)| job.parse().ok());
    if job.is_some() {
        return Ok(Source::Own { key: own.to_owned(), job });
    }
    match OWN_AREAS.iter().any(|area| own.starts_with(area)) {
        true => Err(SourceError::NotYours { key: key.to_owned() }),
        false => Ok(Source::Own { key: own.to_owned(), job: None }),
    }
}

/// JSON path of the file in the spec, for problems.
#[must_use]
pub fn path(file: &ItemFile) -> String {
    let kind = match &file.format {
        FileFormat::Jsonl => "jsonl",
        FileFormat::Lines => "lines",
        FileFormat::Csv { .. } => "csv",
    };
    let field = if file.source.upload.is_some() { "upload" } else { "s3" };
    format!("$.items.{kind}.{field}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::spec::FileSource;

    fn of(upload: Option<&str>, s3: Option<&str>) -> Result<Source, SourceError> {
        let source_of = FileSource { upload: upload.map(str::to_owned), s3: s3.map(str::to_owned) };
        let file = ItemFile { source: source_of, format: FileFormat::Jsonl, chunk: None };
        let tenant = TenantId::new("acme").unwrap_or_else(|e| panic!("{e}"));
        source(&file, &tenant, &Readable { bucket: "cell", prefix: "v/", others: &["data".to_owned()] })
    }

    #[test]
    fn a_tenant_reads_its_own_and_nothing_of_others() {
        let own = |key: &str, job| Ok(Source::Own { key: key.to_owned(), job });
        assert_eq!(of(Some("u1"), None), own("uploads/acme/u1", None));
        assert_eq!(of(None, Some("s3://cell/v/uploads/acme/u1")), own("uploads/acme/u1", None));
        assert_eq!(of(None, Some("s3://cell/v/jobs/j7/main/0/1-9/out/a.jsonl")), own("jobs/j7/main/0/1-9/out/a.jsonl", Some(JobId(7))));
        assert_eq!(of(None, Some("s3://cell/v/lists/a.jsonl")), own("lists/a.jsonl", None));
        assert_eq!(of(None, Some("s3://cell/other/a")), Ok(Source::Other { bucket: "cell".into(), key: "other/a".into() }));
        assert_eq!(of(None, Some("s3://data/a")), Ok(Source::Other { bucket: "data".into(), key: "a".into() }));
        for bad in ["uploads/beta/u1", "uploads/u1", "specs/x", "items/x/000000.jsonl", "checkpoints/1", "volley/cluster.json", "jobs/x"] {
            assert!(matches!(of(None, Some(&format!("s3://cell/v/{bad}"))), Err(SourceError::NotYours { .. })), "{bad}");
        }
        assert!(matches!(of(None, Some("s3://secret/a")), Err(SourceError::Bucket { .. })));
        assert!(matches!(of(None, Some("http://x/a")), Err(SourceError::BadUri(_))));
        assert_eq!(of(None, None), Err(SourceError::Nothing));
    }
}
