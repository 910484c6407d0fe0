//! The connection to the volume server.
//!
//! Owns numbers of requests and whose reply is whose, and that its end is known to everybody. Does not own the process (`supervise`).

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::{mpsc, oneshot, watch};
use volley_volume::server::protocol::{self, Asked, LENGTH_BYTES, Refused, Reply, Request, Said};

/// Frames that wait to be sent; whoever asks waits then.
const SENDING_MAX: usize = 64;

/// What a server said of a volume that it was not asked.
pub type Event = (u64, Refused);

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    replies: BTreeMap<u64, oneshot::Sender<Reply>>,
    closed: bool,
}

/// The server is gone: what was asked may have been done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost;

/// A connection. It is closed when the last of it is dropped.
#[derive(Debug)]
pub struct Link {
    waiting: Arc<Mutex<Waiting>>,
    sending: mpsc::Sender<Vec<u8>>,
    open: watch::Receiver<bool>,
}

impl Link {
    /// On a connection; events go to `events`.
    pub fn new(stream: UnixStream, events: mpsc::UnboundedSender<Event>) -> Arc<Self> {
        let (read, mut write) = stream.into_split();
        let (sending, mut frames) = mpsc::channel::<Vec<u8>>(SENDING_MAX);
        let (closing, open) = watch::channel(true);
        let waiting = Arc::<Mutex<Waiting>>::default();
        let replies = Arc::clone(&waiting);
        tokio::spawn(async move {
            let sent = async {
                while let Some(frame) = frames.recv().await {
                    if write.write_all(&frame).await.is_err() {
                        return;
                    }
                }
            };
            let received = receive(read, &replies, &events);
            tokio::select! {
                () = sent => {}
                why = received => tracing::debug!(?why, "the volume server's connection has ended"),
            }
            let mut waiting = lock(&replies);
            waiting.closed = true;
            // Whoever waits hears of it by that.
            waiting.replies.clear();
            drop(waiting);
            let _ = closing.send(false);
        });
        Arc::new(Self { waiting, sending, open })
    }

    /// Asks, and waits for the reply as long as the server lives.
    ///
    /// # Errors
    /// [`Lost`].
    pub async fn ask(&self, request: Request) -> Result<Reply, Lost> {
        let (reply, replied) = oneshot::channel();
        let id = {
            let mut waiting = lock(&self.waiting);
            if waiting.closed {
                return Err(Lost);
            }
            waiting.next += 1;
            let id = waiting.next;
            waiting.replies.insert(id, reply);
            id
        };
        let frame = match protocol::frame(&Asked { id, request }) {
            Ok(frame) => frame,
            Err(e) => {
                lock(&self.waiting).replies.remove(&id);
                return Ok(Reply::Refused(Refused::new(protocol::RefusedKind::Host, &e.to_string())));
            }
        };
        self.sending.send(frame).await.map_err(|_| Lost)?;
        replied.await.map_err(|_| Lost)
    }

    /// Waits until it is closed.
    pub async fn closed(&self) {
        let mut open = self.open.clone();
        // Whoever would say so is gone: that says it, too.
        let _ = open.wait_for(|open| !open).await;
    }

    /// Is it closed?
    pub fn is_closed(&self) -> bool {
        !*self.open.borrow() || lock(&self.waiting).closed
    }
}

async fn receive(mut from: OwnedReadHalf, waiting: &Mutex<Waiting>, events: &mpsc::UnboundedSender<Event>) -> io::Error {
    loop {
        let said = match said(&mut from).await {
            Ok(said) => said,
            Err(e) => return e,
        };
        match said {
            Said::Reply { id, reply } => {
                if let Some(waits) = lock(waiting).replies.remove(&id) {
                    // Nobody waits any more: it is done all the same.
                    let _ = waits.send(reply);
                }
            }
            Said::Failed { handle, refused } => drop(events.send((handle, refused))),
        }
    }
}

async fn said(from: &mut OwnedReadHalf) -> io::Result<Said> {
    let mut length = [0; LENGTH_BYTES];
    from.read_exact(&mut length).await?;
    let mut bytes = vec![0; protocol::following(length)?];
    from.read_exact(&mut bytes).await?;
    protocol::message(&bytes)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_volume::server::protocol::{RefusedKind, receive, send};

    #[tokio::test]
    async fn each_gets_its_own_reply_and_an_end_is_known_to_all() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let (events, mut heard) = mpsc::unbounded_channel();
        let link = Link::new(UnixStream::from_std(ours).unwrap(), events);
        let server = std::thread::spawn(move || {
            let asked: Vec<Asked> = (0..3).map(|_| receive(&theirs).unwrap().unwrap()).collect();
            send(&theirs, &Said::Failed { handle: 7, refused: Refused::new(RefusedKind::Elsewhere, "gone") }).unwrap();
            for Asked { id, request } in asked.into_iter().rev() {
                let Request::Finish { handle } = request else { continue };
                send(&theirs, &Said::Reply { id, reply: Reply::Kept(handle * 10) }).unwrap();
            }
        });
        let ask = |handle| link.ask(Request::Finish { handle });
        let (one, two, lost) = tokio::join!(ask(1), ask(2), link.ask(Request::Stats));
        assert_eq!((one, two, lost), (Ok(Reply::Kept(10)), Ok(Reply::Kept(20)), Err(Lost)));
        assert_eq!(heard.recv().await.unwrap().0, 7);
        server.join().unwrap();
        link.closed().await;
        assert!(link.is_closed());
        assert_eq!(ask(1).await, Err(Lost));
    }
}
