//! What all slots with machines share: the VMM, images, templates, machines that wait or are kept, scratch disks.
//!
//! Owns opening all of it, and from what a task says to the template it runs from. Does not own any machine (`runtime/microvm`).

pub mod groups;
pub mod kept;
mod scratch;

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use volley_guest::initramfs::{self, InitramfsError};
use volley_jobspecs::ids::TenantId;
use volley_jobspecs::machine;
use volley_jobspecs::resolve::ResolvedTask;
use volley_jobspecs::spec::{Resources, WarmUpSpec};
use volley_jobspecs::wire::work::TemplateStage;

use crate::cgroup::{CgroupError, Cgroups, SlotCgroup};
use crate::config::MachineConfig;
use crate::image::find::{FindError, find};
use crate::image::kernel::{self, Kernel, KernelError, Places};
use crate::image::oci::Config as ImageConfig;
use crate::image::{ImageNote, Store};
use crate::shells::Shells;
use crate::standby::{self, Standby};
use crate::template::{BuildError, Builder, Owner, Recipe, Template, TemplateName, Templates, WarmUp};
use crate::vmm::choice::{self, ChoiceError, Chosen, Programs};
use crate::vmm::spawner::{MachineSpawner, SpawnError};
use crate::vmm::{Kind, Size, Vmm, processor};

use groups::Groups;
use kept::Kept;
pub use scratch::{ScratchDisk, ScratchDisks, ScratchError};

/// The cgroup of machines that become templates. It has no limits: a machine has what it is made with.
const BUILDING: &str = "templates";
/// Proofs of reseeds that are remembered: of more machines than a host runs in an hour.
const PROOFS_KEPT: usize = 4_096;

