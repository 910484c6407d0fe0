//! Inputs of tasks: fetched once per worker, checked, kept within a budget of bytes, copied or linked to where a task wants them.
//!
//! Owns the cache and its files. Does not own transfers (`io`).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{Mode, OFlags};
use tokio::sync::OnceCell;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{JobId, TenantId};
use volley_jobspecs::keys;
use volley_jobspecs::resolve::{InputSource, ResolvedInput};
use volley_jobspecs::wire;
use volley_jobspecs::wire::work::JobForWorker;

use crate::dirs::Dirs;
use crate::io::http;
use crate::ports::{Bus, ObjectError, ObjectName, Objects};
use crate::reach::{Reach, reach};

/// Jobs kept whose tenant is known: those whose outputs are inputs of the jobs that run here.
const TENANTS_KEPT: usize = 1_024;

/// Why an input is not there.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// It can't be fetched.
    #[error("input {path}: {source}")]
    Fetch {
        /// Where it was to go.
        path: String,
        /// Why.
        source: ObjectError,
    },
    /// It isn't the tenant's.
    #[error("input {path}: {from} belongs to Volley or to another tenant; inputs come from your own uploads, jobs and files")]
    NotYours {
        /// Where it was to go.
        path: String,
        /// What it was to be.
        from: String,
    },
    /// It can't be put in place.
    #[error("input {path}: {source}; check the disk of the worker's directory")]
    Place {
        /// Where it was to go.
        path: String,
        /// What the system said.
        source: io::Error,
    },
}

impl InputError {
    /// What it means for the task.
    #[must_use]
    pub fn class(&self) -> FailureClass {
        match self {
            Self::Fetch { source: ObjectError::Missing(_) | ObjectError::Mismatch(_), .. } => FailureClass::InputMissing,
            Self::NotYours { .. } => FailureClass::PolicyDenied,
            Self::Fetch { source: ObjectError::Failed(_), .. } | Self::Place { .. } => FailureClass::StorageFailed,
        }
    }
}

/// A fetched file; it is deleted when nobody holds it any more.
#[derive(Debug)]
struct Cached {
    path: PathBuf,
    bytes: u64,
}

impl Drop for Cached {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[derive(Debug, Default)]
struct State {
    clock: u64,
    tenants: BTreeMap<JobId, TenantId>,
    files: BTreeMap<String, (u64, Arc<OnceCell<Arc<Cached>>>)>,
}

/// The inputs a worker keeps.
#[derive(Debug, Clone)]
pub struct Inputs<O> {
    objects: O,
    dir: PathBuf,
    bytes_max: u64,
    state: Arc<Mutex<State>>,
}

impl<O: Objects> Inputs<O> {
    /// An empty cache in `dir`, which is emptied.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(objects: O, dir: PathBuf, bytes_max: u64) -> io::Result<Self> {
        crate::dirs::remove_all(&dir)?;
        fs::create_dir_all(&dir)?;
        // Tasks get links to what is theirs; the cache holds what is other tenants' as well.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))?;
        Ok(Self { objects, dir, bytes_max, state: Arc::default() })
    }

    /// Puts an input where its task wants it, read-only.
    ///
    /// # Errors
    /// [`InputError`].
    pub async fn place<B: Bus>(
        &self,
        bus: &B,
        (job, tenant): (JobId, &TenantId),
        input: &ResolvedInput,
        dirs: &Dirs,
    ) -> Result<(), InputError> {
        let may = self.may_read(bus, (job, tenant), &input.from).await;
        if !may.map_err(|source| InputError::Fetch { path: input.path.clone(), source })? {
            return Err(InputError::NotYours { path: input.path.clone(), from: source_text(&input.from) });
        }
        let cached = self.fetch(job, tenant, input).await.map_err(|source| InputError::Fetch { path: input.path.clone(), source })?;
        let (dirs, wanted, executable) = (dirs.clone(), input.path.clone(), input.executable);
        let placed = tokio::task::spawn_blocking(move || put_in_place(&cached, &dirs, &wanted, executable)).await;
        placed.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(|source| InputError::Place { path: input.path.clone(), source })
    }

