//! From a valid job to the plan that the log carries.
//!
//! Owns the translation: units to numbers, defaults to values, a share of failures to a count. Does not own either side's shape
//! (`validate`, `wire::plan`).

use crate::backoff::Backoff;
use crate::image;
use crate::machine;
use crate::spec::volumes::parse_name;
use crate::spec::{
    Access, FailFastMode, FailureLimit, Isolation, Keep, Placement, Resources, RetentionSpec, RetryAction, RetrySpec, TaskSpec, VolumeMount,
};
use crate::validate::ValidJob;
use crate::wire::plan;
use crate::wire::volume::{self, VolumePlan};

/// CPU set aside for a task that doesn't say, in thousandths of a core.
pub const CPU_MILLI_DEFAULT: u32 = 1_000;

/// Plans the first stage of a job that has `tasks` tasks: [`ValidJob::tasks`], or what the index of its items' file says.
#[must_use]
pub fn plan(job: &ValidJob, tasks: u32) -> plan::JobPlan {
    let spec = job.spec();
    let task = job.task();
    let limits = &spec.limits;
    let fail_fast = limits.max_failures.map(|limit: FailureLimit| plan::FailFast {
        failures_max: limit.of(tasks),
        stop_running: limits.fail_fast == Some(FailFastMode::Now),
    });
    plan::JobPlan {
        name: spec.name.clone(),
        labels: spec.labels.clone(),
        tasks,
        priority: spec.priority,
        weight: spec.weight,
        concurrency: limits.concurrency,
        rate: limits.rate.map(|rate| plan::Rate { count: rate.count, per_ms: rate.per.ms() }),
        fail_fast,
        queue_ms: task.timeouts.queue.map(|queue| queue.0),
        total_ms: limits.deadline.map(|deadline| deadline.0),
        start_ms: task.timeouts.start.0,
        run_ms: task.timeouts.run.0,
        retry: retry(&task.retry),
        needs: plan::Needs {
            image: image(task),
            volumes: (!task.volumes.is_empty()).then_some(true),
            ..needs(task.isolation, &task.resources, &spec.placement)
        },
        retention: retention(&spec.retention),
        items: None,
        volumes: task.volumes.iter().filter_map(volume).collect(),
    }
}

/// None only for a name that is none, which was refused before.
fn volume(mount: &VolumeMount) -> Option<VolumePlan> {
    // A name with something to be put in is no name yet; it has no snapshot, as it is written.
    let (name, snapshot) = match mount.access {
        Access::Rw => (mount.volume.as_str(), None),
        Access::Ro | Access::Clone => parse_name(&mount.volume).ok()?,
    };
    let access = match mount.access {
        Access::Ro => volume::Access::Ro,
        Access::Rw => volume::Access::Rw,
        Access::Clone => volume::Access::Clone,
    };
    let size_bytes = mount.size.filter(|_| mount.access == Access::Rw).map(|size| size.0);
    Some(VolumePlan { name: name.to_owned(), snapshot: snapshot.map(str::to_owned), access, size_bytes })
}

fn retry(retry: &RetrySpec) -> plan::Retry {
    let rule = |rule: &crate::spec::RetryRuleSpec| plan::RetryRule {
        classes: rule.matches.classes.clone(),
        exit_codes: rule.matches.exit_codes.iter().map(|codes| (i32::from(codes.from), i32::from(codes.to))).collect(),
        signals: rule.matches.signals.iter().map(|signal| i32::from(signal.0)).collect(),
        retry: rule.action == RetryAction::Retry,
    };
    plan::Retry {
        attempts: retry.attempts,
        infra_attempts: retry.infra_attempts,
        backoff: Backoff { initial_ms: retry.backoff.initial.0, factor_milli: retry.backoff.factor.0, cap_ms: retry.backoff.cap.0 },
        rules: retry.rules.iter().map(rule).collect(),
    }
}

/// The image of all tasks, where they have one and it is the same one.
fn image(task: &TaskSpec) -> Option<u64> {
    let has_image = matches!(task.isolation, Isolation::Container | Isolation::Microvm);
    // What stands for a value is put in by the worker, for each task.
    let name = task.image.as_deref().filter(|name| has_image && !name.contains("${"))?;
    image::key(name)
}

fn needs(isolation: Isolation, resources: &Resources, placement: &Placement) -> plan::Needs {
    let limited = resources.cpus.is_some() || resources.memory.is_some() || resources.pids.is_some();
    let (memory, disk) = (resources.memory.map_or(0, |memory| memory.0), resources.disk.map_or(0, |disk| disk.0));
    let (tier, cpu_default, memory_bytes, disk_bytes, limits) = match isolation {
        // Nothing runs, so nothing is set aside.
        Isolation::Null => (plan::Isolation::Null, 0, memory, disk, limited),
        Isolation::Process => (plan::Isolation::Process, CPU_MILLI_DEFAULT, memory, disk, limited),
        Isolation::Container => (plan::Isolation::Container, CPU_MILLI_DEFAULT, memory, disk, limited),
        // A machine is its own limit: its host needs no permission on cgroups for it.
        Isolation::Microvm => {
            let (memory, disk) = (machine::host_memory_bytes(resources), machine::disk_bytes(resources));
            (plan::Isolation::Microvm, CPU_MILLI_DEFAULT, memory, disk, false)
        }
    };
    plan::Needs {
        cpu_milli: resources.cpus.map_or(cpu_default, |cpus| cpus.0),
        memory_bytes,
        disk_bytes,
        isolation: tier,
        labels: placement.labels.clone(),
        limits,
        image: None,
        volumes: None,
    }
}

