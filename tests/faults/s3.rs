//! The S3 server of a test cluster, as a process of its own so that it can be killed and frozen.
//!
//! `serve` is no test: `cluster` starts this binary a second time with only it, and its environment says where.

use std::path::PathBuf;

use tokio::signal::unix::{SignalKind, signal};
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_store::{Store, StoreConfig};

use crate::cluster::{BUCKET, KEYS};

#[tokio::test]
#[ignore = "the S3 server that other tests start"]
async fn serve() {
    let (Some(dir), Ok(port)) = (std::env::var_os("VOLLEY_FAULTS_S3_DIR"), std::env::var("VOLLEY_FAULTS_S3_PORT")) else { return };
    let dir = PathBuf::from(dir);
    let mut term = signal(SignalKind::terminate()).expect("a signal handler");
    let config = EmbeddedConfig {
        root: dir.join("s3"),
        bind: ([127, 0, 0, 1], port.parse().expect("a port")).into(),
        access_key: KEYS.0.to_owned(),
        secret_key: KEYS.1.to_owned(),
        reserve_bytes: 0,
    };
    let server = EmbeddedServer::start(config).await.expect("the embedded server");
    let store = Store::connect(&StoreConfig::new(&server.endpoint(), BUCKET, KEYS.0, KEYS.1)).await.expect("a client");
    store.ensure_bucket().await.expect("the bucket");
    std::fs::write(dir.join("s3-ready"), "").expect("a mark");
    _ = term.recv().await;
    server.shutdown().await;
}
