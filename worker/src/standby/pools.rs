//! How many machines wait for which template.
//!
//! Owns demand, budget, age and refill. Pure: time comes as milliseconds, and what is to be done is returned.

use std::collections::{BTreeMap, VecDeque};

use crate::template::TemplateName;

/// As many machines wait as were taken within this time, in milliseconds: a burst is met again, and one task an hour keeps none.
const DEMAND_MS: u64 = 10_000;
/// And one for so long after the last was taken, in milliseconds.
const IDLE_MS: u64 = 60_000;
/// How long a machine waits at most, in milliseconds: what stands still for hours holds memory whose template may be gone.
const AGE_MS_MAX: u64 = 600_000;
/// Wait after a restore that failed, in milliseconds: the next one may fail too.
const FAILED_MS: u64 = 5_000;

/// Names a machine that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MachineId(u64);

/// How many there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of all templates together: the memory budget, in machines.
    pub machines_max: u32,
    /// Of one template: more than the worker has slots can't be taken at once.
    pub of_one_max: u32,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Restore a machine; then say [`Pools::restored`] or [`Pools::failed`].
    Start(TemplateName),
    /// Kill one that waits.
    Kill(MachineId),
    /// The template is not wanted any more.
    Forget(TemplateName),
}

#[derive(Debug, Default)]
struct Pool {
    ready: VecDeque<(MachineId, u64)>,
    starting: u32,
    /// When machines were asked for, as many as count.
    asked: VecDeque<u64>,
    not_before_ms: u64,
}

impl Pool {
    fn have(&self) -> u32 {
        u32::try_from(self.ready.len()).unwrap_or(u32::MAX).saturating_add(self.starting)
    }

    fn last_asked(&self) -> u64 {
        self.asked.back().copied().unwrap_or(0)
    }

    fn wanted(&self, now_ms: u64, of_one_max: u32) -> u32 {
        let since = |span: u64| now_ms.saturating_sub(span);
        match self.asked.back() {
            Some(last) if *last >= since(IDLE_MS) => {
                let recent = self.asked.iter().filter(|at| **at >= since(DEMAND_MS)).count();
                u32::try_from(recent).unwrap_or(u32::MAX).clamp(1, of_one_max.max(1)).min(of_one_max)
            }
            _ => 0,
        }
    }
}

/// The pools of all templates.
#[derive(Debug)]
pub struct Pools {
    limits: Limits,
    /// So many places of all are somebody else's.
    left: u32,
    pools: BTreeMap<TemplateName, Pool>,
    next: u64,
}

