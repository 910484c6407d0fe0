//! A coordinator, log and bucket played by hand, and a worker beside them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use minicbor::bytes::ByteVec;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use volley_jobspecs::ids::{BundleId, Incarnation, JobId, TenantId, Term, WorkerId};
use volley_jobspecs::parse::parse_and_validate;
use volley_jobspecs::validate::Features;
use volley_jobspecs::wire::live::Watch;
use volley_jobspecs::wire::plan::SpecRef;
use volley_jobspecs::wire::record::Record;
use volley_jobspecs::wire::report::AttemptEnd;
use volley_jobspecs::wire::trace::TraceContext;
use volley_jobspecs::wire::work::{Beat, BeatAnswer, Bundle, JobForWorker, Order, Try, WorkAnswer, WorkMessage};
use volley_jobspecs::{plan, wire};
use volley_worker::ports::{Bus, BusError, Incoming, Moved, ObjectError, ObjectName, Objects};
use volley_worker::{Config, Handle, RunError};

/// The trace that work messages say they belong to.
pub const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Bus and log in memory.
#[derive(Clone)]
pub struct FakeBus(Arc<FakeBusState>);

pub struct FakeBusState {
    work: Mutex<Option<mpsc::Sender<Incoming>>>,
    pub watches: Mutex<Option<mpsc::Sender<(JobId, Watch)>>>,
    answers: Mutex<Vec<WorkAnswer>>,
    pub beats: Mutex<Vec<Beat>>,
    jobs: Mutex<BTreeMap<JobId, Vec<u8>>>,
    pub reports: Mutex<Vec<Vec<AttemptEnd>>>,
    pub live: Mutex<Vec<Vec<u8>>>,
    /// Traces that went along with questions and reports.
    pub traces: Mutex<Vec<TraceContext>>,
    sequence: AtomicU64,
    /// The log doesn't answer.
    pub down: AtomicBool,
    /// The next beat is answered with "lost".
    pub lost: AtomicBool,
    /// How long a beat is on its way, in milliseconds.
    pub beat_takes_ms: AtomicU64,
}

impl Bus for FakeBus {
    async fn work(&self, _worker: &WorkerId) -> Result<mpsc::Receiver<Incoming>, BusError> {
        let (sender, receiver) = mpsc::channel(64);
        *self.0.work.lock().unwrap() = Some(sender);
        Ok(receiver)
    }
    async fn watches(&self) -> Result<mpsc::Receiver<(JobId, Watch)>, BusError> {
        let (sender, receiver) = mpsc::channel(64);
        *self.0.watches.lock().unwrap() = Some(sender);
        Ok(receiver)
    }
    async fn answer(&self, _reply: String, bytes: Vec<u8>) -> Result<(), BusError> {
        self.0.answers.lock().unwrap().push(wire::decode("answer", &bytes).unwrap());
        Ok(())
    }
    async fn beat(&self, _worker: &WorkerId, bytes: Vec<u8>) -> Result<Bytes, BusError> {
        if self.0.down.load(Ordering::SeqCst) {
            return Err(BusError::NoAnswer("down".into()));
        }
        tokio::time::sleep(Duration::from_millis(self.0.beat_takes_ms.load(Ordering::SeqCst))).await;
        let beat: Beat = wire::decode("beat", &bytes).unwrap();
        let joined = !beat.leaving;
        self.0.beats.lock().unwrap().push(beat);
        let lost = self.0.lost.swap(false, Ordering::SeqCst);
        Ok(wire::encode(&BeatAnswer { term: Term(1), linger_ms: 2, joined, lost }).into())
    }
    async fn job(&self, job: JobId, trace: Option<TraceContext>) -> Result<Bytes, BusError> {
        self.0.traces.lock().unwrap().extend(trace);
        Ok(self.0.jobs.lock().unwrap().get(&job).cloned().unwrap_or_default().into())
    }
    async fn report(&self, _worker: &WorkerId, bytes: Bytes, trace: Option<TraceContext>) -> Result<u64, BusError> {
        if self.0.down.load(Ordering::SeqCst) {
            return Err(BusError::NoAnswer("down".into()));
        }
        self.0.traces.lock().unwrap().extend(trace);
        let Ok(Record::Report(report)) = wire::decode::<Record>("record", &bytes) else { panic!("no report") };
        self.0.reports.lock().unwrap().push(report.ends);
        Ok(self.0.sequence.fetch_add(1, Ordering::SeqCst))
    }
    async fn live(&self, _job: JobId, _index: u32, bytes: Vec<u8>) {
        self.0.live.lock().unwrap().push(bytes);
    }
}

