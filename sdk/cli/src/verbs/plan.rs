//! `volley plan`.

use std::path::Path;

use serde_json::{Value, json};
use volley_jobspecs::pages::{LoadedPage, Page, PageCutter};
use volley_jobspecs::resolve::{InputSource, ResolvedInput, ResolvedTask};
use volley_jobspecs::validate::ValidJob;

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::spec_file::{Loaded, SpecArgs};
use crate::table::{count, fields};
use crate::verbs::submit::warn;

/// Bytes of an items file read at once.
const READ_BYTES: usize = 1 << 20;
/// Stands for the job's id, which is given at submit; a dry run of the cluster shows the same.
const JOB_STAND_IN: &str = "${job.id}";
/// Longest value shown, in characters.
const VALUE_CHARS: usize = 160;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    spec: SpecArgs,
    /// How many tasks of the beginning, and of the end, are shown.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=100))]
    show: u64,
    /// Asks the cluster, which knows what it can run. It also reads files in S3, and creates nothing, so local files can't be uploaded.
    #[arg(long)]
    server: bool,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    if args.server && !(args.spec.items.is_none() && args.spec.uploads.is_empty()) {
        let why = "--server creates nothing, so it uploads nothing: leave --server out to plan with --items and --upload here, or upload the \
                   file with `volley upload` and name what that prints in the spec";
        return Err(CliError::Usage(why.to_owned()));
    }
    let loaded = args.spec.load()?;
    let name = &loaded.job.spec().name;
    if args.server {
        let client = ctx.client()?;
        let text = loaded.upload(ctx, &client).await?;
        let answer = client.plan(text, u32::try_from(args.show).ok()).await?;
        warn(ctx, &answer.warnings);
        ctx.out.show(&answer, || tasks_text(name, u64::from(answer.tasks), answer.first.iter().chain(&answer.last)))?;
        return Ok(Exit::Success);
    }
    let plan = plan(&loaded, args.show)?;
    let (first, last): (Vec<_>, Vec<_>) = plan.shown.iter().partition(|shown| shown.index < args.show);
    let (first, last): (Vec<_>, Vec<_>) = (first.into_iter().map(Shown::json).collect(), last.into_iter().map(Shown::json).collect());
    ctx.out.show(&json!({ "tasks": plan.tasks, "first": first, "last": last }), || match plan.tasks {
        Some(tasks) => tasks_text(name, tasks, first.iter().chain(&last)),
        None => format!(
            "{name}: valid; how many tasks is known once the cluster has read the items' file\nnext: `volley plan --server` asks it; `--items FILE` reads a local copy\n"
        ),
    })?;
    Ok(Exit::Success)
}

/// A task as it would run.
struct Shown {
    index: u64,
    item: Value,
    task: ResolvedTask,
}

struct Plan {
    /// None: its items are in a file that is not here.
    tasks: Option<u64>,
    shown: Vec<Shown>,
}

fn plan(loaded: &Loaded, show: u64) -> Result<Plan, CliError> {
    let job = &loaded.job;
    let items = match (&loaded.items, job.items().count()) {
        (Some(path), _) => return from_file(job, path, show).map(|(tasks, shown)| Plan { tasks: Some(tasks), shown }),
        (None, None) => return Ok(Plan { tasks: None, shown: Vec::new() }),
        (None, Some(count)) => count,
    };
    let mut shown = Vec::new();
    for index in ends(items, show) {
        // Every index below the count has an item.
        let item = job.items().item(index).unwrap_or(Value::Null);
        shown.push(resolve(job, item, index)?);
    }
    Ok(Plan { tasks: Some(items), shown })
}

/// The first and the last indexes, each once.
fn ends(count: u64, show: u64) -> impl Iterator<Item = u64> {
    let first = show.min(count);
    (0..first).chain(count.saturating_sub(show).max(first)..count)
}

