//! Layers against what the specification says, against a model, and against images made to do harm.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn entry(path: &str, what: What) -> Entry {
    Entry { path: path.as_bytes().to_vec(), what, attrs: Attrs { mode: 0o640, uid: 7, gid: 8, mtime: 9, ..Attrs::default() } }
}

fn dir(path: &str) -> Entry {
    entry(path, What::Dir)
}

fn file(path: &str, size: u64) -> Entry {
    entry(path, What::File { at: 512, size })
}

fn symlink(path: &str, target: &str) -> Entry {
    entry(path, What::Symlink(target.as_bytes().to_vec()))
}

fn link(path: &str, target: &str) -> Entry {
    entry(path, What::HardLink(target.as_bytes().to_vec()))
}

/// Every path of a tree with what is there.
fn listed(tree: &Tree) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![(ROOT, String::new())];
    while let Some((id, path)) = left.pop() {
        let shown = match &tree.get(id).kind {
            Kind::Dir(names) => {
                let under = |name: &[u8]| format!("{path}/{}", String::from_utf8_lossy(name));
                left.extend(names.iter().map(|(name, id)| (*id, under(name))));
                "dir".to_owned()
            }
            Kind::File(content) => format!("file {} of {}", content.size, content.layer),
            Kind::Symlink(target) => format!("-> {}", String::from_utf8_lossy(target)),
            Kind::Fifo => "fifo".to_owned(),
        };
        found.insert(path, shown);
    }
    found.remove("");
    found
}

fn merged(layers: Vec<Vec<Entry>>) -> Result<(Tree, LeftOut), MergeError> {
    let mut merge = Merge::new(INODES_MAX);
    for (index, layer) in layers.into_iter().enumerate() {
        merge.layer(index, layer)?;
    }
    Ok(merge.finish())
}

fn check(layers: Vec<Vec<Entry>>, want: &[(&str, &str)]) {
    let (tree, _) = merged(layers).unwrap();
    let want: BTreeMap<String, String> = want.iter().map(|(path, what)| ((*path).to_owned(), (*what).to_owned())).collect();
    assert_eq!(listed(&tree), want);
}

#[test]
fn layers_hide_and_replace() {
    check(
        vec![vec![dir("a"), file("a/x", 1), file("a/y", 2), file("b", 3)], vec![file("a/y", 4), file("a/.wh.x", 0), file(".wh.b", 0)]],
        &[("/a", "dir"), ("/a/y", "file 4 of 1")],
    );
    // A directory that comes again keeps what is in it; anything else replaces it whole.
    check(vec![vec![file("a/x", 1)], vec![dir("a/")]], &[("/a", "dir"), ("/a/x", "file 1 of 0")]);
    check(vec![vec![file("a/x", 1)], vec![symlink("a", "b")]], &[("/a", "-> b")]);
    check(vec![vec![file("a", 1)], vec![dir("a"), file("a/x", 2)]], &[("/a", "dir"), ("/a/x", "file 2 of 1")]);
}

#[test]
fn a_whiteout_hides_lower_layers_only() {
    // Wherever it stands in its layer.
    for layer in [vec![file("a/n", 2), file("a/.wh..wh..opq", 0)], vec![file("a/.wh..wh..opq", 0), file("a/n", 2)]] {
        check(vec![vec![file("a/x", 1), file("a/d/y", 1)], layer], &[("/a", "dir"), ("/a/n", "file 2 of 1")]);
    }
    for layer in [vec![file("x", 2), file(".wh.x", 0)], vec![file(".wh.x", 0), file("x", 2)]] {
        check(vec![vec![file("x", 1)], layer], &[("/x", "file 2 of 1")]);
    }
    check(vec![vec![file("x", 1)], vec![file(".wh..wh..opq", 0)]], &[]);
    // Nothing there, or nothing that could hold it; and notes of a storage driver.
    check(vec![vec![file("x", 1)], vec![file("x/.wh.y", 0), file("q/.wh.y", 0), file(".wh..wh.plnk", 0)]], &[("/x", "file 1 of 0")]);
}

#[test]
fn hard_links_are_one_file() {
    let (tree, _) = merged(vec![vec![file("a", 5)], vec![link("b", "a"), link("d/c", "/b"), link("b", "b")]]).unwrap();
    let Kind::Dir(names) = &tree.get(ROOT).kind else { panic!("no directory") };
    assert_eq!(names[b"a".as_slice()], names[b"b".as_slice()]);
    assert_eq!(listed(&tree)["/d/c"], "file 5 of 0");
    // The file lives on under its other name.
    check(vec![vec![file("a", 5), link("b", "a")], vec![file(".wh.a", 0)]], &[("/b", "file 5 of 0")]);
    for target in ["nothing", "d", "", "/", "x/a"] {
        let why = merged(vec![vec![dir("d"), file("x", 1), link("b", target)]]).unwrap_err();
        assert!(matches!(why, MergeError::Target { .. }), "{target}: {why}");
    }
    let why = merged(vec![vec![link("b", "../../etc/shadow")]]).unwrap_err();
    assert!(matches!(why, MergeError::Name { source: NameError::Up, .. }), "{why}");
}

