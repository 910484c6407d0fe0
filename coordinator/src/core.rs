//! The core of a coordinator: records in; state, rows and actions out. Synchronous, without clock or I/O but the rows.
//!
//! Owns the order apply → store → act, loading of jobs that left memory, and the comparison of digests. The driver and the
//! simulation both drive exactly this.

use std::collections::{BTreeMap, BTreeSet};

use volley_jobspecs::ids::{TenantId, Term};
use volley_jobspecs::wire::record::{Decision, Lead, Record, TenantPolicy};
use volley_jobspecs::wire::{self, DecodeError, LEVEL_ROUNDS};

use crate::apply::{self, ApplyError};
use crate::control::BUILT_IN;
use crate::leader::{Leader, Tuning};
use crate::state::effects::Effects;
use crate::state::rows::{self, Rows, RowsError};
use crate::state::{State, Tenant};

/// A digest is taken after every record whose sequence is a multiple of this (DESIGN §5).
pub const RECORDS_PER_DIGEST: u64 = 10_000;
/// Digests remembered: the leader's comes within a round or two.
const DIGESTS_KEPT: usize = 8;

/// A message of the log, as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Its sequence.
    pub sequence: u64,
    /// What it says.
    pub bytes: Vec<u8>,
    /// Where it lies.
    pub mark: Mark,
}

/// Where a message lies, and what it bears there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// Not on the leader's subject.
    Elsewhere,
    /// On the leader's subject, with the fence that every leader's message bears.
    Fenced,
    /// On the leader's subject, without a fence.
    Unfenced,
}

/// Why a coordinator can't go on.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// The rows failed.
    #[error(transparent)]
    Rows(#[from] RowsError),
    /// A record can't be applied.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A record can't be read.
    #[error(
        "record {sequence} can't be read: {source}. Nothing of it is applied; install a build that knows it. To pass over it, and so lose what it says: `volley log skip {sequence}`, then restart every coordinator"
    )]
    Record {
        /// Which.
        sequence: u64,
        /// Why.
        source: DecodeError,
    },
    /// A record makes this build panic.
    #[error(
        "applying record {sequence} panicked ({what}); install a build that can apply it. To pass over it, and so lose what it says: `volley log skip {sequence}`, then restart every coordinator"
    )]
    Panicked {
        /// Which.
        sequence: u64,
        /// What the panic said.
        what: String,
    },
    /// Our state is not what the leader's was.
    #[error(
        "after record {sequence} this coordinator's state differed from the leader's, whose digest is in record {record}; its RocksDB directory must be dropped and rebuilt. If it differs again once rebuilt, records are applied otherwise than they were: report it. To go on without this comparison, and so lose what else record {record} says: `volley log skip {record}`, then restart every coordinator"
    )]
    Digest {
        /// After which record.
        sequence: u64,
        /// The record that carries the leader's digest.
        record: u64,
    },
}

/// A coordinator without its I/O.
#[derive(Debug)]
pub struct Core {
    state: State,
    leader: Option<Leader>,
    digests: BTreeMap<u64, [u8; 16]>,
    /// Records to pass over.
    skips: BTreeSet<u64>,
    /// The record that is being applied, or was the last.
    applying: u64,
    /// The last message on the leader's subject that was passed over, in this life: it moved the server's fence and nothing else.
    passed: u64,
}

impl Core {
    /// Puts a coordinator together from its rows.
    ///
    /// # Errors
    /// [`RowsError`] when they can't be read.
    pub fn open(rows: &dyn Rows) -> Result<Self, RowsError> {
        let mut state = rows::load(rows)?;
        for name in BUILT_IN {
            if let Ok(name) = TenantId::new(name) {
                state.tenants.entry(name).or_insert_with(|| Tenant { policy: TenantPolicy::default() });
            }
        }
        let applying = state.head.sequence;
        Ok(Self { state, leader: None, digests: BTreeMap::new(), skips: BTreeSet::new(), applying, passed: 0 })
    }

    /// Says which records are passed over. Every coordinator must be told the same before it comes to one of them.
    pub fn pass_over(&mut self, skips: BTreeSet<u64>) {
        self.skips = skips;
    }

