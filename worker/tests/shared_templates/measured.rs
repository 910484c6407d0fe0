//! What sharing a template costs, beside booting it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use volley_jobspecs::ids::TenantId;
use volley_jobspecs::spec::{ByteSize, Resources};
use volley_worker::MachineConfig;
use volley_worker::machines::{Machines, Wanted};
use volley_worker::template::Template;
use volley_worker::template::depot::{Depot, Look, Source};
use volley_worker::template::manifest::Built;

use crate::bucket::{Bucket, keys};
use crate::workers::an_image;

const ROUNDS: usize = 5;
const SIZES_KIB: [u32; 4] = [64, 256, 1_024, 4_096];

fn median(mut all: Vec<Duration>) -> f64 {
    all.sort();
    all[all.len() / 2].as_secs_f64() * 1e3
}

fn source(template: &Template) -> Source<'_> {
    let built = Built { by: "w".into(), at_ms: 0, took_ms: 0, build: "test".into() };
    let snapshot = &template.snapshot;
    Source { recipe: &template.recipe, memory: &snapshot.memory, state: &snapshot.state, kept_processes: 0, built }
}

/// Boots a template three times, each of another tenant, and keeps the first.
async fn boot(machines: &Machines, image: &str, mib: u64) -> Arc<Template> {
    let (mut boots, mut first) = (Vec::new(), None);
    for tenant in ["acme", "t1", "t2"] {
        let resources = Resources { memory: Some(ByteSize(mib << 20)), ..Resources::default() };
        let begin = Instant::now();
        let found = machines.template(&Wanted::plain(&TenantId::new(tenant).unwrap(), Some(image), &resources)).await.unwrap();
        boots.push(begin.elapsed());
        first.get_or_insert(found.template);
    }
    eprintln!("task memory {mib} MiB: a template by boot, with its trial: {:.0} ms", median(boots));
    first.unwrap()
}

/// To the bucket, once more, and from there, with chunks of one size.
async fn there_and_back(bucket: &Bucket, template: &Template, kib: u32) {
    let (mut up, mut again, mut down, mut said) = (Vec::new(), Vec::new(), Vec::new(), String::new());
    for round in 0..ROUNDS {
        let prefix = format!("measured-{kib}-{round}/");
        let depot = Depot::new(&bucket.store, keys("a1"), &prefix).with_chunk_bytes(kib << 10);
        let begin = Instant::now();
        let published = depot.publish(&source(template), None, &|_| {}).await.unwrap();
        up.push(begin.elapsed());
        let begin = Instant::now();
        depot.publish(&source(template), None, &|_| {}).await.unwrap();
        again.push(begin.elapsed());
        let Look::Found(stored) = depot.look(&template.recipe).await.unwrap() else { panic!() };
        let begin = Instant::now();
        let (memory, _) = depot.fetch(&template.recipe.owner, &stored, &|_| {}).await.unwrap();
        down.push(begin.elapsed());
        let after = memory.allocated_bytes().unwrap() >> 10;
        let (plain, kept) = (published.data_bytes >> 10, published.stored_bytes >> 10);
        said = format!("{} chunks, {plain} KiB plain, {kept} KiB stored, {after} KiB of memory after", published.chunks);
    }
    let (up, again, down) = (median(up), median(again), median(down));
    eprintln!("chunks of {kib} KiB: publish {up:.0} ms, once more {again:.0} ms, fetch {down:.0} ms; {said}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "it measures; run it alone"]
async fn a_template_is_measured_from_host_to_host() {
    let dir = tempfile::tempdir().unwrap();
    let Some((images, _, image)) = an_image(dir.path()).await else { return };
    let bucket = Bucket::start(&dir.path().join("s3")).await;
    let mut config = MachineConfig::new(dir.path());
    config.images = images;
    config.standby_bytes_max = 0;
    config.templates_bytes_max = 8 << 30;
    let machines = Machines::open(&config, &dir.path().join("machines"), 2, None).await.unwrap();
    let templates = [boot(&machines, &image, 32).await, boot(&machines, &image, 512).await];
    for template in &templates {
        let (memory, state) = (template.memory().allocated_bytes().unwrap() >> 10, template.state().bytes().unwrap() >> 10);
        eprintln!("machine of {} MiB: memory {memory} KiB, state {state} KiB", template.recipe.size.memory_bytes >> 20);
        for kib in SIZES_KIB {
            there_and_back(&bucket, template, kib).await;
        }
    }
    // What a second template of the same image and another size has in common with the first.
    for kib in SIZES_KIB {
        let depot = Depot::new(&bucket.store, keys("a1"), &format!("both-{kib}/")).with_chunk_bytes(kib << 10);
        for template in &templates {
            let done = depot.publish(&source(template), None, &|_| {}).await.unwrap();
            let (sent, kept) = (done.sent_bytes >> 10, done.stored_bytes >> 10);
            eprintln!("chunks of {kib} KiB: {} of {} are new, {sent} of {kept} KiB", done.new_chunks, done.chunks);
        }
    }
    machines.close().await;
}
