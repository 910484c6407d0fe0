//! A bucket in memory that does what it is told, faults too: for tests and simulations only.
//!
//! Owns nothing that lasts. The same calls with the same faults give the same answers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::oneshot;

use super::s3::{Answer, Listed, Objects, ObjectsError, Put};

/// What goes wrong with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    Pass,
    /// It is done, and the answer is lost.
    LoseAnswer,
    /// It is not done, and the answer is lost.
    LoseRequest,
    /// A bit of what is read is another.
    FlipBit,
    /// It waits, as if whoever asks was stopped before it was sent, until [`Fake::release`]; it meets the bucket as it is then.
    Hold,
    /// Of a write: nobody answers, and it is done at [`Fake::deliver`], on the condition that it came with.
    Late,
}

/// A write that is on its way for long.
struct Letter {
    key: String,
    body: Bytes,
    /// The tag that it replaces; None: only if nothing is there.
    tag: Option<String>,
}

#[derive(Default)]
struct Inner {
    objects: BTreeMap<String, (Bytes, u64)>,
    writes: u64,
    faults: VecDeque<(&'static str, Fault)>,
    requests: Vec<(&'static str, String)>,
    held: BTreeMap<u64, oneshot::Sender<()>>,
    holds: u64,
    made: u64,
    late: Vec<Letter>,
}

impl Inner {
    fn put(&mut self, key: &str, body: Bytes, tag: Option<&str>) -> Put {
        let found = self.objects.get(key).map(|(_, has)| format!("\"{has}\""));
        if found.as_deref() != tag {
            return Put::Refused;
        }
        self.writes += 1;
        self.objects.insert(key.to_owned(), (body, self.writes));
        Put::Written(format!("\"{}\"", self.writes))
    }
}

/// The bucket.
#[derive(Default)]
pub struct Fake(Mutex<Inner>);

impl Fake {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next request of this kind (`get`, `get range`, `put`, `list`, `delete`) that has none yet has this fault.
    pub fn fault(&self, request: &'static str, fault: Fault) {
        self.inner().faults.push_back((request, fault));
    }

    /// Forgets faults that met no request; returns how many.
    pub fn clear_faults(&self) -> usize {
        std::mem::take(&mut self.inner().faults).len()
    }

    /// The requests since the last call: kind and key.
    pub fn requests(&self) -> Vec<(&'static str, String)> {
        std::mem::take(&mut self.inner().requests)
    }

    /// The keys that are there.
    pub fn keys(&self) -> Vec<String> {
        self.inner().objects.keys().cloned().collect()
    }

    /// What is there under a key.
    pub fn object(&self, key: &str) -> Option<Bytes> {
        self.inner().objects.get(key).map(|(body, _)| body.clone())
    }

    /// Puts an object there, or changes one, as somebody else would.
    pub fn set(&self, key: &str, body: Bytes) {
        let mut inner = self.inner();
        inner.writes += 1;
        let writes = inner.writes;
        inner.objects.insert(key.to_owned(), (body, writes));
    }

    /// How many requests were ever made.
    pub fn made(&self) -> u64 {
        self.inner().made
    }

    /// Requests that wait now, by numbers that grow.
    pub fn held(&self) -> Vec<u64> {
        self.inner().held.keys().copied().collect()
    }

    /// Lets a request that waits go on.
    pub fn release(&self, hold: u64) {
        if let Some(go) = self.inner().held.remove(&hold) {
            // Whoever waited may have given up.
            let _ = go.send(());
        }
    }

    /// Writes that were on their way for long arrive, in the order in which they were sent; returns how many of them changed something.
    pub fn deliver(&self) -> usize {
        let mut inner = self.inner();
        let late = std::mem::take(&mut inner.late);
        let arrived = late.into_iter().map(|letter| inner.put(&letter.key, letter.body, letter.tag.as_deref()));
        arrived.filter(|put| matches!(put, Put::Written(_))).count()
    }

    /// What becomes of a request that was just made. One that is held has waited when this ends.
    async fn begin(&self, request: &'static str, key: &str) -> Fault {
        let (fault, wait) = {
            let mut inner = self.inner();
            inner.requests.push((request, key.to_owned()));
            inner.made += 1;
            let found = inner.faults.iter().position(|(kind, _)| *kind == request);
            let fault = found.and_then(|at| inner.faults.remove(at)).map_or(Fault::Pass, |(_, fault)| fault);
            let wait = (fault == Fault::Hold).then(|| {
                let (go, wait) = oneshot::channel();
                inner.holds += 1;
                let number = inner.holds;
                inner.held.insert(number, go);
                wait
            });
            (fault, wait)
        };
        let Some(wait) = wait else { return fault };
        // The bucket is gone when nobody can let it go any more.
        let _ = wait.await;
        Fault::Pass
    }

    async fn put(&self, key: &str, body: Bytes, tag: Option<&str>) -> Put {
        let fault = self.begin("put", key).await;
        let mut inner = self.inner();
        match fault {
            Fault::LoseRequest => Put::Unknown("the request was lost".to_owned()),
            Fault::Late => {
                inner.late.push(Letter { key: key.to_owned(), body, tag: tag.map(str::to_owned) });
                Put::Unknown("nobody answers".to_owned())
            }
            Fault::LoseAnswer => {
                drop(inner.put(key, body, tag));
                Put::Unknown("the answer was lost".to_owned())
            }
            Fault::Pass | Fault::FlipBit | Fault::Hold => inner.put(key, body, tag),
        }
    }

    /// An object and its tag, or the range `of` gives of it.
    async fn read(
        &self,
        request: &'static str,
        key: &str,
        of: impl FnOnce(Bytes) -> Result<Bytes, ObjectsError> + Send,
    ) -> Result<(Bytes, u64), ObjectsError> {
        let fault = self.begin(request, key).await;
        if matches!(fault, Fault::LoseAnswer | Fault::LoseRequest | Fault::Late) {
            return Err(ObjectsError::Unavailable { key: key.to_owned(), why: "the answer was lost".to_owned() });
        }
        let (body, tag) = self.inner().objects.get(key).cloned().ok_or_else(|| ObjectsError::NotFound { key: key.to_owned() })?;
        let body = of(body)?;
        if fault != Fault::FlipBit {
            return Ok((body, tag));
        }
        let mut bytes = body.to_vec();
        let middle = bytes.len() / 2;
        bytes.iter_mut().skip(middle).take(1).for_each(|byte| *byte ^= 1);
        Ok((bytes.into(), tag))
    }
}

impl Objects for Fake {
    fn get<'a>(&'a self, key: &'a str, bytes_max: u64) -> Answer<'a, (Bytes, String)> {
        Box::pin(async move {
            let small = |body: Bytes| {
                if body.len() as u64 > bytes_max {
                    return Err(ObjectsError::Refused { key: key.to_owned(), why: format!("it has {} bytes", body.len()) });
                }
                Ok(body)
            };
            let (body, tag) = self.read("get", key, small).await?;
            Ok((body, format!("\"{tag}\"")))
        })
    }

    fn get_range<'a>(&'a self, key: &'a str, start: u64, len: u64) -> Answer<'a, Bytes> {
        Box::pin(async move {
            let end = start.saturating_add(len);
            let part = |body: Bytes| {
                let part = usize::try_from(start).ok().zip(usize::try_from(end).ok()).filter(|(_, end)| *end <= body.len());
                let why = || ObjectsError::Refused { key: key.to_owned(), why: format!("it ends before byte {end}") };
                part.map(|(start, end)| body.slice(start..end)).ok_or_else(why)
            };
            Ok(self.read("get range", key, part).await?.0)
        })
    }

    fn put_if_absent<'a>(&'a self, key: &'a str, body: Bytes) -> Answer<'a, Put> {
        Box::pin(async move { Ok(self.put(key, body, None).await) })
    }

    fn put_if_match<'a>(&'a self, key: &'a str, body: Bytes, tag: &'a str) -> Answer<'a, Put> {
        Box::pin(async move { Ok(self.put(key, body, Some(tag)).await) })
    }

    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> Answer<'a, Vec<Listed>> {
        Box::pin(async move {
            if self.begin("list", prefix).await != Fault::Pass {
                return Err(ObjectsError::Unavailable { key: prefix.to_owned(), why: "the answer was lost".to_owned() });
            }
            let inner = self.inner();
            let wanted = |key: &&String| key.starts_with(prefix) && after.is_none_or(|after| key.as_str() > after);
            let found = inner.objects.iter().filter(|(key, _)| wanted(key)).take(1_000);
            Ok(found.map(|(key, (body, _))| Listed { key: key.clone(), bytes: body.len() as u64 }).collect())
        })
    }

    fn delete<'a>(&'a self, key: &'a str) -> Answer<'a, ()> {
        Box::pin(async move {
            if matches!(self.begin("delete", key).await, Fault::LoseRequest | Fault::Late) {
                return Err(ObjectsError::Unavailable { key: key.to_owned(), why: "the request was lost".to_owned() });
            }
            self.inner().objects.remove(key);
            Ok(())
        })
    }
}
