//! Values of a spec that are written as text with a unit: durations, sizes, CPUs, rates, failure limits, exit codes, signals.
//!
//! Owns their text forms, both ways, and their JSON Schema. Does not own which values a field allows (`validate`). Arithmetic is
//! whole-number: what is read is exact or refused.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};

/// Longest duration, in milliseconds: ten years. Longer is a slip, and sums of a few stay far from overflow.
pub const DURATION_MS_MAX: u64 = 10 * 365 * 24 * 60 * 60 * 1000;
/// Largest size, in bytes: 1 PiB, beyond any one host.
pub const SIZE_BYTES_MAX: u64 = 1 << 50;
/// Most CPUs of one task, in thousandths: 1,024 cores, beyond any one host.
pub const CPUS_MILLI_MAX: u32 = 1_024_000;
/// Longest text of a scalar that is looked at, in bytes.
const TEXT_LEN_MAX: usize = 64;

/// Why a value is not what its field holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScalarError {
    /// Another JSON type.
    #[error("wrong type")]
    Type,
    /// No text, or far too much of it.
    #[error("not a value with a unit")]
    Shape,
    /// A number stands alone.
    #[error("the unit is missing")]
    NoUnit,
    /// The unit isn't one of ours.
    #[error("unknown unit")]
    UnknownUnit,
    /// It isn't a whole number of the smallest unit.
    #[error("more precise than the smallest unit")]
    NotWhole,
    /// Above the limit.
    #[error("too large")]
    TooLarge,
    /// Zero or less where only more makes sense.
    #[error("too small")]
    TooSmall,
    /// No such signal.
    #[error("no such signal")]
    NoSignal,
}

/// A value with its own text form.
pub trait Scalar: Sized {
    /// `format` in the schema; the checker finds the reader by it.
    const FORMAT: &'static str;
    /// What is allowed, in words.
    const ALLOWED: &'static str;
    /// A regular expression for its text form, for editors; the reader is stricter.
    const PATTERN: &'static str;
    /// The JSON types it may be written in.
    const TYPES: &'static [&'static str];

    /// Reads it.
    ///
    /// # Errors
    /// [`ScalarError`] says what is wrong with the value.
    fn read(value: &Value) -> Result<Self, ScalarError>;

    /// Writes it in its shortest exact form.
    fn write(&self) -> Value;
}

macro_rules! scalar_serde {
    ($name:ident, $description:literal, $example:expr) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.write().serialize(serializer)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let value = Value::deserialize(deserializer)?;
                Self::read(&value).map_err(|e| {
                    serde::de::Error::custom(format_args!("{e}: {value}; allowed: {}", <Self as Scalar>::ALLOWED))
                })
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                let types = match <Self as Scalar>::TYPES {
                    [one] => json!(one),
                    many => json!(many),
                };
                json_schema!({
                    "description": $description,
                    "type": types,
                    "format": <Self as Scalar>::FORMAT,
                    "pattern": <Self as Scalar>::PATTERN,
                    "examples": [$example],
                })
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.write() {
                    Value::String(text) => f.write_str(&text),
                    other => write!(f, "{other}"),
                }
            }
        }
    };
}

/// A duration in whole milliseconds, at most ten years.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DurationMs(pub u64);

/// Unit names with their length in milliseconds, longest first.
const DURATION_UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

impl Scalar for DurationMs {
    const FORMAT: &'static str = "volley-duration";
    const ALLOWED: &'static str = "a number and a unit (ms, s, m, h, d), such as \"1500ms\", \"30s\", \"1h30m\", at most 3650d";
    const PATTERN: &'static str = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$";
    const TYPES: &'static [&'static str] = &["string"];

    fn read(value: &Value) -> Result<Self, ScalarError> {
        let text = text_of(value)?;
        let mut rest = text;
        let mut total = 0u64;
        while !rest.is_empty() {
            let (part, after) = quantity(rest, &DURATION_UNITS)?;
            total = total.saturating_add(part);
            rest = after;
        }
        if total > DURATION_MS_MAX { Err(ScalarError::TooLarge) } else { Ok(Self(total)) }
    }

    fn write(&self) -> Value {
        with_unit(self.0, &DURATION_UNITS, "s").into()
    }
}
scalar_serde!(
    DurationMs,
    "A duration: a number and a unit (ms, s, m, h, d), such as \"1500ms\", \"30s\", \"5m\", \"1h30m\", \"2d\". At most 3650d.",
    "30s"
);

