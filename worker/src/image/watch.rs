//! Which images a worker has, told anew whenever that changes: `volley image` is another process, which says nothing to the worker.
//!
//! Owns the looks at the store. Does not own what the coordinator makes of the answer.

use std::io;
use std::time::{Duration, SystemTime};

use super::Store;
use super::find::keys;

/// Pause between two looks, each at one directory's time: whoever imports an image submits a job soon after.
const LOOK: Duration = Duration::from_millis(1_000);

/// What is called how, and when the store was changed last.
type Seen = (Option<SystemTime>, Option<Vec<u64>>);

/// Looks, unless nothing changed since `last`. Blocks.
fn look(store: &Store, last: Option<SystemTime>) -> io::Result<Option<Seen>> {
    // Before its contents: what changes meanwhile is seen at the next look.
    let changed = store.changed()?;
    Ok(if changed.is_some() && changed == last { None } else { Some((changed, keys(store)?)) })
}

/// What images there are now; none where that can't be told. Blocks.
#[must_use]
pub fn now(store: &Store) -> Option<Vec<u64>> {
    keys(store).unwrap_or_else(|why| {
        tracing::warn!(%why, "which images this worker has can't be read, so it is asked for any");
        None
    })
}

/// Tells what images there are whenever it is something else than `told`, until nobody wants to hear it.
pub async fn watch<F: Future<Output = bool>>(store: Store, mut told: Option<Vec<u64>>, mut tell: impl FnMut(Option<Vec<u64>>) -> F) {
    let mut last = None;
    loop {
        tokio::time::sleep(LOOK).await;
        let (store, since) = (store.clone(), last);
        let Ok(looked) = tokio::task::spawn_blocking(move || look(&store, since)).await else { return };
        match looked {
            Ok(None) => {}
            Ok(Some((changed, images))) => {
                last = changed;
                if images != told {
                    told.clone_from(&images);
                    if !tell(images).await {
                        return;
                    }
                }
            }
            Err(why) => tracing::debug!(%why, "looking at the images"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_did_not_change_is_not_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let (changed, images) = look(&store, None).unwrap().unwrap();
        assert_eq!(images, Some(Vec::new()));
        assert!(changed.is_some() && look(&store, changed).unwrap().is_none());
        std::thread::sleep(Duration::from_millis(20));
        std::fs::write(dir.path().join("images/x.part"), "").unwrap();
        assert!(look(&store, changed).unwrap().is_some());
    }
}
