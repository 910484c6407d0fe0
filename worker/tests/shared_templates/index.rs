//! What `volley template ls`, `show` and `rm` do.

use std::time::Duration;

use volley_worker::template::index::{self, IndexError};
use volley_worker::template::manifest::ManifestError;
use volley_worker::template::{Owner, WarmUp};

use crate::bucket::{Bucket, noise, recipe, snapshot, source};

fn nobody(_bytes: u64) {}

#[tokio::test(flavor = "multi_thread")]
async fn templates_are_listed_shown_and_removed_with_the_chunks_that_are_theirs_alone() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = Bucket::start(dir.path()).await;
    let depot = bucket.depot().await;
    let (shared, own, others) = (noise(1, 1 << 20), noise(2, 1 << 20), noise(3, 1 << 20));
    let (mut one, two) = (recipe("one"), recipe("two"));
    one.warm_up = vec![WarmUp { argv: vec!["/bin/sh".into(), "-c".into(), "true".into()], env: Vec::new() }];
    one.keep_processes = true;
    depot.publish(&source(&one, &snapshot(&[(0, &shared), (1 << 20, &own)])), None, &nobody).await.unwrap();
    let saved = snapshot(&[(4 << 20, &shared), (1 << 20, &others)]);
    let second = depot.publish(&source(&two, &saved), None, &nobody).await.unwrap();
    assert_eq!((second.chunks, second.new_chunks), (3, 1), "the other two are there");
    let owner = one.owner.clone();
    let rows = index::list(&depot, &owner).await.unwrap();
    assert_eq!(rows.len(), 2);
    assert!(rows[0].name < rows[1].name);
    let row = rows.iter().find(|row| row.name == one.name()).unwrap();
    let summary = row.manifest.as_ref().unwrap();
    assert_eq!((summary.chunks, summary.data_bytes, summary.built_by.as_str()), (3, (2 << 20) + 70_001, "w1"));
    assert!(summary.recipe.keep_processes && summary.recipe.warm_up[0].argv[0] == "/bin/sh");
    assert_eq!(index::list(&depot, &Owner::Public).await.unwrap(), []);

    let name = one.name().to_string();
    let shown = index::show(&depot, &owner, &name[..10]).await.unwrap();
    assert_eq!((shown.name(), shown.recipe.memory_bytes), (one.name(), 8 << 20));
    assert!(matches!(index::show(&depot, &owner, "nothing").await, Err(IndexError::Missing { .. })));
    assert!(matches!(index::show(&depot, &owner, "").await, Err(IndexError::Several { count: 2, .. })));
    assert!(matches!(index::remove(&depot, &Owner::Public, &name).await, Err(IndexError::Missing { .. })));

    // Chunks are young: somebody may be about to publish with them.
    let removed = index::remove(&depot, &owner, &name).await.unwrap();
    assert_eq!((removed.chunks, removed.young), (0, 1));
    assert_eq!(index::list(&depot, &owner).await.unwrap().len(), 1);

    // A manifest that can't be read: what it refers to is not known, so nothing is deleted.
    let key = format!("templates/tenants/acme/manifests/{}", two.name());
    let good = bucket.store.get(&key, 1 << 20).await.unwrap();
    bucket.store.put(&key, good.slice(..good.len() - 1)).await.unwrap();
    let rows = index::list(&depot, &owner).await.unwrap();
    assert_eq!(rows[0].manifest, Err(ManifestError::Signature));
    let before = bucket.list("templates/").await;
    let why = index::sweep(&depot, &owner, Duration::ZERO).await.unwrap_err();
    assert!(matches!(why, IndexError::Unknown { .. }) && why.to_string().starts_with("no chunk was deleted"), "{why}");
    assert_eq!(bucket.list("templates/").await, before);
    bucket.store.put(&key, good).await.unwrap();

    let swept = index::sweep(&depot, &owner, Duration::ZERO).await.unwrap();
    assert_eq!((swept.chunks, swept.young), (1, 0));
    assert!(swept.bytes > 1 << 20);
    let volley_worker::template::depot::Look::Found(stored) = depot.look(&two).await.unwrap() else { panic!() };
    depot.fetch(&owner, &stored, &nobody).await.unwrap();
    assert_eq!(index::remove(&depot, &owner, &two.name().to_string()).await.unwrap().young, 3);
    assert_eq!(index::sweep(&depot, &owner, Duration::ZERO).await.unwrap().chunks, 3);
    assert_eq!(bucket.list("templates/").await, [""; 0]);
}