/// A size in bytes, at most 1 PiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// Unit names with their bytes. The names of a power come after the name it is printed with.
const SIZE_UNITS: [(&str, u64); 17] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("B", 1),
    ("Ti", 1 << 40),
    ("Gi", 1 << 30),
    ("Mi", 1 << 20),
    ("Ki", 1 << 10),
    ("T", 1_000_000_000_000),
    ("G", 1_000_000_000),
    ("M", 1_000_000),
    ("K", 1_000),
];

impl Scalar for ByteSize {
    const FORMAT: &'static str = "volley-size";
    const ALLOWED: &'static str =
        "a number and a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB; \"Mi\" is \"MiB\"), such as \"512MiB\", at most 1024TiB";
    const PATTERN: &'static str = r"^[0-9]+(\.[0-9]+)?([KMGT]i?B?|B)$";
    const TYPES: &'static [&'static str] = &["string"];

    fn read(value: &Value) -> Result<Self, ScalarError> {
        let (bytes, rest) = quantity(text_of(value)?, &SIZE_UNITS)?;
        match (rest.is_empty(), bytes) {
            (false, _) => Err(ScalarError::Shape),
            (true, bytes) if bytes > SIZE_BYTES_MAX => Err(ScalarError::TooLarge),
            (true, bytes) => Ok(Self(bytes)),
        }
    }

    fn write(&self) -> Value {
        with_unit(self.0, &SIZE_UNITS[..9], "B").into()
    }
}
scalar_serde!(
    ByteSize,
    "A size: a number and a unit. B, KB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in 1024s; \"512Mi\" is \"512MiB\".",
    "512MiB"
);

/// CPUs in thousandths of a core, at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MilliCpus(pub u32);

impl Scalar for MilliCpus {
    const FORMAT: &'static str = "volley-cpus";
    const ALLOWED: &'static str = "a number of cores such as 2 or 0.5, or thousandths such as \"500m\"; 0.001 to 1024";
    const PATTERN: &'static str = r"^[0-9]+(\.[0-9]+)?m?$";
    const TYPES: &'static [&'static str] = &["number", "string"];

    fn read(value: &Value) -> Result<Self, ScalarError> {
        let milli = match value {
            Value::Number(number) => decimal(&number.to_string(), 1_000)?,
            Value::String(text) => match text.strip_suffix('m') {
                Some(milli) => decimal(bounded(milli)?, 1)?,
                None => decimal(bounded(text)?, 1_000)?,
            },
            _ => return Err(ScalarError::Type),
        };
        match u32::try_from(milli) {
            Ok(0) => Err(ScalarError::TooSmall),
            Ok(milli) if milli <= CPUS_MILLI_MAX => Ok(Self(milli)),
            _ => Err(ScalarError::TooLarge),
        }
    }

    fn write(&self) -> Value {
        if self.0.is_multiple_of(1_000) { (self.0 / 1_000).into() } else { format!("{}m", self.0).into() }
    }
}
scalar_serde!(
    MilliCpus,
    "CPUs: a number of cores such as 2 or 0.5, or thousandths of one as text, such as \"500m\". From 0.001 to 1024.",
    1
);

/// What a bound is multiplied with, in thousandths, 1,000 to 100,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Factor(pub u32);

impl Scalar for Factor {
    const FORMAT: &'static str = "volley-factor";
    const ALLOWED: &'static str = "a number from 1 to 100 with at most three decimals, such as 2 or 1.5";
    const PATTERN: &'static str = ".*";
    const TYPES: &'static [&'static str] = &["number"];

    fn read(value: &Value) -> Result<Self, ScalarError> {
        let Value::Number(number) = value else { return Err(ScalarError::Type) };
        match decimal(&number.to_string(), 1_000)? {
            0..1_000 => Err(ScalarError::TooSmall),
            milli @ 1_000..=100_000 => Ok(Self(milli as u32)),
            _ => Err(ScalarError::TooLarge),
        }
    }

    fn write(&self) -> Value {
        if self.0.is_multiple_of(1_000) { (self.0 / 1_000).into() } else { (f64::from(self.0) / 1_000.0).into() }
    }
}
scalar_serde!(Factor, "A factor: a number from 1 to 100 with at most three decimals.", 2);

