//! Slots, the queue before them, and what of the host is given out.
//!
//! Owns who runs where, who waits, and whether cpu, memory and disk fit. Pure. Does not own what a bundle is made of (`core`).

use std::collections::VecDeque;

use volley_jobspecs::ids::BundleId;
use volley_jobspecs::wire::plan::Needs;

/// What a host has for tasks, or what is left of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capacity {
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Disk in bytes.
    pub disk_bytes: u64,
}

impl Capacity {
    /// What a task needs, as a capacity.
    #[must_use]
    pub fn of(needs: &Needs) -> Self {
        Self { cpu_milli: needs.cpu_milli.into(), memory_bytes: needs.memory_bytes, disk_bytes: needs.disk_bytes }
    }

    /// Is there room for `other`?
    #[must_use]
    pub fn fits(&self, other: &Self) -> bool {
        self.cpu_milli >= other.cpu_milli && self.memory_bytes >= other.memory_bytes && self.disk_bytes >= other.disk_bytes
    }

    fn take(&mut self, other: &Self) {
        self.cpu_milli -= other.cpu_milli;
        self.memory_bytes -= other.memory_bytes;
        self.disk_bytes -= other.disk_bytes;
    }

    fn give(&mut self, other: &Self) {
        self.cpu_milli += other.cpu_milli;
        self.memory_bytes += other.memory_bytes;
        self.disk_bytes += other.disk_bytes;
    }
}

/// The queue is full: one bundle may wait per slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} bundles wait for {slots} slots already")]
pub struct Full {
    waiting: usize,
    slots: usize,
}

/// Slots and the queue before them.
#[derive(Debug, Clone)]
pub struct Slots {
    busy: Vec<Option<(BundleId, Capacity)>>,
    /// Free slots; the lowest first, so that a lightly loaded worker reuses what is warm.
    free: std::collections::BTreeSet<u32>,
    total: Capacity,
    left: Capacity,
    waiting: VecDeque<BundleId>,
}

impl Slots {
    /// `count` slots on a host that has `total`.
    #[must_use]
    pub fn new(count: u32, total: Capacity) -> Self {
        Self { busy: (0..count).map(|_| None).collect(), free: (0..count).collect(), total, left: total, waiting: VecDeque::new() }
    }

    /// How many slots there are.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.busy.len()).unwrap_or(u32::MAX)
    }

    /// Could `needs` ever run here?
    #[must_use]
    pub fn could_fit(&self, needs: &Needs) -> bool {
        self.total.fits(&Capacity::of(needs))
    }

    /// Adds a bundle to the queue.
    ///
    /// # Errors
    /// [`Full`] when as many wait as there are slots, beyond those for which a slot is free.
    pub fn enqueue(&mut self, bundle: BundleId) -> Result<(), Full> {
        if self.waiting.len() >= self.busy.len() + self.free.len() {
            return Err(Full { waiting: self.waiting.len(), slots: self.busy.len() });
        }
        self.waiting.push_back(bundle);
        Ok(())
    }

    /// Gives the bundle that waited longest a slot, if its needs are known and fit. Those whose needs are not known yet are
    /// passed over; one that doesn't fit is not, so that a large bundle isn't starved by small ones.
    pub fn start_next(&mut self, needs: impl Fn(BundleId) -> Option<Needs>) -> Option<(u32, BundleId)> {
        let slot = *self.free.first()?;
        let (at, capacity) =
            self.waiting.iter().enumerate().find_map(|(at, bundle)| needs(*bundle).map(|needs| (at, Capacity::of(&needs))))?;
        if !self.left.fits(&capacity) {
            return None;
        }
        let bundle = self.waiting.remove(at)?;
        self.free.remove(&slot);
        self.left.take(&capacity);
        if let Some(place) = self.busy.get_mut(slot as usize) {
            *place = Some((bundle, capacity));
        }
        Some((slot, bundle))
    }

    /// The bundle in a slot.
    #[must_use]
    pub fn in_slot(&self, slot: u32) -> Option<BundleId> {
        self.busy.get(slot as usize).copied().flatten().map(|(bundle, _)| bundle)
    }

    /// Frees a slot.
    pub fn release(&mut self, slot: u32) {
        if let Some((_, capacity)) = self.busy.get_mut(slot as usize).and_then(Option::take) {
            self.left.give(&capacity);
            self.free.insert(slot);
        }
    }

    /// Takes a bundle out of the queue. Was it there?
    pub fn unqueue(&mut self, bundle: BundleId) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| *waiting != bundle);
        self.waiting.len() != before
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What is left of the host.
    #[must_use]
    pub fn left(&self) -> Capacity {
        self.left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use volley_jobspecs::wire::plan::Isolation;

    fn needs(cpu_milli: u32) -> Needs {
        Needs {
            cpu_milli,
            memory_bytes: 0,
            disk_bytes: 0,
            isolation: Isolation::Null,
            labels: Default::default(),
            limits: false,
            image: None,
            volumes: None,
        }
    }

    fn id(place: u32) -> BundleId {
        BundleId { sequence: 1, place }
    }

    fn total(cpu_milli: u64) -> Capacity {
        Capacity { cpu_milli, memory_bytes: 0, disk_bytes: 0 }
    }

    #[test]
    fn a_large_bundle_at_the_head_is_not_starved() {
        let mut slots = Slots::new(3, total(2_000));
        let cost = |b: BundleId| Some(needs(if b.place == 1 { 2_000 } else { 1_000 }));
        for place in 0..3 {
            assert!(slots.enqueue(id(place)).is_ok());
        }
        assert_eq!(slots.start_next(cost), Some((0, id(0))));
        assert_eq!(slots.start_next(cost), None);
        slots.release(0);
        assert_eq!(slots.start_next(cost), Some((0, id(1))));
    }

    #[test]
    fn unknown_needs_are_passed_over() {
        let mut slots = Slots::new(2, total(2_000));
        assert!(slots.enqueue(id(0)).is_ok() && slots.enqueue(id(1)).is_ok());
        assert_eq!(slots.start_next(|b| (b.place == 1).then(|| needs(1))), Some((0, id(1))));
    }

    proptest! {
        #[test]
        fn capacity_is_never_overdrawn_and_comes_back(ops in proptest::collection::vec((0u8..3, 0u32..8, 1u32..1500), 0..200)) {
            let mut slots = Slots::new(4, total(3_000));
            let mut costs = std::collections::BTreeMap::new();
            let mut next = 0;
            for (op, slot, cpu) in ops {
                match op {
                    0 => {
                        costs.insert(next, cpu);
                        if slots.enqueue(id(next)).is_err() { prop_assert!(slots.waiting() >= 4); }
                        next += 1;
                    }
                    1 => {
                        let before = slots.left().cpu_milli;
                        if let Some((_, b)) = slots.start_next(|b| costs.get(&b.place).map(|c| needs(*c))) {
                            prop_assert_eq!(slots.left().cpu_milli + u64::from(costs[&b.place]), before);
                        }
                    }
                    _ => slots.release(slot),
                }
                prop_assert!(slots.waiting() <= 8);
            }
            for slot in 0..4 { slots.release(slot); }
            prop_assert_eq!(slots.left(), total(3_000));
        }
    }
}
