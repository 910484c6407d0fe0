//! The bucket of template leases: who builds which template. Workers use it; most of them may not make it.
//!
//! Owns making it. Does not own what is in it (the worker's `template/lease`).

use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::kv::Config;
use async_nats::jetstream::stream::StorageType;
use volley_jobspecs::subjects::{TEMPLATES_BUCKET, TEMPLATES_KEPT_MS};

/// Makes it if it isn't there: in memory, since one that is lost with its server costs a second build.
pub async fn make(context: &Context) {
    if context.get_key_value(TEMPLATES_BUCKET).await.is_ok() {
        return;
    }
    let config = Config {
        bucket: TEMPLATES_BUCKET.to_owned(),
        description: "Who builds which template".to_owned(),
        history: 1,
        max_age: Duration::from_millis(TEMPLATES_KEPT_MS),
        storage: StorageType::Memory,
        ..Config::default()
    };
    if let Err(why) = context.create_key_value(config).await {
        tracing::warn!("workers can't agree on who builds a template, so each builds its own: making the bucket of their leases: {why}");
    }
}
