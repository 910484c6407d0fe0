//! Workers that share templates, with real machines.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::TenantId;
use volley_jobspecs::spec::{ByteSize, Resources, WarmUpSpec};
use volley_jobspecs::wire::guest::Exec;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_worker::MachineConfig;
use volley_worker::guest::Guest;
use volley_worker::image::ImageNote;
use volley_worker::machines::{Machines, TemplateError, Wanted};
use volley_worker::restore::RestoreError;
use volley_worker::template::claim::Leases;
use volley_worker::template::depot::{Depot, Look};
use volley_worker::template::share::Sharing;
use volley_worker::template::step::{Phase, Step, Steps};
use volley_worker::template::{BuildError, Template, WarmUp};
use volley_worker::vmm::Vmm;

use crate::bucket::{self, Bucket};
use crate::image;
use crate::nats::Nats;

pub fn tenant() -> TenantId {
    TenantId::new("acme").unwrap()
}

pub fn small() -> Resources {
    Resources { memory: Some(ByteSize(32 << 20)), ..Resources::default() }
}

/// A worker's part of all this.
pub struct Worker {
    pub machines: Machines,
    pub steps: Arc<Mutex<Vec<Step>>>,
}

impl Worker {
    /// One with an empty cache, in a directory of its own, with the same image as the others.
    pub async fn start(dir: &Path, name: &str, images: &Path, depot: Depot, nats: &str) -> Self {
        Self::start_with(dir, name, images, depot, nats, |_| {}).await
    }

    pub async fn start_with(
        dir: &Path,
        name: &str,
        images: &Path,
        depot: Depot,
        nats: &str,
        change: impl FnOnce(&mut MachineConfig),
    ) -> Self {
        let dir = dir.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let mut config = MachineConfig::new(&dir);
        assert!(Command::new("cp").arg("-a").arg(images).arg(&config.images).status().unwrap().success());
        config.standby_bytes_max = 0;
        let client = async_nats::ConnectOptions::new().retry_on_initial_connect().connect(nats).await.unwrap();
        config.sharing = Some(Sharing::new(depot, Leases::new(client, name.to_owned()), "test"));
        let steps: Arc<Mutex<Vec<Step>>> = Arc::default();
        let told = steps.clone();
        config.steps = Some(Steps::new(move |step| told.lock().unwrap().push(step)));
        change(&mut config);
        Self { machines: Machines::open(&config, &dir.join("machines"), 2, None).await.unwrap(), steps }
    }

    pub async fn template(&self, image: &str) -> Result<Arc<Template>, TemplateError> {
        self.machines.template(&Wanted::plain(&tenant(), Some(image), &small())).await.map(|found| found.template)
    }

    /// The same with a warm-up.
    pub async fn warmed(&self, image: &str, script: &str, keep_processes: bool) -> Result<Arc<Template>, TemplateError> {
        let command = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let warm_up = [WarmUpSpec { command, env: [("PATH".to_owned(), "/bin".to_owned())].into() }];
        let (tenant, resources) = (tenant(), small());
        let wanted = Wanted { warm_up: &warm_up, keep_processes, ..Wanted::plain(&tenant, Some(image), &resources) };
        self.machines.template(&wanted).await.map(|found| found.template)
    }

    /// Its phases, each once, in order; without what they moved.
    pub fn phases(&self) -> Vec<Phase> {
        let mut phases: Vec<Phase> = self.steps.lock().unwrap().iter().map(|step| step.phase.clone()).collect();
        phases.dedup();
        phases
    }

    pub fn built(&self) -> bool {
        self.phases().contains(&Phase::Building)
    }

