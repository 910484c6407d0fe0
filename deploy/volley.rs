//! The one binary, and the composition root: the only place that sees every crate.
//!
//! Owns the way from arguments to a running process and back to an exit code. Does not own anything a process does once it runs.

mod embedded;
mod failed;
mod image;
mod log;
mod room;
mod serve;
mod template;
mod up;
mod volume;

use std::process::ExitCode;

use volley_cli::{Exit, Out, Outcome, ServeCommand};
use volley_jobspecs::wire::plan::Isolation;
use volley_worker::Spawner;
use volley_worker::vmm::spawner::MachineSpawner;

use failed::Failed;
use serve::Spawners;

/// A worker has one thread for this many cores: one handles some 9,000 tasks a second, more than four cores can start.
const CORES_PER_THREAD: usize = 4;

fn main() -> ExitCode {
    if let Some(ended) = volume::of_a_worker() {
        return ended;
    }
    let cli = match volley_cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(exit) => return exit.into(),
    };
    // One thread: verbs are clients, and a worker's spawner must be forked off before there are more.
    let first = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("can't start: {error}")),
    };
    let (command, out) = match first.block_on(volley_cli::execute(cli)) {
        Outcome::Done(exit) => return exit.into(),
        Outcome::Serve { command, out } => (command, out),
    };
    drop(first);
    serve(command, out)
}

/// Forks off what starts tasks and machines, where the command runs any.
fn spawners(command: &ServeCommand) -> Result<Spawners, String> {
    let isolation = match command {
        ServeCommand::Up(args) => &args.isolation,
        ServeCommand::Worker(args) => &args.isolation,
        ServeCommand::Coordinator(_) | ServeCommand::Log(_) | ServeCommand::Image(_) | ServeCommand::Template(_) => {
            return Ok(Spawners::default());
        }
    };
    let processes = Some(Spawner::start().map_err(|e| e.to_string())?);
    let machines = isolation.iter().any(|tier| tier == Isolation::Microvm.as_str());
    let others = isolation.iter().any(|tier| tier != Isolation::Microvm.as_str());
    let machines = match machines.then(MachineSpawner::start).transpose() {
        Ok(machines) => machines,
        // The worker tries it once more, says what is in the way, and offers the rest.
        Err(_) if others => None,
        Err(why) => return Err(why.to_string()),
    };
    Ok(Spawners { processes, machines })
}

fn serve(command: ServeCommand, out: Out) -> ExitCode {
    // Tasks may run as our own user. They must not read our memory and environment, which hold the credentials, nor those of the
    // helpers forked off below, which inherit this.
    if let Err(error) = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable) {
        return fail(&format!("can't close this process to others: {error}"));
    }
    let spawners = match spawners(&command) {
        Ok(spawners) => spawners,
        Err(line) => return fail(&line),
    };
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = threads(&command) {
        builder.worker_threads(threads);
    }
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("can't start: {error}")),
    };
    let done = runtime.block_on(async {
        let telemetry = match volley_cli::telemetry::init(service(&command), logged(&command)) {
            Ok(telemetry) => telemetry,
            Err(error) => return Err(Failed::new(Exit::NotConfigured, error.to_string())),
        };
        let done = match command {
            ServeCommand::Up(args) => up::up(args, spawners, telemetry.observer()).await,
            ServeCommand::Coordinator(args) => serve::coordinator(args, telemetry.observer()).await,
            ServeCommand::Worker(args) => serve::worker(args, spawners, telemetry.observer()).await,
            ServeCommand::Log(args) => log::log(args).await,
            ServeCommand::Image(args) => image::image(args, out).await,
            ServeCommand::Template(args) => template::template(args, out).await,
        };
        telemetry.shutdown();
        done
    });
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failed { exit, line }) => {
            eprint!("{}", volley_cli::failure(out, exit, &line));
            exit.into()
        }
    }
}

/// Threads of the process's own. A worker's cores are its tasks': more threads than it has work for only wake each other, which costs a task
/// of a millisecond a hundredth of its time. What takes long (files, hashes, compression) has threads of its own anyway.
fn threads(command: &ServeCommand) -> Option<usize> {
    let ServeCommand::Worker(_) = command else { return None };
    std::thread::available_parallelism().ok().map(|cores| (cores.get() / CORES_PER_THREAD).max(1))
}

/// Who a process is to whoever gets its spans and metrics.
fn service(command: &ServeCommand) -> &'static str {
    match command {
        ServeCommand::Up(_) => "volley-up",
        ServeCommand::Coordinator(_) => "volley-coordinator",
        ServeCommand::Worker(_) => "volley-worker",
        ServeCommand::Log(_) => "volley-log",
        ServeCommand::Image(_) => "volley-image",
        ServeCommand::Template(_) => "volley-template",
    }
}

/// What is logged unless the environment says otherwise.
fn logged(command: &ServeCommand) -> &'static str {
    match command {
        ServeCommand::Up(_) | ServeCommand::Coordinator(_) | ServeCommand::Worker(_) => volley_cli::telemetry::FILTER_DEFAULT,
        ServeCommand::Log(_) | ServeCommand::Image(_) | ServeCommand::Template(_) => volley_cli::telemetry::FILTER_QUIET,
    }
}

fn fail(message: &str) -> ExitCode {
    eprintln!("error: {message}");
    Exit::Unavailable.into()
}
