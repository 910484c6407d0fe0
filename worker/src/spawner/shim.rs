//! The shim of one slot: a tiny process that starts the slot's commands one after another and outlives none of them.
//!
//! Owns starting, TERM, KILL of the whole tree, and the exit with its usage. It lives in the slot's cgroup, so that what it starts
//! is there from its first instruction, and it is the reaper of its descendants, so that what a task leaves behind (also a daemon
//! that changed its session) becomes its child and is killed. Blocking, one thread, no runtime. Does not own deadlines or policy.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::child::{self, NotStarted};
use super::container::{self, Behind};
use super::mounts::{Shown, Top};
use super::packet;
use super::proto::{Exited, MakeShim, PACKET_BYTES_MAX, REQUEST_BYTES_MAX, Reply, Request, Spawn, Step};
use super::stack::Stack;
use super::tree;
use super::zygote::IGNORED;

/// How long killing is tried before a process counts as stuck (in the kernel, usually on a dead disk).
const KILL_TIME: Duration = Duration::from_secs(5);
/// How often killing is done again while it doesn't help.
const KILL_EVERY: Duration = Duration::from_secs(1);
/// Longest pause between two rounds of killing: strays are few and die within a millisecond or two.
const KILL_PAUSE_MAX: Duration = Duration::from_millis(20);

/// A command, or the runtime that it stands behind.
struct Watched {
    /// Its process id, session and process group.
    pid: libc::pid_t,
    behind: Option<Behind>,
}

/// A shim.
pub struct Shim {
    socket: OwnedFd,
    /// Becomes readable when a child ends. A descriptor for each process (pidfd) would tell of that one alone, and costs as much as reading
    /// and starting a command's request.
    ends: OwnedFd,
    null: OwnedFd,
    procs: Option<String>,
    oom_file: Option<File>,
    /// Tasks killed for memory as last read; between two commands nothing of ours runs that could add to them.
    oom_seen: u64,
    /// Kept from one command to the next.
    stack: Stack,
}

impl Shim {
    /// A shim that speaks on `socket`. The first of the files to enter cgroups also lists who else is in its cgroup.
    pub fn new(socket: OwnedFd, make: &MakeShim) -> io::Result<Self> {
        if make.containers || make.mounts {
            container::own_mounts(make.hidden.as_deref())?;
        }
        if make.containers {
            container::hide_half_cgroups();
        }
        for file in make.join.iter().filter(|_| make.enters) {
            std::fs::write(file, "0").map_err(|e| io::Error::new(e.kind(), format!("writing {file}: {e}")))?;
        }
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let mut shim = Self {
            socket,
            ends: ends_of_children()?,
            null: OwnedFd::from(File::open("/dev/null")?),
            procs: make.join.first().cloned(),
            oom_file: make.oom_file.as_ref().map(File::open).transpose()?,
            oom_seen: 0,
            stack: Stack::new(),
        };
        shim.oom_seen = shim.oom_kills();
        Ok(shim)
    }

    /// Serves until the worker is gone. Everything that still runs is killed then.
    pub fn serve(mut self) {
        let mut buffer = vec![0; PACKET_BYTES_MAX + 1024];
        if !self.say(&Reply::Ready) {
            return;
        }
        while let Some((request, fds)) = self.hear(&mut buffer) {
            let spawn = match request {
                Request::Spawn(spawn) => Ok((spawn, fds)),
                Request::SpawnFromFile => read_spawn(fds),
                // Its attempt is over already.
                Request::Term | Request::Kill => continue,
            };
            let Some((reply, root)) = self.serve_one(spawn, &mut buffer) else { return };
            if !self.say(&reply) {
                return;
            }
            // What it wrote there is thrown away, which may take a while, and is nobody's wait but the next command's.
            drop(root);
        }
    }

