//! The lease: who may try to lead.
//!
//! Owns the key in KV and its clock. It is a courtesy among coordinators, not a fence: the fence is the log's own condition on the
//! leader's subject. Does not own what a leader does.

use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::kv::{Config, Store};
use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;
use volley_jobspecs::subjects::{LEASE_BUCKET, LEASE_KEY};

/// The lease ends this long after its last renewal (DESIGN §5).
pub const TTL: Duration = Duration::from_secs(6);
/// It is renewed this often.
pub const RENEW: Duration = Duration::from_secs(2);
/// It is given up this long after the last renewal that succeeded was *sent*: before it can end at the server.
pub const GIVE_UP: Duration = Duration::from_secs(4);

/// Tries for ever to hold the lease as `owner`. The receiver says until when it is held; an instant in the past: it is not.
#[must_use]
pub fn hold(context: Context, owner: String, replicas: usize) -> (watch::Receiver<Option<Instant>>, tokio::task::JoinHandle<()>) {
    let (sender, receiver) = watch::channel(None);
    let task = tokio::spawn(async move {
        while !sender.is_closed() {
            match bucket(&context, replicas).await {
                Ok(store) => run(&store, &owner, &sender).await,
                Err(error) => tracing::warn!(%error, "the lease's bucket can't be opened; trying again"),
            }
            tokio::time::sleep(RENEW / 4).await;
        }
    });
    (receiver, task)
}

async fn bucket(context: &Context, replicas: usize) -> Result<Store, String> {
    match context.get_key_value(LEASE_BUCKET).await {
        Ok(store) => Ok(store),
        Err(_) => {
            let config = Config { bucket: LEASE_BUCKET.to_owned(), history: 1, max_age: TTL, num_replicas: replicas, ..Config::default() };
            context.create_key_value(config).await.map_err(|e| e.to_string())
        }
    }
}

/// Tries until something fails that only opening the bucket anew can mend.
async fn run(store: &Store, owner: &str, sender: &watch::Sender<Option<Instant>>) {
    let mut revision = None;
    while !sender.is_closed() {
        let sent = Instant::now();
        let value = Bytes::from(owner.to_owned());
        let result = match revision {
            Some(revision) => timed(store.update(LEASE_KEY, value, revision)).await,
            None => timed(store.create(LEASE_KEY, value)).await,
        };
        match result {
            Ok(new) => {
                revision = Some(new);
                _ = sender.send(Some(sent + GIVE_UP));
                tokio::time::sleep(RENEW).await;
            }
            Err(error) => {
                // Whether a renewal that got no answer was made is not known; the key ends by itself, and is then made anew.
                if revision.take().is_some() {
                    tracing::warn!(error, "the lease was not renewed");
                }
                tokio::time::sleep(RENEW / 4).await;
            }
        }
    }
    if revision.is_some() {
        _ = store.purge(LEASE_KEY).await;
    }
}

async fn timed<E: std::fmt::Display>(request: impl Future<Output = Result<u64, E>>) -> Result<u64, String> {
    match tokio::time::timeout(RENEW, request).await {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("no answer in time".to_owned()),
    }
}
