//! Stage *prepare*: from an attempt's name to everything its command needs.
//!
//! Owns finding the item, putting its values in, the directories, the inputs and the environment. Does not own running anything.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use minicbor::bytes::ByteVec;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, TenantId};
use volley_jobspecs::resolve::{ResolveError, ResolvedTask};
use volley_jobspecs::spec::Isolation;
use volley_jobspecs::template::Values;
use volley_jobspecs::wire::volume::Given;

use crate::cgroup::Limits;
use crate::dirs::{Dirs, Full};
use crate::inputs::{InputError, Inputs};
use crate::job::{ItemError, Job, Pages};
use crate::mounts::{self, MountError, Plan};
use crate::ports::{Bus, Objects};
use crate::runtime::microvm;
use crate::spawner::proto::Spawn;

/// PATH of a task that doesn't set its own.
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// LANG of a task that doesn't set its own: the one locale every Linux has, with UTF-8.
const LANG_DEFAULT: &str = "C.UTF-8";
/// USER and LOGNAME of a task that runs as its slot's user, unless it sets its own.
const USER_NAME: &str = "task";

/// How long a task waits while the disk is full: failing at once would use up the attempts of many tasks within seconds, and have the
/// worker quarantined for longer than the disk is full. Afterwards another worker may have room.
const ROOM_WAIT: Duration = Duration::from_secs(30);
/// Pause before the disk is looked at again.
const ROOM_PAUSE: Duration = Duration::from_millis(500);

