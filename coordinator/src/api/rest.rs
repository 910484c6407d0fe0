//! What is left of a request's body when it was answered before all of it was read.
//!
//! Owns reading the rest, within limits, before the answer goes out. Otherwise the server would close the connection under a client
//! that still sends: the answer may then be lost to a reset, and the next request on the connection surely is. Does not own what a
//! handler reads.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::Request;
use axum::http::{HeaderValue, Version, header};
use axum::middleware::Next;
use axum::response::Response;
use futures::{Stream, StreamExt};

/// Most bytes read for nothing: several times the largest spec. They cost bandwidth only; a client with more should ask first (`Expect`).
const REST_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Longest time spent on it: a client that is still sending is within this; one that stalls is let go.
const REST_WAIT: Duration = Duration::from_secs(2);

type Slot = Arc<Mutex<Option<BodyDataStream>>>;

/// A body that, dropped before its end, leaves what is left in a slot.
struct Kept {
    body: Option<BodyDataStream>,
    slot: Slot,
}

impl Stream for Kept {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = body.poll_next_unpin(cx);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.body = None;
        }
        polled
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = self.body.take();
    }
}

/// Answers only when the request was read, or says that the connection ends.
pub async fn read_rest(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    // Such a client sends nothing until it is told to go on, which an early answer doesn't.
    let waits = parts.headers.contains_key(header::EXPECT);
    let one = matches!(parts.version, Version::HTTP_10 | Version::HTTP_11);
    let slot = Slot::default();
    let kept = Kept { body: Some(body.into_data_stream()), slot: Arc::clone(&slot) };
    let mut response = next.run(Request::from_parts(parts, Body::from_stream(kept))).await;
    let rest = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(rest) = rest
        && (waits || !drain(rest).await)
        && one
    {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Reads to the end; false: it is too far, or the client broke off.
async fn drain(mut rest: BodyDataStream) -> bool {
    let read = async {
        let mut bytes = 0;
        while let Some(chunk) = rest.next().await {
            bytes = chunk.map_or(usize::MAX, |chunk| chunk.len().saturating_add(bytes));
            if bytes > REST_BYTES_MAX {
                return false;
            }
        }
        true
    };
    tokio::time::timeout(REST_WAIT, read).await.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::http::StatusCode;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    async fn connect() -> TcpStream {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let addr = listener.local_addr().expect("its address");
        let router = Router::new().fallback(async || StatusCode::IM_A_TEAPOT).layer(axum::middleware::from_fn(read_rest));
        tokio::spawn(async move { axum::serve(listener, router).await });
        TcpStream::connect(addr).await.expect("a connection")
    }

    async fn answer(stream: &mut TcpStream) -> String {
        let mut text = Vec::new();
        while !text.ends_with(b"\r\n\r\n") {
            text.push(stream.read_u8().await.expect("an answer"));
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    #[tokio::test]
    async fn a_connection_outlives_an_early_answer() {
        let mut stream = connect().await;
        for _ in 0..3 {
            let body = vec![b'x'; 1_000_000];
            let head = format!("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
            stream.write_all(head.as_bytes()).await.expect("sent");
            tokio::time::sleep(Duration::from_millis(50)).await;
            stream.write_all(&body).await.expect("sent");
            let text = answer(&mut stream).await;
            assert!(text.starts_with("HTTP/1.1 418") && !text.contains("close"), "{text}");
        }
    }

    #[tokio::test]
    async fn a_body_without_end_is_not_read_for_ever_and_the_answer_says_so() {
        let mut stream = connect().await;
        stream.write_all(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n").await.expect("sent");
        let text = answer(&mut stream).await;
        assert!(text.starts_with("HTTP/1.1 418") && text.contains("connection: close"), "{text}");
    }
}
