//! Free space under `volley up`: everything it runs writes to one disk.
//!
//! Owns how much is kept free for the log and the state, waiting for room, and starting again what ended for want of it. Does not own what
//! that is (`up`, `embedded`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::failed::Failed;

/// Part of the disk that objects leave free: what a log and a state that are cut down regularly need, with room to spare.
const RESERVE_PART: u64 = 20;
/// It is at most this many bytes, however large the disk is.
const RESERVE_BYTES_MAX: u64 = 512 << 20;
/// It is at least this many bytes: the state's database alone writes files of some MiB.
const RESERVE_BYTES_MIN: u64 = 16 << 20;
/// And never more than this part of a small disk.
const RESERVE_PART_MAX: u64 = 4;
/// Pause before the disk is looked at again.
const PAUSE: Duration = Duration::from_secs(1);
/// Pause before something that ended is started again: nothing that everybody waits for is away for long, and a loop of ends is no busy one.
const RESTART_PAUSE: Duration = Duration::from_millis(500);

/// The disk of one directory.
#[derive(Debug, Clone)]
pub struct Room {
    dir: PathBuf,
    /// Bytes that objects leave free.
    pub reserve_bytes: u64,
}

impl Room {
    /// Looks at the disk under `dir`.
    pub fn of(dir: &Path) -> Result<Self, Failed> {
        let stat = rustix::fs::statvfs(dir).map_err(|e| Failed::local("look at the disk of", dir, &e.into()))?;
        Ok(Self { dir: dir.to_owned(), reserve_bytes: reserve(stat.f_blocks.saturating_mul(stat.f_frsize)) })
    }

    /// Free bytes, when they are fewer than half of the reserve: then it may be for want of room that something ended.
    pub fn short(&self) -> Option<u64> {
        let stat = rustix::fs::statvfs(&self.dir).ok()?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        (free < self.reserve_bytes / 2).then_some(free)
    }

    /// Waits until there is room, and says that it does.
    pub async fn wait(&self) {
        let Some(free) = self.short() else { return };
        let (need, dir) = (self.reserve_bytes / 2 / 1024, self.dir.display());
        eprintln!("The disk is full: {} KiB are free for {dir}, {need} are needed. Free some; Volley goes on by itself.", free / 1024);
        while self.short().is_some() {
            tokio::time::sleep(PAUSE).await;
        }
        eprintln!("There is room on the disk again.");
    }

    /// Starts something again once there is room; once more whenever that fails and the disk is full by then.
    ///
    /// # Errors
    /// What `start` says while there is room.
    pub async fn restart<T, E>(&self, mut start: impl AsyncFnMut() -> Result<T, E>) -> Result<T, E> {
        loop {
            self.wait().await;
            tokio::time::sleep(RESTART_PAUSE).await;
            match start().await {
                Ok(started) => return Ok(started),
                Err(_) if self.short().is_some() => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn reserve(total: u64) -> u64 {
    (total / RESERVE_PART).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX).min(total / RESERVE_PART_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_fails_with_room_on_the_disk_is_not_tried_again() {
        let room = Room { dir: std::env::temp_dir(), reserve_bytes: 0 };
        let mut tries = 0;
        let failed: Result<(), &str> = room
            .restart(async || {
                tries += 1;
                Err("no")
            })
            .await;
        assert_eq!((failed, tries), (Err("no"), 1));
        assert_eq!(room.restart(async || Ok::<_, &str>(7)).await, Ok(7));
    }

    #[test]
    fn the_reserve_suits_the_disk() {
        assert_eq!(reserve(32 << 20), 8 << 20);
        assert_eq!(reserve(100 << 20), 16 << 20);
        assert_eq!(reserve(2_000 << 20), 100 << 20);
        assert_eq!(reserve(1 << 50), 512 << 20);
    }
}
