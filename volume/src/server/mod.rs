//! The volume server: a process of a worker that has its volumes open, so that what kills it kills no worker, and what a worker does waits for no disk.
//!
//! Owns the connection to the worker, and a thread for each thing that is asked for: volumes block, and none may be used on a thread of the runtime. Does not own what
//! is done (`perform`), what is open (`table`), nor what earlier servers left (`aside`).
//!
//! It ends when its worker's end of the connection is closed, as if it had been killed: what was acknowledged is in the logs. Nothing of it is wanted then. A worker that
//! starts anew has other attempts, copies belong to none of them, and a log that has more than S3 is put aside.

mod aside;
mod perform;
pub mod protocol;
mod table;

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use volley_store::{Store, StoreConfig};

use crate::Limits;
use crate::format::FormatError;
use crate::format::seal::ClusterKeys;
use crate::host::{Host, lock};
use protocol::{Asked, Bounds, Refused, Reply, Request, Said, Setup, receive, send};
use table::Table;

/// Most things that are done at once; the worker's next request waits. Each has a thread, and most wait for S3.
const AT_ONCE_MAX: usize = 128;
/// Bytes of a thread's stack: as those of connections.
const STACK_BYTES: usize = 1 << 20;
/// How long a server before this one may take to end: it does so at once, unless the disk holds it up.
const PREDECESSOR_WAIT: Duration = Duration::from_secs(20);
/// Between two looks at whether it has.
const PREDECESSOR_PAUSE: Duration = Duration::from_millis(20);
/// Between two looks for volumes that have failed.
const WATCH_PAUSE: Duration = Duration::from_millis(100);
/// Between two looks for logs that were kept long enough.
const SWEEP_EVERY: Duration = Duration::from_secs(3_600);

/// Why there is no server, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The connection to the worker.
    #[error("the worker's connection: {0}")]
    Connection(#[from] io::Error),
    /// It said something else first.
    #[error("the worker began with something else than how to begin")]
    Setup,
    /// A directory.
    #[error("{what} {}: {source}", .path.display())]
    Dir {
        /// What was done.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// Another server has the directory.
    #[error("another volume server uses {}", .0.display())]
    Locked(PathBuf),
    /// The keys.
    #[error("the cluster's keys for volumes: {0}")]
    Keys(#[from] FormatError),
    /// S3.
    #[error("the bucket of volumes: {0}")]
    Store(String),
    /// A thread.
    #[error("no thread: {0}")]
    Thread(io::Error),
}

/// Serves a worker until it closes the connection. Blocks: call it on a thread that is none of `runtime`'s, which carries out requests to S3. What is open is not closed
/// then: end the process.
///
/// # Errors
/// [`ServerError`].
pub fn run(connection: &UnixStream, runtime: &Handle) -> Result<(), ServerError> {
    let Some(Asked { id, request: Request::Setup(setup) }) = receive(connection)? else { return Err(ServerError::Setup) };
    let saying = Arc::new(Saying(Mutex::new(connection.try_clone()?)));
    let (server, _locked) = match Server::open(&setup, runtime, Arc::clone(&saying)) {
        Ok(server) => server,
        Err(why) => {
            let refused = Refused::new(protocol::RefusedKind::Host, &why.to_string());
            saying.say(&Said::Reply { id, reply: Reply::Refused(refused) });
            return Err(why);
        }
    };
    let server = Arc::new(server);
    let watching = Arc::clone(&server);
    let watch = std::thread::Builder::new().name("volumes watch".into()).stack_size(STACK_BYTES);
    watch.spawn(move || watching.watch()).map_err(ServerError::Thread)?;
    saying.say(&Said::Reply { id, reply: Reply::Done });
    while let Some(Asked { id, request }) = receive(connection)? {
        let place = server.places.take();
        let (serving, saying) = (Arc::clone(&server), Arc::clone(&saying));
        let perform = move || {
            let reply = serving.perform(request);
            drop(place);
            saying.say(&Said::Reply { id, reply });
        };
        std::thread::Builder::new().name("volume".into()).stack_size(STACK_BYTES).spawn(perform).map_err(ServerError::Thread)?;
    }
    Ok(())
}

/// What all that is done shares.
struct Server {
    host: Arc<Host>,
    /// This host's name, for people.
    name: String,
    dir: PathBuf,
    table: Table,
    saying: Arc<Saying>,
    places: Arc<Places>,
}

impl Server {
    fn open(setup: &Setup, runtime: &Handle, saying: Arc<Saying>) -> Result<(Self, std::fs::File), ServerError> {
        let dir = PathBuf::from(&setup.dir);
        let failed = |what| {
            let path = dir.clone();
            move |source| ServerError::Dir { what, path, source }
        };
        std::fs::create_dir_all(&dir).map_err(failed("making"))?;
        let locked = take(&dir)?;
        let keys = ClusterKeys::parse(&setup.keys)?;
        let store = runtime.block_on(Store::connect(&store_config(setup))).map_err(|e| ServerError::Store(e.to_string()))?;
        let host = Host::new(Arc::new(store), keys, dir.clone(), runtime.clone(), limits(&setup.bounds));
        if setup.fresh {
            aside::begin(&dir).map_err(failed("clearing"))?;
        }
        let table = Table::default();
        Ok((Self { host, name: setup.host.clone(), dir, table, saying, places: Arc::default() }, locked))
    }

    /// Tells of volumes that have failed, and removes logs that were kept long enough, for as long as the process is there.
    fn watch(&self) {
        let mut swept = None::<Instant>;
        loop {
            for (handle, refused) in self.table.failed() {
                self.saying.say(&Said::Failed { handle, refused });
            }
            if swept.is_none_or(|swept| swept.elapsed() >= SWEEP_EVERY) {
                aside::sweep(&self.dir, std::time::SystemTime::now());
                swept = Some(Instant::now());
            }
            std::thread::sleep(WATCH_PAUSE);
        }
    }
}

/// Makes the directory this server's alone. One that was just started may have to wait until the one before it is gone.
fn take(dir: &Path) -> Result<std::fs::File, ServerError> {
    let path = dir.join("server.lock");
    let failed = |source| ServerError::Dir { what: "locking", path: path.clone(), source };
    let file = std::fs::File::create(&path).map_err(failed)?;
    let begin = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::WouldBlock) if begin.elapsed() < PREDECESSOR_WAIT => std::thread::sleep(PREDECESSOR_PAUSE),
            Err(std::fs::TryLockError::WouldBlock) => return Err(ServerError::Locked(dir.to_owned())),
            Err(std::fs::TryLockError::Error(e)) => return Err(failed(e)),
        }
    }
}

