//! How an executor hears that its attempt is to be stopped.
//!
//! Owns the signal from driver to slot. It can't be lost and only rises, so a slow executor sees the last word.

use tokio::sync::watch;
use volley_jobspecs::ids::AttemptName;

use crate::attempt::Force;

/// Which attempt is to be stopped, and how hard.
#[derive(Debug, Clone, Copy)]
struct Word {
    name: AttemptName,
    force: Force,
    timed_out: bool,
}

/// The driver's end.
#[derive(Debug)]
pub struct Stopper(watch::Sender<Option<Word>>);

/// The executor's end.
#[derive(Debug, Clone)]
pub struct StopSignal {
    word: watch::Receiver<Option<Word>>,
    name: Option<AttemptName>,
    seen: Option<Force>,
}

/// Both ends of one slot.
#[must_use]
pub fn stop_signal() -> (Stopper, StopSignal) {
    let (sender, word) = watch::channel(None);
    (Stopper(sender), StopSignal { word, name: None, seen: None })
}

impl Stopper {
    /// Says how hard an attempt is to be stopped, and whether that is only because its time to run is over.
    pub fn stop(&self, name: AttemptName, force: Force, timed_out: bool) {
        self.0.send_replace(Some(Word { name, force, timed_out }));
    }
}

impl StopSignal {
    /// Listens for an attempt from now on.
    pub fn begin(&mut self, name: AttemptName) {
        self.name = Some(name);
        self.seen = None;
    }

    /// Is the attempt to be stopped, and then only because its time to run is over? None: it is not.
    #[must_use]
    pub fn timed_out(&self) -> Option<bool> {
        let word = *self.word.borrow();
        word.filter(|word| Some(word.name) == self.name).map(|word| word.timed_out)
    }

    /// The next word that is harder than what was heard. Waits for ever when there is none. Cancel-safe.
    pub async fn next(&mut self) -> Force {
        loop {
            let heard = self.word.borrow_and_update().filter(|word| Some(word.name) == self.name).map(|word| word.force);
            if heard > self.seen {
                self.seen = heard;
                if let Some(force) = heard {
                    return force;
                }
            }
            if self.word.changed().await.is_err() {
                // The driver is gone, and with it everybody who could want this attempt.
                self.seen = Some(Force::Abandon);
                return Force::Abandon;
            }
        }
    }
}
