//! Puts a coordinator together and runs it: NATS, bucket, cluster identity, RocksDB, driver, API.
//!
//! Owns the order of the start and one clear line for each way it can fail. Nothing is served, and nothing is written but the
//! identity of a new cluster, before everything fits together. Does not own what the parts do.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream;
use bytes::Bytes;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use volley_jobspecs::keys;
use volley_store::{EnsureBucketError, GetError, ProbeError, PutError, Store};

use crate::api::auth::secret_hash;
use crate::api::streams::Streams;
use crate::api::{self, App, exec, listen};
use crate::config::{ConfigError, CoordinatorConfig};
use crate::driver::{self, DriverError, Handle, Parts};
use crate::figures;
use crate::io::bus::{self, ConnectError};
use crate::io::checkpoint::Keeper;
use crate::io::garbage::Collector;
use crate::io::levels::Levels;
use crate::io::log::{Log, LogError, Shape};
use crate::io::objects::Objects;
use crate::io::restore::{self, RestoreError};
use crate::io::rocks::Watch;
use crate::io::volumes::Volumes;
use crate::io::{stream, templates};
use crate::metrics::Metrics;

/// Pause between two tries to reach NATS at the start.
const CONNECT_PAUSE: Duration = Duration::from_secs(1);
/// A database that has to be built again so soon after the last time is a fault that building it does not mend.
const REBUILD_PAUSE: Duration = Duration::from_secs(60 * 60);
/// How long the readers of a database may take to let go of it.
const CLOSE_PATIENCE: Duration = Duration::from_secs(15);
/// How often is looked whether they have.
const CLOSE_LOOK: Duration = Duration::from_millis(20);
/// Largest identity object, in bytes.
const IDENTITY_BYTES_MAX: u64 = 4_096;

