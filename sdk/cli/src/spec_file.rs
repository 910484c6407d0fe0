//! The spec a verb is given: read, completed with local files, validated.
//!
//! Owns reading it, `--items` and `--upload`, and their place in the spec. Does not own what a spec may say (`volley_jobspecs`).
//!
//! A local file is uploaded only after the spec with a stand-in for it was found to be valid.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::{Map, Value, json};
use volley_jobspecs::parse::{SPEC_BYTES_MAX, parse, parse_and_validate, too_large};
use volley_jobspecs::validate::{Features, ValidJob};
use volley_sdk::{Client, Error};

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::progress::Transfer;
use crate::units;

/// Where the spec is, and which local files belong to it.
#[derive(Debug, Clone, Args)]
pub struct SpecArgs {
    /// The job spec, a JSON file; `-` reads standard input.
    #[arg(value_name = "SPEC")]
    pub spec: PathBuf,
    /// A local file to fan out over: .jsonl or .ndjson, .csv, else lines. The spec's own `items.jsonl`, `csv` or `lines` say how it is
    /// read when they are there. `run` and `submit` upload it, `plan` only reads it.
    #[arg(long, value_name = "FILE")]
    pub items: Option<PathBuf>,
    /// A local file that the spec means by NAME. It says `upload:NAME` for an input, `"upload": "NAME"` for items. `run` and `submit`
    /// upload it.
    #[arg(long = "upload", value_name = "NAME=FILE", value_parser = units::named_file)]
    pub uploads: Vec<(String, String)>,
}

/// A spec that is valid, with its local files.
#[derive(Debug)]
pub struct Loaded {
    text: Vec<u8>,
    /// The job, with stand-ins for uploads.
    pub job: ValidJob,
    /// The local file that the job fans out over.
    pub items: Option<PathBuf>,
    uploads: BTreeMap<String, PathBuf>,
    /// From `--items`.
    items_flag: Option<PathBuf>,
}

/// `--keep-failed`, for verbs that run the spec.
#[derive(Debug, Clone, Args)]
#[group(skip)]
pub struct KeepArgs {
    /// Keeps machines of failed tries for `volley exec`. For 30 minutes, or as long as is said here, at most 24h. It sets `task.keepFailed` of
    /// the spec.
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "30m")]
    pub keep_failed: Option<String>,
}

/// Stands for the id of an upload that isn't made yet.
const STAND_IN: &str = "local";

impl SpecArgs {
    /// Reads, completes and validates the spec. Nothing is sent.
    ///
    /// # Errors
    /// Every problem of the spec, as the cluster would name them; a file that can't be read.
    pub fn load(&self) -> Result<Loaded, CliError> {
        self.load_keeping(None)
    }

    /// The same, and the machines of attempts that fail are kept for so long.
    ///
    /// # Errors
    /// As [`SpecArgs::load`].
    pub fn load_keeping(&self, keep_failed: Option<&str>) -> Result<Loaded, CliError> {
        let text = read(&self.spec)?;
        let text = match keep_failed {
            Some(time) => set_keep_failed(text, time)?,
            None => text,
        };
        let mut uploads = BTreeMap::new();
        for (name, path) in &self.uploads {
            let path = PathBuf::from(path);
            std::fs::metadata(&path).map_err(CliError::file(&path, "read"))?;
            if uploads.insert(name.clone(), path).is_some() {
                return Err(CliError::Usage(format!("--upload {name} is given twice")));
            }
        }
        load(text, self.items.clone(), uploads)
    }
}

fn load(text: Vec<u8>, items_flag: Option<PathBuf>, uploads: BTreeMap<String, PathBuf>) -> Result<Loaded, CliError> {
    let bad = |problems| CliError::Sdk(Error::BadSpec(problems));
    if items_flag.is_none() && uploads.is_empty() {
        let job = parse_and_validate(&text, &Features::all()).map_err(bad)?;
        return Ok(Loaded { text, job, items: None, uploads, items_flag });
    }
    // Before anything is put in: doubled fields are gone from a Value.
    parse(&text).map_err(bad)?;
    if let Some(path) = &items_flag {
        std::fs::metadata(path).map_err(CliError::file(path, "read"))?;
    }
    let ids: BTreeMap<&str, String> = uploads.keys().map(|name| (name.as_str(), STAND_IN.to_owned())).collect();
    let completed = complete(&text, items_flag.as_deref().map(|path| (path, STAND_IN)), &ids)?;
    let job = parse_and_validate(completed.text.as_bytes(), &Features::all()).map_err(bad)?;
    let items = items_flag.clone().or_else(|| completed.items_upload.and_then(|name| uploads.get(&name).cloned()));
    Ok(Loaded { text, job, items, uploads, items_flag })
}

