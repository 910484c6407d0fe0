//! What a worker asks for, done.
//!
//! Owns the order of each: what is asked before a volume is taken, and that what was done before a server ended is found to be done. Does not own volumes.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use volley_jobspecs::ids::{AttemptName, SnapshotId, TenantId, VolumeId};

use super::protocol::{Left, Open, Opened, Refused, RefusedKind, Reply, Request, Serve, Stats, What};
use super::{Server, aside};
use crate::device::Device;
use crate::format::BLOCK;
use crate::format::content::Content;
use crate::format::head::WrittenBy;
use crate::host::{FetchError, lock};
use crate::io::s3::ObjectsError;
use crate::open::{HOLDING, NewVolume, OpenError, Opener};
use crate::serve::socket::{Place, Socket};
use crate::state::moves::{self, MoveError};
use crate::volume::Volume;

/// Least size of a disk that is made, in bytes: a file system needs some of it for itself.
const DISK_BYTES_MIN: u64 = 16 << 20;
/// Bytes of an image that are moved at once.
const POUR_BYTES: usize = 1 << 20;

fn host(error: impl std::fmt::Display) -> Refused {
    Refused::new(RefusedKind::Host, &error.to_string())
}

impl From<OpenError> for Refused {
    fn from(error: OpenError) -> Self {
        let kind = match &error {
            OpenError::Move(MoveError::Elsewhere { .. } | MoveError::Held { .. }) | OpenError::Busy { .. } => RefusedKind::Elsewhere,
            OpenError::Move(MoveError::Deleted { .. }) => RefusedKind::Missing,
            OpenError::Move(MoveError::Generation { .. } | MoveError::OtherState { .. } | MoveError::Shrink { .. }) => {
                RefusedKind::OtherState
            }
            OpenError::Commit(crate::CommitError::Failure(crate::Failure::Fenced { .. })) => RefusedKind::Elsewhere,
            error if is_missing(error) => RefusedKind::Missing,
            _ => RefusedKind::Host,
        };
        Self::new(kind, &error.to_string())
    }
}

fn is_missing(error: &OpenError) -> bool {
    matches!(error, OpenError::Fetch(FetchError::Objects(ObjectsError::NotFound { .. })))
}

/// A volume that is to be written.
#[derive(Clone, Copy)]
struct Write<'a> {
    volume: VolumeId,
    tenant: &'a TenantId,
    generation: u64,
    attempt: AttemptName,
    attach: [u8; 16],
}

/// What came of opening.
enum Found {
    Open(Volume),
    /// It was finished or kept by a server before this one.
    Ended(Reply),
}

impl Server {
    /// Does what is asked for.
    pub fn perform(&self, request: Request) -> Reply {
        let done = match request {
            Request::Setup(_) => Err(host("this server has begun already")),
            Request::Open(open) => self.open_volume(&open),
            Request::Serve(serve) => self.serve(serve),
            Request::Pour { handle, file } => self.pour(handle, &file),
            Request::Finish { handle } => self.finish(handle),
            Request::Keep { handle } => self.keep(handle),
            Request::Forget { handle, volume } => {
                self.forget(handle, volume);
                Ok(Reply::Done)
            }
            Request::Stats => Ok(Reply::Stats(self.stats())),
        };
        done.unwrap_or_else(Reply::Refused)
    }

    fn stats(&self) -> Stats {
        let ((open, dirty_bytes), (aside, aside_bytes)) = (self.table.figures(), aside::figures(&self.dir));
        Stats { open, dirty_bytes, aside, aside_bytes }
    }

