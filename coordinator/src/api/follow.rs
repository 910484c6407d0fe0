//! Live output on its way to a client: of one task, or of all tasks of a job.
//!
//! Owns following attempts to their end, asking workers for what was written before, and where a stream that broke off goes on. Live
//! pieces may be lost on their way; when an attempt ends, what was kept of it fills the end of what was sent. Does not own publishing
//! (the worker) or the routes (`logs`).

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::StreamExt;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio::time::Instant;
use volley_jobspecs::api::{LogLine, LogPiece};
use volley_jobspecs::ids::{AttemptName, JobId};
use volley_jobspecs::utf8::Utf8;
use volley_jobspecs::wire::live::{Asked, Held, Live, Watch, left_out};
use volley_jobspecs::{subjects, wire};

use super::App;
use super::error::ApiError;
use super::logs::{Wanted, send_kept};
use super::streams::Permit;
use super::tasks::stored;
use crate::state::effects::AttemptRow;
use crate::state::rows;

/// Followers look this often whether an attempt or the job has ended, beside what events tell.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// Streams of a job's attempts of which it is known how far they were sent, at most; then those of the first tasks are let go, which have
/// ended, most likely.
const STREAMS_MAX: usize = 10_000;
/// How long pieces wait for what was written before them, which the worker was asked for: a slow round trip. A worker of an older build
/// doesn't answer, nor does one whose task has not begun.
const HOLD: Duration = Duration::from_secs(2);
/// After so long the question is repeated to show what a task has written so far: it may have been lost.
const ASK_AGAIN: Duration = Duration::from_millis(700);

/// Bytes on their way to a client.
pub type Out = mpsc::Sender<Result<Bytes, std::io::Error>>;

/// How far a task's output was sent: everything of earlier attempts, and so many bytes of stdout and stderr of this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// Which attempt; 0: none yet.
    pub attempt: u32,
    /// Of stdout and stderr.
    pub at: [u64; 2],
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.attempt, self.at[0], self.at[1])
    }
}

/// A text that is no place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a cursor; take the `cursor` of the last piece you have")]
pub struct PlaceError;

impl FromStr for Place {
    type Err = PlaceError;
    fn from_str(text: &str) -> Result<Self, PlaceError> {
        let mut parts = text.split('.');
        let mut next = || parts.next().ok_or(PlaceError);
        let attempt = next()?.parse().map_err(|_| PlaceError)?;
        let at = [next()?.parse().map_err(|_| PlaceError)?, next()?.parse().map_err(|_| PlaceError)?];
        if parts.next().is_some() { Err(PlaceError) } else { Ok(Self { attempt, at }) }
    }
}

/// Where a task's output goes.
pub struct Sink {
    out: Out,
    /// As lines of JSON, each with where to go on; else as it was written.
    pieces: bool,
    /// How far it was sent.
    pub place: Place,
}

impl Sink {
    /// To a client.
    pub fn new(out: Out, pieces: bool, place: Place) -> Self {
        Self { out, pieces, place }
    }

    /// Sends bytes of an attempt that begin at `offset`. Behind them goes on who comes back, unless `moves` is false: then there is no
    /// telling where. `None`: the client has gone.
    pub async fn send(&mut self, name: &AttemptName, stderr: bool, offset: u64, bytes: Bytes, moves: bool) -> Option<()> {
        self.enter(name.number);
        if moves {
            self.place.at[usize::from(stderr)] = offset + bytes.len() as u64;
        }
        if bytes.is_empty() {
            return Some(());
        }
        if !self.pieces {
            return self.out.send(Ok(bytes)).await.ok();
        }
        let stream = if stderr { "stderr" } else { "stdout" };
        let piece = LogPiece {
            attempt: name.number,
            stream: stream.to_owned(),
            offset,
            base64: STANDARD.encode(&bytes),
            cursor: self.place.to_string(),
            end: false,
        };
        self.line(&piece).await
    }

    /// A stream of an attempt was sent to its end.
    pub fn ended(&mut self, name: &AttemptName, stderr: bool, bytes: u64) {
        self.enter(name.number);
        let at = &mut self.place.at[usize::from(stderr)];
        *at = bytes.max(*at);
    }

    /// So many bytes that stand here are not sent. Pieces say it by their offset. `None`: the client has gone.
    pub async fn gap(&self, bytes: u64) -> Option<()> {
        if self.pieces || bytes == 0 { Some(()) } else { self.out.send(Ok(Bytes::from(left_out(bytes)))).await.ok() }
    }