/// At most `count` starts in any span of `per`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TaskRate {
    /// Starts, at least 1.
    pub count: u32,
    /// The span.
    pub per: RateSpan,
}

/// The spans a rate is given for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RateSpan {
    /// `/s`
    Second,
    /// `/m`
    Minute,
    /// `/h`
    Hour,
}

impl RateSpan {
    /// Its length in milliseconds.
    #[must_use]
    pub fn ms(self) -> u64 {
        match self {
            Self::Second => 1_000,
            Self::Minute => 60_000,
            Self::Hour => 3_600_000,
        }
    }
}

impl Scalar for TaskRate {
    const FORMAT: &'static str = "volley-rate";
    const ALLOWED: &'static str = "a whole number per second, minute or hour, such as \"100/s\", \"30/m\", \"500/h\"; 1 to 1000000";
    const PATTERN: &'static str = "^[0-9]+/[smh]$";
    const TYPES: &'static [&'static str] = &["string"];

    fn read(value: &Value) -> Result<Self, ScalarError> {
        let (count, span) = text_of(value)?.split_once('/').ok_or(ScalarError::NoUnit)?;
        let per = match span {
            "s" => RateSpan::Second,
            "m" => RateSpan::Minute,
            "h" => RateSpan::Hour,
            _ => return Err(ScalarError::UnknownUnit),
        };
        match decimal(count, 1)? {
            0 => Err(ScalarError::TooSmall),
            count @ 1..=1_000_000 => Ok(Self { count: count as u32, per }),
            _ => Err(ScalarError::TooLarge),
        }
    }

    fn write(&self) -> Value {
        let per = match self.per {
            RateSpan::Second => 's',
            RateSpan::Minute => 'm',
            RateSpan::Hour => 'h',
        };
        format!("{}/{per}", self.count).into()
    }
}
scalar_serde!(
    TaskRate,
    "A rate of task starts: a whole number per second, minute or hour, such as \"100/s\", \"30/m\", \"500/h\".",
    "100/s"
);

/// How many tasks may fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureLimit {
    /// This many.
    Count(u32),
    /// This share of all tasks, in hundredths of a percent (500 is 5 %), 1 to 10,000.
    Share(u32),
}

impl FailureLimit {
    /// The limit as a number of tasks of `tasks`: a share is rounded down, so that "5%" of 19 tasks allows none.
    #[must_use]
    pub fn of(self, tasks: u32) -> u32 {
        match self {
            Self::Count(count) => count,
            Self::Share(share) => u32::try_from(u64::from(tasks) * u64::from(share) / 10_000).unwrap_or(u32::MAX),
        }
    }
}

impl Scalar for FailureLimit {
    const FORMAT: &'static str = "volley-failure-limit";
    const ALLOWED: &'static str = "a whole number of tasks such as 10, or a share of all such as \"5%\" (0.01% to 100%)";
    const PATTERN: &'static str = r"^[0-9]+(\.[0-9]+)?%$";
    const TYPES: &'static [&'static str] = &["integer", "string"];

    fn read(value: &Value) -> Result<Self, ScalarError> {
        match value {
            Value::Number(number) => {
                let count = decimal(&number.to_string(), 1)?;
                u32::try_from(count).map(Self::Count).map_err(|_| ScalarError::TooLarge)
            }
            Value::String(text) => {
                let share = bounded(text)?.strip_suffix('%').ok_or(ScalarError::NoUnit)?;
                match decimal(share, 100)? {
                    0 => Err(ScalarError::TooSmall),
                    share @ 1..=10_000 => Ok(Self::Share(share as u32)),
                    _ => Err(ScalarError::TooLarge),
                }
            }
            _ => Err(ScalarError::Type),
        }
    }

    fn write(&self) -> Value {
        match *self {
            Self::Count(count) => count.into(),
            Self::Share(share) if share % 100 == 0 => format!("{}%", share / 100).into(),
            Self::Share(share) if share % 10 == 0 => format!("{}.{}%", share / 100, share % 100 / 10).into(),
            Self::Share(share) => format!("{}.{:02}%", share / 100, share % 100).into(),
        }
    }
}
scalar_serde!(
    FailureLimit,
    "A limit of failed tasks: a whole number such as 10, or a share of all tasks such as \"5%\" (rounded down).",
    "5%"
);

