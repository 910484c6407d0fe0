//! The task of one slot: takes an attempt through its stages, one after another, for as long as the worker lives.
//!
//! Owns the order prepare, restore, execute, persist, reclaim, and what each stage's failure makes of the attempt. Does not own
//! deadlines or which attempt runs when (`core`).

mod keeping;
mod volumes;

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::sync::{mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior};
use tracing::Instrument;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::AttemptName;
use volley_jobspecs::spec::Isolation;
use volley_jobspecs::units::counted;
use volley_jobspecs::wire::report::Usage;
use volley_jobspecs::wire::volume::Given;
use volley_jobspecs::wire::work::TemplateStage;

use crate::attempt::{Outcome, Progress};
use crate::core::Input;
use crate::dirs::{self, Dirs, Full};
use crate::execute::{ExecuteError, Executed, LOOK_EVERY, execute};
use crate::inputs::Inputs;
use crate::job::{Job, Pages};
use crate::live::{AllWatched, LiveOutput};
use crate::mounts::Mounts;
use crate::persist::{self, Kept, PersistError, persist};
use crate::ports::{Bus, Objects};
use crate::prepare::{Prepared, prepare};
use crate::reclaim::reclaim;
use crate::restore::{RestoreError, restore};
use crate::runtime::Exit;
use crate::runtime::tiers::Tiers;
use crate::stop::StopSignal;
use crate::trace::{Stage, Stages};
use crate::volumes::Volumes;

/// An attempt to run.
#[derive(Debug)]
pub struct SlotOrder {
    /// Its name.
    pub name: AttemptName,
    /// Its job.
    pub job: Arc<Job>,
    /// The volumes that it may write.
    pub given: Vec<Given>,
}

/// What all slots share.
#[derive(Debug, Clone)]
pub struct Shared<B, O> {
    /// The bus, for live output.
    pub bus: B,
    /// Objects.
    pub objects: O,
    /// Inputs.
    pub inputs: Inputs<O>,
    /// Item pages.
    pub pages: Pages<O>,
    /// Who watches what.
    pub watched: watch::Receiver<AllWatched>,
    /// Where progress and ends go.
    pub events: mpsc::Sender<Input>,
    /// Where slots have their directories.
    pub dir: PathBuf,
    /// Whom tasks run as, if not as the worker.
    pub owner: Option<(u32, u32)>,
    /// Does each slot have its own, counted from that one?
    pub owner_per_slot: bool,
    /// Bytes kept of each stream.
    pub stream_bytes_max: usize,
    /// Volumes, or why there are none.
    pub volumes: Result<Arc<Volumes>, Arc<str>>,
}

/// A slot.
#[derive(Debug)]
pub struct Executor<B, O> {
    slot: u32,
    shared: Shared<B, O>,
    machine: Tiers,
    mounts: Mounts,
    stop: StopSignal,
    dirs: Dirs,
    generation: u32,
    laps: Laps,
    looks: Interval,
}

/// Times stages: one reading of the clock each.
#[derive(Debug)]
struct Laps {
    last: Instant,
    stages: Stages,
}

impl Laps {
    fn begin() -> Self {
        Self { last: Instant::now(), stages: Stages::default() }
    }

    /// What passed since the last stage was this one's.
    fn end(&mut self, stage: Stage) {
        let now = Instant::now();
        let us = now.duration_since(self.last).as_micros();
        self.stages.add(stage, u64::try_from(us).unwrap_or(u64::MAX));
        self.last = now;
    }
}

impl<B: Bus, O: Objects> Executor<B, O> {
    /// A slot in which nothing ran yet.
    #[must_use]
    pub fn new(slot: u32, shared: Shared<B, O>, machine: Tiers, stop: StopSignal) -> Self {
        let dirs = dirs_of(&shared, slot, shared.dir.join(slot.to_string()));
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mounts = Mounts::new(shared.volumes.clone());
        Self { slot, shared, machine, mounts, stop, dirs, generation: 0, laps: Laps::begin(), looks }
    }

