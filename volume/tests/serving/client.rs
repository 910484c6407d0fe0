//! A client that can say anything, and tells what came back.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use volley_volume::serve::nbd::wire::{OPTION_MAGIC, RequestHead, SIMPLE_REPLY_MAGIC, chunk, command, option};

pub struct Client {
    pub stream: UnixStream,
    pub size: u64,
    pub flags: u16,
    next: u64,
}

impl Drop for Client {
    fn drop(&mut self) {
        // A process that another test is just starting may have the descriptor too.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// A reply that is whole.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reply {
    pub error: u32,
    /// What was read, with its offset: in the pieces in which it came.
    pub data: Vec<(u64, Vec<u8>)>,
    /// Lengths and flags of extents.
    pub extents: Vec<(u32, u32)>,
}

impl Reply {
    pub fn bytes(&self) -> Vec<u8> {
        let mut pieces: Vec<&(u64, Vec<u8>)> = self.data.iter().collect();
        pieces.sort();
        pieces.into_iter().flat_map(|(_, bytes)| bytes.clone()).collect()
    }
}

fn option(asked: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(asked.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// What a client says until it may ask for bytes.
pub fn negotiation(structured: bool) -> Vec<u8> {
    let mut said = 3u32.to_be_bytes().to_vec();
    if structured {
        said.extend(option(option::STRUCTURED_REPLY, &[]));
        let mut query = vec![0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 15];
        query.extend(b"base:allocation");
        said.extend(option(option::SET_META_CONTEXT, &query));
    }
    said.extend(option(option::GO, &[0; 6]));
    said
}

impl Client {
    pub fn connect(path: &Path, structured: bool) -> Self {
        Self::over(UnixStream::connect(path).unwrap(), structured)
    }

    pub fn over(stream: UnixStream, structured: bool) -> Self {
        let mut client = Self { stream, size: 0, flags: 0, next: 1 };
        client.stream.write_all(&negotiation(structured)).unwrap();
        client.take(18);
        loop {
            let head = client.take(20);
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
            let (asked, kind, data) = (number(8), number(12), number(16));
            let data = client.take(data as usize);
            if kind == 3 && data[..2] == [0, 0] {
                client.size = u64::from_be_bytes(data[2..10].try_into().unwrap());
                client.flags = u16::from_be_bytes(data[10..].try_into().unwrap());
            }
            assert!(kind < 1 << 31, "option {asked} is answered {kind:#x}");
            if (asked, kind) == (option::GO, 1) {
                return client;
            }
        }
    }

    fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn number<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Sends a request; its cookie.
    pub fn send(&mut self, command: u16, flags: u16, offset: u64, len: u32, bytes: &[u8]) -> u64 {
        let cookie = self.next;
        self.next += 1;
        let mut said = RequestHead { flags, command, cookie, offset, len }.encode().to_vec();
        said.extend(bytes);
        self.stream.write_all(&said).unwrap();
        cookie
    }

    /// The next reply that is whole; of others, pieces may come in between.
    pub fn next(&mut self, open: &mut BTreeMap<u64, Reply>) -> (u64, Reply) {
        self.next_of(open, 0)
    }

    /// `simple` is how many bytes follow a reply without structure that is no error.
    fn next_of(&mut self, open: &mut BTreeMap<u64, Reply>, simple: usize) -> (u64, Reply) {
        loop {
            if u32::from_be_bytes(self.number()) == SIMPLE_REPLY_MAGIC {
                let (error, cookie) = (u32::from_be_bytes(self.number()), u64::from_be_bytes(self.number()));
                let data = if error == 0 && simple > 0 { vec![(0, self.take(simple))] } else { Vec::new() };
                return (cookie, Reply { error, data, extents: Vec::new() });
            }
            let (flags, kind) = (u16::from_be_bytes(self.number()), u16::from_be_bytes(self.number()));
            let (cookie, len) = (u64::from_be_bytes(self.number()), u32::from_be_bytes(self.number()));
            let payload = self.take(len as usize);
            let reply = open.entry(cookie).or_default();
            match kind {
                chunk::NONE => assert!(payload.is_empty()),
                chunk::OFFSET_DATA => reply.data.push((u64::from_be_bytes(payload[..8].try_into().unwrap()), payload[8..].to_vec())),
                chunk::BLOCK_STATUS => {
                    let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
                    reply.extents = payload[4..].chunks(8).map(|extent| (number(&extent[..4]), number(&extent[4..]))).collect();
                }
                chunk::ERROR => reply.error = u32::from_be_bytes(payload[..4].try_into().unwrap()),
                other => panic!("a piece of kind {other}"),
            }
            if flags == chunk::DONE {
                return (cookie, open.remove(&cookie).unwrap());
            }
        }
    }

    /// Asks one thing and waits for it.
    pub fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u32, bytes: &[u8]) -> Reply {
        let cookie = self.send(command, flags, offset, len, bytes);
        let simple = if command == command::READ { len as usize } else { 0 };
        let (replied, reply) = self.next_of(&mut BTreeMap::new(), simple);
        assert_eq!(replied, cookie);
        reply
    }

    pub fn read(&mut self, offset: u64, len: u32) -> Reply {
        self.ask(command::READ, 0, offset, len, &[])
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> u32 {
        self.ask(command::WRITE, 0, offset, bytes.len() as u32, bytes).error
    }

    /// Has the server closed the connection? Waits for that.
    pub fn ended(mut self) -> bool {
        let mut rest = Vec::new();
        // A reset is an end too: of what it did not read.
        self.stream.read_to_end(&mut rest).is_ok_and(|_| rest.is_empty()) || rest.is_empty()
    }
}
