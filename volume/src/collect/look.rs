//! Everything that is in the bucket, and what of it is named.
//!
//! Owns listing, reading every head, snapshot and pin, and the walk from them over maps to packs. Changes nothing, and has no half results: whatever can't be
//! read is an error.

use std::collections::{BTreeMap, HashSet, VecDeque};

use bytes::Bytes;
use volley_jobspecs::ids::{SnapshotId, TenantId, VolumeId};

use crate::format::content::{Content, MapRef};
use crate::format::head::{HEAD_BYTES_MAX, Head};
use crate::format::keys::{self, Object};
use crate::format::page::{Page, PageRef, Root};
use crate::format::pin::{PIN_BYTES_MAX, Pin};
use crate::format::seal::FamilyKey;
use crate::format::snapshot::{SNAPSHOT_BYTES_MAX, Snapshot};
use crate::host::{FetchError, Host, at};
use crate::io::s3::{Listed, ObjectsError};
use crate::state::garbage::{HeadSeen, Seen, SnapshotSeen};

/// Requests under way at once: enough to hide how long each takes, few enough for tasks to notice nothing.
const REQUESTS_MAX: usize = 16;

/// What was found.
#[derive(Debug, Default)]
pub struct Look {
    /// What the rules need.
    pub seen: Seen,
    tenants: BTreeMap<VolumeId, TenantId>,
    tenants_of_snapshots: BTreeMap<SnapshotId, TenantId>,
    roots: HashSet<(MapRef, u32)>,
    pages: HashSet<(MapRef, u32)>,
}

impl Look {
    /// Whose an object is.
    pub fn tenant(&self, key: &str) -> Option<&TenantId> {
        match keys::parse(key) {
            Some((volume, _)) => self.tenants.get(&volume),
            None => self.tenants_of_snapshots.get(&keys::parse_snapshot(key)?),
        }
    }
}

impl Host {
    /// Looks at everything.
    pub(super) fn look(&self, now_ms: u64) -> Result<Look, FetchError> {
        let mut look = Look::default();
        // Objects first: what a head or a snapshot names that comes later is not among them, and nothing is said of it.
        self.each_key(keys::VOLUMES, |object| _ = look.seen.objects.insert(object.key, object.bytes))?;
        let mut snapshots = Vec::new();
        self.each_key(keys::SNAPSHOTS, |object| {
            snapshots.extend(keys::parse_snapshot(&object.key));
            look.seen.objects.insert(object.key, object.bytes);
        })?;
        let pinned = self.pinned(now_ms)?;
        let volumes: Vec<VolumeId> = look.seen.objects.keys().filter_map(|key| keys::parse(key)).filter_map(is_head).collect();
        self.each_object(volumes.into_iter().map(|id| (id, keys::head(id))), HEAD_BYTES_MAX, |id, key, bytes| {
            let (head, family) = Head::read(id, &self.keys, &bytes).map_err(at(key))?;
            look.tenants.insert(id, head.tenant.clone());
            let (dead, held) = (head.tombstone.is_some(), head.holder.is_some());
            let Head { epoch, seq, commit, created_ms, .. } = head;
            look.seen.heads.insert(id, HeadSeen { epoch, seq, commit, created_ms, held, dead });
            if !dead {
                self.mark(&mut look, &family, &head.accepted.content)?;
                if let Some(working) = &head.working {
                    self.mark(&mut look, &family, &working.content)?;
                }
            }
            Ok(())
        })?;
        self.each_object(snapshots.into_iter().map(|id| (id, keys::snapshot(id))), SNAPSHOT_BYTES_MAX, |id, key, bytes| {
            let (snapshot, family) = Snapshot::read(id, &self.keys, &bytes).map_err(at(key))?;
            look.tenants_of_snapshots.insert(id, snapshot.line.tenant.clone());
            let seen = SnapshotSeen { created_ms: snapshot.line.created_ms, pinned: pinned.contains(&id) };
            look.seen.snapshots.insert(id, seen);
            self.mark(&mut look, &family, &snapshot.content)
        })?;
        Ok(look)
    }