    /// Runs attempts until the driver is gone.
    pub async fn serve(mut self, mut orders: mpsc::Receiver<SlotOrder>) {
        while let Some(SlotOrder { name, job, given }) = orders.recv().await {
            // At the level of errors, so that its fields stand on every line, whatever the filter lets through.
            let span = tracing::error_span!(
                "attempt",
                job = %name.job,
                task = name.index,
                attempt = name.number,
                trace = job.trace.map(|trace| trace.trace_id())
            );
            let run = AssertUnwindSafe(self.run(&name, &job, &given).instrument(span.clone())).catch_unwind();
            let mut outcome = match run.await {
                Ok(outcome) => outcome,
                Err(_panic) => self.after_panic(),
            };
            outcome.stages = self.laps.stages;
            let class = outcome.failure.map(FailureClass::as_str);
            span.in_scope(|| tracing::debug!(class, code = outcome.code, "ended"));
            let ended = Input::Ended { slot: self.slot, name, outcome };
            if self.shared.events.send(ended).await.is_err() {
                return;
            }
        }
    }

    /// A mistake of ours must cost one attempt, not hold its slot for ever. Nothing of the slot is used again.
    fn after_panic(&mut self) -> Outcome {
        self.machine.distrust();
        self.mounts = Mounts::new(self.shared.volumes.clone());
        self.leave_dirs();
        Outcome::failed(FailureClass::GuestLost, "the worker panicked over this task; its log says where".to_owned())
    }

    async fn run(&mut self, name: &AttemptName, job: &Job, given: &[Given]) -> Outcome {
        self.stop.begin(*name);
        self.laps = Laps::begin();
        let outcome = self.stages(name, job, given).await;
        if self.machine.is_apart() {
            self.machine.release().await;
            self.laps.end(Stage::Reclaim);
        }
        if !self.mounts.is_empty() {
            // Of an attempt that ended before its end.
            self.mounts.forget().await;
            self.laps.end(Stage::Reclaim);
        }
        if !self.dirs.are_clean() {
            let dirs = self.dirs.clone();
            let span = tracing::debug_span!("reclaim");
            match tokio::task::spawn_blocking(move || span.in_scope(|| reclaim(dirs))).await {
                Ok(Ok(empty)) => self.dirs = empty,
                Ok(Err(why)) => {
                    tracing::warn!(%why);
                    self.leave_dirs();
                }
                // It panicked, or the runtime ends: the next attempt looks for itself.
                Err(_) => {}
            }
            self.laps.end(Stage::Reclaim);
        }
        outcome
    }

    async fn stages(&mut self, name: &AttemptName, job: &Job, given: &[Given]) -> Outcome {
        let stopped = || Outcome::failed(FailureClass::Cancelled, "its command had not begun".to_owned());
        let (bus, inputs, pages, dirs) = (&self.shared.bus, &self.shared.inputs, &self.shared.pages, &mut self.dirs);
        let prepared = tokio::select! {
            biased;
            _ = self.stop.next() => None,
            prepared = prepare(bus, (job, given), name, dirs, inputs, pages).instrument(tracing::debug_span!("prepare")) => Some(prepared),
        };
        self.laps.end(Stage::Prepare);
        let prepared = match prepared {
            Some(Ok(prepared)) => prepared,
            Some(Err(why)) => return Outcome::failed(why.class(), why.to_string()),
            None => {
                // A copy may still be under way; it ends in directories that nobody uses any more.
                self.leave_dirs();
                return stopped();
            }
        };
        let restored = self.restored(name, &prepared).await;
        self.laps.end(Stage::Restore);
        match restored {
            Some(Ok(())) => {}
            Some(Err(why)) => {
                self.machine.distrust();
                return Outcome { blameless: why.is_blameless(), cause: why.cause(), ..Outcome::failed(why.class(), why.to_string()) };
            }
            None => {
                self.machine.distrust();
                return stopped();
            }
        }
        self.say(name, Progress::Started { grace_ms: prepared.grace_ms }).await;
        let mut live = LiveOutput::new(self.shared.bus.clone(), self.shared.watched.clone(), *name);
        let bytes_max = self.shared.stream_bytes_max;
        let executed = execute(&mut self.machine, (&prepared, &self.mounts), &mut self.stop, &mut live, bytes_max, &mut self.looks)
            .instrument(tracing::debug_span!("execute"))
            .await;
        self.laps.end(Stage::Execute);
        if matches!(
            executed.exit,
            Err(ExecuteError::Lost
                | ExecuteError::Guest(_)
                | ExecuteError::GuestEnded(_)
                | ExecuteError::Stuck
                | ExecuteError::Spawner(_)
                | ExecuteError::Container(_))
        ) {
            self.machine.distrust();
            // What can't be killed may still write here.
            if matches!(executed.exit, Err(ExecuteError::Stuck)) {
                self.leave_dirs();
            }
        }
        self.finish(name, &prepared, executed).await
    }

