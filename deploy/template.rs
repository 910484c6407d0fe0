//! `volley template`: the templates of machines that workers share over the bucket.
//!
//! Owns the command line's way to them, and printing. Does not own what a template is, nor the order of its removal
//! (`volley_worker::template`).

use serde::Serialize;
use volley_cli::serve::{StoredArgs, StoredVerb};
use volley_cli::{Exit, Out};
use volley_coordinator::api::views::instant;
use volley_store::Store;
use volley_worker::config::ShareConfig;
use volley_worker::template::Owner;
use volley_worker::template::depot::Depot;
use volley_worker::template::index::{self, IndexError, Removed, Row, Summary};
use volley_worker::template::keys::Keys;

use crate::failed::{Ended, Failed};
use crate::serve;

/// Characters of names in tables: enough to be told apart, and taken by `show` and `rm`.
const NAME_CHARS: usize = 12;

/// A template, as it is shown.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    name: String,
    /// Why it is of no use, if it is of none; then nothing else is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    unusable: Option<String>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    of: Option<Of>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Of {
    /// The image's digest.
    image: String,
    vcpus: u8,
    memory_bytes: u64,
    /// The VMM, its version, and what executes.
    vmm: String,
    /// Commands that were run before it was saved.
    warm_up: Vec<Vec<String>>,
    keep_processes: bool,
    /// Processes of the warm-up that live on in every machine.
    kept_processes: u32,
    chunks: usize,
    stored_bytes: u64,
    built_by: String,
    built_at: String,
    took_ms: u64,
    /// The worker's build of Volley.
    build: String,
}

impl From<&Summary> for Of {
    fn from(of: &Summary) -> Self {
        let recipe = &of.recipe;
        Self {
            image: format!("sha256:{}", recipe.image),
            vcpus: recipe.vcpus,
            memory_bytes: recipe.memory_bytes,
            vmm: format!("{} {}, {}", recipe.vmm, recipe.version, recipe.accelerator),
            warm_up: recipe.warm_up.iter().map(|command| command.argv.clone()).collect(),
            keep_processes: recipe.keep_processes,
            kept_processes: of.kept_processes,
            chunks: of.chunks,
            stored_bytes: of.stored_bytes,
            built_by: of.built_by.clone(),
            built_at: instant(of.built_at_ms),
            took_ms: of.took_ms,
            build: of.build.clone(),
        }
    }
}

/// What a removal came to, as it is shown.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Gone {
    chunks: usize,
    bytes: u64,
    young: usize,
}

/// Carries it out.
pub async fn template(args: StoredArgs, out: Out) -> Ended {
    let keys = Keys::read(&args.keys).map_err(|e| Failed::new(Exit::NotConfigured, e.to_string()))?;
    let share = ShareConfig::new(std::path::PathBuf::new());
    let store = Store::connect(&serve::store(args.store)).await.map_err(Failed::unavailable)?;
    let (depot, owner) = (Depot::new(&store, keys, &share.prefix), Owner::Tenant(args.tenant));
    match args.verb {
        StoredVerb::Ls => {
            let rows: Vec<Shown> = index::list(&depot, &owner).await.map_err(of_index)?.iter().map(shown).collect();
            out.show(&rows, || table(&rows)).map_err(Failed::arguments)
        }
        StoredVerb::Show { name } => {
            let manifest = index::show(&depot, &owner, &name).await.map_err(of_index)?;
            let row = Shown { name: manifest.name().to_string(), unusable: None, of: Some(Of::from(&Summary::from(&manifest))) };
            out.show(&row, || page(&row)).map_err(Failed::arguments)
        }
        StoredVerb::Rm { name } => gone(index::remove(&depot, &owner, &name).await.map_err(of_index)?, out),
        StoredVerb::Sweep => gone(index::sweep(&depot, &owner, index::YOUNG).await.map_err(of_index)?, out),
    }
}

fn of_index(error: IndexError) -> Failed {
    let exit = match &error {
        IndexError::Store(_) => Exit::Unavailable,
        IndexError::Missing { .. } => Exit::NotFound,
        IndexError::Several { .. } | IndexError::Manifest { .. } | IndexError::Unknown { .. } => Exit::Conflict,
    };
    Failed::new(exit, error.to_string())
}

fn shown(row: &Row) -> Shown {
    Shown {
        name: row.name.to_string(),
        unusable: row.manifest.as_ref().err().map(ToString::to_string),
        of: row.manifest.as_ref().ok().map(|summary| Of::from(&**summary)),
    }
}

fn table(rows: &[Shown]) -> String {
    let line = |row: &Shown| {
        let name = row.name.get(..NAME_CHARS).unwrap_or(&row.name);
        match &row.of {
            Some(of) => format!(
                "{name}  {:>6} MiB  {:>2} cpus  {:>6} MiB stored  {}  {}  by {}  {}\n",
                of.memory_bytes >> 20,
                of.vcpus,
                of.stored_bytes >> 20,
                of.image.get(..NAME_CHARS + 7).unwrap_or(&of.image),
                of.vmm,
                of.built_by,
                of.built_at,
            ),
            None => format!("{name}  of no use: {}\n", row.unusable.as_deref().unwrap_or_default()),
        }
    };
    rows.iter().map(line).collect()
}

fn page(row: &Shown) -> String {
    let Some(of) = &row.of else { return String::new() };
    let mut text =
        format!("template   {}\nimage      {}\nmachine    {} cpus, {} MiB\n", row.name, of.image, of.vcpus, of.memory_bytes >> 20);
    text += &format!("VMM        {}\n", of.vmm);
    for command in &of.warm_up {
        text += &format!("warm-up    {}\n", command.join(" "));
    }
    if of.keep_processes {
        text += &format!("processes  {} of its warm-up live on in every machine\n", of.kept_processes);
    }
    text += &format!("stored     {} MiB in {} chunks\n", of.stored_bytes >> 20, of.chunks);
    text + &format!("built      by {} ({}) in {} ms, {}\n", of.built_by, of.build, of.took_ms, of.built_at)
}

fn gone(removed: Removed, out: Out) -> Ended {
    let Removed { chunks, bytes, young } = removed;
    let text = || {
        let left = if young == 0 { String::new() } else { format!("; {young} are too young to tell (`volley template sweep` in an hour)") };
        format!("{chunks} chunks deleted, {} MiB{left}\n", bytes >> 20)
    };
    out.show(&Gone { chunks, bytes, young }, text).map_err(Failed::arguments)
}
