//! What commands find around them.

use serde_json::json;

use super::{Case, case, shell, that, words};
use crate::run::Tier;

/// What a shell sets for what it starts, and what users without a name are given.
const NAMES: &str = "env | cut -d= -f1 | grep -v -x -e PWD -e OLDPWD -e SHLVL -e _ | sort";

/// All of them.
pub fn cases() -> Vec<Case> {
    [variables(), around()].into_iter().flatten().collect()
}

/// Variables and arguments.
fn variables() -> Vec<Case> {
    let odd = json!({ "A": "two words", "B": "line\nbreak", "C": "", "D": "a=b=c", "E": "'\"$`\\", "F": "grün ✓", "G_1": "  spaces  " });
    let print = "printf '[%s]' \"$A\" \"$B\" \"$C\" \"$D\" \"$E\" \"$F\" \"$G_1\"";
    let mut many = ["sh", "-c", "echo $# $${2000}", "sh"].map(str::to_owned).to_vec();
    many.extend((1..=2_000).map(|n| format!("{n:050}")));
    vec![
        shell("variables, and no others", NAMES)
            .ok()
            .out("HOME\nLANG\nPATH\nTMPDIR\nVOLLEY_ATTEMPT\nVOLLEY_ITEM\nVOLLEY_JOB\nVOLLEY_OUTPUT_DIR\nVOLLEY_TASK_COUNT\nVOLLEY_TASK_INDEX\n")
            .differs(Tier::Process, "USER and LOGNAME as well: slots' users are in no passwd file of the host's"),
        shell("variables of Volley's", "echo $VOLLEY_TASK_INDEX $VOLLEY_TASK_COUNT $VOLLEY_ATTEMPT $VOLLEY_ITEM").ok().out("0 1 1 {\"a\":\"item value\"}\n"),
        shell("defaults", "echo $LANG $PATH").ok().out("C.UTF-8 /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"),
        shell("directories exist and are written", "for d in \"$HOME\" \"$TMPDIR\" \"$VOLLEY_OUTPUT_DIR\" .; do test -d \"$d\" && touch \"$d/x\" && echo yes; done")
            .ok()
            .out("yes\nyes\nyes\nyes\n")
            .paths(&["x"]),
        shell("it starts at home", "test \"$(pwd)\" = \"$HOME\" && echo home").ok().out("home\n"),
        case("odd values", json!({ "command": print, "env": odd })).ok().out("[two words][line\nbreak][][a=b=c]['\"$`\\][grün ✓][  spaces  ]"),
        case("values of items", json!({ "command": "echo \"$MINE\"", "env": { "MINE": "${item.a} ${index}" } })).ok().out("item value 0\n"),
        case("its own PATH", json!({ "command": ["tool", "x"], "env": { "PATH": "/no/such:bin" }, "inputs": [{ "from": "upload:script", "path": "bin/tool", "executable": true }] }))
            .ok()
            .out("ran x\n"),
        case("its own defaults", json!({ "command": "echo $LANG $HOME $TMPDIR", "env": { "LANG": "C", "HOME": "/h", "TMPDIR": "/t" } })).ok().out("C /h /t\n"),
        shell("the image's variables", "echo $FROM $PATH; id -u; id -g").in_its_users_image().ok().out("image /bin\n1000\n1001\n"),
        case("its own over the image's", json!({ "command": "echo $FROM", "env": { "FROM": "task" } })).in_its_users_image().ok().out("task\n"),
        shell("the image's user writes", "echo 1 > a && echo 2 > $TMPDIR/b && echo 3 > $VOLLEY_OUTPUT_DIR/c; touch /etc/x 2>/dev/null || echo not there")
            .in_its_users_image()
            .ok()
            .out("not there\n")
            .file("c", b"3\n"),
        shell("the image's files", "cat /etc/release").skip(Tier::Process, "it has no image").ok().out("the image\n"),
        case("arguments", json!({ "command": ["printf", "[%s]", "a b", "", "line\nbreak", "grün ✓", "-x", "'\"$`\\", "*", "~"] }))
            .ok()
            .out("[a b][][line\nbreak][grün ✓][-x]['\"$`\\][*][~]"),
        case("many arguments", json!({ "command": many }))
            .ok()
            .out(&format!("2000 {:050}\n", 2_000)),
        case("a long argument", json!({ "command": ["sh", "-c", "echo $${#1}", "sh", "y".repeat(100 * 1024)] })).ok().out("102400\n"),
        case("a long variable", json!({ "command": "echo $${#LONG}", "env": { "LONG": "z".repeat(100 * 1024) } })).ok().out("102400\n"),
    ]
}

