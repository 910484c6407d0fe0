//! What must hold, whatever the devil does.
//!
//! - every task ends in exactly one terminal state, and every job ends once the devil rests;
//! - a success the log ordered first is never lost or changed;
//! - attempts never exceed their budget, and a task counts as many tries as there are attempts kept of it;
//! - no task runs twice at once unless its worker was declared lost or restarted;
//! - nothing runs above a worker's slots, and at most one bundle a slot waits;
//! - applying the log from empty gives the same bytes, however it is cut into batches;
//! - what is loaded from the rows is what applying gave, after records and at each restart.

use std::collections::{BTreeMap, BTreeSet};

use volley_coordinator::core::{Core, Mark, Message};
use volley_coordinator::state::State;
use volley_coordinator::state::invariants;
use volley_coordinator::state::rows::{self, MapRows, Rows, Table};
use volley_coordinator::state::worker::BUNDLES_PER_SLOT;
use volley_jobspecs::backoff::Backoff;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, Incarnation, JobId, TenantId, WorkerId};
use volley_jobspecs::wire::plan::{FailFast, Isolation, JobPlan, Needs, Rate, Retention, Retry, SpecRef};
use volley_jobspecs::wire::record::{Actor, Control, Decision, Record, Submit, Verb};
use volley_jobspecs::wire::report::Ending;
use volley_jobspecs::wire::{self, LEVEL_BEGUN};

use super::random::Random;
use super::world::World;

/// Attempts a task of the simulated jobs may have.
const ATTEMPTS: u16 = 3;
const INFRA_ATTEMPTS: u16 = 20;

/// What was seen that can't be seen at the end.
#[derive(Debug, Default)]
pub struct Notebook {
    pub broken: Vec<String>,
    /// Where each task runs now: host and its life.
    running: BTreeMap<(JobId, u32), Vec<(usize, u64, AttemptName)>>,
}

pub fn submit(random: &mut Random, key: u64) -> Submit {
    let tasks = [0, 1, 7, 40, 300, 4_200][random.below(6) as usize];
    let plan = JobPlan {
        name: format!("job-{key}"),
        labels: BTreeMap::new(),
        tasks,
        priority: random.below(3) as i16,
        weight: 100,
        concurrency: random.one_in(3).then_some(random.between(1, 4) as u32),
        rate: random.one_in(4).then_some(Rate { count: 500, per_ms: 1_000 }),
        fail_fast: random.one_in(5).then_some(FailFast { failures_max: 5, stop_running: random.one_in(2) }),
        queue_ms: random.one_in(4).then_some(60_000),
        total_ms: random.one_in(6).then_some(90_000),
        start_ms: 60_000,
        run_ms: random.between(500, 20_000),
        retry: Retry {
            attempts: ATTEMPTS,
            infra_attempts: INFRA_ATTEMPTS,
            backoff: Backoff { initial_ms: 200, factor_milli: 2_000, cap_ms: 5_000 },
            rules: Vec::new(),
        },
        needs: Needs {
            cpu_milli: 1_000,
            memory_bytes: 1 << 20,
            disk_bytes: 0,
            isolation: Isolation::Process,
            labels: BTreeMap::new(),
            limits: false,
            image: None,
            volumes: None,
        },
        retention: Retention {
            job_ms: random.one_in(3).then(|| random.below(60_000)),
            failed_objects_ms: random.one_in(2).then(|| random.below(40_000)),
        },
        items: None,
        volumes: Vec::new(),
    };
    let actor = Actor { tenant: TenantId::new("default").unwrap(), principal: "person".to_owned(), request_id: format!("s{key}") };
    Submit {
        actor,
        idempotency_key: format!("k{key}"),
        spec_hash: "h".to_owned(),
        plan,
        spec: SpecRef::Inline(b"{}".to_vec().into()),
        trace: None,
        uploads: Vec::new(),
    }
}

fn complain(world: &mut World, what: String) {
    if world.notebook.broken.len() < 10 {
        let line = format!("at {} ms: {what}", world.now);
        world.notebook.broken.push(line);
    }
}

pub fn after_apply(world: &mut World, at: usize) {
    // Walking everything costs more than all else together; what breaks stays broken for more than a few batches.
    if !world.random.one_in(4) {
        return;
    }
    if world.random.one_in(4) {
        world.coordinators[at].reloads();
    }
    let state = world.coordinators[at].core.state();
    let mut broken = invariants::broken(state);
    broken.extend(world.coordinators[at].core.leader_ref().map(|leader| leader.broken(state)).unwrap_or_default());
    let name = world.coordinators[at].name.clone();
    broken.into_iter().for_each(|b| complain(world, format!("{name}: {b}")));
}

