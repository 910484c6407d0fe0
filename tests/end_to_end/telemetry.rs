//! One trace a job over command line, coordinator and worker, each a process of its own; metrics; log lines that name the attempt.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use futures::StreamExt as _;
use serde_json::{Value, json};

use crate::parts::{Part, Parts, TOKEN, ask, free_port, nats, s3};
use crate::support::cluster::{VOLLEY, nats_server, open_dir, write};
use crate::support::otlp::{Collector, Span};
use crate::support::process::{Ran, start, until};

/// What a CI system would hand on.
const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const CALLER_TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const STAGES: [&str; 7] = ["claim", "prepare", "restore", "execute", "persist", "reclaim", "report"];
const NULLS: u32 = 5_000;

/// Subjects and their header `traceparent`, as they pass on NATS.
type Seen = Arc<Mutex<BTreeSet<(String, String)>>>;

/// Listens as coordinator and as worker, each to what it may hear.
async fn listen(nats: &str) -> (Seen, async_nats::Client) {
    let seen = Seen::default();
    let mut last = None;
    for (user, password, subjects) in
        [("worker", "w-secret", &["volley.work.*"][..]), ("coordinator", "c-secret", &["volley.job.*", "_INBOX.>"][..])]
    {
        let options = async_nats::ConnectOptions::with_user_and_password(user.to_owned(), password.to_owned());
        let client = options.connect(nats).await.unwrap();
        for subject in subjects {
            let (mut messages, seen) = (client.subscribe(*subject).await.unwrap(), seen.clone());
            tokio::spawn(async move {
                while let Some(message) = messages.next().await {
                    let trace = message.headers.as_ref().and_then(|headers| headers.get("traceparent"));
                    let trace = trace.map(|trace| trace.as_str().to_owned()).unwrap_or_default();
                    seen.lock().unwrap().insert((message.subject.to_string(), trace));
                }
            });
        }
        client.flush().await.unwrap();
        last = Some(client);
    }
    (seen, last.unwrap())
}

/// The headers `traceparent` of records in the log, by subject.
async fn logged(client: async_nats::Client) -> BTreeSet<(String, String)> {
    let mut stream = async_nats::jetstream::new(client).get_stream("VOLLEY_LOG").await.unwrap();
    let last = stream.info().await.unwrap().state.last_sequence;
    let mut found = BTreeSet::new();
    for sequence in 1..=last {
        let record = stream.get_raw_message(sequence).await.unwrap();
        if let Some(trace) = record.headers.get("traceparent") {
            found.insert((record.subject.to_string(), trace.as_str().to_owned()));
        }
    }
    found
}

fn volley(dir: &Path, url: &str, args: &[&str], env: &[(&str, &str)]) -> Ran {
    let mut command = Command::new(VOLLEY);
    command.args(args).args(["--url", url]).env("VOLLEY_TOKEN", TOKEN).current_dir(dir);
    for name in ["TRACEPARENT", "OTEL_EXPORTER_OTLP_ENDPOINT"] {
        command.env_remove(name);
    }
    command.envs(env.iter().copied());
    start(command).wait()
}

fn spec(dir: &Path, name: &str, items: u32, task: Value) -> String {
    let spec = json!({ "version": "volley/v1", "name": name, "items": { "count": items }, "task": task });
    write(&dir.join(format!("{name}.json")), &spec.to_string())
}

/// The only span of this name.
#[track_caller]
fn one<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let mut found = spans.iter().filter(|span| span.name == name);
    let span = found.next().unwrap_or_else(|| panic!("no {name} in {spans:#?}"));
    assert!(found.next().is_none(), "several {name}");
    span
}

