//! Sizes, cores and counts for eyes.
//!
//! Owns how they are shown, on the command line and in the coordinator's sentences. Does not own reading them (`spec::scalars`).

/// Units of sizes above a byte, each 1024 of the one before.
const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];

/// Bytes in the largest unit that leaves a digit: `512 B`, `1.5 KiB`, `20 GiB`.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    // Floating point is exact enough for two digits.
    let mut value = bytes as f64 / 1024.0;
    let mut unit = UNITS[0];
    for larger in &UNITS[1..] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

/// Thousandths of a core as cores: `0.5`, `8`, `0.125`.
#[must_use]
pub fn cores(milli: u64) -> String {
    let text = format!("{}.{:03}", milli / 1_000, milli % 1_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Two sizes that differ, as [`bytes`] shows them; to the byte where that would show them alike.
#[must_use]
pub fn different_bytes(one: u64, other: u64) -> (String, String) {
    let shown = (bytes(one), bytes(other));
    if shown.0 == shown.1 && one != other { (format!("{one} B"), format!("{other} B")) } else { shown }
}

/// A number with its noun: `1 task`, `2 tasks`.
#[must_use]
pub fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// The same where an `s` at the end is not enough: `1 try`, `2 tries`; `1 task is`, `2 tasks are`.
#[must_use]
pub fn counted(number: u64, one: &str, more: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { more })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_more_than_one() {
        assert_eq!([0, 1, 2].map(|n| count(n, "task")), ["0 tasks", "1 task", "2 tasks"]);
        assert_eq!([0, 1, 2].map(|n| counted(n, "try", "tries")), ["0 tries", "1 try", "2 tries"]);
    }

    #[test]
    fn sizes_keep_a_digit() {
        let got: Vec<String> = [0, 1023, 1536, 20 << 30, u64::MAX].into_iter().map(bytes).collect();
        assert_eq!(got, ["0 B", "1023 B", "1.5 KiB", "20 GiB", "16384 PiB"]);
        assert_eq!(different_bytes(1 << 30, 2 << 30), ("1.0 GiB".to_owned(), "2.0 GiB".to_owned()));
        assert_eq!(different_bytes(1 << 30, (1 << 30) + 1), ("1073741824 B".to_owned(), "1073741825 B".to_owned()));
    }

    #[test]
    fn cores_are_exact() {
        let got: Vec<String> = [0, 1, 125, 500, 8_000, 10_250].into_iter().map(cores).collect();
        assert_eq!(got, ["0", "0.001", "0.125", "0.5", "8", "10.25"]);
    }
}
