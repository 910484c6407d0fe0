//! A command from start to end.
//!
//! Owns its process, its streams, its time limit, and the end of everything it started. Telling how it ended is all: what that means is
//! the host's.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Answer, Ended, Exec, Order, Refusal, RefusalKind, Usage, User};

use super::Agent;
use super::cgroup::Group;
use super::children::Status;
use super::session::{Call, refused};
use super::spawn::Plan;
use super::tty;
use super::users::{self, Ids};
use crate::files::below;
use crate::program::Program;

/// Bytes moved between a pipe and the channel at once: a pipe holds as many.
const CHUNK_BYTES: usize = 64 * 1024;
/// How long output is waited for once everything was killed. Only what could not be killed, or left the process group where there are no
/// cgroups, can still hold a pipe.
const DRAIN_WAIT: Duration = Duration::from_secs(2);

/// A disk with less room than this, in bytes, is full by anybody's measure: what did not fit may have been larger than what is left.
const ROOM_BYTES_MIN: u64 = 64 * 1024;

/// A command that runs.
struct Running {
    pid: u32,
    group: Option<Group>,
    started: Instant,
    /// Its output and errors, as far as they have not ended.
    pumps: Arc<AtomicU32>,
    /// Its terminal, if it has one.
    tty: Option<OwnedFd>,
}

/// The agent's ends of a command's streams.
struct Ends {
    input: Option<OwnedFd>,
    output: OwnedFd,
    /// None: there is a terminal, which is all of them.
    errors: Option<OwnedFd>,
    tty: Option<OwnedFd>,
}

/// A terminal's end-of-file character, as long as nothing else is set.
const END_OF_FILE: &[u8] = b"\x04";

/// Why it is no longer waited for.
enum Stop {
    /// It has ended.
    Ended(Status),
    /// Everything is to be killed.
    Kill,
    /// The processes are to be left alone.
    Leave,
}

/// Runs a command and answers.
pub fn run(agent: &Agent, call: &Call, exec: &Exec) {
    let running = match start(agent, call, exec) {
        Ok(running) => running,
        Err(answer) => return call.finish(&answer),
    };
    call.say(&Answer::Started { pid: running.pid });
    let (stop, timed_out) = watch(agent, call, exec, &running);
    // What runs on when the command has ended by itself, and is not meant to.
    let strays = if matches!(stop, Stop::Ended(_)) && !exec.leave { running.group.as_ref().map_or(0, Group::members) } else { 0 };
    let (status, leave) = match stop {
        Stop::Leave => {
            agent.children.forget(running.pid);
            return call.finish(&Answer::Done);
        }
        Stop::Ended(status) => (Some(status), exec.leave),
        Stop::Kill => (None, false),
    };
    let survivors = match &running.group {
        Some(group) if leave => group.members(),
        // Nothing is left of it, so there is nobody to kill.
        Some(_) if status.is_some() && strays == 0 => 0,
        _ => kill_tree(&running),
    };
    // What was killed ends at once.
    let deadline = Some(Instant::now() + DRAIN_WAIT);
    let status = status.or_else(|| agent.session.wait(deadline, |_| agent.children.status(running.pid)));
    // A pump may wait for the host to read, for as long as there is a host. Only where something may have survived is there a deadline.
    let sure = running.group.is_some() && survivors == 0;
    let deadline = (!sure).then(|| Instant::now() + DRAIN_WAIT);
    agent.session.wait(deadline, |state| (running.pumps.load(Ordering::Acquire) == 0 || call.is_over(state)).then_some(()));
    let answer = match status {
        Some(status) => {
            let disk_full = is_full(exec.cwd.as_deref().unwrap_or("/"));
            let ended = ended(status, running.group.as_ref(), running.started, timed_out, survivors);
            Answer::Ended(Ended { disk_full, strays, ..ended })
        }
        None => Answer::Refused(Refusal::new(RefusalKind::System, format!("process {} can't be killed", running.pid))),
    };
    agent.children.forget(running.pid);
    call.finish(&answer);
    // Behind the answer: nobody waits for it.
    if let Some(group) = &running.group {
        group.remove();
    }
}

