//! Cuts a file with items into pages in the bucket, as its bytes come by.
//!
//! Owns reading the file, storing pages and index, and bounded memory: a small file is read once, a large one twice, because it is
//! counted before anything is stored. Does not own the cutting itself (`volley_jobspecs::pages`) or the pages' name (`api/submit.rs`).

use std::collections::VecDeque;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::io::AsyncReadExt;
use volley_jobspecs::expand::ItemFile;
use volley_jobspecs::keys;
use volley_jobspecs::pages::{CutError, ItemsIndex, Page, PageCutter};
use volley_store::{GetError, ObjectStream, PutError, Store};

/// Bytes of pages that are kept while a file is read; a file with more is read a second time.
const KEPT_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Bytes read at once.
const READ_BYTES: usize = 256 * 1024;
/// Pages being stored at once: at 256 KiB each, 4 MiB in flight.
const PUTS_MAX: usize = 16;

/// Why a file has no pages.
#[derive(Debug, thiserror::Error)]
pub enum ItemsError {
    /// The file can't be opened.
    #[error("{0}")]
    Open(#[from] GetError),
    /// The file broke off while it was read.
    #[error("reading the file broke off after {bytes} bytes: {source}")]
    Read {
        /// Bytes read before.
        bytes: u64,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no list of items.
    #[error(transparent)]
    Cut(#[from] CutError),
    /// The file was not the same when it was read again.
    #[error("the file changed while it was read; submit again when nothing writes to it")]
    Changed,
    /// A page can't be stored.
    #[error("{0}")]
    Put(#[from] PutError),
}

/// A file that was counted.
#[derive(Debug)]
pub struct Counted {
    /// Its pages.
    pub index: ItemsIndex,
    /// All pages, when they were small enough to keep; else as many of the first as were.
    pub kept: Vec<Page>,
    /// The last page, for looking at.
    pub last: Option<Page>,
}

/// Reads the file once.
///
/// # Errors
/// [`ItemsError`].
pub async fn count(from: &Store, key: &str, file: &ItemFile) -> Result<Counted, ItemsError> {
    let (mut kept, mut kept_bytes, mut last) = (Vec::<Page>::new(), 0, None);
    let mut reader = Reader::open(from, key, file).await?;
    while let Some(page) = reader.next().await? {
        kept_bytes += page.bytes.len();
        if kept.is_empty() || kept_bytes <= KEPT_BYTES_MAX {
            kept.push(page.clone());
        }
        last = Some(page);
    }
    Ok(Counted { index: reader.index, kept, last })
}

/// Stores the pages of a counted file under the name that workers find them by; the index comes last.
///
/// # Errors
/// [`ItemsError`]; what was stored by then is garbage, and collected as such.
pub async fn keep(from: &Store, key: &str, file: &ItemFile, counted: Counted, into: &Store, name: &str) -> Result<(), ItemsError> {
    let Counted { index, kept, .. } = counted;
    let mut puts = Puts { into, name, next: 0, open: FuturesUnordered::new() };
    if kept.len() == index.pages.len() {
        for page in kept {
            puts.put(page).await?;
        }
    } else {
        drop(kept);
        let mut reader = Reader::open(from, key, file).await?;
        while let Some(page) = reader.next().await? {
            puts.put(page).await?;
        }
        if reader.index != index {
            return Err(ItemsError::Changed);
        }
    }
    puts.finish().await?;
    drop(puts);
    into.put(&keys::items_index(name), Bytes::from(index.to_json())).await?;
    Ok(())
}

/// Reads a file and hands out its pages in order.
struct Reader {
    stream: ObjectStream,
    /// None: the file has ended.
    cutter: Option<PageCutter>,
    buffer: Vec<u8>,
    full: VecDeque<Page>,
    bytes: u64,
    /// Of use once the file has ended.
    index: ItemsIndex,
}

impl Reader {
    async fn open(from: &Store, key: &str, file: &ItemFile) -> Result<Self, ItemsError> {
        let stream = from.get_stream(key).await?;
        let index = ItemsIndex { count: 0, pages: Vec::new() };
        Ok(Self { stream, cutter: Some(PageCutter::new(file)), buffer: vec![0; READ_BYTES], full: VecDeque::new(), bytes: 0, index })
    }

    async fn next(&mut self) -> Result<Option<Page>, ItemsError> {
        while self.full.is_empty() {
            let Some(mut cutter) = self.cutter.take() else { return Ok(None) };
            let broken = |bytes| move |source| ItemsError::Read { bytes, source };
            let n = self.stream.read(&mut self.buffer).await.map_err(broken(self.bytes))?;
            self.bytes += n as u64;
            let mut full = Vec::new();
            if n > 0 {
                cutter.feed(&self.buffer[..n], &mut full)?;
                self.cutter = Some(cutter);
            } else if self.bytes == self.stream.bytes {
                self.index = cutter.finish(&mut full)?;
            } else {
                let why = format!("the store announced {} bytes", self.stream.bytes);
                return Err(broken(self.bytes)(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, why)));
            }
            self.full.extend(full);
        }
        Ok(self.full.pop_front())
    }
}

type Put<'a> = std::pin::Pin<Box<dyn Future<Output = Result<(), PutError>> + Send + 'a>>;

/// Pages on their way to the bucket.
struct Puts<'a> {
    into: &'a Store,
    name: &'a str,
    next: u32,
    open: FuturesUnordered<Put<'a>>,
}

impl Puts<'_> {
    async fn put(&mut self, page: Page) -> Result<(), ItemsError> {
        if self.open.len() >= PUTS_MAX
            && let Some(done) = self.open.next().await
        {
            done?;
        }
        let (into, key) = (self.into, keys::items_page(self.name, self.next));
        self.next += 1;
        self.open.push(Box::pin(async move { into.put(&key, Bytes::from(page.bytes)).await.map(|_| ()) }));
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), ItemsError> {
        while let Some(done) = self.open.next().await {
            done?;
        }
        Ok(())
    }
}
