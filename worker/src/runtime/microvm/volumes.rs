//! A machine's volumes: put into its slots while it stands still, mounted by its agent, and written out at the end.
//!
//! Owns these steps. Does not own opening volumes or what becomes of them (`mounts`).
//!
//! A machine that has ended well is not asked to unmount: its file systems are frozen, wherever in it they are mounted. Then everything that was written
//! is on the disk and nothing more will be, also where the task mounted a volume a second time, or somebody holds a file open; and its machine is killed.

use std::time::Duration;

use volley_jobspecs::wire::guest::Mount;

use super::ready::{FILE_SYSTEM, Ready};
use crate::guest::GuestError;
use crate::machines::Machines;
use crate::mounts::{Attached, End, Fate, MountError, Mounts, Plan};
use crate::restore::RestoreError;
use crate::vmm::{Disk, Kind, Slot, Vm};
use crate::volumes::Show;

/// How long a mount may take: the journal of a writer that was killed is read again, and a large file system is grown, in a machine that may be emulated.
const MOUNT_WAIT: Duration = Duration::from_secs(180);
/// How long writing out may take: a guest may hold hundreds of megabytes that are not on its disk yet.
const SETTLE_WAIT: Duration = Duration::from_secs(300);
/// How long a machine that lives on may take to let go of a volume whose content nobody wants.
const UNMOUNT_WAIT: Duration = Duration::from_secs(15);

/// Opens volumes for this machine, which stands still, and puts them into its slots.
pub async fn plug(machines: &Machines, vm: &mut dyn Vm, plans: &[Plan], mounts: &mut Mounts) -> Result<(), RestoreError> {
    if plans.is_empty() {
        return Ok(());
    }
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // A VMM's group has its user's number.
    let (uid, gid) = vm.user().map_or(own, |user| (user, user));
    let show = match machines.vmm.capabilities().identity.vmm {
        Kind::Qemu => Show::Nbd { uid, gid },
        Kind::Firecracker => Show::File { uid, gid },
    };
    mounts.open(plans, (0, 0), |_plan| show).await?;
    for Attached { plan, volume } in mounts.open_ones() {
        let failed = |why: String| MountError::Show { name: plan.name.clone(), path: plan.path.clone(), why };
        let slot = Slot::volume(plan.slot).ok_or_else(|| failed(format!("a machine has no slot {}", plan.slot)))?;
        let source = volume.source().map_err(|e| failed(e.to_string()))?;
        vm.swap(slot, Disk { source, bytes: volume.bytes() }).await?;
    }
    Ok(())
}

/// Has a machine that runs mount them.
pub async fn mount(machines: &Machines, ready: &Ready, mounts: &Mounts) -> Result<(), MountError> {
    for Attached { plan, volume } in mounts.open_ones() {
        let Some(slot) = Slot::volume(plan.slot) else { continue };
        let mount = Mount {
            disk: slot.disk(machines.vmm.capabilities()),
            bytes: volume.bytes(),
            fs: FILE_SYSTEM.to_owned(),
            target: plan.path.clone(),
            read_only: plan.read_only,
            // Whoever runs the command is known now, and was not when the file system was made.
            owner: ready.owner.filter(|_| volume.made() && plan.owner.is_none()),
            grow: volume.grown() && !plan.read_only,
        };
        ready.guest.mount_within(mount, MOUNT_WAIT).await.map_err(|why| failed(plan, "mounting it in the machine", why))?;
    }
    Ok(())
}

/// Has everything on those that are wanted at such an end, and holds whatever would be written yet.
pub async fn settle(machines: &Machines, ready: &Ready, mounts: &Mounts, end: End) -> Result<(), MountError> {
    let wanted = mounts.open_ones().iter().filter(|one| one.plan.fate(end) != Fate::Forgotten);
    let all = wanted.filter_map(|one| Some((&one.plan, Slot::volume(one.plan.slot)?))).map(|(plan, slot)| async move {
        let settled = ready.guest.settle(slot.disk(machines.vmm.capabilities()), SETTLE_WAIT).await;
        settled.map_err(|why| failed(plan, "writing out what its task wrote", why))
    });
    futures::future::try_join_all(all).await.map(drop)
}

/// Takes them from a machine that lives on. One that is in use there stays mounted, with nothing behind it.
pub async fn unmount(ready: &Ready, mounts: &Mounts) {
    for Attached { plan, .. } in mounts.open_ones() {
        if let Err(why) = ready.guest.unmount(&plan.path, UNMOUNT_WAIT).await {
            tracing::debug!(%why, volume = plan.name, "a volume stays mounted in a machine that is kept, with nothing behind it");
        }
    }
}

fn failed(plan: &Plan, what: &'static str, why: GuestError) -> MountError {
    MountError::Guest { name: plan.name.clone(), what, why }
}
