//! From a task's spec and one item to what a worker runs.
//!
//! Owns which text fields take `${…}`, putting the values in, and the checks of the results that only then are possible. Does not
//! own templates themselves (`template`) or fetching and running anything.

use std::collections::BTreeMap;

use crate::image::Name;
use crate::problem::join;
use crate::spec::volumes::{NameError, parse_name};
use crate::spec::{
    Command, EgressRule, Isolation, KeepClone, NetworkSpec, Resources, SecretMount, TaskSpec, Timeouts, VolumeMount, WarmUpSpec,
};
use crate::template::{SubstituteError, Template, TemplateError, Values};

/// Longest word of a command or environment variable with its name, in bytes: Linux takes 128 KiB with the closing NUL.
pub const WORD_BYTES_MAX: usize = 128 * 1024 - 1;
/// Most bytes of a command and its environment together: Linux takes a quarter of the stack limit, 2 MiB by default; half of that
/// leaves room for pointers and for hosts with less.
pub const EXEC_BYTES_MAX: usize = 1024 * 1024;
/// Longest path or URL, in bytes: Linux takes 4,096 with the closing NUL.
pub const PATH_BYTES_MAX: usize = 4095;
/// Longest name between two slashes of a path, in bytes (NAME_MAX of Linux).
pub const NAME_BYTES_MAX: usize = 255;

/// A task as a worker runs it: every text is final.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedTask {
    /// The image; always there for `container` and `microvm`.
    pub image: Option<String>,
    /// Isolation tier.
    pub isolation: Isolation,
    /// Program and arguments; a shell text has become `sh -c TEXT`.
    pub command: Vec<String>,
    /// What is run once before the machine is saved that the task begins in.
    pub warm_up: Vec<WarmUpSpec>,
    /// Do processes of that go on?
    pub keep_processes: bool,
    /// How long its machine is kept when it fails, in milliseconds.
    pub keep_failed_ms: Option<u64>,
    /// The task's own environment variables.
    pub env: BTreeMap<String, String>,
    /// Standard input, at most 256 KiB.
    pub stdin: Option<String>,
    /// Where the command starts: relative to the task's directory, or absolute inside an image.
    pub workdir: Option<String>,
    /// What it needs and is limited to.
    pub resources: Resources,
    /// Files to fetch first.
    pub inputs: Vec<ResolvedInput>,
    /// Declared outputs, relative to the task's directory.
    pub outputs: Vec<String>,
    /// Volumes to mount.
    pub volumes: Vec<VolumeMount>,
    /// Deadlines.
    pub timeouts: Timeouts,
    /// Allowed egress.
    pub network: Option<NetworkSpec>,
    /// Secrets.
    pub secrets: Vec<SecretMount>,
}

/// A file to fetch before the command starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedInput {
    /// Where it comes from.
    pub from: InputSource,
    /// Where it goes, relative to the task's directory; never leaves it.
    pub path: String,
    /// Its SHA-256 in 64 lower-case hex digits, if it is to be checked.
    pub sha256: Option<String>,
    /// May it be executed?
    pub executable: bool,
}

/// Where a file comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InputSource {
    /// An object.
    S3 {
        /// Its bucket.
        bucket: String,
        /// Its key.
        key: String,
    },
    /// An http or https URL.
    Http(String),
    /// An uploaded file, by its id.
    Upload(String),
}

