//! One session's frames on their way between a client's WebSocket and a worker's subjects.
//!
//! Owns that neither side can make this coordinator hold more than a little, and that the session ends at once when its token is revoked, the
//! coordinator stops, or a side sends what is no frame. What the two ends hold each other to is in `wire::shell::link`; nothing of it is
//! looked into here but whether it is a frame and whether it is the last.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Subscriber;
use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use futures::future::BoxFuture;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use tokio::sync::OwnedSemaphorePermit;
use volley_jobspecs::wire;
use volley_jobspecs::wire::shell::link::{SILENCE_MS, WINDOW_BYTES, counted};
use volley_jobspecs::wire::shell::{FRAME_BYTES_MAX, Frame};

use super::super::App;
use super::super::streams::Permit;

/// How long a client may take to take a frame, and a worker to say one: after that much silence its other end has given up anyway.
const SEND_WAIT: Duration = Duration::from_millis(SILENCE_MS);
/// How long a client may take to take the reason of the end. It is told for its own good only.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// Bytes from the worker that wait for the client, as they count ([`counted`]): a whole window, and as many words beside it.
/// A worker sends more only when the client says that it took what it did not take.
const HELD_BYTES_MAX: u64 = 2 * WINDOW_BYTES;

/// One session's way through this coordinator.
pub struct Relay {
    pub app: Arc<App>,
    /// Where the worker hears.
    pub to: String,
    pub revoked: BoxFuture<'static, ()>,
    pub places: (Permit, OwnedSemaphorePermit),
}

/// Why a session is cut off here.
#[derive(Debug)]
enum Cut {
    /// The client is there to be told.
    Told(String),
    /// It is not.
    Gone(&'static str),
}

impl Relay {
    pub async fn run(self, socket: WebSocket, frames: Subscriber) {
        let Self { app, to, mut revoked, places: _places } = self;
        let (mut sink, mut source) = socket.split();
        // Each direction on its own, so that neither is held up by who does not take the other; and neither holds up the end.
        let cut = tokio::select! {
            cut = to_worker(&app, &to, &mut source) => Some(cut),
            cut = from_worker(&mut sink, frames) => cut,
            () = &mut revoked => Some(Cut::Told("the token was revoked".to_owned())),
            () = app.stop.cancelled() => Some(Cut::Told("the coordinator is stopping; run the command again".to_owned())),
        };
        let why = match &cut {
            None => None,
            Some(Cut::Told(why)) => Some(why.as_str()),
            Some(Cut::Gone(why)) => Some(*why),
        };
        if let Some(why) = why {
            tracing::debug!(why, "a shell is cut off");
            // The worker need not wait for the silence.
            let _ = app.handle.client().publish(to, wire::encode(&Frame::of_relay(why)).into()).await;
        }
        let last = async {
            if let Some(Cut::Told(why)) = &cut {
                sink.send(Message::Binary(wire::encode(&Frame::of_relay(why)).into())).await?;
            }
            sink.send(Message::Close(Some(CloseFrame { code: close_code::NORMAL, reason: "".into() }))).await
        };
        if !matches!(cut, Some(Cut::Gone(_))) {
            let _ = tokio::time::timeout(LAST_WAIT, last).await;
        }
    }
}

async fn to_worker(app: &App, to: &str, source: &mut SplitStream<WebSocket>) -> Cut {
    loop {
        let bytes = match source.next().await {
            Some(Ok(Message::Binary(bytes))) => bytes,
            Some(Ok(Message::Text(_))) => return Cut::Told("the client sent text; a frame is binary".to_owned()),
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
            Some(Ok(Message::Close(_)) | Err(_)) | None => return Cut::Gone("the client has gone"),
        };
        if bytes.len() > FRAME_BYTES_MAX {
            return Cut::Told(format!("the client sent a frame of {} bytes; at most {FRAME_BYTES_MAX} are allowed", bytes.len()));
        }
        if let Err(why) = wire::decode::<Frame>("frame of the client", &bytes) {
            return Cut::Told(why.to_string());
        }
        if let Err(why) = app.handle.client().publish(to.to_owned(), bytes).await {
            return Cut::Told(why.to_string());
        }
    }
}

/// None: the session came to its own end.
async fn from_worker(sink: &mut SplitSink<WebSocket, Message>, mut frames: Subscriber) -> Option<Cut> {
    let mut held = Held::default();
    loop {
        // While one is being taken by the client the others are taken off the connection, which would hold more of them.
        if let Some(bytes) = held.pop() {
            let last = is_last(&bytes);
            let mut sending = std::pin::pin!(tokio::time::timeout(SEND_WAIT, sink.send(Message::Binary(bytes))));
            let sent = loop {
                tokio::select! {
                    sent = &mut sending => break sent,
                    Some(message) = frames.next() => {
                        if !held.push(message.payload) {
                            return Some(Cut::Told("the client says that it takes what it does not take".to_owned()));
                        }
                    }
                }
            };
            match sent {
                Ok(Ok(())) if last => return None,
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Some(Cut::Gone("the client takes nothing more")),
            }
            continue;
        }
        match tokio::time::timeout(SEND_WAIT, frames.next()).await {
            Ok(Some(message)) => {
                // There was none: one has room.
                held.push(message.payload);
            }
            Ok(None) => return Some(Cut::Told("the coordinator's connection to NATS ended".to_owned())),
            // It says every few seconds that it lives, as long as the session does.
            Err(_) => return Some(Cut::Told("its worker says nothing any more".to_owned())),
        }
    }
}

fn is_last(bytes: &[u8]) -> bool {
    wire::decode::<Frame>("frame of a shell", bytes).is_ok_and(|frame| frame.body.is_last())
}

/// Frames of the worker that the client has not taken yet.
#[derive(Debug, Default)]
struct Held {
    frames: VecDeque<Bytes>,
    bytes: u64,
}

impl Held {
    /// False: it is too much.
    fn push(&mut self, frame: Bytes) -> bool {
        self.bytes += counted(frame.len());
        self.frames.push_back(frame);
        self.bytes <= HELD_BYTES_MAX
    }

    fn pop(&mut self) -> Option<Bytes> {
        let frame = self.frames.pop_front()?;
        self.bytes -= counted(frame.len());
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::wire::shell::{Body, PIECE_BYTES_MAX};

    use super::*;

    #[test]
    fn who_keeps_the_rules_is_held_for_and_nobody_else() {
        let mut held = Held::default();
        let piece = |len: usize| {
            Bytes::from(wire::encode(&Frame { number: u64::MAX, body: Body::Output { stderr: true, bytes: vec![1; len].into() } }))
        };
        // A window of the longest pieces, then one of the shortest: what stands around them has room too.
        for len in [PIECE_BYTES_MAX, 1] {
            let pieces = WINDOW_BYTES / counted(len);
            assert!((0..pieces).all(|_| held.push(piece(len))), "{len}");
            while held.pop().is_some() {}
        }
        assert_eq!(held.bytes, 0);
        let taken = (0..1_000_000).take_while(|_| held.push(piece(PIECE_BYTES_MAX))).count() as u64;
        assert!(taken * (PIECE_BYTES_MAX as u64) < HELD_BYTES_MAX + PIECE_BYTES_MAX as u64, "{taken}");
    }
}
