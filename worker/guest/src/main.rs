//! The agent's program: the first process of a machine or of a container, or for tests an ordinary one.
//!
//! Owns only how it is started. As the first process it never ends but by switching the machine off.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::ExitCode;

use volley_guest::agent::{self, Options, Transport, boot};
use volley_guest::container;

const USAGE: &str = "usage: volley-guest --listen PATH | --vsock PORT
As the first process of a machine it takes its channel from the kernel's command line instead.";

fn main() -> ExitCode {
    // A machine's kernel says nothing of the kind.
    if std::env::args_os().nth(1).is_some_and(|word| word == container::WORD) {
        return ExitCode::from(container::main(std::env::args_os().skip(2).collect()));
    }
    if std::process::id() == 1 {
        first_process();
        return ExitCode::FAILURE;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let transport = match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["--listen", path] => listen(path),
        ["--vsock", port] => listen_vsock(port),
        _ => Err(USAGE.to_owned()),
    };
    let served = transport.and_then(|transport| agent::run(Options { transport, machine: false }).map_err(|e| e.to_string()));
    let Err(why) = served;
    eprintln!("{why}");
    ExitCode::FAILURE
}

/// Brings the machine up and serves. Whatever fails is said on the console, and the machine is switched off: the host learns of it.
fn first_process() {
    let served = match boot::boot() {
        Ok(transport) => agent::run(Options { transport, machine: true }).map_err(|e| e.to_string()),
        Err(e) => Err(e.to_string()),
    };
    let Err(why) = served;
    eprintln!("volley-guest: {why}");
    let off = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    eprintln!("volley-guest: the machine can't be switched off: {off:?}");
}

fn listen_vsock(port: &str) -> Result<Transport, String> {
    let number = port.parse().map_err(|e| format!("--vsock {port}: {e}"))?;
    boot::listen_vsock(number).map(Transport::Listener).map_err(|e| format!("--vsock {port}: {e}"))
}

fn listen(path: &str) -> Result<Transport, String> {
    let listener = UnixListener::bind(path).map_err(|e| format!("{path}: {e}"))?;
    listener.set_nonblocking(true).map_err(|e| format!("{path}: {e}"))?;
    Ok(Transport::Listener(OwnedFd::from(listener)))
}
