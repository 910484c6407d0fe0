//! Cuts a file with items into pages, as its bytes come by.
//!
//! Owns line and record boundaries, limits, the pages' bytes (JSON lines, one row per task) and the index that finds the page of a
//! task. Does not own reading the file or storing the pages. Memory is bounded by one record, one page and the index.

mod csv;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::expand::{FileFormat, ITEM_BYTES_MAX, ItemFile, TASKS_MAX};
use crate::parse::read_json;

/// Most rows of a page.
pub const PAGE_ROWS_MAX: u32 = 1_000;
/// Most bytes of a page: a worker holds several, and fetches one to run one task.
pub const PAGE_BYTES_MAX: usize = 256 * 1024;
/// Longest line or record of a file, in bytes: four times the largest item, for CSV quoting and JSON white space.
pub const LINE_BYTES_MAX: usize = 4 * ITEM_BYTES_MAX;

/// One page of items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Its place, for the index.
    pub entry: PageEntry,
    /// Its rows: one line of JSON per task, each with its line feed.
    pub bytes: Vec<u8>,
}

/// What the index knows of a page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageEntry {
    /// Index of the first task.
    pub first: u32,
    /// How many tasks, at least 1.
    pub count: u32,
    /// Length in bytes.
    pub bytes: u32,
    /// blake3 of its bytes, in hex.
    pub blake3: String,
}

/// The pages of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ItemsIndex {
    /// How many tasks in all.
    pub count: u32,
    /// The pages in order, without gaps.
    pub pages: Vec<PageEntry>,
}

/// Why a file can't be cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {kind}")]
pub struct CutError {
    /// The line, counted from 1.
    pub line: u64,
    /// What is wrong with it.
    pub kind: CutErrorKind,
}

/// What is wrong with a line of a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CutErrorKind {
    /// Too long.
    #[error("longer than {LINE_BYTES_MAX} bytes (is it one record per line?)")]
    LineTooLong,
    /// The item is too large.
    #[error("the item has {0} bytes of JSON; at most {ITEM_BYTES_MAX} fit in a task's environment")]
    ItemTooLarge(usize),
    /// Not UTF-8.
    #[error("not UTF-8 text")]
    NotUtf8,
    /// Not JSON.
    #[error("{0}")]
    NotJson(String),
    /// A CSV record doesn't have as many fields as there are columns.
    #[error("{found} fields, but there are {columns} columns")]
    Fields {
        /// Fields of the record.
        found: usize,
        /// Columns.
        columns: usize,
    },
    /// The header has an empty or doubled name.
    #[error("the header has an empty name or the name {0:?} twice")]
    Header(String),
    /// The header isn't what the spec says.
    #[error("the header isn't the list in items.csv.columns")]
    OtherHeader,
    /// A quote isn't closed.
    #[error("a quotation mark isn't closed")]
    OpenQuote,
    /// Too many.
    #[error("more than {TASKS_MAX} tasks; use items.chunk to give each task several items")]
    TooMany,
    /// No items at all.
    #[error("the file has no items in it")]
    Empty,
}

/// Takes a file's bytes, gives its pages.
#[derive(Debug)]
pub struct PageCutter {
    reader: Reader,
    pages: PageWriter,
}

#[derive(Debug)]
enum Reader {
    Lines(LineReader),
    Csv(csv::CsvReader),
}

impl PageCutter {
    /// A cutter for one file.
    #[must_use]
    pub fn new(file: &ItemFile) -> Self {
        let reader = match &file.format {
            FileFormat::Jsonl => Reader::Lines(LineReader { json: true, ..LineReader::default() }),
            FileFormat::Lines => Reader::Lines(LineReader::default()),
            FileFormat::Csv { header, delimiter, columns } => Reader::Csv(csv::CsvReader::new(*header, *delimiter, columns.clone())),
        };
        Self { reader, pages: PageWriter::new(file.chunk) }
    }

    /// Takes the next bytes; adds the pages that are full to `full`. Any split of the file gives the same pages.
    ///
    /// # Errors
    /// [`CutError`] names the line; the cutter is of no use afterwards.
    pub fn feed(&mut self, bytes: &[u8], full: &mut Vec<Page>) -> Result<(), CutError> {
        self.pages.full = std::mem::take(full);
        let result = match &mut self.reader {
            Reader::Lines(lines) => lines.feed(bytes, &mut self.pages),
            Reader::Csv(csv) => csv.feed(bytes, &mut self.pages),
        };
        *full = std::mem::take(&mut self.pages.full);
        result
    }

    /// Ends the file; adds the last pages to `full` and returns the index of all.
    ///
    /// # Errors
    /// [`CutError`] when the last line is wrong or there was none.
    pub fn finish(mut self, full: &mut Vec<Page>) -> Result<ItemsIndex, CutError> {
        self.pages.full = std::mem::take(full);
        let result = match &mut self.reader {
            Reader::Lines(lines) => lines.finish(&mut self.pages),
            Reader::Csv(csv) => csv.finish(&mut self.pages),
        };
        let line = match result {
            Ok(line) => self.pages.end(line).map(|()| line),
            Err(error) => Err(error),
        };
        *full = std::mem::take(&mut self.pages.full);
        let line = line?;
        if self.pages.rows == 0 {
            return Err(CutError { line, kind: CutErrorKind::Empty });
        }
        Ok(ItemsIndex { count: self.pages.rows, pages: self.pages.entries })
    }
}

