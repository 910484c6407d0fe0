//! `/v1/volumes/{name}/verify`: is everything there that a volume needs?
//!
//! Owns that route, and telling how far it is, line by line: it takes as long as it takes to read a volume. Does not own the walk (crate `volume`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use tokio::sync::{Semaphore, mpsc};
use volley_jobspecs::api::{DamageView, ErrorBody, VerifiedView, VerifyLine};
use volley_volume::{Verified, VerifyError, Verifying, Whole};

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf};
use super::streams::Permit;
use super::volumes::{found, may_have_volumes};
use crate::state::effects::Refusal;

/// Verifications at once: each holds one object of up to 16 MiB and the map of a volume.
const VERIFIES_MAX: usize = 4;
/// A line is sent at most so often.
const TELL_EVERY: Duration = Duration::from_secs(1);

static TURNS: Semaphore = Semaphore::const_new(VERIFIES_MAX);

/// Checks that everything a volume or a snapshot needs is in the bucket and undamaged, and tells how far it is, one JSON object a line.
///
/// The last line has `ended`, or `error`. An empty line now and then keeps the stream alive. Nothing is repaired.
#[utoipa::path(post, path = "/v1/volumes/{name}/verify", operation_id = "verifyVolume", tag = "volumes",
    params(("name" = String, Path, description = "The volume's name"), ("snapshot" = Option<String>, Query, description = "Of this snapshot"),
        ("deep" = Option<bool>, Query, description = "Read everything that is stored; otherwise only what says where it lies")),
    responses((status = 200, content_type = "application/x-ndjson", body = VerifyLine), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 429, body = ErrorBody)))]
pub async fn verify(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(name): PathOf<String>,
    query: QueryOf,
) -> Result<Response, ApiError> {
    let query = query.only(&["snapshot", "deep"])?;
    let deep = query.flag("deep")?;
    let volume = found(&app, &caller.tenant, &name).await?;
    let what = match query.get("snapshot") {
        None => {
            // Its head is made when the task begins.
            if volume.is_to_be_made() {
                return Err(ApiError::conflict(format!("volume {name} is only being made: {}", crate::volumes::holder(&volume))));
            }
            Whole::Volume(volume.id)
        }
        Some(snapshot) => match volume.snapshots.get(snapshot) {
            Some(found) => Whole::Snapshot(found.id),
            None => return Err(Refusal::SnapshotMissing { name, snapshot: snapshot.chars().take(200).collect() }.into()),
        },
    };
    may_have_volumes(&app).await?;
    let Ok(turn) = TURNS.try_acquire() else {
        let words = format!("{VERIFIES_MAX} volumes are being verified here; try again in a moment");
        return Err(ApiError::new(axum::http::StatusCode::TOO_MANY_REQUESTS, "overloaded", words));
    };
    let permit = app.streams.take(&caller.tenant)?;
    let (lines, coming) = mpsc::channel(1);
    let volumes = app.volumes.clone();
    tokio::spawn(async move {
        let _turn = turn;
        let telling = lines.clone();
        let done = volumes.with(move |host| host.verify_seen(what, deep, &mut teller(telling))).await;
        let last = match done {
            Some(done) => last_line(deep, done),
            None => Some(failed(ApiError::unavailable("the verification ended early; try again"))),
        };
        if let Some(last) = last {
            // Nobody reads it any more: nobody's loss.
            _ = lines.send(last).await;
        }
    });
    let keep_alive = app.keep_alive;
    let revoked = caller.revoked(&app);
    let body = futures::StreamExt::take_until(futures::stream::unfold((coming, permit), move |state| next(state, keep_alive)), revoked);
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response())
}

type Coming = (mpsc::Receiver<VerifyLine>, Permit);

async fn next((mut coming, permit): Coming, keep_alive: Duration) -> Option<(Result<Bytes, std::io::Error>, Coming)> {
    let bytes = match tokio::time::timeout(keep_alive, coming.recv()).await {
        Err(_) => Bytes::from_static(b"\n"),
        Ok(None) => return None,
        Ok(Some(line)) => {
            // Text and numbers only: there is no failing path.
            let mut bytes = serde_json::to_vec(&line).unwrap_or_default();
            bytes.push(b'\n');
            Bytes::from(bytes)
        }
    };
    Some((Ok(bytes), (coming, permit)))
}

/// Tells now and then how far it is; a client that takes nothing is not waited for, one that is gone ends it.
fn teller(lines: mpsc::Sender<VerifyLine>) -> impl FnMut(&Verifying) -> bool {
    let mut told = Instant::now();
    move |how_far| {
        if told.elapsed() >= TELL_EVERY {
            told = Instant::now();
            let Verifying { packs, packs_all, bytes } = *how_far;
            _ = lines.try_send(VerifyLine { packs, packs_all, bytes, ended: None, error: None });
        }
        !lines.is_closed()
    }
}

fn failed(error: ApiError) -> VerifyLine {
    VerifyLine { packs: 0, packs_all: 0, bytes: 0, ended: None, error: Some(error.body) }
}

fn last_line(deep: bool, done: Result<Verified, VerifyError>) -> Option<VerifyLine> {
    let (verified, damage) = match done {
        Ok(verified) => (verified, None),
        Err(VerifyError::Damaged { object, what }) => (Verified::default(), Some(DamageView { object, what })),
        Err(VerifyError::Open(error)) => return Some(failed(ApiError::unavailable(format!("the bucket: {error}")))),
        Err(VerifyError::Stopped) => return None,
    };
    let Verified { blocks, packs, bytes } = verified;
    let ended = Some(VerifiedView { deep, blocks, packs, bytes, damage });
    Some(VerifyLine { packs, packs_all: packs, bytes, ended, error: None })
}
