//! CSV records as bytes come by.
//!
//! Owns finding where records end (a line feed outside quotes), columns, and turning a record into an item. The fields themselves are
//! read by the csv crate, a batch of whole records at a time.

use std::collections::BTreeSet;

use ::csv::{ByteRecord, ReaderBuilder};
use serde_json::{Map, Value};

use super::{CutError, CutErrorKind, LINE_BYTES_MAX, PageWriter};
use crate::problem::shorten;

/// Reads CSV records and hands them on as items.
#[derive(Debug)]
pub(super) struct CsvReader {
    delimiter: u8,
    /// The next record is the header.
    header_due: bool,
    columns: Vec<String>,
    /// Whole records and the start of the next.
    open: Vec<u8>,
    /// Bytes of `open` that were scanned.
    scanned: usize,
    /// Where the last whole record in `open` ends.
    whole: usize,
    state: Scan,
    /// Lines before `open`.
    line: u64,
    first: bool,
}

/// Where the scan stands; the same rules as the csv crate's, so that both agree on where a record ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scan {
    FieldStart,
    Plain,
    Quoted,
    /// After a quotation mark within quotes: the second of a pair, or the end.
    Quote,
}

impl CsvReader {
    pub(super) fn new(header: bool, delimiter: u8, columns: Vec<String>) -> Self {
        Self {
            delimiter,
            header_due: header,
            columns,
            open: Vec::new(),
            scanned: 0,
            whole: 0,
            state: Scan::FieldStart,
            line: 0,
            first: true,
        }
    }

    pub(super) fn feed(&mut self, bytes: &[u8], pages: &mut PageWriter) -> Result<(), CutError> {
        // A caller's chunk may be large; records are taken out after each piece, so that little is held.
        for piece in bytes.chunks(LINE_BYTES_MAX) {
            self.open.extend_from_slice(piece);
            if self.first && self.open.len() >= 3 {
                self.drop_mark();
            }
            self.scan();
            if self.whole > 0 {
                self.take(self.whole, pages)?;
            }
            if self.open.len() > LINE_BYTES_MAX {
                let kind = if self.state == Scan::Quoted { CutErrorKind::OpenQuote } else { CutErrorKind::LineTooLong };
                return Err(CutError { line: self.line + 1, kind });
            }
        }
        Ok(())
    }

    pub(super) fn finish(&mut self, pages: &mut PageWriter) -> Result<u64, CutError> {
        if self.first {
            self.drop_mark();
            self.scan();
        }
        if self.state == Scan::Quoted {
            return Err(CutError { line: self.line + 1, kind: CutErrorKind::OpenQuote });
        }
        self.take(self.open.len(), pages)?;
        Ok(self.line.max(1))
    }

    /// Drops the byte order mark some programs write first.
    fn drop_mark(&mut self) {
        self.first = false;
        if self.open.starts_with("\u{feff}".as_bytes()) {
            self.open.drain(..3);
        }
    }

    fn scan(&mut self) {
        if self.first {
            return;
        }
        for (at, byte) in self.open.iter().enumerate().skip(self.scanned) {
            self.state = match (self.state, *byte) {
                (Scan::Quoted, b'"') => Scan::Quote,
                (Scan::Quoted, _) | (Scan::Quote, b'"') => Scan::Quoted,
                (_, b'\n') => {
                    self.whole = at + 1;
                    Scan::FieldStart
                }
                (_, b'\r') => Scan::FieldStart,
                (_, byte) if byte == self.delimiter => Scan::FieldStart,
                (Scan::FieldStart, b'"') => Scan::Quoted,
                (Scan::FieldStart | Scan::Plain | Scan::Quote, _) => Scan::Plain,
            };
        }
        self.scanned = self.open.len();
    }

    /// Reads the records in the first `len` bytes of `open` and drops them.
    fn take(&mut self, len: usize, pages: &mut PageWriter) -> Result<(), CutError> {
        let rest = self.open.split_off(len.min(self.open.len()));
        let mut batch = std::mem::replace(&mut self.open, rest);
        // The crate would drop a byte order mark here, which inside a file is text like any other: an empty line keeps it from that.
        let added = u64::from(batch.starts_with("\u{feff}".as_bytes()));
        if added > 0 {
            batch.insert(0, b'\n');
        }
        self.scanned = self.open.len();
        self.whole = 0;
        let mut reader = ReaderBuilder::new().has_headers(false).flexible(true).delimiter(self.delimiter).from_reader(batch.as_slice());
        let mut record = ByteRecord::new();
        let (mut counted, mut line) = (0, self.line + 1 - added);
        loop {
            let before = reader.position().byte();
            match reader.read_byte_record(&mut record) {
                Ok(true) => {}
                Ok(false) => break,
                // Reading from memory with `flexible` has no failing path.
                Err(error) => return Err(CutError { line: self.line + 1, kind: CutErrorKind::NotJson(error.to_string()) }),
            }
            // The crate's position is that of the line feeds before a record, so lines are counted here.
            let start = usize::try_from(before).unwrap_or(usize::MAX).min(batch.len());
            let feeds = batch[start..].iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
            line += batch[counted..start + feeds].iter().filter(|b| **b == b'\n').count() as u64;
            counted = start + feeds;
            if reader.position().byte() - before > LINE_BYTES_MAX as u64 {
                return Err(CutError { line, kind: CutErrorKind::LineTooLong });
            }
            self.take_record(&record, pages, line)?;
        }
        self.line += batch.iter().filter(|b| **b == b'\n').count() as u64 - added;
        if batch.last().is_some_and(|b| *b != b'\n') {
            self.line += 1;
        }
        Ok(())
    }

    fn take_record(&mut self, record: &ByteRecord, pages: &mut PageWriter, line: u64) -> Result<(), CutError> {
        let error = |kind| CutError { line, kind };
        let mut fields = Vec::with_capacity(record.len());
        for field in record {
            fields.push(std::str::from_utf8(field).map_err(|_| error(CutErrorKind::NotUtf8))?);
        }
        if self.header_due {
            self.header_due = false;
            return self.take_header(&fields).map_err(error);
        }
        let item = if self.columns.is_empty() {
            fields.into_iter().map(Value::from).collect()
        } else if fields.len() == self.columns.len() {
            Value::Object(self.columns.iter().cloned().zip(fields.into_iter().map(Value::from)).collect::<Map<_, _>>())
        } else {
            return Err(error(CutErrorKind::Fields { found: fields.len(), columns: self.columns.len() }));
        };
        pages.row(item.to_string().as_bytes(), line)
    }

    fn take_header(&mut self, fields: &[&str]) -> Result<(), CutErrorKind> {
        let mut seen = BTreeSet::new();
        if let Some(bad) = fields.iter().find(|name| name.is_empty() || !seen.insert(**name)) {
            return Err(CutErrorKind::Header(shorten(bad)));
        }
        if self.columns.is_empty() {
            self.columns = fields.iter().map(|name| (*name).to_owned()).collect();
            return Ok(());
        }
        if self.columns.iter().map(String::as_str).eq(fields.iter().copied()) { Ok(()) } else { Err(CutErrorKind::OtherHeader) }
    }
}