    fn enter(&mut self, attempt: u32) {
        if self.place.attempt < attempt {
            self.place = Place { attempt, at: [0, 0] };
        }
    }

    /// Says that the connection lives, where that can be said. `None`: the client has gone.
    async fn alive(&self) -> Option<()> {
        if self.pieces { self.out.send(Ok(Bytes::from_static(b"\n"))).await.ok() } else { Some(()) }
    }

    /// Says that this was all, where that can be said.
    async fn end(&self) -> Option<()> {
        let piece = LogPiece {
            attempt: self.place.attempt,
            stream: String::new(),
            offset: 0,
            base64: String::new(),
            cursor: self.place.to_string(),
            end: true,
        };
        if self.pieces { self.line(&piece).await } else { Some(()) }
    }

    async fn line(&self, piece: &LogPiece) -> Option<()> {
        // Text and numbers only: there is no failing path.
        let mut line = serde_json::to_vec(piece).unwrap_or_default();
        line.push(b'\n');
        self.out.send(Ok(Bytes::from(line))).await.ok()
    }

    /// Breaks the body off: the head was sent as success, so this is the only way to say that this is not all.
    pub async fn fail(&self, why: String) -> Option<()> {
        self.out.send(Err(std::io::Error::other(why))).await.ok()
    }
}

/// Says that somebody watches a job, and asks for what tasks of it wrote before. Lost ones are made up for by the next.
async fn watch(app: &App, job: JobId, held: Option<Asked>) {
    let message = if held.is_none() { Bytes::new() } else { wire::encode(&Watch { held }).into() };
    if let Err(error) = app.handle.client().publish(subjects::watch(job), message).await {
        tracing::debug!(%job, %error, "a watch was not sent");
    }
}

/// Pieces of live output that wait for one follower: a little of each task of a large job at once. Further ones are dropped until it reads
/// on; pieces carry their place, so a gap shows, and the end of the attempt fills it. A client's own queue would hold 65,536.
const LIVE_WAITING: usize = 1_024;
/// Bytes of them, at most: two of the largest answers to the question for what a task wrote before.
const LIVE_WAITING_BYTES: usize = 2 << 20;

/// Live output as it comes.
pub struct Pieces {
    waiting: mpsc::Receiver<async_nats::Message>,
    bytes: Arc<AtomicUsize>,
}

impl Pieces {
    /// The next one. Cancel-safe.
    async fn next(&mut self) -> Option<async_nats::Message> {
        let message = self.waiting.recv().await?;
        self.bytes.fetch_sub(message.payload.len(), Ordering::Relaxed);
        Some(message)
    }
}

/// Listens to live output.
///
/// # Errors
/// 503 when NATS refuses.
pub async fn subscribe(app: &App, subject: String) -> Result<Pieces, ApiError> {
    let subscribed = app.handle.client().subscribe(subject).await;
    let mut live = subscribed.map_err(|error| ApiError::unavailable(format!("NATS refused a subscription for live output: {error}")))?;
    let (sender, waiting) = mpsc::channel(LIVE_WAITING);
    let bytes = Arc::new(AtomicUsize::new(0));
    let pieces = Pieces { waiting, bytes: Arc::clone(&bytes) };
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = sender.closed() => return,
                message = live.next() => match message {
                    Some(message) => {
                        let length = message.payload.len();
                        // Full: the follower is slow, and this piece is lost to it.
                        if bytes.fetch_add(length, Ordering::Relaxed) + length > LIVE_WAITING_BYTES || sender.try_send(message).is_err() {
                            bytes.fetch_sub(length, Ordering::Relaxed);
                        }
                    }
                    None => return,
                },
            }
        }
    });
    Ok(pieces)
}

/// Follows one task's output.
pub struct FollowTask {
    app: Arc<App>,
    job: JobId,
    index: u32,
    /// Only this attempt.
    only: Option<u32>,
    wanted: Wanted,
    live: Pieces,
    sink: Sink,
    /// Attempts up to this one were sent to their end.
    done: u32,
    /// Is it still open what the task wrote before?
    asks: bool,
    /// Until then pieces wait for what was written before them.
    hold: Instant,
    _permit: Permit,
}

