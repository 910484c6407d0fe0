//! Which templates are kept: those used last, within a budget of bytes, and all that are in use.
//!
//! Owns the sums and the order. Pure: what is in use is asked of whoever calls.

use std::collections::BTreeMap;

use volley_jobspecs::units::counted;

use super::TemplateName;

/// Templates that can't go take all the room there is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no room for a template of {} MiB: {} in use or being built take {} of {} MiB; raise the worker's memory for templates (--template-memory), or use \
     fewer images and sizes at once", .wanted >> 20, counted(*.others, "template", "templates"), .taken >> 20, .bytes_max >> 20
)]
pub struct NoRoom {
    /// What is wanted.
    pub wanted: u64,
    /// What is taken by those that can't go.
    pub taken: u64,
    /// How many those are.
    pub others: u64,
    /// The budget.
    pub bytes_max: u64,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    bytes: u64,
    used: u64,
}

/// What is kept.
#[derive(Debug)]
pub struct Shelf {
    bytes_max: u64,
    clock: u64,
    kept: BTreeMap<TemplateName, Kept>,
}

impl Shelf {
    /// An empty one.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        Self { bytes_max, clock: 0, kept: BTreeMap::new() }
    }

    /// Bytes of all of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.kept.values().map(|kept| kept.bytes).sum()
    }

    /// It was used just now.
    pub fn touch(&mut self, name: &TemplateName) {
        self.clock += 1;
        if let Some(kept) = self.kept.get_mut(name) {
            kept.used = self.clock;
        }
    }

    /// Sets `bytes` aside for one that is to be made. Which ones go for it.
    ///
    /// # Errors
    /// [`NoRoom`]: nothing changed.
    pub fn admit(&mut self, name: TemplateName, bytes: u64, in_use: impl Fn(&TemplateName) -> bool) -> Result<Vec<TemplateName>, NoRoom> {
        let mut idle: Vec<(u64, TemplateName)> =
            self.kept.iter().filter(|(other, _)| **other != name && !in_use(other)).map(|(other, kept)| (kept.used, *other)).collect();
        idle.sort();
        let old = self.kept.get(&name).map_or(0, |kept| kept.bytes);
        let mut taken = self.bytes() - old;
        let mut gone = Vec::new();
        for (_, other) in idle {
            if taken.saturating_add(bytes) <= self.bytes_max {
                break;
            }
            taken -= self.kept.get(&other).map_or(0, |kept| kept.bytes);
            gone.push(other);
        }
        if taken.saturating_add(bytes) > self.bytes_max {
            let others = (self.kept.len() - usize::from(old > 0) - gone.len()) as u64;
            return Err(NoRoom { wanted: bytes, taken, others, bytes_max: self.bytes_max });
        }
        gone.iter().for_each(|name| self.remove(name));
        self.clock += 1;
        self.kept.insert(name, Kept { bytes, used: self.clock });
        Ok(gone)
    }

    /// What it really takes, now that it is there.
    pub fn settle(&mut self, name: &TemplateName, bytes: u64) {
        if let Some(kept) = self.kept.get_mut(name) {
            kept.bytes = bytes;
        }
        self.touch(name);
    }

    /// It takes more than it did: a machine that is the first to touch a page of its memory that was never written gives it to the file.
    pub fn grown(&mut self, name: &TemplateName, bytes: u64) {
        if let Some(kept) = self.kept.get_mut(name) {
            kept.bytes = kept.bytes.max(bytes);
        }
    }

    /// It is gone.
    pub fn remove(&mut self, name: &TemplateName) {
        self.kept.remove(name);
    }

    /// Those that are not in use.
    #[must_use]
    pub fn idle(&self, in_use: impl Fn(&TemplateName) -> bool) -> Vec<TemplateName> {
        self.kept.keys().filter(|name| !in_use(name)).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(number: u8) -> TemplateName {
        TemplateName([number; 32])
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_and_what_is_in_use_stays() {
        let mut shelf = Shelf::new(100);
        for number in 1..=3 {
            assert_eq!(shelf.admit(name(number), 40, |_| true).is_ok(), number < 3);
        }
        shelf.settle(&name(1), 30);
        assert_eq!(shelf.admit(name(3), 30, |_| true), Ok(vec![]));
        shelf.touch(&name(1));
        assert_eq!(shelf.admit(name(4), 30, |_| false), Ok(vec![name(2)]));
        assert_eq!(shelf.admit(name(5), 60, |other| *other == name(3)), Ok(vec![name(1), name(4)]));
        let full = shelf.admit(name(6), 50, |other| *other == name(5)).unwrap_err();
        assert_eq!((full.taken, full.others), (60, 1));
        assert!(full.to_string().contains("1 template in use"), "{full}");
        assert_eq!(shelf.bytes(), 90);
        // What is in use may grow past the room there is; then nothing has room until it goes.
        shelf.grown(&name(5), 110);
        shelf.grown(&name(5), 20);
        assert_eq!(shelf.bytes(), 140);
        assert!(shelf.admit(name(6), 1, |other| *other == name(5)).is_err());
        assert_eq!(shelf.admit(name(6), 1, |_| false), Ok(vec![name(3), name(5)]));
    }

    proptest! {
        #[test]
        fn the_budget_holds_and_what_is_in_use_stays(ops in proptest::collection::vec((0u8..6, 1u64..60, any::<u8>()), 0..60)) {
            let mut shelf = Shelf::new(100);
            for (number, bytes, used) in ops {
                let in_use = |other: &TemplateName| used & (1 << other.0[0]) != 0;
                let before: Vec<TemplateName> = shelf.kept.keys().copied().collect();
                match shelf.admit(name(number), bytes, in_use) {
                    Ok(gone) => prop_assert!(gone.iter().all(|gone| !in_use(gone))),
                    Err(full) => {
                        prop_assert!(full.taken + bytes > 100);
                        prop_assert_eq!(before, shelf.kept.keys().copied().collect::<Vec<_>>());
                    }
                }
                prop_assert!(shelf.bytes() <= 100);
            }
        }
    }
}
