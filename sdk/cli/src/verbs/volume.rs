//! `volley volume`.

use std::time::Duration;

use clap::Subcommand;
use jiff::Timestamp;
use serde_json::json;
use volley_jobspecs::api::{CollectedView, DamageView, VerifiedView, VolumeRequest, VolumeView};
use volley_jobspecs::spec::volumes::parse_name;
use volley_jobspecs::spec::{ByteSize, Flush};
use volley_sdk::Client;

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::progress::Line;
use crate::table::{count, table};
use crate::units;

/// How often a volume that grows is looked at.
const GROWN_EVERY: Duration = Duration::from_millis(200);
/// What `--flush` takes.
const FLUSHES: [&str; 3] = ["none", "local", "s3"];

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Makes an empty volume.
    Create {
        /// Its name. Of a-z A-Z 0-9 . _ -, beginning with a letter or digit.
        name: String,
        /// Its size, such as 10GiB. From 1MiB to 16TiB; it takes room only for what is written.
        #[arg(value_name = "SIZE", value_parser = units::scalar::<ByteSize>)]
        size: ByteSize,
        /// What a flush promises: none, local or s3. With `local` what was flushed survives all but the loss of the host's disk, with `s3` that too.
        #[arg(long, value_name = "MODE", value_parser = FLUSHES, hide_possible_values = true, default_value = "local")]
        flush: String,
    },
    /// Lists volumes.
    Ls,
    /// Shows a volume with its snapshots.
    Show {
        /// Its name.
        name: String,
    },
    /// Makes a snapshot of a volume as it was last accepted.
    ///
    /// What a task is writing now is not in it.
    Snapshot {
        /// The volume and the snapshot's name.
        #[arg(value_name = "VOLUME@SNAPSHOT")]
        name: String,
    },
    /// Makes a volume that begins as a snapshot. Nothing is copied.
    Clone {
        /// What it begins as.
        #[arg(value_name = "VOLUME@SNAPSHOT")]
        from: String,
        /// Its name.
        name: String,
    },
    /// Deletes from the bucket what nobody needs any more. For operators.
    ///
    /// The cluster does that by itself twice a day. What is found unneeded is deleted by the first run a day later that finds it so too; nothing is deleted by a run
    /// that could not read everything.
    Gc {
        /// Only says what would be done.
        #[arg(long)]
        dry_run: bool,
    },
    /// Lets a volume grow that nobody writes.
    ///
    /// What is new reads as zeros; a file system on it grows when the next task mounts it to write. Volumes never shrink.
    Resize {
        /// Its name.
        name: String,
        /// The size it is to have, such as 20GiB.
        #[arg(value_name = "SIZE", value_parser = units::scalar::<ByteSize>)]
        size: ByteSize,
    },
    /// Checks that everything a volume or a snapshot needs is in the bucket, and undamaged.
    ///
    /// Reads what says where its blocks lie, and with --deep every block that is stored. Repairs nothing, and may run while tasks write. Ends with 5 if something is
    /// damaged.
    Verify {
        /// Which.
        #[arg(value_name = "VOLUME[@SNAPSHOT]")]
        name: String,
        /// Reads everything that is stored.
        #[arg(long)]
        deep: bool,
    },
    /// Removes volumes with their snapshots, or single snapshots.
    ///
    /// What jobs use stays as long as they do.
    Rm {
        /// Which.
        #[arg(required = true, value_name = "VOLUME[@SNAPSHOT]")]
        names: Vec<String>,
    },
}

fn flush(mode: &str) -> Flush {
    match mode {
        "none" => Flush::None,
        "s3" => Flush::S3,
        _ => Flush::Local,
    }
}