    /// One command from its request to the answer. `None`: the worker is gone.
    fn serve_one(
        &mut self,
        spawn: Result<(Spawn, Vec<OwnedFd>), NotStarted>,
        buffer: &mut [u8],
    ) -> Option<(Reply, Option<container::Root>)> {
        let (mut spawn, mut fds) = match spawn {
            Ok(spawn) => spawn,
            Err(NotStarted { step, errno }) => return Some((Reply::NotStarted { step, errno }, None)),
        };
        let root = match spawn.container.take().map(container::Root::make).transpose() {
            Ok(root) => root,
            Err(why) => return Some((Reply::Refused(why), None)),
        };
        let shown = match show(&mut spawn, &mut fds, root.as_ref()) {
            Ok(shown) => shown,
            Err(why) => return Some((Reply::Refused(why), root)),
        };
        let started = self.start(spawn, &fds, root.as_ref());
        // Nobody but the command holds its streams.
        drop(fds);
        let reply = match started {
            Ok(watched) => {
                let exited = self.watch(&watched, buffer)?;
                self.end(watched, exited)
            }
            Err(NotStarted { step, errno }) => Reply::NotStarted { step, errno },
        };
        // Before the answer: whoever hears it may unmount what this is a copy of.
        drop(shown);
        Some((reply, root))
    }

    fn start(&mut self, spawn: Spawn, fds: &[OwnedFd], root: Option<&container::Root>) -> Result<Watched, NotStarted> {
        let [stdout, stderr, rest @ ..] = fds else {
            return Err(NotStarted { step: Step::Streams, errno: libc::EBADF });
        };
        let stdin = rest.first().unwrap_or(&self.null);
        let stack = &mut self.stack;
        let Some(root) = root else {
            return Ok(Watched { pid: child::start(stack, &spawn, [stdin, stdout, stderr], &[])?, behind: None });
        };
        let streams = |e: io::Error| NotStarted { step: Step::Streams, errno: e.raw_os_error().unwrap_or(libc::EIO) };
        let (behind, inherits) = root.descriptors([stdin, stdout, stderr]).map_err(streams)?;
        let pid = match &behind.log {
            Some(log) => child::start(stack, &spawn, [&self.null, log, log], &inherits)?,
            None => child::start(stack, &spawn, [stdin, stdout, stderr], &inherits)?,
        };
        Ok(Watched { pid, behind: Some(behind) })
    }

    /// What is answered of a command that ended.
    fn end(&mut self, watched: Watched, exited: Exited) -> Reply {
        let exited = self.with_oom(exited);
        match watched.behind {
            None => Reply::Exited(exited),
            Some(behind) => behind.end(exited),
        }
    }

    /// Waits for the end, and obeys meanwhile. `None`: the worker is gone, and everything was killed.
    fn watch(&self, watched: &Watched, buffer: &mut [u8]) -> Option<Exited> {
        let mut gone = false;
        // When killing, once it was asked for, is done again.
        let mut again: Option<Instant> = None;
        let mut orphans = Exited::default();
        loop {
            let mut waited = [PollFd::new(&self.ends, PollFlags::IN), PollFd::new(&self.socket, PollFlags::IN)];
            let left = again.map(|again| again.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| rustix::event::Timespec::try_from(left).ok());
            match rustix::event::poll(&mut waited, left.as_ref()) {
                Ok(_) => {}
                Err(_) => continue,
            }
            if again.is_some_and(|again| Instant::now() >= again) {
                // A runtime whose container was killed ends by itself; not so one that is not done with making it.
                self.signal(watched, libc::SIGKILL, true);
                again = Some(Instant::now() + KILL_EVERY);
            }
            let (ended, spoken) = (!waited[0].revents().is_empty(), !waited[1].revents().is_empty());
            if ended {
                // Whose doesn't matter: several ends may be told of as one, and one of another time may be left.
                let _ = rustix::io::read(&self.ends, &mut [0; size_of::<libc::signalfd_siginfo>()]);
                if let Some(exited) = self.reap(watched.pid, &mut orphans) {
                    return Some(exited);
                }
                // Orphans that end while their task runs, so that they don't fill its process limit.
                reap_orphans(watched.pid, &mut orphans);
            }
            if spoken {
                match self.hear(buffer) {
                    Some((Request::Term, _)) => self.signal(watched, libc::SIGTERM, false),
                    Some((Request::Kill, _)) => {
                        again = again.or_else(|| Some(Instant::now() + KILL_EVERY));
                        self.signal(watched, libc::SIGKILL, false);
                    }
                    // A second command while one runs is a mistake of the worker's; it isn't started.
                    Some((Request::Spawn(_) | Request::SpawnFromFile, _)) => {}
                    None => {
                        gone = true;
                        self.signal(watched, libc::SIGKILL, true);
                    }
                }
            }
            if gone {
                // Its own end comes with ours: we are its parent and it asked to die with us; the rest falls to the zygote.
                let _ = self.reap_all(&mut Exited::default());
                return None;
            }
        }
    }