/// Every attempt of a job that failed has a span with its stages, and it hangs below the job.
fn check_failures(spans: &[Span], job: &Span, wanted: &BTreeSet<(String, String)>) {
    let attempts: Vec<&Span> = spans.iter().filter(|span| span.name == "attempt" && span.failed).collect();
    let named = |span: &&Span| (span.attributes["volley.task"].clone(), span.attributes["volley.attempt"].clone());
    assert_eq!(attempts.iter().map(named).collect::<BTreeSet<_>>(), *wanted);
    assert_eq!(attempts.len(), wanted.len(), "each once");
    for attempt in attempts {
        assert_eq!((&attempt.service[..], &attempt.parent), ("volley-worker", &job.id));
        assert_eq!(attempt.attributes["volley.job"], job.attributes["volley.job"]);
        assert_eq!((&attempt.attributes["volley.outcome"][..], &attempt.attributes["volley.worker"][..]), ("exit_code", "w1"));
        let stages: Vec<&Span> = spans.iter().filter(|span| span.parent == attempt.id).collect();
        let names: Vec<&str> = stages.iter().map(|span| span.name.as_str()).collect();
        for stage in ["claim", "prepare", "execute", "persist", "report"] {
            assert!(names.contains(&stage), "{names:?}");
        }
        assert!(stages.iter().all(|stage| stage.start >= attempt.start && stage.end <= attempt.end && stage.start <= stage.end));
    }
}

/// Lines about attempts say which.
fn check_lines(log: &str, job: &str, trace: &str) {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let ended: Vec<Value> = lines.filter(|line| line["message"] == "ended" && line["span"]["job"] == job).collect();
    assert!(!ended.is_empty(), "{log}");
    for line in ended {
        let span = &line["span"];
        assert!(span["name"] == "attempt" && span["task"].is_u64() && span["attempt"].is_u64() && span["trace"] == trace, "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_one_trace_over_all_processes() {
    if nats_server().is_none() {
        return;
    }
    let (dir, collector) = (open_dir(), Collector::start());
    let s3 = s3(dir.path()).await;
    let (nats_port, port) = (free_port(), free_port());
    let _nats = nats(dir.path(), nats_port);
    until("NATS is up", || std::net::TcpStream::connect(("127.0.0.1", nats_port)).is_ok());
    let nats = format!("nats://127.0.0.1:{nats_port}");
    let env = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.clone()),
        ("OTEL_METRIC_EXPORT_INTERVAL", "400".to_owned()),
        ("OTEL_BSP_SCHEDULE_DELAY", "100".to_owned()),
        ("VOLLEY_LOG", "info,volley_worker=debug".to_owned()),
        ("VOLLEY_LOG_FORMAT", "json".to_owned()),
    ];
    let parts = Parts { dir: dir.path(), nats: nats.clone(), s3: s3.endpoint(), env };
    let url = format!("http://127.0.0.1:{port}");
    let _coordinator = parts.coordinator("c1", port);
    until("it leads", || ask(&url, "/v1/cluster").is_some_and(|view| view["leader"].as_str().unwrap().starts_with("c1")));
    let worker = parts.worker("w1", &["--null"]);
    until("the worker is ready", || {
        ask(&url, "/v1/workers").is_some_and(|workers| workers.as_array().unwrap().iter().any(|worker| worker["state"] == "ready"))
    });
    let (seen, client) = listen(&nats).await;

    let world = World { dir: dir.path(), url: &url, collector: &collector };
    run_jobs(&world);
    let jobs = ask(&url, "/v1/jobs").unwrap();
    let by_name: BTreeMap<&str, &Value> = jobs["rows"].as_array().unwrap().iter().map(|job| (job["name"].as_str().unwrap(), job)).collect();
    let ids = ["failing", "nulls", "quiet"].map(|name| by_name[name]["traceId"].as_str().unwrap().to_owned());
    assert_eq!(ids[0], CALLER_TRACE);
    until("every job's span arrived", || ids.iter().all(|trace| world.has(trace, "job")));
    until("the attempts' spans arrived", || world.has(&ids[2], "report"));
    let traces: BTreeSet<String> = collector.spans().into_iter().map(|span| span.trace).collect();
    assert_eq!(traces, ids.iter().cloned().collect(), "one trace a job, and no other");

    let spans = world.of(&ids[0]);
    let (run, submit, job) = (one(&spans, "volley run"), one(&spans, "submit"), one(&spans, "job"));
    assert_eq!((&run.service[..], &submit.service[..], &job.service[..]), ("volley-cli", "volley-coordinator", "volley-coordinator"));
    assert_eq!((&run.parent[..], &submit.parent, &job.parent), ("00f067aa0ba902b7", &run.id, &submit.id));
    assert!(job.failed && job.attributes["volley.tasks.failed"] == "4" && job.attributes["volley.tasks.succeeded"] == "8", "{job:?}");
    assert!(run.start <= submit.start && run.attributes["process.exit.code"] == "1", "{run:?}");
    let wanted = [0, 3, 6, 9].iter().flat_map(|task| [1, 2].map(|attempt| (task.to_string(), attempt.to_string()))).collect();
    check_failures(&spans, job, &wanted);
    let job_id = job.attributes["volley.job"].clone();
    check_lines(&parts.log("w1"), &job_id, &ids[0]);
    let shown = volley(dir.path(), &url, &["job", &job_id], &[]).exits(0).stdout;
    assert!(shown.contains(&ids[0]), "{shown}");

    check_successes(&world, &ids);
    let logged = logged(client).await;
    check_headers(&seen.lock().unwrap(), &logged, &job_id);
    check_figures(&collector, &url);

    check_rerun(&world, by_name["quiet"]["job"].as_str().unwrap(), &ids[2]);
    check_lost(&world, &parts, worker);
}

