//! What a head may become: created, cloned, attached, committed, detached, promoted, removed.
//!
//! Owns the rules of epochs and of the two states. Does not own the writing of it on a condition (`fence`), nor who may ask. Pure.

use volley_jobspecs::ids::{AttemptName, SnapshotId, TenantId, VolumeId};

use crate::format::content::Content;
use crate::format::head::{Accepted, FlushMode, Head, Holder, Tombstone, Working, WrittenBy};
use crate::format::seal::WrappedKey;
use crate::format::snapshot::{Line, Snapshot};

/// Why a head does not become what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// Somebody has it.
    #[error("{volume} is attached on {host} (epoch {epoch}): detach it there, or force it: what was not committed there is lost then")]
    Held {
        /// The volume.
        volume: VolumeId,
        /// Who has it.
        host: String,
        /// The holder's epoch.
        epoch: u64,
    },
    /// It is deleted.
    #[error("{volume} was deleted")]
    Deleted {
        /// The volume.
        volume: VolumeId,
    },
    /// Somebody else has written it since, or was given it.
    #[error("{volume}: {host} has it since (epoch {epoch})")]
    Elsewhere {
        /// The volume.
        volume: VolumeId,
        /// Who; "nobody" when it was let go.
        host: String,
        /// The epoch now.
        epoch: u64,
    },
    /// It is not what an attempt was given.
    #[error(
        "{volume}: generation {given} was given to be written, and it has generation {generation}: it was changed beside the cluster's log"
    )]
    Generation {
        /// The volume.
        volume: VolumeId,
        /// As the log has it.
        given: u64,
        /// As it is.
        generation: u64,
    },
    /// Another state is accepted, or worked on, than the one that is named.
    #[error("{volume}: {asked} can't be accepted: accepted is generation {generation}, and the working state is another one")]
    OtherState {
        /// The volume.
        volume: VolumeId,
        /// What should be accepted: its digest in hex.
        asked: String,
        /// What is.
        generation: u64,
    },
    /// A disk never shrinks.
    #[error("{volume} has {now} bytes and can't shrink to {asked}: make a new volume and copy")]
    Shrink {
        /// The volume.
        volume: VolumeId,
        /// Bytes it has.
        now: u64,
        /// Bytes that were asked for.
        asked: u64,
    },
}

/// A new volume.
#[derive(Debug, Clone)]
pub struct Create {
    /// Its id, never used before.
    pub volume: VolumeId,
    /// Whose it is.
    pub tenant: TenantId,
    /// What a flush promises.
    pub flush: FlushMode,
    /// Now, in milliseconds since the Unix epoch.
    pub now_ms: u64,
    /// Fresh and random.
    pub commit: [u8; 16],
}

/// A head of a disk of zeros.
#[must_use]
pub fn create(new: Create, size: u64, key: WrappedKey) -> Head {
    made(new, Content::empty(size), key, WrittenBy::Host, None)
}

/// A head of a clone: the snapshot's content and key, no request to its volume.
#[must_use]
pub fn clone(new: Create, snapshot: &Snapshot) -> Head {
    made(new, snapshot.content.clone(), snapshot.line.key.clone(), snapshot.line.written_by, Some(snapshot.line.id))
}

fn made(new: Create, content: Content, key: WrappedKey, written_by: WrittenBy, base: Option<SnapshotId>) -> Head {
    let Create { volume, tenant, flush, now_ms, commit } = new;
    let accepted = Accepted { generation: 0, attempt: None, content };
    let (epoch, seq) = (0, 0);
    Head {
        volume,
        tenant,
        epoch,
        seq,
        commit,
        written_by,
        flush,
        key,
        created_ms: now_ms,
        base,
        holder: None,
        tombstone: None,
        accepted,
        working: None,
    }
}

