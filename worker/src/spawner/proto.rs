//! What the worker and its shims say to each other, one message per packet.
//!
//! Owns shapes and packet limits. Both ends are the same build, so nothing here needs to grow.

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};

/// Largest request sent as a packet, in bytes; a larger one travels in a memory file. A packet must fit the socket's send buffer,
/// 208 KiB by default.
pub const PACKET_BYTES_MAX: usize = 64 * 1024;
/// Largest request at all, in bytes: the kernel takes at most a few MiB of arguments and environment.
pub const REQUEST_BYTES_MAX: usize = 4 * 1024 * 1024;

/// To the zygote. The shim's end of its socket comes with it.
#[derive(Debug, Encode, Decode)]
#[cbor(map)]
pub struct MakeShim {
    /// `cgroup.procs` of each hierarchy, where all that it starts is found.
    #[n(0)]
    pub join: Vec<String>,
    /// File with a line `oom_kill N`, if the memory controller is there.
    #[n(1)]
    pub oom_file: Option<String>,
    /// Does it start containers? Then it has mounts of its own.
    #[n(2)]
    pub containers: bool,
    /// Does it enter them itself, so that what it starts is there from its first instruction? Otherwise what it starts does.
    #[n(3)]
    pub enters: bool,
    /// Has it mounts of its own, for tasks with volumes? One that starts containers has them in any case.
    #[n(4)]
    pub mounts: bool,
    /// What is mounted below this directory is left out of its own mounts.
    #[n(5)]
    pub hidden: Option<String>,
}

/// To a shim.
#[derive(Debug, Encode, Decode)]
pub enum Request {
    /// Start a command. Its stdout, stderr and, if there is one, stdin come with it, in this order.
    #[n(0)]
    Spawn(#[n(0)] Spawn),
    /// The same, with the encoded [`Spawn`] in a memory file that comes first among the descriptors.
    #[n(1)]
    SpawnFromFile,
    /// TERM to everything that runs.
    #[n(2)]
    Term,
    /// KILL to everything that runs, until nothing does.
    #[n(3)]
    Kill,
}

/// [`Request::Spawn`] of a command that somebody else has.
#[derive(Debug, Encode)]
pub enum RequestOf<'a> {
    /// The same on the wire.
    #[n(0)]
    Spawn(#[n(0)] &'a Spawn),
}

/// A command to start.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Spawn {
    /// Program and arguments.
    #[n(0)]
    pub argv: Vec<ByteVec>,
    /// `NAME=value`, all there is.
    #[n(1)]
    pub env: Vec<ByteVec>,
    /// Where a program without a slash is looked for, in order.
    #[n(2)]
    pub path: Vec<ByteVec>,
    /// Where it starts.
    #[n(3)]
    pub cwd: ByteVec,
    /// Whom it runs as; `None`: as the worker.
    #[n(4)]
    pub uid: Option<u32>,
    /// With which group.
    #[n(5)]
    pub gid: Option<u32>,
    /// The command is an OCI runtime's, for a task in this container.
    #[n(6)]
    pub container: Option<Container>,
    /// What is mounted for it. The mounts, which are nowhere yet, are the last descriptors that come with it, in the same order.
    #[n(7)]
    #[cbor(default)]
    pub mounts: Vec<ShowMount>,
    /// The directory below which these lie; in a container its root.
    #[n(8)]
    pub top: Option<String>,
}

/// A mount that a task is shown.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct ShowMount {
    /// Where.
    #[n(0)]
    pub path: String,
    /// Can nothing be written?
    #[n(1)]
    pub read_only: bool,
    /// Whose files are whose: on what is mounted, and on the host. Empty: as they are.
    #[n(2)]
    pub users: Vec<(u32, u32)>,
    /// The same of groups.
    #[n(3)]
    pub groups: Vec<(u32, u32)>,
}

/// A container to put together before its runtime is started.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Container {
    /// Where its root and what belongs to it are mounted; the directory is there, and ours alone.
    #[n(0)]
    pub dir: String,
    /// The block device with the image's root; none: an empty root.
    #[n(1)]
    pub device: Option<String>,
    /// Whose files are whose: user in the container (and in the image), and on the host.
    #[n(2)]
    pub users: Vec<(u32, u32)>,
    /// The same of groups.
    #[n(3)]
    pub groups: Vec<(u32, u32)>,
    /// User and group on the host that the root belongs to.
    #[n(4)]
    pub owner: (u32, u32),
    /// Directories made in the root, whatever the image has there; each after those above it.
    #[n(5)]
    pub dirs: Vec<String>,
    /// Directories of the host that are shown, and where: one of `dirs`.
    #[n(6)]
    pub binds: Vec<(String, String)>,
    /// `cgroup.procs` files of what runs in it.
    #[n(7)]
    pub join: Vec<String>,
    /// Does the runtime hand descriptors over? Otherwise streams are its own, and its exit code is all there is.
    #[n(8)]
    pub reports: bool,
    /// What its `/etc/hosts` says.
    #[n(9)]
    pub hosts: String,
}

/// From a shim.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Reply {
    /// It is there and takes requests.
    #[n(0)]
    Ready,
    /// It could not do its part of setting up; says why, and ends.
    #[n(1)]
    Broken(#[n(0)] String),
    /// The command could not be started.
    #[n(2)]
    NotStarted {
        /// At which step.
        #[n(0)]
        step: Step,
        /// The system's error number.
        #[n(1)]
        errno: i32,
    },
    /// The command ended, and nothing it started runs any more.
    #[n(3)]
    Exited(#[n(0)] Exited),
    /// The container could not be put together, or its runtime failed; says why.
    #[n(4)]
    Refused(#[n(0)] String),
}

/// The step at which a command could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Step {
    /// Reading the request.
    #[n(0)]
    Request,
    /// Making the process.
    #[n(1)]
    Clone,
    /// Its session.
    #[n(2)]
    Session,
    /// Its standard streams.
    #[n(3)]
    Streams,
    /// Its directory.
    #[n(4)]
    Directory,
    /// Its user.
    #[n(5)]
    User,
    /// Running the program.
    #[n(6)]
    Exec,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Exited {
    /// Exit code, unless a signal ended it.
    #[n(0)]
    pub code: Option<i32>,
    /// The signal that ended it.
    #[n(1)]
    pub signal: Option<i32>,
    /// CPU time of everything that was waited for, in microseconds.
    #[n(2)]
    pub cpu_us: u64,
    /// Most memory one process had resident, in bytes.
    #[n(3)]
    pub memory_bytes_max: u64,
    /// Did the kernel kill something of it at the memory limit?
    #[n(4)]
    pub oom: bool,
    /// How many processes it left running, which were killed.
    #[n(5)]
    pub strays: u32,
    /// Something can't be killed and still runs: the shim is not to be used again.
    #[n(6)]
    pub stuck: bool,
}
