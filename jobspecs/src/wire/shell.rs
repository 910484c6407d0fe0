//! A command in a task's machine, beside the task's own: what whoever wants it and the worker say to each other.
//!
//! Owns the shapes: the wish and its answer, and the frames of a session. They are the same on a worker's subjects and on the WebSocket of a
//! client, whose coordinator hands them on as they are. What the two ends hold each other to is in `link`. Does not own what a machine's agent
//! is asked (`guest`), nor any I/O.

pub mod link;

use std::fmt;

use minicbor::bytes::{ByteArray, ByteVec};
use minicbor::{Decode, Encode};

use crate::ids::AttemptName;
pub use crate::wire::guest::Tty;

/// Most bytes of input or output in one frame: short, so that what is typed waits for little behind it.
pub const PIECE_BYTES_MAX: usize = 32 * 1024;
/// Longest frame, in bytes: a whole piece and what stands around it, or a text.
pub const FRAME_BYTES_MAX: usize = 64 * 1024;
/// Longest text of an end, in bytes; it is cut.
pub const TEXT_BYTES_MAX: usize = 2 * 1024;
/// Most words of a command.
pub const WORDS_MAX: usize = 64;
/// Most bytes of a command's words together. They stand in the address of a request, each byte as up to three; longer ones belong in a script
/// on the input.
pub const COMMAND_BYTES_MAX: usize = 4 * 1024;
/// Longest name of a kind of terminal (`xterm-256color`), in bytes.
pub const TERM_BYTES_MAX: usize = 64;
/// What is run when no command is named.
pub const SHELL: &str = "/bin/sh";

/// Names a session: random, so that nobody speaks in another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
#[cbor(transparent)]
pub struct SessionId(#[n(0)] pub ByteArray<16>);

impl SessionId {
    /// Of these random bytes.
    #[must_use]
    pub fn new(random: [u8; 16]) -> Self {
        Self(ByteArray::from(random))
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Somebody wants a command to be run in the machine of an attempt: published on `subjects::shell`.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Open {
    /// Whose machine.
    #[n(0)]
    pub name: AttemptName,
    /// The session in which it is spoken from then on.
    #[n(1)]
    pub session: SessionId,
    /// The command; none: a shell, [`SHELL`].
    #[n(2)]
    pub argv: Vec<String>,
    /// With a terminal of its own.
    #[n(3)]
    pub tty: Option<Tty>,
    /// The kind of terminal that shows it (`TERM`).
    #[n(4)]
    pub term: Option<String>,
    /// Nothing is to be run: the machine, one that is kept, is to end now. A worker of an older build runs the command instead.
    #[n(5)]
    #[cbor(default)]
    pub end: bool,
}

/// What is wrong with a wish.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadWish {
    /// The command is too long.
    #[error(
        "the command has {words} words of {bytes} bytes; at most {WORDS_MAX} and {COMMAND_BYTES_MAX} are allowed; send a script to a shell's \
         input instead"
    )]
    TooLong {
        /// Its words.
        words: usize,
        /// Their bytes.
        bytes: usize,
    },
    /// It names no program, or has a NUL byte in it.
    #[error("the command is a program to run, and words without NUL bytes")]
    NoCommand,
    /// The kind of terminal is no name.
    #[error("the kind of terminal is a name of up to {TERM_BYTES_MAX} plain characters, such as xterm")]
    Term,
}

/// Judges what is wished for, at whoever is asked first and again where it is to run. No words: a shell.
///
/// # Errors
/// [`BadWish`].
pub fn check(argv: &[String], term: Option<&str>) -> Result<(), BadWish> {
    let (words, bytes) = (argv.len(), argv.iter().map(String::len).sum());
    if words > WORDS_MAX || bytes > COMMAND_BYTES_MAX {
        return Err(BadWish::TooLong { words, bytes });
    }
    if argv.first().is_some_and(String::is_empty) || argv.iter().any(|word| word.contains('\0')) {
        return Err(BadWish::NoCommand);
    }
    let plain = |term: &str| term.len() <= TERM_BYTES_MAX && term.bytes().all(|byte| byte.is_ascii_graphic());
    if term.is_some_and(|term| !plain(term)) { Err(BadWish::Term) } else { Ok(()) }
}

/// What the worker answers.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Opened {
    /// The session has begun.
    #[n(0)]
    Yes,
    /// It has not.
    #[n(1)]
    No {
        /// What kind of reason.
        #[n(0)]
        kind: Refused,
        /// For people: what, and what to do.
        #[n(1)]
        text: String,
    },
}

