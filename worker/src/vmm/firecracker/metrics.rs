//! What Firecracker counts, as far as it is asked for: operations of one disk that failed on the host.
//!
//! Owns reading its metrics, lines of JSON through a pipe, each of which tells what was counted since the line before. What it says is not
//! trusted: a line is bounded, and what is no such line counts nothing. Does not own when it is asked to tell (`firecracker`).

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::watch;

/// Longest line, in bytes: all that is counted, of all disks, is some 20 KB.
const LINE_BYTES_MAX: usize = 256 * 1024;
const CHUNK_BYTES: usize = 16 * 1024;
/// How long a line may be on its way: it is in the pipe before Firecracker answers that it wrote it.
const LINE_WAIT: Duration = Duration::from_secs(5);

/// What was counted until now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Counted {
    lines: u64,
    failed: u64,
}

/// Follows the metrics of one machine.
#[derive(Debug)]
pub struct Metrics {
    counted: watch::Receiver<Counted>,
}

impl Metrics {
    /// Counts the failed operations of this drive, and where the metrics are to be written to. They are read until the last writer is gone.
    ///
    /// # Errors
    /// What the system says.
    pub fn follow(drive: &str) -> io::Result<(Self, OwnedFd)> {
        let (writer, mut reader) = pipe::pipe()?;
        let (tell, counted) = watch::channel(Counted::default());
        let mut lines = Lines { key: format!("block_{drive}"), line: Vec::new(), counted: Counted::default() };
        tokio::spawn(async move {
            let mut buffer = vec![0; CHUNK_BYTES];
            while let Ok(len @ 1..) = reader.read(&mut buffer).await {
                lines.take(buffer.get(..len).unwrap_or_default());
                tell.send_replace(lines.counted);
            }
        });
        Ok((Self { counted }, writer.into_blocking_fd()?))
    }

    /// How many lines came until now.
    #[must_use]
    pub fn lines(&self) -> u64 {
        self.counted.borrow().lines
    }

    /// The operations that failed until now, once a line came behind so many; none when none comes.
    pub async fn failed_behind(&self, lines: u64) -> Option<u64> {
        let mut counted = self.counted.clone();
        let came = tokio::time::timeout(LINE_WAIT, counted.wait_for(|counted| counted.lines > lines)).await;
        came.ok()?.ok().map(|counted| counted.failed)
    }
}

/// Takes lines apart.
#[derive(Debug)]
struct Lines {
    /// What the drive is called in them.
    key: String,
    /// The line that is being read, as far as it is not too long.
    line: Vec<u8>,
    counted: Counted,
}

impl Lines {
    fn take(&mut self, mut bytes: &[u8]) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.hold(bytes.get(..end).unwrap_or_default());
            let line = std::mem::take(&mut self.line);
            self.counted.lines += 1;
            self.counted.failed = self.counted.failed.saturating_add(failed(&line, &self.key));
            bytes = bytes.get(end + 1..).unwrap_or_default();
        }
        self.hold(bytes);
    }

    fn hold(&mut self, bytes: &[u8]) {
        // One that is longer is cut, which makes it no JSON.
        let room = LINE_BYTES_MAX.saturating_sub(self.line.len());
        self.line.extend_from_slice(bytes.get(..bytes.len().min(room)).unwrap_or_default());
    }
}

/// What a line tells of failed operations: what the host's file did not do, and what the guest asked for that no disk does.
fn failed(line: &[u8], key: &str) -> u64 {
    let line: Option<Value> = serde_json::from_slice(line).ok();
    line.and_then(|line| line.get(key)?.get("invalid_reqs_count")?.as_u64()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_added_up_however_they_come() {
        let text = concat!(
            r#"{"utc_timestamp_ms":1,"block":{"invalid_reqs_count":9},"block_scratch":{"invalid_reqs_count":2,"read_count":7}}"#,
            "\n{\"block_vol0\":{\"invalid_reqs_count\":5}}\nno metrics\n\n",
            r#"{"block_scratch":{"invalid_reqs_count":3}}"#,
            "\n",
            r#"{"block_scratch":{"invalid_reqs_count":100}}"#
        );
        for size in [1, 7, 50, text.len()] {
            let mut lines = Lines { key: "block_scratch".to_owned(), line: Vec::new(), counted: Counted::default() };
            text.as_bytes().chunks(size).for_each(|piece| lines.take(piece));
            assert_eq!(lines.counted, Counted { lines: 5, failed: 5 }, "in pieces of {size}");
        }
    }

    #[test]
    fn a_line_without_end_is_not_kept() {
        let mut lines = Lines { key: "x".to_owned(), line: Vec::new(), counted: Counted::default() };
        for _ in 0..100 {
            lines.take(&[b' '; CHUNK_BYTES]);
        }
        assert_eq!(lines.line.len(), LINE_BYTES_MAX);
        lines.take(b"\n");
        assert_eq!((lines.counted.lines, lines.line.len()), (1, 0));
    }

    #[tokio::test]
    async fn a_count_is_there_behind_its_line_and_not_before() {
        let (metrics, writer) = Metrics::follow("scratch").unwrap();
        let mut writer = std::fs::File::from(writer);
        let before = metrics.lines();
        io::Write::write_all(&mut writer, b"{\"block_scratch\":{\"invalid_reqs_count\":4}}\n").unwrap();
        assert_eq!(metrics.failed_behind(before).await, Some(4));
        drop(writer);
        assert_eq!(metrics.failed_behind(1).await, None, "its writer is gone");
    }
}