/// A bucket in memory.
#[derive(Clone, Default)]
pub struct FakeObjects {
    pub objects: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    pub downloads: Arc<AtomicU64>,
    pub broken: Arc<AtomicBool>,
}

impl FakeObjects {
    pub fn put_now(&self, key: &str, bytes: &[u8]) {
        self.objects.lock().unwrap().insert(key.to_owned(), bytes.to_vec());
    }
    pub fn read(&self, key: &str) -> Option<Vec<u8>> {
        self.objects.lock().unwrap().get(key).cloned()
    }
    fn find(&self, key: &str) -> Result<Vec<u8>, ObjectError> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(ObjectError::Failed(format!("put {key}: 503 for a minute")));
        }
        self.read(key).ok_or_else(|| ObjectError::Missing(format!("get {key}: no such object")))
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

impl Objects for FakeObjects {
    async fn get(&self, key: &str, _bytes_max: u64) -> Result<Bytes, ObjectError> {
        self.find(key).map(Bytes::from)
    }
    async fn download(&self, object: &ObjectName, path: &Path, wanted: Option<&str>) -> Result<Moved, ObjectError> {
        self.downloads.fetch_add(1, Ordering::SeqCst);
        let bytes = self.find(&object.key)?;
        let found = sha256(&bytes);
        if wanted.is_some_and(|wanted| wanted != found) {
            return Err(ObjectError::Mismatch(format!("{}: sha256 is {found}", object.key)));
        }
        std::fs::write(path, &bytes).unwrap();
        Ok(Moved { bytes: bytes.len() as u64, sha256: found })
    }
    fn own_prefix(&self, object: &ObjectName) -> Option<&str> {
        object.bucket.as_deref().is_none_or(|bucket| bucket == "cell").then_some("")
    }
    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), ObjectError> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(ObjectError::Failed(format!("put {key}: 503 for a minute")));
        }
        self.put_now(key, &bytes);
        Ok(())
    }
    async fn upload(&self, key: &str, mut file: std::fs::File) -> Result<Moved, ObjectError> {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut file, &mut bytes).unwrap();
        let moved = Moved { bytes: bytes.len() as u64, sha256: sha256(&bytes) };
        self.put(key, bytes.into()).await.map(|()| moved)
    }
}

/// A worker and the world around it.
pub struct World {
    pub bus: FakeBus,
    pub objects: FakeObjects,
    pub handle: Handle,
    pub running: tokio::task::JoinHandle<Result<(), RunError>>,
    /// Goes with the world.
    _dir: tempfile::TempDir,
    number: u64,
    next_job: u64,
}

pub fn state(bus: &FakeBus) -> &FakeBusState {
    &bus.0
}

impl World {
    /// Starts a worker with two slots, changed by `change`.
    pub async fn start(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self::start_in(dir, change).await
    }

    pub async fn start_in(dir: tempfile::TempDir, change: impl FnOnce(&mut Config)) -> Self {
        let bus = FakeBus(Arc::new(FakeBusState {
            work: Mutex::default(),
            watches: Mutex::default(),
            answers: Mutex::default(),
            beats: Mutex::default(),
            jobs: Mutex::default(),
            reports: Mutex::default(),
            live: Mutex::default(),
            traces: Mutex::default(),
            sequence: AtomicU64::new(1_000),
            down: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            beat_takes_ms: AtomicU64::new(0),
        }));
        let objects = FakeObjects::default();
        let mut config = Config::new(WorkerId::new("w1").unwrap(), dir.path().to_owned());
        config.slots = 2;
        config.cpu_milli = 64_000;
        config.beat_ms = 100;
        config.cgroups = false;
        change(&mut config);
        let (handle, control) = volley_worker::control();
        let running = tokio::spawn(volley_worker::run(config, bus.clone(), objects.clone(), None, control));
        let mut world = Self { bus, objects, handle, running, _dir: dir, number: 0, next_job: 1 };
        world.until("a beat", |w| !state(&w.bus).beats.lock().unwrap().is_empty()).await;
        world
    }

