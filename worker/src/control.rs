//! How a worker is told to drain or stop, and asked how it is.
//!
//! Owns the handle. Does not own signals (`deploy`) or what draining means (`core`).

use tokio::sync::watch;

use crate::core::Totals;

/// What a worker is wished to do. Rises only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wish {
    /// Take nothing more, finish what runs, hand back the rest, leave.
    Drain,
    /// Kill what runs, report it, leave.
    Stop,
}

/// How a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Status {
    /// Is it known what it offers? Before, it may still find that it can't run.
    pub opened: bool,
    /// Its life.
    pub incarnation: u64,
    /// Has a leader recorded it as joined?
    pub joined: bool,
    /// Attempts that run.
    pub running: u32,
    /// Bundles held.
    pub bundles: usize,
    /// Bytes of ends that are not in the log yet.
    pub unsent_bytes: usize,
    /// Counts since it began.
    pub totals: Totals,
}

/// For whoever started the worker.
#[derive(Debug, Clone)]
pub struct Handle {
    wish: watch::Sender<Option<Wish>>,
    status: watch::Receiver<Status>,
}

impl Handle {
    /// Drain: the first SIGTERM. The worker's `run` returns when it has left.
    pub fn drain(&self) {
        self.wish.send_modify(|wish| *wish = (*wish).max(Some(Wish::Drain)));
    }

    /// Stop now: the second SIGTERM.
    pub fn stop(&self) {
        self.wish.send_replace(Some(Wish::Stop));
    }

    /// Waits until it is known what the worker offers; for ever, if it ends before.
    pub async fn opened(&self) {
        if self.status.clone().wait_for(|status| status.opened).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// How it is now.
    #[must_use]
    pub fn status(&self) -> Status {
        *self.status.borrow()
    }
}

/// For the worker.
#[derive(Debug)]
pub struct Control {
    /// What it is wished to do.
    pub wishes: Wishes,
    /// Where it says how it is.
    pub status: watch::Sender<Status>,
}

/// Wishes as they come.
#[derive(Debug)]
pub struct Wishes {
    wish: watch::Receiver<Option<Wish>>,
    seen: Option<Wish>,
}

impl Wishes {
    /// The next wish that goes further than the last. Waits for ever when there is none. Cancel-safe.
    pub async fn next(&mut self) -> Wish {
        loop {
            let wish = *self.wish.borrow_and_update();
            if wish > self.seen {
                self.seen = wish;
                if let Some(wish) = wish {
                    return wish;
                }
            }
            if self.wish.changed().await.is_err() {
                // Nobody can wish anything any more; the worker goes on.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Both ends.
#[must_use]
pub fn control() -> (Handle, Control) {
    let (wish, wishes) = watch::channel(None);
    let (status, seen) = watch::channel(Status::default());
    (Handle { wish, status: seen }, Control { wishes: Wishes { wish: wishes, seen: None }, status })
}
