//! An image with busybox and nothing else.

use std::path::Path;

use volley_worker::image::oci::{Config, Digest};
use volley_worker::image::{self, ImageNote, Limits, Source, Store};

const TOOLS: [&str; 59] = [
    "[", "awk", "cat", "chmod", "cp", "cut", "date", "dd", "df", "echo", "env", "expr", "false", "find", "grep", "head", "hostname", "id",
    "kill", "ln", "ls", "mkdir", "mkfifo", "mknod", "mount", "mv", "nc", "nice", "nohup", "od", "printf", "ps", "pwd", "readlink", "rm",
    "rmdir", "sed", "seq", "setsid", "sh", "sha256sum", "sleep", "sort", "stat", "sync", "tail", "tee", "test", "timeout", "touch", "tr",
    "true", "tty", "umount", "uname", "uniq", "wc", "xargs", "yes",
];

/// The same image with a user and an environment of its own.
pub const OF_USER: &str = "sha256:2222222222222222222222222222222222222222222222222222222222222222";

/// The same image with a user that it does not know.
pub const OF_NOBODY: &str = "sha256:3333333333333333333333333333333333333333333333333333333333333333";

/// Puts all of them into a store. The first one's name; or what is missing here.
pub async fn make(images: &Path) -> Result<String, String> {
    let store = Store::open(images).unwrap();
    let note = import(&store, |_| ()).await?;
    let config = Config { user: "ann".to_owned(), env: vec!["FROM=image".to_owned(), "PATH=/bin".to_owned()], ..Config::default() };
    let other = Config { user: "bob".to_owned(), ..Config::default() };
    for (name, config) in [(OF_USER, config), (OF_NOBODY, other)] {
        let image = ImageNote { digest: Digest::parse(name).unwrap(), source: format!("dir:/{name}"), config, ..note.clone() };
        store.note_image(&image).unwrap();
    }
    Ok(format!("sha256:{}", note.digest.hex()))
}

/// An image whose directories are links out of it.
pub async fn make_hostile(images: &Path) -> Result<String, String> {
    let store = Store::open(images).unwrap();
    let links = |files: &Path| {
        for (name, to) in [("tmp", "/etc"), ("proc", "/etc"), ("dev", "/"), ("sys", "../../.."), ("volley", "/etc"), ("etc", "/root")] {
            std::fs::remove_dir_all(files.join(name)).or_else(|_| std::fs::remove_file(files.join(name))).ok();
            std::os::unix::fs::symlink(to, files.join(name)).unwrap();
        }
    };
    import(&store, links).await.map(|note| format!("sha256:{}", note.digest.hex()))
}

/// Imports busybox, with changes.
async fn import(store: &Store, change: impl FnOnce(&Path)) -> Result<ImageNote, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let busybox = std::env::split_paths(&path).map(|dir| dir.join("busybox")).find(|file| file.is_file()).ok_or("no busybox in PATH")?;
    let files = tempfile::tempdir().unwrap();
    for name in ["bin", "etc", "proc", "sys", "dev", "run", "tmp", "srv"] {
        std::fs::create_dir_all(files.path().join(name)).unwrap();
    }
    std::fs::copy(&busybox, files.path().join("bin/busybox")).unwrap();
    let listed = std::process::Command::new("ldd").arg(&busybox).output().unwrap();
    for library in String::from_utf8_lossy(&listed.stdout).split_whitespace().filter(|word| word.starts_with('/')) {
        let to = files.path().join(&library[1..]);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(library, to).unwrap();
    }
    for name in TOOLS {
        std::os::unix::fs::symlink("busybox", files.path().join("bin").join(name)).unwrap();
    }
    std::fs::write(files.path().join("etc/release"), "the image\n").unwrap();
    std::fs::write(files.path().join("etc/passwd"), "root:x:0:0::/:/bin/sh\nann:x:1000:1001::/:/bin/sh\n").unwrap();
    std::fs::write(files.path().join("etc/group"), "root:x:0:\nann:x:1001:\n").unwrap();
    change(files.path());
    image::import(store, Source::Directory(files.path().to_owned()), None, Limits::default()).await.map_err(|e| e.to_string())
}
