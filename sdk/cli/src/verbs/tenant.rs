//! `volley tenant`.

use std::num::ParseIntError;
use std::str::FromStr;

use clap::Subcommand;
use serde_json::json;
use volley_jobspecs::api::{TenantRequest, TenantView};
use volley_jobspecs::ids::TenantId;
use volley_jobspecs::spec::ByteSize;

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::table::table;
use crate::units;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Makes a tenant, or changes one that is there: what isn't named stays as it is.
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
    /// Most tasks in jobs that have not ended, or `none`.
    #[arg(long, value_name = "N")]
    active_tasks: Option<Limit<u64>>,
    /// Most jobs that have not ended, or `none`.
    #[arg(long, value_name = "N")]
    active_jobs: Option<Limit<u32>>,
    /// Most bundles open at once, or `none`.
    #[arg(long, value_name = "N")]
    concurrency: Option<Limit<u32>>,
    /// Highest priority class its jobs may ask for.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    priority_max: Option<i16>,
    /// Most bytes of its volumes' sizes, such as 500GiB, or `none`.
    #[arg(long, value_name = "SIZE", value_parser = size_limit)]
    volume_bytes: Option<Limit<ByteSize>>,
    /// Most bytes of its volumes in the bucket, or `none`.
    ///
    /// Collections measure them, twice a day: beyond it no volume is made.
    #[arg(long, value_name = "SIZE", value_parser = size_limit)]
    stored_bytes: Option<Limit<ByteSize>>,
}

/// A number, or `none` for no limit.
#[derive(Debug, Clone, Copy)]
struct Limit<T>(Option<T>);

/// Reads a limit; `read` reads what is not `none`.
fn limit<T>(text: &str, read: impl FnOnce(&str) -> Result<T, String>) -> Result<Limit<T>, String> {
    if text == "none" { Ok(Limit(None)) } else { read(text).map(|value| Limit(Some(value))) }
}

impl<T: FromStr<Err = ParseIntError>> FromStr for Limit<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        limit(text, |number| number.parse().map_err(|e| format!("{e}; allowed: a number, or `none`")))
    }
}

fn size_limit(text: &str) -> Result<Limit<ByteSize>, String> {
    limit(text, |size| units::scalar(size).map_err(|e| format!("{e}; or `none`")))
}

impl Add {
    /// What is asked for, of a tenant that is there with what stays.
    fn request(&self, there: Option<&TenantView>) -> TenantRequest {
        let limit = |named: Option<Limit<u32>>, there: Option<u32>| named.map_or(there, |Limit(limit)| limit);
        let bytes = |named: Option<Limit<ByteSize>>, there: Option<u64>| named.map_or(there, |Limit(limit)| limit.map(|limit| limit.0));
        TenantRequest {
            tenant: self.name.to_string(),
            weight: self.weight.or(there.map(|there| there.weight)),
            active_tasks_max: self.active_tasks.map_or(there.and_then(|there| there.active_tasks_max), |Limit(limit)| limit),
            active_jobs_max: limit(self.active_jobs, there.and_then(|there| there.active_jobs_max)),
            concurrency: limit(self.concurrency, there.and_then(|there| there.concurrency)),
            priority_max: self.priority_max.or(there.map(|there| there.priority_max)),
            volume_bytes_max: bytes(self.volume_bytes, there.and_then(|there| there.volume_bytes_max)),
            stored_bytes_max: bytes(self.stored_bytes, there.and_then(|there| there.stored_bytes_max)),
        }
    }
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    match args.verb {
        Verb::Add(add) => {
            let there = client.tenants().await?;
            let request = add.request(there.iter().find(|tenant| tenant.tenant == add.name.as_str()));
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
            format!(
                "{}/{}",
                ByteSize(tenant.volume_bytes),
                tenant.volume_bytes_max.map_or_else(|| "-".to_owned(), |max| ByteSize(max).to_string())
            ),
        ]
    };
    let header = ["TENANT", "WEIGHT", "ACTIVE JOBS", "ACTIVE TASKS", "CONCURRENCY", "PRIORITY MAX", "VOLUMES"];
    table(&header, tenants.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_named_stays() {
        let there = TenantView {
            tenant: "red".to_owned(),
            weight: 7,
            active_tasks: 0,
            active_tasks_max: Some(50),
            active_jobs: 0,
            active_jobs_max: Some(2),
            concurrency: Some(1),
            priority_max: 100,
            volume_bytes_max: Some(1 << 30),
            stored_bytes_max: None,
            volume_bytes: 0,
            stored_bytes: None,
        };
        let add = |concurrency, weight| {
            let name = "red".parse().expect("a name");
            Add {
                name,
                weight,
                active_tasks: None,
                active_jobs: None,
                concurrency,
                priority_max: None,
                volume_bytes: None,
                stored_bytes: Some(size_limit("2GiB").expect("a size")),
            }
            .request(Some(&there))
        };
        let changed = add(None, Some(9));
        assert_eq!((changed.weight, changed.active_tasks_max, changed.active_jobs_max), (Some(9), Some(50), Some(2)));
        assert_eq!((changed.concurrency, changed.priority_max), (Some(1), Some(100)));
        assert_eq!((changed.volume_bytes_max, changed.stored_bytes_max), (Some(1 << 30), Some(2 << 30)));
        let freed = add(Some("none".parse().expect("a limit")), None);
        assert_eq!((freed.weight, freed.concurrency, freed.active_jobs_max), (Some(7), None, Some(2)));
        assert!("many".parse::<Limit<u32>>().is_err());
    }
}
