//! A handler that panics: an answer and a line in the log, instead of a connection that breaks off.
//!
//! Owns that answer. Does not own the state: the driver runs elsewhere, and a handler holds nothing of it.

use std::panic::AssertUnwindSafe;

use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::FutureExt;

use super::error::ApiError;

/// Answers with 500 where a handler panicked.
pub async fn answer(request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    // Nothing that the handler changed is used again: its request and its answer are gone.
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => {
            tracing::error!(%method, path, panic = said(&*panic), "a handler of the API panicked; this is a bug, please report it");
            let message = format!(
                "answering {method} {path} failed by a bug of the coordinator; its log has more. Other requests are not affected; please report it"
            );
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message).into_response()
        }
    }
}

/// What a panic said.
pub fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_else(|| "it said nothing".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::body::Body;
    use axum::routing::get;
    use tower::ServiceExt;
    use volley_jobspecs::api::ErrorBody;

    async fn broken() -> &'static str {
        panic!("on purpose")
    }

    #[tokio::test]
    async fn a_panic_is_an_answer_and_the_next_request_is_served() {
        let router = Router::new().route("/broken", get(broken)).route("/", get(async || "ok")).layer(axum::middleware::from_fn(answer));
        let ask =
            async |path: &str| router.clone().oneshot(Request::get(path).body(Body::empty()).expect("a request")).await.expect("an answer");
        let response = ask("/broken").await;
        assert_eq!(response.status(), 500);
        let body = axum::body::to_bytes(response.into_body(), 10_000).await.expect("a body");
        let body: ErrorBody = serde_json::from_slice(&body).expect("JSON");
        assert!(
            body.code == "internal" && !body.retryable && body.message.contains("GET /broken") && !body.message.contains("on purpose"),
            "{body:?}"
        );
        assert_eq!(ask("/").await.status(), 200);
    }
}