impl Loaded {
    /// Uploads the local files; gives the spec's text with their ids.
    ///
    /// # Errors
    /// What the cluster refused, a file that can't be read.
    pub async fn upload(&self, ctx: &Ctx, client: &Client) -> Result<Vec<u8>, CliError> {
        let given: BTreeMap<&str, String> = self.uploads.keys().map(|name| (name.as_str(), STAND_IN.to_owned())).collect();
        if let Some(name) = forgotten(&self.text, self.items_flag.is_some(), &given) {
            return Err(CliError::Usage(format!("the spec names the upload {name:?}, which is no id; give it with --upload {name}=FILE")));
        }
        if self.items_flag.is_none() && self.uploads.is_empty() {
            return Ok(self.text.clone());
        }
        let mut ids = BTreeMap::new();
        for (name, path) in &self.uploads {
            ids.insert(name.as_str(), upload(ctx, client, path).await?);
        }
        let items = match &self.items_flag {
            Some(path) => Some((path.as_path(), upload(ctx, client, path).await?)),
            None => None,
        };
        let items = items.as_ref().map(|(path, id)| (*path, id.as_str()));
        Ok(complete(&self.text, items, &ids)?.text.into_bytes())
    }
}

/// Has the machines of attempts that fail kept, in a job or in its stages.
fn set_keep_failed(text: Vec<u8>, time: &str) -> Result<Vec<u8>, CliError> {
    // Before anything is put in: doubled fields are gone from a Value.
    parse(&text).map_err(|problems| CliError::Sdk(Error::BadSpec(problems)))?;
    let mut spec: Value = serde_json::from_slice(&text).map_err(|error| CliError::Usage(format!("the spec is not JSON: {error}")))?;
    let set = |part: &mut Value| {
        if let Some(Value::Object(task)) = part.get_mut("task") {
            task.insert("keepFailed".into(), json!(time));
        }
    };
    set(&mut spec);
    spec.get_mut("stages").and_then(Value::as_array_mut).into_iter().flatten().for_each(set);
    Ok(spec.to_string().into_bytes())
}

/// Uploads one file, with a progress line; gives its id.
pub(crate) async fn upload(ctx: &Ctx, client: &Client, path: &Path) -> Result<String, CliError> {
    let meta = std::fs::metadata(path).map_err(CliError::file(path, "upload"))?;
    if meta.is_dir() {
        let words = "it is a directory; pack it into an archive";
        return Err(CliError::file(path, "upload")(std::io::Error::new(std::io::ErrorKind::IsADirectory, words)));
    }
    let bytes = meta.len();
    let transfer = Arc::new(Transfer::start(ctx.out, &format!("uploading {}", path.display()), bytes));
    let seen = transfer.clone();
    let answer = client.upload(path, Arc::new(move |bytes| seen.add(bytes))).await;
    transfer.end();
    Ok(answer?.id)
}

fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    let mut text = Vec::new();
    // One more than allowed, so that the spec's own check sees that it is too large.
    let limit = SPEC_BYTES_MAX as u64 + 1;
    let failed = |error| CliError::file(path, "read the spec")(error);
    if path == Path::new("-") {
        std::io::stdin().lock().take(limit).read_to_end(&mut text).map_err(failed)?;
        return Ok(text);
    }
    let file = std::fs::File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes >= limit {
        return Err(CliError::Sdk(Error::BadSpec(too_large(Some(bytes)))));
    }
    file.take(limit).read_to_end(&mut text).map_err(failed)?;
    Ok(text)
}

struct Completed {
    text: String,
    /// The name of the upload that the items come from.
    items_upload: Option<String>,
}

/// Puts the ids of uploads in their places.
fn complete(text: &[u8], items: Option<(&Path, &str)>, ids: &BTreeMap<&str, String>) -> Result<Completed, CliError> {
    let mut spec: Value = serde_json::from_slice(text).map_err(|error| CliError::Usage(format!("the spec is not JSON: {error}")))?;
    let mut used = Vec::new();
    let mut items_upload = None;
    if let Value::Object(root) = &mut spec {
        if let Some((path, id)) = items {
            set_items(root, path, id)?;
        }
        name_uploads(root, ids, &mut used, &mut items_upload);
        if let Some(Value::Array(stages)) = root.get_mut("stages") {
            for stage in stages.iter_mut().filter_map(Value::as_object_mut) {
                name_uploads(stage, ids, &mut used, &mut None);
            }
        }
    }
    match ids.keys().find(|name| !used.iter().any(|used| used == *name)) {
        Some(unused) => {
            let places = format!("\"from\": \"upload:{unused}\" of an input, or \"upload\": \"{unused}\" of the items");
            Err(CliError::Usage(format!("--upload {unused}=… has no place: the spec nowhere says {places}")))
        }
        None => Ok(Completed { text: spec.to_string(), items_upload }),
    }
}