    fn open_volume(&self, open: &Open) -> Result<Reply, Refused> {
        let volume = open.what.volume();
        let (entry, mut using) = self.table.add(open.handle, volume)?;
        let mut entry = lock(&entry);
        let opened = match &open.what {
            What::Write { tenant, generation, attempt, attach, .. } => {
                let write = Write { volume, tenant, generation: *generation, attempt: *attempt, attach: *attach };
                self.open_to_write(open, write)
            }
            What::Copy { snapshot, .. } => self.open_copy(open, *snapshot, volume),
        };
        let opened = opened.and_then(|found| match found {
            Found::Open(volume) => Ok((ready(open, &volume)?, volume)),
            Found::Ended(reply) => Err(Unopened::Ended(reply)),
        });
        match opened {
            Ok((opened, volume)) => {
                entry.volume = Some(Arc::new(volume));
                using.stays = true;
                Ok(Reply::Opened(opened))
            }
            Err(why) => {
                let _clearing = self.table.remove(open.handle, volume);
                match &why {
                    // S3 has all of it.
                    Unopened::Ended(_) => aside::clear(&self.dir, volume, false),
                    // What a server before this one had acknowledged is still wanted: it is opened again, or forgotten.
                    Unopened::Refused(_) if open.again => {}
                    Unopened::Refused(_) => aside::clear(&self.dir, volume, true),
                }
                aside::unlock(&self.dir, volume);
                using.stays = true;
                match why {
                    Unopened::Ended(reply) => Ok(reply),
                    Unopened::Refused(refused) => Err(refused),
                }
            }
        }
    }

    fn open_to_write(&self, open: &Open, write: Write<'_>) -> Result<Found, Unopened> {
        let Write { volume, tenant, generation, attempt, attach } = write;
        // The log says who may write, and has said it.
        let (force, until_ms, resume) = (true, 0, false);
        let by = Opener { attempt: Some(attempt), host: self.name.clone(), attach, until_ms, guest: open.guest, force, resume };
        if open.again && !self.dir.join(volume.to_string()).join(HOLDING).exists() {
            let (head, ..) = self.host.head(volume).map_err(host)?;
            let left = moves::left_by(&head, attempt).map(|(content, generation)| left(content, generation));
            let gone = || host(format!("{volume}: what was written on it is gone from this host")).into();
            return left.map(|left| Found::Ended(Reply::Left(left))).ok_or_else(gone);
        }
        let attached = || self.host.attach_if(volume, &by, |head| moves::may_attach(head, attempt, attach, generation, open.again));
        match attached() {
            Ok(volume) => Ok(Found::Open(volume)),
            Err(why) if is_missing(&why) && generation == 0 && !open.again => {
                let Some(size) = open.size_bytes else { return Err(Refused::from(why).into()) };
                let new = NewVolume { volume, tenant: tenant.clone(), size: disk_bytes(size), flush: open.flush };
                self.host.create(new).map_err(Refused::from)?;
                Ok(Found::Open(attached().map_err(Refused::from)?))
            }
            Err(why @ OpenError::Move(MoveError::Elsewhere { .. })) if open.again => {
                let (head, ..) = self.host.head(volume).map_err(host)?;
                let left = moves::left_by(&head, attempt).map(|(content, generation)| left(content, generation));
                left.map(|left| Found::Ended(Reply::Left(left))).ok_or_else(|| Refused::from(why).into())
            }
            Err(why) => Err(Refused::from(why).into()),
        }
    }

    fn open_copy(&self, open: &Open, snapshot: SnapshotId, volume: VolumeId) -> Result<Found, Unopened> {
        let there = self.dir.join(volume.to_string()).join(HOLDING).exists();
        if there && !open.again {
            // Of a server that ended while it opened it.
            aside::clear(&self.dir, volume, false);
        }
        if open.again && !there {
            let kept = self.host.head(volume).map_err(host)?.0;
            if kept.base == Some(snapshot) {
                return Ok(Found::Ended(Reply::Kept(kept.accepted.content.size)));
            }
            return Err(host(format!("{volume}: what was written on this copy is gone from this host")).into());
        }
        Ok(Found::Open(self.host.clone_ephemeral(snapshot, volume, open.flush, open.guest).map_err(Refused::from)?))
    }