    /// Waits until its template is in the bucket.
    pub async fn published(&self) {
        let begin = Instant::now();
        while self.phases().last() != Some(&Phase::Ready) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", self.phases());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What a command of a machine that is restored from a template says.
    pub async fn says(&self, template: &Template, script: &str) -> String {
        says(&*self.machines.vmm, template, script).await
    }
}

pub async fn says(vmm: &dyn Vmm, template: &Template, script: &str) -> String {
    let mut vm = vmm.restore(&template.snapshot, &[]).await.unwrap();
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

pub fn shell(script: &str) -> WarmUp {
    WarmUp { argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(), env: vec![("PATH".to_owned(), "/bin".to_owned())] }
}

/// An image below a directory, and its name; or none, and what is missing is said.
pub async fn an_image(dir: &Path) -> Option<(std::path::PathBuf, ImageNote, String)> {
    let images = dir.join("images");
    let note = image::noted(&images).await.map_err(|why| eprintln!("skipped: {why}")).ok()?;
    let name = format!("sha256:{}", note.digest.hex());
    Some((images, note, name))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_is_built_by_one_worker_and_run_by_all() {
    let (Some(nats), dir) = (Nats::start(), tempfile::tempdir().unwrap()) else { return };
    let Some((images, _, image)) = an_image(dir.path()).await else { return };
    let bucket = Bucket::start(&dir.path().join("s3")).await;
    let start = async |name: &str| Worker::start(dir.path(), name, &images, bucket.depot().await, &nats.address()).await;
    // Two ask at once.
    let (one, two) = (start("w1").await, start("w2").await);
    let (first, second) = futures::join!(one.template(&image), two.template(&image));
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first.name, second.name);
    assert!(one.built() != two.built(), "one build: {:?} {:?}", one.phases(), two.phases());
    let (builder, waiter, by) = if one.built() { (&one, &two, "w1") } else { (&two, &one, "w2") };
    builder.published().await;
    let waited = [Phase::Looking, Phase::Waiting { by: by.to_owned() }, Phase::Looking, Phase::Fetching, Phase::Proving, Phase::Ready];
    assert_eq!(waiter.phases(), waited);
    let sent = builder.steps.lock().unwrap().iter().filter(|step| step.phase == Phase::Uploading).map(|step| step.done_bytes).max();
    assert!(sent > Some(40 << 20), "{sent:?}");
    // A third comes later, with an empty cache, and boots nothing.
    let begin = Instant::now();
    let three = start("w3").await;
    let opened = begin.elapsed();
    let third = three.template(&image).await.unwrap();
    eprintln!("opened after {opened:?}, fetched and proven after {:?}", begin.elapsed() - opened);
    assert_eq!(three.phases(), [Phase::Looking, Phase::Fetching, Phase::Proving, Phase::Ready]);
    for (worker, template) in [(&one, &first), (&two, &second), (&three, &third)] {
        assert_eq!(worker.says(template, "cat /etc/release; echo $((6 * 7))").await, "the image\n42\n");
    }
    // What was fetched takes no more memory than what was built.
    let built = if one.built() { &first } else { &second };
    let (built, fetched) = (built.memory().allocated_bytes().unwrap(), third.memory().allocated_bytes().unwrap());
    eprintln!("memory of the built one {} KiB, of the fetched one {} KiB", built >> 10, fetched >> 10);
    assert!(fetched <= built, "{fetched} {built}");

    // One that has no room for a machine's whole memory, and enough for what is written of it.
    let little = |config: &mut MachineConfig| config.templates_bytes_max = 120 << 20;
    let seven = Worker::start_with(dir.path(), "w7", &images, bucket.depot().await, &nats.address(), little).await;
    drop(seven.template(&image).await.unwrap());
    let other = TenantId::new("other").unwrap();
    let why = seven.machines.template(&Wanted::plain(&other, Some(&image), &small())).await.unwrap_err();
    assert!(matches!(&why, TemplateError::Build(why) if matches!(**why, BuildError::TooLarge { shared: true, .. })), "{why}");
    for worker in [one, two, three, seven] {
        worker.machines.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_damaged_is_built_anew_and_replaced() {
    let (Some(nats), dir) = (Nats::start(), tempfile::tempdir().unwrap()) else { return };
    let Some((images, _, image)) = an_image(dir.path()).await else { return };
    let bucket = Bucket::start(&dir.path().join("s3")).await;
    let start = async |name: &str| Worker::start(dir.path(), name, &images, bucket.depot().await, &nats.address()).await;
    let one = start("w1").await;
    let first = one.template(&image).await.unwrap();
    one.published().await;
    // A chunk is damaged for good: the next one builds anew, and whoever comes then fetches that.
    let depot = bucket.depot().await;
    let Look::Found(stored) = depot.look(&first.recipe).await.unwrap() else { panic!() };
    let key = format!("templates/tenants/acme/chunks/{}", stored.manifest.memory.chunks[3].name());
    bucket.store.put(&key, vec![1; 5_000].into()).await.unwrap();
    let four = start("w4").await;
    four.template(&image).await.unwrap();
    four.published().await;
    assert_eq!(four.phases(), [Phase::Looking, Phase::Fetching, Phase::Looking, Phase::Building, Phase::Uploading, Phase::Ready]);
    let Look::Found(replaced) = depot.look(&first.recipe).await.unwrap() else { panic!() };
    assert_ne!(replaced.etag, stored.etag);
    assert_eq!(replaced.manifest.built.by, "w4");
    // A manifest that was changed.
    let key = format!("templates/tenants/acme/manifests/{}", first.name);
    let mut bytes = bucket.store.get(&key, 1 << 20).await.unwrap().to_vec();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    bucket.store.put(&key, bytes.into()).await.unwrap();
    let five = start("w5").await;
    five.template(&image).await.unwrap();
    five.published().await;
    assert_eq!(five.phases(), [Phase::Looking, Phase::Building, Phase::Uploading, Phase::Ready]);
    for worker in [one, four, five] {
        worker.machines.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_goes_away_is_an_infra_failure_and_is_tried_again() {
    let (Some(nats), dir) = (Nats::start(), tempfile::tempdir().unwrap()) else { return };
    let Some((images, _, image)) = an_image(dir.path()).await else { return };
    let bucket = Bucket::start(&dir.path().join("s3")).await;
    let start = async |name: &str| Worker::start(dir.path(), name, &images, bucket.depot().await, &nats.address()).await;
    let one = start("w1").await;
    one.template(&image).await.unwrap();
    one.published().await;
    // The bucket goes away while it is fetched, and comes back.
    let six = start("w6").await;
    bucket.proxy.away_after.store(100, Ordering::SeqCst);
    let why = six.template(&image).await.unwrap_err();
    assert!(matches!(&why, TemplateError::Build(why) if matches!(**why, BuildError::Away(_))), "{why}");
    assert_eq!(RestoreError::Template(why).class(), FailureClass::StorageFailed);
    assert!(!six.built());
    bucket.proxy.away.store(false, Ordering::SeqCst);
    // Until the failure is over for this host.
    let begin = Instant::now();
    let sixth = loop {
        match six.template(&image).await {
            Ok(template) => break template,
            Err(why) => assert!(begin.elapsed() < Duration::from_secs(25), "{why}"),
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    };
    assert!(!six.built());
    assert_eq!(six.says(&sixth, "echo back").await, "back\n");
    for worker in [one, six] {
        worker.machines.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_ups_processes_live_on_only_where_they_are_declared_and_its_failure_is_one_for_all() {
    let (Some(nats), dir) = (Nats::start(), tempfile::tempdir().unwrap()) else { return };
    let Some((images, _, image)) = an_image(dir.path()).await else { return };
    let bucket = Bucket::start(&dir.path().join("s3")).await;
    let depot = bucket.depot().await;
    let start = async |name: &str| {
        let change = |config: &mut MachineConfig| config.build_ms_max = 30_000;
        Worker::start_with(dir.path(), name, &images, bucket.depot().await, &nats.address(), change).await
    };
    let (one, two) = (start("w1").await, start("w2").await);
    // A warm-up that leaves work and a daemon.
    let daemon = "echo warm > /etc/warm; sleep 4242 < /dev/null > /dev/null 2>&1 &";
    for keep in [false, true] {
        let built = one.warmed(&image, daemon, keep).await.unwrap();
        // Another worker's: fetched, once it is there.
        let begin = Instant::now();
        while !matches!(depot.look(&built.recipe).await.unwrap(), Look::Found(_)) {
            assert!(begin.elapsed() < Duration::from_secs(60));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let fetched = two.warmed(&image, daemon, keep).await.unwrap();
        assert!(!two.built());
        for (worker, template) in [(&one, &built), (&two, &fetched)] {
            assert_eq!(template.kept_processes, u32::from(keep));
            let script = "cat /etc/warm; for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep '^sleep 4242'; done";
            assert_eq!(worker.says(template, script).await.trim_end(), if keep { "warm\nsleep 4242" } else { "warm" });
        }
        let shown = volley_worker::template::index::show(&depot, &built.recipe.owner, &built.name.to_string()).await.unwrap();
        assert_eq!((shown.recipe.keep_processes, shown.kept_processes), (keep, u32::from(keep)));
    }
    // One that fails, one that never ends: one build of two workers, one error, which is the job's own everywhere.
    let three = start("w3").await;
    for (script, says) in [("echo no use >&2; exit 5", "ended with exit code 5"), ("sleep 1000", "did not end within 30 s")] {
        let (first, second) = futures::join!(one.warmed(&image, script, false), two.warmed(&image, script, false));
        let late = three.warmed(&image, script, false).await.unwrap_err();
        let whys = [first.unwrap_err(), second.unwrap_err(), late];
        let elsewhere = |why: &&TemplateError| matches!(why, TemplateError::Build(why) if matches!(**why, BuildError::Elsewhere { .. }));
        assert_eq!(whys.iter().filter(elsewhere).count(), 2, "{whys:?}");
        for why in whys {
            assert!(why.to_string().contains("warmUp[0] (/bin/sh -c") && why.to_string().contains(says), "{why}");
            assert_eq!(RestoreError::Template(why).class(), FailureClass::InputMissing);
        }
    }
    for worker in [one, two, three] {
        worker.machines.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_does_not_run_here_is_built_for_this_host_alone() {
    let (Some(nats), dir) = (Nats::start(), tempfile::tempdir().unwrap()) else { return };
    let Some((images, _, image)) = an_image(dir.path()).await else { return };
    let bucket = Bucket::start(&dir.path().join("s3")).await;
    let one = Worker::start(dir.path(), "w1", &images, bucket.depot().await, &nats.address()).await;
    let recipe = one.template(&image).await.unwrap().recipe.clone();
    one.published().await;
    // A signed one whose state no machine can load.
    let depot = bucket.depot().await;
    let Look::Found(stored) = depot.look(&recipe).await.unwrap() else { panic!() };
    let memory = volley_worker::vmm::files::in_memory("memory").unwrap();
    memory.set_len(recipe.size.memory_bytes).unwrap();
    let state = volley_worker::vmm::files::in_memory("state").unwrap();
    std::os::unix::fs::FileExt::write_all_at(&state, &[9; 9_000], 0).unwrap();
    let freeze = |file| Arc::new(volley_worker::vmm::files::Frozen::seal(file).unwrap());
    let saved = (freeze(memory), freeze(state));
    assert!(depot.publish(&bucket::source(&recipe, &saved), Some(&stored.etag), &|_| {}).await.unwrap().stands);
    let two = Worker::start(dir.path(), "w2", &images, bucket.depot().await, &nats.address()).await;
    let template = two.template(&image).await.unwrap();
    assert_eq!(two.phases(), [Phase::Looking, Phase::Fetching, Phase::Proving, Phase::Building, Phase::Ready]);
    assert_eq!(two.says(&template, "echo ours").await, "ours\n");
    for worker in [one, two] {
        worker.machines.close().await;
    }
}
