//! The state of the control plane: what every coordinator has after applying the same log.
//!
//! Owns the tables, the timers and the digest. Changed by `apply` alone. Does not own storage (`rows`, `io/rocks.rs`) or anything
//! that only a leader knows (`leader`).

pub mod effects;
pub mod invariants;
pub mod job;
pub mod rows;
pub mod task;
pub mod volume;
pub mod worker;

use std::collections::{BTreeMap, BTreeSet};

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::{BundleId, JobId, TenantId, Term, VolumeId, WorkerId};
use volley_jobspecs::wire::record::TenantPolicy;

use job::Job;
use volume::Volumes;
use worker::Workers;

/// How long an idempotency key is kept after its submit, in milliseconds: a day, as long as a client may reasonably retry.
pub const KEY_MS: u64 = 24 * 60 * 60 * 1000;
/// How long an upload is kept that no job names, in milliseconds: a day, as long as a submit may be retried.
pub const UPLOAD_MS: u64 = KEY_MS;
/// Checkpoints that are kept. The log is trimmed below the second newest, so one may turn out damaged.
pub const CHECKPOINTS_KEPT: usize = 3;

/// A timer of the state.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    /// A task's next try.
    Retry(JobId, u32),
    /// No worker took anything of the job in time.
    Queue(JobId),
    /// The job takes too long in all.
    Total(JobId),
    /// Objects of the job's failed attempts are to go.
    FailedObjects(JobId),
    /// The job is to be forgotten.
    Forget(JobId),
    /// An idempotency key is to be forgotten.
    Key(TenantId, String),
    /// An upload goes, unless a job names it.
    Upload(TenantId, String),
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Tenant {
    /// What it may do.
    #[n(0)]
    pub policy: TenantPolicy,
}

/// A token: what is known of it without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Token {
    /// Whose.
    #[n(0)]
    pub tenant: TenantId,
    /// SHA-256 of the secret, in hex.
    #[n(1)]
    pub secret_hash: String,
    /// May it do what only an operator may?
    #[n(2)]
    pub operator: bool,
    /// When it was made, in milliseconds since 1970; none: before level 4.
    #[n(3)]
    pub created_ms: Option<u64>,
}

/// An idempotency key.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Key {
    /// The job it made.
    #[n(0)]
    pub job: JobId,
    /// Hash of its spec.
    #[n(1)]
    pub spec_hash: String,
    /// How many tasks it has.
    #[n(2)]
    pub tasks: u32,
    /// When it is forgotten, in milliseconds since 1970.
    #[n(3)]
    pub until_ms: u64,
}

/// An uploaded file.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Upload {
    /// Until when it is kept though no job names it, in milliseconds since 1970.
    #[n(0)]
    pub until_ms: u64,
    /// Jobs that name it and have not been forgotten.
    #[n(1)]
    pub jobs: BTreeSet<JobId>,
    /// Its day is over.
    #[n(2)]
    pub expired: bool,
    /// Its object is to be deleted.
    #[n(3)]
    pub going: bool,
}

/// The small, fixed part of the state; stored with every batch.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Head {
    /// Sequence of the last record that was applied.
    #[n(0)]
    pub sequence: u64,
    /// Time, in milliseconds since 1970. Moves only by records.
    #[n(1)]
    pub now_ms: u64,
    /// How `apply` behaves.
    #[n(2)]
    pub level: u32,
    /// Who leads.
    #[n(3)]
    pub term: Term,
    /// The leader's last round.
    #[n(4)]
    pub round: u64,
    /// Sequence of the last message on the leader's subject: the fence.
    #[n(5)]
    pub leader_sequence: u64,
    /// The leader's name.
    #[n(6)]
    pub leader: String,
    /// Ends that named an attempt which is not open: late, repeated, or of a lost worker.
    #[n(7)]
    pub stale_ends: u64,
    /// Assignments that no longer held when they were applied.
    #[n(8)]
    pub void_tasks: u64,
    /// Jobs whose objects of failed attempts are to be deleted.
    #[n(9)]
    pub sweep: BTreeSet<JobId>,
    /// Jobs to be forgotten, once their objects are gone.
    #[n(10)]
    pub forget: BTreeSet<JobId>,
    /// Jobs submitted since the last Tick. An idle log's time stands still, so their clock starts with the next Tick.
    #[n(11)]
    pub unstamped: BTreeSet<JobId>,
    /// Checkpoints that are in the bucket, by sequence, oldest first; at most [`CHECKPOINTS_KEPT`].
    #[n(12)]
    #[cbor(default)]
    pub checkpoints: Vec<u64>,
    /// Messages that were passed over, because an operator said so or no leader wrote them.
    #[n(13)]
    #[cbor(default)]
    pub skipped: BTreeSet<u64>,
    /// Volumes that were removed and whose heads do not say so yet. None: none. Since level 7.
    #[n(14)]
    pub volumes_going: Option<BTreeSet<(TenantId, VolumeId)>>,
    /// Bytes that the volumes of tenants with a limit have in the bucket, as last measured. None: never. Since level 8.
    #[n(15)]
    pub volumes_stored: Option<BTreeMap<TenantId, u64>>,
}

