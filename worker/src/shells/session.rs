//! One command in a machine, and whoever wants it: from its start to its end.
//!
//! Owns moving input, output, sizes and signals between a session's frames and the machine's agent, within what both ends hold each other to
//! (`wire::shell::link`), and what is said at the end. Whatever ends a session ends its command, with everything it started. How frames
//! travel is the caller's: two channels.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use minicbor::bytes::ByteVec;
use tokio::sync::{Notify, mpsc};
use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Ended, Exec, Exit, Order, RefusalKind};
use volley_jobspecs::wire::shell::link::{Due, End, Link, PIECES_MAX, SILENCE_MS};
use volley_jobspecs::wire::shell::{self, Body, Frame, PIECE_BYTES_MAX};

use super::Permit;
use crate::guest::{Command, Guest, GuestError};

/// Frames that may wait for the session, and pieces for the command: as many as may be on their way, and as many words beside them, so that
/// none that keeps the rules finds it full.
pub const FRAMES_MAX: usize = 2 * PIECES_MAX;
/// Pieces of output that wait for the session: it takes them at once, as long as the client does.
const PIECES_WAITING: usize = 4;
/// The highest signal there is.
const SIGNAL_MAX: i32 = 64;
/// How long it may take until it is known why a machine says nothing more.
const GONE_WAIT: Duration = Duration::from_secs(1);
/// What a shell ends with when it finds no program, and when that can't be run.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

/// What the command says.
enum Said {
    Output { stderr: bool, bytes: Vec<u8> },
    Ended(Result<Ended, GuestError>),
}

/// What it is told.
enum Told {
    Input(ByteVec),
    EndInput,
}

/// Sizes and signals that wait for the machine's agent: the newest of the sizes, each signal once, as a kernel has them.
#[derive(Debug, Default)]
struct Orders {
    waiting: Mutex<VecDeque<Order>>,
    more: Notify,
}

impl Orders {
    fn add(&self, order: Order) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(order, Order::Resize(_)) {
            waiting.retain(|other| !matches!(other, Order::Resize(_)));
        }
        if !waiting.contains(&order) {
            waiting.push_back(order);
        }
        drop(waiting);
        self.more.notify_one();
    }

    async fn next(&self) -> Order {
        loop {
            let next = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match next {
                Some(order) => return order,
                None => self.more.notified().await,
            }
        }
    }
}

/// Runs a session to its end. Frames come decoded from `heard`, whose end is that of who hands them on; what is said goes to `say`.
pub async fn run(permit: Permit, mut heard: mpsc::Receiver<Frame>, say: mpsc::Sender<Frame>) {
    let begin = Instant::now();
    let mut talk = Talk { link: Link::new(End::Worker, 0), begin, say };
    let over = permit.over.clone();
    let gone = || Some(Body::failed(format!("the machine is not there any more: {}", permit.why().as_str())));
    let last = tokio::select! {
        biased;
        () = over.cancelled() => gone(),
        last = talk.serve(&permit.guest, &permit.exec, &mut heard) => match last {
            // Its connection breaks a moment before it is known what became of it.
            Some(Body::Failed(_)) if tokio::time::timeout(GONE_WAIT, over.cancelled()).await.is_ok() => gone(),
            last => last,
        },
    };
    // The command is given up with the future that had it.
    if let Some(last) = last {
        talk.say(last).await;
    }
}

struct Talk {
    link: Link,
    begin: Instant,
    say: mpsc::Sender<Frame>,
}

impl Talk {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    async fn say(&mut self, body: Body) {
        let frame = self.link.say(self.now_ms(), body);
        self.send(frame).await;
    }

    async fn send(&self, frame: Frame) {
        // Nobody there: the silence tells.
        let _ = self.say.send(frame).await;
    }

