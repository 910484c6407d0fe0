//! Flags of the verbs that start processes.
//!
//! Owns their names, environment variables, defaults and help. Does not start anything: the composition root does.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use volley_jobspecs::ids::{TenantId, WorkerId};
use volley_jobspecs::spec::{ByteSize, MilliCpus};

use crate::error::CliError;
use crate::units;
use crate::verbs;

/// Where NATS is when nobody says otherwise.
pub const NATS_DEFAULT: &str = "nats://127.0.0.1:4222";
/// Where clients find a coordinator when nobody says otherwise.
pub const LISTEN_DEFAULT: &str = "127.0.0.1:7800";

/// `volley up`: a whole cluster on this host.
#[derive(Debug, Clone, Args)]
pub struct UpArgs {
    /// Where everything is kept. Default: ~/.local/share/volley; as root /var/lib/volley.
    #[arg(long, env = "VOLLEY_DIR", value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Where the HTTP API listens.
    #[arg(long, env = "VOLLEY_LISTEN", default_value = LISTEN_DEFAULT, value_name = "ADDRESS")]
    pub listen: SocketAddr,
    /// Tasks (bundles) run at once. Default: one a core.
    #[arg(long, env = "VOLLEY_SLOTS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub slots: Option<u32>,
    /// Isolation tiers to offer: process, container, microvm. May be repeated. What this host can't have is left out and said, unless nothing else is
    /// asked for.
    #[arg(long = "isolation", env = "VOLLEY_ISOLATION", value_delimiter = ',', default_value = "process", value_name = "TIER")]
    pub isolation: Vec<String>,
    /// Whom tasks run as.
    #[command(flatten)]
    pub users: UserArgs,
    /// What machines are made of.
    #[command(flatten)]
    pub machines: MachineArgs,
    /// What may be done with volumes.
    #[command(flatten)]
    pub volumes: VolumeArgs,
    /// Also offers `isolation: null`, which runs nothing.
    #[arg(long, hide = true)]
    pub null: bool,
}

impl UpArgs {
    /// The default for root: tasks run as other users then, who can't pass through root's home.
    pub const ROOT_DIR: &str = "/var/lib/volley";

    /// The default for other users than root; none without a home directory.
    #[must_use]
    pub fn home_dir() -> Option<PathBuf> {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let share = || var("XDG_DATA_HOME").or_else(|| var("HOME").map(|home| home.join(".local").join("share")));
        share().map(|share| share.join("volley"))
    }
}

/// How to reach NATS.
#[derive(Debug, Clone, Args)]
pub struct NatsArgs {
    /// NATS servers, separated by commas.
    #[arg(
        id = "nats_url",
        long = "nats",
        env = "NATS_URL",
        default_value = NATS_DEFAULT,
        value_name = "URL",
        help_heading = "NATS"
    )]
    pub url: String,
    /// User.
    #[arg(id = "nats_user", long = "nats-user", env = "NATS_USER", value_name = "NAME", help_heading = "NATS")]
    pub user: Option<String>,
    /// Password. Other users of the host can read it in the list of processes; better the variable or a file.
    #[arg(
        id = "nats_password",
        long = "nats-password",
        env = "NATS_PASSWORD",
        hide_env_values = true,
        value_name = "TEXT",
        help_heading = "NATS"
    )]
    pub password: Option<String>,
    /// A file with nothing but the password in it.
    #[arg(
        id = "nats_password_file",
        long = "nats-password-file",
        env = "NATS_PASSWORD_FILE",
        value_name = "FILE",
        conflicts_with = "nats_password",
        help_heading = "NATS"
    )]
    pub password_file: Option<PathBuf>,
    /// A NATS credentials file.
    #[arg(
        id = "nats_creds",
        long = "nats-creds",
        env = "NATS_CREDS",
        value_name = "FILE",
        conflicts_with = "nats_user",
        help_heading = "NATS"
    )]
    pub credentials: Option<PathBuf>,
}

/// Where the bucket is. The keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the rest of the standard chain.
#[derive(Debug, Clone, Args)]
pub struct StoreArgs {
    /// Where S3 is.
    #[command(flatten)]
    pub place: StorePlace,
    /// The bucket.
    #[arg(id = "s3_bucket", long = "s3-bucket", env = "VOLLEY_S3_BUCKET", value_name = "NAME", help_heading = "S3")]
    pub bucket: String,
}