/// Who wants to write.
#[derive(Debug, Clone)]
pub struct Attach {
    /// For which attempt; None: a person.
    pub attempt: Option<AttemptName>,
    /// Where, and the attach's own random bytes; a restart within the same attach has the same.
    pub holder: Holder,
    /// A guest will write.
    pub guest: bool,
    /// Even if somebody has it.
    pub force: bool,
    /// Goes on with the working state of whoever had it, instead of the accepted one.
    pub resume: bool,
    /// Now, in milliseconds since the Unix epoch.
    pub now_ms: u64,
    /// Fresh and random.
    pub commit: [u8; 16],
}

/// Gives the right to write to somebody: the next epoch. The same attach goes on with its working state; another one begins with the accepted state.
///
/// # Errors
/// [`MoveError::Held`], [`MoveError::Deleted`].
pub fn attach(head: &Head, by: Attach) -> Result<Head, MoveError> {
    alive(head)?;
    let same = head.holder.as_ref().is_some_and(|holder| holder.attach == by.holder.attach);
    if let Some(holder) = head.holder.as_ref().filter(|holder| !same && !by.force && holder.until_ms > by.now_ms) {
        return Err(MoveError::Held { volume: head.volume, host: holder.host.clone(), epoch: head.epoch });
    }
    let epoch = head.epoch + 1;
    let working = match head.working.clone() {
        Some(working) if same => working,
        Some(working) if by.resume => Working { attempt: by.attempt, epoch, seq: 0, op: 0, content: working.content },
        _ => Working { attempt: by.attempt, epoch, seq: 0, op: 0, content: head.accepted.content.clone() },
    };
    let written_by = if by.guest { WrittenBy::Guest } else { head.written_by };
    Ok(Head { epoch, seq: 0, commit: by.commit, written_by, holder: Some(by.holder), working: Some(working), ..head.clone() })
}

/// May an attempt that was given `generation` take a volume with this head? Not what another attempt was given after it: whoever was paused, and is not wanted
/// any more, would end that one. With `again` it had it, and may go on only if nobody else had it since.
///
/// # Errors
/// [`MoveError`].
pub fn may_attach(head: &Head, attempt: AttemptName, attach: [u8; 16], generation: u64, again: bool) -> Result<(), MoveError> {
    alive(head)?;
    let ours = head.holder.as_ref().is_some_and(|holder| holder.attach == attach);
    let elsewhere = || {
        let host = head.holder.as_ref().map_or_else(|| "nobody".to_owned(), |holder| holder.host.clone());
        Err(MoveError::Elsewhere { volume: head.volume, host, epoch: head.epoch })
    };
    if ours {
        return Ok(());
    }
    let working = head.working.as_ref().and_then(|working| working.attempt);
    let later = [working, head.accepted.attempt].into_iter().flatten().any(|other| other.sequence > attempt.sequence);
    if again || later {
        return elsewhere();
    }
    if head.accepted.generation != generation {
        return Err(MoveError::Generation { volume: head.volume, given: generation, generation: head.accepted.generation });
    }
    Ok(())
}

/// What an attempt left that has let the volume go, if it has: the state, and the generation it is based on.
#[must_use]
pub fn left_by(head: &Head, attempt: AttemptName) -> Option<(&Content, u64)> {
    let working = head.working.as_ref().filter(|working| head.holder.is_none() && working.attempt == Some(attempt))?;
    head.tombstone.is_none().then_some((&working.content, head.accepted.generation))
}

/// A commit: the holder's state moves to `content`, which has all operations up to `op`.
///
/// # Errors
/// [`MoveError::Deleted`], [`MoveError::Shrink`].
pub fn commit(head: &Head, content: Content, op: u64, commit: [u8; 16]) -> Result<Head, MoveError> {
    alive(head)?;
    let now = head.latest().size;
    if content.size < now {
        return Err(MoveError::Shrink { volume: head.volume, now, asked: content.size });
    }
    let seq = head.seq + 1;
    let attempt = head.working.as_ref().and_then(|working| working.attempt);
    Ok(Head { seq, commit, working: Some(Working { attempt, epoch: head.epoch, seq, op, content }), ..head.clone() })
}

/// Nobody writes any more. The working state stays for whoever promotes it.
#[must_use]
pub fn detach(head: &Head, commit: [u8; 16]) -> Head {
    Head { holder: None, commit, ..head.clone() }
}