fn start(agent: &Agent, call: &Call, exec: &Exec) -> Result<Running, Answer> {
    let bad = |text: String| Answer::Refused(Refusal::new(RefusalKind::BadRequest, text));
    let Some(program) = exec.argv.first().filter(|program| !program.is_empty()) else {
        return Err(bad("a command without a program".to_owned()));
    };
    if exec.env.iter().any(|(name, _)| name.is_empty() || name.contains('=')) {
        return Err(bad("a variable without a name, or with = in it".to_owned()));
    }
    let ids = ids(exec.user.as_ref())?;
    let cwd = exec.cwd.as_deref().unwrap_or("/");
    if !std::path::Path::new(cwd).is_dir() {
        return Err(Answer::Refused(Refusal::new(RefusalKind::NotFound, format!("the working directory {cwd} is no directory"))));
    }
    if agent.cgroups.is_none() && (exec.limits.memory_bytes.is_some() || exec.limits.pids.is_some() || exec.limits.cpu_milli.is_some()) {
        return Err(bad("this machine can't limit memory, processes or CPU".to_owned()));
    }
    let group = agent.cgroups.as_ref().map(|cgroups| cgroups.group(&exec.limits)).transpose();
    let group = group.map_err(|e| refused("making a cgroup", &e))?;
    let text = |text: String| CString::new(text).ok();
    let words = exec.argv.iter().map(|word| text(word.clone())).collect::<Option<Vec<_>>>();
    let variables = exec.env.iter().map(|(name, value)| text(format!("{name}={value}"))).collect::<Option<Vec<_>>>();
    let found = words.zip(variables).and_then(|(words, variables)| Program::new(words, variables));
    let found = found.ok_or_else(|| bad("a NUL byte in a word or a variable".to_owned()))?;
    let cwd = CString::new(cwd).map_err(|_| bad("a NUL byte in the working directory".to_owned()))?;
    let made = streams(exec, ids.as_ref()).and_then(|(ends, streams)| {
        let (open_files, tty, expendable) = (exec.limits.open_files, exec.tty.is_some(), exec.expendable);
        let group = group.as_ref().map(Group::place).transpose()?;
        Ok((ends, Plan { program: found, streams, group, ids, cwd, open_files, tty, expendable }))
    });
    // The plan goes with its streams: they are the child's ends of pipes, whose output would never end with them.
    let spawned = made.and_then(|(ends, plan)| Ok((agent.children.spawn(&plan)?, ends)));
    let (pid, Ends { input, output, errors, tty }) = match spawned {
        Ok(spawned) => spawned,
        Err(e) => {
            if let Some(group) = group {
                group.remove();
            }
            return Err(Answer::Refused(Refusal {
                errno: e.raw_os_error(),
                ..Refusal::new(RefusalKind::CannotExec, format!("{program}: {e}"))
            }));
        }
    };
    let pumps = Arc::new(AtomicU32::new(if errors.is_some() { 2 } else { 1 }));
    let running = Running { pid, group, started: Instant::now(), pumps, tty };
    let moved = pump(agent, call, output, Channel::Output, &running.pumps)
        .and_then(|()| match errors {
            Some(errors) => pump(agent, call, errors, Channel::Errors, &running.pumps),
            None => {
                call.end(Channel::Errors);
                Ok(())
            }
        })
        .and_then(|()| input.map_or(Ok(()), |end| feed(agent, call, end, if exec.tty.is_some() { END_OF_FILE } else { &[] })));
    match moved {
        Ok(()) => Ok(running),
        Err(e) => {
            kill_tree(&running);
            if let Some(group) = &running.group {
                group.remove();
            }
            Err(refused("starting a thread", &e))
        }
    }
}

