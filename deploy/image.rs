//! `volley image`: images of this host, which workers with `--isolation microvm` make machines from.
//!
//! Owns where they are looked for, how they are named on the command line, and printing. Does not own what an image is or how one is
//! imported (`volley_worker::image`).

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::Serialize;
use volley_cli::serve::{ImageArgs, ImageVerb};
use volley_cli::{Exit, Out};
use volley_jobspecs::image::Reference;
use volley_worker::chain;
use volley_worker::image::find::{FindError, find, name_of};
use volley_worker::image::{self, ImageNote, ImportError, Limits, Source, Store};

use crate::failed::{Ended, Failed};
use crate::up::default_dir;

/// Held while images are changed: what one import has fetched so far must not be cleared away by another.
const LOCK: &str = "import.lock";

/// An image, as it is shown.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    /// What `task.image` may say, as its digest.
    digest: String,
    /// What `task.image` may say, as its name.
    image: String,
    /// What else it may say.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    also: Vec<String>,
    /// Bytes of its root disk.
    disk_bytes: u64,
    /// Files, directories and links in it.
    files: u64,
}

/// Carries it out.
pub async fn image(args: ImageArgs, out: Out) -> Ended {
    let dir = dir(args.images, args.dir)?;
    std::fs::create_dir_all(&dir).map_err(|e| Failed::local("make (another one is chosen with --images)", &dir, &e))?;
    let _alone = lock(&dir)?;
    let store = Store::open(&dir).map_err(|e| Failed::local("open", &dir, &e))?;
    match args.verb {
        ImageVerb::Import { image, name, plain_http } => {
            let name = name.map(|name| Reference::parse(&name).map(|_| name).map_err(Failed::arguments)).transpose()?;
            let note = image::import(&store, source(&image, plain_http)?, name, Limits::default()).await.map_err(of_import)?;
            eprintln!("imported into {}, for workers whose images lie there", dir.display());
            show(&[shown(&store, &dir, &note)?], out)
        }
        ImageVerb::Ls => {
            let notes = store.images().map_err(|e| Failed::local("read", &dir, &e))?;
            let rows = notes.iter().map(|note| shown(&store, &dir, note)).collect::<Result<Vec<_>, _>>()?;
            show(&rows, out)
        }
        ImageVerb::Rm { image } => {
            let (note, _) = find(&store, &image).map_err(|e| of_find(&e, &dir))?;
            let name = name_of(&note, &image).filter(|_| !note.also.is_empty()).map(str::to_owned);
            if let Some(name) = name {
                eprintln!("{name} is one of its names, and goes; the image itself stays under the others");
                let note = image::remove_name(&store, note, name).await.map_err(of_import)?;
                return show(&[shown(&store, &dir, &note)?], out);
            }
            let row = shown(&store, &dir, &note)?;
            image::remove(&store, note.digest).await.map_err(of_import)?;
            eprintln!("removed from {}", dir.display());
            show(&[row], out)
        }
    }
}

/// The named directory, or that of a `volley up`.
fn dir(named: Option<PathBuf>, up: Option<PathBuf>) -> Result<PathBuf, Failed> {
    let found = named.or_else(|| Some(up.or_else(default_dir)?.join("worker").join("images")));
    found.ok_or_else(|| Failed::new(Exit::NotConfigured, "no home directory; say where images lie with --images"))
}

fn lock(dir: &Path) -> Result<File, Failed> {
    let path = dir.join(LOCK);
    let file = File::create(&path).map_err(|e| Failed::local("make", &path, &e))?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        Failed::new(Exit::Conflict, format!("another `volley image` changes the images in {}; wait until it has ended", dir.display()))
    })?;
    Ok(file)
}

fn of_find(error: &FindError, dir: &Path) -> Failed {
    match error {
        FindError::Missing { text } => {
            Failed::new(Exit::NotFound, format!("no image is called {text:?} in {}; `volley image ls` lists them", dir.display()))
        }
        // Here it was typed, and stands in no job's spec.
        FindError::Name(why) => Failed::new(Exit::NotFound, format!("{}; `volley image ls` lists them", chain(why))),
        other => Failed::new(Exit::NotFound, chain(other)),
    }
}

