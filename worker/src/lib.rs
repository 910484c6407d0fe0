//! The agent of a host: takes bundles, runs their tasks, keeps what they leave, and reports how they ended.
//!
//! Owns the road of an attempt from receipt to report: `claim`, `prepare`, `restore`, `execute`, `persist`, `report`, `reclaim`. Their
//! order is decided by pure state machines (`core`, `attempt`, `slots`) and carried out by one loop (`driver`). Does not own any
//! decision about a job: those are the coordinator's.

pub mod attempt;
mod beneath;
pub mod bundle;
pub mod capture;
pub mod cgroup;
pub mod claim;
pub mod config;
pub mod containers;
pub mod control;
pub mod core;
pub mod dirs;
pub mod driver;
pub mod error;
pub mod execute;
pub mod executor;
pub mod guest;
pub mod image;
pub mod inputs;
pub mod io;
pub mod job;
pub mod live;
pub mod machines;
pub mod mounts;
mod offer;
pub mod persist;
mod place;
pub mod ports;
pub mod prepare;
pub mod reach;
pub mod reclaim;
pub mod report;
pub mod restore;
pub mod runtime;
pub mod shells;
pub mod slots;
pub mod spawner;
pub mod standby;
pub mod stop;
pub mod template;
pub mod trace;
pub mod users;
pub mod vmm;
pub mod volumes;

use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::task::AbortOnDropHandle;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::work::{HasVolumes, KeptMachine, Lack, WorkerInfo};

pub use config::{Config, ContainerConfig, MachineConfig, ShareConfig};
pub use control::{Control, Handle, Status, control};
pub use error::{RunError, chain};
pub use io::nats::NatsBus;
pub use io::objects::S3Objects;
pub use spawner::Spawner;
pub use volumes::VolumesConfig;

use driver::{Driver, EVENTS_MAX, Parts};
use executor::Shared;
use inputs::Inputs;
use job::Pages;
use offer::Offer;
use ports::{Bus, Objects};
use template::share::Sharing;

/// Runs a worker until it has left. `spawner` was made first thing in `main`; without one, and if the worker offers `process` or
/// `container`, it is made here, which costs more the larger this process is.
///
/// # Errors
/// [`RunError`]: it can't begin. Once it has begun, nothing ends it but its handle.
pub async fn run<B: Bus, O: Objects>(
    mut config: Config,
    bus: B,
    objects: O,
    spawner: Option<Spawner>,
    control: Control,
) -> Result<(), RunError> {
    config.check()?;
    let offer = Offer::open(&mut config, spawner).await?;
    control.status.send_modify(|status| status.opened = true);
    let images = offer.images();
    let told = told_images(images.as_ref()).await;
    let Offer { place, cgroups, limits, spawner, processes, containers, machines, lacks } = offer;
    let volumes = start_volumes(&config, &place.dir).await?;
    let (events, receiver) = mpsc::channel(EVENTS_MAX);
    let _images = images.map(|store| AbortOnDropHandle::new(tokio::spawn(tell_images(store, told.clone(), events.clone()))));
    let (watched, watching) = watch::channel(Arc::default());
    let _kept = machines.as_ref().map(|machines| AbortOnDropHandle::new(tokio::spawn(tell_kept(machines.kept.watch(), events.clone()))));
    let inputs = Inputs::new(objects.clone(), place.dir.join("cache"), config.cache_bytes_max).map_err(|source| RunError::Dir {
        path: place.dir.clone(),
        what: "making its cache",
        source,
    })?;
    let shared = Shared {
        bus: bus.clone(),
        pages: Pages::new(objects.clone()),
        objects,
        inputs,
        watched: watching,
        events,
        dir: place.dir.join("slots"),
        owner: config.task_user,
        owner_per_slot: config.task_user_per_slot,
        stream_bytes_max: config.stream_bytes_max,
        volumes: volumes.clone(),
    };
    let template_bytes = machines.is_some().then_some(config.machines.templates_bytes_max);
    let core = core_config(
        &config,
        Offered { limits, lacks, template_bytes, images: told, volumes: volumes.as_ref().map(drop).map_err(Arc::clone) },
    );
    let (work, watches) = (bus.work(&config.name).await?, bus.watches().await?);
    let (living, ended) = oneshot::channel();
    let told = tell_figures(&config, &control.status, ended);
    let observer = config.observer.clone();
    let ours = machines.clone();
    let cgroups_kept = cgroups.clone();
    let parts = Parts { shared, events: receiver, watched, spawner, processes, containers, machines, cgroups, observer };
    // A task of its own: one that is polled by `block_on` is woken through the kernel, for each event of a slot.
    let driver = tokio::spawn(Driver::new(core, parts).live(work, watches, control.wishes, control.status));
    if let Err(ended) = AbortOnDropHandle::new(driver).await {
        match ended.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_the_runtime_ends) => return Ok(()),
        }
    }
    drop(living);
    // Its server ends with it: nothing is open any more.
    drop(volumes);
    end(ours, told, cgroups_kept).await;
    drop(place);
    Ok(())
}

/// What is left to do when nothing runs any more.
async fn end(machines: Option<Arc<machines::Machines>>, told: Option<JoinHandle<()>>, cgroups: Option<Arc<cgroup::Cgroups>>) {
    if let Some(machines) = machines {
        machines.close().await;
    }
    if let Some(told) = told {
        // What can't be told is nobody's loss.
        let _ = told.await;
    }
    if let Some(cgroups) = cgroups {
        // What can't be removed now is removed at the next start.
        let _ = tokio::task::spawn_blocking(move || cgroups.sweep()).await;
    }
}