    fn serve(&self, serve: Serve) -> Result<Reply, Refused> {
        let entry = self.table.get(serve.handle)?;
        let mut entry = lock(&entry);
        let device = entry.volume.clone().ok_or_else(|| host("this volume was let go"))?;
        if let Some(before) = entry.socket.take() {
            before.detach();
        }
        let Serve { dir, file, owner, group, peers, export, .. } = serve;
        let place = Place { dir: dir.into(), file, owner, group, peers, export };
        entry.socket = Some(Socket::open(&place, device).map_err(host)?);
        Ok(Reply::Done)
    }

    fn pour(&self, handle: u64, file: &str) -> Result<Reply, Refused> {
        let entry = self.table.get(handle)?;
        let entry = lock(&entry);
        let device = entry.volume.as_ref().ok_or_else(|| host("this volume was let go"))?;
        pour(&**device, file).map_err(|e| host(format!("writing {file} on {}: {e}", device.id())))?;
        Ok(Reply::Done)
    }

    fn finish(&self, handle: u64) -> Result<Reply, Refused> {
        let entry = self.table.get(handle)?;
        let mut entry = lock(&entry);
        let volume = entry.take().ok_or_else(|| host("this volume was let go"))?;
        let id = volume.id();
        if let Some(failure) = volume.failure() {
            return Err(OpenError::Commit(failure.into()).into());
        }
        let (content, generation) = volume.detach()?;
        let _using = self.table.remove(handle, id);
        aside::unlock(&self.dir, id);
        Ok(Reply::Left(left(&content, generation)))
    }

    fn keep(&self, handle: u64) -> Result<Reply, Refused> {
        let entry = self.table.get(handle)?;
        let mut entry = lock(&entry);
        let volume = entry.take().ok_or_else(|| host("this copy was let go"))?;
        let id = volume.id();
        if let Some(failure) = volume.failure() {
            return Err(OpenError::Commit(failure.into()).into());
        }
        let content = volume.keep()?;
        let _using = self.table.remove(handle, id);
        aside::unlock(&self.dir, id);
        Ok(Reply::Kept(content.size))
    }

    fn forget(&self, handle: u64, volume: VolumeId) {
        let _using = match self.table.get(handle) {
            Ok(entry) => {
                let mut entry = lock(&entry);
                // One that was taken, and could not be committed, has more than S3.
                let more = entry.take().is_none_or(|volume| volume.dirty_bytes() > 0);
                let using = self.table.remove(handle, volume);
                aside::clear(&self.dir, volume, more);
                using
            }
            // It is not open: of a server before this one.
            Err(_) => {
                let Some(using) = self.table.claim(volume) else { return };
                aside::clear(&self.dir, volume, true);
                using
            }
        };
        aside::unlock(&self.dir, volume);
    }
}

/// Why nothing is open.
enum Unopened {
    Ended(Reply),
    Refused(Refused),
}

impl From<Refused> for Unopened {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

/// A volume that was just opened, as large as it is to be.
fn ready(open: &Open, volume: &Volume) -> Result<Opened, Refused> {
    let wanted = open.size_bytes.map_or(0, disk_bytes);
    let grown = volume.size() < wanted;
    if grown {
        volume.resize(wanted).map_err(host)?;
    }
    Ok(Opened { bytes: volume.size(), blank: volume.is_blank(), guest_written: volume.written_by() == WrittenBy::Guest, grown })
}

/// The size of a disk that has at least so many bytes.
fn disk_bytes(size: u64) -> u64 {
    size.max(DISK_BYTES_MIN).checked_next_multiple_of(BLOCK).unwrap_or(size)
}

fn left(content: &Content, generation: u64) -> Left {
    Left { root: content.digest(), generation, size_bytes: content.size }
}

/// Writes what an image has that is neither hole nor zeros. Doing it again is harmless.
fn pour(device: &dyn Device, path: &str) -> std::io::Result<()> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    if bytes > device.size() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, format!("it has {bytes} bytes, the disk {}", device.size())));
    }
    let (mut at, mut buffer) = (0, vec![0; POUR_BYTES]);
    while at < bytes {
        let begin = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(begin) => begin,
            Err(Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(begin))?;
        // What lies around it in its blocks is zeros.
        at = begin / BLOCK * BLOCK;
        while at < hole {
            let len = usize::try_from(bytes.min(hole.next_multiple_of(BLOCK)) - at).unwrap_or(POUR_BYTES).min(POUR_BYTES);
            let piece = buffer.get_mut(..len).unwrap_or_default();
            file.read_exact_at(piece, at)?;
            pour_piece(device, at, piece)?;
            at += len as u64;
        }
    }
    device.flush()
}

