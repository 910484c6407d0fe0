//! A job as a worker keeps it: read once, used for every task of it.
//!
//! Owns asking for it, reading its spec, and finding a task's item, in the spec or in pages. Does not own what the core makes of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use tokio::sync::OnceCell;
use volley_jobspecs::expand::ItemPlan;
use volley_jobspecs::ids::{JobId, SnapshotId, TenantId};
use volley_jobspecs::pages::{ItemsIndex, LoadedPage};
use volley_jobspecs::resolve::TaskTemplate;
use volley_jobspecs::wire;
use volley_jobspecs::wire::plan::{Isolation, JobPlan, SpecRef};
use volley_jobspecs::wire::trace::TraceContext;
use volley_jobspecs::wire::volume::{Access, VolumePlan};
use volley_jobspecs::wire::work::JobForWorker;
use volley_jobspecs::{keys, parse};

use crate::core::JobFacts;
use crate::ports::{Bus, BusError, ObjectError, Objects};

/// Largest spec that is fetched from the bucket, in bytes: what a coordinator takes at most, with room to grow.
const SPEC_BYTES_MAX: u64 = 64 << 20;
/// Largest index of item pages, in bytes: 10 million items make 10,000 pages of some 120 bytes of index each.
const INDEX_BYTES_MAX: u64 = 16 << 20;
/// Item pages kept, each at most 256 KiB: one per busy slot and some more.
const PAGES_KEPT: usize = 256;
/// Indexes of item pages kept: one per active job and some more.
const INDEXES_KEPT: usize = 32;

/// Why there is no job.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// Nobody answered.
    #[error("asking for job {job}: {source}")]
    Bus {
        /// Which job.
        job: JobId,
        /// Why.
        source: BusError,
    },
    /// Its spec is in the bucket and can't be read now.
    #[error("reading the spec of job {job}: {source}")]
    Storage {
        /// Which job.
        job: JobId,
        /// Why.
        source: ObjectError,
    },
    /// The leader knows no such job.
    #[error("the coordinator knows no job {0}")]
    Missing(JobId),
    /// Whoever answered does not know yet what its tasks read and copy: it is behind in the log.
    #[error("it is not known yet what the tasks of job {0} read and copy")]
    Unpinned(JobId),
    /// This build can't run it.
    #[error("worker can't read job {job}: {why}; it was accepted by a newer coordinator, or its spec is damaged")]
    Unusable {
        /// Which job.
        job: JobId,
        /// Why.
        why: String,
    },
}

/// A job.
#[derive(Debug)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// Whose.
    pub tenant: TenantId,
    /// Deadlines, needs, number of tasks.
    pub plan: JobPlan,
    /// What each task runs; `None` for `null`, which runs nothing.
    pub template: Option<TaskTemplate>,
    /// What its tasks read or copy, by slot: in each of these slots a snapshot.
    pub pins: Vec<(u8, SnapshotId)>,
    /// Its trace; its attempts' spans lie below this.
    pub trace: Option<TraceContext>,
    items: ItemPlan,
}

impl Job {
    /// Asks for a job and reads it. `trace` is its trace, as far as it is known already.
    ///
    /// # Errors
    /// [`JobError`].
    pub async fn load<B: Bus, O: Objects>(bus: &B, objects: &O, job: JobId, trace: Option<TraceContext>) -> Result<Self, JobError> {
        let unusable = |why: String| JobError::Unusable { job, why };
        let answer = bus.job(job, trace).await.map_err(|source| JobError::Bus { job, source })?;
        if answer.is_empty() {
            return Err(JobError::Missing(job));
        }
        let found: JobForWorker = wire::decode("job", &answer).map_err(|e| unusable(e.to_string()))?;
        let stored = match &found.spec {
            SpecRef::Stored { hash, name, .. } if found.plan.needs.isolation != Isolation::Null => {
                let bytes = objects
                    .get(&keys::spec(name.as_ref().unwrap_or(hash)), SPEC_BYTES_MAX)
                    .await
                    .map_err(|source| JobError::Storage { job, source })?;
                if blake3::hash(&bytes).to_hex().as_str() != hash {
                    return Err(unusable("the stored spec isn't what its hash says".into()));
                }
                Some(bytes)
            }
            SpecRef::Stored { .. } | SpecRef::Inline(_) => None,
        };
        Self::read(found, stored.as_deref())
    }

    /// Reads what was answered. `stored`: the spec, where it is not part of that.
    ///
    /// # Errors
    /// [`JobError`].
    pub fn read(found: JobForWorker, stored: Option<&[u8]>) -> Result<Self, JobError> {
        let job = found.job;
        let unusable = |why: String| JobError::Unusable { job, why };
        let trace = found.trace.as_deref().and_then(|text| text.parse().ok());
        if found.plan.needs.isolation == Isolation::Null {
            let (pins, items) = (Vec::new(), ItemPlan::single());
            return Ok(Self { id: job, tenant: found.tenant, plan: found.plan, template: None, pins, trace, items });
        }
        let pins = pins(&found).ok_or(JobError::Unpinned(job))?;
        let spec = match (&found.spec, stored) {
            (SpecRef::Inline(bytes), _) => bytes.as_slice(),
            (SpecRef::Stored { .. }, stored) => stored.unwrap_or_default(),
        };
        let spec = parse::parse(spec).map_err(|problems| unusable(problems.to_string()))?;
        let items = match &spec.items {
            Some(items) => ItemPlan::new(items).map_err(|e| unusable(e.to_string()))?,
            None => ItemPlan::single(),
        };
        let task = spec.task.ok_or_else(|| unusable("it has stages".into()))?;
        let template = TaskTemplate::compile(&task).map_err(|bad| {
            let texts: Vec<String> = bad.iter().map(|bad| format!("task{}: {}", bad.field, bad.error)).collect();
            unusable(texts.join("; "))
        })?;
        Ok(Self { id: job, tenant: found.tenant, plan: found.plan, template: Some(template), pins, trace, items })
    }