/// [`run`] over NATS and S3. Boxed: an `async fn` is compiled where it is awaited, and so the whole worker with the binary, not with how this
/// crate is optimised.
pub fn run_on_nats(
    mut config: Config,
    bus: NatsBus,
    objects: S3Objects,
    spawner: Option<Spawner>,
    control: Control,
) -> BoxFuture<'static, Result<(), RunError>> {
    Box::pin(async move {
        let (machines, microvm) = (&mut config.machines, config.isolation.contains(&Isolation::Microvm));
        if let (Some(share), true, None) = (&machines.share, microvm, &machines.sharing) {
            let sharing = Sharing::open(share, config.name.as_str(), &config.build, objects.own(), bus.client());
            machines.sharing = Some(sharing?);
        }
        // Also where there are no machines, so that whoever asks hears why. It ends with this worker.
        let shells = io::shells::serve(bus.client(), config.name.clone(), config.machines.shells.clone());
        let _shells = AbortOnDropHandle::new(tokio::spawn(shells));
        run(config, bus, objects, spawner, control).await
    })
}

/// Volumes, or why this worker's tasks can't have any.
async fn start_volumes(config: &Config, dir: &std::path::Path) -> Result<Result<Arc<volumes::Volumes>, Arc<str>>, RunError> {
    let Some(volumes) = config.volumes.clone() else {
        return Ok(Err("it has no key for volumes; start it with --volume-keys".into()));
    };
    let lacks = |why: String| {
        tracing::warn!("tasks with volumes are not for this worker: {why}");
        Ok(Err(why.into()))
    };
    if let Some(why) = mounts::obstacle(&config.isolation) {
        return lacks(why);
    }
    let started = volumes::Volumes::start(volumes, dir, &config.host, config.machines.mke2fs.clone()).await;
    let failed = |source| RunError::Dir { path: dir.join("volumes"), what: "clearing it", source };
    let started = started.map_err(failed)?;
    match started.lack() {
        Some(why) => lacks(why),
        None => Ok(Ok(started)),
    }
}

/// What images there are, of a worker that needs any.
async fn told_images(store: Option<&image::Store>) -> Option<Vec<u64>> {
    let store = store?.clone();
    tokio::task::spawn_blocking(move || image::watch::now(&store)).await.ok().flatten()
}

/// Tells which images there are, whenever that is something else than `told`.
async fn tell_images(store: image::Store, told: Option<Vec<u64>>, events: mpsc::Sender<core::Input>) {
    let tell = |images| {
        let events = events.clone();
        async move { events.send(core::Input::Images(images)).await.is_ok() }
    };
    image::watch::watch(store, told, tell).await;
}

/// Tells which machines are kept, whenever that changes.
async fn tell_kept(mut kept: watch::Receiver<Vec<KeptMachine>>, events: mpsc::Sender<core::Input>) {
    while kept.changed().await.is_ok() {
        let machines = kept.borrow_and_update().clone();
        if events.send(core::Input::KeptMachines(machines)).await.is_err() {
            return;
        }
    }
}

/// What was found out about a host beyond what is configured.
struct Offered {
    /// Limits can be enforced.
    limits: bool,
    lacks: Vec<Lack>,
    template_bytes: Option<u64>,
    images: Option<Vec<u64>>,
    /// Or why tasks can't have any.
    volumes: Result<(), Arc<str>>,
}

/// What the core is told of this worker.
fn core_config(config: &Config, offered: Offered) -> core::CoreConfig {
    let Offered { limits, lacks, template_bytes, images, volumes } = offered;
    core::CoreConfig {
        worker: config.name.clone(),
        info: WorkerInfo {
            slots: config.slots,
            cpu_milli: config.cpu_milli,
            memory_bytes: config.memory_bytes,
            disk_bytes: config.disk_bytes,
            isolation: config.isolation.clone(),
            labels: config.labels.clone(),
            limits,
            build: config.build.clone(),
            host: config.host.clone(),
            lacks,
            template_bytes,
            images,
            fetches: template_bytes.is_some() && config.machines.sharing.is_some(),
            volumes: Some(volumes.map_or_else(|why| HasVolumes::no(&why), |()| HasVolumes::Yes)),
        },
        beat_ms: config.beat_ms,
        linger_ms: config.linger_ms,
        unsent_bytes_max: config.unsent_bytes_max,
        traced: config.observer.as_ref().is_some_and(|observer| observer.takes_spans()),
    }
}

/// Tells the observer the worker's figures every so often, and once more when it has ended; if there is one that wants them.
fn tell_figures(config: &Config, status: &watch::Sender<Status>, mut ended: oneshot::Receiver<()>) -> Option<JoinHandle<()>> {
    let observer = config.observer.clone()?;
    let (every, slots, status) = (observer.figures_every()?, config.slots, status.subscribe());
    Some(tokio::spawn(async move {
        let mut on = true;
        while on {
            observer.figures(trace::figures(&status.borrow(), slots));
            on = tokio::time::timeout(every, &mut ended).await.is_err();
        }
        observer.figures(trace::figures(&status.borrow(), slots));
    }))
}
