//! `zero` and `discard`: ranges that read as zeros, of any length at the cost of one record.
//!
//! Owns the parts of blocks at both ends, which are written.

use std::io;

use crate::format::log::Change;
use crate::format::{BLOCK, BLOCK_BYTES};
use crate::volume::Shared;

impl Shared {
    /// Makes a range read as zeros.
    pub fn zero(&self, offset: u64, len: u64, hole: bool) -> io::Result<()> {
        self.may_change(offset, len)?;
        let end = offset + len;
        let (first, last) = (offset.next_multiple_of(BLOCK), end / BLOCK * BLOCK);
        let zeros = [0; BLOCK_BYTES];
        let part = |from: u64, to: u64| self.write(from, zeros.get(..(to - from) as usize).unwrap_or_default());
        if first > last {
            // Within one block.
            return part(offset, end);
        }
        part(offset, first)?;
        if first < last {
            let change = Change::Zero { block: first / BLOCK, blocks: (last - first) / BLOCK, hole };
            self.append(change, &[], |_| true)?;
        }
        part(last, end)
    }
}
