//! What a host and the agent in one of its machines say to each other.
//!
//! Owns the requests and answers, and the sizes both sides hold each other to. How they become bytes of one stream is in `mux` (calls
//! and their channels) and `resync` (how a session begins). The guest is not trusted: nothing in an answer is a fact about anything but
//! what that guest says. Does not own any I/O: those are `worker/guest` and the worker's `guest` module.
//!
//! | protocol | what came |
//! |---|---|
//! | 1 | everything below |

mod files;
pub mod mux;
pub mod resync;

pub use files::{FileLimits, Files, Get, GetNamed, Put, SkipReason, Skipped};
use minicbor::bytes::ByteArray;
use minicbor::{Decode, Encode};

/// The protocol this build speaks. A host refuses an agent that speaks another: both come from one build, through the template's name.
pub const PROTOCOL: u32 = 1;

/// Longest request, in bytes: the longest command line and environment that Linux takes (a quarter of an 8 MiB stack).
pub const REQUEST_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Longest answer, in bytes: what a host holds for a guest that it does not trust.
pub const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// Longest error text in an answer, in bytes.
pub const TEXT_BYTES_MAX: usize = 1024;
/// Entries that were skipped and are listed by name; more are only counted. So that the list fits into an answer.
pub const SKIPPED_LISTED_MAX: usize = 32;
/// Longest name in such a list, in bytes; it is cut.
pub const SKIPPED_NAME_BYTES_MAX: usize = 512;
/// Bytes of entropy a reseed brings: the kernel's generator takes 32 at a time, and twice that leaves no doubt.
pub const SEED_BYTES: usize = 64;

