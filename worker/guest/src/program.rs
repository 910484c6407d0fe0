//! From a command's words to the program that runs.
//!
//! Owns where a program is looked for and which error counts. As the kernel has it: a script without a first line that names its interpreter
//! is no program, where libraries of C would hand it to a shell. Allocates before the process exists, and not afterwards.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStrExt;

/// Where a program without a slash is looked for when the environment has no PATH.
const PATH_DEFAULT: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A program with its arguments and environment, as the kernel takes them.
#[derive(Debug)]
pub struct Program {
    /// The files to try, in order.
    files: Vec<CString>,
    /// Point into the texts, which lie where they lie however this is moved, and end with a null pointer each.
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    _texts: [Vec<CString>; 2],
}

// SAFETY: the pointers are to texts of its own that nobody changes.
unsafe impl Send for Program {}
// SAFETY: as above.
unsafe impl Sync for Program {}

impl Program {
    /// None when there is no program, or a NUL byte is in a text.
    #[must_use]
    pub fn new(words: Vec<CString>, variables: Vec<CString>) -> Option<Self> {
        let name = words.first()?.as_bytes();
        let path = variables.iter().find_map(|pair| pair.as_bytes().strip_prefix(b"PATH=")).unwrap_or(PATH_DEFAULT);
        let in_folder = |folder: &[u8]| CString::new([if folder.is_empty() { b"." } else { folder }, b"/", name].concat()).ok();
        let files = match name {
            b"" => return None,
            name if name.contains(&b'/') => vec![CString::new(name).ok()?],
            _ => path.split(|byte| *byte == b':').map(in_folder).collect::<Option<_>>()?,
        };
        let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).chain(std::iter::once(std::ptr::null())).collect();
        Some(Self { files, argv: pointers(&words), env: pointers(&variables), _texts: [words, variables] })
    }

    /// Becomes the program. Returns only when that fails, the system's error number. Makes nothing but system calls.
    #[must_use]
    pub fn exec(&self) -> i32 {
        let mut kept = libc::ENOENT;
        for file in &self.files {
            // SAFETY: pointers to texts that live as long as this, each list with a null pointer at its end.
            let errno = unsafe {
                libc::execve(file.as_ptr(), self.argv.as_ptr(), self.env.as_ptr());
                *libc::__errno_location()
            };
            match errno {
                // As a shell does: go on looking, but remember that one was there and wouldn't run.
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => kept = libc::EACCES,
                other => return other,
            }
        }
        kept
    }
}

/// This process's variables, each `NAME=value`.
#[must_use]
pub fn own_variables() -> Vec<CString> {
    let pair = |(name, value): (std::ffi::OsString, std::ffi::OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
    std::env::vars_os().filter_map(|variable| CString::new(pair(variable)).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_looked_for_in_its_own_path() {
        let text = |text: &str| CString::new(text).unwrap();
        let files = |name: &str, path: &str| Program::new(vec![text(name)], vec![text("A=b"), text(path)]).map(|program| program.files);
        assert_eq!(files("x", "PATH=/a::b"), Some(vec![text("/a/x"), text("./x"), text("b/x")]));
        assert_eq!(files("./x", "PATH=/a"), Some(vec![text("./x")]));
        assert_eq!(files("x", "OTHER=/a").map(|files| files.len()), Some(6));
        assert_eq!(files("", "PATH=/a"), None);
        assert_eq!(Program::new(vec![text("/no/such/program")], Vec::new()).unwrap().exec(), libc::ENOENT);
    }
}
