//! A real cluster in one process for tests: nats-server, embedded S3, a coordinator, and a worker that only pretends to run tasks.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use futures::StreamExt;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use volley_coordinator::api;
use volley_coordinator::config::CoordinatorConfig;
use volley_coordinator::io::bus::NatsConfig;
use volley_coordinator::run::{Running, run};
use volley_jobspecs::ids::{AttemptName, Incarnation, JobId, Term, WorkerId};
use volley_jobspecs::subjects;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::record::{Record, Run};
use volley_jobspecs::wire::report::{AttemptEnd, Ending, Report, Timing};
use volley_jobspecs::wire::work::{Beat, BeatAnswer, Held, Order, WorkAnswer, WorkMessage, WorkerInfo};
use volley_jobspecs::wire::{decode, encode};
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_store::{Store, StoreConfig};

pub const BOOTSTRAP: &str = "vt_bootstrap_0123456789abcdef0123456789abcdef";
pub const BUCKET: &str = "cell";

/// The nats-server binary: `$VOLLEY_TEST_NATS`, else on the path. None: the test is skipped, and says so.
pub fn nats_binary() -> Option<PathBuf> {
    let named = std::env::var_os("VOLLEY_TEST_NATS").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = named.into_iter().chain(std::env::split_paths(&path).map(|dir| dir.join("nats-server"))).find(|file| file.is_file());
    if found.is_none() {
        eprintln!("skipped: no nats-server on the path; put one there or name it in VOLLEY_TEST_NATS");
    }
    found
}

pub struct Nats {
    child: Child,
    pub url: String,
}

