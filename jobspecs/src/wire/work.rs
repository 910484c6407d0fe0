//! What leader and workers say to each other over core NATS: beats, work messages, and requests for a job's spec.
//!
//! Owns their shapes. None of them is a fact: each may be lost, repeated or late, and reconciliation makes up for it.

use std::collections::BTreeMap;

use minicbor::{Decode, Encode};
use serde::Serialize;

use crate::ids::{AttemptName, BundleId, Incarnation, JobId, TenantId, Term, WorkerId};
use crate::wire::plan::{Isolation, JobPlan, SpecRef};
use crate::wire::record::Run;
use crate::wire::volume::{Given, Pin};
use crate::wire::{LEVEL_OFFERS, LEVEL_VOLUMES};

/// A bundle that a worker holds for longer than this, in milliseconds, is not soon over, whatever its job's median says: the leader lets
/// nothing more wait behind it, and the worker hands back what did, when the leader is heard. Only a bundle that is expected to take a second
/// may wait, so it lies behind tasks that turned out long, and another worker may be idle.
pub const YOUNG_BUNDLE_MS_MAX: u64 = 5_000;

/// What a worker has. Said in every beat and recorded when it joins.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct WorkerInfo {
    /// Bundles it runs at once.
    #[n(0)]
    pub slots: u32,
    /// CPU in thousandths of a core.
    #[n(1)]
    pub cpu_milli: u32,
    /// Memory for tasks, in bytes.
    #[n(2)]
    pub memory_bytes: u64,
    /// Disk for tasks, in bytes.
    #[n(3)]
    pub disk_bytes: u64,
    /// Isolation tiers it offers.
    #[n(4)]
    pub isolation: Vec<Isolation>,
    /// Its labels.
    #[n(5)]
    pub labels: BTreeMap<String, String>,
    /// Can it enforce memory, pids and cpu limits?
    #[n(6)]
    pub limits: bool,
    /// Its build, for people.
    #[n(7)]
    pub build: String,
    /// Its host's name, for people.
    #[n(8)]
    pub host: String,
    /// Tiers that it was to offer and can't, each with the reason. Recorded since level 6.
    #[n(9)]
    #[cbor(default)]
    pub lacks: Vec<Lack>,
    /// The host's memory for machines' templates, in bytes: no template of a larger machine can be built here. None: it offers none, or does not say.
    /// Recorded since level 6.
    #[n(10)]
    pub template_bytes: Option<u64>,
    /// What its images are called, each as `image::key`, in order. None: it needs none, or does not say. Recorded since level 6.
    #[n(11)]
    pub images: Option<Vec<u64>>,
    /// Does it fetch templates that others build? Those may be of larger machines. Recorded since level 6.
    #[n(12)]
    #[cbor(default)]
    pub fetches: bool,
    /// Can its tasks have volumes? None: it does not say, and they can't. Recorded since level 7.
    #[n(13)]
    pub volumes: Option<HasVolumes>,
}

/// Can a worker's tasks have volumes?
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
pub enum HasVolumes {
    /// In every tier that it offers.
    #[n(0)]
    Yes,
    /// What is missing, and what to do. At most [`LACK_BYTES_MAX`].
    #[n(1)]
    No(#[n(0)] String),
}

impl HasVolumes {
    /// They can't, for this reason, which is made one line and cut where it is too long.
    #[must_use]
    pub fn no(why: &str) -> Self {
        Self::No(one_line(why))
    }
}

impl WorkerInfo {
    /// What of it may be recorded at this level. An older coordinator would leave the rest out, and have another state.
    #[must_use]
    pub fn at_level(&self, level: u32) -> Self {
        if level >= LEVEL_VOLUMES {
            return self.clone();
        }
        let without = Self { volumes: None, ..self.clone() };
        if level >= LEVEL_OFFERS {
            return without;
        }
        Self { lacks: Vec::new(), template_bytes: None, images: None, fetches: false, ..without }
    }