/// Why a text in a task is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// Nothing there.
    #[error("empty")]
    Empty,
    /// It holds a NUL byte, which no argument, variable or path can.
    #[error("it has a NUL byte in it")]
    Nul,
    /// Too many bytes.
    #[error("longer than {0} bytes")]
    TooLong(usize),
    /// Begins with `/`.
    #[error("an absolute path where a relative one is needed")]
    Absolute,
    /// Doesn't begin with `/`.
    #[error("a relative path where an absolute one is needed")]
    Relative,
    /// Leads out with `..`.
    #[error("the path has a \"..\" in it")]
    Escapes,
    /// No path of one file: empty parts, `.`, or a closing slash.
    #[error("not the path of one file")]
    NotAFile,
    /// A name in it that no file can have.
    #[error("a name in the path is longer than {NAME_BYTES_MAX} bytes")]
    NameTooLong,
    /// No known scheme.
    #[error("not a place a file can come from")]
    Source,
    /// No digest.
    #[error("not a SHA-256 digest")]
    Digest,
    /// No name of an image.
    #[error("it names no image: {0}")]
    Image(&'static str),
    /// No name of a volume.
    #[error("it names no volume: {0}")]
    VolumeName(NameError),
}

impl TextError {
    /// What is allowed instead.
    #[must_use]
    pub fn allowed(self) -> &'static str {
        match self {
            Self::Empty => "some text",
            Self::Nul => "text without NUL bytes",
            Self::TooLong(_) => "a shorter text; longer ones belong in an input file",
            Self::Absolute | Self::Escapes | Self::NotAFile => "a path within the task's own directory, such as data/in.json",
            Self::NameTooLong => "names that a file can have",
            Self::Relative => "a path from the root, such as /data",
            Self::Source => "s3://bucket/key, http://…, https://…, or upload:ID (upload:NAME with --upload NAME=FILE)",
            Self::Digest => "64 hex digits",
            Self::Image(_) => "[HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST], sha256:DIGEST, or what `volley image ls` shows",
            Self::VolumeName(_) => "1 to 128 of a-z A-Z 0-9 . _ -, beginning with a letter or digit; NAME@SNAPSHOT for a snapshot",
        }
    }
}

/// Why a task can't be made from an item.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// A value couldn't be put in.
    #[error("task.{field}: {source}")]
    Substitute {
        /// The field, such as `command[2]`.
        field: String,
        /// Why.
        source: SubstituteError,
    },
    /// With its values the text isn't allowed any more.
    #[error("task.{field}: {source}; allowed: {}", source.allowed())]
    Text {
        /// The field.
        field: String,
        /// Why.
        source: TextError,
    },
    /// Command and environment are too large together.
    #[error("task.command and task.env have {bytes} bytes together; at most {EXEC_BYTES_MAX} can be handed to a program")]
    ExecTooLarge {
        /// How large they are.
        bytes: usize,
    },
}

/// A `${…}` that isn't right, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadTemplate {
    /// JSON path within the task, such as `.command[2]`.
    pub field: String,
    /// Why.
    pub error: TemplateError,
}

/// What a text field is for, which decides what its final text must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Image,
    Word,
    Env,
    Stdin,
    Workdir,
    InputFrom,
    FilePath,
    Digest,
    OutputPath,
    VolumeName,
    VolumePath,
    MountPath,
    Host,
    SecretName,
    SecretEnv,
}

