//! Puts a coordinator together and runs it: NATS, bucket, cluster identity, RocksDB, driver, API.
//!
//! Owns the order of the start and one clear line for each way it can fail. Nothing is served, and nothing is written but the
//! identity of a new cluster, before everything fits together. Does not own what the parts do.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use volley_jobspecs::keys;
use volley_jobspecs::subjects::LOG_STREAM;
use volley_store::{EnsureBucketError, GetError, ProbeError, PutError, Store};

use crate::api::auth::secret_hash;
use crate::api::streams::Streams;
use crate::api::{self, App};
use crate::config::{ConfigError, CoordinatorConfig};
use crate::driver::{self, DriverError, Handle, Parts};
use crate::io::bus::{self, ConnectError};
use crate::io::log::{Log, LogError};
use crate::io::objects::Objects;
use crate::io::rocks::RocksRows;
use crate::metrics::Metrics;
use crate::state::rows::{Rows, RowsError, Table, Write};

/// Pause between two tries to reach NATS at the start.
const CONNECT_PAUSE: Duration = Duration::from_secs(1);
/// RocksDB row with the cluster's id.
const CLUSTER_ROW: &[u8] = b"cluster";
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
    #[error("bucket {bucket} belongs to cluster {cluster}, but NATS at {nats} has no log: it is another NATS, or its log was lost. Point to the right one, restore the log, or use an empty bucket (or prefix) for a new cluster")]
    NoLog {
        /// The bucket.
        bucket: String,
        /// Whose it is.
        cluster: String,
        /// Where the log should be.
        nats: String,
    },
    /// Log and bucket belong to different clusters.
    #[error("the log at {nats} belongs to cluster {log}, bucket {bucket} to cluster {found}; point to the bucket of {log} or to the NATS of {found}")]
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
    /// RocksDB belongs to another cluster.
    #[error("the RocksDB in {} belongs to cluster {found}, log and bucket to cluster {log}; choose another directory, or delete this one: it is rebuilt from the log", .path.display())]
    OtherRows {
        /// The directory.
        path: PathBuf,
        /// The log's cluster.
        log: String,
        /// RocksDB's cluster.
        found: String,
    },
    /// The directory can't be made.
    #[error("can't make the directory {}: {source}; check its owner and permissions", .path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// RocksDB can't be opened.
    #[error("can't open the RocksDB in {}: {source} (does another coordinator use it?)", .path.display())]
    Rows {
        /// Where.
        path: PathBuf,
        /// Why.
        source: RowsError,
    },
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
    /// The API ended.
    #[error("the API stopped: {0}")]
    Api(std::io::Error),
    /// A part panicked.
    #[error("a part of the coordinator panicked: {0}")]
    Panicked(String),
}

/// A running coordinator.
#[derive(Debug)]
pub struct Running {
    /// Where the API listens.
    pub addr: SocketAddr,
    /// The cluster's id.
    pub cluster: String,
    /// The coordinator.
    pub handle: Handle,
    /// What the API works with; for serving it elsewhere too.
    pub app: Arc<App>,
    /// Ends when `stop` was asked for, or with the reason why it can't go on.
    pub join: JoinHandle<Result<(), RunError>>,
}

/// Starts a coordinator; it runs until `stop`.
///
/// # Errors
/// [`StartError`]: one clear line.
pub async fn run(config: CoordinatorConfig, stop: CancellationToken) -> Result<Running, StartError> {
    let bootstrap_hash = config.check()?.map(secret_hash);
    let name = format!("{}-{}", config.name, random_hex(4)?);
    let (client, connections) = connect(&config, &name).await?;
    let store = Store::connect(&config.store).await?;
    if config.create_bucket && store.ensure_bucket().await? {
        tracing::info!(bucket = store.bucket(), "made the bucket");
    }
    store.probe().await?;
    let log = identify(&config, &store, client.clone()).await?;
    let rows = open_rows(&config, &log.cluster).await?;
    let metrics = Metrics::default();
    let trailer = Arc::new(Objects::new(store.clone(), rows.clone(), metrics.clone()));
    // Before the driver starts: a coordinator that can't be reached should not lead.
    let listen_error = |source| StartError::Listen { listen: config.listen, source };
    let listener = tokio::net::TcpListener::bind(config.listen).await.map_err(listen_error)?;
    let addr = listener.local_addr().map_err(listen_error)?;
    let cluster = log.cluster.clone();
    let parts = Parts { name, client, connections, log, rows, trailer, tuning: config.tuning, replicas: config.replicas, metrics };
    let stop = stop.child_token();
    let (handle, driver) = driver::start(parts, stop.clone()).await?;
    let app = Arc::new(App {
        handle: handle.clone(),
        store,
        store_config: config.store,
        items_buckets: config.items_buckets,
        bootstrap_hash,
        features: config.features,
        upload_bytes_max: config.upload_bytes_max,
        cluster: cluster.clone(),
        streams: Streams::default(),
        stop: stop.clone(),
    });
    let serving = tokio::spawn(api::serve(listener, app.clone(), stop.clone()));
    let join = tokio::spawn(supervise(driver, serving, stop));
    tracing::info!(%addr, cluster, "the coordinator runs");
    Ok(Running { addr, cluster, handle, app, join })
}

