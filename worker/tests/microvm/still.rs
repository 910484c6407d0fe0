//! Machines that stand still, and machines that only have much to do.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{JobId, TenantId};
use volley_jobspecs::keys;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::work::AtStage;
use volley_worker::guest::alive::{LOOK_EVERY, MISSED_MAX};
use volley_worker::vmm::Vmm;
use volley_worker::vmm::spawner::MachineSpawner;

use crate::hard::signal;
use crate::linux::{self, Linux};
use crate::support::{World, text};
use crate::unlike::Held;
use crate::{begin, children, failed, message, spawner, task, world};

/// From a machine's standstill to the end of its attempt, at least: it may have answered a moment before.
const LOST_MIN: Duration = LOOK_EVERY.saturating_mul(MISSED_MAX - 1);
/// And at most: a look before it is asked, one after, and what a busy host takes for the rest.
const LOST_MAX: Duration = LOOK_EVERY.saturating_mul(MISSED_MAX + 2).saturating_add(Duration::from_secs(15));

/// A worker of which no machine waits.
async fn started(slots: u32) -> Option<(World, String, MachineSpawner, PathBuf)> {
    let spawner = spawner()?;
    let (ours, mut dir) = (spawner.clone(), PathBuf::new());
    let (w, image) = world(|config| {
        config.machines.spawner = Some(ours);
        config.machines.standby_bytes_max = 0;
        config.cgroups = true;
        config.slots = slots;
        dir = config.dir.clone();
    })
    .await?;
    Some((w, image, spawner, dir))
}

