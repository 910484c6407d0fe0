//! A real nats-server.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The program, as the environment names it or in PATH.
fn nats_server() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("NATS_SERVER") {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("nats-server")).find(|file| file.is_file())
}

/// A server of its own, with JetStream in a directory of its own.
pub struct Nats {
    binary: PathBuf,
    dir: tempfile::TempDir,
    port: u16,
    child: Child,
    shipped: bool,
}

impl Nats {
    /// Starts one; none, and says so, where there is no program.
    pub fn start() -> Option<Self> {
        Self::start_with(false)
    }

    /// The same with the configuration that is shipped, for a worker, and what that one may do.
    pub fn shipped() -> Option<Self> {
        Self::start_with(true)
    }

    fn start_with(shipped: bool) -> Option<Self> {
        let Some(binary) = nats_server() else {
            eprintln!("skipped: no nats-server in PATH");
            return None;
        };
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let dir = tempfile::tempdir().unwrap();
        if shipped {
            let text = std::fs::read_to_string("../deploy/nats/nats-server.conf").unwrap();
            let text = text.replace("127.0.0.1:4222", &format!("127.0.0.1:{port}"));
            let text = text.replace("/var/lib/nats", dir.path().join("data").to_str().unwrap());
            std::fs::write(dir.path().join("nats.conf"), text).unwrap();
        }
        let child = Self::spawn(&binary, dir.path(), port, shipped);
        Some(Self { binary, dir, port, child, shipped })
    }

    fn spawn(binary: &Path, dir: &Path, port: u16, shipped: bool) -> Child {
        let mut command = Command::new(binary);
        if shipped {
            command.arg("-c").arg(dir.join("nats.conf"));
            command.env("VOLLEY_COORDINATOR_PASSWORD", "c-secret").env("VOLLEY_WORKER_PASSWORD", "w-secret");
        } else {
            command.args(["-a", "127.0.0.1", "-p", &port.to_string(), "-js", "-sd"]).arg(dir);
        }
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// A client that goes on when the server comes back; a worker's, where rights are told apart.
    pub async fn client(&self) -> async_nats::Client {
        self.connect("worker", "w-secret").await
    }

    /// A coordinator's.
    pub async fn coordinator(&self) -> async_nats::Client {
        self.connect("coordinator", "c-secret").await
    }

    async fn connect(&self, user: &str, password: &str) -> async_nats::Client {
        let options = async_nats::ConnectOptions::new().retry_on_initial_connect().reconnect_delay_callback(|_| Duration::from_millis(50));
        let options = if self.shipped { options.user_and_password(user.into(), password.into()) } else { options };
        options.connect(self.address()).await.unwrap()
    }

    /// Where it listens.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again with what it had on its disk.
    pub fn restart(&mut self) {
        self.child = Self::spawn(&self.binary, self.dir.path(), self.port, self.shipped);
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
