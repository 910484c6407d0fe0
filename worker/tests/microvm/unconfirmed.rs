//! Restored machines that do not confirm: whatever is wrong with one, it is killed, its attempt may be tried again, and nothing is left.
//!
//! The machines are real; at the agent's end of the connection sits somebody else, who lies once.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use minicbor::bytes::ByteArray;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::TenantId;
use volley_jobspecs::spec::{ByteSize, Resources};
use volley_jobspecs::wire::guest::mux::{Mux, Side};
use volley_jobspecs::wire::guest::resync::{From, Resync, Scanner};
use volley_jobspecs::wire::guest::{Answer, Hello, PROTOCOL, Refusal, RefusalKind, Request};
use volley_jobspecs::wire::{decode, encode};
use volley_worker::MachineConfig;
use volley_worker::dirs::Dirs;
use volley_worker::guest::{GuestError, Stream};
use volley_worker::machines::{Machines, Wanted};
use volley_worker::mounts::Mounts;
use volley_worker::prepare::Prepared;
use volley_worker::restore::RestoreError;
use volley_worker::runtime::Machine;
use volley_worker::runtime::microvm::MicrovmMachine;
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::vmm::spawner::proto::Exited;
use volley_worker::vmm::{Boot, Capabilities, Disk, Slot, Snapshot, Vm, Vmm, VmmError};

use crate::bad_days::files;
use crate::prepared::prepared;
use crate::{children, image, spawner};

/// What is said instead of the truth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    /// The proof of a reseed is always the same.
    Proof,
    /// Another nonce comes back than was sent.
    Nonce,
    /// What a sibling said in its session comes, every time.
    Sibling,
    /// It needs no reseed, it says.
    NoReseed,
    /// The clock can't be set.
    Clock,
}

fn hello(reseed_due: bool) -> Answer {
    let (build, kernel) = (String::new(), String::new());
    Answer::Hello(Hello { protocol: PROTOCOL, build, boot_id: None, kernel, reseed_due, limits: true })
}

/// All that the agent of a sibling said: its echo, and who it is.
fn of_a_sibling(asked: Resync) -> Vec<u8> {
    let (mut host, mut guest, mut bytes) = (Mux::new(Side::Host), Mux::new(Side::Guest), Vec::new());
    host.open(encode(&Request::Hello)).unwrap();
    host.fill(&mut bytes, 4096);
    guest.feed(&bytes).unwrap();
    let (call, _) = guest.accept().unwrap();
    guest.finish(call, encode(&hello(true)));
    let mut said = Resync { nonce: [3; 32], ..asked }.encode(From::Guest).to_vec();
    guest.fill(&mut said, 4096);
    said
}

fn answer(lie: Lie, request: Request) -> Answer {
    match request {
        Request::Hello => hello(lie != Lie::NoReseed),
        Request::Reseed { seed } => {
            let proof = if lie == Lie::Proof { [7; 32] } else { *blake3::hash(&seed[..]).as_bytes() };
            Answer::Reseeded { proof: ByteArray::from(proof) }
        }
        Request::SetClock { .. } if lie == Lie::Clock => Answer::Refused(Refusal::new(RefusalKind::System, "setting the clock: no")),
        Request::SetClock { unix_ns } => Answer::Clock { before_unix_ns: unix_ns },
        Request::SetIdentity(_) => Answer::Done,
        Request::Furnish(_) => Answer::Furnished { owner: None },
        other => Answer::Refused(Refusal::new(RefusalKind::BadRequest, format!("{other:?}"))),
    }
}

