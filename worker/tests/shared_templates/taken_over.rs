//! A worker that is killed in the middle of a build.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use async_nats::jetstream;
use volley_jobspecs::subjects::TEMPLATES_BUCKET;
use volley_worker::template::step::Phase;

use crate::bucket::{self, Bucket};
use crate::nats::Nats;
use crate::workers::{Worker, an_image};

/// The other process: a worker that asks for a template, told where everything is by the environment.
#[tokio::test(flavor = "multi_thread")]
async fn the_worker_that_is_killed() {
    let var = |name: &str| std::env::var(name).ok();
    let (Some(dir), Some(nats), Some(s3), Some(image)) = (var("SHARED_DIR"), var("SHARED_NATS"), var("SHARED_S3"), var("SHARED_IMAGE"))
    else {
        return;
    };
    let dir = Path::new(&dir);
    let worker = Worker::start(dir, "killed", &dir.join("images"), bucket::depot(&s3).await, &nats).await;
    worker.template(&image).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_worker_builds_what_a_killed_one_had_begun() {
    let (Some(nats), dir) = (Nats::start(), tempfile::tempdir().unwrap()) else { return };
    let Some((images, _, image)) = an_image(dir.path()).await else { return };
    let bucket = Bucket::start(&dir.path().join("s3")).await;
    let worker = Worker::start(dir.path(), "living", &images, bucket.depot().await, &nats.address()).await;
    let mut killed = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "taken_over::the_worker_that_is_killed"])
        .env("SHARED_DIR", dir.path())
        .env("SHARED_NATS", nats.address())
        .env("SHARED_S3", bucket.endpoint())
        .env("SHARED_IMAGE", &image)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let context = jetstream::new(nats.client().await);
    let begin = Instant::now();
    loop {
        assert!(begin.elapsed() < Duration::from_secs(60), "it claims nothing");
        if let Ok(bucket) = context.get_key_value(TEMPLATES_BUCKET).await
            && futures::StreamExt::next(&mut bucket.keys().await.unwrap()).await.is_some()
        {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    killed.kill().unwrap();
    killed.wait().unwrap();
    let begin = Instant::now();
    let template = worker.template(&image).await.unwrap();
    worker.published().await;
    let took = begin.elapsed();
    let waited = Phase::Waiting { by: "killed".to_owned() };
    assert_eq!(worker.phases(), [Phase::Looking, waited, Phase::Looking, Phase::Building, Phase::Uploading, Phase::Ready]);
    assert!(took > Duration::from_secs(8), "{took:?}");
    eprintln!("taken over, built and published after {took:?}");
    assert_eq!(worker.says(&template, "echo over").await, "over\n");
    worker.machines.close().await;
}
