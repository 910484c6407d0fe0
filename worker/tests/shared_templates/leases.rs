//! Leases on a real nats-server, with what the shipped configuration lets a worker do.

use std::time::{Duration, Instant};

use async_nats::jetstream;
use volley_jobspecs::subjects::TEMPLATES_BUCKET;
use volley_worker::template::TemplateName;
use volley_worker::template::claim::{Claimed, Ending, Lease, Leases};

use crate::nats::Nats;

const WAIT: Duration = Duration::from_secs(60);
/// How long failures stand here: less than in a cluster (`subjects::TEMPLATES_KEPT_MS`), and longer than a lease.
const KEPT: Duration = Duration::from_secs(15);

async fn leases(nats: &Nats, by: &str) -> Leases {
    Leases::new(nats.client().await, by.to_owned())
}

/// As coordinators do. It lies in the server's memory.
async fn make_bucket(nats: &Nats) {
    let context = jetstream::new(nats.coordinator().await);
    let config = jetstream::kv::Config {
        bucket: TEMPLATES_BUCKET.to_owned(),
        max_age: KEPT,
        storage: jetstream::stream::StorageType::Memory,
        ..Default::default()
    };
    let begin = Instant::now();
    while let Err(why) = context.create_key_value(config.clone()).await {
        assert!(begin.elapsed() < Duration::from_secs(10), "{why}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn held(claimed: Claimed) -> Lease {
    match claimed {
        Claimed::Held(lease) => lease,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_holds_it_and_the_others_learn_how_it_ended() {
    let Some(nats) = Nats::shipped() else { return };
    make_bucket(&nats).await;
    let name = TemplateName([7; 32]);
    let workers = futures::future::join_all((0..6).map(|number| {
        let nats = &nats;
        async move { leases(nats, &format!("w{number}")).await }
    }));
    let workers = workers.await;
    let (sender, mut ended) = tokio::sync::mpsc::channel(16);
    for leases in &workers {
        let (leases, sender) = (leases.clone(), sender.clone());
        tokio::spawn(async move {
            let mut waited_for = None;
            let claimed = leases.claim(&name, WAIT, |by| waited_for = Some(by.to_owned())).await;
            sender.send((leases.by().to_owned(), claimed, waited_for)).await.unwrap();
        });
    }
    let (first, claimed, _) = ended.recv().await.unwrap();
    let lease = held(claimed);
    // Longer than a lease that is not renewed lasts.
    assert!(tokio::time::timeout(Duration::from_secs(12), ended.recv()).await.is_err(), "somebody else has it too");
    let released = Instant::now();
    lease.end(Ending::Released).await;
    for _ in 1..workers.len() {
        let (_, claimed, waited_for) = ended.recv().await.unwrap();
        assert!(matches!(claimed, Claimed::LookAgain), "{claimed:?}");
        assert_eq!(waited_for.as_deref(), Some(first.as_str()));
    }
    assert!(released.elapsed() < Duration::from_secs(1), "they are told: {:?}", released.elapsed());

    // It is free again; a build that fails stands for all, and for a while only.
    let lease = held(workers[0].claim(&name, WAIT, |_| {}).await);
    let waiting = tokio::spawn({
        let leases = workers[1].clone();
        async move { leases.claim(&name, WAIT, |_| {}).await }
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    lease.end(Ending::Failed { reason: "the warm-up said no".into(), warm_up: true }).await;
    for claimed in [waiting.await.unwrap(), workers[2].claim(&name, WAIT, |_| {}).await] {
        let Claimed::GiveUp { by, reason, warm_up: true, .. } = claimed else { panic!("{claimed:?}") };
        assert_eq!((by.as_str(), reason.as_str()), ("w0", "the warm-up said no"));
    }
    let begin = Instant::now();
    let lease = loop {
        match workers[3].claim(&name, WAIT, |_| {}).await {
            Claimed::Held(lease) => break lease,
            Claimed::GiveUp { .. } => tokio::time::sleep(Duration::from_millis(500)).await,
            other => panic!("{other:?}"),
        }
        assert!(begin.elapsed() < Duration::from_secs(30));
    };
    assert!(begin.elapsed() > Duration::from_secs(8), "{:?}", begin.elapsed());
    // Dropped, it is released: at once, or before a second look.
    drop(lease);
    let lease = match workers[4].claim(&name, WAIT, |_| {}).await {
        Claimed::LookAgain => held(workers[4].claim(&name, WAIT, |_| {}).await),
        other => held(other),
    };
    lease.end(Ending::Released).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_answer_a_template_is_built_without_a_lease_and_afterwards_with_one_again() {
    let Some(mut nats) = Nats::shipped() else { return };
    make_bucket(&nats).await;
    let (name, one) = (TemplateName([8; 32]), leases(&nats, "w1").await);
    let lease = held(one.claim(&name, WAIT, |_| {}).await);
    nats.kill();
    let begin = Instant::now();
    let claimed = one.claim(&TemplateName([9; 32]), WAIT, |_| {}).await;
    assert!(matches!(claimed, Claimed::Alone(why) if why.contains("does not answer")), "{claimed:?}");
    assert!((8..20).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
    // Its end can't be written, and nobody waits for that for long.
    let begin = Instant::now();
    lease.end(Ending::Released).await;
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    nats.restart();
    make_bucket(&nats).await;
    let begin = Instant::now();
    let lease = held(one.claim(&name, WAIT, |_| {}).await);
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    lease.end(Ending::Released).await;
}
