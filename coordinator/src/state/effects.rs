//! What applying records leaves to be done: rows to store, answers to give, events to tell.
//!
//! Owns the list. `apply` fills it and never reads it; the driver stores it with the log sequence in one batch and empties it.

use std::collections::BTreeSet;

use minicbor::{Decode, Encode};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, BundleId, JobId, TenantId, WorkerId};
use volley_jobspecs::units::counted;
use volley_jobspecs::wire::report::AttemptEnd;

use super::task::Page;

/// Everything a batch of records leaves to be done.
#[derive(Debug, Default)]
pub struct Effects {
    /// Jobs the present record touched; moved to `jobs` or `evicted` at its end.
    pub touched_jobs: BTreeSet<JobId>,
    /// Pages the present record touched; moved to `pages` or `settled` at its end.
    pub touched_pages: BTreeSet<(JobId, u32)>,
    /// Jobs whose facts are new.
    pub new_jobs: BTreeSet<JobId>,
    /// Jobs whose progress changed.
    pub jobs: BTreeSet<JobId>,
    /// Pages that changed and are still in memory.
    pub pages: BTreeSet<(JobId, u32)>,
    /// Pages that settled and left memory.
    pub settled: Vec<(JobId, u32, Page)>,
    /// Jobs that left memory, with what must still be stored of them.
    pub evicted: Vec<super::job::Job>,
    /// Jobs to forget wholly.
    pub forgotten: BTreeSet<JobId>,
    /// Workers that somebody wants to be given tasks again.
    pub resumed: Vec<WorkerId>,
    /// Workers that changed or went.
    pub workers: BTreeSet<WorkerId>,
    /// Tenants that changed.
    pub tenants: BTreeSet<TenantId>,
    /// Tokens that changed or went.
    pub tokens: BTreeSet<String>,
    /// Idempotency keys that changed or went.
    pub keys: BTreeSet<(TenantId, String)>,
    /// Uploads that changed or went.
    pub uploads: BTreeSet<(TenantId, String)>,
    /// Volumes that changed or went.
    pub volumes: BTreeSet<(TenantId, String)>,
    /// Ends of attempts.
    pub attempts: Vec<(AttemptName, AttemptRow)>,
    /// Ends of tasks: job, sequence of the record that ended it, place among that record's ends.
    pub results: Vec<(JobId, u64, u32, ResultEntry)>,
    /// Answers to requests, by request id.
    pub answers: Vec<(String, Answer)>,
    /// Bundles whose last attempt ended, and whose slot is free, each with its job.
    pub closed: Vec<(WorkerId, BundleId, JobId)>,
    /// Workers that were lost and did not leave of their own will.
    pub workers_lost: u64,
    /// Messages that were passed over because no leader wrote them.
    pub aliens: u64,
    /// Bundles that were opened, each with its job.
    pub opened: Vec<(WorkerId, BundleId, JobId)>,
}

impl Effects {
    /// Notes the end of a task. Ends of one record follow each other, so the place is the last one's plus one.
    pub fn result(&mut self, job: JobId, sequence: u64, entry: ResultEntry) {
        let place = self.results.last().filter(|(_, s, _, _)| *s == sequence).map_or(0, |(_, _, place, _)| place + 1);
        self.results.push((job, sequence, place, entry));
    }

    /// Is there nothing to store?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
            && self.new_jobs.is_empty()
            && self.pages.is_empty()
            && self.settled.is_empty()
            && self.evicted.is_empty()
            && self.forgotten.is_empty()
            && self.workers.is_empty()
            && self.tenants.is_empty()
            && self.tokens.is_empty()
            && self.keys.is_empty()
            && self.uploads.is_empty()
            && self.volumes.is_empty()
            && self.attempts.is_empty()
            && self.results.is_empty()
    }
}

/// A stored attempt.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct AttemptRow {
    /// Where it ran.
    #[n(0)]
    pub worker: WorkerId,
    /// What was reported; for one that was lost, what the coordinator says of it.
    #[n(1)]
    pub end: AttemptEnd,
    /// When it was assigned, in milliseconds since 1970.
    #[n(2)]
    pub assigned_ms: u64,
    /// When its end was applied.
    #[n(3)]
    pub ended_ms: u64,
}

/// How a task ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct ResultEntry {
    /// Which task.
    #[n(0)]
    pub index: u32,
    /// The attempt that decided it: its number, 0 when none did (cancelled, queue timeout).
    #[n(1)]
    pub number: u16,
    /// Why it failed; none: it succeeded.
    #[n(2)]
    pub class: Option<FailureClass>,
    /// Tries it took in all.
    #[n(3)]
    pub attempts: u16,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// A job was accepted, or was there already.
    Submitted {
        /// Which.
        job: JobId,
        /// Its tasks.
        tasks: u32,
        /// Was it there already?
        existed: bool,
    },
    /// Done.
    Done,
    /// Refused.
    Refused(Refusal),
}

