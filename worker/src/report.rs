//! Stage *report*: ends of attempts gathered into report records, one publish in flight.
//!
//! Owns batching, sizes, the linger and the rule that the same bytes are repeated until they are in the log. Pure. Does not own the
//! publish itself (`driver`, `io/nats`).

use std::collections::VecDeque;
use std::sync::Arc;

use volley_jobspecs::ids::{Incarnation, JobId, WorkerId};
use volley_jobspecs::wire;
use volley_jobspecs::wire::record::Record;
use volley_jobspecs::wire::report::{AttemptEnd, Ending, REPORT_BYTES_MAX, Report};

/// Most bytes of an encoded end beside its texts: every number at its widest. Sizes are sums of this and the texts, so a report is
/// never larger than computed.
const END_FIXED_BYTES: usize = 192;
/// Most bytes of a report beside its ends: the worker's name and three numbers.
const REPORT_FIXED_BYTES: usize = 128;
/// Wait before a publish that failed is repeated, in milliseconds; doubled up to [`RETRY_MS_MAX`].
const RETRY_MS_MIN: u64 = 100;
/// Longest wait between repeats, in milliseconds: how long after an outage reports may keep still.
const RETRY_MS_MAX: u64 = 2_000;
/// Longest linger taken from a leader, in milliseconds: a mistaken answer may not hold results back for ever.
const LINGER_MS_MAX: u64 = 5_000;

/// How long a worker whose slots are all busy gathers ends, in milliseconds: nobody waits for them to hand out work, and each report
/// costs the log a sync. Far below what a person notices, far above the time between ends of very short tasks.
const GATHER_MS: u64 = 50;

/// How soon ends want to be in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Haste {
    /// At once: the worker is about to leave.
    Now,
    /// After the linger that the leader asks for: a slot is idle, or will be.
    Soon,
    /// When some have come together: every slot is busy.
    Gather,
}

/// Where an end belongs, so that its bundle learns when it is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The bundle.
    pub bundle: volley_jobspecs::ids::BundleId,
    /// Its place in the bundle.
    pub place: u16,
}

/// A report to be published, again and again until it is acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publish {
    /// The report's number.
    pub number: u64,
    /// The encoded record.
    pub bytes: Arc<[u8]>,
    /// The job of all its ends, when it is one and the same: a message has room for one trace context.
    pub job: Option<JobId>,
}

/// Why the log's answer to a publish doesn't count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// It is about a report that isn't in flight.
    #[error("an answer about report {number}, which is not in flight")]
    NotInFlight {
        /// The report's number.
        number: u64,
    },
}

#[derive(Debug, Clone)]
struct InFlight {
    publish: Publish,
    origins: Vec<Origin>,
    ends_bytes: usize,
    /// When it was published first.
    since_ms: u64,
    /// When to publish it again; `None` while an answer is awaited.
    again_at_ms: Option<u64>,
    retry_ms: u64,
}

/// Ends that are not in the log yet.
#[derive(Debug, Clone)]
pub struct Outbox {
    worker: WorkerId,
    incarnation: Incarnation,
    number: u64,
    pending: VecDeque<(AttemptEnd, Origin, usize)>,
    pending_bytes: usize,
    oldest_ms: u64,
    /// Is something among them that another worker can begin once it is known?
    returned: bool,
    linger_ms: u64,
    in_flight: Option<InFlight>,
    reported: u64,
}

impl Outbox {
    /// An empty outbox of a new life.
    #[must_use]
    pub fn new(worker: WorkerId, incarnation: Incarnation, linger_ms: u64) -> Self {
        Self {
            worker,
            incarnation,
            number: 0,
            pending: VecDeque::new(),
            pending_bytes: 0,
            oldest_ms: 0,
            returned: false,
            linger_ms,
            in_flight: None,
            reported: 0,
        }
    }

    /// Sets how long ends may be gathered.
    pub fn set_linger(&mut self, linger_ms: u64) {
        self.linger_ms = linger_ms.min(LINGER_MS_MAX);
    }

    /// Adds an end.
    pub fn push(&mut self, now_ms: u64, end: AttemptEnd, origin: Origin) {
        if self.pending.is_empty() {
            self.oldest_ms = now_ms;
        }
        let size = size_of_end(&end);
        self.returned |= end.ending == Ending::Returned;
        self.pending_bytes += size;
        self.pending.push_back((end, origin, size));
    }

