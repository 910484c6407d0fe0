//! The one retry rule: which answers end an operation, which are tried again, and for how long.
//!
//! Owns classification of SDK errors and the backoff. Does not know what any operation means; each
//! turns a [`Refusal`] into its own error.

use std::future::Future;
use std::time::Duration;

use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use backon::{BackoffBuilder, ExponentialBuilder, Retryable};
use tokio::time::Instant;

use crate::config::Retry;
use crate::connect::Store;
use crate::error::{Failure, Place};

/// An operation that was tried for this long is worth a word in the log: whoever looks there wonders why nothing moves.
const SAY_AFTER: Duration = Duration::from_secs(5);

/// How one operation ended without success.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// 404 for the key.
    NotFound,
    /// 404 for a multipart upload.
    NoSuchUpload,
    /// 412.
    Precondition,
    /// 416.
    BadRange,
    /// Everything the operations share.
    Failure(Failure),
}

/// What one run came to, and whether an earlier attempt of it may have reached the store unheard.
pub(crate) struct Run<T> {
    pub(crate) result: Result<T, Refusal>,
    /// True when an attempt before the last ended without an answer one can believe.
    pub(crate) ambiguous: bool,
}

/// One attempt's end, before anyone knows which operation it was.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// Ask again: the words are for the log and the final error.
    Again(String),
    /// The answer is final.
    Final(Verdict),
}

#[derive(Debug)]
pub(crate) enum Verdict {
    NotFound,
    NoBucket,
    NoSuchUpload,
    Precondition,
    BadRange,
    Denied { code: String, message: String },
    Rejected { status: u16, code: String, message: String },
}

impl Store {
    /// Runs `attempt` until it succeeds, is refused for good, or the budget is used up.
    /// `bytes` is what one attempt moves; it lengthens the attempt's time limit.
    pub(crate) async fn run<T, F, Fut>(&self, operation: &'static str, key: &str, bytes: u64, mut attempt: F) -> Run<T>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<T, Attempt>>,
    {
        let retry = self.retry();
        let limit = retry.attempt_limit(bytes);
        let started = Instant::now();
        let mut attempts = 0_u32;
        let mut said = false;
        let result = (|| {
            attempts += 1;
            let pending = attempt();
            async move {
                match tokio::time::timeout(limit, pending).await {
                    Ok(end) => end,
                    Err(_elapsed) => Err(Attempt::Again(format!("no answer within {} s", limit.as_secs()))),
                }
            }
        })
        .retry(FullJitter::new(retry, started))
        .sleep(tokio::time::sleep)
        .when(|end| matches!(end, Attempt::Again(_)))
        .notify(|end, pause| {
            tracing::debug!(operation, key, ?end, pause_ms = pause.as_millis() as u64, "s3: trying again");
            if let Attempt::Again(why) = end
                && started.elapsed() >= SAY_AFTER
                && !std::mem::replace(&mut said, true)
            {
                let (endpoint, budget_s) = (self.endpoint(), retry.budget.as_secs());
                tracing::warn!(operation, key, endpoint, "S3 does not do it yet ({why}); trying again for up to {budget_s} s");
            }
        })
        .await;

        Run { ambiguous: attempts > 1, result: result.map_err(|end| self.refusal(operation, key, end, attempts, started.elapsed())) }
    }

    fn refusal(&self, operation: &'static str, key: &str, end: Attempt, attempts: u32, waited: Duration) -> Refusal {
        let place = || Box::new(self.place(operation, key));
        match end {
            Attempt::Again(last) => Refusal::Failure(Failure::Unavailable { place: place(), attempts, waited, last }),
            Attempt::Final(verdict) => match verdict {
                Verdict::NotFound => Refusal::NotFound,
                Verdict::NoSuchUpload => Refusal::NoSuchUpload,
                Verdict::Precondition => Refusal::Precondition,
                Verdict::BadRange => Refusal::BadRange,
                Verdict::NoBucket => Refusal::Failure(Failure::NoBucket { place: place() }),
                Verdict::Denied { code, message } => Refusal::Failure(Failure::Denied { place: place(), code, message }),
                Verdict::Rejected { status, code, message } => {
                    Refusal::Failure(Failure::Rejected { place: place(), status, code, message })
                }
            },
        }
    }

    /// Names the place of an operation on `key` (relative to the prefix).
    pub(crate) fn place(&self, operation: &'static str, key: &str) -> Place {
        Place { operation, endpoint: self.endpoint().to_owned(), bucket: self.bucket().to_owned(), key: self.full_key(key) }
    }
}

impl Refusal {
    /// The shared failure in it; kinds that the operation does not expect are the store breaking the protocol.
    pub(crate) fn into_failure(self, place: Place) -> Failure {
        let rejected = |status, code: &str| Failure::Rejected {
            place: Box::new(place),
            status,
            code: code.to_owned(),
            message: "an answer that this operation should never get".to_owned(),
        };
        match self {
            Self::Failure(failure) => failure,
            Self::NotFound => rejected(404, "NoSuchKey"),
            Self::NoSuchUpload => rejected(404, "NoSuchUpload"),
            Self::Precondition => rejected(412, "PreconditionFailed"),
            Self::BadRange => rejected(416, "InvalidRange"),
        }
    }
}

/// What an SDK error means for the retry rule.
pub(crate) fn classify<E>(error: SdkError<E, HttpResponse>) -> Attempt
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    let words = || causes(&error);
    match &error {
        SdkError::TimeoutError(_) | SdkError::DispatchFailure(_) => Attempt::Again(words()),
        // The body broke off or was not what the protocol says: as good as no answer.
        SdkError::ResponseError(response) => match response.raw().status().as_u16() {
            status @ (401 | 403 | 404 | 412) => by_status(status, "", ""),
            _ => Attempt::Again(words()),
        },
        SdkError::ServiceError(service) => {
            let meta = service.err().meta();
            by_status(service.raw().status().as_u16(), meta.code().unwrap_or_default(), meta.message().unwrap_or_default())
        }
        _ => Attempt::Final(Verdict::Rejected { status: 0, code: "request not sent".to_owned(), message: words() }),
    }
}