/// Waits for driver and API; when one ends, so does the other.
async fn supervise(driver: JoinHandle<Result<(), DriverError>>, api: JoinHandle<std::io::Result<()>>, stop: CancellationToken) -> Result<(), RunError> {
    let (mut driver, mut api) = (driver, api);
    let panicked = |error: tokio::task::JoinError| RunError::Panicked(error.to_string());
    tokio::select! {
        ended = &mut driver => {
            stop.cancel();
            let ended = ended.map_err(panicked)?;
            _ = api.await;
            Ok(ended?)
        }
        ended = &mut api => {
            stop.cancel();
            let driven = driver.await.map_err(panicked)?;
            ended.map_err(panicked)?.map_err(RunError::Api)?;
            Ok(driven?)
        }
    }
}

fn random_hex(bytes: usize) -> Result<String, StartError> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).map_err(|error| StartError::Random(error.to_string()))?;
    Ok(hex::encode(random))
}

/// Connects to NATS; one that isn't there yet is waited for. One that won't do is refused at once.
async fn connect(config: &CoordinatorConfig, name: &str) -> Result<(async_nats::Client, tokio::sync::watch::Receiver<u64>), StartError> {
    let started = Instant::now();
    loop {
        let error = match bus::connect(&config.nats, name).await {
            Ok(connected) => return Ok(connected),
            Err(error @ (ConnectError::Old { .. } | ConnectError::NoJetStream { .. } | ConnectError::Credentials { .. })) => return Err(error.into()),
            Err(error @ ConnectError::Unreachable { .. }) => error,
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
        && !has_log(client.clone()).await?
    {
        return Err(StartError::NoLog { bucket: store.url(""), cluster: cluster.clone(), nats });
    }
    let bytes_max = config.log_bytes_max.and_then(|bytes| i64::try_from(bytes).ok()).unwrap_or(-1);
    let log = Log::open(client, config.replicas, bytes_max, &format!("c{}", random_hex(8)?)).await?;
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
    identity.map(|identity| Some(identity.cluster)).map_err(|error| StartError::Identity { url: store.url(keys::CLUSTER), why: error.to_string() })
}

async fn has_log(client: async_nats::Client) -> Result<bool, StartError> {
    let context = jetstream::new(client);
    match context.get_stream(LOG_STREAM).await {
        Ok(_) => Ok(true),
        Err(error) => match error.kind() {
            jetstream::context::GetStreamErrorKind::JetStream(error) if error.error_code() == jetstream::ErrorCode::STREAM_NOT_FOUND => Ok(false),
            _ => Err(LogError::Nats { what: "looking for the stream VOLLEY_LOG", why: error.to_string() }.into()),
        },
    }
}

async fn open_rows(config: &CoordinatorConfig, cluster: &str) -> Result<RocksRows, StartError> {
    let path = config.data_dir.clone();
    let directory_error = |source| StartError::Directory { path: path.clone(), source };
    tokio::fs::create_dir_all(&path).await.map_err(directory_error)?;
    let opened = {
        let path = path.clone();
        tokio::task::spawn_blocking(move || RocksRows::open(&path)).await
    };
    let rows_error = |source| StartError::Rows { path: path.clone(), source };
    let rows = opened.unwrap_or_else(|error| Err(RowsError::Store(error.to_string()))).map_err(rows_error)?;
    match rows.get(Table::Meta, CLUSTER_ROW).map_err(rows_error)? {
        Some(found) if found != cluster.as_bytes() => {
            let found = String::from_utf8_lossy(&found).into_owned();
            Err(StartError::OtherRows { path, log: cluster.to_owned(), found })
        }
        Some(_) => Ok(rows),
        None => {
            let write = Write::Put(Table::Meta, CLUSTER_ROW.to_vec(), cluster.as_bytes().to_vec());
            rows.write(vec![write]).map_err(rows_error)?;
            Ok(rows)
        }
    }
}