/// Cuts bytes at line feeds.
#[derive(Debug, Default)]
struct LineReader {
    json: bool,
    /// The start of a line whose end hasn't come yet.
    open: Vec<u8>,
    /// Lines that have ended.
    line: u64,
}

impl LineReader {
    fn feed(&mut self, bytes: &[u8], pages: &mut PageWriter) -> Result<(), CutError> {
        let mut rest = bytes;
        while let Some(at) = rest.iter().position(|b| *b == b'\n') {
            let (line, after) = (&rest[..at], &rest[at + 1..]);
            self.line += 1;
            if self.open.is_empty() {
                self.take(line, pages)?;
            } else {
                let mut whole = std::mem::take(&mut self.open);
                whole.extend_from_slice(line);
                self.take(&whole, pages)?;
                whole.clear();
                self.open = whole;
            }
            rest = after;
        }
        if self.open.len() + rest.len() > LINE_BYTES_MAX {
            return Err(CutError { line: self.line + 1, kind: CutErrorKind::LineTooLong });
        }
        self.open.extend_from_slice(rest);
        Ok(())
    }

    fn finish(&mut self, pages: &mut PageWriter) -> Result<u64, CutError> {
        let last = std::mem::take(&mut self.open);
        if !last.is_empty() {
            self.line += 1;
            self.take(&last, pages)?;
        }
        Ok(self.line.max(1))
    }

    fn take(&self, line: &[u8], pages: &mut PageWriter) -> Result<(), CutError> {
        let line_number = self.line;
        let error = |kind| CutError { line: line_number, kind };
        if line.len() > LINE_BYTES_MAX {
            return Err(error(CutErrorKind::LineTooLong));
        }
        let text = std::str::from_utf8(line).map_err(|_| error(CutErrorKind::NotUtf8))?;
        let text = if line_number == 1 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text };
        let text = text.strip_suffix('\r').unwrap_or(text);
        if self.json {
            let text = text.trim_ascii();
            if text.is_empty() {
                return Ok(());
            }
            let not_json = |message: String| error(CutErrorKind::NotJson(message));
            let (_, doubled) = read_json(text.as_bytes()).map_err(|problem| {
                // The problem's own line number is always 1 here, and ours is the useful one.
                not_json(problem.message.replace(" at line 1, column ", ", column "))
            })?;
            if let Some(problem) = doubled.first() {
                return Err(not_json(format!("the field {} is given twice", problem.path)));
            }
            // The text itself is kept, so that numbers keep all their digits.
            pages.row(text.as_bytes(), line_number)
        } else if text.is_empty() {
            Ok(())
        } else {
            pages.row(Value::from(text).to_string().as_bytes(), line_number)
        }
    }
}

/// Gathers rows into chunks and chunks into pages.
#[derive(Debug)]
struct PageWriter {
    chunk: Option<u32>,
    /// The chunk that is being filled, without its closing bracket.
    open: Vec<u8>,
    in_open: u32,
    page: Vec<u8>,
    in_page: u32,
    rows: u32,
    entries: Vec<PageEntry>,
    full: Vec<Page>,
}

impl PageWriter {
    fn new(chunk: Option<u32>) -> Self {
        let (open, page) = (Vec::new(), Vec::new());
        Self { chunk, open, in_open: 0, page, in_page: 0, rows: 0, entries: Vec::new(), full: Vec::new() }
    }

    /// Adds one item, compact JSON without line feeds.
    fn row(&mut self, json: &[u8], line: u64) -> Result<(), CutError> {
        let Some(chunk) = self.chunk else { return self.task(json, line) };
        self.open.push(if self.in_open == 0 { b'[' } else { b',' });
        self.open.extend_from_slice(json);
        self.in_open += 1;
        if self.open.len() > ITEM_BYTES_MAX {
            return Err(CutError { line, kind: CutErrorKind::ItemTooLarge(self.open.len() + 1) });
        }
        if self.in_open >= chunk { self.close_chunk(line) } else { Ok(()) }
    }

    fn close_chunk(&mut self, line: u64) -> Result<(), CutError> {
        self.open.push(b']');
        let mut open = std::mem::take(&mut self.open);
        self.in_open = 0;
        let result = self.task(&open, line);
        open.clear();
        self.open = open;
        result
    }

