//! A device for tests: a file, parts of which can be cold, and which can fail.
//!
//! Within a block it reads, changes and writes back as an engine might, so that two changes of one block at once lose one of them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use volley_volume::device::{Device, Piece};

const BLOCK: u64 = 4096;

pub struct FileDevice {
    file: File,
    size: AtomicU64,
    read_only: bool,
    /// Not ready; reads of it wait until it is.
    cold: Mutex<Vec<Range<u64>>>,
    warmed: Condvar,
    fail: Mutex<Option<io::ErrorKind>>,
    flush_fails: AtomicBool,
    pub flushes: AtomicU64,
    /// Reads that came where waiting is allowed.
    pub waited: AtomicU64,
}

impl FileDevice {
    /// An empty one in memory, nearly: the file has no name.
    pub fn new(size: u64) -> Self {
        Self::on(tempfile::tempfile().unwrap(), size, false)
    }

    pub fn read_only(size: u64) -> Self {
        Self::on(tempfile::tempfile().unwrap(), size, true)
    }

    /// On a file that may be there already.
    pub fn at(path: &Path, size: u64) -> Self {
        Self::on(File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap(), size, false)
    }

    fn on(file: File, size: u64, read_only: bool) -> Self {
        file.set_len(size).unwrap();
        Self {
            file,
            size: size.into(),
            read_only,
            cold: Mutex::default(),
            warmed: Condvar::new(),
            fail: Mutex::default(),
            flush_fails: false.into(),
            flushes: 0.into(),
            waited: 0.into(),
        }
    }

    pub fn grow(&self, size: u64) {
        self.file.set_len(size).unwrap();
        self.size.store(size, Ordering::SeqCst);
    }

    pub fn chill(&self, range: Range<u64>) {
        self.cold.lock().unwrap().push(range);
    }

    pub fn warm(&self) {
        self.cold.lock().unwrap().clear();
        self.warmed.notify_all();
    }

    /// Everything fails like this from now on.
    pub fn fail(&self, kind: Option<io::ErrorKind>) {
        *self.fail.lock().unwrap() = kind;
    }

    pub fn fail_flushes(&self, fail: bool) {
        self.flush_fails.store(fail, Ordering::SeqCst);
    }

    pub fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        if let Some(kind) = *self.fail.lock().unwrap() {
            return Err(kind.into());
        }
        if offset.checked_add(len).is_none_or(|end| end > self.size()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(())
    }

    fn is_cold(cold: &[Range<u64>], offset: u64, len: u64) -> bool {
        cold.iter().any(|range| range.start < offset + len && offset < range.end)
    }

    /// Waits until it is warm; was it not?
    fn wait(&self, offset: u64, len: u64) -> bool {
        let mut cold = self.cold.lock().unwrap();
        let mut waited = false;
        while Self::is_cold(&cold, offset, len) {
            waited = true;
            cold = self.warmed.wait(cold).unwrap();
        }
        waited
    }

    /// Changes a block in part: read, wait for whoever else is there, write.
    fn patch(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let begin = offset - offset % BLOCK;
        let len = BLOCK.min(self.size() - begin);
        let waited = self.wait(begin, len);
        let mut block = self.bytes(begin, len as usize);
        if waited {
            // Whoever waited with this one reads the same now.
            std::thread::sleep(Duration::from_millis(2));
        }
        let at = (offset - begin) as usize;
        block[at..at + bytes.len()].copy_from_slice(bytes);
        self.file.write_all_at(&block, begin)
    }
}

impl Device for FileDevice {
    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn read_ready(&self, offset: u64, into: &mut [u8]) -> Option<io::Result<()>> {
        if Self::is_cold(&self.cold.lock().unwrap(), offset, into.len() as u64) {
            return None;
        }
        Some(self.check(offset, into.len() as u64).and_then(|()| self.file.read_exact_at(into, offset)))
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.waited.fetch_add(1, Ordering::SeqCst);
        self.wait(offset, into.len() as u64);
        self.check(offset, into.len() as u64)?;
        self.file.read_exact_at(into, offset)
    }

    fn write(&self, offset: u64, bytes: &[u8], durable: bool) -> io::Result<()> {
        self.check(offset, bytes.len() as u64)?;
        let (mut at, mut left) = (offset, bytes);
        while !left.is_empty() {
            let room = (BLOCK - at % BLOCK) as usize;
            let here = if at.is_multiple_of(BLOCK) && left.len() as u64 >= BLOCK { left.len() - left.len() % BLOCK as usize } else { room };
            let here = here.min(left.len());
            if (here as u64).is_multiple_of(BLOCK) {
                self.file.write_all_at(&left[..here], at)?
            } else {
                self.patch(at, &left[..here])?
            }
            at += here as u64;
            left = &left[here..];
        }
        if durable { self.flush() } else { Ok(()) }
    }

    fn zero(&self, offset: u64, len: u64, hole: bool, durable: bool) -> io::Result<()> {
        self.check(offset, len)?;
        if len > 0 {
            let kind = if hole { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
            fallocate(&self.file, kind | FallocateFlags::KEEP_SIZE, offset, len)?;
        }
        if durable { self.flush() } else { Ok(()) }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.zero(offset, len, true, false)
    }

    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        if self.flush_fails.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::Other.into());
        }
        self.file.sync_data()
    }

    fn pieces(&self, offset: u64, len: u64) -> io::Result<Vec<Piece>> {
        self.check(offset, len)?;
        let (mut at, end) = (offset, offset + len);
        let mut pieces = Vec::new();
        // Their place is one for all who look.
        let _looking = self.cold.lock().unwrap();
        while at < end {
            let data = seek(&self.file, SeekFrom::Data(at)).unwrap_or(end).min(end);
            if data > at {
                pieces.push(Piece { len: data - at, hole: true });
            } else {
                let hole = seek(&self.file, SeekFrom::Hole(at)).unwrap_or(end).min(end);
                pieces.push(Piece { len: hole - at, hole: false });
            }
            at += pieces.last().unwrap().len;
        }
        Ok(pieces)
    }
}