/// Where S3 is, and what of a bucket is ours.
#[derive(Debug, Clone, Args)]
pub struct StorePlace {
    /// The S3 endpoint. Default: AWS.
    #[arg(id = "s3_endpoint", long = "s3-endpoint", env = "VOLLEY_S3_ENDPOINT", value_name = "URL", help_heading = "S3")]
    pub endpoint: Option<String>,
    /// The region to sign for.
    #[arg(id = "s3_region", long = "s3-region", env = "AWS_REGION", default_value = "us-east-1", value_name = "NAME", help_heading = "S3")]
    pub region: String,
    /// Put before every key in the bucket.
    #[arg(id = "s3_prefix", long = "s3-prefix", env = "VOLLEY_S3_PREFIX", default_value = "", value_name = "PREFIX", help_heading = "S3")]
    pub prefix: String,
}

/// `volley coordinator`.
#[derive(Debug, Clone, Args)]
pub struct CoordinatorArgs {
    /// NATS.
    #[command(flatten)]
    pub nats: NatsArgs,
    /// S3.
    #[command(flatten)]
    pub store: StoreArgs,
    /// Where the local copy of the state lies. It can be deleted: it is built again.
    #[arg(long, env = "VOLLEY_DATA_DIR", value_name = "DIR")]
    pub data_dir: PathBuf,
    /// Where the HTTP API listens.
    #[arg(long, env = "VOLLEY_LISTEN", default_value = LISTEN_DEFAULT, value_name = "ADDRESS")]
    pub listen: SocketAddr,
    /// Its name among the coordinators. Default: the host's name.
    #[arg(long, env = "VOLLEY_NAME", value_name = "NAME")]
    pub name: Option<String>,
    /// A file with the operator's first token, `vt_bootstrap_…`. Without, only tokens in the log are valid.
    #[arg(long, env = "VOLLEY_OPERATOR_TOKEN_FILE", value_name = "FILE")]
    pub operator_token_file: Option<PathBuf>,
    /// Gives /metrics without a token to this host. Its tasks can ask, too. Without, Prometheus sends an operator's token
    /// (`volley token create --operator --tenant NAME`).
    #[arg(long, env = "VOLLEY_LOCAL_METRICS")]
    pub local_metrics: bool,
    /// Copies of the log that NATS keeps: 1, 3 or 5. Default: as many as there are; 1 of a new log.
    #[arg(long, env = "VOLLEY_REPLICAS", value_name = "N", value_parser = replicas)]
    pub replicas: Option<usize>,
    /// Most bytes of the log, such as 20GiB; NATS sets them aside. Above 80 % of them submits are refused. Default: as many as there are;
    /// of a new log 4GiB, or what the server has room for.
    #[arg(long, env = "VOLLEY_LOG_BYTES", value_name = "SIZE", value_parser = units::scalar::<ByteSize>)]
    pub log_bytes: Option<ByteSize>,
    /// Another bucket that items may be read from. With the coordinator's own credentials, for `items.jsonl.s3` and the like. May be repeated; `*`
    /// is any.
    #[arg(long = "items-bucket", env = "VOLLEY_ITEMS_BUCKETS", value_name = "NAME", value_delimiter = ',')]
    pub items_buckets: Vec<String>,
    /// The keys of volumes. In this file, the same for all coordinators and workers: one a line, 64 hexadecimal digits (`openssl rand -hex 32`), the first
    /// is written with. Without, there are no volumes.
    #[arg(long, env = "VOLLEY_VOLUME_KEYS", value_name = "FILE")]
    pub volume_keys: Option<PathBuf>,
}

fn replicas(text: &str) -> Result<usize, String> {
    match text {
        "1" => Ok(1),
        "3" => Ok(3),
        "5" => Ok(5),
        _ => Err("NATS keeps 1, 3 or 5 copies".to_owned()),
    }
}

