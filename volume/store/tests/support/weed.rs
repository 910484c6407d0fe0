//! A SeaweedFS server, where its binary is at hand: a second opinion on what S3 is.
//!
//! `VOLLEY_TEST_WEED` names the binary; otherwise `weed` is looked for on the `PATH`.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

fn binary() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("VOLLEY_TEST_WEED") {
        return Some(path.into());
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join("weed")).find(|path| path.is_file())
}

/// A server that is killed at the latest when this is dropped.
pub struct Weed {
    child: Child,
    /// Where it answers, some seconds after its start.
    pub endpoint: String,
    _dir: tempfile::TempDir,
}

impl Drop for Weed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    // SeaweedFS takes the port plus 10,000 for gRPC.
    loop {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if port < 50_000 && std::net::TcpListener::bind(("127.0.0.1", port + 10_000)).is_ok() {
            return port;
        }
    }
}

impl Weed {
    /// Starts one with an empty disk, for whoever has these keys. None: there is no SeaweedFS here, which is said.
    pub fn start(access_key: &str, secret_key: &str) -> Option<Self> {
        let found = binary();
        if found.is_none() {
            eprintln!("skipped: no SeaweedFS binary; set VOLLEY_TEST_WEED, or put `weed` on the PATH");
        }
        Some(run(&found?, access_key, secret_key))
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

fn run(binary: &Path, access_key: &str, secret_key: &str) -> Weed {
    let dir = tempfile::tempdir().unwrap();
    let identities = format!(
        r#"{{"identities":[{{"name":"t","credentials":[{{"accessKey":"{access_key}","secretKey":"{secret_key}"}}],"actions":["Admin","Read","Write","List","Tagging"]}}]}}"#
    );
    let s3_config = dir.path().join("s3.json");
    std::fs::write(&s3_config, identities).unwrap();
    let [master, volume, filer, s3] = [free_port(), free_port(), free_port(), free_port()];
    let child = Command::new(binary)
        .arg("server")
        .arg(format!("-dir={}", dir.path().display()))
        .arg("-ip=127.0.0.1")
        .arg(format!("-master.port={master}"))
        .arg(format!("-volume.port={volume}"))
        .arg("-filer")
        .arg(format!("-filer.port={filer}"))
        .arg("-s3")
        .arg(format!("-s3.port={s3}"))
        .arg(format!("-s3.config={}", s3_config.display()))
        .arg("-master.volumeSizeLimitMB=64")
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Weed { child, endpoint: format!("http://127.0.0.1:{s3}"), _dir: dir }
}
