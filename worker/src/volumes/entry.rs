//! A volume that the server has open for us, through servers that come and go.
//!
//! Owns what the server must be told to open it again, where that stands, and asking about it until there is a reply. Does not own how it is shown.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::watch;
use volley_volume::server::protocol::{Open, Opened, Refused, RefusedKind, Reply, Request, Serve};

use super::VolumeError;
use super::link::{Link, Lost};

/// How long a volume's users wait for a server that is away: as long as QEMU tries to connect again, after which its guest is told of errors.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Where it stands.
#[derive(Debug, Clone)]
pub enum Phase {
    /// The server is away, or does not have it open yet.
    Away,
    /// Open.
    Up(Arc<Link>),
    /// It was finished or kept, by a server that ended before it could say so.
    Ended(Reply),
    /// It takes nothing more.
    Failed(VolumeError),
}

/// See the file's head.
#[derive(Debug)]
pub struct Entry {
    /// What the server is told.
    pub open: Open,
    /// The attempt's slot.
    pub slot: u8,
    serve: Mutex<Option<Serve>>,
    /// The server that it was last asked of to open it again.
    asked: Mutex<Weak<Link>>,
    /// Was it ever open? Then what was acknowledged must be there when it is opened again.
    was_open: AtomicBool,
    phase: watch::Sender<Phase>,
}

impl Entry {
    /// Of a volume that is to be opened.
    pub fn new(open: Open, slot: u8) -> Self {
        Self {
            open,
            slot,
            serve: Mutex::default(),
            asked: Mutex::default(),
            was_open: false.into(),
            phase: watch::Sender::new(Phase::Away),
        }
    }

    /// Was it ever open?
    pub fn was_open(&self) -> bool {
        self.was_open.load(Ordering::Acquire)
    }

    /// Where it stands, and when that changes.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// It takes nothing more. What was said first stays.
    pub fn fail(&self, why: VolumeError) {
        self.phase.send_if_modified(|phase| {
            let goes = matches!(phase, Phase::Away | Phase::Up(_));
            if goes {
                *phase = Phase::Failed(why);
            }
            goes
        });
    }

    /// The server is gone.
    pub fn away(&self) {
        self.phase.send_if_modified(|phase| {
            let goes = matches!(phase, Phase::Up(_));
            if goes {
                *phase = Phase::Away;
            }
            goes
        });
    }

    /// Is it to be opened again on this server? Says so once.
    pub fn wants(&self, link: &Arc<Link>) -> bool {
        self.phase.send_if_modified(|phase| {
            let goes = matches!(phase, Phase::Up(up) if !Arc::ptr_eq(up, link));
            if goes {
                *phase = Phase::Away;
            }
            goes
        });
        if !self.was_open() || !matches!(*self.phase.borrow(), Phase::Away) {
            return false;
        }
        let mut asked = lock(&self.asked);
        let new = !std::ptr::eq(asked.as_ptr(), Arc::as_ptr(link));
        *asked = Arc::downgrade(link);
        new
    }

    /// Does what its users ask for wait, or fail?
    pub fn is_stuck(&self) -> bool {
        !matches!(*self.phase.borrow(), Phase::Up(_))
    }

    /// Opens it on a server, and serves it where it was served. None: it is open no more, and watchers know why.
    ///
    /// # Errors
    /// The server is gone.
    pub async fn bring_up(&self, link: &Arc<Link>) -> Result<Option<Opened>, Lost> {
        let open = Open { again: self.was_open(), ..self.open.clone() };
        let opened = match link.ask(Request::Open(Box::new(open))).await? {
            Reply::Opened(opened) => opened,
            Reply::Refused(refused) => {
                self.fail(VolumeError::refused(self.slot, "opening it", refused));
                return Ok(None);
            }
            ended => {
                self.phase.send_if_modified(|phase| {
                    let goes = matches!(phase, Phase::Away);
                    if goes {
                        *phase = Phase::Ended(ended);
                    }
                    goes
                });
                return Ok(None);
            }
        };
        self.was_open.store(true, Ordering::Release);
        let serve = lock(&self.serve).clone();
        if let Some(serve) = serve
            && let Reply::Refused(refused) = link.ask(Request::Serve(serve)).await?
        {
            self.fail(VolumeError::refused(self.slot, "serving it", refused));
            return Ok(None);
        }
        let up = Arc::clone(link);
        self.phase.send_if_modified(|phase| {
            let goes = matches!(phase, Phase::Away);
            if goes {
                *phase = Phase::Up(up);
            }
            goes
        });
        Ok(Some(opened))
    }

    /// Asks the server that has it open, and the next one if that is gone: what is asked may be done twice.
    ///
    /// # Errors
    /// It was refused, or the volume takes nothing more.
    pub async fn ask(&self, what: &'static str, request: Request) -> Result<Reply, VolumeError> {
        let mut phase = self.watch();
        loop {
            let now = phase.borrow_and_update().clone();
            match now {
                Phase::Up(link) => match link.ask(request.clone()).await {
                    Ok(Reply::Refused(refused)) => return Err(VolumeError::refused(self.slot, what, refused)),
                    Ok(reply) => return Ok(reply),
                    Err(Lost) => {}
                },
                Phase::Ended(reply) => return Ok(reply),
                Phase::Failed(why) => return Err(why),
                Phase::Away => {}
            }
            if phase.changed().await.is_err() {
                let refused = Refused::new(RefusedKind::Host, "the worker ends");
                return Err(VolumeError::refused(self.slot, what, refused));
            }
        }
    }

    /// Serves it from now on, on this server and on those after it.
    ///
    /// # Errors
    /// As [`Entry::ask`].
    pub async fn serve(&self, serve: Serve) -> Result<(), VolumeError> {
        *lock(&self.serve) = Some(serve.clone());
        self.ask("serving it", Request::Serve(serve)).await.map(drop)
    }

    /// Waits until it takes nothing more.
    pub async fn failed(&self) -> VolumeError {
        let mut phase = self.watch();
        let failed = phase.wait_for(|phase| matches!(phase, Phase::Failed(_))).await.map(|phase| phase.clone());
        match failed {
            Ok(Phase::Failed(why)) => why,
            _ => std::future::pending().await,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
