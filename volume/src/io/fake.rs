//! A bucket in memory that does what it is told, faults too: for tests and simulations only.
//!
//! Owns nothing that lasts. The same calls with the same faults give the same answers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

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
}

#[derive(Default)]
struct Inner {
    objects: BTreeMap<String, (Bytes, u64)>,
    writes: u64,
    faults: VecDeque<(&'static str, Fault)>,
    requests: Vec<(&'static str, String)>,
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

    /// Puts an object there, or changes one, as somebody else would.
    pub fn set(&self, key: &str, body: Bytes) {
        let mut inner = self.inner();
        inner.writes += 1;
        let writes = inner.writes;
        inner.objects.insert(key.to_owned(), (body, writes));
    }

    fn begin(&self, request: &'static str, key: &str) -> (MutexGuard<'_, Inner>, Fault) {
        let mut inner = self.inner();
        inner.requests.push((request, key.to_owned()));
        let found = inner.faults.iter().position(|(kind, _)| *kind == request);
        let fault = found.and_then(|at| inner.faults.remove(at)).map_or(Fault::Pass, |(_, fault)| fault);
        (inner, fault)
    }

    fn put(&self, key: &str, body: Bytes, may: impl FnOnce(Option<&(Bytes, u64)>) -> bool) -> Put {
        let (mut inner, fault) = self.begin("put", key);
        if fault == Fault::LoseRequest {
            return Put::Unknown("the request was lost".to_owned());
        }
        let outcome = if may(inner.objects.get(key)) {
            inner.writes += 1;
            let writes = inner.writes;
            inner.objects.insert(key.to_owned(), (body, writes));
            Put::Written(format!("\"{writes}\""))
        } else {
            Put::Refused
        };
        if fault == Fault::LoseAnswer { Put::Unknown("the answer was lost".to_owned()) } else { outcome }
    }

    /// An object and its tag, or the range `of` gives of it.
    fn read(
        &self,
        request: &'static str,
        key: &str,
        of: impl FnOnce(Bytes) -> Result<Bytes, ObjectsError>,
    ) -> Result<(Bytes, u64), ObjectsError> {
        let (inner, fault) = self.begin(request, key);
        if matches!(fault, Fault::LoseAnswer | Fault::LoseRequest) {
            return Err(ObjectsError::Unavailable { key: key.to_owned(), why: "the answer was lost".to_owned() });
        }
        let (body, tag) = inner.objects.get(key).cloned().ok_or_else(|| ObjectsError::NotFound { key: key.to_owned() })?;
        let body = of(body)?;
        if fault == Fault::Pass {
            return Ok((body, tag));
        }
        let mut bytes = body.to_vec();
        let middle = bytes.len() / 2;
        bytes.iter_mut().skip(middle).take(1).for_each(|byte| *byte ^= 1);
        Ok((bytes.into(), tag))
    }
}

fn now<'a, T: Send + 'a>(answer: Result<T, ObjectsError>) -> Answer<'a, T> {
    Box::pin(std::future::ready(answer))
}

impl Objects for Fake {
    fn get<'a>(&'a self, key: &'a str, bytes_max: u64) -> Answer<'a, (Bytes, String)> {
        let found = self.read("get", key, |body| {
            if body.len() as u64 > bytes_max {
                return Err(ObjectsError::Refused { key: key.to_owned(), why: format!("it has {} bytes", body.len()) });
            }
            Ok(body)
        });
        now(found.map(|(body, tag)| (body, format!("\"{tag}\""))))
    }

    fn get_range<'a>(&'a self, key: &'a str, start: u64, len: u64) -> Answer<'a, Bytes> {
        let end = start.saturating_add(len);
        let found = self.read("get range", key, |body| {
            let part = usize::try_from(start).ok().zip(usize::try_from(end).ok()).filter(|(_, end)| *end <= body.len());
            let why = || ObjectsError::Refused { key: key.to_owned(), why: format!("it ends before byte {end}") };
            part.map(|(start, end)| body.slice(start..end)).ok_or_else(why)
        });
        now(found.map(|(part, _)| part))
    }

    fn put_if_absent<'a>(&'a self, key: &'a str, body: Bytes) -> Answer<'a, Put> {
        now(Ok(self.put(key, body, |found| found.is_none())))
    }

    fn put_if_match<'a>(&'a self, key: &'a str, body: Bytes, tag: &'a str) -> Answer<'a, Put> {
        now(Ok(self.put(key, body, |found| found.is_some_and(|(_, has)| format!("\"{has}\"") == tag))))
    }

    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> Answer<'a, Vec<Listed>> {
        let (inner, fault) = self.begin("list", prefix);
        let unavailable = ObjectsError::Unavailable { key: prefix.to_owned(), why: "the answer was lost".to_owned() };
        let wanted = |key: &&String| key.starts_with(prefix) && after.is_none_or(|after| key.as_str() > after);
        let found = inner.objects.iter().filter(|(key, _)| wanted(key)).take(1_000);
        let found = found.map(|(key, (body, _))| Listed { key: key.clone(), bytes: body.len() as u64 }).collect();
        now(if fault == Fault::Pass { Ok(found) } else { Err(unavailable) })
    }

    fn delete<'a>(&'a self, key: &'a str) -> Answer<'a, ()> {
        let (mut inner, fault) = self.begin("delete", key);
        if fault == Fault::LoseRequest {
            return now(Err(ObjectsError::Unavailable { key: key.to_owned(), why: "the request was lost".to_owned() }));
        }
        inner.objects.remove(key);
        now(Ok(()))
    }
}
