//! Records: the messages of the log, and so every fact of the control plane.
//!
//! Owns their shapes. Does not own what they do to the state: that is the coordinator's `apply`.

use minicbor::{Decode, Encode};
use serde::Serialize;

use std::collections::BTreeMap;

use crate::ids::{AttemptName, Incarnation, JobId, SnapshotId, TenantId, Term, VolumeId, WorkerId};
use crate::wire::plan::{JobPlan, SpecRef};
use crate::wire::report::Report;
use crate::wire::work::WorkerInfo;

/// One message of the log.
#[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize)]
pub enum Record {
    /// A job was submitted.
    #[n(0)]
    Submit(#[n(0)] Box<Submit>),
    /// Somebody asked for something.
    #[n(1)]
    Control(#[n(0)] Control),
    /// A coordinator began to lead.
    #[n(2)]
    Lead(#[n(0)] Lead),
    /// What the leader decided.
    #[n(3)]
    Decided(#[n(0)] Decided),
    /// What a worker reported.
    #[n(4)]
    Report(#[n(0)] Report),
}

/// Who asked.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Actor {
    /// For which tenant.
    #[n(0)]
    pub tenant: TenantId,
    /// Who: the id of a token, or `operator`.
    #[n(1)]
    pub principal: String,
    /// Names the request; the same request published twice is applied once.
    #[n(2)]
    pub request_id: String,
}

/// A job was submitted.
#[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Submit {
    /// By whom.
    #[n(0)]
    pub actor: Actor,
    /// The same key gives the same job. Unique within the tenant.
    #[n(1)]
    pub idempotency_key: String,
    /// Hash of the canonical spec: the same key with another hash is refused.
    #[n(2)]
    pub spec_hash: String,
    /// What the state machine needs.
    #[n(3)]
    pub plan: JobPlan,
    /// The spec itself.
    #[n(4)]
    pub spec: SpecRef,
    /// W3C trace context (`traceparent`) of the submit; the job's span lies below it (`wire::trace`).
    #[n(5)]
    pub trace: Option<String>,
    /// Uploads it names, which are kept as long as the job. Since level 2.
    #[n(6)]
    #[cbor(default)]
    pub uploads: Vec<String>,
}

/// Somebody asked for something.
#[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Control {
    /// Who.
    #[n(0)]
    pub actor: Actor,
    /// What.
    #[n(1)]
    pub verb: Verb,
}

/// What can be asked for.
#[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize)]
pub enum Verb {
    /// End a job. Without `stop_running`, tasks that run may end.
    #[n(0)]
    Cancel {
        /// Which.
        #[n(0)]
        job: JobId,
        /// Stop what runs?
        #[n(1)]
        stop_running: bool,
        /// Why, for people.
        #[n(2)]
        reason: String,
    },
    /// Start nothing more of a job.
    #[n(1)]
    Pause {
        /// Which.
        #[n(0)]
        job: JobId,
    },
    /// Go on.
    #[n(2)]
    Resume {
        /// Which.
        #[n(0)]
        job: JobId,
    },
    /// Open a new round for every task that ended without success.
    #[n(3)]
    Rerun {
        /// Which.
        #[n(0)]
        job: JobId,
    },
    /// Forget an ended job and delete its objects.
    #[n(4)]
    Remove {
        /// Which.
        #[n(0)]
        job: JobId,
    },
    /// Give a worker no more work, or give it work again.
    #[n(5)]
    Drain {
        /// Which.
        #[n(0)]
        worker: WorkerId,
        /// Drain, or resume?
        #[n(1)]
        on: bool,
    },
    /// Make a tenant, or change it.
    #[n(6)]
    PutTenant {
        /// Which.
        #[n(0)]
        tenant: TenantId,
        /// Its policy.
        #[n(1)]
        policy: TenantPolicy,
    },
    /// Make a token.
    #[n(7)]
    CreateToken {
        /// Its id, which is no secret.
        #[n(0)]
        id: String,
        /// Whose.
        #[n(1)]
        tenant: TenantId,
        /// SHA-256 of the secret, in hex. The secret itself is nowhere.
        #[n(2)]
        secret_hash: String,
        /// May it do what only an operator may?
        #[n(3)]
        operator: bool,
    },
    /// Make a token useless.
    #[n(8)]
    RevokeToken {
        /// Its id.
        #[n(0)]
        id: String,
    },
    /// Forget a tenant without jobs that have not ended, with all its tokens. Since level 4.
    #[n(10)]
    RemoveTenant {
        /// Which.
        #[n(0)]
        tenant: TenantId,
    },
    /// A file was uploaded. Unless a job names it, it goes after a day. Since level 2.
    #[n(9)]
    Uploaded {
        /// Its id, unique within the tenant.
        #[n(0)]
        id: String,
    },
    /// A volume was made, and gets a name that is no other's. Since level 7.
    #[n(11)]
    PutVolume {
        /// Its name.
        #[n(0)]
        name: String,
        /// Which; its head is in the bucket.
        #[n(1)]
        volume: VolumeId,
        /// Its size, in bytes.
        #[n(2)]
        size_bytes: u64,
    },
    /// Remove a volume that nobody writes, with its snapshots. Since level 7.
    #[n(12)]
    RemoveVolume {
        /// Its name.
        #[n(0)]
        name: String,
    },
    /// A snapshot was made, and gets a name among its volume's that is no other's. Since level 7.
    #[n(13)]
    PutSnapshot {
        /// The volume's name.
        #[n(0)]
        name: String,
        /// Which volume; another one may have the name by now.
        #[n(1)]
        volume: VolumeId,
        /// The snapshot's name.
        #[n(2)]
        snapshot: String,
        /// Which; its object is in the bucket.
        #[n(3)]
        id: SnapshotId,
        /// Its size, in bytes.
        #[n(4)]
        size_bytes: u64,
    },
    /// Take a snapshot's name away. What jobs have pinned stays as long as they do. Since level 7.
    #[n(14)]
    RemoveSnapshot {
        /// The volume's name.
        #[n(0)]
        name: String,
        /// The snapshot's name.
        #[n(1)]
        snapshot: String,
    },
    /// Give a volume to a person, or with `hold` false take it back. Since level 7.
    #[n(15)]
    HoldVolume {
        /// Its name.
        #[n(0)]
        name: String,
        /// Which; another one may have the name by now.
        #[n(1)]
        volume: VolumeId,
        /// Give, or take back?
        #[n(2)]
        hold: bool,
        /// Its size, in bytes, when it is taken back: a person may have grown it.
        #[n(3)]
        size_bytes: Option<u64>,
    },
    /// Let a volume grow that nobody writes. Its head says so later: `VolumeGrown`. Since level 8.
    #[n(16)]
    GrowVolume {
        /// Its name.
        #[n(0)]
        name: String,
        /// Which; another one may have the name by now.
        #[n(1)]
        volume: VolumeId,
        /// The size it is to have, in bytes.
        #[n(2)]
        size_bytes: u64,
    },
}

/// What a tenant may do.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct TenantPolicy {
    /// Share among tenants of one priority class; at least 1.
    #[n(0)]
    pub weight: u32,
    /// Most tasks in jobs that have not ended.
    #[n(1)]
    pub active_tasks_max: Option<u64>,
    /// Most jobs that have not ended.
    #[n(2)]
    pub active_jobs_max: Option<u32>,
    /// Most bundles open at once.
    #[n(3)]
    pub concurrency: Option<u32>,
    /// Highest priority class its jobs may ask for.
    #[n(4)]
    pub priority_max: i16,
    /// Most bytes of its volumes, by their sizes. Since level 8.
    #[n(5)]
    pub volume_bytes_max: Option<u64>,
    /// Most bytes of its volumes in the bucket, as collections measure them: beyond it no volume is made. Since level 8.
    #[n(6)]
    pub stored_bytes_max: Option<u64>,
}

impl Default for TenantPolicy {
    fn default() -> Self {
        Self {
            weight: 100,
            active_tasks_max: None,
            active_jobs_max: None,
            concurrency: None,
            priority_max: 100,
            volume_bytes_max: None,
            stored_bytes_max: None,
        }
    }
}

/// A coordinator began to lead.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Lead {
    /// Its term: one more than the last.
    #[n(0)]
    pub term: Term,
    /// Its name, for people.
    #[n(1)]
    pub coordinator: String,
    /// Wall clock at takeover, in milliseconds since 1970.
    #[n(2)]
    pub now_ms: u64,
}

