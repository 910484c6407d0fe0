//! The server's half of the negotiation: from the greeting to the first request.
//!
//! Owns which option is answered how, with one export to offer. Pure: bytes in, bytes out. Takes one message at a time, and never
//! more than [`MESSAGE_BYTES_MAX`]; a longer one is refused and passed over. Does not own sockets or time (`connection`).

use super::wire::{
    ALLOCATION, ALLOCATION_ID, FIXED_NEWSTYLE, Fields, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC, TEXT_BYTES_MAX, answer,
    flag, info, option,
};

/// Bytes before an option's data.
const OPTION_HEAD_BYTES: usize = 16;
/// Longest data of an option that is looked at, in bytes: a name, and some queries.
const OPTION_BYTES_MAX: usize = 16 * 1024;
/// Longest message, in bytes: whoever holds so many holds a whole one.
pub const MESSAGE_BYTES_MAX: usize = OPTION_HEAD_BYTES + OPTION_BYTES_MAX;
/// Longest data of an option that is passed over, in bytes. Whoever says more means to keep us busy.
const SKIP_BYTES_MAX: u32 = 1 << 20;
/// Most options of a client: known ones need fewer than ten.
const OPTIONS_MAX: u32 = 128;
/// Most queries or wishes in one option: there is one context and there are five kinds of information.
const ASKED_MAX: usize = 256;
/// Zeros behind the answer to `EXPORT_NAME`.
const PADDING: [u8; 124] = [0; 124];
/// Smallest request, in bytes: the volume takes any.
pub const BLOCK_MIN: u32 = 1;
/// Preferred size and alignment of requests, in bytes: a block of the volume.
pub const BLOCK_PREFERRED: u32 = 4096;
/// Largest request that carries bytes, in bytes: what clients assume of servers that say nothing.
pub const BLOCK_MAX: u32 = 32 << 20;

/// What is offered.
#[derive(Debug, Clone)]
pub struct Export {
    /// Clients that ask for no name get it too. At most 4,096 bytes.
    pub name: String,
    /// In bytes.
    pub size: u64,
    /// Are all writes refused?
    pub read_only: bool,
}

/// What client and server agreed upon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// Reads are answered with structure.
    pub structured: bool,
    /// `BLOCK_STATUS` tells `base:allocation`.
    pub allocation: bool,
}

/// How it goes on after some bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// There is no whole message yet: again with what was there and more.
    More,
    /// So many bytes were used.
    Took(usize),
    /// So many were used; requests come next.
    Serve(usize, Agreed),
    /// The client leaves.
    Leave,
}

/// Why a negotiation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// It speaks something else.
    #[error("the client does not speak NBD's fixed newstyle (flags {0:#x})")]
    Flags(u32),
    /// What should begin an option does not.
    #[error("the client sent something that is no option ({0:#x})")]
    Magic(u64),
    /// See [`SKIP_BYTES_MAX`].
    #[error("the client sent an option of {0} bytes")]
    TooLong(u32),
    /// See [`OPTIONS_MAX`].
    #[error("the client sent more than {OPTIONS_MAX} options")]
    TooMany,
    /// The only option that has no way to say no.
    #[error("the client asked, with EXPORT_NAME, for an export that is not here")]
    NoSuchExport,
}

/// A negotiation.
#[derive(Debug)]
pub struct Handshake {
    export: Export,
    /// Have the client's flags come?
    greeted: bool,
    no_zeroes: bool,
    structured: bool,
    allocation: bool,
    options: u32,
    /// Bytes of a refused option that are still to come.
    skip: usize,
}

impl Handshake {
    /// Begins; what it says first is put into `out`.
    #[must_use]
    pub fn new(export: Export, out: &mut Vec<u8>) -> Self {
        out.extend(SERVER_MAGIC.to_be_bytes());
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        Self { export, greeted: false, no_zeroes: false, structured: false, allocation: false, options: 0, skip: 0 }
    }

