//! What this machine has for guests: QEMU, a kernel with modules, busybox.
//!
//! Owns finding them, putting programs into a guest's RAM disk, and the files of an image with busybox.

use std::path::{Path, PathBuf};
use std::process::Command;

use volley_guest::initramfs::Archive;

/// The programs of this machine that make a guest.
pub struct Host {
    pub qemu: PathBuf,
    pub busybox: PathBuf,
    pub kernel: PathBuf,
}

impl Host {
    /// Finds them, or says what is missing. `tests/run` installs all of them.
    pub fn find() -> Result<Self, String> {
        Ok(Self {
            qemu: program("qemu-system-x86_64")?,
            busybox: program("busybox")?,
            kernel: part("VOLLEY_GUEST_KERNEL", "vmlinuz").filter(|file| file.is_file()).ok_or("no guest kernel (VOLLEY_GUEST_KERNEL)")?,
        })
    }
}

/// A program in PATH; or that there is none.
pub fn program(name: &str) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| format!("no {name} in PATH"))
}

/// Where a part of a guest lies: as the environment says, or where `tests/run` puts it.
pub fn part(variable: &str, name: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")))?;
        Some(cache.join("volley/guest").join(name))
    })
}

/// Adds a program of this machine to a RAM disk, with the libraries it loads.
pub fn add_program(disk: &mut Archive, from: &Path, to: &str) {
    let read = |path: &Path| std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    disk.file(Path::new(to), &read(from), 0o755);
    for library in libraries(from) {
        if !disk.has(&library) {
            disk.file(&library, &read(&library), 0o755);
        }
    }
}

/// The libraries that a program loads.
fn libraries(program: &Path) -> Vec<PathBuf> {
    // One that is linked statically has none, and says so on stderr.
    let listed = Command::new("ldd").arg(program).output().expect("ldd");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    listed.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

/// What busybox is called in an image.
const TOOLS: [&str; 61] = [
    "[", "awk", "cat", "chmod", "cp", "cut", "date", "dd", "df", "echo", "env", "expr", "false", "find", "grep", "head", "hostname", "id",
    "kill", "ln", "ls", "mkdir", "mkfifo", "mknod", "mount", "mv", "nc", "nice", "nohup", "od", "printf", "ps", "pwd", "readlink", "rm",
    "rmdir", "sed", "seq", "setsid", "sh", "sha256sum", "sleep", "sort", "stat", "stty", "sync", "tail", "tee", "test", "timeout", "touch",
    "tr", "true", "tty", "umount", "uname", "uniq", "usleep", "wc", "xargs", "yes",
];

/// Makes the files of an image with busybox and nothing else: its names, the libraries it loads, two users, a file that names the image.
pub fn busybox_files(files: &Path) -> Result<(), String> {
    let busybox = program("busybox")?;
    for name in ["bin", "etc", "proc", "sys", "dev", "run", "tmp", "srv"] {
        std::fs::create_dir_all(files.join(name)).expect("a directory");
    }
    std::fs::copy(&busybox, files.join("bin/busybox")).expect("busybox");
    for library in libraries(&busybox) {
        let to = files.join(library.strip_prefix("/").expect("a path from the root"));
        std::fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
        std::fs::copy(&library, to).expect("a library");
    }
    for name in TOOLS {
        std::os::unix::fs::symlink("busybox", files.join("bin").join(name)).expect("a link");
    }
    let write = |name: &str, text: &str| std::fs::write(files.join("etc").join(name), text).expect("a file");
    write("release", "the image\n");
    write("passwd", "root:x:0:0::/:/bin/sh\nann:x:1000:1001::/:/bin/sh\n");
    write("group", "root:x:0:\nann:x:1001:\n");
    Ok(())
}
