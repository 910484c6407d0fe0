//! A machine made ready for one attempt: unlike every other one, and with room to work.
//!
//! Owns the order: disk, resume, greeting with a nonce of its own, entropy and its proof, then clock, names and the scratch disk's mount.
//! A machine that does not confirm one of them is killed.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use minicbor::bytes::ByteArray;
use volley_jobspecs::wire::guest::{Dir, Furnish, Identity, Mount, User};

use super::{OUT, SCRATCH, TMP, WORK, volumes};
use crate::cgroup::Limits;
use crate::guest::{Guest, GuestError};
use crate::image::oci::Config as ImageConfig;
use crate::machines::groups::Group;
use crate::machines::{Found, Machines, ScratchDisk};
use crate::mounts::{Mounts, Plan};
use crate::prepare::InMachine;
use crate::restore::RestoreError;
use crate::standby::Standing;
use crate::template::Template;
use crate::vmm::greet::{GreetError, greet};
use crate::vmm::{Disk, Slot, Source, Vm};

/// How long the first answer may take. An emulated machine answers within half a second; many at once on a busy host take longer.
const ANSWER_WAIT: Duration = Duration::from_secs(30);
/// The kind of file system on a scratch disk, and on volumes.
pub const FILE_SYSTEM: &str = "ext4";
/// Modes: whoever the image's user is, its processes work here, and all of the machine is the task's.
const DIR_MODE: u32 = 0o777;
const TMP_MODE: u32 = 0o1777;

/// A machine that is ready.
#[derive(Debug)]
pub struct Ready {
    /// Before `vm`: the session ends before its machine.
    pub guest: Arc<Guest>,
    /// The machine.
    pub vm: Box<dyn Vm>,
    /// Where it is on the host, with its task's limits.
    pub group: Group,
    /// Whose the task's directories are; root's when none.
    pub owner: Option<(u32, u32)>,
    /// As whom the task runs; as root when none.
    pub user: Option<User>,
    /// The image's words about its programs.
    pub image: ImageConfig,
    /// Size of the scratch disk.
    pub scratch_bytes: u64,
    /// What it was restored from. It maps that, which counts as long as the machine is there.
    pub template: Arc<Template>,
}

/// Where a machine is made ready for its task.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// What it needs to know.
    pub inside: &'a InMachine,
    /// Size of its disk, if the task says one.
    pub disk: Option<u64>,
    /// What it may use of its host.
    pub limits: Limits,
    /// The volumes it gets.
    pub volumes: &'a [Plan],
}

/// Makes one: one that waits if one does, else a new one. When one that waited turns out to be of no use, a new one is made.
///
/// # Errors
/// [`RestoreError`]; the machine is gone.
pub async fn make(machines: &Machines, found: &Found, place: &Place<'_>, mounts: &mut Mounts) -> Result<Ready, RestoreError> {
    let ready = make_one(machines, found, place, mounts).await;
    machines.standby.refill();
    ready
}

async fn make_one(machines: &Machines, found: &Found, place: &Place<'_>, mounts: &mut Mounts) -> Result<Ready, RestoreError> {
    let disk = place.disk.unwrap_or(volley_jobspecs::machine::DISK_BYTES_DEFAULT);
    if let Some(standing) = machines.standby.take(&found.template) {
        match confirm(machines, standing, found, place, machines.scratch.make(disk).await?, mounts).await {
            Ok(ready) => return Ok(ready),
            // Another machine would not have them either.
            Err(why @ RestoreError::Mounts(_)) => return Err(why),
            Err(why) => tracing::warn!("a machine that waited is of no use: {}; another is made", crate::chain(&why)),
        }
    }
    let restored = Standing::restore(&*machines.vmm, &machines.groups, &found.template);
    let (scratch, standing) = tokio::join!(machines.scratch.make(disk), restored);
    confirm(machines, standing?, found, place, scratch?, mounts).await
}

/// Has one become ready, within its limits; else nothing is left of it.
async fn confirm(
    machines: &Machines,
    standing: Standing,
    found: &Found,
    place: &Place<'_>,
    scratch: ScratchDisk,
    mounts: &mut Mounts,
) -> Result<Ready, RestoreError> {
    let Standing { mut vm, mut group } = standing;
    let confirmed = match group.limit(place.limits) {
        Ok(()) => confirm_it(machines, &mut *vm, found, place, scratch, mounts).await,
        Err(why) => Err(why.into()),
    };
    match confirmed {
        Ok(Confirmed { guest, owner, user, scratch_bytes }) => {
            let (image, template) = (found.image.clone(), found.template.clone());
            Ok(Ready { guest: Arc::new(guest), vm, group, owner, user, image, scratch_bytes, template })
        }
        Err(why) => {
            let killed_at = group.killed_at();
            Standing { vm, group }.end().await;
            Err(killed_at.map_or(why, |bytes| RestoreError::HostMemory { bytes }))
        }
    }
}

