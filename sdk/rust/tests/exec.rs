//! A command in a machine, against a coordinator and a worker that are played by hand.

#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};
use volley_sdk::jobspecs::ids::JobId;
use volley_sdk::jobspecs::wire::shell::link::{End, Link, WINDOW_BYTES};
use volley_sdk::jobspecs::wire::shell::{Body, Frame};
use volley_sdk::jobspecs::wire::{decode, encode};
use volley_sdk::{Client, Config, ExecEnded, ExecEvent, ExecRequest, ExecSession, Tty};

/// The worker's end.
struct Worker {
    socket: WebSocketStream<TcpStream>,
    link: Link,
    /// What was asked for.
    path: String,
}

impl Worker {
    async fn accept(listener: &TcpListener) -> Self {
        let (stream, _) = listener.accept().await.unwrap();
        let mut path = String::new();
        let seen = |request: &Request, answer: Response| {
            path = request.uri().to_string();
            assert_eq!(request.headers()["authorization"], "Bearer vt_a_b");
            Ok(answer)
        };
        let socket = tokio_tungstenite::accept_hdr_async(stream, seen).await.unwrap();
        Self { socket, link: Link::new(End::Worker, 0), path }
    }

    async fn say(&mut self, body: Body) {
        let frame = self.link.say(0, body);
        self.socket.send(Message::Binary(encode(&frame).into())).await.unwrap();
    }

    /// The next thing that means something; input is taken at once.
    async fn hear(&mut self) -> Body {
        loop {
            let Message::Binary(bytes) = self.socket.next().await.unwrap().unwrap() else { panic!("no frame") };
            let Some(body) = self.link.hear(0, decode::<Frame>("frame", &bytes).unwrap()).unwrap() else { continue };
            if let Some(ack) = self.link.took(0, body.data().map_or(0, <[u8]>::len)) {
                self.socket.send(Message::Binary(encode(&ack).into())).await.unwrap();
            }
            return body;
        }
    }
}

async fn start(request: ExecRequest) -> (Worker, ExecSession) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(Config::new(vec![format!("http://{}", listener.local_addr().unwrap())], Some("vt_a_b".into()))).unwrap();
    let (worker, session) = tokio::join!(Worker::accept(&listener), client.exec(&request));
    (worker, session.unwrap())
}

async fn next(session: &mut ExecSession) -> ExecEvent {
    tokio::time::timeout(Duration::from_secs(20), session.next()).await.expect("in time").expect("more").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_fed_and_heard_to_its_end() {
    let command = vec!["ls".to_owned(), "-l a".to_owned()];
    let request = ExecRequest {
        attempt: Some(2),
        tty: Some(Tty { rows: 24, cols: 80 }),
        term: Some("xterm".into()),
        ..ExecRequest::new(JobId(7), 3, command)
    };
    let (mut worker, mut session) = start(request).await;
    assert_eq!(worker.path, "/v1/jobs/j7/tasks/3/exec?attempt=2&tty=24x80&term=xterm&cmd=ls&cmd=-l+a");
    let input = session.input();
    // More than the window, which the worker opens as it takes it.
    let bytes: Vec<u8> = (0..2 * WINDOW_BYTES).map(|at| (at % 251) as u8).collect();
    let sent = bytes.clone();
    let writing = tokio::spawn(async move {
        assert!(input.write(&sent).await);
        input.resize(Tty { rows: 1, cols: 2 }).await;
        input.signal(2).await;
        input.end().await;
    });
    let (mut came, mut words) = (Vec::new(), Vec::new());
    while words.len() < 3 {
        match worker.hear().await {
            Body::Input(bytes) => came.extend_from_slice(&bytes),
            other => words.push(other),
        }
    }
    writing.await.unwrap();
    assert!(came == bytes);
    assert!([Body::Resize(Tty { rows: 1, cols: 2 }), Body::Signal(2), Body::EndInput].iter().all(|word| words.contains(word)), "{words:?}");
    worker.say(Body::Output { stderr: false, bytes: vec![0, 255].into() }).await;
    worker.say(Body::Output { stderr: true, bytes: b"err".to_vec().into() }).await;
    worker.say(Body::Ended(ExecEnded { code: Some(3), ..ExecEnded::default() })).await;
    assert_eq!(next(&mut session).await, ExecEvent::Output { stderr: false, bytes: vec![0, 255].into() });
    assert_eq!(next(&mut session).await, ExecEvent::Output { stderr: true, bytes: b"err".to_vec().into() });
    assert_eq!(next(&mut session).await, ExecEvent::Ended(ExecEnded { code: Some(3), ..ExecEnded::default() }));
    assert!(session.next().await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_take_output_holds_it_up_and_loses_none() {
    let (mut worker, mut session) = start(ExecRequest::new(JobId(1), 0, Vec::new())).await;
    let mut sent = 0;
    while worker.link.room() > 0 {
        let len = worker.link.room();
        worker.say(Body::Output { stderr: false, bytes: vec![1; len].into() }).await;
        sent += len;
    }
    assert_eq!(sent as u64, WINDOW_BYTES);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let hearing = tokio::spawn(async move {
        while worker.link.room() == 0 {
            let Message::Binary(bytes) = worker.socket.next().await.unwrap().unwrap() else { panic!("no frame") };
            worker.link.hear(0, decode::<Frame>("frame", &bytes).unwrap()).unwrap();
        }
        worker.say(Body::failed("it is over")).await;
        worker
    });
    let mut came = 0;
    let why = loop {
        match tokio::time::timeout(Duration::from_secs(20), session.next()).await.expect("in time").expect("more") {
            Ok(ExecEvent::Output { bytes, .. }) => came += bytes.len(),
            Ok(other) => panic!("{other:?}"),
            Err(why) => break why.to_string(),
        }
    };
    assert_eq!(came, sent);
    assert!(why.contains("it is over"), "{why}");
    drop(hearing.await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_told_as_ever_and_a_connection_that_breaks_is_too() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(Config::new(vec![format!("http://{}", listener.local_addr().unwrap())], None)).unwrap();
    let refuse = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = vec![0; 4096];
        let _ = stream.read(&mut head).await.unwrap();
        let body = r#"{"code":"conflict","message":"it has no machine","retryable":false,"problems":[]}"#;
        let answer = format!("HTTP/1.1 409 Conflict\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(answer.as_bytes()).await.unwrap();
    };
    let request = ExecRequest::new(JobId(1), 0, Vec::new());
    let ((), refused) = tokio::join!(refuse, client.exec(&request));
    let refused = refused.err().unwrap();
    assert_eq!((refused.status(), refused.to_string().as_str()), (Some(409), "it has no machine"));
    let (worker, mut session) = start(ExecRequest::new(JobId(1), 0, Vec::new())).await;
    drop(worker);
    let broken = tokio::time::timeout(Duration::from_secs(20), session.next()).await.expect("in time").expect("more");
    assert!(broken.is_err_and(|why| why.code() == "connection_broken"));
    let input = session.input();
    let given_up = async { while input.write(b"x").await {} };
    tokio::time::timeout(Duration::from_secs(20), given_up).await.expect("what is written behind the end is not taken");
}
