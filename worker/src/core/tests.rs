//! Tests of the worker's core without any I/O: what goes in, what comes out.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::WorkerId;
use volley_jobspecs::wire;
use volley_jobspecs::wire::plan::{Isolation, Needs};
use volley_jobspecs::wire::record::{Record, Run};
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::work::{Bundle, Order, Try, WorkMessage, WorkerInfo};

use crate::attempt::{Force, Progress};

fn config(slots: u32) -> CoreConfig {
    CoreConfig {
        worker: WorkerId::new("w1").expect("a name"),
        info: WorkerInfo {
            slots,
            cpu_milli: slots * 1_000,
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 30,
            isolation: vec![Isolation::Null, Isolation::Process],
            labels: BTreeMap::new(),
            limits: false,
            build: "test".into(),
            host: "host".into(),
            lacks: Vec::new(),
            template_bytes: None,
            images: None,
            fetches: false,
            volumes: None,
        },
        beat_ms: 3_000,
        linger_ms: 5,
        unsent_bytes_max: 1 << 20,
        traced: true,
    }
}

fn facts() -> JobFacts {
    JobFacts {
        needs: Needs {
            cpu_milli: 1_000,
            memory_bytes: 0,
            disk_bytes: 0,
            isolation: Isolation::Process,
            labels: BTreeMap::new(),
            limits: false,
            image: None,
            volumes: None,
        },
        start_ms: 1_000,
        run_ms: 2_000,
    }
}

/// Plays leader, log and executors by hand.
struct World {
    core: Core,
    now_ms: u64,
    number: u64,
    running: BTreeMap<u32, AttemptName>,
    forced: BTreeMap<u32, Force>,
    published: Vec<(u64, Vec<AttemptEnd>)>,
    beats: Vec<Beat>,
    exited: bool,
    reborn: u64,
    starts: BTreeMap<AttemptName, u32>,
    told: usize,
}

impl World {
    fn new(config: CoreConfig) -> Self {
        let mut world = Self {
            core: Core::new(config, Incarnation(1), 0),
            now_ms: 0,
            number: 0,
            running: BTreeMap::new(),
            forced: BTreeMap::new(),
            published: Vec::new(),
            beats: Vec::new(),
            exited: false,
            reborn: 0,
            starts: BTreeMap::new(),
            told: 0,
        };
        world.give(Input::Tick);
        world
    }

    fn give(&mut self, input: Input) {
        let mut out = Vec::new();
        self.core.handle(self.now_ms, input, &mut out);
        for action in out {
            match action {
                Action::FetchJob(job) => self.give(Input::Job { job, answer: JobAnswer::Known(facts()) }),
                Action::Run { slot, name, .. } => {
                    assert_eq!(self.running.insert(slot, name), None, "one attempt per slot");
                    *self.starts.entry(name).or_default() += 1;
                }
                Action::Stop { slot, name, force, .. } => {
                    assert_eq!(self.running.get(&slot), Some(&name), "only what runs is stopped");
                    self.forced.insert(slot, force);
                }
                Action::Publish { publish, .. } => match wire::decode::<Record>("record", &publish.bytes) {
                    Ok(Record::Report(report)) => self.published.push((publish.number, report.ends)),
                    other => panic!("not a report: {other:?}"),
                },
                Action::Beat(beat) => self.beats.push(beat),
                Action::NewLife => {
                    assert!(self.running.is_empty(), "nothing runs between lives");
                    self.reborn += 1;
                    self.give(Input::Born(Incarnation(100 + self.reborn)));
                }
                Action::Exit => self.exited = true,
                Action::Tell(_) => self.told += 1,
                Action::Answer(_) | Action::Dropped(_) => {}
            }
        }
    }

    fn work(&mut self, orders: Vec<Order>) {
        self.number += 1;
        let incarnation = self.core.incarnation();
        self.give(Input::Work(WorkMessage { incarnation, term: Term(1), number: self.number, orders }));
    }