/// What the leader decided in one round.
#[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Decided {
    /// By which leader.
    #[n(0)]
    pub term: Term,
    /// Counts its rounds; (term, round) repeated is dropped.
    #[n(1)]
    pub round: u64,
    /// Applied in order.
    #[n(2)]
    pub decisions: Vec<Decision>,
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize)]
pub enum Decision {
    /// Time moved to this, in milliseconds since 1970; due timers fire.
    #[n(0)]
    Tick(#[n(0)] u64),
    /// Bundles for workers. The place of each is part of its id.
    #[n(1)]
    Assign(#[n(0)] Vec<Assignment>),
    /// A worker came up.
    #[n(2)]
    WorkerJoined {
        /// Which.
        #[n(0)]
        worker: WorkerId,
        /// In which life.
        #[n(1)]
        incarnation: Incarnation,
        /// What it has.
        #[n(2)]
        info: WorkerInfo,
    },
    /// A worker is gone: what it held runs elsewhere.
    #[n(3)]
    WorkerLost {
        /// Which.
        #[n(0)]
        worker: WorkerId,
        /// In which life.
        #[n(1)]
        incarnation: Incarnation,
        /// Did it leave of its own will, holding nothing? What it was given meanwhile it never began.
        #[n(2)]
        left: bool,
    },
    /// A live worker received these attempts, but neither holds nor reported them.
    #[n(4)]
    AttemptsLost(#[n(0)] Vec<AttemptName>),
    /// What trails a job's end is done.
    #[n(5)]
    Done {
        /// Which job.
        #[n(0)]
        job: JobId,
        /// What is done.
        #[n(1)]
        what: Trailing,
    },
    /// From the next record on, `apply` may behave as this level says.
    #[n(6)]
    Level(#[n(0)] u32),
    /// Hash of the state after a record; whoever's state differed there stops and reloads.
    #[n(7)]
    Digest {
        /// After which record.
        #[n(0)]
        sequence: u64,
        /// The hash.
        #[n(1)]
        #[serde(serialize_with = "super::hex")]
        hash: [u8; 16],
    },
    /// A worker fails too much of what it is given, or is trusted again.
    #[n(8)]
    Quarantine {
        /// Which.
        #[n(0)]
        worker: WorkerId,
        /// In which life.
        #[n(1)]
        incarnation: Incarnation,
        /// Until when, in milliseconds since 1970; 0 ends it.
        #[n(2)]
        until_ms: u64,
    },
    /// A checkpoint of the state after this record is safe in the bucket. Since level 2.
    #[n(9)]
    Checkpointed {
        /// After which record.
        #[n(0)]
        sequence: u64,
    },
    /// An upload's object is deleted, so that the upload may be forgotten. Since level 2.
    #[n(10)]
    UploadGone {
        /// Whose.
        #[n(0)]
        tenant: TenantId,
        /// Which.
        #[n(1)]
        id: String,
    },
    /// An upload lies in the bucket that no record spoke of. It goes with the last of these jobs. Since level 3.
    #[n(11)]
    UploadFound {
        /// Whose.
        #[n(0)]
        tenant: TenantId,
        /// Which.
        #[n(1)]
        id: String,
        /// Jobs that may name it.
        #[n(2)]
        jobs: Vec<JobId>,
    },
    /// What an attempt left in a volume is what the volume is, from now on; or, with `why`, can't be. It may be written again. Since level 7.
    #[n(12)]
    VolumePromoted {
        /// Whose.
        #[n(0)]
        tenant: TenantId,
        /// Its name.
        #[n(1)]
        name: String,
        /// Which.
        #[n(2)]
        volume: VolumeId,
        /// The generation it has now, or was to have.
        #[n(3)]
        generation: u64,
        /// Why it is not so.
        #[n(4)]
        why: Option<String>,
    },
    /// What a job's tasks read or copy in a slot is there, and safe from collection. Since level 7.
    #[n(13)]
    VolumePinned {
        /// Which job.
        #[n(0)]
        job: JobId,
        /// Which slot.
        #[n(1)]
        slot: u8,
        /// What.
        #[n(2)]
        snapshot: SnapshotId,
    },
    /// A removed volume's head says that it is gone, so that it may be forgotten. Since level 7.
    #[n(14)]
    VolumeGone {
        /// Whose.
        #[n(0)]
        tenant: TenantId,
        /// Which.
        #[n(1)]
        volume: VolumeId,
    },
    /// A volume's head has the size it was to have; or, with `why`, can't have it. It may be written again. Since level 8.
    #[n(15)]
    VolumeGrown {
        /// Whose.
        #[n(0)]
        tenant: TenantId,
        /// Its name.
        #[n(1)]
        name: String,
        /// Which.
        #[n(2)]
        volume: VolumeId,
        /// The generation it has now, or was to have.
        #[n(3)]
        generation: u64,
        /// Why it is not so.
        #[n(4)]
        why: Option<String>,
    },
    /// A collection has measured what is stored, of the tenants that have a limit: this, and nothing of others. Since level 8.
    #[n(16)]
    VolumesStored {
        /// Bytes, by tenant.
        #[n(0)]
        bytes: BTreeMap<TenantId, u64>,
    },
}

/// What trails a job's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode, Serialize)]
#[cbor(index_only)]
pub enum Trailing {
    /// The manifest of its round is in the bucket.
    #[n(0)]
    Manifest,
    /// Objects of attempts that were tried again are deleted.
    #[n(1)]
    FailedObjects,
    /// All its objects are deleted, so that the job itself may be forgotten.
    #[n(2)]
    Objects,
}

/// A bundle for a worker: tasks one slot runs one after another.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Assignment {
    /// To whom.
    #[n(0)]
    pub worker: WorkerId,
    /// In which life.
    #[n(1)]
    pub incarnation: Incarnation,
    /// Of which job.
    #[n(2)]
    pub job: JobId,
    /// Which tasks.
    #[n(3)]
    pub tasks: Vec<Run>,
}

/// Tasks `first .. first + count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Run {
    /// The first task.
    #[n(0)]
    pub first: u32,
    /// How many; at least 1.
    #[n(1)]
    pub count: u32,
}
