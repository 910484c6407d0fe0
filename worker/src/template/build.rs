//! Building a template: boot, greet, warm up, prepare, save, and one restore that answers.
//!
//! Owns the order, and that it ends in time. The machine sees the image and nothing else: no inputs, no secrets, no volumes.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Exec, Exit};

use super::depot::DepotError;
use super::{NoRoom, Recipe};
use crate::guest::{Command, Guest, GuestError};
use crate::prepare;
use crate::vmm::greet::{GreetError, greet};
use crate::vmm::{Boot, Snapshot, Vm, Vmm, VmmError};

/// Lines of a console that are told.
const CONSOLE_LINES: usize = 8;
/// Bytes kept of each stream of a warm-up command.
const SAID_BYTES: usize = 1_024;
/// Lines of each that are told.
const SAID_LINES: usize = 5;
/// Where warm-up commands have their HOME: they run as root.
const ROOT_HOME: &str = "/root";
/// Characters of a warm-up command that are told.
const COMMAND_CHARS: usize = 200;

/// Why there is no template.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The budget is used up.
    #[error("{0}")]
    NoRoom(NoRoom),
    /// It is larger than the whole budget.
    #[error(
        "its machine of {} MiB is larger than all the room that this worker has for templates, {} MiB (--template-memory: a machine's whole \
         memory is set aside while its template is made); ask for less (task.resources.memory), or give the worker more", .wanted >> 20, .bytes_max >> 20
    )]
    TooLarge {
        /// Bytes of the machine.
        wanted: u64,
        /// The budget.
        bytes_max: u64,
        /// May another worker have the room, and this one fetch what it builds?
        shared: bool,
    },
    /// The VMM does not do it.
    #[error("building a template failed at {stage}: {source}{console}")]
    Vmm {
        /// At what.
        stage: &'static str,
        /// What it says.
        source: VmmError,
        /// The end of the guest's console, with words before it; empty when it said nothing.
        console: String,
    },
    /// The agent does not.
    #[error("building a template failed at {stage}: {source}{console}")]
    Guest {
        /// At what.
        stage: &'static str,
        /// What it says.
        source: GuestError,
        /// As above.
        console: String,
    },
    /// A command of the warm-up failed.
    #[error("building a template failed: warmUp[{number}] ({command}) {end}; {said}")]
    WarmUp {
        /// Which, counted from 0, as in the job's spec.
        number: usize,
        /// Program and arguments, or their beginning.
        command: String,
        /// How it ended, or that it did not.
        end: String,
        /// The end of its output and errors, with words before it.
        said: String,
    },
    /// It takes too long.
    #[error("building a template did not end within {} s; it was at {stage}{console}", .after.as_secs())]
    Late {
        /// At what.
        stage: &'static str,
        /// Its time.
        after: Duration,
        /// As above.
        console: String,
    },
    /// A machine's file.
    #[error("building a template: {path}: {source}", path = .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// No randomness.
    #[error("building a template: the system gives no random bytes: {0}")]
    Random(String),
    /// A mistake of ours.
    #[error("building a template ended: {0}; the worker's log says where")]
    Ended(String),
    /// It is shared, and the bucket does not give it.
    #[error("fetching a template failed: {0}")]
    Away(Box<DepotError>),
    /// It could not be built here a while ago.
    #[error("its machine's template could not be built {ago_s} s ago, which stands for {for_s} s more: {reason}")]
    Remembered {
        /// Since when it is known, in seconds.
        ago_s: u64,
        /// How long that stands.
        for_s: u64,
        /// Why, without what the machine said: the first who asked was told that.
        reason: String,
        /// Was it the warm-up?
        warm_up: bool,
    },
    /// Another worker could not build it a moment ago.
    #[error("worker {by} could not build the template, which stands for {for_s} s at most: {reason}")]
    Elsewhere {
        /// Which worker.
        by: String,
        /// What it said.
        reason: String,
        /// How long that stands.
        for_s: u64,
        /// Was it the warm-up?
        warm_up: bool,
    },
}

impl From<NoRoom> for BuildError {
    fn from(why: NoRoom) -> Self {
        match why.wanted > why.bytes_max {
            true => Self::TooLarge { wanted: why.wanted, bytes_max: why.bytes_max, shared: false },
            false => Self::NoRoom(why),
        }
    }
}

impl BuildError {
    /// The same, of a worker that fetches what others build.
    pub(super) fn of_shared(room: NoRoom) -> Self {
        match room.into() {
            Self::TooLarge { wanted, bytes_max, .. } => Self::TooLarge { wanted, bytes_max, shared: true },
            other => other,
        }
    }

