//! The rules of a volume, pure: no clock, no chance, no I/O.
//!
//! Owns what lies where in memory (`overlay`, `map`), what a commit consists of (`commit`), what a head may become (`moves`), what the answer to a
//! conditional write means (`fence`), what a log that was found says (`scan`), and what
//! nobody needs any more (`garbage`). Does not own the bytes (`format`).

pub mod commit;
pub mod fence;
pub mod garbage;
pub mod map;
pub mod moves;
pub mod overlay;
pub mod scan;

#[cfg(test)]
mod tests;
