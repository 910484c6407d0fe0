//! The first process of a container: runs one command in it and tells how that ended.
//!
//! Owns what an OCI runtime does not do for a command: a process of its own beside the first one (whom the kernel spares signals), the end of
//! everything it left, and an exact end where a runtime gives but one number. The runtime starts it from a file shown to the container, as
//! the command's user. It depends on nothing in the image, and nothing in the container can speak to it: its memory and descriptors are
//! closed to processes of the same user. Killing it, which kills the container, needs no word of its. Blocking, one thread, few allocations.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStringExt;
use std::time::{Duration, Instant};

use minicbor::{Decode, Encode};

use crate::program::{self, Program};

/// The first argument, by which the program knows what it is for. Then come [`REPORT`] or [`PLAIN`], the directory, and the command.
pub const WORD: &str = "--container";
/// The second argument where descriptors are handed over: from 3 on the report's pipe, stdin, stdout and stderr, then as many files to
/// enter cgroups as the number behind it says.
pub const REPORT: &str = "report=";
/// The second argument where a runtime hands over none: the streams are the runtime's, and the exit code says what it can.
pub const PLAIN: &str = "plain";

/// The report's pipe.
const REPORT_FD: i32 = 3;
/// The first of the three streams.
const STREAM_FD: i32 = 4;
/// The first file to enter a cgroup.
const CGROUP_FD: i32 = 7;
/// How long what the command left is killed before its end is told without it: the kernel kills it with us.
const KILL_TIME: Duration = Duration::from_secs(2);
/// Pause between two rounds of killing.
const KILL_PAUSE: Duration = Duration::from_micros(200);

/// What is told of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum Report {
    /// It could not be started.
    #[n(0)]
    NotStarted {
        /// At which step.
        #[n(0)]
        step: Step,
        /// The system's error number.
        #[n(1)]
        errno: i32,
    },
    /// It ended, and nothing it started runs any more.
    #[n(1)]
    Ended(#[n(0)] Ended),
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Ended {
    /// Exit code, unless a signal ended it.
    #[n(0)]
    pub code: Option<i32>,
    /// The signal that ended it.
    #[n(1)]
    pub signal: Option<i32>,
    /// CPU time of everything in the container, in microseconds.
    #[n(2)]
    pub cpu_us: u64,
    /// Most memory one process had resident, in bytes.
    #[n(3)]
    pub memory_bytes_max: u64,
    /// How many processes it left running, which were killed.
    #[n(4)]
    pub strays: u32,
}

/// The step at which a command could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Step {
    /// Entering its cgroups.
    #[n(0)]
    Cgroup,
    /// Its standard streams.
    #[n(1)]
    Streams,
    /// Making the process.
    #[n(2)]
    Clone,
    /// Its directory.
    #[n(3)]
    Directory,
    /// Running the program.
    #[n(4)]
    Exec,
    /// What it was told.
    #[n(5)]
    Request,
}

/// A step that failed.
type Failed = (Step, i32);

/// What it is told.
#[derive(Debug)]
struct Orders {
    /// Cgroups to enter; none: there are no descriptors at all.
    cgroups: Option<i32>,
    cwd: CString,
    argv: Vec<CString>,
}

/// Carries out its arguments, those behind [`WORD`]; what it returns is the program's exit code.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> u8 {
    close_to_others();
    let orders = orders(arguments);
    let report = orders.as_ref().is_none_or(|orders| orders.cgroups.is_some());
    let told = match orders {
        Some(orders) => run(&orders),
        None => Err((Step::Request, libc::EINVAL)),
    };
    let told = told.map_or_else(|(step, errno)| Report::NotStarted { step, errno }, Report::Ended);
    if report {
        // SAFETY: nobody else here uses that descriptor; if it is none, writing fails, and whoever waits for the report sees its end.
        let mut pipe = unsafe { File::from_raw_fd(REPORT_FD) };
        let _ = minicbor::to_vec(told).map(|bytes| pipe.write_all(&bytes));
    } else if let Report::NotStarted { step, errno } = told {
        eprintln!("the command can't be started ({step:?}): {}", io::Error::from_raw_os_error(errno));
    }
    exit_code(&told)
}

/// As shells count it.
fn exit_code(told: &Report) -> u8 {
    let code = match told {
        Report::NotStarted { step: Step::Exec, errno: libc::ENOENT } => 127,
        Report::NotStarted { .. } => 126,
        Report::Ended(ended) => ended.code.or(ended.signal.map(|signal| 128 + signal)).unwrap_or(255),
    };
    u8::try_from(code & 0xff).unwrap_or(255)
}

fn orders(arguments: Vec<OsString>) -> Option<Orders> {
    let mut arguments = arguments.into_iter();
    let how = arguments.next()?.into_string().ok()?;
    let cgroups = if how == PLAIN { None } else { Some(how.strip_prefix(REPORT)?.parse().ok()?) };
    let cwd = CString::new(arguments.next()?.into_vec()).ok()?;
    let argv = arguments.map(|word| CString::new(word.into_vec()).ok()).collect::<Option<Vec<_>>>()?;
    (!argv.is_empty()).then_some(Orders { cgroups, cwd, argv })
}

/// The container ends when the runtime does; and processes of our user in it can neither read nor trace this one.
fn close_to_others() {
    // SAFETY: plain system calls on this process.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::prctl(libc::PR_SET_NAME, c"volley-init".as_ptr());
    }
}

