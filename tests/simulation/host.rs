//! A worker: the real core, with an executor that only sleeps, and a notebook of what really ran when.

use std::collections::BTreeMap;

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, Incarnation, WorkerId};
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::work::WorkerInfo;
use volley_worker::attempt::Outcome;
use volley_worker::core::{Core, CoreConfig};

use super::random::Random;

/// Milliseconds between beats.
pub const BEAT_MS: u64 = 3_000;

pub struct Host {
    pub name: WorkerId,
    pub core: Core,
    pub up: bool,
    pub frozen_until: u64,
    /// What runs in each slot: the attempt and when it ends by itself.
    pub running: BTreeMap<u32, (AttemptName, u64)>,
    /// Grows with each restart, so that late events of an older life are told apart.
    pub life: u64,
    pub slots: u32,
}

pub fn config(name: &WorkerId, slots: u32) -> CoreConfig {
    let info = WorkerInfo {
        slots,
        cpu_milli: slots * 1_000,
        memory_bytes: 1 << 30,
        disk_bytes: 1 << 30,
        isolation: vec![Isolation::Process],
        labels: BTreeMap::new(),
        limits: true,
        build: "simulated".to_owned(),
        host: name.to_string(),
        lacks: Vec::new(),
        template_bytes: None,
        images: None,
        fetches: false,
        volumes: None,
    };
    CoreConfig { worker: name.clone(), info, beat_ms: BEAT_MS, linger_ms: 5, unsent_bytes_max: 1 << 20, traced: true }
}

impl Host {
    pub fn new(name: &str, slots: u32, random: &mut Random, world_ms: u64) -> Self {
        let name = WorkerId::new(name).unwrap();
        let core = Core::new(config(&name, slots), Incarnation(random.next()), world_ms);
        Self { name, core, up: true, frozen_until: 0, running: BTreeMap::new(), life: 0, slots }
    }

    /// The process dies and its tasks with it (the next start kills what is left before it joins); then it starts again.
    pub fn restart(&mut self, random: &mut Random, world_ms: u64) {
        self.core = Core::new(config(&self.name, self.slots), Incarnation(random.next()), world_ms);
        self.up = true;
        self.running.clear();
        self.life += 1;
    }

    pub fn runs(&self, world_ms: u64) -> bool {
        self.up && self.frozen_until <= world_ms
    }
}

/// How an attempt comes out: decided by its name, so that a replay agrees.
pub fn outcome(name: &AttemptName, failing: u64) -> Outcome {
    let mut random = Random::new(name.job.0 ^ (u64::from(name.index) << 20) ^ (u64::from(name.number) << 50));
    if random.below(100) >= failing {
        return Outcome::success();
    }
    let class = match random.below(5) {
        0 => FailureClass::Signal,
        1 => FailureClass::StorageFailed,
        2 => FailureClass::InputMissing,
        _ => FailureClass::ExitCode,
    };
    Outcome { code: Some(1), ..Outcome::failed(class, "simulated".to_owned()) }
}

/// How long an attempt runs, in milliseconds.
pub fn duration(name: &AttemptName) -> u64 {
    let mut random = Random::new(name.job.0 ^ (u64::from(name.index) << 24) ^ (u64::from(name.number) << 52) ^ 7);
    match random.below(50) {
        0 => random.between(1_000, 8_000),
        1..=5 => random.between(50, 500),
        _ => random.between(1, 10),
    }
}