    fn run(&mut self, place: u32, first: u32, count: u32) {
        let bundle = Bundle {
            id: BundleId { sequence: 10, place },
            job: JobId(1),
            tasks: vec![Try { first, count, number: 1 }],
            volumes: Vec::new(),
        };
        self.work(vec![Order::Run(bundle)]);
    }

    fn end(&mut self, slot: u32, outcome: Outcome) {
        self.forced.remove(&slot);
        let name = self.running.remove(&slot).expect("something runs there");
        self.give(Input::Ended { slot, name, outcome });
    }

    fn at(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        self.give(Input::Tick);
    }

    fn answer(&mut self, lost: bool) {
        self.answered(true, lost);
    }

    fn answered(&mut self, joined: bool, lost: bool) {
        let incarnation = self.core.incarnation();
        let answer = BeatAnswer { term: Term(1), linger_ms: 5, joined, lost };
        self.give(Input::BeatAnswered { incarnation, answer });
    }

    fn ack(&mut self) {
        let (number, _) = self.published.last().cloned().expect("a publish");
        let incarnation = self.core.incarnation();
        self.give(Input::ReportAcked { incarnation, number, sequence: 1_000 + number });
    }
}

#[test]
fn ends_are_gathered_while_every_slot_is_busy_and_reported_when_one_is_idle() {
    let mut world = World::new(config(1));
    world.run(0, 0, 3);
    world.end(0, Outcome::success());
    world.at(5);
    assert_eq!(world.published.len(), 0, "its slot runs the next");
    world.at(50);
    assert_eq!(world.published.len(), 1);
    world.give(Input::ReportAcked { incarnation: world.core.incarnation(), number: 1, sequence: 11 });
    world.end(0, Outcome::success());
    world.end(0, Outcome::success());
    assert_eq!(world.published.len(), 1);
    world.at(55);
    assert_eq!(world.published.last().map(|(_, ends)| ends.len()), Some(2), "no task waits for the slot");
}

#[test]
fn images_that_came_or_went_are_said_at_once() {
    let mut w = World::new(config(1));
    w.answer(false);
    assert_eq!((w.beats.len(), &w.beats[0].info.images), (1, &None));
    w.now_ms = 10;
    w.give(Input::Images(None));
    assert_eq!(w.beats.len(), 1, "nothing changed");
    w.give(Input::Images(Some(vec![7])));
    assert_eq!((w.beats.len(), &w.beats[1].info.images), (2, &Some(vec![7])));
}

#[test]
fn a_bundle_runs_one_after_another_and_is_held_until_acked() {
    let mut w = World::new(config(2));
    w.run(0, 0, 2);
    assert_eq!(w.running.len(), 1);
    w.end(0, Outcome::success());
    assert_eq!(w.running.get(&0).map(|n| n.index), Some(1));
    w.end(0, Outcome::failed(FailureClass::ExitCode, "1".into()));
    assert_eq!(w.core.held(), 1);
    w.at(5);
    assert_eq!(w.published.len(), 1);
    assert_eq!(w.published[0].1.len(), 2);
    w.ack();
    assert_eq!(w.core.held(), 0);
    w.answer(false);
    w.at(3_000);
    let beat = w.beats.last().expect("a beat");
    assert_eq!((beat.held.len(), beat.taken, beat.reported), (0, 1, 1_001));
}

#[test]
fn failed_attempts_are_told_of_once_their_end_is_in_the_log() {
    let run = |traced| {
        let mut w = World::new(CoreConfig { traced, ..config(1) });
        w.run(0, 0, 3);
        w.end(0, Outcome::failed(FailureClass::ExitCode, "1".into()));
        w.end(0, Outcome::success());
        w.end(0, Outcome::failed(FailureClass::Oom, "2".into()));
        w.at(5);
        assert_eq!(w.told, 0);
        w.ack();
        w.ack();
        let totals = w.core.totals();
        assert_eq!((totals.of_class(FailureClass::Oom), totals.succeeded, totals.stages.of(Stage::Report).0), (1, 1, 1));
        w.told
    };
    assert_eq!((run(true), run(false)), (2, 0));
}

