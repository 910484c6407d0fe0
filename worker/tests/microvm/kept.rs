//! Machines of attempts that failed, kept for a while.

use std::time::{Duration, Instant};

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, JobId};
use volley_jobspecs::wire::record::Run;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::shell::{Opened, Refused};
use volley_jobspecs::wire::work::Order;
use volley_worker::Config;
use volley_worker::shells::Shells;

use crate::shell::{Shell, attempt, run, wish};
use crate::support::{World, text};
use crate::{begin, children, failed, message, spawner, task, world};

/// A worker with machines of which none waits, with this much room for those that are kept.
async fn keeping(mib: u64, change: impl FnOnce(&mut Config)) -> Option<(World, String, Shells, u32)> {
    let spawner = spawner()?;
    let (shells, pid) = (Shells::default(), spawner.pid());
    let own = shells.clone();
    let (world, image) = world(|config| {
        config.machines.spawner = Some(spawner);
        config.machines.shells = own;
        config.machines.standby_bytes_max = mib << 20;
        config.machines.standby_of_one_max = Some(0);
        change(config);
    })
    .await?;
    Some((world, image, shells, pid))
}

fn is_here(shells: &Shells, name: AttemptName) -> bool {
    match shells.open(&wish(name, &["true"], None)) {
        Ok(_permit) => true,
        Err(Opened::No { kind: Refused::NotHere, .. }) => false,
        Err(other) => panic!("{other:?}"),
    }
}

