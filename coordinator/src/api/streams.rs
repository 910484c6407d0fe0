//! How many streams a tenant holds open.
//!
//! Owns the count and its limit. A stream costs a connection, a task and a place in the event channel; without a limit one tenant
//! could use up all.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use volley_jobspecs::ids::TenantId;

use super::error::ApiError;

/// Streams (results, events, logs) one tenant may hold open at one coordinator: ten programs with twenty-five each.
pub const STREAMS_MAX: u32 = 256;

/// After this much silence a stream says that it lives: a comment in events, an empty line in lines of JSON. Raw output can't. Tests shorten it.
pub const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Open streams by tenant. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Streams {
    open: Arc<Mutex<BTreeMap<TenantId, u32>>>,
}

/// One open stream; dropping it makes room.
#[derive(Debug)]
pub struct Permit {
    streams: Streams,
    tenant: TenantId,
}

impl Streams {
    /// Opens one.
    ///
    /// # Errors
    /// 429 at [`STREAMS_MAX`].
    pub fn take(&self, tenant: &TenantId) -> Result<Permit, ApiError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(tenant.clone()).or_insert(0);
        if *count >= STREAMS_MAX {
            let message = format!("tenant {tenant} holds {count} streams open here, the most; close some, or follow fewer jobs at once");
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_streams", message));
        }
        *count += 1;
        Ok(Permit { streams: self.clone(), tenant: tenant.clone() })
    }

    /// Streams open in all.
    #[must_use]
    pub fn open(&self) -> u32 {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).values().sum()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.streams.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.tenant) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_its_share_and_gets_it_back() {
        let streams = Streams::default();
        let (a, b) = (TenantId::new("a").unwrap_or_else(|e| panic!("{e}")), TenantId::new("b").unwrap_or_else(|e| panic!("{e}")));
        let held: Vec<_> = (0..STREAMS_MAX).map(|_| streams.take(&a).unwrap_or_else(|e| panic!("{e:?}"))).collect();
        assert!(streams.take(&a).is_err_and(|e| e.status == 429 && e.body.retryable));
        assert!(streams.take(&b).is_ok());
        drop(held);
        assert!(streams.take(&a).is_ok());
        assert_eq!(streams.open(), 0);
    }
}