    /// May tasks of this job be given it?
    async fn may_read<B: Bus>(&self, bus: &B, (job, tenant): (JobId, &TenantId), from: &InputSource) -> Result<bool, ObjectError> {
        let InputSource::S3 { bucket, key } = from else { return Ok(true) };
        let object = ObjectName { bucket: Some(bucket.clone()), key: key.clone() };
        let Some(prefix) = self.objects.own_prefix(&object) else { return Ok(true) };
        match reach(key, prefix, tenant) {
            Reach::Free => Ok(true),
            Reach::Closed => Ok(false),
            Reach::Job(other) if other == job => Ok(true),
            Reach::Job(other) => Ok(self.tenant_of(bus, other).await?.is_some_and(|owner| owner == *tenant)),
        }
    }

    /// Whose a job is, which never changes; none if there is no such job (any more).
    async fn tenant_of<B: Bus>(&self, bus: &B, job: JobId) -> Result<Option<TenantId>, ObjectError> {
        let known = self.state.lock().unwrap_or_else(PoisonError::into_inner).tenants.get(&job).cloned();
        if known.is_some() {
            return Ok(known);
        }
        let failed = |why: &dyn std::fmt::Display| ObjectError::Failed(format!("asking whose job {job} is: {why}"));
        let answer = bus.job(job, None).await.map_err(|e| failed(&e))?;
        if answer.is_empty() {
            return Ok(None);
        }
        let found: JobForWorker = wire::decode("job", &answer).map_err(|e| failed(&e))?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.tenants.len() >= TENANTS_KEPT {
            state.tenants.clear();
        }
        state.tenants.insert(job, found.tenant.clone());
        Ok(Some(found.tenant))
    }

    async fn fetch(&self, job: JobId, tenant: &TenantId, input: &ResolvedInput) -> Result<Arc<Cached>, ObjectError> {
        // A tenant must itself be able to read what it is given; without a checksum, only tasks of one job share a copy, so that a
        // job sees one version of it.
        let key = match &input.sha256 {
            Some(sha256) => format!("{tenant}/{sha256}/{}", source_text(&input.from)),
            None => format!("{tenant}/{job}/{}", source_text(&input.from)),
        };
        let (cell, place) = {
            // Nothing that can panic happens under the lock, and a half-done change of a cache is harmless.
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.clock += 1;
            let clock = state.clock;
            let (used, cell) = state.files.entry(key.clone()).or_default();
            *used = clock;
            (Arc::clone(cell), self.dir.join(format!("{clock}")))
        };
        let cached = cell
            .get_or_try_init(|| async {
                let moved = self.transfer(tenant, input, &place).await?;
                fs::set_permissions(&place, fs::Permissions::from_mode(0o444))
                    .map_err(|e| ObjectError::Failed(format!("{}: {e}", place.display())))?;
                Ok(Arc::new(Cached { path: place.clone(), bytes: moved }))
            })
            .await
            .cloned();
        self.make_room(&key);
        cached
    }

    async fn transfer(&self, tenant: &TenantId, input: &ResolvedInput, place: &Path) -> Result<u64, ObjectError> {
        let sha256 = input.sha256.as_deref();
        let object = match &input.from {
            InputSource::Http(url) => return http::download(url, place, sha256).await.map(|moved| moved.bytes),
            InputSource::S3 { bucket, key } => ObjectName { bucket: Some(bucket.clone()), key: key.clone() },
            InputSource::Upload(id) => ObjectName { bucket: None, key: keys::upload(tenant, id) },
        };
        self.objects.download(&object, place, sha256).await.map(|moved| moved.bytes)
    }

