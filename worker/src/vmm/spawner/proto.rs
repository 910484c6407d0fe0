//! What the worker and the machine spawner say to each other, one message per packet.
//!
//! Owns shapes. Both ends are the same build, so nothing here needs to grow.

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};

/// Largest packet to the spawner, in bytes: a command line of some kilobytes, many times over.
pub const PACKET_BYTES_MAX: usize = 64 * 1024;
/// Largest packet from it, in bytes: small numbers, or one error text.
pub const REPLY_BYTES_MAX: usize = 4 * 1024;

/// To the spawner: start a process. With it come, in this order, the process's own socket, the program if `by_descriptor`, `joins`
/// files, and what the process inherits, which becomes its descriptors from 0 on.
#[derive(Debug, Clone, Encode, Decode)]
#[cbor(map)]
pub struct Start {
    /// What runs.
    #[n(0)]
    pub what: What,
    /// Its arguments, the first is its name.
    #[n(1)]
    pub argv: Vec<ByteVec>,
    /// How many `cgroup.procs` files it writes itself into.
    #[n(2)]
    pub joins: u32,
}

/// What runs.
#[derive(Debug, Clone, Encode, Decode)]
pub enum What {
    /// The file at this path of the view.
    #[n(0)]
    Path(#[n(0)] ByteVec),
    /// The file that comes along.
    #[n(1)]
    Descriptor,
    /// A look at what KVM is worth (`kvm`); it exits with a code of that module.
    #[n(2)]
    KvmProbe,
}

/// To the spawner, on a process's own socket.
#[derive(Debug, Clone, Encode, Decode)]
pub enum Order {
    /// Make the mount that comes along visible in the process's directory under this name.
    #[n(0)]
    Attach {
        /// One plain name.
        #[n(0)]
        name: String,
        /// Is it a directory?
        #[n(1)]
        dir: bool,
    },
}

/// From the spawner: the first on its own socket, then what belongs to a process on that process's.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Reply {
    /// It is there. With it comes the directory of the processes' directories.
    #[n(0)]
    Ready {
        /// What it could not shut off.
        #[n(0)]
        missing: Vec<String>,
    },
    /// It could not set itself up, and ends.
    #[n(1)]
    Broken(#[n(0)] String),
    /// The process runs. Its descriptor (pidfd) comes along.
    #[n(2)]
    Started {
        /// The name of its directory.
        #[n(0)]
        dir: String,
        /// Its user and group; none: the worker's.
        #[n(1)]
        user: Option<u32>,
    },
    /// It could not be started.
    #[n(3)]
    NotStarted {
        /// At which step.
        #[n(0)]
        step: Step,
        /// The system's error number.
        #[n(1)]
        errno: i32,
    },
    /// What was ordered is done, or why not.
    #[n(4)]
    Done(#[n(0)] Option<String>),
    /// The process is gone, with everything of its user's, and its directory.
    #[n(5)]
    Exited(#[n(0)] Exited),
}

/// The step at which a process could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Step {
    /// Reading the request.
    #[n(0)]
    Request,
    /// Finding a user: all are taken.
    #[n(1)]
    Users,
    /// Making its directory.
    #[n(2)]
    Directory,
    /// Making the process.
    #[n(3)]
    Clone,
    /// Entering its cgroups.
    #[n(4)]
    Cgroup,
    /// Placing its descriptors.
    #[n(5)]
    Descriptors,
    /// Taking its user.
    #[n(6)]
    User,
    /// Running the program.
    #[n(7)]
    Exec,
}

impl Step {
    /// In words.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Request => "reading the request",
            Self::Users => "finding a free user",
            Self::Directory => "making its directory",
            Self::Clone => "making the process",
            Self::Cgroup => "entering its cgroup",
            Self::Descriptors => "placing its descriptors",
            Self::User => "taking its user",
            Self::Exec => "running the program",
        }
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Exited {
    /// Exit code, unless a signal ended it.
    #[n(0)]
    pub code: Option<i32>,
    /// The signal that ended it.
    #[n(1)]
    pub signal: Option<i32>,
    /// CPU time, in microseconds.
    #[n(2)]
    pub cpu_us: u64,
    /// Most memory resident at once, in bytes.
    #[n(3)]
    pub memory_bytes_max: u64,
}
