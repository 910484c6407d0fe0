//! retry: is there another try, and when?
//!
//! Owns rules and budgets. Does not own classes (`jobspecs::failure`) or the arithmetic of waiting (`jobspecs::backoff`).

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::plan::{Retry, RetryRule};

use crate::state::task::Cell;

/// What decides about a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// There is another try; the count of failures of this kind before this one.
    Again(u16),
    /// The rule at this place says that there is none.
    Rule(usize),
    /// No rule is about it, and its class is not tried again by itself.
    Class,
    /// The budget of this many is used up.
    Budget(u16),
}

/// Is there another try? `cell` is the task before this failure is counted.
#[must_use]
pub fn verdict(policy: &Retry, cell: &Cell, class: FailureClass, code: Option<i32>) -> Verdict {
    let rule = policy.rules.iter().position(|rule| matches(rule, class, code));
    let (used, budget) = if class.is_infra() { (cell.infra, policy.infra_attempts) } else { (cell.failures, policy.attempts) };
    match rule {
        Some(place) if !policy.rules[place].retry => Verdict::Rule(place),
        None if !class.retry_by_default() => Verdict::Class,
        Some(_) | None if used.saturating_add(1) >= budget => Verdict::Budget(budget),
        Some(_) | None => Verdict::Again(used),
    }
}

/// How long until the next try, in milliseconds; `None`: there is none. `cell` is the task before this failure is counted.
#[must_use]
pub fn decide(policy: &Retry, job: JobId, index: u32, cell: &Cell, class: FailureClass, code: Option<i32>) -> Option<u64> {
    match verdict(policy, cell, class, code) {
        Verdict::Again(used) => Some(policy.backoff.delay_ms(u32::from(used) + 1, job, index, u32::from(cell.number))),
        Verdict::Rule(_) | Verdict::Class | Verdict::Budget(_) => None,
    }
}

fn matches(rule: &RetryRule, class: FailureClass, code: Option<i32>) -> bool {
    let in_ranges = |code: i32| rule.exit_codes.iter().any(|(from, to)| (*from..=*to).contains(&code));
    let exit_code = rule.exit_codes.is_empty() || (class == FailureClass::ExitCode && code.is_some_and(in_ranges));
    let signal = rule.signals.is_empty() || (class == FailureClass::Signal && code.is_some_and(|code| rule.signals.contains(&code)));
    // Exit codes and signals exclude each other, so a rule with both matches either.
    let code_matches = match (rule.exit_codes.is_empty(), rule.signals.is_empty()) {
        (false, false) => (class == FailureClass::ExitCode && exit_code) || (class == FailureClass::Signal && signal),
        _ => exit_code && signal,
    };
    (rule.classes.is_empty() || rule.classes.contains(&class)) && code_matches
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::backoff::Backoff;

    fn policy(rules: Vec<RetryRule>) -> Retry {
        Retry { attempts: 3, infra_attempts: 10, backoff: Backoff::default(), rules }
    }

    fn rule(classes: &[FailureClass], exit_codes: &[(i32, i32)], signals: &[i32], retry: bool) -> RetryRule {
        RetryRule { classes: classes.to_vec(), exit_codes: exit_codes.to_vec(), signals: signals.to_vec(), retry }
    }

    fn tries(policy: &Retry, class: FailureClass, code: Option<i32>) -> u32 {
        let mut cell = Cell::FRESH;
        let mut tries = 1;
        while decide(policy, JobId(1), 0, &cell, class, code).is_some() {
            if class.is_infra() {
                cell.infra += 1
            } else {
                cell.failures += 1
            }
            tries += 1;
            assert!(tries < 100);
        }
        tries
    }

    #[test]
    fn each_kind_of_failure_has_its_own_budget() {
        let p = policy(vec![]);
        assert_eq!(tries(&p, FailureClass::ExitCode, Some(1)), 3);
        assert_eq!(tries(&p, FailureClass::HostLost, None), 10);
        assert_eq!(tries(&p, FailureClass::InputMissing, None), 1);
        assert_eq!(tries(&p, FailureClass::PolicyDenied, None), 1);
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let p = policy(vec![
            rule(&[], &[(2, 2), (64, 78)], &[], false),
            rule(&[], &[], &[9], false),
            rule(&[FailureClass::InputMissing], &[], &[], true),
            rule(&[FailureClass::RunTimeout], &[], &[], false),
        ]);
        assert_eq!(tries(&p, FailureClass::ExitCode, Some(2)), 1);
        assert_eq!(tries(&p, FailureClass::ExitCode, Some(70)), 1);
        assert_eq!(tries(&p, FailureClass::ExitCode, Some(1)), 3);
        assert_eq!(tries(&p, FailureClass::Signal, Some(9)), 1);
        assert_eq!(tries(&p, FailureClass::Signal, Some(11)), 3);
        assert_eq!(tries(&p, FailureClass::InputMissing, None), 3);
        assert_eq!(tries(&p, FailureClass::RunTimeout, None), 1);
    }

    #[test]
    fn a_rule_with_codes_and_signals_matches_either() {
        let p = policy(vec![rule(&[], &[(3, 3)], &[11], false)]);
        assert_eq!(tries(&p, FailureClass::ExitCode, Some(3)), 1);
        assert_eq!(tries(&p, FailureClass::Signal, Some(11)), 1);
        assert_eq!(tries(&p, FailureClass::Signal, Some(3)), 3);
    }
}
