//! What the kernel asks about the file.
//!
//! Owns the meaning of each request: reads, writes, sync and holes go to the server, the rest is answered here. The file behaves as a
//! disk does: it has a size that no user of it changes, and ends where it ends. Does not own the server (`link`).

use std::fs::File;
use std::io::Read;
use std::sync::Arc;

use crate::serve::nbd::wire::flag;

use super::link::{Link, Wish};
use super::wire::{self, Asked, MAJOR, MINOR, REQUEST_BYTES_MAX, Request, agreed, opened};
use super::{FuseError, Owner};

/// `FALLOC_FL_KEEP_SIZE`, `FALLOC_FL_PUNCH_HOLE`, `FALLOC_FL_ZERO_RANGE` of linux/falloc.h.
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;

/// Answers the kernel until the file is unmounted. `ready` is called when it can be opened.
///
/// # Errors
/// The kernel speaks something else.
pub fn run(mut kernel: &File, link: &Link, owner: Owner, ready: impl FnOnce()) -> Result<(), FuseError> {
    let mut buffer = vec![0; REQUEST_BYTES_MAX];
    let mut ready = Some(ready);
    loop {
        let len = match kernel.read(&mut buffer) {
            Ok(len) => len,
            Err(e) => match e.raw_os_error() {
                Some(libc::ENODEV) => return Ok(()),
                // ENOENT: it was given up while it was read.
                Some(libc::EINTR | libc::EAGAIN | libc::ENOENT) => continue,
                _ => return Err(FuseError::Kernel(e)),
            },
        };
        let Some(request) = buffer.get(..len).and_then(Request::decode) else { return Err(FuseError::NoRequest(len)) };
        if let Asked::Init { major, minor, readahead, flags } = request.asked {
            if (major, minor.min(MINOR)) != (MAJOR, MINOR) {
                link.answer(request.unique, libc::EPROTO, &[]);
                return Err(FuseError::Version { major, minor });
            }
            link.answer(request.unique, 0, &agreed(readahead, flags));
            if let Some(ready) = ready.take() {
                ready();
            }
            continue;
        }
        perform(link, owner, &request);
    }
}

fn perform(link: &Link, owner: Owner, request: &Request<'_>) {
    let export = link.export();
    let read_only = export.flags & flag::READ_ONLY != 0;
    let file = wire::File { size: export.size, read_only, uid: owner.uid, gid: owner.gid };
    let outcome = match request.asked {
        Asked::Silent => return,
        Asked::GetAttr => Ok(file.attributes()),
        // Times are not kept; what would change the file's owner, mode or size is not for its users to change.
        Asked::SetAttr { mode: false, uid, gid, size } if file.is(uid, gid, size) => Ok(file.attributes()),
        Asked::SetAttr { .. } => Err(libc::EPERM),
        Asked::Open { flags } if read_only && flags & libc::O_ACCMODE.cast_unsigned() != 0 => Err(libc::EROFS),
        Asked::Open { .. } => Ok(opened()),
        Asked::StatFs => Ok(file.sizes()),
        Asked::Nothing => Ok(Vec::new()),
        Asked::Init { .. } | Asked::Other(_) => Err(libc::ENOSYS),
        Asked::Read { .. } | Asked::Write { .. } | Asked::Sync | Asked::Allocate { .. } => match wish(&request.asked, &file) {
            Ok(Some(wish)) => return link.ask(request.unique, wish),
            Ok(None) => Ok(Vec::new()),
            Err(errno) => Err(errno),
        },
    };
    match outcome {
        Ok(bytes) => link.answer(request.unique, 0, &bytes),
        Err(errno) => link.answer(request.unique, errno, &[]),
    }
}