impl FollowTask {
    /// Begins to listen. A sink that was somewhere already goes on there.
    ///
    /// # Errors
    /// [`ApiError`] when live output or stored attempts can't be read.
    pub async fn open(
        app: Arc<App>,
        (job, index): (JobId, u32),
        only: Option<u32>,
        wanted: Wanted,
        sink: Sink,
        permit: Permit,
    ) -> Result<Self, ApiError> {
        let live = subscribe(&app, subjects::live(job, index)).await?;
        let ended = rows::attempts(app.handle.rows(), job, index)?;
        let last = ended.last().map_or(0, |(_, row)| row.end.name.number);
        // Earlier attempts are history; of a task that has ended, the last one is shown.
        let done = match only {
            _ if sink.place.attempt > 0 => sink.place.attempt - 1,
            Some(number) => number.saturating_sub(1),
            None if settled(&app, job, index) => last.saturating_sub(1),
            None => last,
        };
        Ok(Self { app, job, index, only, wanted, live, sink, done, asks: true, hold: Instant::now() + HOLD, _permit: permit })
    }

    /// Sends what the attempt `only`, which was open in this moment, has written so far. `otherwise` is sent when its worker doesn't
    /// answer: it has not begun yet.
    pub async fn so_far(mut self, otherwise: Option<AttemptRow>) {
        let (stop, out) = (self.app.stop.clone(), self.sink.out.clone());
        let mut again = tokio::time::interval(ASK_AGAIN);
        while self.asks {
            let goes_on = tokio::select! {
                _ = again.tick() => {
                    watch(&self.app, self.job, Some(Asked::One(self.index))).await;
                    Some(())
                }
                Some(message) = self.live.next() => match wire::decode::<Live>("live output", &message.payload) {
                    Ok(piece) if piece.held.is_some() => self.piece(piece).await,
                    Ok(_) | Err(_) => Some(()),
                },
                () = tokio::time::sleep_until(self.hold) => break,
                () = out.closed() => None,
                () = stop.cancelled() => None,
                else => None,
            };
            if goes_on.is_none() {
                return;
            }
        }
        // It may have ended meanwhile: then this is all of it.
        let ended = rows::attempts(self.app.handle.rows(), self.job, self.index).unwrap_or_default();
        let row = ended.into_iter().map(|(_, row)| row).find(|row| self.only == Some(row.end.name.number));
        let from = if row.is_some() { self.sink.place.at } else { [0, 0] };
        if let Some(row) = row.or(otherwise.filter(|_| self.asks && self.sink.place.attempt == 0)) {
            _ = send_kept(&self.app, &row, self.wanted, from, &mut self.sink).await;
        }
    }

    /// Follows until the task, or the one attempt, has ended, the client has gone, or the coordinator stops.
    pub async fn run(mut self) {
        let mut events = self.app.handle.events();
        let mut repeat = tokio::time::interval(Duration::from_millis(subjects::WATCH_REPEAT_MS));
        let mut look = tokio::time::interval(LOOK_AGAIN);
        let mut alive = tokio::time::interval_at(Instant::now() + self.app.keep_alive, self.app.keep_alive);
        let (stop, out) = (self.app.stop.clone(), self.sink.out.clone());
        loop {
            let goes_on = tokio::select! {
                _ = repeat.tick() => {
                    watch(&self.app, self.job, self.asks.then_some(Asked::One(self.index))).await;
                    Some(())
                }
                _ = look.tick() => self.look().await,
                _ = alive.tick() => self.sink.alive().await,
                event = events.recv() => match event {
                    Ok(event) if event.job != self.job => Some(()),
                    Ok(_) | Err(RecvError::Lagged(_)) => self.look().await,
                    Err(RecvError::Closed) => None,
                },
                Some(message) = self.live.next() => match wire::decode::<Live>("live output", &message.payload) {
                    Ok(piece) => {
                        alive.reset();
                        self.piece(piece).await
                    }
                    Err(_) => Some(()),
                },
                () = out.closed() => None,
                () = stop.cancelled() => None,
                else => None,
            };
            if goes_on.is_none() {
                return;
            }
        }
    }