    /// Why it can't offer a tier that it was to offer.
    #[must_use]
    pub fn why_not(&self, tier: Isolation) -> Option<&str> {
        self.lacks.iter().find(|lack| lack.tier == tier).map(|lack| lack.why.as_str())
    }
}

/// Longest reason in a [`Lack`], in bytes: a line for people, which every coordinator keeps.
pub const LACK_BYTES_MAX: usize = 1_000;
/// Most names of images that a worker tells. One with more tells none, and is asked for what it may not have.
pub const IMAGES_TOLD_MAX: usize = 2_048;

/// A tier that a worker was to offer and can't.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Lack {
    /// Which.
    #[n(0)]
    pub tier: Isolation,
    /// What is missing, where it was looked for, and what to do. At most [`LACK_BYTES_MAX`].
    #[n(1)]
    pub why: String,
}

impl Lack {
    /// A tier with its reason, which is made one line and cut where it is too long.
    #[must_use]
    pub fn new(tier: Isolation, why: &str) -> Self {
        Self { tier, why: one_line(why) }
    }
}

/// A reason as one line of at most [`LACK_BYTES_MAX`].
fn one_line(why: &str) -> String {
    let mut why = why.split_whitespace().collect::<Vec<_>>().join(" ");
    if why.len() > LACK_BYTES_MAX {
        let mut end = LACK_BYTES_MAX - '…'.len_utf8();
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        why.truncate(end);
        why.push('…');
    }
    why
}

/// A worker's beat. The answer is a [`BeatAnswer`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Beat {
    /// Who.
    #[n(0)]
    pub worker: WorkerId,
    /// In which life.
    #[n(1)]
    pub incarnation: Incarnation,
    /// What it has.
    #[n(2)]
    pub info: WorkerInfo,
    /// Everything it holds, from receipt until its report is in the log.
    #[n(3)]
    pub held: Vec<Held>,
    /// The newest leader it has heard of.
    #[n(4)]
    pub term: Term,
    /// The last work message of that leader it took, 0 for none.
    #[n(5)]
    pub taken: u64,
    /// Log sequence of its last report that was acknowledged, 0 for none: what is in a report up to here is no longer held.
    #[n(6)]
    pub reported: u64,
    /// It takes nothing more and leaves when it holds nothing.
    #[n(7)]
    pub draining: bool,
    /// It holds nothing and is about to end.
    #[n(8)]
    pub leaving: bool,
    /// What its slots are at; of an older build nothing.
    #[n(9)]
    #[cbor(default)]
    pub at: Vec<At>,
    /// Machines of failed attempts that it keeps, at most [`KEPT_TOLD_MAX`]; of an older build none are told.
    #[n(10)]
    #[cbor(default)]
    pub kept: Vec<KeptMachine>,
}

/// Most kept machines that a worker tells of: each takes some hundred megabytes of its host.
pub const KEPT_TOLD_MAX: usize = 64;

/// The machine of an attempt that failed, which its worker keeps for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct KeptMachine {
    /// Whose it was.
    #[n(0)]
    pub name: AttemptName,
    /// Until when at most, in milliseconds since 1970 by its worker's clock.
    #[n(1)]
    pub until_ms: u64,
    /// What it takes of its host's memory, in bytes.
    #[n(2)]
    pub memory_bytes: u64,
}

/// What a slot is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct At {
    /// The attempt.
    #[n(0)]
    pub name: AttemptName,
    /// How far it is.
    #[n(1)]
    pub stage: AtStage,
    /// For how long, in milliseconds.
    #[n(2)]
    pub for_ms: u64,
    /// What its machine's template still needs, if that is what it waits for; of an older build nothing.
    #[n(3)]
    #[cbor(default)]
    pub template: Option<TemplateStage>,
    /// Are its volumes what it waits for: are they being opened, or what was written being committed? Of an older build nothing.
    #[n(4)]
    #[cbor(default)]
    pub volumes: bool,
}

