//! Commands in the machines of tasks: `volley exec` for programs.
//!
//! Owns the connection's upgrade to a WebSocket, and moving input and output over it within what both ends hold each other to
//! (`wire::shell::link`). A session that breaks off is over: nobody can say what of its input the command had read.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Message, Role, WebSocketConfig};
use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire;
use volley_jobspecs::wire::shell::link::{Due, End, Link, SILENCE_MS};
use volley_jobspecs::wire::shell::{Body, Ended, FRAME_BYTES_MAX, Frame, PIECE_BYTES_MAX, Tty};

use crate::client::Client;
use crate::error::Error;
use crate::http::Call;

/// The version of WebSockets there is (RFC 6455).
const WEBSOCKET_VERSION: u32 = 13;
/// Pieces of input that wait to be sent.
const PIECES_WAITING: usize = 4;
/// Sizes and signals that wait to be sent: more than anybody makes within a moment.
const WORDS_WAITING: usize = 16;
/// How long sending a frame may take: by then the other end takes this one for gone.
const SEND_WAIT: Duration = Duration::from_millis(SILENCE_MS);

type Socket = WebSocketStream<reqwest::Upgraded>;

/// A command to run in a task's machine.
#[derive(Debug, Clone)]
pub struct ExecRequest {
    /// The job.
    pub job: JobId,
    /// The task, counted from 0.
    pub index: u32,
    /// In whose machine, counted from 1; by default of the attempt that runs, else of the last one.
    pub attempt: Option<u32>,
    /// The command; a shell when it is empty.
    pub command: Vec<String>,
    /// With a terminal of its own.
    pub tty: Option<Tty>,
    /// The kind of terminal that shows it, as `TERM` names it.
    pub term: Option<String>,
}

impl ExecRequest {
    /// A command without a terminal.
    #[must_use]
    pub fn new(job: JobId, index: u32, command: Vec<String>) -> Self {
        Self { job, index, attempt: None, command, tty: None, term: None }
    }
}

/// What comes of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// It wrote something. With a terminal everything is stdout.
    Output {
        /// Is it stderr, or stdout?
        stderr: bool,
        /// What it wrote.
        bytes: Bytes,
    },
    /// It has ended, and everything it wrote came before.
    Ended(Ended),
}

/// A command that runs. Dropped, it is ended, with everything it started.
#[derive(Debug)]
pub struct ExecSession {
    events: mpsc::Receiver<Result<ExecEvent, Error>>,
    input: ExecInput,
}

/// What goes to a command.
#[derive(Debug, Clone)]
pub struct ExecInput {
    pieces: mpsc::Sender<Piece>,
    words: mpsc::Sender<Body>,
}

#[derive(Debug)]
enum Piece {
    Bytes(Vec<u8>),
    End,
}

impl ExecSession {
    /// What comes next. `None` behind the end. Output that is not taken holds the command up, as a pipe does.
    ///
    /// # Errors
    /// [`Error::Ended`] when the cluster ended the session, [`Error::Broken`] when it broke off; the command was ended then.
    pub async fn next(&mut self) -> Option<Result<ExecEvent, Error>> {
        self.events.recv().await
    }

    /// Where input goes. It can be used beside [`ExecSession::next`].
    #[must_use]
    pub fn input(&self) -> ExecInput {
        self.input.clone()
    }
}

impl ExecInput {
    /// Writes input, as far as the command takes it. False: the session is over.
    pub async fn write(&self, bytes: &[u8]) -> bool {
        for piece in bytes.chunks(PIECE_BYTES_MAX) {
            if self.pieces.send(Piece::Bytes(piece.to_vec())).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Ends the input.
    pub async fn end(&self) {
        // A session that is over has no input.
        let _ = self.pieces.send(Piece::End).await;
    }

    /// Gives the command's terminal another size.
    pub async fn resize(&self, size: Tty) {
        let _ = self.words.send(Body::Resize(size)).await;
    }

    /// Sends a signal to the command.
    pub async fn signal(&self, signal: i32) {
        let _ = self.words.send(Body::Signal(signal)).await;
    }
}

impl Client {
    /// Ends the machine of a task that failed and whose machine was kept, before its time. `attempt`: of which, counted from 1; of the last when none is
    /// given.
    ///
    /// # Errors
    /// Code `not_found` for a task or an attempt that isn't there, `conflict` when no machine of it is kept.
    pub async fn end_machine(&self, job: JobId, index: u32, attempt: Option<u32>) -> Result<(), Error> {
        let path = ["jobs", &job.to_string(), "tasks", &index.to_string(), "exec"];
        let doing = format!("end the machine of task {index} of {job}");
        self.done(&Call::delete(&path, doing).query_if("attempt", attempt).once()).await
    }

    /// Runs a command in the machine of a task: of one that runs, or of one that failed and whose machine was kept.
    ///
    /// # Errors
    /// What the cluster refused: 404 for a task or an attempt that isn't there, 409 when it has no machine now.
    pub async fn exec(&self, request: &ExecRequest) -> Result<ExecSession, Error> {
        let doing = format!("run a command in the machine of task {} of {}", request.index, request.job);
        let mut key = [0; 16];
        getrandom::fill(&mut key).map_err(|error| Error::Random(error.to_string()))?;
        let key = STANDARD.encode(key);
        let path = ["jobs", &request.job.to_string(), "tasks", &request.index.to_string(), "exec"];
        let mut call = Call::get(&path, doing.clone())
            .query_if("attempt", request.attempt)
            .query_if("tty", request.tty.map(|size| format!("{}x{}", size.rows, size.cols)))
            .query_if("term", request.term.as_ref())
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", WEBSOCKET_VERSION)
            .header("sec-websocket-key", &key);
        for word in &request.command {
            call = call.query("cmd", word);
        }
        // Not until it succeeds: somebody sits there, and a second command is not the same as one.
        let answer = self.send_once(&call).await?;
        if answer.header("sec-websocket-accept") != Some(derive_accept_key(key.as_bytes()).as_str()) {
            return Err(answer.unexpected("it speaks no WebSocket; does a proxy stand between that lets none through?"));
        }
        let (connection, endpoint) = answer.upgrade().await?;
        let config = WebSocketConfig::default().max_message_size(Some(FRAME_BYTES_MAX)).max_frame_size(Some(FRAME_BYTES_MAX));
        let socket = WebSocketStream::from_raw_socket(connection, Role::Client, Some(config)).await;
        let ((pieces, input), (words, said)) = (mpsc::channel(PIECES_WAITING), mpsc::channel(WORDS_WAITING));
        // One at a time: what waits for it waits in the session, which counts it.
        let (tell, events) = mpsc::channel(1);
        tokio::spawn(async move {
            let (to, from) = socket.split();
            let begin = Instant::now();
            let mut talk = Talk { link: Link::new(End::Client, 0), begin, to, waiting: VecDeque::new(), told: false };
            if let Err(why) = talk.converse(from, input, said, &tell).await {
                // What came before that is told first.
                for event in std::mem::take(&mut talk.waiting) {
                    let _ = tell.send(Ok(event)).await;
                }
                let last = if talk.told { Error::Ended { doing, why } } else { Error::Broken { endpoint, doing, why } };
                let _ = tell.send(Err(last)).await;
            }
        });
        Ok(ExecSession { events, input: ExecInput { pieces, words } })
    }
}

/// One session, from this end.
struct Talk {
    link: Link,
    begin: Instant,
    to: SplitSink<Socket, Message>,
    /// What came and was not taken yet; no more than the window.
    waiting: VecDeque<ExecEvent>,
    /// The other end has said why the session is over.
    told: bool,
}

impl Talk {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    async fn send(&mut self, frame: Frame) -> Result<(), String> {
        let sent = tokio::time::timeout(SEND_WAIT, self.to.send(Message::Binary(wire::encode(&frame).into()))).await;
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("nothing could be sent for {} s", SEND_WAIT.as_secs())),
        }
    }