/// The working state of an attempt is accepted. None: it was already.
///
/// # Errors
/// [`MoveError::OtherState`], [`MoveError::Deleted`].
pub fn promote(head: &Head, attempt: Option<AttemptName>, base: u64, root: [u8; 32], commit: [u8; 16]) -> Result<Option<Head>, MoveError> {
    alive(head)?;
    let accepted = &head.accepted;
    if Some(accepted.generation) == base.checked_add(1) && accepted.attempt == attempt && accepted.content.digest() == root {
        return Ok(None);
    }
    let other = MoveError::OtherState { volume: head.volume, asked: hex::encode(root), generation: accepted.generation };
    let ours = |working: &&Working| working.attempt == attempt && working.content.digest() == root;
    let Some(working) = head.working.as_ref().filter(ours).filter(|_| accepted.generation == base) else { return Err(other) };
    let accepted = Accepted { generation: base + 1, attempt, content: working.content.clone() };
    // Whoever still has it attached goes on; otherwise the state would lie in the head twice.
    let working = head.working.clone().filter(|_| head.holder.is_some());
    Ok(Some(Head { accepted, working, commit, ..head.clone() }))
}

/// A disk that nobody is to write grows: what was accepted, with more zeros behind it, is the next generation. None: it was done already. Whoever still writes
/// is out, as the log has given it to nobody.
///
/// # Errors
/// [`MoveError::Generation`], [`MoveError::Shrink`], [`MoveError::Deleted`].
pub fn grow(head: &Head, base: u64, size: u64, commit: [u8; 16]) -> Result<Option<Head>, MoveError> {
    alive(head)?;
    let accepted = &head.accepted;
    let now = accepted.content.size;
    if Some(accepted.generation) == base.checked_add(1) && accepted.attempt.is_none() && now == size {
        return Ok(None);
    }
    if accepted.generation != base {
        return Err(MoveError::Generation { volume: head.volume, given: base, generation: accepted.generation });
    }
    if size < now {
        return Err(MoveError::Shrink { volume: head.volume, now, asked: size });
    }
    let content = Content { size, ..accepted.content.clone() };
    let accepted = Accepted { generation: base + 1, attempt: None, content };
    Ok(Some(Head { epoch: head.epoch + 1, seq: 0, holder: None, working: None, accepted, commit, ..head.clone() }))
}

/// Deletes it: what is left goes with the next collection.
///
/// # Errors
/// [`MoveError::Held`], unless it is forced.
pub fn remove(head: &Head, force: bool, now_ms: u64, commit: [u8; 16]) -> Result<Head, MoveError> {
    if let Some(holder) = head.holder.as_ref().filter(|holder| !force && holder.until_ms > now_ms) {
        return Err(MoveError::Held { volume: head.volume, host: holder.host.clone(), epoch: head.epoch });
    }
    // A new epoch: whoever still writes is out.
    Ok(Head {
        epoch: head.epoch + 1,
        seq: 0,
        holder: None,
        tombstone: Some(Tombstone { at_ms: now_ms }),
        commit,
        working: None,
        ..head.clone()
    })
}

/// A snapshot of a state of the volume: the accepted one, or what the holder has committed.
///
/// # Errors
/// [`MoveError::Deleted`].
pub fn snapshot(head: &Head, id: SnapshotId, accepted: bool, now_ms: u64) -> Result<Snapshot, MoveError> {
    alive(head)?;
    let content = if accepted { &head.accepted.content } else { head.latest() }.clone();
    let line = Line {
        id,
        volume: head.volume,
        tenant: head.tenant.clone(),
        epoch: head.epoch,
        seq: head.seq,
        generation: accepted.then_some(head.accepted.generation),
        written_by: head.written_by,
        key: head.key.clone(),
        created_ms: now_ms,
        parent: head.base,
        size: content.size,
        root: content.digest(),
    };
    Ok(Snapshot { line, content })
}

