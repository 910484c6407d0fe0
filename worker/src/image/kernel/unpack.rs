//! The kernel inside a kernel's image: Firecracker boots an uncompressed one, and distributions install packed ones.
//!
//! Owns finding it in a bzImage and unpacking it, with nothing executed. Pure: bytes in, bytes out. Where the payload is and what it holds:
//! <https://docs.kernel.org/arch/x86/boot.html>, `payload_offset` and `payload_length`. An image is an operator's own file, so what is
//! bounded here is bounded against damage, not against an enemy.

use std::io::{self, Read};

/// Largest kernel that is unpacked, in bytes: Debian's has 53 MB, distributions' with debugging information some 300 MB.
const KERNEL_BYTES_MAX: u64 = 1 << 30;
/// A sector, in which the size of the part that runs in real mode is counted, and how many there are when the header says 0.
const SECTOR_BYTES: usize = 512;
const SETUP_SECTORS_DEFAULT: usize = 4;
/// Fields of the setup header: their place in the file.
const SETUP_SECTORS_AT: usize = 0x1f1;
const PROTOCOL_AT: usize = 0x206;
const PAYLOAD_OFFSET_AT: usize = 0x248;
const PAYLOAD_LENGTH_AT: usize = 0x24c;
/// The first version of the boot protocol that says where the payload is.
const PROTOCOL_MIN: u16 = 0x0208;
/// LZ4's "legacy" frames, which the kernel's own build makes: blocks of this size, each with its packed size before it
/// (<https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md#legacy-frame>).
const LZ4_BLOCK_BYTES: usize = 8 << 20;
/// Behind payloads whose format does not tell how large they become, the kernel's build writes that, in four bytes.
const SIZE_BYTES: usize = 4;
/// What formats begin with.
const GZIP: &[u8] = &[0x1f, 0x8b];
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const LZ4: &[u8] = &[0x02, 0x21, 0x4c, 0x18];
/// Those that hardly anybody uses for a kernel any more: what they begin with, and their names.
const UNUSUAL: [(&[u8], &str); 3] = [(b"BZh", "bzip2"), (&[0x5d, 0, 0], "lzma"), (&[0x89, b'L', b'Z', b'O'], "lzo")];
/// An ELF file's identification: 64 bits, little end first; behind it the kind of file (2 bytes) and the machine, which is x86-64.
const ELF: &[u8] = b"\x7fELF\x02\x01";
const ELF_MACHINE_AT: usize = 18;
const ELF_X86_64: u16 = 62;

/// Why there is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnpackError {
    /// It does not say where it is.
    #[error("it does not say where in it the kernel is (boot protocol {major}.{minor:02}; 2.08 is the first that does)", major = .0 >> 8, minor = .0 & 0xff)]
    Protocol(u16),
    /// It ends too early.
    #[error("it is cut short")]
    Short,
    /// Packed in a way that is not known here.
    #[error("it is packed with {0}, which this build can't unpack (gzip, xz, zstd and lz4 it can)")]
    Format(String),
    /// It can't be unpacked.
    #[error("it is damaged ({0})")]
    Damaged(String),
    /// More than any kernel.
    #[error("what is in it is larger than {} MiB", KERNEL_BYTES_MAX >> 20)]
    TooLarge,
    /// Something else was packed.
    #[error("what is in it is no kernel for x86-64")]
    NoKernel,
}

/// Is this the beginning of an uncompressed kernel, an ELF file for x86-64?
#[must_use]
pub fn is_elf(head: &[u8]) -> bool {
    head.starts_with(ELF) && number16(head, ELF_MACHINE_AT) == Some(ELF_X86_64)
}