    /// Sends a live piece, without what was sent already.
    async fn piece(&mut self, piece: Live) -> Option<()> {
        let number = piece.name.number;
        let other = (piece.name.job, piece.name.index) != (self.job, self.index) || self.only.is_some_and(|only| only != number);
        if other || number <= self.done || number < self.sink.place.attempt {
            return Some(());
        }
        if piece.held == Some(Held::End) {
            self.asks = false;
        }
        if !self.wanted.has(piece.stderr) {
            return Some(());
        }
        let sent = if self.sink.place.attempt == number { self.sink.place.at[usize::from(piece.stderr)] } else { 0 };
        let skip = usize::try_from(sent.saturating_sub(piece.offset)).unwrap_or(usize::MAX);
        if piece.offset > sent && piece.held.is_none() && self.asks && Instant::now() < self.hold {
            // What comes before it is on its way, and so is this one, behind it.
            return Some(());
        }
        // Who comes in the middle of a character gets the next one.
        let skip = skip + if piece.offset > sent { inside(&piece.bytes) } else { 0 };
        let Some(rest) = piece.bytes.get(skip..).filter(|rest| !rest.is_empty()) else { return Some(()) };
        self.sink.gap((piece.offset + skip as u64).saturating_sub(sent)).await?;
        self.sink.send(&piece.name, piece.stderr, piece.offset + skip as u64, Bytes::copy_from_slice(rest), true).await
    }

    /// Sends the ends of attempts that have ended. `None`: there is nothing more to follow.
    async fn look(&mut self) -> Option<()> {
        let over = settled(&self.app, self.job, self.index);
        let ended = rows::attempts(self.app.handle.rows(), self.job, self.index).ok()?;
        for (_, row) in ended {
            let number = row.end.name.number;
            if number <= self.done || self.only.is_some_and(|only| only != number) {
                continue;
            }
            let from = if self.sink.place.attempt == number { self.sink.place.at } else { [0, 0] };
            send_kept(&self.app, &row, self.wanted, from, &mut self.sink).await?;
            self.done = number;
        }
        let enough = self.only.is_some_and(|only| self.done >= only);
        if over || enough {
            self.sink.end().await;
            return None;
        }
        Some(())
    }
}

/// Has the task ended for good (or gone)?
fn settled(app: &App, job: JobId, index: u32) -> bool {
    let header = rows::header(app.handle.rows(), job).ok().flatten();
    let Some((facts, progress)) = header else { return true };
    match stored(app, job, &facts, index) {
        Ok((cell, _)) => cell.settled() || (progress.ended_ms.is_some() && !cell.held),
        Err(_) => true,
    }
}

/// How many bytes at the beginning belong to a character that began before: at most three.
fn inside(bytes: &[u8]) -> usize {
    bytes.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count()
}

/// Text of many streams, each in pieces.
#[derive(Debug, Default)]
struct Texts {
    /// Of each stream: where the next piece begins, and the beginning of a character in which the last one ended.
    streams: BTreeMap<(AttemptName, bool), (u64, Utf8)>,
}

impl Texts {
    /// The text of a piece, without what was given before. While `hold`, a piece whose beginning is missing waits for what was written
    /// before it, which has this one again.
    fn feed(&mut self, piece: &Live, hold: bool) -> String {
        let key = (piece.name, piece.stderr);
        let known = self.streams.get(&key).map(|(next, _)| *next);
        if known.is_none() && piece.offset > 0 && piece.held.is_none() && hold {
            return String::new();
        }
        let next = known.unwrap_or(if piece.held.is_some() { 0 } else { piece.offset });
        let skip = usize::try_from(next.saturating_sub(piece.offset)).unwrap_or(usize::MAX);
        let Some(rest) = piece.bytes.get(skip..).filter(|rest| !rest.is_empty()) else { return String::new() };
        let (_, utf8) = self.streams.entry(key).or_default();
        // Where the piece before is not known, half a character is no text: neither what is held nor what this one begins with.
        let (mut text, cut) = if piece.offset > next {
            *utf8 = Utf8::default();
            (left_out(piece.offset - next), inside(rest))
        } else {
            (String::new(), if known.is_none() && piece.offset > 0 { inside(rest) } else { 0 })
        };
        text.push_str(&utf8.feed(&rest[cut..]));
        if let Some((next, _)) = self.streams.get_mut(&key) {
            *next = piece.offset + piece.bytes.len() as u64;
        }
        if self.streams.len() > STREAMS_MAX {
            self.streams.pop_first();
        }
        text
    }
}