/// How long something is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// This long after the job ended.
    For(DurationMs),
    /// Until somebody removes it.
    Forever,
}

impl Scalar for Keep {
    const FORMAT: &'static str = "volley-keep";
    const ALLOWED: &'static str = "a duration such as \"30d\" or \"12h\", or \"forever\"";
    const PATTERN: &'static str = r"^(forever|([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+)$";
    const TYPES: &'static [&'static str] = &["string"];

    fn read(value: &Value) -> Result<Self, ScalarError> {
        if value == "forever" { Ok(Self::Forever) } else { DurationMs::read(value).map(Self::For) }
    }

    fn write(&self) -> Value {
        match self {
            Self::For(duration) => duration.write(),
            Self::Forever => "forever".into(),
        }
    }
}
scalar_serde!(Keep, "How long something is kept after the job ended: a duration such as \"30d\", or \"forever\".", "30d");

/// Exit codes, an inclusive range within 1 to 255.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExitCodes {
    /// The lowest.
    pub from: u8,
    /// The highest.
    pub to: u8,
}

impl Scalar for ExitCodes {
    const FORMAT: &'static str = "volley-exit-codes";
    const ALLOWED: &'static str = "an exit code from 1 to 255, or a range such as \"64-78\"";
    const PATTERN: &'static str = "^[0-9]+-[0-9]+$";
    const TYPES: &'static [&'static str] = &["integer", "string"];

    fn read(value: &Value) -> Result<Self, ScalarError> {
        let code = |text: &str| match decimal(text, 1)? {
            0 => Err(ScalarError::TooSmall),
            code @ 1..=255 => Ok(code as u8),
            _ => Err(ScalarError::TooLarge),
        };
        match value {
            Value::Number(number) => code(&number.to_string()).map(|code| Self { from: code, to: code }),
            Value::String(text) => {
                let (from, to) = bounded(text)?.split_once('-').ok_or(ScalarError::Shape)?;
                let (from, to) = (code(from)?, code(to)?);
                if from <= to { Ok(Self { from, to }) } else { Err(ScalarError::TooSmall) }
            }
            _ => Err(ScalarError::Type),
        }
    }

    fn write(&self) -> Value {
        if self.from == self.to { self.from.into() } else { format!("{}-{}", self.from, self.to).into() }
    }
}
scalar_serde!(ExitCodes, "An exit code from 1 to 255, or an inclusive range of them as text, such as \"64-78\".", 75);

/// A signal, by its Linux number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signal(pub u8);

/// Names of the Linux signals 1 to 31; the real-time ones (to 64) are written as numbers.
const SIGNAL_NAMES: [&str; 31] = [
    "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGUSR1", "SIGSEGV", "SIGUSR2",
    "SIGPIPE", "SIGALRM", "SIGTERM", "SIGSTKFLT", "SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGXCPU",
    "SIGXFSZ", "SIGVTALRM", "SIGPROF", "SIGWINCH", "SIGIO", "SIGPWR", "SIGSYS",
];

impl Scalar for Signal {
    const FORMAT: &'static str = "volley-signal";
    const ALLOWED: &'static str = "a signal by name, such as \"SIGSEGV\", or by number, 1 to 64";
    const PATTERN: &'static str = "^[A-Z0-9]+$";
    const TYPES: &'static [&'static str] = &["integer", "string"];

    fn read(value: &Value) -> Result<Self, ScalarError> {
        match value {
            Value::Number(number) => match decimal(&number.to_string(), 1)? {
                signal @ 1..=64 => Ok(Self(signal as u8)),
                _ => Err(ScalarError::NoSignal),
            },
            Value::String(text) => (1u8..)
                .zip(SIGNAL_NAMES)
                .find(|(_, name)| name == text || name.strip_prefix("SIG") == Some(text))
                .map(|(number, _)| Self(number))
                .ok_or(ScalarError::NoSignal),
            _ => Err(ScalarError::Type),
        }
    }

    fn write(&self) -> Value {
        match SIGNAL_NAMES.get(usize::from(self.0).wrapping_sub(1)) {
            Some(name) => (*name).into(),
            None => self.0.into(),
        }
    }
}
scalar_serde!(Signal, "A signal: its name such as \"SIGSEGV\" or \"SEGV\", or its Linux number from 1 to 64.", "SIGSEGV");

