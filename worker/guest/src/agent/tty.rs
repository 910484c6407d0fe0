//! A terminal for a command: a pair of the kernel's pseudo terminals.
//!
//! Owns making it and its size. What passes through it is moved by `exec`.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use volley_jobspecs::wire::guest::Tty;

use crate::files::below;

/// Where the kernel makes them; it looks for their file system in `pts` beside it.
const MAKER: &str = "/dev/ptmx";
/// `_IOW('T', 0x31, int)` and `_IO('T', 0x41)` of asm-generic/ioctls.h: lets the other end be opened, and opens it, wherever /dev/pts is.
const TIOCSPTLCK: libc::c_ulong = 0x4004_5431;
const TIOCGPTPEER: libc::c_ulong = 0x5441;

/// A new one: the agent's end, and the command's, which is its user's so that it can be opened by name (`/dev/pts/0`).
///
/// # Errors
/// What the system says.
pub fn open(size: Tty, owner: Option<(u32, u32)>) -> io::Result<(OwnedFd, OwnedFd)> {
    let ours = OwnedFd::from(OpenOptions::new().read(true).write(true).open(MAKER)?);
    let unlocked: libc::c_int = 0;
    // SAFETY: the request reads one int, which lives over the call.
    if unsafe { libc::ioctl(ours.as_raw_fd(), TIOCSPTLCK, &raw const unlocked) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the request takes flags of an open and gives a descriptor that is nobody else's.
    let theirs = unsafe {
        let fd = libc::ioctl(ours.as_raw_fd(), TIOCGPTPEER, libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    below::own(&theirs, owner)?;
    resize(&ours, size)?;
    Ok((ours, theirs))
}

/// Gives it another size; what runs in its foreground is told (SIGWINCH).
///
/// # Errors
/// What the system says.
pub fn resize(tty: impl AsFd, size: Tty) -> io::Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the request reads one such struct, which lives over the call.
    if unsafe { libc::ioctl(tty.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
