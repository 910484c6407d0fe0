//! What a job's spec says of its machine before it is saved.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_worker::template::step::{Phase, Steps};

use crate::support::{World, text};
use crate::{failed, message, world};

fn task(image: &str, warm_up: &str, rest: &str) -> String {
    crate::task(image, &format!(r#""warmUp":[{warm_up}],{rest}"#))
}

/// A shell's words as JSON.
fn sh(script: &str) -> String {
    format!(r#"{{"command":["sh","-c",{script:?}]}}"#)
}

const DAEMON: &str = "sleep 4242 < /dev/null > /dev/null 2>&1 &";
const LOOK: &str =
    r#""command":"cat /etc/warm; for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep '^sleep 4242'; done; true""#;

#[tokio::test(flavor = "multi_thread")]
async fn a_task_finds_what_its_warm_up_made_and_its_processes_only_where_they_are_kept() {
    let Some((mut w, image)) = world(|_| {}).await else { return };
    let warm = r#"{"command":["sh","-c","echo $WHO in $HOME by $(id -u) > /etc/warm"],"env":{"WHO":"$${me}"}}"#;
    let warm = format!("{warm},{}", sh(DAEMON));
    let begin = Instant::now();
    let end = w.run_one(&task(&image, &warm, LOOK)).await;
    eprintln!("the first task, with its template: {:?}", begin.elapsed());
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "${me} in /root by 0\n"), "{end:?}");
    let end = w.run_one(&task(&image, &warm, &format!(r#""keepProcesses":true,{LOOK}"#))).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "${me} in /root by 0\nsleep 4242 \n"), "{end:?}");
    // One without a warm-up has another template.
    let end = w.run_one(&crate::task(&image, r#""command":"ls /etc/warm""#)).await;
    assert_eq!((end.ending, end.code), (failed(FailureClass::ExitCode), Some(1)), "{end:?}");
    w.finish().await;
}

/// The ends of three tasks that run at once.
async fn three(w: &mut World, task: &str) -> Vec<AttemptEnd> {
    let (job, _) = w.job(r#"{"count":3}"#, task);
    let orders = [0, 1, 2].map(|first| w.bundle(job, first, 1).1);
    w.order(orders.to_vec()).await;
    w.until("three ends", |w| w.ends().iter().filter(|end| end.name.job == job).count() == 3).await;
    w.ends().into_iter().filter(|end| end.name.job == job).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_up_that_fails_or_hangs_is_one_error_and_says_which_command_and_what_it_said() {
    let phases: Arc<Mutex<Vec<Phase>>> = Arc::default();
    let told = phases.clone();
    let started = world(|config| {
        config.slots = 3;
        config.machines.build_ms_max = 15_000;
        config.machines.steps = Some(Steps::new(move |step| told.lock().unwrap().push(step.phase)));
    });
    let Some((mut w, image)) = started.await else { return };
    let builds = || phases.lock().unwrap().drain(..).filter(|phase| *phase == Phase::Building).count();
    let true_first = r#"{"command":["true"]}"#;
    for (script, says) in [
        (
            "echo 1; echo two; echo no use >&2; exit 5",
            r#"warmUp[1] (sh -c "echo 1; echo two; echo no use >&2; exit 5") ended with exit code 5; it said last: 1 | two; and as errors: no use"#,
        ),
        ("kill -SEGV $$", r#"warmUp[1] (sh -c "kill -SEGV $$") ended with signal 11; it said nothing"#),
        (
            "echo begun; sleep 1000",
            r#"warmUp[1] (sh -c "echo begun; sleep 1000") did not end within 15 s, which a template's build may take in all; it said last: begun"#,
        ),
    ] {
        let ends = three(&mut w, &task(&image, &format!("{true_first},{}", sh(script)), r#""command":"true""#)).await;
        for end in &ends {
            assert_eq!(end.ending, failed(FailureClass::InputMissing), "{end:?}");
            assert!(message(end).contains(&format!("building a template failed: {says}")), "{}", message(end));
        }
        assert_eq!(builds(), 1, "one build for three tasks");
    }
    let nothing = r#"{"command":["no-such-program","x"]}"#;
    let end = w.run_one(&task(&image, nothing, r#""command":"true""#)).await;
    assert!(message(&end).contains("warmUp[0] (no-such-program x) did not start: "), "{end:?}");
    w.finish().await;
}
