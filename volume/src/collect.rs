//! `collect`: what nobody needs any more is deleted from the bucket.
//!
//! Owns one run: look at everything, write down what is unneeded, delete what was unneeded at an earlier run too. Any answer that does not come, and anything that does
//! not read, ends the run before it has changed anything. Does not own the rules (`state/garbage.rs`), nor when a run is due.

mod look;

use std::collections::BTreeMap;

use volley_jobspecs::ids::{TenantId, VolumeId};

use crate::format::condemned::{CONDEMNED_BYTES_MAX, Collector, Condemned, KEY};
use crate::format::keys::{self, Object};
use crate::format::seal::FamilyKey;
use crate::host::{FetchError, Host, at, random};
use crate::io::s3::{ObjectsError, Put};
use crate::open::OpenError;
use crate::state::garbage::{Known, Plan, Seen, plan};
use crate::state::moves::{self, Create};
use look::Look;

/// For how long a collector has the bucket to itself. One that takes longer goes on until another begins.
const LEASE_MS: u64 = 3_600_000;
/// Whose a volume is that never came to be: nobody's. It is the tenant's name in a head that only says so.
const NOBODY: &str = "collected";

/// How a collection is done.
pub struct Collection<'a> {
    /// What the log knows.
    pub known: &'a Known,
    /// Who collects, for people.
    pub name: &'a str,
    /// Looks and tells, and changes nothing.
    pub dry_run: bool,
    /// Now, in milliseconds since the Unix epoch.
    pub now_ms: &'a dyn Fn() -> u64,
}

/// What was found and done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Volumes that were found, deleted ones too.
    pub volumes: u64,
    /// Snapshots that were found.
    pub snapshots: u64,
    /// Objects, and their bytes.
    pub objects: (u64, u64),
    /// Objects of them that are condemned, and their bytes: they go when they are as unneeded a day after they were condemned.
    pub condemned: (u64, u64),
    /// Objects that were deleted, and their bytes; with `dry_run`: would have been.
    pub deleted: (u64, u64),
    /// Bytes of the objects that the volumes and snapshots of each tenant have written, condemned ones left out.
    pub stored: BTreeMap<TenantId, u64>,
}