    /// Adds the row of one task.
    fn task(&mut self, json: &[u8], line: u64) -> Result<(), CutError> {
        if json.len() > ITEM_BYTES_MAX {
            return Err(CutError { line, kind: CutErrorKind::ItemTooLarge(json.len()) });
        }
        if u64::from(self.rows) >= TASKS_MAX {
            return Err(CutError { line, kind: CutErrorKind::TooMany });
        }
        if self.in_page == PAGE_ROWS_MAX || self.page.len() + json.len() + 1 > PAGE_BYTES_MAX {
            self.close_page();
        }
        self.page.extend_from_slice(json);
        self.page.push(b'\n');
        self.in_page += 1;
        self.rows += 1;
        Ok(())
    }

    fn close_page(&mut self) {
        let bytes = std::mem::take(&mut self.page);
        let entry = PageEntry {
            first: self.rows - self.in_page,
            count: self.in_page,
            // At most PAGE_BYTES_MAX.
            bytes: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
            blake3: blake3::hash(&bytes).to_hex().to_string(),
        };
        self.in_page = 0;
        self.entries.push(entry.clone());
        self.full.push(Page { entry, bytes });
    }

    fn end(&mut self, line: u64) -> Result<(), CutError> {
        if self.in_open > 0 {
            self.close_chunk(line)?;
        }
        if self.in_page > 0 {
            self.close_page();
        }
        Ok(())
    }
}

/// Why an index or page isn't what it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// The index isn't one.
    #[error("the items index can't be read: {0}")]
    Index(String),
    /// The index has gaps or wrong counts.
    #[error("the items index is inconsistent at page {0}")]
    Gap(usize),
    /// A page's bytes aren't those the index names.
    #[error("the page of task {first} isn't the one in the index: its checksum or length differs")]
    Checksum {
        /// Its first task.
        first: u32,
    },
    /// A page's row isn't there or isn't JSON.
    #[error("task {index} can't be read from its page")]
    Row {
        /// The task.
        index: u32,
    },
}

impl ItemsIndex {
    /// The index as it is stored.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        // Numbers and text only: there is no failing path.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads a stored index.
    ///
    /// # Errors
    /// [`PageError`] when it isn't one or its pages don't follow each other.
    pub fn from_json(bytes: &[u8]) -> Result<Self, PageError> {
        let index: Self = serde_json::from_slice(bytes).map_err(|e| PageError::Index(e.to_string()))?;
        let mut next = 0u32;
        for (number, page) in index.pages.iter().enumerate() {
            let counted = next.checked_add(page.count).filter(|_| page.first == next && page.count > 0);
            next = counted.ok_or(PageError::Gap(number))?;
        }
        if next == index.count { Ok(index) } else { Err(PageError::Gap(index.pages.len())) }
    }

    /// blake3 of the stored index, in hex: it names the whole file, page by page, and the pages' keys.
    #[must_use]
    pub fn hash(&self) -> String {
        blake3::hash(&self.to_json()).to_hex().to_string()
    }

    /// The number and entry of the page a task is on.
    #[must_use]
    pub fn locate(&self, index: u32) -> Option<(u32, &PageEntry)> {
        let page = self.pages.partition_point(|page| page.first <= index).checked_sub(1)?;
        let entry = self.pages.get(page).filter(|entry| index - entry.first < entry.count)?;
        Some((u32::try_from(page).ok()?, entry))
    }
}

/// A page that was fetched and is what the index says; picks items from it.
#[derive(Debug, Clone)]
pub struct LoadedPage {
    first: u32,
    bytes: Vec<u8>,
    /// Where each row ends, its line feed not included.
    ends: Vec<u32>,
}

impl LoadedPage {
    /// Checks a page's bytes against its entry.
    ///
    /// # Errors
    /// [`PageError::Checksum`] when they differ in any way.
    pub fn new(entry: &PageEntry, bytes: Vec<u8>) -> Result<Self, PageError> {
        let same = bytes.len() == entry.bytes as usize && blake3::hash(&bytes).to_hex().as_str() == entry.blake3;
        let feeds = bytes.iter().enumerate().filter(|(_, b)| **b == b'\n');
        let ends: Vec<u32> = feeds.filter_map(|(at, _)| u32::try_from(at).ok()).collect();
        if !same || ends.len() != entry.count as usize {
            return Err(PageError::Checksum { first: entry.first });
        }
        Ok(Self { first: entry.first, bytes, ends })
    }

    /// The item of a task on this page, as JSON text.
    ///
    /// # Errors
    /// [`PageError::Row`] when the task is on another page.
    pub fn row(&self, index: u32) -> Result<&str, PageError> {
        let missing = PageError::Row { index };
        let at = index.checked_sub(self.first).map(|at| at as usize).ok_or(missing.clone())?;
        let end = *self.ends.get(at).ok_or(missing.clone())? as usize;
        let start = at.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(0, |end| *end as usize + 1);
        self.bytes.get(start..end).and_then(|row| std::str::from_utf8(row).ok()).ok_or(missing)
    }

    /// The item of a task on this page.
    ///
    /// # Errors
    /// [`PageError::Row`] when the task is on another page or its row isn't JSON.
    pub fn item(&self, index: u32) -> Result<Value, PageError> {
        serde_json::from_str(self.row(index)?).map_err(|_| PageError::Row { index })
    }
}

#[cfg(test)]
mod tests;