/// `volley worker`.
#[derive(Debug, Clone, Args)]
pub struct WorkerArgs {
    /// NATS.
    #[command(flatten)]
    pub nats: NatsArgs,
    /// S3.
    #[command(flatten)]
    pub store: StoreArgs,
    /// Its directory: tasks' directories and cached inputs. One worker a directory.
    #[arg(long, env = "VOLLEY_WORK_DIR", value_name = "DIR")]
    pub work_dir: PathBuf,
    /// The name it keeps over restarts. Default: the host's name.
    #[arg(long, env = "VOLLEY_NAME", value_name = "NAME")]
    pub name: Option<WorkerId>,
    /// Tasks (bundles) it runs at once. Default: one a core.
    #[arg(long, env = "VOLLEY_SLOTS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub slots: Option<u32>,
    /// CPU for tasks, in cores. Default: all.
    #[arg(long, env = "VOLLEY_CPUS", value_name = "CORES", value_parser = units::scalar::<MilliCpus>)]
    pub cpus: Option<MilliCpus>,
    /// Memory for tasks, such as 12GiB. Default: three quarters.
    #[arg(long, env = "VOLLEY_MEMORY", value_name = "SIZE", value_parser = units::scalar::<ByteSize>)]
    pub memory: Option<ByteSize>,
    /// Disk for tasks, such as 100GB. Default: what is free.
    #[arg(long, env = "VOLLEY_DISK", value_name = "SIZE", value_parser = units::scalar::<ByteSize>)]
    pub disk: Option<ByteSize>,
    /// A label that specs can ask for. May be repeated.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = units::pair)]
    pub labels: Vec<(String, String)>,
    /// Isolation tiers to offer: process, container, microvm. May be repeated. What this host can't have is left out and said, unless nothing else is
    /// asked for.
    #[arg(long = "isolation", env = "VOLLEY_ISOLATION", value_delimiter = ',', default_value = "process", value_name = "TIER")]
    pub isolation: Vec<String>,
    /// Whom tasks run as.
    #[command(flatten)]
    pub users: UserArgs,
    /// What machines are made of.
    #[command(flatten)]
    pub machines: MachineArgs,
    /// The keys of volumes. In this file, the same for all coordinators and workers: one a line, 64 hexadecimal digits (`openssl rand -hex 32`), the first
    /// is written with. Without, no task that wants a volume runs here.
    #[arg(long, env = "VOLLEY_VOLUME_KEYS", value_name = "FILE", help_heading = "volumes")]
    pub volume_keys: Option<PathBuf>,
    /// What may be done with volumes.
    #[command(flatten)]
    pub volumes: VolumeArgs,
    /// Also offers `isolation: null`, which runs nothing.
    #[arg(long, hide = true)]
    pub null: bool,
}

/// What may be done with the volumes of tasks.
#[derive(Debug, Clone, Copy, Args)]
pub struct VolumeArgs {
    /// Mounts what guests wrote for processes and containers. The host's kernel reads a file system that a machine's guest could have made to break it:
    /// only where everybody who writes volumes in machines is trusted.
    #[arg(long, env = "VOLLEY_ALLOW_HOST_MOUNT", help_heading = "volumes")]
    pub allow_host_mount: bool,
}

/// What `--vmm` takes.
const VMMS: [&str; 3] = ["auto", "qemu", "firecracker"];