/// Why a worker can't offer machines.
#[derive(Debug, thiserror::Error)]
pub enum MachinesError {
    /// Nothing can be started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// No VMM.
    #[error(transparent)]
    Vmm(#[from] ChoiceError),
    /// A VMM that a guest took over could reach what it must not.
    #[error(
        "machines can't be shut off from the host here, what is missing: {missing}; run the worker as root (in a container: with CAP_SYS_ADMIN), \
         or leave `microvm` out of its isolation; --allow-unconfined-machines permits it, for development only"
    )]
    Unconfined {
        /// What could not be shut off.
        missing: String,
    },
    /// Their cgroup can't be made.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// No kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No agent, or not the kernel's modules.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// A directory or file.
    #[error("{what} {}: {source}", .path.display())]
    Io {
        /// What it is.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// Why a task has no template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// Its image is not here.
    #[error(transparent)]
    Image(#[from] FindError),
    /// It can't be built.
    #[error(transparent)]
    Build(#[from] Arc<BuildError>),
    /// The task names no image.
    #[error("the task names no image; isolation \"microvm\" needs one: task.image")]
    NoImage,
}

/// What a task says of what it runs from.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Whose it is.
    pub tenant: &'a TenantId,
    /// Its image.
    pub image: Option<&'a str>,
    /// What it needs.
    pub resources: &'a Resources,
    /// What is run before the machine is saved.
    pub warm_up: &'a [WarmUpSpec],
    /// Do its processes go on?
    pub keep_processes: bool,
}

impl<'a> Wanted<'a> {
    /// What this task says.
    #[must_use]
    pub fn of(tenant: &'a TenantId, task: &'a ResolvedTask) -> Self {
        let ResolvedTask { image, resources, warm_up, keep_processes, .. } = task;
        Self { warm_up, keep_processes: *keep_processes, ..Self::plain(tenant, image.as_deref(), resources) }
    }

    /// An image as it is.
    #[must_use]
    pub fn plain(tenant: &'a TenantId, image: Option<&'a str>, resources: &'a Resources) -> Self {
        Self { tenant, image, resources, warm_up: &[], keep_processes: false }
    }
}

fn warm_up(spec: &WarmUpSpec) -> WarmUp {
    WarmUp { argv: spec.command.clone(), env: spec.env.iter().map(|(name, value)| (name.clone(), value.clone())).collect() }
}

/// What a task runs from.
#[derive(Debug, Clone)]
pub struct Found {
    /// The template.
    pub template: Arc<Template>,
    /// What the image says of its programs.
    pub image: ImageConfig,
}

/// What slots with machines share.
#[derive(Debug)]
pub struct Machines {
    /// The VMM.
    pub vmm: Arc<dyn Vmm>,
    /// Where each machine gets its cgroup.
    pub groups: Groups,
    /// The files of the one for machines that become templates.
    building: Vec<String>,
    /// Machines that wait.
    pub standby: Standby,
    /// Machines of failed attempts.
    pub kept: Kept,
    /// Where people's commands find machines.
    pub shells: Shells,
    /// Scratch disks.
    pub scratch: ScratchDisks,
    store: Store,
    kernel: Kernel,
    kernel_hash: [u8; 32],
    initrd: PathBuf,
    initrd_hash: [u8; 32],
    /// The host's processor, where machines depend on it.
    processor: String,
    templates: Templates,
    build_time: Duration,
    proofs: Mutex<VecDeque<[u8; 32]>>,
}

impl Machines {
    /// Opens everything. `dir` is emptied; it is the worker's alone.
    ///
    /// # Errors
    /// [`MachinesError`], one line that says what is missing.
    pub async fn open(config: &MachineConfig, dir: &Path, slots: u32, cgroups: Option<Arc<Cgroups>>) -> Result<Self, MachinesError> {
        let at = |what, path: &Path| {
            let path = path.to_owned();
            move |source| MachinesError::Io { what, path, source }
        };
        crate::dirs::remove_all(dir).map_err(at("clearing", dir))?;
        std::fs::create_dir_all(dir).map_err(at("making", dir))?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(dir, mode).map_err(at("closing", dir))?;
        let spawner = match &config.spawner {
            Some(spawner) => spawner.clone(),
            None => MachineSpawner::start()?,
        };
        let vmm = choose(config, spawner).await?;
        let building = cgroups.as_ref().map(|cgroups| cgroups.slot(BUILDING)).transpose()?;
        let building = building.as_ref().map(SlotCgroup::join_files).unwrap_or_default();
        let groups = Groups::new(cgroups);
        let processor =
            processor::of_host(vmm.capabilities().identity.accelerator).map_err(at("reading", Path::new(processor::CPUINFO)))?;
        let kernel = kernel::find(config.kernel.as_deref(), &Places::of_process())?;
        // Beside the one that was found, not beside what is taken out of it.
        let modules = config.modules.clone().or_else(|| modules_of(&kernel));
        let kernel = fitting(kernel, vmm.capabilities().identity.vmm, dir).await?;
        let hash = |path: &Path| std::fs::read(path).map(|bytes| *blake3::hash(&bytes).as_bytes());
        let kernel_hash = hash(&kernel.path).map_err(at("reading the kernel", &kernel.path))?;
        let agent = match &config.agent {
            Some(agent) => agent.clone(),
            None => initramfs::find_agent()?,
        };
        let disk = initramfs::build(&agent, modules.as_deref(), &initramfs::MODULES)?;
        let (initrd, initrd_hash) = (dir.join("initrd"), *blake3::hash(&disk).as_bytes());
        std::fs::write(&initrd, disk).map_err(at("writing", &initrd))?;
        let store = Store::open(&config.images).map_err(at("opening the images in", &config.images))?;
        let scratch = ScratchDisks::open(&dir.join("scratch"), config.mke2fs.clone()).map_err(at("making", dir))?;
        let each = vmm.capabilities().standing_bytes.max(1);
        let machines_max = u32::try_from(config.standby_bytes_max / each).unwrap_or(u32::MAX);
        let limits = standby::Limits { machines_max, of_one_max: config.standby_of_one_max.unwrap_or(slots) };
        let standby = Standby::new(vmm.clone(), limits, groups.clone());
        Ok(Self {
            kept: Kept::new(standby.clone(), config.standby_bytes_max),
            standby,
            shells: config.shells.clone(),
            groups,
            building,
            vmm,
            scratch,
            store,
            kernel,
            kernel_hash,
            initrd,
            initrd_hash,
            processor,
            templates: Templates::new(config.templates_bytes_max).with(config.sharing.clone(), config.steps.clone()),
            build_time: Duration::from_millis(config.build_ms_max),
            proofs: Mutex::default(),
        })
    }

    /// Its images.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The template that a task runs from, built if it isn't there.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub async fn template(&self, wanted: &Wanted<'_>) -> Result<Found, TemplateError> {
        self.template_by_stages(wanted, &watch::Sender::default()).await
    }

    /// The same, and tells what it waits for.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub async fn template_by_stages(
        &self,
        wanted: &Wanted<'_>,
        stage: &watch::Sender<Option<TemplateStage>>,
    ) -> Result<Found, TemplateError> {
        let (store, text) = (self.store.clone(), wanted.image.ok_or(TemplateError::NoImage)?.to_owned());
        let found = tokio::task::spawn_blocking(move || find(&store, &text)).await;
        let (note, root) = found.unwrap_or_else(|e| Err(FindError::Store(io::Error::other(e))))?;
        let recipe = Recipe {
            owner: Owner::Tenant(wanted.tenant.clone()),
            image: note.digest.clone(),
            root,
            kernel: self.kernel_hash,
            initrd: self.initrd_hash,
            words: String::new(),
            size: size(wanted.resources),
            warm_up: wanted.warm_up.iter().map(warm_up).collect(),
            keep_processes: wanted.keep_processes,
            vmm: self.vmm.capabilities().identity.clone(),
            processor: self.processor.clone(),
        };
        let mut template = self.told(recipe.name(), stage, self.templates.get(&recipe, || self.builder(&note))).await;
        if let Err(why) = &template
            && matches!(**why, BuildError::NoRoom(_))
            && self.standby.clear().await > 0
        {
            // Machines that only waited held templates that nobody runs.
            template = self.told(recipe.name(), stage, self.templates.get(&recipe, || self.builder(&note))).await;
        }
        Ok(Found { template: template?, image: note.config })
    }

    /// Waits for a template, and tells meanwhile what is done for it.
    async fn told<T>(&self, name: TemplateName, told: &watch::Sender<Option<TemplateStage>>, template: impl Future<Output = T>) -> T {
        let mut stages = self.templates.stages();
        let mut template = std::pin::pin!(template);
        let found = loop {
            tokio::select! {
                biased;
                found = &mut template => break found,
                // Its sender is ours, so it lives.
                _ = stages.changed() => {
                    let stage = stages.borrow_and_update().get(&name).copied();
                    told.send_if_modified(|now| std::mem::replace(now, stage) != stage);
                }
            }
        };
        told.send_if_modified(|now| now.take().is_some());
        found
    }

    /// Ends what waits and what is kept. Machines of attempts are their slots'.
    pub async fn close(&self) {
        self.kept.close().await;
        self.standby.close().await;
    }

    fn builder(&self, note: &ImageNote) -> Builder {
        Builder {
            vmm: self.vmm.clone(),
            kernel: self.kernel.path.clone(),
            initrd: self.initrd.clone(),
            root: self.store.root(&note.root),
            cgroups: self.building.clone(),
            env: image_env(&note.config),
            time_max: self.build_time,
        }
    }

    /// Takes note of a reseed's proof. False: another machine gave the same, so the two are one.
    #[must_use]
    pub fn is_fresh(&self, proof: [u8; 32]) -> bool {
        let mut proofs = self.proofs.lock().unwrap_or_else(PoisonError::into_inner);
        if proofs.contains(&proof) {
            return false;
        }
        if proofs.len() >= PROOFS_KEPT {
            proofs.pop_front();
        }
        proofs.push_back(proof);
        true
    }

    /// What every result of a machine says, where software emulates the processor or its VMM is not shut off from everything.
    #[must_use]
    pub fn label(&self) -> Option<String> {
        let capabilities = self.vmm.capabilities();
        let identity = &capabilities.identity;
        let emulated = capabilities.emulated.then(|| {
            format!("its machine was emulated in software ({} {}, {})", identity.vmm, identity.version, identity.accelerator.as_str())
        });
        let missing = &capabilities.missing;
        let unconfined = (!missing.is_empty()).then(|| format!("its machine's VMM had to do without {}", missing.join(", ")));
        let all: Vec<String> = emulated.into_iter().chain(unconfined).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

/// An image's environment, in pairs.
#[must_use]
pub fn image_env(config: &ImageConfig) -> Vec<(String, String)> {
    let pairs = config.env.iter().filter_map(|pair| pair.split_once('='));
    pairs.filter(|(name, _)| !name.is_empty()).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The machine for a task's resources.
#[must_use]
pub fn size(resources: &Resources) -> Size {
    Size { vcpus: machine::vcpus(resources), memory_bytes: machine::memory_bytes(resources) }
}

/// The kernel in the form that the VMM boots: a copy, as templates are named by its hash, and another file may take its place while this runs.
async fn fitting(kernel: Kernel, vmm: Kind, dir: &Path) -> Result<Kernel, KernelError> {
    let to = dir.join(match vmm {
        Kind::Qemu => "vmlinuz",
        Kind::Firecracker => "vmlinux",
    });
    let copied = move || -> Result<Kernel, KernelError> {
        let kernel = match vmm {
            Kind::Qemu => kernel.packed()?,
            Kind::Firecracker => kernel.unpacked(&to)?,
        };
        if kernel.path != to {
            std::fs::copy(&kernel.path, &to).map_err(|source| KernelError::Io { path: kernel.path.clone(), source })?;
        }
        Ok(Kernel { path: to, ..kernel })
    };
    // Some fifty megabytes.
    match tokio::task::spawn_blocking(copied).await {
        Ok(copied) => copied,
        Err(e) => Err(KernelError::Io { path: dir.to_owned(), source: io::Error::other(e) }),
    }
}

/// Opens the VMM, and says once which it is and why. One that can't be shut off is refused, unless that is allowed.
async fn choose(config: &MachineConfig, spawner: MachineSpawner) -> Result<Arc<dyn Vmm>, MachinesError> {
    let programs = Programs { qemu: config.qemu.as_deref(), firecracker: config.firecracker.as_deref() };
    let Chosen { vmm, why, unused } = choice::open(config.vmm, &programs, spawner).await?;
    if let Some(unused) = unused {
        tracing::warn!("{unused}");
    }
    let capabilities = vmm.capabilities();
    let identity = &capabilities.identity;
    if capabilities.emulated {
        tracing::warn!("machines run on {identity}, emulated in software, which is slow: {why}");
    } else {
        tracing::info!("machines run on {identity}: {why}");
    }
    if !capabilities.missing.is_empty() {
        let why = MachinesError::Unconfined { missing: capabilities.missing.join(", ") };
        if !config.allow_unconfined {
            return Err(why);
        }
        tracing::warn!("{why}; it was allowed");
    }
    Ok(vmm)
}

/// Where a kernel's modules are: beside it, as deploy/setup.sh unpacks them, or where a distribution installs them. None: it is said by the
/// RAM disk's builder which module is missing, or the kernel has all of them built in.
fn modules_of(kernel: &Kernel) -> Option<PathBuf> {
    let beside = kernel.path.parent().map(|dir| dir.join("modules"));
    let installed = (!kernel.release.is_empty()).then(|| Path::new("/lib/modules").join(&kernel.release));
    beside.into_iter().chain(installed).find(|dir| dir.is_dir())
}