/// The agent's end of a connection, until the host hangs up.
async fn serve(mut stream: DuplexStream, lie: Lie) -> std::io::Result<()> {
    let (mut scanner, mut buffer) = (Scanner::new(From::Host), vec![0; 65536]);
    let mut mux: Option<Mux> = None;
    loop {
        let len = stream.read(&mut buffer).await?;
        if len == 0 {
            return Ok(());
        }
        let mut bytes = &buffer[..len];
        while mux.is_none() && !bytes.is_empty() {
            let (taken, asked) = scanner.feed(bytes);
            bytes = &bytes[taken..];
            match (asked, lie) {
                (None, _) => {}
                (Some(asked), Lie::Nonce) => stream.write_all(&Resync { nonce: [9; 32], ..asked }.encode(From::Guest)).await?,
                (Some(asked), Lie::Sibling) => stream.write_all(&of_a_sibling(asked)).await?,
                (Some(asked), _) => {
                    stream.write_all(&asked.encode(From::Guest)).await?;
                    mux = Some(Mux::new(Side::Guest));
                }
            }
        }
        if let Some(mux) = &mut mux {
            mux.feed(bytes).map_err(std::io::Error::other)?;
            while let Some((call, request)) = mux.accept() {
                mux.finish(call, encode(&answer(lie, decode("request", &request).unwrap())));
            }
            let mut out = Vec::new();
            mux.fill(&mut out, 65536);
            stream.write_all(&out).await?;
        }
    }
}

/// Restores real machines, and puts liars into them as long as there are some.
#[derive(Debug)]
struct LyingVmm {
    real: Arc<dyn Vmm>,
    lies: Arc<Mutex<VecDeque<Lie>>>,
}

impl Vmm for LyingVmm {
    fn capabilities(&self) -> &Capabilities {
        self.real.capabilities()
    }

    fn boot(&self, boot: Boot) -> BoxFuture<'_, Result<Box<dyn Vm>, VmmError>> {
        self.real.boot(boot)
    }

    fn restore<'a>(&'a self, snapshot: &'a Snapshot, cgroups: &'a [String]) -> BoxFuture<'a, Result<Box<dyn Vm>, VmmError>> {
        Box::pin(async move {
            let vm = self.real.restore(snapshot, cgroups).await?;
            Ok(match self.lies.lock().unwrap().pop_front() {
                Some(lie) => Box::new(LyingVm { vm, lie }),
                None => vm,
            })
        })
    }
}

#[derive(Debug)]
struct LyingVm {
    vm: Box<dyn Vm>,
    lie: Lie,
}

impl Vm for LyingVm {
    fn pid(&self) -> u32 {
        self.vm.pid()
    }
    fn user(&self) -> Option<u32> {
        self.vm.user()
    }
    fn pause(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        self.vm.pause()
    }
    fn resume(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        self.vm.resume()
    }
    fn swap(&mut self, slot: Slot, disk: Disk) -> BoxFuture<'_, Result<(), VmmError>> {
        self.vm.swap(slot, disk)
    }
    fn failed_disk_operations(&mut self) -> BoxFuture<'_, Result<u64, VmmError>> {
        self.vm.failed_disk_operations()
    }
    fn connect(&self) -> BoxFuture<'_, Result<Box<dyn Stream>, VmmError>> {
        let (host, guest) = tokio::io::duplex(1 << 16);
        tokio::spawn(serve(guest, self.lie));
        Box::pin(async move { Ok(Box::new(host) as Box<dyn Stream>) })
    }
    fn snapshot(self: Box<Self>) -> BoxFuture<'static, Result<Snapshot, VmmError>> {
        self.vm.snapshot()
    }
    fn console(&self) -> String {
        self.vm.console()
    }
    fn ended(&self) -> BoxFuture<'_, Result<Exited, VmmError>> {
        self.vm.ended()
    }
    fn kill(self: Box<Self>) -> BoxFuture<'static, Result<Exited, VmmError>> {
        self.vm.kill()
    }
}

/// Two slots of the tier on a VMM that lies when it is told to.
struct Tier {
    slots: [MicrovmMachine; 2],
    prepared: Prepared,
    lies: Arc<Mutex<VecDeque<Lie>>>,
    spawner: MachineSpawner,
    dir: tempfile::TempDir,
}

