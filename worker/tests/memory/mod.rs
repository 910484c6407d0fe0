//! Tasks that want more memory than they may have, when no single process of theirs does.

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::report::Ending;

use crate::support::World;
use crate::{failed, task};

/// Of many small processes the kernel takes the largest for want of memory, which is the slot's own helper: what it watched must be over
/// with the verdict all the same, and its slot be as before.
#[tokio::test(flavor = "multi_thread")]
async fn small_processes_that_want_too_much_together_are_over_with_their_verdict() {
    let mut w = World::start(|config| (config.cgroups, config.slots) = (true, 1)).await;
    if !w.last_beat().info.limits {
        eprintln!("skipped: no cgroups here");
        return;
    }
    let many = r#""command":"i=0; while [ $i -lt 300 ]; do sleep 2345 & i=$((i+1)); done; wait","resources":{"memory":"8MiB"}"#;
    for _ in 0..3 {
        let end = w.run_one(&task(many)).await;
        assert_eq!(end.ending, failed(FailureClass::Oom), "{end:?}");
        assert_eq!(sleepers("2345"), 0, "of a task whose verdict is there nothing runs");
        let end = w.run_one(&task(r#""command":["true"]"#)).await;
        assert_eq!(end.ending, Ending::Succeeded, "the next one has nothing to do with it: {end:?}");
    }
    w.finish().await;
}

/// How many `sleep TIME` run on this host.
fn sleepers(time: &str) -> usize {
    let asked = format!("sleep\0{time}\0");
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter(|entry| std::fs::read(entry.path().join("cmdline")).is_ok_and(|line| line == asked.as_bytes())).count()
}
