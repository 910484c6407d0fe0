//! Shells over core NATS: wishes, and the frames of each session on subjects of its own.
//!
//! Owns the subjects and that wishes are answered. Does not own which are granted (`shells`) nor what a session does (`shells/session`).
//! Frames that get lost on their way are noticed by their numbers, at the other end.

use async_nats::{Client, Message};
use futures::StreamExt;
use tokio::sync::mpsc;
use volley_jobspecs::ids::WorkerId;
use volley_jobspecs::wire::shell::{FRAME_BYTES_MAX, Frame, Open, Opened, SessionId};
use volley_jobspecs::{subjects, wire};

use crate::shells::session::FRAMES_MAX;
use crate::shells::{Permit, Shells, session};

/// Frames that wait to be sent: NATS takes them at once while there is a connection.
const SENDING_MAX: usize = 16;

/// Serves wishes for as long as there is a connection to be had. To be dropped at the worker's end.
pub async fn serve(client: Client, worker: WorkerId, shells: Shells) {
    let subject = subjects::shell(&worker);
    let mut wishes = match client.subscribe(subject.clone()).await {
        Ok(wishes) => wishes,
        Err(why) => {
            tracing::error!(%why, subject, "no shells can be opened in this worker's machines");
            return;
        }
    };
    while let Some(wish) = wishes.next().await {
        // In turn: each takes a subscription and an answer, and no word with a machine.
        grant(&client, &worker, &shells, wish).await;
    }
}

async fn grant(client: &Client, worker: &WorkerId, shells: &Shells, wish: Message) {
    let Some(reply) = wish.reply else { return };
    let open: Open = match wire::decode("wish for a shell", &wish.payload) {
        Ok(open) => open,
        Err(why) => return tracing::error!(%why, "a wish for a shell was dropped"),
    };
    if open.end {
        let answer = match shells.end(&open.name) {
            Ok(()) => {
                tracing::info!(job = %open.name.job, task = open.name.index, attempt = open.name.number, "somebody ends a machine that is kept");
                Opened::Yes
            }
            Err(no) => no,
        };
        let _ = client.publish(reply, wire::encode(&answer).into()).await;
        return;
    }
    let answer = match shells.open(&open) {
        Ok(permit) => match client.subscribe(subjects::shell_to_worker(worker, &open.session)).await {
            Ok(frames) => {
                tracing::info!(job = %open.name.job, task = open.name.index, attempt = open.name.number, "a shell was opened");
                tokio::spawn(speak(client.clone(), worker.clone(), open.session, permit, frames));
                Opened::Yes
            }
            Err(why) => {
                tracing::warn!(%why, "a shell could not be opened");
                return;
            }
        },
        Err(no) => no,
    };
    // Who gets no answer asks again.
    let _ = client.publish(reply, wire::encode(&answer).into()).await;
}

/// One session.
async fn speak(client: Client, worker: WorkerId, id: SessionId, permit: Permit, mut frames: async_nats::Subscriber) {
    let (hear, heard) = mpsc::channel(FRAMES_MAX);
    let (say, mut said) = mpsc::channel::<Frame>(SENDING_MAX);
    let subject = subjects::shell_from_worker(&worker, &id);
    let send = async {
        while let Some(frame) = said.recv().await {
            if client.publish(subject.clone(), wire::encode(&frame).into()).await.is_err() {
                return;
            }
        }
    };
    let receive = async {
        while let Some(message) = frames.next().await {
            let frame = match wire::decode::<Frame>("frame of a shell", &message.payload) {
                Ok(frame) if message.payload.len() <= FRAME_BYTES_MAX => frame,
                Ok(_) => Frame::of_relay("a frame was too long"),
                Err(why) => Frame::of_relay(why.to_string()),
            };
            // One that finds no room breaks the rules: it is missed by its number.
            let _ = hear.try_send(frame);
        }
        std::future::pending().await
    };
    let session = async {
        tokio::select! {
            () = session::run(permit, heard, say) => {}
            () = receive => {}
        }
    };
    // What was said last is sent before this ends: its sender goes with the session.
    tokio::join!(session, send);
    tracing::info!("a shell ended");
}
