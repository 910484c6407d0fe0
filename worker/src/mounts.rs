//! The volumes of one attempt: from what its task says to open ones, and from its end to what its report says of them.
//!
//! Owns which volumes an attempt opens and how each is shown to it, the limits on how long that may take, and what becomes of each at the end: what was
//! written is committed, a clone is kept, everything else is let go. Does not own a volume's bytes or how it is served (`volumes`), how a tier shows
//! what is mounted (`runtime`, `spawner/mounts`), nor when an attempt ends (`executor`).

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{select_all, try_join_all};
use tokio::sync::watch;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, TenantId};
use volley_jobspecs::resolve::ResolvedTask;
use volley_jobspecs::spec::volumes::{parse_mode, parse_owner};
use volley_jobspecs::spec::{Access, Flush, KeepClone, KeepWhen, VolumeMount};
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::volume::{Given, Kept, Left, made_by};
use volley_volume::format::head::FlushMode;

use crate::guest::GuestError;
use crate::job::Job;
use crate::spawner::mounts;
use crate::spawner::proto::ShowMount;
use crate::volumes::{OpenVolume, Show, Top, VolumeError, Volumes, Want, What};

/// How long the volumes of an attempt may take to be open, beside `timeouts.start`: an attach takes a handful of requests, and a log that is found after a
/// crash is read at some hundred megabytes a second.
pub const OPEN_WAIT: Duration = Duration::from_secs(180);
/// How long what was written may take to be committed, and clones to be kept: a clone is uploaded whole then.
pub const FINISH_WAIT: Duration = Duration::from_secs(1_800);
/// How long letting go is waited for, before it goes on in the background.
const FORGET_WAIT: Duration = Duration::from_secs(30);
/// What volumes are mounted with on a host.
const DEVICES: [&str; 2] = ["/dev/fuse", "/dev/loop-control"];
/// Mode of the top directory of a volume that is made, unless its task says another.
const MODE_DEFAULT: u32 = 0o755;

/// Users or groups: on a volume, and on the host.
pub type Ids = Vec<(u32, u32)>;

/// Why an attempt does not have its volumes, or what was written on them is not kept.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// Without a key, or without root.
    #[error("this worker can't have volumes: {0}")]
    Off(String),
    /// The coordinator did not say that it may write one.
    #[error("volume {name} was not given to this try; its coordinator or this worker is of an older build")]
    NotGiven {
        /// Which.
        name: String,
    },
    /// One can't be had.
    #[error("volume {name}: {why}")]
    Volume {
        /// Which.
        name: String,
        /// Why.
        why: VolumeError,
    },
    /// They took too long.
    #[error("{what} took longer than {} s", .after.as_secs())]
    Slow {
        /// What.
        what: &'static str,
        /// How long it was waited for.
        after: Duration,
    },
    /// One can't be shown to its task.
    #[error("showing volume {name} at {path}: {why}")]
    Show {
        /// Which.
        name: String,
        /// Where.
        path: String,
        /// What is in the way.
        why: String,
    },
    /// The machine can't use it, or does not let go of it.
    #[error("volume {name}: {what}: {why}")]
    Guest {
        /// Which.
        name: String,
        /// What was asked.
        what: &'static str,
        /// What it said.
        why: GuestError,
    },
}

impl MountError {
    /// What it means for the task.
    #[must_use]
    pub fn class(&self) -> FailureClass {
        match self {
            Self::Volume { why, .. } => why.class(),
            Self::Off(_) | Self::NotGiven { .. } | Self::Slow { .. } | Self::Show { .. } | Self::Guest { .. } => {
                FailureClass::StorageFailed
            }
        }
    }

    /// Does it say nothing of this worker?
    #[must_use]
    pub fn is_blameless(&self) -> bool {
        match self {
            Self::Volume { why, .. } => why.blameless(),
            // What is at the place where it is shown, and whether its machine lets go of it, is its tenant's.
            Self::NotGiven { .. } | Self::Slow { .. } | Self::Show { .. } | Self::Guest { .. } => true,
            Self::Off(_) => false,
        }
    }

    fn show(plan: &Plan, why: &dyn std::fmt::Display) -> Self {
        Self::Show { name: plan.name.clone(), path: plan.path.clone(), why: why.to_string() }
    }
}

