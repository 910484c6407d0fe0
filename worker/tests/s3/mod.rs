//! A real S3 server in this process, with a bucket.

use std::path::Path;

use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_store::{Store, StoreConfig};

/// Starts one that keeps its objects in a directory, and makes the bucket.
pub async fn start(dir: &Path) -> (EmbeddedServer, Store) {
    let server = EmbeddedServer::start(EmbeddedConfig {
        root: dir.to_owned(),
        bind: "127.0.0.1:0".parse().unwrap(),
        access_key: "key".into(),
        secret_key: "secret".into(),
        reserve_bytes: 0,
    });
    let server = server.await.unwrap();
    let store = connect(&server.endpoint()).await;
    store.ensure_bucket().await.unwrap();
    (server, store)
}

/// How its bucket is reached at this address.
pub fn config(endpoint: &str) -> StoreConfig {
    StoreConfig::new(endpoint, "volley-test", "key", "secret")
}

/// Its bucket at this address.
pub async fn connect(endpoint: &str) -> Store {
    Store::connect(&config(endpoint)).await.unwrap()
}