/// Reads a value by the schema's `format`. `None`: no format of ours. `Some(Err)`: the reason and what is allowed.
#[must_use]
pub fn check_format(format: &str, value: &Value) -> Option<Result<(), (ScalarError, &'static str)>> {
    fn check<T: Scalar>(value: &Value) -> Option<Result<(), (ScalarError, &'static str)>> {
        Some(T::read(value).map(|_| ()).map_err(|e| (e, T::ALLOWED)))
    }
    match format {
        DurationMs::FORMAT => check::<DurationMs>(value),
        ByteSize::FORMAT => check::<ByteSize>(value),
        MilliCpus::FORMAT => check::<MilliCpus>(value),
        Factor::FORMAT => check::<Factor>(value),
        TaskRate::FORMAT => check::<TaskRate>(value),
        FailureLimit::FORMAT => check::<FailureLimit>(value),
        Keep::FORMAT => check::<Keep>(value),
        ExitCodes::FORMAT => check::<ExitCodes>(value),
        Signal::FORMAT => check::<Signal>(value),
        _ => None,
    }
}

fn text_of(value: &Value) -> Result<&str, ScalarError> {
    bounded(value.as_str().ok_or(ScalarError::Type)?)
}

fn bounded(text: &str) -> Result<&str, ScalarError> {
    if text.is_empty() || text.len() > TEXT_LEN_MAX { Err(ScalarError::Shape) } else { Ok(text) }
}

/// Reads one number with a unit from the front of `text`; returns its worth in the smallest unit and the rest.
fn quantity<'a>(text: &'a str, units: &[(&str, u64)]) -> Result<(u64, &'a str), ScalarError> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, rest) = text.split_at(digits);
    if number.is_empty() {
        return Err(ScalarError::Shape);
    }
    let letters = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(letters);
    if unit.is_empty() {
        return Err(if rest.is_empty() { ScalarError::NoUnit } else { ScalarError::Shape });
    }
    let worth = units.iter().find(|(name, _)| *name == unit).map(|(_, worth)| *worth).ok_or(ScalarError::UnknownUnit)?;
    Ok((decimal(number, worth)?, rest))
}

/// `text` (decimal digits with at most one point) times `scale`, exactly.
fn decimal(text: &str, scale: u64) -> Result<u64, ScalarError> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return Err(if text.starts_with('-') { ScalarError::TooSmall } else { ScalarError::Shape });
    }
    let fraction = fraction.trim_end_matches('0');
    // Three digits more than any unit of ours can use are a slip, not a value.
    if fraction.len() > 15 {
        return Err(ScalarError::NotWhole);
    }
    let whole: u128 = whole.parse().map_err(|_| ScalarError::TooLarge)?;
    let power = 10u128.pow(fraction.len() as u32);
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| ScalarError::TooLarge)? };
    let scaled = part * u128::from(scale);
    if !scaled.is_multiple_of(power) {
        return Err(ScalarError::NotWhole);
    }
    let total = whole.saturating_mul(u128::from(scale)).saturating_add(scaled / power);
    u64::try_from(total).map_err(|_| ScalarError::TooLarge)
}

