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