#[test]
fn what_is_forgotten_is_not_told_of() {
    let mut w = World::new(config(1));
    w.run(0, 0, 2);
    w.end(0, Outcome::failed(FailureClass::ExitCode, "1".into()));
    w.work(vec![Order::Forget { bundle: BundleId { sequence: 10, place: 0 } }]);
    assert!(w.core.kept.is_empty());
}

#[test]
fn a_repeated_message_or_bundle_starts_nothing_twice() {
    let mut w = World::new(config(2));
    w.run(0, 0, 1);
    w.run(0, 0, 1);
    let again = WorkMessage { incarnation: Incarnation(1), term: Term(1), number: 1, orders: Vec::new() };
    w.give(Input::Work(again));
    assert_eq!(w.starts.values().sum::<u32>(), 1);
}

#[test]
fn one_bundle_waits_per_slot_and_the_rest_is_handed_back() {
    let mut w = World::new(config(2));
    for place in 0..6 {
        w.run(place, place, 1);
    }
    assert_eq!(w.running.len(), 2);
    w.at(5);
    let returned: Vec<u32> = w.published[0].1.iter().map(|end| end.name.index).collect();
    assert_eq!(returned, vec![4, 5]);
    assert!(w.published[0].1.iter().all(|end| end.ending == Ending::Returned));
}

#[test]
fn what_waits_behind_long_tasks_is_handed_back_while_the_leader_is_heard() {
    let mut w = World::new(config(1));
    w.run(0, 0, 2);
    w.run(1, 5, 1);
    w.at(4_900);
    w.answer(false);
    w.at(6_000);
    assert!(w.published.is_empty(), "not before its time, nor while no leader is heard");
    w.answer(false);
    w.at(6_100);
    let returned: Vec<(u32, Ending)> = w.published.iter().flat_map(|(_, ends)| ends.iter().map(|e| (e.name.index, e.ending))).collect();
    assert_eq!(returned, vec![(1, Ending::Returned), (5, Ending::Returned)]);
    assert_eq!(w.running.len(), 1, "what runs goes on");
}

#[test]
fn cancel_stops_what_runs_and_returns_what_waits() {
    let mut w = World::new(config(1));
    w.run(0, 0, 3);
    w.work(vec![Order::Stop { bundle: BundleId { sequence: 10, place: 0 }, tasks: vec![Run { first: 0, count: 3 }] }]);
    assert_eq!(w.forced.get(&0), Some(&Force::Term));
    w.end(0, Outcome::failed(FailureClass::Signal, "15".into()));
    w.at(10);
    let endings: Vec<Ending> = w.published.iter().flat_map(|(_, ends)| ends.iter().map(|e| e.ending)).collect();
    assert_eq!(endings, vec![Ending::Returned, Ending::Returned, Ending::Failed(FailureClass::Cancelled)]);
    assert!(w.running.is_empty());
}

#[test]
fn a_forgotten_bundle_is_killed_and_not_reported() {
    let mut w = World::new(config(1));
    w.run(0, 0, 3);
    w.work(vec![Order::Forget { bundle: BundleId { sequence: 10, place: 0 } }]);
    assert_eq!(w.forced.get(&0), Some(&Force::Abandon));
    w.end(0, Outcome::success());
    w.at(100);
    assert!(w.published.is_empty());
    assert_eq!(w.core.held(), 0);
}

#[test]
fn a_run_deadline_is_kept_without_anybody() {
    let mut w = World::new(config(1));
    w.run(0, 0, 1);
    let name = w.running[&0];
    w.give(Input::Progress { slot: 0, name, progress: Progress::Started { grace_ms: 100 } });
    assert!(w.core.wakeup_ms().is_some_and(|at| at <= 2_000));
    w.at(2_000);
    assert_eq!(w.forced.get(&0), Some(&Force::Term));
    w.at(2_100);
    assert_eq!(w.forced.get(&0), Some(&Force::Kill));
    w.end(0, Outcome::failed(FailureClass::Signal, "9".into()));
    w.at(2_200);
    assert_eq!(w.published[0].1[0].ending, Ending::Failed(FailureClass::RunTimeout));
}