    /// `all`: also a runtime that the command stands behind, and is told of its end by it.
    fn signal(&self, &Watched { pid: command, ref behind }: &Watched, signal: libc::c_int, all: bool) {
        let spared = behind.is_some() && !all;
        if !spared {
            // SAFETY: plain system calls. The process was not waited for, so its number is still its own.
            unsafe {
                if libc::kill(-command, signal) < 0 {
                    // It has no group of its own yet.
                    libc::kill(command, signal);
                }
            }
        }
        for pid in tree::others(self.procs.as_deref()) {
            if spared && pid == command {
                continue;
            }
            // Those of its group have it already; TERM twice is harmless, and KILL is KILL.
            if signal == libc::SIGKILL || tree::group_of(pid) != Some(command) {
                // SAFETY: as above; a process that ended in between and whose number was given away again is a risk of
                // microseconds that every tool which signals by number takes.
                unsafe {
                    libc::kill(pid, signal);
                }
            }
        }
    }

    /// Takes the command's end, if it has ended, and that of everything it left. `orphans` holds what those used that were reaped already.
    fn reap(&self, command: libc::pid_t, orphans: &mut Exited) -> Option<Exited> {
        let (_, status) = wait(command, libc::WNOHANG, orphans).filter(|(pid, _)| *pid > 0)?;
        let mut exited = *orphans;
        if libc::WIFSIGNALED(status) {
            exited.signal = Some(libc::WTERMSIG(status));
        } else {
            exited.code = Some(libc::WEXITSTATUS(status));
        }
        exited.stuck = !self.reap_all(&mut exited);
        Some(exited)
    }

    /// Kills and waits for every descendant. Returns false when some can't be killed.
    fn reap_all(&self, exited: &mut Exited) -> bool {
        let begin = Instant::now();
        let mut pause = Duration::from_micros(200);
        // Orphans that had ended by themselves are no strays.
        let mut killing = false;
        loop {
            loop {
                match wait(-1, libc::WNOHANG, exited) {
                    // No child at all: as orphans become our children, nothing below us is left either.
                    None => return true,
                    Some((0, _)) => break,
                    Some(_) => exited.strays += u32::from(killing),
                }
            }
            if begin.elapsed() > KILL_TIME {
                return false;
            }
            killing = true;
            for pid in tree::others(self.procs.as_deref()) {
                // SAFETY: plain system call, on descendants of ours.
                unsafe {
                    libc::kill(pid, libc::SIGKILL);
                }
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(KILL_PAUSE_MAX);
        }
    }

    fn oom_kills(&self) -> u64 {
        let mut text = [0; 1024];
        let Some(len) = self.oom_file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()) else { return 0 };
        tree::oom_kills(text.get(..len).unwrap_or_default())
    }

    fn with_oom(&mut self, mut exited: Exited) -> Exited {
        // Also with exit code 0: a task that lost one of its processes has not done all of its work, whatever its shell says.
        let oom_kills = self.oom_kills();
        exited.oom = oom_kills > std::mem::replace(&mut self.oom_seen, oom_kills);
        exited
    }

    fn say(&self, reply: &Reply) -> bool {
        packet::send(self.socket.as_fd(), &volley_jobspecs::wire::encode(reply), &[]).is_ok()
    }

