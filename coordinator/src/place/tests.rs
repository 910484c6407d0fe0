//! Jobs that come late: what runs already must not keep them from their share.

use volley_jobspecs::backoff::Backoff;
use volley_jobspecs::ids::{BundleId, Incarnation, Term};
use volley_jobspecs::wire::plan::{Isolation, JobPlan, Retry, SpecRef};
use volley_jobspecs::wire::record::{Actor, Control, Decided, Decision, Lead, Record, Submit, TenantPolicy, Verb};
use volley_jobspecs::wire::report::{AttemptEnd, Report, Timing};
use volley_jobspecs::wire::work::WorkerInfo;

use super::*;
use crate::apply::apply;
use crate::control::OPERATOR;
use crate::explain::{Heard, explain};
use crate::state::Tenant;
use crate::state::effects::Effects;
use crate::testing::plan;
use crate::track::open_name;

/// Workers of the small cluster.
const WORKERS: u64 = 2;
/// Slots of each.
const SLOTS: u32 = 4;
/// Steps of its time, in milliseconds.
const STEP_MS: u64 = 10;

/// The state machine with workers that run every task in a fixed time, one bundle a slot, in the order they came.
struct Cluster {
    state: State,
    scheduler: Scheduler,
    now_ms: u64,
    round: u64,
    took: BTreeMap<JobId, u64>,
    /// From this index on tasks never end.
    long_from: BTreeMap<JobId, u32>,
    /// Since when the present task of each bundle runs.
    since: BTreeMap<BundleId, u64>,
}

impl Cluster {
    fn new() -> Self {
        let mut cluster = Self {
            state: State::default(),
            scheduler: Scheduler::new(BUNDLE_MS, BUNDLE_TASKS_MAX),
            now_ms: 0,
            round: 0,
            took: BTreeMap::new(),
            long_from: BTreeMap::new(),
            since: BTreeMap::new(),
        };
        for name in ["default", OPERATOR] {
            cluster.state.tenants.insert(name.parse().unwrap(), Tenant { policy: TenantPolicy::default() });
        }
        cluster.apply(&Record::Lead(Lead { term: Term(1), coordinator: "c".into(), now_ms: 0 }));
        let joined = |at| Decision::WorkerJoined { worker: worker(at), incarnation: Incarnation(1), info: info() };
        cluster.decide((0..WORKERS).map(joined).collect());
        cluster
    }

    fn apply(&mut self, record: &Record) -> u64 {
        let sequence = self.state.head.sequence + 1;
        let mut fx = Effects::default();
        apply(&mut self.state, sequence, record, &mut fx).unwrap();
        self.scheduler.learn(&self.state, &fx.attempts);
        sequence
    }

    fn decide(&mut self, decisions: Vec<Decision>) {
        self.round += 1;
        self.apply(&Record::Decided(Decided { term: Term(1), round: self.round, decisions }));
    }

    fn tenant(&mut self, name: &str, weight: u32) {
        let policy = TenantPolicy { weight, priority_max: 1_000, ..TenantPolicy::default() };
        let verb = Verb::PutTenant { tenant: name.parse().unwrap(), policy };
        self.apply(&Record::Control(Control { actor: actor(OPERATOR), verb }));
    }

    /// Submits a job of tasks that take `took_ms` each.
    fn submit(&mut self, tenant: &str, tasks: u32, priority: i16, took_ms: u64) -> JobId {
        self.submit_plan(tenant, JobPlan { priority, ..plan(tasks) }, took_ms)
    }

    fn submit_plan(&mut self, tenant: &str, plan: JobPlan, took_ms: u64) -> JobId {
        let submit = Submit {
            actor: actor(tenant),
            idempotency_key: format!("{}", self.state.head.sequence),
            spec_hash: "h".to_owned(),
            plan,
            spec: SpecRef::Inline(Vec::new().into()),
            trace: None,
            uploads: Vec::new(),
        };
        let job = JobId(self.apply(&Record::Submit(Box::new(submit))));
        self.took.insert(job, took_ms);
        job
    }

