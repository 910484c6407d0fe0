//! The client against another S3 server: SeaweedFS, where its binary is at hand.
//!
//! `VOLLEY_TEST_WEED` names the binary; otherwise `weed` is looked for on the `PATH`.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use futures::future::join_all;
use sha2::{Digest, Sha256};
use support::{ACCESS_KEY, SECRET_KEY, config, noise};
use volley_store::{ErrorKind, PutOutcome, Store, UploadOptions};

fn weed() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("VOLLEY_TEST_WEED") {
        return Some(path.into());
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join("weed")).find(|path| path.is_file())
}

struct Weed {
    child: Child,
    _dir: tempfile::TempDir,
}

impl Drop for Weed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    // SeaweedFS takes the port plus 10,000 for gRPC.
    loop {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if port < 50_000 && std::net::TcpListener::bind(("127.0.0.1", port + 10_000)).is_ok() {
            return port;
        }
    }
}

fn start(binary: PathBuf) -> (Weed, String) {
    let dir = tempfile::tempdir().unwrap();
    let identities = format!(
        r#"{{"identities":[{{"name":"t","credentials":[{{"accessKey":"{ACCESS_KEY}","secretKey":"{SECRET_KEY}"}}],"actions":["Admin","Read","Write","List","Tagging"]}}]}}"#
    );
    let s3_config = dir.path().join("s3.json");
    std::fs::write(&s3_config, identities).unwrap();
    let [master, volume, filer, s3] = [free_port(), free_port(), free_port(), free_port()];
    let child = Command::new(binary)
        .arg("server")
        .arg(format!("-dir={}", dir.path().display()))
        .arg("-ip=127.0.0.1")
        .arg(format!("-master.port={master}"))
        .arg(format!("-volume.port={volume}"))
        .arg("-filer")
        .arg(format!("-filer.port={filer}"))
        .arg("-s3")
        .arg(format!("-s3.port={s3}"))
        .arg(format!("-s3.config={}", s3_config.display()))
        .arg("-master.volumeSizeLimitMB=64")
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    (Weed { child, _dir: dir }, format!("http://127.0.0.1:{s3}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_works_with_seaweedfs() {
    let Some(binary) = weed() else {
        eprintln!("skipped: no SeaweedFS binary; set VOLLEY_TEST_WEED, or put `weed` on the PATH");
        return;
    };
    let (_weed, endpoint) = start(binary);
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
