//! Lines of `/proc/self/mountinfo` (proc_pid_mountinfo(5)), as the agent and the worker's host side both read them.
//!
//! Owns the fields that they need. Does not own what is done with a mount.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// A mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted<'a> {
    /// Its device, `major:minor`.
    pub device: &'a str,
    /// Where it is mounted.
    pub place: PathBuf,
    /// Its kind of file system.
    pub kind: &'a str,
}

/// Reads a line. None: it is not one.
#[must_use]
pub fn read(line: &str) -> Option<Mounted<'_>> {
    let (before, behind) = line.split_once(" - ")?;
    let mut fields = before.split(' ');
    let device = fields.nth(2)?;
    let place = unescaped(fields.nth(1)?);
    Some(Mounted { device, place, kind: behind.split(' ').next()? })
}

/// A path as it stands there: some characters are written as a backslash and three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((first, behind)) = rest.split_first() {
        let digits = behind.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = behind.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = behind;
            }
        }
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    #[test]
    fn places_of_mounts_are_read_as_the_kernel_writes_them() {
        for (text, path) in
            [("/data", "/data"), ("/a\\040b\\134c", "/a b\\c"), ("/x\\9", "/x\\9"), ("/y\\04", "/y\\04"), ("\\9\\1", "\\9\\1")]
        {
            assert_eq!(unescaped(text), Path::new(path), "{text}");
        }
    }

    #[test]
    fn mounts_are_read() {
        let line = "3321 29 0:93 / /a\\040b/1/file rw,nosuid shared:1 - fuse.volley volley-volume rw,user_id=0";
        assert_eq!(read(line), Some(Mounted { device: "0:93", place: "/a b/1/file".into(), kind: "fuse.volley" }));
        assert_eq!(read("1 2 7:1 / /t rw - ext4 /dev/loop1 rw"), Some(Mounted { device: "7:1", place: "/t".into(), kind: "ext4" }));
        assert_eq!(read("nonsense"), None);
    }
}