/// Every text field of a task that takes `${…}`: its place, its purpose and its text, in a fixed order.
pub(crate) fn texts(task: &TaskSpec) -> Vec<(String, Kind, &str)> {
    let mut all = Vec::new();
    all.extend(task.image.as_deref().map(|text| (".image".to_owned(), Kind::Image, text)));
    match &task.command {
        Command::Shell(text) => all.push((".command".to_owned(), Kind::Word, text.as_str())),
        Command::Words(words) => {
            all.extend(words.iter().enumerate().map(|(i, word)| (format!(".command[{i}]"), Kind::Word, word.as_str())));
        }
    }
    all.extend(task.env.iter().map(|(name, text)| (join(".env", name), Kind::Env, text.as_str())));
    all.extend(task.stdin.as_deref().map(|text| (".stdin".to_owned(), Kind::Stdin, text)));
    all.extend(task.workdir.as_deref().map(|text| (".workdir".to_owned(), Kind::Workdir, text)));
    for (i, input) in task.inputs.iter().enumerate() {
        all.push((format!(".inputs[{i}].from"), Kind::InputFrom, input.from.as_str()));
        all.push((format!(".inputs[{i}].path"), Kind::FilePath, input.path.as_str()));
        all.extend(input.sha256.as_deref().map(|text| (format!(".inputs[{i}].sha256"), Kind::Digest, text)));
    }
    all.extend(task.outputs.iter().enumerate().map(|(i, path)| (format!(".outputs[{i}]"), Kind::OutputPath, path.as_str())));
    for (i, volume) in task.volumes.iter().enumerate() {
        all.push((format!(".volumes[{i}].volume"), Kind::VolumeName, volume.volume.as_str()));
        all.push((format!(".volumes[{i}].path"), Kind::VolumePath, volume.path.as_str()));
        all.extend(volume.keep.as_ref().map(|keep| (format!(".volumes[{i}].keep.name"), Kind::VolumeName, keep.name.as_str())));
    }
    let hosts = task.network.iter().flat_map(|network| &network.allow).enumerate();
    all.extend(hosts.map(|(i, rule)| (format!(".network.allow[{i}].host"), Kind::Host, rule.host.as_str())));
    for (i, secret) in task.secrets.iter().enumerate() {
        all.push((format!(".secrets[{i}].name"), Kind::SecretName, secret.name.as_str()));
        all.extend(secret.env.as_deref().map(|text| (format!(".secrets[{i}].env"), Kind::SecretEnv, text)));
        all.extend(secret.path.as_deref().map(|text| (format!(".secrets[{i}].path"), Kind::MountPath, text)));
    }
    all
}

/// Checks a final text.
pub(crate) fn check_text(kind: Kind, text: &str) -> Result<(), TextError> {
    if text.contains('\0') && kind != Kind::Stdin {
        return Err(TextError::Nul);
    }
    let longest = match kind {
        Kind::Word | Kind::Env => WORD_BYTES_MAX,
        Kind::Stdin => crate::template::TEXT_BYTES_MAX,
        Kind::Image
        | Kind::Workdir
        | Kind::InputFrom
        | Kind::FilePath
        | Kind::Digest
        | Kind::OutputPath
        | Kind::VolumeName
        | Kind::VolumePath
        | Kind::MountPath
        | Kind::Host
        | Kind::SecretName
        | Kind::SecretEnv => PATH_BYTES_MAX,
    };
    if text.len() > longest {
        return Err(TextError::TooLong(longest));
    }
    match kind {
        Kind::Word | Kind::Env | Kind::Stdin => Ok(()),
        Kind::Image => Name::parse(text).map(drop).map_err(|why| TextError::Image(why.what)),
        Kind::VolumeName => parse_name(text).map(drop).map_err(TextError::VolumeName),
        Kind::Host | Kind::SecretName | Kind::SecretEnv => {
            if text.is_empty() {
                Err(TextError::Empty)
            } else {
                Ok(())
            }
        }
        Kind::Workdir => check_no_escape(text),
        Kind::FilePath | Kind::OutputPath => check_file_path(text),
        Kind::MountPath if !text.starts_with('/') => Err(TextError::Relative),
        Kind::MountPath | Kind::VolumePath => check_no_escape(text),
        Kind::InputFrom => source(text).map(|_| ()).ok_or(TextError::Source),
        Kind::Digest => {
            let hex = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
            if hex { Ok(()) } else { Err(TextError::Digest) }
        }
    }
}

fn check_no_escape(path: &str) -> Result<(), TextError> {
    match path {
        "" => Err(TextError::Empty),
        path if path.split('/').any(|part| part == "..") => Err(TextError::Escapes),
        _ => Ok(()),
    }
}

/// A path of one file or directory below the task's own.
fn check_file_path(path: &str) -> Result<(), TextError> {
    if path.starts_with('/') {
        return Err(TextError::Absolute);
    }
    check_no_escape(path)?;
    if path.split('/').any(|part| part.is_empty() || part == ".") {
        return Err(TextError::NotAFile);
    }
    if path.split('/').any(|part| part.len() > NAME_BYTES_MAX) { Err(TextError::NameTooLong) } else { Ok(()) }
}