    /// Takes out what nobody wants to hear of. What is in flight can't be taken back.
    pub fn forget(&mut self, bundle: volley_jobspecs::ids::BundleId) {
        self.pending.retain(|(_, origin, _)| origin.bundle != bundle);
        self.pending_bytes = self.pending.iter().map(|(.., size)| size).sum();
    }

    /// Bytes of all ends that are not in the log.
    #[must_use]
    pub fn unsent_bytes(&self) -> usize {
        self.pending_bytes + self.in_flight.as_ref().map_or(0, |flight| flight.ends_bytes)
    }

    /// Is everything in the log?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.in_flight.is_none()
    }

    /// Log sequence of the last report that was acknowledged, 0 for none.
    #[must_use]
    pub fn reported(&self) -> u64 {
        self.reported
    }

    /// What is to be published now, if anything.
    pub fn publish(&mut self, now_ms: u64, haste: Haste) -> Option<Publish> {
        if self.due_ms(haste)? > now_ms {
            return None;
        }
        if let Some(flight) = &mut self.in_flight {
            flight.again_at_ms = None;
            return Some(flight.publish.clone());
        }
        let mut origins = Vec::new();
        let mut ends = Vec::new();
        let mut ends_bytes = 0;
        while let Some((end, origin, size)) = self.pending.pop_front() {
            if !ends.is_empty() && REPORT_FIXED_BYTES + ends_bytes + size > REPORT_BYTES_MAX {
                self.pending.push_front((end, origin, size));
                break;
            }
            ends_bytes += size;
            ends.push(end);
            origins.push(origin);
        }
        self.pending_bytes -= ends_bytes;
        self.oldest_ms = now_ms;
        self.returned = self.pending.iter().any(|(end, ..)| end.ending == Ending::Returned);
        self.number += 1;
        let first = ends.first().map(|end| end.name.job);
        let job = first.filter(|job| ends.iter().all(|end| end.name.job == *job));
        let report = Report { worker: self.worker.clone(), incarnation: self.incarnation, number: self.number, ends };
        let bytes = wire::encode(&Record::Report(report)).into();
        let publish = Publish { number: self.number, bytes, job };
        self.in_flight =
            Some(InFlight { publish: publish.clone(), origins, ends_bytes, since_ms: now_ms, again_at_ms: None, retry_ms: RETRY_MS_MIN });
        Some(publish)
    }

    /// When [`Outbox::publish`] next has something, if nothing else happens.
    #[must_use]
    pub fn due_ms(&self, haste: Haste) -> Option<u64> {
        if let Some(flight) = &self.in_flight {
            return flight.again_at_ms;
        }
        if self.pending.is_empty() {
            return None;
        }
        let linger_ms = match haste {
            Haste::Now => 0,
            _ if REPORT_FIXED_BYTES + self.pending_bytes >= REPORT_BYTES_MAX => 0,
            Haste::Gather if !self.returned => self.linger_ms.max(GATHER_MS),
            Haste::Soon | Haste::Gather => self.linger_ms,
        };
        Some(self.oldest_ms.saturating_add(linger_ms))
    }

    /// When the report in flight was published first, if it is the one of this number.
    #[must_use]
    pub fn in_flight_since_ms(&self, number: u64) -> Option<u64> {
        self.in_flight.as_ref().filter(|flight| flight.publish.number == number).map(|flight| flight.since_ms)
    }

    /// The report is in the log. Returns whose ends are safe now.
    ///
    /// # Errors
    /// [`ReportError`] for an answer to an earlier repeat; nothing changes.
    pub fn acked(&mut self, number: u64, sequence: u64) -> Result<Vec<Origin>, ReportError> {
        match self.in_flight.take_if(|flight| flight.publish.number == number) {
            Some(flight) => {
                self.reported = self.reported.max(sequence);
                Ok(flight.origins)
            }
            None => Err(ReportError::NotInFlight { number }),
        }
    }

    /// The publish failed, or its fate is unknown: the same bytes go again, a little later.
    ///
    /// # Errors
    /// [`ReportError`] for an answer to an earlier repeat; nothing changes.
    pub fn failed(&mut self, now_ms: u64, number: u64) -> Result<(), ReportError> {
        match &mut self.in_flight {
            Some(flight) if flight.publish.number == number => {
                flight.again_at_ms = Some(now_ms.saturating_add(flight.retry_ms));
                flight.retry_ms = (flight.retry_ms * 2).min(RETRY_MS_MAX);
                Ok(())
            }
            _ => Err(ReportError::NotInFlight { number }),
        }
    }
}