/// What a process is, and what it sees of its system.
fn around() -> Vec<Case> {
    vec![
        case("directories below home", json!({ "command": "pwd | tail -c 7; ls -A", "workdir": "a/b c" })).ok().out("/a/b c\n"),
        case("a directory of the system's", json!({ "command": ["pwd"], "workdir": "/etc" })).ok().out("/etc\n").skip(Tier::Process, "an absolute workdir wants an image"),
        shell("the mask for new files", "umask; touch f; stat -c %a f; mkdir d; stat -c %a d").ok().out("0022\n644\n755\n"),
        shell("no core files", "ulimit -c").ok().out("0\n"),
        shell("no signal is ignored or blocked", "grep -E '^Sig(Blk|Ign)' /proc/self/status | cut -f2").ok().out("0000000000000000\n0000000000000000\n"),
        words("no descriptors but three", &["sh", "-c", "exec ls /proc/self/fd"]).ok().out("0\n1\n2\n3\n"),
        shell("a session of its own", "set -- $(cat /proc/$$/stat); test $1 = $5 && test $1 = $6 && echo leader").ok().out("leader\n"),
        shell("not the system's first process", "test $$ != 1 && echo other").ok().out("other\n"),
        shell("an ordinary user on the host", "test $(id -u) != 0 && echo no root")
            .ok()
            .out("no root\n")
            .differs(Tier::Container, "root of its own namespace of users, who is the slot's user on the host")
            .differs(Tier::Microvm, "root of its own machine"),
        shell("no new rights", "grep NoNewPrivs /proc/self/status | cut -f2").ok().out("1\n").differs(Tier::Microvm, "what it may become, it becomes in its own machine"),
        shell("devices", "head -c 3 /dev/zero | wc -c | tr -d ' '; head -c 4 /dev/urandom | wc -c | tr -d ' '; echo x > /dev/null; test -e /dev/full && echo full")
            .ok()
            .out("3\n4\nfull\n"),
        shell("shared memory", "echo x > /dev/shm/volley-$$ && cat /dev/shm/volley-$$ && rm /dev/shm/volley-$$").ok().out("x\n"),
        shell("the time is the host's", "date +%s").ok().varies().check(|seen| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_secs());
            let said: u64 = seen.out().trim().parse().map_err(|e| format!("{e}"))?;
            that(said <= now + 2 && said + 300 > now, "a time of the last minutes")
        }),
        shell("a name of its own", "test $(hostname) = $VOLLEY_JOB-$VOLLEY_TASK_INDEX-$VOLLEY_ATTEMPT && echo its own")
            .ok()
            .out("its own\n")
            .differs(Tier::Process, "it has its host's name"),
        shell("random names differ", "cat /proc/sys/kernel/random/uuid").times(2).ok().varies().check(|seen| {
            that(seen.stdout[0] != seen.stdout[1] && seen.stdout[0].len() == 37, "two UUIDs")
        }),
        shell("boots differ", "cat /proc/sys/kernel/random/boot_id")
            .times(2)
            .ok()
            .varies()
            .check(|seen| that(seen.stdout[0] != seen.stdout[1], "two boot ids"))
            .differs(Tier::Process, "the kernel is its host's")
            .differs(Tier::Container, "the kernel is its host's"),
        shell("no network", "grep -c : /proc/net/dev; tail -n +2 /proc/net/route | wc -l | tr -d ' '").ok().out("1\n0\n").differs(Tier::Process, "it has its host's network"),
        shell("it can speak to itself", "cat /sys/class/net/lo/operstate").ok().out("unknown\n"),
        shell("its own names have addresses", "grep -qw localhost /etc/hosts && grep -qw \"$VOLLEY_JOB-$VOLLEY_TASK_INDEX-$VOLLEY_ATTEMPT\" /etc/hosts && echo named")
            .ok()
            .out("named\n")
            .differs(Tier::Process, "it has its host's names"),
        shell("nobody else's processes", "ls /proc | grep -c '^[0-9]' | while read n; do test $n -lt 12 && echo few; done")
            .ok()
            .out("few\n")
            .differs(Tier::Process, "it sees its host's processes")
            .differs(Tier::Microvm, "it sees its own machine's, the kernel's among them"),
        shell("usage is told", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done").ok().check(|seen| {
            that(seen.end().usage.as_ref().is_some_and(|usage| usage.cpu_us > 1_000 && usage.memory_bytes_max > 100_000), "some usage")
        }),
    ]
}