fn run(orders: &Orders) -> Result<Ended, Failed> {
    if let Some(cgroups) = orders.cgroups {
        take_descriptors(cgroups)?;
    }
    let child = start(orders)?;
    let mut ended = Ended::default();
    loop {
        match wait(0, &mut ended) {
            Some((pid, status)) if pid == child => {
                if libc::WIFSIGNALED(status) {
                    ended.signal = Some(libc::WTERMSIG(status));
                } else {
                    ended.code = Some(libc::WEXITSTATUS(status));
                }
                break;
            }
            Some(_orphan) => {}
            // It is our child until it was waited for.
            None => return Err((Step::Clone, libc::ECHILD)),
        }
    }
    kill_all(&mut ended);
    Ok(ended)
}

/// Enters cgroups, and makes the streams that were handed over its own.
fn take_descriptors(cgroups: i32) -> Result<(), Failed> {
    // SAFETY: system calls on descriptors that are ours by agreement; one that is none is an error that is told.
    unsafe {
        for fd in CGROUP_FD..CGROUP_FD.saturating_add(cgroups) {
            // 0 is whoever writes.
            if libc::write(fd, c"0".as_ptr().cast(), 1) < 0 {
                return Err((Step::Cgroup, last_errno()));
            }
        }
        for stream in 0..3 {
            if libc::dup2(STREAM_FD + stream, stream) < 0 {
                return Err((Step::Streams, last_errno()));
            }
        }
        libc::fcntl(REPORT_FD, libc::F_SETFD, libc::FD_CLOEXEC);
        for fd in STREAM_FD..CGROUP_FD.saturating_add(cgroups) {
            libc::close(fd);
        }
    }
    Ok(())
}

fn start(orders: &Orders) -> Result<libc::pid_t, Failed> {
    let program = Program::new(orders.argv.clone(), program::own_variables()).ok_or((Step::Exec, libc::ENOENT))?;
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|e| (Step::Clone, e.raw_os_error()))?;
    // SAFETY: this process has one thread, so that the child may do anything until it becomes the program.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err((Step::Clone, last_errno()));
    }
    if pid == 0 {
        let (step, errno) = become_it(&program, &orders.cwd);
        let mut bytes = [step as u8, 0, 0, 0, 0];
        bytes[1..].copy_from_slice(&errno.to_le_bytes());
        // SAFETY: system calls with a buffer of ours; leaves without running anything of the parent's.
        unsafe {
            libc::write(write.as_raw_fd(), bytes.as_ptr().cast(), bytes.len());
            libc::_exit(127)
        }
    }
    drop(write);
    let mut bytes = [0; 5];
    match io::Read::read_exact(&mut File::from(read), &mut bytes) {
        // Its end closed when it became the program, or died.
        Err(_) => Ok(pid),
        Ok(()) => {
            let _ = wait(0, &mut Ended::default());
            let step = if bytes[0] == Step::Directory as u8 { Step::Directory } else { Step::Exec };
            Err((step, i32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]])))
        }
    }
}

/// In the child. Returns only when it fails.
fn become_it(program: &Program, cwd: &CString) -> Failed {
    // SAFETY: system calls with pointers that outlive them.
    unsafe {
        libc::setsid();
        for signal in 1..=libc::SIGRTMAX() {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        if libc::chdir(cwd.as_ptr()) < 0 {
            return (Step::Directory, last_errno());
        }
    }
    (Step::Exec, program.exec())
}

/// Kills everything else in the container and waits for it.
fn kill_all(ended: &mut Ended) {
    let begin = Instant::now();
    // Orphans that had ended by themselves are no strays.
    let mut killing = false;
    while begin.elapsed() < KILL_TIME {
        loop {
            match wait(libc::WNOHANG, ended) {
                None => return,
                Some((0, _)) => break,
                Some(_) => ended.strays = ended.strays.saturating_add(u32::from(killing)),
            }
        }
        killing = true;
        // SAFETY: a plain system call: to everybody in this namespace of processes but us, its first.
        unsafe { libc::kill(-1, libc::SIGKILL) };
        std::thread::sleep(KILL_PAUSE);
    }
}

/// Waits for any child, adding what it used. None: there is no child. Process 0: there are some, but none has ended.
fn wait(options: libc::c_int, ended: &mut Ended) -> Option<(libc::pid_t, libc::c_int)> {
    let mut status = 0;
    loop {
        // SAFETY: a zeroed rusage is a valid one, and both pointers are ours.
        let (pid, usage) = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            (libc::wait4(-1, &raw mut status, options, &raw mut usage), usage)
        };
        if pid < 0 && last_errno() == libc::EINTR {
            continue;
        }
        if pid < 0 {
            return None;
        }
        if pid > 0 {
            let micros =
                |time: libc::timeval| u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(time.tv_usec).unwrap_or(0);
            ended.cpu_us += micros(usage.ru_utime) + micros(usage.ru_stime);
            ended.memory_bytes_max = ended.memory_bytes_max.max(u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024);
        }
        return Some((pid, status));
    }
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_understood_or_refused() {
        let orders = |words: &[&str]| super::orders(words.iter().map(OsString::from).collect());
        let found = orders(&["report=2", "/volley/work", "sh", "-c", "exit 3"]).unwrap();
        assert_eq!((found.cgroups, found.argv.len()), (Some(2), 3));
        assert_eq!(orders(&["plain", "/", "true"]).unwrap().cgroups, None);
        for bad in [&["report=x", "/", "true"][..], &["report=1", "/"], &["plain"], &[], &["other", "/", "true"]] {
            assert!(orders(bad).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn ends_are_counted_as_shells_count_them() {
        assert_eq!(exit_code(&Report::Ended(Ended { code: Some(7), ..Ended::default() })), 7);
        assert_eq!(exit_code(&Report::Ended(Ended { signal: Some(11), ..Ended::default() })), 139);
        assert_eq!(exit_code(&Report::NotStarted { step: Step::Exec, errno: libc::ENOENT }), 127);
        assert_eq!(exit_code(&Report::NotStarted { step: Step::Directory, errno: libc::ENOENT }), 126);
    }
}
