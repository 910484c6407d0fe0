//! The log's stream: how it is made, and how large and in how many copies it is kept.
//!
//! Owns its configuration and bringing a stream that is there to what was asked for. Does not own what is done with it (`log`).

use std::collections::HashMap;
use std::time::Duration;

use async_nats::jetstream::context::{CreateStreamError, CreateStreamErrorKind, GetStreamErrorKind};
use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy, StorageType, Stream};
use async_nats::jetstream::{Context, ErrorCode};
use volley_jobspecs::subjects::{LOG_ALL, LOG_STREAM};

use super::log::{CLUSTER_ID, LogError, nats};

/// Bytes of a log that nobody names a size for: some ten million tasks between two checkpoints. NATS sets them aside. A log without a
/// limit can't tell when it is nearly full, and would stop with everything else that is on the server's disk.
const BYTES_DEFAULT: i64 = 4 << 30;
/// Where the server has less room than that, half of it is tried, and so on down to this.
const BYTES_LEAST: i64 = 16 << 20;

/// What is asked for. What isn't named stays as it is, and is chosen for a new log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shape {
    /// Copies.
    pub replicas: Option<usize>,
    /// Most bytes.
    pub bytes_max: Option<u64>,
}

/// Opens the stream and brings it to this shape, and makes it when there is none.
///
/// # Errors
/// [`LogError::Nats`], [`LogError::Replicas`], [`LogError::Room`].
pub async fn open(context: &Context, shape: Shape, cluster: &str) -> Result<Stream, LogError> {
    for _ in 0..2 {
        if let Some(stream) = find(context).await? {
            return bring(context, stream, shape).await;
        }
        match make(context, shape, cluster).await {
            // Another coordinator was faster.
            Err(error) if code(&error) == Some(ErrorCode::STREAM_NAME_EXIST) => {}
            made => return made.map_err(|error| refused(&error, shape)),
        }
    }
    Err(nats("opening the stream VOLLEY_LOG")(&"it comes and goes"))
}

async fn find(context: &Context) -> Result<Option<Stream>, LogError> {
    match context.get_stream(LOG_STREAM).await {
        Ok(stream) => Ok(Some(stream)),
        Err(error) => match error.kind() {
            GetStreamErrorKind::JetStream(why) if why.error_code() == ErrorCode::STREAM_NOT_FOUND => Ok(None),
            _ => Err(nats("opening the stream VOLLEY_LOG")(&error)),
        },
    }
}

async fn make(context: &Context, shape: Shape, cluster: &str) -> Result<Stream, CreateStreamError> {
    let mut config = Config {
        name: LOG_STREAM.to_owned(),
        subjects: vec![LOG_ALL.to_owned()],
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        discard: DiscardPolicy::New,
        deny_delete: true,
        num_replicas: shape.replicas.unwrap_or(1),
        // Broker dedupe is never relied upon (DESIGN §5); the shortest window costs the least memory.
        duplicate_window: Duration::from_millis(100),
        metadata: HashMap::from([(CLUSTER_ID.to_owned(), cluster.to_owned())]),
        ..Config::default()
    };
    for bytes in sizes(shape) {
        config.max_bytes = bytes;
        match context.create_stream(config.clone()).await {
            Err(error) if bytes > 0 && has_no_room(&error) && shape.bytes_max.is_none() => {}
            made => return made,
        }
    }
    context.create_stream(config).await
}

/// Gives a stream that is there what it lacks.
async fn bring(context: &Context, stream: Stream, shape: Shape) -> Result<Stream, LogError> {
    let mut config = stream.cached_info().config.clone();
    let replicas = shape.replicas.filter(|wanted| *wanted != config.num_replicas);
    let bytes = match shape.bytes_max {
        Some(wanted) => i64::try_from(wanted).ok().filter(|wanted| *wanted != config.max_bytes),
        // Made by a version that gave it none.
        None => (config.max_bytes <= 0).then_some(BYTES_DEFAULT),
    };
    if replicas.is_none() && bytes.is_none() {
        return Ok(stream);
    }
    config.num_replicas = replicas.unwrap_or(config.num_replicas);
    let used = i64::try_from(stream.cached_info().state.bytes).unwrap_or(i64::MAX);
    let tried = if bytes.is_some() { sizes(shape) } else { vec![config.max_bytes] };
    // A new log may be refused more room than it uses, but no log is made smaller than what is in it.
    for bytes in tried.into_iter().filter(|bytes| *bytes <= 0 || *bytes > used || shape.bytes_max.is_some()) {
        config.max_bytes = bytes;
        match context.update_stream(config.clone()).await {
            Ok(_) => break,
            Err(error) if bytes > 0 && has_no_room(&error) && shape.bytes_max.is_none() => {}
            Err(error) => return Err(refused(&error, shape)),
        }
    }
    find(context).await?.ok_or_else(|| nats("opening the stream VOLLEY_LOG")(&"it is gone"))
}

/// Sizes to try, the largest first; the last is no limit, where nobody named one.
fn sizes(shape: Shape) -> Vec<i64> {
    match shape.bytes_max {
        Some(bytes) => vec![i64::try_from(bytes).unwrap_or(i64::MAX)],
        None => {
            std::iter::successors(Some(BYTES_DEFAULT), |bytes| Some(bytes / 2).filter(|half| *half >= BYTES_LEAST)).chain([-1]).collect()
        }
    }
}

fn code(error: &CreateStreamError) -> Option<ErrorCode> {
    match error.kind() {
        CreateStreamErrorKind::JetStream(error) => Some(error.error_code()),
        _ => None,
    }
}

fn has_no_room(error: &CreateStreamError) -> bool {
    matches!(code(error), Some(ErrorCode::STORAGE_RESOURCES_EXCEEDED | ErrorCode::INSUFFICIENT_RESOURCES))
}

fn refused(error: &CreateStreamError, shape: Shape) -> LogError {
    match (code(error), shape) {
        (Some(ErrorCode::STREAM_REPLICAS_NOT_SUPPORTED | ErrorCode::CLUSTER_NO_PEERS), Shape { replicas: Some(replicas), .. }) => {
            LogError::Replicas { replicas, why: error.to_string() }
        }
        (Some(_), Shape { bytes_max: Some(bytes), .. }) if has_no_room(error) => LogError::Room { bytes, why: error.to_string() },
        _ => nats("opening the stream VOLLEY_LOG")(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_halved_until_there_is_room_unless_one_was_named() {
        let all = sizes(Shape::default());
        assert_eq!((all.first(), all.last()), (Some(&BYTES_DEFAULT), Some(&-1)));
        assert!(all.windows(2).all(|pair| pair[0] == 2 * pair[1] || pair[1] == -1) && all.contains(&BYTES_LEAST), "{all:?}");
        assert_eq!(sizes(Shape { bytes_max: Some(7), replicas: None }), [7]);
    }
}
