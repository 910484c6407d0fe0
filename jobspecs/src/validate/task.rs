//! Rules of one task: what the cluster offers, texts, paths, environment, deadlines and retry rules.

use std::collections::BTreeSet;

use super::{Features, unavailable, volumes};
use crate::backoff::DELAY_MS_MAX;
use crate::failure::FailureClass;
use crate::problem::{PROBLEMS_MAX, Problem, join, list};
use crate::resolve::{Kind, TextError, check_text, texts};
use crate::spec::{Command, Isolation, RetryAction, RetryRuleSpec, RetrySpec, TaskSpec, WarmUpSpec};
use crate::template::{Segment, Template, TemplateError};

/// Least memory of a task, in bytes: below it no program starts.
const MEMORY_BYTES_MIN: u64 = 4 << 20;
/// Least CPU of a machine, in thousandths of a core: with less, the agent in one that is emulated does not answer in time (measured: with 10 it
/// takes more than 30 s to begin a command, with 50 some seconds).
const MACHINE_CPU_MILLI_MIN: u32 = 50;
/// Longest time between SIGTERM and SIGKILL, in milliseconds: a worker that drains waits for it.
const GRACE_MS_MAX: u64 = 10 * 60_000;

/// Longest time for which a failed attempt's machine is kept, in milliseconds: somebody looks the next morning, and not later.
const KEEP_FAILED_MS_MAX: u64 = 24 * 60 * 60_000;

/// Most bytes of a warm-up, all words and variables together: they stand in the template's manifest, which every worker reads.
const WARM_UP_BYTES_MAX: usize = 256 * 1024;

/// What to write for the tier that every cluster has.
const TRUSTED_HINT: &str = "for code you trust, write \"isolation\": \"process\"";

/// `many`: may there be more than one task?
pub(super) fn judge(path: &str, task: &TaskSpec, many: bool, features: &Features, out: &mut Vec<Problem>) {
    judge_features(path, task, features, out);
    judge_texts(path, task, out);
    judge_paths(path, task, out);
    judge_environment(path, task, out);
    judge_warm_up(path, task, out);
    judge_keep_failed(path, task, out);
    volumes::judge(path, task, many, out);
    if let Some(memory) = task.resources.memory.filter(|memory| memory.0 < MEMORY_BYTES_MIN) {
        out.push(Problem::new(format!("{path}.resources.memory"), "too small").found(memory).allowed("at least 4MiB"));
    }
    if let Some(cpus) = task.resources.cpus.filter(|cpus| task.isolation == Isolation::Microvm && cpus.0 < MACHINE_CPU_MILLI_MIN) {
        let problem = Problem::new(format!("{path}.resources.cpus"), "too few for a machine").found(cpus).allowed("at least 0.05");
        out.push(problem.depends(format!("{path}.isolation")));
    }
    let timeouts = &task.timeouts;
    for (name, duration) in [("queue", timeouts.queue), ("start", Some(timeouts.start)), ("run", Some(timeouts.run))] {
        if duration.is_some_and(|duration| duration.0 == 0) {
            out.push(Problem::new(format!("{path}.timeouts.{name}"), "too short").found("0s").allowed("at least 1ms"));
        }
    }
    if timeouts.grace.0 > GRACE_MS_MAX {
        out.push(Problem::new(format!("{path}.timeouts.grace"), "too long").found(timeouts.grace).allowed("at most 10m"));
    }
    judge_retry(&format!("{path}.retry"), &task.retry, out);
}

