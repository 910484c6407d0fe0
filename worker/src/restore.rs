//! Stage *restore*: a machine made ready for one attempt.
//!
//! Owns the stage's errors and their classes. What "ready" means is the tier's (`runtime`).

use std::io;
use std::path::PathBuf;

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::image;
use volley_jobspecs::wire::guest::RefusalKind;
use volley_jobspecs::wire::report::Cause;

use crate::cgroup::CgroupError;
use crate::containers::RootError;
use crate::guest::{FilesError, GuestError};
use crate::image::find::FindError;
use crate::machines::{ScratchError, TemplateError};
use crate::mounts::{MountError, Mounts};
use crate::prepare::Prepared;
use crate::runtime::Machine;
use crate::spawner::SpawnerError;
use crate::template::BuildError;
use crate::vmm::VmmError;

/// Why a machine is not ready.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The slot's helper doesn't come up.
    #[error(transparent)]
    Spawner(#[from] SpawnerError),
    /// Limits can't be set.
    #[error("setting limits: {0}")]
    Limits(#[from] CgroupError),
    /// Limits are asked for, and this worker can't enforce any.
    #[error(
        "the task asks for cpu, memory or pids limits, and this worker has no writable cgroups; run it as root or with a delegated \
         cgroup, or leave out task.resources"
    )]
    NoLimits,
    /// The slot has no such tier.
    #[error("this worker has no isolation {0:?}")]
    NoTier(&'static str),
    /// A mistake of ours.
    #[error("the task was not prepared for a machine")]
    NotPrepared,
    /// There is no image for its container.
    #[error(transparent)]
    Root(#[from] RootError),
    /// Its container's configuration can't be written.
    #[error("writing the container's configuration in {}: {source}; check the disk of the worker's directory", .dir.display())]
    Bundle {
        /// Where.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A mistake of ours.
    #[error("the slot has no user for its containers")]
    NoUser,
    /// It does not have its volumes.
    #[error(transparent)]
    Mounts(#[from] MountError),
    /// There is no template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// No machine comes up.
    #[error("restoring a machine: {0}")]
    Vmm(#[from] VmmError),
    /// No disk for it.
    #[error(transparent)]
    Scratch(#[from] ScratchError),
    /// Its agent does not confirm.
    #[error("restoring a machine: {0}; the machine was killed")]
    Guest(#[from] GuestError),
    /// It gave the same random bytes as another one.
    #[error("a restored machine gave the same random bytes as another one and was killed")]
    NotUnique,
    /// This host has no randomness.
    #[error("the system gives no random bytes: {0}")]
    Random(String),
    /// Its VMM grew beyond what is set aside for it.
    #[error("the host's kernel ended the machine, which took more than the {} MiB that are set aside for it on the host", .bytes >> 20)]
    HostMemory {
        /// The limit.
        bytes: u64,
    },
    /// Inputs do not get into it.
    #[error("copying inputs into the machine: {0}")]
    Inputs(FilesError),
    /// They are more than it has room for.
    #[error("the task's inputs do not fit onto its disk of {} MiB: {why}; raise task.resources.disk", .disk >> 20)]
    NoSpace {
        /// The disk's size in bytes.
        disk: u64,
        /// What the machine says.
        why: String,
    },
}

impl RestoreError {
    /// What it means for the task.
    #[must_use]
    pub fn class(&self) -> FailureClass {
        match self {
            Self::Template(TemplateError::Build(why)) if matches!(**why, BuildError::Away(_)) => FailureClass::StorageFailed,
            // As a container says it: another try would meet the same image.
            Self::Guest(GuestError::Refused(refusal)) if refusal.kind == RefusalKind::NoUser => FailureClass::InputMissing,
            Self::Mounts(why) => why.class(),
            // It was there, and had confirmed.
            Self::Inputs(FilesError::Guest(GuestError::NoSign { .. })) => FailureClass::GuestLost,
            // The job's own fault, on every worker: no other try, and nothing that speaks against the worker.
            Self::Template(TemplateError::Build(why)) if why.is_warm_up() => FailureClass::InputMissing,
            // The same, on this worker; the coordinator gives it to none that it knows to be too small.
            Self::Template(TemplateError::Build(why)) if matches!(**why, BuildError::TooLarge { shared: false, .. }) => {
                FailureClass::PolicyDenied
            }
            Self::Spawner(_)
            | Self::Limits(_)
            | Self::NotPrepared
            | Self::NoUser
            | Self::Root(RootError::Find(FindError::Missing { .. } | FindError::Several { .. } | FindError::Store(_)))
            | Self::Root(RootError::Disk { .. })
            | Self::Template(TemplateError::Image(FindError::Missing { .. } | FindError::Several { .. } | FindError::Store(_)))
            | Self::Template(TemplateError::Build(_))
            | Self::Vmm(_)
            | Self::Guest(_)
            | Self::NotUnique
            | Self::HostMemory { .. }
            | Self::Random(_)
            | Self::Inputs(_) => FailureClass::RestoreFailed,
            Self::Scratch(_) | Self::Bundle { .. } => FailureClass::StorageFailed,
            Self::NoLimits | Self::NoTier(_) | Self::NoSpace { .. } => FailureClass::PolicyDenied,
            // Another try would meet the same name.
            Self::Root(RootError::NoImage | RootError::NoUser { .. } | RootError::Find(FindError::Name(_)))
            | Self::Template(TemplateError::NoImage | TemplateError::Image(FindError::Name(_))) => FailureClass::InputMissing,
        }
    }
}

impl RestoreError {
    /// What kept the task from beginning, where there is more to say than its class does.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Self::Root(RootError::Find(why)) | Self::Template(TemplateError::Image(why)) => match why {
                FindError::Missing { text } => image::key(text).map(Cause::NoImage),
                FindError::Name(_) | FindError::Several { .. } => Some(Cause::NoName),
                FindError::Store(_) => None,
            },
            Self::Root(RootError::NoImage) | Self::Template(TemplateError::NoImage) => Some(Cause::NoName),
            Self::Template(TemplateError::Build(why)) => match &**why {
                BuildError::TooLarge { .. } => Some(Cause::TooLarge),
                BuildError::NoRoom(_) | BuildError::Away(_) => None,
                why if why.is_warm_up() => Some(Cause::WarmUp),
                _ => Some(Cause::Build),
            },
            _ => None,
        }
    }

    /// Does it say nothing of this worker? An image that is not here may be nowhere: one wrong name must not take the worker from others. Its
    /// tasks are tried again all the same, elsewhere first.
    #[must_use]
    pub fn is_blameless(&self) -> bool {
        match self {
            Self::Template(TemplateError::Build(why)) => why.is_blameless(),
            // What runs in a machine is its tenant's, from the image and the warm-up on, and it can do anything that a machine can: not confirm, lie, hang or end
            // its VMM, at any moment. None of it must take the worker from others. A host that can't run machines is told by what comes before a guest
            // runs: processes, files, limits.
            Self::Guest(_) | Self::Inputs(FilesError::Guest(_)) | Self::NotUnique | Self::HostMemory { .. } => true,
            Self::Vmm(why) => why.is_of_guest(),
            Self::Root(RootError::Find(why)) | Self::Template(TemplateError::Image(why)) => {
                matches!(why, FindError::Missing { .. } | FindError::Several { .. })
            }
            Self::Mounts(why) => why.is_blameless(),
            _ => false,
        }
    }
}

/// Makes `machine` ready, and opens what the task wants of volumes.
///
/// # Errors
/// [`RestoreError`].
pub async fn restore<M: Machine>(machine: &mut M, prepared: &Prepared, mounts: &mut Mounts) -> Result<(), RestoreError> {
    machine.restore(prepared, mounts).await
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::wire::guest::Refusal;

    use super::*;
    use crate::vmm::Kind;

    #[test]
    fn what_a_machine_says_does_not_speak_against_its_worker() {
        let refused = |kind| RestoreError::Guest(GuestError::Refused(Refusal::new(kind, "no".to_owned())));
        assert!(
            refused(RefusalKind::System).is_blameless() && RestoreError::Guest(GuestError::Lost("it hung up".to_owned())).is_blameless()
        );
        assert_eq!(refused(RefusalKind::System).class(), FailureClass::RestoreFailed);
        assert_eq!(refused(RefusalKind::NoUser).class(), FailureClass::InputMissing);
        let lost = || GuestError::Lost("it hung up".to_owned());
        assert!(RestoreError::NotUnique.is_blameless() && RestoreError::Inputs(FilesError::Guest(lost())).is_blameless());
        let (vmm, what) = (Kind::Qemu, "stop".to_owned());
        let ended = || VmmError::Ended { vmm, what: what.clone(), end: "exit code 0".to_owned(), said: String::new() };
        let io = || VmmError::Io { what: what.clone(), source: io::Error::other("no") };
        assert!(RestoreError::Vmm(ended()).is_blameless() && !RestoreError::Vmm(io()).is_blameless());
        let saving = |source| BuildError::Vmm { stage: "saving the machine", source, console: String::new() };
        let built = |why| RestoreError::Template(TemplateError::Build(std::sync::Arc::new(why))).is_blameless();
        assert!(built(saving(ended())) && !built(saving(io())));
        assert!(built(BuildError::Guest { stage: "the machine's boot", source: lost(), console: String::new() }));
        assert!(!RestoreError::Random(String::new()).is_blameless());
    }
}
