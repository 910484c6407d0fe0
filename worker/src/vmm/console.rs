//! The end of what a process writes.
//!
//! Owns reading it, always, so that the writer never waits, and keeping the last of it. Guests write what they like: what is shown has no
//! control characters.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::Notify;

/// How much is kept, in bytes: a kernel's last words, its call trace included.
pub const KEPT_BYTES: usize = 32 * 1024;
const CHUNK_BYTES: usize = 8 * 1024;

/// Keeps the end of a stream.
#[derive(Debug, Clone, Default)]
pub struct Tail {
    kept: Arc<Mutex<VecDeque<u8>>>,
    ended: Arc<Notify>,
}

impl Tail {
    /// A stream's end, and where to write to it. It is read until the last writer is gone.
    ///
    /// # Errors
    /// What the system says.
    pub fn follow() -> io::Result<(Self, OwnedFd)> {
        let (writer, mut reader) = pipe::pipe()?;
        let tail = Self::default();
        let ours = tail.clone();
        tokio::spawn(async move {
            let mut buffer = vec![0; CHUNK_BYTES];
            while let Ok(len @ 1..) = reader.read(&mut buffer).await {
                ours.take(buffer.get(..len).unwrap_or_default());
            }
            // Kept for whoever waits next.
            ours.ended.notify_one();
        });
        Ok((tail, writer.into_blocking_fd()?))
    }

    fn take(&self, bytes: &[u8]) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(bytes);
        let over = kept.len().saturating_sub(KEPT_BYTES);
        kept.drain(..over);
    }

    /// What is kept, as text.
    #[must_use]
    pub fn text(&self) -> String {
        let bytes: Vec<u8> = self.kept.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        plain(&String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
    }

    /// What is kept once the writer is gone and everything was read, or after so long.
    pub async fn ended(&self, time_max: Duration) -> String {
        if tokio::time::timeout(time_max, self.ended.notified()).await.is_ok() {
            self.ended.notify_one();
        }
        self.text()
    }

    /// The last lines.
    #[must_use]
    pub fn last(&self, lines: usize) -> String {
        let text = self.text();
        let all: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        all.get(all.len().saturating_sub(lines)..).unwrap_or_default().join("; ")
    }
}

/// Without what steers terminals.
#[must_use]
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_is_kept_and_steers_nothing() {
        let tail = Tail::default();
        tail.take(&vec![b'x'; KEPT_BYTES]);
        tail.take(b"\x1b[2Jone\r\ntwo\r\n\n");
        assert_eq!(tail.text().len(), KEPT_BYTES - 2);
        assert!(tail.last(2).ends_with(" [2Jone; two"), "{}", tail.last(1));
    }
}