/// Why nothing, or not everything, was collected.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    /// Somebody else is at it.
    #[error("{name} collects already; ask again when that is done, within an hour at most")]
    Busy {
        /// Who.
        name: String,
        /// Until when.
        until_ms: u64,
    },
    /// Another run began meanwhile.
    #[error("another run began while this one looked; nothing was deleted")]
    Overtaken,
    /// Something that is there could not be read: nobody knows what it needs.
    #[error("nothing was deleted, as not everything could be read: {0}")]
    Look(#[source] FetchError),
    /// While it deleted. What is left goes with the next run.
    #[error("not everything that may go was deleted: {0}")]
    Delete(#[source] OpenError),
    /// The list of what is unneeded.
    #[error("the list of what is unneeded: {0}")]
    List(#[source] OpenError),
}

impl Host {
    /// Collects. Not to be called on a thread of the runtime.
    ///
    /// # Errors
    /// [`CollectError`]; doing it again is safe.
    pub fn collect(&self, how: &Collection<'_>) -> Result<Collected, CollectError> {
        let (mut list, mut tag) = self.condemned().map_err(CollectError::List)?;
        let now_ms = (how.now_ms)();
        if !how.dry_run {
            if let Some(Collector { name, until_ms }) = list.collector.take().filter(|other| other.until_ms > now_ms) {
                return Err(CollectError::Busy { name, until_ms });
            }
            list.collector = Some(Collector { name: how.name.to_owned(), until_ms: now_ms.saturating_add(LEASE_MS) });
            tag = self.put_condemned(&mut list, tag)?;
        }
        let collected = self.run(how, &mut list, &mut tag);
        if !how.dry_run && !matches!(collected, Err(CollectError::Overtaken)) {
            list.collector = None;
            self.put_condemned(&mut list, tag)?;
        }
        collected
    }

    fn run(&self, how: &Collection<'_>, list: &mut Condemned, tag: &mut Option<String>) -> Result<Collected, CollectError> {
        let look = self.look((how.now_ms)()).map_err(CollectError::Look)?;
        let now_ms = (how.now_ms)();
        let plan = plan(&look.seen.garbage(how.known, now_ms), &list.keys, now_ms);
        let mut collected = counted(&look, &plan);
        if how.dry_run {
            collected.deleted = total(&look.seen, &plan.due);
            return Ok(collected);
        }
        // Before anything goes: whoever else has begun since is not overtaken.
        list.keys.clone_from(&plan.condemned);
        *tag = self.put_condemned(list, tag.take())?;
        for (volume, of_volume) in by_volume(&plan.due) {
            let gone = self.delete(&look.seen, volume, &of_volume).map_err(CollectError::Delete)?;
            for key in &gone {
                list.keys.remove(key);
            }
            let (objects, bytes) = total(&look.seen, &gone);
            collected.deleted = (collected.deleted.0 + objects, collected.deleted.1 + bytes);
        }
        Ok(collected)
    }

    /// Deletes objects of one volume; returns those that are gone. Nothing of a volume whose head is another one than was seen.
    fn delete(&self, seen: &Seen, volume: Option<VolumeId>, due: &[String]) -> Result<Vec<String>, OpenError> {
        if let Some(volume) = volume {
            let before = seen.heads.get(&volume);
            let now = match self.head(volume) {
                Ok((head, ..)) => Some(head),
                Err(FetchError::Objects(ObjectsError::NotFound { .. })) => None,
                Err(error) => return Err(error.into()),
            };
            match (before, now) {
                // Whoever is about to make its head is told that it is too late; what it has uploaded goes with a later run.
                (None, None) => return self.put_tombstone(volume).map(|()| Vec::new()),
                (Some(before), Some(now)) if before.commit == now.commit => {
                    // A volume that nobody knows: its head says that it is deleted, and the rest follows.
                    if !before.dead && due.iter().any(|key| matches!(keys::parse(key), Some((_, Object::Head)))) {
                        return self.remove(volume, false).map(|()| vec![keys::head(volume)]);
                    }
                }
                _ => return Ok(Vec::new()),
            }
        }
        for key in due {
            let name = key.clone();
            Self::end(key, &self.begin(|objects| async move { objects.delete(&name).await }))?;
        }
        Ok(due.to_vec())
    }

    fn put_tombstone(&self, volume: VolumeId) -> Result<(), OpenError> {
        let tenant = TenantId::new(NOBODY).map_err(|_| crate::format::FormatError::Make { what: "a head", why: NOBODY.to_owned() })?;
        let family = FamilyKey::new(random()?);
        let (key, now_ms) = (family.wrap(&self.keys, volume, random()?)?, crate::host::now_ms());
        let by = Create { volume, tenant, flush: crate::format::head::FlushMode::None, now_ms, commit: random()? };
        let head = moves::remove(&moves::create(by, crate::format::SIZE_MIN, key), true, now_ms, random()?)?;
        match self.put_new_head(&head, &family) {
            // It has come to be.
            Err(OpenError::Fetch(FetchError::Objects(ObjectsError::Refused { .. }))) => Ok(()),
            other => other.map(drop),
        }
    }

    fn condemned(&self) -> Result<(Condemned, Option<String>), OpenError> {
        match self.get(KEY, CONDEMNED_BYTES_MAX) {
            Ok((bytes, tag)) => Ok((Condemned::read(&bytes).map_err(at(KEY))?, Some(tag))),
            Err(ObjectsError::NotFound { .. }) => Ok((Condemned::default(), None)),
            Err(error) => Err(error.into()),
        }
    }

    /// Replaces the list that has this tag; returns the new one's.
    fn put_condemned(&self, list: &mut Condemned, tag: Option<String>) -> Result<Option<String>, CollectError> {
        list.writing = random().map_err(|error| CollectError::List(error.into()))?;
        let bytes: bytes::Bytes = list.write().map_err(|error| CollectError::List(error.into()))?.into();
        let put = match &tag {
            Some(tag) => self.put_if_match(KEY, bytes, tag),
            None => Self::end(KEY, &self.begin(|objects| async move { objects.put_if_absent(KEY, bytes).await })),
        };
        match put.map_err(|error| CollectError::List(error.into()))? {
            Put::Written(tag) => Ok(Some(tag)),
            // A try whose answer was lost may have been ours.
            Put::Refused | Put::Unknown(_) => match self.condemned().map_err(CollectError::List)? {
                (found, tag) if found.writing == list.writing => Ok(tag),
                _ => Err(CollectError::Overtaken),
            },
        }
    }
}

fn counted(look: &Look, plan: &Plan) -> Collected {
    let seen = &look.seen;
    let mut stored = BTreeMap::new();
    for (key, bytes) in seen.objects.iter().filter(|(key, _)| !plan.condemned.contains_key(*key)) {
        if let Some(tenant) = look.tenant(key) {
            *stored.entry(tenant.clone()).or_default() += bytes;
        }
    }
    Collected {
        volumes: seen.heads.len() as u64,
        snapshots: seen.snapshots.len() as u64,
        objects: (seen.objects.len() as u64, seen.objects.values().sum()),
        condemned: total(seen, plan.condemned.keys()),
        deleted: (0, 0),
        stored,
    }
}

fn total<'a>(seen: &Seen, keys: impl IntoIterator<Item = &'a String>) -> (u64, u64) {
    keys.into_iter().fold((0, 0), |(count, bytes), key| (count + 1, bytes + seen.objects.get(key).copied().unwrap_or_default()))
}

/// What is due, volume by volume; snapshots are nobody's.
fn by_volume(due: &[String]) -> BTreeMap<Option<VolumeId>, Vec<String>> {
    let mut all: BTreeMap<Option<VolumeId>, Vec<String>> = BTreeMap::new();
    for key in due {
        all.entry(keys::parse(key).map(|(volume, _)| volume)).or_default().push(key.clone());
    }
    all
}
