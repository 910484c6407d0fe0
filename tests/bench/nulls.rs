//! Figures of the null tier: everything but running the task.

use std::time::{Duration, Instant};

use volley_jobspecs::ids::WorkerId;
use volley_jobspecs::wire::plan::Isolation;
use volley_sdk::{Client, ResultsQuery};
use volley_store::Store;
use volley_worker::{NatsBus, S3Objects};

use crate::cluster::{Cluster, cpu_seconds, resident};
use crate::figures::{figure, median};
use crate::raw;

fn spec(tasks: u32) -> String {
    format!(
        r#"{{"version":"volley/v1","name":"null","items":{{"range":{{"from":0,"to":{tasks}}}}},"task":{{"isolation":"null","command":["true"]}}}}"#
    )
}

/// Submits, reads all results back as they come, and waits for the end. Returns seconds.
async fn run(client: &Client, tasks: u32) -> f64 {
    let started = Instant::now();
    let job = client.submit(spec(tasks)).await.unwrap().job;
    let mut results = client.results(job, ResultsQuery::follow());
    let mut seen = vec![false; tasks as usize];
    while let Some(row) = results.next().await {
        let row = row.unwrap();
        assert!(!std::mem::replace(&mut seen[row.index as usize], true), "task {} twice", row.index);
        assert!(row.class.is_none(), "task {} failed: {:?}", row.index, row.message);
    }
    assert!(seen.iter().all(|seen| *seen), "a result is missing");
    started.elapsed().as_secs_f64()
}

/// 100,000 tasks, one worker with 64 slots; the other: the target of the design, 20,000 a second.
pub async fn null() {
    let mut cluster = Cluster::start().await;
    cluster.worker(64, &["--isolation", "null"]).await;
    let client = cluster.client();
    run(&client, 10_000).await;
    let mut rates = Vec::new();
    for _ in 0..3 {
        rates.push(100_000.0 / run(&client, 100_000).await);
    }
    let log = raw::publish_rate(&cluster.nats_url).await;
    figure("null tasks/s vs target", median(&rates), 20_000.0);
    figure("null tasks/s vs raw log msg/s", median(&rates), log);
}

/// Starts null workers in this process, each with a connection of its own.
async fn workers(cluster: &Cluster, count: usize, slots: u32) {
    let own = Store::connect(&cluster.store_config()).await.unwrap();
    for at in 0..count {
        let name = WorkerId::new(&format!("n{at}")).unwrap();
        let mut config = volley_worker::Config::new(name, cluster.dir.path().join(format!("n{at}")));
        config.slots = slots;
        config.cpu_milli = slots * 1_000;
        config.isolation = vec![Isolation::Null];
        config.cgroups = false;
        let client = async_nats::connect(&cluster.nats_url).await.unwrap();
        let objects = S3Objects::new(&own, cluster.store_config(), Duration::from_secs(60));
        let (handle, control) = volley_worker::control();
        tokio::spawn(async move {
            let _handle = handle;
            volley_worker::run(config, NatsBus::new(client), objects, None, control).await.unwrap();
        });
    }
    cluster.joined(count).await;
}

async fn metrics(client: &Client) -> String {
    let request = reqwest::Client::new().get(format!("{}/metrics", client.endpoint())).bearer_auth(crate::cluster::TOKEN);
    request.send().await.unwrap().text().await.unwrap()
}

fn metric(text: &str, name: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(f64::NAN)
}

/// Upper bound of the bucket that holds the 99th percentile of a histogram.
fn p99(text: &str, name: &str) -> f64 {
    let count = metric(text, &format!("{name}_count"));
    let buckets = text.lines().filter_map(|line| line.strip_prefix(&format!("{name}_bucket{{le=\"")));
    let mut bounds =
        buckets.filter_map(|line| Some((line.split('"').next()?.parse::<f64>().ok()?, line.rsplit(' ').next()?.parse::<f64>().ok()?)));
    bounds.find(|(_, seen)| *seen >= count * 0.99).map_or(f64::NAN, |(bound, _)| bound)
}

/// 1,000 workers × 4 slots, 1,000,000 tasks; nats-server is restarted in the middle of a second job.
pub async fn scale() {
    let mut cluster = Cluster::start().await;
    workers(&cluster, 1_000, 4).await;
    let client = cluster.client();
    let before = cpu_seconds(&cluster.coordinator);
    run(&client, 10_000).await;
    let small = (cpu_seconds(&cluster.coordinator) - before) / 10_000.0;
    let before = cpu_seconds(&cluster.coordinator);
    let seconds = run(&client, 1_000_000).await;
    let large = (cpu_seconds(&cluster.coordinator) - before) / 1_000_000.0;
    figure("scale tasks/s vs target", 1_000_000.0 / seconds, 10_000.0);
    figure("scale cpu us/task 1M vs 10k", large * 1e6, small * 1e6);
    figure("scale coordinator MiB vs max", resident(&cluster.coordinator) / 1_048_576.0, 400.0);
    let text = metrics(&client).await;
    figure("scale round ms p99 vs max", p99(&text, "volley_place_round_seconds") * 1e3, 20.0);
    let lost = metric(&text, "volley_track_workers_lost_total");
    let job = tokio::spawn({
        let client = client.clone();
        async move { run(&client, 200_000).await }
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    cluster.restart_nats();
    let seconds = job.await.unwrap();
    figure("scale tasks/s, NATS restarted", 200_000.0 / seconds, 10_000.0);
    let lost = metric(&metrics(&client).await, "volley_track_workers_lost_total") - lost;
    assert!(lost == 0.0, "{lost} workers were declared lost");
    println!("scale: workers declared lost over the restart of nats-server: {lost}");
}

/// Resident growth a task after 1,000,000 finished tasks; RocksDB's memtables and cache are capped at 32 MiB and not counted.
pub async fn memory() {
    let mut cluster = Cluster::start().await;
    cluster.worker(64, &["--isolation", "null"]).await;
    let client = cluster.client();
    // Fills RocksDB's memtables and cache, and the allocator's first arenas.
    run(&client, 200_000).await;
    let before = resident(&cluster.coordinator);
    run(&client, 1_000_000).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let grown = (resident(&cluster.coordinator) - before).max(0.0) / 1e6;
    figure("memory bytes/task vs max", grown, 100.0);
}

/// Submit of a range of a million.
pub async fn submit() {
    let cluster = Cluster::start().await;
    let client = cluster.client();
    let mut times = Vec::new();
    for _ in 0..11 {
        let started = Instant::now();
        client.submit(spec(1_000_000)).await.unwrap();
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    figure("submit ms of 1M vs max", median(&times), 100.0);
}