/// What the host asks for. It is the first message of a call.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Request {
    /// Who are you? Answer: [`Answer::Hello`].
    #[n(0)]
    Hello,
    /// Run a command. Answers: [`Answer::Started`], then [`Answer::Ended`]. Input, output and errors are channels of the call.
    #[n(1)]
    Exec(#[n(0)] Exec),
    /// Take files, as a tar stream on the call's input. Answer: [`Answer::Files`].
    #[n(2)]
    Put(#[n(0)] Put),
    /// Give files, as a tar stream on the call's output. Answer: [`Answer::Files`], behind the stream.
    #[n(3)]
    Get(#[n(0)] Get),
    /// Mount a disk. Answer: [`Answer::Done`].
    #[n(4)]
    Mount(#[n(0)] Mount),
    /// Write out and unmount what is mounted there. Answer: [`Answer::Done`].
    #[n(5)]
    Unmount {
        /// Where.
        #[n(0)]
        target: String,
    },
    /// Set the wall clock. Answer: [`Answer::Clock`].
    #[n(6)]
    SetClock {
        /// Nanoseconds since the Unix epoch.
        #[n(0)]
        unix_ns: u64,
    },
    /// Mix these bytes into the kernel's generator, credit them, and let it begin anew. Answer: [`Answer::Reseeded`].
    #[n(7)]
    Reseed {
        /// From the host's generator, for this machine alone.
        #[n(0)]
        seed: ByteArray<SEED_BYTES>,
    },
    /// Take a name and ids of its own. Answer: [`Answer::Done`].
    #[n(8)]
    SetIdentity(#[n(0)] Identity),
    /// Write out everything. Answer: [`Answer::Done`].
    #[n(9)]
    Sync,
    /// Write out one file system and hold all writes to it. Answer: [`Answer::Done`].
    #[n(10)]
    Freeze {
        /// Where it is mounted.
        #[n(0)]
        target: String,
    },
    /// Let writes go on. Answer: [`Answer::Done`].
    #[n(11)]
    Thaw {
        /// Where it is mounted.
        #[n(0)]
        target: String,
    },
    /// What is used? Answer: [`Answer::Stats`].
    #[n(12)]
    Stats,
    /// End everything, write out, answer, and from then on read only for a resync. Answer: [`Answer::Prepared`], the session's last.
    #[n(13)]
    PrepareSnapshot {
        /// Commands that still run may live on into the snapshot, unheard; otherwise all of them are killed.
        #[n(0)]
        keep_processes: bool,
    },
    /// Write out, unmount and switch off. Answer: [`Answer::Done`], before the end.
    #[n(14)]
    Shutdown,
    /// Mount a disk and make directories on it. Answer: [`Answer::Furnished`]. Agents before this refuse it.
    #[n(15)]
    Furnish(#[n(0)] Furnish),
    /// Give some of the files below a directory, as a tar stream on the call's output. Answer: [`Answer::Files`], behind the stream. Agents
    /// before this refuse it.
    #[n(16)]
    GetNamed(#[n(0)] GetNamed),
    /// Let nothing that commands started run, or let it go on. Answer: [`Answer::Done`], when nothing runs any more; a call that starts a
    /// command meanwhile may wait for as long. Agents before this refuse it.
    #[n(17)]
    Hold {
        /// Or go on.
        #[n(0)]
        hold: bool,
    },
    /// Have everything on this disk that was written to its file system, and hold all further writes, wherever it is mounted. Answer: [`Answer::Done`], also
    /// when it is not mounted any more. Agents before this refuse it.
    #[n(18)]
    Settle {
        /// Which.
        #[n(0)]
        disk: Disk,
    },
}

/// What the host says on a call of [`Request::Exec`] while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Order {
    /// Send a signal to the command's process group.
    #[n(0)]
    Signal(#[n(0)] i32),
    /// Kill the command and everything it started.
    #[n(1)]
    Kill,
    /// Its terminal has another size. Without effect where it has none. Agents before this end the call.
    #[n(2)]
    Resize(#[n(0)] Tty),
}

/// A command.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Exec {
    /// The program and its arguments; looked for in the `PATH` of `env` when it has no slash.
    #[n(0)]
    pub argv: Vec<String>,
    /// The whole environment; of two with one name the later counts.
    #[n(1)]
    pub env: Vec<(String, String)>,
    /// Where it begins; `/` when not given.
    #[n(2)]
    pub cwd: Option<String>,
    /// As whom; as root when not given.
    #[n(3)]
    pub user: Option<User>,
    /// Is there input? Otherwise it reads nothing.
    #[n(4)]
    #[cbor(default)]
    pub input: bool,
    /// After this long it is sent TERM, in milliseconds.
    #[n(5)]
    pub timeout_ms: Option<u64>,
    /// And this long after that everything is killed, in milliseconds.
    #[n(6)]
    #[cbor(default)]
    pub grace_ms: u64,
    /// Limits of it and everything it starts.
    #[n(7)]
    #[cbor(default)]
    pub limits: Limits,
    /// When it ends by itself, what it started lives on: for the warm-up of a template that keeps processes. Agents before this kill it, as
    /// they do where this is false.
    #[n(8)]
    #[cbor(default)]
    pub leave: bool,
    /// A terminal of its own, which is its three streams: what it writes comes as output, and no errors. Agents before this give it pipes.
    #[n(9)]
    pub tty: Option<Tty>,
    /// When the machine is out of memory, is it the first to go? For what is beside a task, and must not be in the way of its verdict. Agents
    /// before this take no heed.
    #[n(10)]
    #[cbor(default)]
    pub expendable: bool,
}

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Tty {
    /// Lines.
    #[n(0)]
    pub rows: u16,
    /// Columns.
    #[n(1)]
    pub cols: u16,
}

/// As whom a command runs.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum User {
    /// By number, with these further groups.
    #[n(0)]
    Ids {
        /// User.
        #[n(0)]
        uid: u32,
        /// Group.
        #[n(1)]
        gid: u32,
        /// Further groups.
        #[n(2)]
        groups: Vec<u32>,
    },
    /// `user` or `user:group`, names or numbers, as the guest's `/etc/passwd` and `/etc/group` have them.
    #[n(1)]
    Named(#[n(0)] String),
}

/// Limits of a command and everything it starts. What is not given is not limited.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Limits {
    /// Memory in bytes; there is no swap.
    #[n(0)]
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    #[n(1)]
    pub pids: Option<u32>,
    /// CPU in thousandths of a core.
    #[n(2)]
    pub cpu_milli: Option<u32>,
    /// Open files of one process.
    #[n(3)]
    pub open_files: Option<u64>,
}

/// A disk to mount.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Mount {
    /// Which.
    #[n(0)]
    pub disk: Disk,
    /// Its size in bytes, which is waited for and checked before it is mounted: a slot's disk was another one a moment ago.
    #[n(1)]
    pub bytes: u64,
    /// The kind of file system, as Linux names it.
    #[n(2)]
    pub fs: String,
    /// Where; the directory is made if it isn't there.
    #[n(3)]
    pub target: String,
    /// Can nothing be written?
    #[n(4)]
    #[cbor(default)]
    pub read_only: bool,
    /// Whose its top directory becomes; left alone when not given.
    #[n(5)]
    pub owner: Option<(u32, u32)>,
    /// Is the file system to be grown to the disk's size? Only one that can be written. Agents before this leave it as it is.
    #[n(6)]
    #[cbor(default)]
    pub grow: bool,
}

/// A disk to mount, and directories on it.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Furnish {
    /// The disk; it can be written.
    #[n(0)]
    pub mount: Mount,
    /// Directories in its top directory.
    #[n(1)]
    pub dirs: Vec<Dir>,
    /// Whose they become; root's when not given.
    #[n(2)]
    pub user: Option<User>,
}

/// A directory to make.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Dir {
    /// Its name: one, without a slash.
    #[n(0)]
    pub name: String,
    /// Its mode.
    #[n(1)]
    pub mode: u32,
    /// Where else it is to be found; the directory is made if it isn't there.
    #[n(2)]
    pub also: Option<String>,
}

/// Which disk.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Disk {
    /// The one with this serial number, which QEMU sets.
    #[n(0)]
    Serial(#[n(0)] String),
    /// The one the guest's kernel gave this name (`vdb`): in the order they were attached.
    #[n(1)]
    Named(#[n(0)] String),
}

/// Who a machine is. What is not given stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Identity {
    /// The host name.
    #[n(0)]
    pub hostname: Option<String>,
    /// `/etc/machine-id`.
    #[n(1)]
    pub machine_id: Option<ByteArray<16>>,
    /// `/proc/sys/kernel/random/boot_id`.
    #[n(2)]
    pub boot_id: Option<ByteArray<16>>,
}

/// What the guest answers. Each call ends with one that is not [`Answer::Started`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Answer {
    /// It can't be done.
    #[n(0)]
    Refused(#[n(0)] Refusal),
    /// Who this is.
    #[n(1)]
    Hello(#[n(0)] Hello),
    /// The command runs.
    #[n(2)]
    Started {
        /// Its process, in the guest.
        #[n(0)]
        pid: u32,
    },
    /// The command is over, and everything it wrote was sent.
    #[n(3)]
    Ended(#[n(0)] Ended),
    /// The stream is over.
    #[n(4)]
    Files(#[n(0)] Files),
    /// It is done.
    #[n(5)]
    Done,
    /// The clock is set.
    #[n(6)]
    Clock {
        /// What it said before, in nanoseconds since the Unix epoch.
        #[n(0)]
        before_unix_ns: u64,
    },
    /// The generator began anew.
    #[n(7)]
    Reseeded {
        /// The hash of 64 bytes read from it afterwards: two machines with the same one are the same.
        #[n(0)]
        proof: ByteArray<32>,
    },
    /// What is used.
    #[n(8)]
    Stats(#[n(0)] Stats),
    /// A snapshot can be taken as soon as this was read.
    #[n(9)]
    Prepared {
        /// Processes that live on into it.
        #[n(0)]
        kept: u32,
    },
    /// The disk is mounted.
    #[n(10)]
    Furnished {
        /// User and group of the directories, when a user was given.
        #[n(0)]
        owner: Option<(u32, u32)>,
    },
}

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Refusal {
    /// What kind of reason.
    #[n(0)]
    pub kind: RefusalKind,
    /// The system's error number, if it gave one.
    #[n(1)]
    pub errno: Option<i32>,
    /// For people: what, where.
    #[n(2)]
    pub text: String,
}

impl Refusal {
    /// A reason without an error number; a long text is cut.
    #[must_use]
    pub fn new(kind: RefusalKind, text: impl Into<String>) -> Self {
        let mut text = text.into();
        while text.len() > TEXT_BYTES_MAX {
            text.pop();
        }
        Self { kind, errno: None, text }
    }
}

/// Kinds of reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum RefusalKind {
    /// The request makes no sense, or this agent does not know it.
    #[n(0)]
    BadRequest,
    /// The machine may be the clone of another one: it must be reseeded first.
    #[n(1)]
    NotReseeded,
    /// A file, directory, user or disk is not there.
    #[n(2)]
    NotFound,
    /// The program can't be started.
    #[n(3)]
    CannotExec,
    /// It is more than the limits of the request allow.
    #[n(4)]
    TooMuch,
    /// The guest's disk or memory file system is full.
    #[n(5)]
    NoSpace,
    /// The stream of files is not well formed.
    #[n(6)]
    BadStream,
    /// The system refused.
    #[n(7)]
    System,
    /// The user whom the image names is not among its users.
    #[n(8)]
    NoUser,
}

/// Who answers.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Hello {
    /// The protocol it speaks.
    #[n(0)]
    pub protocol: u32,
    /// Its build, for people.
    #[n(1)]
    pub build: String,
    /// The guest's boot id; none before a reseed that is due, because asking for it draws from the generator.
    #[n(2)]
    pub boot_id: Option<String>,
    /// The guest's kernel, for people.
    #[n(3)]
    pub kernel: String,
    /// Must it be reseeded before anything else?
    #[n(4)]
    pub reseed_due: bool,
    /// Can memory, CPU and processes of commands be limited, and their whole trees be killed?
    #[n(5)]
    pub limits: bool,
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Ended {
    /// How its first process ended.
    #[n(0)]
    pub exit: Exit,
    /// Did the time limit pass before that?
    #[n(1)]
    pub timed_out: bool,
    /// How many processes of the tree the kernel ended for want of memory.
    #[n(2)]
    pub oom_kills: u64,
    /// What it used.
    #[n(3)]
    pub usage: Usage,
    /// Processes of it that could not be killed.
    #[n(4)]
    pub survivors: u32,
    /// Was the disk of its working directory full at its end? Earlier agents do not look.
    #[n(5)]
    #[cbor(default)]
    pub disk_full: bool,
    /// Processes that still ran when the first one had ended by itself, and were killed. Earlier agents do not count.
    #[n(6)]
    #[cbor(default)]
    pub strays: u32,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum Exit {
    /// With a code.
    #[n(0)]
    Code(#[n(0)] i32),
    /// By a signal.
    #[n(1)]
    Signal(#[n(0)] i32),
}

/// What a command and everything it started used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Usage {
    /// From start to end, in milliseconds.
    #[n(0)]
    pub wall_ms: u64,
    /// CPU time in user mode, in microseconds.
    #[n(1)]
    pub user_us: u64,
    /// CPU time in the kernel, in microseconds.
    #[n(2)]
    pub system_us: u64,
    /// Most memory at once, in bytes.
    #[n(3)]
    pub memory_peak_bytes: Option<u64>,
}

/// What a machine uses.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Stats {
    /// Memory the kernel manages, in bytes.
    #[n(0)]
    pub memory_total_bytes: u64,
    /// Memory that could be had without swapping, in bytes.
    #[n(1)]
    pub memory_available_bytes: u64,
    /// CPU time of all cores that was not idle, in milliseconds since boot.
    #[n(2)]
    pub cpu_busy_ms: u64,
    /// Since boot, in milliseconds.
    #[n(3)]
    pub uptime_ms: u64,
    /// Processes.
    #[n(4)]
    pub processes: u32,
    /// The root file system: size and what is free, in bytes.
    #[n(5)]
    pub root_bytes: u64,
    /// What is free of it, in bytes.
    #[n(6)]
    pub root_free_bytes: u64,
    /// The wall clock, in nanoseconds since the Unix epoch.
    #[n(7)]
    pub unix_ns: u64,
}

#[cfg(test)]
mod tests;
