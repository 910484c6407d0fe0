//! The trace of a job: the W3C `traceparent`, version 00, the ids of the spans below it, and which attempts are worth a span.
//!
//! Owns reading and writing the header's text, strictly, and ids and choices that every process must come to alike. Pure: whoever
//! begins a trace brings the random bytes. Does not own what a span says (`observe`) or sending it.

use std::fmt;
use std::str::FromStr;

use crate::backoff::splitmix64;
use crate::ids::{AttemptName, JobId};

/// Name of the header that carries a trace context, in HTTP and in NATS.
pub const HEADER: &str = "traceparent";
/// One in so many successful attempts is kept; failed ones always are. A job of a million tasks still leaves 10,000 to compare.
pub const KEPT_ONE_IN: u64 = 100;

/// Length of a `traceparent` of version 00, in bytes: `00-`, 32 digits, `-`, 16 digits, `-`, 2 digits.
const TEXT_BYTES: usize = 55;
/// The flag that says that the caller may have recorded the trace.
const SAMPLED: u8 = 1;

/// Where in which trace something belongs: a trace, and the span that is the parent of what comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    trace: [u8; 16],
    span: [u8; 8],
    sampled: bool,
}

/// Why a text is no `traceparent`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no traceparent; one looks like 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01, in lower case, no id all zero")]
pub struct TraceError(String);

impl TraceContext {
    /// A context of these ids, big end first; none when one of them is all zero, which the standard forbids.
    #[must_use]
    pub fn new(trace: [u8; 16], span: [u8; 8], sampled: bool) -> Option<Self> {
        (trace != [0; 16] && span != [0; 8]).then_some(Self { trace, span, sampled })
    }

    /// The trace's id.
    #[must_use]
    pub fn trace(&self) -> [u8; 16] {
        self.trace
    }

    /// The span's id.
    #[must_use]
    pub fn span(&self) -> [u8; 8] {
        self.span
    }

    /// Is the trace recorded?
    #[must_use]
    pub fn sampled(&self) -> bool {
        self.sampled
    }

    /// The trace's id as people look it up: 32 hexadecimal digits.
    #[must_use]
    pub fn trace_id(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.trace))
    }

    /// The same, recorded or not.
    #[must_use]
    pub fn with_sampled(self, sampled: bool) -> Self {
        Self { sampled, ..self }
    }

    /// Another span of the same trace; none when its id is all zero.
    #[must_use]
    pub fn child(&self, span: [u8; 8]) -> Option<Self> {
        Self::new(self.trace, span, self.sampled)
    }

    /// The span below this one that `salt` names. Whoever computes it comes to the same id, so that a span sent twice is the same
    /// span, and a worker knows its parent's id before the parent has ended.
    #[must_use]
    pub fn derived(&self, salt: &[u64]) -> Self {
        let trace = u128::from_be_bytes(self.trace);
        let begin = [(trace >> 64) as u64, trace as u64, u64::from_be_bytes(self.span)];
        // Zero is no id.
        Self { span: mixed(begin.iter().chain(salt)).max(1).to_be_bytes(), ..*self }
    }

    /// The span of a job, below that of its submit.
    #[must_use]
    pub fn of_job(&self, job: JobId) -> Self {
        self.derived(&[job.0])
    }

    /// The span of an attempt, below that of its job.
    #[must_use]
    pub fn of_attempt(&self, name: &AttemptName) -> Self {
        self.derived(&[u64::from(name.stage), name.index.into(), name.number.into(), name.sequence])
    }
}

fn mixed<'a>(words: impl Iterator<Item = &'a u64>) -> u64 {
    words.fold(0, |hash, word| splitmix64(hash ^ *word))
}

/// Is a successful attempt one of those that are kept? The same for everybody who asks: by job, task and number.
#[must_use]
pub fn is_kept(job: JobId, index: u32, number: u32) -> bool {
    mixed([job.0, index.into(), number.into()].iter()).is_multiple_of(KEPT_ONE_IN)
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace, span) = (u128::from_be_bytes(self.trace), u64::from_be_bytes(self.span));
        write!(f, "00-{trace:032x}-{span:016x}-{:02x}", u8::from(self.sampled))
    }
}

