//! Sharing: a template that a worker of the cluster has built is fetched by the others, and built once however many want it.
//!
//! Owns the order: look, fetch and prove; else claim, look once more, build, publish; and what follows from each trouble. What lies in the
//! bucket is `depot`'s, who may build is decided by `lease` and asked for by `claim`.
//!
//! | what is found | what is done |
//! |---|---|
//! | a template that verifies and answers | machines are restored from it |
//! | nothing | claimed, built, published; who comes second waits |
//! | a manifest that was changed, a chunk that is missing or damaged after a second read | claimed, built, and the manifest replaced |
//! | a manifest of another version, or under a key that is not here | built for this host alone; it is good for others |
//! | one that does not answer when it is restored here | the same: the others' hosts may be unlike this one |
//! | a bucket that does not answer | an error, which is the cluster's: the task is tried again later |
//! | a bucket of leases that does not answer | built without a lease; two builds at once are a waste and no harm |

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use async_nats::Client;
use volley_store::Store;

use super::build::{BuildError, Builder};
use super::claim::{Claimed, Ending, Lease, Leases};
use super::depot::{Depot, DepotError, Look, Published, Source, Stored};
use super::keys::{Keys, KeysError};
use super::manifest::Built;
use super::recipe::Recipe;
use super::step::{Phase, Teller};
use super::{NoRoom, Template};
use crate::config::ShareConfig;
use crate::vmm::Snapshot;

/// How often it is looked, fetched and claimed before a template is built without any of it: each round is a change that somebody else made.
const ROUNDS_MAX: usize = 8;
/// How long a build on another worker may take beyond the time a build has: for its upload.
const UPLOAD_WAIT: Duration = Duration::from_secs(300);
/// How long a template that was fetched may take to answer.
const PROOF_TIME: Duration = Duration::from_secs(60);

/// The sharing of templates, as one worker takes part in it.
#[derive(Debug, Clone)]
pub struct Sharing {
    depot: Depot,
    leases: Leases,
    build: String,
}

/// A template that is there, and what is left to do for it.
#[derive(Debug)]
pub(super) struct Obtained {
    /// It.
    pub snapshot: Snapshot,
    /// Processes of the warm-up that live on in it.
    pub kept_processes: u32,
    /// It was built here, and is to be published.
    pub publish: Option<Publish>,
}

/// A publication that is due. Dropped, its lease is given back.
#[derive(Debug)]
pub(super) struct Publish {
    lease: Option<Lease>,
    over: Option<String>,
    built: Built,
}

impl Sharing {
    /// Reads the key file and takes part.
    ///
    /// # Errors
    /// [`KeysError`].
    pub fn open(config: &ShareConfig, worker: &str, build: &str, store: &Store, client: Client) -> Result<Self, KeysError> {
        let depot = Depot::new(store, Keys::read(&config.key_file)?, &config.prefix);
        Ok(Self::new(depot, Leases::new(client, worker.to_owned()), build))
    }

    /// With parts that are open.
    #[must_use]
    pub fn new(depot: Depot, leases: Leases, build: &str) -> Self {
        Self { depot, leases, build: build.to_owned() }
    }

    /// Gets a template: fetched, or built. `room` sets so many bytes of this host's memory aside for it, instead of what was before.
    pub(super) async fn obtain(&self, recipe: &Recipe, builder: &Builder, teller: &Teller, room: Room<'_>) -> Result<Obtained, BuildError> {
        let make = Make { recipe, builder, teller, room };
        let (mut lease, mut broken): (Option<Lease>, Option<String>) = (None, None);
        let name = recipe.name();
        for _ in 0..ROUNDS_MAX {
            teller.tell(Phase::Looking);
            let over = match self.depot.look(recipe).await.map_err(away)? {
                Look::Missing => None,
                Look::Found(stored) if broken.as_ref() == Some(&stored.etag) => broken.clone(),
                Look::Found(stored) => match self.fetch(&make, &stored).await {
                    Ok(snapshot) => {
                        let kept_processes = stored.manifest.kept_processes;
                        return Ok(Obtained { snapshot, kept_processes, publish: None });
                    }
                    Err(NotFetched::Broken(why)) => {
                        tracing::warn!(template = %name, "the shared template is of no use and is built anew: {why}");
                        broken = Some(stored.etag);
                        broken.clone()
                    }
                    Err(NotFetched::Unlike(why)) => {
                        tracing::warn!(template = %name, "the shared template does not run here and is built for this host alone: {why}");
                        return make.build().await.map(|(obtained, _)| obtained);
                    }
                    Err(NotFetched::Away(why)) => return Err(why),
                },
                Look::Bad { etag, why } => {
                    tracing::warn!(template = %name, "the shared template's manifest is of no use, it is built anew: {why}");
                    Some(etag)
                }
                Look::Foreign(why) => {
                    tracing::warn!(template = %name, "the shared template can't be used here, it is built for this host alone: {why}");
                    return make.build().await.map(|(obtained, _)| obtained);
                }
            };
            if lease.is_some() {
                return self.build_and_publish(&make, lease, over).await;
            }
            let waiting = |by: &str| teller.tell(Phase::Waiting { by: by.to_owned() });
            match self.leases.claim(&name, builder.time_max + UPLOAD_WAIT, waiting).await {
                // Once more: whoever had it before may have published.
                Claimed::Held(held) => lease = Some(held),
                Claimed::LookAgain => {}
                Claimed::GiveUp { by, reason, for_ms, warm_up } => {
                    return Err(BuildError::Elsewhere { by, reason, for_s: for_ms.div_ceil(1_000), warm_up });
                }
                Claimed::Alone(why) => {
                    tracing::warn!(template = %name, "built without a lease: {why}");
                    return self.build_and_publish(&make, None, over).await;
                }
            }
        }
        tracing::warn!(template = %name, "looked for {ROUNDS_MAX} times, and always changed by others: built for this host alone");
        make.build().await.map(|(obtained, _)| obtained)
    }

