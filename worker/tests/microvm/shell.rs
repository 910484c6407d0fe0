//! A session with a command in a machine, held by a test as its client.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use volley_jobspecs::ids::{AttemptName, JobId};
use volley_jobspecs::wire::shell::link::{Due, End, Link};
use volley_jobspecs::wire::shell::{Body, Ended, Frame, Open, Opened, PIECE_BYTES_MAX, SessionId, Tty};
use volley_worker::shells::{Shells, session};

use crate::support::World;

/// For what must not hang.
const SOON: Duration = Duration::from_secs(60);

/// The attempt of a job's first task that runs.
pub fn attempt(w: &World, job: JobId) -> AttemptName {
    w.last_beat().at.iter().find(|at| at.name.job == job).unwrap().name
}

/// A wish for a command.
pub fn wish(name: AttemptName, words: &[&str], tty: Option<Tty>) -> Open {
    let argv = words.iter().map(|word| (*word).to_owned()).collect();
    Open { name, session: SessionId::new([7; 16]), argv, tty, term: None, end: false }
}

/// What came of a command.
#[derive(Debug, Default)]
pub struct Came {
    pub output: Vec<u8>,
    pub errors: Vec<u8>,
    /// How it ended, or why the session did.
    pub end: Option<Result<Ended, String>>,
}

impl Came {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }

    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&self.errors).into_owned()
    }

    #[track_caller]
    pub fn code(&self) -> i32 {
        match &self.end {
            Some(Ok(Ended { code: Some(code), .. })) => *code,
            other => panic!("{other:?}: {} {}", self.text(), self.errors()),
        }
    }

    #[track_caller]
    pub fn why(&self) -> &str {
        match &self.end {
            Some(Err(why)) => why,
            other => panic!("{other:?}: {} {}", self.text(), self.errors()),
        }
    }
}

/// One session.
pub struct Shell {
    link: Link,
    begin: Instant,
    hear: mpsc::Sender<Frame>,
    said: mpsc::Receiver<Frame>,
    /// Says nothing of its own accord.
    pub silent: bool,
    pub came: Came,
}

impl Shell {
    pub fn open(shells: &Shells, open: &Open) -> Result<Self, Opened> {
        let permit = shells.open(open)?;
        let (hear, heard) = mpsc::channel(session::FRAMES_MAX);
        let (say, said) = mpsc::channel(16);
        tokio::spawn(session::run(permit, heard, say));
        Ok(Self { link: Link::new(End::Client, 0), begin: Instant::now(), hear, said, silent: false, came: Came::default() })
    }

    fn now_ms(&self) -> u64 {
        self.begin.elapsed().as_millis() as u64
    }

    pub async fn say(&mut self, body: Body) {
        let frame = self.link.say(self.now_ms(), body);
        let _ = self.hear.send(frame).await;
    }

    /// Says something that never arrives.
    pub async fn lose(&mut self) {
        let _lost = self.link.say(self.now_ms(), Body::Alive);
    }

    /// Takes one frame, or says that this end lives. False: the session is over.
    async fn step(&mut self) -> bool {
        let now = self.now_ms();
        let pause = match self.link.due(now) {
            Due::Send(frame) if !self.silent => {
                let _ = self.hear.send(frame).await;
                return true;
            }
            Due::At(at) => Duration::from_millis(at - now),
            Due::Send(_) => Duration::from_millis(100),
            Due::Silent => panic!("the worker says nothing"),
        };
        let frame = tokio::select! {
            frame = self.said.recv() => frame,
            () = tokio::time::sleep(pause) => return true,
        };
        let Some(frame) = frame else { return false };
        match self.link.hear(self.now_ms(), frame).unwrap() {
            Some(Body::Output { stderr, bytes }) => {
                let to = if stderr { &mut self.came.errors } else { &mut self.came.output };
                to.extend_from_slice(&bytes);
                if let Some(ack) = self.link.took(self.now_ms(), bytes.len()) {
                    let _ = self.hear.send(ack).await;
                }
            }
            Some(Body::Ended(ended)) => self.came.end = Some(Ok(ended)),
            Some(Body::Failed(why)) => self.came.end = Some(Err(why)),
            Some(other) => panic!("{other:?}"),
            None => {}
        }
        true
    }

    /// Serves it until its output has this in it.
    pub async fn until(&mut self, text: &str) {
        let begin = Instant::now();
        while !self.came.text().contains(text) {
            assert!(begin.elapsed() < SOON && self.came.end.is_none(), "{text}: {:?} {:?}", self.came.text(), self.came.end);
            assert!(self.step().await, "{text}: it is over");
        }
    }

    /// Writes input and serves it meanwhile.
    pub async fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.came.end.is_none() {
            let (now, rest) = bytes.split_at(self.link.room().min(PIECE_BYTES_MAX).min(bytes.len()));
            bytes = rest;
            if now.is_empty() {
                self.step().await;
            } else {
                self.say(Body::Input(now.to_vec().into())).await;
            }
        }
    }

    /// Serves it to its end.
    pub async fn finish(mut self) -> Came {
        let all = async {
            while self.step().await {}
            self.came
        };
        tokio::time::timeout(SOON, all).await.expect("it ends")
    }
}

/// Runs a command to its end, without input.
pub async fn run(shells: &Shells, name: AttemptName, words: &[&str]) -> Came {
    let mut shell = Shell::open(shells, &wish(name, words, None)).unwrap_or_else(|no| panic!("{no:?}"));
    shell.say(Body::EndInput).await;
    shell.finish().await
}
