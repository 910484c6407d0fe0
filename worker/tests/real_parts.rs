//! A worker on a real nats-server and a real S3 server, with the coordinator played by hand.
//!
//! Wants `nats-server` in PATH or named by NATS_SERVER; without it the NATS tests say so and pass.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

#[expect(dead_code, reason = "shared with tests of leases")]
mod nats;
mod s3;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::jetstream;
use futures::StreamExt;
use minicbor::bytes::ByteVec;
use sha2::{Digest, Sha256};
use volley_jobspecs::ids::{BundleId, JobId, TenantId, Term, WorkerId};
use volley_jobspecs::parse::parse_and_validate;
use volley_jobspecs::spec::Isolation;
use volley_jobspecs::validate::Features;
use volley_jobspecs::wire::plan::SpecRef;
use volley_jobspecs::wire::record::Record;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::work::{Beat, BeatAnswer, Bundle, JobForWorker, Order, Try, WorkAnswer, WorkMessage};
use volley_jobspecs::{keys, plan, subjects, wire};
use volley_store::embedded::EmbeddedServer;
use volley_store::{Store, StoreConfig};
use volley_worker::ports::{ObjectName, Objects};
use volley_worker::{Config, NatsBus, S3Objects};

use nats::Nats;

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

async fn bucket(dir: &Path) -> (EmbeddedServer, S3Objects) {
    let (server, store) = s3::start(dir).await;
    let objects = S3Objects::new(&store, s3::config(&server.endpoint()), Duration::from_secs(5));
    (server, objects)
}

/// Answers beats and questions about jobs.
fn play_coordinator(client: &async_nats::Client, jobs: BTreeMap<JobId, Vec<u8>>) -> Arc<Mutex<Vec<Beat>>> {
    let beats: Arc<Mutex<Vec<Beat>>> = Arc::default();
    let (seen, beat_client) = (Arc::clone(&beats), client.clone());
    tokio::spawn(async move {
        let mut messages = beat_client.subscribe(subjects::BEATS_ALL).await.unwrap();
        while let Some(message) = messages.next().await {
            let beat: Beat = wire::decode("beat", &message.payload).unwrap();
            let joined = !beat.leaving;
            seen.lock().unwrap().push(beat);
            let answer = wire::encode(&BeatAnswer { term: Term(1), linger_ms: 2, joined, lost: false });
            let _ = beat_client.publish(message.reply.unwrap(), answer.into()).await;
        }
    });
    let job_client = client.clone();
    tokio::spawn(async move {
        let mut messages = job_client.subscribe(subjects::JOBS_ALL).await.unwrap();
        while let Some(message) = messages.next().await {
            let job = message.subject.rsplit('.').next().unwrap().parse().unwrap();
            let answer = jobs.get(&job).cloned().unwrap_or_default();
            let _ = job_client.publish(message.reply.unwrap(), answer.into()).await;
        }
    });
    beats
}

