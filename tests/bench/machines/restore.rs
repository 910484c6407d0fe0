//! `firecracker-restore`, `qemu-restore`: how long until a saved machine answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use volley_jobspecs::wire::guest::Exec;
use volley_worker::guest::{Guest, Stream};
use volley_worker::vmm::qemu::Qemu;
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::vmm::{Snapshot, Vm, Vmm};

use crate::bare::{Bare, FirecrackerParts, QemuParts};
use crate::limits::{Limit, pair};
use crate::linux::qemu as open;
use crate::linux::{self, Linux, output};
use crate::tiny::{Tiny, say};
use crate::{SOON, ms};

/// Restores of one kind, in turns with the other.
const ROUNDS: usize = 25;
/// Cold boots.
const BOOTS: usize = 5;
/// What the driver may take, of what the same steps take by hand.
const BARE: Limit = Limit::RatioAtMost(1.3);
/// So many times faster than a boot a restore must be, to the first answer and to the end of the first command.
const COLD_ANSWER: f64 = 25.0;
const COLD_EXEC: f64 = 12.0;

/// Milliseconds of the steps of many restores.
#[derive(Default)]
struct Steps {
    /// From nothing to the first answer.
    answer: Vec<f64>,
    /// From the resume of a machine that stood still to its first answer.
    resumed: Vec<f64>,
    /// From nothing to the end of the first command.
    exec: Vec<f64>,
    /// From the resume to there.
    resumed_exec: Vec<f64>,
}

impl Steps {
    fn add(&mut self, paused: Duration, answered: Duration, ran: Duration) {
        self.answer.push(ms(answered));
        self.resumed.push(ms(answered - paused));
        self.exec.push(ms(ran));
        self.resumed_exec.push(ms(ran - paused));
    }

    fn print(&self, name: &str, other: &Self, answer: Option<Limit>, resumed: Option<Limit>) {
        pair(&format!("{name} answer ms"), &self.answer, Some(&other.answer), answer);
        pair(&format!("{name} resume-answer ms"), &self.resumed, Some(&other.resumed), resumed);
        pair(&format!("{name} exec ms"), &self.exec, Some(&other.exec), None);
        pair(&format!("{name} resume-exec ms"), &self.resumed_exec, Some(&other.resumed_exec), None);
    }
}

async fn session(stream: Box<dyn Stream>, nonce: u8) -> Guest {
    let (guest, _) = Guest::connect(stream, [nonce; 32], true, 2 * SOON).await.unwrap();
    guest
}

async fn exec(guest: &Guest, nonce: u8, words: &[&str]) {
    guest.reseed([nonce; 64]).await.unwrap();
    let argv = words.iter().map(|word| (*word).to_owned()).collect();
    output(guest, &Exec { argv, ..Exec::default() }).await;
}

/// By the driver.
async fn ours(vmm: &dyn Vmm, snapshot: &Snapshot, words: &[&str], nonce: u8) -> (Box<dyn Vm>, [Duration; 3]) {
    let begin = Instant::now();
    let mut vm = vmm.restore(snapshot, &[]).await.unwrap();
    let paused = begin.elapsed();
    vm.resume().await.unwrap();
    let guest = session(vm.connect().await.unwrap(), nonce).await;
    let answered = begin.elapsed();
    exec(&guest, nonce, words).await;
    (vm, [paused, answered, begin.elapsed()])
}

/// By hand.
async fn by_hand(restore: impl FnOnce() -> Bare, words: &[&str], nonce: u8) -> (Bare, [Duration; 3]) {
    let begin = Instant::now();
    let (stream, bare, paused) = tokio::task::block_in_place(|| {
        let mut bare = restore();
        let paused = begin.elapsed();
        bare.resume();
        (bare.connect(), bare, paused)
    });
    let guest = session(stream, nonce).await;
    let answered = begin.elapsed();
    exec(&guest, nonce, words).await;
    (bare, [paused, answered, begin.elapsed()])
}