/// What an attempt wants in one slot.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The attempt.
    pub attempt: AttemptName,
    /// Whose it is.
    pub tenant: TenantId,
    /// The slot.
    pub slot: u8,
    /// The volume's name.
    pub name: String,
    /// Where it is shown.
    pub path: String,
    /// Can it be written?
    pub read_only: bool,
    /// Which bytes.
    pub what: What,
    /// At least so many bytes.
    pub size_bytes: Option<u64>,
    /// What a flush promises.
    pub flush: FlushMode,
    /// Who owns the top directory of a file system that is made, if the task says so.
    pub owner: Option<(u32, u32)>,
    /// Its mode.
    pub mode: u32,
    /// Whether it stays.
    pub keep: Option<KeepClone>,
}

impl Plan {
    fn new(job: &Job, attempt: &AttemptName, given: &[Given], slot: u8, mount: &VolumeMount) -> Result<Self, MountError> {
        let not_given = || MountError::NotGiven { name: mount.volume.clone() };
        let what = match mount.access {
            Access::Rw => {
                let given = given.iter().find(|given| (given.index, given.slot) == (attempt.index, slot)).ok_or_else(not_given)?;
                What::Write { volume: given.volume, generation: given.generation }
            }
            Access::Ro | Access::Clone => {
                let (_, snapshot) = job.pins.iter().find(|(pinned, _)| *pinned == slot).ok_or_else(not_given)?;
                What::Copy { snapshot: *snapshot, volume: made_by(attempt, slot) }
            }
        };
        Ok(Self {
            attempt: *attempt,
            tenant: job.tenant.clone(),
            slot,
            name: mount.volume.clone(),
            path: mount.path.clone(),
            read_only: mount.access == Access::Ro,
            what,
            size_bytes: mount.size.map(|size| size.0),
            flush: match mount.flush {
                Some(Flush::None) => FlushMode::None,
                Some(Flush::Local) | None => FlushMode::Local,
                Some(Flush::S3) => FlushMode::S3,
            },
            owner: mount.owner.as_deref().and_then(parse_owner),
            mode: mount.mode.as_deref().and_then(parse_mode).unwrap_or(MODE_DEFAULT),
            keep: mount.keep.clone(),
        })
    }

    /// `who`: to whom the top directory of a new file system belongs, if the task names nobody.
    fn want(&self, show: Show, who: (u32, u32)) -> Want {
        let (uid, gid) = self.owner.unwrap_or(who);
        Want {
            name: self.attempt,
            slot: self.slot,
            tenant: self.tenant.clone(),
            what: self.what,
            size_bytes: self.size_bytes,
            flush: self.flush,
            top: Top { uid, gid, mode: self.mode },
            show,
        }
    }

    /// What becomes of it at the end.
    #[must_use]
    pub fn fate(&self, end: End) -> Fate {
        let keeps = |when| self.keep.as_ref().is_some_and(|keep| keep.when == when);
        match (&self.what, end) {
            (What::Write { .. }, End::Succeeded) => Fate::Committed,
            (What::Copy { .. }, End::Succeeded) if keeps(KeepWhen::OnSuccess) || keeps(KeepWhen::Always) => Fate::Kept,
            (What::Copy { .. }, End::Failed) if keeps(KeepWhen::Always) => Fate::Kept,
            (What::Write { .. } | What::Copy { .. }, _) => Fate::Forgotten,
        }
    }
}

/// How an attempt ended, as far as its volumes are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Well, so far: if what it wrote is kept, it is a success.
    Succeeded,
    /// With a verdict on the task, in a machine and on storage that were sound.
    Failed,
    /// Otherwise.
    Unsound,
}

/// What becomes of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// What was written is committed and reported.
    Committed,
    /// A clone becomes a volume.
    Kept,
    /// Nothing of it is wanted.
    Forgotten,
}

/// What keeps a worker that offers these tiers from having volumes at all, if anything.
#[must_use]
pub fn obstacle(tiers: &[Isolation]) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("it does not run as root, which mounting and handing over volumes takes; run it as root".to_owned());
    }
    let on_host = tiers.iter().any(|tier| matches!(tier, Isolation::Process | Isolation::Container));
    let missing = DEVICES.into_iter().find(|device| on_host && !std::path::Path::new(device).exists());
    missing.map(|device| format!("this host has no {device}, which volumes of processes and containers are mounted with; load its module"))
}

