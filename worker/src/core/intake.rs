//! What comes from the leader: work messages with their orders, and jobs.
//!
//! Owns what each order does to the state. Does not own which messages count (`claim`).

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{BundleId, JobId};
use volley_jobspecs::units::{cores, different_bytes};
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::record::Run;
use volley_jobspecs::wire::report::{AttemptEnd, Ending, Timing};
use volley_jobspecs::wire::work::{Bundle, HasVolumes, Order, WorkMessage};

use super::{Action, Core, Going, Job, JobAnswer, JobFacts};
use crate::attempt::StopCause;
use crate::bundle::HeldBundle;
use crate::claim;
use crate::report::Origin;
use crate::trace::{Stage, Stages};

/// Wait before a job is asked for again, in milliseconds.
const JOB_RETRY_MS: u64 = 500;
/// How often a leader may say that it knows no such job before its tasks are given up: a new leader may still be reading the log.
const JOB_MISSING_MAX: u32 = 10;

impl Core {
    pub(super) fn on_work(&mut self, now_ms: u64, message: WorkMessage, out: &mut Vec<Action>) {
        if matches!(self.going, Going::Dying { .. } | Going::Unborn | Going::Gone) {
            return;
        }
        match claim::claim(&mut self.heard, message) {
            Ok(orders) => {
                for order in orders {
                    self.on_order(now_ms, order, out);
                }
            }
            Err(why) => out.push(Action::Dropped(why)),
        }
        out.push(Action::Answer(self.heard.answer()));
    }

    fn on_order(&mut self, now_ms: u64, order: Order, out: &mut Vec<Action>) {
        match order {
            Order::Run(bundle) => self.on_run(now_ms, &bundle),
            Order::Stop { bundle, tasks } => {
                self.hand_back(now_ms, bundle, Some(&tasks), None);
                self.stop_running(now_ms, bundle, Some(&tasks), StopCause::Cancelled, out);
            }
            Order::HandBack { bundle, tasks } => self.hand_back(now_ms, bundle, Some(&tasks), None),
            Order::Forget { bundle } => self.on_forget(now_ms, bundle, out),
        }
    }

    fn on_run(&mut self, now_ms: u64, bundle: &Bundle) {
        if self.bundles.contains_key(&bundle.id) {
            return;
        }
        let held = HeldBundle::new(bundle, now_ms);
        if held.is_done() {
            return;
        }
        self.bundles.insert(bundle.id, held);
        // Another bundle than agreed on is handed back rather than kept waiting where the leader doesn't count it.
        if self.going != Going::On || self.slots.enqueue(bundle.id).is_err() {
            self.hand_back(now_ms, bundle.id, None, None);
            return;
        }
        self.jobs.entry(bundle.job).or_insert(Job::AskAgain { at_ms: now_ms, missing: 0 });
    }

    /// Ends what waits of a bundle, as returned or as `failed` says.
    pub(super) fn hand_back(&mut self, now_ms: u64, id: BundleId, tasks: Option<&[Run]>, failed: Option<(FailureClass, &str)>) {
        let Some(bundle) = self.bundles.get_mut(&id) else { return };
        let isolation = match self.jobs.get(&bundle.job) {
            Some(Job::Known(facts)) => facts.needs.isolation,
            _ => Isolation::Process,
        };
        let wait_ms = u32::try_from(now_ms.saturating_sub(bundle.received_ms)).unwrap_or(u32::MAX);
        let mut stages = Stages::default();
        if failed.is_some() {
            stages.add(Stage::Claim, u64::from(wait_ms) * 1_000);
        }
        let places = bundle.end_waiting(tasks);
        let names: Vec<_> = places.into_iter().filter_map(|place| Some((place, bundle.name(place)?))).collect();
        if !bundle.has_waiting() {
            self.slots.unqueue(id);
        }
        for (place, name) in names {
            let end = AttemptEnd {
                message: failed.map(|(_, message)| message.to_owned()),
                timing: Timing { wait_ms, ..Timing::default() },
                ..AttemptEnd::bare(name, failed.map_or(Ending::Returned, |(class, _)| Ending::Failed(class)), isolation)
            };
            self.take_end(now_ms, end, stages, Origin { bundle: id, place });
        }
    }

