//! What a task may use.

use serde_json::json;
use volley_jobspecs::failure::FailureClass;

use super::{Case, shell, that};

/// Wants 90 MiB, more than its limit and less than its machine has, in a process of its own.
const HOG: &str = "dd if=/dev/zero of=/dev/null bs=90M count=1";

pub fn cases() -> Vec<Case> {
    let pids = |pids: u32| json!({ "resources": { "pids": pids } });
    vec![
        shell("out of memory", &format!("exec {HOG}")).failed(FailureClass::Oom, Some(9)).says("64 MiB"),
        shell("much more memory than there is", "exec dd if=/dev/zero of=/dev/null bs=1000M count=1")
            .failed(FailureClass::Oom, Some(9))
            .says("64 MiB"),
        shell("a child out of memory", &format!("{HOG}; exit 3")).failed(FailureClass::Oom, Some(3)).says("64 MiB"),
        shell("a child out of memory, and a success", &format!("{HOG}; exit 0")).failed(FailureClass::Oom, Some(0)),
        shell("within its memory", "dd if=/dev/zero of=/dev/null bs=20M count=1 2>/dev/null && echo fits").ok().out("fits\n"),
        shell("more processes than it may have", "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 2 & done; wait; echo not here")
            .with(pids(6))
            .check(|seen| that(matches!(seen.end().code, Some(1 | 2)), "a shell that can't fork"))
            .free()
            .varies(),
        shell("as many processes as it may have", "for i in 1 2 3 4; do sleep 0.3 & done; wait; echo all").with(pids(6)).ok().out("all\n"),
        shell("a fork bomb", "f() { f | f & }; f; sleep 60")
            .with(json!({ "resources": { "pids": 60 }, "timeouts": { "run": "2s", "grace": "1s" } }))
            .varies()
            .free()
            .check(|seen| that(seen.end().timing.run_ms < 25_000 && seen.end().code != Some(0), "an end, and no success")),
        shell("a part of a processor", "while :; do :; done")
            .with(json!({ "resources": { "cpus": "200m" }, "timeouts": { "run": "1500ms", "grace": "1s" } }))
            .class(FailureClass::RunTimeout)
            .check(|seen| {
                let (used, ran) = (seen.end().usage.as_ref().map_or(0, |usage| usage.cpu_us), u64::from(seen.end().timing.run_ms));
                that(used > 0 && used < ran * 500, "at most half a processor")
            }),
    ]
}