/// Writes the blocks of a piece that are not zeros, as many at once as there are.
fn pour_piece(device: &dyn Device, at: u64, piece: &[u8]) -> std::io::Result<()> {
    let mut offset = at;
    for run in piece.chunks(BLOCK as usize).collect::<Vec<_>>().chunk_by(|one, next| crate::is_zero(one) == crate::is_zero(next)) {
        let len: usize = run.iter().map(|block| block.len()).sum();
        let begin = usize::try_from(offset - at).unwrap_or(usize::MAX);
        if run.first().is_some_and(|block| !crate::is_zero(block)) {
            device.write(offset, piece.get(begin..begin + len).unwrap_or_default(), false)?;
        }
        offset += len as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::device::Piece;

    /// A disk in memory, and what was written on it.
    struct Memory(std::sync::Mutex<(Vec<u8>, Vec<(u64, usize)>)>);

    impl Device for Memory {
        fn size(&self) -> u64 {
            lock(&self.0).0.len() as u64
        }
        fn read_only(&self) -> bool {
            false
        }
        fn read_ready(&self, _: u64, _: &mut [u8]) -> Option<std::io::Result<()>> {
            None
        }
        fn read(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            Ok(())
        }
        fn write(&self, offset: u64, bytes: &[u8], _: bool) -> std::io::Result<()> {
            let mut disk = lock(&self.0);
            disk.0[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
            disk.1.push((offset, bytes.len()));
            Ok(())
        }
        fn zero(&self, _: u64, _: u64, _: bool, _: bool) -> std::io::Result<()> {
            Ok(())
        }
        fn discard(&self, _: u64, _: u64) -> std::io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> std::io::Result<()> {
            Ok(())
        }
        fn pieces(&self, _: u64, _: u64) -> std::io::Result<Vec<Piece>> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn what_is_poured_is_what_an_image_has_and_no_zeros() {
        let mut image = tempfile::NamedTempFile::new().unwrap();
        let mut bytes = vec![0u8; 5 << 20];
        for (at, len) in [(0, 10), (8_192, 4_096), (12_288, 5_000), (1 << 20, 2 << 20), ((5 << 20) - 3, 3)] {
            bytes[at..at + len].fill(7);
        }
        image.write_all(&bytes).unwrap();
        rustix::fs::fallocate(
            image.as_file(),
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            4 << 20,
            900_000,
        )
        .unwrap();
        let disk = Memory(std::sync::Mutex::new((vec![0; 6 << 20], Vec::new())));
        pour(&disk, image.path().to_str().unwrap()).unwrap();
        let (written, pieces) = disk.0.into_inner().unwrap();
        assert!(written[..bytes.len()] == bytes);
        let sum: usize = pieces.iter().map(|(_, len)| len).sum();
        assert_eq!(sum, 4_096 + 4_096 + 8_192 + (2 << 20) + 4_096, "{pieces:?}");
        let small = Memory(std::sync::Mutex::new((vec![0; 4 << 20], Vec::new())));
        assert!(pour(&small, image.path().to_str().unwrap()).is_err());
    }

    #[test]
    fn a_disk_has_whole_blocks_and_room_for_a_file_system() {
        assert_eq!([1, 16 << 20, (16 << 20) + 1].map(disk_bytes), [16 << 20, 16 << 20, (16 << 20) + 4_096]);
        assert_eq!(disk_bytes(u64::MAX), u64::MAX);
    }
}