impl Tier {
    async fn start() -> Option<Self> {
        let (spawner, dir) = (spawner()?, tempfile::tempdir().unwrap());
        let mut config = MachineConfig::new(dir.path());
        let image = image::busybox(&config.images).await.map_err(|why| eprintln!("skipped: {why}")).ok()?;
        (config.spawner, config.standby_bytes_max) = (Some(spawner.clone()), 0);
        let mut machines = Machines::open(&config, &dir.path().join("machines"), 2, None).await.unwrap();
        let lies = Arc::new(Mutex::new(VecDeque::new()));
        machines.vmm = Arc::new(LyingVmm { real: machines.vmm.clone(), lies: lies.clone() });
        let machines = Arc::new(machines);
        let resources = Resources { memory: Some(ByteSize(64 << 20)), ..Resources::default() };
        // Made before anybody lies.
        machines.template(&Wanted::plain(&TenantId::new("public").unwrap(), Some(&image), &resources)).await.unwrap();
        let mut dirs = Dirs::new(dir.path().join("slot"), None);
        dirs.make().unwrap();
        let prepared = prepared(&image, resources, &dirs);
        let slots = [0, 1].map(|_| MicrovmMachine::new(machines.clone()));
        Some(Self { slots, prepared, lies, spawner, dir })
    }

    fn lie(&self, lies: &[Lie]) {
        self.lies.lock().unwrap().extend(lies);
    }

    async fn restored(&mut self) -> Result<(), RestoreError> {
        self.slots[0].restore(&self.prepared, &mut Mounts::none()).await
    }

    /// Processes of machines, and files of the worker.
    fn held(&self) -> (Vec<u32>, Vec<PathBuf>) {
        let machines = PathBuf::from(format!("/proc/{}/root/m", self.spawner.pid()));
        (children(self.spawner.pid()), [self.dir.path(), &machines].iter().flat_map(|dir| files(dir)).collect())
    }

    /// Another try, with a machine that tells the truth; nothing is left behind it.
    async fn again(&mut self) {
        self.restored().await.unwrap();
        let streams = self.slots[0].start(&self.prepared).await.unwrap();
        assert_eq!(self.slots[0].wait().await.unwrap().code, Some(0));
        drop(streams);
        self.slots[0].release().await;
    }
}

#[track_caller]
fn assert_tried_again(why: &RestoreError) {
    let class = why.class();
    assert_eq!(class, FailureClass::RestoreFailed, "{why}");
    // What a machine says is its tenant's: it speaks against no worker.
    assert!(class.is_infra() && class.retry_by_default() && why.is_blameless(), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_does_not_confirm_is_killed_and_another_one_serves() {
    let Some(mut tier) = Tier::start().await else { return };
    tier.again().await;
    let before = tier.held();
    assert_eq!(before.0, Vec::<u32>::new());
    // The first that gives this proof may be right.
    tier.lie(&[Lie::Proof, Lie::Proof]);
    tier.restored().await.unwrap();
    tier.slots[0].release().await;
    let why = tier.restored().await.unwrap_err();
    assert!(matches!(why, RestoreError::NotUnique), "{why}");
    assert_tried_again(&why);
    assert_eq!(tier.held(), before, "it was killed");
    tier.again().await;
    for (lie, said) in [
        (Lie::Clock, "restoring a machine: the machine's agent refused: setting the clock: no; the machine was killed"),
        (Lie::NoReseed, "answered to a session that begins with a reseed with something else; the machine was killed"),
    ] {
        tier.lie(&[lie]);
        let why = tier.restored().await.unwrap_err();
        assert!(why.to_string().contains(said), "{lie:?}: {why}");
        assert_tried_again(&why);
        assert_eq!(tier.held(), before, "{lie:?}: it was killed");
        tier.again().await;
    }
    assert_eq!(tier.held(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_sibling_said_confirms_nothing() {
    let Some(mut tier) = Tier::start().await else { return };
    let before = tier.held();
    tier.lie(&[Lie::Nonce, Lie::Sibling]);
    let begun = Instant::now();
    let [first, second] = &mut tier.slots;
    let mut none = (Mounts::none(), Mounts::none());
    let both = tokio::join!(first.restore(&tier.prepared, &mut none.0), second.restore(&tier.prepared, &mut none.1));
    eprintln!("given up after {:?}", begun.elapsed());
    for why in [both.0.unwrap_err(), both.1.unwrap_err()] {
        assert!(matches!(&why, RestoreError::Guest(GuestError::Silent { what: "the beginning of a session", .. })), "{why}");
        assert_tried_again(&why);
    }
    assert!(begun.elapsed() < Duration::from_secs(60));
    assert_eq!(tier.held(), before, "both were killed");
    tier.again().await;
    assert_eq!(tier.held(), before);
}
