//! Who asks: tokens and what their bearers may do.
//!
//! Owns reading and checking `Authorization: Bearer vt_<id>_<secret>`. A secret is never stored: the log has its SHA-256, which is
//! enough for 256 random bits. Does not own the table of tokens (`state`).

use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use sha2::{Digest, Sha256};
use volley_jobspecs::ids::TenantId;
use volley_jobspecs::wire::record::Actor;

use super::App;
use super::error::ApiError;
use super::extract::QueryOf;
use crate::control::OPERATOR;
use crate::state::Token;
use crate::state::rows::{self, Rows, RowsError, Table};

/// What every token begins with, so that a leaked one is recognised.
pub const TOKEN_PREFIX: &str = "vt_";
/// Id of the token that comes with the configuration.
pub const BOOTSTRAP_ID: &str = "bootstrap";
/// Whose jobs the bootstrap operator submits when no tenant is named.
pub const DEFAULT_TENANT: &str = "default";
/// Longest token that is looked at, in bytes.
const TOKEN_BYTES_MAX: usize = 256;
/// How often an open stream looks whether its token is still there: one read of a row.
pub const REVOKED_EVERY: Duration = Duration::from_secs(1);
/// Random bytes of a secret: 256 bits can't be guessed, so a plain hash protects them.
const SECRET_BYTES: usize = 32;

/// Who asks, and for whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Whose jobs are meant: the token's tenant, or the one an operator named.
    pub tenant: TenantId,
    /// Id of the token.
    pub principal: String,
    /// May it do what only an operator may?
    pub operator: bool,
    /// Did an operator name the tenant?
    pub named: bool,
}

impl Caller {
    /// Refuses everybody but operators.
    ///
    /// # Errors
    /// 403.
    pub fn operators_only(&self) -> Result<(), ApiError> {
        if self.operator {
            return Ok(());
        }
        Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", "only an operator may do this; ask with an operator's token"))
    }

    /// May this caller see what belongs to `tenant`? Operators see everything unless they named a tenant.
    #[must_use]
    pub fn sees(&self, tenant: &TenantId) -> bool {
        self.tenant == *tenant || (self.operator && !self.named)
    }

    /// Ends when the caller's token is revoked: an open stream outlives its token by [`REVOKED_EVERY`].
    pub fn revoked(&self, app: &Arc<App>) -> futures::future::BoxFuture<'static, ()> {
        let (app, principal) = (app.clone(), self.principal.clone());
        Box::pin(async move {
            if principal == BOOTSTRAP_ID {
                return std::future::pending().await;
            }
            let key = rows::token_key(&principal);
            // Rows that can't be read say nothing about the token.
            while !matches!(app.handle.rows().get(Table::Meta, &key), Ok(None)) {
                tokio::time::sleep(REVOKED_EVERY).await;
            }
        })
    }

    /// The actor of a submit: always of one tenant.
    #[must_use]
    pub fn submitter(&self, request_id: String) -> Actor {
        Actor { tenant: self.tenant.clone(), principal: self.principal.clone(), request_id }
    }

    /// The actor of a control: operators act as the operator, who may change every job.
    ///
    /// # Errors
    /// 503 never happens: the operator's name is a name.
    pub fn controller(&self, request_id: String) -> Result<Actor, ApiError> {
        let tenant = if self.operator { TenantId::new(OPERATOR)? } else { self.tenant.clone() };
        Ok(Actor { tenant, principal: self.principal.clone(), request_id })
    }
}

/// SHA-256 of a secret, in hex.
#[must_use]
pub fn secret_hash(secret: &str) -> String {
    hex::encode(Sha256::digest(secret.as_bytes()))
}

/// A new token: its id and its secret.
///
/// # Errors
/// 503 when the system has no randomness to give.
pub fn new_token() -> Result<(String, String), ApiError> {
    Ok((random_hex(8)?, random_hex(SECRET_BYTES)?))
}

/// Random bytes as hex.
///
/// # Errors
/// 503 when the system has no randomness to give.
pub fn random_hex(bytes: usize) -> Result<String, ApiError> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).map_err(|e| ApiError::unavailable(format!("no randomness from the system: {e}")))?;
    Ok(hex::encode(random))
}