fn snapshot(text: &str) -> Result<(&str, &str), CliError> {
    let parsed = parse_name(text).ok().and_then(|(volume, snapshot)| Some((volume, snapshot?)));
    parsed.ok_or_else(|| CliError::Usage(format!("{text:?} names no snapshot; allowed: VOLUME@SNAPSHOT")))
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    match args.verb {
        Verb::Create { name, size, flush: mode } => {
            let request = VolumeRequest { name, size_bytes: Some(size.0), flush: Some(flush(&mode)), from: None };
            let made = client.create_volume(&request).await?;
            ctx.out.show(&made, || volumes_table(std::slice::from_ref(&made)))?;
        }
        Verb::Ls => {
            let volumes = client.volumes().await?;
            ctx.out.show(&volumes, || volumes_table(&volumes))?;
        }
        Verb::Show { name } => {
            let volume = client.volume(&name).await?;
            ctx.out.show(&volume, || shown(&volume))?;
        }
        Verb::Snapshot { name } => {
            let (volume, snapshot) = snapshot(&name)?;
            let volume = client.create_snapshot(volume, snapshot).await?;
            ctx.out.show(&volume, || shown(&volume))?;
            ctx.out.note(&format!("next: `volley volume clone {name} NAME`"));
        }
        Verb::Clone { from, name } => {
            snapshot(&from)?;
            let made = client.create_volume(&VolumeRequest { name, size_bytes: None, flush: None, from: Some(from) }).await?;
            ctx.out.show(&made, || volumes_table(std::slice::from_ref(&made)))?;
        }
        Verb::Gc { dry_run } => {
            let mut line = Line::start(ctx.out);
            line.set("reading what volumes have in the bucket".to_owned());
            let collected = client.collect_volumes(dry_run).await;
            line.end();
            let collected = collected?;
            ctx.out.show(&collected, || collected_text(&collected, dry_run))?;
        }
        Verb::Resize { name, size } => {
            let volume = resize(ctx, &client, &name, size.0).await?;
            ctx.out.show(&volume, || volumes_table(std::slice::from_ref(&volume)))?;
        }
        Verb::Verify { name, deep } => return verify(ctx, &client, &name, deep).await,
        Verb::Rm { names } => {
            names.iter().try_for_each(|name| named(name).map(|_| ()))?;
            // Before anything goes, so that a mistyped name costs nothing.
            are_there(&client.volumes().await?, &names).map_err(CliError::NotFound)?;
            for (place, name) in names.iter().enumerate() {
                let removed = match parse_name(name) {
                    Ok((volume, Some(snapshot))) => client.remove_snapshot(volume, snapshot).await,
                    Ok((volume, None)) => client.remove_volume(volume).await,
                    Err(_) => Ok(()),
                };
                if let (Err(_), done @ [_, ..]) = (&removed, names.get(..place).unwrap_or_default()) {
                    ctx.out.note(&format!("removed until then: {}", done.join(", ")));
                }
                removed?;
            }
            ctx.out.show(&json!({ "removed": names }), || format!("removed: {}\n", names.join(", ")))?;
        }
    }
    Ok(Exit::Success)
}

fn named(text: &str) -> Result<(&str, Option<&str>), CliError> {
    parse_name(text).map_err(|why| CliError::Usage(format!("{text:?} names no volume: {why}")))
}

/// Asks for it, and waits until it is done.
async fn resize(ctx: &Ctx, client: &Client, name: &str, size_bytes: u64) -> Result<VolumeView, CliError> {
    let mut volume = client.resize_volume(name, size_bytes).await?;
    let wanted = volume.growing_to_bytes.unwrap_or(volume.size_bytes);
    let mut line = Line::start(ctx.out);
    let waited = async {
        while volume.growing_to_bytes.is_some() {
            line.set(format!("{name} grows to {}", units::bytes(wanted)));
            tokio::time::sleep(GROWN_EVERY).await;
            volume = client.volume(name).await?;
        }
        Ok::<_, CliError>(volume)
    };
    let volume = waited.await;
    line.end();
    match volume? {
        volume if volume.size_bytes >= wanted => Ok(volume),
        _ => Err(CliError::Conflict(format!(
            "volume {name} did not grow: its head in the bucket is not what the cluster's log says; `volley volume verify {name}` and the coordinator's log say more"
        ))),
    }
}

async fn verify(ctx: &Ctx, client: &Client, name: &str, deep: bool) -> Result<Exit, CliError> {
    let (volume, snapshot) = named(name)?;
    let mut line = Line::start(ctx.out);
    line.set(format!("reading what {name} consists of"));
    let verified = client.verify_volume(volume, snapshot, deep, |at| {
        if at.packs_all > 0 {
            line.set(format!("{name}: {} of {} objects read, {}", at.packs, at.packs_all, units::bytes(at.bytes)));
        }
    });
    let verified = verified.await;
    line.end();
    let verified = verified?;
    ctx.out.show(&verified, || verified_text(name, &verified))?;
    Ok(if verified.damage.is_some() { Exit::Damaged } else { Exit::Success })
}

fn verified_text(name: &str, verified: &VerifiedView) -> String {
    match &verified.damage {
        None if verified.deep => {
            let read = units::bytes(verified.bytes);
            format!("{name} is undamaged: {} read, {read}, {} stored\n", count(verified.packs, "object"), count(verified.blocks, "block"))
        }
        None => format!(
            "{name}: the map is undamaged; it names {} in {} (--deep reads them)\n",
            count(verified.blocks, "block"),
            count(verified.packs, "object")
        ),
        Some(DamageView { object, what }) => format!(
            "{name} is DAMAGED\nobject: {object}\nproblem: {what}\nnext: put the object back from a copy of the bucket or an older version of it, and verify again; \
             or go on from a snapshot that is undamaged (`volley volume verify VOLUME@SNAPSHOT`, `volley volume clone`)\n"
        ),
    }
}

