//! `create`, `attach`, `detach`: a volume comes to be, is opened by whoever takes the next epoch, and is let go.
//!
//! Owns the order of an attach: what this host is about to ask for is on its disk first (`format/holding.rs`), then the head is asked, then the log is read.
//! Who may ask is the caller's business.

use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};

use volley_jobspecs::ids::{AttemptName, SnapshotId, TenantId, VolumeId};

use crate::commit::{CommitError, Commits, Next};
use crate::format::content::{Content, check_size};
use crate::format::head::{FlushMode, HEAD_BYTES_MAX, Head, Holder};
use crate::format::holding::{Boot, Holding};
use crate::format::seal::FamilyKey;
use crate::format::{FormatError, keys};
use crate::host::{FetchError, Host, at, boot_id, lock, now_ms, random, replace_file};
use crate::io::log::{Log, LogError, LogOf, sync_dir};
use crate::io::s3::{ObjectsError, Put};
use crate::state::fence::{Tried, Verdict, judge};
use crate::state::moves::{self, Attach, Create, MoveError};
use crate::volume::{Shared, State, Volume};

/// How often an attach is tried when others change the head at the same time, or nobody answers.
const ATTACH_TRIES: u32 = 8;
/// The file that says what this host holds.
pub(crate) const HOLDING: &str = "holding";

/// Why a volume is not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Not for us.
    #[error(transparent)]
    Move(#[from] MoveError),
    /// S3, or what came from there.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A file of this host.
    #[error("{what} {}: {error}", path.display())]
    File {
        /// What was done.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's words.
        error: std::io::Error,
    },
    /// It is open in this host already.
    #[error("{volume} is open on this host already ({})", path.display())]
    Open {
        /// The volume.
        volume: VolumeId,
        /// Its directory.
        path: PathBuf,
    },
    /// It is no volume of its own yet.
    #[error("{volume} is a clone on this host only: keep it first")]
    Ephemeral {
        /// The clone.
        volume: VolumeId,
    },
    /// It was not made: what it should begin with was removed meanwhile.
    #[error("{volume} was not made: its snapshot {snapshot} was removed before; clone one that is there")]
    BaseGone {
        /// The clone.
        volume: VolumeId,
        /// Of which snapshot.
        snapshot: SnapshotId,
    },
    /// Others change the head all the time, or nobody answers.
    #[error("{volume}: the head can't be taken: {why}")]
    Busy {
        /// The volume.
        volume: VolumeId,
        /// What came last.
        why: String,
    },
    /// The last commit.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// A record that can't be written.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl From<ObjectsError> for OpenError {
    fn from(error: ObjectsError) -> Self {
        Self::Fetch(error.into())
    }
}

/// What is to be made.
#[derive(Debug, Clone)]
pub struct NewVolume {
    /// Its id; never used before.
    pub volume: VolumeId,
    /// Whose it is.
    pub tenant: TenantId,
    /// Bytes: whole blocks, 1 MiB to 16 TiB.
    pub size: u64,
    /// What a flush promises.
    pub flush: FlushMode,
}

/// Who opens a volume to write.
#[derive(Debug, Clone)]
pub struct Opener {
    /// For which attempt; None: a person.
    pub attempt: Option<AttemptName>,
    /// This host's name, for people.
    pub host: String,
    /// Random bytes of this attach. Whoever gives the same again goes on with what is in the log.
    pub attach: [u8; 16],
    /// Until when others should leave it alone, in milliseconds since the Unix epoch.
    pub until_ms: u64,
    /// A guest will write.
    pub guest: bool,
    /// Even if somebody has it.
    pub force: bool,
    /// Goes on with what the last holder had committed, instead of what was accepted.
    pub resume: bool,
}

/// A volume that is being opened.
pub(crate) struct Opening {
    pub head: Head,
    pub family: FamilyKey,
    pub tag: Option<String>,
    pub lock: File,
    pub dir: PathBuf,
    /// Of what the log gets from now on.
    pub epoch: u64,
    /// Where the log goes on: the last operation that S3 has.
    pub committed: u64,
    /// The first epoch in which this host wrote since it was last started.
    pub whole_from: Option<u64>,
}

impl Host {
    /// Makes a volume of zeros: one request.
    ///
    /// # Errors
    /// [`OpenError`]; one of this id is there already: the key is named.
    pub fn create(&self, new: NewVolume) -> Result<(), OpenError> {
        check_size("a volume", new.size)?;
        let family = FamilyKey::new(random()?);
        let key = family.wrap(&self.keys, new.volume, random()?)?;
        let by = Create { volume: new.volume, tenant: new.tenant, flush: new.flush, now_ms: now_ms(), commit: random()? };
        let head = moves::create(by, new.size, key);
        self.put_new_head(&head, &family)?;
        Ok(())
    }