impl Nats {
    pub async fn start(binary: &PathBuf, dir: &std::path::Path) -> Self {
        for _ in 0..10 {
            let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("its address").port();
            let mut command = Command::new(binary);
            command.args(["-a", "127.0.0.1", "-p", &port.to_string(), "-js", "-sd"]).arg(dir);
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("nats-server starts");
            for _ in 0..100 {
                if tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
                    return Self { child, url: format!("nats://127.0.0.1:{port}") };
                }
                if child.try_wait().ok().flatten().is_some() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            _ = child.kill();
            _ = child.wait();
        }
        panic!("nats-server did not come up");
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// NATS, S3 and a directory; coordinators are started on it.
pub struct World {
    pub nats: Nats,
    pub s3: EmbeddedServer,
    pub dir: tempfile::TempDir,
}

impl World {
    pub async fn new() -> Option<Self> {
        let binary = nats_binary()?;
        let dir = tempfile::tempdir().expect("a directory");
        let nats = Nats::start(&binary, &dir.path().join("nats")).await;
        let config = EmbeddedConfig {
            root: dir.path().join("s3"),
            bind: ([127, 0, 0, 1], 0).into(),
            access_key: "key".into(),
            secret_key: "secret".into(),
            reserve_bytes: 0,
        };
        let s3 = EmbeddedServer::start(config).await.expect("S3 starts");
        Some(Self { nats, s3, dir })
    }

    pub fn config(&self) -> CoordinatorConfig {
        let nats = NatsConfig { url: self.nats.url.clone(), ..NatsConfig::default() };
        let store = StoreConfig::new(&self.s3.endpoint(), BUCKET, "key", "secret");
        CoordinatorConfig {
            create_bucket: true,
            bootstrap_token: Some(BOOTSTRAP.to_owned()),
            start_patience: Duration::ZERO,
            ..CoordinatorConfig::new(nats, self.dir.path().join("rows"), store)
        }
    }

    pub async fn cluster(self) -> Cluster {
        let config = self.config();
        self.cluster_with(config).await
    }

    pub async fn cluster_with(self, config: CoordinatorConfig) -> Cluster {
        let stop = CancellationToken::new();
        let running = run(config, stop.clone()).await.unwrap_or_else(|e| panic!("{e}"));
        let store = Store::connect(&self.config().store).await.expect("a store");
        let router = api::router(running.app.clone());
        let cluster = Cluster { world: self, running, router, store, stop };
        cluster.ready().await;
        cluster
    }
}

/// A running coordinator.
pub struct Cluster {
    pub world: World,
    pub running: Running,
    pub router: Router,
    pub store: Store,
    pub stop: CancellationToken,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub bytes: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    pub fn lines(&self) -> Vec<Value> {
        let text = self.text();
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
    }

    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{}", self.text());
        self
    }
}

impl Cluster {
    async fn ready(&self) {
        for _ in 0..200 {
            if self.call(Method::GET, "/readyz", None, &[], "").await.status == 200 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("not ready: {}", self.call(Method::GET, "/readyz", None, &[], "").await.text());
    }

    pub async fn call(&self, method: Method, path: &str, token: Option<&str>, headers: &[(&str, &str)], body: impl Into<Body>) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request.body(body.into()).expect("a request")).await
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.expect("the router never fails");
        let (parts, body) = response.into_parts();
        let bytes = axum::body::to_bytes(body, 1 << 30).await.expect("a whole body");
        Answer { status: parts.status, headers: parts.headers, bytes }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, Some(BOOTSTRAP), &[], "").await
    }

    pub async fn post(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.call(Method::POST, path, Some(BOOTSTRAP), &[], body).await
    }

    /// Opens a stream; its bytes as they come.
    pub async fn stream(&self, path: &str) -> axum::body::BodyDataStream {
        let request = Request::get(path).header("authorization", format!("Bearer {BOOTSTRAP}")).body(Body::empty()).expect("a request");
        let response = self.router.clone().oneshot(request).await.expect("the router never fails");
        assert_eq!(response.status(), 200, "{path}");
        response.into_body().into_data_stream()
    }

    /// Reports the end of an attempt in the name of the one worker there is.
    pub async fn report(&self, end: AttemptEnd) {
        let read = self.running.handle.read(|state, _, _| state.workers.iter().next().map(|(name, w)| (name.clone(), w.incarnation)));
        let (worker, incarnation) = read.await.expect("read").expect("a worker");
        let report = Report { worker: worker.clone(), incarnation, number: 9, ends: vec![end] };
        let record = encode(&Record::Report(report));
        self.running.handle.log().publish(&subjects::log_report(&worker), record.into(), Duration::from_secs(5)).await.expect("published");
    }

    /// Submits a spec and returns the job's id.
    pub async fn submit(&self, spec: &Value) -> String {
        let answer = self.post("/v1/jobs", spec.to_string()).await.expect(201).json();
        answer["job"].as_str().expect("a job").to_owned()
    }

    /// Waits until records are of this level.
    pub async fn level(&self, level: u32) {
        for _ in 0..400 {
            if self.get("/v1/cluster").await.expect(200).json()["level"].as_u64() >= Some(u64::from(level)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the level was not raised to {level}");
    }

    /// Waits until the job has ended.
    pub async fn ended(&self, job: &str) -> Value {
        for _ in 0..400 {
            let view = self.get(&format!("/v1/jobs/{job}")).await.expect(200).json();
            if !view["ended"].is_null() {
                return view;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("{job} did not end: {}", self.get(&format!("/v1/jobs/{job}")).await.text());
    }

    pub async fn stop(self) {
        self.stop.cancel();
        let ended = self.running.join.await.expect("no panic");
        assert!(ended.is_ok(), "{ended:?}");
    }
}

/// Ends an attempt well.
pub fn success(name: AttemptName) -> AttemptEnd {
    let timing = Timing { wait_ms: 0, prepare_ms: 1, run_ms: 2, persist_ms: 3 };
    AttemptEnd { code: Some(0), timing, ..AttemptEnd::bare(name, Ending::Succeeded, Isolation::Process) }
}

pub fn worker_info(slots: u32) -> WorkerInfo {
    WorkerInfo {
        slots,
        cpu_milli: 64_000,
        memory_bytes: 64 << 30,
        disk_bytes: 64 << 30,
        isolation: vec![Isolation::Null, Isolation::Process],
        labels: BTreeMap::from([("zone".to_owned(), "a".to_owned())]),
        limits: true,
        build: "test".into(),
        host: "test".into(),
        lacks: Vec::new(),
        template_bytes: None,
        images: None,
        fetches: false,
        volumes: None,
    }
}

/// A worker that ends attempts as `ends` says; `None`: it holds them for ever.
pub async fn worker(
    url: &str,
    name: &str,
    slots: u32,
    stop: CancellationToken,
    ends: impl Fn(AttemptName) -> Option<AttemptEnd> + Send + 'static,
) {
    worker_with(url, name, worker_info(slots), stop, ends).await;
}

/// The same, with these things to offer.
pub async fn worker_with(
    url: &str,
    name: &str,
    info: WorkerInfo,
    stop: CancellationToken,
    ends: impl Fn(AttemptName) -> Option<AttemptEnd> + Send + 'static,
) {
    let client = async_nats::connect(url).await.expect("NATS");
    let (jetstream, worker) = (async_nats::jetstream::new(client.clone()), WorkerId::new(name).expect("a name"));
    let mut work = client.subscribe(subjects::work(&worker)).await.expect("a subscription");
    let mut beat = Beat {
        worker: worker.clone(),
        incarnation: Incarnation(rand()),
        info,
        held: Vec::new(),
        term: Term(0),
        taken: 0,
        reported: 0,
        draining: false,
        leaving: false,
        at: Vec::new(),
        kept: Vec::new(),
    };
    tokio::spawn(async move {
        let (mut ticks, mut number) = (tokio::time::interval(Duration::from_millis(100)), 0);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {
                    let answer = client.request(subjects::beat(&worker), encode(&beat).into()).await;
                    if let Some(answer) = answer.ok().and_then(|m| decode::<BeatAnswer>("beat answer", &m.payload).ok())
                        && answer.term > beat.term
                    {
                        (beat.term, beat.taken) = (answer.term, 0);
                    }
                }
                Some(message) = work.next() => {
                    let Ok(orders) = decode::<WorkMessage>("work", &message.payload) else { continue };
                    if orders.number <= beat.taken && orders.term == beat.term { continue }
                    (beat.term, beat.taken) = (orders.term, orders.number);
                    if let Some(reply) = message.reply {
                        let answer = WorkAnswer { incarnation: beat.incarnation, term: beat.term, taken: beat.taken };
                        _ = client.publish(reply, encode(&answer).into()).await;
                    }
                    let mut all = Vec::new();
                    for order in orders.orders {
                        match order {
                            Order::Run(bundle) => for tries in &bundle.tasks {
                                for index in tries.first..tries.first + tries.count {
                                    let name = AttemptName { job: bundle.job, stage: 0, index, number: tries.number, sequence: bundle.id.sequence };
                                    match ends(name) {
                                        Some(end) => all.push(end),
                                        None => beat.held.push(Held { bundle: bundle.id, job: bundle.job, tasks: vec![Run { first: index, count: 1 }] }),
                                    }
                                }
                            },
                            Order::Stop { bundle, .. } | Order::HandBack { bundle, .. } | Order::Forget { bundle } => beat.held.retain(|h| h.bundle != bundle),
                        }
                    }
                    for ends in all.chunks(500) {
                        number += 1;
                        let report = Report { worker: worker.clone(), incarnation: beat.incarnation, number, ends: ends.to_vec() };
                        let sent = jetstream.publish(subjects::log_report(&worker), encode(&Record::Report(report)).into()).await.expect("sent");
                        beat.reported = sent.await.expect("acknowledged").sequence;
                    }
                }
            }
        }
    });
}

fn rand() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// Reads a job id.
pub fn id(job: &str) -> JobId {
    job.parse().expect("a job id")
}
