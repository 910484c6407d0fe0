//! Values for this crate's tests.

use std::collections::BTreeMap;

use volley_jobspecs::backoff::Backoff;
use volley_jobspecs::wire::plan::{Isolation, JobPlan, Needs, Retention, Retry};

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
        },
        retention: Retention { job_ms: None, failed_objects_ms: None },
        items: None,
        volumes: Vec::new(),
    }
}