    /// Serves the session to its end. An error is why it broke off.
    async fn converse(
        &mut self,
        mut from: SplitStream<Socket>,
        mut input: mpsc::Receiver<Piece>,
        mut said: mpsc::Receiver<Body>,
        tell: &mpsc::Sender<Result<ExecEvent, Error>>,
    ) -> Result<(), String> {
        let mut over = false;
        while !(over && self.waiting.is_empty()) {
            let now_ms = self.now_ms();
            let at_ms = match self.link.due(now_ms) {
                Due::At(at_ms) => at_ms,
                Due::Send(alive) if !over => {
                    self.send(alive).await?;
                    continue;
                }
                Due::Silent if !over => return Err(format!("nothing was heard of the machine's worker for {} s", SILENCE_MS / 1_000)),
                Due::Send(_) | Due::Silent => u64::MAX,
            };
            let pause = Duration::from_millis(at_ms.saturating_sub(now_ms));
            let roomy = self.link.room() >= PIECE_BYTES_MAX;
            let frame = tokio::select! {
                message = from.next(), if !over => {
                    over = self.take(message)?;
                    continue;
                }
                permit = tell.reserve(), if !self.waiting.is_empty() => {
                    // Nobody wants it any more: the connection's end tells the others.
                    let Ok(permit) = permit else { return Ok(()) };
                    let Some(event) = self.waiting.pop_front() else { continue };
                    let bytes = if let ExecEvent::Output { bytes, .. } = &event { bytes.len() } else { 0 };
                    permit.send(Ok(event));
                    match self.link.took(self.now_ms(), bytes) {
                        Some(frame) if !over => frame,
                        _ => continue,
                    }
                }
                () = tell.closed() => return Ok(()),
                Some(body) = said.recv(), if !over => self.link.say(self.now_ms(), body),
                Some(piece) = input.recv(), if roomy && !over => match piece {
                    Piece::Bytes(bytes) => self.link.say(self.now_ms(), Body::Input(bytes.into())),
                    Piece::End => self.link.say(self.now_ms(), Body::EndInput),
                },
                () = tokio::time::sleep(pause), if !over => continue,
            };
            self.send(frame).await?;
        }
        Ok(())
    }

    /// Takes what came. Is that the end?
    fn take(&mut self, message: Option<Result<Message, tokio_tungstenite::tungstenite::Error>>) -> Result<bool, String> {
        let bytes = match message {
            Some(Ok(Message::Binary(bytes))) => bytes,
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => return Ok(false),
            Some(Ok(Message::Text(_))) => return Err("it sent a text where only frames are spoken".to_owned()),
            Some(Ok(Message::Close(_))) | None => return Err("the connection was closed".to_owned()),
            Some(Err(error)) => return Err(error.to_string()),
        };
        let frame = wire::decode::<Frame>("frame of a shell", &bytes).map_err(|error| error.to_string())?;
        match self.link.hear(self.now_ms(), frame).map_err(|error| error.to_string())? {
            Some(Body::Output { stderr, bytes }) => self.waiting.push_back(ExecEvent::Output { stderr, bytes: Vec::from(bytes).into() }),
            Some(Body::Ended(ended)) => {
                self.waiting.push_back(ExecEvent::Ended(ended));
                return Ok(true);
            }
            Some(Body::Failed(why)) => {
                self.told = true;
                return Err(why);
            }
            Some(_) | None => {}
        }
        Ok(false)
    }
}
