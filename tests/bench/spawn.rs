//! The process tier against raw spawning and against HyperQueue, all on the same cores, in turn.

use std::process::Command;
use std::time::Instant;

use volley_sdk::{Client, ResultsQuery};

use crate::cluster::Cluster;
use crate::figures::{figure, median};
use crate::raw;

const TASKS: u32 = 5_000;
const ROUNDS: usize = 5;

async fn run(client: &Client) -> f64 {
    let spec = format!(
        r#"{{"version":"volley/v1","name":"true","items":{{"count":{TASKS}}},"task":{{"isolation":"process","command":["/bin/true"]}}}}"#
    );
    let started = Instant::now();
    let job = client.submit(spec).await.unwrap().job;
    let mut results = client.results(job, ResultsQuery::follow());
    let mut seen = 0;
    while let Some(row) = results.next().await {
        assert!(row.unwrap().class.is_none());
        seen += 1;
    }
    assert_eq!(seen, TASKS);
    f64::from(TASKS) / started.elapsed().as_secs_f64()
}

/// Tasks a second of HyperQueue, which keeps what tasks write, as we do, or throws it away.
fn hyperqueue(cores: usize, output: &str) -> Option<f64> {
    let python = std::env::var_os("VOLLEY_BENCH_PYTHON").unwrap_or_else(|| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bench/hq_local_cluster.py");
    let output = Command::new(python).arg(script).args([&TASKS.to_string(), &cores.to_string(), output]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().lines().last()?.parse().ok()
}

/// 5,000 tasks of /bin/true.
pub async fn spawn() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let mut cluster = Cluster::start().await;
    cluster.worker(cores as u32 * 2, &["--cpus", &(cores * 2).to_string()]).await;
    let client = cluster.client();
    run(&client).await;
    let (mut ours, mut raws, mut theirs, mut without_output) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        raws.push(tokio::task::spawn_blocking(move || raw::spawn_rate(cores)).await.unwrap());
        ours.push(run(&client).await);
        theirs.extend(hyperqueue(cores, "kept"));
        without_output.extend(hyperqueue(cores, "off"));
    }
    figure("spawn tasks/s vs posix_spawn", median(&ours), median(&raws));
    match theirs.is_empty() {
        true => println!("spawn vs HyperQueue: skipped: no python3 with hyperqueue 0.27 (pip install hyperqueue==0.27.0)"),
        false => {
            figure("spawn tasks/s vs HyperQueue", median(&ours), median(&theirs));
            figure("spawn tasks/s vs HyperQueue without output", median(&ours), median(&without_output));
        }
    }
}
