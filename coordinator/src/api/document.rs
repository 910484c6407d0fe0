//! What the OpenAPI document says of every route, beside what each says of itself.
//!
//! Owns how requests say who asks, and the answers that come before a route is reached. Does not own the routes.

use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, OpenApi, PathItem, Ref, ResponseBuilder};

/// Routes that ask for no token: whoever watches over a process has none, and what programs may do is no secret.
pub const OPEN: [&str; 3] = ["/healthz", "/readyz", "/openapi.json"];

/// Answers that every other route may give, and when.
const ANSWERS: [(&str, &str); 4] = [
    ("400", "A parameter is wrong, or not known"),
    ("401", "No token, or one that is not known or was revoked"),
    ("403", "The token may not do this, or not for that tenant"),
    ("503", "This coordinator can't do it now, such as while it catches up; the same may succeed later"),
];

/// How requests say who asks.
pub struct Bearer;

impl utoipa::Modify for Bearer {
    fn modify(&self, document: &mut OpenApi) {
        let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        document.components.get_or_insert_default().add_security_scheme("token", scheme);
        document.security = Some(vec![SecurityRequirement::new("token", Vec::<String>::new())]);
    }
}

/// Adds what all routes have in common to what each says of itself.
pub fn complete(document: &mut OpenApi) {
    for (path, item) in &mut document.paths.paths {
        let open = OPEN.contains(&path.as_str());
        for operation in operations(item) {
            if open {
                operation.security = Some(Vec::new());
            } else {
                ANSWERS.iter().for_each(|(status, when)| answer(operation, status, when));
            }
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.put, &mut item.post, &mut item.delete].into_iter().flatten()
}

fn answer(operation: &mut Operation, status: &str, when: &str) {
    let made = || {
        let body = Content::new(Some(Ref::from_schema_name("ErrorBody")));
        ResponseBuilder::new().description(when).content("application/json", body).build().into()
    };
    operation.responses.responses.entry(status.to_owned()).or_insert_with(made);
}