fn resolve(job: &ValidJob, item: Value, index: u64) -> Result<Shown, CliError> {
    let number = u32::try_from(index).unwrap_or(u32::MAX);
    match job.resolve(&item, number, JOB_STAND_IN, 1) {
        Ok(task) => Ok(Shown { index, item, task }),
        Err(error) => Err(CliError::Resolve { index, error }),
    }
}

/// Reads a local items file as the cluster would; every task is made once, so that a bad line is found here.
fn from_file(job: &ValidJob, path: &Path, show: u64) -> Result<(u64, Vec<Shown>), CliError> {
    use std::io::Read as _;
    let Some(file) = job.items().file() else {
        return Ok((0, Vec::new()));
    };
    let bad = |error| CliError::Items { path: path.to_owned(), error };
    let mut read = std::fs::File::open(path).map_err(CliError::file(path, "read"))?;
    let (mut cutter, mut pages, mut bytes) = (PageCutter::new(file), Vec::new(), vec![0; READ_BYTES]);
    let (mut first, mut last) = (Vec::new(), Vec::new());
    let mut take = |pages: &mut Vec<Page>| -> Result<(), CliError> {
        for page in pages.drain(..) {
            for shown in tasks_of(job, page)? {
                if shown.index < show {
                    first.push(shown);
                } else {
                    last.push(shown);
                }
            }
            let surplus = last.len().saturating_sub(usize::try_from(show).unwrap_or(usize::MAX));
            last.drain(..surplus);
        }
        Ok(())
    };
    loop {
        let length = read.read(&mut bytes).map_err(CliError::file(path, "read"))?;
        if length == 0 {
            break;
        }
        cutter.feed(&bytes[..length], &mut pages).map_err(bad)?;
        take(&mut pages)?;
    }
    let index = cutter.finish(&mut pages).map_err(bad)?;
    take(&mut pages)?;
    first.extend(last);
    Ok((u64::from(index.count), first))
}

fn tasks_of(job: &ValidJob, page: Page) -> Result<Vec<Shown>, CliError> {
    let internal = |error: volley_jobspecs::pages::PageError| CliError::Usage(format!("a page of items can't be read back: {error}"));
    let (first, count) = (page.entry.first, page.entry.count);
    let loaded = LoadedPage::new(&page.entry, page.bytes).map_err(internal)?;
    (first..first + count).map(|index| resolve(job, loaded.item(index).map_err(internal)?, u64::from(index))).collect()
}

impl Shown {
    /// In the shape of the cluster's own plan.
    fn json(&self) -> Value {
        let task = &self.task;
        let source = |from: &InputSource| match from {
            InputSource::S3 { bucket, key } => format!("s3://{bucket}/{key}"),
            InputSource::Http(url) => url.clone(),
            InputSource::Upload(id) => format!("upload:{id}"),
        };
        let input = |input: &ResolvedInput| json!({ "from": source(&input.from), "path": input.path, "sha256": input.sha256, "executable": input.executable });
        json!({
            "index": self.index, "item": self.item, "image": task.image, "isolation": task.isolation, "command": task.command,
            "env": task.env, "stdin": task.stdin, "workdir": task.workdir, "resources": task.resources,
            "inputs": task.inputs.iter().map(input).collect::<Vec<_>>(), "outputs": task.outputs, "volumes": task.volumes,
            "timeouts": task.timeouts, "network": task.network, "secrets": task.secrets,
        })
    }
}

/// Tasks in the order of their indexes, with what is left out in between.
fn tasks_text<'a>(name: &str, tasks: u64, shown: impl Iterator<Item = &'a Value>) -> String {
    let mut text = format!("{name}: {}\n", count(tasks, "task"));
    let mut next = 0;
    for task in shown {
        let index = task["index"].as_u64().unwrap_or(next);
        if index > next {
            text.push_str(&format!("\n… {} in between\n", count(index - next, "task")));
        }
        next = index + 1;
        text.push_str(&format!("\ntask {index}\n{}", task_text(task)));
    }
    text
}