    /// The record that is being applied, or was the last: names the one that made `apply` panic.
    #[must_use]
    pub fn applying(&self) -> u64 {
        self.applying
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The leader's part, when this coordinator leads.
    pub fn leader(&mut self) -> Option<(&mut Leader, &State)> {
        self.leader.as_mut().map(|leader| (leader, &self.state))
    }

    /// The leader's part, to look at.
    #[must_use]
    pub fn leader_ref(&self) -> Option<&Leader> {
        self.leader.as_ref()
    }

    /// Does it lead?
    #[must_use]
    pub fn leads(&self) -> bool {
        self.leader.is_some()
    }

    /// Applies records, stores what came of them in one batch, and tells the leader. Returns the effects, for answers and events.
    ///
    /// # Errors
    /// [`CoreError`]: the coordinator must stop.
    pub fn apply(&mut self, rows: &dyn Rows, messages: &[Message]) -> Result<Vec<Effects>, CoreError> {
        let mut all = Vec::new();
        let mut fx = Effects::default();
        for Message { sequence, bytes, mark } in messages {
            if *sequence <= self.state.head.sequence {
                continue;
            }
            self.applying = *sequence;
            if self.skips.contains(sequence) {
                tracing::warn!(sequence, "passing over a record, as `volley log skip` said");
                self.passes_over(*sequence, *mark);
                continue;
            }
            let record: Record = match wire::decode("record", bytes) {
                Ok(record) => record,
                Err(source) if *mark == Mark::Unfenced => {
                    tracing::warn!(sequence, "passing over a message on the leader's subject that no leader wrote: {source}");
                    self.passes_over(*sequence, *mark);
                    fx.aliens += 1;
                    continue;
                }
                Err(source) => {
                    // What came before it is whole.
                    self.store(rows, &mut fx, &mut all)?;
                    return Err(CoreError::Record { sequence: *sequence, source });
                }
            };
            if let Some((job, settled)) = apply::needs(&record) {
                // What is loaded must not be older than what is still to be stored.
                self.store(rows, &mut fx, &mut all)?;
                rows::load_job(&mut self.state, rows, job, settled)?;
            }
            self.compare(*sequence, &record)?;
            apply::apply(&mut self.state, *sequence, &record, &mut fx)?;
            // Below, digests counted timers that a restart could lose: they say nothing.
            if sequence.is_multiple_of(RECORDS_PER_DIGEST) && self.state.head.level >= LEVEL_ROUNDS {
                self.digest(*sequence);
            }
        }
        self.store(rows, &mut fx, &mut all)?;
        Ok(all)
    }

    /// Passes over a message. The state says so in the same way whether an operator ordered it or no leader wrote the message.
    ///
    /// NATS answers a publish to whatever subject its sender names, also one to which the sender itself may not publish: so whoever may
    /// publish to the log at all can have an acknowledgement lie on the leader's subject. It has no header, while all that a leader writes
    /// bears the fence. A message that can be read is applied all the same, with or without a fence: a coordinator of another build does
    /// so, and must not come to differ. One that can't be read stops a build that doesn't look for the fence, until `volley log skip`
    /// makes the same state of it as is made here.
    fn passes_over(&mut self, sequence: u64, mark: Mark) {
        self.state.head.sequence = sequence;
        self.state.head.skipped.insert(sequence);
        if mark != Mark::Elsewhere {
            self.passed = sequence;
            if let Some(leader) = &mut self.leader {
                leader.passed_over(sequence);
            }
        }
    }

    fn store(&mut self, rows: &dyn Rows, fx: &mut Effects, all: &mut Vec<Effects>) -> Result<(), CoreError> {
        rows.write(rows::batch(&self.state, fx))?;
        if let Some(leader) = &mut self.leader {
            leader.applied(&self.state, fx);
        }
        all.push(std::mem::take(fx));
        Ok(())
    }

    fn digest(&mut self, sequence: u64) {
        let hash = self.state.digest();
        self.digests.insert(sequence, hash);
        while self.digests.len() > DIGESTS_KEPT {
            self.digests.pop_first();
        }
        if let Some(leader) = &mut self.leader {
            leader.digest(sequence, hash);
        }
    }

    fn compare(&self, record: u64, content: &Record) -> Result<(), CoreError> {
        let Record::Decided(decided) = content else { return Ok(()) };
        if decided.term != self.state.head.term {
            return Ok(());
        }
        for decision in &decided.decisions {
            if let Decision::Digest { sequence, hash } = decision
                && self.digests.get(sequence).is_some_and(|ours| ours != hash)
            {
                return Err(CoreError::Digest { sequence: *sequence, record });
            }
        }
        Ok(())
    }

    /// The Lead record to write when the lease was won.
    #[must_use]
    pub fn lead_record(&self, coordinator: &str, wall_ms: u64) -> (Record, u64) {
        let term = Term(self.state.head.term.0 + 1);
        let lead = Lead { term, coordinator: coordinator.to_owned(), now_ms: wall_ms };
        (Record::Lead(lead), self.state.head.leader_sequence.max(self.passed))
    }

    /// Takes office: our Lead record, of this term, was applied.
    pub fn take_office(&mut self, wall_ms: u64, now_ms: u64, tuning: Tuning) {
        let mut leader = Leader::new(&self.state, wall_ms, now_ms, tuning);
        leader.passed_over(self.passed);
        self.leader = Some(leader);
    }

    /// Leaves office.
    pub fn leave_office(&mut self) {
        self.leader = None;
    }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::wire::record::Decided;

    use super::*;
    use crate::leader::Action;
    use crate::state::rows::MapRows;

    const PUB_ACK: &[u8] = br#"{"stream":"VOLLEY_LOG","seq":12}"#;

    fn lead(sequence: u64, term: u64, mark: Mark) -> Message {
        let lead = Lead { term: Term(term), coordinator: "c".into(), now_ms: 1_000 };
        Message { sequence, bytes: wire::encode(&Record::Lead(lead)), mark }
    }

    fn alien(sequence: u64, mark: Mark) -> Message {
        Message { sequence, bytes: PUB_ACK.to_vec(), mark }
    }

    #[test]
    fn what_no_leader_wrote_is_passed_over_as_an_operator_would_have_it() {
        let (rows, skipping) = (MapRows::default(), MapRows::default());
        let (mut core, mut told) = (Core::open(&rows).unwrap(), Core::open(&skipping).unwrap());
        told.pass_over([2].into());
        let messages = [lead(1, 1, Mark::Fenced), alien(2, Mark::Unfenced), lead(3, 2, Mark::Fenced)];
        let effects = core.apply(&rows, &messages).unwrap();
        told.apply(&skipping, &messages).unwrap();
        assert_eq!(effects.iter().map(|fx| fx.aliens).sum::<u64>(), 1);
        assert_eq!((core.state(), rows.dump()), (told.state(), skipping.dump()), "the same state, to the row");
        assert_eq!((core.state().head.term, core.state().head.skipped.contains(&2)), (Term(2), true));
        // Elsewhere, or with the fence, it may be of a build that knows more.
        for mark in [Mark::Elsewhere, Mark::Fenced] {
            assert!(matches!(core.apply(&rows, &[alien(4, mark)]), Err(CoreError::Record { sequence: 4, .. })), "{mark:?}");
        }
        // Other builds apply what they can read.
        core.apply(&rows, &[lead(4, 3, Mark::Unfenced)]).unwrap();
        assert_eq!(core.state().head.term, Term(3));
    }

    #[test]
    fn a_leader_writes_behind_what_was_passed_over() {
        let rows = MapRows::default();
        let mut core = Core::open(&rows).unwrap();
        core.apply(&rows, &[lead(1, 1, Mark::Fenced), alien(2, Mark::Unfenced)]).unwrap();
        core.take_office(1_000, 0, Tuning::default());
        let after = |core: &mut Core, digest| {
            let Some((leader, state)) = core.leader() else { panic!("it leads") };
            leader.record(Decision::Digest { sequence: digest, hash: [0; 16] });
            let actions = leader.poll(state, digest);
            let publish = actions.into_iter().find_map(|action| match action {
                Action::Publish { decided, after } => Some((decided, after)),
                Action::Send(..) | Action::Trail(..) | Action::Work(_) | Action::StepDown => None,
            });
            publish.unwrap_or_else(|| panic!("nothing is published"))
        };
        let (decided, fence): (Decided, u64) = after(&mut core, 10);
        assert_eq!(fence, 2);
        let written = Message { sequence: 3, bytes: wire::encode(&Record::Decided(decided)), mark: Mark::Fenced };
        core.apply(&rows, &[written, alien(4, Mark::Unfenced), alien(5, Mark::Elsewhere)]).unwrap_err();
        assert_eq!(after(&mut core, 20).1, 4);
        assert_eq!(core.lead_record("c", 1_000).1, 4);
    }
}