/// What an attempt wants, by slot.
///
/// # Errors
/// [`MountError::NotGiven`].
pub fn plan_of(job: &Job, attempt: &AttemptName, given: &[Given], task: &ResolvedTask) -> Result<Vec<Plan>, MountError> {
    (0..).zip(&task.volumes).map(|(slot, mount)| Plan::new(job, attempt, given, slot, mount)).collect()
}

/// A volume that is open.
#[derive(Debug)]
pub struct Attached {
    /// What was wanted.
    pub plan: Plan,
    /// What there is.
    pub volume: OpenVolume,
}

/// The volumes of a slot's attempt. Dropped, they are let go in the background.
#[derive(Debug)]
pub struct Mounts {
    volumes: Result<Arc<Volumes>, Arc<str>>,
    open: Vec<Attached>,
    /// Are some being opened?
    opening: watch::Sender<bool>,
}

impl Mounts {
    /// A slot without any, on a worker that has these, or none for this reason.
    #[must_use]
    pub fn new(volumes: Result<Arc<Volumes>, Arc<str>>) -> Self {
        Self { volumes, open: Vec::new(), opening: watch::Sender::new(false) }
    }

    /// A slot that never has any.
    #[must_use]
    pub fn none() -> Self {
        Self::new(Err("it was not told of any".into()))
    }

    /// Whether some are being opened, as it changes.
    #[must_use]
    pub fn opening(&self) -> watch::Receiver<bool> {
        self.opening.subscribe()
    }

    /// Those that are open.
    #[must_use]
    pub fn open_ones(&self) -> &[Attached] {
        &self.open
    }

    /// Is nothing open?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Opens all that an attempt wants. `show`: how each is shown; `who`: to whom new file systems belong if the task names nobody.
    ///
    /// # Errors
    /// [`MountError`]; nothing is open then.
    pub async fn open(&mut self, plans: &[Plan], who: (u32, u32), show: impl Fn(&Plan) -> Show) -> Result<(), MountError> {
        if plans.is_empty() {
            return Ok(());
        }
        // One of an attempt that was given up while it opened its volumes.
        self.forget().await;
        let volumes = self.volumes.clone().map_err(|why| MountError::Off(why.to_string()))?;
        let open = plans.iter().map(|plan| {
            let opened = volumes.open(plan.want(show(plan), who));
            async move {
                match opened.await {
                    Ok(volume) => Ok(Attached { plan: plan.clone(), volume }),
                    Err(why) => Err(MountError::Volume { name: plan.name.clone(), why }),
                }
            }
        });
        let opening = Opening::begin(&self.opening);
        let all = tokio::time::timeout(OPEN_WAIT, try_join_all(open)).await;
        drop(opening);
        self.open = all.map_err(|_| MountError::Slow { what: "opening the task's volumes", after: OPEN_WAIT })??;
        Ok(())
    }

    /// Copies of what is mounted, which are nowhere yet, and what the process that shows them to the task is told of each. `users`: whose files are whose, of
    /// a volume whose top directory belongs to this user and group.
    ///
    /// # Errors
    /// [`MountError::Show`].
    pub fn copies(&self, users: impl Fn((u32, u32)) -> (Ids, Ids)) -> Result<(Vec<ShowMount>, Vec<OwnedFd>), MountError> {
        let copy = |Attached { plan, volume }: &Attached| {
            let failed = |why: std::io::Error| MountError::show(plan, &why);
            let top = std::fs::metadata(volume.dir()).map_err(failed)?;
            let (users, groups) = users((top.uid(), top.gid()));
            let shown = ShowMount { path: plan.path.clone(), read_only: plan.read_only, users, groups };
            Ok((shown, mounts::copy_of(volume.dir()).map_err(failed)?))
        };
        let all: Result<Vec<_>, MountError> = self.open.iter().map(copy).collect();
        Ok(all?.into_iter().unzip())
    }

    /// Waits until one of them takes nothing more. Never, where there are none.
    pub async fn failed(&self) -> MountError {
        if self.open.is_empty() {
            return std::future::pending().await;
        }
        let failed = self.open.iter().map(|one| async { (one.plan.name.clone(), one.volume.failed().await) }.boxed());
        let ((name, why), ..) = select_all(failed).await;
        MountError::Volume { name, why }
    }

    /// Does anything become of them at such an end?
    #[must_use]
    pub fn wants(&self, end: End) -> bool {
        self.open.iter().any(|one| one.plan.fate(end) != Fate::Forgotten)
    }