/// What is wanted of the server. None: nothing, and the answer is empty. Err: an errno.
fn wish(asked: &Asked<'_>, file: &wire::File) -> Result<Option<Wish>, i32> {
    let left = |offset: u64| file.size.saturating_sub(offset);
    let writable = || if file.read_only { Err(libc::EROFS) } else { Ok(()) };
    match *asked {
        Asked::Read { offset, len } => {
            let len = u32::try_from(left(offset)).unwrap_or(u32::MAX).min(len).min(wire::TRANSFER_BYTES_MAX);
            Ok((len > 0).then_some(Wish::Read { offset, len }))
        }
        Asked::Write { offset, bytes, sync } => {
            writable()?;
            let here = usize::try_from(left(offset)).unwrap_or(usize::MAX).min(bytes.len());
            if here == 0 {
                // As a disk says it that is at its end.
                return Err(libc::ENOSPC);
            }
            Ok(Some(Wish::Write { offset, bytes: Arc::from(&bytes[..here]), fua: sync }))
        }
        Asked::Allocate { offset, len, mode } => {
            writable()?;
            let end = offset.checked_add(len).ok_or(libc::EFBIG)?;
            if end > file.size && mode & KEEP_SIZE == 0 {
                return Err(libc::ENOSPC);
            }
            let hole = match mode & !KEEP_SIZE {
                // A hole reads as zeros, which TRIM does not promise.
                PUNCH_HOLE => true,
                ZERO_RANGE => false,
                _ => return Err(libc::EOPNOTSUPP),
            };
            let len = len.min(left(offset));
            Ok((len > 0).then_some(Wish::Zero { offset, len, hole }))
        }
        // Of what else there is only a sync asks the server.
        _ => Ok(if file.read_only { None } else { Some(Wish::Flush) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: wire::File = wire::File { size: 10_000, read_only: false, uid: 1, gid: 1 };
    const READ_ONLY: wire::File = wire::File { read_only: true, ..FILE };

    fn said(asked: &Asked<'_>, file: &wire::File) -> String {
        format!("{:?}", wish(asked, file))
    }

    #[test]
    fn the_file_ends_where_it_ends() {
        assert_eq!(said(&Asked::Read { offset: 9_990, len: 100 }, &FILE), "Ok(Some(Read { offset: 9990, len: 10 }))");
        assert_eq!(said(&Asked::Read { offset: 10_000, len: 1 }, &FILE), "Ok(None)");
        let write = |offset| Asked::Write { offset, bytes: &[1; 3], sync: false };
        assert_eq!(said(&write(9_998), &FILE), "Ok(Some(Write { offset: 9998, bytes: [1, 1], fua: false }))");
        assert_eq!(said(&write(u64::MAX), &FILE), format!("Err({})", libc::ENOSPC));
    }

    #[test]
    fn holes_and_zeros_are_told_apart() {
        let allocate = |offset, len, mode| said(&Asked::Allocate { offset, len, mode }, &FILE);
        assert_eq!(allocate(0, 20_000, PUNCH_HOLE | KEEP_SIZE), "Ok(Some(Zero { offset: 0, len: 10000, hole: true }))");
        assert_eq!(allocate(5, 10, ZERO_RANGE), "Ok(Some(Zero { offset: 5, len: 10, hole: false }))");
        assert_eq!(allocate(0, 20_000, ZERO_RANGE), format!("Err({})", libc::ENOSPC));
        assert_eq!(allocate(0, 10, 0), format!("Err({})", libc::EOPNOTSUPP));
        assert_eq!(allocate(0, 10, 8), format!("Err({})", libc::EOPNOTSUPP));
        assert_eq!(allocate(u64::MAX, 10, ZERO_RANGE), format!("Err({})", libc::EFBIG));
    }

    #[test]
    fn nothing_is_written_to_what_is_read_only() {
        assert_eq!(said(&Asked::Write { offset: 0, bytes: b"x", sync: true }, &READ_ONLY), format!("Err({})", libc::EROFS));
        assert_eq!(said(&Asked::Allocate { offset: 0, len: 1, mode: 3 }, &READ_ONLY), format!("Err({})", libc::EROFS));
        assert_eq!(said(&Asked::Sync, &READ_ONLY), "Ok(None)");
        assert_eq!(said(&Asked::Sync, &FILE), "Ok(Some(Flush))");
    }
}