    /// Snapshots that somebody needs.
    fn pinned(&self, now_ms: u64) -> Result<HashSet<SnapshotId>, FetchError> {
        let (mut pins, mut pinned) = (Vec::new(), HashSet::new());
        self.each_key(keys::PINS, |object| pins.push(object.key))?;
        for key in pins {
            match self.get(&key, PIN_BYTES_MAX) {
                Ok((bytes, _)) => {
                    let pin = Pin::read(&bytes).map_err(at(&key))?;
                    if pin.until_ms.is_none_or(|until| until > now_ms) {
                        pinned.insert(pin.snapshot);
                    }
                }
                // Let go of meanwhile.
                Err(ObjectsError::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(pinned)
    }

    /// All that a state names.
    fn mark(&self, look: &mut Look, family: &FamilyKey, content: &Content) -> Result<(), FetchError> {
        look.seen.named.extend(content.deltas.iter().map(|delta| delta.pack.key()));
        let Some(root) = content.root else { return Ok(()) };
        let key = root.object.key();
        look.seen.named.insert(key.clone());
        // A clone's is its snapshot's, until it writes one.
        if !look.roots.insert((root.object, root.frame.offset)) {
            return Ok(());
        }
        let request = self.begin_range(key.clone(), root.frame.offset.into(), root.frame.stored.into());
        let root = Root::open(family, &root, &Self::end(&key, &request)?).map_err(at(&key))?;
        let new: Vec<(u64, PageRef)> =
            root.pages.into_iter().filter(|(_, page)| look.pages.insert((page.object, page.frame.offset))).collect();
        let mut under_way = VecDeque::new();
        for (number, page) in new {
            look.seen.named.insert(page.object.key());
            let request = self.begin_range(page.object.key(), page.frame.offset.into(), page.frame.stored.into());
            under_way.push_back((number, page, request));
            if under_way.len() == REQUESTS_MAX {
                self.mark_page(look, family, under_way.pop_front())?;
            }
        }
        while !under_way.is_empty() {
            self.mark_page(look, family, under_way.pop_front())?;
        }
        Ok(())
    }

    fn mark_page(&self, look: &mut Look, family: &FamilyKey, next: Option<(u64, PageRef, Request)>) -> Result<(), FetchError> {
        let Some((number, page, request)) = next else { return Ok(()) };
        let key = page.object.key();
        let page = Page::open(family, number, &page, &Self::end(&key, &request)?).map_err(at(&key))?;
        look.seen.named.extend(page.packs.iter().map(crate::format::extent::PackRef::key));
        Ok(())
    }

    fn each_key(&self, prefix: &str, mut each: impl FnMut(Listed)) -> Result<(), FetchError> {
        let mut after: Option<String> = None;
        loop {
            let (name, from) = (prefix.to_owned(), after.clone());
            let page = Self::end(prefix, &self.begin(|objects| async move { objects.list(&name, from.as_deref()).await }))?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.key.clone());
            page.into_iter().for_each(&mut each);
        }
    }

    /// Reads objects, some at once, and hands them on in order.
    fn each_object<I: Copy>(
        &self,
        all: impl Iterator<Item = (I, String)>,
        bytes_max: usize,
        mut each: impl FnMut(I, &str, Bytes) -> Result<(), FetchError>,
    ) -> Result<(), FetchError> {
        let mut under_way = VecDeque::new();
        let mut all = all.fuse();
        loop {
            while under_way.len() < REQUESTS_MAX
                && let Some((id, key)) = all.next()
            {
                let name = key.clone();
                let request = self.begin(|objects| async move { objects.get(&name, bytes_max as u64).await });
                under_way.push_back((id, key, request));
            }
            let Some((id, key, request)) = under_way.pop_front() else { return Ok(()) };
            each(id, &key, Self::end(&key, &request)?.0)?;
        }
    }
}

/// The bytes of a range that are awaited.
type Request = std::sync::mpsc::Receiver<Result<Bytes, ObjectsError>>;

fn is_head((volume, object): (VolumeId, Object)) -> Option<VolumeId> {
    (object == Object::Head).then_some(volume)
}
