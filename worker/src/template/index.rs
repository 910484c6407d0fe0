//! What templates an owner has in the bucket: listed, shown, removed.
//!
//! Owns the rows and the order of removal. Does not own the command line, nor who may ask.
//!
//! **Removal fails closed.** The manifest goes first, so that nobody begins to fetch. Then all manifests that are left are read; a chunk is
//! deleted only if none of them has it, and if one of them can't be read, none is. A chunk that is younger than [`YOUNG`] stays: somebody
//! may be publishing a template with it, whose manifest is not there yet. What still goes wrong (a build that found an old chunk in the
//! moment before it was deleted) is found when that template is fetched, which is then built anew.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::{StreamExt, TryStreamExt};
use volley_jobspecs::keys as names;
use volley_store::{LIST_LIMIT_MAX, ListedObject};

use super::depot::{Depot, DepotError};
use super::manifest::{Manifest, ManifestError, RecipeNote};
use super::recipe::{Owner, TemplateName};

/// Chunks that nothing refers to are left alone for so long after they were written: longer than any upload takes.
pub const YOUNG: Duration = Duration::from_secs(3_600);
/// Manifests read at once.
const PARALLEL: usize = 8;

/// Why the index did not do it.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The bucket.
    #[error("templates in the bucket: {0}")]
    Store(String),
    /// No template has this name.
    #[error("no template of {owner} begins with {name}; `volley template ls` shows what is there")]
    Missing {
        /// The owner, for people.
        owner: String,
        /// What was asked for.
        name: String,
    },
    /// Several do.
    #[error("{count} templates of {owner} begin with {name}; give more of its name")]
    Several {
        /// The owner, for people.
        owner: String,
        /// What was asked for.
        name: String,
        /// How many.
        count: usize,
    },
    /// Its manifest is none.
    #[error("the manifest of template {name} is of no use: {why}; it is replaced when a task next wants the template")]
    Manifest {
        /// The template.
        name: String,
        /// Why.
        why: ManifestError,
    },
    /// What the others refer to is not known.
    #[error(
        "{removed}no chunk was deleted: the manifest of template {name} can't be read ({why}), so it is not known which chunks it has; remove that one first, or add the key it is signed with"
    )]
    Unknown {
        /// What was done before.
        removed: &'static str,
        /// Which one.
        name: String,
        /// Why.
        why: ManifestError,
    },
}

impl From<DepotError> for IndexError {
    fn from(why: DepotError) -> Self {
        Self::Store(why.to_string())
    }
}

/// One template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Its name.
    pub name: TemplateName,
    /// What its manifest says; or why that is of no use.
    pub manifest: Result<Box<Summary>, ManifestError>,
}

/// What a manifest says, in short.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// What it was made of, in clear.
    pub recipe: RecipeNote,
    /// Plain bytes of its chunks: what a host reads and keeps.
    pub data_bytes: u64,
    /// Bytes of its objects in the bucket. What it shares with others is counted in each.
    pub stored_bytes: u64,
    /// Its chunks.
    pub chunks: usize,
    /// Processes of its warm-up that live on in every machine.
    pub kept_processes: u32,
    /// The worker that built it.
    pub built_by: String,
    /// That worker's build of Volley.
    pub build: String,
    /// When, in milliseconds since the Unix epoch, by that worker's clock.
    pub built_at_ms: u64,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
}

impl From<&Manifest> for Summary {
    fn from(manifest: &Manifest) -> Self {
        let chunks = manifest.chunks();
        Self {
            recipe: manifest.recipe.clone(),
            data_bytes: manifest.data_bytes(),
            stored_bytes: chunks.iter().map(|(_, stored)| u64::from(*stored)).sum(),
            chunks: chunks.len(),
            kept_processes: manifest.kept_processes,
            built_by: manifest.built.by.clone(),
            build: manifest.built.build.clone(),
            built_at_ms: manifest.built.at_ms,
            took_ms: manifest.built.took_ms,
        }
    }
}

/// What a removal came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    /// Chunks that were deleted.
    pub chunks: usize,
    /// Their bytes in the bucket.
    pub bytes: u64,
    /// Chunks that nothing refers to, and that are too young to be deleted.
    pub young: usize,
}

/// All templates of an owner, by their names.
///
/// # Errors
/// [`IndexError::Store`].
pub async fn list(depot: &Depot, owner: &Owner) -> Result<Vec<Row>, IndexError> {
    let manifests = read_all(depot, owner).await?;
    Ok(manifests.into_iter().map(|(name, read)| Row { name, manifest: read.map(|manifest| Box::new(Summary::from(&*manifest))) }).collect())
}

/// One template, by its name or the beginning of it.
///
/// # Errors
/// [`IndexError`].
pub async fn show(depot: &Depot, owner: &Owner, name: &str) -> Result<Manifest, IndexError> {
    let name = find(depot, owner, name).await?;
    match depot.read(owner, &name).await? {
        Some((Ok(stored), _)) if stored.manifest.name() == name => Ok(stored.manifest),
        Some((Ok(_), _)) => Err(IndexError::Manifest { name: name.to_string(), why: ManifestError::Nonsense("it is another template's") }),
        Some((Err(why), _)) => Err(IndexError::Manifest { name: name.to_string(), why }),
        None => Err(IndexError::Missing { owner: said(owner), name: name.to_string() }),
    }
}

