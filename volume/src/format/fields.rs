//! Reading and writing fixed layouts: numbers in their order, reserved bytes, nothing left over.
//!
//! Owns the two cursors. Knows no record.

use super::FormatError;

/// Reads fields from the front of a record.
pub struct Fields<'a> {
    what: &'static str,
    whole: usize,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// `what`: the record, for errors.
    #[must_use]
    pub fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, whole: bytes.len(), rest: bytes }
    }

    /// The next `N` bytes.
    ///
    /// # Errors
    /// [`FormatError::Size`].
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let size = FormatError::Size { what: self.what, bytes: self.whole };
        let (field, rest) = self.rest.split_first_chunk::<N>().ok_or(size)?;
        self.rest = rest;
        Ok(*field)
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// [`FormatError::Size`].
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], FormatError> {
        let size = FormatError::Size { what: self.what, bytes: self.whole };
        let (field, rest) = self.rest.split_at_checked(len).ok_or(size)?;
        self.rest = rest;
        Ok(field)
    }

    /// One byte.
    ///
    /// # Errors
    /// [`FormatError::Size`].
    pub fn u8(&mut self) -> Result<u8, FormatError> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Two bytes.
    ///
    /// # Errors
    /// [`FormatError::Size`].
    pub fn u16(&mut self) -> Result<u16, FormatError> {
        self.array().map(u16::from_le_bytes)
    }

    /// Four bytes.
    ///
    /// # Errors
    /// [`FormatError::Size`].
    pub fn u32(&mut self) -> Result<u32, FormatError> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes.
    ///
    /// # Errors
    /// [`FormatError::Size`].
    pub fn u64(&mut self) -> Result<u64, FormatError> {
        self.array().map(u64::from_le_bytes)
    }

    /// `N` bytes that are zeros.
    ///
    /// # Errors
    /// [`FormatError::Field`] if they are not: a newer build may have given them a meaning.
    pub fn reserved<const N: usize>(&mut self) -> Result<(), FormatError> {
        match self.array::<N>()?.iter().find(|byte| **byte != 0) {
            Some(byte) => Err(self.bad("reserved", u64::from(*byte))),
            None => Ok(()),
        }
    }

    /// How the record begins: four letters and a version.
    ///
    /// # Errors
    /// [`FormatError::Magic`], [`FormatError::Version`].
    pub fn begin(&mut self, magic: [u8; 4], version: u16) -> Result<(), FormatError> {
        if self.array()? != magic {
            return Err(FormatError::Magic { what: self.what });
        }
        match self.u16()? {
            found if found == version => Ok(()),
            found => Err(FormatError::Version { what: self.what, found, known: version }),
        }
    }

    /// Nothing may be left.
    ///
    /// # Errors
    /// [`FormatError::Size`].
    pub fn end(self) -> Result<(), FormatError> {
        if self.rest.is_empty() { Ok(()) } else { Err(FormatError::Size { what: self.what, bytes: self.whole }) }
    }

    /// A field with a value that it can't have.
    #[must_use]
    pub fn bad(&self, field: &'static str, value: u64) -> FormatError {
        FormatError::Field { what: self.what, field, value }
    }
}

/// Writes fields behind each other.
#[derive(Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// With room for `capacity` bytes.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self { bytes: Vec::with_capacity(capacity) }
    }

    /// How the record begins.
    pub fn begin(&mut self, magic: [u8; 4], version: u16) -> &mut Self {
        self.bytes(&magic).bytes(&version.to_le_bytes())
    }

    /// Bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// One byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    /// Two bytes.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// `N` zeros.
    pub fn reserved<const N: usize>(&mut self) -> &mut Self {
        self.bytes(&[0; N])
    }

    /// What was written.
    #[must_use]
    pub fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

/// Several numbers as `u32`, for counts and offsets of what is written.
///
/// # Errors
/// [`FormatError::Make`] if it is too large.
pub fn small(what: &'static str, number: usize) -> Result<u32, FormatError> {
    u32::try_from(number).map_err(|_| FormatError::Make { what, why: format!("{number} is more than a field of four bytes holds") })
}
