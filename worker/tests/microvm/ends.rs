//! How tasks begin and end.

use std::time::Instant;

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::report::Ending;
use volley_worker::vmm::kvm::{self, Kvm};

use crate::support::text;
use crate::{failed, message, spawner, task, world};

#[tokio::test(flavor = "multi_thread")]
async fn a_task_runs_in_a_machine_of_its_own_and_its_end_is_told() {
    let Some((mut w, image)) = world(|_| {}).await else { return };
    let task = |rest: &str| task(&image, rest);
    let begin = Instant::now();
    let end = w.run_one(&task(r#""command":"env | sort; pwd; cat /etc/release; id -u","env":{"MINE":"${item.a} ${index}"}"#)).await;
    eprintln!("the first task, with its template: {:?}; {:?}", begin.elapsed(), end.message);
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    let out = text(&end.stdout);
    for line in
        ["MINE=item value 0", r#"VOLLEY_ITEM={"a":"item value"}"#, "HOME=/volley/work", "TMPDIR=/tmp", "VOLLEY_OUTPUT_DIR=/volley/out"]
    {
        assert!(out.lines().any(|found| found == line), "{line}: {out}");
    }
    assert!(out.ends_with("/volley/work\nthe image\n0\n"), "{out}");
    // A machine whose processor is emulated says so in every result.
    let usable = kvm::probe(&spawner().unwrap()).await == Kvm::Usable;
    assert_eq!(message(&end).contains("emulated in software (QEMU"), !usable, "{end:?}");
    assert!(end.usage.unwrap().memory_bytes_max > 100_000);

    let end = w.run_one(&task(r#""command":"echo out; echo err >&2; exit 7""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(7)), "{end:?}");
    assert_eq!((text(&end.stdout).as_str(), text(&end.stderr).as_str()), ("out\n", "err\n"));
    let end = w.run_one(&task(r#""command":"kill -SEGV $$""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::Signal), Some(11)), "{end:?}");
    assert!(message(&end).contains("SIGSEGV"));
    let end = w.run_one(&task(r#""command":["no-such-program"]"#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(127)), "{end:?}");
    let end = w.run_one(&task(r#""command":["/etc/release"]"#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(126)), "{end:?}");
    let end = w.run_one(&task(r#""command":["true"],"workdir":"/nowhere""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(126)), "{end:?}");
    let end = w.run_one(&task(r#""command":"pwd","workdir":"a/b""#)).await;
    assert_eq!(text(&end.stdout), "/volley/work/a/b\n", "{end:?}");
    let end = w.run_one(&task(r#""command":["cat"],"stdin":"${item.a}!""#)).await;
    assert_eq!(text(&end.stdout), "item value!", "{end:?}");
    // What is asked for and not there is said, once for each task, and costs no machine.
    let other = crate::task("sha256:1111111111111111111111111111111111111111111111111111111111111111", r#""command":["true"]"#);
    let end = w.run_one(&other).await;
    assert!(end.ending == failed(FailureClass::RestoreFailed) && message(&end).contains("no image"), "{end:?}");
    // The host's own tier beside it, in the same slot.
    let end = w.run_one(r#"{"isolation":"process","command":"pwd"}"#).await;
    assert!(end.ending == Ending::Succeeded && text(&end.stdout).ends_with("/slots/0/work\n"), "{end:?}");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_takes_too_long_is_ended_also_when_it_does_not_want_to() {
    let Some((mut w, image)) = world(|_| {}).await else { return };
    let task = |run: &str, grace: &str, command: &str| {
        let timeouts = format!(r#""timeouts":{{"start":"80s","run":"{run}","grace":"{grace}"}}"#);
        format!(r#"{{"isolation":"microvm","image":"{image}","resources":{{"memory":"64MiB"}},{timeouts},"command":"{command}"}}"#)
    };
    let end = w.run_one(&task("1s", "10s", "echo begun; exec sleep 60")).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::RunTimeout), Some(15)), "{end:?}");
    assert_eq!(text(&end.stdout), "begun\n");
    assert!((1_000..8_000).contains(&end.timing.run_ms), "{:?}", end.timing);
    let end = w.run_one(&task("1s", "500ms", "trap '' TERM; echo > /volley/out/left; while :; do :; done")).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::RunTimeout), Some(9)), "{end:?}");
    assert!((1_500..10_000).contains(&end.timing.run_ms), "{:?}", end.timing);
    assert_eq!(end.outputs.map(|outputs| outputs.files), Some(1), "what it left until then is kept");
    w.finish().await;
}
