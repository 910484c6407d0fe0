//! `commit`: what the log has and S3 lacks goes into packs, and the head moves.
//!
//! Owns the order: packs first, map pages then, the head last, on the condition that it is still ours; and what is done when an answer is lost. What a commit
//! consists of is `state/commit.rs`'s, what answers mean `state/fence.rs`'s.
//!
//! A commit has everything that was acknowledged up to its cut and nothing behind it: a state that a power cut could have left. Until the head has moved,
//! nothing of it counts, and the log keeps all of it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::format::content::{Content, Delta, MapRef};
use crate::format::extent::PackRef;
use crate::format::head::{HEAD_BYTES_MAX, Head};
use crate::format::page::{MapWriter, PageRef};
use crate::format::{BLOCK, FormatError, keys};
use crate::host::{FetchError, Host, at, lock, now_ms, random};
use crate::io::s3::{ObjectsError, Put};
use crate::state::commit::{Item, Packed, Packs, cut, stays, taken_up, takes_up, wants_checkpoint};
use crate::state::fence::{Tried, Verdict, judge, rebase};
use crate::state::map::Map;
use crate::state::moves::{self, MoveError};
use crate::state::overlay::{Place, Run};
use crate::volume::{Failure, Shared, State};

/// Packs that are on their way at once. One that is built while others travel keeps a link of 1 Gbit/s busy.
const UPLOADS_MAX: usize = 4;
/// How often the head is sent, with what it is now, before the commit is given up for this time.
const HEAD_TRIES: u32 = 8;
/// Pause between two; the client below has waited longer already.
const HEAD_PAUSE: Duration = Duration::from_millis(20);
/// Pause after a commit that failed.
const COMMIT_PAUSE: Duration = Duration::from_secs(1);

/// Why nothing was committed. What was to be is still in the log.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// Not any more.
    #[error(transparent)]
    Failure(#[from] Failure),
    /// S3, or what came from there.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// A record can't be written.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The head can't become this.
    #[error(transparent)]
    Move(#[from] MoveError),
    /// A part of the log does not read.
    #[error("{0}")]
    Log(String),
    /// Nobody answers.
    #[error("the head can't be written: {0}; the commit is tried again")]
    NoAnswer(String),
}

impl From<ObjectsError> for CommitError {
    fn from(error: ObjectsError) -> Self {
        Self::Fetch(error.into())
    }
}

impl From<CommitError> for std::io::Error {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Failure(failure) => failure.into(),
            other => Self::other(other),
        }
    }
}

/// The head as it is known, for whoever commits.
pub(crate) struct Commits {
    pub head: Head,
    /// Its tag; None: it lies in no bucket.
    pub tag: Option<String>,
    /// One that was sent, and nobody said what became of it: it comes first.
    pub pending: Option<Next>,
    /// The last sequence that objects were named by, so that a commit which failed leaves its names behind.
    pub seq: u64,
}

/// A head that is to be, and the map that goes with it; None: the map stays.
#[derive(Clone)]
pub(crate) struct Next {
    pub head: Head,
    pub map: Option<Map>,
}

/// A commit that is being made. It has a map of its own: until the head has moved, nothing that it made may be met by anybody.
struct Making<'a> {
    shared: &'a Shared,
    content: Content,
    map: Map,
    epoch: u64,
    seq: u64,
    uploads: VecDeque<(String, mpsc::Receiver<Result<String, ObjectsError>>)>,
}

impl Shared {
    /// Commits everything up to now.
    pub fn commit(&self) -> Result<(), CommitError> {
        let mut commits = lock(&self.commits);
        self.commit_with(&mut commits, false)
    }

    /// Commits, and writes the map if that is asked.
    pub fn commit_with(&self, commits: &mut Commits, checkpoint: bool) -> Result<(), CommitError> {
        if let Some(pending) = commits.pending.take() {
            self.put_head(commits, pending)?;
        }
        let content = commits.head.latest().clone();
        let (until, dirty, size, runs, map) = {
            let state = lock(&self.state);
            state.alive()?;
            let until = state.log.last_op();
            if until == state.committed && (content.deltas.is_empty() || !checkpoint) {
                let dirty = state.dirty;
                drop(state);
                self.committed(dirty);
                return Ok(());
            }
            (until, state.dirty, state.size, state.overlay.changed(state.committed, until), state.map.clone())
        };
        // Names count on even if an earlier commit of this process failed: no name is used twice.
        let seq = commits.seq.max(commits.head.seq) + 1;
        commits.seq = seq;
        let epoch = commits.head.epoch;
        let content = Content { size, ..content };
        let mut making = Making { shared: self, content, map, epoch, seq, uploads: VecDeque::new() };
        making.packs(&runs)?;
        making.checkpoint(checkpoint)?;
        making.finish_uploads(0)?;
        let Making { content, map, .. } = making;
        let head = Head { seq: seq - 1, ..commits.head.clone() };
        let head = moves::commit(&head, content, until, random()?)?;
        self.put_head(commits, Next { head, map: Some(map) })?;
        self.committed(dirty);
        Ok(())
    }

