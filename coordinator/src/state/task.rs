//! Tasks, eight bytes each, in pages of 4,096.
//!
//! Owns the cell of a task, the page it lies in and the page's stored form. Does not own what a task's phase means for its job:
//! `job.rs` keeps the counts.

use std::collections::BTreeMap;

use volley_jobspecs::failure::FailureClass;

/// Tasks in a page: 32 KiB of cells, small enough to rewrite for one change and large enough that a million tasks are 245 pages.
pub const PAGE_TASKS: u32 = 4_096;

/// Where a task stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Never given out.
    Fresh = 0,
    /// Waits for a worker, not for the first time.
    Ready = 1,
    /// With a worker.
    Open = 2,
    /// Waits for its next try.
    Backoff = 3,
    /// Ended well.
    Succeeded = 4,
    /// Failed for good.
    Failed = 5,
    /// Cancelled.
    Cancelled = 6,
}

impl Phase {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Fresh,
            1 => Self::Ready,
            2 => Self::Open,
            3 => Self::Backoff,
            4 => Self::Succeeded,
            5 => Self::Failed,
            6 => Self::Cancelled,
            _ => return None,
        })
    }

    /// Has the task ended?
    #[must_use]
    pub fn ended(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

/// One task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Where it stands.
    pub phase: Phase,
    /// Does an attempt of it hold a slot? True for `Open`, and for an ended task whose attempt has not been reported yet.
    pub held: bool,
    /// Class of its last failure, by wire number; [`NO_CLASS`] for none.
    class: u8,
    /// Failures of its own in this round.
    pub failures: u16,
    /// Infra failures in this round.
    pub infra: u16,
    /// Number of its last attempt, over all rounds.
    pub number: u16,
}

const NO_CLASS: u8 = 0x7f;
const HELD: u8 = 0x80;

// The memory figure of the design rests on this.
const _: () = assert!(std::mem::size_of::<Cell>() <= 10);

impl Cell {
    /// A task that was never given out.
    pub const FRESH: Self = Self { phase: Phase::Fresh, held: false, class: NO_CLASS, failures: 0, infra: 0, number: 0 };

    /// Class of its last failure.
    #[must_use]
    pub fn class(&self) -> Option<FailureClass> {
        FailureClass::ALL.get(usize::from(self.class)).copied()
    }

    /// Notes the class of its last failure.
    pub fn set_class(&mut self, class: Option<FailureClass>) {
        self.class = class
            .map_or(NO_CLASS, |c| FailureClass::ALL.iter().position(|k| *k == c).and_then(|p| u8::try_from(p).ok()).unwrap_or(NO_CLASS));
    }

    /// Ended, and no attempt holds a slot: nothing will change but by a rerun.
    #[must_use]
    pub fn settled(&self) -> bool {
        self.phase.ended() && !self.held
    }

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.push(self.phase as u8 | if self.held { HELD } else { 0 });
        bytes.push(self.class);
        bytes.extend_from_slice(&self.failures.to_le_bytes());
        bytes.extend_from_slice(&self.infra.to_le_bytes());
        bytes.extend_from_slice(&self.number.to_le_bytes());
    }

    fn read(bytes: &[u8; 8]) -> Option<Self> {
        Some(Self {
            phase: Phase::from_byte(bytes[0] & !HELD)?,
            held: bytes[0] & HELD != 0,
            class: bytes[1],
            failures: u16::from_le_bytes([bytes[2], bytes[3]]),
            infra: u16::from_le_bytes([bytes[4], bytes[5]]),
            number: u16::from_le_bytes([bytes[6], bytes[7]]),
        })
    }
}

/// Tasks `number × 4,096 …` of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    cells: Vec<Cell>,
    settled: u32,
    /// When the tries of tasks in backoff are due, in milliseconds since 1970, by place in the page.
    pub due: BTreeMap<u16, u64>,
}