    /// Lets go of what was used longest ago until the rest fits; what tasks hold right now stays on disk until they let go.
    fn make_room(&self, just_used: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let size = |cell: &Arc<OnceCell<Arc<Cached>>>| cell.get().map_or(0, |cached| cached.bytes);
            let total: u64 = state.files.values().map(|(_, cell)| size(cell)).sum();
            if total <= self.bytes_max {
                return;
            }
            let oldest = state
                .files
                .iter()
                .filter(|(key, (_, cell))| key.as_str() != just_used && cell.get().is_some())
                .min_by_key(|(_, (used, _))| *used)
                .map(|(key, _)| key.clone());
            match oldest {
                Some(key) => state.files.remove(&key),
                None => return,
            };
        }
    }
}

fn source_text(source: &InputSource) -> String {
    match source {
        InputSource::S3 { bucket, key } => format!("s3://{bucket}/{key}"),
        InputSource::Http(url) => url.clone(),
        InputSource::Upload(id) => format!("upload:{id}"),
    }
}

fn put_in_place(cached: &Cached, dirs: &Dirs, wanted: &str, executable: bool) -> io::Result<()> {
    let wanted = Path::new(wanted);
    let name = wanted.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = dirs.make_in_work(wanted.parent().unwrap_or(Path::new("")))?;
    // A task that runs as another user can't change what it is linked to; one that runs as ours could, so it gets a copy.
    if dirs.owner().is_some()
        && !executable
        && rustix::fs::linkat(rustix::fs::CWD, &cached.path, &parent, name, rustix::fs::AtFlags::empty()).is_ok()
    {
        return Ok(());
    }
    let part = format!(".volley-input-{}", std::process::id());
    let copied = copy(&cached.path, &parent, &part, if executable { 0o555 } else { 0o444 })
        .and_then(|()| Ok(rustix::fs::renameat(&parent, &part, &parent, name)?));
    if copied.is_err() {
        let _ = rustix::fs::unlinkat(&parent, &part, rustix::fs::AtFlags::empty());
    }
    copied
}

/// Copies a file into a directory held open, as a new file.
fn copy(from: &Path, parent: &OwnedFd, name: &str, mode: u32) -> io::Result<()> {
    // Left by an attempt that was ended in the middle.
    let _ = rustix::fs::unlinkat(parent, name, rustix::fs::AtFlags::empty());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut to = fs::File::from(rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o600))?);
    io::copy(&mut fs::File::open(from)?, &mut to)?;
    Ok(rustix::fs::fchmod(&to, Mode::from_raw_mode(mode))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::beneath::tests::Swapping;

    #[test]
    fn nothing_outside_is_written_while_directories_are_swapped_for_links() {
        let place = tempfile::tempdir().expect("a directory");
        let (path, outside) = (place.path().join("cached"), place.path().join("outside"));
        fs::write(&path, "input").expect("written");
        fs::create_dir(&outside).expect("made");
        let cached = Cached { path, bytes: 5 };
        // To become another user takes root; a link is made only for one.
        let owner = rustix::process::geteuid().is_root().then_some((65_534, 65_534));
        for (slot, owner) in [None, owner].into_iter().enumerate() {
            let mut dirs = Dirs::new(place.path().join(format!("slots/{slot}")), owner);
            dirs.make().expect("made");
            let swapping = Swapping::start(&dirs.work(), "d", &outside);
            let mut placed = 0;
            for number in 0..1_000 {
                placed += usize::from(put_in_place(&cached, &dirs, &format!("d/{number}/file"), number % 2 == 0).is_ok());
                placed += usize::from(put_in_place(&cached, &dirs, "d/file", number % 2 == 0).is_ok());
                let _ = dirs.make_in_work(Path::new("d/work"));
            }
            swapping.end();
            assert!(placed > 0);
            assert_eq!(fs::read_dir(&outside).expect("there").count(), 0);
            let meta = fs::metadata(&outside).expect("there");
            assert_eq!(std::os::unix::fs::MetadataExt::uid(&meta), rustix::process::geteuid().as_raw());
        }
    }
}
