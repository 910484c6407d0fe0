//! `volley plan`.

use std::path::Path;

use serde_json::{Value, json};
use volley_jobspecs::pages::{LoadedPage, Page, PageCutter};
use volley_jobspecs::resolve::{InputSource, ResolvedTask};
use volley_jobspecs::validate::ValidJob;

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::spec_file::{Loaded, SpecArgs};
use crate::table::{count, fields};

/// Bytes of an items file read at once.
const READ_BYTES: usize = 1 << 20;
/// Stands for the job's id, which is given at submit.
const JOB_STAND_IN: &str = "j0";
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
    /// Asks the cluster, which also knows what it can run and reads files in S3. Creates nothing.
    #[arg(long, conflicts_with_all = ["items", "uploads"])]
    server: bool,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let loaded = args.spec.load()?;
    if args.server {
        let client = ctx.client()?;
        let text = loaded.upload(ctx, &client).await?;
        let plan = client.plan(text).await?;
        ctx.out.show(&plan, || server_text(&loaded.job, &plan))?;
        return Ok(Exit::Success);
    }
    let plan = plan(&loaded, args.show)?;
    ctx.out.show(&plan.json(), || plan.text())?;
    Ok(Exit::Success)
}

/// A task as it would run.
struct Shown {
    index: u64,
    item: Value,
    task: ResolvedTask,
}

struct Plan {
    name: String,
    /// None: its items are in a file that is not here.
    tasks: Option<u64>,
    shown: Vec<Shown>,
}

fn plan(loaded: &Loaded, show: u64) -> Result<Plan, CliError> {
    let job = &loaded.job;
    let name = job.spec().name.clone();
    let items = match (&loaded.items, job.items().count()) {
        (Some(path), _) => {
            return from_file(job, path, show).map(|(tasks, shown)| Plan {
                name,
                tasks: Some(tasks),
                shown,
            });
        }
        (None, None) => {
            return Ok(Plan {
                name,
                tasks: None,
                shown: Vec::new(),
            });
        }
        (None, Some(count)) => count,
    };
    let mut shown = Vec::new();
    for index in ends(items, show) {
        // Every index below the count has an item.
        let item = job.items().item(index).unwrap_or(Value::Null);
        shown.push(resolve(job, item, index)?);
    }
    Ok(Plan {
        name,
        tasks: Some(items),
        shown,
    })
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
    let bad = |error| CliError::Items {
        path: path.to_owned(),
        error,
    };
    let mut read = std::fs::File::open(path).map_err(CliError::file(path, "read"))?;
    let (mut cutter, mut pages, mut bytes) =
        (PageCutter::new(file), Vec::new(), vec![0; READ_BYTES]);
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
            let surplus = last
                .len()
                .saturating_sub(usize::try_from(show).unwrap_or(usize::MAX));
            last.drain(..surplus);
        }
        Ok(())
    };
    loop {
        let length = read
            .read(&mut bytes)
            .map_err(CliError::file(path, "read"))?;
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
    let internal = |error: volley_jobspecs::pages::PageError| {
        CliError::Usage(format!("a page of items can't be read back: {error}"))
    };
    let (first, count) = (page.entry.first, page.entry.count);
    let loaded = LoadedPage::new(&page.entry, page.bytes).map_err(internal)?;
    (first..first + count)
        .map(|index| resolve(job, loaded.item(index).map_err(internal)?, u64::from(index)))
        .collect()
}

impl Plan {
    fn json(&self) -> Value {
        let shown: Vec<Value> = self.shown.iter().map(|shown| json!({ "index": shown.index, "item": shown.item, "task": task_json(&shown.task) })).collect();
        json!({ "name": self.name, "tasks": self.tasks, "shown": shown })
    }

    fn text(&self) -> String {
        let Some(tasks) = self.tasks else {
            return format!(
                "{}: valid; how many tasks is known once the cluster has read the items' file\nnext: `volley plan --server` asks it; `--items FILE` reads a local copy\n",
                self.name
            );
        };
        let mut text = format!("{}: {}\n", self.name, count(tasks, "task"));
        let mut next = 0;
        for shown in &self.shown {
            if shown.index > next {
                text.push_str(&format!(
                    "\n… {} in between\n",
                    count(shown.index - next, "task")
                ));
            }
            next = shown.index + 1;
            text.push_str(&format!("\ntask {}\n", shown.index));
            text.push_str(&task_text(&shown.item, &shown.task));
        }
        text
    }
}

fn source(from: &InputSource) -> String {
    match from {
        InputSource::S3 { bucket, key } => format!("s3://{bucket}/{key}"),
        InputSource::Http(url) => url.clone(),
        InputSource::Upload(id) => format!("upload:{id}"),
    }
}