impl Head {
    /// A checkpoint after this record is recorded.
    pub fn checkpointed(&mut self, sequence: u64) {
        if self.checkpoints.last().is_none_or(|last| *last < sequence) {
            self.checkpoints.push(sequence);
            let old = self.checkpoints.len().saturating_sub(CHECKPOINTS_KEPT);
            self.checkpoints.drain(..old);
        }
    }
}

/// Counts `count` bundles of a tenant, or counts them off.
pub fn count_bundles(counts: &mut BTreeMap<TenantId, u32>, tenant: &TenantId, count: u32, up: bool) {
    match counts.get_mut(tenant) {
        Some(open) => {
            *open = if up { *open + count } else { open.saturating_sub(count) };
            if *open == 0 {
                counts.remove(tenant);
            }
        }
        None if up && count > 0 => _ = counts.insert(tenant.clone(), count),
        None => {}
    }
}

/// The state.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct State {
    /// The small, fixed part.
    pub head: Head,
    /// Jobs that have not ended, or still hold slots or trail something.
    pub jobs: BTreeMap<JobId, Job>,
    /// Workers that have joined and were not lost.
    pub workers: Workers,
    /// Tenants.
    pub tenants: BTreeMap<TenantId, Tenant>,
    /// Tokens, by id.
    pub tokens: BTreeMap<String, Token>,
    /// Idempotency keys.
    pub keys: BTreeMap<(TenantId, String), Key>,
    /// Uploads, by tenant and id.
    pub uploads: BTreeMap<(TenantId, String), Upload>,
    /// Volumes.
    pub volumes: Volumes,
    /// What happens when. Follows from the rest.
    pub timers: BTreeSet<(u64, Timer)>,
    /// Bundles open, by tenant; without those that have none. Follows from the jobs.
    pub tenant_bundles: BTreeMap<TenantId, u32>,
}

impl State {
    /// The job, when it is in memory and of this tenant (or the tenant is not asked for).
    #[must_use]
    pub fn job(&self, id: JobId) -> Option<&Job> {
        self.jobs.get(&id)
    }

    /// Who holds a bundle.
    #[must_use]
    pub fn holder(&self, job: &Job, index: u32) -> Option<(&WorkerId, BundleId)> {
        let open = job.open.get(&index)?;
        let holder = self.workers.iter().find(|(_, w)| w.bundles.contains_key(&open.bundle));
        holder.map(|(name, _)| (name, open.bundle))
    }

    /// Bundles open of all jobs of a tenant.
    #[must_use]
    pub fn bundles_of(&self, tenant: &TenantId) -> u32 {
        self.tenant_bundles.get(tenant).copied().unwrap_or(0)
    }

    /// Hash over all that the log decides: equal on every coordinator that applied the same records. What follows from the rest (timers,
    /// indexes, counters) is left out: tests check that it does.
    #[must_use]
    pub fn digest(&self) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new();
        let mut feed = |bytes: Vec<u8>| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(&bytes);
        };
        feed(rows::encode(&self.head));
        for job in self.jobs.values() {
            feed(rows::encode(&job.id));
            feed(rows::encode(&job.progress));
            for (number, page) in &job.pages {
                feed(rows::encode(number));
                feed(page.to_bytes());
            }
        }
        for (name, worker) in &self.workers {
            feed(rows::encode(name));
            feed(rows::encode(worker));
        }
        for ((tenant, key), entry) in &self.keys {
            feed(rows::encode(tenant));
            feed(rows::encode(key));
            feed(rows::encode(entry));
        }
        self.volumes.iter().for_each(|((t, k), v)| feed([rows::encode(t), rows::encode(k), rows::encode(v)].concat()));
        self.uploads.iter().for_each(|((t, k), v)| feed([rows::encode(t), rows::encode(k), rows::encode(v)].concat()));
        self.tenants.iter().for_each(|(k, v)| feed([rows::encode(k), rows::encode(v)].concat()));
        self.tokens.iter().for_each(|(k, v)| feed([rows::encode(k), rows::encode(v)].concat()));
        let mut digest = [0; 16];
        digest.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        digest
    }
}
