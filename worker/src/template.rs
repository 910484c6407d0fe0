//! Templates: a machine booted once, warmed up, saved; and whoever asks for one gets it from memory.
//!
//! Owns what a template is and its name ([`Recipe`]), one build of each at a time on a host, and keeping them in memory within a budget.
//! How one is built is in `template/build`, what is kept in `template/shelf` (pure), how the workers of a cluster share them in
//! `template/share`. Does not own images or VMMs, nor who may use which template: whoever asks has looked that its tenant may use the image.
//!
//! A template is three files: the root disk (from the image), [`Template::memory`] and [`Template::state`]. Those two are shared; the root
//! disk is not, since each worker makes it from the image, and its hash is part of the recipe.

mod build;
pub mod chunks;
pub mod claim;
pub mod depot;
pub mod index;
pub mod keys;
pub mod lease;
pub mod manifest;
mod recipe;
pub mod share;
mod shelf;
pub mod step;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::sync::watch;
use volley_jobspecs::subjects::TEMPLATES_KEPT_MS;
use volley_jobspecs::wire::work::TemplateStage;

use crate::vmm::Snapshot;
use crate::vmm::files::Frozen;
use share::{Obtained, Sharing};
use shelf::Shelf;
use step::{Phase, Steps, Teller};

pub use build::{BuildError, Builder, last_lines};
pub use recipe::{Owner, Recipe, TemplateName, WarmUp};
pub use shelf::NoRoom;

/// How long a build stands for all who ask that failed by what it was made of. Tasks of one job ask at once, and again and again, and each
/// build takes a machine's whole boot, or all the time that a build may take. As long on other workers (`template/lease`).
const FAILURE_KEPT: Duration = Duration::from_millis(TEMPLATES_KEPT_MS);
/// How long one stands that failed by this host alone, or for want of an answer: it may be well again soon.
const TROUBLE_KEPT: Duration = Duration::from_secs(15);

/// A template in memory.
#[derive(Debug)]
pub struct Template {
    /// Its name.
    pub name: TemplateName,
    /// What it was made of.
    pub recipe: Recipe,
    /// What machines are restored from.
    pub snapshot: Snapshot,
    /// Processes of the warm-up that live on in it.
    pub kept_processes: u32,
}

impl Template {
    /// Its machine's memory.
    #[must_use]
    pub fn memory(&self) -> &Frozen {
        &self.snapshot.memory
    }

    /// The state of its machine's devices.
    #[must_use]
    pub fn state(&self) -> &Frozen {
        &self.snapshot.state
    }

    /// The host's memory that it takes, however many machines are restored from it.
    fn bytes(&self) -> u64 {
        [self.memory(), self.state()].into_iter().map(|file| file.allocated_bytes().unwrap_or(0)).sum()
    }
}

type Building = Shared<BoxFuture<'static, Result<Arc<Template>, Arc<BuildError>>>>;

#[derive(Debug)]
enum Place {
    Building(Building),
    Ready(Arc<Template>),
    Failed(Arc<BuildError>, Instant),
}

#[derive(Debug)]
struct State {
    shelf: Shelf,
    places: BTreeMap<TemplateName, Place>,
}

/// The templates of a host.
#[derive(Debug, Clone)]
pub struct Templates {
    state: Arc<Mutex<State>>,
    sharing: Option<Sharing>,
    steps: Option<Steps>,
    stages: Arc<Stages>,
}

/// What is being done for which template.
type Stages = watch::Sender<BTreeMap<TemplateName, TemplateStage>>;

