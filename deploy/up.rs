//! `volley up`: a whole cluster in one process tree.
//!
//! Owns the order of starting and stopping: NATS, S3, coordinator, worker, and back. Does not own any of them.

use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use volley_cli::Exit;
use volley_cli::sdk::Client;
use volley_cli::sdk::config::{ClusterFile, Config as ClientConfig};
use volley_cli::serve::UpArgs;
use volley_coordinator::config::CoordinatorConfig;
use volley_coordinator::run::{self, RunError, Running};
use volley_jobspecs::ids::WorkerId;
use volley_jobspecs::observe::Observing;
use volley_store::StoreConfig;
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::{Config, Handle, VolumesConfig, users};

use crate::embedded::{Nats, Secrets, make_private_dir};
use crate::failed::{Ended, Failed};
use crate::room::Room;
use crate::serve::{Spawners, run_worker, set_machines, set_users, tiers};

/// The bucket of an embedded store.
const BUCKET: &str = "volley";
/// How the system words a full disk, in whatever error it comes to light.
const NO_ROOM: &str = "No space left on device";
/// How long a cluster that was here before may take to answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// Starts everything, and ends it on a signal: the first drains, the second stops now.
pub async fn up(args: UpArgs, spawners: Spawners, observer: Observing) -> Ended {
    let dir = make_dir(&args)?;
    let mut config = Config { observer: observer.clone(), ..worker_config(&args, &dir, spawners.machines)? };
    config.check().map_err(Failed::arguments)?;
    let room = Room::of(&dir)?;
    room.wait().await;
    let secrets = Secrets::open(&dir)?;
    let mut nats = Nats::start(&dir, &secrets).await?;
    let s3 = EmbeddedConfig {
        root: dir.join("s3"),
        bind: ([127, 0, 0, 1], 0).into(),
        access_key: secrets.s3_access_key.clone(),
        secret_key: secrets.s3_secret_key.clone(),
        reserve_bytes: room.reserve_bytes,
    };
    let s3 = Arc::new(EmbeddedServer::start(s3).await?);
    let store = StoreConfig::new(&s3.endpoint(), BUCKET, &secrets.s3_access_key, &secrets.s3_secret_key);
    config.volumes = secrets
        .volume_key
        .clone()
        .map(|key| VolumesConfig { allow_host_mount: args.volumes.allow_host_mount, ..VolumesConfig::new(key, store.clone()) });
    let coordinator = CoordinatorConfig {
        name: "up".to_owned(),
        listen: args.listen,
        bootstrap_token: Some(secrets.token.clone()),
        create_bucket: true,
        volume_keys: secrets.volume_keys(&dir)?,
        observer,
        ..CoordinatorConfig::new(nats.config.clone(), dir.join("coordinator"), store.clone())
    };
    let mut coordinator = Coordinator::start(coordinator).await?;
    let file = ClusterFile { url: format!("http://{}", coordinator.config.listen), token: secrets.token.clone() };
    let reach = nats.config.clone();
    let (handle, control) = volley_worker::control();
    let worker = run_worker(config, &reach, store, spawners.processes, (handle.clone(), control));
    let ended = tokio::select! {
        ended = worker => ended,
        why = greet(&handle, &file, &dir) => Err(why),
        // NATS ends with us: only by the directory can it be found again.
        why = coordinator.keep(&room) => {
            let line = why.line.replace("`volley log skip", &format!("`volley log --dir {} skip", dir.display()));
            Err(Failed { line, ..why })
        }
        why = nats.keep(&room) => Err(why),
    };
    coordinator.stop().await;
    if let Some(s3) = Arc::into_inner(s3) {
        s3.shutdown().await;
    }
    nats.stop().await;
    ended
}

/// Says that the cluster is up, once its worker has found what it can offer: it may have to end for that. Returns only what is in the way.
async fn greet(worker: &Handle, file: &ClusterFile, dir: &Path) -> Failed {
    worker.opened().await;
    let path = match tell_clients(file, dir).await {
        Ok(path) => path,
        Err(why) => return why,
    };
    eprintln!("Volley is up at {}; clients find it and its token in {}", file.url, path.display());
    if !rustix::process::geteuid().is_root() {
        eprintln!(
            "Tasks run as this user, who can read the cluster's keys in {}: only what is trusted, or start it as root.",
            dir.display()
        );
    }
    eprintln!("Try it: volley run SPEC.json    Stop it: Ctrl-C");
    std::future::pending().await
}

