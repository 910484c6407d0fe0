//! Machines of one template are alike in nothing that must not be shared, and their clocks are right.
//!
//! Owns what is compared, fifty machines of a worker, and the same comparison of machines that are driven by hand, with the reseed and without:
//! one that finds nothing even then would be worth nothing.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use minicbor::bytes::ByteArray;
use volley_jobspecs::wire::guest::Identity;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::Ending;
use volley_worker::image::{self, Limits, Source, Store};
use volley_worker::shells::Shells;
use volley_worker::vmm::{Snapshot, Vm, Vmm};

use crate::linux::{self, Linux};
use crate::shell::{attempt, run};
use crate::support::{World, text};
use crate::{begin, spawner, task};

/// Machines of one template.
const MACHINES: usize = 50;
/// Of these so many in a row are told to say the same.
const IN_A_ROW: u32 = 10;
/// Machines that are driven by hand, of each kind.
const BY_HAND: u8 = 8;
/// When this time is over, the rest of the fifty is compared without Python, whose start takes seconds in an emulated machine.
const PYTHON_TIME: Duration = Duration::from_secs(180);
/// How long template and machine stand still before the clock is looked at.
const STOOD: Duration = Duration::from_secs(60);

/// What a machine says of itself. The first thing that is run in it is the shell; the first thing that is read is the generator.
const WHO: &str = r#"
echo "urandom $(head -c 16 /dev/urandom | od -A n -t x1 | tr -d ' \n')"
echo "uuid $(cat /proc/sys/kernel/random/uuid)"
echo "boot_id $(cat /proc/sys/kernel/random/boot_id)"
echo "machine_id $(cat /etc/machine-id)"
while read -r range rest; do case $rest in *stack*) echo "stack $range";; esac; done </proc/self/maps
"#;
/// What they have said of; and that of Python.
const KINDS: [&str; 5] = ["boot_id", "machine_id", "stack", "urandom", "uuid"];
const HASH: &str = r#"echo "hash $(python3 -c "print(hash('x'))")""#;

/// By kind.
type Who = BTreeMap<String, String>;

fn who(said: &str) -> Who {
    said.lines().filter_map(|line| line.split_once(' ')).map(|(kind, value)| (kind.to_owned(), value.to_owned())).collect()
}

/// The comparison: in what machines are alike, and how many of them say what another one says too.
fn alike(all: &[Who]) -> BTreeMap<&str, usize> {
    let mut said: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (kind, value) in all.iter().flatten() {
        *said.entry((kind, value)).or_default() += 1;
    }
    let mut found = BTreeMap::new();
    for ((kind, _), count) in said.into_iter().filter(|(_, count)| *count > 1) {
        *found.entry(kind).or_default() += count;
    }
    found
}