/// What the checks work with.
struct World<'a> {
    dir: &'a Path,
    url: &'a str,
    collector: &'a Collector,
}

impl World<'_> {
    fn of(&self, trace: &str) -> Vec<Span> {
        self.collector.spans().into_iter().filter(|span| span.trace == trace).collect()
    }

    fn has(&self, trace: &str, name: &str) -> bool {
        self.of(trace).iter().any(|span| span.name == name)
    }
}

/// Runs a job that goes on with a trace, one that begins its own, and one that is submitted by somebody who traces nothing.
fn run_jobs(world: &World) {
    let on = ("OTEL_EXPORTER_OTLP_ENDPOINT", world.collector.url.as_str());
    let failing = json!({ "isolation": "process", "command": "exit $((VOLLEY_TASK_INDEX % 3 == 0))", "retry": { "attempts": 2, "backoff": { "initial": "20ms" } } });
    let failing = spec(world.dir, "failing", 12, failing);
    volley(world.dir, world.url, &["run", &failing], &[on, ("TRACEPARENT", CALLER)]).exits(1);
    let nulls = spec(world.dir, "nulls", NULLS, json!({ "isolation": "null", "command": ["true"] }));
    volley(world.dir, world.url, &["run", &nulls], &[on]).exits(0);
    // Off: the job has a trace all the same, and the coordinator begins it.
    let quiet = spec(world.dir, "quiet", 1, json!({ "isolation": "process", "command": "false", "retry": { "attempts": 1 } }));
    volley(world.dir, world.url, &["run", &quiet], &[]).exits(1);
}

/// Few successes are kept; what nobody traces begins at the coordinator.
fn check_successes(world: &World, ids: &[String; 3]) {
    let spans = world.of(&ids[1]);
    let (job, kept) = (one(&spans, "job"), spans.iter().filter(|span| span.name == "attempt").count());
    assert!((20..100).contains(&kept), "one in a hundred of {NULLS}, not {kept}");
    assert!(spans.iter().filter(|span| span.name == "attempt").all(|span| !span.failed && span.parent == job.id));
    let spans = world.of(&ids[2]);
    assert!(one(&spans, "submit").parent.is_empty() && spans.iter().all(|span| span.name != "volley run"));
}