#[test]
fn links_on_the_way_stay_inside() {
    // /etc is the image's own.
    check(vec![vec![symlink("a", "/etc"), file("a/passwd", 1)]], &[("/a", "-> /etc"), ("/etc", "dir"), ("/etc/passwd", "file 1 of 0")]);
    check(
        vec![vec![dir("d"), symlink("d/up", "../../../.."), file("d/up/x", 1)]],
        &[("/d", "dir"), ("/d/up", "-> ../../../.."), ("/x", "file 1 of 0")],
    );
    check(
        vec![vec![dir("usr/lib"), symlink("lib", "usr/lib")], vec![file("lib/c", 2)]],
        &[("/lib", "-> usr/lib"), ("/usr", "dir"), ("/usr/lib", "dir"), ("/usr/lib/c", "file 2 of 1")],
    );
    let why = merged(vec![vec![symlink("a", "b"), symlink("b", "a"), file("a/x", 1)]]).unwrap_err();
    assert!(matches!(why, MergeError::Links { .. }), "{why}");
    let long = "n".repeat(NAME_BYTES_MAX + 1);
    let why = merged(vec![vec![symlink("a", &long), file("a/x", 1)]]).unwrap_err();
    assert!(matches!(why, MergeError::Name { source: NameError::LongPart, .. }), "{why}");
}

#[test]
fn what_can_not_be_is_refused_with_its_name() {
    let refused = |entry: Entry, want: &str| {
        let why = merged(vec![vec![file("x", 1), entry]]).unwrap_err().to_string();
        assert!(why.contains(want), "{why}");
    };
    refused(file("../x", 1), "\"../x\": it has a part `..`");
    refused(file("a/../../x", 1), "`..`");
    refused(dir(".."), "`..`");
    refused(file("a\0b", 1), "zero byte");
    refused(file(&"a/".repeat(3000), 1), "longer than 4095");
    refused(file("x/y", 1), "no directory");
    refused(file("/", 1), "its root is no directory");
    refused(symlink(".", "/etc"), "its root is no directory");
    refused(symlink("l", ""), "whose target");
    refused(symlink("l", "a\0b"), "whose target");
    refused(file(".wh.", 0), "whiteout of nothing");
    refused(file("d/.wh...", 0), "whiteout of nothing");
}

#[test]
fn devices_and_sockets_are_left_out_and_told() {
    let left = |path: &str, why| entry(path, What::Left(why));
    let (tree, out) = merged(vec![
        vec![file("dev/null", 3), file("k", 1)],
        vec![left("dev/null", Left::Device), left("deep/er/sock", Left::Socket), left("odd", Left::Unknown), entry("pipe", What::Fifo)],
    ])
    .unwrap();
    let want = [("/dev", "dir"), ("/k", "file 1 of 0"), ("/pipe", "fifo")];
    assert_eq!(listed(&tree), want.into_iter().map(|(path, what)| (path.to_owned(), what.to_owned())).collect());
    assert_eq!(out.counts, BTreeMap::from([(Left::Device, 1), (Left::Socket, 1), (Left::Unknown, 1)]));
    assert_eq!(out.names, ["dev/null", "deep/er/sock", "odd"]);
    let many = (0..100).map(|n| left(&format!("d{n}"), Left::Device)).collect();
    let (_, out) = merged(vec![many]).unwrap();
    assert_eq!((out.counts[&Left::Device], out.names.len()), (100, LEFT_NAMES_MAX));
}

#[test]
fn an_image_makes_only_so_many_files() {
    let mut merge = Merge::new(100);
    // The same file again and again, and directories that no entry names.
    let why = merge.layer(0, (0..100).map(|_| file("x", 1)).collect()).unwrap_err();
    assert_eq!(why, MergeError::TooMany { max: 100 });
    let why = Merge::new(100).layer(0, vec![file(&"d/".repeat(150), 1)]).unwrap_err();
    assert_eq!(why, MergeError::TooMany { max: 100 });
}

#[test]
fn a_chain_of_links_can_not_take_for_ever() {
    // Each way through the chain walks tens of thousands of names.
    let deep = "d/".repeat(600);
    let mut entries = vec![dir(&deep)];
    for n in 0..30 {
        entries.push(symlink(&format!("l{n}"), &format!("{deep}{}l{}", "../".repeat(600), n + 1)));
    }
    entries.push(dir("l30"));
    entries.extend((0..10_000).map(|n| file(&format!("l0/{n}"), 1)));
    let begun = std::time::Instant::now();
    assert_eq!(merged(vec![entries]).unwrap_err(), MergeError::TooLong);
    assert!(begun.elapsed().as_secs() < 120, "{:?}", begun.elapsed());
}