fn retention(retention: &RetentionSpec) -> plan::Retention {
    let ms = |keep: Keep| match keep {
        Keep::For(duration) => Some(duration.0),
        Keep::Forever => None,
    };
    let job_ms = ms(retention.job);
    // What failed goes with the job at the latest.
    let failed_objects_ms = match (ms(retention.failed_outputs), job_ms) {
        (Some(failed), Some(job)) => Some(failed.min(job)),
        (failed, _) => failed,
    };
    plan::Retention { job_ms, failed_objects_ms }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::failure::FailureClass;
    use crate::parse::parse_and_validate;
    use crate::validate::Features;
    use serde_json::{Value, json};

    fn plan_of(spec: Value) -> plan::JobPlan {
        let job = parse_and_validate(spec.to_string().as_bytes(), &Features::all()).unwrap_or_else(|e| panic!("{e}"));
        plan(&job, job.tasks().unwrap_or(200))
    }

    #[test]
    fn every_field_arrives() {
        let got = plan_of(json!({
            "version": "volley/v1", "name": "n", "labels": { "a": "b" }, "items": { "jsonl": { "upload": "u" } },
            "task": {
                "isolation": "process", "command": "x", "resources": { "cpus": "1500m", "memory": "1GiB", "disk": "2GB" },
                "timeouts": { "queue": "1h", "start": "2s", "run": "3s" },
                "retry": {
                    "attempts": 3, "infraAttempts": 4, "backoff": { "initial": "2s", "factor": 1.5, "cap": "9s" },
                    "rules": [{ "match": { "exitCodes": ["3-5"] }, "action": "retry" }, { "match": { "signals": [9] }, "action": "fail" },
                              { "match": { "classes": ["oom"] }, "action": "fail" }]
                }
            },
            "limits": { "concurrency": 7, "rate": "5/m", "maxFailures": "5%", "failFast": "now", "deadline": "1d" },
            "priority": 9, "weight": 50, "retention": { "job": "1h" }, "placement": { "labels": { "zone": "z" } }
        }));
        let rule = |classes, exit_codes, signals, retry| plan::RetryRule { classes, exit_codes, signals, retry };
        let wanted = plan::JobPlan {
            name: "n".into(),
            labels: BTreeMap::from([("a".into(), "b".into())]),
            tasks: 200,
            priority: 9,
            weight: 50,
            concurrency: Some(7),
            rate: Some(plan::Rate { count: 5, per_ms: 60_000 }),
            fail_fast: Some(plan::FailFast { failures_max: 10, stop_running: true }),
            queue_ms: Some(3_600_000),
            total_ms: Some(86_400_000),
            start_ms: 2_000,
            run_ms: 3_000,
            retry: plan::Retry {
                attempts: 3,
                infra_attempts: 4,
                backoff: Backoff { initial_ms: 2_000, factor_milli: 1_500, cap_ms: 9_000 },
                rules: vec![
                    rule(vec![], vec![(3, 5)], vec![], true),
                    rule(vec![], vec![], vec![9], false),
                    rule(vec![FailureClass::Oom], vec![], vec![], false),
                ],
            },
            needs: plan::Needs {
                cpu_milli: 1_500,
                memory_bytes: 1 << 30,
                disk_bytes: 2_000_000_000,
                isolation: plan::Isolation::Process,
                labels: BTreeMap::from([("zone".into(), "z".into())]),
                limits: true,
                image: None,
                volumes: None,
            },
            retention: plan::Retention { job_ms: Some(3_600_000), failed_objects_ms: Some(3_600_000) },
            items: None,
            volumes: vec![],
        };
        assert_eq!(got, wanted);
    }

    #[test]
    fn volumes_are_planned_slot_by_slot() {
        let got = plan_of(
            json!({ "version": "volley/v1", "name": "n", "items": { "count": 2 }, "task": { "image": "i", "command": "x", "volumes": [
            { "volume": "a", "path": "/a" }, { "volume": "b@s", "path": "/b", "access": "clone", "size": "1GiB" },
            { "volume": "c-${index}", "path": "/c", "access": "rw", "size": "1GiB" }
        ] } }),
        );
        let volume = |name: &str, snapshot: Option<&str>, access, size_bytes| VolumePlan {
            name: name.to_owned(),
            snapshot: snapshot.map(str::to_owned),
            access,
            size_bytes,
        };
        let wanted = [
            volume("a", None, volume::Access::Ro, None),
            volume("b", Some("s"), volume::Access::Clone, None),
            volume("c-${index}", None, volume::Access::Rw, Some(1 << 30)),
        ];
        assert_eq!(got.volumes, wanted);
    }

    #[test]
    fn a_job_that_says_little_gets_the_documented_defaults() {
        let got = plan_of(json!({ "version": "volley/v1", "name": "n", "task": { "isolation": "process", "command": "x" } }));
        assert_eq!((got.tasks, got.weight, got.concurrency, got.fail_fast, got.queue_ms), (1, 100, None, None, None));
        assert_eq!((got.start_ms, got.run_ms, got.retry.attempts, got.retry.infra_attempts), (300_000, 3_600_000, 1, 10));
        assert_eq!(got.retry.backoff, Backoff::default());
        assert_eq!((got.needs.cpu_milli, got.needs.memory_bytes, got.needs.limits), (1_000, 0, false));
        assert_eq!(got.retention.job_ms, Some(30 * 86_400_000));
    }

    #[test]
    fn a_machine_is_set_aside_as_a_whole() {
        let resources = json!({ "cpus": 2, "memory": "1GiB" });
        let task = json!({ "isolation": "microvm", "image": "i", "command": "x", "resources": resources });
        let needs = plan_of(json!({ "version": "volley/v1", "name": "n", "task": task })).needs;
        assert_eq!((needs.cpu_milli, needs.memory_bytes >> 20, needs.disk_bytes >> 20, needs.limits), (2_000, 1_192, 2_048, false));
    }
}