fn store_config(setup: &Setup) -> StoreConfig {
    StoreConfig {
        endpoint: setup.endpoint.clone(),
        region: setup.region.clone(),
        prefix: setup.prefix.clone(),
        credentials: setup.credentials.clone(),
        force_path_style: setup.path_style,
        ..StoreConfig::new("", &setup.bucket, "", "")
    }
}

fn limits(bounds: &Bounds) -> Limits {
    Limits {
        commit_every: Duration::from_millis(bounds.commit_every_ms),
        commit_bytes: bounds.commit_bytes,
        dirty_bytes_max: bounds.dirty_bytes_max,
        stall_max: Duration::from_millis(bounds.stall_max_ms),
        log_keep_bytes: bounds.log_keep_bytes,
        ephemeral_bytes_max: bounds.ephemeral_bytes_max,
        cache_bytes: usize::try_from(bounds.cache_bytes).unwrap_or(usize::MAX),
        cache_disk_bytes: bounds.cache_disk_bytes,
    }
}

impl From<&Limits> for Bounds {
    fn from(limits: &Limits) -> Self {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            commit_every_ms: ms(limits.commit_every),
            commit_bytes: limits.commit_bytes,
            dirty_bytes_max: limits.dirty_bytes_max,
            stall_max_ms: ms(limits.stall_max),
            log_keep_bytes: limits.log_keep_bytes,
            ephemeral_bytes_max: limits.ephemeral_bytes_max,
            cache_bytes: limits.cache_bytes as u64,
            cache_disk_bytes: limits.cache_disk_bytes,
        }
    }
}

/// The way to the worker.
struct Saying(Mutex<UnixStream>);

impl Saying {
    /// Says it. That nobody hears it any more is noticed by whoever listens for what is asked.
    fn say(&self, said: &Said) {
        let stream = lock(&self.0);
        if let Err(e) = send(&*stream, said) {
            tracing::debug!(error = %e, "the worker of this volume server is gone");
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Places for what is done at once.
#[derive(Default)]
struct Places {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// A place that is taken; free again when dropped.
struct Taken(Arc<Places>);

impl Places {
    fn take(self: &Arc<Self>) -> Taken {
        let taken = lock(&self.taken);
        let mut taken = self.freed.wait_while(taken, |taken| *taken >= AT_ONCE_MAX).unwrap_or_else(PoisonError::into_inner);
        *taken += 1;
        Taken(Arc::clone(self))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *lock(&self.0.taken) -= 1;
        self.0.freed.notify_one();
    }
}