    /// What the core needs to know.
    #[must_use]
    pub fn facts(&self) -> JobFacts {
        JobFacts { needs: self.plan.needs.clone(), start_ms: self.plan.start_ms, run_ms: self.plan.run_ms }
    }

    /// The item of a task.
    ///
    /// # Errors
    /// [`ItemError`].
    pub async fn item<O: Objects>(&self, pages: &Pages<O>, index: u32) -> Result<Value, ItemError> {
        match &self.plan.items {
            // Boxed, as it is large, and most jobs need none.
            Some(hash) => Box::pin(pages.item(hash, index)).await,
            None => self.items.item(index.into()).ok_or(ItemError::NoItem(index)),
        }
    }
}

/// The snapshots that a job's tasks read or copy. None: not all of them are known to be there yet.
fn pins(job: &JobForWorker) -> Option<Vec<(u8, SnapshotId)>> {
    let wanted = (0..).zip(&job.plan.volumes).filter(|(_, volume)| volume.access != Access::Rw);
    let one = |(slot, _): (u8, &VolumePlan)| {
        let pin = job.pins.iter().find(|pin| pin.slot == slot && pin.held)?;
        Some((slot, pin.snapshot?))
    };
    wanted.map(one).collect()
}

/// Why a task has no item.
#[derive(Debug, thiserror::Error)]
pub enum ItemError {
    /// There are fewer.
    #[error("the job has no item {0}")]
    NoItem(u32),
    /// Its page can't be read now.
    #[error("reading the item of task {index}: {source}")]
    Storage {
        /// Of which task.
        index: u32,
        /// Why.
        source: ObjectError,
    },
    /// Its page isn't what the index says.
    #[error("the item of task {index}: {why}")]
    Damaged {
        /// Of which task.
        index: u32,
        /// Why.
        why: String,
    },
}

type Shelf<K, V> = BTreeMap<K, (u64, Arc<OnceCell<Arc<V>>>)>;

#[derive(Debug, Default)]
struct Shelves {
    clock: u64,
    indexes: Shelf<String, ItemsIndex>,
    pages: Shelf<(String, u32), LoadedPage>,
}

/// Item pages and their indexes, each fetched once for all slots and kept while it is used.
#[derive(Debug, Clone)]
pub struct Pages<O> {
    objects: O,
    shelves: Arc<Mutex<Shelves>>,
}

impl<O: Objects> Pages<O> {
    /// An empty cache.
    pub fn new(objects: O) -> Self {
        Self { objects, shelves: Arc::default() }
    }

    async fn item(&self, hash: &str, index: u32) -> Result<Value, ItemError> {
        let storage = |source| ItemError::Storage { index, source };
        let damaged = |why: String| ItemError::Damaged { index, why };
        let cell = self.shelf(|shelves| take(&mut shelves.indexes, &mut shelves.clock, hash.to_owned(), INDEXES_KEPT));
        let found = cell
            .get_or_try_init(|| async {
                let bytes = self.objects.get(&keys::items_index(hash), INDEX_BYTES_MAX).await.map_err(storage)?;
                ItemsIndex::from_json(&bytes).map(Arc::new).map_err(|e| damaged(e.to_string()))
            })
            .await?;
        let (number, entry) = found.locate(index).ok_or(ItemError::NoItem(index))?;
        let key = (hash.to_owned(), number);
        let cell = self.shelf(|shelves| take(&mut shelves.pages, &mut shelves.clock, key, PAGES_KEPT));
        let page = cell
            .get_or_try_init(|| async {
                let key = keys::items_page(hash, number);
                let bytes = self.objects.get(&key, entry.bytes.into()).await.map_err(storage)?;
                LoadedPage::new(entry, bytes.to_vec()).map(Arc::new).map_err(|e| damaged(format!("{key}: {e}")))
            })
            .await?;
        page.item(index).map_err(|e| damaged(e.to_string()))
    }

    fn shelf<T>(&self, f: impl FnOnce(&mut Shelves) -> T) -> T {
        // Nothing that can panic happens under the lock, and a half-done change of a cache is harmless.
        f(&mut self.shelves.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Takes a cell from a shelf, making room by dropping what was used longest ago.
fn take<K: Ord + Clone, V>(shelf: &mut Shelf<K, V>, clock: &mut u64, key: K, kept: usize) -> Arc<OnceCell<Arc<V>>> {
    *clock += 1;
    let (used, cell) = shelf.entry(key).or_default();
    *used = *clock;
    let cell = Arc::clone(cell);
    while shelf.len() > kept {
        let Some(oldest) = shelf.iter().min_by_key(|(_, (used, _))| *used).map(|(key, _)| key.clone()) else { break };
        shelf.remove(&oldest);
    }
    cell
}