/// `s3://bucket/key`, both there.
#[must_use]
pub fn s3_uri(text: &str) -> Option<(&str, &str)> {
    let (bucket, key) = text.strip_prefix("s3://")?.split_once('/')?;
    let bucket_ok = bucket.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'_'));
    // S3 itself sets both limits.
    ((3..=63).contains(&bucket.len()) && bucket_ok && (1..=1024).contains(&key.len())).then_some((bucket, key))
}

/// Reads where an input comes from.
#[must_use]
pub fn source(text: &str) -> Option<InputSource> {
    if let Some((bucket, key)) = s3_uri(text) {
        return Some(InputSource::S3 { bucket: bucket.to_owned(), key: key.to_owned() });
    }
    if let Some(id) = text.strip_prefix("upload:") {
        return crate::ids::check_name(id).ok().map(|()| InputSource::Upload(id.to_owned()));
    }
    is_http_url(text).then(|| InputSource::Http(text.to_owned()))
}

/// An http or https URL with a host, without spaces or control characters.
#[must_use]
pub(crate) fn is_http_url(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let printable = text.bytes().all(|b| b > b' ' && b != 0x7f);
    rest.is_some_and(|rest| printable && rest.split(['/', '?', '#']).next().is_some_and(|host| !host.is_empty()))
}

/// A task whose texts were read once, to be resolved for many items.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskTemplate {
    task: TaskSpec,
    templates: Vec<(String, Kind, Template)>,
}

impl TaskTemplate {
    /// Reads every text field of a task.
    ///
    /// # Errors
    /// Every text that is no template.
    pub fn compile(task: &TaskSpec) -> Result<Self, Vec<BadTemplate>> {
        let mut templates = Vec::new();
        let mut bad = Vec::new();
        for (field, kind, text) in texts(task) {
            match Template::parse(text) {
                Ok(template) => templates.push((field, kind, template)),
                Err(errors) => bad.extend(errors.into_iter().map(|error| BadTemplate { field: field.clone(), error })),
            }
        }
        if bad.is_empty() { Ok(Self { task: task.clone(), templates }) } else { Err(bad) }
    }

    /// The task as the spec has it.
    #[must_use]
    pub fn task(&self) -> &TaskSpec {
        &self.task
    }

    pub(crate) fn templates(&self) -> &[(String, Kind, Template)] {
        &self.templates
    }

    /// Puts one attempt's values in.
    ///
    /// # Errors
    /// [`ResolveError`] names the field: the item lacks a value, or with it a path leaves the task's directory, a text grows too
    /// long, and so on. It is the spec's or the item's fault, so another try can't help.
    pub fn resolve(&self, values: &Values<'_>) -> Result<ResolvedTask, ResolveError> {
        let mut texts = Vec::with_capacity(self.templates.len());
        for (field, kind, template) in &self.templates {
            let text = template.substitute(values).map_err(|source| ResolveError::Substitute { field: field[1..].to_owned(), source })?;
            check_text(*kind, &text).map_err(|source| ResolveError::Text { field: field[1..].to_owned(), source })?;
            texts.push(text);
        }
        let resolved = self.fill(texts)?;
        if resolved.command.first().is_none_or(String::is_empty) {
            return Err(ResolveError::Text { field: "command[0]".to_owned(), source: TextError::Empty });
        }
        let words = resolved.command.iter().map(|word| word.len() + 1);
        let variables = resolved.env.iter().map(|(name, text)| name.len() + text.len() + 2);
        let bytes = words.chain(variables).sum();
        if bytes > EXEC_BYTES_MAX { Err(ResolveError::ExecTooLarge { bytes }) } else { Ok(resolved) }
    }

