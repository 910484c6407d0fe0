//! The host's side of a machine's agent: one session, and typed calls in it.
//!
//! Owns how a session begins (a nonce of its own, and nothing believed before its echo), what each call sends and what it takes for an
//! answer. The guest is not trusted: it can make a call fail, and nothing else. It can't make this side panic, hold more than
//! `wire::guest::mux` allows, or wait past a deadline. Does not own the machine (`vmm`), nor what its commands mean.

pub mod alive;
mod files;
mod link;

use std::time::Duration;

use minicbor::bytes::ByteArray;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::Instant;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::resync::{DISCARD_BYTES_MAX, FILLER, FILLER_BYTES, From, NONCE_BYTES, Resync, Scanner};
use volley_jobspecs::wire::guest::{
    Answer, Disk, Ended, Exec, Furnish, Hello, Identity, Mount, Order, PROTOCOL, Refusal, Request, SEED_BYTES, Stats,
};

pub use files::FilesError;
pub use link::Call;

use link::Link;

/// Wait for an echo before the frame is sent again, with filler before it. The first one gets lost only when the agent was in the middle
/// of a frame that will never end.
const RESYNC_AGAIN: Duration = Duration::from_millis(500);
/// How long a verb that does little may take: an emulated machine answers within a second, a busy host may stop for several.
pub const CALL_WAIT: Duration = Duration::from_secs(30);
/// How long the end of everything before a snapshot may take; the agent itself gives up before that.
const PREPARE_WAIT: Duration = Duration::from_secs(60);

/// A connection to an agent.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Why a call gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The agent says no.
    #[error("the machine's agent refused: {}", .0.text)]
    Refused(Refusal),
    /// The session is over.
    #[error("the machine's agent is lost: {0}")]
    Lost(String),
    /// It did not answer in time.
    #[error("the machine's agent did not answer to {what} within {} s", .after.as_secs_f32())]
    Silent {
        /// To what.
        what: &'static str,
        /// For how long.
        after: Duration,
    },
    /// It was asked again and again, and nothing came.
    #[error("the machine's agent gave no sign of life for {} s", .after.as_secs())]
    NoSign {
        /// For how long.
        after: Duration,
    },
    /// It answered something else.
    #[error("the machine's agent answered to {what} with something else")]
    Nonsense {
        /// To what.
        what: &'static str,
    },
    /// It speaks another protocol.
    #[error("the machine's agent speaks protocol {theirs}, this worker speaks {PROTOCOL}; its template must be built anew")]
    Protocol {
        /// Its.
        theirs: u32,
    },
    /// The request is larger than an agent takes, or too many calls are open.
    #[error("a request of {bytes} bytes can't be sent")]
    TooLarge {
        /// How large.
        bytes: usize,
    },
}

/// A session with an agent. It ends when this is dropped.
#[derive(Debug)]
pub struct Guest {
    link: Link,
}

impl Guest {
    /// Begins a session. The connection must have been made before a machine's saved state was loaded, and this be called once the machine
    /// runs: bytes sent to one that stands still never reach it. `nonce` must be fresh from the host's generator; `reseed` tells the agent
    /// to do nothing before a reseed. What came before the echo of the nonce is thrown away.
    ///
    /// # Errors
    /// [`GuestError::Lost`], [`GuestError::Silent`], [`GuestError::Protocol`].
    pub async fn connect(
        mut stream: Box<dyn Stream>,
        nonce: [u8; NONCE_BYTES],
        reseed: bool,
        time_max: Duration,
    ) -> Result<(Self, Hello), GuestError> {
        let (what, deadline) = ("the beginning of a session", Instant::now() + time_max);
        let silent = || GuestError::Silent { what, after: time_max };
        let rest =
            tokio::time::timeout_at(deadline, resync(&mut stream, Resync { nonce, attempt: 1, reseed })).await.map_err(|_| silent())??;
        let guest = Self { link: Link::start(stream, &rest) };
        let hello = tokio::time::timeout_at(deadline, guest.hello()).await.map_err(|_| silent())??;
        if hello.protocol != PROTOCOL {
            return Err(GuestError::Protocol { theirs: hello.protocol });
        }
        Ok((guest, hello))
    }

    /// A session that nobody has answered to.
    #[cfg(test)]
    pub fn unheard(stream: Box<dyn Stream>) -> Self {
        Self { link: Link::start(stream, &[]) }
    }

    /// Sends a request and waits for the one answer.
    async fn ask(&self, what: &'static str, request: &Request, time_max: Duration) -> Result<Answer, GuestError> {
        let call = self.link.open(request)?;
        let answer = tokio::time::timeout(time_max, call.answer(what)).await;
        answer.map_err(|_| GuestError::Silent { what, after: time_max })?
    }

    async fn done(&self, what: &'static str, request: &Request) -> Result<(), GuestError> {
        match self.ask(what, request, CALL_WAIT).await? {
            Answer::Done => Ok(()),
            _ => Err(GuestError::Nonsense { what }),
        }
    }

