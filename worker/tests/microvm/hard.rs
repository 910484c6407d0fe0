//! Tasks that break their machine.

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::report::Ending;

use crate::support::text;
use crate::{failed, message, task, world};

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_task_does_to_its_machine_it_ends_with_a_cause() {
    let Some((mut w, image)) = world(|_| {}).await else { return };
    let task = |rest: &str| task(&image, rest);
    // At its own limit, and, without one, at the machine's.
    let hog = "dd if=/dev/zero of=/dev/null bs=200M count=1; exit 3";
    let end = w.run_one(&task(&format!(r#""command":"{hog}""#))).await;
    assert!(end.ending == failed(FailureClass::Oom) && message(&end).contains("64 MiB"), "{end:?}");
    let end = w.run_one(&task(r#""command":"echo dying; echo c > /proc/sysrq-trigger; sleep 60""#)).await;
    assert_eq!(end.ending, failed(FailureClass::GuestLost), "{end:?}");
    let said = message(&end);
    assert!(said.contains("kernel panicked (not syncing: sysrq triggered crash)") && said.contains("its console said last:"), "{said}");
    assert_eq!(text(&end.stdout), "dying\n");
    // The agent is the first process: whoever kills it kills the machine, or can't.
    let end = w.run_one(&task(r#""command":"kill -9 1; echo still there""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "still there\n"), "{end:?}");
    let bomb = r#"f() { f | f & }; f; sleep 100"#;
    let bomb = format!(
        r#"{{"isolation":"microvm","image":"{image}","resources":{{"memory":"64MiB","pids":200}},"timeouts":{{"start":"80s","run":"3s","grace":"1s"}},
            "command":"{bomb}"}}"#
    );
    let end = w.run_one(&bomb).await;
    assert!(matches!(end.ending, Ending::Failed(FailureClass::RunTimeout | FailureClass::Oom | FailureClass::ExitCode)), "{end:?}");
    let end = w.run_one(&task(r#""command":"echo o > /proc/sysrq-trigger; sleep 60""#)).await;
    assert!(end.ending == failed(FailureClass::GuestLost) && message(&end).contains("switched off"), "{end:?}");
    let end = w.run_one(&task(r#""command":"exec >&- 2>&-; sleep 1; exit 4""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(4)), "{end:?}");
    let end = w.run_one(&task(r#""command":"echo fine""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "fine\n"), "{end:?}");
    w.finish().await;
}
