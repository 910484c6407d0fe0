//! Templates on a real VMM: built once, kept within a budget.

use std::sync::Arc;
use std::time::Instant;

use volley_jobspecs::ids::TenantId;
use volley_jobspecs::spec::{ByteSize, Resources};
use volley_worker::MachineConfig;
use volley_worker::machines::{Machines, TemplateError, Wanted};
use volley_worker::template::BuildError;
use volley_worker::vmm::choice::Choice;

use crate::image;

fn resources(mib: u64) -> Resources {
    Resources { memory: Some(ByteSize(mib << 20)), ..Resources::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_is_built_once_and_goes_when_another_needs_its_room() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = MachineConfig::new(dir.path());
    let note = match image::noted(&config.images).await {
        Ok(note) => note,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    // Room for one machine that is being built, and no more.
    config.templates_bytes_max = 200 << 20;
    config.standby_bytes_max = 0;
    let mut without = config.clone();
    (without.vmm, without.qemu) = (Choice::Qemu, Some("/nowhere/qemu".into()));
    let why = Machines::open(&without, &dir.path().join("machines"), 2, None).await.unwrap_err().to_string();
    assert_eq!(why, "QEMU can't be used: /nowhere/qemu is not there; install qemu-system-x86, or name another with --qemu");
    let machines = Machines::open(&config, &dir.path().join("machines"), 2, None).await.unwrap();
    let (name, tenant, other) = (format!("sha256:{}", note.digest.hex()), TenantId::new("a").unwrap(), TenantId::new("b").unwrap());
    let begin = Instant::now();
    let (small, large) = (resources(32), resources(96));
    let wanted = Wanted::plain(&tenant, Some(&name), &small);
    let eight = futures::future::join_all((0..8).map(|_| machines.template(&wanted))).await;
    let built = begin.elapsed();
    let eight: Vec<_> = eight.into_iter().map(|found| found.unwrap().template).collect();
    assert!(eight.iter().all(|template| Arc::ptr_eq(template, &eight[0])), "one build for all who ask");
    let begin = Instant::now();
    let again = machines.template(&Wanted::plain(&tenant, Some(&name), &small)).await.unwrap().template;
    assert!(Arc::ptr_eq(&again, &eight[0]));
    let (memory, state) = (again.memory().allocated_bytes().unwrap(), again.state().bytes().unwrap());
    eprintln!("built in {built:?}, found in {:?}; memory {} KiB, state {} KiB", begin.elapsed(), memory >> 10, state >> 10);
    // Another tenant's is another one, and there is no room for it while the first is used.
    let full = machines.template(&Wanted::plain(&other, Some(&name), &large)).await.unwrap_err();
    assert!(matches!(&full, TemplateError::Build(why) if matches!(**why, BuildError::NoRoom(_))), "{full}");
    assert!(full.to_string().contains("1 template in use"), "{full}");
    let first = again.name;
    drop((eight, again));
    let second = machines.template(&Wanted::plain(&other, Some(&name), &large)).await.unwrap().template;
    assert_ne!(second.name, first);
    drop(second);
    assert_eq!(
        machines.template(&Wanted::plain(&tenant, Some(&name), &small)).await.unwrap().template.name,
        first,
        "built anew, with the same name"
    );

    machines.close().await;
}