    /// Does with each what its fate is. Nobody uses any of them any more. What is left in those that were written, and clones that are kept: of all of
    /// them, or of none.
    ///
    /// # Errors
    /// [`MountError`]: something is not kept. All are let go, but what was kept already can't be taken back: nobody names it.
    pub async fn end(&mut self, end: End) -> Result<(Vec<Left>, Vec<Kept>), MountError> {
        let ends = std::mem::take(&mut self.open).into_iter().map(|one| end_one(one, end));
        let all = tokio::time::timeout(FINISH_WAIT, try_join_all(ends)).await;
        let all = all.map_err(|_| MountError::Slow { what: "committing what was written on the task's volumes", after: FINISH_WAIT })??;
        let (left, kept): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        Ok((left.into_iter().flatten().collect(), kept.into_iter().flatten().collect()))
    }

    /// Lets go of all of them. What takes long goes on in the background.
    pub async fn forget(&mut self) {
        let all = std::mem::take(&mut self.open).into_iter().map(|one| one.volume.forget());
        if tokio::time::timeout(FORGET_WAIT, futures::future::join_all(all)).await.is_err() {
            tracing::warn!("letting go of a task's volumes takes longer than {} s", FORGET_WAIT.as_secs());
        }
    }
}

/// Says that volumes are being opened, until this goes.
struct Opening<'a>(&'a watch::Sender<bool>);