#[test]
fn a_lost_life_kills_everything_before_the_next_begins() {
    let mut w = World::new(config(2));
    w.run(0, 0, 2);
    w.run(1, 5, 1);
    w.answer(true);
    assert_eq!(w.forced.len(), 2);
    w.end(0, Outcome::success());
    assert_eq!(w.reborn, 0);
    w.end(1, Outcome::success());
    assert_eq!(w.reborn, 1);
    assert_eq!(w.core.incarnation(), Incarnation(101));
    assert!(w.published.is_empty());
    assert_eq!(w.beats.last().map(|b| (b.incarnation, b.held.len())), Some((Incarnation(101), 0)));
}

#[test]
fn drain_finishes_what_runs_hands_back_the_rest_and_leaves() {
    let mut w = World::new(config(1));
    w.run(0, 0, 2);
    w.run(1, 5, 1);
    w.give(Input::Drain);
    assert_eq!(w.running.len(), 1);
    w.ack();
    w.end(0, Outcome::success());
    assert!(!w.exited);
    w.ack();
    assert!(w.beats.last().is_some_and(|beat| beat.leaving && beat.held.is_empty()));
    w.answered(false, false);
    assert!(w.exited);
}

#[test]
fn a_worker_says_that_it_leaves_until_the_log_has_it() {
    let leaving = || {
        let mut w = World::new(config(1));
        w.answer(false);
        w.give(Input::Drain);
        // The answer to the beat before.
        w.answer(false);
        assert!(!w.exited);
        w
    };
    let mut w = leaving();
    // What was sent to it meanwhile goes back.
    w.run(0, 0, 1);
    assert!(w.running.is_empty() && w.published[0].1[0].ending == Ending::Returned);
    let said = w.beats.len();
    w.at(LEAVE_AGAIN_MS);
    assert_eq!(w.beats.iter().skip(said).map(|beat| beat.leaving).collect::<Vec<_>>(), [false], "it holds what is not in the log");
    w.ack();
    w.answer(false);
    w.at(3 * LEAVE_AGAIN_MS);
    assert!(w.beats.last().is_some_and(|beat| beat.leaving) && !w.exited);
    w.answered(false, false);
    assert!(w.exited);
    let mut alone = leaving();
    alone.at(LEAVE_MS);
    assert!(alone.exited, "not for ever");
}

#[test]
fn what_was_being_prepared_when_the_worker_was_stopped_is_handed_back() {
    let mut w = World::new(config(2));
    w.run(0, 0, 1);
    w.run(1, 5, 1);
    let name = w.running[&1];
    w.give(Input::Progress { slot: 1, name, progress: Progress::Started { grace_ms: 100 } });
    w.give(Input::Stop);
    for slot in 0..2 {
        w.end(slot, Outcome::failed(FailureClass::Cancelled, "stopped".into()));
    }
    w.ack();
    w.at(10);
    let ends: Vec<_> = w.published.iter().flat_map(|(_, ends)| ends.iter().map(|end| (end.name.index, end.ending))).collect();
    assert_eq!(ends, [(0, Ending::Returned), (5, Ending::Failed(FailureClass::HostLost))]);
}

#[test]
fn stop_kills_at_once_reports_and_exits_even_when_nobody_answers() {
    let mut w = World::new(config(1));
    w.run(0, 0, 2);
    w.give(Input::Drain);
    w.give(Input::Stop);
    assert_eq!(w.forced.get(&0), Some(&Force::Abandon));
    w.end(0, Outcome::failed(FailureClass::Signal, "9".into()));
    w.at(4_000);
    w.at(9_000);
    assert!(w.exited);
}