    /// `None`: the worker is gone.
    fn hear(&self, buffer: &mut [u8]) -> Option<(Request, Vec<OwnedFd>)> {
        loop {
            match packet::receive(self.socket.as_fd(), buffer) {
                Ok((0, _)) => return None,
                Ok((len, fds)) => return Some((minicbor::decode(buffer.get(..len)?).ok()?, fds)),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }
}

/// Shows a command its mounts.
fn show(spawn: &mut Spawn, fds: &mut Vec<OwnedFd>, root: Option<&container::Root>) -> Result<Shown, String> {
    let mounts = std::mem::take(&mut spawn.mounts);
    let trees = fds.split_off(fds.len().saturating_sub(mounts.len()));
    match (root, &spawn.top) {
        _ if mounts.is_empty() => Ok(Shown::default()),
        (Some(root), _) => Shown::place(&mounts, trees, Top::Root(&root.top()), Some(root.owner())),
        (None, Some(top)) => Shown::place(&mounts, trees, Top::Work(Path::new(top)), spawn.uid.zip(spawn.gid)),
        (None, None) => Err("nobody says where a volume is to be shown".to_owned()),
    }
}

/// A descriptor that becomes readable when a child ends, in place of the signal. Signals that a command obeys and we don't are held back
/// too: until a command has made them its own, one that is sent to it waits for that, where it would be lost if we only ignored it.
fn ends_of_children() -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: system calls on a set of ours, in a process of one thread; the descriptor is new and nobody else owns it.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        let mut held = set;
        for signal in IGNORED {
            libc::sigaddset(&raw mut held, signal);
        }
        libc::sigprocmask(libc::SIG_BLOCK, &raw const held, std::ptr::null_mut());
        match libc::signalfd(-1, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) {
            fd if fd < 0 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Waits for every child that has ended but `but`, whose end is the task's and is taken elsewhere.
fn reap_orphans(but: libc::pid_t, exited: &mut Exited) {
    loop {
        // SAFETY: a zeroed siginfo is a valid one and ours; NOWAIT only looks.
        let pid = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            if libc::waitid(libc::P_ALL, 0, &raw mut info, options) < 0 { 0 } else { info.si_pid() }
        };
        if pid == 0 || pid == but || wait(pid, libc::WNOHANG, exited).is_none() {
            return;
        }
    }
}

fn read_spawn(mut fds: Vec<OwnedFd>) -> Result<(Spawn, Vec<OwnedFd>), NotStarted> {
    let bad = |errno| NotStarted { step: Step::Request, errno };
    if fds.is_empty() {
        return Err(bad(libc::EBADF));
    }
    let file = File::from(fds.remove(0));
    let len = file.metadata().map_or(0, |meta| meta.len());
    let len = usize::try_from(len).ok().filter(|len| *len <= REQUEST_BYTES_MAX).ok_or(bad(libc::E2BIG))?;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, 0).map_err(|e| bad(e.raw_os_error().unwrap_or(libc::EIO)))?;
    let spawn = minicbor::decode(&bytes).map_err(|_| bad(libc::EINVAL))?;
    Ok((spawn, fds))
}

/// Waits, adding what was used. `None`: no such child. Process 0: there are some, but none has ended.
fn wait(pid: libc::pid_t, options: libc::c_int, exited: &mut Exited) -> Option<(libc::pid_t, libc::c_int)> {
    let mut status = 0;
    // SAFETY: a zeroed rusage is a valid one, and both pointers are ours.
    let (pid, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::wait4(pid, &raw mut status, options, &raw mut usage), usage)
    };
    if pid < 0 {
        return None;
    }
    if pid > 0 {
        let micros = |time: libc::timeval| u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(time.tv_usec).unwrap_or(0);
        exited.cpu_us += micros(usage.ru_utime) + micros(usage.ru_stime);
        let resident = u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024;
        exited.memory_bytes_max = exited.memory_bytes_max.max(resident);
    }
    Some((pid, status))
}
