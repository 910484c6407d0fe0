//! What in the bucket nobody needs, and when it may go.
//!
//! Owns the rules of collection. Does not own looking (`collect.rs`). Pure.
//!
//! **Needed** is what a head or a snapshot that stays names. Nothing goes by its age alone, and nothing at the first look: what is unneeded is condemned, and goes when
//! a look a day later still finds it so. What a writer has uploaded and not committed yet is named by nobody and looks just like it, so objects
//! go only when no commit can name them any more: those of an epoch that is over, or up to the last commit of the present one.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use volley_jobspecs::ids::{SnapshotId, VolumeId};

use crate::format::keys::{self, Object};

const DAY_MS: u64 = 24 * 3_600_000;
/// So long something must be known to be unneeded. Longer than anybody takes from reading a state to storing another name for it.
pub const CONDEMNED_MS: u64 = DAY_MS;
/// So old must a volume or a snapshot be that the log does not name, before it counts as unneeded. Its name comes with the result of the attempt that made it, which may
/// wait as long as the log is away.
pub const UNNAMED_MS: u64 = 7 * DAY_MS;
/// Most keys condemned at once, so that their list stays an object of a few MiB; there is another run tomorrow.
pub const CONDEMNED_MAX: usize = 50_000;

/// What the log knows.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// Volumes that have a name, and those whose removal is under way.
    pub volumes: BTreeSet<VolumeId>,
    /// Snapshots that have a name, or that a job reads.
    pub snapshots: BTreeSet<SnapshotId>,
    /// Since when the log is kept, in milliseconds since the Unix epoch. What is older may be another log's, which was lost: it stays.
    pub since_ms: u64,
}

/// A volume's head, as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadSeen {
    /// The present writer's.
    pub epoch: u64,
    /// Of its last commit.
    pub seq: u64,
    /// Tells whether it is still the same one.
    pub commit: [u8; 16],
    /// When it was made.
    pub created_ms: u64,
    /// Somebody has it attached.
    pub held: bool,
    /// It is deleted.
    pub dead: bool,
}

/// A snapshot, as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotSeen {
    /// When it was taken.
    pub created_ms: u64,
    /// Somebody needs it.
    pub pinned: bool,
}

/// The bucket, as it was seen.
#[derive(Debug, Default)]
pub struct Seen {
    /// All keys below `vol/` and `snap/`, with their bytes.
    pub objects: BTreeMap<String, u64>,
    /// Every head there was.
    pub heads: BTreeMap<VolumeId, HeadSeen>,
    /// Every snapshot there was.
    pub snapshots: BTreeMap<SnapshotId, SnapshotSeen>,
    /// Packs and maps that heads and snapshots name. What is to go one day still names.
    pub named: HashSet<String>,
}

/// Can no commit name an object of this epoch and commit any more, so that it stays as unneeded as it is?
fn is_settled(head: Option<&HeadSeen>, epoch: u64, seq: u64) -> bool {
    // Without a head there is no writer; somebody may be about to make it, which is prevented before anything goes.
    head.is_none_or(|head| head.dead || (epoch, seq) <= (head.epoch, head.seq))
}

/// Does the log not know something that it should, if it was needed?
fn is_forgotten(named: bool, created_ms: u64, known: &Known, now_ms: u64) -> bool {
    !named && created_ms >= known.since_ms && now_ms.saturating_sub(created_ms) >= UNNAMED_MS
}

impl Seen {
    /// What nobody needs. A key that is not exactly one of ours is never in it.
    #[must_use]
    pub fn garbage(&self, known: &Known, now_ms: u64) -> BTreeSet<&str> {
        let with_objects: HashSet<VolumeId> = self.objects.keys().filter_map(|key| keys::parse(key)).filter_map(is_part).collect();
        let unneeded = |key: &&str| match keys::parse(key) {
            Some((volume, Object::Head)) => self.heads.get(&volume).is_some_and(|head| match head.dead {
                true => !with_objects.contains(&volume),
                false => !head.held && is_forgotten(known.volumes.contains(&volume), head.created_ms, known, now_ms),
            }),
            Some((volume, Object::Pack { epoch, seq, .. } | Object::Map { epoch, seq })) => {
                !self.named.contains(*key) && is_settled(self.heads.get(&volume), epoch, seq)
            }
            None => keys::parse_snapshot(key).and_then(|id| Some((id, self.snapshots.get(&id)?))).is_some_and(|(id, snapshot)| {
                !snapshot.pinned && is_forgotten(known.snapshots.contains(&id), snapshot.created_ms, known, now_ms)
            }),
        };
        self.objects.keys().map(String::as_str).filter(unneeded).collect()
    }
}

fn is_part((volume, object): (VolumeId, Object)) -> Option<VolumeId> {
    (object != Object::Head).then_some(volume)
}

/// What to do about garbage.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Everything that is condemned now, and since when.
    pub condemned: BTreeMap<String, u64>,
    /// What of it may go now.
    pub due: Vec<String>,
}

