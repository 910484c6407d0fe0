//! A bucket on the embedded server whose requests are counted and whose answers are lost on demand, and hosts on it.
#![allow(dead_code, reason = "each test file uses its own part")]

#[path = "../../store/tests/support/weed.rs"]
pub mod weed;

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::runtime::Runtime;
use volley_jobspecs::ids::{SnapshotId, TenantId, VolumeId};
use volley_store::embedded::{EmbeddedConfig, EmbeddedServer};
use volley_store::{Store, StoreConfig};
use volley_volume::format::head::FlushMode;
use volley_volume::format::seal::ClusterKeys;
use volley_volume::io::s3::{Answer, Listed, Objects, ObjectsError, Put};
use volley_volume::{Host, Limits, NewVolume, Opener};

pub const MIB: u64 = 1 << 20;

/// What becomes of the next conditional exchange of a head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It is done, nobody is told.
    LoseAnswer,
    /// It is not done, nobody is told.
    LoseRequest,
}

/// Requests of one host.
pub struct Counted {
    store: Store,
    requests: Mutex<Vec<(&'static str, String)>>,
    faults: Mutex<Vec<Fault>>,
    /// No request gets through.
    pub away: std::sync::atomic::AtomicBool,
}

impl Counted {
    fn note(&self, request: &'static str, key: &str) -> Result<(), ObjectsError> {
        self.requests.lock().unwrap().push((request, key.to_owned()));
        if self.away.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(ObjectsError::Unavailable { key: key.to_owned(), why: "S3 is away".to_owned() });
        }
        Ok(())
    }

    pub fn take(&self) -> Vec<(&'static str, String)> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }

    pub fn fault(&self, fault: Fault) {
        self.faults.lock().unwrap().push(fault);
    }
}

impl Objects for Counted {
    fn get<'a>(&'a self, key: &'a str, bytes_max: u64) -> Answer<'a, (Bytes, String)> {
        Box::pin(async move {
            self.note("get", key)?;
            Objects::get(&self.store, key, bytes_max).await
        })
    }
    fn get_range<'a>(&'a self, key: &'a str, start: u64, len: u64) -> Answer<'a, Bytes> {
        Box::pin(async move {
            self.note("get range", key)?;
            Objects::get_range(&self.store, key, start, len).await
        })
    }
    fn put_if_absent<'a>(&'a self, key: &'a str, body: Bytes) -> Answer<'a, Put> {
        Box::pin(async move {
            self.note("put", key)?;
            Objects::put_if_absent(&self.store, key, body).await
        })
    }
    fn put_if_match<'a>(&'a self, key: &'a str, body: Bytes, tag: &'a str) -> Answer<'a, Put> {
        Box::pin(async move {
            self.note("put", key)?;
            let fault = self.faults.lock().unwrap().pop();
            if fault == Some(Fault::LoseRequest) {
                return Ok(Put::Unknown("lost".into()));
            }
            let put = Objects::put_if_match(&self.store, key, body, tag).await;
            if fault.is_some() { Ok(Put::Unknown("lost".into())) } else { put }
        })
    }
    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> Answer<'a, Vec<Listed>> {
        Box::pin(async move {
            self.note("list", prefix)?;
            Objects::list(&self.store, prefix, after).await
        })
    }
    fn delete<'a>(&'a self, key: &'a str) -> Answer<'a, ()> {
        Box::pin(async move {
            self.note("delete", key)?;
            Objects::delete(&self.store, key).await
        })
    }
}

/// A bucket.
pub struct World {
    pub dir: std::path::PathBuf,
    pub runtime: Runtime,
    endpoint: String,
    _mine: Option<(tempfile::TempDir, Server)>,
}

