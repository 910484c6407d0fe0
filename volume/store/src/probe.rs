//! `probe` and `ensure_bucket`: what a cluster asks of its bucket before it starts.
//!
//! Owns the test that conditional writes are kept, one after another and all at once. A store that
//! takes the header and ignores it would lose volumes and manifests without a sound.

use std::time::{Duration, Instant};

use aws_sdk_s3::types::{BucketLocationConstraint, CreateBucketConfiguration};
use bytes::Bytes;
use futures::future::join_all;

use crate::connect::Store;
use crate::delete::DeleteError;
use crate::error::{ErrorKind, Failure, answers};
use crate::get::GetError;
use crate::list::ListError;
use crate::put::{PutError, PutOutcome};
use crate::retry::{Refusal, classify, random_tag};

/// Writers that race for one key: enough to meet a check-then-write race, few enough for any store.
const RACERS: usize = 8;
/// Races per condition: one alone may end well by luck. (Some stores take a second over each.)
const RACES: usize = 2;
/// Probe objects have a few bytes.
const PROBE_BYTES_MAX: u64 = 1024;

/// What a good bucket was found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeReport {
    /// Time of one write and one read of a small object.
    pub round_trip: Duration,
}

/// Why the bucket cannot serve a cluster.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// It cannot be written to.
    #[error("the bucket cannot be used: {0}")]
    Put(#[from] PutError),
    /// It cannot be read.
    #[error("the bucket cannot be used: {0}")]
    Get(#[from] GetError),
    /// It cannot be listed.
    #[error("the bucket cannot be used: {0}")]
    List(#[from] ListError),
    /// Nothing can be deleted from it.
    #[error("the bucket cannot be used: {0}")]
    Delete(#[from] DeleteError),
    /// A condition that holds was refused.
    #[error("{store} refuses a conditional write that should succeed ({what}); Volley needs conditional writes: use a store that has them")]
    RefusesValid {
        /// The bucket and endpoint.
        store: String,
        /// Which write.
        what: &'static str,
    },
    /// A condition that does not hold was ignored.
    #[error("{store} does not keep conditional writes: {what}; results and volumes would be lost: use a store that keeps them")]
    Ignores {
        /// The bucket and endpoint.
        store: String,
        /// What it did.
        what: &'static str,
    },
    /// What was written was not read or listed.
    #[error("{store} does not give back what was just written ({what}); Volley needs reads and lists that see every earlier write")]
    Stale {
        /// The bucket and endpoint.
        store: String,
        /// Which read.
        what: &'static str,
    },
}

impl ProbeError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Put(error) => error.kind(),
            Self::Get(error) => error.kind(),
            Self::List(error) => error.kind(),
            Self::Delete(error) => error.kind(),
            Self::RefusesValid { .. } | Self::Ignores { .. } | Self::Stale { .. } => ErrorKind::Rejected,
        }
    }
}
answers!(ProbeError);

/// Why the bucket is not there and could not be made.
#[derive(Debug, thiserror::Error)]
pub enum EnsureBucketError {
    /// Anything that went wrong on the way to the store.
    #[error(transparent)]
    Store(#[from] Failure),
}

impl EnsureBucketError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Store(failure) => failure.kind(),
        }
    }
}
answers!(EnsureBucketError);

impl Store {
    /// Tries what a cluster needs: write, read, list, delete, and conditional writes that are kept.
    pub async fn probe(&self) -> Result<ProbeReport, ProbeError> {
        let base = format!("volley/probe/{}", random_tag());
        let keys: Vec<String> = (0..=2 * RACES).map(|n| format!("{base}/{n}")).collect();
        let end = self.probe_keys(&base, &keys).await;
        if let Err(away) = &end
            && away.kind() == ErrorKind::Unavailable
        {
            // Tidying up would only wait as long again.
            return end;
        }
        // Tidy up after a failure too, but report the failure.
        let tidy = self.delete_many(&keys).await;
        let report = end?;
        tidy?;
        Ok(report)
    }

    async fn probe_keys(&self, base: &str, keys: &[String]) -> Result<ProbeReport, ProbeError> {
        let Some((first, races)) = keys.split_first() else { return Ok(ProbeReport { round_trip: Duration::ZERO }) };
        let round_trip = self.probe_one_by_one(base, first).await?;
        let (absent, matching) = races.split_at(RACES.min(races.len()));
        for key in absent {
            let end = join_all((0..RACERS).map(|n| self.put_if_absent(key, word(n)))).await;
            self.one_winner(end, "of several writers that each asked for a new object, more than one was told yes")?;
        }
        for key in matching {
            let etag = self.put(key, word(RACERS)).await?;
            let end = join_all((0..RACERS).map(|n| self.put_if_match(key, word(n), &etag))).await;
            self.one_winner(end, "of several writers that each replaced the same version, more than one was told yes")?;
        }
        Ok(ProbeReport { round_trip })
    }