/// Compares without telling by its duration where two texts differ.
#[must_use]
pub fn same(a: &str, b: &str) -> bool {
    let differing = a.bytes().zip(b.bytes()).fold(0u8, |acc, (a, b)| std::hint::black_box(acc | (a ^ b)));
    a.len() == b.len() && differing == 0
}

/// The token that a request brought.
fn bearer(parts: &Parts) -> Result<&str, ApiError> {
    let refused = |message: &str| ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message);
    let value = parts.headers.get(header::AUTHORIZATION);
    let value = value.ok_or_else(|| refused("no token; send `Authorization: Bearer <token>` (the CLI takes it from VOLLEY_TOKEN)"))?;
    let text = value.to_str().ok().filter(|text| text.len() <= TOKEN_BYTES_MAX);
    let token = text.and_then(|text| text.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    token.map(|(_, token)| token.trim()).ok_or_else(|| refused("the Authorization header is not `Bearer <token>`"))
}

/// Finds whose token it is.
fn lookup(app: &App, token: &str) -> Result<Option<(String, Token)>, RowsError> {
    let Some((id, secret)) = token.strip_prefix(TOKEN_PREFIX).and_then(|rest| rest.split_once('_')) else { return Ok(None) };
    let hash = secret_hash(secret);
    if id == BOOTSTRAP_ID {
        let known = app.bootstrap_hash.as_deref().is_some_and(|known| same(known, &hash));
        let tenant = TenantId::new(DEFAULT_TENANT).ok().filter(|_| known);
        return Ok(tenant.map(|tenant| (id.to_owned(), Token { tenant, secret_hash: hash, operator: true, created_ms: None })));
    }
    let row = app.handle.rows().get(Table::Meta, &rows::token_key(id))?;
    let found: Option<Token> = row.and_then(|bytes| volley_jobspecs::wire::decode("token", &bytes).ok());
    Ok(found.filter(|found| same(&found.secret_hash, &hash)).map(|found| (id.to_owned(), found)))
}

impl FromRequestParts<Arc<App>> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let token = bearer(parts)?;
        let found = lookup(app, token)?;
        let unknown = || {
            ApiError::new(
                StatusCode::UNAUTHORIZED,
                "unauthorized",
                "this token is not known, or was revoked; ask an operator for a new one",
            )
        };
        let (principal, found) = found.ok_or_else(unknown)?;
        let query = QueryOf::from_request_parts(parts, app).await?;
        let named = query.get("tenant").map(TenantId::new).transpose()?;
        match named {
            None => Ok(Self { tenant: found.tenant, principal, operator: found.operator, named: false }),
            Some(tenant) if found.operator => Ok(Self { tenant, principal, operator: true, named: true }),
            Some(tenant) if tenant == found.tenant => Ok(Self { tenant, principal, operator: false, named: true }),
            Some(tenant) => {
                let message = format!("this token is of tenant {}, not {tenant}; only an operator names another tenant", found.tenant);
                Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_the_same_only_when_they_are() {
        assert!(same("", "") && same("abc", "abc"));
        assert!(!same("abc", "abd") && !same("abc", "ab") && !same("", "a"));
    }

    #[test]
    fn secrets_differ_and_ids_carry_no_separator() {
        let (a, b) = (new_token().unwrap_or_else(|e| panic!("{e:?}")), new_token().unwrap_or_else(|e| panic!("{e:?}")));
        assert_ne!(a, b);
        assert!(!a.0.contains('_') && a.1.len() == 64);
        assert_eq!(secret_hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn operators_see_everything_until_they_name_a_tenant() {
        let id = |name: &str| TenantId::new(name).unwrap_or_else(|e| panic!("{e}"));
        let caller = |operator, named| Caller { tenant: id("a"), principal: "t".into(), operator, named };
        assert!(caller(true, false).sees(&id("b")));
        assert!(!caller(true, true).sees(&id("b")));
        assert!(!caller(false, false).sees(&id("b")) && caller(false, false).sees(&id("a")));
        assert!(caller(false, false).operators_only().is_err());
    }
}
