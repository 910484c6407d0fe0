//! The machine spawner's process: starts VMMs, watches them, and is the first process of the namespace they live in.
//!
//! Owns users and directories of VMMs, their end, and what is left of them. When the worker's end of its socket closes it ends, and the
//! kernel ends every VMM with it. Blocking, one thread, no runtime. Does not own what is started or why.

use std::collections::VecDeque;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::mount::UnmountFlags;
use volley_jobspecs::wire;

use super::child::{self, HIGH, Plan, Running};
use super::proto::{Exited, Order, PACKET_BYTES_MAX, Reply, Start, Step, What};
use super::{Hello, USERS_FIRST, USERS_MAX, view};
use crate::spawner::packet;
use crate::spawner::stack::Stack;
use crate::spawner::zygote::{self, Children};
use crate::vmm::kvm;

/// A mount goes at once, whoever uses it, and a link in its place is not followed.
const TAKE_AWAY: UnmountFlags = UnmountFlags::DETACH.union(UnmountFlags::NOFOLLOW);

/// One process.
struct Vmm {
    socket: OwnedFd,
    running: Running,
    user: Option<u32>,
    dir: PathBuf,
    /// Names of mounts in its directory.
    attached: Vec<String>,
    /// The worker has let go of it: it was killed, and nobody listens.
    dropped: bool,
}

struct Init {
    worker: OwnedFd,
    machines: PathBuf,
    /// Those that are not in use, the one that was free the longest first.
    users: VecDeque<u32>,
    /// For directories where all machines have one user.
    counter: u64,
    vmms: Vec<Vmm>,
    stack: Stack,
}

/// Runs in the forked child, never returns. `missing`: what could not be shut off before.
pub fn main(worker: OwnedFd, mut missing: Vec<String>, own_mounts: bool) -> ! {
    zygote::set_up(c"volley-machines", Children::Awaited);
    let entered = view::enter(own_mounts);
    let outside = entered.is_err();
    let say = |reply: Reply, fds: &[std::os::fd::BorrowedFd<'_>]| packet::send(worker.as_fd(), &wire::encode(&Hello::Reply(reply)), fds);
    let directory = match entered {
        Ok(directory) => directory,
        Err(why) if rustix::process::geteuid().is_root() && own_mounts => {
            let _ = say(Reply::Broken(why), &[]);
            exit(1)
        }
        Err(why) => {
            missing.push(why);
            match own_directory() {
                Ok(directory) => directory,
                Err(e) => {
                    let _ = say(Reply::Broken(format!("{}; nor can it make a directory for machines: {e}", missing.join("; "))), &[]);
                    exit(1)
                }
            }
        }
    };
    let as_root = missing.iter().all(|what| !what.starts_with("a user"));
    let machines = fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&directory)));
    if say(Reply::Ready { missing }, &[directory.as_fd()]).is_err() {
        exit(1)
    }
    drop(directory);
    let users = if as_root { (USERS_FIRST..USERS_FIRST + USERS_MAX).collect() } else { VecDeque::new() };
    let machines = machines.unwrap_or_else(|_| PathBuf::from(view::MACHINES));
    let mut init = Init { worker, machines, users, counter: 0, vmms: Vec::new(), stack: Stack::new() };
    init.serve();
    for vmm in &init.vmms {
        init.kill(vmm);
    }
    if outside {
        // In a view nothing is removed: it goes as a whole, and behind its mounts are the worker's files.
        let _ = fs::remove_dir_all(&init.machines);
    }
    exit(0)
}

/// Where the host's files can't be hidden, the directories lie among them.
fn own_directory() -> io::Result<OwnedFd> {
    let dir = std::env::temp_dir().join(format!("volley-machines-{}", std::process::id()));
    fs::create_dir(&dir)?;
    fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
    Ok(fs::File::open(dir)?.into())
}

