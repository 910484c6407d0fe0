//! Numbers for eyes.
//!
//! Owns how times and ages are shown. Does not own sizes and cores (`volley_jobspecs::units`) or reading them
//! (`volley_jobspecs::spec::scalars`).

use jiff::Timestamp;
use volley_jobspecs::spec::scalars::Scalar;
pub use volley_jobspecs::units::{bytes, cores};

/// Milliseconds in two units at most: `340ms`, `4.2s`, `1m05s`, `2h10m`, `3d4h`.
#[must_use]
pub fn time(ms: u64) -> String {
    let seconds = ms / 1_000;
    match seconds {
        0 => format!("{ms}ms"),
        1..10 => format!("{seconds}.{}s", ms % 1_000 / 100),
        10..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d{}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// Whole seconds, for what is only known to a second: `<1s`, `4s`, `1m05s`.
#[must_use]
pub fn seconds(seconds: u64) -> String {
    match seconds {
        0 => "<1s".to_owned(),
        1..10 => format!("{seconds}s"),
        _ => time(seconds.saturating_mul(1_000)),
    }
}

/// How long ago an RFC 3339 instant was, to a second; the text itself when it isn't one.
#[must_use]
pub fn age(instant: &str, now: Timestamp) -> String {
    between(instant, now).unwrap_or_else(|| instant.to_owned())
}

/// From one instant to another, or to now when there is no other yet; to a second, as the cluster's clock is.
#[must_use]
pub fn span(from: Option<&str>, to: Option<&str>, now: Timestamp) -> String {
    let to = to.and_then(|to| to.parse().ok()).unwrap_or(now);
    from.and_then(|from| between(from, to)).unwrap_or_default()
}

fn between(from: &str, to: Timestamp) -> Option<String> {
    let from: Timestamp = from.parse().ok()?;
    // A clock that is behind the cluster's shows none, not a negative age.
    let ms = u64::try_from(to.as_millisecond().saturating_sub(from.as_millisecond())).unwrap_or(0);
    Some(seconds(ms / 1_000))
}

/// Reads an argument as a spec would: durations, sizes, cores.
///
/// # Errors
/// What is allowed.
pub fn scalar<T: Scalar>(text: &str) -> Result<T, String> {
    T::read(&serde_json::Value::String(text.to_owned())).map_err(|error| format!("{error}; allowed: {}", T::ALLOWED))
}

/// Reads `key=value`.
///
/// # Errors
/// When there is no `=` or no key.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("it should be KEY=VALUE".to_owned()),
    }
}

/// Reads `name=file`.
///
/// # Errors
/// When there is no `=`, no name or no file.
pub fn named_file(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, file)) if !name.is_empty() && !file.is_empty() => Ok((name.to_owned(), file.to_owned())),
        _ => Err("it should be NAME=FILE: the name that the spec has, and a local file".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::spec::{ByteSize, DurationMs};

    use super::*;

    #[test]
    fn times_have_two_units_at_most() {
        let got: Vec<String> = [0, 340, 4_250, 59_999, 65_000, 7_800_000, 273_600_000].into_iter().map(time).collect();
        assert_eq!(got, ["0ms", "340ms", "4.2s", "59s", "1m05s", "2h10m", "3d4h"]);
    }

    #[test]
    fn ages_are_never_negative_and_spans_end_now_when_they_have_not_ended() {
        let now: Timestamp = "2026-01-01T00:01:05Z".parse().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(age("2026-01-01T00:00:00Z", now), "1m05s");
        assert_eq!(age("2026-01-02T00:00:00Z", now), "<1s");
        assert_eq!(age("?", now), "?");
        assert_eq!(span(Some("2026-01-01T00:00:00Z"), None, now), "1m05s");
        assert_eq!(span(Some("2026-01-01T00:00:00Z"), Some("2026-01-01T00:00:02Z"), now), "2s");
        let ticks = ("2026-01-01T00:00:00.020Z", "2026-01-01T00:00:01.021Z");
        assert_eq!(span(Some(ticks.0), Some(ticks.0), now), "<1s", "a job within one tick of the cluster's clock");
        assert_eq!(span(Some(ticks.0), Some(ticks.1), now), "1s");
        assert_eq!(span(None, None, now), "");
    }

    #[test]
    fn arguments_are_read_as_specs_are() {
        assert_eq!(scalar::<DurationMs>("1h30m").map(|d| d.0), Ok(5_400_000));
        assert!(scalar::<ByteSize>("5").is_err_and(|text| text.contains("allowed: a number and a unit")));
        assert_eq!(pair("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(pair("=b").is_err() && pair("a").is_err());
        assert_eq!(named_file("tool=./a=b"), Ok(("tool".into(), "./a=b".into())));
        assert!(named_file("script").is_err_and(|text| text.contains("NAME=FILE")) && named_file("a=").is_err());
    }
}
