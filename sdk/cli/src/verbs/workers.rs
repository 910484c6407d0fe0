//! `volley workers`.

use clap::Subcommand;
use serde_json::json;
use volley_jobspecs::api::{KeptView, WorkerView};

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::table::table;
use crate::units;

/// Longest reason shown, in characters: all of it, but for a worker that says too much.
const LACK_CHARS: usize = 1_000;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Gives workers nothing more to do; what they run goes on (operators).
    Drain {
        /// The workers.
        #[arg(required = true)]
        workers: Vec<String>,
    },
    /// Gives drained or quarantined workers tasks again (operators).
    Resume {
        /// The workers.
        #[arg(required = true)]
        workers: Vec<String>,
    },
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    let (done, workers) = match args.verb {
        None => {
            let workers = client.workers().await?;
            ctx.out.show(&workers, || text(&workers))?;
            return Ok(Exit::Success);
        }
        Some(Verb::Drain { workers }) => {
            for worker in &workers {
                client.drain(worker).await?;
            }
            ("drained", workers)
        }
        Some(Verb::Resume { workers }) => {
            for worker in &workers {
                client.resume_worker(worker).await?;
            }
            ("resumed", workers)
        }
    };
    // As they are then: one that was told to end by its own host drains whatever is asked of it.
    let mut now = client.workers().await?;
    now.retain(|worker| workers.contains(&worker.worker));
    ctx.out.show(&json!({ done: workers }), || text(&now))?;
    for worker in now.iter().filter(|worker| done == "resumed" && worker.state == "draining") {
        ctx.out.note(&format!("{}: it was told to end on its host, and takes nothing more until it is started again there", worker.worker));
    }
    Ok(Exit::Success)
}

/// How many of its slots are taken, and what waits for one.
fn slots(worker: &WorkerView) -> String {
    let waiting = worker.bundles.saturating_sub(worker.slots);
    let taken = format!("{}/{}", worker.bundles - waiting, worker.slots);
    if waiting == 0 { taken } else { format!("{taken} +{waiting}") }
}

fn text(workers: &[WorkerView]) -> String {
    let row = |worker: &WorkerView| {
        let labels: Vec<String> = worker.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        vec![
            worker.worker.clone(),
            worker.state.clone(),
            slots(worker),
            worker.tasks.to_string(),
            units::cores(worker.cpu_milli.into()),
            units::bytes(worker.memory_bytes),
            units::bytes(worker.disk_bytes),
            worker.isolation.join(","),
            worker.silent_ms.map(units::time).unwrap_or_default(),
            worker.host.clone(),
            worker.build.clone(),
            clean::cell(&labels.join(","), 80),
        ]
    };
    let header = ["WORKER", "STATE", "SLOTS", "TASKS", "CPUS", "MEMORY", "DISK", "ISOLATION", "HEARD", "HOST", "BUILD", "LABELS"];
    let lacking = workers.iter().flat_map(|worker| {
        let line = |(tier, why): (&String, &String)| format!("{} can't offer {tier}: {}\n", worker.worker, clean::cell(why, LACK_CHARS));
        worker.lacks.iter().map(line).collect::<Vec<_>>()
    });
    let keeping = workers.iter().flat_map(|worker| worker.kept.iter().map(|machine| kept(&worker.worker, machine)));
    let below: String = lacking.chain(keeping).collect();
    let table = table(&header, workers.iter().map(row).collect());
    if below.is_empty() { table } else { format!("{table}\n{below}") }
}

/// A machine that is kept, with what to type.
fn kept(worker: &str, machine: &KeptView) -> String {
    let KeptView { job, task, attempt, until, memory_bytes } = machine;
    let memory = units::bytes(*memory_bytes);
    format!(
        "{worker} keeps the machine of {job} {task} until {until}, {memory} (`volley exec {job} {task} --attempt {attempt}`; `--end` frees it)\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_lacks_stands_below_the_table() {
        let mut worker: WorkerView = serde_json::from_value(json!({
            "worker": "w", "state": "ready", "slots": 1, "bundles": 0, "tasks": 0, "cpuMilli": 1000, "memoryBytes": 0, "diskBytes": 0,
            "isolation": ["process"], "labels": {}, "silentMs": null, "build": "b", "host": "h"
        }))
        .unwrap_or_else(|e| panic!("{e}"));
        assert!(!text(&[worker.clone()]).contains("can't offer"));
        worker.lacks.insert("microvm".to_owned(), "QEMU is not there".to_owned());
        assert!(text(&[worker.clone()]).ends_with("\nw can't offer microvm: QEMU is not there\n"));
        let until = "2026-01-01T00:00:00Z".to_owned();
        worker.kept = vec![KeptView { job: "j7".to_owned(), task: 3, attempt: 2, until, memory_bytes: 1 << 30 }];
        let text = text(&[worker]);
        assert!(text.contains("w keeps the machine of j7 3 until 2026-01-01T00:00:00Z, 1.0 GiB (`volley exec j7 3 --attempt 2`"), "{text}");
    }
}