impl Templates {
    /// None yet; they may take so much of the host's memory.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        let state = State { shelf: Shelf::new(bytes_max), places: BTreeMap::new() };
        Self { state: Arc::new(Mutex::new(state)), sharing: None, steps: None, stages: Arc::default() }
    }

    /// What is being done for which template, as it changes.
    #[must_use]
    pub fn stages(&self) -> watch::Receiver<BTreeMap<TemplateName, TemplateStage>> {
        self.stages.subscribe()
    }

    /// Whoever is told of steps, and the stages that follow from them.
    fn told(&self) -> Steps {
        let (steps, stages) = (self.steps.clone(), self.stages.clone());
        Steps::new(move |step| {
            let stage = step.phase.stage();
            stages.send_if_modified(|all| match stage {
                Some(stage) => all.insert(step.template, stage) != Some(stage),
                None => all.remove(&step.template).is_some(),
            });
            if let Some(steps) = &steps {
                steps.tell(step);
            }
        })
    }

    /// The same, shared with the cluster's other workers, where it is said how; and with somebody who is told of steps, if there is one.
    #[must_use]
    pub fn with(mut self, sharing: Option<Sharing>, steps: Option<Steps>) -> Self {
        (self.sharing, self.steps) = (sharing, steps);
        self
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A change that a panic cut short leaves a template out, which is then built again.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The template of a recipe, which is fetched or built if it is not there. Whoever else asks meanwhile waits for the same one, and gets
    /// the same error. A build goes on when nobody waits any more.
    ///
    /// # Errors
    /// [`BuildError`].
    pub async fn get(&self, recipe: &Recipe, build: impl FnOnce() -> Builder) -> Result<Arc<Template>, Arc<BuildError>> {
        let building = {
            let mut state = self.lock();
            let state = &mut *state;
            let name = recipe.name();
            match state.places.get(&name) {
                Some(Place::Ready(template)) => {
                    state.shelf.touch(&name);
                    return Ok(template.clone());
                }
                Some(Place::Failed(why, at)) if at.elapsed() < kept(why) => return Err(Arc::new(remembered(why, at.elapsed()))),
                Some(Place::Building(building)) => building.clone(),
                Some(Place::Failed(..)) | None => {
                    // What is fetched takes less than what is built, and which of them it is turns out later.
                    if self.sharing.is_none() {
                        make_room(state, &name, recipe.size.memory_bytes).map_err(|why| Arc::new(why.into()))?;
                    }
                    let building = self.begin(name, recipe.clone(), build());
                    state.places.insert(name, Place::Building(building.clone()));
                    building
                }
            }
        };
        building.await
    }

    /// Lets go of all that nobody uses. How many.
    pub fn clear(&self) -> usize {
        let mut state = self.lock();
        let State { shelf, places } = &mut *state;
        let idle = shelf.idle(|name| in_use(places, name));
        for name in &idle {
            shelf.remove(name);
            places.remove(name);
        }
        idle.len()
    }

    /// Bytes of all of them, as far as they are known.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lock().shelf.bytes()
    }

    fn begin(&self, name: TemplateName, recipe: Recipe, builder: Builder) -> Building {
        let this = self.clone();
        // A task of its own: it must not end with whoever asked first.
        let built = tokio::spawn(async move {
            let teller = Teller::new(Some(this.told()), name);
            let begun = Instant::now();
            let obtained = match &this.sharing {
                Some(sharing) => {
                    let room = |bytes| make_room(&mut this.lock(), &name, bytes);
                    sharing.obtain(&recipe, &builder, &teller, &room).await
                }
                None => share::alone(&recipe, &builder, &teller).await,
            };
            match obtained {
                Ok(obtained) => Ok(this.put(name, recipe, obtained, begun, teller)),
                Err(why) => {
                    tracing::error!(template = %name, "{}", crate::chain(&why));
                    teller.tell(Phase::Failed(crate::chain(&why)));
                    let why = Arc::new(why);
                    let mut state = this.lock();
                    state.shelf.remove(&name);
                    match *why {
                        // There is room again as soon as a machine ends.
                        BuildError::NoRoom(_) | BuildError::TooLarge { .. } => state.places.remove(&name),
                        _ => state.places.insert(name, Place::Failed(why.clone(), Instant::now())),
                    };
                    Err(why)
                }
            }
        });
        let this = self.clone();
        async move {
            let panicked = match built.await {
                Ok(built) => return built,
                Err(panicked) => Arc::new(BuildError::Ended(panicked.to_string())),
            };
            let mut state = this.lock();
            state.shelf.remove(&name);
            state.places.insert(name, Place::Failed(panicked.clone(), Instant::now()));
            Err(panicked)
        }
        .boxed()
        .shared()
    }

    /// Keeps a template that is there now, and sends it to the others if it was built here.
    fn put(&self, name: TemplateName, recipe: Recipe, obtained: Obtained, begun: Instant, teller: Teller) -> Arc<Template> {
        let Obtained { snapshot, kept_processes, publish } = obtained;
        let template = Arc::new(Template { name, recipe, snapshot, kept_processes });
        let bytes = template.bytes();
        let mut state = self.lock();
        state.shelf.settle(&name, bytes);
        state.places.insert(name, Place::Ready(template.clone()));
        drop(state);
        tracing::info!(template = %name, bytes, ms = begun.elapsed().as_millis(), "the template is ready");
        match (&self.sharing, publish) {
            (Some(sharing), Some(publish)) => {
                // Nobody waits for it here; as long as it lasts, the template is in use and does not go.
                let (sharing, template) = (sharing.clone(), template.clone());
                tokio::spawn(async move { sharing.publish(&template, publish, &teller).await });
            }
            _ => teller.tell(Phase::Ready),
        }
        template
    }
}

