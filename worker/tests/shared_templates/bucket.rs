//! A bucket behind a proxy that misbehaves on request, and snapshots that need no machine.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use volley_jobspecs::ids::TenantId;
use volley_store::embedded::EmbeddedServer;
use volley_store::{Retry, Store};
use volley_worker::image::oci::Digest;
use volley_worker::template::depot::{Depot, Source};
use volley_worker::template::keys::Keys;
use volley_worker::template::manifest::Built;
use volley_worker::template::{Owner, Recipe};
use volley_worker::vmm::files::{self, Frozen};
use volley_worker::vmm::{Accelerator, Identity, Kind, Size, Version};

use crate::s3;

/// What the proxy does.
#[derive(Default)]
pub struct Proxy {
    /// Breaks every connection and takes none.
    pub away: AtomicBool,
    /// Damages one byte of the next large piece of an answer.
    pub damage: AtomicBool,
    /// Is away after so many more large pieces of answers.
    pub away_after: AtomicUsize,
}

pub struct Bucket {
    _server: EmbeddedServer,
    /// On the server itself.
    pub store: Store,
    pub proxy: Arc<Proxy>,
    port: u16,
}

pub fn keys(byte: &str) -> Keys {
    Keys::parse(&byte.repeat(32)).unwrap()
}

impl Bucket {
    pub async fn start(dir: &Path) -> Self {
        let (server, store) = s3::start(dir).await;
        let proxy = Arc::new(Proxy { away_after: AtomicUsize::new(usize::MAX), ..Proxy::default() });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (to, acting) = (server.endpoint().strip_prefix("http://").unwrap().to_owned(), proxy.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if !acting.away.load(Ordering::SeqCst) {
                    tokio::spawn(pass(client, TcpStream::connect(to.clone()).await.unwrap(), acting.clone()));
                }
            }
        });
        Self { _server: server, store, proxy, port }
    }

    /// The endpoint of the proxy.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Templates in it, reached through the proxy, and given up soon.
    pub async fn depot(&self) -> Depot {
        depot(&self.endpoint()).await
    }

    /// Keys of all objects below a prefix.
    pub async fn list(&self, prefix: &str) -> Vec<String> {
        self.store.list(prefix, None, 1_000).await.unwrap().objects.into_iter().map(|object| object.key).collect()
    }
}

pub async fn depot(endpoint: &str) -> Depot {
    let retry = Retry { budget: Duration::from_secs(2), attempt_timeout: Duration::from_secs(5), ..Retry::default() };
    Depot::new(&s3::connect(endpoint).await, keys("a1"), "templates/").with_retry(retry)
}

async fn pass(client: TcpStream, server: TcpStream, proxy: Arc<Proxy>) {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client.into_split(), server.into_split());
    let up = async {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match from_client.read(&mut buffer).await {
                Ok(len) if len > 0 && to_server.write_all(&buffer[..len]).await.is_ok() => {}
                _ => return,
            }
        }
    };
    let down = async {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let Ok(len) = from_server.read(&mut buffer).await else { return };
            if len > 4_096 {
                if proxy.damage.swap(false, Ordering::SeqCst) {
                    buffer[len - 1] ^= 1;
                }
                if proxy.away_after.fetch_sub(1, Ordering::SeqCst) == 0 {
                    proxy.away.store(true, Ordering::SeqCst);
                }
            }
            if len == 0 || to_client.write_all(&buffer[..len]).await.is_err() {
                return;
            }
        }
    };
    let cut = async {
        while !proxy.away.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! { () = up => {}, () = down => {}, () = cut => {} }
}

/// A recipe whose machine has 8 MiB.
pub fn recipe(word: &str) -> Recipe {
    let digest = |byte: u8| Digest::parse(&format!("sha256:{}", hex::encode([byte; 32]))).unwrap();
    Recipe {
        owner: Owner::Tenant(TenantId::new("acme").unwrap()),
        image: digest(1),
        root: digest(2),
        kernel: [3; 32],
        initrd: [4; 32],
        words: word.to_owned(),
        size: Size { vcpus: 1, memory_bytes: 8 << 20 },
        warm_up: Vec::new(),
        keep_processes: false,
        vmm: Identity { vmm: Kind::Qemu, version: Version(7, 2, 22), accelerator: Accelerator::Tcg, machine: "q35", cpu: "max", format: 1 },
        processor: String::new(),
    }
}

/// Bytes that do not compress, and the same for the same seed.
pub fn noise(seed: u8, len: usize) -> Vec<u8> {
    let mut all = vec![0; len];
    blake3::Hasher::new().update(&[seed]).finalize_xof().fill(&mut all);
    all
}

/// A memory of 8 MiB with these parts written, the rest a hole; and a state.
pub fn snapshot(parts: &[(u64, &[u8])]) -> (Arc<Frozen>, Arc<Frozen>) {
    let memory = files::in_memory("memory").unwrap();
    memory.set_len(8 << 20).unwrap();
    for (at, bytes) in parts {
        memory.write_all_at(bytes, *at).unwrap();
    }
    let state = files::in_memory("state").unwrap();
    state.write_all_at(&noise(200, 70_001), 0).unwrap();
    (Arc::new(Frozen::seal(memory).unwrap()), Arc::new(Frozen::seal(state).unwrap()))
}

pub fn source<'a>(recipe: &'a Recipe, (memory, state): &'a (Arc<Frozen>, Arc<Frozen>)) -> Source<'a> {
    let built = Built { by: "w1".into(), at_ms: 1_800_000_000_000, took_ms: 3_000, build: "test".into() };
    Source { recipe, memory, state, kept_processes: 0, built }
}

pub fn bytes_of(file: &Frozen) -> Vec<u8> {
    let mut all = vec![0; file.bytes().unwrap() as usize];
    file.read_at(&mut all, 0).unwrap();
    all
}