    fn step(&mut self) {
        self.now_ms += STEP_MS;
        for at in 0..WORKERS {
            let ends = self.ends(&worker(at));
            if !ends.is_empty() {
                self.apply(&Record::Report(Report { worker: worker(at), incarnation: Incarnation(1), number: 0, ends }));
            }
        }
        let assignments = place(&mut self.scheduler, &self.state, self.now_ms, &BTreeSet::new());
        self.decide(vec![Decision::Tick(self.now_ms), Decision::Assign(assignments)]);
    }

    /// What ends now on a worker: what ran long enough, and what waited too long.
    fn ends(&mut self, name: &WorkerId) -> Vec<AttemptEnd> {
        let mut ends = self.returned(name);
        for (id, bundle) in self.state.workers[name].bundles.iter().take(SLOTS as usize) {
            let since = self.since.entry(*id).or_insert(self.now_ms - STEP_MS);
            let took = self.took[&bundle.job];
            let open = bundle.indices().find_map(|index| open_name(&self.state, bundle.job, index, *id));
            let long_from = self.long_from.get(&bundle.job).copied().unwrap_or(u32::MAX);
            if let Some(name) = open.filter(|name| name.index < long_from && self.now_ms - *since >= took) {
                *since = self.now_ms;
                ends.push(end(name, Ending::Succeeded, took as u32));
            }
        }
        ends
    }

    /// What a worker hands back because it waited too long.
    fn returned(&self, name: &WorkerId) -> Vec<AttemptEnd> {
        let waiting = self.state.workers[name].bundles.iter().skip(SLOTS as usize);
        let stuck = waiting.filter(|(_, bundle)| self.now_ms >= bundle.assigned_ms + YOUNG_BUNDLE_MS_MAX);
        let open = stuck.flat_map(|(id, bundle)| bundle.indices().filter_map(|index| open_name(&self.state, bundle.job, index, *id)));
        open.map(|name| end(name, Ending::Returned, 0)).collect()
    }

    fn run(&mut self, ms: u64) {
        (0..ms / STEP_MS).for_each(|_| self.step());
    }

    /// How long from now until the job ends, in milliseconds; it may take `most_ms`.
    fn until_ended(&mut self, job: JobId, most_ms: u64) -> u64 {
        let began = self.now_ms;
        while self.state.jobs.get(&job).is_some_and(|job| job.progress.ended_ms.is_none()) {
            assert!(self.now_ms - began <= most_ms, "{:?}", self.state.jobs[&job].counts());
            self.step();
        }
        self.now_ms - began
    }

    /// Slots that run something of the job now.
    fn slots_of(&self, job: JobId) -> usize {
        let running = self.state.workers.values().flat_map(|w| w.bundles.values().take(SLOTS as usize));
        running.filter(|bundle| bundle.job == job).count()
    }
}

fn end(name: AttemptName, ending: Ending, run_ms: u32) -> AttemptEnd {
    let timing = Timing { run_ms, ..Timing::default() };
    AttemptEnd { code: (ending == Ending::Succeeded).then_some(0), timing, ..AttemptEnd::bare(name, ending, Isolation::Null) }
}

fn worker(at: u64) -> WorkerId {
    format!("w{at}").parse().unwrap()
}

fn actor(tenant: &str) -> Actor {
    Actor { tenant: tenant.parse().unwrap(), principal: "person".to_owned(), request_id: "r".to_owned() }
}

fn info() -> WorkerInfo {
    WorkerInfo {
        slots: SLOTS,
        cpu_milli: 64_000,
        memory_bytes: 1 << 40,
        disk_bytes: 1 << 40,
        isolation: vec![Isolation::Null],
        labels: BTreeMap::new(),
        limits: true,
        build: String::new(),
        host: String::new(),
        lacks: Vec::new(),
        template_bytes: None,
        images: None,
        fetches: false,
        volumes: None,
    }
}

