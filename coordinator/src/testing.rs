//! Values for this crate's tests.

use std::collections::BTreeMap;

use volley_jobspecs::backoff::Backoff;
use volley_jobspecs::wire::plan::{Isolation, JobPlan, Needs, Retention, Retry};
use volley_jobspecs::wire::work::WorkerInfo;

/// The plan of a job without limits, whose tasks run nothing and are tried once; kept for ever.
pub fn plan(tasks: u32) -> JobPlan {
    JobPlan {
        name: "job".to_owned(),
        labels: BTreeMap::new(),
        tasks,
        priority: 0,
        weight: 100,
        concurrency: None,
        rate: None,
        fail_fast: None,
        queue_ms: None,
        total_ms: None,
        start_ms: 60_000,
        run_ms: 60_000,
        retry: Retry { attempts: 1, infra_attempts: 10, backoff: Backoff::default(), rules: Vec::new() },
        needs: Needs {
            cpu_milli: 1,
            memory_bytes: 0,
            disk_bytes: 0,
            isolation: Isolation::Null,
            labels: BTreeMap::new(),
            limits: false,
            image: None,
            volumes: None,
        },
        retention: Retention { job_ms: None, failed_objects_ms: None },
        items: None,
        volumes: Vec::new(),
    }
}

/// What a worker has that offers this tier, with so many slots: four cores, and a gibibyte of memory and of disk.
pub fn worker_info(slots: u32, tier: Isolation) -> WorkerInfo {
    WorkerInfo {
        slots,
        cpu_milli: 4_000,
        memory_bytes: 1 << 30,
        disk_bytes: 1 << 30,
        isolation: vec![tier],
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
