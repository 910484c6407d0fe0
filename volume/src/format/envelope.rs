//! The envelope of small records: a part anybody may read, a part that is sealed, and a check sum over both.
//!
//! Owns the layout that head, snapshot, pin and a clone's record share. Knows none of them.
//!
//! ```text
//! 0       4   letters of the record
//! 4       2   version of the record
//! 6       2   reserved
//! 8       4   n: bytes of the open part
//! 12      4   m: bytes of the sealed part and its tag; 0: there is none
//! 16      16  salt of this writing; zeros if nothing is sealed
//! 32      n   the open part, CBOR
//! 32+n    m   the sealed part, CBOR, AES-256-GCM; everything before it is authenticated with it
//! 32+n+m  16  BLAKE3-128 of everything before
//! ```
//! The check sum tells damage to those who have no key; whoever has it does not rely on it.

use super::FormatError;
use super::fields::{Fields, Writer, small};
use super::seal::{Kind, ObjectKey, Salt, TAG_BYTES};

const HEADER_BYTES: usize = 32;
const SUM_BYTES: usize = 16;

/// Which record it is.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    /// Its name, for errors.
    pub what: &'static str,
    /// Its letters.
    pub magic: [u8; 4],
    /// Its version.
    pub version: u16,
    /// Most bytes it may have in all.
    pub bytes_max: usize,
}

/// An envelope that was read: its sum was right, its sealed part is still sealed.
pub struct Opened<'a> {
    form: Form,
    /// Of this writing.
    pub salt: Salt,
    /// The open part.
    pub open: &'a [u8],
    sealed: &'a [u8],
    before: &'a [u8],
}

/// Puts a record together. `sealed`: its key, the salt that the key was derived with, and the plain bytes.
///
/// # Errors
/// [`FormatError::Make`].
pub fn write(form: Form, open: &[u8], sealed: Option<(&ObjectKey, Salt, &[u8])>) -> Result<Vec<u8>, FormatError> {
    let (salt, plain) = sealed.map_or(([0; 16], None), |(_, salt, plain)| (salt, Some(plain)));
    let sealed_bytes = plain.map_or(0, |plain| plain.len() + TAG_BYTES);
    let whole = HEADER_BYTES + open.len() + sealed_bytes + SUM_BYTES;
    if whole > form.bytes_max {
        return Err(FormatError::Make { what: form.what, why: format!("it would have {whole} bytes; {} are allowed", form.bytes_max) });
    }
    let mut out = Writer::with_capacity(whole);
    out.begin(form.magic, form.version).reserved::<2>().u32(small(form.what, open.len())?).u32(small(form.what, sealed_bytes)?);
    let mut out = out.bytes(&salt).bytes(open).finish();
    if let Some((key, _, plain)) = sealed {
        let mut cipher = plain.to_vec();
        let tag = key.seal(Kind::Record, 0, &out, &mut cipher)?;
        out.extend_from_slice(&cipher);
        out.extend_from_slice(&tag);
    }
    let sum = sum(&out);
    out.extend_from_slice(&sum);
    Ok(out)
}

/// Takes one apart and checks its sum.
///
/// # Errors
/// [`FormatError`].
pub fn read(form: Form, bytes: &[u8]) -> Result<Opened<'_>, FormatError> {
    let size = FormatError::Size { what: form.what, bytes: bytes.len() };
    if bytes.len() > form.bytes_max {
        return Err(size);
    }
    let mut fields = Fields::new(form.what, bytes);
    fields.begin(form.magic, form.version)?;
    let (all, found) = bytes.split_last_chunk::<SUM_BYTES>().ok_or(size)?;
    if sum(all) != *found {
        return Err(FormatError::Checksum { what: form.what });
    }
    fields.reserved::<2>()?;
    let (open_bytes, sealed_bytes) = (fields.u32()? as usize, fields.u32()? as usize);
    let salt = fields.array()?;
    let open = fields.bytes(open_bytes)?;
    let before = bytes.get(..HEADER_BYTES + open_bytes).unwrap_or_default();
    let sealed = fields.bytes(sealed_bytes)?;
    fields.bytes(SUM_BYTES)?;
    fields.end()?;
    Ok(Opened { form, salt, open, sealed, before })
}

impl Opened<'_> {
    /// Opens the sealed part. `key`: derived with [`Self::salt`].
    ///
    /// # Errors
    /// [`FormatError::Seal`].
    pub fn unseal(&self, key: &ObjectKey) -> Result<Vec<u8>, FormatError> {
        let (cipher, tag) = self.sealed.split_last_chunk::<TAG_BYTES>().ok_or(FormatError::Seal { what: self.form.what })?;
        let mut plain = cipher.to_vec();
        key.open(self.form.what, Kind::Record, 0, self.before, &mut plain, tag)?;
        Ok(plain)
    }

    fn nothing_sealed(&self) -> Result<(), FormatError> {
        match self.sealed.len() {
            0 => Ok(()),
            bytes => Err(FormatError::Field { what: self.form.what, field: "sealed bytes", value: bytes as u64 }),
        }
    }
}

fn sum(bytes: &[u8]) -> [u8; SUM_BYTES] {
    let mut sum = [0; SUM_BYTES];
    sum.copy_from_slice(&blake3::hash(bytes).as_bytes()[..SUM_BYTES]);
    sum
}

/// Writes a record of which nothing is sealed.
///
/// # Errors
/// [`FormatError::Make`].
pub fn write_open<T: minicbor::Encode<()>>(form: Form, record: &T) -> Result<Vec<u8>, FormatError> {
    write(form, &encode(form.what, record)?, None)
}

/// Reads one.
///
/// # Errors
/// [`FormatError`].
pub fn read_open<'b, T: minicbor::Decode<'b, ()>>(form: Form, bytes: &'b [u8]) -> Result<T, FormatError> {
    let envelope = read(form, bytes)?;
    envelope.nothing_sealed()?;
    decode(form.what, envelope.open)
}

/// Decodes CBOR that must be used up to its end.
///
/// # Errors
/// [`FormatError::Cbor`].
pub fn decode<'b, T: minicbor::Decode<'b, ()>>(what: &'static str, bytes: &'b [u8]) -> Result<T, FormatError> {
    let mut decoder = minicbor::Decoder::new(bytes);
    let value = decoder.decode().map_err(|e| FormatError::Cbor { what, why: e.to_string() })?;
    match bytes.len() - decoder.position() {
        0 => Ok(value),
        rest => Err(FormatError::Cbor { what, why: format!("{rest} bytes follow it") }),
    }
}

/// Encodes to CBOR.
///
/// # Errors
/// [`FormatError::Make`].
pub fn encode<T: minicbor::Encode<()>>(what: &'static str, value: &T) -> Result<Vec<u8>, FormatError> {
    minicbor::to_vec(value).map_err(|e| FormatError::Make { what, why: e.to_string() })
}