    pub async fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let begin = Instant::now();
        while !done(self) {
            assert!(begin.elapsed() < Duration::from_secs(90), "waited too long for {what}");
            if self.running.is_finished() {
                panic!("worker ended while waiting for {what}");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub fn last_beat(&self) -> Beat {
        state(&self.bus).beats.lock().unwrap().last().cloned().unwrap()
    }

    pub fn incarnation(&self) -> Incarnation {
        self.last_beat().incarnation
    }

    /// Makes a job of a task's JSON; returns its id and number of tasks.
    pub fn job(&mut self, items: &str, task: &str) -> (JobId, u32) {
        let job = JobId(self.next_job);
        self.next_job += 1;
        let spec = format!(r#"{{"version":"volley/v1","name":"t","items":{items},"task":{task}}}"#);
        let features = Features::current();
        let valid = parse_and_validate(spec.as_bytes(), &features).unwrap_or_else(|e| panic!("{e}"));
        let tasks = valid.tasks().unwrap() as u32;
        self.offer(JobForWorker {
            job,
            tenant: TenantId::new("public").unwrap(),
            plan: plan::plan(&valid, tasks),
            spec: SpecRef::Inline(ByteVec::from(spec.into_bytes())),
            trace: None,
            pins: Vec::new(),
        });
        (job, tasks)
    }

    /// Makes a job known.
    pub fn offer(&self, found: JobForWorker) {
        state(&self.bus).jobs.lock().unwrap().insert(found.job, wire::encode(&found));
    }

    /// What is known of a job.
    pub fn offered(&self, job: JobId) -> JobForWorker {
        wire::decode("job", &state(&self.bus).jobs.lock().unwrap()[&job]).unwrap()
    }

    pub async fn order(&mut self, orders: Vec<Order>) {
        self.number += 1;
        let message = WorkMessage { incarnation: self.incarnation(), term: Term(1), number: self.number, orders };
        let incoming = Incoming { bytes: wire::encode(&message).into(), reply: Some("r".into()), trace: TRACE.parse().ok() };
        let sender = state(&self.bus).work.lock().unwrap().clone().unwrap();
        sender.send(incoming).await.unwrap();
    }

    pub fn bundle(&self, job: JobId, first: u32, count: u32) -> (BundleId, Order) {
        let id = BundleId { sequence: 100 + self.number, place: first };
        (id, Order::Run(Bundle { id, job, tasks: vec![Try { first, count, number: 1 }], volumes: Vec::new() }))
    }

    pub fn ends(&self) -> Vec<AttemptEnd> {
        state(&self.bus).reports.lock().unwrap().concat()
    }

    /// Runs one task and returns how it ended.
    pub async fn run_one(&mut self, task: &str) -> AttemptEnd {
        let (job, _) = self.job(r#"{"inline":[{"a":"item value"}]}"#, task);
        let (_, order) = self.bundle(job, 0, 1);
        self.order(vec![order]).await;
        self.end_of(job).await
    }

    pub async fn end_of(&mut self, job: JobId) -> AttemptEnd {
        let mut found = None;
        self.until("an end", |w| {
            found = w.ends().into_iter().find(|end| end.name.job == job);
            found.is_some()
        })
        .await;
        found.unwrap()
    }

    /// Drains and waits.
    pub async fn finish(mut self) {
        self.handle.drain();
        let ended = tokio::time::timeout(Duration::from_secs(20), &mut self.running).await;
        ended.expect("it left").expect("no panic").expect("no error");
        // Beats overtake each other: that it drains may come after that it leaves.
        assert!(state(&self.bus).beats.lock().unwrap().iter().any(|beat| beat.leaving));
    }
}

pub fn text(stream: &Option<volley_jobspecs::wire::report::Stream>) -> String {
    stream.as_ref().map(|s| String::from_utf8_lossy(&s.tail).into_owned()).unwrap_or_default()
}
