//! The container tier: an OCI runtime of the host runs the task in its image, for code you trust not to attack a kernel.
//!
//! Owns a slot's container from the image to the runtime's start. Starting, killing and limits are the process tier's (a shim and a cgroup
//! per slot); roots are put together by the shim (`spawner/container`), configurations are written by `container/bundle`.
//!
//! **Users.** Each container has a namespace of users in which there are one or two: the image's user, who is the slot's own user on the
//! host, and root, who is the same one or nobody. So root in a container owns nothing on the host; files that a task leaves are its slot's
//! as in the process tier; and no range of users has to be set aside for each slot. The image's files show the owners that they have in the
//! image, so far as these are one of the two; those of others show as nobody's.

mod bundle;
mod seccomp;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::process::ProcessMachine;
use super::{Exit, Machine, Streams, environment};
use crate::attempt::Force;
use crate::cgroup::Cgroups;
use crate::containers::{Containers, Found, ImageDisk};
use crate::execute::ExecuteError;
use crate::mounts::Mounts;
use crate::prepare::Prepared;
use crate::restore::RestoreError;
use crate::runtime::microvm::{OUT, TMP, WORK};
use crate::spawner::Spawner;
use crate::spawner::proto::{Container, MakeShim, Reply, Spawn};
use crate::volumes::Show;
use bundle::Bundle;

/// Directories that the root has whatever the image has there: the runtime's mount points, and the task's.
const DIRS: [&str; 7] = ["/proc", "/dev", "/sys", "/tmp", "/volley", WORK, OUT];
/// Beside the containers' directory: where volumes are mounted on the host.
const VOLUMES: &str = "volumes";
/// Whom root is on the host where the image's user is another: nobody runs as it once the container is made.
const NOBODY: u32 = 65_534;
/// Descriptors of a task beside its cgroups' files: the report's pipe and three streams.
const DESCRIPTORS: usize = 4;

/// A slot of the container tier.
#[derive(Debug)]
pub struct ContainerMachine {
    containers: Arc<Containers>,
    dir: PathBuf,
    inner: ProcessMachine,
    /// The image whose disk the shim has mounted.
    disk: Option<Arc<ImageDisk>>,
    spawn: Option<(Spawn, Vec<OwnedFd>)>,
    count: u64,
}

impl ContainerMachine {
    /// A slot in which nothing ran yet.
    #[must_use]
    pub fn new(slot: u32, containers: Arc<Containers>, spawner: Spawner, cgroups: Option<Arc<Cgroups>>) -> Self {
        let dir = containers.dir.join(slot.to_string());
        let inner = ProcessMachine::for_containers(slot, spawner, cgroups, !containers.runtime.hands_over());
        let inner = inner.hiding(&containers.dir.with_file_name(VOLUMES));
        Self { containers, dir, inner, disk: None, spawn: None, count: 0 }
    }

    /// After an attempt whose end leaves the slot in doubt: nothing of it is used again.
    pub fn distrust(&mut self) {
        self.spawn = None;
        self.inner.distrust();
    }

    /// Writes the bundle, and what the shim is asked.
    fn make(&mut self, prepared: &Prepared, found: &Found) -> Result<Spawn, RestoreError> {
        let inside = prepared.inside.as_deref().ok_or(RestoreError::NotPrepared)?;
        let (uid, gid) = inside.dirs.owner().ok_or(RestoreError::NoUser)?;
        let join = self.inner.join_files();
        self.count += 1;
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        let dirs = &inside.dirs;
        let users = self::users(found.user.uid, uid);
        let groups = self::users(found.user.gid, gid);
        let bundle = Bundle {
            containers: &self.containers,
            dir: &self.dir,
            argv: &prepared.task.command,
            env: environment(inside, &found.image),
            cwd: &inside.cwd,
            user: (found.user.uid, found.user.gid),
            users: &users,
            groups: &groups,
            hostname: &inside.hostname,
            cgroups: join.len(),
        };
        bundle.write().map_err(|source| RestoreError::Bundle { dir: self.dir.clone(), source })?;
        let container = Container {
            // Its own names have addresses, as they have everywhere.
            hosts: format!("127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\t{}\n", inside.hostname),
            dir: path(self.dir.clone()),
            device: Some(found.disk.device.clone()),
            owner: (users[0].1, groups[0].1),
            users,
            groups,
            dirs: DIRS.map(str::to_owned).to_vec(),
            binds: [(dirs.work(), WORK), (dirs.out(), OUT), (dirs.tmp(), TMP)].map(|(from, to)| (path(from), to.to_owned())).to_vec(),
            join,
            reports: self.containers.runtime.hands_over(),
        };
        Ok(spawn(&self.containers, self.count, container))
    }
}

