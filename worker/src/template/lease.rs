//! The lease of one template's build: who builds it for the cluster, and what the others do meanwhile.
//!
//! Owns every decision about it. Pure: time and what the bucket says are arguments; `claim` carries out what is wished. It is a courtesy
//! among workers, not a fence: two who build the same template at once waste a boot, and nothing else.
//!
//! Ages are counted by whoever looks, from the moment it first saw a revision, so clocks of hosts are not compared. A holder writes its
//! entry anew every [`RENEW_MS`]; one that has not changed for [`EXPIRES_MS`] is taken over, on the condition that it is still the same
//! revision. A failed build stays as an entry that says why; nobody tries again until it is gone. The bucket drops entries that were not
//! written anew for [`KEPT_MS`]: those of failures, and of holders that died while nobody waited.

use minicbor::{Decode, Encode};
use volley_jobspecs::subjects::TEMPLATES_KEPT_MS as KEPT_MS;

/// A holder writes its entry anew this often.
pub const RENEW_MS: u64 = 2_000;
/// An entry that did not change for so long is its dead holder's: four renewals may get lost.
pub const EXPIRES_MS: u64 = 10_000;
/// A bucket that was out of reach for so long is waited for no longer: whoever wants the template builds it for itself.
pub const AWAY_MS: u64 = 10_000;
/// Longest reason of a failure that is kept, in bytes: a line, with the end of a console.
pub const REASON_BYTES_MAX: usize = 2_000;

/// What stands in the bucket under a template's name.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Entry {
    /// It is being built.
    #[n(0)]
    Building {
        /// The worker.
        #[n(0)]
        by: String,
        /// One claim of it: a worker that came back is another holder.
        #[n(1)]
        claim: u64,
        /// Counts renewals, so that no two entries are the same.
        #[n(2)]
        count: u64,
    },
    /// It could not be built.
    #[n(1)]
    Failed {
        /// The worker.
        #[n(0)]
        by: String,
        /// Why.
        #[n(1)]
        reason: String,
        /// How long that stands at most, in milliseconds.
        #[n(2)]
        for_ms: u64,
        /// Was it the warm-up? Not said by an older build.
        #[n(3)]
        #[cbor(default)]
        warm_up: bool,
    },
    /// Its build ended: the template is there, or somebody else may try.
    #[n(2)]
    Ended {
        /// The worker.
        #[n(0)]
        by: String,
    },
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// What stands there now, with its revision; or nothing.
    Seen(Option<(Entry, u64)>),
    /// What was wished was written, under this revision.
    Written(u64),
    /// It was not: another one was there first.
    Refused,
    /// The bucket gave no answer.
    Away,
    /// Time passes.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// Nothing; at the latest in so many milliseconds it is a [`Event::Tick`].
    Wait(u64),
    /// Look what stands there.
    Look,
    /// Write this where nothing stands.
    Create(Entry),
    /// Write this over that revision.
    Replace(Entry, u64),
    /// It is ours: look whether the template came meanwhile, else build.
    Hold,
    /// Somebody else's ended: the template may be there.
    LookForTemplate,
    /// Nobody builds it, as it failed on another worker a moment ago.
    GiveUp {
        /// On which.
        by: String,
        /// Why.
        reason: String,
        /// How long that stands at most, in milliseconds.
        for_ms: u64,
        /// Was it the warm-up?
        warm_up: bool,
    },
    /// Build it without a lease: the bucket does not answer, or its holder takes too long.
    Alone(&'static str),
}

/// Where a claim is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Nothing is known yet.
    Begun,
    /// Somebody builds; this revision was first seen then.
    Others { revision: u64, since_ms: u64 },
    /// An entry of ours is on its way.
    Asking,
    /// Over.
    Over,
}

/// One worker's claim of one template.
#[derive(Debug)]
pub struct Claim {
    by: String,
    claim: u64,
    /// How long somebody else's build is waited for.
    wait_ms: u64,
    begun_ms: u64,
    away_since_ms: Option<u64>,
    state: State,
    /// Who builds, while somebody else does.
    holder: Option<String>,
}

impl Claim {
    /// A claim that begins now. `claim` is random.
    #[must_use]
    pub fn new(by: String, claim: u64, wait_ms: u64, now_ms: u64) -> Self {
        Self { by, claim, wait_ms, begun_ms: now_ms, away_since_ms: None, state: State::Begun, holder: None }
    }

    /// Who builds it, while somebody else does.
    #[must_use]
    pub fn holder(&self) -> Option<&str> {
        self.holder.as_deref()
    }