/// The stock image with Python, as `deploy/stock_image` makes it from Debian's packages; or why there is none.
async fn stock_python(images: &Path) -> Result<String, String> {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root.tar");
    // It hands its archive over to `volley image import`; this takes it as it is.
    let volley = dir.path().join("volley");
    std::fs::write(&volley, format!("#!/bin/sh\nfor last; do :; done\nexec mv \"${{last#tar:}}\" {}\n", root.display())).unwrap();
    std::fs::set_permissions(&volley, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/stock_image");
    let made = Command::new("timeout").arg("240").arg(script).arg("python").env("VOLLEY", &volley).output();
    let made = made.map_err(|e| format!("timeout: {e}"))?;
    if !made.status.success() {
        return Err(format!("deploy/stock_image python: {}: {}", made.status, String::from_utf8_lossy(&made.stderr).trim()));
    }
    let store = Store::open(images).unwrap();
    let note = image::import(&store, Source::Tarball(root), None, Limits::default()).await.map_err(|e| e.to_string())?;
    Ok(format!("sha256:{}", note.digest.hex()))
}

/// Ten machines of a worker, two at once in its two slots.
async fn ten(w: &mut World, image: &str, script: &str) -> Vec<Who> {
    let command = serde_json::to_string(&["/bin/sh", "-c", script]).unwrap();
    let (job, _) = w.job(&format!(r#"{{"count":{IN_A_ROW}}}"#), &task(image, &format!(r#""command":{command}"#)));
    for first in (0..IN_A_ROW).step_by(2) {
        // What has to wait for a slot for some seconds is handed back.
        let orders = [first, first + 1].map(|index| w.bundle(job, index, 1).1);
        w.order(orders.to_vec()).await;
        w.until("two ends", |w| w.ends().iter().filter(|end| end.name.job == job).count() == first as usize + 2).await;
    }
    let ends = w.ends().into_iter().filter(|end| end.name.job == job);
    ends.map(|end| {
        assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
        who(&text(&end.stdout))
    })
    .collect()
}

fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// By how many seconds a machine's clock is wrong at least, as far as that can be seen from outside.
async fn wrong_by(shells: &Shells, name: volley_jobspecs::ids::AttemptName) -> f64 {
    let before = unix_now();
    let said = run(shells, name, &["date", "+%s.%N"]).await.text();
    let after = unix_now();
    // Busybox knows no fractions: it may be any time within that second.
    let (second, fraction) = said.trim().split_once('.').unwrap();
    let second: f64 = second.parse().unwrap();
    let (from, to) = match format!("0.{fraction}").parse::<f64>() {
        Ok(fraction) => (second + fraction, second + fraction),
        Err(_) => (second, second + 1.0),
    };
    eprintln!("asked at {before:.3}, told {said:?}, heard at {after:.3}");
    (before - to).max(from - after).max(0.0)
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_machines_of_one_template_are_unlike_each_other_and_their_clocks_are_right() {
    let Some(spawner) = spawner() else { return };
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().join("images");
    let busybox = match crate::image::busybox(&images).await {
        Ok(image) => image,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let begun = Instant::now();
    let python = stock_python(&images).await.map_err(|why| eprintln!("skipped: Python's hash, all else is compared: {why}")).ok();
    eprintln!("the image with Python: {:?}", begun.elapsed());
    let image = python.as_ref().unwrap_or(&busybox).clone();
    let shells = Shells::default();
    let own = shells.clone();
    let mut w = World::start_in(dir, |config| {
        config.isolation = vec![Isolation::Microvm];
        config.machines.spawner = Some(spawner);
        config.machines.shells = own;
        // Some waited, some did not.
        config.machines.standby_of_one_max = Some(1);
    })
    .await;
    let (begun, mut all) = (Instant::now(), Vec::new());
    while all.len() < MACHINES {
        let script = if python.is_some() && begun.elapsed() < PYTHON_TIME { format!("{WHO}{HASH}\n") } else { WHO.to_owned() };
        all.extend(ten(&mut w, &image, &script).await);
    }
    let hashes = all.iter().filter(|who| who.contains_key("hash")).count();
    eprintln!("{} machines, {hashes} of them with Python, in {:?}", all.len(), begun.elapsed());
    for who in &all {
        assert!(KINDS.iter().all(|kind| who.get(*kind).is_some_and(|value| value.len() > 8)), "{who:?}");
    }
    assert!(python.is_none() || hashes >= IN_A_ROW as usize, "{hashes}");
    assert_eq!(alike(&all), BTreeMap::new());
    // The template stands still since it was made, and a machine that waits as well.
    tokio::time::sleep(STOOD).await;
    let job = begin(&mut w, &task(&image, r#""command":"sleep 10""#)).await;
    for _ in 0..3 {
        let wrong = wrong_by(&shells, attempt(&w, job)).await;
        assert!(wrong < 1.0, "its clock is wrong by {wrong} s");
    }
    assert_eq!(w.end_of(job).await.ending, Ending::Succeeded);
    w.finish().await;
}

/// A machine as the worker makes it, but for the reseed where that is left out.
async fn by_hand(vmm: &dyn Vmm, snapshot: &Snapshot, number: u8, reseed: bool) -> Who {
    let mut vm: Box<dyn Vm> = vmm.restore(snapshot, &[]).await.unwrap();
    vm.resume().await.unwrap();
    let guest = linux::session(vm.connect().await.unwrap(), number, reseed).await;
    if reseed {
        let mut seed = [0; 64];
        getrandom::fill(&mut seed).unwrap();
        guest.reseed(seed).await.unwrap();
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    guest.set_clock(u64::try_from(now.as_nanos()).unwrap()).await.unwrap();
    let (mut machine_id, mut boot_id) = ([0; 16], [0; 16]);
    getrandom::fill(&mut machine_id).unwrap();
    getrandom::fill(&mut boot_id).unwrap();
    let hostname = Some(format!("machine-{number}"));
    let identity = Identity { hostname, machine_id: Some(ByteArray::from(machine_id)), boot_id: Some(ByteArray::from(boot_id)) };
    guest.set_identity(identity).await.unwrap();
    let said = linux::sh(&guest, WHO).await;
    drop(guest);
    vm.kill().await.unwrap();
    who(&said)
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_reseed_the_same_comparison_finds_them_alike() {
    let (Some(spawner), Some(linux)) = (spawner(), Linux::find().await) else { return };
    let Some(qemu) = linux::qemu(&spawner).await else { return };
    let vm = qemu.boot(linux.boot("")).await.unwrap();
    let guest = linux::session(vm.connect().await.unwrap(), 1, false).await;
    // A young kernel draws anew from the time of interrupts when half of its life has passed since it last did: it must not do so by itself
    // between here and the first thing that a clone runs.
    tokio::time::sleep(Duration::from_secs(8)).await;
    guest.reseed([1; 64]).await.unwrap();
    // It is not told that it becomes a template: an agent that is runs nothing before a reseed.
    drop(guest);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let snapshot = vm.snapshot().await.unwrap();
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for number in 10..10 + BY_HAND {
        with.push(by_hand(&qemu, &snapshot, number, true).await);
        without.push(by_hand(&qemu, &snapshot, number, false).await);
    }
    assert!(with.iter().chain(&without).all(|who| who.len() == KINDS.len()), "{with:?} {without:?}");
    assert_eq!(alike(&with), BTreeMap::new());
    let found = alike(&without);
    eprintln!("alike without the reseed, of {BY_HAND}: {found:?}");
    for kind in ["stack", "urandom", "uuid"] {
        assert!(found.contains_key(kind), "{kind}: {without:?}");
    }
    assert!(!found.contains_key("machine_id") && !found.contains_key("boot_id"), "these come from the host: {without:?}");
}
