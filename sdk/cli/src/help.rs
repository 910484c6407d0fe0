//! What `-h` and `--help` show.
//!
//! Owns their shape: `-h` has a line a flag, `--help` everything: whole explanations, variables, defaults, examples; and the groups of
//! verbs. Does not own the flags' own words (each verb).

use clap::{Arg, Command};

use crate::exit::{EXIT_CODES_HELP, SERVE_EXIT_CODES_HELP};

/// Most characters of a flag's line, without its name, before its default is left to `--help`: with the longest names it still fits
/// a terminal of 100 columns.
const LINE_CHARS: usize = 60;

/// The verbs, by what somebody wants.
const GROUPS: [(&str, &[&str]); 6] = [
    ("Start a cluster", &["up", "coordinator", "worker", "image", "template", "log"]),
    ("Submit", &["run", "submit", "plan", "upload"]),
    ("Look", &["jobs", "job", "tasks", "task", "explain", "logs", "results", "outputs", "exec"]),
    ("Control", &["wait", "cancel", "pause", "resume", "rerun", "rm"]),
    ("Operate", &["volume", "workers", "cluster", "tenant", "token"]),
    ("Other", &["schema", "completions"]),
];

/// Verbs that start what goes on until it is told to end.
const SERVES: [&str; 3] = ["up", "coordinator", "worker"];

/// What to type, by verb.
const EXAMPLES: &[(&str, &str)] = &[
    ("up", "volley up\nvolley up --dir /srv/volley --slots 8"),
    ("coordinator", "volley coordinator --nats nats://nats:4222 --s3-bucket volley --data-dir /var/lib/volley/c"),
    ("worker", "volley worker --nats nats://nats:4222 --s3-bucket volley --work-dir /var/lib/volley/w"),
    (
        "template",
        "volley template --s3-bucket volley ls --template-keys /etc/volley/template.keys\nvolley template --s3-bucket volley rm 3fa9",
    ),
    ("image", "volley image import python:3.12\nvolley image import dir:/srv/rootfs\nvolley image ls"),
    (
        "run",
        "volley run spec.json\nvolley run spec.json --items inputs.jsonl --results results.jsonl\nvolley run - --upload script=./eval.py",
    ),
    ("submit", "volley submit spec.json --key nightly-2026-01-31"),
    ("plan", "volley plan spec.json --items inputs.csv --show 5"),
    ("upload", "volley upload inputs.jsonl"),
    ("jobs", "volley jobs --state running\nvolley jobs --label team=a --all -o json"),
    ("job", "volley job j1042\nvolley job j1042 --spec"),
    ("tasks", "volley tasks j1042 --state failed"),
    ("task", "volley task j1042 17"),
    ("explain", "volley explain j1042\nvolley explain j1042 17"),
    ("logs", "volley logs j1042 17\nvolley logs -f j1042"),
    ("results", "volley results j1042 --failed\nvolley results j1042 --out results.jsonl"),
    ("outputs", "volley outputs ls j1042 17\nvolley outputs get j1042"),
    ("outputs ls", "volley outputs ls j1042 17"),
    ("outputs get", "volley outputs get j1042\nvolley outputs get j1042 17 report.txt --stdout"),
    (
        "exec",
        "volley exec j1042 17\nvolley exec j1042 17 -- ps\nvolley exec j1042 17 -- tar c /volley/out > out.tar\n\
         volley exec j1042 17 --attempt 1 -- python3 - < look.py\nvolley exec j1042 17 --end",
    ),
    ("wait", "volley wait j1042 j1043 --timeout 2h"),
    ("cancel", "volley cancel j1042 --now --reason 'wrong input'"),
    ("pause", "volley pause j1042"),
    ("resume", "volley resume j1042"),
    ("rerun", "volley rerun j1042"),
    ("rm", "volley rm j1042 j1043"),
    ("workers", "volley workers\nvolley workers drain host-7"),
    ("workers drain", "volley workers drain host-7 host-8"),
    ("workers resume", "volley workers resume host-7"),
    ("cluster", "volley cluster\nvolley cluster -o json"),
    (
        "volume",
        "volley volume create state 10GiB\nvolley volume snapshot state@monday\nvolley volume clone state@monday trial\nvolley volume ls",
    ),
    ("volume create", "volley volume create state 10GiB\nvolley volume create ledger 1GiB --flush s3"),
    ("volume ls", "volley volume ls\nvolley volume ls -o json"),
    ("volume show", "volley volume show state"),
    ("volume snapshot", "volley volume snapshot state@monday"),
    ("volume clone", "volley volume clone state@monday trial"),
    ("volume resize", "volley volume resize state 20GiB"),
    ("volume verify", "volley volume verify state\nvolley volume verify state@monday --deep"),
    ("volume gc", "volley volume gc --dry-run\nvolley volume gc"),
    ("volume rm", "volley volume rm state@monday\nvolley volume rm state trial"),
    ("tenant", "volley tenant add red --weight 50 --active-tasks 100000\nvolley tenant rm red"),
    ("tenant add", "volley tenant add red --weight 50 --active-tasks 100000"),
    ("tenant ls", "volley tenant ls"),
    ("tenant rm", "volley tenant rm red"),
    ("token", "volley token create --tenant red\nvolley token ls\nvolley token revoke 0123456789abcdef"),
    ("token create", "volley token create --tenant red"),
    ("token ls", "volley token ls"),
    ("token revoke", "volley token revoke 0123456789abcdef"),
    ("template build", "volley template build spec.json"),
    ("template ls", "volley template --s3-bucket volley ls --tenant nightly"),
    ("template show", "volley template --s3-bucket volley show 3fa9"),
    ("template rm", "volley template --s3-bucket volley rm 3fa9"),
    ("template sweep", "volley template --s3-bucket volley sweep --tenant nightly"),
    ("image import", "volley image import python:3.12\nvolley image import dir:/srv/rootfs --name tools"),
    ("image ls", "volley image ls -o json"),
    ("image rm", "volley image rm tools"),
    ("log", "volley log --dir /var/lib/volley show --job j1042\nvolley log --nats nats://nats:4222 skip 4711"),
    ("log show", "volley log show --from 4700 --limit 20"),
    ("log skip", "volley log skip 4711"),
    ("schema", "volley schema"),
    ("completions", "volley completions bash"),
];

