//! What a bench prints.
//!
//! Owns the form of a line and the middle of what was measured.

/// What the columns are.
pub fn heading() {
    println!("{:<32} {:>14} {:>14} {:>8}", "name", "ours", "the other", "ratio");
}

/// Prints a figure.
pub fn figure(name: &str, ours: f64, other: f64) {
    println!("{name:<32} {ours:>14.1} {other:>14.1} {:>8.2}", ours / other);
}

/// The median.
pub fn median(values: &[f64]) -> f64 {
    part(values, 0.5)
}

/// What this part of the values is not above.
pub fn part(values: &[f64], part: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = (values.len() as f64 * part) as usize;
    values[at.min(values.len() - 1)]
}