    /// What follows from what happened.
    pub fn step(&mut self, now_ms: u64, event: Event) -> Wish {
        if !matches!(event, Event::Away | Event::Tick) {
            self.away_since_ms = None;
        }
        match event {
            Event::Seen(entry) => self.seen(now_ms, entry),
            Event::Written(_) => {
                self.end();
                Wish::Hold
            }
            Event::Refused => {
                self.state = State::Begun;
                Wish::Look
            }
            Event::Away => self.away(now_ms),
            Event::Tick => self.tick(now_ms),
        }
    }

    fn seen(&mut self, now_ms: u64, entry: Option<(Entry, u64)>) -> Wish {
        let begun = matches!(self.state, State::Begun);
        match entry {
            None if begun => self.ask(None),
            // It ended, and the bucket has forgotten that.
            None => {
                self.end();
                Wish::LookForTemplate
            }
            // Our own, whose answer was lost. Written anew, as somebody may be about to take it over.
            Some((Entry::Building { by, claim, .. }, revision)) if by == self.by && claim == self.claim => self.ask(Some(revision)),
            Some((Entry::Building { by, .. }, revision)) => {
                self.holder = Some(by);
                match self.state {
                    State::Others { revision: known, .. } if known == revision => {}
                    _ => self.state = State::Others { revision, since_ms: now_ms },
                }
                self.tick(now_ms)
            }
            Some((Entry::Ended { .. }, revision)) if begun => self.ask(Some(revision)),
            Some((Entry::Ended { .. }, _)) => {
                self.end();
                Wish::LookForTemplate
            }
            Some((Entry::Failed { by, reason, for_ms, warm_up }, _)) => {
                self.end();
                Wish::GiveUp { by, reason, for_ms, warm_up }
            }
        }
    }

    fn tick(&mut self, now_ms: u64) -> Wish {
        match self.state {
            State::Others { revision, since_ms } => {
                if now_ms.saturating_sub(since_ms) >= EXPIRES_MS {
                    return self.ask(Some(revision));
                }
                if now_ms.saturating_sub(self.begun_ms) >= self.wait_ms {
                    self.end();
                    return Wish::Alone("its build on another worker takes too long");
                }
                Wish::Wait((since_ms + EXPIRES_MS).saturating_sub(now_ms).min(RENEW_MS))
            }
            State::Begun | State::Asking => Wish::Look,
            State::Over => Wish::Wait(EXPIRES_MS),
        }
    }

    fn away(&mut self, now_ms: u64) -> Wish {
        let since = *self.away_since_ms.get_or_insert(now_ms);
        if now_ms.saturating_sub(since) >= AWAY_MS {
            self.end();
            return Wish::Alone("the bucket of leases does not answer");
        }
        // Whether what was asked for was written is not known; a look says.
        if matches!(self.state, State::Asking) {
            self.state = State::Begun;
        }
        Wish::Wait(RENEW_MS / 4)
    }

    fn ask(&mut self, over: Option<u64>) -> Wish {
        self.state = State::Asking;
        let entry = Entry::Building { by: self.by.clone(), claim: self.claim, count: 0 };
        match over {
            None => Wish::Create(entry),
            Some(revision) => Wish::Replace(entry, revision),
        }
    }

    fn end(&mut self) {
        self.state = State::Over;
        self.holder = None;
    }
}

/// A lease that is held.
#[derive(Debug)]
pub struct Held {
    by: String,
    claim: u64,
    count: u64,
    revision: u64,
    /// When the last renewal that succeeded was sent.
    renewed_ms: u64,
}

impl Held {
    /// One that was written under this revision; its write was sent then.
    #[must_use]
    pub fn new(by: String, claim: u64, revision: u64, sent_ms: u64) -> Self {
        Self { by, claim, count: 0, revision, renewed_ms: sent_ms }
    }

    /// The entry to write over a revision, to renew it.
    pub fn renew(&mut self) -> (Entry, u64) {
        self.count += 1;
        (Entry::Building { by: self.by.clone(), claim: self.claim, count: self.count }, self.revision)
    }

    /// A renewal, sent then, ended so: its revision, or what stands there instead, or nothing known. False: the lease is lost.
    pub fn renewed(&mut self, sent_ms: u64, now_ms: u64, event: &Event) -> bool {
        match event {
            Event::Written(revision) => {
                self.revision = *revision;
                self.renewed_ms = sent_ms;
                true
            }
            // A renewal whose answer was lost is ours all the same.
            Event::Seen(Some((Entry::Building { by, claim, .. }, revision))) if *by == self.by && *claim == self.claim => {
                self.revision = *revision;
                true
            }
            Event::Seen(_) => false,
            Event::Refused | Event::Away | Event::Tick => now_ms.saturating_sub(self.renewed_ms) < EXPIRES_MS,
        }
    }

    /// The revision that stands.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }
}