async fn until_gone(shells: &Shells, name: AttemptName, within: Duration) {
    let begin = Instant::now();
    while is_here(shells, name) {
        assert!(begin.elapsed() < within, "it is still there");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// No VMM is left.
async fn until_none(spawner: u32) {
    let begin = Instant::now();
    while !children(spawner).is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", children(spawner));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[track_caller]
fn assert_kept(end: &AttemptEnd, job: JobId) {
    let said = format!(" UTC at most: volley exec {job} 0 --attempt 1");
    assert!(message(end).contains("its machine was kept, until ") && message(end).contains(&said), "{end:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_attempts_machine_answers_afterwards_and_the_slot_goes_on() {
    let Some((mut w, image, shells, spawner)) = keeping(2_000, |config| config.slots = 1).await else { return };
    let kept = |rest: &str| task(&image, &format!(r#""keepFailed":"1h",{rest}"#));
    let command = r#""command":"echo left > file; echo tmp > /tmp/t; echo out > $VOLLEY_OUTPUT_DIR/o; sleep 600 & echo said; exit 7""#;
    let job = begin_any(&mut w, &kept(command)).await;
    let end = w.end_of(job).await;
    assert_eq!((end.ending, end.code, text(&end.stdout).as_str()), (failed(FailureClass::ExitCode), Some(7), "said\n"), "{end:?}");
    assert_eq!(end.outputs.as_ref().map(|outputs| outputs.files), Some(1), "outputs are kept as ever");
    assert!(message(&end).starts_with("exit code 7; 1 process was still running"), "{end:?}");
    assert_kept(&end, job);
    let came = run(&shells, end.name, &["sh", "-c", "cat file /tmp/t $VOLLEY_OUTPUT_DIR/o; ps | grep -c '[s]leep 600'; hostname"]).await;
    assert_eq!(came.text(), format!("left\ntmp\nout\n0\n{job}-0-1\n"), "{}", came.errors());
    // The slot is free, and its next machine has limits of its own.
    let other = w.run_one(&task(&image, r#""command":"cat file || echo nothing""#)).await;
    assert_eq!((other.ending, text(&other.stdout).as_str()), (Ending::Succeeded, "nothing\n"), "{other:?}");
    assert!(!is_here(&shells, other.name), "one that is not to be kept is not");
    // Success keeps nothing; what could not be started does.
    let other = w.run_one(&kept(r#""command":"true""#)).await;
    assert!(other.ending == Ending::Succeeded && !message(&other).contains("kept") && !is_here(&shells, other.name), "{other:?}");
    let other = w.run_one(&kept(r#""command":["no-such-program"]"#)).await;
    assert_eq!(other.code, Some(127), "{other:?}");
    assert_kept(&other, other.name.job);
    assert!(is_here(&shells, end.name) && is_here(&shells, other.name));
    assert_eq!(children(spawner).len(), 2);
    // A shell in one that is kept ends with the worker.
    let mut shell = Shell::open(&shells, &wish(end.name, &["sh", "-c", "echo up; exec sleep 600"], None)).unwrap();
    shell.until("up").await;
    w.finish().await;
    assert!(shell.finish().await.why().contains("the machine is not there any more"));
    until_none(spawner).await;
}

/// Starts a task, whether or not its command is seen to run.
async fn begin_any(w: &mut World, task: &str) -> JobId {
    let (job, _) = w.job(r#"{"count":1}"#, task);
    let (_, order) = w.bundle(job, 0, 1);
    w.order(vec![order]).await;
    job
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_changes_outputs_while_they_are_fetched_nor_holds_that_up() {
    let Some((mut w, image, shells, spawner)) = keeping(2_000, |_| {}).await else { return };
    let command = r#""command":"cd $VOLLEY_OUTPUT_DIR; dd if=/dev/zero of=big bs=1M count=24 2> /dev/null; while [ ! -e /tmp/stop ]; do usleep 50000; done; exit 7""#;
    let job = begin(&mut w, &task(&image, &format!(r#""keepFailed":"1h",{command}"#))).await;
    let name = attempt(&w, job);
    // Without end it writes a file that is an output, and makes more of them.
    let words =
        "cd $VOLLEY_OUTPUT_DIR; echo up; touch /tmp/stop; i=0; while :; do i=$((i+1)); echo >> theirs; mkdir -p d; echo > d/$i; done";
    let mut shell = Shell::open(&shells, &wish(name, &["sh", "-c", words], None)).unwrap_or_else(|no| panic!("{no:?}"));
    shell.until("up").await;
    let end = w.end_of(job).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(7)), "{end:?}");
    assert_kept(&end, job);
    // It goes on then.
    let lengths = ["sh", "-c", "cd $VOLLEY_OUTPUT_DIR; stat -c %s theirs; sleep 2; stat -c %s theirs"];
    let came = run(&shells, name, &lengths).await;
    let lengths: Vec<u64> = came.text().lines().map(|line| line.parse().unwrap()).collect();
    assert!(lengths.len() == 2 && lengths[1] > lengths[0], "{came:?}");
    drop(shell);
    w.finish().await;
    until_none(spawner).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_machine_goes_when_its_time_is_over_and_only_failures_of_the_tasks_are_kept() {
    let Some((mut w, image, shells, spawner)) = keeping(2_000, |_| {}).await else { return };
    let kept = |time: &str, timeouts: &str, command: &str| {
        let timeouts = format!(r#""timeouts":{{"start":"80s"{timeouts}}}"#);
        let rest = format!(r#""keepFailed":"{time}","resources":{{"memory":"64MiB"}},{timeouts},"command":"{command}""#);
        format!(r#"{{"isolation":"microvm","image":"{image}",{rest}}}"#)
    };
    let end = w.run_one(&kept("2s", "", "exit 1")).await;
    assert_kept(&end, end.name.job);
    assert!(is_here(&shells, end.name));
    until_gone(&shells, end.name, Duration::from_secs(10)).await;
    until_none(spawner).await;
    // One whose time ran out, though it ended well when it was told.
    let end = w.run_one(&kept("1h", r#","run":"2s""#, "trap 'exit 0' TERM; echo > mark; while :; do usleep 50000; done")).await;
    assert_eq!(end.ending, failed(FailureClass::RunTimeout), "{end:?}");
    assert_kept(&end, end.name.job);
    assert_eq!(run(&shells, end.name, &["ls"]).await.text(), "mark\n");
    // One that somebody cancelled.
    let (job, _) = w.job(r#"{"count":1}"#, &kept("1h", "", "sleep 600"));
    let (id, order) = w.bundle(job, 0, 1);
    w.order(vec![order]).await;
    w.until("the command", |w| crate::is_running(w, job)).await;
    w.order(vec![Order::Stop { bundle: id, tasks: vec![Run { first: 0, count: 1 }] }]).await;
    let cancelled = w.end_of(job).await;
    assert_eq!(cancelled.ending, failed(FailureClass::Cancelled), "{cancelled:?}");
    assert!(!message(&cancelled).contains("kept") && !is_here(&shells, cancelled.name), "{cancelled:?}");
    // And one that ended its own machine.
    let lost = w.run_one(&kept("1h", "", "echo c > /proc/sysrq-trigger; sleep 60")).await;
    assert!(lost.ending == failed(FailureClass::GuestLost) && !message(&lost).contains("kept"), "{lost:?}");
    // A kept one that ends itself is nobody's any more.
    let came = run(&shells, end.name, &["sh", "-c", "echo c > /proc/sysrq-trigger; sleep 60"]).await;
    assert!(came.end.is_some_and(|end| end.is_err()));
    until_gone(&shells, end.name, Duration::from_secs(20)).await;
    until_none(spawner).await;
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn there_is_room_for_so_much_and_the_oldest_goes() {
    // A machine of 192 MiB with 40 MiB for its VMM, and 128 MiB where it is emulated: one fits.
    let Some((mut w, image, shells, spawner)) = keeping(450, |config| config.slots = 1).await else { return };
    let task = task(&image, r#""keepFailed":"1h","command":"exit 1""#);
    let first = w.run_one(&task).await;
    assert_kept(&first, first.name.job);
    let second = w.run_one(&task).await;
    assert_kept(&second, second.name.job);
    if children(spawner).len() == 1 {
        assert!(!is_here(&shells, first.name), "the oldest goes");
    }
    assert!(is_here(&shells, second.name));
    w.finish().await;
    let Some((mut w, image, shells, spawner)) = keeping(200, |_| {}).await else { return };
    let end = w.run_one(&crate::task(&image, r#""keepFailed":"1h","command":"exit 1""#)).await;
    assert_eq!(end.ending, failed(FailureClass::ExitCode), "{end:?}");
    assert!(message(&end).contains("MiB could not be kept: this worker has 200 MiB for machines that wait"), "{end:?}");
    assert!(!is_here(&shells, end.name));
    until_none(spawner).await;
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_leaves_keeps_none() {
    let Some((mut w, image, _, spawner)) = keeping(2_000, |_| {}).await else { return };
    let job = begin(&mut w, &task(&image, r#""keepFailed":"1h","command":"sleep 3; exit 1""#)).await;
    w.handle.drain();
    let end = w.end_of(job).await;
    assert!(end.ending == failed(FailureClass::ExitCode) && message(&end).contains("the worker is leaving"), "{end:?}");
    w.finish().await;
    until_none(spawner).await;
}
