//! `volley coordinator` and `volley worker`: from flags to a running process.
//!
//! Owns reading secrets from files and signals. Does not own what runs.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use volley_cli::Exit;
use volley_cli::serve::{CoordinatorArgs, MachineArgs, NatsArgs, StoreArgs, UserArgs, WorkerArgs};
use volley_coordinator::config::CoordinatorConfig;
use volley_coordinator::io::bus::{self, ConnectError, NatsConfig};
use volley_coordinator::run::Running;
use volley_jobspecs::ids::WorkerId;
use volley_jobspecs::observe::Observing;
use volley_jobspecs::wire::plan::Isolation;
use volley_store::{Store, StoreConfig};
use volley_volume::format::seal::ClusterKeys;
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::{Config, Control, Handle, NatsBus, S3Objects, ShareConfig, Spawner, VolumesConfig, users};

use crate::failed::{Ended, Failed};

/// Pause before NATS is tried again at a worker's start.
const CONNECT_PAUSE: Duration = Duration::from_secs(1);
/// How long a worker waits for NATS at its start: coordinators and workers may start before it.
const CONNECT_PATIENCE: Duration = Duration::from_secs(60);

fn secret(path: &Path, what: &str) -> Result<String, Failed> {
    let text = std::fs::read_to_string(path).map_err(|e| Failed::local(&format!("read the {what}"), path, &e))?;
    Ok(text.trim().to_owned())
}

/// The keys of volumes in a file that nobody else may read: as they are there, and read.
fn volume_keys(path: &Path) -> Result<(String, ClusterKeys), Failed> {
    let io = |e| Failed::local("read the keys of volumes", path, &e);
    let mode = std::fs::metadata(path).map_err(io)?.permissions().mode();
    if mode & 0o077 != 0 {
        let text = format!("{} can be read by others (mode {:o}); `chmod 600` it", path.display(), mode & 0o777);
        return Err(Failed::new(Exit::BadSpec, text));
    }
    let text = std::fs::read_to_string(path).map_err(io)?;
    let keys = ClusterKeys::parse(&text).map_err(|why| Failed::new(Exit::BadSpec, format!("{}: {why}", path.display())))?;
    Ok((text, keys))
}

/// How to reach NATS, as the flags say.
pub fn nats(args: NatsArgs) -> Result<NatsConfig, Failed> {
    let password = match args.password_file {
        Some(path) => Some(secret(&path, "NATS password file")?),
        None => args.password,
    };
    let user = match (args.user, password) {
        (Some(user), Some(password)) => Some((user, password)),
        (None, None) => None,
        (Some(_), None) => {
            return Err(Failed::new(Exit::BadSpec, "--nats-user needs --nats-password-file (or NATS_PASSWORD)"));
        }
        (None, Some(_)) => return Err(Failed::new(Exit::BadSpec, "a NATS password needs --nats-user")),
    };
    Ok(NatsConfig { url: args.url, user, credentials: args.credentials })
}

/// Where the bucket is.
pub fn store(args: StoreArgs) -> StoreConfig {
    let StoreArgs { place, bucket } = args;
    let path_style = place.endpoint.is_some();
    StoreConfig {
        endpoint: place.endpoint,
        region: place.region,
        prefix: place.prefix,
        credentials: None,
        force_path_style: path_style,
        ..StoreConfig::new("", &bucket, "", "")
    }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let fit = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' };
    let name: String = name.trim().chars().map(fit).take(48).collect();
    if name.starts_with(|c: char| c.is_ascii_alphanumeric()) { name } else { format!("host{name}") }
}

/// Runs a coordinator until it is told to stop.
pub async fn coordinator(args: CoordinatorArgs, observer: Observing) -> Ended {
    let token = args.operator_token_file.as_deref().map(|path| secret(path, "operator token file")).transpose()?;
    let config = CoordinatorConfig {
        name: args.name.unwrap_or_else(host_name),
        replicas: args.replicas,
        log_bytes_max: args.log_bytes.map(|size| size.0),
        items_buckets: args.items_buckets,
        listen: args.listen,
        local_metrics: args.local_metrics,
        bootstrap_token: token,
        observer,
        volume_keys: args.volume_keys.as_deref().map(volume_keys).transpose()?.map(|(_, keys)| keys),
        ..CoordinatorConfig::new(nats(args.nats)?, args.data_dir, store(args.store))
    };
    let stop = CancellationToken::new();
    // Only these: whoever keeps the rest keeps its database open.
    let Running { addr, cluster, mut join, .. } = volley_coordinator::run::run(config, stop.clone()).await?;
    tracing::info!(%addr, cluster, "coordinator ready");
    let ended = tokio::select! {
        ended = &mut join => ended,
        () = stop_signal() => {
            stop.cancel();
            join.await
        }
    };
    Ok(ended.map_err(|e| Failed::new(Exit::Internal, format!("the coordinator panicked: {e}")))??)
}

/// Waits for SIGTERM or SIGINT.
pub async fn stop_signal() {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}

