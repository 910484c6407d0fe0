//! `volley log`: the log as JSON for people, and passing over a record.
//!
//! Owns finding the NATS of a `volley up`, or starting it where that ended at a record it can't apply, and printing. Does not own what a line says (`coordinator/src/show.rs`).

use std::io::Write as _;

use volley_cli::serve::{LogArgs, LogVerb};
use volley_coordinator::io::bus::NatsConfig;
use volley_coordinator::io::log::Log;
use volley_coordinator::show;
use volley_jobspecs::ids::JobId;

use crate::embedded::{self, Nats, Secrets};
use crate::serve::{self, Ended, line};

/// Carries it out.
pub async fn log(args: LogArgs) -> Ended {
    let (config, own) = match &args.dir {
        None => (serve::nats(args.nats)?, None),
        Some(dir) => match embedded::running(dir)? {
            Some(config) => (config, None),
            None => {
                let nats = Nats::start(dir, &Secrets::open(dir)?).await?;
                (nats.config.clone(), Some(nats))
            }
        },
    };
    let done = carry_out(&config, args.verb).await;
    if let Some(nats) = own {
        nats.stop().await;
    }
    done
}

async fn carry_out(config: &NatsConfig, verb: LogVerb) -> Ended {
    let client = serve::connect(config, "log").await?;
    let log = Log::existing(client).await.map_err(line)?;
    match verb {
        LogVerb::Show { from, limit, job, follow } => show(&log, from, limit, job, follow).await,
        LogVerb::Skip { sequence } => skip(&log, sequence).await,
    }
}

/// Prints records until the end of the log, or for ever.
async fn show(log: &Log, from: Option<u64>, limit: Option<u64>, job: Option<JobId>, follow: bool) -> Ended {
    let (first, last, _, _) = log.bounds().await.map_err(line)?;
    let from = from.unwrap_or(first).max(first).max(1);
    if !follow && from > last {
        return Ok(());
    }
    let (mut out, mut left) = (std::io::stdout().lock(), limit.unwrap_or(u64::MAX));
    let mut records = log.read(from);
    while let Some(batch) = records.recv().await {
        for (sequence, bytes) in batch.map_err(line)? {
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

async fn skip(log: &Log, sequence: u64) -> Ended {
    let (first, last, _, _) = log.bounds().await.map_err(line)?;
    if sequence < first || sequence > last {
        return Err(format!("there is no record {sequence}: the log has {first} to {last}"));
    }
    log.skip(sequence).await.map_err(line)?;
    println!("Every coordinator passes over record {sequence} from its next start on; what it said is lost. Restart all of them now.");
    Ok(())
}