fn alive(head: &Head) -> Result<(), MoveError> {
    if head.tombstone.is_some() { Err(MoveError::Deleted { volume: head.volume }) } else { Ok(()) }
}

#[cfg(test)]
pub mod tests {
    use volley_jobspecs::ids::JobId;

    use super::*;
    use crate::format::head::tests::cluster;
    use crate::format::seal::FamilyKey;

    pub fn fresh() -> Head {
        let volume = VolumeId([1; 16]);
        let key = FamilyKey::new([2; 32]).wrap(&cluster(), volume, [3; 16]).unwrap();
        let new = Create { volume, tenant: TenantId::new("t").unwrap(), flush: FlushMode::Local, now_ms: 0, commit: [0; 16] };
        create(new, 1 << 20, key)
    }

    pub fn by(attach: u8, now_ms: u64) -> Attach {
        let holder = Holder { host: format!("h{attach}"), attach: [attach; 16], until_ms: now_ms + 10 };
        let attempt = Some(AttemptName { job: JobId(1), stage: 0, index: 0, number: 1, sequence: u64::from(attach) });
        Attach { attempt, holder, guest: true, force: false, resume: false, now_ms, commit: [attach; 16] }
    }

    #[test]
    fn one_holder_at_a_time_and_the_next_has_a_higher_epoch() {
        let held = attach(&fresh(), by(1, 0)).unwrap();
        assert_eq!((held.epoch, held.written_by), (1, WrittenBy::Guest));
        assert!(matches!(attach(&held, by(2, 5)), Err(MoveError::Held { epoch: 1, .. })));
        assert_eq!(attach(&held, by(2, 10)).unwrap().epoch, 2, "the lease is over");
        assert_eq!(attach(&held, Attach { force: true, ..by(2, 5) }).unwrap().epoch, 2);
        assert_eq!(attach(&detach(&held, [9; 16]), by(2, 5)).unwrap().epoch, 2);
    }

    #[test]
    fn a_restart_goes_on_and_another_attempt_begins_with_what_was_accepted() {
        let held = attach(&fresh(), by(1, 0)).unwrap();
        let written = commit(&held, Content::empty(2 << 20), 7, [4; 16]).unwrap();
        let again = attach(&written, by(1, 1)).unwrap();
        let working = again.working.as_ref().unwrap();
        assert_eq!((again.epoch, again.seq, working.epoch, working.seq, working.op, working.content.size), (2, 0, 1, 1, 7, 2 << 20));
        let other = attach(&written, Attach { force: true, ..by(2, 1) }).unwrap();
        assert_eq!((other.working.as_ref().unwrap().content.size, other.working.unwrap().op), (1 << 20, 0));
        let resumed = attach(&written, Attach { force: true, resume: true, ..by(2, 1) }).unwrap();
        assert_eq!((resumed.working.as_ref().unwrap().content.size, resumed.working.unwrap().op), (2 << 20, 0));
        assert!(matches!(commit(&written, Content::empty(1 << 20), 8, [5; 16]), Err(MoveError::Shrink { .. })));
    }