    /// Who is there.
    ///
    /// # Errors
    /// [`GuestError`], as of every call.
    pub async fn hello(&self) -> Result<Hello, GuestError> {
        match self.ask("hello", &Request::Hello, CALL_WAIT).await? {
            Answer::Hello(hello) => Ok(hello),
            _ => Err(GuestError::Nonsense { what: "hello" }),
        }
    }

    /// Starts a command. It has started when this returns.
    ///
    /// # Errors
    /// [`GuestError::Refused`] when it can't be started.
    pub async fn exec(&self, exec: &Exec) -> Result<Command, GuestError> {
        let what = "exec";
        let call = self.link.open(&Request::Exec(exec.clone()))?;
        let answer = tokio::time::timeout(CALL_WAIT, call.answer(what)).await;
        match answer.map_err(|_| GuestError::Silent { what, after: CALL_WAIT })?? {
            Answer::Started { pid } => Ok(Command { call, pid }),
            _ => Err(GuestError::Nonsense { what }),
        }
    }

    /// Mixes `seed` into the generator. It must be fresh from the host's. Two machines that return the same are the same.
    ///
    /// # Errors
    /// [`GuestError`]: the machine must not be used.
    pub async fn reseed(&self, seed: [u8; SEED_BYTES]) -> Result<[u8; 32], GuestError> {
        match self.ask("reseed", &Request::Reseed { seed: ByteArray::from(seed) }, CALL_WAIT).await? {
            Answer::Reseeded { proof } => Ok(proof.into()),
            _ => Err(GuestError::Nonsense { what: "reseed" }),
        }
    }

    /// Sets the wall clock, in nanoseconds since the Unix epoch. What it said before.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn set_clock(&self, unix_ns: u64) -> Result<u64, GuestError> {
        match self.ask("set clock", &Request::SetClock { unix_ns }, CALL_WAIT).await? {
            Answer::Clock { before_unix_ns } => Ok(before_unix_ns),
            _ => Err(GuestError::Nonsense { what: "set clock" }),
        }
    }

    /// Gives it names and ids.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn set_identity(&self, identity: Identity) -> Result<(), GuestError> {
        self.done("set identity", &Request::SetIdentity(identity)).await
    }

    /// Mounts a disk.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn mount(&self, mount: Mount) -> Result<(), GuestError> {
        self.done("mount", &Request::Mount(mount)).await
    }

    /// The same, of one that may take longer: what was written last is read again then, and the file system may be grown.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn mount_within(&self, mount: Mount, time_max: Duration) -> Result<(), GuestError> {
        let what = "mount";
        match self.ask(what, &Request::Mount(mount), time_max).await? {
            Answer::Done => Ok(()),
            _ => Err(GuestError::Nonsense { what }),
        }
    }

    /// Has everything on a disk that was written to it, and holds all further writes.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn settle(&self, disk: Disk, time_max: Duration) -> Result<(), GuestError> {
        let what = "settle";
        match self.ask(what, &Request::Settle { disk }, time_max).await? {
            Answer::Done => Ok(()),
            _ => Err(GuestError::Nonsense { what }),
        }
    }

    /// Mounts a disk and makes directories on it. Whose they are, when a user was given.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn furnish(&self, furnish: Furnish) -> Result<Option<(u32, u32)>, GuestError> {
        match self.ask("furnish", &Request::Furnish(furnish), CALL_WAIT).await? {
            Answer::Furnished { owner } => Ok(owner),
            _ => Err(GuestError::Nonsense { what: "furnish" }),
        }
    }

    /// Writes out and unmounts. `time_max`: writing out takes as long as the disk takes.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn unmount(&self, target: &str, time_max: Duration) -> Result<(), GuestError> {
        let what = "unmount";
        match self.ask(what, &Request::Unmount { target: target.to_owned() }, time_max).await? {
            Answer::Done => Ok(()),
            _ => Err(GuestError::Nonsense { what }),
        }
    }

    /// Writes out everything.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn sync(&self, time_max: Duration) -> Result<(), GuestError> {
        match self.ask("sync", &Request::Sync, time_max).await? {
            Answer::Done => Ok(()),
            _ => Err(GuestError::Nonsense { what: "sync" }),
        }
    }

    /// Holds writes to the file system mounted at `target`.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn freeze(&self, target: &str) -> Result<(), GuestError> {
        self.done("freeze", &Request::Freeze { target: target.to_owned() }).await
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn thaw(&self, target: &str) -> Result<(), GuestError> {
        self.done("thaw", &Request::Thaw { target: target.to_owned() }).await
    }

    /// Lets nothing of any command run, or lets them go on.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn hold(&self, hold: bool) -> Result<(), GuestError> {
        self.done("hold", &Request::Hold { hold }).await
    }

    /// What it uses, as it says.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn stats(&self) -> Result<Stats, GuestError> {
        match self.ask("stats", &Request::Stats, CALL_WAIT).await? {
            Answer::Stats(stats) => Ok(stats),
            _ => Err(GuestError::Nonsense { what: "stats" }),
        }
    }

    /// Ends everything in the machine that a snapshot must not hold, and the session. How many processes live on, as it says, and the
    /// connection: everything the agent sent was read, it sends nothing more, and from now on reads only for a resync.
    ///
    /// # Errors
    /// [`GuestError`]: no snapshot may be taken.
    pub async fn prepare_snapshot(self, keep_processes: bool) -> Result<(u32, Box<dyn Stream>), GuestError> {
        let what = "prepare snapshot";
        let call = self.link.open(&Request::PrepareSnapshot { keep_processes })?;
        let asked = async {
            let answer = call.answer(what).await?;
            call.closed().await;
            Ok(answer)
        };
        let answer = tokio::time::timeout(PREPARE_WAIT, asked).await;
        match answer.map_err(|_| GuestError::Silent { what, after: PREPARE_WAIT })?? {
            Answer::Prepared { kept } => {
                drop(call);
                Ok((kept, self.link.stop().await?))
            }
            _ => Err(GuestError::Nonsense { what }),
        }
    }

    /// Has the machine write out and switch itself off. It returns when it has said that it will.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn shutdown(&self) -> Result<(), GuestError> {
        self.done("shutdown", &Request::Shutdown).await
    }
}

