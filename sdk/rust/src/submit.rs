//! Submitting a job.
//!
//! Owns the idempotency key, which makes a submit safe to repeat, and the dry run. Does not own checking the spec
//! (`volley_jobspecs`) or files that it names (`upload`).

use volley_jobspecs::api::{IDEMPOTENCY_HEADER, PlanAnswer, SubmitAnswer};
use volley_jobspecs::ids::JobId;
use volley_jobspecs::spec::JobSpec;
use volley_jobspecs::wire::trace::{self, TraceContext};

use crate::client::Client;
use crate::error::Error;
use crate::http::Call;
use bytes::Bytes;

/// A job spec as JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec(Bytes);

impl From<Vec<u8>> for Spec {
    fn from(text: Vec<u8>) -> Self {
        Self(text.into())
    }
}

impl From<String> for Spec {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<&JobSpec> for Spec {
    fn from(spec: &JobSpec) -> Self {
        // A spec has text keys only, so this can't fail.
        Self(serde_json::to_vec(spec).unwrap_or_default().into())
    }
}

/// Names a submit: the same key with the same spec is the same job, however often it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey(String);

/// Bytes of randomness in a key: no two of a cluster's life meet.
const KEY_BYTES: usize = 16;

impl IdempotencyKey {
    /// A fresh one.
    ///
    /// # Errors
    /// [`Error::Random`].
    pub fn random() -> Result<Self, Error> {
        let mut bytes = [0; KEY_BYTES];
        getrandom::fill(&mut bytes).map_err(|error| Error::Random(error.to_string()))?;
        Ok(Self(hex::encode(bytes)))
    }

    /// One of your own, such as the id of what the job is for.
    ///
    /// # Errors
    /// [`Error::Setting`] unless it is 1 to 128 visible ASCII characters.
    pub fn new(text: &str) -> Result<Self, Error> {
        if (1..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic()) {
            Ok(Self(text.to_owned()))
        } else {
            let why = "it should be 1 to 128 visible ASCII characters".into();
            Err(Error::Setting { setting: format!("the idempotency key {text:?}"), why })
        }
    }

    /// The key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for IdempotencyKey {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::new(text)
    }
}

/// How a job is submitted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SubmitOptions {
    /// Under this key; none: under a fresh one.
    pub key: Option<IdempotencyKey>,
    /// The span the job is to hang below, such as that of the request your program answers; none: the job's trace begins at the
    /// coordinator. Whether the trace is recorded goes along.
    pub trace: Option<TraceContext>,
}

/// A job that was submitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submitted {
    /// The job.
    pub job: JobId,
    /// How many tasks it has.
    pub tasks: u32,
    /// Was it there already, under the same key?
    pub existed: bool,
    /// What keeps it from running as things are now, for people; workers may come.
    pub warnings: Vec<String>,
}

impl Client {
    /// Submits a job under a fresh key.
    ///
    /// # Errors
    /// [`Error::Refused`] with code `bad_spec` and every problem, or why the cluster takes no job now.
    pub async fn submit(&self, spec: impl Into<Spec>) -> Result<Submitted, Error> {
        self.submit_with(spec, &SubmitOptions::default()).await
    }

    /// Submits a job under this key: a program that died after sending can send again and gets the same job.
    ///
    /// # Errors
    /// As [`Client::submit`]; code `conflict` when the key belongs to another spec.
    pub async fn submit_as(&self, spec: impl Into<Spec>, key: &IdempotencyKey) -> Result<Submitted, Error> {
        self.submit_with(spec, &SubmitOptions { key: Some(key.clone()), trace: None }).await
    }

    /// Submits a job as `options` say.
    ///
    /// # Errors
    /// As [`Client::submit_as`].
    pub async fn submit_with(&self, spec: impl Into<Spec>, options: &SubmitOptions) -> Result<Submitted, Error> {
        let fresh;
        let key = match &options.key {
            Some(key) => key,
            None => {
                fresh = IdempotencyKey::random()?;
                &fresh
            }
        };
        let mut call = Call::post(&["jobs"], "submit the job").header(IDEMPOTENCY_HEADER, key.as_str()).json_text(spec.into().0);
        if let Some(trace) = options.trace {
            call = call.header(trace::HEADER, trace);
        }
        let answer: SubmitAnswer = self.json(&call).await?;
        let job = answer.job.parse().map_err(|error: volley_jobspecs::ids::IdError| Error::Unexpected {
            endpoint: self.endpoint(),
            doing: call.doing.clone(),
            why: error.to_string(),
        })?;
        Ok(Submitted { job, tasks: answer.tasks, existed: answer.existed, warnings: answer.warnings })
    }

    /// Asks the cluster what a submit would create, and to show so many tasks of its beginning, and of its end: 1 to 100, or as many as it
    /// thinks. Creates nothing.
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub async fn plan(&self, spec: impl Into<Spec>, show: Option<u32>) -> Result<PlanAnswer, Error> {
        let call = Call::post(&["jobs"], "plan the job").query("dryRun", true).query_if("show", show);
        self.json(&call.json_text(spec.into().0)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_fresh_and_fit_a_header() {
        let (a, b) = (IdempotencyKey::random(), IdempotencyKey::random());
        assert_ne!(a.as_ref().ok(), b.as_ref().ok());
        assert!(a.is_ok_and(|key| IdempotencyKey::new(key.as_str()).is_ok()));
        for bad in ["", "a b", "a\n", "é", &"x".repeat(129)] {
            assert!(IdempotencyKey::new(bad).is_err(), "{bad:?}");
        }
    }
}