#[test]
fn above_the_bound_of_unsent_ends_nothing_new_is_started() {
    let mut w = World::new(CoreConfig { unsent_bytes_max: 1_000, ..config(1) });
    w.run(0, 0, 100);
    let mut ended = 0;
    while w.running.contains_key(&0) {
        w.end(0, Outcome::success());
        ended += 1;
    }
    assert!(ended < 10);
    w.at(10);
    w.ack();
    assert!(w.running.contains_key(&0), "an ack makes room");
}

#[test]
fn limits_that_can_not_be_enforced_are_refused_with_a_reason() {
    let mut core = Core::new(config(1), Incarnation(1), 0);
    let mut out = Vec::new();
    let bundle = Bundle {
        id: BundleId { sequence: 1, place: 0 },
        job: JobId(1),
        tasks: vec![Try { first: 0, count: 1, number: 1 }],
        volumes: Vec::new(),
    };
    let orders = vec![Order::Run(bundle)];
    core.handle(0, Input::Work(WorkMessage { incarnation: Incarnation(1), term: Term(1), number: 1, orders }), &mut out);
    assert!(out.contains(&Action::FetchJob(JobId(1))));
    let mut facts = facts();
    facts.needs.limits = true;
    out.clear();
    core.handle(0, Input::Job { job: JobId(1), answer: JobAnswer::Known(facts) }, &mut out);
    core.handle(10, Input::Tick, &mut out);
    let ends = out.iter().find_map(|action| match action {
        Action::Publish { publish, .. } => wire::decode::<Record>("record", &publish.bytes).ok(),
        _ => None,
    });
    match ends {
        Some(Record::Report(report)) => {
            assert_eq!(report.ends[0].ending, Ending::Failed(FailureClass::PolicyDenied));
            assert!(report.ends[0].message.as_ref().is_some_and(|m| m.contains("cgroup")));
        }
        other => panic!("{other:?}"),
    }
}

proptest! {
    /// Whatever comes in whatever order: no attempt starts twice in one life, what is received is held until it is reported, and
    /// in the end nothing is left.
    #[test]
    fn nothing_is_started_twice_and_nothing_is_lost(steps in proptest::collection::vec((0u8..9, 0u32..6), 1..120)) {
        let mut w = World::new(config(2));
        let mut sent = BTreeSet::new();
        let mut place = 0;
        for (step, x) in steps {
            match step {
                0 | 1 => {
                    place += 1;
                    for at in 0..=x { sent.insert(place * 10 + at); }
                    w.run(place, place * 10, x + 1);
                }
                2 | 3 => { if w.running.contains_key(&(x % 2)) { w.end(x % 2, Outcome::success()); } }
                4 => { if !w.published.is_empty() { w.ack(); } }
                5 => {
                    let number = w.published.last().map_or(0, |(n, _)| *n);
                    w.give(Input::ReportFailed { incarnation: Incarnation(1), number });
                }
                6 => { let now = w.now_ms + u64::from(x) * 40; w.at(now); }
                7 => { let bundle = BundleId { sequence: 10, place: x };
                       w.work(vec![Order::HandBack { bundle, tasks: vec![Run { first: 0, count: 1_000 }] }]); }
                _ => w.answer(false),
            }
            prop_assert!(w.running.len() <= 2);
        }
        for _ in 0..400 {
            for slot in 0..2 { if w.running.contains_key(&slot) { w.end(slot, Outcome::success()); } }
            let now = w.now_ms + 100;
            w.at(now);
            if !w.published.is_empty() { w.ack(); }
        }
        prop_assert_eq!(w.core.held(), 0);
        prop_assert!(w.starts.values().all(|n| *n == 1));
        let reported: BTreeSet<u32> =
            w.published.iter().flat_map(|(_, ends)| ends.iter().map(|end| end.name.index)).collect();
        prop_assert_eq!(reported, sent);
    }
}
