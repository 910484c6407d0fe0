//! Firecracker's control connection: HTTP over a socket in the machine's directory.
//!
//! Owns one connection, requests and the status of answers. A client library would bring pools, TLS and a connection task for a dozen
//! requests with small bodies to one server. What Firecracker says is not trusted: heads and bodies are bounded.

use std::io;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::Instant;

use super::super::console::plain;
use super::super::spawner::Process;
use super::super::{Kind, VmmError};

/// Longest answer, in bytes: they are empty, or one error text.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// Between looks for the socket of a process that has just been started; it is there after a few milliseconds.
const LOOK: Duration = Duration::from_micros(500);

/// A control connection.
#[derive(Debug)]
pub struct Api {
    socket: UnixStream,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Answer {
    status: u16,
    body: String,
}

impl Api {
    /// Connects as soon as the socket is there.
    ///
    /// # Errors
    /// [`VmmError::Silent`].
    pub async fn connect(process: &Process, name: &str, time_max: Duration) -> Result<Self, VmmError> {
        let deadline = Instant::now() + time_max;
        loop {
            match process.connect(name).await {
                Ok(socket) => return Ok(Self { socket }),
                Err(_) if Instant::now() >= deadline => {
                    return Err(VmmError::Silent { vmm: Kind::Firecracker, what: "its start".to_owned(), after: time_max });
                }
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// Has Firecracker do something.
    ///
    /// # Errors
    /// [`VmmError`].
    pub async fn call(&mut self, method: &str, path: &str, body: &Value, time_max: Duration) -> Result<(), VmmError> {
        let what = format!("{method} {path}");
        let asked = async {
            let gone = |e: io::Error| gone(&what, &e.to_string());
            self.socket.write_all(request(method, path, &body.to_string()).as_bytes()).await.map_err(gone)?;
            let mut read = Vec::new();
            loop {
                match parse(&read) {
                    Ok(Some(answer)) => return Ok(answer),
                    Ok(None) if read.len() <= ANSWER_BYTES_MAX => {}
                    Ok(None) => return Err(nonsense(&what, "an answer without an end")),
                    Err(why) => return Err(nonsense(&what, why)),
                }
                if self.socket.read_buf(&mut read).await.map_err(gone)? == 0 {
                    return Err(gone(io::Error::from(io::ErrorKind::UnexpectedEof)));
                }
            }
        };
        let silent = || VmmError::Silent { vmm: Kind::Firecracker, what: what.clone(), after: time_max };
        let answer = tokio::time::timeout(time_max, asked).await.map_err(|_| silent())??;
        if (200..300).contains(&answer.status) {
            return Ok(());
        }
        let said = serde_json::from_str::<Value>(&answer.body).ok();
        let why = said.as_ref().and_then(|body| body.get("fault_message")?.as_str()).unwrap_or(&answer.body);
        Err(VmmError::Refused { vmm: Kind::Firecracker, what, why: format!("{} ({})", plain(why), answer.status) })
    }
}

fn gone(what: &str, why: &str) -> VmmError {
    let end = format!("its control connection broke: {why}");
    VmmError::Ended { vmm: Kind::Firecracker, what: what.to_owned(), end, said: String::new() }
}

fn nonsense(what: &str, why: &str) -> VmmError {
    VmmError::Nonsense { vmm: Kind::Firecracker, what: what.to_owned(), why: plain(why) }
}

fn request(method: &str, path: &str, body: &str) -> String {
    let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\nContent-Type: application/json\r\n");
    format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())
}

/// The answer in what was read, once all of it is there.
fn parse(read: &[u8]) -> Result<Option<Answer>, &'static str> {
    let Some(end) = read.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(read.get(..end).unwrap_or_default()).map_err(|_| "a head that is no text")?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()).ok_or("no status")?;
    let length = lines.filter_map(|line| line.split_once(':')).find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let length = length.map_or(Ok(0), |(_, value)| value.trim().parse::<usize>()).map_err(|_| "no length")?;
    let body = read.get(end + 4..).unwrap_or_default();
    if length > ANSWER_BYTES_MAX {
        return Err("a length past all measure");
    }
    let body = body.get(..length).map(|body| String::from_utf8_lossy(body).into_owned());
    Ok(body.map(|body| Answer { status, body }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_when_they_are_whole() {
        let text = b"HTTP/1.1 400 \r\nServer: x\r\ncontent-length: 5\r\n\r\nwrong";
        for cut in 0..text.len() {
            assert_eq!(parse(&text[..cut]), Ok(None), "{cut}");
        }
        assert_eq!(parse(text), Ok(Some(Answer { status: 400, body: "wrong".to_owned() })));
        assert_eq!(parse(b"HTTP/1.1 204 \r\n\r\n").unwrap().unwrap().status, 204);
        for bad in
            [&b"junk\r\n\r\n"[..], b"HTTP/1.1 200 \r\nContent-Length: 99999999\r\n\r\n", b"HTTP/1.1 200 \r\nContent-Length: x\r\n\r\n"]
        {
            assert!(parse(bad).is_err());
        }
    }
}
