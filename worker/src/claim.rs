//! Stage *claim*: which work messages count.
//!
//! Owns the checks of life, term and number. Pure. Does not own what becomes of the orders (`core`).

use volley_jobspecs::ids::{Incarnation, Term};
use volley_jobspecs::wire::work::{Order, WorkAnswer, WorkMessage};

/// What a worker has heard and taken so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heard {
    /// The worker's life.
    pub incarnation: Incarnation,
    /// The newest leader it has heard of.
    pub term: Term,
    /// The last message of that leader it took, 0 for none.
    pub taken: u64,
}

impl Heard {
    /// Takes note of a leader. Returns false for one that is older than one known already: nothing it says counts.
    pub fn hear(&mut self, term: Term) -> bool {
        if term > self.term {
            self.term = term;
            self.taken = 0;
        }
        term == self.term
    }

    /// What a work message is answered with.
    #[must_use]
    pub fn answer(&self) -> WorkAnswer {
        WorkAnswer { incarnation: self.incarnation, term: self.term, taken: self.taken }
    }
}

/// Why the orders of a message are dropped. Each is harmless: the leader learns from the answer, or has moved on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// It was meant for another life of this worker.
    #[error("work message for life {wanted:?}, this is {own:?}; dropped")]
    OtherLife {
        /// For whom it was.
        wanted: Incarnation,
        /// Who this is.
        own: Incarnation,
    },
    /// A newer leader is known.
    #[error("work message of term {of:?}, term {known:?} is known; dropped")]
    OlderTerm {
        /// Whose it was.
        of: Term,
        /// Who leads.
        known: Term,
    },
    /// It was taken before.
    #[error("work message {number} was taken before (last taken: {taken}); dropped")]
    SeenBefore {
        /// Its number.
        number: u64,
        /// The last one taken.
        taken: u64,
    },
}

/// Checks a message and takes it. Its orders are to be carried out in full once this has returned them.
///
/// # Errors
/// [`ClaimError`]: the orders don't count. The message is answered all the same.
pub fn claim(heard: &mut Heard, message: WorkMessage) -> Result<Vec<Order>, ClaimError> {
    if message.incarnation != heard.incarnation {
        return Err(ClaimError::OtherLife { wanted: message.incarnation, own: heard.incarnation });
    }
    if !heard.hear(message.term) {
        return Err(ClaimError::OlderTerm { of: message.term, known: heard.term });
    }
    if message.number <= heard.taken {
        return Err(ClaimError::SeenBefore { number: message.number, taken: heard.taken });
    }
    heard.taken = message.number;
    Ok(message.orders)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(incarnation: u64, term: u64, number: u64) -> WorkMessage {
        WorkMessage { incarnation: Incarnation(incarnation), term: Term(term), number, orders: Vec::new() }
    }

    #[test]
    fn each_message_counts_once_per_leader() {
        let mut heard = Heard { incarnation: Incarnation(7), term: Term(0), taken: 0 };
        assert!(claim(&mut heard, message(7, 3, 1)).is_ok());
        assert!(matches!(claim(&mut heard, message(7, 3, 1)), Err(ClaimError::SeenBefore { .. })));
        assert!(claim(&mut heard, message(7, 3, 2)).is_ok());
        assert!(matches!(claim(&mut heard, message(7, 2, 9)), Err(ClaimError::OlderTerm { .. })));
        assert!(claim(&mut heard, message(7, 4, 1)).is_ok());
        assert_eq!(heard.answer(), WorkAnswer { incarnation: Incarnation(7), term: Term(4), taken: 1 });
    }

    #[test]
    fn a_message_for_another_life_changes_nothing() {
        let mut heard = Heard { incarnation: Incarnation(7), term: Term(1), taken: 5 };
        let before = heard;
        assert!(matches!(claim(&mut heard, message(8, 9, 9)), Err(ClaimError::OtherLife { .. })));
        assert_eq!(heard, before);
    }
}