pub fn began(world: &mut World, host: usize, name: AttemptName) {
    let life = world.hosts[host].life;
    let slots = world.hosts[host].slots as usize;
    if world.hosts[host].running.len() > slots {
        complain(world, format!("host {host} runs {} attempts in {slots} slots", world.hosts[host].running.len()));
    }
    // A slot may be free while its bundle waits for the job's spec, so waiting and running count together.
    let bundles = world.hosts[host].core.waiting() + world.hosts[host].running.len();
    if bundles > slots * BUNDLES_PER_SLOT as usize {
        complain(world, format!("{bundles} bundles wait or run on host {host} with {slots} slots"));
    }
    let task = (name.job, name.index);
    let others = world.notebook.running.entry(task).or_default().clone();
    for (other, other_life, other_name) in others {
        // A frozen or silent host whose worker the log declared lost may still run it; so may one that will hear of it soon.
        let lost = world.coordinators.iter().any(|c| {
            let job = c.core.state().job(name.job);
            job.is_some_and(|job| {
                job.open
                    .get(&name.index)
                    .is_none_or(|open| open.bundle.sequence != other_name.sequence || u32::from(open.number) != other_name.number)
            })
        });
        let same_life = world.hosts[other].life == other_life;
        // Either may be the later to begin: a host that woke up may begin what was given to another long ago.
        let older = if other_name.sequence <= name.sequence { (other, other_name) } else { (host, name) };
        let declared = host_was_lost(world, older.0, &older.1);
        if same_life && lost && !declared {
            if std::env::var("VOLLEY_SIM_DEBUG").is_ok() {
                for Message { sequence, bytes, .. } in world.log.read(other_name.sequence, usize::MAX) {
                    let Ok(record) = wire::decode::<Record>("record", &bytes) else { continue };
                    let text = format!("{record:?}");
                    let about = match &record {
                        Record::Report(r) => r.ends.iter().any(|e| e.name.job == name.job && e.name.index == name.index),
                        Record::Control(_) => true,
                        Record::Decided(_) => text.contains("Lost") || sequence == name.sequence,
                        _ => false,
                    };
                    if about {
                        eprintln!("LOG {sequence}: {}", text.chars().take(1500).collect::<String>());
                    }
                }
            }
            complain(
                world,
                format!(
                    "task {}/{} runs on host {host} as {name} and on host {other} as {other_name}, which was not lost",
                    name.job, name.index
                ),
            );
        }
    }
    world.notebook.running.entry(task).or_default().push((host, life, name));
}

/// Did the log, after it assigned this attempt, say that its host was lost or restarted?
fn host_was_lost(world: &World, host: usize, name: &AttemptName) -> bool {
    let host = &world.hosts[host].name;
    let after = world.log.read(name.sequence + 1, usize::MAX).into_iter();
    let mut decided = after.filter_map(|message| match wire::decode("record", &message.bytes) {
        Ok(Record::Decided(decided)) => Some(decided.decisions),
        _ => None,
    });
    decided.any(|decisions| {
        decisions.iter().any(|decision| match decision {
            Decision::WorkerLost { worker, .. } | Decision::WorkerJoined { worker, .. } => worker == host,
            _ => false,
        })
    })
}

pub fn stopped(world: &mut World, host: usize, name: AttemptName) {
    if let Some(running) = world.notebook.running.get_mut(&(name.job, name.index)) {
        running.retain(|(h, _, n)| !(*h == host && *n == name));
    }
}

pub fn died(world: &mut World, host: usize) {
    world.notebook.running.values_mut().for_each(|running| running.retain(|(h, ..)| *h != host));
}

pub fn all_ended(world: &World) -> bool {
    let caught_up = world.coordinators.iter().all(|c| c.core.state().head.sequence == world.log.len());
    caught_up && world.coordinators.iter().all(|c| c.core.state().jobs.is_empty())
}

