//! QEMU's control connection (QMP, <https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html>).
//!
//! Owns commands, their answers and the events between them, each under a deadline. What QEMU says is not trusted: a guest may have
//! broken into it, so lines and events are bounded.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::UnixStream;

use super::super::console::plain;
use super::super::{Kind, VmmError};

/// Longest line, in bytes: the answers to what is asked here have a few hundred.
const LINE_BYTES_MAX: usize = 256 * 1024;
/// Events kept until somebody waits for them; the oldest go first.
const EVENTS_MAX: usize = 64;
/// How long a command may take that does little. While a disk behind NBD is away, `stop` waits for it.
pub const COMMAND_WAIT: Duration = Duration::from_secs(30);

/// A control connection.
#[derive(Debug)]
pub struct Qmp {
    socket: UnixStream,
    read: Vec<u8>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Takes a connection, and waits until QEMU greets.
    ///
    /// # Errors
    /// [`VmmError`].
    pub async fn greet(socket: UnixStream, time_max: Duration) -> Result<Self, VmmError> {
        let mut qmp = Self { socket, read: Vec::new(), events: VecDeque::new() };
        let what = "its start";
        let greeting = tokio::time::timeout(time_max, qmp.line(what)).await.map_err(|_| silent(what, time_max))??;
        if greeting.get("QMP").is_none() {
            return Err(nonsense(what, "no greeting"));
        }
        qmp.command("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Has QEMU do something.
    ///
    /// # Errors
    /// [`VmmError`].
    pub async fn command(&mut self, name: &str, arguments: Value) -> Result<Value, VmmError> {
        self.command_with(name, arguments, None).await
    }

    /// The same, with a descriptor.
    ///
    /// # Errors
    /// [`VmmError`].
    pub async fn command_with(&mut self, name: &str, arguments: Value, fd: Option<BorrowedFd<'_>>) -> Result<Value, VmmError> {
        let line = format!("{}\n", json!({"execute": name, "arguments": arguments}));
        let asked = async {
            self.send(line.as_bytes(), fd).await.map_err(|e| gone(name, &e))?;
            loop {
                let mut answer = self.line(name).await?;
                if let Some(result) = answer.get_mut("return") {
                    return Ok(result.take());
                }
                if let Some(error) = answer.get("error") {
                    let why = plain(error.get("desc").and_then(Value::as_str).unwrap_or("it does not say why"));
                    return Err(VmmError::Refused { vmm: Kind::Qemu, what: name.to_owned(), why });
                }
                self.keep(answer);
            }
        };
        tokio::time::timeout(COMMAND_WAIT, asked).await.map_err(|_| silent(name, COMMAND_WAIT))?
    }

    /// Waits until a migration, out or in, is over. Needs the capability `events`.
    ///
    /// # Errors
    /// [`VmmError::Refused`] when it failed.
    pub async fn migrated(&mut self, what: &str, time_max: Duration) -> Result<(), VmmError> {
        let waited = async {
            loop {
                while let Some(event) = self.events.pop_front() {
                    if event.get("event").and_then(Value::as_str) != Some("MIGRATION") {
                        continue;
                    }
                    match event.pointer("/data/status").and_then(Value::as_str) {
                        Some("completed") => return Ok(()),
                        Some(status @ ("failed" | "cancelled")) => {
                            return Err(VmmError::Refused { vmm: Kind::Qemu, what: what.to_owned(), why: format!("it {status}") });
                        }
                        _ => {}
                    }
                }
                let event = self.line(what).await?;
                self.keep(event);
            }
        };
        tokio::time::timeout(time_max, waited).await.map_err(|_| silent(what, time_max))?
    }

    fn keep(&mut self, event: Value) {
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    async fn send(&mut self, mut bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        let mut fds = fds.as_slice();
        while !bytes.is_empty() {
            self.socket.writable().await?;
            let sent = self.socket.try_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if !fds.is_empty() {
                    control.push(SendAncillaryMessage::ScmRights(fds));
                }
                Ok(rustix::net::sendmsg(self.socket.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
            });
            match sent {
                Ok(len) => {
                    bytes = bytes.get(len..).unwrap_or_default();
                    fds = &[];
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The next line. Cancel-safe: what was read of one stays.
    async fn line(&mut self, what: &str) -> Result<Value, VmmError> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|e| nonsense(what, &e.to_string()));
            }
            if self.read.len() > LINE_BYTES_MAX {
                return Err(nonsense(what, "a line without an end"));
            }
            match self.socket.read_buf(&mut self.read).await {
                Ok(0) => return Err(gone(what, &io::Error::from(io::ErrorKind::UnexpectedEof))),
                Ok(_) => {}
                Err(e) => return Err(gone(what, &e)),
            }
        }
    }
}

/// The driver replaces it by what it knows of the process's end.
fn gone(what: &str, why: &io::Error) -> VmmError {
    VmmError::Ended { vmm: Kind::Qemu, what: what.to_owned(), end: format!("its control connection broke: {why}"), said: String::new() }
}

fn silent(what: &str, after: Duration) -> VmmError {
    VmmError::Silent { vmm: Kind::Qemu, what: what.to_owned(), after }
}

fn nonsense(what: &str, why: &str) -> VmmError {
    VmmError::Nonsense { vmm: Kind::Qemu, what: what.to_owned(), why: plain(why) }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    /// Plays QEMU: greets, then answers each command with the next of `lines`.
    async fn played(lines: &'static [&'static str]) -> Result<Qmp, VmmError> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(async move {
            let (read, mut write) = theirs.into_split();
            let mut commands = tokio::io::BufReader::new(read);
            let _ = write.write_all(b"{\"QMP\": {\"version\": {}}}\r\n").await;
            for line in ["{\"return\": {}}"].iter().chain(lines) {
                let mut command = String::new();
                let _ = tokio::io::AsyncBufReadExt::read_line(&mut commands, &mut command).await;
                let _ = write.write_all(format!("{line}\r\n").as_bytes()).await;
            }
        });
        Qmp::greet(ours, COMMAND_WAIT).await
    }

    #[tokio::test]
    async fn answers_come_between_events() {
        let events = "{\"event\":\"MIGRATION\",\"data\":{\"status\":\"active\"}}\r\n{\"event\":\"STOP\"}\r\n{\"event\":\"MIGRATION\",\"data\":{\"status\":\"completed\"}}\r\n{\"return\":{\"a\":1}}";
        let mut qmp = played(Box::leak(Box::new([events]))).await.unwrap();
        assert_eq!(qmp.command("migrate", json!({})).await.unwrap(), json!({"a": 1}));
        qmp.migrated("saving", COMMAND_WAIT).await.unwrap();
        assert!(matches!(qmp.command("query-status", json!({})).await, Err(VmmError::Ended { .. })));
    }

    #[tokio::test]
    async fn a_refusal_and_nonsense_are_told_apart() {
        let mut qmp = played(&["{\"error\":{\"class\":\"GenericError\",\"desc\":\"no\\u001b such\"}}", "nothing"]).await.unwrap();
        assert_eq!(qmp.command("cont", json!({})).await.unwrap_err().to_string(), "QEMU refused cont: no  such");
        assert!(matches!(qmp.command("cont", json!({})).await, Err(VmmError::Nonsense { .. })));
    }
}
