//! `resize`: a disk grows. It never shrinks: what would be cut off is somebody's.

use std::io;

use volley_jobspecs::ids::VolumeId;

use crate::format::content::check_size;
use crate::format::log::Change;
use crate::host::{Host, lock};
use crate::open::OpenError;
use crate::state::moves;
use crate::volume::Volume;

impl Host {
    /// Lets a volume grow that nobody is to write: `generation` is the one that was accepted last, the next one has `size` bytes. Doing it again changes nothing.
    ///
    /// # Errors
    /// [`OpenError`]: another state is there, the size is none, or nobody answers.
    pub fn grow(&self, volume: VolumeId, generation: u64, size: u64) -> Result<(), OpenError> {
        check_size("a volume", size)?;
        self.change_head(volume, |head, commit| moves::grow(head, generation, size, commit))
    }
}

impl Volume {
    /// Grows the disk to `size` bytes; what is new reads as zeros. The same size is no change.
    ///
    /// # Errors
    /// `InvalidInput` for a size that is smaller than now, or that no disk has; as a write otherwise.
    pub fn resize(&self, size: u64) -> io::Result<()> {
        let shared = &self.shared;
        shared.may_change(0, 0)?;
        check_size("a volume", size).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let refuse = |now: u64| {
            let why = format!("{} has {now} bytes and can't shrink to {size}: make a new volume and copy", shared.id);
            io::Error::new(io::ErrorKind::InvalidInput, why)
        };
        loop {
            let now = lock(&shared.state).size;
            match size.cmp(&now) {
                std::cmp::Ordering::Less => return Err(refuse(now)),
                std::cmp::Ordering::Equal => return Ok(()),
                std::cmp::Ordering::Greater => {}
            }
            if shared.append(Change::Resize { size }, &[], |state| state.size == now)? {
                return Ok(());
            }
        }
    }
}