    /// Is it the job's own fault? Another try would meet the same warm-up.
    #[must_use]
    pub fn is_warm_up(&self) -> bool {
        matches!(self, Self::WarmUp { .. } | Self::Elsewhere { warm_up: true, .. } | Self::Remembered { warm_up: true, .. })
    }

    /// Is it only what is known of an earlier build?
    #[must_use]
    pub fn is_known(&self) -> bool {
        matches!(self, Self::Elsewhere { .. } | Self::Remembered { .. })
    }

    /// Does it say nothing of this worker? What an image and a warm-up do to their machine may show at any step, also as the end of its VMM.
    #[must_use]
    pub fn is_blameless(&self) -> bool {
        match self {
            // What is known was counted when it was built, where it was built.
            Self::Elsewhere { .. } | Self::Remembered { .. } => true,
            Self::TooLarge { .. } | Self::WarmUp { .. } | Self::Guest { .. } | Self::Late { .. } => true,
            Self::Vmm { source, .. } => source.is_of_guest(),
            Self::NoRoom(_) | Self::File { .. } | Self::Random(_) | Self::Ended(_) | Self::Away(_) => false,
        }
    }

    /// Without what the machine and its commands said.
    #[must_use]
    pub fn brief(&self) -> String {
        let text = crate::chain(self);
        let said = match self {
            Self::Vmm { console, .. } | Self::Guest { console, .. } | Self::Late { console, .. } => console.clone(),
            Self::WarmUp { said, .. } => format!("; {said}"),
            _ => String::new(),
        };
        text.strip_suffix(&said).map_or(text.clone(), str::to_owned)
    }

    /// Would it fail on every worker? Else it is this host's own trouble.
    #[must_use]
    pub fn is_recipes(&self) -> bool {
        match self {
            Self::WarmUp { .. } | Self::Guest { .. } | Self::Late { .. } => true,
            Self::Vmm { source, .. } => match source {
                VmmError::Refused { .. } | VmmError::Silent { .. } | VmmError::Nonsense { .. } | VmmError::Ended { .. } => true,
                VmmError::Unusable { .. } | VmmError::Spawn(_) | VmmError::Io { .. } | VmmError::Frozen(_) => false,
                VmmError::Other { .. } | VmmError::Slot(_) => false,
            },
            Self::NoRoom(_)
            | Self::TooLarge { .. }
            | Self::File { .. }
            | Self::Random(_)
            | Self::Ended(_)
            | Self::Away(_)
            | Self::Remembered { .. }
            | Self::Elsewhere { .. } => false,
        }
    }
}

/// Builds one.
#[derive(Debug)]
pub struct Builder {
    /// With what.
    pub vmm: Arc<dyn Vmm>,
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    pub initrd: PathBuf,
    /// The image's root disk.
    pub root: PathBuf,
    /// `cgroup.procs` files of the cgroup in which machines are that no task has.
    pub cgroups: Vec<String>,
    /// The image's environment, for the warm-up.
    pub env: Vec<(String, String)>,
    /// Longest time for all of it.
    pub time_max: Duration,
}

/// One build: its deadline and where it is.
struct Build<'a> {
    builder: &'a Builder,
    deadline: Instant,
}

impl Builder {
    /// Builds a template. How many processes of the warm-up live on in it.
    ///
    /// # Errors
    /// [`BuildError`]; nothing is left of the machine.
    pub async fn build(&self, recipe: &Recipe) -> Result<(Snapshot, u32), BuildError> {
        let build = Build { builder: self, deadline: Instant::now() + self.time_max };
        self.check(recipe).await?;
        let root = self.open_root()?;
        let boot = Boot {
            size: recipe.size,
            kernel: self.kernel.clone(),
            initrd: Some(self.initrd.clone()),
            words: recipe.words.clone(),
            root: Some(root),
            cgroups: self.cgroups.clone(),
        };
        let vm = build.vmm("starting the machine", None, self.vmm.boot(boot)).await?;
        let guest = build.session(&*vm, "the machine's boot", false).await?;
        for (number, warm_up) in recipe.warm_up.iter().enumerate() {
            let defaults = prepare::of_every_command(ROOT_HOME);
            // The later counts.
            let env: BTreeMap<_, _> = defaults.into_iter().chain(self.env.iter().chain(&warm_up.env).cloned()).collect();
            let env = env.into_iter().collect();
            let exec = Exec { argv: warm_up.argv.clone(), env, leave: recipe.keep_processes, ..Exec::default() };
            build.warm(&*vm, &guest, number, &exec).await?;
        }
        let prepared = build.guest("the agent's preparation", &*vm, guest.prepare_snapshot(recipe.keep_processes)).await;
        let (kept, stream) = prepared?;
        // From here on nobody touches the machine but the driver, which saves it and kills it before its files are read.
        let snapshot = build.vmm("saving the machine", None, vm.snapshot()).await?;
        drop(stream);
        build.trial(&snapshot).await?;
        Ok((snapshot, kept))
    }