/// Kinds of reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Refused {
    /// There is no machine of this attempt.
    #[n(0)]
    NotHere,
    /// There are as many shells as may be.
    #[n(1)]
    TooMany,
    /// The wish makes no sense.
    #[n(2)]
    BadRequest,
    /// The attempt still runs.
    #[n(3)]
    Runs,
}

/// What the reason begins with where there was a machine.
pub const GONE: &str = "its machine is gone";

/// What is said in a session.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Frame {
    /// Counts what one end says, from 1. 0: said by who hands frames on, which is the end of the session ([`Body::Failed`]).
    #[n(0)]
    pub number: u64,
    /// What.
    #[n(1)]
    pub body: Body,
}

/// The kinds of frames.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Body {
    /// To the worker: input of the command, 1 to [`PIECE_BYTES_MAX`] bytes.
    #[n(0)]
    Input(#[n(0)] ByteVec),
    /// To the worker: the input has ended. A terminal is sent its end-of-file character.
    #[n(1)]
    EndInput,
    /// To the worker: the terminal has another size.
    #[n(2)]
    Resize(#[n(0)] Tty),
    /// To the worker: send a signal to the command.
    #[n(3)]
    Signal(#[n(0)] i32),
    /// To both: so many bytes, of all that were sent, have been taken. A piece counts as at least `link::PIECE_COUNTS_MIN`.
    #[n(4)]
    Ack(#[n(0)] u64),
    /// To both: nothing else to say.
    #[n(5)]
    Alive,
    /// From the worker: output of the command, 1 to [`PIECE_BYTES_MAX`] bytes.
    #[n(6)]
    Output {
        /// Is it stderr, or stdout?
        #[n(0)]
        stderr: bool,
        /// The bytes.
        #[n(1)]
        bytes: ByteVec,
    },
    /// From the worker: the command has ended, and all it wrote was sent. The session's last.
    #[n(7)]
    Ended(#[n(0)] Ended),
    /// To both: the session is over for this reason. Its last.
    #[n(8)]
    Failed(#[n(0)] String),
}

impl Body {
    /// The end of a session, with a reason; a long one is cut.
    #[must_use]
    pub fn failed(text: impl Into<String>) -> Self {
        let mut text = text.into();
        while text.len() > TEXT_BYTES_MAX {
            text.pop();
        }
        Self::Failed(text)
    }

    /// Bytes of the command that it carries.
    #[must_use]
    pub fn data(&self) -> Option<&[u8]> {
        match self {
            Self::Input(bytes) | Self::Output { bytes, .. } => Some(bytes),
            _ => None,
        }
    }

    /// Is it the last of a session?
    #[must_use]
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Ended(_) | Self::Failed(_))
    }
}

impl Frame {
    /// What who hands frames on says: the session is over.
    #[must_use]
    pub fn of_relay(why: impl Into<String>) -> Self {
        Self { number: 0, body: Body::failed(why) }
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Ended {
    /// Its exit code, unless a signal ended it.
    #[n(0)]
    pub code: Option<i32>,
    /// The signal that ended it.
    #[n(1)]
    pub signal: Option<i32>,
    /// Did the guest's kernel end something of it for want of memory?
    #[n(2)]
    #[cbor(default)]
    pub oom: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::JobId;
    use crate::wire::{decode, encode};

    #[test]
    fn what_is_said_comes_back() {
        let name = AttemptName { job: JobId(1), stage: 0, index: 2, number: 3, sequence: 4 };
        let session = SessionId::new([0xa5; 16]);
        assert_eq!(session.to_string(), "a5".repeat(16));
        let open =
            Open { name, session, argv: vec!["sh".into()], tty: Some(Tty { rows: 24, cols: 80 }), term: Some("xterm".into()), end: true };
        assert_eq!(decode::<Open>("wish", &encode(&open)).ok(), Some(open));
        for opened in [Opened::Yes, Opened::No { kind: Refused::TooMany, text: "no".into() }] {
            assert_eq!(decode::<Opened>("answer", &encode(&opened)).ok(), Some(opened));
        }
        let bodies = [
            Body::Input(vec![0, 255].into()),
            Body::EndInput,
            Body::Resize(Tty { rows: 1, cols: 2 }),
            Body::Signal(15),
            Body::Ack(u64::MAX),
            Body::Alive,
            Body::Output { stderr: true, bytes: vec![7; PIECE_BYTES_MAX].into() },
            Body::Ended(Ended { code: None, signal: Some(9), oom: true }),
            Body::failed("é".repeat(TEXT_BYTES_MAX)),
        ];
        for (number, body) in (1..).zip(bodies) {
            let frame = Frame { number, body };
            let bytes = encode(&frame);
            assert!(bytes.len() <= FRAME_BYTES_MAX);
            assert_eq!(decode::<Frame>("frame", &bytes).ok(), Some(frame));
        }
    }
}
