//! `/v1/tenants` and `/v1/tokens`: who may ask for what. For operators only.
//!
//! Owns those routes and the bounds of a policy. Does not own checking tokens (`auth`).

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use volley_jobspecs::api::{ErrorBody, TenantRequest, TenantView, TokenAnswer, TokenRequest, TokenView};
use volley_jobspecs::ids::TenantId;
use volley_jobspecs::wire::record::{Control, TenantPolicy, Verb};
use volley_jobspecs::wire::{LEVEL_QUOTAS, LEVEL_TENANTS};

use super::App;
use super::auth::{Caller, TOKEN_PREFIX, new_token, random_hex, secret_hash};
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, json};
use super::views::instant;
use crate::control::OPERATOR;
use crate::state::State as Cluster;
use crate::state::Tenant;
use crate::volumes::quota;

/// Largest share: a tenant with it gets ten thousand times what one with the least gets.
const WEIGHT_MAX: u32 = 10_000;
/// Priority classes, as specs have them.
const PRIORITIES: std::ops::RangeInclusive<i16> = -100..=100;

fn view(state: &Cluster, name: &TenantId, tenant: &Tenant) -> TenantView {
    let policy = &tenant.policy;
    let active = || state.jobs.values().filter(|job| job.facts.tenant == *name && job.progress.ended_ms.is_none());
    TenantView {
        tenant: name.to_string(),
        weight: policy.weight,
        active_tasks_max: policy.active_tasks_max,
        active_jobs_max: policy.active_jobs_max,
        concurrency: policy.concurrency,
        priority_max: policy.priority_max,
        volume_bytes_max: policy.volume_bytes_max,
        stored_bytes_max: policy.stored_bytes_max,
        volume_bytes: quota::size_of_all(state, name),
        stored_bytes: quota::stored(state, name),
        active_jobs: u32::try_from(active().count()).unwrap_or(u32::MAX),
        active_tasks: active().map(|job| u64::from(job.tasks())).sum(),
    }
}

/// Lists the tenants.
#[utoipa::path(get, path = "/v1/tenants", operation_id = "listTenants", tag = "operators", responses((status = 200, body = Vec<TenantView>), (status = 403, body = ErrorBody)))]
pub async fn list(State(app): State<Arc<App>>, caller: Caller, query: QueryOf) -> Result<Json<Vec<TenantView>>, ApiError> {
    query.only(&[])?;
    caller.operators_only()?;
    let all = app.handle.read(|state, _, _| state.tenants.iter().map(|(name, tenant)| view(state, name, tenant)).collect());
    Ok(Json(all.await?))
}

/// Makes a tenant, or changes it: what is left out is unlimited, or its default.
#[utoipa::path(post, path = "/v1/tenants", operation_id = "putTenant", tag = "operators", request_body = TenantRequest,
    responses((status = 201, body = TenantView), (status = 400, body = ErrorBody), (status = 403, body = ErrorBody)))]
pub async fn put(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: QueryOf,
    body: Body,
) -> Result<(StatusCode, Json<TenantView>), ApiError> {
    query.only(&[])?;
    caller.operators_only()?;
    let request: TenantRequest = json(body, None).await?;
    let name = TenantId::new(&request.tenant)?;
    let default = TenantPolicy::default();
    let policy = TenantPolicy {
        weight: request.weight.unwrap_or(default.weight),
        active_tasks_max: request.active_tasks_max,
        active_jobs_max: request.active_jobs_max,
        concurrency: request.concurrency,
        priority_max: request.priority_max.unwrap_or(default.priority_max),
        volume_bytes_max: request.volume_bytes_max,
        stored_bytes_max: request.stored_bytes_max,
    };
    let limited = policy.volume_bytes_max.is_some() || policy.stored_bytes_max.is_some();
    if limited && super::submit::level(&app).await? < LEVEL_QUOTAS {
        return Err(ApiError::unavailable("not every coordinator of the cluster knows limits of volumes yet; upgrade all of them"));
    }
    if !(1..=WEIGHT_MAX).contains(&policy.weight) {
        return Err(ApiError::bad_request(format!("weight is {}; allowed: 1 to {WEIGHT_MAX}", policy.weight)));
    }
    if !PRIORITIES.contains(&policy.priority_max) {
        return Err(ApiError::bad_request(format!("priorityMax is {}; allowed: -100 to 100", policy.priority_max)));
    }
    let actor = caller.controller(random_hex(16)?)?;
    app.handle.control(Control { actor, verb: Verb::PutTenant { tenant: name.clone(), policy } }).await?;
    let made = app.handle.read(move |state, _, _| state.tenants.get(&name).map(|tenant| view(state, &name, tenant))).await?;
    let made = made.ok_or_else(|| ApiError::unavailable("the tenant was recorded, but is not seen yet; list the tenants"))?;
    Ok((StatusCode::CREATED, Json(made)))
}