    /// Puts the final texts, in the order of [`texts`], back into their fields.
    fn fill(&self, texts: Vec<String>) -> Result<ResolvedTask, ResolveError> {
        let task = &self.task;
        let mut texts = texts.into_iter();
        // There are exactly as many texts as fields; a missing one could only be a slip here, and would show in every test.
        let mut next = || texts.next().unwrap_or_default();
        let image = task.image.as_ref().map(|_| next());
        let command = match &task.command {
            Command::Shell(_) => vec!["sh".to_owned(), "-c".to_owned(), next()],
            Command::Words(words) => words.iter().map(|_| next()).collect(),
        };
        let env = task.env.keys().map(|name| (name.clone(), next())).collect();
        let stdin = task.stdin.as_ref().map(|_| next());
        let workdir = task.workdir.as_ref().map(|_| next());
        let mut inputs = Vec::with_capacity(task.inputs.len());
        for (i, input) in task.inputs.iter().enumerate() {
            let from =
                source(&next()).ok_or_else(|| ResolveError::Text { field: format!("inputs[{i}].from"), source: TextError::Source })?;
            let path = next();
            let sha256 = input.sha256.as_ref().map(|_| next().to_ascii_lowercase());
            inputs.push(ResolvedInput { from, path, sha256, executable: input.executable });
        }
        let outputs = task.outputs.iter().map(|_| next()).collect();
        let mut volumes = Vec::with_capacity(task.volumes.len());
        for volume in &task.volumes {
            let (name, path) = (next(), next());
            let keep = volume.keep.as_ref().map(|keep| KeepClone { name: next(), ..keep.clone() });
            volumes.push(VolumeMount { volume: name, path, keep, ..volume.clone() });
        }
        let network = task.network.as_ref().map(|network| NetworkSpec {
            allow: network.allow.iter().map(|rule| EgressRule { host: next(), ports: rule.ports.clone() }).collect(),
        });
        let secrets = task
            .secrets
            .iter()
            .map(|s| SecretMount { name: next(), env: s.env.as_ref().map(|_| next()), path: s.path.as_ref().map(|_| next()) })
            .collect();
        Ok(ResolvedTask {
            image,
            isolation: task.isolation,
            command,
            warm_up: task.warm_up.iter().map(plain).collect(),
            keep_processes: task.keep_processes,
            keep_failed_ms: task.keep_failed.map(|time| time.0),
            env,
            stdin,
            workdir,
            resources: task.resources.clone(),
            inputs,
            outputs,
            volumes,
            timeouts: task.timeouts.clone(),
            network,
            secrets,
        })
    }
}