impl Machine for ContainerMachine {
    async fn restore(&mut self, prepared: &Prepared, mounts: &mut Mounts) -> Result<(), RestoreError> {
        let (containers, image) = (self.containers.clone(), prepared.task.image.clone());
        let found = tokio::task::spawn_blocking(move || containers.find(image.as_deref())).await;
        let found = found.map_err(|e| RestoreError::Bundle { dir: self.dir.clone(), source: std::io::Error::other(e) })??;
        self.inner.ready(prepared).await?;
        let who = (found.user.uid, found.user.gid);
        mounts.open(&prepared.volumes, who, |plan| Show::Mount { read_only: plan.read_only }).await?;
        let mut spawn = self.make(prepared, &found)?;
        // As the image's own files are shown: whoever has a number on a volume has it in the container.
        let whose = spawn.container.as_ref().map(|container| (container.users.clone(), container.groups.clone())).unwrap_or_default();
        let (shows, trees) = mounts.copies(|_top| whose.clone())?;
        spawn.mounts = shows;
        self.spawn = Some((spawn, trees));
        // Not before: the shim may still have the other image's disk mounted, which holds that all the same.
        self.disk = Some(found.disk);
        Ok(())
    }

    async fn start(&mut self, prepared: &Prepared) -> Result<Streams, ExecuteError> {
        let (spawn, trees) = self.spawn.take().ok_or(ExecuteError::Lost)?;
        self.inner.start_as(&spawn, prepared, &trees).await
    }

    async fn wait(&self) -> Result<Exit, ExecuteError> {
        self.inner.wait().await
    }

    async fn stop(&self, force: Force) {
        self.inner.stop(force).await;
    }
}

/// Who is who: in the container, on the host. Root comes first: the container is made as root.
fn users(inside: u32, outside: u32) -> Vec<(u32, u32)> {
    if inside == 0 { vec![(0, outside)] } else { vec![(0, NOBODY), (inside, outside)] }
}

/// What the shim is asked.
fn spawn(containers: &Containers, count: u64, container: Container) -> Spawn {
    let bytes = |text: &str| minicbor::bytes::ByteVec::from(text.as_bytes().to_vec());
    let state = format!("{}/state", container.dir);
    // Some runtimes take it for the name of an abstract socket, of which a host has one space.
    let name = blake3::hash(container.dir.as_bytes()).to_hex();
    let id = format!("volley-{}-{count}", name.get(..12).unwrap_or_default());
    let words = containers.runtime.command(&container.dir, &state, &id, DESCRIPTORS + container.join.len());
    Spawn {
        argv: words.iter().map(|word| bytes(word)).collect(),
        env: vec![bytes("PATH=/usr/sbin:/usr/bin:/sbin:/bin")],
        path: Vec::new(),
        cwd: bytes("/"),
        uid: None,
        gid: None,
        container: Some(container),
        mounts: Vec::new(),
        top: None,
    }
}

/// Runs the first program in a container with nothing else in it, which it leaves saying that it was told nothing.
///
/// # Errors
/// What did not work, in words.
pub async fn trial(containers: &Containers, spawner: &Spawner, (uid, gid): (u32, u32)) -> Result<(), String> {
    let dir = containers.dir.join("trial");
    let (users, groups) = (self::users(0, uid), self::users(0, gid));
    let argv = [bundle::INIT.to_owned()];
    let bundle = Bundle {
        containers,
        dir: &dir,
        argv: &argv,
        env: Vec::new(),
        cwd: "/",
        user: (0, 0),
        users: &users,
        groups: &groups,
        hostname: "trial",
        cgroups: 0,
    };
    bundle.write().map_err(|e| format!("{}: {e}", dir.display()))?;
    let container = Container {
        dir: dir.to_string_lossy().into_owned(),
        device: None,
        owner: (uid, gid),
        users,
        groups,
        dirs: DIRS.map(str::to_owned).to_vec(),
        binds: Vec::new(),
        hosts: String::new(),
        join: Vec::new(),
        reports: containers.runtime.hands_over(),
    };
    let failed = |e: &dyn std::fmt::Display| e.to_string();
    let make = MakeShim { join: Vec::new(), oom_file: None, containers: true, enters: false, mounts: true, hidden: None };
    let shim = spawner.shim(&make).await.map_err(|e| failed(&e))?;
    let null = std::fs::File::open("/dev/null").map_err(|e| failed(&e))?;
    let null = std::os::fd::AsFd::as_fd(&null);
    shim.spawn(&spawn(containers, 0, container), null, null, None, &[]).await.map_err(|e| failed(&e))?;
    match shim.reply().await.map_err(|e| failed(&e))? {
        Reply::Exited(exited) if exited.code == Some(1) => Ok(()),
        Reply::Refused(why) => Err(why),
        Reply::NotStarted { step, errno } => Err(format!("{step:?}: {}", std::io::Error::from_raw_os_error(errno))),
        other => Err(format!("it ended unexpectedly ({other:?})")),
    }
}
