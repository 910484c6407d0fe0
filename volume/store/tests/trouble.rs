//! What happens when the store, the network or the credentials are not well.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use support::{ACCESS_KEY, Mode, Proxy, SECRET_KEY, config, noise, serve, world};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer, StartError};
use volley_store::{ConnectError, ErrorKind, ProbeError, PutOutcome, Retry, Store, StoreConfig, UploadOptions};

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_away_for_a_while_is_waited_for() {
    let w = world().await;
    let proxy = Proxy::start(w.server.addr()).await;
    let store = proxy.store().await;
    proxy.set(Mode::Answer(503));
    let mode = proxy.mode.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(2)).await;
        *mode.lock().unwrap() = Mode::Pass;
    });
    let began = Instant::now();
    let options = UploadOptions::default();
    let (put, absent, upload) =
        tokio::join!(store.put("a", "1".into()), store.put_if_absent("b", "2".into()), store.upload_stream("c", &b"3"[..], &options),);
    put.unwrap();
    assert!(absent.unwrap().is_written());
    upload.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(2));
    assert!(began.elapsed() < Duration::from_secs(10), "it comes back soon after the store does");
    assert!(proxy.requests() > 6, "it was tried again");
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_budget_ends_it_with_a_clear_error() {
    let w = world().await;
    let proxy = Proxy::start(w.server.addr()).await;
    proxy.set(Mode::Answer(503));
    let short = Retry { budget: Duration::from_secs(1), ..config("http://x").retry };
    let store = proxy.store().await.with_retry(short);
    let began = Instant::now();
    let error = store.get("a", 1).await.unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(3));
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.is_retryable());
    let words = error.to_string();
    for part in ["get s3://volley/cell/a at http://127.0.0.1", "attempts", "503", "check that the endpoint is up"] {
        assert!(words.contains(part), "{words}");
    }

    // Nobody listens at all.
    let nobody = Store::connect(&config("http://127.0.0.1:9")).await.unwrap().with_retry(short);
    let error = nobody.put("a", Bytes::new()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let words = error.to_string();
    assert!(words.contains("refused") && !words.contains('{'), "{words}");
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_errors_are_not_tried_again() {
    let w = world().await;
    let proxy = Proxy::start(w.server.addr()).await;
    let store = proxy.store().await;
    for (status, kind) in [(400, ErrorKind::Rejected), (403, ErrorKind::Denied), (404, ErrorKind::NotFound), (501, ErrorKind::Rejected)] {
        proxy.set(Mode::Answer(status));
        let before = proxy.requests();
        let error = store.get("a", 1).await.unwrap_err();
        assert_eq!((error.kind(), proxy.requests() - before), (kind, 1), "{status}: {error}");
        assert!(!error.is_retryable());
    }
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_not_a_lost_race() {
    let w = world().await;
    let proxy = Proxy::start(w.server.addr()).await;
    let store = proxy.store().await;

    proxy.set(Mode::LoseOneAnswer);
    let PutOutcome::Written { etag } = store.put_if_absent("once", "1".into()).await.unwrap() else { panic!("it was ours") };
    assert_eq!(store.head("once").await.unwrap().etag, etag);

    proxy.set(Mode::LoseOneAnswer);
    assert!(store.put_if_match("once", "2".into(), &etag).await.unwrap().is_written());
    assert_eq!(store.get("once", 1).await.unwrap(), "2");

    // The same loss, but the object is someone else's.
    proxy.set(Mode::LoseOneAnswer);
    assert_eq!(store.put_if_absent("once", "3".into()).await.unwrap(), PutOutcome::Refused);
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_lost_anywhere_in_a_multipart_upload_do_no_harm() {
    let w = world().await;
    let proxy = Proxy::start(w.server.addr()).await;
    let store = proxy.store().await;
    let data = noise(17 << 20, 3);
    // Begin, three parts, complete: one of the five answers is lost each time.
    for skip in 0..5_u64 {
        let mode = proxy.mode.clone();
        let (requests, start) = (proxy.requests.clone(), proxy.requests());
        let arm = tokio::spawn(async move {
            while requests.load(std::sync::atomic::Ordering::SeqCst) < start + skip as usize {
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
            *mode.lock().unwrap() = Mode::LoseOneAnswer;
        });
        if skip == 0 {
            arm.await.unwrap();
        }
        let key = format!("parts/{skip}");
        let uploaded = store.upload_stream(&key, &data[..], &UploadOptions::default()).await.unwrap();
        assert_eq!(uploaded.bytes, data.len() as u64);
        assert!(store.get(&key, data.len() as u64).await.unwrap() == data[..]);
        proxy.set(Mode::Pass);
    }
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_download_is_resumed() {
    let w = world().await;
    let data = noise(3 << 20, 5);
    let etag = w.store.put("data", data.clone().into()).await.unwrap();
    let proxy = Proxy::start(w.server.addr()).await;
    let store = proxy.store().await;
    proxy.set(Mode::CutOneBody(2 << 20));
    let mut fetched = Vec::new();
    let done = store.download("data", &mut fetched, None).await.unwrap();
    assert_eq!((done.bytes, done.etag), (data.len() as u64, etag));
    assert!(fetched == data);
    assert_eq!(proxy.requests(), 2);

    proxy.set(Mode::CutOneBody(2 << 20));
    assert!(store.get("data", 4 << 20).await.unwrap() == data[..]);
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_are_refused() {
    let w = world().await;
    w.store.put("a", "1".into()).await.unwrap();
    for (access, secret) in [(ACCESS_KEY, "wrong"), ("nobody", SECRET_KEY)] {
        let config = StoreConfig { credentials: Some((access.into(), secret.into())), ..config(&w.server.endpoint()) };
        let store = Store::connect(&config).await.unwrap();
        for error in [store.get("a", 1).await.unwrap_err().to_string(), store.put("b", "1".into()).await.unwrap_err().to_string()] {
            assert!(error.contains("access denied") && error.contains("check the access key"), "{error}");
        }
        assert_eq!(store.head("a").await.unwrap_err().kind(), ErrorKind::Denied);
        let error = store.probe().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
    }
    // Without any signature.
    for request in ["GET /volley/cell/a", "PUT /volley/cell/b", "GET /", "DELETE /volley/cell/a", "GET /volley?list-type=2"] {
        let mut stream = TcpStream::connect(w.server.addr()).await.unwrap();
        let head = format!("{request} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 403"), "{request}: {answer}");
    }
    assert_eq!(w.store.get("a", 1).await.unwrap(), "1");
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_probe_takes_a_good_store_and_refuses_a_lying_one() {
    let w = world().await;
    w.store.probe().await.unwrap();
    assert!(w.store.list("", None, 10).await.unwrap().objects.is_empty(), "it tidied up");

    let proxy = Proxy::start(w.server.addr()).await;
    proxy.set(Mode::Lie);
    let error = proxy.store().await.probe().await.unwrap_err();
    assert!(matches!(error, ProbeError::Ignores { .. }), "{error}");
    assert!(error.to_string().contains("does not keep conditional writes"), "{error}");
    assert!(!error.to_string().contains('\n'));

    let other = StoreConfig { bucket: "missing".into(), ..config(&w.server.endpoint()) };
    let error = Store::connect(&other).await.unwrap().probe().await.unwrap_err();
    assert!(error.to_string().contains("the bucket does not exist"), "{error}");
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_keeps_all_that_was_answered_and_nothing_else() {
    let w = world().await;
    let data = noise(9 << 20, 1);
    w.store.put("small", "1".into()).await.unwrap();
    let big = w.store.upload_stream("big", &data[..], &UploadOptions::default()).await.unwrap();
    let before = w.store.list("", None, 10).await.unwrap();
    let endpoint = w.server.endpoint();
    let again = EmbeddedConfig {
        root: w.dir.path().into(),
        bind: w.server.addr(),
        access_key: ACCESS_KEY.into(),
        secret_key: SECRET_KEY.into(),
        reserve_bytes: 0,
    };
    let error = EmbeddedServer::start(EmbeddedConfig { bind: "127.0.0.1:0".parse().unwrap(), ..again.clone() }).await.unwrap_err();
    assert!(matches!(error, StartError::InUse { .. }), "{error}");
    w.server.shutdown().await;

    std::fs::write(w.dir.path().join("tmp/half-written"), "x").unwrap();
    // The same port, so that the store's pooled connections are stale: it must not notice.
    let server = EmbeddedServer::start(again).await.unwrap();
    assert_eq!(server.endpoint(), endpoint);
    assert_eq!(w.store.list("", None, 10).await.unwrap(), before);
    let (body, etag) = w.store.get_with_etag("big", 10 << 20).await.unwrap();
    assert!(body == data[..] && etag == big.etag);
    assert_eq!(std::fs::read_dir(w.dir.path().join("tmp")).unwrap().count(), 0);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_whose_server_is_going_is_waited_for() {
    let w = world().await;
    let next = EmbeddedConfig {
        root: w.dir.path().into(),
        bind: "127.0.0.1:0".parse().unwrap(),
        access_key: ACCESS_KEY.into(),
        secret_key: SECRET_KEY.into(),
        reserve_bytes: 0,
    };
    let starting = tokio::spawn(EmbeddedServer::start(next));
    // It has met the lock by then, or meets none: either way it must start.
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    assert!(!starting.is_finished(), "the lock is held");
    w.server.shutdown().await;
    starting.await.unwrap().unwrap().shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_see_whole_objects_while_they_are_replaced() {
    let w = world().await;
    let body = |n: u8| Bytes::from(vec![n; 300_000]);
    w.store.put("turning", body(0)).await.unwrap();
    let writer = {
        let store = w.store.clone();
        tokio::spawn(async move {
            for n in 1..60 {
                store.put("turning", body(n)).await.unwrap();
            }
        })
    };
    while !writer.is_finished() {
        let seen = w.store.get("turning", 300_000).await.unwrap();
        assert_eq!(seen.len(), 300_000);
        assert!(seen.iter().all(|byte| *byte == seen[0]), "never a mixture");
    }
    writer.await.unwrap();
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writers_and_deleters_of_one_directory_do_not_trip_each_other() {
    let w = world().await;
    let tasks: Vec<_> = (0..8)
        .map(|n| {
            let store = w.store.clone();
            tokio::spawn(async move {
                for round in 0..25 {
                    let key = format!("shared/deep/dir/{n}-{round}");
                    store.put(&key, "x".into()).await.unwrap();
                    store.delete(&key).await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(w.store.list("", None, 10).await.unwrap().objects.is_empty());
    w.server.shutdown().await;
}

#[tokio::test]
async fn bad_configuration_is_named() {
    let with = |change: fn(&mut StoreConfig)| {
        let mut config = config("http://127.0.0.1:1");
        change(&mut config);
        config
    };
    let error = Store::connect(&with(|c| c.endpoint = Some("localhost:9000".into()))).await.unwrap_err();
    assert!(matches!(error, ConnectError::BadEndpoint { .. }), "{error}");
    let error = Store::connect(&with(|c| c.bucket = "Upper".into())).await.unwrap_err();
    assert!(matches!(error, ConnectError::BadBucket { .. }), "{error}");
    let error = Store::connect(&with(|c| c.prefix = "a//b".into())).await.unwrap_err();
    assert!(matches!(error, ConnectError::BadPrefix { .. }), "{error}");
    assert!(!format!("{:?}", with(|_| {})).contains(SECRET_KEY));
}

/// Needs the right to mount a file system; says so where it has none.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_a_clear_answer_and_passes_when_space_is_freed() {
    let dir = tempfile::tempdir().unwrap();
    let mount = |args: &[&str]| std::process::Command::new(args[0]).args(&args[1..]).arg(dir.path()).status().is_ok_and(|s| s.success());
    if !mount(&["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs"]) {
        eprintln!("skipped: mounting a small tmpfs is not permitted here");
        return;
    }
    let server = serve(dir.path()).await;
    let store = Store::connect(&config(&server.endpoint())).await.unwrap();
    store.ensure_bucket().await.unwrap();
    store.put("ballast", Bytes::from(vec![0; 3 << 20])).await.unwrap();
    let short = store.with_retry(Retry { budget: Duration::from_millis(500), ..Retry::default() });
    let error = short.put("more", Bytes::from(vec![0; 2 << 20])).await.unwrap_err();
    let words = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{words}");
    assert!(words.contains("507") && words.contains("disk of the embedded S3 server is full"), "{words}");
    assert_eq!(store.head("more").await.unwrap_err().kind(), ErrorKind::NotFound);

    let waiting = {
        let store = store.clone();
        tokio::spawn(async move { store.put("more", Bytes::from(vec![0; 2 << 20])).await })
    };
    tokio::time::sleep(Duration::from_millis(300)).await;
    store.delete("ballast").await.unwrap();
    waiting.await.unwrap().unwrap();
    server.shutdown().await;
    assert!(mount(&["umount"]));
}