/// Removes one template, by its name or the beginning of it, and the chunks that no other one has. Machines that run from it are not
/// disturbed: hosts keep what they fetched.
///
/// # Errors
/// [`IndexError`]. The manifest may be gone and chunks left; [`sweep`] deletes them.
pub async fn remove(depot: &Depot, owner: &Owner, name: &str) -> Result<Removed, IndexError> {
    let name = find(depot, owner, name).await?;
    depot.store().delete(&depot.manifest_key(owner, &name)).await.map_err(store)?;
    delete_unused(depot, owner, YOUNG, "the manifest was deleted, but ").await
}

/// Deletes the chunks of an owner that no template has and that are older than `young` ([`YOUNG`]): left by builds that were cut short, by
/// manifests that were replaced, by removals.
///
/// # Errors
/// [`IndexError`]; some may be gone.
pub async fn sweep(depot: &Depot, owner: &Owner, young: Duration) -> Result<Removed, IndexError> {
    delete_unused(depot, owner, young, "").await
}

async fn delete_unused(depot: &Depot, owner: &Owner, young: Duration, removed: &'static str) -> Result<Removed, IndexError> {
    // Chunks before manifests: one that is referred to by a manifest that came meanwhile is seen to be.
    let prefix = names::template_chunks(&depot.place(owner));
    let mut unused: BTreeMap<String, ListedObject> =
        list_all(depot, &prefix).await?.into_iter().map(|object| (object.key.clone(), object)).collect();
    for (name, read) in read_all(depot, owner).await? {
        let manifest = read.map_err(|why| IndexError::Unknown { removed, name: name.to_string(), why })?;
        for (chunk, _) in manifest.chunks() {
            unused.remove(&depot.chunk_key(owner, &chunk));
        }
    }
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX));
    let oldest_ms = now_ms.saturating_sub(i64::try_from(young.as_millis()).unwrap_or(i64::MAX));
    let all = unused.len();
    // What is no chunk's name is nothing of ours.
    unused.retain(|key, object| key.strip_prefix(&prefix).is_some_and(is_name) && object.modified_ms <= oldest_ms);
    let keys: Vec<&String> = unused.keys().collect();
    depot.store().delete_many(&keys).await.map_err(store)?;
    Ok(Removed { chunks: keys.len(), bytes: unused.values().map(|object| object.bytes).sum(), young: all - keys.len() })
}

/// All manifests of an owner.
async fn read_all(depot: &Depot, owner: &Owner) -> Result<Vec<(TemplateName, Result<Box<Manifest>, ManifestError>)>, IndexError> {
    let names = all_names(depot, owner).await?;
    let read = futures::stream::iter(names).map(|name| async move {
        // One that was removed meanwhile is none.
        let Some((read, _)) = depot.read(owner, &name).await? else { return Ok(None) };
        let read = read.and_then(|stored| match stored.manifest.name() == name {
            true => Ok(Box::new(stored.manifest)),
            false => Err(ManifestError::Nonsense("it is another template's")),
        });
        Ok::<_, IndexError>(Some((name, read)))
    });
    let mut all: Vec<_> = read.buffer_unordered(PARALLEL).try_filter_map(|row| async move { Ok(row) }).try_collect().await?;
    all.sort_by_key(|(name, _)| *name);
    Ok(all)
}

/// The template whose name begins so.
async fn find(depot: &Depot, owner: &Owner, begins: &str) -> Result<TemplateName, IndexError> {
    let begins = begins.to_ascii_lowercase();
    let all: Vec<TemplateName> = all_names(depot, owner).await?.into_iter().filter(|name| name.to_string().starts_with(&begins)).collect();
    match all.as_slice() {
        [name] if !begins.is_empty() => Ok(*name),
        [] => Err(IndexError::Missing { owner: said(owner), name: begins }),
        _ => Err(IndexError::Several { owner: said(owner), name: begins, count: all.len() }),
    }
}

async fn all_names(depot: &Depot, owner: &Owner) -> Result<Vec<TemplateName>, IndexError> {
    let prefix = names::template_manifests(&depot.place(owner));
    let objects = list_all(depot, &prefix).await?;
    let name = |key: &str| {
        let mut name = [0; 32];
        let digits = key.strip_prefix(&prefix).filter(|digits| is_name(digits))?;
        hex::decode_to_slice(digits, &mut name).ok().map(|()| TemplateName(name))
    };
    Ok(objects.iter().filter_map(|object| name(&object.key)).collect())
}

async fn list_all(depot: &Depot, prefix: &str) -> Result<Vec<ListedObject>, IndexError> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = depot.store().list(prefix, after.as_deref(), LIST_LIMIT_MAX).await.map_err(store)?;
        all.extend(page.objects);
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}

/// 64 hexadecimal digits, as names are written.
fn is_name(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn said(owner: &Owner) -> String {
    match owner {
        Owner::Public => "everybody".to_owned(),
        Owner::Tenant(tenant) => format!("tenant {tenant}"),
    }
}

fn store(why: impl std::fmt::Display) -> IndexError {
    IndexError::Store(why.to_string())
}