/// A later round hangs below the job, and is as long as it took.
fn check_rerun(world: &World, job: &str, trace: &str) {
    volley(world.dir, world.url, &["rerun", job], &[]).exits(0);
    until("the rerun's span arrived", || world.has(trace, "rerun"));
    let spans = world.of(trace);
    let (job, rerun) = (one(&spans, "job"), one(&spans, "rerun"));
    assert!(rerun.parent == job.id && rerun.start >= job.end && rerun.start < rerun.end, "{job:?} {rerun:?}");
}

/// What a worker ran in an earlier life has nobody to tell of it but the leader.
fn check_lost(world: &World, parts: &Parts, mut worker: Part) {
    let slow = json!({ "isolation": "process", "command": "[ $VOLLEY_ATTEMPT -gt 1 ] || sleep 60" });
    let slow = spec(world.dir, "slow", 1, slow);
    let submitted = volley(world.dir, world.url, &["submit", &slow, "-o", "json"], &[]).exits(0).json();
    let path = format!("/v1/jobs/{}", submitted["job"].as_str().unwrap());
    let view = || ask(world.url, &path).unwrap();
    until("it runs", || view()["tasks"]["running"] == 1);
    worker.0.kill().unwrap();
    worker.0.wait().unwrap();
    let _worker = parts.worker("w1", &["--null"]);
    until("it ends all the same", || view()["state"] == "succeeded");
    let trace = view()["traceId"].as_str().unwrap().to_owned();
    until("the job's span arrived", || world.has(&trace, "job"));
    let spans = world.of(&trace);
    let (job, lost) = (one(&spans, "job"), spans.iter().find(|span| span.name == "attempt" && span.failed).unwrap());
    assert_eq!((&lost.service[..], &lost.parent, &lost.attributes["volley.outcome"][..]), ("volley-coordinator", &job.id, "host_lost"));
}

/// Messages about one job carry its trace.
fn check_headers(seen: &BTreeSet<(String, String)>, logged: &BTreeSet<(String, String)>, job: &str) {
    let within = |what: &BTreeSet<(String, String)>, subject: &str| {
        what.iter().any(|(s, trace)| s.starts_with(subject) && trace.contains(CALLER_TRACE))
    };
    for subject in ["volley.work.w1", &format!("volley.job.{job}"), "_INBOX."] {
        assert!(within(seen, subject), "{subject}: {seen:#?}");
    }
    for subject in ["volley.log.submit.", "volley.log.report.w1"] {
        assert!(within(logged, subject), "{subject}: {logged:#?}");
    }
}

/// Both processes' figures arrive, the coordinator's as `/metrics` shows them.
fn check_figures(collector: &Collector, url: &str) {
    let label = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
    let value = |service: &str, name: &str, labels: BTreeMap<String, String>| {
        collector.figures().get(&(service.to_owned(), name.to_owned(), labels)).copied()
    };
    let attempts = |service, name, outcome| value(service, name, label("outcome", outcome));
    until("the last figures arrive", || {
        attempts("volley-worker", "volley_worker_attempts", "exit_code") == Some(9.0)
            && attempts("volley-coordinator", "volley_track_attempts", "exit_code") == Some(9.0)
    });
    assert_eq!(attempts("volley-worker", "volley_worker_attempts", "succeeded"), Some(f64::from(NULLS + 8)));
    for stage in STAGES {
        assert!(value("volley-worker", "volley_worker_stage_seconds", label("stage", stage)).is_some(), "{stage}");
    }
    let passes = value("volley-worker", "volley_worker_stage_passes", label("stage", "execute"));
    assert_eq!(passes, Some(17.0), "12 tasks, 4 of them twice, and one more");
    let scraped = crate::support::http::request(url, "GET", "/metrics", Some(TOKEN), b"").body;
    assert!(scraped.contains("volley_track_attempts_total{outcome=\"exit_code\"} 9\n"), "{scraped}");
    assert_eq!(value("volley-coordinator", "volley_leader", BTreeMap::new()), Some(1.0));
    assert_eq!(value("volley-worker", "volley_worker_slots", BTreeMap::new()), Some(2.0));
}