/// Condemns what was found. `before`: what earlier runs have condemned; what is needed again is forgotten.
#[must_use]
pub fn plan(garbage: &BTreeSet<&str>, before: &BTreeMap<String, u64>, now_ms: u64) -> Plan {
    // A clock that went back must not make anything look older.
    let since = |key: &str| before.get(key).map_or(now_ms, |since| (*since).min(now_ms));
    let (old, new): (Vec<&str>, Vec<&str>) = garbage.iter().partition(|key| before.contains_key(**key));
    // Those of earlier runs first, or a full list would never get shorter.
    let condemned: BTreeMap<String, u64> = old.into_iter().chain(new).take(CONDEMNED_MAX).map(|key| (key.to_owned(), since(key))).collect();
    let due = condemned.iter().filter(|(_, since)| now_ms.saturating_sub(**since) >= CONDEMNED_MS).map(|(key, _)| key.clone());
    let due = due.collect();
    Plan { condemned, due }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 100 * DAY_MS;

    fn head(epoch: u64, seq: u64) -> HeadSeen {
        HeadSeen { epoch, seq, commit: [0; 16], created_ms: NOW - 30 * DAY_MS, held: true, dead: false }
    }

    fn seen(head: Option<HeadSeen>, objects: &[String], named: &[String]) -> Seen {
        let id = VolumeId([1; 16]);
        Seen {
            objects: objects.iter().cloned().chain(head.map(|_| keys::head(id))).map(|key| (key, 1)).collect(),
            heads: head.map(|head| (id, head)).into_iter().collect(),
            named: named.iter().cloned().collect(),
            ..Seen::default()
        }
    }

    fn pack(epoch: u64, seq: u64) -> String {
        keys::pack(VolumeId([1; 16]), epoch, seq, 0)
    }

    #[test]
    fn what_a_commit_may_still_name_stays() {
        let all = [pack(1, 9), pack(2, 1), pack(2, 3), pack(2, 4), pack(3, 1)];
        let seen = seen(Some(head(2, 3)), &all, &all[1..2]);
        let garbage = seen.garbage(&Known::default(), NOW);
        assert_eq!(garbage.into_iter().collect::<Vec<_>>(), [&all[0], &all[2]]);
    }

    #[test]
    fn a_deleted_volume_goes_from_below_and_its_head_last() {
        let dead = HeadSeen { dead: true, held: false, ..head(2, 0) };
        let all = [pack(1, 9), pack(9, 9)];
        assert_eq!(seen(Some(dead), &all, &all[..1]).garbage(&Known::default(), NOW).len(), 1, "a clone has the other");
        let left = seen(Some(dead), &[], &[]);
        assert_eq!(left.garbage(&Known::default(), NOW).len(), 1);
    }

    #[test]
    fn what_the_log_does_not_know_goes_only_if_it_should_know_it() {
        let free = HeadSeen { held: false, ..head(1, 1) };
        let known = |since_ms| Known { since_ms, ..Known::default() };
        let count = |head, known: &Known| seen(Some(head), &[], &[]).garbage(known, NOW).len();
        assert_eq!(count(free, &known(NOW - 40 * DAY_MS)), 1);
        assert_eq!(count(free, &known(NOW - 20 * DAY_MS)), 0, "the log is younger");
        assert_eq!(count(HeadSeen { created_ms: NOW - UNNAMED_MS + 1, ..free }, &known(0)), 0);
        assert_eq!(count(head(1, 1), &known(0)), 0, "somebody has it");
        let named = Known { volumes: [VolumeId([1; 16])].into(), ..Known::default() };
        assert_eq!(count(free, &named), 0);
    }

    #[test]
    fn snapshots_stay_while_named_pinned_or_young() {
        let id = SnapshotId([3; 16]);
        let old = SnapshotSeen { created_ms: NOW - 8 * DAY_MS, pinned: false };
        let count = |snapshot, known: &Known| {
            let objects = [(keys::snapshot(id), 1), ("snap/other".to_owned(), 1)].into();
            let seen = Seen { objects, snapshots: [(id, snapshot)].into(), ..Seen::default() };
            seen.garbage(known, NOW).len()
        };
        let none = Known::default();
        assert_eq!(count(old, &none), 1);
        assert_eq!(count(SnapshotSeen { pinned: true, ..old }, &none), 0);
        assert_eq!(count(SnapshotSeen { created_ms: NOW, ..old }, &none), 0);
        assert_eq!(count(old, &Known { snapshots: [id].into(), ..none }), 0);
    }

    #[test]
    fn nothing_goes_before_a_day_and_what_is_needed_again_begins_anew() {
        let (first, again) = (plan(&["a", "b"].into(), &BTreeMap::new(), NOW), |before: &Plan, keys: &[&'static str], at| {
            plan(&keys.iter().copied().collect(), &before.condemned, at)
        });
        assert_eq!((first.due.len(), first.condemned.len()), (0, 2));
        assert!(again(&first, &["a", "b"], NOW + CONDEMNED_MS - 1).due.is_empty());
        let second = again(&first, &["b", "c"], NOW + CONDEMNED_MS);
        assert_eq!(second.due, ["b"]);
        assert!(again(&second, &["a"], NOW + CONDEMNED_MS + 1).due.is_empty());
        let back = again(&first, &["a"], NOW - DAY_MS);
        assert_eq!(back.condemned["a"], NOW - DAY_MS, "a clock that went back starts anew");
    }
}
