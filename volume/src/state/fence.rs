//! What the answer to a conditional write of the head means.
//!
//! Owns the one question: was it written, may it be tried again, or has somebody else the right? Does not own the requests. Pure.
//!
//! A head is written on the condition that it still has the tag that is known. The answer may be lost, and the write may then have happened, or
//! happen later. So whoever has no clear answer reads the head and looks for the random bytes of its own writing; it then tries **the same bytes** again,
//! never others, until it knows. Every head has other random bytes, so no tag ever comes back.

use crate::format::head::Head;

/// What was tried.
#[derive(Debug, Clone, Copy)]
pub struct Tried<'a> {
    /// The head that was sent.
    pub head: &'a Head,
    /// The random bytes of the head that it should replace.
    pub replaces: [u8; 16],
}

/// What the head in S3 tells whoever has no clear answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Verdict {
    /// It was written: what is there is ours.
    #[error("it was written")]
    Mine,
    /// It was not written, nothing has changed: the same again.
    #[error("it was not written yet")]
    Again,
    /// Somebody changed something that is not the writer's: the same commit again, on top of that.
    #[error("the head was changed beside the writer")]
    Rebase,
    /// Somebody else has the right to write.
    #[error("{host} has it since (epoch {epoch})")]
    Fenced {
        /// The epoch in S3.
        epoch: u64,
        /// Who has it; "nobody" after a detach or removal.
        host: String,
    },
    /// There is no head: it was removed, or the bucket is another one.
    #[error("its head is gone")]
    Gone,
}

/// Judges the head that was found after an answer that was lost or negative.
#[must_use]
pub fn judge(tried: Tried<'_>, found: Option<&Head>) -> Verdict {
    let Some(found) = found else { return Verdict::Gone };
    if found.commit == tried.head.commit {
        return Verdict::Mine;
    }
    if found.commit == tried.replaces {
        return Verdict::Again;
    }
    // An attach and a removal take a new epoch, and nobody else writes the holder's part: in the same epoch only others' parts may differ.
    let attach = |head: &Head| head.holder.as_ref().map(|holder| holder.attach);
    let holds = attach(found).is_some() && (tried.head.holder.is_none() || attach(found) == attach(tried.head));
    if found.epoch == tried.head.epoch && holds && found.tombstone.is_none() {
        return Verdict::Rebase;
    }
    let host = found.holder.as_ref().map_or_else(|| "nobody".to_owned(), |holder| holder.host.clone());
    Verdict::Fenced { epoch: found.epoch, host }
}

/// A holder's commit on top of a head in which others changed something: the writer's part of `mine`, all else of `found`.
#[must_use]
pub fn rebase(found: &Head, mine: &Head) -> Head {
    Head { seq: mine.seq, commit: mine.commit, holder: mine.holder.clone(), working: mine.working.clone(), ..found.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::content::Content;
    use crate::state::moves::tests::{by, fresh};
    use crate::state::moves::{Attach, attach, commit, detach, promote, remove};

    #[test]
    fn each_answer_has_its_meaning() {
        let before = attach(&fresh(), by(1, 0)).unwrap();
        let mine = commit(&before, Content::empty(1 << 20), 3, [50; 16]).unwrap();
        let tried = Tried { head: &mine, replaces: before.commit };
        assert_eq!(judge(tried, None), Verdict::Gone);
        assert_eq!(judge(tried, Some(&mine)), Verdict::Mine);
        assert_eq!(judge(tried, Some(&before)), Verdict::Again);
        let other = attach(&before, Attach { force: true, ..by(2, 0) }).unwrap();
        assert_eq!(judge(tried, Some(&other)), Verdict::Fenced { epoch: 2, host: "h2".into() });
        // A restarted server of the same attach has a new epoch: the process before it is out too.
        assert!(
            matches!(judge(tried, Some(&attach(&before, by(1, 0)).unwrap())), Verdict::Fenced { epoch: 2, .. })
                || by(1, 0).commit == before.commit
        );
        assert!(matches!(judge(tried, Some(&remove(&before, true, 0, [51; 16]).unwrap())), Verdict::Fenced { .. }));
        assert!(
            matches!(judge(tried, Some(&detach(&before, [52; 16]))), Verdict::Fenced { .. }),
            "nobody detaches for the holder in its epoch"
        );
    }

    #[test]
    fn a_commit_goes_on_top_of_a_promotion_and_keeps_it() {
        let held = attach(&fresh(), by(1, 0)).unwrap();
        let first = commit(&held, Content::empty(2 << 20), 3, [50; 16]).unwrap();
        let second = commit(&first, Content::empty(3 << 20), 4, [51; 16]).unwrap();
        let root = first.working.as_ref().unwrap().content.digest();
        let promoted = promote(&first, by(1, 0).attempt, 0, root, [60; 16]).unwrap().unwrap();
        assert_eq!(judge(Tried { head: &second, replaces: first.commit }, Some(&promoted)), Verdict::Rebase);
        let both = rebase(&promoted, &second);
        assert_eq!((both.accepted.generation, both.accepted.content.size, both.working.unwrap().content.size), (1, 2 << 20, 3 << 20));
        let leaving = detach(&second, [61; 16]);
        assert_eq!(judge(Tried { head: &leaving, replaces: second.commit }, Some(&promoted)), Verdict::Rebase);
        assert_eq!(rebase(&promoted, &leaving).holder, None);
    }
}