/// Writes down where clients find the cluster. Not over a file whose cluster answers: its clients would lose it.
async fn tell_clients(file: &ClusterFile, dir: &Path) -> Result<PathBuf, Failed> {
    let path = std::env::var_os("VOLLEY_CONFIG").map(Into::into).or_else(ClusterFile::default_path);
    let nowhere = || Failed::new(Exit::NotConfigured, "no home directory; say where clients find the cluster with VOLLEY_CONFIG");
    let mut path = path.ok_or_else(nowhere)?;
    if let Ok(other) = ClusterFile::load(&path)
        && other.url != file.url
        && answers(&other).await
    {
        let own = dir.join("cluster.json");
        eprintln!(
            "Another cluster, at {}, is what {} names. For this one: export VOLLEY_CONFIG={}",
            other.url,
            path.display(),
            own.display()
        );
        path = own;
    }
    file.save(&path)?;
    Ok(path)
}

async fn answers(cluster: &ClusterFile) -> bool {
    let config = ClientConfig::new(vec![cluster.url.clone()], Some(cluster.token.clone()));
    let Ok(client) = Client::new(config) else { return false };
    tokio::time::timeout(ANSWER_PATIENCE, client.cluster()).await.is_ok_and(|answer| answer.is_ok())
}

/// The coordinator, which is started again after its disk was full.
struct Coordinator {
    config: CoordinatorConfig,
    stop: CancellationToken,
    join: JoinHandle<Result<(), RunError>>,
}

impl Coordinator {
    async fn start(mut config: CoordinatorConfig) -> Result<Self, Failed> {
        let stop = CancellationToken::new();
        // Only these: whoever keeps the rest keeps its database open.
        let Running { addr, join, .. } = run::run(config.clone(), stop.clone()).await?;
        // The port that was found free: those that come after take it again.
        config.listen = addr;
        Ok(Self { config, stop, join })
    }

    /// Keeps it running while all that ends it is a full disk. Returns why that can't go on.
    async fn keep(&mut self, room: &Room) -> Failed {
        loop {
            let why = match (&mut self.join).await {
                Ok(Ok(())) => Failed::new(Exit::Internal, "the coordinator ended"),
                Ok(Err(error)) => error.into(),
                Err(error) => Failed::new(Exit::Internal, format!("the coordinator panicked: {error}")),
            };
            if !why.line.contains(NO_ROOM) && room.short().is_none() {
                return why;
            }
            eprintln!("The coordinator ended: {}", why.line);
            match room.restart(async || run::run(self.config.clone(), self.stop.clone()).await).await {
                Ok(Running { join, .. }) => self.join = join,
                Err(error) => return error.into(),
            }
        }
    }

    async fn stop(self) {
        self.stop.cancel();
        if !self.join.is_finished() {
            let _ = self.join.await;
        }
    }
}

/// Where `volley up` keeps everything unless it is said; none without a home directory. As root elsewhere: tasks run as other users then,
/// who can't pass through root's home.
pub fn default_dir() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() { Some(PathBuf::from(UpArgs::ROOT_DIR)) } else { UpArgs::home_dir() }
}

/// Makes the cluster's directory. Everything in it is private but the way to the tasks' directories, which other users must pass.
fn make_dir(args: &UpArgs) -> Result<PathBuf, Failed> {
    let root = rustix::process::geteuid().is_root();
    let dir = args.dir.clone().or_else(default_dir);
    let dir = dir.ok_or_else(|| Failed::new(Exit::NotConfigured, "no home directory; say where to keep things with --dir"))?;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&dir);
    made.map_err(|e| Failed::local("make (another one is chosen with --dir)", &dir, &e))?;
    let dir = std::fs::canonicalize(&dir).map_err(|e| Failed::local("find", &dir, &e))?;
    let mode = std::fs::Permissions::from_mode(0o711);
    std::fs::set_permissions(&dir, mode).map_err(|e| Failed::local("open to tasks", &dir, &e))?;
    // Before anything is started; the worker looks at its own directory.
    let others = root && args.users.task_user.is_none_or(|(uid, _)| uid != 0);
    if others && let Some(closed) = users::closed_above(&dir) {
        let why = format!(
            "tasks run as other users, who can't pass through {} to {}; choose another place with --dir",
            closed.display(),
            dir.display()
        );
        return Err(Failed::new(Exit::BadSpec, why));
    }
    for private in ["s3", "coordinator", "nats"] {
        make_private_dir(&dir.join(private))?;
    }
    Ok(dir)
}

fn worker_config(args: &UpArgs, dir: &Path, machines: Option<MachineSpawner>) -> Result<Config, Failed> {
    let name = WorkerId::new("local").map_err(Failed::arguments)?;
    let mut config = Config::new(name, dir.join("worker"));
    config.slots = args.slots.unwrap_or(config.slots);
    config.isolation = tiers(&args.isolation, args.null)?;
    set_users(&mut config, &args.users)?;
    set_machines(&mut config, args.machines.clone(), machines)?;
    Ok(config)
}
