//! Leases of builds in a bucket of NATS: carries out what `lease` wishes.
//!
//! Owns every call to the bucket, each with a time limit. Decides nothing. Coordinators make the bucket; where a worker may, it does so too.
//!
//! Workers get by with three rights: to publish below `$KV.VOLLEY_TEMPLATES.`, to subscribe there, and `STREAM.MSG.GET` of that stream. A
//! direct get or a consumer would be quicker, and would let a worker have the server send what it likes to any subject, the log's included:
//! the server does not check the reply subject of a request, nor a consumer's, against the rights of who asks (tried with 2.15).

use std::future::IntoFuture;
use std::time::Duration;

use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{LastRawMessageErrorKind, StorageType};
use async_nats::jetstream::{self, Context, ErrorCode, kv};
use async_nats::{Client, Subscriber};
use futures::StreamExt;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use volley_jobspecs::subjects::{TEMPLATES_BUCKET, TEMPLATES_KEPT_MS};
use volley_jobspecs::wire;

use super::TemplateName;
use super::lease::{self, Claim, Entry, Event, Held, RENEW_MS, Wish};

/// Longest wait for an answer: less than the time between two renewals.
const ANSWER_WAIT: Duration = Duration::from_millis(1_500);
/// How long a message that was heard may take to be kept: it lies in memory.
const SETTLED_AFTER: Duration = Duration::from_millis(20);
/// Between looks while nothing tells of changes.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// The leases of a cluster's builds, as one worker sees them.
#[derive(Debug, Clone)]
pub struct Leases {
    client: Client,
    context: Context,
    by: String,
}

/// How a claim ended.
#[derive(Debug)]
pub enum Claimed {
    /// It is held.
    Held(Lease),
    /// Somebody else's build ended: the template may be there.
    LookAgain,
    /// It failed on another worker a moment ago.
    GiveUp {
        /// On which.
        by: String,
        /// Why.
        reason: String,
        /// How long that stands at most.
        for_ms: u64,
        /// Was it the warm-up?
        warm_up: bool,
    },
    /// To be built without a lease, and why.
    Alone(&'static str),
}

/// How a held lease ends.
#[derive(Debug)]
pub enum Ending {
    /// The template is there, or somebody else may try.
    Released,
    /// Nobody is to try again for a while.
    Failed {
        /// Why.
        reason: String,
        /// Was it the warm-up?
        warm_up: bool,
    },
}

/// A lease that is held, and renewed until it is ended. Dropped, it is released.
#[derive(Debug)]
pub struct Lease {
    end: Option<oneshot::Sender<Ending>>,
    renewing: Option<JoinHandle<()>>,
}

impl Lease {
    /// Ends it; returns when that was written, or can't be.
    pub async fn end(mut self, ending: Ending) {
        if let Some(end) = self.end.take() {
            // Whoever renews ends by itself when the lease was lost.
            let _ = end.send(ending);
        }
        if let Some(renewing) = self.renewing.take() {
            let _ = renewing.await;
        }
    }
}

impl Leases {
    /// Over this client, for the worker of this name.
    #[must_use]
    pub fn new(client: Client, by: String) -> Self {
        let mut context = jetstream::new(client.clone());
        context.set_timeout(ANSWER_WAIT);
        Self { client, context, by }
    }

    /// The worker.
    #[must_use]
    pub fn by(&self) -> &str {
        &self.by
    }

    /// Claims a template's build, and waits while somebody else builds it, at most for `wait`. `waiting` is told who that is.
    pub async fn claim(&self, name: &TemplateName, wait: Duration, mut waiting: impl FnMut(&str)) -> Claimed {
        let (key, begun) = (name.to_string(), Instant::now());
        let now = || ms(begun.elapsed());
        let mut number = [0; 8];
        // Without randomness two claims of one worker can't be told apart, which costs a second build at worst.
        let _ = getrandom::fill(&mut number);
        let number = u64::from_le_bytes(number);
        let mut claim = Claim::new(self.by.clone(), number, ms(wait), 0);
        let (mut watch, mut event, mut sent, mut written) = (None, Event::Tick, begun, 0);
        loop {
            if let Event::Written(revision) = event {
                written = revision;
            }
            event = match claim.step(now(), event) {
                Wish::Wait(for_ms) => {
                    if let Some(by) = claim.holder() {
                        waiting(by);
                    }
                    self.changed(&mut watch, &key, Duration::from_millis(for_ms)).await;
                    self.look(&key).await
                }
                Wish::Look => self.look(&key).await,
                Wish::Create(entry) => {
                    sent = Instant::now();
                    self.write(&key, &entry, None).await
                }
                Wish::Replace(entry, over) => {
                    sent = Instant::now();
                    self.write(&key, &entry, Some(over)).await
                }
                Wish::Hold => {
                    let (end, ended) = oneshot::channel();
                    let held = Held::new(self.by.clone(), number, written, 0);
                    let renewing = tokio::spawn(self.clone().keep(key, held, sent, ended));
                    return Claimed::Held(Lease { end: Some(end), renewing: Some(renewing) });
                }
                Wish::LookForTemplate => return Claimed::LookAgain,
                Wish::GiveUp { by, reason, for_ms, warm_up } => return Claimed::GiveUp { by, reason, for_ms, warm_up },
                Wish::Alone(why) => return Claimed::Alone(why),
            };
        }
    }

