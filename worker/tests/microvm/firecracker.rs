//! Tasks on the real Firecracker, from their templates to their results. The guest is the tiny one: everything on the host is what a task with
//! a Linux guest meets.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use volley_guest::initramfs;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::work::Order;
use volley_worker::image::{self, Limits, Source, Store};
use volley_worker::machines::Machines;
use volley_worker::vmm::Kind;
use volley_worker::vmm::choice::Choice;
use volley_worker::vmm::kvm::{self, Kvm};
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::{Config, MachineConfig};

use crate::bad_days::files;
use crate::groups::{groups_of, limit, name_of, names};
use crate::support::{World, text};
use crate::tiny_guest::{binary, built, built_with};
use crate::unconfined::NOBODY;
use crate::{begin, children, failed, message, spawner};

/// For what must not hang.
const SOON: Duration = Duration::from_secs(30);
const START: &str = r#""start":"80s""#;

/// What tests say to a worker whose machines run on Firecracker.
struct Tiny {
    spawner: MachineSpawner,
    machines: MachineConfig,
    image: String,
    /// The worker's directory.
    dir: PathBuf,
}

/// What is there for such a worker; or none, and the reason is printed. The directory is the worker's.
async fn parts(dir: &Path) -> Option<Tiny> {
    let found = try_parts(spawner()?, dir).await;
    found.map_err(|why| eprintln!("skipped: {why}")).ok()
}

async fn try_parts(spawner: MachineSpawner, dir: &Path) -> Result<Tiny, String> {
    let mut machines = MachineConfig::new(dir);
    machines.kernel = Some(built(dir)?);
    machines.firecracker = Some(binary()?);
    machines.vmm = Choice::Firecracker;
    machines.spawner = Some(spawner.clone());
    initramfs::find_agent().map_err(|e| e.to_string())?;
    if !Path::new("/sbin/mke2fs").is_file() {
        return Err("no /sbin/mke2fs".to_owned());
    }
    if !spawner.missing().is_empty() {
        return Err(format!("can't shut off {}", spawner.missing().join(", ")));
    }
    match kvm::probe(&spawner).await {
        Kvm::Usable | Kvm::Emulates => {}
        none => return Err(none.as_str().to_owned()),
    }
    let files = dir.join("files");
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join("file"), "of the image").unwrap();
    let store = Store::open(&machines.images).unwrap();
    let note = image::import(&store, Source::Directory(files), None, Limits::default()).await.map_err(|e| e.to_string())?;
    let image = format!("sha256:{}", note.digest.hex());
    Ok(Tiny { spawner, machines, image, dir: dir.to_owned() })
}

/// A worker with two slots, in cgroups where it can have some.
async fn world(change: impl FnOnce(&mut Config)) -> Option<(World, Tiny)> {
    let dir = tempfile::tempdir().unwrap();
    let tiny = parts(dir.path()).await?;
    let machines = tiny.machines.clone();
    let world = World::start_in(dir, |config| {
        config.isolation = vec![Isolation::Microvm];
        config.machines = machines;
        config.cgroups = true;
        change(config);
    });
    Some((world.await, tiny))
}