impl Pools {
    /// None.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, left: 0, pools: BTreeMap::new(), next: 0 }
    }

    /// A task wants a machine: the one that has waited longest, if one waits.
    pub fn take(&mut self, now_ms: u64, name: TemplateName) -> Option<MachineId> {
        let pool = self.pools.entry(name).or_default();
        pool.asked.push_back(now_ms);
        while pool.asked.len() > self.limits.of_one_max.max(1) as usize {
            pool.asked.pop_front();
        }
        pool.ready.pop_front().map(|(id, _)| id)
    }

    /// Leaves so many places of all to others, from now on.
    pub fn leave(&mut self, machines: u32) {
        self.left = machines;
    }

    fn machines_max(&self) -> u32 {
        self.limits.machines_max.saturating_sub(self.left)
    }

    /// A restore ended well. The machine's name, or none: it is not wanted any more.
    pub fn restored(&mut self, now_ms: u64, name: TemplateName) -> Option<MachineId> {
        let (of_one_max, too_many) = (self.limits.of_one_max, self.total() > self.machines_max());
        let pool = self.pools.get_mut(&name)?;
        pool.starting = pool.starting.checked_sub(1)?;
        if too_many || pool.have() >= pool.wanted(now_ms, of_one_max) {
            return None;
        }
        self.next += 1;
        pool.ready.push_back((MachineId(self.next), now_ms));
        Some(MachineId(self.next))
    }

    /// A restore failed.
    pub fn failed(&mut self, now_ms: u64, name: TemplateName) {
        if let Some(pool) = self.pools.get_mut(&name) {
            pool.starting = pool.starting.saturating_sub(1);
            pool.not_before_ms = now_ms.saturating_add(FAILED_MS);
        }
    }

    /// Forgets everything; what is being restored is not wanted any more.
    pub fn clear(&mut self) {
        self.pools.clear();
    }

    fn total(&self) -> u32 {
        self.pools.values().map(Pool::have).sum()
    }

    /// What is to be done now.
    pub fn plan(&mut self, now_ms: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        let (machines_max, of_one_max) = (self.machines_max(), self.limits.of_one_max);
        for (name, pool) in &mut self.pools {
            let wanted = pool.wanted(now_ms, of_one_max);
            while pool.ready.front().is_some_and(|(_, born)| born.saturating_add(AGE_MS_MAX) <= now_ms) || (pool.have() > wanted) {
                let Some((id, _)) = pool.ready.pop_front() else { break };
                actions.push(Action::Kill(id));
            }
            if wanted == 0 && pool.have() == 0 {
                actions.push(Action::Forget(*name));
            }
        }
        // Places were left to others: those of templates that were asked for longest ago go.
        while self.total() > machines_max {
            let ready = self.pools.values_mut().filter(|pool| !pool.ready.is_empty());
            let Some((id, _)) = ready.min_by_key(|pool| pool.last_asked()).and_then(|pool| pool.ready.pop_front()) else { break };
            actions.push(Action::Kill(id));
        }
        self.pools.retain(|_, pool| pool.have() > 0 || pool.wanted(now_ms, of_one_max) > 0);
        // Those that have the fewest first, so that a template with much demand does not keep the others without.
        loop {
            let wants = |pool: &&Pool| pool.have() < pool.wanted(now_ms, of_one_max) && pool.not_before_ms <= now_ms;
            let next = self.pools.iter().filter(|(_, pool)| wants(pool)).min_by_key(|(name, pool)| (pool.have(), **name));
            let Some((name, have)) = next.map(|(name, pool)| (*name, pool.have())) else { return actions };
            if self.total() >= machines_max {
                match self.give_up(name, have) {
                    Some(id) => actions.push(Action::Kill(id)),
                    None => return actions,
                }
            }
            if let Some(pool) = self.pools.get_mut(&name) {
                pool.starting += 1;
            }
            actions.push(Action::Start(name));
        }
    }

    /// One that makes room for a template's first machine: of another that was asked for longest ago, before this one.
    fn give_up(&mut self, name: TemplateName, have: u32) -> Option<MachineId> {
        let asked = self.pools.get(&name)?.last_asked();
        let others = self.pools.iter_mut().filter(|(other, pool)| **other != name && !pool.ready.is_empty());
        let (_, pool) = others.filter(|(_, pool)| have == 0 && pool.last_asked() < asked).min_by_key(|(_, pool)| pool.last_asked())?;
        pool.ready.pop_front().map(|(id, _)| id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(number: u8) -> TemplateName {
        TemplateName([number; 32])
    }

    fn started(actions: &[Action], of: u8) -> usize {
        actions.iter().filter(|action| **action == Action::Start(name(of))).count()
    }

    #[test]
    fn as_many_wait_as_were_wanted_lately() {
        let mut pools = Pools::new(Limits { machines_max: 10, of_one_max: 3 });
        assert_eq!(pools.plan(0), []);
        assert_eq!(pools.take(0, name(1)), None);
        assert_eq!(pools.plan(0), [Action::Start(name(1))]);
        let first = pools.restored(50, name(1)).unwrap();
        assert_eq!(pools.plan(50), []);
        assert_eq!(pools.take(60, name(1)), Some(first));
        // Two within ten seconds: two wait.
        assert_eq!(started(&pools.plan(60), 1), 2);
        for at in 61..70 {
            pools.take(at, name(1));
        }
        assert_eq!(started(&pools.plan(70), 1), 1, "never more than the worker has slots");
        let all: Vec<_> = (0..3).map(|_| pools.restored(80, name(1)).unwrap()).collect();
        // The burst is over: one is kept, for a minute.
        assert_eq!(pools.plan(DEMAND_MS + 100), [Action::Kill(all[0]), Action::Kill(all[1])]);
        assert_eq!(pools.plan(IDLE_MS), []);
        assert_eq!(pools.plan(IDLE_MS + 100), [Action::Kill(all[2]), Action::Forget(name(1))]);
    }

    #[test]
    fn what_failed_is_not_tried_at_once_and_what_is_old_is_replaced() {
        let mut pools = Pools::new(Limits { machines_max: 10, of_one_max: 1 });
        pools.take(0, name(1));
        assert_eq!(started(&pools.plan(0), 1), 1);
        pools.failed(10, name(1));
        assert_eq!(pools.plan(10), []);
        assert_eq!(started(&pools.plan(10 + FAILED_MS), 1), 1);
        let id = pools.restored(6_000, name(1)).unwrap();
        for at in (0..AGE_MS_MAX + 6_000).step_by(30_000) {
            // Taken elsewhere, so that it stays wanted.
            pools.pools.get_mut(&name(1)).unwrap().asked.push_back(at);
        }
        assert_eq!(pools.plan(AGE_MS_MAX + 6_000), [Action::Kill(id), Action::Start(name(1))]);
        // Nobody wants it when it comes.
        assert_eq!(pools.restored(2 * AGE_MS_MAX, name(1)), None);
        pools.take(2 * AGE_MS_MAX, name(1));
        pools.plan(2 * AGE_MS_MAX);
        pools.clear();
        assert_eq!(pools.restored(2 * AGE_MS_MAX, name(1)), None);
    }

    #[test]
    fn a_template_without_any_gets_the_place_of_one_that_was_used_before() {
        let mut pools = Pools::new(Limits { machines_max: 2, of_one_max: 4 });
        for at in 0..4 {
            pools.take(at, name(1));
        }
        assert_eq!(started(&pools.plan(4), 1), 2);
        let first = pools.restored(5, name(1)).unwrap();
        pools.restored(5, name(1)).unwrap();
        pools.take(6, name(2));
        assert_eq!(pools.plan(6), [Action::Kill(first), Action::Start(name(2))]);
        assert_eq!(pools.plan(7), []);
        let mut none = Pools::new(Limits { machines_max: 0, of_one_max: 4 });
        none.take(0, name(1));
        assert_eq!(none.plan(0), []);
    }

    #[test]
    fn places_that_are_left_to_others_are_given_up_and_taken_again() {
        let mut pools = Pools::new(Limits { machines_max: 3, of_one_max: 4 });
        for at in 0..3 {
            pools.take(at, name(1));
        }
        pools.take(3, name(2));
        assert_eq!(pools.plan(3).len(), 3);
        let first = pools.restored(4, name(1)).unwrap();
        let other = pools.restored(4, name(2)).unwrap();
        pools.leave(1);
        assert_eq!(pools.plan(5), [Action::Kill(first)]);
        pools.leave(2);
        assert_eq!(pools.plan(6), [Action::Kill(other)], "what is being restored can't be killed");
        assert!(pools.restored(7, name(1)).is_some());
        pools.leave(9);
        assert_eq!(pools.plan(8).len(), 1);
        assert_eq!(pools.plan(9), []);
        pools.leave(0);
        assert_eq!(pools.plan(10).len(), 3);
    }

    proptest! {
        #[test]
        fn the_budget_holds_and_no_machine_is_taken_twice(
            ops in proptest::collection::vec((0u8..4, 0u8..3, 0u64..20_000), 0..200), machines_max in 0u32..5, of_one_max in 0u32..4,
        ) {
            let mut pools = Pools::new(Limits { machines_max, of_one_max });
            let (mut now, mut alive, mut starting) = (0, std::collections::BTreeSet::new(), [0u32; 3]);
            for (op, which, later) in ops {
                now += later;
                match op {
                    0 => if let Some(id) = pools.take(now, name(which)) { prop_assert!(alive.remove(&id)); },
                    1 if starting[which as usize] > 0 => {
                        starting[which as usize] -= 1;
                        if let Some(id) = pools.restored(now, name(which)) { prop_assert!(alive.insert(id)); }
                    }
                    2 if starting[which as usize] > 0 => {
                        starting[which as usize] -= 1;
                        pools.failed(now, name(which));
                    }
                    _ => {}
                }
                for action in pools.plan(now) {
                    match action {
                        Action::Start(TemplateName(bytes)) => starting[bytes[0] as usize] += 1,
                        Action::Kill(id) => prop_assert!(alive.remove(&id)),
                        Action::Forget(TemplateName(bytes)) => prop_assert_eq!(starting[bytes[0] as usize], 0),
                    }
                }
                prop_assert!(alive.len() as u32 + starting.iter().sum::<u32>() <= machines_max);
                prop_assert_eq!(pools.plan(now), vec![], "once planned, nothing is left");
            }
        }
    }
}