/// Why a request was refused. Each is what a person is told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such job of this tenant.
    #[error("no job {0} (`volley jobs` lists them)")]
    NoJob(JobId),
    /// No such tenant.
    #[error("no tenant {0}; an operator makes one with `volley tenant add {0}`")]
    NoTenant(TenantId),
    /// No such worker.
    #[error("no worker {0} (`volley workers` lists them)")]
    NoWorker(WorkerId),
    /// No such token.
    #[error("no token {0} (`volley token ls` lists them)")]
    NoToken(String),
    /// The key was used for another spec.
    #[error("idempotency key {key:?} was used for another spec, that of job {job}; use a new key, or submit the same spec")]
    KeyReused {
        /// The key.
        key: String,
        /// The job it belongs to.
        job: JobId,
    },
    /// A quota of the tenant.
    #[error(
        "tenant {tenant} may have {max} {what} at a time, those of ended jobs not counted; it has {has}, the new job brings {brings}. Wait, cancel a job, or ask an operator for more"
    )]
    Quota {
        /// Whose.
        tenant: TenantId,
        /// Of what.
        what: &'static str,
        /// Limit.
        max: u64,
        /// Used.
        has: u64,
        /// Asked for.
        brings: u64,
    },
    /// A limit of the tenant's volumes.
    #[error(
        "tenant {tenant} may have {max} bytes {what} and has {has}, {brings} more are asked for; remove volumes or snapshots (what is stored counts until \
         it is collected), or ask an operator for more"
    )]
    VolumeQuota {
        /// Whose.
        tenant: TenantId,
        /// Of what.
        what: &'static str,
        /// Limit, in bytes.
        max: u64,
        /// Used.
        has: u64,
        /// Asked for.
        brings: u64,
    },
    /// More than the whole quota of the tenant: waiting doesn't help.
    #[error(
        "tenant {tenant} may have {max} {what} in jobs that have not ended, and this job alone brings {brings}; make it smaller, or ask an operator for more"
    )]
    NeverFits {
        /// Whose.
        tenant: TenantId,
        /// Of what.
        what: &'static str,
        /// Limit.
        max: u64,
        /// Asked for.
        brings: u64,
    },
    /// Priority above the tenant's.
    #[error("$.priority: tenant {tenant} may ask for at most {max}, not {asked}")]
    Priority {
        /// Whose.
        tenant: TenantId,
        /// Limit.
        max: i16,
        /// Asked for.
        asked: i16,
    },
    /// A tenant that every cluster has.
    #[error("tenant {0} belongs to every cluster and can't be removed")]
    BuiltIn(TenantId),
    /// A tenant with work to do.
    #[error(
        "tenant {tenant} has {} not ended; wait, or cancel what runs (`volley --tenant {tenant} jobs` lists it)",
        counted(*jobs as u64, "job that has", "jobs that have")
    )]
    TenantBusy {
        /// Which.
        tenant: TenantId,
        /// How many.
        jobs: usize,
    },
    /// The job has ended.
    #[error("job {0} has ended, so nothing of it is left to do")]
    Ended(JobId),
    /// The job has not ended.
    #[error(
        "job {0} has not ended; cancel it first with `volley cancel {0}`, or with `--now` if it is ending and its last tasks take too long"
    )]
    NotEnded(JobId),
    /// The job is being removed.
    #[error("job {0} is being removed; submit it again instead")]
    Removed(JobId),
    /// A volume that a job names is not there.
    #[error(
        "$.task.volumes[{slot}].volume: there is no volume {name} (`volley volume ls` lists them); with \"access\": \"rw\" and \"size\" it is made"
    )]
    NoVolume {
        /// Its place in the spec.
        slot: u8,
        /// Which.
        name: String,
    },
    /// A snapshot that a job names is not there.
    #[error("$.task.volumes[{slot}].volume: volume {name} has no snapshot {snapshot} (`volley volume show {name}` lists them)")]
    NoSnapshot {
        /// Its place in the spec.
        slot: u8,
        /// Of which volume.
        name: String,
        /// Which.
        snapshot: String,
    },
    /// No such volume.
    #[error("there is no volume {0} (`volley volume ls` lists them)")]
    VolumeMissing(String),
    /// The name is taken.
    #[error("there is a volume {0} already; choose another name, or remove it with `volley volume rm {0}`")]
    VolumeExists(String),
    /// Somebody writes it.
    #[error("volume {name} is in use: {by}; wait for it, or cancel or detach what has it")]
    VolumeHeld {
        /// Which.
        name: String,
        /// By whom.
        by: String,
    },
    /// A disk never shrinks.
    #[error("volume {name} has {now} bytes and can't shrink to {asked}: make a new volume and copy")]
    VolumeShrinks {
        /// Which.
        name: String,
        /// Bytes it has.
        now: u64,
        /// Bytes that were asked for.
        asked: u64,
    },
    /// No such snapshot.
    #[error("volume {name} has no snapshot {snapshot} (`volley volume show {name}` lists them)")]
    SnapshotMissing {
        /// Of which volume.
        name: String,
        /// Which.
        snapshot: String,
    },
    /// The snapshot's name is taken.
    #[error("volume {name} has a snapshot {snapshot} already; choose another name")]
    SnapshotExists {
        /// Of which volume.
        name: String,
        /// Which.
        snapshot: String,
    },
    /// Nothing to rerun.
    #[error("job {0} has no task that ended without success: there is nothing to rerun")]
    NothingToRerun(JobId),
}
