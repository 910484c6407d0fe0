//! What lies where.

use crate::none;
use crate::source::{files, read, root};

/// Everything at the top that is not hidden; tool configuration lies in hidden files.
const TOP: [&str; 10] = ["Cargo.lock", "Cargo.toml", "README.md", "coordinator", "deploy", "jobspecs", "sdk", "tests", "volume", "worker"];
/// Longest composition root, in lines: what is longer belongs into a crate.
const ROOT_LINES_MAX: usize = 400;

#[test]
fn the_top_level_is_what_the_readme_shows() {
    let names = std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    // A target directory may be there; it is not in the repository.
    let mut names: Vec<String> = names.filter(|name| !name.starts_with('.') && name != "target").collect();
    names.sort();
    assert_eq!(names, TOP);
    let readme = read("README.md");
    none("the README's layout names it", TOP[2..].iter().filter(|name| !readme.contains(*name)).map(|name| (*name).to_owned()).collect());
}

#[test]
fn every_source_file_says_what_it_owns() {
    let silent = files(&[".rs"]).into_iter().filter(|name| !read(name).starts_with("//! "));
    none("the first line is `//! …`: what the file owns", silent.collect());
}

#[test]
fn the_composition_root_is_short() {
    let lines = read("deploy/volley.rs").lines().count();
    assert!(lines < ROOT_LINES_MAX, "deploy/volley.rs has {lines} lines");
}