fn job(id: JobId, spec: &str) -> Vec<u8> {
    let valid = parse_and_validate(spec.as_bytes(), &Features::with_isolation(&[Isolation::Process])).unwrap();
    let plan = plan::plan(&valid, valid.tasks().unwrap() as u32);
    let spec = SpecRef::Inline(ByteVec::from(spec.as_bytes().to_vec()));
    wire::encode(&JobForWorker { job: id, tenant: TenantId::new("public").unwrap(), plan, spec, trace: None, pins: Vec::new() })
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_run_and_report_over_a_nats_server_that_is_killed_and_comes_back() {
    let Some(mut nats) = Nats::start() else { return };
    let place = tempfile::tempdir().unwrap();
    let (_server, objects) = bucket(&place.path().join("s3")).await;
    let client = nats.client().await;
    let js = jetstream::new(client.clone());
    let stream =
        jetstream::stream::Config { name: subjects::LOG_STREAM.into(), subjects: vec![subjects::LOG_ALL.into()], ..Default::default() };
    let begin = Instant::now();
    while js.create_stream(stream.clone()).await.is_err() {
        assert!(begin.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let spec = r#"{"version":"volley/v1","name":"t","items":{"count":40},"task":{"isolation":"process",
        "command":"sleep 0.1; echo ${index} > $VOLLEY_OUTPUT_DIR/f; seq 2000"}}"#;
    let beats = play_coordinator(&client, BTreeMap::from([(JobId(1), job(JobId(1), spec))]));
    let worker = WorkerId::new("w1").unwrap();
    let mut config = Config::new(worker.clone(), place.path().join("worker"));
    config.beat_ms = 200;
    config.slots = 4;
    config.cpu_milli = 4_000;
    let (handle, control) = volley_worker::control();
    let bus = NatsBus::new(nats.client().await);
    let running = tokio::spawn(volley_worker::run(config, bus, objects.clone(), None, control));
    let begin = Instant::now();
    while !handle.status().joined {
        assert!(begin.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let incarnation = beats.lock().unwrap().last().unwrap().incarnation;
    let orders = (0..4)
        .map(|place| {
            let id = BundleId { sequence: 7, place };
            Order::Run(Bundle { id, job: JobId(1), tasks: vec![Try { first: place * 10, count: 10, number: 1 }], volumes: Vec::new() })
        })
        .collect();
    let message = wire::encode(&WorkMessage { incarnation, term: Term(1), number: 1, orders });
    let answer = client.request(subjects::work(&worker), message.into()).await.unwrap();
    let answer: WorkAnswer = wire::decode("answer", &answer.payload).unwrap();
    assert_eq!((answer.incarnation, answer.taken), (incarnation, 1));

    tokio::time::sleep(Duration::from_millis(300)).await;
    nats.kill();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    nats.restart();

    let ends = read_log(&js, 40).await;
    for (index, end) in &ends {
        assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
        assert_eq!(end.outputs.map(|o| o.files), Some(1));
        let kept = objects.get(&keys::attempt_output(&end.name, "f"), 100).await.unwrap();
        assert_eq!(kept, format!("{index}\n").as_bytes());
        let log = objects.get(&keys::attempt_log(&end.name, "stdout"), 100_000).await.unwrap();
        assert!(log.ends_with(b"1999\n2000\n") && end.stdout.as_ref().is_some_and(|s| s.tail.ends_with(b"1999\n2000\n")));
    }
    handle.drain();
    tokio::time::timeout(Duration::from_secs(20), running).await.unwrap().unwrap().unwrap();
    let last = beats.lock().unwrap().last().cloned().unwrap();
    assert!(last.leaving && last.held.is_empty() && last.reported > 0);
}

/// Ends of `count` tasks, each by its first record; a repeated record is dropped, as the coordinator does.
async fn read_log(js: &jetstream::Context, count: usize) -> BTreeMap<u32, AttemptEnd> {
    let begin = Instant::now();
    loop {
        let mut ends = BTreeMap::new();
        if let Ok(mut stream) = js.get_stream(subjects::LOG_STREAM).await {
            let last = stream.info().await.map_or(0, |info| info.state.last_sequence);
            for sequence in 1..=last {
                let Ok(message) = stream.get_raw_message(sequence).await else { break };
                let Ok(Record::Report(report)) = wire::decode::<Record>("record", &message.payload) else { panic!() };
                for end in report.ends {
                    ends.entry(end.name.index).or_insert(end);
                }
            }
        }
        if ends.len() == count {
            return ends;
        }
        assert!(begin.elapsed() < Duration::from_secs(40), "{} of {count}", ends.len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_move_whole_and_other_buckets_are_reached() {
    let place = tempfile::tempdir().unwrap();
    let (server, objects) = bucket(&place.path().join("s3")).await;
    let big = vec![7_u8; 20 << 20];
    std::fs::write(place.path().join("big"), &big).unwrap();
    let moved = objects.upload("big", std::fs::File::open(place.path().join("big")).unwrap()).await.unwrap();
    assert_eq!((moved.bytes, moved.sha256.as_str()), (20 << 20, sha256(&big).as_str()));
    let other = StoreConfig::new(&server.endpoint(), "other-bucket", "key", "secret");
    let store = Store::connect(&other).await.unwrap();
    store.ensure_bucket().await.unwrap();
    store.put("a/b", "hello".into()).await.unwrap();
    let name = ObjectName { bucket: Some("other-bucket".into()), key: "a/b".into() };
    let to = place.path().join("got");
    let moved = objects.download(&name, &to, Some(&sha256(b"hello"))).await.unwrap();
    assert_eq!((moved.bytes, std::fs::read(&to).unwrap().as_slice()), (5, b"hello".as_slice()));
    let missing = ObjectName { bucket: None, key: "none".into() };
    let error = objects.download(&missing, &place.path().join("x"), None).await.unwrap_err();
    assert!(matches!(error, volley_worker::ports::ObjectError::Missing(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_come_over_http_and_trouble_is_told_apart() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut tries = 0;
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut request = vec![0; 4_096];
            let len = socket.read(&mut request).await.unwrap();
            let answer = if request[..len].starts_with(b"GET /missing") {
                "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            } else if tries < 2 {
                tries += 1;
                "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            } else {
                "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"
            };
            socket.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    let place = tempfile::tempdir().unwrap();
    let to = place.path().join("f");
    let moved = volley_worker::io::http::download(&format!("{url}/f"), &to, Some(&sha256(b"hello"))).await.unwrap();
    assert_eq!((moved.bytes, std::fs::read(&to).unwrap().as_slice()), (5, b"hello".as_slice()));
    let missing = volley_worker::io::http::download(&format!("{url}/missing"), &to, None).await.unwrap_err();
    assert!(missing.to_string().contains("404"), "{missing}");
    let wrong = volley_worker::io::http::download(&format!("{url}/f"), &to, Some(&"0".repeat(64))).await.unwrap_err();
    assert!(matches!(wrong, volley_worker::ports::ObjectError::Mismatch(_)), "{wrong}");
    assert!(!to.exists());
}
