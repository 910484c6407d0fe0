//! The client against another S3 server: SeaweedFS, where its binary is at hand.
//!
//! `VOLLEY_TEST_WEED` names the binary; otherwise `weed` is looked for on the `PATH`.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;
#[path = "support/weed.rs"]
mod weed;

use std::time::Duration;

use futures::future::join_all;
use sha2::{Digest, Sha256};
use support::{ACCESS_KEY, SECRET_KEY, config, noise};
use volley_store::{ErrorKind, PutOutcome, Store, UploadOptions};

#[tokio::test(flavor = "multi_thread")]
async fn the_client_works_with_seaweedfs() {
    let Some(weed) = weed::Weed::start(ACCESS_KEY, SECRET_KEY) else { return };
    let endpoint = weed.endpoint.clone();
    let s = Store::connect(&config(&endpoint)).await.unwrap();
    for _ in 0..60 {
        if s.ensure_bucket().await.is_ok() && s.put("warm", "1".into()).await.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    s.delete("warm").await.unwrap();

    let PutOutcome::Written { etag } = s.put_if_absent("a/b", "1".into()).await.unwrap() else { panic!() };
    assert_eq!(s.put_if_absent("a/b", "2".into()).await.unwrap(), PutOutcome::Refused);
    assert!(s.put_if_match("a/b", "3".into(), &etag).await.unwrap().is_written());
    assert_eq!(s.put_if_match("a/b", "4".into(), &etag).await.unwrap(), PutOutcome::Refused);
    assert_eq!(s.get("a/b", 1).await.unwrap(), "3");
    assert_eq!(s.get("missing", 1).await.unwrap_err().kind(), ErrorKind::NotFound);
    s.probe().await.unwrap();
    // Harder than the probe: a race that a check followed by a write would lose.
    for round in 0..2 {
        let key = format!("race/{round}");
        let absent = join_all((0..32).map(|n| s.put_if_absent(&key, format!("{n}").into()))).await;
        let absent = absent.iter().filter(|end| end.as_ref().unwrap().is_written()).count();
        let etag = s.head(&key).await.unwrap().etag;
        let matching = join_all((0..32).map(|n| s.put_if_match(&key, format!("again {n}").into(), &etag))).await;
        let matching = matching.iter().filter(|end| end.as_ref().unwrap().is_written()).count();
        assert_eq!((absent, matching), (1, 1), "round {round}");
    }

    for key in ["k/1", "k/2 +é", "k/3"] {
        s.put(key, key.into()).await.unwrap();
    }
    let listed: Vec<_> = s.list("k/", None, 10).await.unwrap().objects.into_iter().map(|object| object.key).collect();
    assert_eq!(listed, ["k/1", "k/2 +é", "k/3"]);
    let page = s.list("k/", Some("k/1"), 1).await.unwrap();
    assert_eq!((page.objects[0].key.as_str(), page.next.as_deref()), ("k/2 +é", Some("k/2 +é")));
    s.delete_many(&listed).await.unwrap();
    assert!(s.list("k/", None, 10).await.unwrap().objects.is_empty());

    let data = noise(20 << 20, 9);
    let uploaded = s.upload_stream("big", &data[..], &UploadOptions::default()).await.unwrap();
    assert_eq!(uploaded.sha256, hex::encode(Sha256::digest(&data)));
    let mut fetched = Vec::new();
    s.download("big", &mut fetched, Some(&uploaded.sha256)).await.unwrap();
    assert!(fetched == data);
    assert_eq!(s.get_range("big", 9 << 20, 100).await.unwrap(), data[9 << 20..(9 << 20) + 100]);

    let wrong = volley_store::StoreConfig { credentials: Some((ACCESS_KEY.into(), "wrong".into())), ..config(&endpoint) };
    assert_eq!(Store::connect(&wrong).await.unwrap().get("big", 1).await.unwrap_err().kind(), ErrorKind::Denied);
}
