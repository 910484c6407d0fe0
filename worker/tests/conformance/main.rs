//! One suite for every tier: what a task sees and how its end is told must not depend on where it runs.
//!
//! Owns the cases (`cases`, data), running each of them in every tier through a real worker (`run`), and the verdict: a case's expectation
//! holds in every tier, and what came out is the same in all of them. A difference is a failure, unless the case lists it with its reason;
//! a listed one that is not there is a failure too. A tier that can't run here is counted as skipped, and says why.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod cases;
mod container;
#[expect(dead_code, reason = "shared with tests that start QEMU themselves")]
#[path = "../guest/host.rs"]
mod host;
mod image;
mod run;
#[expect(dead_code, reason = "shared with tests of other tiers")]
#[path = "../support/mod.rs"]
mod support;

use std::time::Instant;

use run::{Place, Tier, Verdict};

#[tokio::test(flavor = "multi_thread")]
async fn every_tier_does_the_same() {
    let begin = Instant::now();
    let all = cases::all_cases();
    assert!(all.len() >= 60, "{} cases", all.len());
    let mut names: Vec<&str> = all.iter().map(|case| case.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all.len(), "two cases have one name");
    // `VOLLEY_CASES=a,b` runs those whose names contain one of these.
    let wanted = std::env::var("VOLLEY_CASES").unwrap_or_default();
    let all: Vec<_> = all.into_iter().filter(|case| wanted.is_empty() || wanted.split(',').any(|part| case.name.contains(part))).collect();
    let Some(place) = Place::find(&Tier::ALL, None).await else { return };
    let verdicts = place.run(&all).await;
    let mut failed = Vec::new();
    for (case, row) in all.iter().zip(&verdicts) {
        let shown: Vec<String> = row.iter().map(|(tier, verdict)| format!("{} {}", tier.name(), verdict.word())).collect();
        eprintln!("{:<44} {}", case.name, shown.join(" | "));
        for (tier, verdict) in row {
            match verdict {
                Verdict::Failed(why) => failed.push(format!("{} in {}: {why}", case.name, tier.name())),
                Verdict::Differs(why) => eprintln!("{:<44} {}: {why}", "", tier.name()),
                Verdict::Skipped(why) => eprintln!("{:<44} {}: {why}", "", tier.name()),
                Verdict::Same => {}
            }
        }
    }
    eprintln!("{} cases in {:?}", all.len(), begin.elapsed());
    assert!(failed.is_empty(), "{} of {} cases:\n{}", failed.len(), all.len(), failed.join("\n"));
}

/// gVisor's runtime: its own kernel, so a handful of cases only, and no report but an exit code.
#[tokio::test(flavor = "multi_thread")]
async fn runsc_runs_containers_too() {
    smoke("runsc").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runc_runs_containers_too() {
    smoke("runc").await;
}

/// Some cases under another runtime than the default.
async fn smoke(runtime: &str) {
    const SMOKE: [&str; 7] = [
        "exit code 0",
        "exit code 7",
        "ended by signal 9",
        "stdout and stderr apart",
        "inputs are there",
        "outputs are kept",
        "no network",
    ];
    let Some(place) = Place::find(&[Tier::Container], Some(runtime)).await else { return };
    let cases: Vec<_> = cases::all_cases().into_iter().filter(|case| SMOKE.iter().any(|name| case.name.starts_with(name))).collect();
    assert!(cases.len() >= SMOKE.len(), "{}", cases.len());
    let verdicts = place.run(&cases).await;
    for (case, row) in cases.iter().zip(&verdicts) {
        for (_, verdict) in row {
            eprintln!("{runtime}: {:<40} {}", case.name, verdict.word());
            if let Verdict::Failed(why) = verdict {
                panic!("{}: {why}", case.name);
            }
        }
    }
}