    /// From a command's end to that of its attempt: what it left is kept, its machine goes or is kept too.
    async fn finish(&mut self, name: &AttemptName, prepared: &Prepared, mut executed: Executed) -> Outcome {
        // Asked before anything is cleared away.
        let room = if executed.exit.as_ref().is_ok_and(|exit| exit.code == Some(0)) { Ok(()) } else { self.dirs.room() };
        // Nobody may hold a file of a volume open.
        if self.mounts.is_empty() && keeping::may_be_kept(prepared, &executed.exit, self.stop.timed_out()) {
            self.machine.hold().await;
        } else {
            self.machine.end_shells();
        }
        let collected = if self.machine.is_apart() { self.collect(name, prepared, &executed).await } else { Collected::Here(None) };
        let intact = match &collected {
            Collected::Here(_) => true,
            Collected::Lost(why) => matches!(why, PersistError::Machine { class: FailureClass::PolicyDenied, .. }),
            Collected::Stopped => false,
        };
        // Its message says so already.
        let disk_failed = matches!(collected, Collected::Lost(PersistError::Disk { .. }));
        let (settled, lost) = self.settle(prepared, &mut executed, &collected).await;
        let outcome = self.keep(name, prepared, executed, collected).instrument(tracing::debug_span!("persist")).await;
        self.laps.end(Stage::Persist);
        let outcome = labelled(outcome, self.machine.label());
        let outcome = match room {
            Err(full) => excused(outcome, Some(&full)),
            Ok(()) if disk_failed => excused(outcome, None),
            Ok(()) => outcome,
        };
        let outcome = match settled {
            Some(settled) => {
                let outcome = self.end_volumes(name, prepared, (settled, lost), outcome).await;
                self.laps.end(Stage::Persist);
                outcome
            }
            None => outcome,
        };
        match prepared.task.keep_failed_ms {
            Some(ms) if intact && keeping::is_kept(outcome.failure, self.stop.timed_out()) => {
                keeping::keep(&mut self.machine, prepared, name, Duration::from_millis(ms), outcome).await
            }
            _ => outcome,
        }
    }

    /// Makes the machine ready, and tells meanwhile what its template needs, and that its volumes are being opened. None: the attempt is to end.
    async fn restored(&mut self, name: &AttemptName, prepared: &Prepared) -> Option<Result<(), RestoreError>> {
        let mut stages = self.machine.stages(prepared);
        let mut opening = (!prepared.volumes.is_empty()).then(|| self.mounts.opening());
        let restoring = restore(&mut self.machine, prepared, &mut self.mounts).instrument(tracing::debug_span!("restore"));
        let mut restoring = std::pin::pin!(restoring);
        loop {
            tokio::select! {
                biased;
                _ = self.stop.next() => return None,
                restored = &mut restoring => return Some(restored),
                progress = next_progress(&mut stages, &mut opening) => {
                    // A driver that is gone is noticed at the end.
                    let _ = self.shared.events.send(Input::Progress { slot: self.slot, name: *name, progress }).await;
                }
            }
        }
    }

    /// Brings outputs out of a machine.
    async fn collect(&mut self, name: &AttemptName, prepared: &Prepared, executed: &Executed) -> Collected {
        if executed.exit.is_err() {
            return Collected::Here(None);
        }
        self.say(name, Progress::Exited).await;
        tokio::select! {
            biased;
            _ = self.stop.next() => {
                self.machine.distrust();
                // Files may still come.
                self.leave_dirs();
                Collected::Stopped
            }
            collected = Box::pin(self.machine.collect(prepared, &self.dirs)).instrument(tracing::debug_span!("collect")) => match collected {
                Ok(left_out) => Collected::Here(left_out),
                Err(why) => Collected::Lost(why),
            },
        }
    }

