//! Every operation of the client against the embedded server.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use sha2::{Digest, Sha256};
use support::{Mode, Proxy, noise, world};
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use volley_store::{ErrorKind, GetError, PART_BYTES_MIN, PutOutcome, UploadOptions};

const MIB: usize = 1024 * 1024;

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_written_read_and_deleted() {
    let w = world().await;
    let s = &w.store;
    assert!(!s.ensure_bucket().await.unwrap(), "it is there now");

    let etag = s.put("a/b", Bytes::from_static(b"hello world")).await.unwrap();
    s.put("a", Bytes::new()).await.unwrap();
    assert_eq!(s.get("a/b", 11).await.unwrap(), "hello world");
    assert_eq!(s.get("a", 0).await.unwrap(), "");
    assert_eq!(s.get_with_etag("a/b", 100).await.unwrap().1, etag);
    assert_eq!(s.get_range("a/b", 6, 3).await.unwrap(), "wor");
    assert_eq!(s.get_range("a/b", 6, 100).await.unwrap(), "world");
    assert_eq!(s.get_range("a/b", 6, 0).await.unwrap(), "");
    let meta = s.head("a/b").await.unwrap();
    assert_eq!((meta.bytes, &meta.etag), (11, &etag));
    assert!(meta.modified_ms > 1_600_000_000_000);
    let mut stream = s.get_stream("a/b").await.unwrap();
    assert_eq!(stream.bytes, 11);
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "hello world");

    let error = s.get("a/b", 10).await.unwrap_err();
    assert!(matches!(error, GetError::TooLarge { bytes: 11, bytes_max: 10, .. }), "{error}");
    let error = s.get_range("a/b", 11, 1).await.unwrap_err();
    assert!(matches!(error, GetError::PastEnd { start: 11, .. }), "{error}");
    let error = s.get("missing", 10).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let words = error.to_string();
    assert!(words.contains("s3://volley/cell/missing") && words.contains(&w.server.endpoint()), "{words}");
    assert_eq!(s.head("missing").await.unwrap_err().kind(), ErrorKind::NotFound);

    s.delete("a/b").await.unwrap();
    s.delete("a/b").await.unwrap();
    assert_eq!(s.get("a/b", 10).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(s.get("a", 0).await.unwrap(), "");
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conditional_writes_are_kept() {
    let w = world().await;
    let s = &w.store;
    let PutOutcome::Written { etag: first } = s.put_if_absent("head", "1".into()).await.unwrap() else { panic!() };
    assert_eq!(s.put_if_absent("head", "2".into()).await.unwrap(), PutOutcome::Refused);
    let PutOutcome::Written { etag: second } = s.put_if_match("head", "3".into(), &first).await.unwrap() else { panic!() };
    assert_ne!(first, second);
    assert_eq!(s.put_if_match("head", "4".into(), &first).await.unwrap(), PutOutcome::Refused);
    assert_eq!(s.get("head", 1).await.unwrap(), "3");
    assert_eq!(s.put_if_match("missing", "5".into(), &first).await.unwrap(), PutOutcome::Refused);

    for round in 0..20 {
        let key = format!("race/{round}");
        let ends = join_all((0..16).map(|n| {
            let (s, key) = (s.clone(), key.clone());
            tokio::spawn(async move { s.put_if_absent(&key, format!("{n}").into()).await.unwrap() })
        }))
        .await;
        let winners: Vec<usize> = (0..16).filter(|n| ends[*n].as_ref().unwrap().is_written()).collect();
        assert_eq!(winners.len(), 1, "round {round}");
        assert_eq!(s.get(&key, 2).await.unwrap(), winners[0].to_string());

        let etag = s.head(&key).await.unwrap().etag;
        let ends = join_all((0..16).map(|n| s.put_if_match(&key, format!("again {n}").into(), &etag))).await;
        assert_eq!(ends.iter().filter(|end| end.as_ref().unwrap().is_written()).count(), 1);
    }
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_stream_is_stored_in_parts_and_fetched() {
    let w = world().await;
    let data = noise(50 * MIB + 12_345, 7);
    let sha256 = hex::encode(Sha256::digest(&data));
    let options = UploadOptions { content_type: Some("text/x-noise".into()), ..UploadOptions::default() };
    let uploaded = w.store.upload_stream("big", &data[..], &options).await.unwrap();
    assert_eq!((uploaded.bytes, &uploaded.sha256), (data.len() as u64, &sha256));
    assert!(uploaded.etag.trim_matches('"').ends_with("-7"), "seven parts: {}", uploaded.etag);
    let meta = w.store.head("big").await.unwrap();
    assert_eq!((meta.bytes, meta.content_type.as_deref()), (data.len() as u64, Some("text/x-noise")));
    assert_eq!(std::fs::read_dir(w.dir.path().join("uploads")).unwrap().count(), 0);

    let path = w.dir.path().join("fetched");
    let fetched = w.store.download_to("big", &path, Some(&sha256)).await.unwrap();
    assert_eq!((fetched.bytes, &fetched.sha256), (uploaded.bytes, &sha256));
    assert!(std::fs::read(&path).unwrap() == data);
    let middle = w.store.get_range("big", 30_000_000, 1000).await.unwrap();
    assert_eq!(middle, data[30_000_000..30_001_000]);

    // Exactly one part, and one byte less: both sides of the border.
    for bytes in [PART_BYTES_MIN as usize, PART_BYTES_MIN as usize - 1, 2 * PART_BYTES_MIN as usize, 0, 1] {
        let uploaded = w.store.upload_stream("border", &data[..bytes], &UploadOptions::default()).await.unwrap();
        assert_eq!(uploaded.sha256, hex::encode(Sha256::digest(&data[..bytes])));
        assert!(w.store.get("border", bytes as u64).await.unwrap() == data[..bytes]);
    }

    let wrong = "0".repeat(64);
    let path = w.dir.path().join("wrong");
    let error = w.store.download_to("big", &path, Some(&wrong)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains(&sha256));
    assert!(!path.exists());
    let left: Vec<_> = std::fs::read_dir(w.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("volley-part")), "{left:?}");
    w.server.shutdown().await;
}

/// Gives `left` bytes, counts them, then fails or ends.
struct Source {
    left: usize,
    given: Arc<AtomicUsize>,
    fails: bool,
}

impl AsyncRead for Source {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.left == 0 && self.fails {
            return Poll::Ready(Err(io::Error::other("the pipe broke")));
        }
        let bytes = buf.remaining().min(self.left).min(64 * 1024);
        buf.initialize_unfilled_to(bytes).fill(7);
        buf.advance(bytes);
        self.left -= bytes;
        self.given.fetch_add(bytes, Ordering::SeqCst);
        Poll::Ready(Ok(()))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_holds_five_parts_at_most_and_a_dropped_one_is_aborted() {
    let w = world().await;
    let proxy = Proxy::start(w.server.addr()).await;
    proxy.set(Mode::StallParts);
    let store = proxy.store().await;
    let given = Arc::new(AtomicUsize::new(0));
    let source = Source { left: 500 * MIB, given: given.clone(), fails: false };
    let uploading = tokio::spawn(async move { store.upload_stream("stalled", source, &UploadOptions::default()).await });
    tokio::time::sleep(Duration::from_secs(2)).await;
    let held = given.load(Ordering::SeqCst) as u64;
    // Four on their way, and the fifth is not begun before there is room.
    assert_eq!(held, 4 * PART_BYTES_MIN);
    assert_eq!(std::fs::read_dir(w.dir.path().join("uploads")).unwrap().count(), 1);

    proxy.set(Mode::Pass);
    uploading.abort();
    let _ = uploading.await;
    let mut left = 1;
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        left = std::fs::read_dir(w.dir.path().join("uploads")).unwrap().count();
        if left == 0 {
            break;
        }
    }
    assert_eq!(left, 0, "aborted in the background");
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_upload_leaves_nothing() {
    let w = world().await;
    let source = |left| Source { left, given: Arc::default(), fails: true };
    for bytes in [100, 20 * MIB] {
        let error = w.store.upload_stream("broken", source(bytes), &UploadOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Local);
        assert!(error.to_string().contains("the pipe broke"), "{error}");
    }
    let options = UploadOptions { bytes_max: Some(10 * MIB as u64), ..UploadOptions::default() };
    let error = w.store.upload_stream("broken", source(20 * MIB), &options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert_eq!(w.store.head("broken").await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(std::fs::read_dir(w.dir.path().join("uploads")).unwrap().count(), 0);
    assert_eq!(std::fs::read_dir(w.dir.path().join("tmp")).unwrap().count(), 0);
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_any_form_are_listed_in_order_page_by_page() {
    let w = world().await;
    let long = "x".repeat(700);
    let mut keys: Vec<String> =
        ["a", "a!b", "a+b c", "a/", "a/b", "a/b/c", "a//b", "a0", "é/ü", "%41", "..", "q/../r", "tab\tnl\n", "\u{1}", "<&>"]
            .into_iter()
            .map(str::to_owned)
            .chain([format!("{long}/1"), format!("{long}/2"), long.clone(), format!("k/{long}")])
            .collect();
    for key in &keys {
        w.store.put(key, key.clone().into()).await.unwrap();
    }
    keys.sort();
    for key in &keys {
        assert_eq!(w.store.get(key, 2000).await.unwrap(), *key);
    }
    for limit in [1, 2, 7, 1000] {
        let mut seen = Vec::new();
        let mut after = None;
        loop {
            let page = w.store.list("", after.as_deref(), limit).await.unwrap();
            assert!(page.objects.len() <= limit);
            seen.extend(page.objects.into_iter().map(|object| object.key));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(seen, keys, "limit {limit}");
    }
    let under: Vec<_> = w.store.list("a/", None, 10).await.unwrap().objects.into_iter().map(|object| object.key).collect();
    assert_eq!(under, ["a/", "a//b", "a/b", "a/b/c"]);

    w.store.delete_many(&keys).await.unwrap();
    assert!(w.store.list("", None, 10).await.unwrap().objects.is_empty());
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_keys_than_a_batch_are_deleted() {
    let w = world().await;
    let keys: Vec<String> = (0..1050).map(|n| format!("many/{n:04}")).collect();
    for some in keys.chunks(50) {
        for end in join_all(some.iter().map(|key| w.store.put(key, Bytes::new()))).await {
            end.unwrap();
        }
    }
    let page = w.store.list("many/", None, 5000).await.unwrap();
    assert_eq!((page.objects.len(), page.next.as_deref()), (1000, Some("many/0999")));
    let page = w.store.list("many/", page.next.as_deref(), 1000).await.unwrap();
    assert_eq!((page.objects.len(), page.next), (50, None));
    w.store.delete_many(&keys).await.unwrap();
    assert!(w.store.list("many/", None, 10).await.unwrap().objects.is_empty());
    w.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_uploads_are_found_and_aborted() {
    let w = world().await;
    let proxy = Proxy::start(w.server.addr()).await;
    proxy.set(Mode::StallParts);
    let store = proxy.store().await;
    // Two that a dead process would leave: their abort is stopped with their runtime's task.
    let stuck: Vec<_> = (0..2)
        .map(|n| {
            let (store, data) = (store.clone(), vec![0; 9 * MIB]);
            tokio::spawn(async move { store.upload_stream(&format!("jobs/{n}"), &data[..], &UploadOptions::default()).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let later = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap() + 60_000;
    assert_eq!(w.store.abort_stale_uploads("jobs/", 1_000).await.unwrap(), 0, "none is that old");
    assert_eq!(w.store.abort_stale_uploads("other/", later).await.unwrap(), 0);
    assert_eq!(w.store.abort_stale_uploads("jobs/", later).await.unwrap(), 2);
    assert_eq!(std::fs::read_dir(w.dir.path().join("uploads")).unwrap().count(), 0);
    for task in stuck {
        task.abort();
    }
    w.server.shutdown().await;
}
