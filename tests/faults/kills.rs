//! kill -9 and SIGSTOP/SIGCONT of the leading coordinator, a worker, nats-server and the S3 server, at random instants under a job
//! of 10,000 tasks: all results are there, each exactly once, and nobody had to do anything by hand. Now and then everything is killed
//! at once, as by a power cut, or a coordinator loses its database.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::cluster::{Cluster, Plan, exactly_once};
use crate::random::Random;
use crate::setting;

/// Tasks that run nothing.
const NULLS: u32 = 9_000;
/// Tasks that are real processes and write an output each.
const WRITERS: u32 = 1_000;
/// Faults begin within this time of the submit, in milliseconds; the rate limit makes the job last as long.
const FAULTS_MS: u64 = 24_000;
/// Longest freeze, in milliseconds; beyond the 15 s of silence after which a worker is lost.
const FREEZE_MS_MAX: u64 = 18_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Leader,
    Worker,
    Nats,
    S3,
    /// The whole host loses its power.
    All,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill,
    Freeze(u64),
    /// A coordinator is killed and loses its database, which may be deleted at any time.
    Wipe,
    /// A worker's helper that starts processes is killed.
    Helper,
}

/// One of each fault for each target, at random instants; those of one target don't overlap.
fn schedule(random: &mut Random) -> Vec<(Target, Vec<(u64, Fault)>)> {
    let mut all = Vec::new();
    for target in [Target::Leader, Target::Worker, Target::Nats, Target::S3] {
        // Mostly short: a freeze of many seconds of NATS or S3 is an outage, which other tests have.
        let most = if random.one_in(3) { FREEZE_MS_MAX } else { 4_000 };
        let kill = match target {
            Target::Leader if random.one_in(2) => Fault::Wipe,
            Target::Worker if random.one_in(3) => Fault::Helper,
            _ => Fault::Kill,
        };
        let mut faults = [kill, Fault::Freeze(random.between(200, most))];
        if random.one_in(2) {
            faults.swap(0, 1);
        }
        let at = faults.map(|fault| (random.between(1_500, FAULTS_MS / 2), fault));
        all.push((target, at.to_vec()));
    }
    if random.one_in(3) {
        all.push((Target::All, vec![(random.between(3_000, FAULTS_MS), Fault::Kill)]));
    }
    all
}