/// Why a coordinator did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is wrong.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// NATS can't be used.
    #[error("{0}")]
    Nats(#[from] ConnectError),
    /// The log can't be used.
    #[error("{0}")]
    Log(#[from] LogError),
    /// The bucket's client can't be made.
    #[error("{0}")]
    Store(#[from] volley_store::ConnectError),
    /// The bucket is not there.
    #[error("{0}")]
    Bucket(#[from] EnsureBucketError),
    /// The bucket can't serve a cluster.
    #[error("{0}")]
    Probe(#[from] ProbeError),
    /// The cluster's identity can't be read from the bucket.
    #[error("reading the cluster's identity: {0}")]
    ReadIdentity(#[from] GetError),
    /// The cluster's identity can't be written to the bucket.
    #[error("writing the cluster's identity: {0}")]
    WriteIdentity(#[from] PutError),
    /// The identity in the bucket is damaged.
    #[error("{url} is no identity of a Volley cluster ({why}); is this the right bucket and prefix?")]
    Identity {
        /// Where it lies.
        url: String,
        /// What is wrong.
        why: String,
    },
    /// The bucket belongs to a cluster whose log is not at this NATS.
    #[error(
        "bucket {bucket} belongs to cluster {cluster}, but NATS at {nats} has no log: it is another NATS, or its log was lost. Point to the right one, restore the log, or use an empty bucket (or prefix) for a new cluster"
    )]
    NoLog {
        /// The bucket.
        bucket: String,
        /// Whose it is.
        cluster: String,
        /// Where the log should be.
        nats: String,
    },
    /// Log and bucket belong to different clusters.
    #[error(
        "the log at {nats} belongs to cluster {log}, bucket {bucket} to cluster {found}; point to the bucket of {log} or to the NATS of {found}"
    )]
    OtherBucket {
        /// Where the log is.
        nats: String,
        /// The log's cluster.
        log: String,
        /// The bucket.
        bucket: String,
        /// The bucket's cluster.
        found: String,
    },
    /// The directory, or what is to be loaded into it.
    #[error("{0}")]
    Restore(#[from] RestoreError),
    /// The system has no randomness.
    #[error("the system gives no randomness: {0}")]
    Random(String),
    /// The driver did not start.
    #[error("{0}")]
    Driver(#[from] DriverError),
    /// The API can't listen.
    #[error("can't listen on {listen}: {source}; choose another address or port")]
    Listen {
        /// Where.
        listen: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
}

/// Why a running coordinator ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The driver ended.
    #[error("{0}")]
    Driver(#[from] DriverError),
    /// A part panicked.
    #[error("a part of the coordinator panicked: {0}")]
    Panicked(String),
    /// Its database was to be built again, which failed.
    #[error("building the state again: {0}")]
    Again(#[from] Box<StartError>),
    /// Its database was to be built again, but something still reads it.
    #[error("the RocksDB is still in use after {0:?}, so it can't be built again; the next start does it")]
    StillOpen(Duration),
}

/// A running coordinator.
#[derive(Debug)]
pub struct Running {
    /// Where the API listens.
    pub addr: SocketAddr,
    /// The cluster's id.
    pub cluster: String,
    /// The coordinator. It keeps the database open: who holds it keeps a damaged one from being built again within this process.
    pub handle: Handle,
    /// What the API works with; for serving it elsewhere too. Keeps the database open as well.
    pub app: Arc<App>,
    /// Ends when `stop` was asked for, or with the reason why it can't go on.
    pub join: JoinHandle<Result<(), RunError>>,
}

/// What outlives a rebuild of the database.
struct Ground {
    config: CoordinatorConfig,
    bootstrap_hash: Option<String>,
    client: async_nats::Client,
    connections: watch::Receiver<u64>,
    store: Store,
    log: Log,
    metrics: Metrics,
    volumes: Volumes,
    /// As given, and with the port that was found free.
    listen: SocketAddr,
}

/// From an opened database to its end.
struct Life {
    driver: JoinHandle<Result<(), DriverError>>,
    api: JoinHandle<()>,
    keeper: JoinHandle<()>,
    collector: JoinHandle<()>,
    rows: Watch,
    stop: CancellationToken,
}

/// Starts a coordinator; it runs until `stop`. Boxed: an `async fn` is compiled where it is awaited, and so all of this with the binary, not
/// with how this crate is optimised.
///
/// # Errors
/// [`StartError`]: one clear line.
pub fn run(config: CoordinatorConfig, stop: CancellationToken) -> BoxFuture<'static, Result<Running, StartError>> {
    Box::pin(start(config, stop))
}

async fn start(config: CoordinatorConfig, stop: CancellationToken) -> Result<Running, StartError> {
    let bootstrap_hash = config.check()?.map(secret_hash);
    let (client, connections) = connect(&config, &config.name).await?;
    let store = Store::connect(&config.store).await?;
    if config.create_bucket && store.ensure_bucket().await? {
        tracing::info!(bucket = store.bucket(), "made the bucket");
    }
    store.probe().await?;
    let log = identify(&config, &store, client.clone()).await?;
    let (listen, cluster) = (config.listen, log.cluster.clone());
    let volumes = Volumes::new(&store, config.volume_keys.clone());
    let mut ground = Ground { config, bootstrap_hash, client, connections, store, log, metrics: Metrics::default(), volumes, listen };
    // Before the driver starts: a coordinator that can't be reached should not lead.
    let listener = ground.listen().await?;
    let addr = listener.local_addr().map_err(|source| StartError::Listen { listen, source })?;
    ground.listen = addr;
    let (life, app) = ground.begin(listener, &stop).await?;
    let join = tokio::spawn(supervise(ground, life, stop));
    tracing::info!(%addr, cluster, "the coordinator runs");
    Ok(Running { addr, cluster, handle: app.handle.clone(), app, join })
}

impl Ground {
    async fn listen(&self) -> Result<TcpListener, StartError> {
        TcpListener::bind(self.listen).await.map_err(|source| StartError::Listen { listen: self.listen, source })
    }

    /// Opens the database and starts everything on it. A database that turns out damaged is built again, once.
    async fn begin(&self, listener: TcpListener, stop: &CancellationToken) -> Result<(Life, Arc<App>), StartError> {
        let stop = stop.child_token();
        let (rows, name, handle, driver) = match self.drive(&stop).await {
            Err(StartError::Driver(error)) if error.wants_rebuild() => {
                self.drop_rows(&error)?;
                self.drive(&stop).await?
            }
            driven => driven?,
        };
        let app = Arc::new(App {
            handle: handle.clone(),
            store: self.store.clone(),
            volumes: self.volumes.clone(),
            store_config: self.config.store.clone(),
            items_buckets: self.config.items_buckets.clone(),
            bootstrap_hash: self.bootstrap_hash.clone(),
            features: self.config.features.clone(),
            upload_bytes_max: self.config.upload_bytes_max,
            local_metrics: self.config.local_metrics,
            observer: self.config.observer.clone(),
            cluster: self.log.cluster.clone(),
            streams: Streams::default(),
            sessions: exec::sessions(),
            keep_alive: self.config.keep_alive,
            stop: stop.clone(),
        });
        if let Some(observer) = &self.config.observer
            && let Some(every) = observer.figures_every()
        {
            tokio::spawn(figures::tell(app.clone(), observer.clone(), every, stop.clone()));
        }
        let api = tokio::spawn(listen::serve(listener, api::router(app.clone()), self.config.limits, stop.clone()));
        let collector = Collector {
            handle: handle.clone(),
            store: self.store.clone(),
            collect: self.config.collect,
            volumes: self.volumes.clone(),
            name: name.clone(),
        };
        let collector = tokio::spawn(collector.run(stop.clone()));
        templates::make(self.log.context()).await;
        let levels = Levels::new(self.log.context().clone(), self.log.replicas);
        let (store, dir, every) = (self.store.clone(), self.config.data_dir.clone(), self.config.checkpoints);
        let keeper = tokio::spawn(Keeper { handle, store, dir, name, every, levels }.run(stop.clone()));
        Ok((Life { driver, api, keeper, collector, rows, stop }, app))
    }

    async fn drive(&self, stop: &CancellationToken) -> Result<(Watch, String, Handle, JoinHandle<Result<(), DriverError>>), StartError> {
        // New at each start: what an earlier life wrote must not be taken for our own.
        let name = format!("{}-{}", self.config.name, random_hex(4)?);
        let rows = restore::open(&self.config.data_dir, &self.store, &self.log).await?;
        let trailer = Arc::new(Objects::new(self.store.clone(), rows.clone(), self.metrics.clone(), self.volumes.clone()));
        let watch = rows.watch();
        let parts = Parts {
            name: name.clone(),
            client: self.client.clone(),
            connections: self.connections.clone(),
            log: self.log.clone(),
            rows,
            trailer,
            keeper: Arc::new(self.volumes.clone()),
            tuning: self.config.tuning,
            replicas: self.log.replicas,
            metrics: self.metrics.clone(),
            observer: self.config.observer.clone(),
        };
        let (handle, driver) = driver::start(parts, stop.clone()).await?;
        Ok((watch, name, handle, driver))
    }

    /// Has the next opening drop the database.
    fn drop_rows(&self, why: &DriverError) -> Result<(), StartError> {
        tracing::error!("dropping the RocksDB in {} and building it again from checkpoint and log: {why}", self.config.data_dir.display());
        Ok(restore::mark(&self.config.data_dir)?)
    }
}

/// Waits for the end of a coordinator. Where a rebuild of its database helps, that is no end, unless the last one is not long past.
async fn supervise(ground: Ground, life: Life, stop: CancellationToken) -> Result<(), RunError> {
    let (mut life, mut rebuilt) = (life, None::<Instant>);
    loop {
        let rows = life.rows.clone();
        let ended = ended(life).await;
        let error = match &ended {
            Err(RunError::Driver(error)) if error.wants_rebuild() || error.wants_checkpoint() => error,
            _ => return ended,
        };
        if error.wants_rebuild() {
            ground.drop_rows(error).map_err(Box::new)?;
        } else {
            tracing::warn!("loading a checkpoint: {error}");
        }
        if rebuilt.is_some_and(|rebuilt| rebuilt.elapsed() < REBUILD_PAUSE) {
            return ended;
        }
        rebuilt = Some(Instant::now());
        let waited = Instant::now();
        while !rows.closed() {
            if waited.elapsed() > CLOSE_PATIENCE {
                return Err(RunError::StillOpen(CLOSE_PATIENCE));
            }
            tokio::time::sleep(CLOSE_LOOK).await;
        }
        let listener = ground.listen().await.map_err(Box::new)?;
        (life, _) = ground.begin(listener, &stop).await.map_err(Box::new)?;
    }
}

/// Waits for driver and API; when one ends, so does the other.
async fn ended(life: Life) -> Result<(), RunError> {
    let Life { mut driver, mut api, keeper, collector, stop, .. } = life;
    let panicked = |error: tokio::task::JoinError| RunError::Panicked(error.to_string());
    let ended = tokio::select! {
        ended = &mut driver => {
            stop.cancel();
            _ = api.await;
            ended.map_err(panicked)?.map_err(RunError::Driver)
        }
        ended = &mut api => {
            stop.cancel();
            let driven = driver.await.map_err(panicked)?;
            ended.map_err(panicked)?;
            driven.map_err(RunError::Driver)
        }
    };
    _ = keeper.await;
    _ = collector.await;
    ended
}

fn random_hex(bytes: usize) -> Result<String, StartError> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).map_err(|error| StartError::Random(error.to_string()))?;
    Ok(hex::encode(random))
}

/// Connects to NATS; one that isn't there yet is waited for. One that won't do is refused at once.
async fn connect(config: &CoordinatorConfig, name: &str) -> Result<(async_nats::Client, watch::Receiver<u64>), StartError> {
    let started = Instant::now();
    loop {
        let error = match bus::connect(&config.nats, name).await {
            Ok(connected) => return Ok(connected),
            Err(error @ ConnectError::Unreachable { .. }) => error,
            Err(error) => return Err(error.into()),
        };
        let waited = started.elapsed();
        if waited + CONNECT_PAUSE > config.start_patience {
            return Err(error.into());
        }
        tracing::warn!(%error, "trying again for {} s more", (config.start_patience - waited).as_secs());
        tokio::time::sleep(CONNECT_PAUSE).await;
    }
}

/// What the bucket says of its cluster.
#[derive(Debug, Serialize, Deserialize)]
struct Identity {
    cluster: String,
}

/// Opens the log once it is sure that log and bucket belong to one cluster; gives a new cluster its identity.
async fn identify(config: &CoordinatorConfig, store: &Store, client: async_nats::Client) -> Result<Log, StartError> {
    let nats = config.nats.url.clone();
    let mut found = bucket_identity(store).await?;
    if let Some(cluster) = &found
        && stream::find(&jetstream::new(client.clone())).await?.is_none()
    {
        return Err(StartError::NoLog { bucket: store.url(""), cluster: cluster.clone(), nats });
    }
    let shape = Shape { replicas: config.replicas, bytes_max: config.log_bytes_max };
    let log = Log::open(client, shape, &format!("c{}", random_hex(8)?)).await?;
    if found.is_none() {
        let identity = serde_json::json!({ "cluster": log.cluster }).to_string();
        let outcome = store.put_if_absent(keys::CLUSTER, Bytes::from(identity)).await?;
        // Refused: another coordinator of (we hope) the same cluster was faster.
        found = if outcome.is_written() { Some(log.cluster.clone()) } else { bucket_identity(store).await? };
    }
    match found {
        Some(found) if found != log.cluster => Err(StartError::OtherBucket { nats, log: log.cluster, bucket: store.url(""), found }),
        Some(_) | None => Ok(log),
    }
}

async fn bucket_identity(store: &Store) -> Result<Option<String>, StartError> {
    let bytes = match store.get(keys::CLUSTER, IDENTITY_BYTES_MAX).await {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == volley_store::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let identity: Result<Identity, _> = serde_json::from_slice(&bytes);
    identity
        .map(|identity| Some(identity.cluster))
        .map_err(|error| StartError::Identity { url: store.url(keys::CLUSTER), why: error.to_string() })
}
