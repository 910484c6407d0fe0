//! `volley cluster`.

use volley_jobspecs::api::ClusterView;

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::table::fields;
use crate::units;

/// Longest line about what workers lack, in characters.
const LINE_CHARS: usize = 1_200;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Carries it out.
pub async fn run(ctx: &Ctx, _: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    let cluster = client.cluster().await?;
    ctx.out.show(&cluster, || text(&cluster, &client.endpoint()))?;
    Ok(Exit::Success)
}

fn text(cluster: &ClusterView, endpoint: &str) -> String {
    let used = match cluster.log_bytes_max {
        None | Some(0) => units::bytes(cluster.log_bytes),
        Some(max) => {
            let percent = u128::from(cluster.log_bytes) * 100 / u128::from(max);
            format!("{} of {} ({percent} %)", units::bytes(cluster.log_bytes), units::bytes(max))
        }
    };
    let leader = if cluster.leader.is_empty() { "none yet" } else { &cluster.leader };
    let mut pairs = vec![
        ("cluster", cluster.id.clone()),
        ("address", endpoint.to_owned()),
        ("version", cluster.version.clone()),
        ("leader", leader.to_owned()),
        ("term", cluster.term.to_string()),
        ("sequence", cluster.sequence.to_string()),
        ("level", cluster.level.to_string()),
        ("log", used),
        ("bucket", cluster.bucket.clone()),
        ("accepts", cluster.features.join(", ")),
    ];
    pairs.extend(cluster.lacks.iter().map(|line| ("lacks", clean::cell(line, LINE_CHARS))));
    fields(&pairs)
}