/// Gives the command its short and its long help.
#[must_use]
pub fn shaped(command: Command) -> Command {
    let verbs = verbs(&command);
    let template = format!("{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{verbs}\nOptions:\n{{options}}{{after-help}}");
    each(command, "")
        .help_template(template)
        .after_help("`volley VERB -h` has a verb's flags; `--help` has examples, variables and exit codes.")
        .after_long_help(EXIT_CODES_HELP)
}

/// The verbs in their groups, each with a line.
fn verbs(command: &Command) -> String {
    let about = |verb: &str| command.find_subcommand(verb).and_then(Command::get_about).map(ToString::to_string).unwrap_or_default();
    let mut text = String::new();
    for (group, verbs) in GROUPS {
        text.push_str(&format!("\n{group}:\n"));
        verbs.iter().for_each(|verb| text.push_str(&format!("  {verb:<11}  {}\n", about(verb))));
    }
    text
}

fn each(command: Command, path: &str) -> Command {
    let command = command.mut_args(arg).mut_subcommands(|verb| {
        let path = format!("{path} {}", verb.get_name());
        each(verb, path.trim())
    });
    match EXAMPLES.iter().find(|(verb, _)| *verb == path) {
        Some((_, lines)) => {
            let lines: String = lines.lines().map(|line| format!("\n  {line}")).collect();
            let serves = SERVES.contains(&path);
            let codes = if serves { format!("\n\n{SERVE_EXIT_CODES_HELP}") } else { String::new() };
            command.after_long_help(format!("Examples:{lines}{codes}"))
        }
        None => command,
    }
}

