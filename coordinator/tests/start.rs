//! Starting a coordinator: what fits together, and one clear line for what does not.

mod support;

use std::time::Duration;

use support::World;
use tokio_util::sync::CancellationToken;
use volley_coordinator::config::CoordinatorConfig;
use volley_coordinator::run::run;
use volley_jobspecs::keys;
use volley_store::Store;

async fn refusal(config: CoordinatorConfig) -> String {
    match run(config, CancellationToken::new()).await {
        Ok(_) => panic!("it started"),
        Err(error) => error.to_string(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_belong_together_is_refused() {
    let (Some(one), Some(two)) = (World::new().await, World::new().await) else { return };
    let (first, second) = (one.config(), two.config());
    let (one, two) = (one.cluster().await, two.cluster().await);
    let (id_one, id_two) = (one.running.cluster.clone(), two.running.cluster.clone());
    assert_ne!(id_one, id_two);
    one.running.join.abort();

    let other = CoordinatorConfig { data_dir: first.data_dir.join("fresh"), store: second.store.clone(), ..first.clone() };
    let line = refusal(other).await;
    assert!(line.contains(&id_one) && line.contains(&id_two) && line.contains("bucket"), "{line}");

    let in_use = refusal(first.clone()).await;
    assert!(in_use.contains("does another coordinator use it?"), "{in_use}");

    let rows = CoordinatorConfig { data_dir: second.data_dir.clone(), ..first.clone() };
    two.stop.cancel();
    _ = two.running.join.await;
    drop((two.running.handle, two.running.app, two.router));
    tokio::time::sleep(Duration::from_millis(500)).await;
    let line = refusal(rows).await;
    assert!(line.contains(&id_one) && line.contains(&id_two) && line.contains("delete this one"), "{line}");

    let lost = two.world.dir.path().join("another-nats");
    let binary = support::nats_binary().expect("a binary");
    let empty = support::Nats::start(&binary, &lost).await;
    let mut config = second.clone();
    config.nats.url = empty.url.clone();
    let line = refusal(config).await;
    assert!(line.contains(&id_two) && line.contains("has no log"), "{line}");

    let store = Store::connect(&first.store).await.expect("a store");
    store.put(keys::CLUSTER, "nonsense".into()).await.expect("put");
    let line = refusal(CoordinatorConfig { data_dir: first.data_dir.join("fresh"), ..first }).await;
    assert!(line.contains("is no identity of a Volley cluster"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_is_named() {
    let Some(world) = World::new().await else { return };
    let mut config = world.config();
    config.nats.url = "nats://127.0.0.1:1".into();
    let line = refusal(config).await;
    assert!(line.contains("can't reach NATS at nats://127.0.0.1:1"), "{line}");

    let config = CoordinatorConfig { bootstrap_token: Some("vt_bootstrap_short".into()), ..world.config() };
    assert!(refusal(config).await.contains("at least 16"));

    let mut config = CoordinatorConfig { create_bucket: false, ..world.config() };
    config.store.bucket = "nothing".into();
    let line = refusal(config).await;
    assert!(line.contains("nothing") && line.contains("does not exist"), "{line}");

    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let listen = taken.local_addr().expect("its address");
    let line = refusal(CoordinatorConfig { listen, ..world.config() }).await;
    assert!(line.contains(&listen.to_string()), "{line}");
    // Nothing that was refused has left anything in the way of a good start.
    world.cluster().await.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_finds_everything_even_without_its_rows() {
    let Some(world) = World::new().await else { return };
    let config = world.config();
    let cluster = world.cluster().await;
    let spec = serde_json::json!({ "version": "volley/v1", "name": "kept", "items": { "count": 3 }, "task": { "isolation": "process", "command": "true" } });
    let job = cluster.submit(&spec).await;
    cluster.stop.cancel();
    cluster.running.join.await.expect("no panic").expect("a clean end");
    drop((cluster.running.handle, cluster.running.app, cluster.router));
    let fresh = CoordinatorConfig { data_dir: config.data_dir.join("fresh"), ..config };
    let running = run(fresh, CancellationToken::new()).await.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(running.cluster, cluster.running.cluster);
    let id = job.parse().expect("a job id");
    for _ in 0..200 {
        let found = volley_coordinator::state::rows::header(running.handle.rows(), id).expect("rows");
        if found.is_some_and(|(facts, _)| facts.plan.name == "kept") {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the job was lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_of_the_log_are_as_many_as_were_asked_for_or_it_does_not_start() {
    let Some(world) = World::new().await else { return };
    let config = world.config();
    let three = |config: &CoordinatorConfig| CoordinatorConfig { replicas: Some(3), ..config.clone() };
    let line = refusal(three(&config)).await;
    assert!(line.contains("can't keep 3 copies") && line.contains("--replicas"), "{line}");
    // Nor does one that is there with fewer pass for it.
    let cluster = world.cluster_with(config.clone()).await;
    cluster.stop.cancel();
    _ = cluster.running.join.await;
    let fresh = CoordinatorConfig { data_dir: config.data_dir.join("fresh"), ..config };
    let line = refusal(three(&fresh)).await;
    assert!(line.contains("can't keep 3 copies"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_is_nearly_full_takes_no_jobs_but_ends_those_it_has() {
    let Some(world) = World::new().await else { return };
    let config = CoordinatorConfig { log_bytes_max: Some(1 << 20), ..world.config() };
    let cluster = world.cluster_with(config).await;
    let spec = |number: u64, filling: &str| {
        serde_json::json!({ "version": "volley/v1", "name": format!("n{number}"),
            "task": { "isolation": "null", "command": "x", "env": { "FILLING": filling } } })
    };
    let first = cluster.submit(&spec(0, "")).await;
    let filling = "x".repeat(30_000);
    let mut refused = None;
    for number in 1..60 {
        let answer = cluster.post("/v1/jobs", spec(number, &filling).to_string()).await;
        if answer.status == 503 {
            refused = Some(answer.json());
            break;
        }
    }
    let refused = refused.expect("submits go on for ever");
    assert_eq!((&refused["code"], &refused["retryable"]), (&"overloaded".into(), &true.into()), "{refused}");
    // Whatever ends jobs goes on.
    cluster.post(&format!("/v1/jobs/{first}/cancel"), "{}").await.expect(200);
    assert_eq!(cluster.ended(&first).await["state"], "cancelled");
    cluster.stop().await;
}
