//! How commands begin, and how they end.

use serde_json::json;
use volley_jobspecs::failure::FailureClass;

use super::{Case, case, shell, that, words};
use crate::run::{Seen, Tier};

/// Ended, and at the latest so many milliseconds after its start.
fn within_ms(ms: u32) -> impl Fn(&Seen) -> Result<(), String> + Send + Sync + 'static {
    move |seen| that(seen.end().timing.run_ms < ms, &format!("an end within {ms} ms"))
}

pub fn cases() -> Vec<Case> {
    let mut all = vec![words("exit code 0", &["true"]).ok().out("").err("")];
    for code in [1, 2, 7, 125, 126, 127, 128, 129, 137, 143, 254, 255] {
        all.push(shell(&format!("exit code {code}"), &format!("exit {code}")).code(code).says(&format!("exit code {code}")));
    }
    for (signal, name) in [(1, "HUP"), (2, "INT"), (6, "ABRT"), (9, "KILL"), (10, "USR1"), (11, "SEGV"), (13, "PIPE"), (15, "TERM")] {
        all.push(
            shell(&format!("ended by signal {signal}"), &format!("kill -{name} $$; sleep 5")).signal(signal).says(&format!("SIG{name}")),
        );
    }
    all.extend([
        shell("a child's signal is the shell's code", "sh -c 'kill -9 $$'; exit $?").code(137),
        words("not found in PATH", &["no-such-program"]).code(127).says("no-such-program: command not found"),
        words("not found at its path", &["/no/such/program"]).code(127).says("/no/such/program: command not found"),
        words("no executable file", &["/etc/passwd"]).code(126).says("can't be executed"),
        words("a directory is no program", &["/etc"]).code(126).says("can't be executed"),
        shell("no interpreter", "printf '#!/no/such/shell\\n' > s; chmod +x s; ./s").code(127),
        case("a script without its first line", json!({ "command": ["./s"], "inputs": [{ "from": "upload:text", "path": "s", "executable": true }] }))
            .code(126)
            .says("not a program for this machine"),
        case("no interpreter, directly", json!({ "command": ["./gone"], "inputs": [{ "from": "upload:orphan", "path": "gone", "executable": true }] }))
            .code(127)
            .says("interpreter"),
        case("no such directory", json!({ "command": ["true"], "workdir": "/no/such/place" })).code(126).says("task.workdir").skip(Tier::Process, "an absolute workdir wants an image"),
        case("a file is no directory", json!({ "command": ["true"], "workdir": "/etc/passwd" })).code(126).says("task.workdir").skip(Tier::Process, "an absolute workdir wants an image"),
        shell("run timeout, TERM obeyed", "echo begun; exec sleep 60")
            .within("600ms", "10s")
            .failed(FailureClass::RunTimeout, Some(15))
            .out("begun\n")
            .check(within_ms(9_000)),
        shell("run timeout, TERM ignored", "trap '' TERM; echo begun; while :; do sleep 1; done")
            .within("600ms", "500ms")
            .failed(FailureClass::RunTimeout, Some(9))
            .out("begun\n")
            .check(within_ms(12_000)),
        shell("run timeout, TERM taken", "trap 'echo bye; exit 5' TERM; echo begun; while :; do sleep 0.1; done")
            .within("800ms", "10s")
            .failed(FailureClass::RunTimeout, Some(5))
            .out("begun\nbye\n"),
        shell("run timeout, TERM taken as a success", "trap 'exit 0' TERM; while :; do sleep 0.1; done")
            .within("800ms", "10s")
            .failed(FailureClass::RunTimeout, Some(0)),
        shell("run timeout reaches children", "sh -c 'trap \"echo child; exit 0\" TERM; while :; do sleep 0.1; done' & trap 'wait; exit 6' TERM; wait; wait; exit 6")
            .within("800ms", "10s")
            .failed(FailureClass::RunTimeout, Some(6))
            .out("child\n"),
        shell("TERM reaches another session", "setsid sh -c 'trap \"echo far; exit 0\" TERM; while :; do sleep 0.1; done' & trap 'wait; exit 6' TERM; sleep 0.2; wait; wait; exit 6")
            .within("1500ms", "3s")
            .failed(FailureClass::RunTimeout, Some(6))
            .out("far\n"),
        shell("cancelled", "echo begun; exec sleep 60").stopped_after_ms(300).failed(FailureClass::Cancelled, Some(15)).out("begun\n"),
        shell("cancelled, TERM ignored", "trap '' TERM; echo begun; while :; do sleep 1; done")
            .with(json!({ "timeouts": { "grace": "500ms" } }))
            .stopped_after_ms(1_500)
            .failed(FailureClass::Cancelled, Some(9))
            .out("begun\n"),
        shell("a background child is killed and counted", "sleep 300 & exit 0").ok().says("1 process was still running at its end and was killed"),
        shell("a daemon is killed and counted", "(setsid sh -c 'sleep 301 & sleep 302 & wait' </dev/null >/dev/null 2>&1 &) ; sleep 0.5; exit 3")
            .code(3)
            .says("3 processes were still running at its end and were killed"),
        shell("a child that ended is no stray", "sh -c 'exit 0' & (sh -c 'exit 0' &); sleep 0.3; exit 0").ok().check(|seen| that(!seen.message().contains("still running"), "no strays")),
        shell("closed streams and a hang", "exec >&- 2>&-; sleep 60").within("600ms", "5s").class(FailureClass::RunTimeout),
        shell("closed streams and an end", "exec >&- 2>&-; sleep 0.2; exit 4").code(4),
        shell("a child holds the streams", "sleep 300 & echo done").ok().out("done\n").check(within_ms(5_000)),
        shell("zombies are nobody's concern", "for i in 1 2 3 4 5; do (sh -c 'exit 0' &) ; done; sleep 0.2; echo here").ok().out("here\n"),
    ]);
    all
}
