//! What is left in the bucket once a job is removed, or was never made.

mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use axum::http::Method;
use serde_json::json;
use support::{BOOTSTRAP, Cluster, World, id, success, worker};
use tokio_util::sync::CancellationToken;
use volley_coordinator::config::CoordinatorConfig;
use volley_coordinator::garbage::Collect;
use volley_coordinator::state::rows;
use volley_jobspecs::{keys, wire};

/// Every key but those of checkpoints and of the cluster itself.
async fn objects(cluster: &Cluster) -> BTreeSet<String> {
    let (mut found, mut after) = (BTreeSet::new(), None::<String>);
    loop {
        let page = cluster.store.list("", after.as_deref(), 1_000).await.expect("a list");
        found.extend(page.objects.into_iter().map(|object| object.key));
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    found.retain(|key| !key.starts_with(keys::CHECKPOINTS) && key != keys::CLUSTER);
    found
}

async fn until(cluster: &Cluster, what: &str, is: impl Fn(&BTreeSet<String>) -> bool) {
    for _ in 0..400 {
        if is(&objects(cluster).await) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{what}: {:?}", objects(cluster).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_job_leaves_nothing_and_what_nobody_names_goes() {
    let Some(world) = World::new().await else { return };
    let collect = Collect { every: Duration::from_millis(200), orphan_ms: 1_500 };
    let config = CoordinatorConfig { collect, ..world.config() };
    let cluster = world.cluster_with(config).await;
    cluster.level(wire::LEVEL_ROUNDS).await;
    worker(&cluster.world.nats.url, "w1", 4, CancellationToken::new(), |name| Some(success(name))).await;
    let upload = cluster.post("/v1/uploads", "1\n2\n3\n").await.expect(201).json();
    let upload = upload["id"].as_str().expect("an id");
    let spec = json!({ "version": "volley/v1", "name": "large", "items": { "lines": { "upload": upload } },
        "task": { "isolation": "process", "command": ["echo", "${item}", "x".repeat(70_000)] } });
    // Twice the same: what one stores is not the other's.
    let (job, other) = (cluster.submit(&spec).await, cluster.submit(&spec).await);
    cluster.ended(&job).await;
    cluster.ended(&other).await;
    for key in ["items/nobodys/index.json", "items/nobodys/000000.jsonl", "specs/nobodys", "uploads/other/ulost", "jobs/strange"] {
        cluster.store.put(key, b"x".to_vec().into()).await.expect("stored");
    }
    let names = |job: &str| {
        let facts = rows::facts(cluster.running.handle.rows(), id(job)).expect("rows").expect("a job");
        (facts.plan.items.clone().expect("items"), facts.spec.name().expect("a stored spec").to_owned())
    };
    let ((items, stored), (other_items, other_stored)) = (names(&job), names(&other));
    assert!(items != other_items && stored != other_stored);
    let of_job = |items: &str, stored: &str, job: &str, key: &str| {
        key.starts_with(&keys::items_prefix(items)) || key == keys::spec(stored) || key.starts_with(&keys::job_prefix(id(job)))
    };
    until(&cluster, "what nobody names goes", |all| !all.iter().any(|key| key.contains("nobodys") || key.contains("ulost"))).await;
    tokio::time::sleep(Duration::from_millis(2_000)).await;
    let all = objects(&cluster).await;
    for (items, stored, job) in [(&items, &stored, &job), (&other_items, &other_stored, &other)] {
        assert!(all.iter().filter(|key| of_job(items, stored, job, key)).count() >= 4, "pages, index, spec, manifest of {job}: {all:?}");
    }
    assert!(all.contains("jobs/strange") && all.contains(&format!("uploads/default/{upload}")), "{all:?}");

    cluster.call(Method::DELETE, &format!("/v1/jobs/{job}"), Some(BOOTSTRAP), &[], "").await.expect(202);
    until(&cluster, "the removed job leaves nothing", |all| !all.iter().any(|key| of_job(&items, &stored, &job, key))).await;
    let all = objects(&cluster).await;
    assert!(all.iter().any(|key| of_job(&other_items, &other_stored, &other, key)), "{all:?}");
    assert_eq!(cluster.get(&format!("/v1/jobs/{other}/spec")).await.expect(200).json()["name"], "large");
    cluster.stop().await;
}