/// Stops the machine of a job and waits for the attempt's end.
async fn stopped(w: &mut World, job: JobId, spawner: &MachineSpawner) -> (AttemptEnd, Duration) {
    signal(children(spawner.pid()), libc::SIGSTOP);
    let begun = Instant::now();
    let end = w.end_of(job).await;
    eprintln!("lost {:?} after it stood still: {}", begun.elapsed(), message(&end));
    (end, begun.elapsed())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_stands_still_is_lost_and_nothing_is_left_of_it() {
    let Some((mut w, image, spawner, dir)) = started(1).await else { return };
    assert_eq!(w.run_one(&task(&image, r#""command":"echo first""#)).await.ending, Ending::Succeeded);
    let before = Held::now(spawner.pid(), &dir);
    let job = begin(&mut w, &task(&image, r#""command":"echo begun; sleep 1000""#)).await;
    // Long enough that it was asked, and answered.
    tokio::time::sleep(LOOK_EVERY * 2).await;
    let (end, after) = stopped(&mut w, job, &spawner).await;
    assert!(end.ending == failed(FailureClass::GuestLost) && message(&end).contains("no sign of life for 30 s"), "{end:?}");
    assert!(after > LOST_MIN && after < LOST_MAX, "{after:?}");
    assert!(FailureClass::GuestLost.is_infra() && FailureClass::GuestLost.retry_by_default());
    let begun = Instant::now();
    while Held::now(spawner.pid(), &dir) != before {
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?} and before {before:?}", Held::now(spawner.pid(), &dir));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let end = w.run_one(&task(&image, r#""command":"echo again""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "again\n"), "{end:?}");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_that_stand_still_while_files_are_moved_are_lost_as_well() {
    let Some((mut w, image, spawner, _)) = started(2).await else { return };
    let tenant = TenantId::new("public").unwrap();
    w.objects.put_now(&keys::upload(&tenant, "big"), &vec![1; 500 << 20]);
    let first = begin(&mut w, &task(&image, r#""command":"dd if=/dev/zero of=/volley/out/big bs=1M count=300""#)).await;
    w.until("its outputs", |w| w.last_beat().at.iter().any(|at| at.name.job == first && at.stage == AtStage::Keeping)).await;
    let begun = Instant::now();
    signal(children(spawner.pid()), libc::SIGSTOP);
    // Another one while its input is copied into it.
    let stands = children(spawner.pid());
    let (second, _) = w.job(r#"{"count":1}"#, &task(&image, r#""command":"true","inputs":[{"from":"upload:big","path":"big"}]"#));
    let (_, order) = w.bundle(second, 0, 1);
    w.order(vec![order]).await;
    w.until("its machine", |_| children(spawner.pid()).len() == 2).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    signal(children(spawner.pid()).into_iter().filter(|pid| !stands.contains(pid)).collect(), libc::SIGSTOP);
    for (job, moved) in [(first, "the machine's agent"), (second, "copying inputs into the machine: the machine's agent")] {
        let end = w.end_of(job).await;
        eprintln!("{:?} after the first stood still: {}, {:?}", begun.elapsed(), message(&end), end.timing);
        assert_eq!(end.ending, failed(FailureClass::GuestLost), "{end:?}");
        assert!(message(&end).contains(&format!("{moved} gave no sign of life for 30 s")), "{end:?}");
    }
    // The VMM is asked about failed operations too, and has its own time for that.
    assert!(begun.elapsed() < LOST_MAX + Duration::from_secs(40), "{:?}", begun.elapsed());
    w.objects.objects.lock().unwrap().clear();
    let end = w.run_one(&task(&image, r#""command":"echo again""#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "again\n"), "{end:?}");
    w.finish().await;
    assert_eq!(children(spawner.pid()), Vec::<u32>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_with_too_much_to_do_are_not_lost() {
    let Some((mut w, image)) = world(|config| config.machines.standby_bytes_max = 0).await else { return };
    // For longer than a machine that says nothing has; what is waited for begins before the rest, which leaves no room for it.
    let long = (LOOK_EVERY * (MISSED_MAX + 3)).as_secs();
    let script = format!(
        r#"sleep {long} & last=$!
           i=0; while [ $i -lt 8 ]; do (while :; do :; done) & i=$((i+1)); done
           b() {{ while :; do (b) & done; }}; (b) 2>/dev/null &
           wait $last; echo lived"#
    );
    let command = serde_json::to_string(&["/bin/sh", "-c", &script]).unwrap();
    let of = |resources: &str, timeouts: &str| {
        format!(
            r#"{{"isolation":"microvm","image":"{image}","resources":{{{resources}}},"timeouts":{{"start":"80s"{timeouts}}},"command":{command}}}"#
        )
    };
    // One within its limits, and one whose only limits are its time and its machine.
    let tasks = [of(r#""memory":"128MiB","pids":300"#, ""), of(r#""memory":"64MiB""#, &format!(r#","run":"{long}s","grace":"1s""#))];
    let mut jobs = Vec::new();
    for task in &tasks {
        let (job, _) = w.job(r#"{"count":1}"#, task);
        let (_, order) = w.bundle(job, 0, 1);
        w.order(vec![order]).await;
        jobs.push(job);
    }
    let limited = w.end_of(jobs[0]).await;
    eprintln!("300 processes: {:?}, {:?}, {}", limited.ending, limited.timing, message(&limited));
    assert_eq!((limited.ending, text(&limited.stdout).as_str()), (Ending::Succeeded, "lived\n"), "{limited:?}");
    let free = w.end_of(jobs[1]).await;
    eprintln!("without a limit: {:?}, {:?}, {}", free.ending, free.timing, message(&free));
    assert_ne!(free.ending, failed(FailureClass::GuestLost), "{free:?}");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_answers_where_all_else_waits() {
    let (Some(spawner), Some(linux)) = (spawner(), Linux::find().await) else { return };
    let Some(qemu) = linux::qemu(&spawner).await else { return };
    let vm = qemu.boot(linux.boot("")).await.unwrap();
    let guest = linux::session(vm.connect().await.unwrap(), 1, false).await;
    let bomb =
        "i=0; while [ $i -lt 8 ]; do (while :; do :; done) & i=$((i+1)); done; b() { while :; do (b) & done; }; (b) 2>/dev/null & wait";
    let _bomb = guest.exec(&linux::shell(bomb)).await.unwrap();
    let (begun, mut longest, mut count) = (Instant::now(), Duration::ZERO, 0);
    while begun.elapsed() < Duration::from_secs(30) {
        let asked = Instant::now();
        guest.hello().await.unwrap();
        longest = longest.max(asked.elapsed());
        count += 1;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let processes = guest.stats().await.map(|stats| stats.processes);
    eprintln!("{count} answers with {processes:?} processes, the longest after {longest:?}");
    assert!(longest < LOOK_EVERY * MISSED_MAX, "{longest:?}");
    vm.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_can_not_begin_is_in_nobodys_way() {
    let (Some(spawner), Some(linux)) = (spawner(), Linux::find().await) else { return };
    let Some(qemu) = linux::qemu(&spawner).await else { return };
    let vm = qemu.boot(linux.boot("")).await.unwrap();
    let guest = Arc::new(linux::session(vm.connect().await.unwrap(), 1, false).await);
    // One whose end is awaited, as a task's or a shell's is.
    let _sits = guest.exec(&linux::shell("sleep 1000")).await.unwrap();
    for round in 0..3 {
        guest.hold(true).await.unwrap();
        // Its process stands still before it is its program.
        let begins = guest.clone();
        let begun = tokio::spawn(async move { linux::sh(&begins, "echo begun").await });
        let asked = Instant::now();
        while asked.elapsed() < Duration::from_secs(3) {
            guest.hello().await.unwrap();
            guest.stats().await.unwrap();
        }
        assert!(!begun.is_finished(), "round {round}: nothing runs where all is held");
        guest.hold(false).await.unwrap();
        assert_eq!(begun.await.unwrap().trim(), "begun", "round {round}");
    }
    vm.kill().await.unwrap();
}