/// Why stored bytes are no page.
#[derive(Debug, thiserror::Error)]
#[error("a stored task page is damaged ({0}); stop the coordinator and delete its RocksDB directory: it is rebuilt from the log")]
pub struct PageError(&'static str);

impl Page {
    /// A page of `tasks` fresh tasks.
    #[must_use]
    pub fn fresh(tasks: u32) -> Self {
        Self { cells: vec![Cell::FRESH; tasks as usize], settled: 0, due: BTreeMap::new() }
    }

    /// A task by its place.
    #[must_use]
    pub fn get(&self, place: u16) -> Option<&Cell> {
        self.cells.get(usize::from(place))
    }

    /// All tasks, in order.
    #[must_use]
    pub fn cells(&self) -> &[Cell] {
        &self.cells
    }

    /// Changes a task. Returns the cell as it was before.
    pub fn update(&mut self, place: u16, change: impl FnOnce(&mut Cell)) -> Option<Cell> {
        let cell = self.cells.get_mut(usize::from(place))?;
        let before = *cell;
        change(cell);
        self.settled = self.settled + u32::from(cell.settled()) - u32::from(before.settled());
        if cell.phase != Phase::Backoff {
            self.due.remove(&place);
        }
        Some(before)
    }

    /// Is every task ended, with no attempt holding a slot?
    #[must_use]
    pub fn settled(&self) -> bool {
        self.settled as usize == self.cells.len()
    }

    /// The stored form: `u32` count of runs, then runs of equal cells (`u16` length, 8 bytes cell), then the due instants
    /// (`u16` place, `u64` milliseconds). A page of one kind of task is 14 bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        let mut runs: u32 = 0;
        let mut rest = self.cells.as_slice();
        while let Some(first) = rest.first() {
            let len = rest.iter().take_while(|c| *c == first).count();
            bytes.extend_from_slice(&(len as u16).to_le_bytes());
            first.write(&mut bytes);
            rest = &rest[len..];
            runs += 1;
        }
        bytes[..4].copy_from_slice(&runs.to_le_bytes());
        for (place, due) in &self.due {
            bytes.extend_from_slice(&place.to_le_bytes());
            bytes.extend_from_slice(&due.to_le_bytes());
        }
        bytes
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// [`PageError`] when the bytes are no page.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PageError> {
        let (head, mut rest) = bytes.split_first_chunk::<4>().ok_or(PageError("no header"))?;
        let mut page = Self { cells: Vec::new(), settled: 0, due: BTreeMap::new() };
        for _ in 0..u32::from_le_bytes(*head) {
            let (len, after) = rest.split_first_chunk::<2>().ok_or(PageError("cut run"))?;
            let (cell, after) = after.split_first_chunk::<8>().ok_or(PageError("cut cell"))?;
            let cell = Cell::read(cell).ok_or(PageError("unknown phase"))?;
            let len = u16::from_le_bytes(*len);
            if page.cells.len() + usize::from(len) > PAGE_TASKS as usize {
                return Err(PageError("too many cells"));
            }
            page.settled += u32::from(len) * u32::from(cell.settled());
            page.cells.extend(std::iter::repeat_n(cell, usize::from(len)));
            rest = after;
        }
        while !rest.is_empty() {
            let (place, after) = rest.split_first_chunk::<2>().ok_or(PageError("cut place"))?;
            let (due, after) = after.split_first_chunk::<8>().ok_or(PageError("cut instant"))?;
            page.due.insert(u16::from_le_bytes(*place), u64::from_le_bytes(*due));
            rest = after;
        }
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cell() -> impl Strategy<Value = Cell> {
        (0u8..7, any::<bool>(), 0u8..14, any::<u16>(), any::<u16>(), any::<u16>()).prop_map(|(p, held, class, failures, infra, number)| {
            Cell {
                phase: Phase::from_byte(p).unwrap_or(Phase::Fresh),
                held,
                class: if class == 13 { NO_CLASS } else { class },
                failures,
                infra,
                number,
            }
        })
    }

    proptest! {
        #[test]
        fn stored_pages_come_back(runs in proptest::collection::vec((cell(), 1usize..50), 0..60), due in proptest::collection::btree_map(any::<u16>(), any::<u64>(), 0..20)) {
            let cells: Vec<Cell> = runs.into_iter().flat_map(|(c, n)| std::iter::repeat_n(c, n)).collect();
            let settled = cells.iter().filter(|c| c.settled()).count() as u32;
            let page = Page { cells, settled, due };
            prop_assert_eq!(Page::from_bytes(&page.to_bytes()).ok(), Some(page));
        }

        #[test]
        fn damaged_pages_are_refused_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Page::from_bytes(&bytes);
        }
    }

    #[test]
    fn a_page_of_one_kind_is_tiny() {
        assert_eq!(Page::fresh(PAGE_TASKS).to_bytes().len(), 14);
    }
}