impl Init {
    /// Until the worker is gone.
    fn serve(&mut self) {
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        loop {
            let mut waited = vec![PollFd::new(&self.worker, PollFlags::IN)];
            for vmm in &self.vmms {
                waited.push(PollFd::new(&vmm.running.pidfd, PollFlags::IN));
                // One that was dropped says nothing more, and is hung up for ever.
                let events = if vmm.dropped { PollFlags::empty() } else { PollFlags::IN };
                waited.push(if vmm.dropped { PollFd::new(&vmm.running.pidfd, events) } else { PollFd::new(&vmm.socket, events) });
            }
            if rustix::event::poll(&mut waited, None).is_err() {
                continue;
            }
            let ready: Vec<bool> = waited.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(waited);
            let at = |index: usize| ready.get(index).copied().unwrap_or_default();
            // From the last: those before keep their places.
            for index in (0..self.vmms.len()).rev() {
                if at(1 + 2 * index) {
                    self.ended(index);
                } else if at(2 + 2 * index) {
                    self.ordered(index, &mut buffer);
                }
            }
            if at(0) && !self.hear(&mut buffer) {
                return;
            }
        }
    }

    /// False: the worker is gone.
    fn hear(&mut self, buffer: &mut [u8]) -> bool {
        match packet::receive(self.worker.as_fd(), buffer) {
            Ok((0, _)) => false,
            Ok((len, fds)) => {
                let mut fds = fds.into_iter();
                let Some(socket) = fds.next() else { return true };
                let start = buffer.get(..len).and_then(|bytes| minicbor::decode::<Start>(bytes).ok());
                let started = start.ok_or((Step::Request, libc::EINVAL)).and_then(|start| self.start(&start, fds));
                match started {
                    Ok((running, user, name)) => self.started(socket, running, user, name),
                    Err((step, errno)) => say(&socket, &Reply::NotStarted { step, errno }),
                }
                true
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => true,
            Err(_) => false,
        }
    }

    fn started(&mut self, socket: OwnedFd, running: Running, user: Option<u32>, name: String) {
        let reply = wire::encode(&Reply::Started { dir: name.clone(), user });
        // One that nobody hears of is seen to have been dropped.
        let _ = packet::send(socket.as_fd(), &reply, &[running.pidfd.as_fd()]);
        self.vmms.push(Vmm { socket, running, user, dir: self.machines.join(name), attached: Vec::new(), dropped: false });
    }

    fn start(&mut self, start: &Start, mut fds: impl Iterator<Item = OwnedFd>) -> Result<(Running, Option<u32>, String), (Step, i32)> {
        let user = match self.users.pop_front() {
            Some(user) => Some(user),
            None if self.vmms.iter().any(|vmm| vmm.user.is_some()) => return Err((Step::Users, libc::EAGAIN)),
            None => None,
        };
        self.counter += 1;
        let name = user.map_or_else(|| format!("n{}", self.counter), |user| user.to_string());
        let dir = self.machines.join(&name);
        let started = make_dir(&dir, user).map_err(|e| (Step::Directory, e.raw_os_error().unwrap_or(0))).and_then(|()| {
            if matches!(start.what, What::KvmProbe) {
                return probe_kvm();
            }
            self.exec(start, &dir, user, &mut fds)
        });
        match started {
            Ok(running) => Ok((running, user, name)),
            Err(failed) => {
                let _ = fs::remove_dir_all(&dir);
                self.users.extend(user);
                Err(failed)
            }
        }
    }

    fn exec(
        &mut self,
        start: &Start,
        dir: &Path,
        user: Option<u32>,
        fds: &mut impl Iterator<Item = OwnedFd>,
    ) -> Result<Running, (Step, i32)> {
        let invalid = (Step::Request, libc::EINVAL);
        let text = |bytes: &[u8]| CString::new(bytes).map_err(|_| invalid);
        let (program, program_fd) = match &start.what {
            What::Path(path) => (Some(text(path)?), None),
            What::Descriptor => (None, Some(high(fds.next().ok_or(invalid)?)?)),
            What::KvmProbe => return Err(invalid),
        };
        let joins: Vec<OwnedFd> = fds.take(start.joins as usize).collect();
        let inherits = fds.map(high).collect::<Result<Vec<_>, _>>()?;
        if inherits.len() > HIGH as usize || inherits.len() < 3 || joins.len() != start.joins as usize {
            return Err(invalid);
        }
        let argv = start.argv.iter().map(|word| text(word)).collect::<Result<Vec<_>, _>>()?;
        let dir = text(dir.as_os_str().as_encoded_bytes())?;
        let plan = Plan {
            program: program.as_deref(),
            program_fd: program_fd.as_ref(),
            argv: &argv,
            joins: &joins,
            inherits: &inherits,
            dir: &dir,
            user,
        };
        child::start(&mut self.stack, &plan)
    }

    fn ordered(&mut self, index: usize, buffer: &mut [u8]) {
        let Some(vmm) = self.vmms.get_mut(index) else { return };
        match packet::receive(vmm.socket.as_fd(), buffer) {
            Ok((len, fds)) if len > 0 => {
                let order = buffer.get(..len).and_then(|bytes| minicbor::decode::<Order>(bytes).ok());
                let done = match (order, fds.first()) {
                    (Some(Order::Attach { name, dir }), Some(mount)) => attach(vmm, name, dir, mount),
                    _ => Err("a request that makes no sense".to_owned()),
                };
                say(&vmm.socket, &Reply::Done(done.err()));
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            _gone => {
                vmm.dropped = true;
                if let Some(vmm) = self.vmms.get(index) {
                    self.kill(vmm);
                }
            }
        }
    }

    fn kill(&self, vmm: &Vmm) {
        let _ = rustix::process::pidfd_send_signal(&vmm.running.pidfd, rustix::process::Signal::KILL);
    }

    /// Takes its status and everything that is left of it.
    fn ended(&mut self, index: usize) {
        let vmm = self.vmms.swap_remove(index);
        let exited = take_status(vmm.running.pid);
        let alone = vmm.user.is_none_or(|user| end_all_of(user, &self.vmms));
        let stays = |name: &&String| rustix::mount::unmount(vmm.dir.join(name), TAKE_AWAY).is_err();
        let bare = vmm.attached.iter().filter(stays).count() == 0;
        // Made by a VMM that may be hostile, so no link in it is followed. Only without mounts: behind them are the worker's files.
        let removed = bare && fs::remove_dir_all(&vmm.dir).is_ok();
        // A user with something left is not given out again.
        if removed && alone {
            self.users.extend(vmm.user);
        }
        say(&vmm.socket, &Reply::Exited(exited));
    }
}

/// Out of the way of those that are placed.
#[expect(clippy::needless_pass_by_value, reason = "the one that was in the way is closed")]
fn high(fd: OwnedFd) -> Result<OwnedFd, (Step, i32)> {
    rustix::io::fcntl_dupfd_cloexec(&fd, HIGH).map_err(|e| (Step::Descriptors, e.raw_os_error()))
}

fn say(socket: &OwnedFd, reply: &Reply) {
    // Without waiting: a worker that doesn't read must not hold up the other machines.
    let _ = rustix::io::ioctl_fionbio(socket, true);
    let _ = packet::send(socket.as_fd(), &wire::encode(reply), &[]);
    let _ = rustix::io::ioctl_fionbio(socket, false);
}

fn make_dir(dir: &Path, user: Option<u32>) -> io::Result<()> {
    fs::create_dir(dir)?;
    fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
    match user {
        Some(user) => std::os::unix::fs::chown(dir, Some(user), Some(user)),
        None => Ok(()),
    }
}

/// Shows a detached mount of the worker's in the VMM's directory.
fn attach(vmm: &mut Vmm, name: String, dir: bool, mount: &OwnedFd) -> Result<(), String> {
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') && !name.is_empty();
    if !plain || vmm.attached.contains(&name) {
        return Err(format!("{name:?} is no free name"));
    }
    // The VMM owns its directory: what it put there itself is not used, and a link is not followed.
    let at = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {}", io::Error::from(e));
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC;
    let own = rustix::fs::open(&vmm.dir, flags, rustix::fs::Mode::empty()).map_err(at("opening its directory"))?;
    if dir {
        rustix::fs::mkdirat(&own, &name, rustix::fs::Mode::RWXU).map_err(at("making a directory"))?;
    } else {
        let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::EXCL | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::openat(&own, &name, flags, rustix::fs::Mode::RUSR).map_err(at("making a file"))?;
    }
    let flags = rustix::mount::MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", &own, &name, flags).map_err(at("mounting"))?;
    vmm.attached.push(name);
    Ok(())
}

fn take_status(pid: libc::pid_t) -> Exited {
    let mut status = 0;
    // SAFETY: a zeroed rusage is a valid one, and both pointers are ours.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::wait4(pid, &raw mut status, 0, &raw mut usage);
        usage
    };
    let micros = |time: libc::timeval| u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(time.tv_usec).unwrap_or(0);
    let signalled = libc::WIFSIGNALED(status);
    Exited {
        code: (!signalled).then(|| libc::WEXITSTATUS(status)),
        signal: signalled.then(|| libc::WTERMSIG(status)),
        cpu_us: micros(usage.ru_utime) + micros(usage.ru_stime),
        memory_bytes_max: u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024,
    }
}

/// How long what a VMM left is killed and waited for. Machines of others wait meanwhile, but it is there only when a guest took its VMM
/// over, and dies within milliseconds.
const LEFT_TIME: Duration = Duration::from_secs(2);
const LEFT_LOOK: Duration = Duration::from_millis(1);

/// A VMM that a guest took over may have started others. They have its user, which nobody else has. False: some don't die.
fn end_all_of(user: u32, vmms: &[Vmm]) -> bool {
    let begin = Instant::now();
    loop {
        reap_strangers(vmms);
        if kill_all_of(user) == 0 {
            return true;
        }
        if begin.elapsed() > LEFT_TIME {
            return false;
        }
        std::thread::sleep(LEFT_LOOK);
    }
}

/// How many there were.
fn kill_all_of(user: u32) -> usize {
    use std::os::unix::fs::MetadataExt;
    let mut found = 0;
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<libc::pid_t>().ok());
        if let (Some(pid), Ok(meta)) = (pid, entry.metadata())
            && meta.uid() == user
        {
            found += 1;
            // SAFETY: plain system call, on a process of a user that is given to one VMM at a time, which has ended.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }
    found
}

/// Processes whose status is taken at once; more than a VMM's user may have.
const PROCESSES_LOOKED_AT: usize = 1024;

/// Takes the status of processes that became ours when the one that started them ended.
fn reap_strangers(vmms: &[Vmm]) {
    for _ in 0..PROCESSES_LOOKED_AT {
        // SAFETY: a zeroed siginfo is a valid one and ours; NOWAIT only looks.
        let pid = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            if libc::waitid(libc::P_ALL, 0, &raw mut info, options) < 0 { 0 } else { info.si_pid() }
        };
        if pid == 0 || vmms.iter().any(|vmm| vmm.running.pid == pid) {
            return;
        }
        // SAFETY: plain system call, on a child that has ended.
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) };
    }
}

fn probe_kvm() -> Result<Running, (Step, i32)> {
    // SAFETY: this process has one thread, so the child may run anything.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: plain system call.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
        exit(kvm::look());
    }
    if pid < 0 {
        return Err((Step::Clone, io::Error::last_os_error().raw_os_error().unwrap_or(0)));
    }
    Running::new(pid).map_err(|errno| (Step::Clone, errno))
}

fn exit(code: i32) -> ! {
    // Not `std::process::exit`: handlers of the process we were forked from are none of our business.
    // SAFETY: ends this process.
    unsafe { libc::_exit(code) }
}