/// What is known of a machine that is ready.
struct Confirmed {
    guest: Guest,
    owner: Option<(u32, u32)>,
    user: Option<User>,
    scratch_bytes: u64,
}

async fn confirm_it(
    machines: &Machines,
    vm: &mut dyn Vm,
    found: &Found,
    place: &Place<'_>,
    mut scratch: ScratchDisk,
    mounts: &mut Mounts,
) -> Result<Confirmed, RestoreError> {
    let (bytes, mut laps) = (scratch.bytes, Laps::begin());
    if let Some(file) = scratch.file.take() {
        vm.swap(Slot::SCRATCH, Disk { source: Source::File(file), bytes }).await?;
    }
    // The machine holds it; its name is not needed any more.
    drop(scratch);
    volumes::plug(machines, vm, place.volumes, mounts).await?;
    laps.end();
    vm.resume().await?;
    let guest = greeted(machines, vm).await?;
    laps.end();
    let proof = guest.reseed(random()?).await?;
    laps.end();
    if !machines.is_fresh(proof) {
        return Err(RestoreError::NotUnique);
    }
    let user = Some(found.image.user.clone()).filter(|user| !user.is_empty()).map(User::Named);
    let identity = Identity {
        hostname: Some(place.inside.hostname.clone()),
        machine_id: Some(ByteArray::from(random()?)),
        boot_id: Some(ByteArray::from(uuid(random()?))),
    };
    let (_before, (), owner) =
        futures::try_join!(guest.set_clock(now()), guest.set_identity(identity), guest.furnish(furniture(machines, bytes, user.clone())))?;
    laps.end();
    tracing::debug!(swap_greet_reseed_furnish_us = ?laps.us, "a machine is ready");
    Ok(Confirmed { guest, owner, user, scratch_bytes: bytes })
}

/// How long each step took, in microseconds.
struct Laps {
    last: Instant,
    us: Vec<u128>,
}

impl Laps {
    fn begin() -> Self {
        Self { last: Instant::now(), us: Vec::new() }
    }

    fn end(&mut self) {
        self.us.push(self.last.elapsed().as_micros());
        self.last = Instant::now();
    }
}

/// Begins the session.
async fn greeted(machines: &Machines, vm: &dyn Vm) -> Result<Guest, RestoreError> {
    let greeted = greet(vm, machines.vmm.capabilities(), true, tokio::time::Instant::now() + ANSWER_WAIT).await;
    let (guest, hello) = greeted.map_err(|why| match why {
        GreetError::Vmm(why) => RestoreError::Vmm(why),
        GreetError::Guest(why) => RestoreError::Guest(why),
        GreetError::Random(why) => RestoreError::Random(why),
    })?;
    if !hello.reseed_due {
        return Err(RestoreError::Guest(GuestError::Nonsense { what: "a session that begins with a reseed" }));
    }
    Ok(guest)
}

fn furniture(machines: &Machines, bytes: u64, user: Option<User>) -> Furnish {
    let disk = Slot::SCRATCH.disk(machines.vmm.capabilities());
    let mount = Mount { disk, bytes, fs: FILE_SYSTEM.to_owned(), target: SCRATCH.to_owned(), read_only: false, owner: None, grow: false };
    let dir = |path: &str, mode, also: Option<&str>| {
        let name = path.rsplit('/').next().unwrap_or_default().to_owned();
        Dir { name, mode, also: also.map(str::to_owned) }
    };
    Furnish { mount, dirs: vec![dir(WORK, DIR_MODE, None), dir(OUT, DIR_MODE, None), dir(TMP, TMP_MODE, Some(TMP))], user }
}

/// Fresh bytes of the host's generator.
fn random<const N: usize>() -> Result<[u8; N], RestoreError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| RestoreError::Random(e.to_string()))?;
    Ok(bytes)
}

/// Random bytes as a version 4 UUID, which the kernel's boot id is: RFC 9562, 5.4.
fn uuid(mut bytes: [u8; 16]) -> [u8; 16] {
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    bytes
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    u64::try_from(since).unwrap_or(u64::MAX)
}
