//! Joins its input and output to a vsock port of its own machine, so that a test can reach an agent that listens there. `vsock PORT`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};

fn main() -> io::Result<()> {
    let port = std::env::args().nth(1).and_then(|port| port.parse().ok()).ok_or_else(|| io::Error::other("usage: vsock PORT"))?;
    let socket = connect(port)?;
    let mut from = socket.try_clone()?;
    std::thread::spawn(move || {
        let copied = copy(&mut from, &mut io::stdout());
        std::process::exit(i32::from(copied.is_err()));
    });
    let mut to = socket;
    copy(&mut io::stdin(), &mut to)
}

/// Each piece at once: what is at both ends waits for answers.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut bytes = [0; 16 * 1024];
    loop {
        let len = from.read(&mut bytes)?;
        if len == 0 {
            return Ok(());
        }
        to.write_all(bytes.get(..len).unwrap_or_default())?;
        to.flush()?;
    }
}

fn connect(port: u32) -> io::Result<File> {
    // SAFETY: plain system calls; the address is plain data that lives over the call; the descriptor is nobody else's.
    unsafe {
        let socket = libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = File::from_raw_fd(socket);
        let mut address: libc::sockaddr_vm = std::mem::zeroed();
        address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).map_err(io::Error::other)?;
        address.svm_cid = libc::VMADDR_CID_LOCAL;
        address.svm_port = port;
        let len = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
        let connected = libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len);
        if connected == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
    }
}