/// Connects a worker, waiting a while for a server that is not up yet.
pub async fn connect(config: &NatsConfig, name: &str) -> Result<async_nats::Client, Failed> {
    let started = tokio::time::Instant::now();
    loop {
        match bus::connect(config, name).await {
            Ok((client, _)) => return Ok(client),
            Err(error @ ConnectError::Unreachable { .. }) if started.elapsed() < CONNECT_PATIENCE => {
                tracing::warn!("{error}; trying again");
                tokio::time::sleep(CONNECT_PAUSE).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// What starts processes, each forked off first thing in `main`.
#[derive(Debug, Default)]
pub struct Spawners {
    /// Of tasks.
    pub processes: Option<Spawner>,
    /// Of machines, where they are offered.
    pub machines: Option<MachineSpawner>,
}

/// Tiers by their names.
pub fn tiers(names: &[String], null: bool) -> Result<Vec<Isolation>, Failed> {
    let mut tiers = Vec::new();
    for name in names {
        let known = [Isolation::Null, Isolation::Process, Isolation::Container, Isolation::Microvm];
        let tier = known.into_iter().find(|tier| tier.as_str() == name);
        tiers.push(
            tier.ok_or_else(|| Failed::new(Exit::BadSpec, format!("--isolation {name}: this build has process, container and microvm")))?,
        );
    }
    if null && !tiers.contains(&Isolation::Null) {
        tiers.push(Isolation::Null);
    }
    Ok(tiers)
}

/// Whom tasks run as: who was named; as root, without, a user of its own for each slot.
pub fn set_users(config: &mut Config, args: &UserArgs) -> Result<(), Failed> {
    let named = args.task_users.or(args.task_user);
    let root = rustix::process::geteuid().is_root()
        && [Isolation::Process, Isolation::Container].iter().any(|tier| config.isolation.contains(tier));
    config.task_user = match named {
        None if root => Some(users::for_slots(config.slots).map_err(Failed::arguments)?),
        named => named,
    };
    config.task_user_per_slot = config.task_user.is_some() && args.task_user.is_none();
    Ok(())
}

/// What machines are made of: what was named. `spawner` is there where the worker offers them.
pub fn set_machines(config: &mut Config, args: MachineArgs, spawner: Option<MachineSpawner>) -> Result<(), Failed> {
    let machines = &mut config.machines;
    machines.images = args.images.unwrap_or_else(|| std::mem::take(&mut machines.images));
    machines.vmm = args.vmm.parse().map_err(Failed::arguments)?;
    machines.qemu = args.qemu;
    machines.firecracker = args.firecracker;
    machines.kernel = args.guest_kernel;
    machines.modules = args.guest_modules;
    machines.agent = args.guest_agent;
    machines.allow_unconfined = args.allow_unconfined_machines;
    machines.spawner = spawner;
    machines.share = args.template_keys.map(ShareConfig::new);
    machines.templates_bytes_max = args.template_memory.map_or(machines.templates_bytes_max, |size| size.0);
    if !config.isolation.contains(&Isolation::Microvm) {
        let vmm = (args.vmm != "auto").then(|| format!("--vmm {}", args.vmm));
        let program = |flag, named: &Option<PathBuf>| named.as_ref().map(|named| format!("{flag} {}", named.display()));
        let unused = [vmm, program("--firecracker", &machines.firecracker), program("--qemu", &machines.qemu)];
        let unused: Vec<String> = unused.into_iter().flatten().collect();
        if !unused.is_empty() {
            tracing::warn!("not used, as machines are not offered (--isolation microvm): {}", unused.join(", "));
        }
    }
    config.containers.runtime = args.container_runtime;
    Ok(())
}

/// Runs a worker until it has drained.
pub async fn worker(args: WorkerArgs, spawners: Spawners, observer: Observing) -> Ended {
    let name = match args.name {
        Some(name) => name,
        None => WorkerId::new(&host_name()).map_err(Failed::arguments)?,
    };
    let mut config = Config::new(name, args.work_dir);
    config.isolation = tiers(&args.isolation, args.null)?;
    config.slots = args.slots.unwrap_or(config.slots);
    config.cpu_milli = args.cpus.map_or(config.cpu_milli, |cpus| cpus.0);
    config.memory_bytes = args.memory.map_or(config.memory_bytes, |size| size.0);
    config.disk_bytes = args.disk.map_or(config.disk_bytes, |size| size.0);
    config.labels = args.labels.into_iter().collect();
    set_users(&mut config, &args.users)?;
    set_machines(&mut config, args.machines, spawners.machines)?;
    config.observer = observer;
    let nats = nats(args.nats)?;
    let store = store(args.store);
    if let Some(path) = &args.volume_keys {
        let (keys, _) = volume_keys(path)?;
        config.volumes = Some(VolumesConfig { allow_host_mount: args.volumes.allow_host_mount, ..VolumesConfig::new(keys, store.clone()) });
    }
    run_worker(config, &nats, store, spawners.processes, volley_worker::control()).await
}

/// Runs a worker: the first signal drains it, the second stops it now. `control`: both ends of it.
pub async fn run_worker(
    config: Config,
    nats: &NatsConfig,
    store: StoreConfig,
    spawner: Option<Spawner>,
    (handle, control): (Handle, Control),
) -> Ended {
    let client = connect(nats, config.name.as_str()).await?;
    let own = Store::connect(&store).await.map_err(Failed::unavailable)?;
    own.probe().await.map_err(Failed::unavailable)?;
    let objects = S3Objects::new(&own, store, volley_worker::io::objects::BUDGET_DEFAULT);
    let signals = async {
        stop_signal().await;
        tracing::info!("draining: running tasks may end; a second signal stops now");
        handle.drain();
        stop_signal().await;
        tracing::info!("stopping now");
        handle.stop();
        std::future::pending::<()>().await;
    };
    let run = volley_worker::run_on_nats(config, NatsBus::new(client), objects, spawner, control);
    tokio::select! {
        ended = run => Ok(ended?),
        () = signals => Ok(()),
    }
}
