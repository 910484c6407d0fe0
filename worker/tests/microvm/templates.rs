//! Templates on a real VMM: built once, warmed, kept within a budget.

use std::sync::Arc;
use std::time::{Duration, Instant};

use volley_guest::initramfs;
use volley_jobspecs::ids::TenantId;
use volley_jobspecs::spec::{ByteSize, Resources};
use volley_jobspecs::wire::guest::Exec;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_worker::guest::Guest;
use volley_worker::image::Store;
use volley_worker::image::kernel::{self, Places};
use volley_worker::machines::{Machines, TemplateError, Wanted};
use volley_worker::template::{BuildError, Builder, WarmUp};
use volley_worker::vmm::Vmm;
use volley_worker::{MachineConfig, chain};

use crate::{host, image};

fn resources(mib: u64) -> Resources {
    Resources { memory: Some(ByteSize(mib << 20)), ..Resources::default() }
}

fn shell(script: &str) -> WarmUp {
    WarmUp { argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(), env: vec![("PATH".to_owned(), "/bin".to_owned())] }
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
    without.qemu = Some("/nowhere/qemu".into());
    let why = Machines::open(&without, &dir.path().join("machines"), 2, None).await.unwrap_err().to_string();
    assert_eq!(why, "QEMU can't be used: /nowhere/qemu is not there; install qemu-system-x86");
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

    // By hand: a warm-up whose work is in every machine, one that fails, one that never ends.
    let (kernel, store) = (kernel::find(None, &Places::of_process()).unwrap(), Store::open(&config.images).unwrap());
    let initrd = dir.path().join("initrd");
    let (agent, modules) = (initramfs::find_agent().unwrap(), host::part("VOLLEY_GUEST_MODULES", "modules").unwrap());
    std::fs::write(&initrd, initramfs::build(&agent, Some(&modules), &initramfs::MODULES).unwrap()).unwrap();
    let builder = |time_max| Builder {
        vmm: machines.vmm.clone(),
        kernel: kernel.path.clone(),
        initrd: initrd.clone(),
        root: store.root(&note.root),
        cgroups: Vec::new(),
        env: vec![("FROM".to_owned(), "the image".to_owned())],
        time_max,
    };
    let mut recipe = machines.template(&Wanted::plain(&tenant, Some(&name), &small)).await.unwrap().template.recipe.clone();
    recipe.warm_up = vec![shell("echo warm $FROM > /etc/warm"), shell("sleep 1000 > /dev/null 2>&1 & true")];
    let (snapshot, kept) = builder(Duration::from_secs(100)).build(&recipe).await.unwrap_or_else(|why| panic!("{}", chain(&why)));
    assert_eq!(kept, 0);
    assert_eq!(sh(&*machines.vmm, &snapshot, "cat /etc/warm; ls -d /proc/[0-9]* | wc -l >&2").await, "warm the image\n");
    recipe.warm_up = vec![shell("echo no use >&2; exit 5")];
    let why = builder(Duration::from_secs(100)).build(&recipe).await.unwrap_err().to_string();
    assert!(why.ends_with(r#"warmUp[0] (/bin/sh -c "echo no use >&2; exit 5") ended with exit code 5; it said last: no use"#), "{why}");
    recipe.warm_up = vec![shell("sleep 1000")];
    let why = builder(Duration::from_secs(25)).build(&recipe).await.unwrap_err().to_string();
    assert!(why.contains(r#"warmUp[0] (/bin/sh -c "sleep 1000") did not end within 25 s"#), "{why}");
    machines.close().await;
}

/// What a command of a restored machine says.
async fn sh(vmm: &dyn Vmm, snapshot: &volley_worker::vmm::Snapshot, script: &str) -> String {
    let mut vm = vmm.restore(snapshot, &[]).await.unwrap();
    vm.resume().await.unwrap();
    let (guest, _) = Guest::connect(vm.connect().await.unwrap(), [3; 32], true, Duration::from_secs(60)).await.unwrap();
    guest.reseed([3; 64]).await.unwrap();
    let WarmUp { argv, env } = shell(script);
    let command = guest.exec(&Exec { argv, env, ..Exec::default() }).await.unwrap();
    let (mut said, mut buffer) = (String::new(), [0; 4096]);
    loop {
        match command.read(Channel::Output, &mut buffer).await.unwrap() {
            0 => break,
            len => said.push_str(&String::from_utf8_lossy(&buffer[..len])),
        }
    }
    command.ended().await.unwrap();
    drop(guest);
    vm.kill().await.unwrap();
    said
}