#[test]
fn a_job_alone_fills_the_waiting_places_and_loses_no_time() {
    let mut cluster = Cluster::new();
    let hog = cluster.submit("default", 2_500, 0, 100);
    cluster.run(2_000);
    assert_eq!(cluster.state.jobs[&hog].bundles, WORKERS as u32 * SLOTS * BUNDLES_PER_SLOT);
    let took = 2_000 + cluster.until_ended(hog, 60_000);
    let least = 2_500 * 100 / (WORKERS * u64::from(SLOTS));
    assert!(took <= least + least / 20, "{took} ms of at least {least}");
}

#[test]
fn a_late_job_of_higher_priority_goes_first() {
    let mut cluster = Cluster::new();
    cluster.tenant("vip", 300);
    let hog = cluster.submit("default", 2_500, 0, 100);
    cluster.run(5_000);
    let vip = cluster.submit("vip", 5, 100, 100);
    let said = explain(&cluster.state, vip, 0, &Heard::default()).summary;
    assert!(said.contains(&format!("job {hog} holds 16 of 16 places taken")), "{said}");
    let took = cluster.until_ended(vip, 2_000);
    assert!(took <= 600, "{took} ms");
    // And the first has its waiting places again.
    cluster.run(1_000);
    assert_eq!(cluster.state.jobs[&hog].bundles, WORKERS as u32 * SLOTS * BUNDLES_PER_SLOT);
}

#[test]
fn a_late_job_of_equal_priority_gets_its_share_by_weight() {
    for (tenant, weight, share) in [("default", 100, 4.0), ("vip", 100, 4.0), ("vip", 300, 6.0)] {
        let mut cluster = Cluster::new();
        cluster.tenant(tenant, weight);
        let hog = cluster.submit("default", 100_000, 0, 100);
        cluster.run(5_000);
        // Too long to wait behind others: only an idle slot will do, ever.
        let late = cluster.submit(tenant, 1_000, 0, 2_500);
        cluster.run(5_000);
        let (mut of_late, mut of_hog, mut seen) = (0, 0, 0);
        for _ in 0..3_000 {
            cluster.step();
            (of_late, of_hog, seen) = (of_late + cluster.slots_of(late), of_hog + cluster.slots_of(hog), seen + 1);
        }
        let (of_late, of_hog) = (of_late as f64 / f64::from(seen), of_hog as f64 / f64::from(seen));
        assert!((of_late - share).abs() <= 1.0, "weight {weight}: {of_late} slots, its share is {share}; the first has {of_hog}");
        assert!(of_late + of_hog >= 7.0, "weight {weight}: {of_late} and {of_hog} of 8 slots are used");
    }
}

#[test]
fn a_late_job_waits_only_where_it_could_run() {
    let mut cluster = Cluster::new();
    let hog = cluster.submit("default", 2_500, 0, 100);
    cluster.run(5_000);
    let mut only = JobPlan { priority: 100, ..plan(5) };
    only.needs.isolation = Isolation::Microvm;
    let late = Submit {
        actor: actor("default"),
        idempotency_key: "late".to_owned(),
        spec_hash: "h".to_owned(),
        plan: only,
        spec: SpecRef::Inline(Vec::new().into()),
        trace: None,
        uploads: Vec::new(),
    };
    cluster.apply(&Record::Submit(Box::new(late)));
    cluster.run(1_000);
    assert_eq!(cluster.state.jobs[&hog].bundles, WORKERS as u32 * SLOTS * BUNDLES_PER_SLOT, "no place is kept free for what can't use it");
}

#[test]
fn nothing_waits_behind_long_tasks() {
    let mut cluster = Cluster::new();
    let short = cluster.submit("default", 25_000, 0, 100);
    cluster.run(2_000);
    // It takes every slot, for longer than the test.
    cluster.submit("default", WORKERS as u32 * SLOTS, 100, 1_000_000);
    cluster.run(30_000);
    assert_eq!(cluster.state.jobs[&short].bundles, 0, "what waited was handed back, and nothing waits again");
}