    pub(super) fn stop_running(&mut self, now_ms: u64, id: BundleId, tasks: Option<&[Run]>, cause: StopCause, out: &mut Vec<Action>) {
        let Some(bundle) = self.bundles.get(&id) else { return };
        for (slot, current) in (0u32..).zip(&mut self.current) {
            let Some(current) = current else { continue };
            let meant = current.bundle == id && tasks.is_none_or(|tasks| bundle.is_among(current.place, tasks));
            if meant && let Some(force) = current.attempt.stop(now_ms, cause) {
                out.push(current.stop_action(slot, force));
            }
        }
    }

    fn on_forget(&mut self, now_ms: u64, id: BundleId, out: &mut Vec<Action>) {
        self.stop_running(now_ms, id, None, StopCause::Forgotten, out);
        self.slots.unqueue(id);
        self.outbox.forget(id);
        self.kept.retain(|(bundle, _), _| *bundle != id);
        if let Some(bundle) = self.bundles.get_mut(&id) {
            bundle.forget();
        }
        self.drop_if_done(id);
    }

    pub(super) fn on_job(&mut self, now_ms: u64, job: JobId, answer: JobAnswer) {
        let Some(Job::Asked { missing }) = self.jobs.get(&job).cloned() else { return };
        let ask_again = |missing| Job::AskAgain { at_ms: now_ms + JOB_RETRY_MS, missing };
        let refused = match answer {
            JobAnswer::Known(facts) => {
                let refused = self.refuse(&facts);
                self.jobs.insert(job, Job::Known(facts));
                refused
            }
            JobAnswer::Missing if missing + 1 < JOB_MISSING_MAX => {
                self.jobs.insert(job, ask_again(missing + 1));
                None
            }
            JobAnswer::Missing => {
                Some((FailureClass::HostLost, format!("the coordinator knows no job {job}, asked {JOB_MISSING_MAX} times")))
            }
            JobAnswer::Unusable(why) => Some((FailureClass::PolicyDenied, why)),
            JobAnswer::NoAnswer => {
                self.jobs.insert(job, ask_again(missing));
                None
            }
        };
        if let Some((class, message)) = refused {
            let ids: Vec<BundleId> = self.bundles.values().filter(|b| b.job == job).map(|b| b.id).collect();
            for id in ids {
                self.hand_back(now_ms, id, None, Some((class, &message)));
            }
            self.jobs.remove(&job);
        }
    }

    /// Why a job's tasks can't run here, if they can't.
    fn refuse(&self, facts: &JobFacts) -> Option<(FailureClass, String)> {
        let info = &self.config.info;
        let worker = &self.config.worker;
        let needs = &facts.needs;
        let why = if !info.isolation.contains(&needs.isolation) {
            format!("worker {worker} offers no isolation {:?}; choose another pool or isolation", needs.isolation.as_str())
        } else if needs.limits && needs.isolation != Isolation::Microvm && !info.limits {
            // A machine limits what runs in it by itself.
            format!(
                "worker {worker} can't enforce cpu, memory or pids limits: it has no writable cgroups; run it as root or with a \
                 delegated cgroup, or leave out task.resources"
            )
        } else if needs.volumes == Some(true) && info.volumes != Some(HasVolumes::Yes) {
            return Some((
                FailureClass::StorageFailed,
                format!("worker {worker} can't have volumes; `volley explain` of a task that waits says why"),
            ));
        } else if !self.slots.could_fit(needs) {
            let (cpu, worker_cpu) = (cores(needs.cpu_milli.into()), cores(info.cpu_milli.into()));
            let (memory, worker_memory) = different_bytes(needs.memory_bytes, info.memory_bytes);
            let (disk, worker_disk) = different_bytes(needs.disk_bytes, info.disk_bytes);
            format!(
                "a task needs {cpu} cores, {memory} of memory and {disk} of disk, worker {worker} has {worker_cpu}, {worker_memory} and \
                 {worker_disk}"
            )
        } else {
            return None;
        };
        Some((FailureClass::PolicyDenied, why))
    }
}