enum Server {
    Embedded(#[allow(dead_code, reason = "it is there")] EmbeddedServer),
    Weed(#[allow(dead_code, reason = "it is there")] weed::Weed),
}

impl World {
    pub fn new() -> Self {
        let (dir, runtime) = (tempfile::tempdir().unwrap(), Runtime::new().unwrap());
        let root = dir.path().join("s3");
        let config =
            EmbeddedConfig { root, bind: "127.0.0.1:0".parse().unwrap(), access_key: "k".into(), secret_key: "s".into(), reserve_bytes: 0 };
        let server = runtime.block_on(EmbeddedServer::start(config)).unwrap();
        let (path, endpoint) = (dir.path().to_owned(), server.endpoint());
        let world = Self { dir: path, runtime, endpoint, _mine: Some((dir, Server::Embedded(server))) };
        world.runtime.block_on(async { world.store().await.ensure_bucket().await }).unwrap();
        world
    }

    /// The same on SeaweedFS, where there is one.
    pub fn on_seaweedfs() -> Option<Self> {
        let weed = weed::Weed::start("k", "s")?;
        let (dir, runtime) = (tempfile::tempdir().unwrap(), Runtime::new().unwrap());
        let (path, endpoint) = (dir.path().to_owned(), weed.endpoint.clone());
        let world = Self { dir: path, runtime, endpoint, _mine: Some((dir, Server::Weed(weed))) };
        let begun = std::time::Instant::now();
        let warm = || {
            world.runtime.block_on(async {
                let store = world.store().await;
                store.ensure_bucket().await.is_ok()
                    && store.put("warm", "1".into()).await.is_ok()
                    && Store::delete(&store, "warm").await.is_ok()
            })
        };
        while !warm() {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "SeaweedFS does not answer");
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        Some(world)
    }

    /// Where the bucket's server is.
    pub fn server(&self) -> std::net::SocketAddr {
        self.endpoint.strip_prefix("http://").unwrap().parse().unwrap()
    }

    /// Hosts that are made from now on reach the bucket through this address.
    pub fn through(&mut self, proxy: std::net::SocketAddr) {
        self.endpoint = format!("http://{proxy}");
    }

    /// Where another process finds it.
    pub fn address(&self) -> String {
        format!("{} {}", self.endpoint, self.dir.display())
    }

    /// The world of another process.
    pub fn join(address: &str) -> Self {
        let (endpoint, dir) = address.split_once(' ').unwrap();
        Self { dir: dir.into(), runtime: Runtime::new().unwrap(), endpoint: endpoint.into(), _mine: None }
    }

    async fn store(&self) -> Store {
        Store::connect(&StoreConfig::new(&self.endpoint, "volley", "k", "s")).await.unwrap()
    }

    /// A host of this name; the same name is the same disk.
    pub fn host(&self, name: &str, limits: Limits) -> (Arc<Host>, Arc<Counted>) {
        let store = self.runtime.block_on(self.store());
        let objects = Arc::new(Counted { store, requests: Mutex::default(), faults: Mutex::default(), away: false.into() });
        let dir = self.dir.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let keys = ClusterKeys::new(&[[1; 32]]).unwrap();
        (Host::new(Arc::clone(&objects) as Arc<dyn Objects>, keys, dir, self.runtime.handle().clone(), limits), objects)
    }

    /// An object's bytes.
    pub fn object(&self, key: &str) -> Vec<u8> {
        self.runtime.block_on(async { Store::get(&self.store().await, key, 1 << 30).await }).unwrap().to_vec()
    }

    /// Flips a bit in the middle of each object whose key has `part` in it; returns how many.
    pub fn damage(&self, part: &str) -> usize {
        self.runtime.block_on(async {
            let store = self.store().await;
            let all = Store::list(&store, "", None, 1_000).await.unwrap().objects;
            let hit: Vec<_> = all.into_iter().filter(|object| object.key.contains(part)).collect();
            for object in &hit {
                let mut bytes = Store::get(&store, &object.key, 1 << 30).await.unwrap().to_vec();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 8;
                store.put(&object.key, bytes.into()).await.unwrap();
            }
            hit.len()
        })
    }
}

/// No commit by itself: tests say when.
pub fn quiet() -> Limits {
    Limits { commit_every: std::time::Duration::from_secs(3_600), ..Limits::default() }
}

pub fn id(byte: u8) -> VolumeId {
    VolumeId([byte; 16])
}

pub fn snap(byte: u8) -> SnapshotId {
    SnapshotId([byte; 16])
}

pub fn new(volume: VolumeId, size: u64, flush: FlushMode) -> NewVolume {
    NewVolume { volume, tenant: TenantId::new("t").unwrap(), size, flush }
}

pub fn opener(attach: u8) -> Opener {
    let until_ms = u64::MAX;
    Opener { attempt: None, host: format!("host-{attach}"), attach: [attach; 16], until_ms, guest: false, force: false, resume: false }
}

/// Bytes that do not pack, the same for the same seed.
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out
}
