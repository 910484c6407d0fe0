//! `clone`: a disk that begins as a snapshot. An ephemeral one lives on this host alone until it is kept, and costs no request beside what is read.
//!
//! Owns the snapshots that this host has read, so that a thousand clones of one read it once. Does not own snapshots themselves (`snapshot.rs`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use volley_jobspecs::ids::{SnapshotId, VolumeId};

use crate::format::content::Content;
use crate::format::extent::PackRef;
use crate::format::head::{FlushMode, Head, WrittenBy};
use crate::format::holding::{Boot, Holding};
use crate::format::keys;
use crate::format::seal::FamilyKey;
use crate::format::snapshot::{SNAPSHOT_BYTES_MAX, Snapshot};
use crate::host::{FetchError, Host, boot_id, lock, now_ms, random, replace_file};
use crate::io::s3::ObjectsError;
use crate::open::{HOLDING, OpenError, Opening};
use crate::state::map::Map;
use crate::state::moves::{self, Create};
use crate::volume::Volume;

/// Snapshots that are remembered. A host has few at a time; each is some pages and a list of them.
const BASES_MAX: usize = 64;

/// What clones of a snapshot begin with.
pub(crate) struct Base {
    pub snapshot: Snapshot,
    pub family: FamilyKey,
    map: Map,
    bodies: HashMap<PackRef, Arc<Vec<u8>>>,
}

impl Base {
    /// The map, whose pages are shared until somebody changes his own.
    pub fn map(&self) -> (Map, HashMap<PackRef, Arc<Vec<u8>>>) {
        (self.map.clone(), self.bodies.clone())
    }
}

/// Those that this host has read.
pub(crate) type Bases = Mutex<HashMap<SnapshotId, Arc<Base>>>;

impl Host {
    /// A snapshot, read once.
    pub(crate) fn base(&self, id: SnapshotId) -> Result<Arc<Base>, FetchError> {
        // Under the lock: whoever comes at the same time waits for the first, and asks for nothing.
        let mut bases = lock(&self.bases);
        if let Some(base) = bases.get(&id) {
            return Ok(Arc::clone(base));
        }
        let (snapshot, family) = self.read_snapshot(id)?;
        let (map, bodies) = self.map(&family, &snapshot.content)?;
        let base = Arc::new(Base { snapshot, family, map, bodies });
        if bases.len() >= BASES_MAX {
            bases.retain(|_, base| Arc::strong_count(base) > 1);
        }
        bases.insert(id, Arc::clone(&base));
        Ok(base)
    }

    fn clone_head(&self, snapshot: SnapshotId, volume: VolumeId, flush: FlushMode) -> Result<(Head, FamilyKey), OpenError> {
        let base = self.base(snapshot)?;
        let by = Create { volume, tenant: base.snapshot.line.tenant.clone(), flush, now_ms: now_ms(), commit: random()? };
        Ok((moves::clone(by, &base.snapshot), base.family.clone()))
    }

    /// A clone as a volume of its own: one object is written, none of the snapshot's volume.
    ///
    /// # Errors
    /// [`OpenError`]; [`OpenError::BaseGone`]: nothing was made.
    pub fn clone_named(&self, snapshot: SnapshotId, volume: VolumeId, flush: FlushMode) -> Result<(), OpenError> {
        let (head, family) = self.clone_head(snapshot, volume, flush)?;
        self.put_new_head(&head, &family)?;
        self.base_is_there(snapshot, volume)
    }

    /// Looks whether the snapshot is still there whose blocks a head names that was just written. Whoever was stopped between reading the one and writing the other may come days
    /// too late: then what it names is collected, or will be, and a head that says so would keep every collection from going on. While the snapshot is there nothing
    /// that it names goes, and later collections see the head.
    fn base_is_there(&self, snapshot: SnapshotId, volume: VolumeId) -> Result<(), OpenError> {
        match self.get(&keys::snapshot(snapshot), SNAPSHOT_BYTES_MAX) {
            Ok(_) => Ok(()),
            Err(ObjectsError::NotFound { .. }) => {
                // Never one that anybody was given since: a clone is made with an epoch of 0, or kept with 1.
                self.change_head(volume, |head, commit| match head.tombstone.is_some() || head.epoch > 1 {
                    true => Ok(None),
                    false => moves::remove(head, true, now_ms(), commit).map(Some),
                })?;
                Err(OpenError::BaseGone { volume, snapshot })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// A clone that is on this host only. `volume`: fresh, or that of a clone which a process before this one had open here: it goes on then.
    /// `guest`: a guest will write on it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn clone_ephemeral(
        self: &Arc<Self>,
        snapshot: SnapshotId,
        volume: VolumeId,
        flush: FlushMode,
        guest: bool,
    ) -> Result<Volume, OpenError> {
        let (dir, lock) = self.lock_dir(volume)?;
        let before = Self::holding(&dir)?;
        let (head, family, epoch) = match before.as_ref().and_then(|before| Some((before, before.ephemeral.as_ref()?))) {
            Some((before, bytes)) => {
                let (head, family) = Head::read(volume, &self.keys, bytes)?;
                (head, family, before.epoch + 1)
            }
            None => {
                let (mut head, family) = self.clone_head(snapshot, volume, flush)?;
                head.written_by = if guest { WrittenBy::Guest } else { head.written_by };
                (head, family, 0)
            }
        };
        // The epoch counts openings here: what the log gets from now on is told from what it got before.
        let ephemeral = Some(head.write(&family, random()?)?);
        let boot = Boot::of(boot_id(), epoch, before.as_ref().and_then(|before| before.boot));
        let holding = Holding { volume, attach: random()?, epoch, log_from: 0, ephemeral, boot };
        let path = dir.join(HOLDING);
        replace_file(&path, &holding.write()?, false).map_err(|error| OpenError::File { what: "writing", path, error })?;
        let whole_from = boot.map(|boot| boot.since);
        self.open(Opening { head, family, tag: None, lock, dir, epoch, committed: 0, whole_from }, true)
    }
}

impl Volume {
    /// Keeps an ephemeral clone as a volume: what was written goes to S3, its head is made, and it is open no more. Doing it again is harmless.
    ///
    /// # Errors
    /// [`OpenError`]: the clone is still on this host, as it was.
    pub fn keep(mut self) -> Result<Content, OpenError> {
        self.stop();
        let shared = &self.shared;
        let mut commits = lock(&shared.commits);
        let content = shared.first_commit(&mut commits)?;
        if let Some(base) = commits.head.base {
            shared.host.base_is_there(base, shared.id)?;
        }
        drop(commits);
        self.drop_clone()?;
        Ok(content)
    }

    /// Forgets an ephemeral clone.
    pub(crate) fn drop_clone(&self) -> Result<(Content, u64), OpenError> {
        let dir = self.shared.host.dir_of(self.shared.id);
        std::fs::remove_dir_all(&dir).map_err(|error| OpenError::File { what: "removing", path: dir, error })?;
        Ok((lock(&self.shared.commits).head.latest().clone(), 0))
    }
}