    /// Are kernel and RAM disk what the template is named by? A machine that boots something else, or nothing, would tell nobody why.
    async fn check(&self, recipe: &Recipe) -> Result<(), BuildError> {
        let all = [(self.kernel.clone(), recipe.kernel), (self.initrd.clone(), recipe.initrd)];
        let check = move || {
            for (path, hash) in all {
                let source = match std::fs::read(&path) {
                    Ok(bytes) if *blake3::hash(&bytes).as_bytes() == hash => continue,
                    Ok(_) => std::io::Error::other("it was changed since this worker began; start the worker again, which makes it anew"),
                    Err(source) => source,
                };
                return Err(BuildError::File { path, source });
            }
            Ok(())
        };
        tokio::task::spawn_blocking(check).await.unwrap_or_else(|e| Err(BuildError::Ended(e.to_string())))
    }

    /// Opens the image's root disk.
    ///
    /// # Errors
    /// [`BuildError::File`].
    pub fn open_root(&self) -> Result<Arc<File>, BuildError> {
        File::open(&self.root).map(Arc::new).map_err(|source| BuildError::File { path: self.root.clone(), source })
    }

    /// Restores a machine from a snapshot that came from elsewhere, and hears its agent. Nothing is left of it.
    ///
    /// # Errors
    /// [`BuildError`].
    pub async fn prove(&self, snapshot: &Snapshot, time_max: Duration) -> Result<(), BuildError> {
        Build { builder: self, deadline: Instant::now() + time_max }.trial(snapshot).await
    }
}

impl Build<'_> {
    /// A template counts when a machine restored from it has answered.
    async fn trial(&self, snapshot: &Snapshot) -> Result<(), BuildError> {
        let stage = "a first restore";
        let mut vm = self.vmm(stage, None, self.builder.vmm.restore(snapshot, &self.builder.cgroups)).await?;
        let resumed = self.vmm(stage, None, vm.resume()).await;
        resumed?;
        let guest = self.session(&*vm, stage, true).await?;
        drop(guest);
        self.vmm(stage, None, vm.kill()).await.map(drop)
    }

    async fn session(&self, vm: &dyn Vm, stage: &'static str, reseed: bool) -> Result<Guest, BuildError> {
        let capabilities = self.builder.vmm.capabilities();
        // A machine that ends while it boots says nothing more.
        let greeted = tokio::select! {
            greeted = greet(vm, capabilities, reseed, self.deadline) => greeted,
            _ended = vm.ended() => Err(GuestError::Lost("the machine ended".to_owned()).into()),
        };
        match greeted {
            Ok((guest, _hello)) => Ok(guest),
            Err(GreetError::Guest(GuestError::Silent { .. })) if Instant::now() >= self.deadline => Err(self.late(stage, Some(vm))),
            Err(GreetError::Guest(source)) => Err(BuildError::Guest { stage, source, console: console(Some(vm)) }),
            Err(GreetError::Vmm(source)) => Err(BuildError::Vmm { stage, source, console: console(Some(vm)) }),
            Err(GreetError::Random(why)) => Err(BuildError::Random(why)),
        }
    }

    /// Runs a command of the warm-up.
    async fn warm(&self, vm: &dyn Vm, guest: &Guest, number: usize, exec: &Exec) -> Result<(), BuildError> {
        let said = [Said::default(), Said::default()];
        let run = async {
            let command = guest.exec(exec).await?;
            let [output, errors] = &said;
            futures::try_join!(output.hear(&command, Channel::Output), errors.hear(&command, Channel::Errors))?;
            command.ended().await
        };
        let end = match tokio::time::timeout_at(self.deadline, run).await {
            Ok(Ok(ended)) if ended.exit == Exit::Code(0) => return Ok(()),
            Ok(Ok(ended)) => {
                let memory = if ended.oom_kills > 0 { ", for want of memory; raise task.resources.memory" } else { "" };
                match ended.exit {
                    Exit::Code(code) => format!("ended with exit code {code}{memory}"),
                    Exit::Signal(signal) => format!("ended with signal {signal}{memory}"),
                }
            }
            Ok(Err(GuestError::Refused(refusal))) => format!("did not start: {}", refusal.text),
            Ok(Err(GuestError::Lost(why))) => format!("ended its machine: {why}{}", console(Some(vm))),
            Ok(Err(source)) => return Err(BuildError::Guest { stage: "its warm-up", source, console: console(Some(vm)) }),
            Err(_late) => format!("did not end within {} s, which a template's build may take in all", self.builder.time_max.as_secs()),
        };
        let said = match said.map(|said| said.last_lines()) {
            [output, errors] if output.is_empty() && errors.is_empty() => "it said nothing".to_owned(),
            [output, errors] if errors.is_empty() => format!("it said last: {output}"),
            [output, errors] if output.is_empty() => format!("it said last: {errors}"),
            [output, errors] => format!("it said last: {output}; and as errors: {errors}"),
        };
        Err(BuildError::WarmUp { number, command: shown(&exec.argv), end, said })
    }

    async fn vmm<T>(
        &self,
        stage: &'static str,
        vm: Option<&dyn Vm>,
        done: impl Future<Output = Result<T, VmmError>>,
    ) -> Result<T, BuildError> {
        match tokio::time::timeout_at(self.deadline, done).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(source)) => Err(BuildError::Vmm { stage, source, console: console(vm) }),
            Err(_late) => Err(self.late(stage, vm)),
        }
    }

    async fn guest<T>(&self, stage: &'static str, vm: &dyn Vm, done: impl Future<Output = Result<T, GuestError>>) -> Result<T, BuildError> {
        match tokio::time::timeout_at(self.deadline, done).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(source)) => Err(BuildError::Guest { stage, source, console: console(Some(vm)) }),
            Err(_late) => Err(self.late(stage, Some(vm))),
        }
    }

    fn late(&self, stage: &'static str, vm: Option<&dyn Vm>) -> BuildError {
        BuildError::Late { stage, after: self.builder.time_max, console: console(vm) }
    }
}

