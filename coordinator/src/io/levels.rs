//! Which level of records each live coordinator's build can apply.
//!
//! Owns a bucket of KV in which every coordinator says so; an entry ends by itself. The leader raises the level when all can follow. Does
//! not own what a level means (`wire`).

use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::kv::{Config, Store};
use futures::TryStreamExt;
use tokio::time::Instant;
use volley_jobspecs::subjects::LEVELS_BUCKET;
use volley_jobspecs::wire::LEVEL;

/// An entry ends this long after it was written: a coordinator that is away longer learns of a new level from the log.
const TTL: Duration = Duration::from_secs(120);
/// It is written this often.
const SAY: Duration = Duration::from_secs(30);

/// What coordinators say of themselves.
#[derive(Debug)]
pub struct Levels {
    context: Context,
    replicas: usize,
    said: Option<Instant>,
}

impl Levels {
    /// In this JetStream.
    #[must_use]
    pub fn new(context: Context, replicas: usize) -> Self {
        Self { context, replicas, said: None }
    }

    async fn bucket(&self) -> Result<Store, String> {
        match self.context.get_key_value(LEVELS_BUCKET).await {
            Ok(store) => Ok(store),
            Err(_) => {
                let config =
                    Config { bucket: LEVELS_BUCKET.to_owned(), history: 1, max_age: TTL, num_replicas: self.replicas, ..Config::default() };
                self.context.create_key_value(config).await.map_err(|e| e.to_string())
            }
        }
    }

    /// Says what this build can apply. A failure is made good at the next look.
    pub async fn say(&mut self, name: &str) {
        if self.said.is_some_and(|said| said.elapsed() < SAY) {
            return;
        }
        let said = async {
            let store = self.bucket().await?;
            store.put(name, LEVEL.to_string().into()).await.map_err(|e| e.to_string())
        };
        match said.await {
            Ok(_) => self.said = Some(Instant::now()),
            Err(error) => tracing::warn!(error, "this coordinator could not say which level it supports; trying again"),
        }
    }

    /// The lowest level of all live coordinators; none when that can't be told, or when not even `name` is among them.
    pub async fn lowest(&self, name: &str) -> Option<u32> {
        let store = self.bucket().await.ok()?;
        let names: Vec<String> = store.keys().await.ok()?.try_collect().await.ok()?;
        let mut lowest = None;
        for key in names.iter().filter(|_| names.iter().any(|key| key == name)) {
            let value = store.get(key.as_str()).await.ok()?;
            // Ended since it was listed.
            let Some(value) = value else { continue };
            let level = std::str::from_utf8(&value).ok()?.parse().ok()?;
            lowest = Some(lowest.map_or(level, |lowest: u32| lowest.min(level)));
        }
        lowest
    }
}
