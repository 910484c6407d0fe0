//! `volley log`: the log as JSON for people, and passing over a record.
//!
//! Owns finding the NATS of a `volley up`, or starting it where that ended at a record it can't apply, and printing. Does not own what a line says (`coordinator/src/show.rs`).

use std::io::Write as _;
use std::path::{Path, PathBuf};

use volley_cli::Exit;
use volley_cli::sdk::config::ClusterFile;
use volley_cli::serve::{LogArgs, LogVerb, NATS_DEFAULT, NatsArgs, UpArgs};
use volley_coordinator::core::Message;
use volley_coordinator::io::bus::{self, ConnectError, NatsConfig};
use volley_coordinator::io::log::Log;
use volley_coordinator::show;
use volley_jobspecs::ids::JobId;

use crate::embedded::{self, Nats, Secrets};
use crate::failed::{Ended, Failed};
use crate::serve;

/// Characters of a record that are shown when it isn't passed over.
const SHOWN_CHARS: usize = 200;

/// Carries it out.
pub async fn log(args: LogArgs) -> Ended {
    let (client, own) = open(args.dir.as_deref(), args.nats).await?;
    let done = carry_out(client, args.verb).await;
    if let Some(nats) = own {
        nats.stop().await;
    }
    done
}

/// Connects to the NATS of a `volley up`, which is started if need be, or to the one that was named.
async fn open(dir: Option<&Path>, nats: NatsArgs) -> Result<(async_nats::Client, Option<Nats>), Failed> {
    let Some(dir) = dir else {
        let config = serve::nats(nats)?;
        // At once or not at all: a person waits, who may have meant another address.
        let named = |error: ConnectError| {
            let failed = Failed::from(error);
            Failed { line: format!("{}{}", failed.line, hint(&config)), ..failed }
        };
        let client = bus::connect(&config, "log").await.map_err(named)?.0;
        return Ok((client, None));
    };
    let (config, own) = match embedded::running(dir)? {
        Some(config) => (config, None),
        None => {
            let nats = Nats::start(dir, &Secrets::open(dir)?).await?;
            (nats.config.clone(), Some(nats))
        }
    };
    Ok((serve::connect(&config, "log").await?, own))
}

/// Where nobody named a NATS and there was a `volley up`, its NATS is meant, which has another address at each start.
fn hint(config: &NatsConfig) -> String {
    let file = std::env::var_os("VOLLEY_CONFIG").map(PathBuf::from).or_else(ClusterFile::default_path);
    if config.url != NATS_DEFAULT || !file.is_some_and(|file| file.exists()) {
        return " (--nats URL names another)".to_owned();
    }
    let usual = [Some(PathBuf::from(UpArgs::ROOT_DIR)), UpArgs::home_dir()].into_iter().flatten().find(|dir| dir.join("nats").exists());
    let dir = usual.map_or_else(|| "DIR".to_owned(), |dir| dir.display().to_string());
    format!("; the cluster of `volley up` has a NATS of its own, in its directory: `volley log --dir {dir} …`")
}

async fn carry_out(client: async_nats::Client, verb: LogVerb) -> Ended {
    let log = Log::existing(client).await.map_err(Failed::unavailable)?;
    match verb {
        LogVerb::Show { from, limit, job, follow } => show(&log, from, limit, job, follow).await,
        LogVerb::Skip { sequence, force } => skip(&log, sequence, force).await,
    }
}

/// Prints records until the end of the log, or for ever.
async fn show(log: &Log, from: Option<u64>, limit: Option<u64>, job: Option<JobId>, follow: bool) -> Ended {
    let (first, last, _, _) = log.bounds().await.map_err(Failed::unavailable)?;
    let from = from.unwrap_or(first).max(first).max(1);
    if !follow && from > last {
        return Ok(());
    }
    let (mut out, mut left) = (std::io::stdout().lock(), limit.unwrap_or(u64::MAX));
    let mut records = log.read(from);
    while let Some(batch) = records.recv().await {
        for Message { sequence, bytes, .. } in batch.map_err(Failed::unavailable)? {
            if left == 0 || (!follow && sequence > last) {
                return Ok(());
            }
            if let Some(shown) = show::line(sequence, &bytes, job) {
                left -= 1;
                // Whoever read along (`| head`) has seen enough.
                if writeln!(out, "{shown}").is_err() {
                    return Ok(());
                }
            }
            if left == 0 || (!follow && sequence == last) {
                return Ok(());
            }
        }
    }
    Ok(())
}

async fn skip(log: &Log, sequence: u64, force: bool) -> Ended {
    let (first, last, _, _) = log.bounds().await.map_err(Failed::unavailable)?;
    if sequence < first || sequence > last {
        return Err(Failed::new(Exit::NotFound, format!("there is no record {sequence}: the log has {first} to {last}")));
    }
    if let Some(record) = readable(log, sequence).await?.filter(|_| !force) {
        return Err(Failed::new(
            Exit::Conflict,
            format!(
                "record {sequence} can be read: {record}. Without it every coordinator would make something else of all that came after, also \
                 of jobs that have ended. If it is what stops them (their last line names it), add --force"
            ),
        ));
    }
    log.skip(sequence).await.map_err(Failed::unavailable)?;
    println!("Every coordinator passes over record {sequence} from its next start on; what it said is lost. Restart all of them now.");
    Ok(())
}

/// A record as people see it, cut short; none when it can't be read.
async fn readable(log: &Log, sequence: u64) -> Result<Option<String>, Failed> {
    let mut records = log.read(sequence);
    let ended = || Failed::new(Exit::Unavailable, "the log can't be read");
    let batch = records.recv().await.ok_or_else(ended)?.map_err(Failed::unavailable)?;
    let found = batch.iter().find(|message| message.sequence == sequence).and_then(|message| show::line(sequence, &message.bytes, None));
    let record = found.as_ref().and_then(|shown| shown.get("record"));
    Ok(record.map(|record| record.to_string().chars().take(SHOWN_CHARS).collect()))
}