impl<'a> Opening<'a> {
    fn begin(told: &'a watch::Sender<bool>) -> Self {
        told.send_replace(true);
        Self(told)
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

async fn end_one(one: Attached, end: End) -> Result<(Option<Left>, Option<Kept>), MountError> {
    let Attached { plan, volume } = one;
    let failed = |why| MountError::Volume { name: plan.name.clone(), why };
    match plan.fate(end) {
        Fate::Committed => Ok((Some(volume.finish().await.map_err(failed)?), None)),
        Fate::Kept => {
            let size_bytes = volume.keep().await.map_err(failed)?;
            let name = plan.keep.as_ref().map(|keep| keep.name.clone()).unwrap_or_default();
            Ok((None, Some(Kept { slot: plan.slot, volume: made_by(&plan.attempt, plan.slot), name, size_bytes })))
        }
        Fate::Forgotten => {
            volume.forget().await;
            Ok((None, None))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use volley_jobspecs::ids::{JobId, SnapshotId, VolumeId};
    use volley_jobspecs::wire::plan::SpecRef;
    use volley_jobspecs::wire::volume::Pin;
    use volley_jobspecs::wire::work::JobForWorker;

    use super::*;

    fn attempt() -> AttemptName {
        AttemptName { job: JobId(1), stage: 0, index: 1, number: 2, sequence: 9 }
    }

    /// A job with these volumes and pins.
    fn found(volumes: serde_json::Value, pins: Vec<(u8, SnapshotId)>) -> JobForWorker {
        let task = json!({ "isolation": "process", "command": "x", "volumes": volumes });
        let spec = json!({ "version": "volley/v1", "name": "n", "items": { "count": 3 }, "task": task }).to_string();
        let features = volley_jobspecs::validate::Features::all();
        let valid = volley_jobspecs::parse::parse_and_validate(spec.as_bytes(), &features).unwrap_or_else(|e| panic!("{e}"));
        let plan = volley_jobspecs::plan::plan(&valid, 3);
        JobForWorker {
            job: JobId(1),
            tenant: "t".parse().unwrap_or_else(|e| panic!("{e}")),
            plan,
            spec: SpecRef::Inline(spec.into_bytes().into()),
            trace: None,
            pins: pins.into_iter().map(|(slot, id)| Pin { slot, volume: VolumeId([0; 16]), snapshot: Some(id), held: true }).collect(),
        }
    }

    /// What an attempt of such a job plans, with these rights.
    fn planned(volumes: serde_json::Value, pins: Vec<(u8, SnapshotId)>, given: &[Given]) -> Result<Vec<Plan>, MountError> {
        let job = Job::read(found(volumes, pins), None).unwrap_or_else(|e| panic!("{e}"));
        let values = volley_jobspecs::template::Values { item: &json!(7), index: 1, job: "j1", attempt: 2 };
        let task = job.template.as_ref().map(|template| template.resolve(&values)).unwrap_or_else(|| panic!("a task"));
        plan_of(&job, &attempt(), given, &task.unwrap_or_else(|e| panic!("{e}")))
    }

    #[test]
    fn an_attempt_plans_what_it_was_given_and_what_was_pinned() {
        let volumes = json!([
            { "volume": "state-${index}", "path": "a", "access": "rw", "size": "1MiB", "owner": "5:6", "mode": "0700", "flush": "s3" },
            { "volume": "data@x", "path": "b" },
            { "volume": "data", "path": "c", "access": "clone", "keep": { "name": "kept-${index}-${item}" } },
        ]);
        let pins = vec![(1, SnapshotId([1; 16])), (2, SnapshotId([2; 16]))];
        let given = |index, slot| Given { index, slot, volume: VolumeId([4; 16]), generation: 3 };
        let plans = planned(volumes.clone(), pins.clone(), &[given(0, 0), given(1, 0)]).unwrap_or_else(|e| panic!("{e}"));
        let [rw, ro, clone] = plans.as_slice() else { panic!("{plans:?}") };
        assert_eq!((rw.name.as_str(), rw.read_only, rw.size_bytes, rw.flush), ("state-1", false, Some(1 << 20), FlushMode::S3));
        assert_eq!((rw.owner, rw.mode, rw.what), (Some((5, 6)), 0o700, What::Write { volume: VolumeId([4; 16]), generation: 3 }));
        assert_eq!((ro.read_only, ro.what), (true, What::Copy { snapshot: SnapshotId([1; 16]), volume: made_by(&attempt(), 1) }));
        assert_eq!((clone.read_only, clone.mode), (false, MODE_DEFAULT));
        assert_eq!(clone.keep.as_ref().map(|keep| keep.name.as_str()), Some("kept-1-7"));
        let want = clone.want(Show::Mount { read_only: false }, (8, 9));
        assert_eq!((want.slot, want.top), (2, Top { uid: 8, gid: 9, mode: MODE_DEFAULT }));
        assert!(matches!(planned(volumes.clone(), pins, &[given(0, 0)]), Err(MountError::NotGiven { name }) if name == "state-1"));
        let unpinned = found(volumes, vec![(1, SnapshotId([1; 16]))]);
        assert!(matches!(Job::read(unpinned, None), Err(crate::job::JobError::Unpinned(JobId(1)))), "asked for again");
    }

    #[test]
    fn only_a_success_commits_and_only_what_is_sound_is_kept() {
        let fates = |volume: serde_json::Value| {
            let given = [Given { index: 1, slot: 0, volume: VolumeId([4; 16]), generation: 3 }];
            let plans = planned(json!([volume]), vec![(0, SnapshotId([1; 16]))], &given).unwrap_or_else(|e| panic!("{e}"));
            [End::Succeeded, End::Failed, End::Unsound].map(|end| plans[0].fate(end))
        };
        let clone = |when: &str| json!({ "volume": "v", "path": "a", "access": "clone", "keep": { "name": "k-${index}-${attempt}", "when": when } });
        use Fate::{Committed, Forgotten, Kept};
        assert_eq!(fates(json!({ "volume": "v", "path": "a", "access": "rw" })), [Committed, Forgotten, Forgotten]);
        assert_eq!(fates(json!({ "volume": "v", "path": "a" })), [Forgotten; 3]);
        assert_eq!(fates(json!({ "volume": "v", "path": "a", "access": "clone" })), [Forgotten; 3]);
        assert_eq!(fates(clone("never")), [Forgotten; 3]);
        assert_eq!(fates(clone("onSuccess")), [Kept, Forgotten, Forgotten]);
        assert_eq!(fates(clone("always")), [Kept, Kept, Forgotten]);
    }

    #[tokio::test]
    async fn a_worker_without_volumes_says_why() {
        let given = [Given { index: 1, slot: 0, volume: VolumeId([4; 16]), generation: 3 }];
        let plans = planned(json!([{ "volume": "v", "path": "a", "access": "rw" }]), Vec::new(), &given).unwrap_or_else(|e| panic!("{e}"));
        let mut mounts = Mounts::new(Err("it has no key".into()));
        let why = mounts.open(&plans, (0, 0), |_| Show::Mount { read_only: false }).await.expect_err("there are none");
        assert_eq!((why.class(), why.to_string().as_str()), (FailureClass::StorageFailed, "this worker can't have volumes: it has no key"));
        assert!(mounts.open(&[], (0, 0), |_| Show::Mount { read_only: false }).await.is_ok(), "a task without volumes needs none");
        assert!(!*mounts.opening().borrow() && mounts.is_empty());
    }
}