/// What the machines of `--isolation microvm` and the containers of `--isolation container` are made of.
#[derive(Debug, Clone, Args)]
pub struct MachineArgs {
    /// Where images lie (`volley image`). Default: `images` in the worker's directory.
    #[arg(long, env = "VOLLEY_IMAGES", value_name = "DIR", help_heading = "microVMs")]
    pub images: Option<PathBuf>,
    /// The OCI runtime of containers. crun, runc or runsc, by name or path. Default: crun.
    #[arg(long, env = "VOLLEY_CONTAINER_RUNTIME", value_name = "PROGRAM", help_heading = "containers")]
    pub container_runtime: Option<PathBuf>,
    /// Shares machines' snapshots over the bucket. Sealed with the keys in this file, the same on all workers: one a line, 64 hexadecimal digits
    /// (`openssl rand -hex 32`), the first is written with.
    #[arg(long, env = "VOLLEY_TEMPLATE_KEYS", value_name = "FILE", help_heading = "microVMs")]
    pub template_keys: Option<PathBuf>,
    /// Memory for machines' snapshots, such as 4GiB. Beside --memory. Default: an eighth of the host's, as each takes only what its machine has written
    /// (some 100 MiB). A machine's whole memory is set aside while its snapshot is made, so none larger than this can run.
    #[arg(long, env = "VOLLEY_TEMPLATE_MEMORY", value_name = "SIZE", value_parser = units::scalar::<ByteSize>, help_heading = "microVMs")]
    pub template_memory: Option<ByteSize>,
    /// What runs the machines: auto, qemu or firecracker. `auto` is Firecracker where KVM executes and there is one, else QEMU (with KVM if that executes, else emulating).
    /// With `qemu` or `firecracker` it is that one or none.
    #[arg(long, env = "VOLLEY_VMM", value_name = "VMM", value_parser = VMMS, hide_possible_values = true, default_value = "auto", help_heading = "microVMs")]
    pub vmm: String,
    /// Firecracker, 1.12 or later. Default: the first in PATH, /usr/local/bin and /usr/bin.
    #[arg(long, env = "VOLLEY_FIRECRACKER", value_name = "FILE", help_heading = "microVMs")]
    pub firecracker: Option<PathBuf>,
    /// QEMU. Default: where distributions put it.
    #[arg(long, env = "VOLLEY_QEMU", value_name = "FILE", help_heading = "microVMs")]
    pub qemu: Option<PathBuf>,
    /// The guests' kernel. Default: the newest cloud kernel in /boot.
    #[arg(long, env = "VOLLEY_GUEST_KERNEL", value_name = "FILE", help_heading = "microVMs")]
    pub guest_kernel: Option<PathBuf>,
    /// That kernel's modules. Default: those of its release in /lib/modules.
    #[arg(long, env = "VOLLEY_GUEST_MODULES", value_name = "DIR", help_heading = "microVMs")]
    pub guest_modules: Option<PathBuf>,
    /// The guests' agent. Default: volley-guest beside this program.
    #[arg(long, env = "VOLLEY_GUEST_AGENT", value_name = "FILE", help_heading = "microVMs")]
    pub guest_agent: Option<PathBuf>,
    /// Offers `microvm` also where VMMs can't be shut off from the host. For development only: without root, above all, a guest that breaks into
    /// its VMM is on the host. Every result says what was missing.
    #[arg(long, env = "VOLLEY_ALLOW_UNCONFINED_MACHINES", help_heading = "microVMs")]
    pub allow_unconfined_machines: bool,
}

/// `volley image`.
#[derive(Debug, Clone, Args)]
pub struct ImageArgs {
    /// Where images lie: the worker's `--images`. Default: those of `volley up` in its usual directory.
    #[arg(long, env = "VOLLEY_IMAGES", value_name = "DIR", global = true)]
    pub images: Option<PathBuf>,
    /// Those of the `volley up` that keeps its cluster here. It does so in ~/.local/share/volley, as root in /var/lib/volley.
    #[arg(long, env = "VOLLEY_DIR", value_name = "DIR", global = true, conflicts_with = "images")]
    pub dir: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub verb: ImageVerb,
}

/// What to do with images.
#[derive(Debug, Clone, Subcommand)]
pub enum ImageVerb {
    /// Makes an image usable on this host, as `task.image`.
    Import {
        /// Where it is: a registry's name such as python:3.12, or one of these.
        ///
        /// `dir:DIR` and `tar:FILE` have its files; `oci:PATH` and `oci:PATH:NAME` are an OCI layout.
        image: String,
        /// What tasks call it. An older image of that name is then called by its digest. Default: what is said above.
        #[arg(long)]
        name: Option<String>,
        /// Speaks to the registry without encryption.
        #[arg(long)]
        plain_http: bool,
    },
    /// Lists the images of this host.
    Ls,
    /// Removes an image, and what no other one uses.
    Rm {
        /// Its digest, or what it is called.
        image: String,
    },
}

/// `volley template`.
#[derive(Debug, Clone, Args)]
pub struct TemplateArgs {
    /// S3.
    #[command(flatten)]
    pub place: StorePlace,
    /// The bucket. All but `build` want it.
    #[arg(id = "s3_bucket", long = "s3-bucket", env = "VOLLEY_S3_BUCKET", value_name = "NAME", help_heading = "S3")]
    pub bucket: Option<String>,
    /// The key file of the workers that share templates. All but `build` want it.
    #[arg(long, env = "VOLLEY_TEMPLATE_KEYS", value_name = "FILE", global = true)]
    pub template_keys: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub verb: TemplateVerb,
}

/// What to do with templates.
#[derive(Debug, Clone, Subcommand)]
pub enum TemplateVerb {
    /// Has a worker build the template of a job's machines now.
    Build(verbs::template::Args),
    /// Something with those in the bucket.
    #[command(flatten)]
    Stored(StoredVerb),
}

