//! Dependencies point one way: only the root package sees all; coordinator and worker never see each other.

use crate::none;
use crate::source::{files, read};

/// What each crate may use of ours. The root package may use everything.
const ALLOWED: [(&str, &[&str]); 8] = [
    ("jobspecs/Cargo.toml", &[]),
    ("volume/store/Cargo.toml", &["volley-jobspecs"]),
    ("volume/Cargo.toml", &["volley-jobspecs", "volley-store"]),
    ("coordinator/Cargo.toml", &["volley-jobspecs", "volley-store", "volley-volume"]),
    ("worker/Cargo.toml", &["volley-jobspecs", "volley-store", "volley-volume", "volley-guest"]),
    ("worker/guest/Cargo.toml", &["volley-jobspecs"]),
    ("sdk/rust/Cargo.toml", &["volley-jobspecs"]),
    ("sdk/cli/Cargo.toml", &["volley-jobspecs", "volley-sdk"]),
];

/// Our crates that a manifest names in any section of dependencies.
fn ours(manifest: &str) -> Vec<String> {
    let mut in_dependencies = false;
    let mut found = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            in_dependencies = line.trim_end_matches(']').ends_with("dependencies");
        } else if in_dependencies && line.starts_with("volley-") {
            found.push(line.split(['.', ' ', '=']).next().unwrap_or_default().to_owned());
        }
    }
    found
}

#[test]
fn dependencies_point_one_way() {
    let mut broken = Vec::new();
    for manifest in files(&["Cargo.toml"]).iter().filter(|name| *name != "Cargo.toml") {
        match ALLOWED.iter().find(|(name, _)| name == manifest) {
            None => broken.push(format!("{manifest}: say in tests/tidy/dependencies.rs what it may use")),
            Some((_, allowed)) => {
                let wrong = ours(&read(manifest)).into_iter().filter(|name| !allowed.contains(&name.as_str()));
                broken.extend(wrong.map(|name| format!("{manifest}: may not use {name}")));
            }
        }
    }
    none("dependencies point one way (README, layout)", broken);
}

#[test]
fn the_contract_does_no_io() {
    let manifest = read("jobspecs/Cargo.toml");
    let wrong = ["tokio", "async-nats", "reqwest", "rocksdb", "aws-sdk-s3"]
        .into_iter()
        .filter(|name| manifest.lines().any(|l| l.starts_with(name)));
    none("jobspecs is pure", wrong.map(|name| format!("jobspecs/Cargo.toml: {name}")).collect());
}

#[test]
fn sections_are_told_apart() {
    let manifest = "[package]\nname = \"volley-x\"\n[dependencies]\nvolley-a.workspace = true\n[dev-dependencies]\nvolley-b = { path = \"b\" }\n[features]\nvolley-c = []\n";
    assert_eq!(ours(manifest), ["volley-a", "volley-b"]);
}
