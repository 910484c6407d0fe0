//! `volley token`.

use clap::Subcommand;
use serde_json::json;
use volley_jobspecs::api::{TokenRequest, TokenView};
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
    /// Makes a token of the tenant that `--tenant` names, and prints it, this once.
    Create {
        /// It may do what only an operator may.
        #[arg(long)]
        operator: bool,
    },
    /// Lists the tokens that are valid, without their secrets.
    Ls,
    /// Makes a token worthless.
    Revoke {
        /// The token's id: what stands between `vt_` and the next `_`.
        id: String,
    },
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    match args.verb {
        Verb::Create { operator } => {
            let Some(tenant) = ctx.tenant() else {
                return Err(CliError::Usage(
                    "whose token is it to be? name the tenant: --tenant NAME (`volley tenant ls` lists them)".into(),
                ));
            };
            let tenant = tenant.parse::<TenantId>().map_err(|error| CliError::Usage(format!("--tenant: {error}")))?.to_string();
            let answer = client.create_token(&TokenRequest { tenant, operator }).await?;
            ctx.out.show(&answer, || format!("{}\n", answer.token))?;
            ctx.out.note(&format!("it is shown this once; `volley token revoke {}` makes it worthless", answer.id));
        }
        Verb::Ls => {
            let tokens = client.tokens().await?;
            ctx.out.show(&tokens, || tokens_table(&tokens))?;
        }
        Verb::Revoke { id } => {
            client.revoke_token(&id).await?;
            ctx.out.show(&json!({ "revoked": id }), || format!("{id} is revoked\n"))?;
        }
    }
    Ok(Exit::Success)
}

fn tokens_table(tokens: &[TokenView]) -> String {
    let row = |token: &TokenView| {
        let may = if token.operator { "operator" } else { "tenant" };
        vec![token.id.clone(), token.tenant.clone(), may.to_owned(), token.created.clone().unwrap_or_default()]
    };
    table(&["TOKEN", "TENANT", "MAY ACT AS", "CREATED"], tokens.iter().map(row).collect())
}
