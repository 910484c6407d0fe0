//! What commands read and write.

use serde_json::json;

use super::{Case, case, shell, that, words};

pub fn cases() -> Vec<Case> {
    let long = "x".repeat(200_000);
    let input = |name: &str, path: &str| json!([{ "from": format!("upload:{name}"), "path": path }]);
    vec![
        shell("stdout and stderr apart", "echo out; echo err >&2; echo more").ok().out("out\nmore\n").err("err\n"),
        shell("interleaved into one", "for i in 1 2 3; do echo out$i; echo err$i >&2; done 2>&1")
            .ok()
            .out("out1\nerr1\nout2\nerr2\nout3\nerr3\n")
            .err(""),
        shell("no line's end", "printf abc").ok().out("abc"),
        case("every byte", json!({ "command": ["cat", "b"], "inputs": input("bytes", "b") }))
            .ok()
            .varies()
            .check(|seen| that(seen.stdout[0] == (0..=255).collect::<Vec<u8>>(), "256 bytes")),
        shell("UTF-8", "printf 'gr\\303\\274n \\342\\234\\223\\n'").ok().out("grün ✓\n"),
        shell("output kept whole", "seq 20000").ok().varies().check(|seen| {
            let wanted: String = (1..=20_000).map(|n| format!("{n}\n")).collect();
            that(seen.stdout[0] == wanted.as_bytes(), "all lines")
        }),
        shell("long output loses its middle", "seq 400000; echo last").ok().varies().check(|seen| {
            let stream = seen.end().stdout.as_ref().ok_or("no stdout")?;
            let kept = String::from_utf8_lossy(&seen.stdout[0]).into_owned();
            that(stream.bytes == 2_688_900 && stream.truncated && stream.stored, "2688900 bytes, cut")?;
            that(kept.starts_with("1\n2\n") && kept.ends_with("400000\nlast\n"), "both ends")?;
            that(kept.contains("[volley: 1640324 bytes left out here]"), "the mark")
        }),
        shell("long stderr", "seq 50000 >&2").ok().out("").check(|seen| {
            that(
                seen.end().stderr.as_ref().is_some_and(|stream| stream.bytes == 288_894 && stream.tail.ends_with(b"50000\n")),
                "288894 bytes",
            )
        }),
        shell("written and failed", "echo before; exit 9").code(9).out("before\n"),
        case("stdin", json!({ "command": ["cat"], "stdin": "${item.a}!\n" })).ok().out("item value!\n"),
        case("stdin, empty", json!({ "command": "wc -c | tr -d ' '", "stdin": "" })).ok().out("0\n"),
        words("no stdin", &["cat"]).ok().out(""),
        case("stdin, large", json!({ "command": "wc -c | tr -d ' '", "stdin": long })).ok().out("200000\n"),
        case("stdin that nobody reads", json!({ "command": ["true"], "stdin": "x".repeat(100_000) })).ok(),
        case("stdin read in part", json!({ "command": "head -n 1; exec sleep 0.1", "stdin": format!("one\n{}", "two\n".repeat(50_000)) }))
            .ok()
            .out("one\n"),
        shell("streams by name", "echo out > /dev/stdout; echo err > /dev/stderr").ok().out("out\n").err("err\n"),
        shell("streams by descriptor", "echo out > /proc/self/fd/1; echo three 3>&1 >&3").ok().out("out\nthree\n"),
        shell("no terminal", "tty; test -t 0 || test -t 1 || test -t 2 || echo none").ok().out("not a tty\nnone\n"),
        shell("a pipe that closes", "yes | head -n 2; echo end").ok().out("y\ny\nend\n"),
    ]
}