impl FromStr for TraceContext {
    type Err = TraceError;

    fn from_str(text: &str) -> Result<Self, TraceError> {
        read(text).ok_or_else(|| TraceError(text.chars().take(2 * TEXT_BYTES).collect()))
    }
}

fn read(text: &str) -> Option<TraceContext> {
    let lower_hex = |part: &&str| part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if text.len() != TEXT_BYTES {
        return None;
    }
    let mut parts = text.split('-');
    let mut part = |digits: usize| parts.next().filter(|part| part.len() == digits).filter(lower_hex);
    let (version, trace, span, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
    if version != "00" {
        return None;
    }
    let trace = u128::from_str_radix(trace, 16).ok()?.to_be_bytes();
    let span = u64::from_str_radix(span, 16).ok()?.to_be_bytes();
    // Flags that are not known yet are ignored, and not handed on.
    TraceContext::new(trace, span, u8::from_str_radix(flags, 16).ok()? & SAMPLED != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn context() -> TraceContext {
        TEXT.parse().unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn a_context_is_read_and_written_alike() {
        let context = context();
        assert_eq!(context.to_string(), TEXT);
        assert_eq!(context.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(context.sampled());
        let with_later_flags = TEXT.replace("-01", "-fe").parse::<TraceContext>();
        assert_eq!(with_later_flags.map(|context| context.to_string()), Ok(TEXT.replace("-01", "-00")));
        assert_eq!(context.child([1; 8]).map(|child| child.to_string()), Some(TEXT.replace("00f067aa0ba902b7", "0101010101010101")));
        assert_eq!(context.child([0; 8]), None);
    }

    #[test]
    fn what_the_standard_forbids_is_refused() {
        let bad = [
            "".to_owned(),
            TEXT.to_uppercase(),
            format!("{TEXT}-00"),
            TEXT[..54].to_owned(),
            format!(" {}", &TEXT[..54]),
            TEXT.replace("00-4b", "ff-4b"),
            TEXT.replace("00-4b", "01-4b"),
            TEXT.replace('-', "_"),
            TEXT.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            TEXT.replace("00f067aa0ba902b7", &"0".repeat(16)),
            TEXT.replace("4bf9", "+bf9"),
            TEXT.replace("4bf92", "4b-92"),
            TEXT.replace("4bf9", "é4b"),
        ];
        for text in bad {
            assert!(text.parse::<TraceContext>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_same_span_has_the_same_id_and_others_have_others() {
        let job = context().of_job(JobId(7));
        assert_eq!(job, context().of_job(JobId(7)));
        let name = |index, number| AttemptName { job: JobId(7), stage: 0, index, number, sequence: 9 };
        let spans = [
            context(),
            job,
            context().of_job(JobId(8)),
            job.of_attempt(&name(0, 1)),
            job.of_attempt(&name(1, 0)),
            job.of_attempt(&name(1, 1)),
        ];
        let ids: std::collections::BTreeSet<_> = spans.iter().map(TraceContext::span).collect();
        assert_eq!(ids.len(), spans.len());
        assert!(spans.iter().all(|span| span.trace() == context().trace() && span.sampled()));
    }

    #[test]
    fn one_success_in_a_hundred_is_kept_whatever_is_counted_on() {
        let near = |kept: usize| (880..=1_120).contains(&kept);
        assert!(near((0..100_000).filter(|index| is_kept(JobId(2), *index, 1)).count()));
        assert!(near((0..100_000).filter(|job| is_kept(JobId(*job), 0, 1)).count()));
        assert!(near((0..100_000).filter(|number| is_kept(JobId(2), 0, *number)).count()));
    }

    proptest! {
        #[test]
        fn every_context_survives_its_text(trace: [u8; 16], span: [u8; 8], sampled: bool) {
            if let Some(context) = TraceContext::new(trace, span, sampled) {
                prop_assert_eq!(context.to_string().parse(), Ok(context));
            }
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,60}") {
            if let Ok(context) = text.parse::<TraceContext>() {
                prop_assert_eq!(context.to_string().len(), TEXT_BYTES);
            }
        }
    }
}
