//! Signs of life: does a machine's agent still answer?
//!
//! Owns when it is asked, what counts as a sign, and after how much silence the session is given up. Looks at a question that was asked and not
//! answered are counted, not time: a host that stood still itself has looked at nothing. Does not own what becomes of the machine
//! (`runtime/microvm`).

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};
use volley_jobspecs::wire::guest::Request;

use super::{Call, Guest, GuestError};

/// Between looks. A question costs an emulated machine a millisecond or two.
pub const LOOK_EVERY: Duration = Duration::from_secs(3);
/// So many looks in a row at a question without an answer, or anything else from the machine, are the end: 30 seconds. An emulated machine
/// on a busy host answers within one, even under a fork bomb (deploy/docs/0029). Far longer is waited, because a machine that is given up too
/// early costs a whole attempt, and one that is given up late only this time.
pub const MISSED_MAX: u32 = 10;
/// A look that comes this long after the former one is not counted: this process, or its whole host, stood still, and the machine may have as
/// well.
const LATE: Duration = Duration::from_secs(6);

/// What a look leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Nothing is to be done.
    Wait,
    /// The agent is to be asked.
    Ask,
    /// There was no sign for too long.
    GiveUp,
}

/// How long nothing was heard of an agent. Pure: time is what passed since its beginning.
#[derive(Debug)]
struct Silence {
    looked_at: Duration,
    heard: u64,
    missed: u32,
}

impl Silence {
    /// `heard`: how often something came from the machine so far.
    fn begin(heard: u64) -> Self {
        Self { looked_at: Duration::ZERO, heard, missed: 0 }
    }

    /// One look. `asked`: a question was sent at a former one and has no answer yet.
    fn look(&mut self, now: Duration, heard: u64, asked: bool) -> Then {
        let late = now.saturating_sub(self.looked_at) > LATE;
        self.looked_at = now;
        if heard != self.heard {
            (self.heard, self.missed) = (heard, 0);
        } else if asked && !late {
            self.missed += 1;
        }
        match asked {
            _ if self.missed >= MISSED_MAX => Then::GiveUp,
            true => Then::Wait,
            false => Then::Ask,
        }
    }
}

impl Guest {
    /// Asks for signs of life, for as long as it is waited for this. It returns when none came for too long, and the session is over then:
    /// whoever waits in it is told so.
    pub async fn silence(&self) -> GuestError {
        let begin = Instant::now();
        let mut looks = tokio::time::interval_at(begin + LOOK_EVERY, LOOK_EVERY);
        // After a standstill one look, and not all that were missed.
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut silence = Silence::begin(self.link.heard());
        let mut question = None;
        loop {
            tokio::select! {
                () = answered(question.as_ref()), if question.is_some() => {
                    question = None;
                    continue;
                }
                _ = looks.tick() => {}
            }
            match silence.look(begin.elapsed(), self.link.heard(), question.is_some()) {
                Then::Wait => {}
                // A session that is over, or has no call left for it, is not asked; whoever waits in it is told.
                Then::Ask => question = self.link.open(&Request::Hello).ok(),
                Then::GiveUp => {
                    let why = GuestError::NoSign { after: LOOK_EVERY * MISSED_MAX };
                    self.link.give_up(&why.to_string());
                    return why;
                }
            }
        }
    }
}

/// Waits for an answer, whatever it says.
async fn answered(question: Option<&Call>) {
    if let Some(call) = question {
        let _ = call.answer("hello").await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use volley_jobspecs::wire::encode;
    use volley_jobspecs::wire::guest::mux::{Mux, Side};
    use volley_jobspecs::wire::guest::{Answer, Refusal, RefusalKind};

    use super::*;

    /// Looks one interval apart at an agent that says nothing.
    fn looks(silence: &mut Silence, count: u32, asked: bool) -> Then {
        let mut then = Then::Wait;
        for _ in 0..count {
            then = silence.look(silence.looked_at + LOOK_EVERY, silence.heard, asked);
        }
        then
    }

    #[test]
    fn only_looks_at_an_open_question_are_counted() {
        let mut silence = Silence::begin(7);
        assert_eq!(looks(&mut silence, 100, false), Then::Ask, "nothing was asked");
        assert_eq!(looks(&mut silence, MISSED_MAX - 1, true), Then::Wait);
        assert_eq!(looks(&mut silence, 1, true), Then::GiveUp);
    }

    #[test]
    fn whatever_comes_is_a_sign() {
        let mut silence = Silence::begin(7);
        assert_eq!(looks(&mut silence, MISSED_MAX - 1, true), Then::Wait);
        assert_eq!(silence.look(silence.looked_at + LOOK_EVERY, 8, true), Then::Wait);
        assert_eq!(looks(&mut silence, MISSED_MAX - 1, true), Then::Wait, "it is counted from the beginning");
        assert_eq!(looks(&mut silence, 1, true), Then::GiveUp);
    }

    #[test]
    fn a_host_that_stood_still_has_missed_nothing() {
        let mut silence = Silence::begin(0);
        for _ in 0..1_000 {
            let hour_later = silence.looked_at + Duration::from_secs(3_600);
            assert_eq!(silence.look(hour_later, 0, true), Then::Wait);
        }
        assert_eq!(looks(&mut silence, MISSED_MAX - 1, true), Then::Wait);
        assert_eq!(looks(&mut silence, 1, true), Then::GiveUp);
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_says_nothing_is_given_up_and_its_session_with_it() {
        let (ours, _its) = tokio::io::duplex(1 << 16);
        let guest = Guest::unheard(Box::new(ours));
        let begin = Instant::now();
        let waits = async {
            let why = guest.stats().await;
            (why, begin.elapsed())
        };
        let (why, (waited, after)) = tokio::join!(guest.silence(), waits);
        assert!(matches!(why, GuestError::NoSign { .. }), "{why}");
        assert!((30..40).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
        assert!(matches!(waited, Err(GuestError::Silent { .. } | GuestError::Lost(_))) && after <= begin.elapsed());
        assert!(matches!(guest.stats().await, Err(GuestError::Lost(why)) if why.contains("no sign of life for 30 s")));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_takes_its_time_is_not_whatever_it_answers() {
        let (ours, mut its) = tokio::io::duplex(1 << 16);
        let guest = Guest::unheard(Box::new(ours));
        let slow = async {
            let (mut mux, mut buffer, mut out) = (Mux::new(Side::Guest), vec![0; 4096], Vec::new());
            loop {
                let len = its.read(&mut buffer).await.unwrap();
                mux.feed(&buffer[..len]).unwrap();
                while let Some((call, _)) = mux.accept() {
                    tokio::time::sleep(LOOK_EVERY * (MISSED_MAX - 1)).await;
                    mux.finish(call, encode(&Answer::Refused(Refusal::new(RefusalKind::System, "no thread"))));
                }
                mux.fill(&mut out, 4096);
                its.write_all(&out).await.unwrap();
                out.clear();
            }
        };
        let hour = tokio::time::sleep(Duration::from_secs(3_600));
        tokio::select! {
            () = hour => {}
            why = guest.silence() => panic!("{why}"),
            () = slow => {}
        }
    }
}