    async fn probe_one_by_one(&self, base: &str, key: &str) -> Result<Duration, ProbeError> {
        let began = Instant::now();
        let PutOutcome::Written { etag: first } = self.put_if_absent(key, word(1)).await? else {
            return Err(self.refuses("If-None-Match: * on a new key"));
        };
        self.reads(key, &word(1)).await?;
        let round_trip = began.elapsed();
        if self.put_if_absent(key, word(2)).await?.is_written() {
            return Err(self.ignores("it overwrote an object although If-None-Match: * was asked"));
        }
        if !self.put_if_match(key, word(3), &first).await?.is_written() {
            return Err(self.refuses("If-Match with the current version"));
        }
        if self.put_if_match(key, word(4), &first).await?.is_written() {
            return Err(self.ignores("it overwrote an object although If-Match named an older version"));
        }
        self.reads(key, &word(3)).await?;
        let listed = self.list(base, None, 2).await?;
        if listed.objects.iter().map(|object| object.key.as_str()).ne([key]) {
            return Err(ProbeError::Stale { store: self.name(), what: "a list" });
        }
        // Last, since a store that ignores it leaves an object: the next writer may ask for this key again.
        self.delete(key).await?;
        if self.put_if_match(key, word(5), &first).await?.is_written() {
            return Err(self.ignores("it created an object although If-Match named a version that is gone"));
        }
        Ok(round_trip)
    }

    async fn reads(&self, key: &str, expected: &Bytes) -> Result<(), ProbeError> {
        if self.get(key, PROBE_BYTES_MAX).await? == *expected {
            return Ok(());
        }
        Err(ProbeError::Stale { store: self.name(), what: "a read" })
    }

    fn one_winner(&self, ends: Vec<Result<PutOutcome, PutError>>, what: &'static str) -> Result<(), ProbeError> {
        let mut winners = 0;
        for end in ends {
            winners += usize::from(end?.is_written());
        }
        match winners {
            1 => Ok(()),
            0 => Err(self.refuses("one of several at once")),
            _ => Err(self.ignores(what)),
        }
    }

    fn refuses(&self, what: &'static str) -> ProbeError {
        ProbeError::RefusesValid { store: self.name(), what }
    }

    fn ignores(&self, what: &'static str) -> ProbeError {
        ProbeError::Ignores { store: self.name(), what }
    }

    fn name(&self) -> String {
        format!("bucket {} at {}", self.bucket(), self.endpoint())
    }

    /// Creates the bucket if it is not there. Returns whether it did.
    pub async fn ensure_bucket(&self) -> Result<bool, EnsureBucketError> {
        let run = self.run("find bucket", "", 0, || {
            let request = self.client().head_bucket().bucket(self.bucket());
            async move { request.send().await.map_err(classify) }
        });
        match run.await.result {
            Ok(_) => return Ok(false),
            Err(Refusal::NotFound | Refusal::Failure(Failure::NoBucket { .. })) => {}
            Err(refusal) => return Err(refusal.into_failure(self.place("find bucket", "")).into()),
        }
        // AWS wants the region named, except the one it takes by default; other stores ignore or refuse it.
        let location = (self.endpoint().starts_with("AWS ") && self.region() != "us-east-1")
            .then(|| CreateBucketConfiguration::builder().location_constraint(BucketLocationConstraint::from(self.region())).build());
        let run = self.run("create bucket", "", 0, || {
            let request = self.client().create_bucket().bucket(self.bucket()).set_create_bucket_configuration(location.clone());
            async move { request.send().await.map_err(classify) }
        });
        match run.await.result {
            Ok(_) => Ok(true),
            // Another process was faster, or our own first try was heard.
            Err(Refusal::Failure(Failure::Rejected { code, .. })) if code == "BucketAlreadyOwnedByYou" => Ok(false),
            Err(refusal) => Err(refusal.into_failure(self.place("create bucket", "")).into()),
        }
    }
}

/// Bytes that differ for each writer.
fn word(n: usize) -> Bytes {
    Bytes::from(format!("volley probe {n}"))
}