#[test]
fn what_waits_behind_long_tasks_is_not_handed_to_and_fro() {
    let mut cluster = Cluster::new();
    let job = cluster.submit("default", 25_000, 0, 100);
    // Its tasks are short, until all that begin turn out long.
    cluster.long_from.insert(job, 200);
    cluster.run(30_000);
    let found = &cluster.state.jobs[&job];
    assert_eq!(found.bundles, WORKERS as u32 * SLOTS, "one bundle a slot, none waits");
    assert_eq!((0..found.tasks()).filter_map(|index| found.cell(index)).map(|cell| cell.number).max(), Some(1));
}

#[test]
fn a_large_task_that_comes_first_gets_its_room() {
    let mut cluster = Cluster::new();
    let mut small = plan(2_000);
    small.needs.cpu_milli = 10_000;
    // Two durations, so that on no worker everything ends at once.
    let small = [1_000, 1_370].map(|took_ms| cluster.submit_plan("default", small.clone(), took_ms));
    cluster.run(20_000);
    let running = |cluster: &Cluster| small.iter().map(|job| cluster.slots_of(*job)).sum::<usize>();
    assert_eq!(running(&cluster), (WORKERS as u32 * SLOTS) as usize);
    let mut large = JobPlan { priority: 100, ..plan(1) };
    large.needs.cpu_milli = info().cpu_milli;
    let large = cluster.submit_plan("default", large, 1_000);
    let begun = cluster.now_ms;
    while cluster.slots_of(large) == 0 {
        assert!(cluster.now_ms - begun < 3_000, "{:?}", cluster.state.jobs[&large].counts());
        cluster.step();
        assert!(running(&cluster) >= SLOTS as usize, "the other worker goes on");
    }
    cluster.until_ended(large, 10_000);
    cluster.run(2_000);
    assert_eq!(running(&cluster), (WORKERS as u32 * SLOTS) as usize, "nothing is held for what has ended");
}

/// The same machine may be what is wrong.
#[test]
fn a_task_that_failed_goes_to_another_worker_unless_there_is_none() {
    let mut cluster = Cluster::new();
    let retry = Retry { attempts: 9, backoff: Backoff { initial_ms: 0, ..Backoff::default() }, ..plan(1).retry };
    let job = cluster.submit_plan("default", JobPlan { retry, ..plan(1) }, 100);
    let (mut before, mut met) = (None, BTreeSet::new());
    for _ in 0..6 {
        cluster.step();
        let held = |(name, worker): (&WorkerId, &Worker)| Some((name.clone(), *worker.bundles.keys().next()?));
        let (at, bundle) = cluster.state.workers.iter().find_map(held).unwrap();
        assert_ne!(before.as_ref(), Some(&at), "it failed there");
        met.insert(at.clone());
        let name = open_name(&cluster.state, job, 0, bundle).unwrap();
        let ends = vec![AttemptEnd { code: Some(1), ..end(name, Ending::Failed(FailureClass::ExitCode), 1) }];
        cluster.apply(&Record::Report(Report { worker: at.clone(), incarnation: Incarnation(1), number: 0, ends }));
        before = Some(at);
    }
    assert_eq!(met.len() as u64, WORKERS);
    // Alone it is better than nowhere.
    let gone = worker((0..WORKERS).find(|at| Some(worker(*at)) != before).unwrap());
    cluster.decide(vec![Decision::WorkerLost { worker: gone, incarnation: Incarnation(1), left: true }]);
    let again = place(&mut cluster.scheduler, &cluster.state, cluster.now_ms, &BTreeSet::new());
    assert_eq!(again.into_iter().map(|assignment| assignment.worker).collect::<Vec<_>>(), before.into_iter().collect::<Vec<_>>());
}