/// What to do with the templates in the bucket.
#[derive(Debug, Clone, Subcommand)]
pub enum StoredVerb {
    /// Lists templates.
    Ls,
    /// Shows what a template is made of, and its warm-up.
    Show {
        /// Its name, or the beginning of it.
        name: String,
    },
    /// Removes a template. Machines that run from it are not disturbed; a task that wants it has it built again.
    Rm {
        /// Its name, or the beginning of it.
        name: String,
    },
    /// Deletes what builds that were cut short, and templates that were replaced, have left.
    Sweep,
}

/// `volley template ls|show|rm|sweep`.
#[derive(Debug)]
pub struct StoredArgs {
    /// S3.
    pub store: StoreArgs,
    /// The key file of the workers that share templates.
    pub keys: PathBuf,
    /// Whose templates.
    pub tenant: TenantId,
    /// What to do.
    pub verb: StoredVerb,
}

impl TemplateArgs {
    /// Those of a verb that works on the bucket, for this tenant (`--tenant`).
    ///
    /// # Errors
    /// [`CliError::Usage`]: what is missing, or no tenant's name.
    pub fn stored(self, verb: StoredVerb, tenant: Option<&str>) -> Result<StoredArgs, CliError> {
        let missing = |what: &str| CliError::Usage(format!("{what} is missing: {TEMPLATES_LIE}"));
        let store = StoreArgs { place: self.place, bucket: self.bucket.ok_or_else(|| missing("--s3-bucket NAME"))? };
        let keys = self.template_keys.ok_or_else(|| missing("--template-keys FILE"))?;
        let tenant = TenantId::new(tenant.unwrap_or(TENANT_DEFAULT)).map_err(|e| CliError::Usage(format!("--tenant: {e}")))?;
        Ok(StoredArgs { store, keys, tenant, verb })
    }
}

/// The tenant of a cluster that has made no others.
const TENANT_DEFAULT: &str = "default";
const TEMPLATES_LIE: &str = "templates lie in the workers' bucket, sealed with the keys that the workers share them with";

/// Whom tasks run as, where the worker runs as root. Without either, each slot has a user of its own, counted from 80000:80000.
#[derive(Debug, Clone, Args)]
pub struct UserArgs {
    /// As root: the first of the users that slots have, one each. Tasks of different slots can't touch each other. Default: 80000:80000.
    #[arg(long, env = "VOLLEY_TASK_USERS", value_name = "UID:GID", value_parser = user, conflicts_with = "task_user")]
    pub task_users: Option<(u32, u32)>,
    /// As root: one user for all tasks instead. `root` lets them do anything on this host.
    #[arg(long, env = "VOLLEY_TASK_USER", value_name = "UID:GID", value_parser = user_or_root)]
    pub task_user: Option<(u32, u32)>,
}

fn user_or_root(text: &str) -> Result<(u32, u32), String> {
    if text == "root" { Ok((0, 0)) } else { user(text).map_err(|why| format!("{why}, or root")) }
}

fn user(text: &str) -> Result<(u32, u32), String> {
    let read = || {
        let (uid, gid) = text.split_once(':')?;
        Some((uid.parse().ok()?, gid.parse().ok()?))
    };
    read().ok_or_else(|| "it should be UID:GID, two numbers such as 1000:1000".to_owned())
}

/// `volley log`.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// NATS.
    #[command(flatten)]
    pub nats: NatsArgs,
    /// Uses the NATS of the `volley up` that keeps its cluster here. It does so in ~/.local/share/volley, as root in /var/lib/volley.
    #[arg(long, env = "VOLLEY_DIR", value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub verb: LogVerb,
}

/// What to do with the log.
#[derive(Debug, Clone, Subcommand)]
pub enum LogVerb {
    /// Prints records as JSON, one a line.
    Show {
        /// The first sequence. Default: the oldest there is.
        #[arg(long, value_name = "SEQUENCE")]
        from: Option<u64>,
        /// How many. Default: all there are.
        #[arg(long, value_name = "N")]
        limit: Option<u64>,
        /// Only records of this job.
        #[arg(long, value_name = "JOB")]
        job: Option<volley_jobspecs::ids::JobId>,
        /// Waits for more.
        #[arg(short, long)]
        follow: bool,
    },
    /// Lets every coordinator pass over a record that stops them. What it said is lost.
    Skip {
        /// The record.
        sequence: u64,
        /// Also one that can be read: whatever it did is undone, in jobs that have ended too.
        #[arg(long)]
        force: bool,
    },
}