    /// Commits an ephemeral clone, which has no head in S3 yet: it gets one.
    pub fn first_commit(&self, commits: &mut Commits) -> Result<Content, CommitError> {
        let (size, runs, map) = {
            let state = lock(&self.state);
            state.alive()?;
            (state.size, state.overlay.changed(0, state.log.last_op()), state.map.clone())
        };
        // Whoever keeps a clone again, after a crash in the middle, must not meet the names of the first time.
        let (epoch, seq) = (1, now_ms());
        let content = Content { size, ..commits.head.latest().clone() };
        let mut making = Making { shared: self, content, map, epoch, seq, uploads: VecDeque::new() };
        making.packs(&runs)?;
        making.checkpoint(false)?;
        making.finish_uploads(0)?;
        let mut head = Head { epoch, seq, commit: random()?, ..commits.head.clone() };
        head.accepted.content = making.content;
        let key = keys::head(self.id);
        let put = self.host.begin_put(key.clone(), head.write(&self.family, random()?)?.into());
        match Host::end(&key, &put) {
            Ok(_) => Ok(head.accepted.content),
            // The id is this clone's alone: an earlier try got as far as this.
            Err(error @ ObjectsError::Refused { .. }) => {
                let (found, _, _) = self.host.head(self.id)?;
                if found.base == head.base && found.epoch == epoch { Ok(found.accepted.content) } else { Err(error.into()) }
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The head has moved: makes room.
    fn committed(&self, dirty: u64) {
        let mut state = lock(&self.state);
        state.dirty = state.dirty.saturating_sub(dirty);
        if state.short {
            self.give_back_all(&mut state);
        } else {
            self.give_back(&mut state, self.host.limits.log_keep_bytes);
        }
        drop(state);
        self.room.notify_all();
    }

    /// Gives back what S3 has of the log, but for about `keep` bytes.
    fn give_back(&self, state: &mut State, keep: u64) {
        let committed = state.committed;
        let oldest = state.log.oldest_wanted(committed, keep);
        state.overlay.forget(committed, oldest);
        state.log.give_back(oldest);
    }

    /// Gives back all of the log's room that is not needed; tells whether there was any.
    pub fn give_back_all(&self, state: &mut State) -> bool {
        let before = state.log.bytes();
        self.give_back(state, 0);
        state.log.drop_spares();
        state.log.bytes() < before
    }

    /// Replaces the head, until it is known to be there, or somebody else has the right.
    pub fn put_head(&self, commits: &mut Commits, mut next: Next) -> Result<(), CommitError> {
        let Some(mut tag) = commits.tag.clone() else {
            return Err(CommitError::NoAnswer("it lies in no bucket".to_owned()));
        };
        let (key, mut last) = (keys::head(self.id), String::new());
        let mut bytes: Bytes = next.head.write(&self.family, random()?)?.into();
        // Until it is known what became of it, nothing else may be sent: it may be written yet.
        commits.pending = Some(next.clone());
        for _ in 0..HEAD_TRIES {
            match self.host.put_if_match(&key, bytes.clone(), &tag) {
                Ok(Put::Written(tag)) => return self.moved(commits, next, tag),
                Ok(Put::Refused) => "somebody has changed it".clone_into(&mut last),
                Ok(Put::Unknown(why)) => last = why,
                Err(error) => last = error.to_string(),
            }
            let found = match self.host.get(&key, HEAD_BYTES_MAX) {
                Ok((bytes, tag)) => Some((Head::read(self.id, &self.host.keys, &bytes).map_err(at(&key))?.0, tag)),
                Err(ObjectsError::NotFound { .. }) => None,
                Err(error) => {
                    last = error.to_string();
                    std::thread::sleep(HEAD_PAUSE);
                    continue;
                }
            };
            let tried = Tried { head: &next.head, replaces: commits.head.commit };
            match (judge(tried, found.as_ref().map(|(head, _)| head)), found) {
                (Verdict::Mine, Some((_, tag))) => return self.moved(commits, next, tag),
                (Verdict::Again, Some((_, found))) => {
                    tag = found;
                    std::thread::sleep(HEAD_PAUSE);
                }
                (Verdict::Rebase, Some((head, found))) => {
                    next.head = rebase(&head, &next.head);
                    bytes = next.head.write(&self.family, random()?)?.into();
                    commits.pending = Some(next.clone());
                    (commits.head, commits.tag, tag) = (head, Some(found.clone()), found);
                }
                (Verdict::Fenced { epoch, host }, _) => return Err(self.fenced(host, epoch).into()),
                (verdict, _) => return Err(self.fenced(verdict.to_string(), 0).into()),
            }
        }
        Err(CommitError::NoAnswer(last))
    }

    fn moved(&self, commits: &mut Commits, next: Next, tag: String) -> Result<(), CommitError> {
        let Next { head, map } = next;
        let mut state = lock(&self.state);
        state.map = map.unwrap_or_else(|| std::mem::take(&mut state.map));
        if let Some(working) = head.working.as_ref().filter(|working| working.op > state.committed) {
            state.committed = working.op;
        }
        let here = |delta: &Delta| delta.body.as_ref().map(|body| (delta.pack, Arc::new(body.clone())));
        state.bodies = head.latest().deltas.iter().filter_map(here).collect();
        drop(state);
        *commits = Commits { seq: commits.seq.max(head.seq), head, tag: Some(tag), pending: None };
        Ok(())
    }

    fn fenced(&self, host: String, epoch: u64) -> Failure {
        let failure = Failure::Fenced { volume: self.id, host, epoch };
        self.fail(failure.clone());
        failure
    }

    /// Commits for ever: some time after each first change, and when much waits.
    pub fn commit_for_ever(&self) {
        let limits = &self.host.limits;
        loop {
            let mut state = lock(&self.state);
            let mut since: Option<Instant> = None;
            while !state.closing && state.failure.is_none() && state.dirty < limits.commit_bytes && !(state.short && state.dirty > 0) {
                if state.dirty == 0 {
                    state = self.wake.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
                    continue;
                }
                let left = (*since.get_or_insert_with(Instant::now) + limits.commit_every).saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                state = self.wake.wait_timeout(state, left).map_or_else(|e| e.into_inner().0, |(state, _)| state);
            }
            if state.closing || state.failure.is_some() {
                return;
            }
            drop(state);
            if let Err(error) = self.commit() {
                tracing::warn!(volume = %self.id, %error, "a commit failed; it is tried again");
                let state = lock(&self.state);
                drop(self.wake.wait_timeout_while(state, COMMIT_PAUSE, |state| !state.closing));
            }
        }
    }
}

impl Making<'_> {
    /// Reads what was changed, puts it into packs, and sends those that do not stay in the head.
    fn packs(&mut self, runs: &[Run]) -> Result<(), CommitError> {
        let bytes: u64 = runs.iter().filter(|run| run.place != Place::Zero).map(|run| run.blocks * BLOCK).sum();
        let large = !stays(&Content::empty(0), usize::try_from(bytes).unwrap_or(usize::MAX));
        let first = PackRef { volume: self.shared.id, epoch: self.epoch, seq: self.seq, n: 0, salt: [0; 16] };
        let whole = large || takes_up(&self.content, false, usize::try_from(bytes).unwrap_or(usize::MAX));
        let old = if whole { self.take_up(runs)? } else { Vec::new() };
        let mut pieces: Vec<Piece> =
            old.into_iter().map(|(block, blocks, plain)| Piece { block, blocks, bytes: Lies::Here(plain) }).collect();
        pieces.extend(cut(runs).into_iter().map(|item| match item {
            Item::Hole { block, blocks } => Piece { block, blocks, bytes: Lies::Here(None) },
            Item::Extent { block, blocks, runs } => Piece { block, blocks, bytes: Lies::Log(runs) },
        }));
        pieces.sort_by_key(|piece| piece.block);
        let family = self.shared.family.clone();
        let mut packs = Packs::new(&family, first, random);
        for Piece { block, blocks, bytes } in pieces {
            let full = match bytes {
                Lies::Here(None) => packs.hole(block, blocks)?,
                Lies::Here(Some(plain)) => packs.blocks(block, &plain)?,
                Lies::Log(runs) => packs.blocks(block, &self.read(&runs)?)?,
            };
            for pack in full {
                self.take(pack, false)?;
            }
        }
        match packs.finish()? {
            Some(last) => self.take(last, !large),
            None => Ok(()),
        }
    }

    fn read(&self, runs: &[Run]) -> Result<Vec<u8>, CommitError> {
        let mut plain = vec![0; (runs.iter().map(|run| run.blocks).sum::<u64>() * BLOCK) as usize];
        let mut rest = plain.as_mut_slice();
        for run in runs {
            let (part, behind) = std::mem::take(&mut rest).split_at_mut((run.blocks * BLOCK) as usize);
            rest = behind;
            let Place::Log(place) = run.place else { continue };
            let segment = lock(&self.shared.state).log.segment(place.segment);
            let segment = segment.ok_or_else(|| CommitError::Log(format!("segment {} is gone", place.segment)))?;
            segment.read(place, part).map_err(|error| CommitError::Log(error.to_string()))?;
        }
        Ok(plain)
    }

    /// What the packs in the head say, once more; they are dropped.
    fn take_up(&mut self, runs: &[Run]) -> Result<Vec<(u64, u64, Option<Vec<u8>>)>, CommitError> {
        let shared = self.shared;
        let bodies: Vec<PackRef> = self.content.deltas.iter().filter(|delta| delta.body.is_some()).map(|delta| delta.pack).collect();
        let mut out = Vec::new();
        for range in taken_up(&shared.family, &self.content, runs)? {
            let found = loop {
                let mut found = Vec::new();
                let Some(missing) = self.map.get(range.clone(), &mut found) else { break found };
                self.map.load(missing.number, shared.host.page(&shared.family, &missing)?);
            };
            for run in found {
                let plain = match run.place {
                    None => None,
                    Some((pack, _)) if !bodies.contains(&pack) => continue,
                    Some((pack, stored)) => {
                        let body = lock(&shared.state).bodies.get(&pack).cloned().unwrap_or_default();
                        let bytes = crate::format::object::slice(&body, stored.frame).unwrap_or_default();
                        let extent = crate::format::pack::open_extent(&shared.family, &pack, &stored, bytes)?;
                        let start = stored.skip as usize * BLOCK as usize;
                        let part = extent.get(start..start + (run.blocks * BLOCK) as usize);
                        Some(part.ok_or(FormatError::Size { what: "an extent", bytes: extent.len() })?.to_vec())
                    }
                };
                out.push((run.block, run.blocks, plain));
            }
        }
        self.content.deltas.retain(|delta| delta.body.is_none());
        Ok(out)
    }

    /// Takes a pack into the state, and sends it unless it stays in the head.
    fn take(&mut self, pack: Packed, small: bool) -> Result<(), CommitError> {
        let Packed { bytes, mut delta, pointers } = pack;
        let stays = small && stays(&self.content, bytes.len());
        self.map.apply(delta.pack, &pointers);
        if stays {
            delta.body = Some(bytes);
        } else {
            self.send(delta.pack.key(), bytes.into())?;
        }
        self.content.deltas.push(delta);
        Ok(())
    }

    fn send(&mut self, key: String, bytes: Bytes) -> Result<(), CommitError> {
        self.finish_uploads(UPLOADS_MAX - 1)?;
        let request = self.shared.host.begin_put(key.clone(), bytes);
        self.uploads.push_back((key, request));
        Ok(())
    }

    fn finish_uploads(&mut self, left: usize) -> Result<(), CommitError> {
        while self.uploads.len() > left {
            let Some((key, request)) = self.uploads.pop_front() else { break };
            Host::end(&key, &request)?;
        }
        Ok(())
    }

    /// Writes the changed pages and the root, if it is time or asked for: no deltas are left then.
    fn checkpoint(&mut self, asked: bool) -> Result<(), CommitError> {
        if self.content.deltas.is_empty() || !(asked || wants_checkpoint(&self.content)) {
            return Ok(());
        }
        // A page names objects only: what lies in the head becomes one as it is, under the name that it has.
        for mut delta in std::mem::take(&mut self.content.deltas) {
            if let Some(body) = delta.body.take() {
                self.send(delta.pack.key(), body.into())?;
            }
        }
        let shared = self.shared;
        for missing in self.map.missing_changed() {
            self.map.load(missing.number, shared.host.page(&shared.family, &missing)?);
        }
        let object = MapRef { volume: shared.id, epoch: self.epoch, seq: self.seq, salt: random()? };
        let mut writer = MapWriter::new(&shared.family, object)?;
        let mut written: BTreeMap<u64, PageRef> = BTreeMap::new();
        for (number, page) in self.map.changed().iter().filter(|(_, page)| !page.pointers.is_empty()) {
            written.insert(*number, writer.page(*number, page)?);
        }
        let (bytes, root) = writer.finish(&self.map.root(self.content.size, &written))?;
        self.send(object.key(), bytes.into())?;
        self.map.stored(&written);
        self.content.root = Some(root);
        Ok(())
    }
}

/// A piece of a commit.
struct Piece {
    block: u64,
    blocks: u64,
    bytes: Lies,
}

/// Where a piece's bytes are.
enum Lies {
    /// Here; None: zeros.
    Here(Option<Vec<u8>>),
    /// In the log.
    Log(Vec<Run>),
}
