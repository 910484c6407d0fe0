//! Tasks that break their machine.

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::record::Run;
use volley_jobspecs::wire::report::Ending;
use volley_jobspecs::wire::work::Order;

use crate::support::text;
use crate::{begin, children, failed, is_running, message, spawner, task, world};

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_task_does_to_its_machine_it_ends_with_a_cause() {
    let Some((mut w, image)) = world(|_| {}).await else { return };
    let task = |rest: &str| task(&image, rest);
    // At its own limit, and, without one, at the machine's.
    let hog = "dd if=/dev/zero of=/dev/null bs=90M count=1; exit 3";
    let end = w.run_one(&task(&format!(r#""command":"{hog}""#))).await;
    assert!(end.ending == failed(FailureClass::Oom) && message(&end).contains("64 MiB"), "{end:?}");
    let hogs = "for i in 1 2 3 4 5 6; do dd if=/dev/zero of=/dev/null bs=150M count=1 & done; wait; exit 3";
    let end = w.run_one(&format!(r#"{{"isolation":"microvm","image":"{image}","timeouts":{{"start":"80s"}},"command":"{hogs}"}}"#)).await;
    assert!(end.ending == failed(FailureClass::Oom) && message(&end).contains("in its machine"), "{end:?}");
    eprintln!("out of memory: {:?}", end.timing);
    let end = w.run_one(&task(r#""command":"echo dying; echo c > /proc/sysrq-trigger; sleep 60""#)).await;
    assert_eq!(end.ending, failed(FailureClass::GuestLost), "{end:?}");
    let said = message(&end);
    assert!(said.contains("kernel panicked (not syncing: sysrq triggered crash)") && said.contains("its console said last:"), "{said}");
    assert_eq!(text(&end.stdout), "dying\n");
    // The agent is the first process: whoever kills it kills the machine, or can't.
    let end = w.run_one(&task(r#""command":"kill -9 1; echo still there""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "still there\n"), "{end:?}");
    let bomb_script = r#"f() { f | f & }; f; sleep 100"#;
    let bomb = format!(
        r#"{{"isolation":"microvm","image":"{image}","resources":{{"memory":"64MiB","pids":200}},"timeouts":{{"start":"80s","run":"3s","grace":"1s"}},
            "command":"{bomb_script}"}}"#
    );
    let end = w.run_one(&bomb).await;
    assert!(matches!(end.ending, Ending::Failed(FailureClass::RunTimeout | FailureClass::Oom | FailureClass::ExitCode)), "{end:?}");
    let end = w.run_one(&task(r#""command":"echo o > /proc/sysrq-trigger; sleep 60""#)).await;
    assert!(end.ending == failed(FailureClass::GuestLost) && message(&end).contains("switched off"), "{end:?}");
    let end = w.run_one(&task(r#""command":"exec >&- 2>&-; sleep 1; exit 4""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(4)), "{end:?}");
    // And then says nothing, and never ends.
    let silent = task(r#""command":"exec >&- 2>&-; trap '' TERM; while :; do sleep 1; done""#);
    let end = w.run_one(&silent.replacen(r#""start":"80s""#, r#""start":"80s","run":"2s","grace":"1s""#, 1)).await;
    assert_eq!((end.ending, end.code, text(&end.stdout).as_str()), (failed(FailureClass::RunTimeout), Some(9), ""), "{end:?}");
    // All processes but the first are killed: the agent goes on and tells.
    let end = w.run_one(&task(r#""command":"echo i > /proc/sysrq-trigger; sleep 60""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::Signal), Some(9)), "{end:?}");
    // A bomb without a limit of its own: the machine's end is the limit, and its slot is free again.
    let free = format!(
        r#"{{"isolation":"microvm","image":"{image}","resources":{{"memory":"64MiB"}},"timeouts":{{"start":"80s","run":"4s","grace":"1s"}},
            "command":"{bomb_script}"}}"#
    );
    let end = w.run_one(&free).await;
    eprintln!("a fork bomb: {:?}, {:?}, {}", end.ending, end.timing, message(&end));
    let causes = [FailureClass::RunTimeout, FailureClass::Oom, FailureClass::ExitCode, FailureClass::Signal, FailureClass::GuestLost];
    assert!(causes.into_iter().any(|cause| end.ending == failed(cause)), "{end:?}");
    let end = w.run_one(&task(r#""command":"echo fine""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "fine\n"), "{end:?}");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_does_not_obey_or_is_killed_does_not_hold_its_slot() {
    let Some(spawner) = spawner() else { return };
    let ours = spawner.clone();
    let change = |config: &mut volley_worker::Config| {
        config.machines.spawner = Some(ours);
        config.machines.standby_bytes_max = 0;
    };
    let Some((mut w, image)) = world(change).await else { return };
    let command = r#""command":"echo begun; sleep 100""#;
    let long = format!(
        r#"{{"isolation":"microvm","image":"{image}","resources":{{"memory":"64MiB"}},"timeouts":{{"start":"80s","run":"2s","grace":"1s"}},{command}}}"#
    );
    // Its VMM stands still, and with it the agent that should end it.
    let job = begin(&mut w, &long).await;
    signal(children(spawner.pid()), libc::SIGSTOP);
    let end = w.end_of(job).await;
    assert_eq!(end.ending, failed(FailureClass::RunTimeout), "{end:?}");
    assert!(end.timing.run_ms < 30_000, "{end:?}");
    // Its VMM is killed from outside.
    let job = begin(&mut w, &task(&image, command)).await;
    signal(children(spawner.pid()), libc::SIGKILL);
    let end = w.end_of(job).await;
    assert!(end.ending == failed(FailureClass::GuestLost) && message(&end).contains("ended by signal 9"), "{end:?}");
    // It is to be stopped, and does not want to.
    let (job, _) =
        w.job(
            r#"{"inline":[{}]}"#,
            &task(&image, r#""command":"trap '' TERM; echo on; while :; do sleep 1; done","timeouts":{"start":"80s","grace":"1s"}"#)
                .replacen(r#""timeouts":{"start":"80s"},"#, "", 1),
        );
    let (bundle, order) = w.bundle(job, 0, 1);
    w.order(vec![order]).await;
    w.until("the command", |w| is_running(w, job)).await;
    // Until it has set its trap.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    w.order(vec![Order::Stop { bundle, tasks: vec![Run { first: 0, count: 1 }] }]).await;
    let end = w.end_of(job).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::Cancelled), Some(9)), "{end:?}");
    assert_eq!(children(spawner.pid()), Vec::<u32>::new());
    w.finish().await;
}

pub fn signal(pids: Vec<u32>, signal: i32) {
    assert_eq!(pids.len(), 1, "one machine runs");
    for pid in pids {
        // SAFETY: a plain system call, on a process of this test's own spawner.
        assert_eq!(unsafe { libc::kill(pid.cast_signed(), signal) }, 0);
    }
}
