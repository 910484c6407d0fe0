//! Tests of `persist`: what is found, what is skipped, and that links lead nowhere.

use std::fs;
use std::io::Read;

use super::*;
use crate::beneath::tests::Swapping;

/// Often enough to meet every moment of a swap; the old way by paths met them within a few dozen.
const TRIES: usize = 2_000;

#[test]
fn nothing_outside_is_read_while_directories_are_swapped_for_links() {
    let place = tempfile::tempdir().expect("a directory");
    let secret = place.path().join("secret");
    for dir in [secret.clone(), secret.join("e")] {
        fs::create_dir_all(&dir).expect("made");
        fs::write(dir.join("file"), "secret").expect("written");
    }
    let mut dirs = Dirs::new(place.path().join("slots/0"), None);
    dirs.make().expect("made");
    for dir in [dirs.out().join("d"), dirs.out().join("d/e"), dirs.work().join("d"), dirs.work().join("d/e")] {
        fs::create_dir_all(&dir).expect("made");
        fs::write(dir.join("file"), "plain").expect("written");
    }
    let swapping = [Swapping::start(&dirs.out(), "d", &secret), Swapping::start(&dirs.work(), "d", &secret)];
    let (mut read, capture) = (0, Capture::new(0));
    for _ in 0..TRIES {
        let left = find(&dirs, &["d".to_owned(), "d/e/file".to_owned()], &capture, &capture).expect("found");
        for (name, place) in &left.files {
            let mut text = String::new();
            if place.open().and_then(|mut file| file.read_to_string(&mut text)).is_ok() {
                assert_eq!(text, "plain", "{name}");
                read += 1;
            }
        }
    }
    swapping.into_iter().for_each(Swapping::end);
    assert!(read > 0);
}

#[test]
fn a_result_is_kept_as_all_can_read_it_or_as_a_file() {
    let kept = |json: &str| result_of(json.as_bytes().to_vec()).map(|bytes| String::from_utf8(bytes).expect("text"));
    let same = [r#"{"a": [1, 2.5, "\ud83d\ude00"]}"#, r#""\\ud83d""#, r#""é""#];
    for json in same {
        assert_eq!(kept(json).expect("read"), json);
    }
    for (json, whole) in [
        (r#""bad \ud83d tail""#, r#""bad \ufffd tail""#),
        (r#""\ude00\ud83d\ude00\uD83D""#, r#""\ufffd\ud83d\ude00\ufffd""#),
        (r#"["\\\ud83d", "\ud83d\n"]"#, r#"["\\\ufffd", "\ufffd\n"]"#),
    ] {
        assert_eq!(kept(json).expect("read"), whole);
        assert!(serde_json::from_str::<serde_json::Value>(whole).is_ok());
    }
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    assert_eq!(kept(&deep(100)).expect("read"), deep(100));
    assert!(kept(&deep(101)).is_err_and(|why| why.to_string().contains("nested deeper than 100 levels")));
    for json in ["", "{", "1e999", "nan", &"[".repeat(200), "\"\\ud83d", "\"\\u", "\"\\"] {
        assert!(kept(json).is_err(), "{json:?}");
    }
    assert!(result_of(b"\"\xff\"".to_vec()).is_err(), "no UTF-8");
}

#[test]
fn directories_whose_path_is_longer_than_any_may_be_are_left_out() {
    let place = tempfile::tempdir().expect("a directory");
    let mut dirs = Dirs::new(place.path().join("slots/0"), None);
    dirs.make().expect("made");
    let mut dir = beneath::root(&dirs.out()).expect("opened");
    for _ in 0..25 {
        dir = beneath::make_dirs(&dir, Path::new(&"n".repeat(200)), 0o700, None).expect("made");
    }
    fs::write(dirs.out().join("file"), "x").expect("written");
    let capture = Capture::new(0);
    let left = find(&dirs, &[], &capture, &capture).expect("found");
    assert_eq!(left.files.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["file"]);
    assert!(left.kept.notes.iter().any(|note| note.contains("(path too long)")), "{:?}", left.kept.notes);
}