/// What an image is called on the command line.
fn source(text: &str, plain_http: bool) -> Result<Source, Failed> {
    if let Some(prefix) = prefix_of(text) {
        let line = format!(
            "{text} lies here: `volley image import {prefix}{text}` imports it; a registry's image is meant with a tag, {text}:latest"
        );
        return Err(Failed::new(Exit::BadSpec, line));
    }
    Ok(match text.split_once(':') {
        Some(("dir", path)) => Source::Directory(path.into()),
        Some(("tar", path)) => Source::Tarball(path.into()),
        Some(("oci", rest)) => match rest.rsplit_once(':') {
            Some((path, name)) if !name.contains('/') => Source::Layout { path: path.into(), name: Some(name.to_owned()) },
            _ => Source::Layout { path: rest.into(), name: None },
        },
        _ => Source::Registry { reference: Reference::parse(text).map_err(Failed::arguments)?, plain_http, credentials: None },
    })
}

/// What must be written before the path of a file or directory that is there, if it may be meant: it has no prefix, and no tag or digest.
fn prefix_of(text: &str) -> Option<&'static str> {
    if text.contains([':', '@']) {
        return None;
    }
    let (path, kind) = (Path::new(text), std::fs::metadata(text).ok()?);
    Some(match kind.is_dir() {
        true if path.join("oci-layout").is_file() => "oci:",
        true => "dir:",
        false => "tar:",
    })
}

fn of_import(error: ImportError) -> Failed {
    let exit = match &error {
        ImportError::Registry(_) => Exit::Unavailable,
        _ => Exit::LocalFile,
    };
    Failed::new(exit, chain(&error))
}

fn shown(store: &Store, dir: &Path, note: &ImageNote) -> Result<Shown, Failed> {
    let root = store.root_note(&note.root).map_err(|e| Failed::local("read", dir, &e))?;
    let totals = root.map(|root| root.totals);
    Ok(Shown {
        digest: note.digest.to_string(),
        image: note.source.clone(),
        also: note.also.clone(),
        disk_bytes: totals.map_or(0, |totals| totals.bytes),
        files: totals.map_or(0, |totals| totals.inodes),
    })
}

fn show(rows: &[Shown], out: Out) -> Ended {
    let table = || {
        let line = |row: &Shown| {
            let names = [std::slice::from_ref(&row.image), &row.also].concat().join(", ");
            format!("{}  {:>7} MiB  {:>8} files  {names}\n", row.digest, row.disk_bytes >> 20, row.files)
        };
        rows.iter().map(line).collect()
    };
    out.show(rows, table).map_err(Failed::arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_looked_for_where_they_are_said_to_be_or_where_up_keeps_its_cluster() {
        assert_eq!(dir(Some("/images".into()), None), Ok("/images".into()));
        assert_eq!(dir(None, Some("/up".into())), Ok("/up/worker/images".into()));
    }

    #[test]
    fn images_are_named_by_where_they_are() {
        let named = |text: &str| format!("{:?}", source(text, false));
        assert_eq!(named("dir:/srv/x"), r#"Ok(Directory("/srv/x"))"#);
        assert_eq!(named("tar:a.tar.gz"), r#"Ok(Tarball("a.tar.gz"))"#);
        assert_eq!(named("oci:/srv/x:1.2"), r#"Ok(Layout { path: "/srv/x", name: Some("1.2") })"#);
        assert_eq!(named("oci:a:b/c"), r#"Ok(Layout { path: "a:b/c", name: None })"#);
        assert!(named("python:3.12").starts_with("Ok(Registry"));
        let here = tempfile::tempdir().unwrap();
        let path = here.path().to_str().unwrap();
        assert!(source(path, false).is_err_and(|failed| failed.line.contains(&format!("import dir:{path}"))));
        let missing = find(&Store::open(here.path()).unwrap(), "").unwrap_err();
        let said = of_find(&missing, here.path()).line;
        assert!(said.starts_with("\"\" names no image") && said.ends_with("lists them"), "{said}");
        assert!(source("Not A Name", false).is_err_and(|failed| failed.exit == Exit::BadSpec));
    }
}