fn judge_features(path: &str, task: &TaskSpec, features: &Features, out: &mut Vec<Problem>) {
    if !features.isolation.contains(&task.isolation) {
        let tier = task.isolation.as_str();
        let default = if task.isolation == Isolation::default() { " (the default)" } else { "" };
        let problem = unavailable(format!("{path}.isolation"), &format!("isolation \"{tier}\"{default}"));
        let problem = problem.allowed(list(features.isolation.iter().map(|tier| tier.as_str())));
        let trusted = features.isolation.contains(&Isolation::Process).then(|| TRUSTED_HINT.to_owned());
        let hints: Vec<String> = features.why_not.get(&task.isolation).cloned().into_iter().chain(trusted).collect();
        out.push(if hints.is_empty() { problem } else { problem.hint(hints.join("; ")) });
    }
    match task.isolation {
        Isolation::Container | Isolation::Microvm if task.image.is_none() && features.isolation.contains(&task.isolation) => {
            let message = format!("isolation \"{}\" needs an image", task.isolation.as_str());
            let problem = Problem::new(format!("{path}.image"), message).depends(format!("{path}.isolation"));
            out.push(problem.hint(TRUSTED_HINT));
        }
        Isolation::Process | Isolation::Null if task.image.is_some() => {
            let message = format!("isolation \"{}\" has no image: the task sees its host's files", task.isolation.as_str());
            let problem = Problem::new(format!("{path}.image"), message).depends(format!("{path}.isolation"));
            out.push(problem.hint("leave it out, or choose isolation \"container\" or \"microvm\""));
        }
        Isolation::Null | Isolation::Process | Isolation::Container | Isolation::Microvm => {}
    }
    for (name, asked, there) in [
        ("volumes", !task.volumes.is_empty(), features.volumes),
        ("network", task.network.is_some(), features.network),
        ("secrets", !task.secrets.is_empty(), features.secrets),
    ] {
        if asked && !there {
            out.push(unavailable(format!("{path}.{name}"), name));
        }
    }
}

/// Every text is a template, and what is plain in it is allowed where it stands.
fn judge_texts(path: &str, task: &TaskSpec, out: &mut Vec<Problem>) {
    for (field, kind, text) in texts(task) {
        let place = format!("{path}{field}");
        let template = match Template::parse(text) {
            Ok(template) => template,
            Err(errors) => {
                let problem = |e: TemplateError| Problem::new(&place, e.to_string()).hint(e.hint()).allowed(e.allowed());
                out.extend(errors.into_iter().take(PROBLEMS_MAX).map(problem));
                continue;
            }
        };
        if let Err(error) = probe(&template).map_or(Ok(()), |text| check_probe(kind, &template, &text)) {
            out.push(Problem::new(place, error.to_string()).found(format!("{text:?}")).allowed(error.allowed()));
        }
    }
    let empty = match &task.command {
        Command::Shell(text) => text.trim().is_empty().then_some(""),
        Command::Words(words) => words.first().is_some_and(String::is_empty).then_some("[0]"),
    };
    if let Some(place) = empty {
        out.push(Problem::new(format!("{path}.command{place}"), "empty").allowed("a program to run"));
    }
}

/// The text with something harmless for each value; `None` if a value comes first, because that may change everything.
fn probe(template: &Template) -> Option<String> {
    if template.segments().first().is_some_and(|first| !matches!(first, Segment::Text(_))) {
        return None;
    }
    let parts = template.segments().iter().map(|segment| match segment {
        Segment::Text(text) => text.as_str(),
        Segment::Item(_) | Segment::Index | Segment::JobId | Segment::Attempt => "xxx",
    });
    Some(parts.collect())
}

fn check_probe(kind: Kind, template: &Template, text: &str) -> Result<(), TextError> {
    match check_text(kind, text) {
        // The digits may come with the value.
        Err(TextError::Digest) if template.literal().is_none() => Ok(()),
        result => result,
    }
}

fn judge_paths(path: &str, task: &TaskSpec, out: &mut Vec<Problem>) {
    let absolute = task.workdir.as_ref().is_some_and(|workdir| workdir.starts_with('/'));
    if absolute && matches!(task.isolation, Isolation::Process | Isolation::Null) {
        let problem = Problem::new(format!("{path}.workdir"), "an absolute path needs an image").depends(format!("{path}.isolation"));
        out.push(problem.allowed("a path within the task's own directory, such as data"));
    }
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for (index, input) in task.inputs.iter().enumerate() {
        let place = format!("{path}.inputs[{index}].path");
        let above = input.path.match_indices('/').find(|(at, _)| seen.contains(&input.path[..*at]));
        let below = format!("{}/", input.path);
        let inside = seen.range(below.as_str()..).next().filter(|other| other.starts_with(&below));
        if seen.contains(input.path.as_str()) {
            out.push(Problem::new(place, "another input goes to the same path").found(format!("{:?}", input.path)));
        } else if above.is_some() || inside.is_some() {
            out.push(Problem::new(place, "another input is a file where this one needs a directory").found(format!("{:?}", input.path)));
        }
        seen.insert(&input.path);
    }
}

