//! What lies in the bucket: it comes out as it went in, and nothing else does.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use volley_worker::template::depot::{Depot, DepotError, Look, Stored};
use volley_worker::template::manifest::ManifestError;
use volley_worker::template::{Owner, Recipe};

use crate::bucket::{Bucket, bytes_of, keys, noise, recipe, snapshot, source};

fn nobody(_bytes: u64) {}

async fn found(depot: &Depot, recipe: &Recipe) -> Box<Stored> {
    match depot.look(recipe).await.unwrap() {
        Look::Found(stored) => stored,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_comes_out_of_the_bucket_as_it_went_in() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = Bucket::start(dir.path()).await;
    let (depot, recipe) = (bucket.depot().await, recipe("one"));
    assert!(matches!(depot.look(&recipe).await.unwrap(), Look::Missing));
    // Two equal pieces, zeros that were written, one page, the last byte.
    let (big, zeros, page) = (noise(1, 1 << 20), vec![0; 1 << 20], noise(2, 4_096));
    let parts = [(0, &big[..]), (2 << 20, &big[..]), (3 << 20, &zeros[..]), ((5 << 20) + 8_192, &page[..]), ((8 << 20) - 1, &[7][..])];
    let saved = snapshot(&parts);
    let moved = AtomicU64::new(0);
    let published = depot.publish(&source(&recipe, &saved), None, &|bytes| _ = moved.fetch_add(bytes, Ordering::SeqCst)).await.unwrap();
    assert!(published.stands);
    assert_eq!(published.chunks, 5, "4 of the memory, 1 of the state");
    assert_eq!(published.data_bytes, (4 << 20) + 70_001);
    assert_eq!(moved.load(Ordering::SeqCst), (5 << 20) + 70_001, "zeros are read");
    let objects = bucket.list("templates/tenants/acme/chunks/").await;
    assert_eq!(objects.len(), 4, "equal pieces are one object");
    assert!((1 << 20..1_300_000).contains(&published.stored_bytes.saturating_sub(1 << 20)), "{published:?}");

    let stored = found(&depot, &recipe).await;
    assert_eq!(stored.manifest.data_bytes(), published.data_bytes);
    let (memory, state) = depot.fetch(&recipe.owner, &stored, &nobody).await.unwrap();
    assert_eq!(bytes_of(&memory), bytes_of(&saved.0));
    assert_eq!(bytes_of(&state), bytes_of(&saved.1));
    assert!(memory.is_sealed() && state.is_sealed());
    assert!(memory.allocated_bytes().unwrap() <= (2 << 20) + 3 * 4_096, "holes stay holes: {}", memory.allocated_bytes().unwrap());

    // Nothing of it is in the clear, in names or in objects.
    for key in &objects {
        let object = bucket.store.get(key, 2 << 20).await.unwrap();
        assert!(!object.windows(64).any(|window| window == &big[..64] || window == &page[..64]));
        assert!(!key.ends_with(blake3::hash(&big).to_hex().as_str()));
    }
    // Who publishes the same again sends nothing and changes nothing.
    let again = depot.publish(&source(&recipe, &saved), None, &nobody).await.unwrap();
    assert_eq!((again.stands, again.new_chunks, again.sent_bytes), (false, 0, 0));
    assert_eq!(found(&depot, &recipe).await.etag, stored.etag);
    // Another tenant's is another one, with objects of its own.
    let mut other = recipe.clone();
    other.owner = Owner::Public;
    assert!(matches!(depot.look(&other).await.unwrap(), Look::Missing));
    assert_eq!(depot.publish(&source(&other, &saved), None, &nobody).await.unwrap().new_chunks, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_that_is_damaged_or_missing_is_read_twice_and_then_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = Bucket::start(dir.path()).await;
    let (depot, recipe) = (bucket.depot().await, recipe("one"));
    let saved = snapshot(&[(0, &noise(1, 3 << 20))]);
    depot.publish(&source(&recipe, &saved), None, &nobody).await.unwrap();
    let stored = found(&depot, &recipe).await;
    // Damaged on its way, once.
    bucket.proxy.damage.store(true, Ordering::SeqCst);
    let (memory, _) = depot.fetch(&recipe.owner, &stored, &nobody).await.unwrap();
    assert!(!bucket.proxy.damage.load(Ordering::SeqCst));
    assert_eq!(bytes_of(&memory), bytes_of(&saved.0));

    let broken = async |why: &str| match depot.fetch(&recipe.owner, &stored, &nobody).await {
        Err(DepotError::Broken(said)) => assert!(said.contains(why) && said.contains("of its memory"), "{said}"),
        other => panic!("{other:?}"),
    };
    let key = format!("templates/tenants/acme/chunks/{}", stored.manifest.memory.chunks[1].name());
    let good = bucket.store.get(&key, 2 << 20).await.unwrap();
    for at in [0, 5, 20, 50, good.len() - 1] {
        let mut damaged = good.to_vec();
        damaged[at] ^= 0x10;
        bucket.store.put(&key, damaged.into()).await.unwrap();
        broken("piece 1").await;
    }
    bucket.store.put(&key, good.slice(..good.len() / 2)).await.unwrap();
    broken("does not open").await;
    bucket.store.put(&key, vec![0; 3 << 20].into()).await.unwrap();
    broken("bytes").await;
    // Another chunk of the same template in its place.
    let other = format!("templates/tenants/acme/chunks/{}", stored.manifest.memory.chunks[2].name());
    bucket.store.put(&key, bucket.store.get(&other, 2 << 20).await.unwrap()).await.unwrap();
    broken("does not open").await;
    bucket.store.delete(&key).await.unwrap();
    broken("no such object").await;

    // Whoever builds it anew replaces manifest and chunks, also those that are there and damaged.
    bucket.store.put(&key, good.slice(..9)).await.unwrap();
    let again = depot.publish(&source(&recipe, &saved), Some(&stored.etag), &nobody).await.unwrap();
    assert!(again.stands && again.new_chunks == again.chunks);
    let fresh = found(&depot, &recipe).await;
    depot.fetch(&recipe.owner, &fresh, &nobody).await.unwrap();
    // And who comes late with the same replaces nothing: the one that was of no use is gone.
    assert!(fresh.etag == stored.etag || !depot.publish(&source(&recipe, &saved), Some(&stored.etag), &nobody).await.unwrap().stands);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_that_was_changed_or_moved_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = Bucket::start(dir.path()).await;
    let (depot, one) = (bucket.depot().await, recipe("one"));
    let saved = snapshot(&[(0, &noise(1, 1 << 20))]);
    depot.publish(&source(&one, &saved), None, &nobody).await.unwrap();
    let key = |recipe: &Recipe| format!("templates/tenants/acme/manifests/{}", recipe.name());
    let good = bucket.store.get(&key(&one), 1 << 20).await.unwrap();
    for at in [0, 12, 30, 60, good.len() - 1] {
        let mut changed = good.to_vec();
        changed[at] ^= 1;
        bucket.store.put(&key(&one), changed.into()).await.unwrap();
        match depot.look(&one).await.unwrap() {
            // The key's id.
            Look::Foreign(ManifestError::Key(_)) => assert_eq!(at, 12),
            Look::Bad { why: ManifestError::Form(_), .. } => assert_eq!(at, 0),
            Look::Bad { why: ManifestError::Signature, .. } => assert!(at >= 30),
            other => panic!("{at}: {other:?}"),
        }
    }
    let mut newer = good.to_vec();
    newer[8] = 2;
    bucket.store.put(&key(&one), newer.into()).await.unwrap();
    let Look::Foreign(why) = depot.look(&one).await.unwrap() else { panic!() };
    assert_eq!(why.to_string(), "it has the version 2, this build reads 1");
    // One that is good, under another's name: a template of another version of the VMM.
    let mut other = recipe("one");
    other.vmm.version.2 += 1;
    assert_ne!(other.name(), one.name());
    assert!(matches!(depot.look(&other).await.unwrap(), Look::Missing), "of another VMM: built anew");
    bucket.store.put(&key(&other), good.clone()).await.unwrap();
    assert!(matches!(depot.look(&other).await.unwrap(), Look::Bad { why: ManifestError::Nonsense(_), .. }));
    // One that is no manifest's size.
    bucket.store.put(&key(&one), vec![0; 15 << 20].into()).await.unwrap();
    assert!(matches!(depot.look(&one).await.unwrap(), Look::Bad { why: ManifestError::Form(_), .. }));
    bucket.store.put(&key(&one), good).await.unwrap();
    // Another cluster's keys; and the old key beside a new one.
    let others = Depot::new(&bucket.store, keys("b2"), "templates/");
    assert!(matches!(others.look(&one).await.unwrap(), Look::Foreign(ManifestError::Key(_))));
    let both = volley_worker::template::keys::Keys::parse(&format!("{}\n{}", "b2".repeat(32), "a1".repeat(32))).unwrap();
    let both = Depot::new(&bucket.store, both, "templates/");
    let stored = found(&both, &one).await;
    both.fetch(&one.owner, &stored, &nobody).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_goes_away_in_the_middle_is_no_broken_template() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = Bucket::start(dir.path()).await;
    let (depot, recipe) = (bucket.depot().await, recipe("one"));
    let saved = snapshot(&[(0, &noise(1, 8 << 20))]);
    depot.publish(&source(&recipe, &saved), None, &nobody).await.unwrap();
    let stored = found(&depot, &recipe).await;
    bucket.proxy.away_after.store(20, Ordering::SeqCst);
    let begin = Instant::now();
    let why = depot.fetch(&recipe.owner, &stored, &nobody).await.unwrap_err();
    assert!(matches!(&why, DepotError::Away(said) if said.contains("no success within")), "{why:?}");
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert!(matches!(depot.look(&recipe).await, Err(DepotError::Away(_))));
    assert!(matches!(depot.publish(&source(&recipe, &saved), None, &nobody).await, Err(DepotError::Away(_))));
    bucket.proxy.away.store(false, Ordering::SeqCst);
    let (memory, _) = depot.fetch(&recipe.owner, &stored, &nobody).await.unwrap();
    assert_eq!(bytes_of(&memory), bytes_of(&saved.0));
}