/// An entry that says why a build failed. `warm_up`: it was that.
#[must_use]
pub fn failed(by: &str, reason: &str, warm_up: bool) -> Entry {
    let mut reason = reason.to_owned();
    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    Entry::Failed { by: by.to_owned(), reason, for_ms: KEPT_MS, warm_up }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn claim(by: &str, now_ms: u64) -> Claim {
        Claim::new(by.to_owned(), 7, 60_000, now_ms)
    }

    fn building(by: &str, count: u64) -> Entry {
        Entry::Building { by: by.to_owned(), claim: if by == "me" { 7 } else { 1 }, count }
    }

    #[test]
    fn where_nothing_stands_it_is_claimed() {
        let mut mine = claim("me", 0);
        assert_eq!(mine.step(0, Event::Tick), Wish::Look);
        assert_eq!(mine.step(1, Event::Seen(None)), Wish::Create(building("me", 0)));
        assert_eq!(mine.step(2, Event::Written(5)), Wish::Hold);
    }

    #[test]
    fn who_comes_second_waits_for_the_template() {
        let mut mine = claim("me", 0);
        assert_eq!(mine.step(0, Event::Seen(None)), Wish::Create(building("me", 0)));
        assert_eq!(mine.step(1, Event::Refused), Wish::Look);
        assert_eq!(mine.step(2, Event::Seen(Some((building("other", 0), 4)))), Wish::Wait(RENEW_MS));
        assert_eq!(mine.holder(), Some("other"));
        // Renewals keep it alive, however long it takes.
        for round in 1..20 {
            assert_eq!(mine.step(round * 2_000, Event::Seen(Some((building("other", round), 4 + round)))), Wish::Wait(RENEW_MS));
        }
        assert_eq!(mine.step(40_000, Event::Seen(Some((Entry::Ended { by: "other".into() }, 30)))), Wish::LookForTemplate);
        // The next one finds it ended, and begins.
        let mut next = claim("me", 0);
        assert_eq!(next.step(0, Event::Seen(Some((Entry::Ended { by: "other".into() }, 30)))), Wish::Replace(building("me", 0), 30));
        let mut forgotten = claim("me", 0);
        assert_eq!(forgotten.step(0, Event::Seen(Some((building("other", 0), 4)))), Wish::Wait(RENEW_MS));
        assert_eq!(forgotten.step(1, Event::Seen(None)), Wish::LookForTemplate);
    }

    #[test]
    fn a_holder_that_died_is_followed_by_one_other() {
        let mut all: Vec<Claim> = ["me", "you"].map(|by| claim(by, 0)).into();
        let dead = || Event::Seen(Some((building("dead", 3), 9)));
        for claim in &mut all {
            assert_eq!(claim.step(0, dead()), Wish::Wait(RENEW_MS));
            assert_eq!(claim.step(9_999, dead()), Wish::Wait(1));
        }
        assert_eq!(all[0].step(10_000, Event::Tick), Wish::Replace(building("me", 0), 9));
        assert!(matches!(all[1].step(10_000, dead()), Wish::Replace(_, 9)));
        assert_eq!(all[0].step(10_001, Event::Written(10)), Wish::Hold);
        assert_eq!(all[1].step(10_001, Event::Refused), Wish::Look);
        assert_eq!(all[1].step(10_002, Event::Seen(Some((building("me", 0), 10)))), Wish::Wait(RENEW_MS));
    }

    #[test]
    fn a_write_whose_answer_was_lost_is_found_again() {
        let mut mine = claim("me", 0);
        assert_eq!(mine.step(0, Event::Seen(None)), Wish::Create(building("me", 0)));
        assert_eq!(mine.step(3_000, Event::Away), Wish::Wait(500));
        assert_eq!(mine.step(3_500, Event::Tick), Wish::Look);
        assert_eq!(mine.step(3_501, Event::Seen(Some((building("me", 0), 3)))), Wish::Replace(building("me", 0), 3));
        assert_eq!(mine.step(3_502, Event::Written(4)), Wish::Hold);
    }

    #[test]
    fn a_failure_elsewhere_is_one_for_all() {
        let entry = failed("other", &"é".repeat(1_500), true);
        let Entry::Failed { reason, .. } = &entry else { panic!() };
        assert_eq!(reason.len(), REASON_BYTES_MAX);
        let given_up = Wish::GiveUp { by: "other".into(), reason: reason.clone(), for_ms: KEPT_MS, warm_up: true };
        assert_eq!(claim("me", 0).step(0, Event::Seen(Some((entry.clone(), 4)))), given_up);
        // Also for who waited for it.
        let mut waiting = claim("me", 0);
        assert_eq!(waiting.step(0, Event::Seen(Some((building("other", 0), 3)))), Wish::Wait(RENEW_MS));
        assert_eq!(waiting.step(1, Event::Seen(Some((entry, 4)))), given_up);
    }

    #[test]
    fn who_can_wait_no_longer_builds_alone() {
        let mut mine = claim("me", 0);
        assert_eq!(mine.step(0, Event::Away), Wish::Wait(500));
        assert_eq!(mine.step(5_000, Event::Seen(Some((building("other", 0), 3)))), Wish::Wait(RENEW_MS));
        assert_eq!(mine.step(11_000, Event::Away), Wish::Wait(500), "counted anew");
        assert!(matches!(mine.step(21_000, Event::Away), Wish::Alone(_)));
        let mut mine = claim("me", 0);
        for second in 0..60 {
            let seen = Event::Seen(Some((building("other", second), second)));
            assert!(matches!(mine.step(second * 1_000, seen), Wish::Wait(_)));
        }
        assert!(matches!(mine.step(60_000, Event::Tick), Wish::Alone(_)));
    }

    #[test]
    fn a_held_lease_is_lost_when_another_stands_there_or_nothing_was_heard() {
        let mut held = Held::new("me".into(), 7, 3, 0);
        assert_eq!(held.renew(), (building("me", 1), 3));
        assert!(held.renewed(2_000, 2_001, &Event::Written(4)));
        assert_eq!(held.renew(), (building("me", 2), 4));
        assert!(held.renewed(4_000, 6_000, &Event::Away), "its last one was sent 4 s ago");
        assert!(held.renewed(6_000, 6_001, &Event::Seen(Some((building("me", 2), 5)))));
        assert_eq!(held.revision(), 5);
        assert!(!held.renewed(12_000, 12_001, &Event::Away));
        let mut held = Held::new("me".into(), 7, 3, 0);
        assert!(!held.renewed(2_000, 2_001, &Event::Seen(Some((building("you", 0), 9)))));
        assert!(!held.renewed(2_000, 2_001, &Event::Seen(None)));
    }

    /// A bucket with one key, as the server keeps it.
    #[derive(Default)]
    struct Bucket {
        entry: Option<(Entry, u64)>,
        revision: u64,
    }

    impl Bucket {
        fn write(&mut self, entry: Entry, over: Option<u64>) -> Event {
            if self.entry.as_ref().map(|(_, revision)| *revision) != over {
                return Event::Refused;
            }
            self.revision += 1;
            self.entry = Some((entry, self.revision));
            Event::Written(self.revision)
        }
    }

    proptest! {
        /// Workers act in any order, any answer may be lost, holders die or end: no two hold it at a time, and somebody gets it in the end.
        #[test]
        fn one_holds_it_at_a_time(steps in proptest::collection::vec((0usize..3, 0u8..10, 0u64..3_000), 0..200)) {
            let (mut bucket, mut now, mut holder) = (Bucket::default(), 0, None::<usize>);
            let fresh = |who: usize, now: u64, round: u64| Claim::new(format!("w{who}"), round, u64::MAX, now);
            let mut claims: Vec<(Claim, Wish)> = (0..3).map(|who| (fresh(who, 0, 0), Wish::Look)).collect();
            let mut renewed = 0;
            for (round, (who, luck, pause)) in steps.into_iter().enumerate() {
                now += pause;
                if holder == Some(who) {
                    match luck {
                        // It dies: nobody renews it.
                        0 => { holder = None; claims[who] = (fresh(who, now, round as u64 + 1), Wish::Look); }
                        // It is done.
                        1 => {
                            holder = None;
                            let revision = bucket.entry.as_ref().map(|(_, revision)| *revision);
                            bucket.write(Entry::Ended { by: "w".into() }, revision);
                            claims[who] = (fresh(who, now, round as u64 + 1), Wish::Look);
                        }
                        _ => {}
                    }
                }
                // A living holder renews in time.
                if holder.is_some() && now - renewed >= RENEW_MS {
                    renewed = now;
                    let (entry, revision) = bucket.entry.clone().unwrap();
                    prop_assert!(matches!(bucket.write(entry, Some(revision)), Event::Written(_)));
                }
                if holder == Some(who) {
                    continue;
                }
                let event = match claims[who].1.clone() {
                    Wish::Wait(_) | Wish::Look => if luck == 9 { Event::Away } else { Event::Seen(bucket.entry.clone()) },
                    Wish::Create(entry) => { let done = bucket.write(entry, None); if luck == 8 { Event::Away } else { done } }
                    Wish::Replace(entry, over) => { let done = bucket.write(entry, Some(over)); if luck == 8 { Event::Away } else { done } }
                    Wish::LookForTemplate | Wish::GiveUp { .. } | Wish::Alone(_) => {
                        claims[who] = (fresh(who, now, round as u64 + 1), Wish::Look);
                        continue;
                    }
                    Wish::Hold => unreachable!(),
                };
                let wish = claims[who].0.step(now, event);
                if wish == Wish::Hold {
                    prop_assert_eq!(holder, None, "two hold it");
                    (holder, renewed) = (Some(who), now);
                }
                claims[who].1 = wish;
            }
        }
    }
}