#[test]
fn attributes_of_the_last_one_hold() {
    let (tree, _) =
        merged(vec![vec![dir("a"), dir(".")], vec![Entry { attrs: Attrs { mode: 0o4755, ..Attrs::default() }, ..dir("a") }]]).unwrap();
    assert_eq!(tree.get(ROOT).attrs.mode, 0o640);
    let Kind::Dir(names) = &tree.get(ROOT).kind else { panic!("no directory") };
    assert_eq!(tree.get(names[b"a".as_slice()]).attrs.mode, 0o4755);
}

/// The model: paths as texts, and nothing else.
fn model(layers: &[Vec<Entry>]) -> BTreeMap<String, String> {
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    let below = |all: &BTreeMap<String, String>, path: &str| -> BTreeSet<String> {
        all.keys().filter(|key| key.starts_with(&format!("{path}/"))).cloned().collect()
    };
    for (number, layer) in layers.iter().enumerate() {
        let paths = || layer.iter().map(|entry| format!("/{}", String::from_utf8(entry.path.clone()).unwrap()));
        for path in paths() {
            let (parent, name) = path.rsplit_once('/').unwrap();
            let gone = match name.strip_prefix(".wh.") {
                Some(".wh..opq") => below(&all, parent),
                Some(name) => {
                    let path = format!("{parent}/{name}");
                    below(&all, &path).into_iter().chain([path]).collect()
                }
                None => continue,
            };
            all.retain(|path, _| !gone.contains(path));
        }
        for (path, entry) in paths().zip(layer) {
            if path.contains(".wh.") {
                continue;
            }
            let is_dir = matches!(entry.what, What::Dir);
            if !(is_dir && all.get(&path).is_some_and(|what| what == "dir")) {
                for gone in below(&all, &path) {
                    all.remove(&gone);
                }
            }
            for (at, _) in path.match_indices('/').skip(1) {
                all.insert(path[..at].to_owned(), "dir".to_owned());
            }
            let what = match &entry.what {
                What::Dir => "dir".to_owned(),
                What::File { size, .. } => format!("file {size} of {number}"),
                What::Symlink(target) => format!("-> {}", String::from_utf8_lossy(target)),
                _ => "fifo".to_owned(),
            };
            all.insert(path, what);
        }
    }
    all
}

/// Layers over few names, so that they meet often. Names of directories and of files differ, so that none stands in another's way.
fn some_layers() -> impl Strategy<Value = Vec<Vec<Entry>>> {
    let parents = prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 0..4);
    let leaf = prop::sample::select(vec!["f", "g", "a", "b", ".wh.f", ".wh.a", ".wh.g", ".wh.b", ".wh..wh..opq"]);
    let one = (parents, leaf, 0u64..50, 0..3u8).prop_map(|(mut parts, leaf, size, kind)| {
        parts.push(leaf);
        let path = parts.join("/");
        match kind {
            _ if leaf.starts_with(".wh.") => file(&path, 0),
            _ if leaf.len() == 1 && "ab".contains(leaf) => dir(&path),
            0 => symlink(&path, "nowhere"),
            1 => entry(&path, What::Fifo),
            _ => file(&path, size),
        }
    });
    prop::collection::vec(prop::collection::vec(one, 0..12), 1..5)
}

proptest! {
    #[test]
    fn layers_add_up_as_in_the_model(layers in some_layers()) {
        let want = model(&layers);
        let (tree, _) = merged(layers).unwrap();
        prop_assert_eq!(listed(&tree), want);
    }

    #[test]
    fn nothing_makes_it_panic(layers in prop::collection::vec(prop::collection::vec(("[./a-c\\x00wh]{0,12}", 0..6u8, "[./a-c]{0,8}"), 0..20), 0..4)) {
        let layers = layers.into_iter().map(|layer| layer.into_iter().map(|(path, kind, target)| match kind {
            0 => dir(&path),
            1 => symlink(&path, &target),
            2 => link(&path, &target),
            3 => entry(&path, What::Left(Left::Device)),
            _ => file(&path, 1),
        }).collect()).collect();
        if let Ok((tree, _)) = merged(layers) {
            // A tree that comes out is one: it can be walked, and no directory has two parents.
            let mut seen = BTreeSet::new();
            let mut left = vec![ROOT];
            while let Some(id) = left.pop() {
                if let Kind::Dir(names) = &tree.get(id).kind {
                    prop_assert!(seen.insert(id));
                    for (name, id) in names {
                        prop_assert!(!name.is_empty() && name != b"." && name != b".." && !name.contains(&b'/') && !name.contains(&0));
                        left.push(*id);
                    }
                }
            }
        }
    }
}