/// Sends what all tasks of a job write, beginning with a little of what those that run wrote before, until it has ended.
pub async fn follow_job(app: Arc<App>, job: JobId, mut live: Pieces, out: Out, _permit: Permit) {
    let mut events = app.handle.events();
    let mut repeat = tokio::time::interval(Duration::from_millis(subjects::WATCH_REPEAT_MS));
    let mut alive = tokio::time::interval_at(Instant::now() + app.keep_alive, app.keep_alive);
    let ended = || !matches!(rows::progress(app.handle.rows(), job), Ok(Some(progress)) if progress.ended_ms.is_none());
    let mut texts = Texts::default();
    let (hold, mut ask) = (Instant::now() + HOLD, Some(Asked::All));
    loop {
        tokio::select! {
            // Pieces first: those that came before the job's end are sent before the stream ends.
            biased;
            Some(message) = live.next() => {
                let Ok(piece) = wire::decode::<Live>("live output", &message.payload) else { continue };
                let (stream, text) = (if piece.stderr { "stderr" } else { "stdout" }, texts.feed(&piece, Instant::now() < hold));
                if text.is_empty() { continue }
                let line = LogLine { index: piece.name.index, stream: stream.to_owned(), text };
                let mut bytes = serde_json::to_vec(&line).unwrap_or_default();
                bytes.push(b'\n');
                if out.send(Ok(Bytes::from(bytes))).await.is_err() { return }
                alive.reset();
            }
            _ = alive.tick() => if out.send(Ok(Bytes::from_static(b"\n"))).await.is_err() { return },
            event = events.recv() => match event {
                Ok(event) if event.job != job => {}
                Ok(_) | Err(RecvError::Lagged(_)) => if ended() { return },
                Err(RecvError::Closed) => return,
            },
            _ = repeat.tick() => {
                if ended() { return }
                watch(&app, job, ask.take()).await;
            }
            () = out.closed() => return,
            () = app.stop.cancelled() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_round_trip_and_refuse_other_text() {
        let place = Place { attempt: 2, at: [10, 0] };
        assert_eq!(place.to_string().parse(), Ok(place));
        for bad in ["", "1", "1.2", "1.2.3.4", "a.b.c", "-1.0.0"] {
            assert_eq!(bad.parse::<Place>(), Err(PlaceError), "{bad}");
        }
    }

    #[test]
    fn a_character_across_two_pieces_is_whole() {
        let name = |index| AttemptName { job: JobId(1), stage: 0, index, number: 1, sequence: 1 };
        let piece =
            |index, stderr, offset, bytes: &[u8]| Live { name: name(index), stderr, offset, bytes: bytes.to_vec().into(), held: None };
        let mut texts = Texts::default();
        assert_eq!(texts.feed(&piece(0, false, 0, b"a\xe2\x86"), false), "a");
        assert_eq!(texts.feed(&piece(0, true, 0, b"\xe2"), false), "");
        assert_eq!(texts.feed(&piece(1, false, 0, "é".as_bytes()), false), "é");
        assert_eq!(texts.feed(&piece(0, false, 3, b"\x92b"), false), "→b");
        // Something is missing.
        assert_eq!(texts.feed(&piece(0, true, 9, b"\x92c"), false), "\n[volley: 8 bytes left out here]\nc");
        // The first that is seen begins within a character.
        assert_eq!(texts.feed(&piece(2, true, 9, b"\x92c"), false), "c");
    }

    #[test]
    fn what_was_written_before_comes_first_and_once() {
        let name = AttemptName { job: JobId(1), stage: 0, index: 0, number: 1, sequence: 1 };
        let piece = |offset, bytes: &[u8], held| Live { name, stderr: false, offset, bytes: bytes.to_vec().into(), held };
        let mut texts = Texts::default();
        // Somebody else watched already, so this one comes before the worker has answered.
        assert_eq!(texts.feed(&piece(6, b"c\n", None), true), "");
        assert_eq!(texts.feed(&piece(0, b"a\n", Some(Held::Piece)), true), "a\n");
        assert_eq!(texts.feed(&piece(4, b"b\nc\n", Some(Held::Piece)), true), "\n[volley: 2 bytes left out here]\nb\nc\n");
        assert_eq!(texts.feed(&piece(8, b"d\n", None), true), "d\n");
        // Another one asks, and is answered on the same subject.
        assert_eq!(texts.feed(&piece(0, b"a\n", Some(Held::Piece)), false), "");
        assert_eq!(texts.feed(&piece(4, b"b\nc\nd\n", Some(Held::Piece)), false), "");
        assert_eq!(texts.feed(&piece(10, b"e\n", None), false), "e\n");
    }
}