    async fn fetch(&self, make: &Make<'_>, stored: &Stored) -> Result<Snapshot, NotFetched> {
        let Make { recipe, builder, teller, room } = make;
        room(stored.manifest.data_bytes()).map_err(|why| NotFetched::Away(BuildError::of_shared(why)))?;
        let begun = Instant::now();
        let progress = teller.progress(Phase::Fetching, stored.manifest.data_bytes());
        let fetched = self.depot.fetch(&recipe.owner, stored, &|bytes| progress.add(bytes)).await;
        let (memory, state) = fetched.map_err(|why| match why {
            DepotError::Broken(why) => NotFetched::Broken(why),
            other => NotFetched::Away(away(other)),
        })?;
        let root = builder.open_root().map_err(NotFetched::Away)?;
        let snapshot =
            Snapshot { made_by: recipe.vmm.clone(), size: recipe.size, memory: Arc::new(memory), state: Arc::new(state), root: Some(root) };
        let took = begun.elapsed();
        teller.tell(Phase::Proving);
        builder.prove(&snapshot, PROOF_TIME).await.map_err(|why| NotFetched::Unlike(crate::chain(&why)))?;
        let bytes = stored.manifest.data_bytes();
        tracing::info!(template = %recipe.name(), bytes, ms = took.as_millis(), built_by = stored.manifest.built.by, "template fetched");
        Ok(snapshot)
    }

    async fn build_and_publish(&self, make: &Make<'_>, lease: Option<Lease>, over: Option<String>) -> Result<Obtained, BuildError> {
        match make.build().await {
            Ok((mut obtained, took)) => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let built = Built { by: self.leases.by().to_owned(), at_ms: ms(since), took_ms: ms(took), build: self.build.clone() };
                obtained.publish = Some(Publish { lease, over, built });
                Ok(obtained)
            }
            Err(why) => {
                if let Some(lease) = lease {
                    // What is this host's trouble alone is for another one to try.
                    let ending = match why.is_recipes() {
                        true => Ending::Failed { reason: crate::chain(&why), warm_up: why.is_warm_up() },
                        false => Ending::Released,
                    };
                    lease.end(ending).await;
                }
                Err(why)
            }
        }
    }

    /// Publishes a template that was built here. A failure costs the others a build of their own.
    pub(super) async fn publish(&self, template: &Template, publish: Publish, teller: &Teller) {
        let Publish { lease, over, built } = publish;
        let begun = Instant::now();
        let progress = teller.progress(Phase::Uploading, template.bytes());
        let source = Source {
            recipe: &template.recipe,
            memory: &template.snapshot.memory,
            state: &template.snapshot.state,
            kept_processes: template.kept_processes,
            built,
        };
        let published = self.depot.publish(&source, over.as_deref(), &|bytes| progress.add(bytes)).await;
        match published {
            Ok(Published { stands, chunks, new_chunks, data_bytes, stored_bytes, sent_bytes }) => tracing::info!(
                template = %template.name, stands, chunks, new_chunks, data_bytes, stored_bytes, sent_bytes, ms = begun.elapsed().as_millis(),
                "template published"
            ),
            Err(why) => tracing::warn!(template = %template.name, "the template is not shared: {}", crate::chain(&why)),
        }
        teller.tell(Phase::Ready);
        if let Some(lease) = lease {
            lease.end(Ending::Released).await;
        }
    }
}

/// Why a template that is there is not fetched.
enum NotFetched {
    /// It is damaged.
    Broken(String),
    /// It does not answer here.
    Unlike(String),
    /// It can't be read now, or not into this host's memory.
    Away(BuildError),
}

/// Sets bytes of this host's memory aside.
pub(super) type Room<'a> = &'a (dyn Fn(u64) -> Result<(), NoRoom> + Send + Sync);

/// One template that is made.
struct Make<'a> {
    recipe: &'a Recipe,
    builder: &'a Builder,
    teller: &'a Teller,
    room: Room<'a>,
}

impl Make<'_> {
    /// Builds it. How long that took.
    async fn build(&self) -> Result<(Obtained, Duration), BuildError> {
        (self.room)(self.recipe.size.memory_bytes).map_err(BuildError::of_shared)?;
        self.teller.tell(Phase::Building);
        let begun = Instant::now();
        let (snapshot, kept_processes) = self.builder.build(self.recipe).await?;
        Ok((Obtained { snapshot, kept_processes, publish: None }, begun.elapsed()))
    }
}

/// Gets a template where none are shared. Its room is set aside.
pub(super) async fn alone(recipe: &Recipe, builder: &Builder, teller: &Teller) -> Result<Obtained, BuildError> {
    Make { recipe, builder, teller, room: &|_bytes| Ok(()) }.build().await.map(|(obtained, _)| obtained)
}

fn away(why: DepotError) -> BuildError {
    BuildError::Away(Box::new(why))
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
