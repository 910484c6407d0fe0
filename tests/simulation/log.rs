//! A log that behaves as measured: ordered, durable, with the server-side fence.
//!
//! Whether a publish or its answer is lost, and how long both take, is the world's to decide.

use volley_coordinator::core::{Mark, Message};
use volley_jobspecs::subjects::LOG_LEADER;

/// How a publish ends at the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    At(u64),
    Refused,
}

/// The stream.
#[derive(Debug, Default)]
pub struct Log {
    records: Vec<(Mark, Vec<u8>)>,
    last_leader: u64,
    /// Everything before is trimmed: no coordinator may read it. Kept all the same, for the demands made at the end.
    first: u64,
}

impl Log {
    pub fn append(&mut self, subject: &str, bytes: Vec<u8>, after: Option<u64>) -> Written {
        if after.is_some_and(|after| after != self.last_leader) {
            return Written::Refused;
        }
        let mark = match after {
            _ if subject != LOG_LEADER => Mark::Elsewhere,
            Some(_) => Mark::Fenced,
            None => Mark::Unfenced,
        };
        self.records.push((mark, bytes));
        let sequence = self.records.len() as u64;
        if subject == LOG_LEADER {
            self.last_leader = sequence;
        }
        Written::At(sequence)
    }

    /// Up to `count` records from `next` on.
    pub fn read(&self, next: u64, count: usize) -> Vec<Message> {
        let from = (next as usize).saturating_sub(1).min(self.records.len());
        let some = self.records[from..].iter().take(count).enumerate();
        some.map(|(at, (mark, bytes))| Message { sequence: (from + at + 1) as u64, bytes: bytes.clone(), mark: *mark }).collect()
    }

    pub fn trim(&mut self, keep: u64) {
        assert!(keep <= self.last_leader, "the fence is trimmed away");
        self.first = self.first.max(keep);
    }

    pub fn first(&self) -> u64 {
        self.first
    }

    pub fn last_leader(&self) -> Option<(u64, &[u8])> {
        let at = (self.last_leader as usize).checked_sub(1)?;
        Some((self.last_leader, &self.records[at].1))
    }

    pub fn len(&self) -> u64 {
        self.records.len() as u64
    }
}