/// What is done for a template that a machine is to be made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
#[cbor(index_only)]
pub enum TemplateStage {
    /// The worker builds it: boots a machine, warms it, saves it.
    #[n(0)]
    Building,
    /// Another worker builds it.
    #[n(1)]
    Awaited,
    /// It is fetched from the bucket.
    #[n(2)]
    Fetching,
}

impl TemplateStage {
    /// What the worker does, for people.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Building => "building template",
            Self::Awaited => "waiting for another worker to build the template",
            Self::Fetching => "fetching template",
        }
    }
}

/// How far an attempt is that has a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum AtStage {
    /// Inputs and machine are made ready.
    #[n(0)]
    Preparing,
    /// The command runs.
    #[n(1)]
    Running,
    /// Outputs and logs are kept.
    #[n(2)]
    Keeping,
}

/// What a worker holds of one bundle.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Held {
    /// Which.
    #[n(0)]
    pub bundle: BundleId,
    /// Of which job.
    #[n(1)]
    pub job: JobId,
    /// Tasks not yet reported.
    #[n(2)]
    pub tasks: Vec<Run>,
}

/// What the leader answers to a beat.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct BeatAnswer {
    /// Who leads.
    #[n(0)]
    pub term: Term,
    /// How long reports may be gathered, in milliseconds.
    #[n(1)]
    pub linger_ms: u32,
    /// Has this life of the worker been recorded as joined? Until then it gets no work.
    #[n(2)]
    pub joined: bool,
    /// Was this life declared lost? Then everything it holds is another's by now, and it must begin a new life.
    #[n(3)]
    pub lost: bool,
}

/// Work for a worker. The answer is a [`WorkAnswer`]; the same message comes again until it is answered.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct WorkMessage {
    /// For which life; another one drops it.
    #[n(0)]
    pub incarnation: Incarnation,
    /// By which leader; a message of an older one is dropped.
    #[n(1)]
    pub term: Term,
    /// Counts this leader's messages to this worker, from 1; one seen before is answered and otherwise dropped.
    #[n(2)]
    pub number: u64,
    /// What to do, in order.
    #[n(3)]
    pub orders: Vec<Order>,
}

impl WorkMessage {
    /// The job of all bundles to run, when it is one and the same: a message has room for one trace context.
    #[must_use]
    pub fn only_job(&self) -> Option<JobId> {
        let mut jobs = self.orders.iter().filter_map(|order| match order {
            Order::Run(bundle) => Some(bundle.job),
            Order::Stop { .. } | Order::HandBack { .. } | Order::Forget { .. } => None,
        });
        let first = jobs.next()?;
        jobs.all(|job| job == first).then_some(first)
    }
}

/// One order.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Order {
    /// Run a bundle. One that is held already is left alone.
    #[n(0)]
    Run(#[n(0)] Bundle),
    /// End tasks of a bundle now: TERM, grace, KILL; report each. What is not held is ignored.
    #[n(1)]
    Stop {
        /// Which bundle.
        #[n(0)]
        bundle: BundleId,
        /// Which tasks.
        #[n(1)]
        tasks: Vec<Run>,
    },
    /// Report what has not begun of these tasks as returned; leave alone what runs.
    #[n(2)]
    HandBack {
        /// Which bundle.
        #[n(0)]
        bundle: BundleId,
        /// Which tasks.
        #[n(1)]
        tasks: Vec<Run>,
    },
    /// Forget a bundle that is not open in the state: kill what runs of it and report nothing.
    #[n(3)]
    Forget {
        /// Which bundle.
        #[n(0)]
        bundle: BundleId,
    },
    // 4 stays reserved: it said that somebody watches a job, which `subjects::watch` does now. No coordinator ever sent it.
}

/// Tasks one slot runs one after another, each its own attempt.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Bundle {
    /// Its id; the sequence is part of its attempts' names.
    #[n(0)]
    pub id: BundleId,
    /// Of which job.
    #[n(1)]
    pub job: JobId,
    /// Which tasks, each with the number of this try.
    #[n(2)]
    pub tasks: Vec<Try>,
    /// Volumes that they may write. Since level 7.
    #[n(3)]
    #[cbor(default)]
    pub volumes: Vec<Given>,
}