    #[test]
    fn an_attempt_takes_what_it_was_given_and_nothing_that_came_after() {
        let attempt = |sequence: u64| AttemptName { job: JobId(1), stage: 0, index: 0, number: 1, sequence };
        let may = |head: &Head, sequence: u8, generation, again| {
            may_attach(head, attempt(sequence.into()), [sequence; 16], generation, again).map_err(|why| why.to_string())
        };
        let fresh = fresh();
        assert_eq!(may(&fresh, 2, 0, false), Ok(()));
        assert!(may(&fresh, 2, 1, false).unwrap_err().contains("generation 1 was given"));
        assert!(may(&fresh, 2, 0, true).unwrap_err().contains("nobody has it since"));
        let held = attach(&fresh, by(2, 0)).unwrap();
        assert_eq!((may(&held, 2, 0, true), may(&held, 3, 0, false)), (Ok(()), Ok(())));
        assert!(may(&held, 1, 0, false).unwrap_err().contains("h2 has it since"), "one that was given it before");
        assert!(may(&held, 3, 0, true).is_err());
        assert_eq!(left_by(&held, attempt(2)), None);
        let done = detach(&commit(&held, Content::empty(2 << 20), 7, [4; 16]).unwrap(), [5; 16]);
        assert_eq!(left_by(&done, attempt(2)).map(|(content, base)| (content.size, base)), Some((2 << 20, 0)));
        assert_eq!(left_by(&done, attempt(3)), None);
        // It must not begin anew with what was accepted, as if nothing had been written.
        assert!(may(&done, 2, 0, true).is_err());
        let root = done.working.as_ref().unwrap().content.digest();
        let accepted = promote(&done, Some(attempt(2)), 0, root, [6; 16]).unwrap().unwrap();
        assert!(may(&accepted, 1, 1, false).is_err() && may(&accepted, 3, 0, false).is_err());
        assert_eq!(may(&accepted, 3, 1, false), Ok(()));
        assert!(may(&remove(&fresh, true, 0, [7; 16]).unwrap(), 2, 0, false).unwrap_err().contains("deleted"));
    }

    #[test]
    fn a_promotion_is_repeatable_and_never_takes_another_state() {
        let held = attach(&fresh(), by(1, 0)).unwrap();
        let attempt = by(1, 0).attempt;
        let done = detach(&commit(&held, Content::empty(2 << 20), 7, [4; 16]).unwrap(), [5; 16]);
        let root = done.working.as_ref().unwrap().content.digest();
        for (attempt, base, root) in [(None, 0, root), (attempt, 1, root), (attempt, 0, [0; 32])] {
            assert!(matches!(promote(&done, attempt, base, root, [6; 16]), Err(MoveError::OtherState { .. })));
        }
        let accepted = promote(&done, attempt, 0, root, [6; 16]).unwrap().unwrap();
        assert_eq!((accepted.accepted.generation, accepted.accepted.content.size, accepted.working.as_ref()), (1, 2 << 20, None));
        assert_eq!(promote(&accepted, attempt, 0, root, [7; 16]), Ok(None));
        // A later attempt that failed, and was not accepted, changes nothing of that.
        let next = attach(&accepted, by(2, 0)).unwrap();
        assert_eq!(promote(&next, attempt, 0, root, [8; 16]), Ok(None));
    }

    #[test]
    fn a_disk_grows_once_and_whoever_still_writes_is_out() {
        let held = attach(&fresh(), by(1, 0)).unwrap();
        let grown = grow(&held, 0, 3 << 20, [1; 16]).unwrap().unwrap();
        assert_eq!((grown.accepted.generation, grown.accepted.content.size, grown.epoch), (1, 3 << 20, held.epoch + 1));
        assert!(grown.holder.is_none() && grown.working.is_none());
        assert_eq!(grow(&grown, 0, 3 << 20, [2; 16]), Ok(None), "again");
        assert!(matches!(grow(&grown, 0, 4 << 20, [2; 16]), Err(MoveError::Generation { .. })));
        assert!(matches!(grow(&grown, 1, 2 << 20, [2; 16]), Err(MoveError::Shrink { .. })));
        let gone = remove(&grown, true, 5, [1; 16]).unwrap();
        assert!(matches!(grow(&gone, 1, 4 << 20, [2; 16]), Err(MoveError::Deleted { .. })));
    }

    #[test]
    fn what_was_deleted_is_gone_and_a_writer_of_it_is_out() {
        let held = attach(&fresh(), by(1, 0)).unwrap();
        assert!(matches!(remove(&held, false, 5, [1; 16]), Err(MoveError::Held { .. })));
        let gone = remove(&held, true, 5, [1; 16]).unwrap();
        assert_eq!(gone.epoch, 2);
        assert!(matches!(attach(&gone, by(2, 50)), Err(MoveError::Deleted { .. })));
        assert!(commit(&gone, Content::empty(1 << 20), 1, [2; 16]).is_err() && snapshot(&gone, SnapshotId([1; 16]), true, 0).is_err());
    }
}
