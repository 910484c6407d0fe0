//! The listener of the API: connections in, each served until its end.
//!
//! Owns how many connections there are at once, how long a client may take to say what it wants, and the end in order. Does not own
//! what is answered (the router).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;
use volley_jobspecs::api::ErrorBody;

/// Connections at once: a few for each of some hundred programs, most of them idle. A connection costs some 20 KiB.
pub const CONNECTIONS_MAX: usize = 4_096;
/// Of the files this process may open, connections take at most one in so many: RocksDB, NATS and the bucket need some too.
const FILES_SHARE: u64 = 2;
/// How long a client may take to send the head of a request, and how long a connection may be idle: a client on a bad line needs a
/// second, one that holds connections open on purpose gets no more than this.
pub const HEAD_MAX: Duration = Duration::from_secs(30);
/// How often a silent HTTP/2 client is asked whether it is still there.
const PING_EVERY: Duration = Duration::from_secs(20);
/// Streams end by themselves at a stop; an upload or a slow client is cut after this long.
const GRACE: Duration = Duration::from_secs(5);
/// Pause after a connection could not be accepted: the system is out of something, and may have it again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections that are being told that there are too many; beyond, they are closed without a word.
const REFUSALS_MAX: usize = 64;
/// How long one of those may take to read that.
const REFUSAL_MAX: Duration = Duration::from_secs(1);

/// What the listener allows. Tests shorten it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// See [`CONNECTIONS_MAX`].
    pub connections: usize,
    /// See [`HEAD_MAX`].
    pub head: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let share = files.map_or(CONNECTIONS_MAX, |files| usize::try_from(files / FILES_SHARE).unwrap_or(CONNECTIONS_MAX));
        Self { connections: share.clamp(1, CONNECTIONS_MAX), head: HEAD_MAX }
    }
}

/// Serves until `stop`; then gives open requests a moment to end.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits, stop: CancellationToken) {
    let (places, refusals) = (Arc::new(Semaphore::new(limits.connections)), Arc::new(Semaphore::new(REFUSALS_MAX)));
    let (open, cut) = (TaskTracker::new(), CancellationToken::new());
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection to the API could not be accepted; is this process out of files (ulimit -n)?");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if let Ok(place) = places.clone().try_acquire_owned() {
            let serving = connection(stream, peer, router.clone(), limits.head, stop.clone());
            let cut = cut.clone();
            open.spawn(async move {
                let _place = place;
                tokio::select! {
                    () = serving => {}
                    () = cut.cancelled() => {}
                }
            });
        } else if let Ok(place) = refusals.clone().try_acquire_owned() {
            tracing::warn!(%peer, most = limits.connections, "too many connections to the API; this one is refused");
            open.spawn(async move {
                let _place = place;
                _ = tokio::time::timeout(REFUSAL_MAX, refuse(stream, limits.connections)).await;
            });
        }
    }
    drop(listener);
    open.close();
    if tokio::time::timeout(GRACE, open.wait()).await.is_err() {
        cut.cancel();
        open.wait().await;
    }
}

