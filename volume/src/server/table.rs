//! What is open in a server.
//!
//! Owns who may do something with a volume at a time, and that no volume is open twice. Does not own what is done.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use volley_jobspecs::ids::VolumeId;

use super::protocol::{Refused, RefusedKind};
use crate::host::lock;
use crate::serve::socket::Socket;
use crate::volume::{Failure, Volume};

/// Most volumes that are open at once: a worker has at most 4,096 slots, of which few have any.
const OPEN_MAX: usize = 8_192;

/// A volume that is open.
#[derive(Default)]
pub struct Entry {
    /// None: it is being opened, or was let go.
    pub volume: Option<Arc<Volume>>,
    /// Where it is served.
    pub socket: Option<Socket>,
    /// Was its failure told?
    told: bool,
}

impl Entry {
    /// Takes it out, served no more. None: there is none. An `Arc` that somebody else holds would be a bug.
    pub fn take(&mut self) -> Option<Volume> {
        if let Some(socket) = self.socket.take() {
            socket.detach();
        }
        let volume = self.volume.take()?;
        let id = volume.id();
        let alone = Arc::into_inner(volume);
        if alone.is_none() {
            tracing::error!(volume = %id, "somebody still uses a volume that nobody is served");
        }
        alone
    }
}

#[derive(Default)]
struct State {
    entries: BTreeMap<u64, Arc<Mutex<Entry>>>,
    /// Volumes whose directory somebody has.
    used: BTreeSet<VolumeId>,
}

/// All of them.
#[derive(Default)]
pub struct Table(Mutex<State>);

/// The right to a volume's directory; given back when dropped.
pub struct Using<'a> {
    table: &'a Table,
    volume: VolumeId,
    /// It stays open: the right goes when it is forgotten.
    pub stays: bool,
}

impl Drop for Using<'_> {
    fn drop(&mut self) {
        if !self.stays {
            lock(&self.table.0).used.remove(&self.volume);
        }
    }
}

fn refuse(words: String) -> Refused {
    Refused::new(RefusedKind::Host, &words)
}

impl Table {
    /// A new entry, and the right to its volume's directory.
    ///
    /// # Errors
    /// It is open already, or too many are.
    pub fn add(&self, handle: u64, volume: VolumeId) -> Result<(Arc<Mutex<Entry>>, Using<'_>), Refused> {
        let mut state = lock(&self.0);
        if state.entries.len() >= OPEN_MAX {
            return Err(refuse(format!("{OPEN_MAX} volumes are open on this host; more are not")));
        }
        if state.entries.contains_key(&handle) || !state.used.insert(volume) {
            return Err(refuse(format!("{volume} is open on this host already")));
        }
        let entry = Arc::<Mutex<Entry>>::default();
        state.entries.insert(handle, Arc::clone(&entry));
        Ok((entry, Using { table: self, volume, stays: false }))
    }

    /// One that is open.
    ///
    /// # Errors
    /// It is not.
    pub fn get(&self, handle: u64) -> Result<Arc<Mutex<Entry>>, Refused> {
        lock(&self.0).entries.get(&handle).cloned().ok_or_else(|| refuse("this volume is not open".to_owned()))
    }

    /// Is the directory of this volume in nobody's use? Then it is the caller's.
    pub fn claim(&self, volume: VolumeId) -> Option<Using<'_>> {
        let ours = lock(&self.0).used.insert(volume);
        // Made only where it is ours: it gives the right back when it is dropped.
        ours.then(|| Using { table: self, volume, stays: false })
    }

    /// Removes an entry; its volume's directory is the caller's now.
    pub fn remove(&self, handle: u64, volume: VolumeId) -> Using<'_> {
        lock(&self.0).entries.remove(&handle);
        Using { table: self, volume, stays: false }
    }

    fn all(&self) -> Vec<(u64, Arc<Mutex<Entry>>)> {
        lock(&self.0).entries.iter().map(|(handle, entry)| (*handle, Arc::clone(entry))).collect()
    }

    /// Those that have failed since they were asked for last. One with which something is done is asked later: whoever does it hears of it.
    pub fn failed(&self) -> Vec<(u64, Refused)> {
        let told = |mut entry: MutexGuard<'_, Entry>| {
            let failure = entry.volume.as_ref().and_then(|volume| volume.failure()).filter(|_| !entry.told)?;
            entry.told = true;
            Some(said(&failure))
        };
        let all = self.all();
        all.iter().filter_map(|(handle, entry)| Some((*handle, entry.try_lock().ok().and_then(told)?))).collect()
    }

    /// How many are open, and how many bytes S3 lacks.
    pub fn figures(&self) -> (u64, u64) {
        let all = self.all();
        let dirty = |entry: &Arc<Mutex<Entry>>| entry.try_lock().ok().and_then(|entry| Some(entry.volume.as_ref()?.dirty_bytes()));
        (all.len() as u64, all.iter().filter_map(|(_, entry)| dirty(entry)).sum())
    }
}

/// A volume's failure, for the worker.
fn said(failure: &Failure) -> Refused {
    let kind = match failure {
        Failure::Fenced { .. } => RefusedKind::Elsewhere,
        Failure::Log { .. } => RefusedKind::Host,
    };
    Refused::new(kind, &failure.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_one_entry_at_a_time() {
        let table = Table::default();
        let volume = VolumeId([1; 16]);
        let (_, mut using) = table.add(1, volume).unwrap();
        assert!(table.add(2, volume).is_err() && table.add(1, VolumeId([2; 16])).is_err());
        assert!(table.claim(volume).is_none());
        using.stays = true;
        drop(using);
        assert!(table.claim(volume).is_none(), "it is open");
        assert!(table.get(1).is_ok() && table.get(2).is_err());
        let using = table.remove(1, volume);
        assert!(table.get(1).is_err() && table.add(2, volume).is_err(), "its directory is being cleared");
        drop(using);
        assert!(table.add(2, volume).is_ok());
        assert_eq!(table.figures(), (1, 0));
    }
}
