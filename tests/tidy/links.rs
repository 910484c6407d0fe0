//! What the documents point to is there.

use crate::none;
use crate::source::{files, read, root};

/// Targets of `[text](target)` that are files.
fn links(text: &str) -> Vec<String> {
    let targets = text.match_indices("](").filter_map(|(at, _)| text[at + 2..].split(')').next());
    let local = targets.filter(|target| !target.starts_with("http") && !target.starts_with('#') && !target.contains(' '));
    local.map(|target| target.split('#').next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn links_of_documents_are_alive() {
    let mut dead = Vec::new();
    for name in files(&[".md"]) {
        let dir = root().join(&name).parent().unwrap().to_owned();
        let gone = links(&read(&name)).into_iter().filter(|target| !dir.join(target).exists());
        dead.extend(gone.map(|target| format!("{name}: {target}")));
    }
    none("links point to files that are there", dead);
}

#[test]
fn decision_records_are_listed() {
    let index = links(&read("deploy/docs/README.md"));
    let records = files(&[".md"]).into_iter().filter_map(|name| name.strip_prefix("deploy/docs/").map(str::to_owned));
    let missing = records.filter(|name| name != "README.md" && !index.contains(name));
    none("deploy/docs/README.md lists every record", missing.collect());
}

#[test]
fn the_road_of_a_task_is_there() {
    let readme = read("README.md");
    let table = readme.split("## The road of a task").nth(1).expect("README.md has a chapter `The road of a task`");
    let rows: Vec<&str> =
        table.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|')).skip(2).collect();
    assert!(rows.len() >= 12, "{} rows", rows.len());
    let mut wrong = Vec::new();
    for row in rows {
        let files: Vec<String> = links(row.split('|').nth(2).unwrap_or_default());
        if files.is_empty() {
            wrong.push(format!("no file: {row}"));
        }
        wrong.extend(files.into_iter().filter(|file| !root().join(file).exists()).map(|file| format!("{file} is not there")));
    }
    none("each row of the road of a task links its files", wrong);
}