/// A warm-up's command as it is run. Nothing is replaced in it, which is checked before.
fn plain(spec: &WarmUpSpec) -> WarmUpSpec {
    let plain = |text: &String| Template::plain(text).unwrap_or_else(|| text.clone());
    WarmUpSpec {
        command: spec.command.iter().map(plain).collect(),
        env: spec.env.iter().map(|(name, text)| (name.clone(), plain(text))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn task(json: Value) -> TaskSpec {
        serde_json::from_value(json).unwrap_or_else(|e| panic!("{e}"))
    }

    fn resolve(spec: Value, item: &Value) -> Result<ResolvedTask, ResolveError> {
        let template = TaskTemplate::compile(&task(spec)).unwrap_or_else(|bad| panic!("{bad:?}"));
        template.resolve(&Values { item, index: 3, job: "j9", attempt: 1 })
    }

    #[test]
    fn a_path_has_names_that_files_can_have() {
        let name = |bytes| "n".repeat(bytes);
        for kind in [Kind::FilePath, Kind::OutputPath] {
            assert_eq!(check_text(kind, &format!("{}/{}", name(255), name(255))), Ok(()));
            assert_eq!(check_text(kind, &format!("a/{}", name(256))), Err(TextError::NameTooLong));
        }
    }

    #[test]
    fn every_text_gets_its_own_value() {
        let spec = json!({
            "image": "i${index}", "command": ["c${item}", "d"], "warmUp": [{ "command": ["w", "$${A}"], "env": { "A": "$5" } }], "env": { "A": "a${item}", "B": "b" }, "stdin": "s${item}",
            "workdir": "w${item}", "outputs": ["o${item}"],
            "inputs": [
                { "from": "s3://bucket/k${item}", "path": "p${item}", "sha256": "${item}${item}", "executable": true },
                { "from": "upload:u${index}", "path": "q" }
            ],
            "volumes": [{ "volume": "v${item}", "path": "/m${item}", "access": "clone", "keep": { "name": "k${item}" } }],
            "network": { "allow": [{ "host": "h${item}" }] },
            "secrets": [{ "name": "n${item}", "path": "/s${item}" }]
        });
        let item = json!("AB".repeat(16));
        let it = "AB".repeat(16);
        let r = resolve(spec, &item).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(r.image.as_deref(), Some("i3"));
        assert_eq!(r.command, [format!("c{it}"), "d".into()]);
        assert_eq!((r.warm_up[0].command[1].as_str(), r.warm_up[0].env["A"].as_str()), ("${A}", "$5"));
        assert_eq!(r.env["A"], format!("a{it}"));
        assert_eq!(r.env["B"], "b");
        assert_eq!(r.stdin, Some(format!("s{it}")));
        assert_eq!(r.workdir, Some(format!("w{it}")));
        assert_eq!(r.outputs, [format!("o{it}")]);
        assert_eq!(r.inputs[0].from, InputSource::S3 { bucket: "bucket".into(), key: format!("k{it}") });
        assert_eq!((r.inputs[0].path.as_str(), r.inputs[0].executable), (format!("p{it}").as_str(), true));
        assert_eq!(r.inputs[0].sha256, Some("ab".repeat(32)));
        assert_eq!(r.inputs[1].from, InputSource::Upload("u3".into()));
        assert_eq!((r.volumes[0].volume.as_str(), r.volumes[0].path.as_str()), (&*format!("v{it}"), &*format!("/m{it}")));
        assert_eq!(r.volumes[0].keep.as_ref().map(|keep| keep.name.as_str()), Some(&*format!("k{it}")));
        assert_eq!(r.network.map(|n| n.allow[0].host.clone()), Some(format!("h{it}")));
        assert_eq!((r.secrets[0].name.as_str(), r.secrets[0].path.clone()), (&*format!("n{it}"), Some(format!("/s{it}"))));
    }

    #[test]
    fn an_item_can_not_lead_out_of_the_task() {
        let spec = json!({ "command": "true", "inputs": [{ "from": "${item.from}", "path": "in/${item.path}" }] });
        let ok = json!({ "from": "https://example.org/x", "path": "a" });
        assert!(resolve(spec.clone(), &ok).is_ok());
        for (from, path) in
            [("file:///etc/passwd", "a"), ("https://", "a"), ("s3://b/", "a"), ("s3://bucket/k", "../../x"), ("s3://bucket/k", "a/")]
        {
            assert!(resolve(spec.clone(), &json!({ "from": from, "path": path })).is_err(), "{from} {path}");
        }
        let error = resolve(json!({ "command": ["x", "${item}"] }), &json!("a\0b")).map_err(|e| e.to_string());
        assert_eq!(error, Err("task.command[1]: it has a NUL byte in it; allowed: text without NUL bytes".into()));
    }

    #[test]
    fn what_no_program_can_be_given_is_refused() {
        let long = json!("x".repeat(WORD_BYTES_MAX + 1));
        assert!(matches!(resolve(json!({ "command": ["${item}"] }), &long), Err(ResolveError::Text { .. })));
        let words: Vec<&str> = std::iter::repeat_n("${item}", 100).collect();
        assert!(matches!(resolve(json!({ "command": words }), &json!("x".repeat(12_000))), Err(ResolveError::ExecTooLarge { .. })));
    }
}