/// How long a failure stands.
fn kept(why: &BuildError) -> Duration {
    if why.is_recipes() { FAILURE_KEPT } else { TROUBLE_KEPT }
}

/// What who asks later is told of a failure.
fn remembered(why: &BuildError, ago: Duration) -> BuildError {
    let for_s = kept(why).saturating_sub(ago).as_secs().max(1);
    BuildError::Remembered { ago_s: ago.as_secs(), for_s, reason: why.brief(), warm_up: why.is_warm_up() }
}

/// Is a template held by a machine, a pool, or a build?
fn in_use(places: &BTreeMap<TemplateName, Place>, name: &TemplateName) -> bool {
    match places.get(name) {
        Some(Place::Ready(template)) => Arc::strong_count(template) > 1,
        Some(Place::Building(_)) => true,
        Some(Place::Failed(..)) | None => false,
    }
}

/// Sets bytes aside for a template; what was used longest ago, and is not used now, makes room.
fn make_room(state: &mut State, name: &TemplateName, bytes: u64) -> Result<(), NoRoom> {
    let State { shelf, places } = state;
    // Failures that nobody asks for any more.
    places.retain(|_, place| !matches!(place, Place::Failed(why, at) if at.elapsed() >= kept(why)));
    for (name, place) in &*places {
        if let Place::Ready(template) = place {
            shelf.grown(name, template.bytes());
        }
    }
    for gone in shelf.admit(*name, bytes, |name| in_use(places, name))? {
        places.remove(&gone);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use proptest::strategy::{Strategy, ValueTree};
    use proptest::test_runner::TestRunner;

    use super::*;
    use crate::vmm::{Boot, Capabilities, Kind, Vm, Vmm, VmmError};

    /// A VMM that starts nothing: it fails after a moment, or never answers.
    #[derive(Debug)]
    struct Broken {
        capabilities: Capabilities,
        boots: AtomicU32,
        hangs: bool,
    }

    impl Vmm for Broken {
        fn capabilities(&self) -> &Capabilities {
            &self.capabilities
        }

        fn boot(&self, _boot: Boot) -> BoxFuture<'_, Result<Box<dyn Vm>, VmmError>> {
            self.boots.fetch_add(1, Ordering::SeqCst);
            let hangs = self.hangs;
            async move {
                tokio::time::sleep(Duration::from_millis(if hangs { 60_000 } else { 50 })).await;
                Err(VmmError::Unusable { vmm: Kind::Qemu, why: "it is broken".to_owned() })
            }
            .boxed()
        }

        fn restore<'a>(&'a self, _: &'a Snapshot, _: &'a [String]) -> BoxFuture<'a, Result<Box<dyn Vm>, VmmError>> {
            async { Err(VmmError::Slot("never".to_owned())) }.boxed()
        }
    }

    fn broken(recipe: &Recipe, hangs: bool) -> Arc<Broken> {
        let capabilities = Capabilities {
            identity: recipe.vmm.clone(),
            emulated: true,
            why_emulated: None,
            connects_paused: true,
            sets_clock: false,
            serials: true,
            standing_bytes: 0,
            beside_bytes: 0,
            missing: Vec::new(),
        };
        Arc::new(Broken { capabilities, boots: AtomicU32::new(0), hangs })
    }

    /// The same, with a kernel and a RAM disk that are empty files.
    fn of_nothing(recipe: Recipe) -> Recipe {
        let empty = *blake3::hash(b"").as_bytes();
        Recipe { kernel: empty, initrd: empty, ..recipe }
    }

    async fn ask_at_once(templates: &Templates, recipe: &Recipe, vmm: &Arc<Broken>) -> Vec<Arc<BuildError>> {
        let null = || std::path::PathBuf::from("/dev/null");
        let builder = || Builder {
            vmm: vmm.clone(),
            kernel: null(),
            initrd: null(),
            root: null(),
            cgroups: Vec::new(),
            env: Vec::new(),
            time_max: Duration::from_millis(200),
        };
        let all = futures::future::join_all((0..5).map(|_| templates.get(recipe, builder))).await;
        all.into_iter().map(|built| built.map(|_| ()).unwrap_err()).collect()
    }

    #[tokio::test]
    async fn a_build_that_fails_or_hangs_is_one_error_for_all_who_ask() {
        let recipe = of_nothing(recipe::tests::recipe().new_tree(&mut TestRunner::deterministic()).unwrap().current());
        for hangs in [false, true] {
            let (templates, vmm) = (Templates::new(1 << 40), broken(&recipe, hangs));
            let all = ask_at_once(&templates, &recipe, &vmm).await;
            assert!(all.iter().all(|why| Arc::ptr_eq(why, &all[0])), "one error");
            let text = all[0].to_string();
            assert!(text.contains(if hangs { "did not end within" } else { "it is broken" }), "{text}");
            // Who asks soon after is told the same, and nothing is built for it.
            let again = ask_at_once(&templates, &recipe, &vmm).await;
            let known = |why: &Arc<BuildError>| matches!(&**why, BuildError::Remembered { reason, .. } if *reason == all[0].brief());
            assert!(again.iter().all(known), "{}", again[0]);
            assert_eq!((vmm.boots.load(Ordering::SeqCst), templates.bytes()), (1, 0));
        }
        // One larger than all the room there is.
        let all = ask_at_once(&Templates::new(1), &recipe, &broken(&recipe, false)).await;
        assert!(matches!(*all[0], BuildError::TooLarge { bytes_max: 1, .. }), "{}", all[0]);
    }

    #[tokio::test]
    async fn a_build_outlives_who_asked_for_it() {
        let recipe = of_nothing(recipe::tests::recipe().new_tree(&mut TestRunner::deterministic()).unwrap().current());
        let (templates, vmm) = (Templates::new(1 << 40), broken(&recipe, false));
        let asked = tokio::time::timeout(Duration::from_millis(5), ask_at_once(&templates, &recipe, &vmm)).await;
        assert!(asked.is_err());
        let all = ask_at_once(&templates, &recipe, &vmm).await;
        assert!(all[0].to_string().contains("it is broken"));
        assert_eq!(vmm.boots.load(Ordering::SeqCst), 1);
    }
}