/// Tasks `first .. first + count`, all in their `number`-th try.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct Try {
    /// The first task.
    #[n(0)]
    pub first: u32,
    /// How many; at least 1.
    #[n(1)]
    pub count: u32,
    /// Which try of each of them, counted from 1.
    #[n(2)]
    pub number: u32,
}

/// What a worker answers to a work message.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct WorkAnswer {
    /// Its life.
    #[n(0)]
    pub incarnation: Incarnation,
    /// The newest leader it has heard of: a leader that sees a higher term than its own steps down.
    #[n(1)]
    pub term: Term,
    /// The last message of that leader it took.
    #[n(2)]
    pub taken: u64,
}

/// What a worker needs to know of a job. Answer to a request on `subjects::job`; an empty answer: no such job.
#[derive(Debug, Clone, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct JobForWorker {
    /// Which.
    #[n(0)]
    pub job: JobId,
    /// Whose.
    #[n(1)]
    pub tenant: TenantId,
    /// Deadlines, limits, task count.
    #[n(2)]
    pub plan: JobPlan,
    /// The canonical JSON spec.
    #[n(3)]
    pub spec: SpecRef,
    /// W3C trace context (`traceparent`) of the job; its attempts' spans lie below it (`wire::trace`).
    #[n(4)]
    pub trace: Option<String>,
    /// What its tasks read or copy. Since level 7.
    #[n(5)]
    #[cbor(default)]
    pub pins: Vec<Pin>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, encode};

    fn info() -> WorkerInfo {
        WorkerInfo {
            slots: 2,
            cpu_milli: 2_000,
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 30,
            isolation: vec![Isolation::Process],
            labels: BTreeMap::new(),
            limits: true,
            build: "b".into(),
            host: "h".into(),
            lacks: vec![Lack::new(Isolation::Microvm, "no QEMU")],
            template_bytes: Some(1 << 30),
            images: Some(vec![1, 2]),
            fetches: false,
            volumes: Some(HasVolumes::no("no\nkey")),
        }
    }

    #[test]
    fn a_reason_is_one_line_and_not_too_long() {
        let lack = Lack::new(Isolation::Microvm, " no\nQEMU:  here ");
        assert_eq!(lack.why, "no QEMU: here");
        let long = Lack::new(Isolation::Microvm, &"é".repeat(LACK_BYTES_MAX));
        assert!(long.why.len() <= LACK_BYTES_MAX && long.why.ends_with('…'), "{}", long.why.len());
    }

    #[test]
    fn what_a_worker_says_comes_back_and_an_older_level_records_less() {
        let said = info();
        assert_eq!(decode::<WorkerInfo>("info", &encode(&said)).ok(), Some(said.clone()));
        assert_eq!((said.why_not(Isolation::Microvm), said.why_not(Isolation::Container)), (Some("no QEMU"), None));
        assert_eq!(said.at_level(LEVEL_VOLUMES), said);
        assert_eq!(said.at_level(LEVEL_OFFERS), WorkerInfo { volumes: None, ..said.clone() });
        let older = said.at_level(LEVEL_OFFERS - 1);
        assert_eq!((older.lacks.len(), older.template_bytes, &older.images, older.slots), (0, None, &None, 2));

        /// As it was before level 6.
        #[derive(Debug, PartialEq, Encode, Decode)]
        #[cbor(map)]
        struct Old {
            #[n(0)]
            slots: u32,
            #[n(1)]
            cpu_milli: u32,
            #[n(2)]
            memory_bytes: u64,
            #[n(3)]
            disk_bytes: u64,
            #[n(4)]
            isolation: Vec<Isolation>,
            #[n(5)]
            labels: BTreeMap<String, String>,
            #[n(6)]
            limits: bool,
            #[n(7)]
            build: String,
            #[n(8)]
            host: String,
        }
        let old = decode::<Old>("info", &encode(&said)).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(decode::<WorkerInfo>("info", &encode(&old)).ok(), Some(older));
    }
}
