//! Files that tasks are given and leave.

use serde_json::{Value, json};
use volley_jobspecs::failure::FailureClass;

use super::{Case, case, shell, that};
use crate::run::Tier;

fn input(name: &str, path: &str) -> Value {
    json!({ "from": format!("upload:{name}"), "path": path })
}

pub fn cases() -> Vec<Case> {
    [inputs(), outputs(), results(), places()].into_iter().flatten().collect()
}

fn inputs() -> Vec<Case> {
    let tool = json!({ "from": "upload:script", "path": "bin/tool", "executable": true });
    vec![
        case("inputs are there", json!({ "command": "cat d/e/in.txt; bin/tool now; stat -c %a d/e/in.txt bin/tool", "inputs": [input("text", "d/e/in.txt"), tool] }))
            .ok()
            .out("data!\nran now\n444\n555\n"),
        case("inputs with odd names", json!({ "command": "find . -type f | sort", "inputs": [input("text", "a b/c'd\"e"), input("text", "grün/✓"), input("text", "-n"), input("text", "...")] }))
            .ok()
            .out("./-n\n./...\n./a b/c'd\"e\n./grün/✓\n"),
        case("inputs can't be written", json!({ "command": "echo more 2>/dev/null >> in.txt || echo denied; cat in.txt", "inputs": [input("text", "in.txt")] }))
            .ok()
            .out("denied\ndata!\n")
            .differs(Tier::Microvm, "root of the machine writes its own copy"),
        case("inputs can be replaced", json!({ "command": "rm -f in.txt && echo mine > in.txt && cat in.txt", "inputs": [input("text", "in.txt")] })).ok().out("mine\n"),
        case("an input of another checksum", json!({ "command": ["true"], "inputs": [{ "from": "upload:text", "path": "x", "sha256": "0".repeat(64) }] }))
            .failed(FailureClass::InputMissing, None)
            .says("sha256"),
        case("an input that is not there", json!({ "command": ["true"], "inputs": [input("nothing", "x")] })).failed(FailureClass::InputMissing, None),
        case("an input as an output", json!({ "command": ["true"], "inputs": [input("text", "d/in.txt")], "outputs": ["d"] })).ok().file("d/in.txt", b"data!\n"),
    ]
}

fn outputs() -> Vec<Case> {
    let in_out = |script: &str| format!("cd $VOLLEY_OUTPUT_DIR; {script}");
    vec![
        shell("outputs are kept", &in_out("echo one > one; mkdir -p d/e; echo two > d/e/two; : > empty; echo h > .hidden"))
            .ok()
            .paths(&[".hidden", "d/e/two", "empty", "one"])
            .file("d/e/two", b"two\n")
            .file("empty", b""),
        shell("outputs with odd names", &in_out("echo 1 > 'a b'; echo 2 > 'grün ✓'; echo 3 > \"q'\\\"q\"; echo 4 > ./-n; echo 5 > '*'"))
            .ok()
            .paths(&["*", "-n", "a b", "grün ✓", "q'\"q"]),
        shell("a name with a line's end", &in_out("echo 1 > \"$(printf 'a\\nb')\"")).ok().paths(&["a\nb"]),
        shell("a name that is no text", &in_out("echo 1 > \"$(printf 'a\\377b')\"; echo 2 > plain")).ok().paths(&["plain"]).says("not kept"),
        shell("links, pipes and sockets are left out", &in_out("ln -s /etc/passwd link; ln -s . loop; mkfifo pipe; echo x > plain")).ok().paths(&["plain"]).check(|seen| {
            let message = seen.message();
            that(["link", "loop", "pipe"].iter().all(|name| message.contains(name)), "a message that names what was left out")
        }),
        shell("two names of one file", &in_out("echo x > a; ln a b")).ok().paths(&["a", "b"]).file("b", b"x\n"),
        shell("a large file", &in_out("dd if=/dev/zero of=big bs=1024 count=8192 2>/dev/null; echo end >> big"))
            .ok()
            .check(|seen| that(seen.file("big").is_some_and(|bytes| bytes.len() == (8 << 20) + 4 && bytes.ends_with(b"\0end\n")), "8 MiB and 4 bytes")),
        shell("a file with holes", &in_out("dd if=/dev/zero of=holes bs=1 count=1 seek=1048575 2>/dev/null"))
            .ok()
            .check(|seen| that(seen.file("holes").is_some_and(|bytes| bytes.len() == 1 << 20), "1 MiB")),
        shell("a file that nobody may read", &in_out("echo x > closed; chmod 000 closed; mkdir d; echo y > d/f; chmod 000 d")).ok().paths(&["closed", "d/f"]),
        shell("outputs of a failure", &in_out("echo x > left; exit 3")).code(3).paths(&["left"]),
        shell("outputs of a timeout", &in_out("echo x > left; sleep 60")).within("600ms", "5s").class(FailureClass::RunTimeout).paths(&["left"]),
        case("declared outputs", json!({ "command": "mkdir -p made/deep; echo 1 > made/deep/one; echo 2 > two; echo 3 > three", "outputs": ["made", "two", "none"] }))
            .ok()
            .paths(&["made/deep/one", "two"]),
        case("a declared link is left out", json!({ "command": "ln -s /etc made; ln -s /etc/passwd two", "outputs": ["made/passwd", "two"] })).ok().paths(&[]),
        shell("a directory that was removed", "rm -r $VOLLEY_OUTPUT_DIR; cd /; rm -r $HOME; echo gone").ok().out("gone\n").paths(&[]),
        case("a link in a directory's place", json!({ "command": "d=$VOLLEY_OUTPUT_DIR; rmdir $d 2>/dev/null && ln -s /etc $d; h=$HOME; cd /; rm -r $h && ln -s /etc $h; echo here", "outputs": ["passwd"] }))
            .ok()
            .paths(&[]),
        shell("many files", &in_out("for i in $(seq 200); do echo $i > f$i; done")).ok().check(|seen| that(seen.paths().len() == 200, "200 files")),
    ]
}

