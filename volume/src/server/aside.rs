//! What servers and attempts before leave in the directory: copies that nobody wants, and logs that have more than S3.
//!
//! Owns what becomes of both: a copy goes; a log is put aside, where somebody may look at it, for a day, and as long as there is room for it. Does not own the
//! directories of volumes that are open.
//!
//! Only directories named by a volume's id, and those named `<id>.lost-…`, are looked at (`open.rs` names them so too).

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use volley_jobspecs::ids::VolumeId;

use crate::host::{Host, random};
use crate::io::log::sync_dir;
use crate::open::HOLDING;

/// How long a log is kept that has more than S3: a night and the day after it.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3_600);
/// Bytes of all of them: an attempt's log has half a GiB at most, and attempts that fail may be many. The oldest go first.
const KEPT_BYTES_MAX: u64 = 8 << 30;
/// What their names have behind the volume's id.
const LOST: &str = ".lost-";

/// Clears what earlier servers left. Nothing is open.
///
/// # Errors
/// What the system says of the directory.
pub fn begin(dir: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some(Ok(_)) = name.strip_suffix(".lock").map(str::parse::<VolumeId>) {
            let _ = std::fs::remove_file(dir.join(name));
        } else if let Ok(volume) = name.parse::<VolumeId>() {
            clear(dir, volume, true);
        }
    }
    Ok(())
}

/// Clears a volume's directory, if it is there, which nobody has open. `more`: has its log more than S3? A copy's never counts.
pub fn clear(dir: &Path, volume: VolumeId, more: bool) {
    let path = dir.join(volume.to_string());
    if !path.exists() {
        return;
    }
    let holding = Host::holding(&path).ok().flatten();
    let log = more && holding.as_ref().is_none_or(|holding| holding.ephemeral.is_none()) && has_log(&path);
    let done = if log { put_aside(dir, volume, &path, holding.map_or(0, |holding| holding.epoch)) } else { std::fs::remove_dir_all(&path) };
    if let Err(e) = done {
        tracing::warn!(volume = %volume, path = %path.display(), error = %e, "what a volume left on this host can't be cleared");
    }
}

/// Removes what locks a volume's directory; the caller is the only one who would lock it.
pub fn unlock(dir: &Path, volume: VolumeId) {
    let _ = std::fs::remove_file(dir.join(format!("{volume}.lock")));
}

/// Is there anything but what says whose it is?
fn has_log(path: &Path) -> bool {
    std::fs::read_dir(path).is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|entry| entry.file_name() != HOLDING)))
}

fn put_aside(dir: &Path, volume: VolumeId, path: &Path, epoch: u64) -> io::Result<()> {
    let random = random::<4>().map_err(io::Error::other)?;
    let aside = dir.join(format!("{volume}{LOST}{epoch:016x}-{}", hex::encode(random)));
    std::fs::rename(path, &aside)?;
    sync_dir(dir)?;
    tracing::info!(volume = %volume, path = %aside.display(), "what an attempt had in its log and S3 has not was put aside for a day");
    Ok(())
}

/// A log that was put aside.
struct Lost {
    path: PathBuf,
    bytes: u64,
    changed: SystemTime,
}

fn lost(dir: &Path) -> Vec<Lost> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some((volume, _)) = name.to_str().and_then(|name| name.split_once(LOST)) else { continue };
        if volume.parse::<VolumeId>().is_err() {
            continue;
        }
        let files = std::fs::read_dir(entry.path()).into_iter().flatten().flatten();
        let (mut bytes, mut changed) = (0, SystemTime::UNIX_EPOCH);
        for meta in files.filter_map(|file| file.metadata().ok()).chain(entry.metadata().ok()) {
            bytes += std::os::unix::fs::MetadataExt::blocks(&meta) * 512;
            changed = changed.max(meta.modified().unwrap_or(SystemTime::UNIX_EPOCH));
        }
        all.push(Lost { path: entry.path(), bytes, changed });
    }
    all.sort_by_key(|lost| std::cmp::Reverse(lost.changed));
    all
}

/// Removes logs that were kept long enough, and the oldest where there are too many.
pub fn sweep(dir: &Path, now: SystemTime) {
    let mut kept = 0u64;
    for Lost { path, bytes, changed } in lost(dir) {
        kept = kept.saturating_add(bytes);
        let old = now.duration_since(changed).is_ok_and(|age| age >= KEPT_FOR);
        if !old && kept <= KEPT_BYTES_MAX {
            continue;
        }
        kept = kept.saturating_sub(bytes);
        if let Err(e) = std::fs::remove_dir_all(&path) {
            tracing::warn!(path = %path.display(), error = %e, "a log that was kept for a day can't be removed");
        }
    }
}

/// How many there are, and their bytes.
pub fn figures(dir: &Path) -> (u64, u64) {
    let all = lost(dir);
    (all.len() as u64, all.iter().map(|lost| lost.bytes).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::holding::Holding;

    fn volume(dir: &Path, id: u8, ephemeral: bool, log: bool) -> VolumeId {
        let volume = VolumeId([id; 16]);
        let path = dir.join(volume.to_string());
        std::fs::create_dir(&path).unwrap();
        std::fs::write(dir.join(format!("{volume}.lock")), "").unwrap();
        let holding = Holding { volume, attach: [0; 16], epoch: 3, log_from: 3, ephemeral: ephemeral.then(Vec::new), boot: None };
        std::fs::write(path.join(HOLDING), holding.write().unwrap()).unwrap();
        if log {
            std::fs::write(path.join("log"), "x").unwrap();
        }
        volume
    }

    #[test]
    fn copies_go_and_logs_are_kept_for_a_day() {
        let dir = tempfile::tempdir().unwrap();
        volume(dir.path(), 1, true, true);
        volume(dir.path(), 2, false, false);
        let kept = volume(dir.path(), 3, false, true);
        std::fs::write(dir.path().join("cache.slab"), "").unwrap();
        std::fs::create_dir(dir.path().join("else.lost-1")).unwrap();
        begin(dir.path()).unwrap();
        let names = || {
            let mut names: Vec<_> =
                std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let found = names();
        assert_eq!((found.len(), &found[0][..], &found[1][..]), (3, "cache.slab", "else.lost-1"), "{found:?}");
        assert!(found[2].starts_with(&format!("{kept}.lost-0000000000000003-")), "{found:?}");
        assert_eq!(figures(dir.path()).0, 1);
        let now = SystemTime::now();
        sweep(dir.path(), now + KEPT_FOR / 2);
        assert_eq!(names(), found);
        sweep(dir.path(), now + KEPT_FOR * 2);
        assert_eq!(names(), found[..2]);
    }
}
