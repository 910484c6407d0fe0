//! Commands that people run in the machine of a task that runs.

use std::time::{Duration, Instant};

use futures::StreamExt;
use volley_jobspecs::ids::WorkerId;
use volley_jobspecs::wire::report::Ending;
use volley_jobspecs::wire::shell::link::SILENCE_MS;
use volley_jobspecs::wire::shell::{Body, Frame, Opened, Refused, Tty};
use volley_jobspecs::{subjects, wire};
use volley_worker::Config;
use volley_worker::shells::Shells;

use crate::nats::Nats;
use crate::shell::{Shell, attempt, run, wish};
use crate::support::{World, text};
use crate::{begin, image, message, task, world};

/// A worker with machines of which none waits, and its shells.
async fn world_with_shells(change: impl FnOnce(&mut Config)) -> Option<(World, String, Shells)> {
    let shells = Shells::default();
    let own = shells.clone();
    let (world, image) = world(|config| {
        config.machines.shells = own;
        change(config);
    })
    .await?;
    Some((world, image, shells))
}

/// Does what `stop` in the task's directory says.
const WAITS: &str = r#""command":"echo hello > file; while [ ! -e stop ]; do usleep 50000; done; exit 0""#;

#[tokio::test(flavor = "multi_thread")]
async fn a_shell_sees_the_task_and_is_not_in_its_way() {
    let Some((mut w, image, shells)) = world_with_shells(|_| {}).await else { return };
    let own = format!(r#""env":{{"MINE":"a b"}},"resources":{{"memory":"64MiB","pids":20}},{WAITS}"#);
    let spec = format!(r#"{{"isolation":"microvm","image":"{image}","timeouts":{{"start":"80s"}},{own}}}"#);
    let job = begin(&mut w, &spec).await;
    let name = attempt(&w, job);
    let begun = Instant::now();
    while run(&shells, name, &["cat", "file"]).await.text() != "hello\n" {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    let came = run(&shells, name, &["sh", "-c", "pwd; id -u; echo $MINE; echo $VOLLEY_JOB; echo err >&2; exit 3"]).await;
    assert_eq!((came.text(), came.errors(), came.code()), (format!("/volley/work\n0\na b\n{job}\n"), "err\n".to_owned(), 3));
    // What can't be run ends as a shell says it.
    let came = run(&shells, name, &["no-such-program"]).await;
    assert!(came.code() == 127 && came.errors().starts_with("volley exec: no-such-program"), "{}", came.errors());
    assert_eq!(run(&shells, name, &["/etc/release"]).await.code(), 126);
    // Input and output are binary, and longer than the window in both directions.
    let mut shell = Shell::open(&shells, &wish(name, &["cat"], None)).unwrap_or_else(|no| panic!("{no:?}"));
    let bytes: Vec<u8> = (0..1_500_000u32).map(|at| (at % 251) as u8).collect();
    shell.write(&bytes).await;
    shell.say(Body::EndInput).await;
    let came = shell.finish().await;
    assert!(came.code() == 0 && came.output == bytes, "{} bytes", came.output.len());
    // The default is a shell, which reads its commands; it is in no limit of the task's.
    let mut shell = Shell::open(&shells, &wish(name, &[], None)).unwrap_or_else(|no| panic!("{no:?}"));
    shell.write(b"for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24; do sleep 600 & done; echo all\nexit 5\n").await;
    let came = shell.finish().await;
    assert_eq!((came.text().as_str(), came.code()), ("all\n", 5), "{}", came.errors());
    assert_eq!(run(&shells, name, &["sh", "-c", "ps | grep -c '[s]leep 600'"]).await.text(), "0\n", "what it started went with it");
    on_a_terminal(&shells, name).await;
    // A signal, and one that leaves without a word.
    let mut shell =
        Shell::open(&shells, &wish(name, &["sh", "-c", "trap 'echo got; exit 9' INT; echo up; while :; do usleep 20000; done"], None))
            .unwrap();
    shell.until("up").await;
    shell.say(Body::Signal(2)).await;
    assert_eq!(shell.finish().await.code(), 9);
    let mut shell = Shell::open(&shells, &wish(name, &["sh", "-c", "echo up; exec sleep 700"], None)).unwrap();
    shell.until("up").await;
    drop(shell);
    let begun = Instant::now();
    while run(&shells, name, &["sh", "-c", "ps | grep -c '[s]leep 700'"]).await.text() != "0\n" {
        assert!(begun.elapsed() < Duration::from_secs(20), "its command goes with it");
    }
    // The end of the task's command is that of every shell, and its verdict is its own.
    let mut shell = Shell::open(&shells, &wish(name, &["sh", "-c", "echo up; touch stop; exec sleep 600"], None)).unwrap();
    shell.until("up").await;
    let end = w.end_of(job).await;
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    assert!(!message(&end).contains("running at its end"), "{end:?}");
    assert!(shell.finish().await.why().contains("the machine is not there any more"));
    assert!(matches!(shells.open(&wish(name, &["true"], None)), Err(Opened::No { kind: Refused::NotHere, .. })));
    assert_eq!(shells.count(), 0);
    w.finish().await;
}

async fn on_a_terminal(shells: &Shells, name: volley_jobspecs::ids::AttemptName) {
    let size = Tty { rows: 33, cols: 77 };
    let mut shell = Shell::open(shells, &wish(name, &[], Some(size))).unwrap_or_else(|no| panic!("{no:?}"));
    shell.write(b"tty; stty size; echo $TERM; echo en''d\n").await;
    shell.until("\r\nend\r\n").await;
    let shown = shell.came.text();
    assert!(shown.contains("/dev/pts/0\r\n33 77\r\nxterm\r\n"), "{shown:?}");
    shell.say(Body::Resize(Tty { rows: 10, cols: 200 })).await;
    shell.write(b"stty size; echo siz''ed\n").await;
    shell.until("\r\nsized\r\n").await;
    assert!(shell.came.text().contains("10 200\r\n"), "{:?}", shell.came.text());
    // As fast as somebody can drag a window: none ends the session, and the last counts.
    for cols in 0..500 {
        shell.say(Body::Resize(Tty { rows: 10, cols })).await;
        shell.say(Body::Signal(libc::SIGWINCH)).await;
    }
    shell.say(Body::Resize(Tty { rows: 12, cols: 210 })).await;
    shell.write(b"usleep 500000; stty size; echo agai''n\n").await;
    shell.until("\r\nagain\r\n").await;
    assert!(shell.came.text().contains("12 210\r\n"), "{:?}", shell.came.text());
    // ^C ends what is in front, and not the shell.
    shell.write(b"sleep 600\n").await;
    shell.until("sleep 600\r\n").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    shell.write(b"\x03").await;
    shell.write(b"echo st''ill\n").await;
    shell.until("\r\nstill\r\n").await;
    shell.write(b"exit 6\n").await;
    let came = shell.finish().await;
    assert_eq!((came.code(), came.errors().as_str()), (6, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_says_nothing_more_loses_its_command() {
    let Some((mut w, image, shells)) = world_with_shells(|_| {}).await else { return };
    let job = begin(&mut w, &task(&image, WAITS)).await;
    let name = attempt(&w, job);
    let mut shell = Shell::open(&shells, &wish(name, &["sleep", "800"], None)).unwrap_or_else(|no| panic!("{no:?}"));
    shell.silent = true;
    let begun = Instant::now();
    let came = shell.finish().await;
    assert!(came.why().contains("nothing was heard of the client for 20 s"), "{came:?}");
    let took = begun.elapsed().as_millis() as u64;
    assert!((SILENCE_MS - 1_000..SILENCE_MS + 5_000).contains(&took), "{took}");
    let begun = Instant::now();
    while run(&shells, name, &["sh", "-c", "ps | grep -c '[s]leep 800'"]).await.text() != "0\n" {
        assert!(begun.elapsed() < Duration::from_secs(20), "its command goes with it");
    }
    // One that loses a frame is told so.
    let mut shell = Shell::open(&shells, &wish(name, &["cat"], None)).unwrap();
    shell.say(Body::Alive).await;
    shell.lose().await;
    shell.say(Body::EndInput).await;
    assert!(shell.finish().await.why().contains("something was lost on its way"));
    run(&shells, name, &["touch", "stop"]).await;
    assert_eq!(w.end_of(job).await.ending, Ending::Succeeded);
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shells_are_served_over_nats_with_the_rights_that_are_shipped() {
    let Some((mut w, image, shells)) = world_with_shells(|_| {}).await else { return };
    let Some(nats) = Nats::shipped() else { return w.finish().await };
    let worker = WorkerId::new("w1").unwrap();
    let serving = tokio::spawn(volley_worker::io::shells::serve(nats.client().await, worker.clone(), shells.clone()));
    let client = nats.coordinator().await;
    let job = begin(&mut w, &task(&image, WAITS)).await;
    let name = attempt(&w, job);
    let open = wish(name, &["sh", "-c", "read a; echo got $a; exit 4"], None);
    let mut frames = client.subscribe(subjects::shell_from_worker(&worker, &open.session)).await.unwrap();
    let reply = subjects::shell_answer(&open.session);
    let mut answers = client.subscribe(reply.clone()).await.unwrap();
    let mut ask = async |open: &volley_jobspecs::wire::shell::Open| {
        // It may take a moment until the worker listens.
        for _ in 0..50 {
            client.publish_with_reply(subjects::shell(&worker), reply.clone(), wire::encode(open).into()).await.unwrap();
            let answer = tokio::time::timeout(Duration::from_secs(10), answers.next()).await.unwrap().unwrap();
            if answer.status.is_none() {
                return wire::decode::<Opened>("answer", &answer.payload).unwrap();
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("nobody listens");
    };
    let other = wish(volley_jobspecs::ids::AttemptName { number: 9, ..name }, &[], None);
    assert!(matches!(ask(&other).await, Opened::No { kind: Refused::NotHere, .. }));
    assert_eq!(ask(&open).await, Opened::Yes);
    let to = subjects::shell_to_worker(&worker, &open.session);
    let frame = Frame { number: 1, body: Body::Input(b"this\n".to_vec().into()) };
    client.publish(to, wire::encode(&frame).into()).await.unwrap();
    let mut came = Vec::new();
    loop {
        let message = tokio::time::timeout(Duration::from_secs(20), frames.next()).await.unwrap().unwrap();
        let frame: Frame = wire::decode("frame", &message.payload).unwrap();
        came.push(frame.body);
        if came.last().is_some_and(Body::is_last) {
            break;
        }
    }
    assert_eq!(came[0], Body::Output { stderr: false, bytes: b"got this\n".to_vec().into() });
    assert!(matches!(came.last(), Some(Body::Ended(ended)) if ended.code == Some(4)), "{came:?}");
    // The task's end ends what is run beside it, so it comes last.
    run(&shells, name, &["touch", "stop"]).await;
    let end = w.end_of(job).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, ""));
    serving.abort();
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shell_is_the_images_user_in_the_images_environment() {
    let Some((mut w, _, shells)) = world_with_shells(|_| {}).await else { return };
    let job = begin(&mut w, &task(image::OF_USER, WAITS)).await;
    let name = attempt(&w, job);
    // When memory is short it is the first to go.
    let came = run(&shells, name, &["sh", "-c", "id -u; echo $FROM; cat /proc/self/oom_score_adj; touch stop"]).await;
    assert_eq!(came.text(), "1000\nimage\n1000\n", "{}", came.errors());
    assert_eq!(w.end_of(job).await.ending, Ending::Succeeded);
    w.finish().await;
}
