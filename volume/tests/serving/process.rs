//! A server and a shim in processes of their own, which can be killed: this test binary, run again.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use volley_volume::serve::fuse::{self, Options, Owner};
use volley_volume::serve::socket::{Place, Socket};

use crate::device::FileDevice;
use crate::soon;

/// A process that is killed at the latest when the test ends.
pub struct Killed(pub Child);

impl Killed {
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn place(dir: &Path, file: &str) -> Place {
    let me = rustix::process::geteuid().as_raw();
    let group = rustix::process::getegid().as_raw();
    Place { dir: dir.to_owned(), file: file.into(), owner: me, group, peers: vec![me], export: "disk".into() }
}

fn again(test: &str, env: &[(&str, &str)]) -> Killed {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).envs(env.iter().copied());
    Killed(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
}

/// Serves the file `dir/disk` of `size` bytes on `dir/socket`.
pub fn server(dir: &Path, size: u64) -> Killed {
    let server = again(
        "process::a_server_that_will_be_killed",
        &[("VOLLEY_TEST_DIR", dir.to_str().unwrap()), ("VOLLEY_TEST_SIZE", &size.to_string())],
    );
    soon("the server", || std::os::unix::net::UnixStream::connect(dir.join("socket")).is_ok());
    server
}

#[test]
#[ignore = "run by other tests"]
fn a_server_that_will_be_killed() {
    let Some(dir) = std::env::var_os("VOLLEY_TEST_DIR").map(PathBuf::from) else { return };
    let size = std::env::var("VOLLEY_TEST_SIZE").unwrap().parse().unwrap();
    let _socket = Socket::open(&place(&dir, "socket"), Arc::new(FileDevice::at(&dir.join("disk"), size))).unwrap();
    loop {
        std::thread::park();
    }
}

/// Shows `dir/socket` as `dir/file` to `owner`; it is there when this returns.
pub fn shim(dir: &Path, owner: u32, run_as: Option<u32>, patience: Duration) -> Killed {
    let _ = std::fs::remove_file(dir.join("ready"));
    let (owner, run_as) = (owner.to_string(), run_as.map_or(String::new(), |uid| uid.to_string()));
    let env = [
        ("VOLLEY_TEST_DIR", dir.to_str().unwrap()),
        ("VOLLEY_TEST_OWNER", &owner),
        ("VOLLEY_TEST_RUN_AS", &run_as),
        ("VOLLEY_TEST_PATIENCE", &patience.as_millis().to_string()),
    ];
    let mut shim = again("process::a_shim_that_will_be_killed", &env);
    soon("the file", || {
        assert!(shim.0.try_wait().unwrap().is_none(), "the shim ended");
        std::fs::read(dir.join("ready")).is_ok_and(|said| said == b"ready")
    });
    shim
}

#[test]
#[ignore = "run by other tests"]
fn a_shim_that_will_be_killed() {
    let Some(dir) = std::env::var_os("VOLLEY_TEST_DIR").map(PathBuf::from) else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<u32>().ok();
    let user = |uid: u32| Owner { uid, gid: uid };
    let options = Options {
        socket: dir.join("socket"),
        export: String::new(),
        file: dir.join("file"),
        owner: user(number("VOLLEY_TEST_OWNER").unwrap()),
        run_as: number("VOLLEY_TEST_RUN_AS").map(user),
        patience: Duration::from_millis(number("VOLLEY_TEST_PATIENCE").unwrap().into()),
    };
    // Opened while it may be.
    let mut ready = std::fs::File::create(dir.join("ready")).unwrap();
    fuse::run(&options, || ready.write_all(b"ready").unwrap()).unwrap();
}
