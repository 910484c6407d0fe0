//! Figures that have a limit: the median and what 99 of 100 don't exceed, one line each, with what must hold beside it.
//!
//! Owns the form of these lines. Which limits there are is said where they are measured.

use crate::figures::{median, part};

/// What must hold.
#[derive(Clone, Copy)]
pub enum Limit {
    /// Ours through the other.
    RatioAtMost(f64),
    /// The same.
    RatioAtLeast(f64),
    /// Ours alone.
    AtMost(f64),
}

impl Limit {
    fn say(self, ours: f64, ratio: f64) -> String {
        let (held, what) = match self {
            Self::RatioAtMost(max) => (ratio <= max, format!("ratio at most {max}")),
            Self::RatioAtLeast(min) => (ratio >= min, format!("ratio at least {min}")),
            Self::AtMost(max) => (ours <= max, format!("at most {max}")),
        };
        format!("{what}: {}", if held { "held" } else { "NOT HELD" })
    }
}

/// What the columns are.
pub fn heading() {
    println!("{:<40} {:>14} {:>14} {:>8}  what must hold", "name", "ours", "the other", "ratio");
}

/// One line: name, ours, the other, ratio, and what must hold. The other is left out where ours stands alone.
pub fn line(name: &str, ours: f64, other: Option<f64>, limit: Option<Limit>) {
    let said = limit.map(|limit| format!("  {}", limit.say(ours, other.map_or(0.0, |other| ours / other)))).unwrap_or_default();
    match other {
        Some(other) => println!("{name:<40} {ours:>14.1} {other:>14.1} {:>8.2}{said}", ours / other),
        None => println!("{name:<40} {ours:>14.1} {:>14} {:>8}{said}", "-", "-"),
    }
}

/// The median, which must hold, and p99. Of fewer than a hundred values p99 is the largest.
pub fn pair(name: &str, ours: &[f64], other: Option<&[f64]>, limit: Option<Limit>) {
    line(name, median(ours), other.map(median), limit);
    line(&format!("{name} p99"), part(ours, 0.99), other.map(|other| part(other, 0.99)), None);
}
