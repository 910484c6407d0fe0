//! `volley tenant`.

use clap::Subcommand;
use serde_json::json;
use volley_jobspecs::api::{TenantRequest, TenantView};
use volley_jobspecs::ids::TenantId;

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::table::table;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Makes a tenant, or sets the limits of one that is there.
    Add(Add),
    /// Lists tenants.
    Ls,
    /// Removes a tenant and all its tokens. Refused while it has jobs that have not ended.
    Rm {
        /// Its name.
        name: TenantId,
    },
}

#[derive(Debug, clap::Args)]
struct Add {
    /// Its name.
    name: TenantId,
    /// Its share among tenants. Default: 100.
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
    /// Most tasks in jobs that have not ended.
    #[arg(long, value_name = "N")]
    active_tasks: Option<u64>,
    /// Most jobs that have not ended.
    #[arg(long, value_name = "N")]
    active_jobs: Option<u32>,
    /// Most bundles open at once.
    #[arg(long, value_name = "N")]
    concurrency: Option<u32>,
    /// Highest priority class its jobs may ask for.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    priority_max: Option<i16>,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    match args.verb {
        Verb::Add(add) => {
            let request = TenantRequest {
                tenant: add.name.to_string(),
                weight: add.weight,
                active_tasks_max: add.active_tasks,
                active_jobs_max: add.active_jobs,
                concurrency: add.concurrency,
                priority_max: add.priority_max,
            };
            let made = client.put_tenant(&request).await?;
            ctx.out.show(&made, || tenants_table(std::slice::from_ref(&made)))?;
            ctx.out.note(&format!("next: `volley token create --tenant {}`", made.tenant));
        }
        Verb::Ls => {
            let tenants = client.tenants().await?;
            ctx.out.show(&tenants, || tenants_table(&tenants))?;
        }
        Verb::Rm { name } => {
            client.remove_tenant(name.as_str()).await?;
            ctx.out.show(&json!({ "removed": name }), || format!("{name} is removed, and its tokens are worthless\n"))?;
        }
    }
    Ok(Exit::Success)
}

fn tenants_table(tenants: &[TenantView]) -> String {
    let limit = |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), |limit| limit.to_string());
    let row = |tenant: &TenantView| {
        vec![
            tenant.tenant.clone(),
            tenant.weight.to_string(),
            format!("{}/{}", tenant.active_jobs, limit(tenant.active_jobs_max.map(u64::from))),
            format!("{}/{}", tenant.active_tasks, limit(tenant.active_tasks_max)),
            limit(tenant.concurrency.map(u64::from)),
            tenant.priority_max.to_string(),
        ]
    };
    let header = ["TENANT", "WEIGHT", "ACTIVE JOBS", "ACTIVE TASKS", "CONCURRENCY", "PRIORITY MAX"];
    table(&header, tenants.iter().map(row).collect())
}
