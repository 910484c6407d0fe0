//! Live output of one attempt, for as long as somebody watches its job.
//!
//! Owns cutting pieces, whether they are sent at all, and what is sent of what was written before. Nothing depends on their arrival.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use minicbor::bytes::ByteVec;
use tokio::sync::watch;
use volley_jobspecs::ids::{AttemptName, JobId};
use volley_jobspecs::wire::live::{Asked, Held, LIVE_BYTES_MAX, Live};
use volley_jobspecs::{subjects, wire};

use crate::capture::Capture;
use crate::ports::Bus;

/// Bytes of a stream that were written before and are sent to who asks for one task: more than anybody reads on a terminal, and with both
/// streams half of what a follower's queue takes.
const HELD_BYTES_MAX: usize = 512 * 1024;
/// The same for who asks for all tasks of a job: a thousand of them make 32 MiB.
const HELD_OF_ALL_BYTES_MAX: usize = 16 * 1024;
/// How long sending that may take; a task must not wait for somebody who watches. Who got less asks again.
const HELD_TIME: Duration = Duration::from_millis(250);
/// Questions about one job that are remembered: who asks repeats it until there is an answer.
const ASKS_MAX: usize = 32;

/// Jobs that are watched.
pub type AllWatched = Arc<BTreeMap<JobId, Watched>>;

/// A job that is watched.
#[derive(Debug, Clone)]
pub struct Watched {
    /// Until then.
    pub until: Instant,
    /// The last questions for what was written before, the oldest first, and when they came.
    asks: Vec<(Instant, Asked)>,
}

impl Watched {
    /// One that nobody asked about.
    #[must_use]
    pub fn new(until: Instant) -> Self {
        Self { until, asks: Vec::new() }
    }

    /// Somebody watches it at `now`, and perhaps asks.
    pub fn renew(&mut self, now: Instant, asked: Option<Asked>) {
        self.until = now + Duration::from_millis(subjects::WATCH_MS);
        if let Some(asked) = asked {
            self.asks.retain(|(_, other)| *other != asked);
            self.asks.push((now, asked));
            let over = self.asks.len().saturating_sub(ASKS_MAX);
            self.asks.drain(..over);
        }
    }

    /// What is asked of a task in questions that came after `answered`; and when the last one came.
    fn asked(&self, index: u32, answered: Option<Instant>) -> (Option<Asked>, Option<Instant>) {
        let of_it = |asked: &Asked| *asked == Asked::All || *asked == Asked::One(index);
        let open = self.asks.iter().filter(|(at, asked)| answered.is_none_or(|answered| *at > answered) && of_it(asked));
        // One task's is the more.
        (open.map(|(_, asked)| *asked).max(), self.asks.last().map(|(at, _)| *at).max(answered))
    }
}

/// Where the output of one attempt goes.
#[derive(Debug, Clone)]
pub struct LiveOutput<B> {
    bus: B,
    watched: watch::Receiver<AllWatched>,
    name: AttemptName,
    /// Until when it is watched, as of the last look; none: nobody has looked yet. Only so nothing is sent of what follows before what was
    /// held is.
    seen: Option<Option<Instant>>,
    /// When the last question came that was answered.
    answered: Option<Instant>,
}

impl<B: Bus> LiveOutput<B> {
    /// Of an attempt.
    #[must_use]
    pub fn new(bus: B, watched: watch::Receiver<AllWatched>, name: AttemptName) -> Self {
        Self { bus, watched, name, seen: None, answered: None }
    }

    /// Tells when to look again.
    #[must_use]
    pub fn changes(&self) -> Changes {
        Changes(Some(self.watched.clone()))
    }