fn results() -> Vec<Case> {
    let write = |text: &str| format!("printf '%s' '{text}' > $VOLLEY_OUTPUT_DIR/result.json");
    vec![
        shell("a result", &write(r#"{"score": 1}"#))
            .ok()
            .paths(&[])
            .check(|seen| that(seen.end().result.as_ref().is_some_and(|result| **result == b"{\"score\": 1}"[..]), "the result")),
        shell("a result that is no JSON", &write("no"))
            .ok()
            .paths(&["result.json"])
            .says("result.json is no JSON")
            .check(|seen| that(seen.end().result.is_none(), "none")),
        shell(
            "a result that is too large",
            "{ printf '\"'; head -c 100000 /dev/zero | tr '\\0' x; printf '\"'; } > $VOLLEY_OUTPUT_DIR/result.json",
        )
        .ok()
        .paths(&["result.json"])
        .says("result.json has more than"),
        shell("a result of a failure", &format!("{}; exit 2", write("[1]")))
            .code(2)
            .check(|seen| that(seen.end().result.is_some(), "the result")),
    ]
}

fn places() -> Vec<Case> {
    vec![
        shell(
            "nothing is left for the next",
            "ls -A . $TMPDIR $VOLLEY_OUTPUT_DIR | grep -v -e :$ -e ^$; touch a $TMPDIR/b $VOLLEY_OUTPUT_DIR/c; mkdir -p .x/y; chmod 000 .x",
        )
        .times(2)
        .ok()
        .out(""),
        shell("/tmp is nobody else's", "ls -A /tmp | grep -v -x -e volley-mark -c; touch /tmp/volley-mark; exit 0")
            .times(2)
            .ok()
            .out("0\n0\n")
            .skip(Tier::Process, "it has its host's /tmp beside its own TMPDIR"),
        shell("the image is fresh each time", "test -e /srv/mark && echo stale; echo x > /srv/mark && rm /etc/release && cat /srv/mark")
            .times(2)
            .ok()
            .out("x\nx\n")
            .skip(Tier::Process, "it has no image"),
        shell("nothing outside is written", "touch /etc/volley-mark 2>/dev/null || echo denied")
            .ok()
            .out("denied\n")
            .differs(Tier::Container, "root writes into its own layer over the image, which goes with it")
            .differs(Tier::Microvm, "root writes into its own layer over the image, which goes with it"),
        shell("no mounts", "mount -t tmpfs none /tmp 2>/dev/null || echo denied")
            .ok()
            .out("denied\n")
            .differs(Tier::Microvm, "root of its own machine"),
        shell("no devices", "mknod d b 8 0 2>/dev/null || echo denied")
            .ok()
            .out("denied\n")
            .differs(Tier::Microvm, "root of its own machine"),
        shell(
            "modes and times",
            "touch f; chmod 4751 f; stat -c %a f; ln f g; stat -c %h f; ln -s f s; readlink s; mkfifo p; test -p p && echo pipe",
        )
        .ok()
        .out("4751\n2\nf\npipe\n"),
        shell("much in one file", "dd if=/dev/zero of=f bs=65536 count=320 2>/dev/null; stat -c %s f").ok().out("20971520\n"),
    ]
}