    pub(crate) fn put_new_head(&self, head: &Head, family: &FamilyKey) -> Result<String, OpenError> {
        let (key, bytes) = (keys::head(head.volume), head.write(family, random()?)?);
        Ok(Self::end(&key, &self.begin_put(key.clone(), bytes.into()))?)
    }

    /// A volume's head as it is now, and its tag.
    pub(crate) fn head(&self, volume: VolumeId) -> Result<(Head, FamilyKey, String), FetchError> {
        let key = keys::head(volume);
        let (bytes, tag) = self.get(&key, HEAD_BYTES_MAX)?;
        let (head, family) = Head::read(volume, &self.keys, &bytes).map_err(at(&key))?;
        Ok((head, family, tag))
    }

    /// Opens a volume to write: takes the next epoch. With the attach of a process before this one, what its log has is there again; with another
    /// one the disk is as it was accepted, and an older log of this host is put aside.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn attach(self: &Arc<Self>, volume: VolumeId, by: &Opener) -> Result<Volume, OpenError> {
        self.attach_if(volume, by, |_| Ok(()))
    }

    /// The same, if the head that is replaced is one that `may` be: it is asked for each head that is found.
    pub(crate) fn attach_if(
        self: &Arc<Self>,
        volume: VolumeId,
        by: &Opener,
        may: impl Fn(&Head) -> Result<(), MoveError>,
    ) -> Result<Volume, OpenError> {
        let (dir, file) = self.lock_dir(volume)?;
        let (mut head, family, mut tag) = self.head(volume)?;
        for _ in 0..ATTACH_TRIES {
            may(&head)?;
            let holder = Holder { host: by.host.clone(), attach: by.attach, until_ms: by.until_ms };
            let Opener { attempt, guest, force, resume, .. } = *by;
            let next = moves::attach(&head, Attach { attempt, holder, guest, force, resume, now_ms: now_ms(), commit: random()? })?;
            let same = head.holder.as_ref().is_some_and(|holder| holder.attach == by.attach);
            let whole_from = self.hold(volume, &dir, by, next.epoch, same)?;
            let put = self.put_if_match(&keys::head(volume), next.write(&family, random()?)?.into(), &tag)?;
            let found = match put {
                Put::Written(tag) => (next.clone(), tag),
                Put::Refused | Put::Unknown(_) => {
                    let (found, _, tag) = self.head(volume)?;
                    (found, tag)
                }
            };
            if judge(Tried { head: &next, replaces: head.commit }, Some(&found.0)) == Verdict::Mine {
                let committed = next.working.as_ref().map_or(0, |working| working.op);
                let (epoch, tag) = (next.epoch, Some(found.1));
                return self.open(Opening { head: next, family, tag, lock: file, dir, epoch, committed, whole_from }, false);
            }
            // Not ours, or not yet: on top of what is there now.
            (head, tag) = found;
        }
        Err(OpenError::Busy { volume, why: format!("epoch {} was given to others, or nobody answered", head.epoch) })
    }

    /// The volume's directory, for this process alone.
    pub(crate) fn lock_dir(&self, volume: VolumeId) -> Result<(PathBuf, File), OpenError> {
        let dir = self.dir_of(volume);
        let error = |what| {
            let path = dir.clone();
            move |error| OpenError::File { what, path, error }
        };
        if !dir.exists() {
            std::fs::create_dir_all(&dir).map_err(error("making"))?;
            // What is flushed in it must still have a name after a power cut.
            sync_dir(&self.dir).map_err(error("naming"))?;
        }
        let file = File::create(self.dir.join(format!("{volume}.lock"))).map_err(error("locking"))?;
        match file.try_lock() {
            Ok(()) => Ok((dir, file)),
            Err(std::fs::TryLockError::WouldBlock) => Err(OpenError::Open { volume, path: dir }),
            Err(std::fs::TryLockError::Error(e)) => Err(error("locking")(e)),
        }
    }

    pub(crate) fn holding(dir: &std::path::Path) -> Result<Option<Holding>, OpenError> {
        let path = dir.join(HOLDING);
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Some(Holding::read(&bytes)?)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(OpenError::File { what: "reading", path, error }),
        }
    }

    /// Says on the disk what is about to be asked for. The log that is there is gone on with if the head still has the same attach. Any other was written
    /// over another state of the disk, and is put aside: somebody may want to look at it. Returns the first epoch that this attach wrote since the host was started.
    fn hold(&self, volume: VolumeId, dir: &std::path::Path, by: &Opener, epoch: u64, same: bool) -> Result<Option<u64>, OpenError> {
        let error = |what, path: &std::path::Path| {
            let path = path.to_owned();
            move |error| OpenError::File { what, path, error }
        };
        let before = Self::holding(dir)?;
        let (log_from, boot) = match &before {
            Some(before) if same && before.attach == by.attach => (before.log_from, before.boot),
            Some(before) => {
                let aside = self.dir.join(format!("{volume}.lost-{:016x}-{}", before.epoch, hex::encode(random::<4>()?)));
                std::fs::rename(dir, &aside).map_err(error("putting aside", &aside))?;
                std::fs::create_dir(dir).map_err(error("making", dir))?;
                sync_dir(&self.dir).map_err(error("naming", dir))?;
                tracing::warn!(volume = %volume, path = %aside.display(), "what an earlier attach of this host had in its log was put aside");
                (epoch, None)
            }
            None => (epoch, None),
        };
        let boot = Boot::of(boot_id(), epoch, boot);
        let holding = Holding { volume, attach: by.attach, epoch, log_from, ephemeral: None, boot };
        let path = dir.join(HOLDING);
        replace_file(&path, &holding.write()?, true).map_err(error("writing", &path))?;
        Ok(boot.map(|boot| boot.since))
    }

    /// Reads map and log, and begins to serve.
    pub(crate) fn open(self: &Arc<Self>, opening: Opening, ephemeral: bool) -> Result<Volume, OpenError> {
        let Opening { head, family, tag, lock: file, dir, epoch, committed, whole_from } = opening;
        let (map, bodies) = match head.base.filter(|_| ephemeral) {
            Some(base) => self.base(base)?.map(),
            None => self.map(&family, head.latest())?,
        };
        let of = LogOf { dir, volume: head.volume, family: family.clone(), lasts: !ephemeral, whole_from };
        let found = of.find(committed)?;
        let entries = found.entries.clone();
        let log = Log::new(of, epoch, found, Box::new(random));
        let size = head.latest().size;
        let mut state =
            State { log, overlay: Default::default(), map, bodies, size, committed, dirty: 0, short: false, failure: None, closing: false };
        for entry in entries {
            state.play(entry.record.change, entry.record.op, entry.place);
            state.dirty += entry.record.bytes();
        }
        let shared = Arc::new(Shared {
            host: Arc::clone(self),
            id: head.volume,
            family,
            flush: head.flush,
            read_only: false,
            ephemeral,
            state: Mutex::new(state),
            room: Condvar::new(),
            wake: Condvar::new(),
            sync: Mutex::new(()),
            ahead: Default::default(),
            commits: Mutex::new(Commits { seq: head.seq, head, tag, pending: None }),
            _lock: file,
        });
        let committer = (!ephemeral).then(|| {
            let shared = Arc::clone(&shared);
            let name = std::thread::Builder::new().name("volume commits".to_owned());
            name.spawn(move || shared.commit_for_ever())
        });
        let committer =
            committer.transpose().map_err(|error| OpenError::File { what: "starting a thread for", path: self.dir.clone(), error })?;
        Ok(Volume { shared, committer })
    }
}

impl Volume {
    /// Commits everything and lets the volume go. Returns the state that stands: its digest, and the generation it is based on.
    ///
    /// # Errors
    /// [`OpenError::Commit`]: what was not committed is in the log, and the same attach finds it.
    pub fn detach(mut self) -> Result<(Content, u64), OpenError> {
        self.stop();
        let shared = &self.shared;
        if shared.ephemeral {
            return self.drop_clone();
        }
        let mut commits = lock(&shared.commits);
        shared.commit_with(&mut commits, false)?;
        let head = moves::detach(&commits.head, random()?);
        shared.put_head(&mut commits, Next { head, map: None })?;
        let (content, generation) = (commits.head.latest().clone(), commits.head.accepted.generation);
        drop(commits);
        // S3 has all of it: nothing here is needed any more.
        let dir = shared.host.dir_of(shared.id);
        std::fs::remove_dir_all(&dir).map_err(|error| OpenError::File { what: "removing", path: dir, error })?;
        Ok((content, generation))
    }
}
