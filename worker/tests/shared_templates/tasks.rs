//! A task of a whole worker runs in a machine whose template another worker built.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use volley_jobspecs::ids::TenantId;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::Ending;
use volley_worker::ShareConfig;
use volley_worker::machines::Wanted;
use volley_worker::template::share::Sharing;
use volley_worker::template::step::{Phase, Steps};

use crate::bucket::Bucket;
use crate::nats::Nats;
use crate::support::{World, text};
use crate::workers::{Worker, an_image, small};

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_first_task_runs_in_a_machine_that_another_worker_booted() {
    let (Some(nats), dir) = (Nats::start(), tempfile::tempdir().unwrap()) else { return };
    let Some((images, _, image)) = an_image(dir.path()).await else { return };
    let bucket = Bucket::start(&dir.path().join("s3")).await;
    let one = Worker::start(dir.path(), "one", &images, bucket.depot().await, &nats.address()).await;
    one.machines.template(&Wanted::plain(&TenantId::new("public").unwrap(), Some(&image), &small())).await.unwrap();
    one.published().await;
    one.machines.close().await;
    // The keys of the bucket's templates, as a worker is told them.
    let share = ShareConfig::new(dir.path().join("templates.key"));
    std::fs::write(&share.key_file, "a1".repeat(32)).unwrap();
    std::fs::set_permissions(&share.key_file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let sharing = Sharing::open(&share, "two", "test", &bucket.store, nats.client().await).unwrap();
    let phases: Arc<Mutex<Vec<Phase>>> = Arc::default();
    let told = phases.clone();
    let theirs = tempfile::tempdir().unwrap();
    assert!(Command::new("cp").arg("-a").arg(&images).arg(theirs.path().join("images")).status().unwrap().success());
    let mut world = World::start_in(theirs, |config| {
        config.isolation = vec![Isolation::Microvm];
        config.machines.share = Some(share);
        config.machines.sharing = Some(sharing);
        config.machines.steps = Some(Steps::new(move |step| told.lock().unwrap().push(step.phase)));
    })
    .await;
    let begin = Instant::now();
    let task = format!(r#"{{"isolation":"microvm","image":"{image}","resources":{{"memory":"32MiB"}},"command":"cat /etc/release"}}"#);
    let end = world.run_one(&task).await;
    eprintln!("the first task, with a template from elsewhere: {:?}", begin.elapsed());
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "the image\n"), "{:?}", end.message);
    phases.lock().unwrap().dedup();
    assert_eq!(*phases.lock().unwrap(), [Phase::Looking, Phase::Fetching, Phase::Proving, Phase::Ready]);
    world.finish().await;
}
