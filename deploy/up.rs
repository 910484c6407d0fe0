//! `volley up`: a whole cluster in one process tree.
//!
//! Owns the order of starting and stopping: NATS, S3, coordinator, worker, and back. Does not own any of them.

use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use volley_cli::sdk::config::ClusterFile;
use volley_cli::serve::UpArgs;
use volley_coordinator::config::CoordinatorConfig;
use volley_coordinator::run::{self, RunError, Running};
use volley_jobspecs::ids::WorkerId;
use volley_jobspecs::observe::Observing;
use volley_jobspecs::wire::plan::Isolation;
use volley_store::StoreConfig;
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_worker::{Config, Spawner};

use crate::embedded::{Nats, Secrets, make_private_dir};
use crate::room::Room;
use crate::serve::{Ended, line, run_worker};

/// The bucket of an embedded store.
const BUCKET: &str = "volley";
/// How the system words a full disk, in whatever error it comes to light.
const NO_ROOM: &str = "No space left on device";
/// Pause before a coordinator that ended is started again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// The user tasks run as when everything runs as root: Debian's `nobody`. A task must not be able to read the credentials.
const NOBODY: (u32, u32) = (65_534, 65_534);

/// Starts everything, and ends it on a signal: the first drains, the second stops now.
pub async fn up(args: UpArgs, spawner: Option<Spawner>, observer: Observing) -> Ended {
    let dir = make_dir(&args)?;
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
    let s3 = Arc::new(EmbeddedServer::start(s3).await.map_err(line)?);
    let store = StoreConfig::new(&s3.endpoint(), BUCKET, &secrets.s3_access_key, &secrets.s3_secret_key);
    let config = CoordinatorConfig {
        name: "up".to_owned(),
        listen: args.listen,
        bootstrap_token: Some(secrets.token.clone()),
        create_bucket: true,
        observer: observer.clone(),
        ..CoordinatorConfig::new(nats.config.clone(), dir.join("coordinator"), store.clone())
    };
    let mut coordinator = Coordinator::start(config).await?;
    let file = ClusterFile { url: format!("http://{}", coordinator.config.listen), token: secrets.token.clone() };
    let path = std::env::var_os("VOLLEY_CONFIG").map(Into::into).or_else(ClusterFile::default_path);
    let path = path.ok_or("no home directory; say where clients find the cluster with VOLLEY_CONFIG")?;
    file.save(&path).map_err(line)?;
    eprintln!("Volley is up at {}; clients find it and its token in {}", file.url, path.display());
    eprintln!("Try it: volley run SPEC.json    Stop it: Ctrl-C");

    let config = nats.config.clone();
    let worker = run_worker(Config { observer, ..worker_config(&args, &dir)? }, &config, store, spawner);
    let ended = tokio::select! {
        ended = worker => ended,
        // NATS ends with us: only by the directory can it be found again.
        why = coordinator.keep(&room) => Err(why.replace("`volley log skip", &format!("`volley log --dir {} skip", dir.display()))),
        why = nats.keep(&room) => Err(why),
    };
    coordinator.stop().await;
    if let Some(s3) = Arc::into_inner(s3) {
        s3.shutdown().await;
    }
    nats.stop().await;
    ended
}

/// The coordinator, which is started again after its disk was full.
struct Coordinator {
    config: CoordinatorConfig,
    stop: CancellationToken,
    join: JoinHandle<Result<(), RunError>>,
}

impl Coordinator {
    async fn start(mut config: CoordinatorConfig) -> Result<Self, String> {
        let stop = CancellationToken::new();
        // Only these: whoever keeps the rest keeps its database open.
        let Running { addr, join, .. } = run::run(config.clone(), stop.clone()).await.map_err(line)?;
        // The port that was found free: those that come after take it again.
        config.listen = addr;
        Ok(Self { config, stop, join })
    }

    /// Keeps it running while all that ends it is a full disk. Returns why that can't go on.
    async fn keep(&mut self, room: &Room) -> String {
        loop {
            let why = match (&mut self.join).await {
                Ok(Ok(())) => "the coordinator ended".to_owned(),
                Ok(Err(error)) => line(error),
                Err(error) => format!("the coordinator panicked: {error}"),
            };
            if !why.contains(NO_ROOM) && room.short().is_none() {
                return why;
            }
            eprintln!("The coordinator ended: {why}");
            loop {
                room.wait().await;
                tokio::time::sleep(RESTART_PAUSE).await;
                match run::run(self.config.clone(), self.stop.clone()).await {
                    Ok(Running { join, .. }) => {
                        self.join = join;
                        break;
                    }
                    Err(_) if room.short().is_some() => {}
                    Err(error) => return line(error),
                }
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

/// Makes the cluster's directory. Everything in it is private but the way to the tasks' directories, which other users must pass.
fn make_dir(args: &UpArgs) -> Result<PathBuf, String> {
    let root = rustix::process::geteuid().is_root();
    let dir = match &args.dir {
        Some(dir) => dir.clone(),
        // Tasks run as nobody then, who can't pass through root's home.
        None if root => PathBuf::from(UpArgs::ROOT_DIR),
        None => args.dir().ok_or("no home directory; say where to keep things with --dir")?,
    };
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&dir);
    made.map_err(|e| format!("can't make {}: {e}; choose another with --dir", dir.display()))?;
    let dir = std::fs::canonicalize(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mode = std::fs::Permissions::from_mode(0o711);
    std::fs::set_permissions(&dir, mode).map_err(|e| format!("{}: {e}", dir.display()))?;
    if root && let Some(closed) = dir.ancestors().skip(1).find(|d| std::fs::metadata(d).is_ok_and(|m| m.permissions().mode() & 0o001 == 0))
    {
        return Err(format!(
            "tasks run as nobody, who can't pass through {} to {}; choose another place with --dir",
            closed.display(),
            dir.display()
        ));
    }
    for private in ["s3", "coordinator", "nats"] {
        make_private_dir(&dir.join(private))?;
    }
    Ok(dir)
}

fn worker_config(args: &UpArgs, dir: &std::path::Path) -> Result<Config, String> {
    let name = WorkerId::new("local").map_err(line)?;
    let mut config = Config::new(name, dir.join("worker"));
    config.slots = args.slots.unwrap_or(config.slots);
    config.isolation = vec![Isolation::Process];
    if args.null {
        config.isolation.push(Isolation::Null);
    }
    if rustix::process::geteuid().is_root() {
        config.task_user = Some(NOBODY);
    }
    if args.task_users.is_some() {
        config.task_user = args.task_users;
        config.task_user_per_slot = true;
    }
    Ok(config)
}
