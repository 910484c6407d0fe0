//! Rules of a task's volumes: what goes with which access, names, and where they are mounted.
//!
//! Owns what needs more than one field to judge. Texts by themselves are `resolve`'s.

use crate::problem::Problem;
use crate::spec::volumes::{parse_mode, parse_name, parse_owner};
use crate::spec::{Access, Isolation, KeepWhen, TaskSpec, VolumeMount};
use crate::template::{Segment, Template};

/// Where no volume is mounted, beside the root itself: what the kernel shows there is not a task's.
const RESERVED: [&str; 3] = ["/dev", "/proc", "/sys"];
/// The same: where the task's outputs are collected, which no volume's files are.
const OUTPUTS: &str = "/volley/out";
/// The task's own directory, in an image.
const WORK: &str = "/volley/work";
/// Where a volume would cover the task's own directories; below them is room.
const COVERS: [&str; 2] = ["/volley", WORK];
/// Smallest volume, in bytes: no file system fits into less.
const SIZE_BYTES_MIN: u64 = 1 << 20;
/// Largest volume, in bytes: its map is made for no more.
const SIZE_BYTES_MAX: u64 = 16 << 40;
/// What access needs for a field, in words.
const WRITTEN: &str = "\"rw\" or \"clone\"";

/// `many`: may there be more than one task?
pub(super) fn judge(path: &str, task: &TaskSpec, many: bool, out: &mut Vec<Problem>) {
    if task.isolation == Isolation::Null && !task.volumes.is_empty() {
        let problem = Problem::new(format!("{path}.volumes"), "has no effect: isolation \"null\" runs nothing");
        out.push(problem.depends(format!("{path}.isolation")));
    }
    let mut mounts: Vec<&str> = Vec::new();
    for (index, volume) in task.volumes.iter().enumerate() {
        let place = format!("{path}.volumes[{index}]");
        judge_access(&place, volume, out);
        judge_name(&place, volume, out);
        judge_size(&place, volume, out);
        judge_keep(&place, volume, many, out);
        judge_mount(path, &place, task, volume, &mounts, out);
        judge_inputs(path, &place, task, volume, out);
        mounts.push(&volume.path);
    }
}

fn judge_access(place: &str, volume: &VolumeMount, out: &mut Vec<Problem>) {
    let access = volume.access;
    let made = access == Access::Rw && volume.size.is_some();
    for (name, asked, fits, with) in [
        ("flush", volume.flush.is_some(), access != Access::Ro, WRITTEN),
        ("size", volume.size.is_some(), access != Access::Ro, WRITTEN),
        ("keep", volume.keep.is_some(), access == Access::Clone, "\"clone\""),
        ("fs", volume.fs.is_some(), made, "\"rw\" and \"size\" is given"),
        ("owner", volume.owner.is_some(), made, "\"rw\" and \"size\" is given"),
        ("mode", volume.mode.is_some(), made, "\"rw\" and \"size\" is given"),
    ] {
        if asked && !fits {
            let problem = Problem::new(format!("{place}.{name}"), format!("has no effect unless \"access\" is {with}"));
            out.push(problem.depends(format!("{place}.access")));
        }
    }
    if let Some(owner) = volume.owner.as_ref().filter(|owner| parse_owner(owner).is_none()) {
        let problem = Problem::new(format!("{place}.owner"), "not an owner in numbers").found(format!("{owner:?}"));
        out.push(problem.allowed("uid or uid:gid, such as 1000:1000"));
    }
    if let Some(mode) = volume.mode.as_ref().filter(|mode| parse_mode(mode).is_none()) {
        let problem = Problem::new(format!("{place}.mode"), "not a mode in octal").found(format!("{mode:?}"));
        out.push(problem.allowed("three or four octal digits, such as 0755"));
    }
    if access == Access::Rw && volume.volume.contains('@') {
        let problem = Problem::new(format!("{place}.volume"), "a snapshot is never written").found(format!("{:?}", volume.volume));
        out.push(problem.depends(format!("{place}.access")).hint("\"access\": \"clone\" gives each task a copy of it"));
    }
}

/// Who writes, and what is cloned, is known before any item is.
fn judge_name(place: &str, volume: &VolumeMount, out: &mut Vec<Problem>) {
    // What can't be read is named with all other texts.
    let Ok(template) = Template::parse(&volume.volume) else { return };
    let rw = volume.access == Access::Rw;
    let fit = |segment: &Segment| match segment {
        Segment::Text(_) => true,
        Segment::Index | Segment::JobId => rw,
        Segment::Item(_) | Segment::Attempt => false,
    };
    if !template.segments().iter().all(fit) {
        let allowed = if rw { "a name in which only ${index} and ${job.id} may be put" } else { "a name as it is, without ${…}" };
        let problem =
            Problem::new(format!("{place}.volume"), "must be known before a task's item is").found(format!("{:?}", volume.volume));
        out.push(problem.allowed(allowed).depends(format!("{place}.access")));
    }
}