fn task_text(task: &Value) -> String {
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
    let shown = |text: &str| clean::cell(text, VALUE_CHARS);
    let field = |name: &str| task.get(name).filter(|value| !value.is_null()).map(|value| shown(&plain(value))).unwrap_or_default();
    let list = |name: &str| task[name].as_array().into_iter().flatten();
    let words: Vec<String> = list("command").map(|word| quoted(&plain(word))).collect();
    let mut pairs = vec![
        ("  item", task.get("item").map(|item| shown(&item.to_string())).unwrap_or_default()),
        ("  command", shown(&words.join(" "))),
        ("  isolation", field("isolation")),
        ("  image", field("image")),
    ];
    let env = task["env"].as_object().into_iter().flatten();
    pairs.extend(env.map(|(key, value)| ("  env", shown(&format!("{key}={}", plain(value))))));
    pairs.push(("  stdin", field("stdin")));
    pairs.push(("  workdir", field("workdir")));
    pairs.extend(list("inputs").map(|input| ("  input", shown(&format!("{} <- {}", plain(&input["path"]), plain(&input["from"]))))));
    pairs.extend(list("outputs").map(|output| ("  output", shown(&plain(output)))));
    fields(&pairs)
}

/// A word as a shell would want it.
fn quoted(word: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-./:=,@%+".contains(&b);
    if !word.is_empty() && word.bytes().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::parse::parse_and_validate;
    use volley_jobspecs::validate::Features;

    use super::*;

    fn job(items: Value) -> ValidJob {
        let task = json!({ "isolation": "process", "command": ["echo", "${item.a} b"], "env": { "I": "${index}" } });
        let spec = json!({ "version": "volley/v1", "name": "n", "items": items, "task": task });
        parse_and_validate(spec.to_string().as_bytes(), &Features::all()).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn the_ends_are_shown_and_none_twice() {
        let of = |count, show| ends(count, show).collect::<Vec<_>>();
        assert_eq!(of(10, 2), [0, 1, 8, 9]);
        assert_eq!(of(3, 2), [0, 1, 2]);
        assert_eq!(of(1, 2), [0]);
    }

    #[test]
    fn a_local_file_is_read_as_the_cluster_would_and_every_line_is_tried() {
        let dir = std::env::temp_dir().join(format!("volley-plan-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("{e}"));
        let path = dir.join("items.jsonl");
        let write = |text: &str| std::fs::write(&path, text).unwrap_or_else(|e| panic!("{e}"));
        let job = job(json!({ "jsonl": { "upload": "local" } }));

        write(&(0..50).map(|n| format!("{{\"a\":{n}}}\n")).collect::<String>());
        let (tasks, shown) = from_file(&job, &path, 2).unwrap_or_else(|e| panic!("{e}"));
        let shown: Vec<Value> = shown.iter().map(Shown::json).collect();
        let text = tasks_text("n", tasks, shown.iter());
        assert!(text.starts_with("n: 50 tasks\n\ntask 0\n  item       {\"a\":0}\n  command    echo '0 b'\n"), "{text}");
        assert!(text.contains("\n… 46 tasks in between\n\ntask 48\n") && text.contains("  env        I=49\n"), "{text}");
        assert_eq!(shown.len(), 4);

        write("{\"a\":1}\n{\"b\":1}\n");
        let error = from_file(&job, &path, 2).err().map(|e| (e.exit().code(), e.to_string()));
        assert!(error.is_some_and(|(code, text)| code == 2 && text.starts_with("task 1 can't be made")));
        write("{\"a\":1}\nnope\n");
        let error = from_file(&job, &path, 2).err().map(|e| e.to_string());
        assert!(error.as_ref().is_some_and(|text| text.contains("items.jsonl, line 2: ")), "{error:?}");
        std::fs::remove_dir_all(&dir).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_split_them() {
        assert_eq!((quoted("a/b=c"), quoted("it's"), quoted("")), ("a/b=c".into(), "'it'\\''s'".into(), "''".into()));
    }
}
