//! Shells in the machines of tasks, from the command line: piped and on a terminal, in a task that runs and in one that failed.
//!
//! Wants what `microvm` wants, and for the terminal `script` (util-linux); without one of them the test says that it was skipped.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::microvm::with_image;
use crate::support::Cluster;
use crate::support::process::until;

/// Runs a command with this on its input; its exit code, output and errors.
fn with_input(mut command: Command, input: &[u8]) -> (i32, Vec<u8>, String) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_vec());
    let mut stderr = child.stderr.take().unwrap();
    let writer = std::thread::spawn(move || {
        // One that ends early reads no more.
        let _ = stdin.write_all(&input);
    });
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        text
    });
    let mut output = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut output).unwrap();
    let code = child.wait().unwrap().code().unwrap_or(-1);
    writer.join().unwrap();
    (code, output, errors.join().unwrap())
}

#[test]
fn shells_are_opened_in_machines_that_run_and_in_those_that_were_kept() {
    let Some((cluster, imported)) = with_image() else { return };
    let digest = imported[0]["digest"].as_str().unwrap();
    let command = "echo hello > file; echo ready; while [ ! -e stop ]; do /bin/busybox usleep 100000; done; exit 3";
    let task = json!({
        "isolation": "microvm", "image": digest, "command": command, "resources": { "memory": "64MiB" }, "timeouts": { "start": "2m" },
    });
    let spec = cluster.spec(json!({ "count": 1 }), task, json!({}));
    let job = cluster.ask(&["submit", &spec, "--keep-failed=10m"])["job"].as_str().unwrap().to_owned();
    let exec = |words: &[&str]| {
        let mut args = vec!["exec", job.as_str(), "0", "--"];
        args.extend(words);
        cluster.command(&args)
    };
    // Until its machine is there it has none, and that is said.
    let begin = Instant::now();
    loop {
        let (code, output, errors) = with_input(exec(&["cat", "file"]), b"");
        if code == 0 && output == b"hello\n" {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(120) && (code == 65 || code == 1), "{code}: {errors}");
        std::thread::sleep(Duration::from_millis(200));
    }
    let bytes: Vec<u8> = (0..1_000_000u32).map(|at| (at % 251) as u8).collect();
    let (code, output, errors) = with_input(exec(&["sh", "-c", "cat; echo err >&2; exit 5"]), &bytes);
    assert_eq!((code, errors.as_str()), (5, "err\n"));
    assert!(output == bytes, "{} bytes came back", output.len());
    let (code, _, errors) = with_input(exec(&["no-such-program"]), b"");
    assert!(code == 127 && errors.contains("no-such-program"), "{code}: {errors}");
    assert_eq!(with_input(exec(&["sh", "-c", "kill -KILL $$"]), b"").0, 137);
    on_a_terminal(&cluster, &job);
    refusals(&cluster, &job);
    assert_eq!(with_input(exec(&["sh", "-c", ": > stop"]), b"").0, 0);
    cluster.ended(&job);
    let row = &cluster.results(&job)[0];
    assert_eq!((&row["class"], &row["code"]), (&json!("exit_code"), &json!(3)), "{row}");
    let message = row["message"].as_str().unwrap();
    assert!(message.contains("its machine was kept, until ") && message.contains(&format!("volley exec {job} 0 --attempt 1")), "{message}");
    let (code, output, errors) = with_input(exec(&["cat", "file"]), b"");
    assert_eq!((code, output.as_slice()), (0, &b"hello\n"[..]), "{errors}");
    // It is listed, and gone before its time when somebody says so.
    let kept = || cluster.workers()[0]["kept"].as_array().unwrap().clone();
    until("the machine is listed", || kept().len() == 1);
    assert_eq!((&kept()[0]["job"], &kept()[0]["task"], &kept()[0]["attempt"]), (&json!(job), &json!(0), &json!(1)));
    cluster.volley(&["exec", &job, "0", "--end"]).exits(0);
    until("the machine is gone", || {
        let (code, _, errors) = with_input(exec(&["true"]), b"");
        code == 65 && errors.contains("its machine is gone: somebody ended it")
    });
    let told = cluster.volley(&["exec", &job, "0", "--end"]).exits(65);
    assert!(told.stderr.contains("somebody ended it"), "{}", told.stderr);
    until("nothing is listed", || kept().is_empty());
}

/// As somebody types it.
fn on_a_terminal(cluster: &Cluster, job: &str) {
    let exec = cluster.command(["exec", job, "0"]);
    let words: Vec<String> =
        [exec.get_program()].into_iter().chain(exec.get_args()).map(|word| format!("'{}'", word.to_string_lossy())).collect();
    let mut script = Command::new("script");
    script.args(["-q", "-e", "-c", &format!("stty rows 33 cols 77; exec {}", words.join(" ")), "/dev/null"]);
    script.envs(exec.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("TERM", "vt220");
    let mut child = match script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn() {
        Ok(child) => child,
        Err(why) => return eprintln!("skipped: script: {why}"),
    };
    let mut stdin = child.stdin.take().unwrap();
    let typing = std::thread::spawn(move || {
        // The shell's own line editor would take what comes before it has begun.
        std::thread::sleep(Duration::from_secs(3));
        let _ = stdin.write_all(b"/bin/busybox tty; /bin/busybox stty size; echo $TERM; cat file; exit 7\n");
        std::thread::sleep(Duration::from_secs(10));
    });
    let mut shown = String::new();
    child.stdout.take().unwrap().read_to_string(&mut shown).unwrap();
    let code = child.wait().unwrap().code();
    typing.join().unwrap();
    assert!(shown.contains("/dev/pts/0\r\n33 77\r\nvt220\r\nhello\r\n"), "{shown:?}");
    assert_eq!(code, Some(7), "{shown:?}");
}

/// What has no machine, and who may not.
fn refusals(cluster: &Cluster, job: &str) {
    cluster.volley(&["exec", job, "9"]).exits(66);
    cluster.volley(&["exec", "j999", "0"]).exits(66);
    cluster.volley(&["exec", job, "0", "--attempt", "8"]).exits(66);
    let told = cluster.volley(&["exec", job, "0", "-o", "json"]).exits(2);
    assert!(told.stderr.contains("no JSON"), "{}", told.stderr);
    let process = cluster.submit(&cluster.spec(json!({ "count": 1 }), json!({ "command": "true" }), json!({})));
    let told = cluster.volley(&["exec", &process, "0"]).exits(65);
    assert!(told.stderr.contains("only tasks with isolation \"microvm\" have a machine"), "{}", told.stderr);
    cluster.ask(&["tenant", "add", "red"]);
    let token = cluster.ask(&["token", "create", "--tenant", "red"])["token"].as_str().unwrap().to_owned();
    let mut other = cluster.command(["exec", job, "0", "--", "true"]);
    other.env("VOLLEY_TOKEN", token);
    assert_eq!(with_input(other, b"").0, 66, "another tenant's job is not there");
}