/// One job's wrong image, or the time that it gives a machine to start, must not take workers from the others.
#[test]
fn ends_that_say_nothing_of_the_worker_do_not_have_it_quarantined() {
    let (restore, start) = (FailureClass::RestoreFailed, FailureClass::StartTimeout);
    for (class, blameless, judged) in [(restore, None, 1), (restore, Some(true), 0), (start, None, 0), (FailureClass::GuestLost, None, 0)] {
        let mut scheduler = Scheduler::new(BUNDLE_MS, BUNDLE_TASKS_MAX);
        let name = |index| AttemptName { job: JobId(1), stage: 0, index, number: 1, sequence: 2 };
        let row = |index| {
            let failed = AttemptEnd { blameless, ..end(name(index), Ending::Failed(class), 1) };
            (name(index), AttemptRow { end: failed, worker: worker(0), assigned_ms: 0, ended_ms: 1 })
        };
        scheduler.learn(&State::default(), &(0..40).map(row).collect::<Vec<_>>());
        assert_eq!(scheduler.misbehaving().len(), judged, "{class} {blameless:?}");
        assert_eq!(scheduler.avoid.len(), 40, "another worker may do better");
    }
}

#[test]
fn waiting_places_are_used_beside_a_long_task() {
    let mut cluster = Cluster::new();
    let short = cluster.submit("default", 25_000, 0, 100);
    cluster.run(2_000);
    cluster.submit("default", 1, 100, 1_000_000);
    cluster.run(30_000);
    assert!(cluster.state.jobs[&short].bundles >= WORKERS as u32 * SLOTS * BUNDLES_PER_SLOT - 3, "{}", cluster.state.jobs[&short].bundles);
}

/// A job whose tasks need a machine of so many bytes, made from the image of this key.
fn machines(cluster: &mut Cluster, memory_bytes: u64, image: Option<u64>) -> JobId {
    let id = cluster.submit("default", 10, 0, 4);
    let needs = &mut cluster.state.jobs.get_mut(&id).unwrap().facts.plan.needs;
    (needs.isolation, needs.memory_bytes, needs.image) = (Isolation::Microvm, memory_bytes + volley_jobspecs::machine::VMM_BYTES, image);
    id
}

/// Whom a round gives something.
fn given(cluster: &mut Cluster) -> BTreeSet<WorkerId> {
    let round = place(&mut cluster.scheduler, &cluster.state, cluster.now_ms, &BTreeSet::new());
    round.into_iter().map(|assignment| assignment.worker).collect()
}

/// Has this worker offer machines.
fn offers(cluster: &mut Cluster, at: u64, template_bytes: Option<u64>, images: Option<Vec<u64>>) {
    let info = &mut cluster.state.workers.get_mut(&worker(at)).unwrap().info;
    (info.isolation, info.template_bytes, info.images) = (vec![Isolation::Microvm], template_bytes, images);
}

#[test]
fn a_machine_goes_where_there_is_room_for_its_template() {
    let mut cluster = Cluster::new();
    offers(&mut cluster, 0, Some(1 << 30), None);
    offers(&mut cluster, 1, Some(4 << 30), None);
    machines(&mut cluster, 2 << 30, None);
    assert_eq!(given(&mut cluster), BTreeSet::from([worker(1)]));
    offers(&mut cluster, 1, Some(1 << 30), None);
    assert_eq!(given(&mut cluster), BTreeSet::new());
    let said = explain(&cluster.state, *cluster.state.jobs.keys().next().unwrap(), 0, &Heard::default());
    let reason = "has room for machines of 1.0 GiB, the task's has 2.0 GiB (a machine is saved once, as its template: `volley worker --template-memory`)";
    assert_eq!(said.workers[0].reasons, [reason]);
    assert!(said.summary.contains("no worker could ever run this task") && said.next[0].contains("--template-memory"), "{said:?}");
    offers(&mut cluster, 1, None, None);
    assert_eq!(given(&mut cluster), BTreeSet::from([worker(1)]), "one that does not say is asked");
    // One that fetches takes what another one has room to build.
    cluster.state.workers.get_mut(&worker(0)).unwrap().info.fetches = true;
    assert_eq!(given(&mut cluster).len(), 2);
    offers(&mut cluster, 1, Some(1 << 30), None);
    assert_eq!(given(&mut cluster), BTreeSet::new());
    let said = explain(&cluster.state, *cluster.state.jobs.keys().next().unwrap(), 0, &Heard::default());
    assert!(said.workers.iter().all(|worker| worker.reasons == [reason]), "{said:?}");
}