fn judge_size(place: &str, volume: &VolumeMount, out: &mut Vec<Problem>) {
    let Some(size) = volume.size else { return };
    if !(SIZE_BYTES_MIN..=SIZE_BYTES_MAX).contains(&size.0) {
        let what = if size.0 < SIZE_BYTES_MIN { "too small" } else { "too large" };
        out.push(Problem::new(format!("{place}.size"), what).found(size).allowed("from 1MiB to 16TiB"));
    }
}

fn judge_keep(place: &str, volume: &VolumeMount, many: bool, out: &mut Vec<Problem>) {
    let Some(keep) = volume.keep.as_ref().filter(|keep| keep.when != KeepWhen::Never) else { return };
    let Ok(template) = Template::parse(&keep.name) else { return };
    let place = format!("{place}.keep.name");
    let holds = |wanted: &Segment| template.segments().contains(wanted);
    for (wanted, text, needed, why) in [
        (Segment::Index, "${index}", many, "every task would keep its clone under one name"),
        (Segment::Attempt, "${attempt}", keep.when == KeepWhen::Always, "every try would keep its clone under one name"),
    ] {
        if needed && !holds(&wanted) {
            let problem = Problem::new(&place, why).found(format!("{:?}", keep.name));
            out.push(problem.allowed(format!("a name with {text} in it")));
        }
    }
    if template.literal().is_some_and(|name| parse_name(name).is_ok_and(|(_, snapshot)| snapshot.is_some())) {
        out.push(Problem::new(&place, "names a snapshot; what is kept is a volume").found(format!("{:?}", keep.name)));
    }
}

fn judge_mount(path: &str, place: &str, task: &TaskSpec, volume: &VolumeMount, mounts: &[&str], out: &mut Vec<Problem>) {
    let place = format!("{place}.path");
    let wanted = volume.path.as_str();
    let say = |what: &str| Problem::new(&place, what).found(format!("{wanted:?}"));
    let on_host = matches!(task.isolation, Isolation::Process | Isolation::Null);
    // A path that begins with a value is judged when the task has its item.
    let begins_plain = !wanted.starts_with("${");
    if on_host && wanted.starts_with('/') {
        let problem = say("an absolute path needs an image").depends(format!("{path}.isolation"));
        out.push(problem.allowed("a path within the task's own directory, such as data"));
    } else if !on_host && begins_plain && !wanted.starts_with('/') {
        out.push(say("a relative path where an absolute one is needed").allowed("a path from the root, such as /data"));
    }
    let plain = wanted.trim_end_matches('/');
    let reserved = RESERVED.iter().chain([&OUTPUTS]).any(|dir| below(plain, dir));
    if wanted.starts_with('/') && (plain.is_empty() || COVERS.contains(&plain) || reserved) {
        out.push(say("no volume can be mounted there").allowed("a path of its own, such as /data"));
    }
    for other in mounts {
        let other = other.trim_end_matches('/');
        if plain == other {
            out.push(say("another volume is mounted there"));
        } else if below(plain, other) || below(other, plain) {
            out.push(say("it and another volume lie one in the other").allowed("paths beside each other"));
        }
    }
}

/// Is a path a directory's, or in it?
fn below(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Inputs are put into the task's own directory before anything is mounted: one in a volume would be covered by it.
fn judge_inputs(path: &str, place: &str, task: &TaskSpec, volume: &VolumeMount, out: &mut Vec<Problem>) {
    let plain = volume.path.trim_end_matches('/');
    let inside = if plain.starts_with('/') { plain.strip_prefix(WORK).and_then(|rest| rest.strip_prefix('/')) } else { Some(plain) };
    let Some(inside) = inside.filter(|inside| !inside.is_empty()) else { return };
    for (index, input) in task.inputs.iter().enumerate() {
        if below(&input.path, inside) || below(inside, &input.path) {
            let problem = Problem::new(format!("{place}.path"), "it and an input lie one in the other").found(format!("{:?}", volume.path));
            out.push(problem.depends(format!("{path}.inputs[{index}].path")).allowed("paths beside each other"));
        }
    }
}