fn specs() -> (serde_json::Value, serde_json::Value) {
    let nulls = json!({
        "version": "volley/v1", "name": "nulls", "items": { "count": NULLS },
        "task": { "isolation": "null", "command": "true", "retry": { "infraAttempts": 30, "backoff": { "initial": "100ms", "cap": "1s" } } },
        "limits": { "rate": format!("{}/s", u64::from(NULLS) * 1_000 / FAULTS_MS) },
    });
    let writers = json!({
        "version": "volley/v1", "name": "writers", "items": { "count": WRITERS },
        "task": {
            "isolation": "process", "command": "echo ${index} > \"$VOLLEY_OUTPUT_DIR/n\"",
            "retry": { "infraAttempts": 30, "backoff": { "initial": "100ms", "cap": "1s" } }
        },
        "limits": { "rate": format!("{}/s", u64::from(WRITERS) * 1_000 / FAULTS_MS) },
    });
    (nulls, writers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_part_is_killed_and_frozen_under_ten_thousand_tasks() {
    let cluster = Arc::new(Cluster::start(Plan { workers: vec![8, 8, 8], ..Plan::default() }).await);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let first = setting("VOLLEY_FAULTS_SEED", now);
    for seed in first..first + setting("VOLLEY_FAULTS_ROUNDS", 2) {
        let begun = Instant::now();
        round(&cluster, seed).await;
        println!("round with seed {seed}: {:.1} s", begun.elapsed().as_secs_f64());
    }
    let Ok(cluster) = Arc::try_unwrap(cluster) else { panic!("a round still holds the cluster") };
    cluster.stop().await;
}

async fn round(cluster: &Arc<Cluster>, seed: u64) {
    let mut random = Random::new(seed);
    let plan = schedule(&mut random);
    println!("seed {seed}: {plan:?}");
    let (nulls, writers) = specs();
    let (nulls, writers) = (cluster.submit(&nulls).await, cluster.submit(&writers).await);
    let following = [(cluster.follow(nulls), NULLS), (cluster.follow(writers), WRITERS)];
    let mut faults = Vec::new();
    for (target, faults_of_it) in plan {
        let (cluster, pick) = (Arc::clone(cluster), random.next());
        faults.push(tokio::spawn(async move {
            for (pause_ms, fault) in faults_of_it {
                tokio::time::sleep(Duration::from_millis(pause_ms)).await;
                strike(&cluster, target, fault, pick).await;
            }
        }));
    }
    for fault in faults {
        fault.await.unwrap();
    }
    for (job, total) in [(nulls, NULLS), (writers, WRITERS)] {
        cluster.wait(job, Duration::from_secs(240)).await;
        cluster.all_succeeded(job, total).await;
    }
    for (follow, total) in following {
        let rows = follow.await.unwrap().unwrap_or_else(|e| panic!("following results: {e}\n{}", cluster.logs(20)));
        exactly_once(&rows, total, "the followed stream");
    }
    for _ in 0..50 {
        let index = u32::try_from(random.below(u64::from(WRITERS))).unwrap();
        check_task(cluster, writers, index).await;
    }
    cluster.at_rest().await;
    let complaints = cluster.complaints();
    assert!(complaints.is_empty(), "{complaints:#?}\n{}", cluster.logs(30));
}

async fn strike(cluster: &Cluster, target: Target, fault: Fault, pick: u64) {
    if target == Target::All {
        println!("  {fault:?} everything");
        [&cluster.nats, &cluster.s3]
            .into_iter()
            .chain(&cluster.coordinators)
            .chain(&cluster.workers)
            .for_each(crate::process::Process::kill);
        return;
    }
    let process = match target {
        // Nobody may be known to lead while another fault lasts; then one of them is as good as the other.
        Target::Leader => &cluster.coordinators[cluster.leader().await.unwrap_or(pick as usize % cluster.coordinators.len())],
        Target::Worker => &cluster.workers[pick as usize % cluster.workers.len()],
        Target::Nats => &cluster.nats,
        Target::S3 | Target::All => &cluster.s3,
    };
    println!("  {fault:?} {} ({target:?})", process.name);
    match fault {
        Fault::Kill => process.kill(),
        Fault::Helper => process.kill_helpers(),
        Fault::Wipe => {
            process.away();
            while process.pid() != 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            std::fs::remove_dir_all(cluster.dir.path().join(&process.name)).unwrap();
            process.back();
        }
        Fault::Freeze(ms) => process.freeze(Duration::from_millis(ms)).await,
    }
}

/// One success among its attempts, within their budget, and the output is that task's.
async fn check_task(cluster: &Cluster, job: volley_cli::sdk::jobspecs::ids::JobId, index: u32) {
    use volley_cli::sdk::jobspecs::api::TaskState;
    let attempts = cluster.client.attempts(job, index).await.unwrap_or_else(|e| panic!("attempts of {index}: {e}"));
    let successes = attempts.iter().filter(|a| a.state == TaskState::Succeeded).count();
    assert_eq!(successes, 1, "task {index}: {attempts:#?}");
    assert!(attempts.iter().all(|a| a.state != TaskState::Running), "task {index}: {attempts:#?}");
    let files = cluster.client.outputs(job, index, None).await.unwrap_or_else(|e| panic!("outputs of {index}: {e}"));
    assert_eq!(files.iter().map(|f| f.path.as_str()).collect::<Vec<_>>(), ["n"], "task {index}");
    let mut output = cluster.client.output(job, index, None, "n").await.unwrap_or_else(|e| panic!("output of {index}: {e}"));
    let mut bytes = Vec::new();
    while let Some(chunk) = output.chunk().await.unwrap_or_else(|e| panic!("output of {index}: {e}")) {
        bytes.extend_from_slice(&chunk);
    }
    assert_eq!(bytes, format!("{index}\n").into_bytes(), "task {index}");
}