    /// Starts the command and serves it. What is said last; none: nobody is there to hear it.
    async fn serve(&mut self, guest: &Guest, exec: &Exec, heard: &mut mpsc::Receiver<Frame>) -> Option<Body> {
        let (told, tell) = mpsc::channel(FRAMES_MAX);
        let orders = Orders::default();
        let command = {
            let mut starting = std::pin::pin!(start(guest, exec));
            loop {
                tokio::select! {
                    started = &mut starting => break started,
                    // A start may take its time, and both ends are there meanwhile: what is said to it waits.
                    frame = heard.recv() => match self.hear(frame?) {
                        Ok(Some(body)) => pass_on(&orders, &told, body),
                        Ok(None) => {}
                        Err(last) => return last,
                    },
                    due = due(&mut self.link, self.begin) => match due {
                        Some(frame) => self.send(frame).await,
                        None => return Some(silent()),
                    },
                }
            }
        };
        match command {
            Ok(command) => self.converse(&command, heard, &orders, (told, tell)).await,
            Err(GuestError::Refused(refusal)) if refusal.kind == RefusalKind::CannotExec => {
                let found = !matches!(refusal.errno, Some(libc::ENOENT | libc::ENOTDIR));
                let text = format!("volley exec: {}\n", refusal.text).into_bytes();
                self.say(Body::Output { stderr: exec.tty.is_none(), bytes: text.into() }).await;
                Some(Body::Ended(shell::Ended { code: Some(if found { NOT_EXECUTABLE } else { NOT_FOUND }), ..Default::default() }))
            }
            Err(why) => Some(Body::failed(why.to_string())),
        }
    }

    /// A frame of the other end: what is for the command, if anything. An error: the session ends, and what is said last.
    fn hear(&mut self, frame: Frame) -> Result<Option<Body>, Option<Body>> {
        match self.link.hear(self.now_ms(), frame) {
            Ok(Some(Body::Failed(why))) => {
                tracing::debug!(why, "a shell was ended by its other end");
                Err(None)
            }
            Ok(body) => Ok(body),
            Err(why) => Err(Some(Body::failed(why.to_string()))),
        }
    }

    async fn converse(
        &mut self,
        command: &Command,
        heard: &mut mpsc::Receiver<Frame>,
        orders: &Orders,
        (told, tell): (mpsc::Sender<Told>, mpsc::Receiver<Told>),
    ) -> Option<Body> {
        let (took, taken) = mpsc::channel(PIECES_WAITING);
        let (pieces, said) = mpsc::channel(PIECES_WAITING);
        tokio::select! {
            last = self.exchange(orders, heard, said, (told, taken)) => last,
            never = listen(command, pieces) => match never {},
            never = feed(command, tell, took) => match never {},
            never = steer(command, orders) => match never {},
        }
    }

    async fn exchange(
        &mut self,
        orders: &Orders,
        heard: &mut mpsc::Receiver<Frame>,
        mut said: mpsc::Receiver<Said>,
        (told, mut taken): (mpsc::Sender<Told>, mpsc::Receiver<usize>),
    ) -> Option<Body> {
        loop {
            // A whole piece, so that none is cut; with less room the client has not taken enough for a while.
            let roomy = self.link.room() >= PIECE_BYTES_MAX;
            let frame = tokio::select! {
                frame = heard.recv() => match self.hear(frame?) {
                    Ok(body) => {
                        if let Some(body) = body {
                            pass_on(orders, &told, body);
                        }
                        continue;
                    }
                    Err(last) => return last,
                },
                Some(said) = said.recv(), if roomy => match said {
                    Said::Output { stderr, bytes } => self.link.say(self.now_ms(), Body::Output { stderr, bytes: bytes.into() }),
                    Said::Ended(Ok(ended)) => return Some(Body::Ended(told_end(&ended))),
                    Said::Ended(Err(why)) => return Some(Body::failed(why.to_string())),
                },
                Some(bytes) = taken.recv() => match self.link.took(self.now_ms(), bytes) {
                    Some(frame) => frame,
                    None => continue,
                },
                due = due(&mut self.link, self.begin) => match due {
                    Some(frame) => frame,
                    None => return Some(silent()),
                },
            };
            self.send(frame).await;
        }
    }
}