/// Removes a tenant and all its tokens. Refused while it has volumes, or jobs that have not ended; those that have stay until their time is over.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}", operation_id = "removeTenant", tag = "operators", params(("tenant" = String, Path, description = "The tenant")),
    responses((status = 204), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn remove(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(name): PathOf<String>,
    query: QueryOf,
) -> Result<StatusCode, ApiError> {
    query.only(&[])?;
    caller.operators_only()?;
    let tenant = TenantId::new(&name)?;
    let known = app.handle.read({
        let tenant = tenant.clone();
        move |state, _, _| {
            let volumes = state.volumes.range((tenant.clone(), String::new())..).take_while(|((whose, _), _)| *whose == tenant);
            state.tenants.contains_key(&tenant).then(|| volumes.count() as u64)
        }
    });
    // Checked first, so that a mistyped name costs no record.
    let volumes = known.await?.ok_or_else(|| ApiError::not_found(format!("no tenant {tenant}")))?;
    if volumes > 0 {
        // They stay until somebody removes them, and whoever gets the name next would have them.
        let text = format!(
            "tenant {tenant} has {}; remove them first: `volley --tenant {tenant} volume ls` lists them, `volley --tenant {tenant} volume rm` removes them",
            volley_jobspecs::units::count(volumes, "volume")
        );
        return Err(ApiError::conflict(text));
    }
    if super::submit::level(&app).await? < LEVEL_TENANTS {
        return Err(ApiError::unavailable("not every coordinator of the cluster can remove tenants yet; upgrade all of them"));
    }
    let actor = caller.controller(random_hex(16)?)?;
    app.handle.control(Control { actor, verb: Verb::RemoveTenant { tenant } }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists the tokens that are valid, without their secrets and without the one of the configuration.
#[utoipa::path(get, path = "/v1/tokens", operation_id = "listTokens", tag = "operators", responses((status = 200, body = Vec<TokenView>), (status = 403, body = ErrorBody)))]
pub async fn list_tokens(State(app): State<Arc<App>>, caller: Caller, query: QueryOf) -> Result<Json<Vec<TokenView>>, ApiError> {
    query.only(&[])?;
    caller.operators_only()?;
    // Whoever names a tenant means its tokens.
    let only = caller.named.then_some(caller.tenant);
    let all = app.handle.read(move |state, _, _| {
        let wanted = state.tokens.iter().filter(|(_, token)| only.as_ref().is_none_or(|only| token.tenant == *only));
        let view = |(id, token): (&String, &crate::state::Token)| TokenView {
            id: id.clone(),
            tenant: token.tenant.to_string(),
            operator: token.operator,
            created: token.created_ms.map(instant),
        };
        wanted.map(view).collect()
    });
    Ok(Json(all.await?))
}

/// Makes a token. Its secret is in this answer and nowhere else.
#[utoipa::path(post, path = "/v1/tokens", operation_id = "createToken", tag = "operators", request_body = TokenRequest,
    responses((status = 201, body = TokenAnswer), (status = 400, body = ErrorBody), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn create_token(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: QueryOf,
    body: Body,
) -> Result<(StatusCode, Json<TokenAnswer>), ApiError> {
    query.only(&[])?;
    caller.operators_only()?;
    let request: TokenRequest = json(body, None).await?;
    let tenant = TenantId::new(&request.tenant)?;
    if tenant.as_str() == OPERATOR && !request.operator {
        return Err(ApiError::bad_request(format!("tokens of tenant {OPERATOR} are operators' tokens; ask with \"operator\": true")));
    }
    let (id, secret) = new_token()?;
    let actor = caller.controller(random_hex(16)?)?;
    let verb = Verb::CreateToken { id: id.clone(), tenant, secret_hash: secret_hash(&secret), operator: request.operator };
    app.handle.control(Control { actor, verb }).await?;
    let token = format!("{TOKEN_PREFIX}{id}_{secret}");
    Ok((StatusCode::CREATED, Json(TokenAnswer { id, token })))
}

/// Makes a token useless, at once.
#[utoipa::path(delete, path = "/v1/tokens/{id}", operation_id = "revokeToken", tag = "operators", params(("id" = String, Path, description = "The token's id: what stands between `vt_` and the secret")),
    responses((status = 204), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn revoke_token(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(id): PathOf<String>,
    query: QueryOf,
) -> Result<StatusCode, ApiError> {
    query.only(&[])?;
    caller.operators_only()?;
    let known = app.handle.read({
        let id = id.clone();
        move |state, _, _| state.tokens.contains_key(&id)
    });
    // Checked first, so that a mistyped id costs no record.
    if !known.await? {
        let shown: String = id.chars().take(60).collect();
        return Err(ApiError::not_found(format!("no token {shown:?} (`volley token ls` lists them)")));
    }
    let actor = caller.controller(random_hex(16)?)?;
    app.handle.control(Control { actor, verb: Verb::RevokeToken { id } }).await?;
    Ok(StatusCode::NO_CONTENT)
}