/// An error and what caused it, in one line. (The SDK's own display of causes adds their debug form.)
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let text = next.to_string();
        // Many errors repeat their cause in their own words.
        if !words.ends_with(&text) {
            words = format!("{words}: {text}");
        }
        cause = next.source();
    }
    words
}

/// The table of answers. Codes first, since some stores give them with another status, or in a 200.
fn by_status(status: u16, code: &str, message: &str) -> Attempt {
    let message = if message.is_empty() { "no details given" } else { message };
    let passing = || Attempt::Again(format!("HTTP {status} {code}: {message}").replace(" :", ":"));
    let denied = || Verdict::Denied { code: non_empty(code, status), message: message.to_owned() };
    match code {
        "NoSuchBucket" => return Attempt::Final(Verdict::NoBucket),
        "NoSuchUpload" => return Attempt::Final(Verdict::NoSuchUpload),
        "NoSuchKey" | "NotFound" => return Attempt::Final(Verdict::NotFound),
        "PreconditionFailed" => return Attempt::Final(Verdict::Precondition),
        // Two conditional writes met; the store asks for another try and a later one gets a real answer.
        "ConditionalRequestConflict" | "OperationAborted" | "SlowDown" | "RequestTimeout" | "InternalError" | "ServiceUnavailable" => {
            return passing();
        }
        _ => {}
    }
    match status {
        401 | 403 => Attempt::Final(denied()),
        404 => Attempt::Final(Verdict::NotFound),
        412 => Attempt::Final(Verdict::Precondition),
        416 => Attempt::Final(Verdict::BadRange),
        501 => Attempt::Final(Verdict::Rejected { status, code: non_empty(code, status), message: message.to_owned() }),
        408 | 429 | 500.. => passing(),
        _ => Attempt::Final(Verdict::Rejected { status, code: non_empty(code, status), message: message.to_owned() }),
    }
}

fn non_empty(code: &str, status: u16) -> String {
    if code.is_empty() { format!("HTTP {status}") } else { code.to_owned() }
}

/// Pauses drawn evenly from zero to an exponentially growing bound, until the budget is used up.
/// backon's own jitter only adds to the delay; many workers that failed together would come back together.
struct FullJitter {
    bounds: <ExponentialBuilder as BackoffBuilder>::Backoff,
    deadline: Instant,
    seed: u64,
}

impl FullJitter {
    fn new(retry: &Retry, started: Instant) -> Self {
        let bounds = ExponentialBuilder::default()
            .with_min_delay(retry.backoff_first)
            .with_max_delay(retry.backoff_max)
            .with_factor(2.0)
            .without_max_times()
            .build();
        Self { bounds, deadline: started + retry.budget, seed: random_u64() }
    }
}

impl Iterator for FullJitter {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let bound = self.bounds.next()?;
        self.seed = splitmix64(self.seed);
        // 32 random bits are plenty for a pause, and keep the product exact.
        let share = f64::from((self.seed >> 32) as u32) / f64::from(u32::MAX);
        let pause = bound.mul_f64(share);
        (Instant::now() + pause < self.deadline).then_some(pause)
    }
}

fn splitmix64(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Random bits from the system. Without them a fixed value serves: they only spread pauses and name probes and temporary files.
pub(crate) fn random_u64() -> u64 {
    getrandom::u64().unwrap_or(0x5EED)
}

/// A tag of 128 random bits, in hex.
pub(crate) fn random_tag() -> String {
    format!("{:016x}{:016x}", random_u64(), random_u64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_errors_end_and_server_errors_do_not() {
        for status in [400, 401, 403, 404, 405, 409, 411, 412, 416, 501] {
            assert!(matches!(by_status(status, "", ""), Attempt::Final(_)), "{status}");
        }
        for status in [408, 429, 500, 502, 503, 504, 507] {
            assert!(matches!(by_status(status, "", ""), Attempt::Again(_)), "{status}");
        }
        assert!(matches!(by_status(409, "ConditionalRequestConflict", ""), Attempt::Again(_)));
        assert!(matches!(by_status(404, "NoSuchBucket", ""), Attempt::Final(Verdict::NoBucket)));
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_are_spread_and_stop_at_the_budget() {
        let retry = Retry::default();
        let started = Instant::now();
        let mut longest = Duration::ZERO;
        let mut count = 0;
        for pause in FullJitter::new(&retry, started) {
            assert!(pause <= retry.backoff_max);
            longest = longest.max(pause);
            count += 1;
            tokio::time::advance(pause).await;
            assert!(count < 10_000, "the budget must end it");
        }
        assert!(started.elapsed() <= retry.budget);
        assert!(longest > retry.backoff_first, "it grew");
        assert!(count > 8, "{count} tries in a minute");
    }
}