pub fn at_the_end(world: &mut World) -> Vec<String> {
    let mut broken = std::mem::take(&mut world.notebook.broken);
    if !all_ended(world) {
        for host in world.hosts.iter().filter(|_| std::env::var("VOLLEY_SIM_DEBUG").is_ok()) {
            broken.push(format!("{} up {} frozen {} life {} {:?}", host.name, host.up, host.frozen_until, host.life, host.core));
        }
        for c in &world.coordinators {
            let jobs: Vec<_> = c
                .core
                .state()
                .jobs
                .values()
                .map(|j| {
                    (
                        j.id,
                        j.counts(),
                        j.progress.ending,
                        j.progress.paused,
                        j.progress.trailing.clone(),
                        j.open.len(),
                        j.bundles,
                        j.facts.plan.concurrency,
                        j.facts.plan.rate,
                    )
                })
                .collect();
            if std::env::var("VOLLEY_SIM_DEBUG").is_ok() && c.core.leads() {
                broken.push(format!("{:?} {:?} {:?}", c.publishing, c.core.leader_ref(), c.core.state().workers));
            }
            broken.push(format!(
                "{} at {} of {} leads {}: not ended: {jobs:?}",
                c.name,
                c.core.state().head.sequence,
                world.log.len(),
                c.core.leads()
            ));
        }
        return broken;
    }
    let log = world.log.read(1, usize::MAX);
    let (whole, in_ones) = (replay(&log, usize::MAX), replay(&log, 1));
    let cut = replay(&log, 37);
    for (what, other) in [("one by one", &in_ones), ("in batches of 37", &cut)] {
        if whole.dump() != other.dump() {
            broken.push(format!("applying the log whole and {what} gives different rows: {}", difference(&whole, other)));
        }
    }
    for c in &world.coordinators {
        if c.rows.dump() != whole.dump() {
            broken.push(format!("{}'s rows differ from a replay of the log: {}", c.name, difference(&c.rows, &whole)));
        }
    }
    broken.extend(tasks(&whole, &first_successes(&log), begun_from(&log)));
    broken
}

fn replay(log: &[Message], batch: usize) -> MapRows {
    let rows = MapRows::default();
    let mut core = Core::open(&rows).unwrap();
    for (turn, records) in log.chunks(batch.min(log.len().max(1))).enumerate() {
        core.apply(&rows, records).unwrap();
        // Every so often all that is in memory is thrown away.
        if batch == 37 && turn % 5 == 4 {
            let again = Core::open(&rows).unwrap();
            same_state(again.state(), core.state());
            core = again;
        }
    }
    rows
}

/// Loading must give what applying gave.
pub fn same_state(loaded: &State, applied: &State) {
    let at = applied.head.sequence;
    assert_eq!(loaded.head, applied.head, "head at {at}");
    assert_eq!(loaded.timers, applied.timers, "timers at {at}");
    assert_eq!(loaded.workers, applied.workers, "workers at {at}");
    assert_eq!(loaded.keys, applied.keys, "keys at {at}");
    assert_eq!(loaded.jobs.keys().collect::<Vec<_>>(), applied.jobs.keys().collect::<Vec<_>>(), "jobs at {at}");
    for (a, b) in loaded.jobs.values().zip(applied.jobs.values()) {
        assert_eq!(a.progress, b.progress, "{} at {at}", a.id);
        assert_eq!(a.open, b.open, "{} at {at}", a.id);
        assert_eq!(a.ready, b.ready, "{} at {at}", a.id);
        assert_eq!(a.bundles, b.bundles, "{} at {at}", a.id);
        assert_eq!(a.pages.keys().collect::<Vec<_>>(), b.pages.keys().collect::<Vec<_>>(), "{} at {at}", a.id);
        assert!(a == b, "{} at {at}", a.id);
    }
    assert!(loaded == applied, "at {at}");
}

fn difference(a: &MapRows, b: &MapRows) -> String {
    let (a, b) = (a.dump(), b.dump());
    let keys: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    let differ: Vec<_> = keys.into_iter().filter(|k| a.get(*k) != b.get(*k)).collect();
    format!(
        "{} rows, first {:?}: {:?} / {:?}",
        differ.len(),
        differ.first(),
        differ.first().and_then(|k| a.get(*k)),
        differ.first().and_then(|k| b.get(*k))
    )
}