/// Sends the frame until it is echoed. What came behind the echo.
async fn resync(stream: &mut Box<dyn Stream>, mut resync: Resync) -> Result<Vec<u8>, GuestError> {
    let lost = |e: std::io::Error| GuestError::Lost(format!("the connection broke: {e}"));
    let mut scanner = Scanner::new(From::Guest);
    let mut buffer = vec![0; 64 * 1024];
    let mut thrown_away = 0u64;
    let mut out = resync.encode(From::Host).to_vec();
    let mut sent = 0;
    let mut again = Instant::now() + RESYNC_AGAIN;
    let (mut reader, mut writer) = tokio::io::split(stream);
    loop {
        let rest = out.get(sent..).unwrap_or_default();
        let len = tokio::select! {
            read = reader.read(&mut buffer) => read.map_err(lost)?,
            wrote = writer.write(rest), if !rest.is_empty() => {
                sent += wrote.map_err(lost)?;
                continue;
            }
            () = tokio::time::sleep_until(again), if rest.is_empty() => {
                resync.attempt += 1;
                out = [vec![FILLER; FILLER_BYTES], resync.encode(From::Host).to_vec()].concat();
                (sent, again) = (0, Instant::now() + RESYNC_AGAIN);
                continue;
            }
        };
        if len == 0 {
            return Err(GuestError::Lost("it hung up".to_owned()));
        }
        let mut bytes = buffer.get(..len).unwrap_or_default();
        while !bytes.is_empty() {
            let (taken, found) = scanner.feed(bytes);
            thrown_away += taken as u64;
            bytes = bytes.get(taken..).unwrap_or_default();
            // Another nonce is another session's: a sibling's, or one of before the snapshot. Behind the echo of an earlier try comes another.
            if found.is_some_and(|found| found == resync) {
                return Ok(bytes.to_vec());
            }
        }
        if thrown_away > DISCARD_BYTES_MAX {
            return Err(GuestError::Lost(format!("it sent {thrown_away} bytes that belong to no session")));
        }
    }
}

/// A command that runs in the machine. Dropped, it is killed with everything it started.
#[derive(Debug)]
pub struct Command {
    call: Call,
    /// Its process in the guest, as it says.
    pub pid: u32,
}

impl Command {
    /// Reads output or errors. 0: it has ended.
    ///
    /// # Errors
    /// [`GuestError::Lost`].
    pub async fn read(&self, channel: Channel, into: &mut [u8]) -> Result<usize, GuestError> {
        self.call.read(channel, into).await
    }

    /// Writes input, as far as the command takes it.
    ///
    /// # Errors
    /// [`GuestError::Lost`]; also when the command has ended.
    pub async fn write(&self, bytes: &[u8]) -> Result<(), GuestError> {
        self.call.write(bytes).await
    }

    /// Ends the input.
    pub fn end_input(&self) {
        self.call.end_input();
    }

    /// Sends a signal to its process group.
    ///
    /// # Errors
    /// [`GuestError::Lost`].
    pub fn signal(&self, signal: i32) -> Result<(), GuestError> {
        self.call.say(&Order::Signal(signal))
    }

    /// Kills it and everything it started; how it ended is still told.
    ///
    /// # Errors
    /// [`GuestError::Lost`].
    pub fn kill(&self) -> Result<(), GuestError> {
        self.call.say(&Order::Kill)
    }

    /// Sends a signal to its process group, or gives its terminal another size, as soon as the guest has room for one more order.
    ///
    /// # Errors
    /// [`GuestError::Lost`].
    pub async fn order(&self, order: &Order) -> Result<(), GuestError> {
        self.call.say_in_time(order).await
    }

    /// Waits for its end, as the guest tells it. Output that nobody reads holds it up.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn ended(&self) -> Result<Ended, GuestError> {
        match self.call.answer("exec").await? {
            Answer::Ended(ended) => Ok(ended),
            _ => Err(GuestError::Nonsense { what: "exec" }),
        }
    }
}