    /// Takes at most one message from the front of `input`; answers go to `out`, at most a few hundred bytes and a name.
    ///
    /// # Errors
    /// The connection is to be closed.
    pub fn take(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<Step, HandshakeError> {
        if self.skip > 0 {
            let took = self.skip.min(input.len());
            self.skip -= took;
            return Ok(if took == 0 { Step::More } else { Step::Took(took) });
        }
        let mut from = Fields(input);
        if !self.greeted {
            return from.u32().map_or(Ok(Step::More), |flags| self.flags(flags));
        }
        let (Some(magic), Some(asked), Some(len)) = (from.u64(), from.u32(), from.u32()) else { return Ok(Step::More) };
        if magic != OPTION_MAGIC {
            return Err(HandshakeError::Magic(magic));
        }
        if self.options == OPTIONS_MAX {
            return Err(HandshakeError::TooMany);
        }
        let bytes = usize::try_from(len).map_err(|_| HandshakeError::TooLong(len))?;
        if bytes > OPTION_BYTES_MAX {
            if len > SKIP_BYTES_MAX {
                return Err(HandshakeError::TooLong(len));
            }
            self.options += 1;
            self.skip = bytes;
            reply(out, asked, answer::ERR_TOO_BIG, &[]);
            return Ok(Step::Took(OPTION_HEAD_BYTES));
        }
        let Some(data) = from.bytes(bytes) else { return Ok(Step::More) };
        self.options += 1;
        self.option(asked, data, OPTION_HEAD_BYTES + bytes, out)
    }

    fn flags(&mut self, flags: u32) -> Result<Step, HandshakeError> {
        let known = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
        if flags & !known != 0 || flags & u32::from(FIXED_NEWSTYLE) == 0 {
            return Err(HandshakeError::Flags(flags));
        }
        self.greeted = true;
        self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
        Ok(Step::Took(4))
    }

    fn option(&mut self, asked: u32, data: &[u8], took: usize, out: &mut Vec<u8>) -> Result<Step, HandshakeError> {
        let kind = match asked {
            option::EXPORT_NAME => return self.export_name(data, took, out),
            option::ABORT => {
                reply(out, asked, answer::ACK, &[]);
                return Ok(Step::Leave);
            }
            option::GO => match self.describe(asked, data, out) {
                Ok(()) => {
                    reply(out, asked, answer::ACK, &[]);
                    return Ok(Step::Serve(took, self.agreed()));
                }
                Err(kind) => kind,
            },
            option::INFO => done(self.describe(asked, data, out)),
            option::LIST if data.is_empty() => {
                reply(out, asked, answer::SERVER, &text(self.export.name.as_bytes()));
                answer::ACK
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                answer::ACK
            }
            option::LIST | option::STRUCTURED_REPLY => answer::ERR_INVALID,
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => done(self.contexts(asked, data, out)),
            _ => answer::ERR_UNSUP,
        };
        reply(out, asked, kind, &[]);
        Ok(Step::Took(took))
    }

    fn agreed(&self) -> Agreed {
        Agreed { structured: self.structured, allocation: self.structured && self.allocation }
    }

    fn is_ours(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.export.name.as_bytes()
    }

    fn transmission_flags(&self) -> u16 {
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_TRIM | flag::SEND_WRITE_ZEROES;
        if self.export.read_only {
            flags |= flag::READ_ONLY;
        }
        if self.structured {
            flags |= flag::SEND_DF;
        }
        flags
    }

    fn export_name(&self, name: &[u8], took: usize, out: &mut Vec<u8>) -> Result<Step, HandshakeError> {
        if !self.is_ours(name) {
            return Err(HandshakeError::NoSuchExport);
        }
        out.extend(self.export.size.to_be_bytes());
        out.extend(self.transmission_flags().to_be_bytes());
        if !self.no_zeroes {
            out.extend(PADDING);
        }
        Ok(Step::Serve(took, self.agreed()))
    }

    /// Tells everything about the export that a client must know, and its name if it was asked for. Err: the answer instead.
    fn describe(&self, asked: u32, data: &[u8], out: &mut Vec<u8>) -> Result<(), u32> {
        let mut from = Fields(data);
        let (Some(name), Some(count)) = (from.text(), from.u16()) else { return Err(answer::ERR_INVALID) };
        if usize::from(count) > ASKED_MAX || from.0.len() != usize::from(count) * 2 {
            return Err(answer::ERR_INVALID);
        }
        if !self.is_ours(name) {
            return Err(answer::ERR_UNKNOWN);
        }
        let mut about = info::EXPORT.to_be_bytes().to_vec();
        about.extend(self.export.size.to_be_bytes());
        about.extend(self.transmission_flags().to_be_bytes());
        reply(out, asked, answer::INFO, &about);
        let mut about = info::BLOCK_SIZE.to_be_bytes().to_vec();
        about.extend([BLOCK_MIN, BLOCK_PREFERRED, BLOCK_MAX].iter().flat_map(|size| size.to_be_bytes()));
        reply(out, asked, answer::INFO, &about);
        if from.0.chunks_exact(2).any(|kind| kind == info::NAME.to_be_bytes()) {
            let mut about = info::NAME.to_be_bytes().to_vec();
            about.extend(self.export.name.as_bytes());
            reply(out, asked, answer::INFO, &about);
        }
        Ok(())
    }

    /// Lists or chooses metadata. Err: the answer instead.
    fn contexts(&mut self, asked: u32, data: &[u8], out: &mut Vec<u8>) -> Result<(), u32> {
        let set = asked == option::SET_META_CONTEXT;
        if set {
            // Whatever becomes of this one, what an earlier one chose is chosen no more.
            self.allocation = false;
        }
        if !self.structured {
            return Err(answer::ERR_INVALID);
        }
        let mut from = Fields(data);
        let (Some(name), Some(count)) = (from.text(), from.u32()) else { return Err(answer::ERR_INVALID) };
        let count = usize::try_from(count).ok().filter(|count| *count <= ASKED_MAX).ok_or(answer::ERR_TOO_BIG)?;
        let mut wanted = !set && count == 0;
        for _ in 0..count {
            let query = from.text().ok_or(answer::ERR_INVALID)?;
            // A client may list a whole namespace, but not choose it.
            wanted |= query == ALLOCATION.as_bytes() || (!set && query == b"base:");
        }
        if !from.0.is_empty() {
            return Err(answer::ERR_INVALID);
        }
        if !self.is_ours(name) {
            return Err(answer::ERR_UNKNOWN);
        }
        if wanted {
            let id = if set { ALLOCATION_ID } else { 0 };
            let mut about = id.to_be_bytes().to_vec();
            about.extend(ALLOCATION.as_bytes());
            reply(out, asked, answer::META_CONTEXT, &about);
            self.allocation |= set;
        }
        Ok(())
    }
}

fn done(result: Result<(), u32>) -> u32 {
    result.err().unwrap_or(answer::ACK)
}

/// A text behind its length.
fn text(bytes: &[u8]) -> Vec<u8> {
    let bytes = &bytes[..bytes.len().min(TEXT_BYTES_MAX)];
    let mut out = (bytes.len() as u32).to_be_bytes().to_vec();
    out.extend(bytes);
    out
}

fn reply(out: &mut Vec<u8>, asked: u32, kind: u32, data: &[u8]) {
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(asked.to_be_bytes());
    out.extend(kind.to_be_bytes());
    // Ours are a few bytes and at most a name.
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

#[cfg(test)]
mod tests;