/// Takes the kernel out of a bzImage: an ELF file.
///
/// # Errors
/// [`UnpackError`].
pub fn unpack(image: &[u8]) -> Result<Vec<u8>, UnpackError> {
    let protocol = number16(image, PROTOCOL_AT).ok_or(UnpackError::Short)?;
    if protocol < PROTOCOL_MIN {
        return Err(UnpackError::Protocol(protocol));
    }
    let sectors = match image.get(SETUP_SECTORS_AT).copied().ok_or(UnpackError::Short)? {
        0 => SETUP_SECTORS_DEFAULT,
        sectors => sectors.into(),
    };
    let (offset, length) = (number32(image, PAYLOAD_OFFSET_AT)?, number32(image, PAYLOAD_LENGTH_AT)?);
    // The boot sector lies before the sectors that are counted.
    let begin = ((sectors + 1) * SECTOR_BYTES).saturating_add(offset);
    let payload = image.get(begin..begin.saturating_add(length)).filter(|payload| payload.len() > SIZE_BYTES).ok_or(UnpackError::Short)?;
    let kernel = unpacked(payload)?;
    if is_elf(&kernel) { Ok(kernel) } else { Err(UnpackError::NoKernel) }
}

fn unpacked(payload: &[u8]) -> Result<Vec<u8>, UnpackError> {
    if payload.starts_with(GZIP) {
        read(flate2::read::GzDecoder::new(payload))
    } else if payload.starts_with(XZ) {
        read(lzma_rust2::XzReader::new(payload, false))
    } else if payload.starts_with(ZSTD) {
        let decoder = zstd::stream::read::Decoder::with_buffer(payload).map_err(damaged)?;
        read(decoder.single_frame())
    } else if let Some(blocks) = payload.strip_prefix(LZ4) {
        lz4(blocks)
    } else if is_elf(payload) {
        Ok(payload.to_vec())
    } else {
        let unusual = UNUSUAL.iter().find(|(begin, _)| payload.starts_with(begin)).map(|(_, name)| (*name).to_owned());
        let head = payload.get(..SIZE_BYTES).unwrap_or_default();
        Err(UnpackError::Format(unusual.unwrap_or_else(|| format!("something unknown (it begins with {})", hex::encode(head)))))
    }
}

/// Everything of one stream; what lies behind it is not looked at.
fn read(from: impl Read) -> Result<Vec<u8>, UnpackError> {
    let mut kernel = Vec::new();
    from.take(KERNEL_BYTES_MAX + 1).read_to_end(&mut kernel).map_err(damaged)?;
    if kernel.len() as u64 > KERNEL_BYTES_MAX { Err(UnpackError::TooLarge) } else { Ok(kernel) }
}

fn lz4(mut blocks: &[u8]) -> Result<Vec<u8>, UnpackError> {
    let mut kernel = Vec::new();
    // What is left behind the last block is the size.
    while blocks.len() > SIZE_BYTES {
        let length = number32(blocks, 0)?;
        let rest = blocks.get(SIZE_BYTES..).unwrap_or_default();
        let block = rest.get(..length).ok_or_else(|| UnpackError::Damaged("a block that is longer than the rest".to_owned()))?;
        let begin = kernel.len();
        if begin.saturating_add(LZ4_BLOCK_BYTES) as u64 > KERNEL_BYTES_MAX {
            return Err(UnpackError::TooLarge);
        }
        kernel.resize(begin + LZ4_BLOCK_BYTES, 0);
        let into = kernel.get_mut(begin..).unwrap_or_default();
        let made = lz4_flex::block::decompress_into(block, into).map_err(|e| UnpackError::Damaged(e.to_string()))?;
        kernel.truncate(begin + made);
        blocks = rest.get(length..).unwrap_or_default();
    }
    Ok(kernel)
}

fn damaged(e: io::Error) -> UnpackError {
    UnpackError::Damaged(e.to_string())
}

fn number16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn number32(bytes: &[u8], at: usize) -> Result<usize, UnpackError> {
    let bytes = bytes.get(at..at.saturating_add(4)).and_then(|bytes| bytes.try_into().ok()).ok_or(UnpackError::Short)?;
    usize::try_from(u32::from_le_bytes(bytes)).map_err(|_| UnpackError::Short)
}

#[cfg(test)]
pub mod tests {
    use std::io::Write;

    use super::*;