/// Why an attempt can't begin.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// Its item can't be found.
    #[error(transparent)]
    Item(#[from] ItemError),
    /// Its values don't fit the spec.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// An input is not there.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Its directories can't be made.
    #[error("work directory: {0}; check the disk and permissions of the worker's directory")]
    Dirs(#[source] io::Error),
    /// Its directories' disk is full.
    #[error(transparent)]
    Full(#[from] Full),
    /// Its volumes were not given to it.
    #[error(transparent)]
    Mounts(#[from] MountError),
    /// The job has nothing to run.
    #[error("job has no command")]
    NoCommand,
}

impl PrepareError {
    /// What it means for the task.
    #[must_use]
    pub fn class(&self) -> FailureClass {
        match self {
            // Another try would meet the same item and the same spec.
            Self::Item(ItemError::NoItem(_)) | Self::Resolve(_) | Self::NoCommand => FailureClass::InputMissing,
            Self::Item(ItemError::Storage { .. } | ItemError::Damaged { .. }) => FailureClass::StorageFailed,
            Self::Input(input) => input.class(),
            Self::Mounts(mounts) => mounts.class(),
            Self::Dirs(_) | Self::Full(_) => FailureClass::StorageFailed,
        }
    }
}

/// Everything a command needs.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// The task with its values.
    pub task: ResolvedTask,
    /// The command as it is started.
    pub spawn: Spawn,
    /// What it may use.
    pub limits: Limits,
    /// Milliseconds between TERM and KILL.
    pub grace_ms: u64,
    /// The volumes it wants, by slot.
    pub volumes: Vec<Plan>,
    /// What a machine or container of its own needs, if the task has one.
    pub inside: Option<Box<InMachine>>,
}

/// What a task's machine or container needs to know.
#[derive(Debug, Clone)]
pub struct InMachine {
    /// The attempt.
    pub name: AttemptName,
    /// Whose the task is.
    pub tenant: TenantId,
    /// Its name.
    pub hostname: String,
    /// Variables that the image may change.
    pub defaults: BTreeMap<String, String>,
    /// Variables that it may not: the task's own, and Volley's.
    pub own: BTreeMap<String, String>,
    /// Where the command starts.
    pub cwd: String,
    /// The slot's directories on the host. Inputs lie in them and are copied into the machine; a container shows them.
    pub dirs: Dirs,
    /// Is there anything to copy?
    pub has_files: bool,
}

/// The directories of a task, as it sees them.
struct Seen {
    work: String,
    out: String,
    tmp: String,
}

impl Seen {
    fn of(dirs: &Dirs) -> Self {
        let path = |path: std::path::PathBuf| path.to_string_lossy().into_owned();
        Self { work: path(dirs.work()), out: path(dirs.out()), tmp: path(dirs.tmp()) }
    }

    fn in_machine() -> Self {
        Self { work: microvm::WORK.to_owned(), out: microvm::OUT.to_owned(), tmp: microvm::TMP.to_owned() }
    }
}

/// Waits for room on the disk.
async fn room(dirs: &mut Dirs) -> Result<(), Full> {
    let begun = tokio::time::Instant::now();
    let mut said = false;
    loop {
        match dirs.room_for_next() {
            Err(full) if begun.elapsed() < ROOM_WAIT => {
                if !std::mem::replace(&mut said, true) {
                    tracing::warn!("{full}; tasks wait");
                }
                tokio::time::sleep(ROOM_PAUSE).await;
            }
            room => return room,
        }
    }
}

/// Prepares an attempt in a slot's directories.
///
/// # Errors
/// [`PrepareError`].
pub async fn prepare<B: Bus, O: Objects>(
    bus: &B,
    (job, given): (&Job, &[Given]),
    name: &AttemptName,
    dirs: &mut Dirs,
    inputs: &Inputs<O>,
    pages: &Pages<O>,
) -> Result<Prepared, PrepareError> {
    let template = job.template.as_ref().ok_or(PrepareError::NoCommand)?;
    let item = job.item(pages, name.index).await?;
    let job_text = job.id.to_string();
    let values = Values { item: &item, index: name.index, job: &job_text, attempt: name.number };
    let task = template.resolve(&values)?;
    let volumes = mounts::plan_of(job, name, given, &task)?;
    dirs.make().map_err(PrepareError::Dirs)?;
    room(dirs).await?;
    dirs.lend();
    for input in &task.inputs {
        // Boxed, as it is large, and most tasks have none.
        Box::pin(inputs.place(bus, (job.id, &job.tenant), input, dirs)).await?;
    }
    let cwd = match &task.workdir {
        Some(workdir) => {
            let cwd = dirs.work().join(workdir);
            // Only below the task's own directory; an absolute one is the host's, and must be there.
            if let Ok(below) = cwd.strip_prefix(dirs.work()) {
                dirs.make_in_work(below).map_err(PrepareError::Dirs)?;
            }
            cwd
        }
        None => dirs.work(),
    };
    let has_image = matches!(task.isolation, Isolation::Container | Isolation::Microvm);
    let inside = has_image.then(|| Box::new(in_machine(job, name, dirs, &task, &item.to_string())));
    let env = match inside {
        // Its image has a word in it.
        Some(_) => BTreeMap::new(),
        None => {
            let seen = Seen::of(dirs);
            let mut env = defaults(&seen, dirs.are_closed());
            env.extend(own(job, name, &seen, &task, &item.to_string()));
            env
        }
    };
    let path = env.get("PATH").map_or(PATH_DEFAULT, String::as_str).split(':');
    let path = path.map(|folder| bytes(if folder.is_empty() { "." } else { folder })).collect();
    let spawn = Spawn {
        argv: task.command.iter().map(|word| bytes(word)).collect(),
        env: env.iter().map(|(name, value)| bytes(&format!("{name}={value}"))).collect(),
        path,
        cwd: bytes(&cwd.to_string_lossy()),
        uid: dirs.owner().map(|(uid, _)| uid),
        gid: dirs.owner().map(|(_, gid)| gid),
        container: None,
        mounts: Vec::new(),
        top: (!volumes.is_empty()).then(|| dirs.work().to_string_lossy().into_owned()),
    };
    let limits = Limits {
        memory_bytes: task.resources.memory.map(|memory| memory.0),
        cpu_milli: task.resources.cpus.map(|cpus| cpus.0),
        pids: task.resources.pids,
    };
    let grace_ms = task.timeouts.grace.0;
    Ok(Prepared { task, spawn, limits, grace_ms, volumes, inside })
}

fn bytes(text: &str) -> ByteVec {
    ByteVec::from(text.as_bytes().to_vec())
}

fn in_machine(job: &Job, name: &AttemptName, dirs: &Dirs, task: &ResolvedTask, item: &str) -> InMachine {
    let seen = Seen::in_machine();
    InMachine {
        name: *name,
        tenant: job.tenant.clone(),
        // Letters, digits and - only, and at most 34 of them: a host name of any system.
        hostname: format!("{}-{}-{}", job.id, name.index, name.number),
        defaults: defaults(&seen, false),
        own: own(job, name, &seen, task, item),
        cwd: microvm::workdir(task.workdir.as_deref()),
        dirs: dirs.clone(),
        has_files: !task.inputs.is_empty() || task.workdir.as_ref().is_some_and(|workdir| !workdir.starts_with('/')),
    }
}

/// What every command has, of a task and of a warm-up.
pub(crate) fn of_every_command(home: &str) -> [(String, String); 3] {
    [("PATH", PATH_DEFAULT), ("HOME", home), ("LANG", LANG_DEFAULT)].map(|(name, value)| (name.to_owned(), value.to_owned()))
}

/// What every task has, unless something else is said: nothing of the worker's own environment.
fn defaults(seen: &Seen, own_user: bool) -> BTreeMap<String, String> {
    let mut env = BTreeMap::from(of_every_command(&seen.work));
    env.insert("TMPDIR".to_owned(), seen.tmp.clone());
    if own_user {
        // Slots' users are in no passwd file, where programs look for a name when the environment has none.
        env.extend(["USER", "LOGNAME"].map(|name| (name.to_owned(), USER_NAME.to_owned())));
    }
    env
}

/// What the task says itself, and what Volley tells it.
fn own(job: &Job, name: &AttemptName, seen: &Seen, task: &ResolvedTask, item: &str) -> BTreeMap<String, String> {
    let mut env = task.env.clone();
    env.extend([
        ("VOLLEY_JOB".to_owned(), job.id.to_string()),
        ("VOLLEY_TASK_INDEX".to_owned(), name.index.to_string()),
        ("VOLLEY_TASK_COUNT".to_owned(), job.plan.tasks.to_string()),
        ("VOLLEY_ATTEMPT".to_owned(), name.number.to_string()),
        ("VOLLEY_ITEM".to_owned(), item.to_owned()),
        ("VOLLEY_OUTPUT_DIR".to_owned(), seen.out.clone()),
    ]);
    env
}