/// Serves one connection.
async fn connection(stream: TcpStream, peer: SocketAddr, router: Router, head: Duration, stop: CancellationToken) {
    // Answers are small and waited for.
    _ = stream.set_nodelay(true);
    let asked = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&asked);
    let service = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        seen.store(true, Ordering::Relaxed);
        let mut request: Request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(peer));
        router.clone().oneshot(request)
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(head);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(PING_EVERY);
    let mut serving = std::pin::pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    // Which version is spoken is found out from the first bytes, before any other limit holds.
    let mut first = std::pin::pin!(tokio::time::sleep(head));
    let (mut waits, mut stopping) = (true, false);
    loop {
        tokio::select! {
            ended = serving.as_mut() => {
                if let Err(error) = ended {
                    // A peer that goes away or is too slow is its own affair.
                    tracing::debug!(%peer, %error, "a connection to the API ended");
                }
                return;
            }
            () = first.as_mut(), if waits => {
                waits = false;
                if !asked.load(Ordering::Relaxed) {
                    tracing::debug!(%peer, "a connection to the API brought no request in time; it is cut");
                    return;
                }
            }
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                serving.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Says that there are too many connections, whatever is asked.
async fn refuse(mut stream: TcpStream, most: usize) {
    let message = format!("this coordinator has {most} connections open, the most; close some, or ask another coordinator");
    let body = ErrorBody { code: "overloaded".to_owned(), message, retryable: true, problems: Vec::new() };
    // Text and numbers only: there is no failing path.
    let body = serde_json::to_string(&body).unwrap_or_default();
    let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close";
    let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    if stream.write_all(answer.as_bytes()).await.is_ok() && stream.shutdown().await.is_ok() {
        // What it sends is read away: closed with something unread, the connection would be reset and the answer lost.
        let mut bytes = [0; 4_096];
        while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::time::Instant;

    async fn start(limits: Limits) -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let (addr, stop) = (listener.local_addr().expect("its address"), CancellationToken::new());
        let router = Router::new()
            .route("/", get(async |ConnectInfo(peer): ConnectInfo<SocketAddr>| peer.ip().to_string()))
            .route("/slow", get(async || tokio::time::sleep(Duration::from_millis(600)).await));
        (addr, stop.clone(), tokio::spawn(serve(listener, router, limits, stop)))
    }

    async fn ask(addr: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(addr).await.expect("a connection");
        let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("an answer");
        text
    }

    /// Sends a byte now and then; gives how long it took until the server had enough of it.
    async fn drip(addr: SocketAddr, bytes: &[u8]) -> Duration {
        let (begin, mut stream) = (Instant::now(), TcpStream::connect(addr).await.expect("a connection"));
        for byte in bytes.iter().cycle() {
            if stream.write_all(&[*byte]).await.is_err() {
                break;
            }
            let mut answer = [0; 64];
            if let Ok(Ok(0) | Err(_)) = tokio::time::timeout(Duration::from_millis(20), stream.read(&mut answer)).await {
                break;
            }
            assert!(begin.elapsed() < Duration::from_secs(10), "it is never cut");
        }
        begin.elapsed()
    }

    #[tokio::test]
    async fn a_client_that_never_comes_to_the_point_is_cut_and_others_are_served() {
        let limits = Limits { connections: 8, head: Duration::from_millis(300) };
        let (addr, _stop, _serving) = start(limits).await;
        let slow = async { tokio::join!(drip(addr, b"GET / HTTP/1.1\r\nx: "), drip(addr, b"y"), drip(addr, b"PRI * HTTP/2.0\r\n\r")) };
        let others = async {
            for _ in 0..20 {
                assert!(ask(addr, "/").await.ends_with("127.0.0.1"));
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let ((one, two, three), ()) = tokio::join!(slow, others);
        for took in [one, two, three] {
            assert!(took < Duration::from_secs(3), "{took:?}");
        }
        assert!(ask(addr, "/slow").await.starts_with("HTTP/1.1 200"), "an answer may take its time");
    }

    #[tokio::test]
    async fn one_connection_too_many_is_told_so() {
        let (addr, _stop, _serving) = start(Limits { connections: 2, head: Duration::from_secs(60) }).await;
        let held = [TcpStream::connect(addr).await.expect("one"), TcpStream::connect(addr).await.expect("two")];
        tokio::time::sleep(Duration::from_millis(50)).await;
        let refused = ask(addr, "/").await;
        assert!(
            refused.starts_with("HTTP/1.1 503") && refused.contains("\"retryable\":true") && refused.contains("2 connections"),
            "{refused}"
        );
        drop(held);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(ask(addr, "/").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn a_stop_lets_requests_end_and_idle_connections_go() {
        let (addr, stop, serving) = start(Limits { connections: 8, head: Duration::from_secs(60) }).await;
        let _idle = TcpStream::connect(addr).await.expect("a connection");
        let asked = tokio::spawn(ask(addr, "/slow"));
        tokio::time::sleep(Duration::from_millis(100)).await;
        let begin = Instant::now();
        stop.cancel();
        serving.await.expect("it ends");
        assert!(begin.elapsed() < GRACE, "{:?}", begin.elapsed());
        assert!(asked.await.expect("no panic").starts_with("HTTP/1.1 200"));
    }
}
