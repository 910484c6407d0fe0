//! A server that answers each request with the next reply of a script, one request a connection.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What a request gets.
pub enum Reply {
    /// These bytes; then the connection is closed.
    Bytes(Vec<u8>),
    /// Parts of a stream with so long between them; then nothing, for ever.
    Slow(Duration, Vec<String>),
    /// Nothing: the connection is closed.
    Drop,
}

/// A request as it came.
#[derive(Clone)]
pub struct Request {
    head: String,
    pub body: Vec<u8>,
}

impl Request {
    pub fn target(&self) -> String {
        self.head.split(' ').nth(1).unwrap_or_default().to_owned()
    }

    pub fn header(&self, name: &str) -> Option<String> {
        let find = |line: &str| line.split_once(": ").filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned());
        self.head.lines().find_map(find)
    }
}

pub struct Fake {
    url: String,
    requests: Arc<Mutex<Vec<Request>>>,
    task: JoinHandle<()>,
}

impl Fake {
    pub async fn start(script: Vec<Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        let task = tokio::spawn(async move {
            let mut script = script.into_iter();
            while let Ok((mut socket, _)) = listener.accept().await {
                let Some(request) = read(&mut socket).await else {
                    continue;
                };
                seen.lock().expect("not poisoned").push(request);
                match script.next() {
                    Some(Reply::Bytes(bytes)) => {
                        let _ = socket.write_all(&bytes).await;
                        let _ = socket.shutdown().await;
                    }
                    Some(Reply::Slow(pause, parts)) => _ = tokio::spawn(slow(socket, pause, parts)),
                    Some(Reply::Drop) | None => {}
                }
            }
        });
        Self { url, requests, task }
    }

    pub fn url(&self) -> String {
        self.url.clone()
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("not poisoned").clone()
    }

    pub async fn stop(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

async fn slow(mut socket: TcpStream, pause: Duration, parts: Vec<String>) {
    let _ = socket.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
    for part in parts {
        let _ = socket.write_all(chunk(&part).as_bytes()).await;
        tokio::time::sleep(pause).await;
    }
    std::future::pending::<()>().await;
}

async fn read(socket: &mut TcpStream) -> Option<Request> {
    let mut bytes = Vec::new();
    loop {
        if socket.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
        let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
            continue;
        };
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let mut request = Request { head, body: bytes[end + 4..].to_vec() };
        let length: usize = request.header("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
        while request.body.len() < length {
            if socket.read_buf(&mut request.body).await.ok()? == 0 {
                return None;
            }
        }
        return Some(request);
    }
}

pub fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

fn chunked(parts: &[&str], end: &str) -> Reply {
    let body: String = parts.iter().map(|part| chunk(part)).collect();
    Reply::Bytes(format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n{body}{end}").into_bytes())
}

/// A stream that ends as it should.
pub fn whole(parts: &[&str]) -> Reply {
    chunked(parts, "0\r\n\r\n")
}

/// A stream whose connection breaks.
pub fn cut_off(parts: &[&str]) -> Reply {
    chunked(parts, "")
}

pub fn json(status: u16, sequence: u64, value: &Value) -> Reply {
    let body = value.to_string();
    let head = format!("HTTP/1.1 {status} S\r\ncontent-length: {}\r\nvolley-sequence: {sequence}\r\nconnection: close\r\n\r\n", body.len());
    Reply::Bytes((head + &body).into_bytes())
}

pub fn refusal(status: u16, code: &str, retryable: bool) -> Reply {
    json(status, 0, &json!({ "code": code, "message": "no", "retryable": retryable }))
}

pub fn not_ready() -> Reply {
    refusal(503, "not_ready", true)
}
