//! What a volume is to those who serve it: a row of bytes.
//!
//! Owns the seam between the volume and the protocols (`serve`). Knows no protocol, no file and no S3.

use std::io;

/// A block device. Offsets and lengths are in bytes and lie within the size; what does not is refused with `InvalidInput`.
///
/// Calls block and come from many threads at once. A write that returned is seen by every later read; two that overlap in time leave one or
/// the other in each 4 KiB block.
pub trait Device: Send + Sync {
    /// Its size in bytes now; it may grow.
    fn size(&self) -> u64;

    /// Is every write refused?
    fn read_only(&self) -> bool;

    /// Reads, if that needs no wait for the network. None: it does; call [`Device::read`] where waiting does no harm.
    ///
    /// # Errors
    /// As [`Device::read`].
    fn read_ready(&self, offset: u64, into: &mut [u8]) -> Option<io::Result<()>>;

    /// Reads.
    ///
    /// # Errors
    /// What is stored could not be had, or is damaged: never other bytes. `ErrorKind::StaleNetworkFileHandle`: another writer has the volume.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes. With `durable` it returns when a flush of it would.
    ///
    /// # Errors
    /// `StorageFull` when nothing more can be taken; `ReadOnlyFilesystem`; `StaleNetworkFileHandle` when another writer has the volume.
    fn write(&self, offset: u64, bytes: &[u8], durable: bool) -> io::Result<()>;

    /// Makes a range read as zeros. `hole`: it need keep no room.
    ///
    /// # Errors
    /// As [`Device::write`].
    fn zero(&self, offset: u64, len: u64, hole: bool, durable: bool) -> io::Result<()>;

    /// Says that what is in the range is wanted no more. It reads as zeros afterwards.
    ///
    /// # Errors
    /// As [`Device::write`].
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes every write that has returned as durable as the volume's mode promises.
    ///
    /// # Errors
    /// It is not known to be durable, and later flushes will not say that it is.
    fn flush(&self) -> io::Result<()>;

    /// What a range consists of, in order, without gaps; as many pieces as are found without waiting for the network, at least one.
    ///
    /// # Errors
    /// As [`Device::read`].
    fn pieces(&self, offset: u64, len: u64) -> io::Result<Vec<Piece>>;
}

/// A part of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// In bytes.
    pub len: u64,
    /// Nothing is stored for it: it reads as zeros.
    pub hole: bool,
}
