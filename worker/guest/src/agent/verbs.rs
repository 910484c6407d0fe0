//! What is done for each request.
//!
//! Owns which verb goes where, which of them are allowed before a reseed, and the end of a session before a snapshot.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use minicbor::bytes::ByteArray;
use rustix::fs::{Mode, OFlags};
use volley_jobspecs::wire::decode;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Answer, Files, Get, GetNamed, Hello, PROTOCOL, Put, Refusal, RefusalKind, Request};

use super::session::{Call, Input, Output, refused};
use super::{Agent, disks, exec, identity, stats};
use crate::files::{PackError, Unpack, UnpackError, pack, pack_named, unpack};

/// How long other calls may take to end before a snapshot. Longer than killing takes.
const PREPARE_WAIT: Duration = Duration::from_secs(40);
/// How long the answer to a shutdown may take to be sent.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(2);
/// All bits of a mode: in a machine of its own a task may have what it wants.
const MODE_MASK: u32 = 0o7777;

/// Starts whatever the host has asked for.
pub fn start(agent: &Arc<Agent>) {
    while let Some((call, request)) = agent.session.accept() {
        let (own, its) = (agent.clone(), call.clone());
        if let Err(e) = agent.threads.run(move || carry_out(&own, &its, &request)) {
            call.finish(&refused("starting a thread", &e));
        }
    }
}

fn carry_out(agent: &Agent, call: &Call, request: &[u8]) {
    let request: Request = match decode("request", request) {
        Ok(request) => request,
        Err(e) => return call.finish(&Answer::Refused(Refusal::new(RefusalKind::BadRequest, e.to_string()))),
    };
    let (reseed_due, preparing) = {
        let state = agent.session.lock();
        (state.reseed_due, state.preparing)
    };
    if preparing {
        return call.finish(&Answer::Refused(Refusal::new(RefusalKind::BadRequest, "a snapshot is being prepared")));
    }
    if reseed_due && !before_reseed(&request) {
        return call.finish(&Answer::Refused(Refusal::new(RefusalKind::NotReseeded, "this machine may be a clone; reseed it first")));
    }
    if !agent.machine && changes_machine(&request) {
        return call.finish(&Answer::Refused(Refusal::new(RefusalKind::BadRequest, "this agent is not alone in a machine of its own")));
    }
    match request {
        Request::Exec(exec) => exec::run(agent, call, &exec),
        Request::PrepareSnapshot { keep_processes } => prepare_snapshot(agent, call, keep_processes),
        Request::Shutdown => shut_down(agent, call),
        Request::Put(put) => call.finish(&take_files(call, &put)),
        Request::Get(get) => {
            let answer = give_files(call, &get);
            call.end(Channel::Output);
            call.finish(&answer);
        }
        Request::GetNamed(get) => {
            let answer = give_named(call, &get);
            call.end(Channel::Output);
            call.finish(&answer);
        }
        Request::Furnish(furnish) => call.finish(&disks::furnish(&furnish)),
        Request::Hello => call.finish(&Answer::Hello(hello(agent, reseed_due))),
        Request::Mount(mount) => call.finish(&disks::mount(&mount)),
        Request::Unmount { target } => call.finish(&disks::unmount(&target)),
        Request::Freeze { target } => call.finish(&disks::freeze(&target, true)),
        Request::Thaw { target } => call.finish(&disks::freeze(&target, false)),
        Request::Settle { disk } => call.finish(&disks::settle(&disk)),
        Request::Hold { hold } => call.finish(&hold_commands(agent, hold)),
        Request::Stats => call.finish(&Answer::Stats(stats::read())),
        Request::SetIdentity(identity) => call.finish(&identity::set(&identity)),
        Request::Sync => {
            rustix::fs::sync();
            call.finish(&Answer::Done);
        }
        Request::SetClock { unix_ns } => call.finish(&match identity::set_clock(unix_ns) {
            Ok(before_unix_ns) => Answer::Clock { before_unix_ns },
            Err(e) => refused("setting the clock", &e),
        }),
        Request::Reseed { seed } => call.finish(&match identity::reseed(&seed) {
            Ok(proof) => {
                agent.session.lock().reseed_due = false;
                Answer::Reseeded { proof: ByteArray::from(proof) }
            }
            Err(e) => refused("reseeding the kernel's generator", &e),
        }),
    }
}

/// What neither runs anything nor reads randomness.
fn before_reseed(request: &Request) -> bool {
    matches!(request, Request::Hello | Request::Reseed { .. } | Request::SetClock { .. } | Request::Stats | Request::Shutdown)
}

/// What only the first process of a machine may do: elsewhere it would be done to the host.
fn changes_machine(request: &Request) -> bool {
    match request {
        Request::Mount(_)
        | Request::Furnish(_)
        | Request::Unmount { .. }
        | Request::SetClock { .. }
        | Request::SetIdentity(_)
        | Request::Freeze { .. }
        | Request::Settle { .. }
        | Request::Thaw { .. } => true,
        Request::Hello
        | Request::Exec(_)
        | Request::Put(_)
        | Request::Get(_)
        | Request::GetNamed(_)
        | Request::Reseed { .. }
        | Request::Sync
        | Request::Stats
        | Request::Hold { .. }
        | Request::PrepareSnapshot { .. }
        | Request::Shutdown => false,
    }
}

