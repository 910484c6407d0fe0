//! The volume server's process: started, started again when it dies, and told what was open.
//!
//! Owns the process, its connection, and the table of what is to be open in it. Does not own what is said of a volume (`entry`), nor how one is shown.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use volley_volume::server::protocol::{Refused, RefusedKind, Reply, Request, Setup};

use super::VolumeError;
use super::entry::{Entry, PATIENCE};
use super::link::{Link, Lost};
use super::programs::Programs;

/// How long a server may take until it is ready: it waits up to 20 s for one before it, and for S3.
const READY_WAIT: Duration = Duration::from_secs(60);
/// Pause before a server is started again; it doubles up to [`PAUSE_MAX`], and begins anew with one that lived for [`LIVED`].
const PAUSE_FIRST: Duration = Duration::from_millis(20);
/// Longest pause: users of volumes wait for half a minute, and a server is to be seen by them more than once in that time.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long a server that closed its connection may take to be gone.
const END_WAIT: Duration = Duration::from_secs(5);
/// A server that lived so long was no failure to start.
const LIVED: Duration = Duration::from_secs(10);

/// Whether there is a server.
#[derive(Debug, Clone)]
pub enum State {
    /// One is being started.
    Starting,
    /// There is.
    Up(Arc<Link>),
    /// One could not be started; it is tried again. In words.
    Down(String),
}

/// What is to be open, and the server.
#[derive(Debug)]
pub struct Supervised {
    entries: Mutex<BTreeMap<u64, Arc<Entry>>>,
    state: watch::Sender<State>,
    /// The process, for tests and for people.
    pid: watch::Sender<Option<u32>>,
    again: Notify,
}

impl Supervised {
    /// Starts a server, and keeps one there until the handle's task is ended.
    pub fn start(programs: Programs, setup: Setup) -> (Arc<Self>, JoinHandle<()>) {
        let supervised = Arc::new(Self {
            entries: Mutex::default(),
            state: watch::Sender::new(State::Starting),
            pid: watch::Sender::new(None),
            again: Notify::new(),
        });
        let keeping = Arc::clone(&supervised);
        let task = tokio::spawn(async move { keeping.keep(programs, setup).await });
        (supervised, task)
    }

    /// The server's process, while there is one.
    pub fn pid(&self) -> Option<u32> {
        *self.pid.borrow()
    }

    /// Why there is none, if one could not be started.
    pub fn lack(&self) -> Option<String> {
        match &*self.state.borrow() {
            State::Down(why) => Some(why.clone()),
            State::Starting | State::Up(_) => None,
        }
    }

    /// Waits until the first server is ready or could not be started.
    pub async fn begun(&self) -> State {
        let mut state = self.state.subscribe();
        match state.wait_for(|state| !matches!(state, State::Starting)).await {
            Ok(state) => state.clone(),
            Err(_) => State::Down("the worker ends".to_owned()),
        }
    }