/// The end of what a command says on one of its streams. It is there also when the command never ends.
#[derive(Debug, Default)]
struct Said(Mutex<Vec<u8>>);

impl Said {
    async fn hear(&self, command: &Command, channel: Channel) -> Result<(), GuestError> {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let len = command.read(channel, &mut buffer).await?;
            if len == 0 {
                return Ok(());
            }
            let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            said.extend_from_slice(buffer.get(..len).unwrap_or_default());
            let over = said.len().saturating_sub(SAID_BYTES);
            said.drain(..over);
        }
    }

    fn last_lines(&self) -> String {
        let said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last_lines(&crate::vmm::console::plain(&String::from_utf8_lossy(&said)), SAID_LINES)
    }
}

/// A command for people, or its beginning.
fn shown(argv: &[String]) -> String {
    let plain = |word: &str| word.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./=:,@%+".contains(&b)) && !word.is_empty();
    let words: Vec<String> = argv.iter().map(|word| if plain(word) { word.clone() } else { format!("{word:?}") }).collect();
    let all = words.join(" ");
    match all.char_indices().nth(COMMAND_CHARS) {
        Some((at, _)) => format!("{}…", all.get(..at).unwrap_or_default()),
        None => all,
    }
}

/// The end of a machine's console, to be put behind an error.
fn console(vm: Option<&dyn Vm>) -> String {
    let text = vm.map(Vm::console).unwrap_or_default();
    match last_lines(&text, CONSOLE_LINES) {
        last if last.is_empty() => String::new(),
        last => format!("; its console said last: {last}"),
    }
}

/// The last lines that hold something, in one.
#[must_use]
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.get(lines.len().saturating_sub(count)..).unwrap_or_default().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_short_an_error_says_nothing_of_the_console() {
        let console = "; its console said last: panic".to_owned();
        let late = BuildError::Late { stage: "the machine's boot", after: Duration::from_secs(240), console };
        assert!(late.to_string().ends_with("panic"));
        assert_eq!(late.brief(), "building a template did not end within 240 s; it was at the machine's boot");
        let (command, end, said) = ("false".to_owned(), "ended with exit code 1".to_owned(), "it said nothing".to_owned());
        let warm_up = BuildError::WarmUp { number: 1, command, end, said };
        assert_eq!(warm_up.brief(), "building a template failed: warmUp[1] (false) ended with exit code 1");
    }

    #[test]
    fn a_command_is_shown_as_it_would_be_typed_and_not_too_long() {
        let shown = |argv: &[&str]| super::shown(&argv.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert_eq!(shown(&["python3", "-m", "compileall", "/app"]), "python3 -m compileall /app");
        assert_eq!(shown(&["sh", "-c", "echo no use\n\u{1b}[2J", ""]), r#"sh -c "echo no use\n\u{1b}[2J" """#);
        assert_eq!(shown(&["é"; 300]).chars().count(), COMMAND_CHARS + 1);
    }
}