    /// `xz --check=crc32 --x86 --lzma2=dict=64KiB`, as the kernel's build does it, of [`kernel`].
    const XZ_KERNEL: &str = "fd377a585a0000016922de360201040021010800d2b974cbe000bf00345d003f914584683d89a6da8acc93e24fe70914a4069fa8b494cb029d496566\
                             309d7e7d5defe77c27da63fb9139268b7caa040ab5300000e54506ed00014cc001000000749166ea3e300d8b020000000001595a";

    /// What passes for a kernel: an ELF file's head, and calls, which the filter for x86 changes.
    pub fn kernel() -> Vec<u8> {
        let head = [ELF, &[1], &[0; 9], &[2, 0, 62, 0], &[0; 44]].concat();
        [head, b"\xe8\x10\0\0\0the kernel\n".repeat(8)].concat()
    }

    /// A bzImage with this payload.
    pub fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 3 * SECTOR_BYTES];
        image[SETUP_SECTORS_AT] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[PROTOCOL_AT..PROTOCOL_AT + 2].copy_from_slice(&0x020fu16.to_le_bytes());
        // Half a sector behind the sectors of real mode.
        image[PAYLOAD_OFFSET_AT..PAYLOAD_OFFSET_AT + 4].copy_from_slice(&512u32.to_le_bytes());
        image[PAYLOAD_LENGTH_AT..PAYLOAD_LENGTH_AT + 4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        [&image, payload, b"what lies behind"].concat()
    }

    /// LZ4's legacy frame, in blocks of so many bytes.
    fn legacy(bytes: &[u8], block: usize) -> Vec<u8> {
        let mut all = LZ4.to_vec();
        for block in bytes.chunks(block) {
            let packed = lz4_flex::block::compress(block);
            all.extend_from_slice(&(packed.len() as u32).to_le_bytes());
            all.extend_from_slice(&packed);
        }
        all
    }

    #[test]
    fn what_distributions_pack_kernels_with_is_unpacked() {
        let kernel = kernel();
        let size = (kernel.len() as u32).to_le_bytes();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        gzip.write_all(&kernel).unwrap();
        let sized = |bytes: Vec<u8>| [bytes.as_slice(), &size].concat();
        for (name, payload) in [
            ("gzip", gzip.finish().unwrap()),
            ("xz", sized(hex::decode(XZ_KERNEL).unwrap())),
            ("zstd", sized(zstd::stream::encode_all(kernel.as_slice(), 19).unwrap())),
            ("lz4", sized(legacy(&kernel, LZ4_BLOCK_BYTES))),
            ("lz4 in blocks", sized(legacy(&kernel, 100))),
            ("nothing", kernel.clone()),
        ] {
            assert_eq!(unpack(&image(&payload)).as_deref(), Ok(kernel.as_slice()), "{name}");
        }
    }

    #[test]
    fn what_can_not_be_unpacked_says_why() {
        let why = |payload: &[u8]| unpack(&image(payload)).unwrap_err();
        assert_eq!(why(b"BZh91AY&SY"), UnpackError::Format("bzip2".to_owned()));
        assert!(why(b"anything").to_string().contains("something unknown (it begins with 616e7974)"));
        assert_eq!(why(&legacy(b"no kernel, but well packed", 100)), UnpackError::NoKernel);
        assert!(matches!(why(&[LZ4, &[0xff; 9]].concat()), UnpackError::Damaged(_)));
        assert!(matches!(why(&[XZ, &[0; 90]].concat()), UnpackError::Damaged(_)));
        let mut old = image(&kernel());
        old[PROTOCOL_AT..PROTOCOL_AT + 2].copy_from_slice(&0x0206u16.to_le_bytes());
        assert!(unpack(&old).unwrap_err().to_string().contains("boot protocol 2.06"));
        let whole = image(&kernel());
        for cut in 0..whole.len() - b"what lies behind".len() {
            assert_eq!(unpack(&whole[..cut]), Err(UnpackError::Short), "{cut}");
        }
    }
}