    /// A server that is there, or comes within the patience.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn link(&self) -> Result<Arc<Link>, String> {
        let mut state = self.state.subscribe();
        let up = state.wait_for(|state| matches!(state, State::Up(link) if !link.is_closed()));
        let found = match tokio::time::timeout(PATIENCE, up).await {
            Ok(Ok(state)) => state.clone(),
            _ => self.state.borrow().clone(),
        };
        match found {
            State::Up(link) => Ok(link),
            State::Down(why) => Err(why),
            State::Starting => Err(format!("the volume server was not ready within {} s", PATIENCE.as_secs())),
        }
    }

    /// From now on it is opened again on each new server.
    pub fn add(&self, entry: Arc<Entry>) {
        lock(&self.entries).insert(entry.open.handle, entry);
        // The server may be another one than it was opened on.
        self.again.notify_one();
    }

    /// It is opened no more.
    pub fn remove(&self, handle: u64) {
        lock(&self.entries).remove(&handle);
    }

    /// How many are to be open.
    pub fn count(&self) -> usize {
        lock(&self.entries).len()
    }

    fn all(&self) -> Vec<Arc<Entry>> {
        lock(&self.entries).values().cloned().collect()
    }

    async fn keep(&self, programs: Programs, mut setup: Setup) {
        let (mut pause, mut away) = (PAUSE_FIRST, Instant::now());
        loop {
            let (events, mut heard) = mpsc::unbounded_channel();
            let begun = Instant::now();
            match start(&programs, &setup, events).await {
                Ok((link, mut process)) => {
                    setup.fresh = false;
                    self.pid.send_replace(process.id());
                    self.state.send_replace(State::Up(Arc::clone(&link)));
                    loop {
                        self.bring_up(&link);
                        tokio::select! {
                            () = link.closed() => break,
                            event = heard.recv() => if let Some((handle, refused)) = event {
                                self.failed(handle, refused);
                            },
                            () = self.again.notified() => {}
                        }
                    }
                    self.state.send_replace(State::Starting);
                    self.pid.send_replace(None);
                    end(&mut process).await;
                    away = Instant::now();
                    self.all().iter().for_each(|entry| entry.away());
                    tracing::warn!(open = self.count(), "the volume server has ended; it is started again");
                }
                Err(why) => {
                    tracing::warn!(why, "the volume server can't be started; it is tried again");
                    self.give_up(away, &why);
                    self.state.send_replace(State::Down(why));
                }
            }
            pause = if begun.elapsed() >= LIVED { PAUSE_FIRST } else { pause };
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Opens what is not open on this server, all at once: one that waits for S3 holds up no other.
    fn bring_up(&self, link: &Arc<Link>) {
        for entry in self.all().into_iter().filter(|entry| entry.wants(link)) {
            let link = Arc::clone(link);
            tokio::spawn(async move {
                if entry.bring_up(&link).await == Err(Lost) {
                    tracing::debug!(handle = entry.open.handle, "the volume server ended while it opened a volume again");
                }
            });
        }
    }

    fn failed(&self, handle: u64, refused: Refused) {
        let entry = lock(&self.entries).get(&handle).cloned();
        if let Some(entry) = entry {
            entry.fail(VolumeError::refused(entry.slot, "serving it", refused));
        }
    }

    /// Users of volumes wait no longer than they do: then they are told of errors, and what they write is not what they think it is.
    fn give_up(&self, away: Instant, why: &str) {
        if away.elapsed() >= PATIENCE {
            let refused = Refused::new(RefusedKind::Host, why);
            self.all().iter().for_each(|entry| entry.fail(VolumeError::refused(entry.slot, "serving it", refused.clone())));
        }
    }
}

/// Starts a server and tells it how to begin.
async fn start(
    programs: &Programs,
    setup: &Setup,
    events: mpsc::UnboundedSender<super::link::Event>,
) -> Result<(Arc<Link>, Child), String> {
    let pair = StdStream::pair().and_then(|(ours, theirs)| ours.set_nonblocking(true).map(|()| (ours, theirs)));
    let (ours, theirs) = pair.map_err(|e| format!("a connection to the volume server: {e}"))?;
    let mut process = programs.start_server(OwnedFd::from(theirs)).map_err(|e| format!("{}: {e}", programs.path.display()))?;
    let stream = UnixStream::from_std(ours).map_err(|e| format!("a connection to the volume server: {e}"))?;
    let link = Link::new(stream, events);
    let ready = tokio::time::timeout(READY_WAIT, link.ask(Request::Setup(Box::new(setup.clone())))).await;
    let why = match ready {
        Ok(Ok(Reply::Done)) => return Ok((link, process)),
        Ok(Ok(Reply::Refused(refused))) => refused.words,
        Ok(Ok(_)) => "the volume server answered something else".to_owned(),
        Ok(Err(Lost)) => match tokio::time::timeout(END_WAIT, process.wait()).await {
            Ok(Ok(status)) => format!("the volume server ended at once: {status}"),
            _ => "the volume server closed its connection at once".to_owned(),
        },
        Err(_late) => format!("the volume server was not ready within {} s", READY_WAIT.as_secs()),
    };
    end(&mut process).await;
    Err(why)
}

/// Ends a server, if it has not ended: nothing reaches it any more.
async fn end(process: &mut Child) {
    if let Err(e) = process.kill().await {
        tracing::debug!(error = %e, "the volume server had ended");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
