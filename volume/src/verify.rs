//! `verify`: does everything that a state names exist, and is it what it should be?
//!
//! Owns the walk from a head or a snapshot over tables and pages to every extent, and which errors are damage. Repairs nothing.

use std::collections::{BTreeMap, BTreeSet};

use crate::format::content::Content;
use crate::format::extent::{PackRef, Stored};
use crate::format::object::{OBJECT_BYTES_MAX, slice};
use crate::format::pack;
use crate::format::seal::FamilyKey;
use crate::format::{BLOCK, FormatError};
use crate::host::{FetchError, Host, at};
use crate::io::s3::ObjectsError;
use crate::open::OpenError;
use volley_jobspecs::ids::{SnapshotId, VolumeId};

/// What was looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// Blocks that are stored.
    pub blocks: u64,
    /// Packs that hold them.
    pub packs: u64,
    /// Bytes of those packs, if they were read.
    pub bytes: u64,
}

/// How far a verification is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verifying {
    /// Packs that were read.
    pub packs: u64,
    /// Packs to be read of the state at hand; 0 while its map is read.
    pub packs_all: u64,
    /// Bytes of the packs that were read.
    pub bytes: u64,
}

/// What is verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whole {
    /// Both states of a volume: what was accepted, and what its writer has committed.
    Volume(VolumeId),
    /// A snapshot.
    Snapshot(SnapshotId),
}

/// Why something was not verified.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// An object that is needed is missing, or is not what it should be.
    #[error("{object}: {what}")]
    Damaged {
        /// The object's key.
        object: String,
        /// What is wrong with it.
        what: String,
    },
    /// It can't be told: nobody answers.
    #[error(transparent)]
    Open(OpenError),
    /// Nobody wants to know any more.
    #[error("nobody waits for it any more")]
    Stopped,
}

impl From<FetchError> for VerifyError {
    fn from(error: FetchError) -> Self {
        match error {
            // Another build or another key may well read it.
            FetchError::Format { error: FormatError::Version { .. } | FormatError::ClusterKey { .. }, .. } => Self::Open(error.into()),
            FetchError::Format { key, error } => Self::Damaged { what: error.to_string(), object: key },
            FetchError::Objects(ObjectsError::NotFound { key }) => Self::Damaged { what: "it is missing".to_owned(), object: key },
            FetchError::Objects(_) => Self::Open(error.into()),
        }
    }
}

impl From<ObjectsError> for VerifyError {
    fn from(error: ObjectsError) -> Self {
        FetchError::from(error).into()
    }
}

/// A verification that is under way.
struct Walk<'a> {
    host: &'a Host,
    family: FamilyKey,
    deep: bool,
    so_far: Verified,
    seen: &'a mut dyn FnMut(&Verifying) -> bool,
}

impl Host {
    /// Verifies both states of a volume. `deep`: reads and opens every pack; otherwise the map only.
    ///
    /// # Errors
    /// [`VerifyError::Damaged`] names the first object that is missing or damaged.
    pub fn verify(&self, volume: VolumeId, deep: bool) -> Result<Verified, VerifyError> {
        self.verify_seen(Whole::Volume(volume), deep, &mut |_| true)
    }

    /// The same, of a snapshot too. `seen` is told before each pack how far it is, and says whether to go on.
    ///
    /// # Errors
    /// As [`Host::verify`]; [`VerifyError::Stopped`].
    pub fn verify_seen(&self, what: Whole, deep: bool, seen: &mut dyn FnMut(&Verifying) -> bool) -> Result<Verified, VerifyError> {
        let (family, contents) = match what {
            Whole::Volume(volume) => {
                let (head, family, _) = self.head(volume)?;
                (family, [Some(head.accepted.content), head.working.map(|working| working.content)])
            }
            Whole::Snapshot(id) => {
                let (snapshot, family) = self.read_snapshot(id)?;
                (family, [Some(snapshot.content), None])
            }
        };
        let mut walk = Walk { host: self, family, deep, so_far: Verified::default(), seen };
        contents.iter().flatten().try_for_each(|content| walk.content(content))?;
        Ok(walk.so_far)
    }
}

impl Walk<'_> {
    fn tell(&mut self, packs: u64, packs_all: u64) -> Result<(), VerifyError> {
        let how_far = Verifying { packs, packs_all, bytes: self.so_far.bytes };
        if (self.seen)(&how_far) { Ok(()) } else { Err(VerifyError::Stopped) }
    }

    fn content(&mut self, content: &Content) -> Result<(), VerifyError> {
        self.tell(0, 0)?;
        let (mut map, bodies) = self.host.map(&self.family, content)?;
        let mut found = Vec::new();
        while let Some(missing) = map.get(0..content.size / BLOCK, &mut found) {
            map.load(missing.number, self.host.page(&self.family, &missing)?);
            found.clear();
            self.tell(0, 0)?;
        }
        let mut packs: BTreeMap<PackRef, Vec<Stored>> = BTreeMap::new();
        for run in &found {
            if let Some((pack, stored)) = run.place {
                self.so_far.blocks += run.blocks;
                packs.entry(pack).or_default().push(stored);
            }
        }
        let all = packs.len() as u64;
        for (number, (pack, places)) in (0..).zip(packs) {
            self.so_far.packs += 1;
            if self.deep {
                self.tell(number, all)?;
                self.pack(pack, &places, bodies.get(&pack).map(|body| body.to_vec()))?;
            }
        }
        Ok(())
    }

    /// Reads a pack, and opens each place of it that the map names.
    fn pack(&mut self, pack: PackRef, places: &[Stored], body: Option<Vec<u8>>) -> Result<(), VerifyError> {
        let key = pack.key();
        let bytes = match body {
            Some(body) => body.into(),
            None => self.host.get(&key, OBJECT_BYTES_MAX)?.0,
        };
        let (delta, _) = pack::check(&self.family, pack, &bytes).map_err(at(&key))?;
        if delta.pack != pack {
            return Err(at(&key)(FormatError::Checksum { what: "a pack" }).into());
        }
        self.so_far.bytes += bytes.len() as u64;
        // Several runs may lie in one extent.
        let mut opened = BTreeSet::new();
        for stored in places.iter().filter(|stored| opened.insert((stored.frame.offset, stored.hash))) {
            let part = slice(&bytes, stored.frame).unwrap_or_default();
            pack::open_extent(&self.family, &pack, stored, part).map_err(at(&key))?;
        }
        Ok(())
    }
}