/// The first success of each task that the log says of an attempt which was still somebody's: told by the records alone, without `apply`.
/// Tasks of jobs that somebody cancelled before it are left out: there the cancellation stands.
fn first_successes(log: &[Message]) -> BTreeMap<(JobId, u32), u32> {
    let mut first = BTreeMap::new();
    let mut lives: BTreeMap<WorkerId, (Incarnation, u64)> = BTreeMap::new();
    let (mut over, mut cancelled) = (BTreeSet::new(), BTreeSet::new());
    for Message { sequence, bytes, mark } in log {
        let record = match wire::decode::<Record>("record", bytes) {
            Ok(record) => record,
            Err(_) if *mark == Mark::Unfenced => continue,
            Err(error) => panic!("record {sequence}: {error}"),
        };
        match record {
            Record::Control(Control { verb: Verb::Cancel { job, .. }, .. }) => _ = cancelled.insert(job),
            Record::Decided(decided) => {
                for decision in decided.decisions {
                    match decision {
                        Decision::WorkerJoined { worker, incarnation, .. } => _ = lives.insert(worker, (incarnation, *sequence)),
                        Decision::WorkerLost { worker, incarnation, .. }
                            if lives.get(&worker).is_some_and(|life| life.0 == incarnation) =>
                        {
                            lives.remove(&worker);
                        }
                        Decision::AttemptsLost(names) => over.extend(names),
                        _ => {}
                    }
                }
            }
            Record::Report(report) => {
                let Some((_, since)) = lives.get(&report.worker).filter(|life| life.0 == report.incarnation) else { continue };
                for end in report.ends.iter().filter(|end| end.name.sequence > *since) {
                    let mine = over.insert(end.name) && !cancelled.contains(&end.name.job);
                    if mine && end.ending == Ending::Succeeded {
                        first.entry((end.name.job, end.name.index)).or_insert(end.name.number);
                    }
                }
            }
            _ => {}
        }
    }
    first
}

/// From which record on what did not begin is no try.
fn begun_from(log: &[Message]) -> u64 {
    let raises = |message: &&Message| match wire::decode("record", &message.bytes) {
        Ok(Record::Decided(decided)) => decided.decisions.iter().any(|d| matches!(d, Decision::Level(level) if *level >= LEVEL_BEGUN)),
        _ => false,
    };
    log.iter().find(raises).map_or(u64::MAX, |message| message.sequence)
}

/// Every task of every job: one end, within its budget, and success exactly if a success was stored and reported.
fn tasks(rows: &MapRows, successes: &BTreeMap<(JobId, u32), u32>, begun_from: u64) -> Vec<String> {
    let mut broken = Vec::new();
    let mut jobs = Vec::new();
    rows.scan(Table::Jobs, b"", b"", &mut |key, _| {
        jobs.push(JobId(u64::from_be_bytes(key.try_into().unwrap())));
        true
    })
    .unwrap();
    for id in jobs {
        let (facts, progress) = rows::header(rows, id).unwrap().unwrap();
        let counts = progress.counts(facts.plan.tasks);
        if progress.ended_ms.is_none() || counts.waiting + counts.running + counts.backoff > 0 {
            broken.push(format!("{id} has not ended: {counts:?}"));
        }
        let mut last: BTreeMap<u32, Option<FailureClass>> = BTreeMap::new();
        let mut numbers: BTreeMap<u32, u32> = BTreeMap::new();
        let mut tries: BTreeMap<u32, usize> = BTreeMap::new();
        rows.scan(Table::Results, &rows::job_key(id), b"", &mut |key, value| {
            let entry = rows::result_entry(key, value).unwrap();
            if last.get(&entry.index) == Some(&None) {
                broken.push(format!("{id}/{} ended again after its success", entry.index));
            }
            last.insert(entry.index, entry.class);
            numbers.insert(entry.index, entry.number.into());
            tries.insert(entry.index, entry.attempts.into());
            true
        })
        .unwrap();
        let succeeded = last.values().filter(|class| class.is_none()).count() as u32;
        if succeeded != counts.succeeded {
            broken.push(format!("{id} counts {} successes, its results say {succeeded}", counts.succeeded));
        }
        // A job that ends before its tasks do takes no more successes.
        let to_its_end = facts.plan.total_ms.is_none() && facts.plan.fail_fast.is_none();
        for ((_, index), number) in successes.range((id, 0)..=(id, u32::MAX)).filter(|_| to_its_end) {
            if last.get(index) != Some(&None) || numbers.get(index) != Some(number) {
                let stored = (last.get(index), numbers.get(index));
                broken.push(format!("{id}/{index}: attempt {number} reported a success; what is stored is {stored:?}"));
            }
        }
        let most = u64::from(progress.round) * u64::from(ATTEMPTS + INFRA_ATTEMPTS);
        for index in last.keys() {
            let attempts = rows::attempts(rows, id, *index).unwrap();
            if attempts.len() as u64 > most {
                broken.push(format!("{id}/{index} had {} attempts in {} rounds", attempts.len(), progress.round));
            }
            // Of one whose job ended it, the last attempt may have come to its end only after that.
            let decided = numbers.get(index).is_some_and(|number| *number > 0);
            if decided && id.0 > begun_from && tries.get(index) != Some(&attempts.len()) {
                let counted = tries.get(index);
                broken.push(format!("{id}/{index} counts {counted:?} tries, and {} attempts are kept of it", attempts.len()));
            }
        }
    }
    broken
}
