//! A server in a temporary directory, and a proxy that misbehaves on request.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_store::{Retry, Store, StoreConfig};

pub const ACCESS_KEY: &str = "volley-test";
pub const SECRET_KEY: &str = "not-a-secret";

pub async fn serve(root: &Path) -> EmbeddedServer {
    EmbeddedServer::start(EmbeddedConfig {
        root: root.to_owned(),
        bind: "127.0.0.1:0".parse().unwrap(),
        access_key: ACCESS_KEY.into(),
        secret_key: SECRET_KEY.into(),
        reserve_bytes: 0,
    })
    .await
    .unwrap()
}

pub fn config(endpoint: &str) -> StoreConfig {
    StoreConfig {
        prefix: "cell".into(),
        retry: Retry { backoff_first: Duration::from_millis(20), backoff_max: Duration::from_millis(200), ..Retry::default() },
        ..StoreConfig::new(endpoint, "volley", ACCESS_KEY, SECRET_KEY)
    }
}

/// A server with a bucket, and a store on it.
pub struct World {
    pub dir: tempfile::TempDir,
    pub server: EmbeddedServer,
    pub store: Store,
}

pub async fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir.path()).await;
    let store = Store::connect(&config(&server.endpoint())).await.unwrap();
    assert!(store.ensure_bucket().await.unwrap());
    World { dir, server, store }
}

/// What the proxy does with the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// Answers so itself.
    Answer(u16),
    /// Lets the request through and drops the answer; then passes.
    LoseOneAnswer,
    /// Lets the first bytes of answers to GET through, then closes the connection; once, then passes.
    CutOneBody(usize),
    /// Never answers requests that send a part.
    StallParts,
    /// Turns 412 into 200, as a store does that ignores conditions.
    Lie,
}

pub struct Proxy {
    pub addr: SocketAddr,
    pub mode: Arc<Mutex<Mode>>,
    pub requests: Arc<AtomicUsize>,
}

impl Proxy {
    pub async fn start(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let mode = Arc::new(Mutex::new(Mode::Pass));
        let requests = Arc::new(AtomicUsize::new(0));
        let (shared, count) = (mode.clone(), requests.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (mode, count) = (shared.clone(), count.clone());
                tokio::spawn(async move { handle(client, upstream, mode, count).await });
            }
        });
        Self { addr, mode, requests }
    }

    pub fn set(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
    }

    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    pub async fn store(&self) -> Store {
        Store::connect(&config(&format!("http://{}", self.addr))).await.unwrap()
    }
}

/// One request per connection.
async fn handle(mut client: TcpStream, upstream: SocketAddr, shared: Arc<Mutex<Mode>>, count: Arc<AtomicUsize>) -> Option<()> {
    let request = read_request(&mut client).await?;
    count.fetch_add(1, Ordering::SeqCst);
    let head = String::from_utf8_lossy(&request[..request.len().min(4096)]).into_owned();
    let mode = {
        let mut mode = shared.lock().unwrap();
        let now = *mode;
        match now {
            Mode::LoseOneAnswer => *mode = Mode::Pass,
            Mode::CutOneBody(_) if head.starts_with("GET") => *mode = Mode::Pass,
            _ => {}
        }
        now
    };
    if let Mode::Answer(status) = mode {
        let answer = format!("HTTP/1.1 {status} Nope\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        client.write_all(answer.as_bytes()).await.ok()?;
        return Some(());
    }
    if mode == Mode::StallParts && head.contains("partNumber=") {
        tokio::time::sleep(Duration::from_secs(600)).await;
    }
    let mut server = TcpStream::connect(upstream).await.ok()?;
    // The connection header is not signed: the server closes after its answer, which ends it for us.
    let line = request.windows(2).position(|two| two == b"\r\n")? + 2;
    server.write_all(&request[..line]).await.ok()?;
    server.write_all(b"connection: close\r\n").await.ok()?;
    server.write_all(&request[line..]).await.ok()?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).await.ok()?;
    match mode {
        Mode::LoseOneAnswer => return None,
        Mode::CutOneBody(bytes) if head.starts_with("GET") => answer.truncate(bytes),
        Mode::Lie if answer.starts_with(b"HTTP/1.1 412") => {
            answer = b"HTTP/1.1 200 OK\r\netag: \"lie\"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_vec();
        }
        _ => {}
    }
    client.write_all(&answer).await.ok()
}

async fn read_request(client: &mut TcpStream) -> Option<Vec<u8>> {
    let mut request = Vec::new();
    let head = loop {
        if let Some(at) = request.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if client.read_buf(&mut request).await.ok()? == 0 {
            return None;
        }
    };
    let text = String::from_utf8_lossy(&request[..head]).to_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok()).unwrap_or(0);
    if text.contains("expect: 100-continue") {
        client.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.ok()?;
    }
    while request.len() < head + length {
        if client.read_buf(&mut request).await.ok()? == 0 {
            return None;
        }
    }
    Some(request)
}

/// Bytes that do not compress or repeat, the same for the same seed.
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut data = vec![0; bytes];
    for chunk in data.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    data
}