/// `amount` with the largest unit it is a whole number of; zero gets `zero_unit`.
fn with_unit(amount: u64, units: &[(&str, u64)], zero_unit: &str) -> String {
    match units.iter().find(|(_, worth)| amount != 0 && amount.is_multiple_of(*worth)) {
        Some((unit, worth)) => format!("{}{unit}", amount / worth),
        None => format!("{amount}{zero_unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn duration(text: &str) -> Result<u64, ScalarError> {
        DurationMs::read(&json!(text)).map(|d| d.0)
    }

    #[test]
    fn durations_are_exact_or_refused() {
        for (text, ms) in [("1500ms", 1500), ("30s", 30_000), ("1.5h", 5_400_000), ("1h30m", 5_400_000), ("2d", 172_800_000)] {
            assert_eq!(duration(text), Ok(ms), "{text}");
        }
        for (text, error) in [
            ("", ScalarError::Shape),
            ("5", ScalarError::NoUnit),
            ("5 m", ScalarError::Shape),
            ("5min", ScalarError::UnknownUnit),
            ("0.5ms", ScalarError::NotWhole),
            ("-5s", ScalarError::Shape),
            ("99999d", ScalarError::TooLarge),
            ("1.2.3s", ScalarError::Shape),
            ("99999999999999999999999999999999999999999s", ScalarError::TooLarge),
        ] {
            assert_eq!(duration(text), Err(error), "{text}");
        }
    }

    #[test]
    fn sizes_know_both_kinds_of_unit() {
        for (text, bytes) in [("512Mi", 512 << 20), ("2GiB", 2 << 30), ("1GB", 1_000_000_000), ("1.5KiB", 1536), ("7B", 7)] {
            assert_eq!(ByteSize::read(&json!(text)), Ok(ByteSize(bytes)), "{text}");
        }
        assert_eq!(ByteSize::read(&json!(512)), Err(ScalarError::Type));
        assert_eq!(ByteSize::read(&json!("512")), Err(ScalarError::NoUnit));
        assert_eq!(ByteSize::read(&json!("512mb")), Err(ScalarError::UnknownUnit));
        assert_eq!(ByteSize(512 << 20).to_string(), "512MiB");
    }

    #[test]
    fn the_others_read_what_people_write() {
        assert_eq!(MilliCpus::read(&json!(0.5)), Ok(MilliCpus(500)));
        assert_eq!(MilliCpus::read(&json!("500m")), Ok(MilliCpus(500)));
        assert_eq!(MilliCpus::read(&json!(0)), Err(ScalarError::TooSmall));
        assert_eq!(MilliCpus::read(&json!(1e30)), Err(ScalarError::Shape));
        assert_eq!(FailureLimit::read(&json!("0.5%")), Ok(FailureLimit::Share(50)));
        assert_eq!(FailureLimit::read(&json!("101%")), Err(ScalarError::TooLarge));
        assert_eq!(FailureLimit::Share(50).to_string(), "0.5%");
        assert_eq!(FailureLimit::Share(500).of(19), 0);
        assert_eq!(FailureLimit::Share(10_000).of(u32::MAX), u32::MAX);
        assert_eq!(TaskRate::read(&json!("0/s")), Err(ScalarError::TooSmall));
        assert_eq!(ExitCodes::read(&json!("64-78")), Ok(ExitCodes { from: 64, to: 78 }));
        assert_eq!(ExitCodes::read(&json!(0)), Err(ScalarError::TooSmall));
        assert_eq!(Signal::read(&json!("SEGV")), Ok(Signal(11)));
        assert_eq!(Signal::read(&json!("SIGNOPE")), Err(ScalarError::NoSignal));
        assert_eq!(Signal::read(&json!(64)).map(|s| s.write()), Ok(json!(64)));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(ms in 0..=DURATION_MS_MAX, bytes in 0..=SIZE_BYTES_MAX, milli in 1..=CPUS_MILLI_MAX, share in 1u32..=10_000) {
            prop_assert_eq!(DurationMs::read(&DurationMs(ms).write()), Ok(DurationMs(ms)));
            prop_assert_eq!(ByteSize::read(&ByteSize(bytes).write()), Ok(ByteSize(bytes)));
            prop_assert_eq!(MilliCpus::read(&MilliCpus(milli).write()), Ok(MilliCpus(milli)));
            let factor = Factor(1_000 + milli % 99_001);
            prop_assert_eq!(Factor::read(&factor.write()), Ok(factor));
            prop_assert_eq!(FailureLimit::read(&FailureLimit::Share(share).write()), Ok(FailureLimit::Share(share)));
        }

        #[test]
        fn no_text_panics(text in ".{0,80}") {
            let value = json!(text);
            for format in [DurationMs::FORMAT, ByteSize::FORMAT, MilliCpus::FORMAT, TaskRate::FORMAT, FailureLimit::FORMAT, Keep::FORMAT, ExitCodes::FORMAT, Signal::FORMAT] {
                let _ = check_format(format, &value);
            }
        }
    }
}