    /// Renews a lease until it is lost or ended.
    async fn keep(self, key: String, mut held: Held, begun: Instant, mut ended: oneshot::Receiver<Ending>) {
        let ending = loop {
            tokio::select! {
                ending = &mut ended => break ending.unwrap_or(Ending::Released),
                () = tokio::time::sleep(Duration::from_millis(RENEW_MS)) => {}
            }
            let sent = ms(begun.elapsed());
            let (entry, over) = held.renew();
            let mut event = self.write(&key, &entry, Some(over)).await;
            if event == Event::Refused {
                event = self.look(&key).await;
            }
            if !held.renewed(sent, ms(begun.elapsed()), &event) {
                tracing::warn!(template = key, "the lease of its build is lost; another worker may build it too");
                return;
            }
        };
        let entry = match ending {
            Ending::Released => Entry::Ended { by: self.by.clone() },
            Ending::Failed { reason, warm_up } => lease::failed(&self.by, &reason, warm_up),
        };
        if !matches!(self.write(&key, &entry, Some(held.revision())).await, Event::Written(_)) {
            tracing::warn!(template = key, "the lease of its build could not be ended; it ends by itself");
        }
    }

    /// What stands under a key.
    async fn look(&self, key: &str) -> Event {
        let stream = match self.context.get_stream_no_info(format!("KV_{TEMPLATES_BUCKET}")).await {
            Ok(stream) => stream,
            Err(why) => return away(&why.to_string()),
        };
        let subject = subject(key);
        match tokio::time::timeout(ANSWER_WAIT, stream.get_last_raw_message_by_subject(&subject)).await {
            Ok(Ok(message)) => match wire::decode("lease", &message.payload) {
                Ok(entry) => Event::Seen(Some((entry, message.sequence))),
                // Of a newer build: somebody's, and it changes or ends like any other.
                Err(_) => {
                    let unknown = Entry::Building { by: "a worker of another build of Volley".to_owned(), claim: 0, count: 0 };
                    Event::Seen(Some((unknown, message.sequence)))
                }
            },
            Ok(Err(why)) => match why.kind() {
                LastRawMessageErrorKind::NoMessageFound => Event::Seen(None),
                LastRawMessageErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => {
                    self.make().await;
                    away("there is no bucket")
                }
                _ => away(&why.to_string()),
            },
            Err(_) => away("no answer in time"),
        }
    }

    /// Writes an entry over a revision, or where nothing stands.
    async fn write(&self, key: &str, entry: &Entry, over: Option<u64>) -> Event {
        let message = PublishMessage::build().payload(wire::encode(entry).into()).expected_last_subject_sequence(over.unwrap_or(0));
        let written = async { self.context.send_publish(subject(key), message).await?.into_future().await };
        match tokio::time::timeout(ANSWER_WAIT, written).await {
            Ok(Ok(ack)) => Event::Written(ack.sequence),
            Ok(Err(why)) if why.kind() == PublishErrorKind::WrongLastSequence => Event::Refused,
            Ok(Err(why)) => away(&why.to_string()),
            Err(_) => away("no answer in time"),
        }
    }

    /// Waits until an entry changes, or so long. Where nothing tells of changes it is looked often.
    async fn changed(&self, watch: &mut Option<Subscriber>, key: &str, at_most: Duration) {
        match watch {
            Some(watching) => match tokio::time::timeout(at_most, watching.next()).await {
                // The server keeps it a moment after it told of it.
                Ok(Some(_)) => tokio::time::sleep(SETTLED_AFTER).await,
                Ok(None) => *watch = None,
                Err(_) => {}
            },
            None => {
                // What changes before the server knows of it is found by the look that follows.
                *watch = self.client.subscribe(subject(key)).await.ok();
                tokio::time::sleep(at_most.min(LOOK_EVERY)).await;
            }
        }
    }

    /// Makes the bucket, if this worker may: in memory, since one that is lost with its server costs a second build.
    async fn make(&self) {
        let config = kv::Config {
            bucket: TEMPLATES_BUCKET.to_owned(),
            description: "Who builds which template".to_owned(),
            history: 1,
            max_age: Duration::from_millis(TEMPLATES_KEPT_MS),
            storage: StorageType::Memory,
            ..kv::Config::default()
        };
        match tokio::time::timeout(ANSWER_WAIT, self.context.create_key_value(config)).await {
            Ok(Ok(_)) => {}
            Ok(Err(why)) => tracing::debug!(%why, "making the bucket of template leases"),
            Err(_) => tracing::debug!("making the bucket of template leases: no answer in time"),
        }
    }
}

fn subject(key: &str) -> String {
    format!("$KV.{TEMPLATES_BUCKET}.{key}")
}

fn away(why: &str) -> Event {
    tracing::debug!(why, "the bucket of template leases");
    Event::Away
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