fn ids(user: Option<&User>) -> Result<Option<Ids>, Answer> {
    match user {
        None => Ok(None),
        Some(User::Ids { uid, gid, groups }) => Ok(Some(Ids { uid: *uid, gid: *gid, groups: groups.clone() })),
        Some(User::Named(name)) => match users::find(name) {
            Some(ids) => Ok(Some(ids)),
            None => Err(Answer::Refused(Refusal::new(RefusalKind::NotFound, format!("there is no user {name}")))),
        },
    }
}

/// Makes the command's streams, which are its user's, so that it can open them by name (/dev/stdout): the agent's ends, and the command's.
fn streams(exec: &Exec, ids: Option<&Ids>) -> io::Result<(Ends, [OwnedFd; 3])> {
    let owner = ids.map(|ids| (ids.uid, ids.gid));
    if let Some(size) = exec.tty {
        let (ours, theirs) = tty::open(size, owner)?;
        let streams = [theirs.try_clone()?, theirs.try_clone()?, theirs];
        let input = if exec.input { Some(ours.try_clone()?) } else { None };
        return Ok((Ends { input, output: ours.try_clone()?, errors: None, tty: Some(ours) }, streams));
    }
    let (input, their_input) = if exec.input {
        let (theirs, mine) = io::pipe()?;
        below::own(&theirs, owner)?;
        (Some(OwnedFd::from(mine)), theirs.into())
    } else {
        (None, File::open("/dev/null")?.into())
    };
    let ((output, their_output), (errors, their_errors)) = (io::pipe()?, io::pipe()?);
    below::own(&their_output, owner)?;
    below::own(&their_errors, owner)?;
    let ends = Ends { input, output: output.into(), errors: Some(errors.into()), tty: None };
    Ok((ends, [their_input, their_output.into(), their_errors.into()]))
}

/// Moves what a process writes to the host. When nobody takes it any more it is dropped, so that what may live on is not held up.
fn pump(agent: &Agent, call: &Call, from: OwnedFd, channel: Channel, open: &Arc<AtomicU32>) -> io::Result<()> {
    let (call, open) = (call.clone(), open.clone());
    agent.threads.run(move || {
        let mut from = File::from(from);
        let mut bytes = vec![0; CHUNK_BYTES];
        while let Ok(len) = from.read(&mut bytes) {
            if len == 0 {
                break;
            }
            let _ = call.write(channel, bytes.get(..len).unwrap_or_default());
        }
        call.end(channel);
        open.fetch_sub(1, Ordering::Release);
        // With the lock of those who wait, so that none misses it between its look and its wait.
        drop(call.session.lock());
        call.session.notify();
    })
}

/// Moves what the host writes to a process, and at its end `last`. Its end is the command's: a command that reads nothing more ends it.
fn feed(agent: &Agent, call: &Call, to: OwnedFd, last: &'static [u8]) -> io::Result<()> {
    let call = call.clone();
    agent.threads.run(move || {
        let mut to = File::from(to);
        let mut bytes = vec![0; CHUNK_BYTES];
        let mut open = true;
        while let Ok(len) = call.read(&mut bytes) {
            if len == 0 {
                // Nobody may be there to read it.
                let _ = to.write_all(last);
                break;
            }
            // What is not taken is dropped, so that the host can send all of it.
            open = open && to.write_all(bytes.get(..len).unwrap_or_default()).is_ok();
        }
    })
}