fn hold_commands(agent: &Agent, hold: bool) -> Answer {
    let Some(cgroups) = &agent.cgroups else {
        return Answer::Refused(Refusal::new(RefusalKind::BadRequest, "this machine has no cgroups to hold commands in"));
    };
    match cgroups.hold(hold) {
        Ok(()) => Answer::Done,
        Err(e) => refused("holding commands", &e),
    }
}

fn hello(agent: &Agent, reseed_due: bool) -> Hello {
    let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned());
    Hello {
        protocol: PROTOCOL,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: if reseed_due { None } else { read(identity::BOOT_ID).ok() },
        kernel: agent.kernel.clone(),
        reseed_due,
        limits: agent.cgroups.is_some(),
    }
}

fn take_files(call: &Call, put: &Put) -> Answer {
    let opened = open_target(Path::new(&put.dir), put.owner);
    let dir = match opened {
        Ok(dir) => dir,
        Err(e) => return refused(format_args!("opening {}", put.dir), &e),
    };
    let how = Unpack { owner: put.owner, mode_mask: MODE_MASK, limits: put.limits };
    match unpack(Input(call), &dir, how) {
        Ok(files) => Answer::Files(files),
        Err(e) => {
            let (kind, errno) = match &e {
                UnpackError::TooMuch(_) => (RefusalKind::TooMuch, None),
                UnpackError::Stream(_) => (RefusalKind::BadStream, None),
                UnpackError::File { source, .. } => (disks::kind_of(source), source.raw_os_error()),
            };
            Answer::Refused(Refusal { errno, ..Refusal::new(kind, e.to_string()) })
        }
    }
}

fn open_target(path: &Path, owner: Option<(u32, u32)>) -> std::io::Result<OwnedFd> {
    if !path.is_dir() {
        std::fs::create_dir_all(path)?;
        if let Some((uid, gid)) = owner {
            std::os::unix::fs::chown(path, Some(uid), Some(gid))?;
        }
    }
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

fn give_files(call: &Call, get: &Get) -> Answer {
    // Small writes are gathered: each one would be a frame.
    let mut out = std::io::BufWriter::with_capacity(32 * 1024, Output(call));
    given(pack(Path::new(&get.path), &mut out, get.limits))
}

fn give_named(call: &Call, get: &GetNamed) -> Answer {
    let mut out = std::io::BufWriter::with_capacity(32 * 1024, Output(call));
    given(pack_named(Path::new(&get.dir), &get.names, &mut out, get.limits))
}

fn given(packed: Result<Files, PackError>) -> Answer {
    match packed {
        Ok(files) => Answer::Files(files),
        Err(e) => {
            let (kind, errno) = match &e {
                PackError::TooMuch(_) => (RefusalKind::TooMuch, None),
                PackError::Stream(_) => (RefusalKind::BadStream, None),
                PackError::File { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                    (RefusalKind::NotFound, source.raw_os_error())
                }
                PackError::File { source, .. } => (disks::kind_of(source), source.raw_os_error()),
            };
            Answer::Refused(Refusal { errno, ..Refusal::new(kind, e.to_string()) })
        }
    }
}

/// Ends all other calls, and processes if they may not stay; writes out; answers; and then the session is over.
fn prepare_snapshot(agent: &Agent, call: &Call, keep_processes: bool) {
    {
        let mut state = agent.session.lock();
        state.preparing = true;
        state.keep = keep_processes;
        if let Some(mux) = call.mux(&mut state) {
            mux.abandon_others(call.number);
        }
    }
    agent.session.notify();
    let alone = agent.session.wait(Some(Instant::now() + PREPARE_WAIT), |state| {
        call.mux(state).map_or(Some(false), |mux| (mux.open_calls() <= 1).then_some(true))
    });
    if alone != Some(true) {
        give_up_preparing(agent);
        return call.finish(&Answer::Refused(Refusal::new(RefusalKind::System, "other calls do not end")));
    }
    let left = if keep_processes { 0 } else { exec::kill_left(agent) };
    if left > 0 {
        give_up_preparing(agent);
        return call.finish(&Answer::Refused(Refusal::new(RefusalKind::System, format!("{left} processes can't be killed"))));
    }
    if let Some(cgroups) = &agent.cgroups {
        cgroups.make_spare();
    }
    rustix::fs::sync();
    call.finish_session(&Answer::Prepared { kept: exec::count_left(agent) });
}

fn give_up_preparing(agent: &Agent) {
    let mut state = agent.session.lock();
    (state.preparing, state.keep) = (false, false);
}

fn shut_down(agent: &Agent, call: &Call) {
    exec::kill_left(agent);
    rustix::fs::sync();
    call.finish(&Answer::Done);
    // Until the answer has been taken over by the channel; it needs a moment more to be on its way.
    agent.session.wait(Some(Instant::now() + SHUTDOWN_WAIT), |state| call.is_over(state).then_some(()));
    std::thread::sleep(Duration::from_millis(50));
    if agent.machine {
        if let Err(e) = disks::switch_off() {
            eprintln!("volley-guest: can't switch off: {e}");
        }
    } else {
        std::process::exit(0);
    }
}
