//! `verify`: does everything that a state names exist, and is it what it should be?
//!
//! Owns the walk from a head or a snapshot over tables and pages to every extent. Repairs nothing.

use std::collections::BTreeSet;

use crate::format::content::Content;
use crate::format::extent::PackRef;
use crate::format::object::{OBJECT_BYTES_MAX, slice};
use crate::format::pack;
use crate::format::seal::FamilyKey;
use crate::format::{BLOCK, FormatError};
use crate::host::{FetchError, Host, at};
use crate::open::OpenError;
use volley_jobspecs::ids::VolumeId;

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

impl Host {
    /// Verifies both states of a volume. `deep`: reads and opens every pack; otherwise the map only.
    ///
    /// # Errors
    /// [`OpenError::Fetch`] names the first object that is missing or damaged.
    pub fn verify(&self, volume: VolumeId, deep: bool) -> Result<Verified, OpenError> {
        let (head, family, _) = self.head(volume)?;
        let mut all = self.verify_content(&family, &head.accepted.content, deep)?;
        if let Some(working) = &head.working {
            let more = self.verify_content(&family, &working.content, deep)?;
            all = Verified { blocks: all.blocks + more.blocks, packs: all.packs + more.packs, bytes: all.bytes + more.bytes };
        }
        Ok(all)
    }

    fn verify_content(&self, family: &FamilyKey, content: &Content, deep: bool) -> Result<Verified, FetchError> {
        let (mut map, bodies) = self.map(family, content)?;
        let mut found = Vec::new();
        while let Some(missing) = map.get(0..content.size / BLOCK, &mut found) {
            map.load(missing.number, self.page(family, &missing)?);
            found.clear();
        }
        let stored = found.iter().filter_map(|run| run.place.map(|(pack, _)| (run.blocks, pack)));
        let mut all = Verified { blocks: stored.clone().map(|(blocks, _)| blocks).sum(), ..Verified::default() };
        let packs: BTreeSet<PackRef> = stored.map(|(_, pack)| pack).collect();
        all.packs = packs.len() as u64;
        for pack in packs.into_iter().filter(|_| deep) {
            let key = pack.key();
            let bytes = match bodies.get(&pack) {
                Some(body) => body.to_vec().into(),
                None => self.get(&key, OBJECT_BYTES_MAX)?.0,
            };
            let (delta, _) = pack::check(family, pack, &bytes).map_err(at(&key))?;
            if delta.pack != pack {
                return Err(at(&key)(FormatError::Checksum { what: "a pack" }));
            }
            all.bytes += bytes.len() as u64;
            // Each place that the map names is one of the pack's.
            for (_, stored) in found.iter().filter_map(|run| run.place).filter(|(of, _)| *of == pack) {
                let part = slice(&bytes, stored.frame).unwrap_or_default();
                pack::open_extent(family, &pack, &stored, part).map_err(at(&key))?;
            }
        }
        Ok(all)
    }
}
