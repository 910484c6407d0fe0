//! `volley template build`.
//!
//! Owns what is asked of the cluster: a job of one task that does nothing, on a machine like those of the spec's. So a build is seen, explained
//! and cancelled as any other work is, and is done by a worker that could run the job. Does not own what a template is.

use serde_json::{Map, Value, json};
use volley_jobspecs::api::{ResultRow, TaskState};
use volley_jobspecs::spec::{Isolation, TaskSpec};
use volley_sdk::{IdempotencyKey, ResultsQuery, SubmitOptions};

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::follow::{Followed, detached, follow};
use crate::spec_file::SpecArgs;
use crate::verbs::submit::warn;

/// What the task runs. An image need not have it.
const NOTHING: &str = "true";
/// What a shell says of a command that is not there or can't be executed. It was looked for in the machine.
const NO_COMMAND: [i32; 2] = [126, 127];
/// Put before the job's name.
const NAME: &str = "template-of-";
/// Longest name of a job, in bytes.
const NAME_BYTES_MAX: usize = 64;
/// Longest message shown, in characters.
const MESSAGE_CHARS: usize = 500;

/// Arguments.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    spec: SpecArgs,
}

/// Carries it out.
pub async fn build(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let loaded = args.spec.load()?;
    let spec = loaded.job.spec();
    let job = job(&spec.name, spec.task.as_ref())?;
    let client = ctx.patient_client()?;
    let options = SubmitOptions { key: Some(IdempotencyKey::random()?), trace: None };
    let submitted = client.submit_with(job.to_string().into_bytes(), &options).await?;
    ctx.out.note(&format!("{}: one machine of {} is made, which has its template built where that is not there", submitted.job, spec.name));
    warn(ctx, &submitted.warnings);
    let ended = match follow(ctx.out, &client, submitted.job, None).await? {
        Followed::Ended(ended) => *ended,
        Followed::Detached => {
            ctx.out.note(&detached(submitted.job));
            return Ok(Exit::Interrupted);
        }
    };
    let row = match client.results(submitted.job, ResultsQuery::now()).next().await {
        Some(row) => row?,
        None => return Ok(Exit::of_job(&ended)),
    };
    let ready = is_ready(&row);
    let answer = json!({ "job": submitted.job.to_string(), "ready": ready, "class": row.class, "message": row.message });
    ctx.out.show(&answer, || match (ready, &row.message) {
        (true, _) => format!("the template of {} is ready\n", spec.name),
        (false, why) => format!("no template: {}\n", clean::cell(why.as_deref().unwrap_or("the job was cancelled"), MESSAGE_CHARS)),
    })?;
    Ok(if ready { Exit::Success } else { Exit::of_job(&ended) })
}

/// Was a machine there that its command could be looked for in?
fn is_ready(row: &ResultRow) -> bool {
    row.state == TaskState::Succeeded || row.code.is_some_and(|code| NO_COMMAND.contains(&code))
}

/// The job.
fn job(name: &str, task: Option<&TaskSpec>) -> Result<Value, CliError> {
    let wrong = |why: &str| Err(CliError::Usage(why.to_owned()));
    let Some(task) = task else {
        return wrong("the spec has stages and no task of its own; make a spec with one stage's task");
    };
    let Some(image) = task.image.as_deref().filter(|_| task.isolation == Isolation::Microvm) else {
        return wrong("only tasks with isolation \"microvm\" run from templates; $.task.isolation says otherwise");
    };
    if image.contains("${") {
        return wrong("$.task.image differs from task to task, and a template is of one image; write one of them");
    }
    // What shapes a machine, and nothing else.
    let whole = serde_json::to_value(task).map_err(|e| CliError::Usage(e.to_string()))?;
    let mut small = Map::new();
    for field in ["isolation", "image", "resources", "warmUp", "keepProcesses"] {
        small.extend(whole.get(field).map(|value| (field.to_owned(), value.clone())));
    }
    small.insert("command".to_owned(), json!([NOTHING]));
    let mut short = format!("{NAME}{name}");
    // Names have no characters of several bytes.
    short.truncate(NAME_BYTES_MAX);
    Ok(json!({ "version": "volley/v1", "name": short, "task": small }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::parse::parse_and_validate;
    use volley_jobspecs::validate::Features;

    fn made(task: Value) -> Result<Value, String> {
        let spec = json!({ "version": "volley/v1", "name": "n".repeat(64), "items": { "count": 7 }, "task": task });
        let spec = parse_and_validate(spec.to_string().as_bytes(), &Features::all()).unwrap();
        job(&spec.spec().name, spec.spec().task.as_ref()).map_err(|e| e.to_string())
    }

    #[test]
    fn the_job_has_what_shapes_the_machine_and_is_one_task() {
        let task = json!({
            "isolation": "microvm", "image": "python", "command": "exit ${index}", "env": { "A": "b" }, "warmUp": [{ "command": ["python3"] }],
            "keepProcesses": true, "resources": { "memory": "256MiB", "cpus": 2 }, "retry": { "attempts": 9 }
        });
        let job = made(task).unwrap();
        let valid = parse_and_validate(job.to_string().as_bytes(), &Features::all()).unwrap();
        assert_eq!(valid.items().count(), Some(1));
        let task = &job["task"];
        assert_eq!((&task["command"], &task["keepProcesses"], &task["image"]), (&json!(["true"]), &json!(true), &json!("python")));
        assert_eq!((task.get("env"), task["resources"]["memory"].clone()), (None, json!("256MiB")));
    }

    #[test]
    fn what_has_no_template_is_told() {
        assert!(made(json!({ "isolation": "process", "command": "true" })).unwrap_err().contains("$.task.isolation"));
        let several = json!({ "isolation": "microvm", "image": "a:${index}", "command": "true" });
        assert!(made(several).unwrap_err().contains("$.task.image"));
    }
}
