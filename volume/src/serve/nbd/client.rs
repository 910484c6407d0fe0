//! The client's end of NBD: negotiation, and the connection afterwards.
//!
//! Owns getting from a connected socket to one on which requests can be sent and replies come without structure. Does not own sending
//! again what a server that went away had not replied to (`fuse`).

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::wire::{FIXED_NEWSTYLE, Fields, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC, answer, info, option};

/// A server that says nothing for this long during the negotiation is none.
const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer of a server that is read, in bytes: names and descriptions have at most 4,096.
const ANSWER_BYTES_MAX: u32 = 16 * 1024;
/// Most answers before the export is served.
const ANSWERS_MAX: u32 = 64;

/// What is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// In bytes.
    pub size: u64,
    /// What it can do: see [`flag`](super::wire::flag).
    pub flags: u16,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket.
    #[error("no connection to an NBD server: {0}")]
    Io(#[from] io::Error),
    /// It is something else, or broken.
    #[error("the NBD server said something that is not understood: {0}")]
    Protocol(&'static str),
    /// It has no such export.
    #[error("the NBD server refuses to serve the export (answer {0:#x})")]
    Refused(u32),
}

/// Connects to the server on a socket.
///
/// # Errors
/// See [`ClientError`].
pub fn connect(path: &Path, name: &str) -> Result<(UnixStream, Export), ClientError> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(NEGOTIATION_TIMEOUT))?;
    stream.set_write_timeout(Some(NEGOTIATION_TIMEOUT))?;
    let export = negotiate(&mut &stream, name)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok((stream, export))
}

/// Negotiates the export `name`, without structured replies.
///
/// # Errors
/// See [`ClientError`].
pub fn negotiate<S: Read + Write>(stream: &mut S, name: &str) -> Result<Export, ClientError> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    let mut from = Fields(&greeting);
    if (from.u64(), from.u64()) != (Some(SERVER_MAGIC), Some(OPTION_MAGIC)) {
        return Err(ClientError::Protocol("it does not speak NBD's newstyle"));
    }
    if from.u16().is_none_or(|flags| flags & FIXED_NEWSTYLE == 0) {
        return Err(ClientError::Protocol("it does not speak the fixed newstyle"));
    }
    let mut said = u32::from(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes().to_vec();
    said.extend(OPTION_MAGIC.to_be_bytes());
    said.extend(option::GO.to_be_bytes());
    // Names are short.
    said.extend((name.len() as u32 + 6).to_be_bytes());
    said.extend((name.len() as u32).to_be_bytes());
    said.extend(name.as_bytes());
    said.extend(0u16.to_be_bytes());
    stream.write_all(&said)?;
    let mut export = None;
    for _ in 0..ANSWERS_MAX {
        let (kind, data) = receive(stream)?;
        match kind {
            answer::INFO => {
                let mut from = Fields(&data);
                if from.u16() == Some(info::EXPORT) {
                    let (size, flags) = from.u64().zip(from.u16()).ok_or(ClientError::Protocol("an export without a size"))?;
                    export = Some(Export { size, flags });
                }
            }
            answer::ACK => return export.ok_or(ClientError::Protocol("it serves an export and does not say which")),
            other => return Err(ClientError::Refused(other)),
        }
    }
    Err(ClientError::Protocol("it says too much about an export"))
}

/// An answer to `GO`: its kind and data.
fn receive<S: Read>(stream: &mut S) -> Result<(u32, Vec<u8>), ClientError> {
    let mut head = [0; 20];
    stream.read_exact(&mut head)?;
    let mut from = Fields(&head);
    if (from.u64(), from.u32()) != (Some(OPTION_REPLY_MAGIC), Some(option::GO)) {
        return Err(ClientError::Protocol("an answer to nothing that was asked"));
    }
    let (Some(kind), Some(len)) = (from.u32(), from.u32()) else { return Err(ClientError::Protocol("half an answer")) };
    if len > ANSWER_BYTES_MAX {
        return Err(ClientError::Protocol("an answer that is too long"));
    }
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::serve::nbd::handshake::{self, Handshake, MESSAGE_BYTES_MAX, Step};

    /// The other end, which has said something and keeps what it is told.
    struct Said {
        says: io::Cursor<Vec<u8>>,
        told: Vec<u8>,
    }

    impl Said {
        fn new(says: Vec<u8>) -> Self {
            Self { says: io::Cursor::new(says), told: Vec::new() }
        }
    }

    impl Read for Said {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.says.read(buffer)
        }
    }

    impl Write for Said {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.told.extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// All that our server says to a client that asks for `name` at once.
    fn server(name: &str, size: u64) -> Vec<u8> {
        let mut says = Vec::new();
        let export = handshake::Export { name: "disk".into(), size, read_only: false };
        let mut server = Handshake::new(export, &mut says);
        let mut client = Said::new(says.clone());
        let _ = negotiate(&mut client, name);
        let mut told = &client.told[..];
        while let Ok(Step::Took(bytes)) = server.take(told, &mut says) {
            told = &told[bytes..];
        }
        says
    }

    #[test]
    fn our_server_is_understood() {
        for name in ["", "disk"] {
            let export = negotiate(&mut Said::new(server(name, 7_777)), name).unwrap();
            assert_eq!(export, Export { size: 7_777, flags: 0b110_1101 });
        }
        let refused = negotiate(&mut Said::new(server("other", 1)), "other");
        assert!(matches!(refused, Err(ClientError::Refused(answer::ERR_UNKNOWN))));
    }

    #[test]
    fn a_server_that_stops_in_the_middle_is_none() {
        let says = server("", 1);
        for len in 0..says.len() {
            assert!(negotiate(&mut Said::new(says[..len].to_vec()), "").is_err(), "{len}");
        }
    }

    #[test]
    fn a_server_is_not_believed_to_say_much() {
        let mut says = server("", 1)[..18].to_vec();
        says.extend(OPTION_REPLY_MAGIC.to_be_bytes());
        says.extend([option::GO, answer::INFO, u32::MAX].iter().flat_map(|field| field.to_be_bytes()));
        says.resize(MESSAGE_BYTES_MAX * 2, 0);
        assert!(matches!(negotiate(&mut Said::new(says), ""), Err(ClientError::Protocol(_))));
    }

    proptest! {
        #[test]
        fn whatever_a_server_says_ends_well(at in 0usize..120, noise in proptest::collection::vec(any::<u8>(), 1..60)) {
            let mut says = server("", 1);
            says.truncate(at);
            says.extend(noise);
            let _ = negotiate(&mut Said::new(says), "");
        }
    }
}