/// Is each of them there, and still will be when it is its turn? Otherwise what to say.
fn are_there(volumes: &[VolumeView], names: &[String]) -> Result<(), String> {
    let mut gone: Vec<&str> = Vec::new();
    for name in names {
        let Ok((volume, snapshot)) = parse_name(name) else { continue };
        let found = volumes.iter().find(|found| found.name == volume);
        let there = found.is_some_and(|found| snapshot.is_none_or(|wanted| found.snapshots.iter().any(|one| one.name == wanted)));
        if !there {
            return Err(match found {
                Some(_) => format!("there is no snapshot {name} (`volley volume show {volume}` lists them); nothing was removed"),
                None => format!("there is no volume {volume} (`volley volume ls` lists them); nothing was removed"),
            });
        }
        if gone.contains(&name.as_str()) || gone.contains(&volume) {
            return Err(format!("{name} is named twice, or goes with its volume; nothing was removed"));
        }
        gone.push(name);
    }
    Ok(())
}

fn volumes_table(volumes: &[VolumeView]) -> String {
    let now = Timestamp::now();
    let row = |volume: &VolumeView| {
        vec![
            volume.name.clone(),
            units::bytes(volume.size_bytes),
            volume.generation.to_string(),
            volume.snapshots.len().to_string(),
            units::age(&volume.created, now),
            volume.held_by.clone().unwrap_or_default(),
        ]
    };
    table(&["VOLUME", "SIZE", "ACCEPTED", "SNAPSHOTS", "AGE", "IN USE"], volumes.iter().map(row).collect())
}

fn collected_text(of: &CollectedView, dry_run: bool) -> String {
    let of_bytes = |objects: u64, bytes: u64| format!("{}, {}", count(objects, "object"), units::bytes(bytes));
    let mut text = format!(
        "in the bucket, removed ones too: {} and {}, {}\n",
        count(of.volumes, "volume"),
        count(of.snapshots, "snapshot"),
        of_bytes(of.objects, of.bytes)
    );
    let waiting = (of.condemned_objects.saturating_sub(of.deleted_objects), of.condemned_bytes.saturating_sub(of.deleted_bytes));
    text.push_str(&format!(
        "{}: {}\n",
        if dry_run { "would be deleted" } else { "deleted" },
        of_bytes(of.deleted_objects, of.deleted_bytes)
    ));
    text.push_str(&format!("unneeded, to be deleted when that is so for a day: {}\n", of_bytes(waiting.0, waiting.1)));
    let rows = of.stored_bytes.iter().map(|(tenant, bytes)| vec![tenant.clone(), units::bytes(*bytes)]).collect();
    if !of.stored_bytes.is_empty() {
        text.push_str(&format!("\n{}", table(&["TENANT", "STORED"], rows)));
    }
    text
}

fn shown(volume: &VolumeView) -> String {
    let now = Timestamp::now();
    let mut text = volumes_table(std::slice::from_ref(volume));
    if !volume.snapshots.is_empty() {
        let row = |snapshot: &volley_jobspecs::api::SnapshotView| {
            vec![format!("{}@{}", volume.name, snapshot.name), units::bytes(snapshot.size_bytes), units::age(&snapshot.created, now)]
        };
        text.push_str(&format!("\n{}", table(&["SNAPSHOT", "SIZE", "AGE"], volume.snapshots.iter().map(row).collect())));
    }
    text.push_str(&format!("\nid: {}\n", volume.id));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_removed_unless_all_of_it_is_there() {
        let snapshots =
            vec![volley_jobspecs::api::SnapshotView { name: "x".into(), id: "s1".into(), size_bytes: 1, created: String::new() }];
        let one = |name: &str| VolumeView {
            name: name.into(),
            id: "v1".into(),
            size_bytes: 1,
            generation: 0,
            created: String::new(),
            held_by: None,
            growing_to_bytes: None,
            snapshots: snapshots.clone(),
        };
        let all = [one("a"), one("b")];
        let judge = |names: &[&str]| are_there(&all, &names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).is_ok();
        assert!(judge(&["a", "b@x"]) && judge(&["a@x", "a"]));
        for wrong in [&["a", "c"][..], &["a@y"], &["a", "a"], &["a", "a@x"]] {
            assert!(!judge(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn a_snapshot_is_named_with_its_volume() {
        assert_eq!(snapshot("a@b").map_err(|e| e.to_string()), Ok(("a", "b")));
        for text in ["a", "a@", "@b", "a@b@c"] {
            assert!(snapshot(text).is_err(), "{text}");
        }
    }
}
