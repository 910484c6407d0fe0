//! Templates of the real Firecracker, shared: what one worker saved is restored by another from bytes of the bucket.

use std::time::Duration;

use volley_jobspecs::wire::guest::Exec;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_worker::MachineConfig;
use volley_worker::guest::Guest;
use volley_worker::template::Template;
use volley_worker::template::step::Phase;
use volley_worker::vmm::Vmm;
use volley_worker::vmm::choice::Choice;
use volley_worker::vmm::kvm::{self, Kvm};
use volley_worker::vmm::spawner::MachineSpawner;

use crate::bucket::Bucket;
use crate::nats::Nats;
use crate::tiny_guest::{binary, built};
use crate::workers::{Worker, an_image};

/// How often the guest of a template was asked to count, this time included.
async fn count(vmm: &dyn Vmm, template: &Template, nonce: u8) -> String {
    let mut vm = vmm.restore(&template.snapshot, &[]).await.unwrap();
    vm.resume().await.unwrap();
    let (guest, _) = Guest::connect(vm.connect().await.unwrap(), [nonce; 32], true, Duration::from_secs(30)).await.unwrap();
    guest.reseed([nonce; 64]).await.unwrap();
    let command = guest.exec(&Exec { argv: vec!["count".to_owned()], ..Exec::default() }).await.unwrap();
    let mut buffer = [0; 64];
    let len = command.read(Channel::Output, &mut buffer).await.unwrap();
    command.ended().await.unwrap();
    drop(guest);
    vm.kill().await.unwrap();
    String::from_utf8_lossy(&buffer[..len]).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_of_firecracker_is_run_by_a_worker_that_did_not_build_it() {
    let (Some(nats), dir) = (Nats::start(), tempfile::tempdir().unwrap()) else { return };
    let parts = || Ok::<_, String>((built(dir.path())?, binary()?, MachineSpawner::start().map_err(|why| why.to_string())?));
    let (kernel, firecracker, spawner) = match parts() {
        Ok(parts) => parts,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    match kvm::probe(&spawner).await {
        Kvm::Usable | Kvm::Emulates if spawner.missing().is_empty() => {}
        kvm => return eprintln!("skipped: {}; can't shut off {:?}", kvm.as_str(), spawner.missing()),
    }
    let Some((images, _, image)) = an_image(dir.path()).await else { return };
    let bucket = Bucket::start(&dir.path().join("s3")).await;
    let start = async |name: &str| {
        let change = |config: &mut MachineConfig| {
            (config.vmm, config.firecracker, config.kernel) = (Choice::Firecracker, Some(firecracker.clone()), Some(kernel.clone()));
            config.spawner = Some(spawner.clone());
        };
        Worker::start_with(dir.path(), name, &images, bucket.depot().await, &nats.address(), change).await
    };
    let one = start("w1").await;
    let first = one.template(&image).await.unwrap();
    one.published().await;
    assert_eq!(one.phases(), [Phase::Looking, Phase::Building, Phase::Uploading, Phase::Ready]);
    let two = start("w2").await;
    let second = two.template(&image).await.unwrap();
    assert_eq!(two.phases(), [Phase::Looking, Phase::Fetching, Phase::Proving, Phase::Ready]);
    assert_eq!(first.name, second.name);
    assert!(!first.recipe.processor.is_empty(), "a guest on KVM depends on the processor");
    for (worker, template) in [(&one, &first), (&two, &second)] {
        for nonce in 1..3 {
            assert_eq!(count(&*worker.machines.vmm, template, nonce).await, "0001\n");
        }
    }
    // All of a machine's memory is written when it is saved, and next to nothing of it is kept.
    let kept = [&first, &second].map(|template| template.memory().allocated_bytes().unwrap());
    eprintln!("memory of the built one {} KiB, of the fetched one {} KiB", kept[0] >> 10, kept[1] >> 10);
    assert!(kept.iter().all(|bytes| *bytes < 64 << 20), "{kept:?}");
    for worker in [one, two] {
        worker.machines.close().await;
    }
}