#[test]
fn a_task_goes_where_its_image_is_and_anywhere_while_it_is_nowhere() {
    let mut cluster = Cluster::new();
    let (here, there) = (Some(vec![3, 7]), Some(vec![1]));
    offers(&mut cluster, 0, None, there.clone());
    offers(&mut cluster, 1, None, here.clone());
    let id = machines(&mut cluster, 1, Some(7));
    assert_eq!(given(&mut cluster), BTreeSet::from([worker(1)]));
    let said = explain(&cluster.state, id, 0, &Heard::default());
    assert!(said.workers[0].reasons[0].starts_with("has no image") && said.workers[1].reasons.is_empty(), "{said:?}");
    // What it has is not known.
    offers(&mut cluster, 0, None, None);
    assert_eq!(given(&mut cluster).len(), 2);
    for at in [0, 1] {
        offers(&mut cluster, at, None, there.clone());
    }
    assert_eq!(given(&mut cluster).len(), 2, "a worker says that it is missing");
    let needs = &cluster.state.jobs[&id].facts.plan.needs;
    let warned = crate::explain::nowhere(&cluster.state, needs).unwrap();
    assert!(warned.contains("w0 has no image that is called as $.task.image says (`volley image import`"), "{warned}");
}

#[test]
fn a_volume_goes_where_it_was_unless_that_is_busy() {
    use volley_jobspecs::ids::{SnapshotId, VolumeId};
    use volley_jobspecs::wire::volume::{Access, VolumePlan};
    use volley_jobspecs::wire::work::HasVolumes;

    let mut cluster = Cluster::new();
    let volume = VolumeId([7; 16]);
    let verb = Verb::PutVolume { name: "data".to_owned(), volume, size_bytes: 1 << 20 };
    cluster.apply(&Record::Control(Control { actor: actor("default"), verb }));
    for at in 0..WORKERS {
        cluster.state.workers.get_mut(&worker(at)).unwrap().info.volumes = Some(HasVolumes::Yes);
    }
    let of = |access| VolumePlan { name: "data".to_owned(), snapshot: None, access, size_bytes: None };
    let with = |cluster: &mut Cluster, access, tasks| {
        let job = cluster.submit_plan("default", JobPlan { volumes: vec![of(access)], ..plan(tasks) }, 1_000_000);
        if access != Access::Rw {
            cluster.decide(vec![Decision::VolumePinned { job, slot: 0, snapshot: SnapshotId([1; 16]) }]);
        }
        job
    };
    let taken = |cluster: &mut Cluster| -> Vec<u64> {
        let round = place(&mut cluster.scheduler, &cluster.state, cluster.now_ms, &BTreeSet::new());
        (0..WORKERS).map(|at| round.iter().filter(|one| one.worker == worker(at)).count() as u64).collect()
    };
    // Nobody knows it yet: the first of equals.
    let first = with(&mut cluster, Access::Clone, 1);
    assert_eq!(taken(&mut cluster), [1, 0]);
    let state = &cluster.state;
    cluster.scheduler.warm.ran(state, &state.jobs[&first], 0, &worker(1));
    assert_eq!(taken(&mut cluster), [0, 1]);
    cluster.state.jobs.remove(&first);
    // Many: up to half its slots more than the other has, then as they come.
    let many = with(&mut cluster, Access::Ro, 6);
    assert_eq!(taken(&mut cluster), [2, 4]);
    cluster.state.jobs.remove(&many);
    // Who wrote it last has it too; a worker that is gone has not.
    let writer = with(&mut cluster, Access::Rw, 1);
    assert_eq!(taken(&mut cluster), [0, 1]);
    cluster.state.workers.remove(&worker(1));
    assert_eq!(taken(&mut cluster), [1, 0]);
    cluster.state.jobs.remove(&writer);
}