    async fn keep(&mut self, name: &AttemptName, prepared: &Prepared, executed: Executed, collected: Collected) -> Outcome {
        let Executed { exit, stdout, stderr, .. } = executed;
        let inline = Kept { stdout: stdout.stream(false), stderr: stderr.stream(false), ..Kept::default() };
        let note = match collected {
            Collected::Here(note) => note,
            Collected::Lost(why) => return outcome(exit, prepared, inline, Some(&why)),
            Collected::Stopped => return Outcome { failure: Some(FailureClass::Cancelled), ..outcome(exit, prepared, inline, None) },
        };
        // Reading directories blocks, for long when they are large; most tasks leave nothing in them at all.
        let found = if self.dirs.settle() {
            Ok(persist::find_streams(&stdout, &stderr))
        } else {
            let (dirs, declared) = (self.dirs.clone(), prepared.task.outputs.clone());
            let failed = |e| PersistError::Read { path: self.dirs.out(), source: std::io::Error::other(e) };
            let find = move || {
                let left = persist::find(&dirs, &declared, &stdout, &stderr)?;
                if left.wants_storage() {
                    dirs.shed(left.lies_in(&dirs.work()));
                }
                Ok(left)
            };
            tokio::task::spawn_blocking(find).await.unwrap_or_else(|e| Err(failed(e)))
        };
        let left = match found {
            Ok(left) => left.with_note(note),
            Err(why) => return outcome(exit, prepared, inline, Some(&why)),
        };
        if !left.wants_storage() {
            return outcome(exit, prepared, left.inline_only(), None);
        }
        self.say(name, Progress::Exited).await;
        let inline = left.inline();
        let kept = tokio::select! {
            biased;
            _ = self.stop.next() => return Outcome {
                failure: Some(FailureClass::Cancelled),
                ..outcome(exit, prepared, inline.inline_only(), None)
            },
            // Boxed, as it is large, and most tasks leave nothing for it.
            kept = Box::pin(persist(&self.shared.objects, name, left)) => kept,
        };
        match kept {
            Ok(kept) => outcome(exit, prepared, kept, None),
            Err(why) => outcome(exit, prepared, inline.inline_only(), Some(&why)),
        }
    }

    /// Goes on in other directories; the old ones are removed when that is possible.
    fn leave_dirs(&mut self) {
        self.generation += 1;
        let root = self.shared.dir.join(format!("{}-{}", self.slot, self.generation));
        let old = self.shared.dir.join(match self.generation {
            1 => self.slot.to_string(),
            n => format!("{}-{}", self.slot, n - 1),
        });
        self.dirs = dirs_of(&self.shared, self.slot, root);
        tokio::task::spawn_blocking(move || {
            // What can't be removed now is removed at the next start.
            let _ = dirs::remove_all(&old);
        });
    }

    async fn say(&self, name: &AttemptName, progress: Progress) {
        // A driver that is gone is noticed at the end.
        let _ = self.shared.events.send(Input::Progress { slot: self.slot, name: *name, progress }).await;
    }
}

/// Directories of a slot in `root`.
fn dirs_of<B, O>(shared: &Shared<B, O>, slot: u32, root: PathBuf) -> Dirs {
    if !shared.owner_per_slot {
        return Dirs::new(root, shared.owner);
    }
    // That it doesn't overflow was checked with the configuration.
    Dirs::closed(root, shared.owner.map(|(uid, gid)| (uid.saturating_add(slot), gid.saturating_add(slot))))
}

/// The next thing that a machine's template needs, or whether volumes are being opened now. Never, where there is neither.
async fn next_progress(
    stages: &mut Option<watch::Receiver<Option<TemplateStage>>>,
    opening: &mut Option<watch::Receiver<bool>>,
) -> Progress {
    tokio::select! {
        stage = next(stages) => Progress::Template(stage),
        opening = next(opening) => Progress::Volumes(opening),
    }
}

/// The next value of what is watched. Never, where nothing is.
async fn next<T: Copy>(watched: &mut Option<watch::Receiver<T>>) -> T {
    if let Some(watched) = watched
        && watched.changed().await.is_ok()
    {
        return *watched.borrow_and_update();
    }
    std::future::pending().await
}

/// What became of outputs that lay in a machine.
enum Collected {
    /// They are in the slot's directories, or there are none to be had; and what was left out.
    Here(Option<String>),
    /// They are lost.
    Lost(PersistError),
    /// The attempt is to end.
    Stopped,
}