/// Starts it. Where the task's own directory is gone, at the root.
async fn start(guest: &Guest, exec: &Exec) -> Result<Command, GuestError> {
    match guest.exec(exec).await {
        Err(GuestError::Refused(refusal)) if refusal.kind == RefusalKind::NotFound && exec.cwd.is_some() => {
            guest.exec(&Exec { cwd: None, ..exec.clone() }).await
        }
        started => started,
    }
}

/// Waits until something is due: a frame, or none when the other end is silent.
async fn due(link: &mut Link, begin: Instant) -> Option<Frame> {
    loop {
        let now_ms = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        match link.due(now_ms) {
            Due::At(at_ms) => tokio::time::sleep(std::time::Duration::from_millis(at_ms.saturating_sub(now_ms))).await,
            Due::Send(frame) => return Some(frame),
            Due::Silent => return None,
        }
    }
}

fn silent() -> Body {
    Body::failed(format!("nothing was heard of the client for {} s", SILENCE_MS / 1_000))
}

/// What is for the command.
fn pass_on(orders: &Orders, told: &mpsc::Sender<Told>, body: Body) {
    let done = match body {
        // A command that reads slowly is not waited for; the window is what bounds what waits.
        Body::Input(bytes) => told.try_send(Told::Input(bytes)).map_err(|_| "input"),
        Body::EndInput => told.try_send(Told::EndInput).map_err(|_| "the end of input"),
        Body::Resize(size) => {
            orders.add(Order::Resize(size));
            Ok(())
        }
        Body::Signal(signal @ 1..=SIGNAL_MAX) => {
            orders.add(Order::Signal(signal));
            Ok(())
        }
        Body::Signal(_) => Err("a signal that there is not"),
        Body::Ack(_) | Body::Alive | Body::Output { .. } | Body::Ended(_) | Body::Failed(_) => Ok(()),
    };
    if let Err(what) = done {
        tracing::debug!("{what} of a shell was dropped");
    }
}

/// Reads what the command writes, to its end.
async fn listen(command: &Command, pieces: mpsc::Sender<Said>) -> Infallible {
    let ended = async {
        tokio::try_join!(pump(command, Channel::Output, &pieces), pump(command, Channel::Errors, &pieces))?;
        command.ended().await
    };
    let ended = ended.await;
    // Whoever listens ends this.
    let _ = pieces.send(Said::Ended(ended)).await;
    std::future::pending().await
}

async fn pump(command: &Command, channel: Channel, pieces: &mpsc::Sender<Said>) -> Result<(), GuestError> {
    let mut buffer = vec![0; PIECE_BYTES_MAX];
    loop {
        let len = command.read(channel, &mut buffer).await?;
        let Some(bytes) = buffer.get(..len).filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
        let _ = pieces.send(Said::Output { stderr: channel == Channel::Errors, bytes: bytes.to_vec() }).await;
    }
}

/// Writes what the command is to read, and says how much of it was taken.
async fn feed(command: &Command, mut tell: mpsc::Receiver<Told>, took: mpsc::Sender<usize>) -> Infallible {
    while let Some(told) = tell.recv().await {
        match told {
            Told::Input(bytes) => {
                // One that has ended reads nothing more; that is told elsewhere.
                let _ = command.write(&bytes).await;
                let _ = took.send(bytes.len()).await;
            }
            Told::EndInput => command.end_input(),
        }
    }
    std::future::pending().await
}

/// Gives it sizes and signals, as its agent takes them.
async fn steer(command: &Command, orders: &Orders) -> Infallible {
    loop {
        let order = orders.next().await;
        // One that has ended is told elsewhere.
        let _ = command.order(&order).await;
    }
}

fn told_end(ended: &Ended) -> shell::Ended {
    let (code, signal) = match ended.exit {
        Exit::Code(code) => (Some(code), None),
        Exit::Signal(signal) => (None, Some(signal)),
    };
    shell::Ended { code, signal, oom: ended.oom_kills > 0 }
}