/// The first sentence of its explanation is its short help; the rest, its variable and a long default are left to the long one.
fn arg(arg: Arg) -> Arg {
    let Some(help) = arg.get_help().map(ToString::to_string) else { return arg };
    let short = help.split_once(". ").map_or(help.as_str(), |(first, _)| first).to_owned();
    let mut long = arg.get_long_help().map_or(help, ToString::to_string);
    if let Some(name) = arg.get_env() {
        long.push_str(&format!("\n\n[env: {}]", name.to_string_lossy()));
    }
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    let default = defaults.join(" ");
    let hidden = arg.is_hide_default_value_set();
    let fits = !default.is_empty() && short.len() + " [default: ]".len() + default.len() <= LINE_CHARS;
    if !hidden && !fits && !default.is_empty() {
        long.push_str(&format!("\n\n[default: {default}]"));
    }
    let arg = arg.help(short).long_help(long).hide_env(true);
    if arg.get_action().takes_values() { arg.hide_default_value(hidden || !fits) } else { arg }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command;

    /// Every command with its path, built.
    fn all(command: &Command, path: &str, found: &mut Vec<(String, Command)>) {
        found.push((path.to_owned(), command.clone()));
        for verb in command.get_subcommands().filter(|verb| verb.get_name() != "help") {
            all(verb, format!("{path} {}", verb.get_name()).trim(), found);
        }
    }

    fn built() -> Vec<(String, Command)> {
        let mut command = command();
        command.build();
        let mut found = Vec::new();
        all(&command, "", &mut found);
        found
    }

    #[test]
    fn every_verb_is_in_one_group() {
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, verbs)| verbs.iter().copied()).collect();
        let command = command();
        let mut verbs: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
        grouped.sort_unstable();
        verbs.sort_unstable();
        assert_eq!(grouped, verbs);
    }

    #[test]
    fn the_short_help_has_a_line_a_flag_and_no_examples() {
        let mut broken = Vec::new();
        for (path, mut command) in built() {
            let text = command.render_help().to_string();
            let wrapped = text.lines().filter(|line| line.len() > 100 || line.starts_with("          "));
            broken.extend(wrapped.map(|line| format!("{path}: {line}")));
            assert!(!text.contains("Example") && !text.contains("[env:"), "{text}");
        }
        assert!(broken.is_empty(), "{}", broken.join("\n"));
    }

    #[test]
    fn the_long_help_has_variables_and_examples_that_are_read() {
        let found = built();
        for (path, _) in found.iter().filter(|(path, _)| !path.is_empty()) {
            assert!(EXAMPLES.iter().any(|(verb, _)| verb == path), "{path} has no example");
        }
        for (verb, lines) in EXAMPLES {
            let (_, command) = found.iter().find(|(path, _)| path == verb).unwrap_or_else(|| panic!("no verb {verb}"));
            let text = command.clone().render_long_help().to_string();
            for line in lines.lines() {
                assert!(text.contains(line), "{verb}: {line}");
                // As a shell would: what stands in quotes is one word.
                let words = line.split('\'').enumerate().flat_map(|(part, text)| match part % 2 {
                    0 => text.split_whitespace().map(str::to_owned).collect::<Vec<_>>(),
                    _ => vec![text.to_owned()],
                });
                let parsed = crate::cli::read(words);
                assert!(parsed.is_ok(), "{line}: {}", parsed.err().map(|e| e.to_string()).unwrap_or_default());
            }
        }
        let up = found.iter().find(|(path, _)| path == "up").map(|(_, command)| command.clone().render_long_help().to_string());
        assert!(up.is_some_and(|text| text.contains("nats-server is missing")));
        let worker = found.iter().find(|(path, _)| path == "worker").map(|(_, command)| command.clone().render_long_help().to_string());
        assert!(worker.is_some_and(|text| text.contains("[env: VOLLEY_TASK_USERS]") && text.contains("[env: AWS_REGION]")));
    }
}