fn judge_environment(path: &str, task: &TaskSpec, out: &mut Vec<Problem>) {
    let secrets = task.secrets.iter().enumerate();
    for (index, secret) in secrets.clone() {
        if secret.env.is_some() == secret.path.is_some() {
            let found = if secret.env.is_some() { "both" } else { "none" };
            let problem = Problem::new(format!("{path}.secrets[{index}]"), "exactly one of \"env\" and \"path\" is needed");
            out.push(problem.found(found));
        }
    }
    let from_secrets = secrets.filter_map(|(i, secret)| Some((format!("{path}.secrets[{i}].env"), secret.env.as_deref()?)));
    let own = task.env.keys().map(|name| (join(&format!("{path}.env"), name), name.as_str()));
    let mut seen = BTreeSet::new();
    for (place, name) in own.chain(from_secrets) {
        if let Some(problem) = judge_variable(&place, name) {
            out.push(problem);
        } else if !seen.insert(name) {
            out.push(Problem::new(place, "the variable is set twice").found(name));
        }
    }
    for (index, rule) in task.network.iter().flat_map(|network| &network.allow).enumerate() {
        let place = format!("{path}.network.allow[{index}]");
        let host = rule.host.strip_prefix("*.").unwrap_or(&rule.host);
        let letters = host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'));
        if !rule.host.contains("${") && (host.is_empty() || host.len() > 253 || !letters) {
            let problem = Problem::new(format!("{place}.host"), "not a host").found(format!("{:?}", rule.host));
            out.push(problem.allowed("a name such as pypi.org, or *.example.org for all below it"));
        }
        if let Some(at) = rule.ports.iter().position(|port| *port == 0) {
            out.push(Problem::new(format!("{place}.ports[{at}]"), "out of range").found(0).allowed("1 to 65535"));
        }
    }
}

/// What is wrong with the name of an environment variable.
fn judge_variable(place: &str, name: &str) -> Option<Problem> {
    let letters = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    if name.is_empty() || !letters || name.starts_with(|c: char| c.is_ascii_digit()) {
        let problem = Problem::new(place, "not the name of an environment variable");
        return Some(problem.allowed("letters, digits and _, not beginning with a digit"));
    }
    let ours = name.starts_with("VOLLEY_");
    ours.then(|| Problem::new(place, "names that begin with VOLLEY_ are set by Volley").hint("choose another name"))
}

/// A warm-up is one for all tasks, and only machines have one.
fn judge_warm_up(path: &str, task: &TaskSpec, out: &mut Vec<Problem>) {
    let asked = [("warmUp", !task.warm_up.is_empty()), ("keepProcesses", task.keep_processes)];
    for (name, _) in asked.into_iter().filter(|(_, asked)| *asked && task.isolation != Isolation::Microvm) {
        let message = format!("isolation \"{}\" has no warm-up: only a machine can be saved and begun again", task.isolation.as_str());
        let problem = Problem::new(format!("{path}.{name}"), message).depends(format!("{path}.isolation"));
        out.push(problem.hint("leave it out, or choose isolation \"microvm\""));
    }
    if task.keep_processes && task.warm_up.is_empty() && task.isolation == Isolation::Microvm {
        let problem = Problem::new(format!("{path}.keepProcesses"), "has no effect without \"warmUp\"");
        out.push(problem.depends(format!("{path}.warmUp")));
    }
    for (index, warm_up) in task.warm_up.iter().enumerate() {
        judge_warm_up_command(&format!("{path}.warmUp[{index}]"), warm_up, out);
    }
    let pairs = task.warm_up.iter().flat_map(|warm_up| &warm_up.env);
    let words: usize = task.warm_up.iter().flat_map(|warm_up| &warm_up.command).map(String::len).sum();
    let bytes = words + pairs.map(|(name, text)| name.len() + text.len()).sum::<usize>();
    if bytes > WARM_UP_BYTES_MAX {
        let problem = Problem::new(format!("{path}.warmUp"), "too long").found(format!("{bytes} bytes"));
        out.push(problem.allowed(format!("at most {WARM_UP_BYTES_MAX} bytes; longer ones belong in a script of the image")));
    }
}

/// Only a machine can be kept, and not for ever.
fn judge_keep_failed(path: &str, task: &TaskSpec, out: &mut Vec<Problem>) {
    let Some(time) = task.keep_failed else { return };
    let place = format!("{path}.keepFailed");
    if task.isolation != Isolation::Microvm {
        let message = format!("isolation \"{}\" has no machine that could be kept", task.isolation.as_str());
        let problem = Problem::new(&place, message).depends(format!("{path}.isolation"));
        out.push(problem.hint("leave it out, or choose isolation \"microvm\""));
    }
    if time.0 > KEEP_FAILED_MS_MAX {
        out.push(Problem::new(place, "too long").found(time).allowed("at most 24h"));
    } else if time.0 == 0 {
        out.push(Problem::new(place, "too short").found(time).allowed("at least 1ms; leave it out to keep none"));
    }
}

