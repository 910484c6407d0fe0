//! The cluster itself: workers, tenants, tokens.
//!
//! Owns these requests; most need an operator's token.

use volley_jobspecs::api::{ClusterView, TenantRequest, TenantView, TokenAnswer, TokenRequest, TokenView, WorkerView};

use crate::client::Client;
use crate::error::Error;
use crate::http::Call;

impl Client {
    /// What the cluster is and how it stands.
    ///
    /// # Errors
    /// What the cluster refused, or no connection.
    pub async fn cluster(&self) -> Result<ClusterView, Error> {
        self.json(&Call::get(&["cluster"], "read the cluster's state")).await
    }

    /// Every worker the cluster knows.
    ///
    /// # Errors
    /// What the cluster refused, or no connection.
    pub async fn workers(&self) -> Result<Vec<WorkerView>, Error> {
        self.json(&Call::get(&["workers"], "list the workers")).await
    }

    /// Gives a worker nothing more to do; what it runs goes on.
    ///
    /// # Errors
    /// Code `not_found`, or `forbidden` without an operator's token.
    pub async fn drain(&self, worker: &str) -> Result<(), Error> {
        self.done(&Call::post(&["workers", worker, "drain"], format!("drain the worker {worker}"))).await
    }

    /// Gives a drained or quarantined worker tasks again.
    ///
    /// # Errors
    /// As [`Client::drain`].
    pub async fn resume_worker(&self, worker: &str) -> Result<(), Error> {
        self.done(&Call::post(&["workers", worker, "resume"], format!("resume the worker {worker}"))).await
    }

    /// Makes a tenant, or changes its limits.
    ///
    /// # Errors
    /// Code `forbidden` without an operator's token.
    pub async fn put_tenant(&self, tenant: &TenantRequest) -> Result<TenantView, Error> {
        self.json(&Call::post(&["tenants"], format!("set the tenant {}", tenant.tenant)).json(tenant)).await
    }

    /// Every tenant with its limits.
    ///
    /// # Errors
    /// Code `forbidden` without an operator's token.
    pub async fn tenants(&self) -> Result<Vec<TenantView>, Error> {
        self.json(&Call::get(&["tenants"], "list the tenants")).await
    }

    /// Removes a tenant and all its tokens.
    ///
    /// # Errors
    /// Code `not_found`, `conflict` (it has jobs that have not ended), or `forbidden` without an operator's token.
    pub async fn remove_tenant(&self, tenant: &str) -> Result<(), Error> {
        // The second time it would be an error: not found.
        self.done(&Call::delete(&["tenants", tenant], format!("remove the tenant {tenant}")).once()).await
    }

    /// Every valid token, without its secret.
    ///
    /// # Errors
    /// Code `forbidden` without an operator's token.
    pub async fn tokens(&self) -> Result<Vec<TokenView>, Error> {
        self.json(&Call::get(&["tokens"], "list the tokens")).await
    }

    /// Makes a token. Its secret is in this answer only.
    ///
    /// # Errors
    /// Code `forbidden` without an operator's token.
    pub async fn create_token(&self, request: &TokenRequest) -> Result<TokenAnswer, Error> {
        // A second one would be a secret nobody holds.
        self.json(&Call::post(&["tokens"], format!("create a token for {}", request.tenant)).json(request).once()).await
    }

    /// Makes a token worthless.
    ///
    /// # Errors
    /// Code `not_found`, or `forbidden` without an operator's token.
    pub async fn revoke_token(&self, id: &str) -> Result<(), Error> {
        self.done(&Call::delete(&["tokens", id], format!("revoke the token {id}"))).await
    }
}