/// A name of an upload in the spec that stands for nothing: it is not among those that are `given`, and not an id as `volley upload` prints
/// it.
fn forgotten(text: &[u8], items_given: bool, given: &BTreeMap<&str, String>) -> Option<String> {
    let spec: Value = serde_json::from_slice(text).ok()?;
    let parts = std::iter::once(&spec).chain(spec.get("stages").and_then(Value::as_array).into_iter().flatten());
    let mut names = Vec::new();
    for part in parts {
        let inputs = part.pointer("/task/inputs").and_then(Value::as_array).into_iter().flatten();
        names.extend(inputs.filter_map(|input| input.get("from")?.as_str()?.strip_prefix("upload:")));
        let sources = FILE_KINDS.into_iter().filter_map(|kind| part.get("items")?.get(kind)?.get("upload")?.as_str());
        names.extend(sources.filter(|_| !items_given));
    }
    // With a value of the item in it, only each task knows.
    names.into_iter().find(|name| !given.contains_key(name) && !is_id(name) && !name.contains("${")).map(str::to_owned)
}

/// Is it an id that the API gave an upload: `u` and 24 hex digits?
fn is_id(name: &str) -> bool {
    name.strip_prefix('u').is_some_and(|hex| hex.len() == 24 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

const FILE_KINDS: [&str; 3] = ["jsonl", "csv", "lines"];

/// Lets the job fan out over an upload.
fn set_items(root: &mut Map<String, Value>, path: &Path, id: &str) -> Result<(), CliError> {
    let items = root.entry("items").or_insert(Value::Null);
    // `null` and leaving a field out mean the same.
    if items.is_null() {
        *items = json!({});
    }
    let Value::Object(items) = items else {
        return Ok(());
    };
    let other = items.iter().find(|(key, value)| *key != "chunk" && !value.is_null() && !FILE_KINDS.contains(&key.as_str()));
    if let Some((other, _)) = other {
        return Err(CliError::Usage(format!("--items has no place: the spec fans out over `items.{other}` already; take that out")));
    }
    let said = FILE_KINDS.into_iter().find(|kind| items.get(*kind).is_some_and(|value| !value.is_null()));
    let kind = said.unwrap_or_else(|| kind_of(path));
    let source = items.entry(kind).or_insert(Value::Null);
    if source.is_null() {
        *source = json!({});
    }
    if let Value::Object(source) = source {
        source.remove("s3");
        source.insert("upload".into(), json!(id));
    }
    Ok(())
}

fn kind_of(path: &Path) -> &'static str {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_ascii_lowercase();
    match extension.as_str() {
        "jsonl" | "ndjson" => "jsonl",
        "csv" => "csv",
        _ => "lines",
    }
}

/// Replaces names of uploads by their ids, in a job or in a stage.
fn name_uploads(part: &mut Map<String, Value>, ids: &BTreeMap<&str, String>, used: &mut Vec<String>, items_upload: &mut Option<String>) {
    if let Some(Value::Object(items)) = part.get_mut("items") {
        let sources = items.iter_mut().filter(|(kind, _)| FILE_KINDS.contains(&kind.as_str()));
        for source in sources.filter_map(|(_, source)| source.get_mut("upload")) {
            if let Some(name) = source.as_str().map(ToOwned::to_owned)
                && let Some(id) = ids.get(name.as_str())
            {
                *source = json!(id);
                used.push(name.clone());
                *items_upload = Some(name);
            }
        }
    }
    let inputs = part.get_mut("task").and_then(|task| task.get_mut("inputs")).and_then(Value::as_array_mut);
    for from in inputs.into_iter().flatten().filter_map(|input| input.get_mut("from")) {
        if let Some(name) = from.as_str().and_then(|from| from.strip_prefix("upload:")).map(ToOwned::to_owned)
            && let Some(id) = ids.get(name.as_str())
        {
            *from = json!(format!("upload:{id}"));
            used.push(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(items: Value) -> Vec<u8> {
        let task = json!({ "isolation": "process", "command": "x ${item.a}", "inputs": [{ "from": "upload:tool", "path": "t" }] });
        json!({ "version": "volley/v1", "name": "n", "items": items, "task": task }).to_string().into_bytes()
    }

    fn completed(text: &[u8], items: Option<&str>, ids: &[(&str, &str)]) -> Result<Value, String> {
        let ids = ids.iter().map(|(name, id)| (*name, (*id).to_owned())).collect();
        let completed = complete(text, items.map(|path| (Path::new(path), "u9")), &ids).map_err(|error| error.to_string())?;
        serde_json::from_str(&completed.text).map_err(|error| error.to_string())
    }

    #[test]
    fn names_of_uploads_become_their_ids() {
        let got = completed(&spec(json!({ "jsonl": { "upload": "data" } })), None, &[("data", "u1"), ("tool", "u2")]);
        let got = got.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((&got["items"], &got["task"]["inputs"][0]["from"]), (&json!({ "jsonl": { "upload": "u1" } }), &json!("upload:u2")));
    }

    #[test]
    fn an_upload_without_a_place_is_an_error() {
        let got = completed(&spec(json!({ "count": 1 })), None, &[("tol", "u1")]);
        assert!(got.is_err_and(|text| text.starts_with("--upload tol=… has no place")));
    }

    #[test]
    fn an_upload_that_was_forgotten_is_named() {
        let given = BTreeMap::from([("tool", "u1".to_owned())]);
        let file = |upload: &str| spec(json!({ "csv": { "upload": upload } }));
        assert_eq!(forgotten(&file("data"), false, &given), Some("data".to_owned()));
        assert_eq!(forgotten(&file("data"), true, &given), None, "--items takes its place");
        assert_eq!(forgotten(&file("u0123456789abcdef01234567"), false, &given), None);
        assert_eq!(forgotten(&spec(json!({ "count": 1 })), false, &BTreeMap::new()), Some("tool".to_owned()));
        assert_eq!(forgotten(b"{\"task\":{\"inputs\":[{\"from\":\"upload:${item}\"}]}}", false, &BTreeMap::new()), None);
    }

    #[test]
    fn machines_are_kept_as_the_flag_says() {
        let task = json!({ "image": "i", "command": "x", "keepFailed": "1h" });
        let text = json!({ "version": "volley/v1", "name": "n", "items": { "count": 1 }, "task": task }).to_string().into_bytes();
        let set = set_keep_failed(text, "30m").map_err(|error| error.to_string());
        let got: Result<Value, _> = serde_json::from_slice(&set.unwrap_or_else(|e| panic!("{e}")));
        assert!(got.is_ok_and(|spec| spec["task"]["keepFailed"] == "30m"));
        // What isn't one is said as a problem of the spec, and so is a tier that has none.
        let loaded = set_keep_failed(spec(json!({ "count": 1 })), "soon").and_then(|text| load(text, None, BTreeMap::new()));
        assert!(loaded.is_err_and(|error| error.exit().code() == 2 && error.to_string().contains("$.task.keepFailed")));
    }

    #[test]
    fn an_items_file_is_read_as_the_spec_says_or_as_its_name_does() {
        let of = |items, path| completed(&spec(items), Some(path), &[]).map(|got| got["items"].clone());
        assert_eq!(of(json!({}), "a.NDJSON"), Ok(json!({ "jsonl": { "upload": "u9" } })));
        assert_eq!(of(json!({ "chunk": 3 }), "a.csv"), Ok(json!({ "chunk": 3, "csv": { "upload": "u9" } })));
        assert_eq!(of(json!({}), "list"), Ok(json!({ "lines": { "upload": "u9" } })));
        let said = json!({ "csv": { "s3": "s3://b/k", "delimiter": ";" } });
        assert_eq!(of(said, "data.txt"), Ok(json!({ "csv": { "delimiter": ";", "upload": "u9" } })));
        assert!(of(json!({ "count": 3 }), "a.csv").is_err_and(|text| text.contains("`items.count`")));
    }

    #[test]
    fn a_spec_is_validated_with_its_files_before_anything_is_uploaded() {
        let dir = std::env::temp_dir();
        // A directory is there, which is all that loading asks of the file.
        let loaded = load(
            spec(json!({ "jsonl": { "upload": "data" } })),
            None,
            [("data".to_owned(), dir.clone()), ("tool".to_owned(), dir.clone())].into(),
        );
        assert_eq!(loaded.map(|loaded| loaded.items).ok(), Some(Some(dir.clone())));
        let missing = load(spec(json!({})), Some(PathBuf::from("/nowhere.csv")), BTreeMap::new());
        assert!(missing.is_err_and(|error| error.exit().code() == 74));
        let bad = load(b"{ \"version\": \"volley/v1\", \"nme\": 1 }".to_vec(), Some(dir), BTreeMap::new());
        assert!(bad.is_err_and(|error| error.exit().code() == 2 && error.to_string().contains("$.nme")));
    }
}