fn task_json(task: &ResolvedTask) -> Value {
    let input = |input: &volley_jobspecs::resolve::ResolvedInput| json!({ "from": source(&input.from), "path": input.path, "sha256": input.sha256, "executable": input.executable });
    json!({
        "image": task.image,
        "isolation": task.isolation.as_str(),
        "command": task.command,
        "env": task.env,
        "stdin": task.stdin,
        "workdir": task.workdir,
        "inputs": task.inputs.iter().map(input).collect::<Vec<_>>(),
        "outputs": task.outputs,
        "resources": task.resources,
        "timeouts": task.timeouts,
    })
}

fn task_text(item: &Value, task: &ResolvedTask) -> String {
    let shown = |text: &str| clean::line(text, VALUE_CHARS);
    let words: Vec<String> = task.command.iter().map(|word| quoted(word)).collect();
    let mut pairs = vec![
        ("  item", shown(&item.to_string())),
        ("  command", shown(&words.join(" "))),
        ("  isolation", task.isolation.as_str().to_owned()),
        ("  image", shown(task.image.as_deref().unwrap_or_default())),
    ];
    pairs.extend(
        task.env
            .iter()
            .map(|(key, value)| ("  env", shown(&format!("{key}={value}")))),
    );
    pairs.push(("  stdin", shown(task.stdin.as_deref().unwrap_or_default())));
    pairs.extend(task.inputs.iter().map(|input| {
        (
            "  input",
            shown(&format!("{} <- {}", input.path, source(&input.from))),
        )
    }));
    pairs.extend(
        task.outputs
            .iter()
            .map(|output| ("  output", shown(output))),
    );
    fields(&pairs)
}

/// A word as a shell would want it.
fn quoted(word: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-./:=,@%+".contains(&b);
    if !word.is_empty() && word.bytes().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

fn server_text(job: &ValidJob, plan: &volley_sdk::PlanAnswer) -> String {
    let mut text = format!(
        "{}: {}\n",
        job.spec().name,
        count(u64::from(plan.tasks), "task")
    );
    for (title, tasks) in [("first", &plan.first), ("last", &plan.last)] {
        for task in tasks {
            text.push_str(&format!("\n{title}\n"));
            for (key, value) in task.as_object().into_iter().flatten() {
                text.push_str(&format!(
                    "  {key}  {}\n",
                    clean::line(&value.to_string(), VALUE_CHARS)
                ));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::parse::parse_and_validate;
    use volley_jobspecs::validate::Features;

    use super::*;

    fn job(items: Value) -> ValidJob {
        let task = json!({ "isolation": "process", "command": ["echo", "${item.a} b"], "env": { "I": "${index}" } });
        let spec = json!({ "version": "volley/v1", "name": "n", "items": items, "task": task });
        parse_and_validate(spec.to_string().as_bytes(), &Features::all())
            .unwrap_or_else(|e| panic!("{e}"))
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

        write(
            &(0..50)
                .map(|n| format!("{{\"a\":{n}}}\n"))
                .collect::<String>(),
        );
        let (tasks, shown) = from_file(&job, &path, 2).unwrap_or_else(|e| panic!("{e}"));
        let plan = Plan {
            name: "n".into(),
            tasks: Some(tasks),
            shown,
        };
        let text = plan.text();
        assert!(
            text.starts_with(
                "n: 50 tasks\n\ntask 0\n  item       {\"a\":0}\n  command    echo '0 b'\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("\n… 46 tasks in between\n\ntask 48\n")
                && text.contains("  env        I=49\n"),
            "{text}"
        );
        assert_eq!(plan.json()["shown"].as_array().map(Vec::len), Some(4));

        write("{\"a\":1}\n{\"b\":1}\n");
        let error = from_file(&job, &path, 2)
            .err()
            .map(|e| (e.exit().code(), e.to_string()));
        assert!(
            error.is_some_and(|(code, text)| code == 2 && text.starts_with("task 1 can't be made"))
        );
        write("{\"a\":1}\nnope\n");
        let error = from_file(&job, &path, 2).err().map(|e| e.to_string());
        assert!(
            error
                .as_ref()
                .is_some_and(|text| text.contains("items.jsonl, line 2: ")),
            "{error:?}"
        );
        std::fs::remove_dir_all(&dir).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_split_them() {
        assert_eq!(
            (quoted("a/b=c"), quoted("it's"), quoted("")),
            ("a/b=c".into(), "'it'\\''s'".into(), "''".into())
        );
    }
}