impl Tiny {
    /// A task's JSON. The guest has neither files nor a shell.
    fn task(&self, command: &[&str], timeouts: &str) -> String {
        let (image, command) = (&self.image, serde_json::to_string(command).unwrap());
        let resources = r#""resources":{"memory":"16MiB"}"#;
        format!(r#"{{"isolation":"microvm","image":"{image}",{resources},"timeouts":{{{timeouts}}},"command":{command}}}"#)
    }

    /// The processes of machines, those that wait included.
    fn processes(&self) -> BTreeSet<u32> {
        children(self.spawner.pid()).into_iter().collect()
    }

    /// Waits until one machine waits and no other is there; its process.
    async fn waiting(&self, w: &mut World) -> u32 {
        w.until("a machine that waits", |_| self.processes().len() == 1).await;
        // It stands still some moments after its process began.
        tokio::time::sleep(Duration::from_millis(700)).await;
        self.processes().into_iter().next().unwrap()
    }

    async fn none_left(&self) {
        let begin = Instant::now();
        while !self.processes().is_empty() {
            assert!(begin.elapsed() < SOON, "{:?} are left", self.processes());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Everything in the worker's directory and in its cgroups, and the directories of machines.
    fn held(&self) -> BTreeSet<PathBuf> {
        let machines = PathBuf::from(format!("/proc/{}/root/m", self.spawner.pid()));
        groups_of(&self.dir).iter().chain([&self.dir, &machines]).flat_map(|dir| files(dir)).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_runs_from_its_template_and_the_next_one_in_the_machine_that_waited() {
    let Some((mut w, tiny)) = world(|config| config.machines.standby_of_one_max = Some(1)).await else { return };
    let begun = Instant::now();
    let end = w.run_one(&tiny.task(&["exit", "0", "hello", "from", "it"], START)).await;
    eprintln!("with its template: {:?}, {:?}", begun.elapsed(), end.timing);
    assert_eq!((end.ending, end.code, text(&end.stdout).as_str()), (Ending::Succeeded, Some(0), "hello from it\n"), "{end:?}");
    if kvm::probe(&tiny.spawner).await == Kvm::Emulates {
        assert!(message(&end).contains("its machine was emulated in software (Firecracker 1."), "{end:?}");
        assert!(message(&end).contains(", kvm-emulated)"), "{end:?}");
    }
    // The next one is in the machine that waited, wherever that was until then.
    let waited = tiny.waiting(&mut w).await;
    let begun = Instant::now();
    let job = begin(&mut w, &tiny.task(&["sleep"], r#""start":"80s","run":"3s","grace":"1s""#)).await;
    eprintln!("from a machine that waited to its command: {:?}", begun.elapsed());
    assert!(tiny.processes().contains(&waited));
    let groups = groups_of(&tiny.dir);
    if !groups.is_empty() {
        assert!(limit(&groups, &name_of(waited, &groups)).is_some(), "it has its task's limits now");
    }
    let end = w.end_of(job).await;
    assert_eq!(end.ending, failed(FailureClass::RunTimeout), "{end:?}");
    assert!(!tiny.processes().contains(&waited), "it served one attempt");
    // An exit code is the task's verdict, and its words are what it said.
    let begun = Instant::now();
    let end = w.run_one(&tiny.task(&["exit", "42", "what", "it", "said"], START)).await;
    eprintln!("a task with a machine that waited: {:?}, {:?}", begun.elapsed(), end.timing);
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(42)), "{end:?}");
    assert_eq!(text(&end.stdout), "what it said\n");
    w.finish().await;
    tiny.none_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_prove_that_they_are_unlike_and_twenty_leave_nothing() {
    let Some((mut w, tiny)) = world(|config| config.machines.standby_of_one_max = Some(1)).await else { return };
    // The first make the template, the slots' directories and cgroups.
    for _ in 0..3 {
        let end = w.run_one(&tiny.task(&["proof"], START)).await;
        assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    }
    tiny.waiting(&mut w).await;
    let (mut proofs, mut before) = (BTreeSet::new(), None);
    for round in 0..20 {
        let end = w.run_one(&tiny.task(&["proof"], START)).await;
        assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
        assert!(proofs.insert(text(&end.stdout)), "round {round}: {proofs:?}");
        // Each counts how often it was asked since its template was made.
        if round % 5 == 0 {
            let end = w.run_one(&tiny.task(&["count"], START)).await;
            assert_eq!(text(&end.stdout), "0001\n", "{end:?}");
        }
        tiny.waiting(&mut w).await;
        // One directory and one cgroup are those of the machine that waits, whose names are others each time.
        let of_one = |path: &PathBuf| ["/root/m/", "/machine-"].iter().any(|part| path.to_string_lossy().contains(part));
        let begun = Instant::now();
        while names(&groups_of(&tiny.dir)).len() > 1 {
            assert!(begun.elapsed() < SOON, "{:?}", names(&groups_of(&tiny.dir)));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let (machines, held): (BTreeSet<_>, BTreeSet<_>) = tiny.held().into_iter().partition(of_one);
        let now = (held, machines.len());
        let first = before.get_or_insert_with(|| now.clone());
        assert!(first.0 == now.0, "after {round}: {:?}", first.0.symmetric_difference(&now.0).collect::<Vec<_>>());
        assert_eq!(first.1, now.1, "after {round}");
    }
    assert!(proofs.iter().all(|proof| proof.len() == 65), "{proofs:?}");
    let groups = groups_of(&tiny.dir);
    w.finish().await;
    tiny.none_left().await;
    assert!(groups.iter().all(|group| !group.exists()), "cgroups are left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_is_killed_is_a_lost_guest_and_a_command_that_hangs_is_stopped() {
    let Some((mut w, tiny)) = world(|config| config.machines.standby_bytes_max = 0).await else { return };
    let job = begin(&mut w, &tiny.task(&["sleep"], START)).await;
    let pid = tiny.processes().into_iter().next().unwrap();
    let killed = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(killed, rustix::process::Signal::KILL).unwrap();
    let end = w.end_of(job).await;
    assert_eq!(end.ending, failed(FailureClass::GuestLost), "{end:?}");
    assert!(message(&end).contains("its machine was ended by signal 9; its console said last: tiny guest: a command goes on"), "{end:?}");
    let end = w.run_one(&tiny.task(&["panic"], START)).await;
    assert_eq!(end.ending, failed(FailureClass::GuestLost), "{end:?}");
    assert!(message(&end).contains("the guest's kernel panicked (not syncing: it was told to)"), "{end:?}");
    // One that ends when it is sent TERM, and one that does nothing that it is told.
    let begun = Instant::now();
    let end = w.run_one(&tiny.task(&["sleep"], r#""start":"80s","run":"1s","grace":"10s""#)).await;
    eprintln!("obeyed after {:?}", begun.elapsed());
    assert_eq!(end.ending, failed(FailureClass::RunTimeout), "{end:?}");
    assert!(begun.elapsed() < Duration::from_secs(8));
    tiny.none_left().await;
    let begun = Instant::now();
    let end = w.run_one(&tiny.task(&["hang"], r#""start":"80s","run":"1s","grace":"500ms""#)).await;
    eprintln!("given up after {:?}: {:?} {}", begun.elapsed(), end.ending, message(&end));
    assert_eq!(end.ending, failed(FailureClass::RunTimeout), "{end:?}");
    tiny.none_left().await;
    // A VMM that stands still with its guest.
    let job = begin(&mut w, &tiny.task(&["sleep"], r#""start":"80s","run":"2s","grace":"500ms""#)).await;
    let pid = tiny.processes().into_iter().next().unwrap();
    let stopped = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(stopped, rustix::process::Signal::STOP).unwrap();
    let end = w.end_of(job).await;
    eprintln!("a VMM that was stopped: {:?} {}", end.ending, message(&end));
    assert!(matches!(end.ending, Ending::Failed(FailureClass::RunTimeout | FailureClass::GuestLost)), "{end:?}");
    tiny.none_left().await;
    let end = w.run_one(&tiny.task(&["exit", "0", "fine"], START)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "fine\n"), "{end:?}");
    w.finish().await;
}

/// A program that says this, whatever it is asked.
fn says(dir: &Path, text: &str) -> PathBuf {
    let (source, to) = (dir.join("says.c"), dir.join("says"));
    std::fs::write(&source, format!("#include <stdio.h>\nint main(void) {{ return puts({text:?}) < 0; }}\n")).unwrap();
    assert!(Command::new("gcc").args(["-static", "-o"]).args([&to, &source]).status().unwrap().success());
    to
}

/// Why machines can't be opened.
async fn refused(config: &MachineConfig, dir: &Path) -> String {
    Machines::open(config, &dir.join("machines"), 1, None).await.map(|_| ()).unwrap_err().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_firecracker_that_can_not_be_used_is_told_in_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let Some(Tiny { mut machines, spawner, .. }) = parts(dir.path()).await else { return };
    let real = machines.firecracker.replace("/nowhere/firecracker".into());
    assert_eq!(
        refused(&machines, dir.path()).await,
        "Firecracker can't be used: /nowhere/firecracker is not there; install it, or name another with --firecracker"
    );
    machines.firecracker = Some(says(dir.path(), "Firecracker v1.11.0"));
    assert_eq!(
        refused(&machines, dir.path()).await,
        "Firecracker can't be used: it is version 1.11.0; 1.12.0 is the oldest that can be used: install a newer one"
    );
    let script = dir.path().join("script");
    std::fs::write(&script, "#!/bin/sh\necho Firecracker v1.16.1\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    machines.firecracker = Some(script);
    let why = refused(&machines, dir.path()).await;
    assert!(why.contains("script can't be executed (") && why.ends_with("it must be a program that is linked statically"), "{why}");
    // QEMU is not given the kernel that Firecracker boots.
    (machines.vmm, machines.firecracker) = (Choice::Qemu, real.clone());
    let why = refused(&machines, dir.path()).await;
    assert!(why.ends_with("QEMU wants its bzImage (vmlinuz)") || why.starts_with("QEMU can't be used: "), "{why}");
    // Where it is not asked for, it is used only where KVM executes.
    (machines.vmm, machines.qemu) = (Choice::Auto, Some("/nowhere/qemu".into()));
    match kvm::probe(&spawner).await {
        Kvm::Usable => {
            let opened = Machines::open(&machines, &dir.path().join("machines"), 1, None).await.unwrap();
            assert_eq!(opened.vmm.capabilities().identity.vmm, Kind::Firecracker);
        }
        kvm => assert_eq!(
            refused(&machines, dir.path()).await,
            format!(
                "QEMU can't be used: /nowhere/qemu is not there; install qemu-system-x86, or name another with --qemu; Firecracker is not used either: {}",
                kvm.as_str()
            )
        ),
    }
    // What distributions install is unpacked for it.
    let Some(vmlinuz) = crate::host::part("VOLLEY_GUEST_KERNEL", "vmlinuz").filter(|file| file.is_file()) else { return };
    (machines.vmm, machines.firecracker, machines.kernel) = (Choice::Firecracker, real, Some(vmlinuz));
    let opened = Machines::open(&machines, &dir.path().join("machines"), 1, None).await.unwrap();
    assert_eq!(opened.vmm.capabilities().identity.vmm, Kind::Firecracker);
    assert_eq!(std::fs::read(dir.path().join("machines/vmlinux")).unwrap().get(..4), Some(b"\x7fELF".as_slice()));
}

/// Where the test that runs as nobody finds what it can't read elsewhere.
const PLACE: &str = "VOLLEY_TEST_FIRECRACKER";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by the test below"]
async fn firecracker_as_nobody() {
    let Some(place) = std::env::var_os(PLACE).map(PathBuf::from) else { return };
    let spawner = match MachineSpawner::start() {
        Ok(spawner) => spawner,
        Err(why) => return println!("skipped: {why}"),
    };
    let mut config = MachineConfig::new(&place);
    (config.vmm, config.firecracker) = (Choice::Firecracker, Some(place.join("firecracker")));
    (config.spawner, config.allow_unconfined) = (Some(spawner), true);
    println!("refused: {}", refused(&config, &place).await);
}

#[tokio::test]
async fn a_kvm_that_may_not_be_opened_is_told_in_a_line() {
    let firecracker = match binary() {
        Ok(firecracker) => firecracker,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let Ok(meta) = std::fs::metadata("/dev/kvm") else { return eprintln!("skipped: there is no KVM") };
    if meta.permissions().mode() & 0o006 != 0 || !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: everybody may open /dev/kvm here, or this is not root");
    }
    let place = tempfile::tempdir().unwrap();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let copy = |from: &Path, name: &str| {
        let to = place.path().join(name);
        std::fs::copy(from, &to).unwrap();
        std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755)).unwrap();
        to
    };
    copy(&firecracker, "firecracker");
    let ran = Command::new(copy(&std::env::current_exe().unwrap(), "test"))
        .args(["--exact", "firecracker::firecracker_as_nobody", "--ignored", "--nocapture"])
        .env(PLACE, place.path())
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    eprintln!("{said}");
    if said.contains("skipped: ") {
        return;
    }
    let line = "refused: Firecracker can't be used: KVM is there, but the worker may not open /dev/kvm; give it that device\n";
    assert!(said.contains(line), "{said} {}", String::from_utf8_lossy(&ran.stderr));
}

/// One try of a job's only task.
async fn tried(w: &mut World, job: JobId, number: u32) -> AttemptEnd {
    let (_, mut order) = w.bundle(job, 0, 1);
    if let Order::Run(bundle) = &mut order {
        bundle.tasks[0].number = number;
    }
    w.order(vec![order]).await;
    let mut found = None;
    w.until("an end", |w| {
        found = w.ends().into_iter().find(|end| end.name.job == job && end.name.number == number);
        found.is_some()
    })
    .await;
    found.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_whose_machine_does_not_confirm_is_tried_again_and_leaves_nothing() {
    for (lie, said) in
        [("PROOF_REPEATS", "gave the same random bytes as another one and was killed"), ("CLOCK_REFUSED", "the clock can't be set")]
    {
        let built = tempfile::tempdir().unwrap();
        let started = world(|config| {
            config.machines.kernel = Some(built_with(built.path(), &[lie]).unwrap());
            config.machines.standby_of_one_max = Some(0);
        });
        let Some((mut w, tiny)) = started.await else { return };
        let (mut before, mut failed_tries) = (None, 0);
        // Half of the machines lie; that none of so many does, or all of one task's, does not happen.
        for _ in 0..16 {
            let (job, _) = w.job(r#"{"count":1}"#, &tiny.task(&["exit", "0", "fine"], START));
            let mut number = 1;
            let end = loop {
                let end = tried(&mut w, job, number).await;
                if end.ending == Ending::Succeeded {
                    break end;
                }
                assert_eq!(end.ending, failed(FailureClass::RestoreFailed), "{end:?}");
                assert!(message(&end).contains(said) && text(&end.stdout).is_empty(), "{end:?}");
                failed_tries += 1;
                number += 1;
                assert!(number < 60);
            };
            assert_eq!(text(&end.stdout), "fine\n", "{end:?}");
            tiny.none_left().await;
            let begun = Instant::now();
            let before = before.get_or_insert_with(|| tiny.held());
            while tiny.held() != *before {
                assert!(begun.elapsed() < SOON, "{lie}: {:?}", tiny.held().symmetric_difference(before).collect::<Vec<_>>());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        eprintln!("{lie}: {failed_tries} tries failed, 16 tasks succeeded");
        assert!(failed_tries > 0, "{lie}");
        assert!(FailureClass::RestoreFailed.is_infra() && FailureClass::RestoreFailed.retry_by_default());
        w.finish().await;
    }
}