/// The driver against a bare QEMU, and both against a boot.
pub async fn qemu(spawner: &MachineSpawner) {
    let (Some(qemu), Some(linux)) = (open(spawner).await, Linux::find().await) else { return };
    let words = ["/bin/true"];
    let (mut cold, mut snapshot) = (Steps::default(), None);
    for _ in 0..BOOTS {
        let begin = Instant::now();
        let vm = qemu.boot(linux.boot("")).await.unwrap();
        let guest = linux::session(vm.connect().await.unwrap(), 1, false).await;
        let answered = begin.elapsed();
        linux::sh(&guest, "true").await;
        cold.add(Duration::ZERO, answered, begin.elapsed());
        let (_, stream) = guest.prepare_snapshot(false).await.unwrap();
        snapshot = Some(vm.snapshot().await.unwrap());
        drop(stream);
    }
    let Some(snapshot) = snapshot else { return };
    let first = qemu.restore(&snapshot, &[]).await.unwrap();
    let parts = QemuParts::of(&*first, &snapshot);
    first.kill().await.unwrap();
    let (mut steps, mut bare) = (Steps::default(), Steps::default());
    for round in 0..ROUNDS {
        let (vm, [paused, answered, ran]) = ours(&qemu, &snapshot, &words, round as u8).await;
        vm.kill().await.unwrap();
        steps.add(paused, answered, ran);
        let (machine, [paused, answered, ran]) = by_hand(|| parts.restore(), &words, round as u8).await;
        drop(machine);
        bare.add(paused, answered, ran);
    }
    steps.print("qemu-restore", &bare, Some(BARE), None);
    pair("qemu cold boot vs restore, answer ms", &cold.answer, Some(&steps.answer), Some(Limit::RatioAtLeast(COLD_ANSWER)));
    pair("qemu cold boot vs restore, exec ms", &cold.exec, Some(&steps.exec), Some(Limit::RatioAtLeast(COLD_EXEC)));
    pair("qemu cold boot vs standby, answer ms", &cold.answer, Some(&steps.resumed), None);
    println!("# machines of QEMU are {}", accelerated(&qemu));
}

fn accelerated(qemu: &Qemu) -> &'static str {
    if qemu.capabilities().emulated { "emulated in software (TCG)" } else { "accelerated (KVM)" }
}

/// From a standby machine's resume to its first answer: no more than this is wanted, in milliseconds, of one alone.
const RESUMED: Limit = Limit::AtMost(25.0);

/// The driver against a bare Firecracker, alone and many at once.
pub async fn firecracker(spawner: &MachineSpawner) {
    let Some(tiny) = Tiny::find(spawner).await else { return };
    let snapshot = tiny.saved().await;
    let first = tiny.vmm.restore(&snapshot, &[]).await.unwrap();
    let parts = Arc::new(FirecrackerParts::of(&*first, &tiny.program));
    first.kill().await.unwrap();
    for (at_once, rounds) in [(1, ROUNDS), (8, 6), (64, 3)] {
        let (mut steps, mut bare) = (Steps::default(), Steps::default());
        for _ in 0..rounds {
            let all = futures::future::join_all((0..at_once).map(|n| ours(&tiny.vmm, &snapshot, &["count"], n)));
            for (vm, [paused, answered, ran]) in all.await {
                vm.kill().await.unwrap();
                steps.add(paused, answered, ran);
            }
            let all = (0..at_once).map(|n| {
                let parts = parts.clone();
                tokio::spawn(async move { by_hand(|| parts.restore(), &["count"], n).await })
            });
            for one in futures::future::join_all(all).await {
                let (machine, [paused, answered, ran]) = one.unwrap();
                drop(machine);
                bare.add(paused, answered, ran);
            }
        }
        let resumed = (at_once == 1).then_some(RESUMED);
        steps.print(&format!("firecracker x{at_once}"), &bare, Some(BARE), resumed);
    }
    let (mut vm, _) = ours(&tiny.vmm, &snapshot, &["count"], 9).await;
    vm.pause().await.unwrap();
    vm.resume().await.unwrap();
    let guest = linux::session(vm.connect().await.unwrap(), 8, false).await;
    assert_eq!(say(&guest, &["count"]).await, "0004", "it is the machine that was saved");
}
