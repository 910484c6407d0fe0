//! A bucket whose requests and uploaded bytes are counted, and hosts on it.
//!
//! Owns the counting. The bucket is the tests' (`volume/tests/support`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use volley_volume::format::seal::ClusterKeys;
use volley_volume::io::s3::{Answer, Listed, Objects, Put};
use volley_volume::{Host, Limits};

use crate::support::{Counted, World};

/// Counts what passes.
pub struct Meter {
    inner: Arc<Counted>,
    gets: AtomicU64,
    puts: AtomicU64,
    bytes: AtomicU64,
}

/// Since the last look.
#[derive(Debug, Clone, Copy)]
pub struct Passed {
    /// Requests that read.
    pub gets: u64,
    /// Requests that write.
    pub puts: u64,
    /// Bytes of those.
    pub bytes: u64,
}

impl Meter {
    /// A host of this name in a world; the same name is the same disk.
    pub fn host(world: &World, name: &str, limits: Limits) -> (Arc<Host>, Arc<Self>) {
        let (_, inner) = world.host(name, limits.clone());
        let meter = Arc::new(Self { inner, gets: AtomicU64::new(0), puts: AtomicU64::new(0), bytes: AtomicU64::new(0) });
        let objects = Arc::clone(&meter) as Arc<dyn Objects>;
        let keys = ClusterKeys::new(&[[1; 32]]).unwrap();
        (Host::new(objects, keys, world.dir.join(name), world.runtime.handle().clone(), limits), meter)
    }

    /// What passed since the last look.
    pub fn take(&self) -> Passed {
        let take = |count: &AtomicU64| count.swap(0, Ordering::Relaxed);
        Passed { gets: take(&self.gets), puts: take(&self.puts), bytes: take(&self.bytes) }
    }

    fn got(&self) -> &Counted {
        self.gets.fetch_add(1, Ordering::Relaxed);
        &self.inner
    }

    fn sent(&self, bytes: usize) -> &Counted {
        self.puts.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        &self.inner
    }
}

impl Objects for Meter {
    fn get<'a>(&'a self, key: &'a str, bytes_max: u64) -> Answer<'a, (Bytes, String)> {
        self.got().get(key, bytes_max)
    }
    fn get_range<'a>(&'a self, key: &'a str, start: u64, len: u64) -> Answer<'a, Bytes> {
        self.got().get_range(key, start, len)
    }
    fn put_if_absent<'a>(&'a self, key: &'a str, body: Bytes) -> Answer<'a, Put> {
        self.sent(body.len()).put_if_absent(key, body)
    }
    fn put_if_match<'a>(&'a self, key: &'a str, body: Bytes, tag: &'a str) -> Answer<'a, Put> {
        self.sent(body.len()).put_if_match(key, body, tag)
    }
    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> Answer<'a, Vec<Listed>> {
        self.got().list(prefix, after)
    }
    fn delete<'a>(&'a self, key: &'a str) -> Answer<'a, ()> {
        self.sent(0).delete(key)
    }
}