/// At least as many bytes as the end takes in a report.
fn size_of_end(end: &AttemptEnd) -> usize {
    let tail = |stream: &Option<volley_jobspecs::wire::report::Stream>| stream.as_ref().map_or(0, |s| s.tail.len());
    END_FIXED_BYTES
        + end.message.as_ref().map_or(0, String::len)
        + end.result.as_ref().map_or(0, |result| result.len())
        + tail(&end.stdout)
        + tail(&end.stderr)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attempt::{Attempt, Outcome};
    use minicbor::bytes::ByteVec;
    use volley_jobspecs::ids::{AttemptName, BundleId, JobId};
    use volley_jobspecs::wire::plan::Isolation;
    use volley_jobspecs::wire::report::{Outputs, Stream, Usage};

    fn outbox() -> Outbox {
        Outbox::new(WorkerId::new("w").expect("a name"), Incarnation(1), 5)
    }

    fn end(index: u32, fat: bool) -> AttemptEnd {
        let name = AttemptName { job: JobId(u64::MAX), stage: u16::MAX, index, number: u32::MAX, sequence: u64::MAX };
        let mut outcome = Outcome::success();
        if fat {
            let stream = Stream { bytes: u64::MAX, tail: ByteVec::from(vec![0; 2_048]), stored: true, truncated: true };
            outcome.code = Some(i32::MIN);
            outcome.message = Some("m".repeat(2_048));
            outcome.usage = Some(Usage { cpu_us: u64::MAX, memory_bytes_max: u64::MAX });
            outcome.result = Some(vec![1; 4_096]);
            outcome.stdout = Some(stream.clone());
            outcome.stderr = Some(stream);
            outcome.outputs = Some(Outputs { files: u32::MAX, bytes: u64::MAX });
        }
        Attempt::begin(name, Isolation::Microvm, u64::MAX, 0, (1, 1)).end(u64::MAX, outcome)
    }

    fn origin(place: u16) -> Origin {
        Origin { bundle: BundleId { sequence: 1, place: 0 }, place }
    }

    #[test]
    fn a_report_is_never_larger_than_its_limit() {
        let mut outbox = outbox();
        for index in 0..100 {
            outbox.push(0, end(u32::MAX - index, true), origin(index as u16));
        }
        let mut seen = 0;
        while let Some(publish) = outbox.publish(10, Haste::Now) {
            assert!(publish.bytes.len() <= REPORT_BYTES_MAX, "{}", publish.bytes.len());
            seen += outbox.acked(publish.number, publish.number).expect("in flight").len();
        }
        assert_eq!(seen, 100);
        assert!(outbox.is_empty());
        assert_eq!(outbox.unsent_bytes(), 0);
    }

    #[test]
    fn a_busy_worker_gathers_and_one_with_an_idle_slot_does_not() {
        let mut outbox = outbox();
        outbox.push(100, end(0, false), origin(0));
        assert_eq!(outbox.due_ms(Haste::Now), Some(100));
        assert_eq!(outbox.due_ms(Haste::Soon), Some(105));
        assert_eq!(outbox.due_ms(Haste::Gather), Some(100 + GATHER_MS));
        outbox.set_linger(1_000);
        assert_eq!(outbox.due_ms(Haste::Gather), Some(1_100));
    }

    #[test]
    fn the_same_bytes_are_repeated_until_acked_and_later_ends_ride_in_the_next() {
        let mut outbox = outbox();
        outbox.push(0, end(0, false), origin(0));
        assert_eq!(outbox.publish(4, Haste::Soon), None);
        let first = outbox.publish(5, Haste::Soon).expect("the linger is over");
        outbox.push(6, end(1, false), origin(1));
        assert_eq!(outbox.publish(50, Haste::Soon), None);
        assert!(outbox.failed(50, first.number).is_ok());
        assert_eq!(outbox.publish(149, Haste::Soon), None);
        assert_eq!(outbox.publish(150, Haste::Soon), Some(first.clone()));
        assert_eq!(outbox.acked(first.number, 77).map(|o| o.len()), Ok(1));
        assert_eq!(outbox.acked(first.number, 78), Err(ReportError::NotInFlight { number: 1 }));
        assert_eq!(outbox.reported(), 77);
        let second = outbox.publish(200, Haste::Soon).expect("the next");
        assert_ne!(second.bytes, first.bytes);
    }

    #[test]
    fn what_is_forgotten_is_not_reported() {
        let mut outbox = outbox();
        outbox.push(0, end(0, false), origin(0));
        outbox.forget(BundleId { sequence: 1, place: 0 });
        assert_eq!(outbox.publish(100, Haste::Now), None);
        assert!(outbox.is_empty());
    }
}
