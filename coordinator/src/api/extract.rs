//! Reading requests: path, query, bodies, each with its limit and a clear refusal.
//!
//! Owns the extractors of all routes and the limits of what a request may bring. Does not own what is done with it.

use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use volley_jobspecs::api::{PAGE_ROWS_DEFAULT, PAGE_ROWS_MAX};
use volley_jobspecs::ids::JobId;

use super::error::ApiError;

/// Longest path with query, in bytes: the longest output path (4,095), percent-encoded, would be three times that.
pub const URI_BYTES_MAX: usize = 16 * 1024;
/// Most bytes of all headers: a token, a key and a trace fit hundreds of times.
pub const HEADERS_BYTES_MAX: usize = 32 * 1024;
/// Most bytes of a body that is neither a spec nor an upload.
pub const BODY_BYTES_MAX: usize = 64 * 1024;
/// Most query parameters: 32 labels and everything else fit twice.
pub const QUERY_PARAMETERS_MAX: usize = 100;

/// Path parameters; a path that can't be read is a path that isn't there.
#[derive(Debug, Clone)]
pub struct PathOf<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for PathOf<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        Ok(Self(Path::<T>::from_request_parts(parts, state).await?.0))
    }
}

/// The query as pairs, in order. Every parameter must be asked for: one that no route knows is a mistake worth a word.
#[derive(Debug, Clone)]
pub struct QueryOf(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for QueryOf {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let pairs = Query::<Vec<(String, String)>>::from_request_parts(parts, state).await?.0;
        if pairs.len() > QUERY_PARAMETERS_MAX {
            return Err(ApiError::bad_request(format!("{} query parameters; at most {QUERY_PARAMETERS_MAX} are allowed", pairs.len())));
        }
        Ok(Self(pairs))
    }
}

impl QueryOf {
    /// Refuses parameters that are not among `known`; `tenant` always is (operators name tenants with it).
    ///
    /// # Errors
    /// 400, naming the parameter and what is known.
    pub fn only(self, known: &[&str]) -> Result<Self, ApiError> {
        match self.0.iter().find(|(name, _)| name != "tenant" && !known.contains(&name.as_str())) {
            None => Ok(self),
            Some((name, _)) => {
                let shown: String = name.chars().take(60).collect();
                let allowed = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Err(ApiError::bad_request(format!("unknown query parameter {shown:?}; allowed here: {allowed}")))
            }
        }
    }

    /// The last value of a parameter.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().rfind(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Every value of a parameter, in order.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// A parameter read as something.
    ///
    /// # Errors
    /// 400, saying what is allowed.
    pub fn parse<T: std::str::FromStr>(&self, name: &str, allowed: &str) -> Result<Option<T>, ApiError> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let shown: String = text.chars().take(60).collect();
        let wrong = || ApiError::bad_request(format!("query parameter {name}={shown:?}; allowed: {allowed}"));
        text.parse().map(Some).map_err(|_| wrong())
    }

    /// `true` or `false`; false when it isn't there.
    ///
    /// # Errors
    /// 400 for anything else.
    pub fn flag(&self, name: &str) -> Result<bool, ApiError> {
        Ok(self.parse(name, "true, false")?.unwrap_or(false))
    }

    /// How many rows the answer may have.
    ///
    /// # Errors
    /// 400 beyond [`PAGE_ROWS_MAX`].
    pub fn limit(&self) -> Result<usize, ApiError> {
        let allowed = format!("1 to {PAGE_ROWS_MAX}");
        match self.parse::<u32>("limit", &allowed)? {
            None => Ok(PAGE_ROWS_DEFAULT as usize),
            Some(limit) if (1..=PAGE_ROWS_MAX).contains(&limit) => Ok(limit as usize),
            Some(limit) => Err(ApiError::bad_request(format!("query parameter limit={limit}; allowed: {allowed}"))),
        }
    }
}

/// Reads a job id from a path.
///
/// # Errors
/// 404: there can be no such job.
pub fn job_id(text: &str) -> Result<JobId, ApiError> {
    let shown: String = text.chars().take(60).collect();
    text.parse().map_err(|_| ApiError::not_found(format!("{shown:?} is no job id: one looks like j1042 (`volley jobs` lists them)")))
}

/// Reads a task index from a path.
///
/// # Errors
/// 404: there can be no such task.
pub fn task_index(text: &str) -> Result<u32, ApiError> {
    let shown: String = text.chars().take(60).collect();
    text.parse().map_err(|_| ApiError::not_found(format!("{shown:?} is no task: tasks are counted from 0")))
}

/// Reads a whole body.
///
/// # Errors
/// 413 beyond `bytes_max`, 400 when it breaks off.
pub async fn body(body: Body, bytes_max: usize, hint: &str) -> Result<Bytes, ApiError> {
    axum::body::to_bytes(body, bytes_max).await.map_err(|error| {
        let mut cause: Option<&dyn std::error::Error> = Some(&error);
        while let Some(inner) = cause {
            if inner.to_string().contains("length limit exceeded") {
                return ApiError::too_large(format!("the body has more than {bytes_max} bytes; {hint}"));
            }
            cause = inner.source();
        }
        ApiError::bad_request(format!("the body could not be read: {error}"))
    })
}

/// Reads a small JSON body; an empty one is `T`'s default when `T` has one.
///
/// # Errors
/// 413 and 400 as [`body`]; 400 when it isn't what is asked for.
pub async fn json<T: DeserializeOwned>(bytes: Body, empty: Option<T>) -> Result<T, ApiError> {
    let bytes = body(bytes, BODY_BYTES_MAX, "send less").await?;
    match empty {
        Some(empty) if bytes.trim_ascii().is_empty() => Ok(empty),
        _ => {
            serde_json::from_slice(&bytes).map_err(|error| ApiError::bad_request(format!("the body is not what this path takes: {error}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(pairs: &[(&str, &str)]) -> QueryOf {
        QueryOf(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn a_query_says_what_is_wrong_with_it() {
        let q = query(&[("limit", "5"), ("label", "a=b"), ("label", "c=d")]);
        assert_eq!(q.limit(), Ok(5));
        assert_eq!(q.all("label").collect::<Vec<_>>(), ["a=b", "c=d"]);
        assert!(q.clone().only(&["limit"]).is_err_and(|e| e.body.message.contains("\"label\"")));
        for bad in ["0", "1001", "-1", "x", ""] {
            assert!(query(&[("limit", bad)]).limit().is_err_and(|e| e.status == 400), "{bad}");
        }
        assert_eq!(query(&[]).flag("follow"), Ok(false));
        assert!(query(&[("follow", "1")]).flag("follow").is_err());
    }
}