/// Waits for the command, its time limit, the host's orders, and the session's end.
fn watch(agent: &Agent, call: &Call, exec: &Exec, running: &Running) -> (Stop, bool) {
    let after = |ms: u64| Instant::now().checked_add(Duration::from_millis(ms));
    let mut deadline = exec.timeout_ms.and_then(after);
    let mut timed_out = false;
    loop {
        let next = agent.session.wait(deadline, |state| {
            if let Some(status) = agent.children.status(running.pid) {
                return Some(Ok(Stop::Ended(status)));
            }
            if call.is_over(state) {
                return Some(Ok(if state.keep { Stop::Leave } else { Stop::Kill }));
            }
            call.order(state).map(Err)
        });
        match next {
            Some(Ok(stop)) => return (stop, timed_out),
            Some(Err(Order::Signal(libc::SIGTERM))) => say_that_time_is_over(running),
            Some(Err(Order::Signal(signal))) => signal_group(running.pid, signal),
            Some(Err(Order::Kill)) => return (Stop::Kill, timed_out),
            Some(Err(Order::Resize(size))) => {
                if let Some(tty) = &running.tty {
                    // One that is not obeyed is seen by whoever looks at it, and harms nobody.
                    let _ = tty::resize(tty, size);
                }
            }
            None if deadline.is_none() => {}
            None if timed_out => return (Stop::Kill, true),
            None => {
                timed_out = true;
                say_that_time_is_over(running);
                deadline = after(exec.grace_ms);
            }
        }
    }
}

/// TERM to everything of the command's, also what left its process group.
fn say_that_time_is_over(running: &Running) {
    signal_group(running.pid, libc::SIGTERM);
    let group = i32::try_from(running.pid).unwrap_or(0);
    for pid in running.group.iter().flat_map(Group::processes) {
        // SAFETY: plain system calls, on processes that were in the group a moment ago; those of its process group have it already.
        unsafe {
            if libc::getpgid(pid) != group {
                libc::kill(pid, libc::SIGTERM);
            }
        }
    }
}

fn signal_group(pid: u32, signal: i32) {
    if let Ok(pid) = i32::try_from(pid).map(|pid| -pid) {
        // SAFETY: a plain system call. The number is the group's own while the group has a process, and numbers are given out in turn.
        unsafe { libc::kill(pid, signal) };
    }
}

/// Ends everything the command started. How many could not be ended.
fn kill_tree(running: &Running) -> u32 {
    match &running.group {
        Some(group) => group.kill(),
        // Only in tests: what left the process group is not found.
        None => {
            signal_group(running.pid, libc::SIGKILL);
            0
        }
    }
}

/// Ends what commands of all sessions left. How many could not be ended.
pub fn kill_left(agent: &Agent) -> u32 {
    let Some(cgroups) = &agent.cgroups else { return 0 };
    cgroups
        .all()
        .into_iter()
        .map(|group| {
            let left = group.kill();
            group.remove();
            left
        })
        .sum()
}

/// Processes that commands left or are.
pub fn count_left(agent: &Agent) -> u32 {
    agent.cgroups.iter().flat_map(|cgroups| cgroups.all()).map(|group| group.members()).sum()
}

/// Has the disk that holds this directory no room left? A directory that is gone had room.
fn is_full(dir: &str) -> bool {
    rustix::fs::statvfs(dir).is_ok_and(|disk| {
        let files_full = disk.f_files > 0 && disk.f_favail == 0;
        disk.f_blocks > 0 && (disk.f_bavail.saturating_mul(disk.f_frsize) < ROOM_BYTES_MIN || files_full)
    })
}

fn ended(status: Status, group: Option<&Group>, started: Instant, timed_out: bool, survivors: u32) -> Ended {
    let wall_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    let usage = match group {
        Some(group) => {
            let (user_us, system_us, memory_peak_bytes) = group.usage();
            Usage { wall_ms, user_us, system_us, memory_peak_bytes }
        }
        None => Usage { wall_ms, user_us: status.user_us, system_us: status.system_us, memory_peak_bytes: Some(status.memory_peak_bytes) },
    };
    Ended { exit: status.exit, timed_out, oom_kills: group.map_or(0, Group::oom_kills), usage, survivors, disk_full: false, strays: 0 }
}
