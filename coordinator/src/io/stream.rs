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

/// The stream that is there.
///
/// # Errors
/// [`LogError::Nats`].
pub(crate) async fn find(context: &Context) -> Result<Option<Stream>, LogError> {
    match context.get_stream(LOG_STREAM).await {
        Ok(stream) => Ok(Some(stream)),
        Err(error) => match error.kind() {
            GetStreamErrorKind::JetStream(why) if why.error_code() == ErrorCode::STREAM_NOT_FOUND => Ok(None),
            _ => Err(nats("opening the stream VOLLEY_LOG")(&error)),
        },
    }
}

async fn make(context: &Context, shape: Shape, cluster: &str) -> Result<Stream, CreateStreamError> {
    let config = Config {
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
    let (sizes, last) = sizes(shape);
    with_room(&sizes, last, |max_bytes| context.create_stream(Config { max_bytes, ..config.clone() })).await
}

/// Gives a stream that is there what it lacks.
async fn bring(context: &Context, stream: Stream, shape: Shape) -> Result<Stream, LogError> {
    let mut config = stream.cached_info().config.clone();
    let replicas = shape.replicas.filter(|wanted| *wanted != config.num_replicas);
    let (mut tried, last) = match shape.bytes_max {
        // Made by a version that gave it none.
        None if config.max_bytes <= 0 => sizes(shape),
        None => (Vec::new(), config.max_bytes),
        Some(_) => sizes(shape),
    };
    if replicas.is_none() && tried.is_empty() && last == config.max_bytes {
        return Ok(stream);
    }
    config.num_replicas = replicas.unwrap_or(config.num_replicas);
    let used = i64::try_from(stream.cached_info().state.bytes).unwrap_or(i64::MAX);
    // A new log may be refused more room than it uses, but no log is made smaller than what is in it.
    tried.retain(|bytes| *bytes > used);
    let update = |max_bytes| {
        let config = Config { max_bytes, ..config.clone() };
        async move { context.update_stream(config).await }
    };
    let updated = with_room(&tried, last, update).await;
    updated.map_err(|error| refused(&error, shape))?;
    find(context).await?.ok_or_else(|| nats("opening the stream VOLLEY_LOG")(&"it is gone"))
}

/// Asks for one size after the other while there is no room for it, and for `last` in the end.
async fn with_room<T, A>(sizes: &[i64], last: i64, ask: impl Fn(i64) -> A) -> Result<T, CreateStreamError>
where
    A: Future<Output = Result<T, CreateStreamError>>,
{
    for bytes in sizes {
        match ask(*bytes).await {
            Err(error) if has_no_room(&error) => {}
            asked => return asked,
        }
    }
    ask(last).await
}

/// Sizes to try, the largest first, and what is asked for in the end: the one that was named, or no limit where nobody named one.
fn sizes(shape: Shape) -> (Vec<i64>, i64) {
    match shape.bytes_max {
        Some(bytes) => (Vec::new(), i64::try_from(bytes).unwrap_or(i64::MAX)),
        None => {
            let halves = std::iter::successors(Some(BYTES_DEFAULT), |bytes| Some(bytes / 2).filter(|half| *half >= BYTES_LEAST));
            (halves.collect(), -1)
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
        let (all, last) = sizes(Shape::default());
        assert_eq!((all.first(), all.last(), last), (Some(&BYTES_DEFAULT), Some(&BYTES_LEAST), -1));
        assert!(all.windows(2).all(|pair| pair[0] == 2 * pair[1]), "{all:?}");
        assert_eq!(sizes(Shape { bytes_max: Some(7), replicas: None }), (Vec::new(), 7));
    }
}