fn judge_warm_up_command(path: &str, warm_up: &WarmUpSpec, out: &mut Vec<Problem>) {
    if warm_up.command.first().is_some_and(String::is_empty) {
        out.push(Problem::new(format!("{path}.command[0]"), "empty").allowed("a program to run"));
    }
    let words = warm_up.command.iter().enumerate().map(|(at, word)| (format!("{path}.command[{at}]"), Kind::Word, word));
    let variables = warm_up.env.iter().map(|(name, text)| (join(&format!("{path}.env"), name), Kind::Env, text));
    for (place, kind, text) in words.chain(variables) {
        match Template::plain(text) {
            None => {
                let problem = Problem::new(place, "\"${…}\" is not replaced in a warm-up, which is run once for all tasks");
                out.push(problem.hint("write $${…} for the shell's own; what differs belongs in the task's command, env or stdin"));
            }
            Some(text) => {
                if let Err(error) = check_text(kind, &text) {
                    out.push(Problem::new(place, error.to_string()).allowed(error.allowed()));
                }
            }
        }
    }
    out.extend(warm_up.env.keys().filter_map(|name| judge_variable(&join(&format!("{path}.env"), name), name)));
}

fn judge_retry(path: &str, retry: &RetrySpec, out: &mut Vec<Problem>) {
    let backoff = &retry.backoff;
    if backoff.initial > backoff.cap {
        let problem = Problem::new(format!("{path}.backoff.initial"), "longer than \"cap\"").found(backoff.initial);
        out.push(problem.allowed(format!("at most {}", backoff.cap)).depends(format!("{path}.backoff.cap")));
    }
    if backoff.cap.0 > DELAY_MS_MAX {
        out.push(Problem::new(format!("{path}.backoff.cap"), "too long").found(backoff.cap).allowed("at most 1d"));
    }
    let mut all_taken = None;
    for (index, rule) in retry.rules.iter().enumerate() {
        let place = format!("{path}.rules[{index}]");
        if let Some(before) = all_taken {
            let problem = Problem::new(&place, format!("never reached: rules[{before}] matches everything"));
            out.push(problem.depends(format!("{path}.rules[{before}]")));
            continue;
        }
        if let Some(problem) = judge_rule(path, &place, retry, rule) {
            out.push(problem);
        }
        let m = &rule.matches;
        if m.classes.is_empty() && m.exit_codes.is_empty() && m.signals.is_empty() {
            all_taken = Some(index);
        }
    }
}

/// Can the rule ever decide anything?
fn judge_rule(path: &str, place: &str, retry: &RetrySpec, rule: &RetryRuleSpec) -> Option<Problem> {
    let m = &rule.matches;
    let implied = match (m.exit_codes.is_empty(), m.signals.is_empty()) {
        (false, false) => {
            return Some(Problem::new(format!("{place}.match"), "matches nothing: no failure has both an exit code and a signal"));
        }
        (false, true) => Some((FailureClass::ExitCode, "exitCodes")),
        (true, false) => Some((FailureClass::Signal, "signals")),
        (true, true) => None,
    };
    if let Some((class, field)) = implied
        && !m.classes.is_empty()
        && !m.classes.contains(&class)
    {
        let problem = Problem::new(format!("{place}.match"), format!("matches nothing: only the class \"{class}\" has \"{field}\""));
        return Some(problem.hint("leave \"classes\" out"));
    }
    if rule.action == RetryAction::Retry {
        if let Some(at) = m.classes.iter().position(|class| *class == FailureClass::Cancelled) {
            return Some(Problem::new(format!("{place}.match.classes[{at}]"), "a cancelled task is never retried"));
        }
        let counted = match (implied, m.classes.as_slice()) {
            (Some(_), _) => true,
            (None, []) => false,
            (None, classes) => classes.iter().all(|class| class.counts_against_attempts()),
        };
        if counted && retry.attempts == 1 {
            let problem = Problem::new(format!("{place}.action"), "has no effect: \"attempts\" is 1, so there is no second try");
            return Some(problem.hint("raise retry.attempts").depends(format!("{path}.attempts")));
        }
    }
    None
}
