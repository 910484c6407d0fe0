//! The S3 server that `volley up` embeds: one directory on a local disk, one pair of credentials.
//!
//! Owns listening, connections, shutdown, and the order of start-up. `service` speaks the protocol,
//! `disk` and its neighbours keep the bytes. It serves Volley's own needs: what it does not know
//! (versions, ACLs, lifecycle rules, server-side encryption) is refused as not implemented.
//!
//! On disk, under `root`:
//! ```text
//! lock                       held while a server runs
//! buckets/<bucket>/…         objects, one file each (layout.rs, object_file.rs)
//! uploads/<id>/              multipart uploads (uploads.rs)
//! tmp/                       files being written; emptied at start
//! ```

mod answer;
mod convert;
mod disk;
mod layout;
mod object_file;
mod service;
mod spool;
mod uploads;
mod walk;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use disk::Disk;
use service::Service;

/// Connections served at once; more wait in the kernel's backlog. One process tree needs far fewer.
const CONNECTIONS_MAX: usize = 1024;
/// A peer that sends no request head for this long is let go.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Requests under way at shutdown may take this long; then their connections are cut.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
/// Pause after a failed accept (out of file descriptors): trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What the server is told.
#[derive(Clone)]
pub struct EmbeddedConfig {
    /// Directory for everything; made if missing, readable by its owner only.
    pub root: PathBuf,
    /// Where to listen; port 0 picks a free one.
    pub bind: SocketAddr,
    /// The one access key.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
    /// Bytes of the disk that writes leave free for what else lives there; a write that would not is refused as on a full disk.
    pub reserve_bytes: u64,
}

// Written by hand so that no log line can ever show the secret.
impl std::fmt::Debug for EmbeddedConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddedConfig")
            .field("root", &self.root)
            .field("bind", &self.bind)
            .field("access_key", &self.access_key)
            .finish_non_exhaustive()
    }
}

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The directory cannot be used.
    #[error("embedded S3: cannot use {}: {source}; check the directory's owner, permissions and free space", .path.display())]
    Root {
        /// The path that failed.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another server has the directory.
    #[error("embedded S3: {} is in use by another server; stop it, or choose another directory", .root.display())]
    InUse {
        /// The directory.
        root: PathBuf,
    },
    /// The address cannot be listened on.
    #[error("embedded S3: cannot listen on {bind}: {source}; choose another address or port")]
    Bind {
        /// As configured.
        bind: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A running server. Dropping the handle leaves it running until the runtime ends; [`shutdown`](Self::shutdown) ends it in order.
#[derive(Debug)]
pub struct EmbeddedServer {
    addr: SocketAddr,
    stop: CancellationToken,
    accepting: JoinHandle<()>,
}

impl EmbeddedServer {
    /// Takes the directory, empties `tmp/`, and listens.
    pub async fn start(config: EmbeddedConfig) -> Result<Self, StartError> {
        let root = config.root.clone();
        let opened = tokio::task::spawn_blocking(move || Disk::open(root, config.reserve_bytes)).await;
        let disk = match opened {
            Ok(disk) => disk?,
            Err(join) => std::panic::resume_unwind(join.into_panic()),
        };
        let bind_error = |source| StartError::Bind { bind: config.bind, source };
        let listener = TcpListener::bind(config.bind).await.map_err(bind_error)?;
        let addr = listener.local_addr().map_err(bind_error)?;

        let mut builder = S3ServiceBuilder::new(Service::new(Arc::new(disk)));
        builder.set_auth(SimpleAuth::from_single(config.access_key, config.secret_key));
        let stop = CancellationToken::new();
        let accepting = tokio::spawn(accept(listener, builder.build(), stop.clone()));
        Ok(Self { addr, stop, accepting })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://host:port`, for [`StoreConfig`](crate::StoreConfig).
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Takes no new requests, lets those under way finish (10 s at most), and frees the directory.
    pub async fn shutdown(self) {
        self.stop.cancel();
        // A panic in the accept loop has been printed by the panic hook; there is nothing left to stop.
        let _ = self.accepting.await;
    }
}

async fn accept(listener: TcpListener, service: S3Service, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let connections = TaskTracker::new();
    let cut = CancellationToken::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = accept_one(&listener, &places) => accepted,
        };
        match accepted {
            Ok((stream, place)) => {
                let serving = serve(stream, service.clone(), stop.clone());
                let cut = cut.clone();
                connections.spawn(async move {
                    let _place = place;
                    tokio::select! {
                        () = cut.cancelled() => {}
                        () = serving => {}
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "embedded S3: accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
    if tokio::time::timeout(SHUTDOWN_GRACE, connections.wait()).await.is_err() {
        tracing::warn!(left = connections.len(), "embedded S3: cutting connections that did not finish in time");
        cut.cancel();
        connections.wait().await;
    }
}

async fn accept_one(listener: &TcpListener, places: &Arc<Semaphore>) -> std::io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _peer) = listener.accept().await?;
    // Answers are small and waited for.
    stream.set_nodelay(true)?;
    Ok((stream, place))
}

async fn serve(stream: TcpStream, service: S3Service, stop: CancellationToken) {
    let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let end = tokio::select! {
        end = connection.as_mut() => end,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = end {
        // A peer that goes away mid-request is its own affair.
        tracing::debug!(%error, "embedded S3: connection ended");
    }
}