/// With what results must say of how they came about.
fn labelled(mut outcome: Outcome, label: Option<String>) -> Outcome {
    if let Some(label) = label {
        outcome.message = Some(match outcome.message {
            Some(message) => format!("{message}; {label}"),
            None => label,
        });
    }
    outcome
}

/// What became of an attempt.
fn outcome(exit: Result<Exit, ExecuteError>, prepared: &Prepared, kept: Kept, lost: Option<&PersistError>) -> Outcome {
    let blameless = exit.as_ref().is_err_and(ExecuteError::is_blameless);
    let mut notes = kept.notes;
    let (failure, code, message, usage) = match exit {
        Ok(exit) => {
            let (failure, code, message) = verdict(&exit, prepared);
            if exit.strays > 0 {
                let them = counted(
                    u64::from(exit.strays),
                    "process was still running at its end and was",
                    "processes were still running at its end and were",
                );
                notes.push(format!("{them} killed"));
            }
            if exit.disk_full && failure.is_some() {
                notes.push("its machine's disk was full; raise task.resources.disk".to_owned());
            }
            let usage = Usage { cpu_us: exit.cpu_us, memory_bytes_max: exit.memory_bytes_max };
            (failure, code, message, Some(usage))
        }
        Err(why) => {
            let (class, code) = why.class();
            (Some(class), code, Some(format!("{}: {why}", program(prepared))), None)
        }
    };
    // A verdict on the task stands, even if what it left is lost; a success without its outputs is none.
    let failure = match (failure, lost) {
        (None, Some(PersistError::TooMany)) => Some(FailureClass::PolicyDenied),
        (None, Some(PersistError::Storage { .. } | PersistError::Read { .. } | PersistError::Disk { .. })) => {
            Some(FailureClass::StorageFailed)
        }
        (None, Some(PersistError::Machine { class, .. })) => Some(*class),
        (failure, _) => failure,
    };
    let parts: Vec<String> = message.into_iter().chain(lost.map(ToString::to_string)).chain(notes).collect();
    Outcome {
        failure,
        code,
        message: (!parts.is_empty()).then(|| parts.join("; ")),
        usage,
        result: kept.result,
        stdout: kept.stdout,
        stderr: kept.stderr,
        outputs: kept.outputs,
        blameless,
        cause: None,
        volumes: Vec::new(),
        kept: Vec::new(),
        stages: Stages::default(),
    }
}

/// A task that failed while the worker's disk was full may have failed for that: a fault of the cluster's is never its verdict.
fn excused(mut outcome: Outcome, full: Option<&Full>) -> Outcome {
    if matches!(outcome.failure, Some(FailureClass::ExitCode | FailureClass::Signal)) {
        outcome.failure = Some(FailureClass::StorageFailed);
        let parts: Vec<String> = outcome.message.into_iter().chain(full.map(ToString::to_string)).collect();
        outcome.message = (!parts.is_empty()).then(|| parts.join("; "));
    }
    outcome
}

fn verdict(exit: &Exit, prepared: &Prepared) -> (Option<FailureClass>, Option<i32>, Option<String>) {
    let code = exit.code.or(exit.signal);
    if exit.oom {
        let limit = match prepared.limits.memory_bytes {
            Some(bytes) => format!("at its memory limit of {} MiB; raise task.resources.memory", bytes >> 20),
            None if prepared.task.isolation == Isolation::Microvm => {
                "for want of memory in its machine; raise task.resources.memory".to_owned()
            }
            None => "for want of memory on the host".to_owned(),
        };
        return (Some(FailureClass::Oom), code, Some(format!("the kernel ended it {limit}")));
    }
    match (exit.code, exit.signal) {
        (Some(0), _) => (None, code, None),
        (Some(number), _) => (Some(FailureClass::ExitCode), code, Some(format!("exit code {number}"))),
        (None, Some(signal)) => (Some(FailureClass::Signal), code, Some(format!("ended by signal {signal} ({})", signal_name(signal)))),
        (None, None) => (Some(FailureClass::GuestLost), None, Some("it ended without a status".to_owned())),
    }
}

fn program(prepared: &Prepared) -> &str {
    prepared.task.command.first().map_or("", String::as_str)
}

fn signal_name(signal: i32) -> String {
    let number = u8::try_from(signal).unwrap_or(0);
    volley_jobspecs::spec::Signal(number).to_string()
}