    /// Looks who watches, and sends what was captured to who asks for it.
    pub async fn look(&mut self, stdout: &Capture, stderr: &Capture) {
        let (until, asked) = match self.watched.borrow().get(&self.name.job) {
            Some(watched) => {
                let (asked, last) = watched.asked(self.name.index, self.answered);
                self.answered = last;
                (Some(watched.until), asked)
            }
            None => (None, None),
        };
        self.seen = Some(until);
        let Some(asked) = asked else { return };
        let send = async {
            let bytes_max = if asked == Asked::All { HELD_OF_ALL_BYTES_MAX } else { HELD_BYTES_MAX };
            for (stderr, capture) in [(false, stdout), (true, stderr)] {
                let (first, at, last) = capture.held(bytes_max);
                self.pieces(stderr, 0, &first, Some(Held::Piece)).await;
                self.pieces(stderr, at, &last, Some(Held::Piece)).await;
            }
            if asked != Asked::All {
                self.piece(false, stdout.total(), &[], Some(Held::End)).await;
            }
        };
        if tokio::time::timeout(HELD_TIME, send).await.is_err() {
            tracing::debug!("what the task wrote before was not sent in time to somebody who asked for it");
        }
    }

    /// Sends a piece that begins at `offset` of its stream, if anybody watches.
    pub async fn send(&self, stderr: bool, offset: u64, bytes: &[u8]) {
        let until = self.seen.unwrap_or_else(|| self.watched.borrow().get(&self.name.job).map(|watched| watched.until));
        if until.is_some_and(|until| Instant::now() < until) {
            self.pieces(stderr, offset, bytes, None).await;
        }
    }

    async fn pieces(&self, stderr: bool, offset: u64, bytes: &[u8], held: Option<Held>) {
        for (piece, at) in bytes.chunks(LIVE_BYTES_MAX).zip((offset..).step_by(LIVE_BYTES_MAX)) {
            self.piece(stderr, at, piece, held).await;
        }
    }

    async fn piece(&self, stderr: bool, offset: u64, bytes: &[u8], held: Option<Held>) {
        let live = Live { name: self.name, stderr, offset, bytes: ByteVec::from(bytes.to_vec()), held };
        self.bus.live(self.name.job, self.name.index, wire::encode(&live)).await;
    }
}

/// Tells that somebody began to watch, asked, or went on. A default one tells nothing.
#[derive(Debug, Default)]
pub struct Changes(Option<watch::Receiver<AllWatched>>);

impl Changes {
    /// Does it tell?
    #[must_use]
    pub fn are_told(&self) -> bool {
        self.0.is_some()
    }

    /// Waits for the next change. Cancel-safe.
    pub async fn next(&mut self) {
        match &mut self.0 {
            Some(watched) => match watched.changed().await {
                Ok(()) => {}
                // The driver is gone.
                Err(_) => pending().await,
            },
            None => pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_question_is_answered_once_and_only_by_who_is_meant() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut watched = Watched::new(begin);
        watched.renew(begin, None);
        assert!(watched.until > begin);
        assert_eq!(watched.asked(7, None), (None, None));
        watched.renew(at(1), Some(Asked::All));
        watched.renew(at(2), Some(Asked::One(7)));
        assert_eq!(watched.asked(7, None), (Some(Asked::One(7)), Some(at(2))));
        assert_eq!(watched.asked(8, None), (Some(Asked::All), Some(at(2))));
        assert_eq!(watched.asked(7, Some(at(2))), (None, Some(at(2))));
        watched.renew(at(3), Some(Asked::All));
        assert_eq!(watched.asked(7, Some(at(2))), (Some(Asked::All), Some(at(3))));
        // Nobody watched for a while, and what was asked is forgotten.
        assert_eq!(Watched::new(at(9)).asked(7, Some(at(3))), (None, Some(at(3))));
        (0..100u32).for_each(|index| watched.renew(at(10 + u64::from(index)), Some(Asked::One(index))));
        assert_eq!((watched.asks.len(), watched.asked(99, Some(at(3)))), (ASKS_MAX, (Some(Asked::One(99)), Some(at(109)))));
    }
}
