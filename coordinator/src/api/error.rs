//! What the API answers when it can't do what was asked.
//!
//! Owns the mapping of every error to a status, a stable code, whether to try again, and words for people. Does not own the words
//! of the errors themselves.

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use volley_jobspecs::api::{ErrorBody, ProblemView};
use volley_jobspecs::ids::IdError;
use volley_jobspecs::problem::Problems;

use crate::driver::RequestError;
use crate::state::effects::Refusal;
use crate::state::rows::RowsError;

/// Seconds a client should wait before it repeats a request that was answered with 429 or 503.
const RETRY_AFTER_S: u64 = 1;

/// An answer that is no success.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// What it says.
    pub body: ErrorBody,
}

impl ApiError {
    /// An error with these words.
    #[must_use]
    pub fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let retryable = matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS);
        Self { status, body: ErrorBody { code: code.to_owned(), message: message.into(), retryable, problems: Vec::new() } }
    }

    /// 400: the request itself is wrong.
    #[must_use]
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    /// 400: one problem of the spec.
    #[must_use]
    pub fn bad_spec(path: &str, message: impl Into<String>) -> Self {
        let message = message.into();
        let mut error = Self::new(StatusCode::BAD_REQUEST, "bad_spec", format!("{path}: {message}"));
        error.body.problems = vec![ProblemView { path: path.to_owned(), message }];
        error
    }

    /// 404.
    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    /// 409: the state of things doesn't allow it.
    #[must_use]
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "conflict", message)
    }

    /// 413.
    #[must_use]
    pub fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    }

    /// 503: later it may well be done.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
    }

    /// What a failure of the bucket means for a request.
    #[must_use]
    pub fn store(kind: volley_store::ErrorKind, message: impl Into<String>) -> Self {
        match kind {
            volley_store::ErrorKind::NotFound => Self::not_found(message),
            volley_store::ErrorKind::TooLarge => Self::too_large(message),
            // The bucket is the cluster's: whatever is wrong with it, the request is right and may be repeated.
            volley_store::ErrorKind::Unavailable
            | volley_store::ErrorKind::Denied
            | volley_store::ErrorKind::Rejected
            | volley_store::ErrorKind::Precondition
            | volley_store::ErrorKind::Corrupt
            | volley_store::ErrorKind::Local => Self::new(StatusCode::SERVICE_UNAVAILABLE, "storage_unavailable", message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body)).into_response();
        let headers = response.headers_mut();
        if matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_S));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<Problems> for ApiError {
    fn from(problems: Problems) -> Self {
        let mut error = Self::new(StatusCode::BAD_REQUEST, "bad_spec", problems.to_string());
        let views = problems.0.iter().map(|p| ProblemView { path: p.path.clone(), message: p.explanation() });
        error.body.problems = views.collect();
        error
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::NoJob(_)
            | Refusal::NoTenant(_)
            | Refusal::NoWorker(_)
            | Refusal::NoToken(_)
            | Refusal::VolumeMissing(_)
            | Refusal::SnapshotMissing { .. } => Self::not_found(message),
            Refusal::KeyReused { .. }
            | Refusal::BuiltIn(_)
            | Refusal::TenantBusy { .. }
            | Refusal::Ended(_)
            | Refusal::NotEnded(_)
            | Refusal::Removed(_)
            | Refusal::VolumeExists(_)
            | Refusal::VolumeHeld { .. }
            | Refusal::VolumeShrinks { .. }
            | Refusal::SnapshotExists { .. }
            | Refusal::NothingToRerun(_) => Self::new(StatusCode::CONFLICT, "conflict", message),
            Refusal::VolumeQuota { .. } => Self::new(StatusCode::CONFLICT, "quota", message),
            Refusal::Quota { .. } => Self::new(StatusCode::TOO_MANY_REQUESTS, "quota", message),
            Refusal::NeverFits { .. } => Self::bad_spec("$.items", message),
            Refusal::NoVolume { slot, .. } | Refusal::NoSnapshot { slot, .. } => {
                let place = format!("$.task.volumes[{slot}].volume");
                let text = message.strip_prefix(&format!("{place}: ")).unwrap_or(&message);
                Self::bad_spec(&place, text)
            }
            Refusal::Priority { .. } => {
                let text = message.strip_prefix("$.priority: ").unwrap_or(&message);
                Self::bad_spec("$.priority", text)
            }
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::Refused(refusal) => refusal.into(),
            RequestError::LogFull { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message),
            RequestError::TooLarge { .. } => Self::too_large(message),
            RequestError::Log(_) | RequestError::Timeout(_) | RequestError::Stopping => Self::unavailable(message),
        }
    }
}

impl From<RowsError> for ApiError {
    fn from(error: RowsError) -> Self {
        // Another coordinator has its own rows, so the same request may succeed there.
        Self::unavailable(error.to_string())
    }
}

impl From<IdError> for ApiError {
    fn from(error: IdError) -> Self {
        match error {
            IdError::Job(_) => Self::not_found(error.to_string()),
            IdError::Name(_) | IdError::Volume(_) | IdError::Snapshot(_) => Self::bad_request(error.to_string()),
        }
    }
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        Self::not_found(format!("no such path: {}", rejection.body_text()))
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self::bad_request(format!("the query can't be read: {}", rejection.body_text()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::ids::{JobId, TenantId};

    #[test]
    fn a_job_that_can_never_fit_is_not_asked_to_try_later() {
        let tenant = TenantId::new("t").unwrap_or_else(|e| panic!("{e}"));
        let never = ApiError::from(Refusal::NeverFits { tenant: tenant.clone(), what: "tasks", max: 10, brings: 11 });
        assert_eq!((never.status, never.body.code.as_str(), never.body.retryable), (StatusCode::BAD_REQUEST, "bad_spec", false));
        let later = ApiError::from(Refusal::Quota { tenant, what: "tasks", max: 10, has: 1, brings: 10 });
        assert_eq!((later.status, later.body.retryable), (StatusCode::TOO_MANY_REQUESTS, true));
    }

    #[test]
    fn refusals_are_never_the_servers_fault() {
        let refusals = [
            Refusal::NoJob(JobId(1)),
            Refusal::NoToken("x".into()),
            Refusal::Ended(JobId(1)),
            Refusal::NotEnded(JobId(1)),
            Refusal::Removed(JobId(1)),
            Refusal::NothingToRerun(JobId(1)),
            Refusal::KeyReused { key: "k".into(), job: JobId(1) },
        ];
        for refusal in refusals {
            assert!(ApiError::from(refusal.clone()).status.is_client_error(), "{refusal}");
        }
    }
}
