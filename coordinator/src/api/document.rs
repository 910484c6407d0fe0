//! What the OpenAPI document says of every route, beside what each says of itself.
//!
//! Owns how requests say who asks, and the answers that come before a route is reached. Does not own the routes.

use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, OpenApi, PathItem, Ref, RefOr, Required, ResponseBuilder};

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

/// What a status means where a route doesn't say it.
const MEANINGS: [(&str, &str); 9] = [
    ("200", "What was asked for"),
    ("201", "It was made"),
    ("202", "It will be done"),
    ("204", "It is done"),
    ("404", "There is no such thing, or not for this token"),
    ("409", "It can't be done as things are now"),
    ("413", "The body is larger than is taken here"),
    ("429", "Too many at once, or a quota is used up; the same may succeed later"),
    ("503", "This coordinator can't do it now; the same may succeed later"),
];

/// Adds what all routes have in common to what each says of itself.
pub fn complete(document: &mut OpenApi) {
    // The router's word for the rest of a path is not the document's.
    document.paths.paths =
        std::mem::take(&mut document.paths.paths).into_iter().map(|(path, item)| (path.replace("{*", "{"), item)).collect();
    for (path, item) in &mut document.paths.paths {
        let open = OPEN.contains(&path.as_str());
        for operation in operations(item) {
            if open {
                operation.security = Some(Vec::new());
            } else {
                ANSWERS.iter().for_each(|(status, when)| answer(operation, status, when));
                // The tenant of the path, the query or the body may not be there.
                answer(operation, "404", meaning("404"));
                names_tenant(operation);
            }
            if operation.request_body.is_some() {
                answer(operation, "413", meaning("413"));
            }
            describe(operation);
        }
    }
}

/// Every route takes the name of a tenant.
fn names_tenant(operation: &mut Operation) {
    let parameters = operation.parameters.get_or_insert_default();
    if parameters.iter().any(|parameter| matches!(parameter, RefOr::T(parameter) if parameter.name == "tenant")) {
        return;
    }
    let schema = ObjectBuilder::new().schema_type(Type::String);
    let parameter = ParameterBuilder::new().name("tenant").parameter_in(ParameterIn::Query).required(Required::False);
    let about = "Operators: act for this tenant, and see only what is its own. Others: their own, or 403";
    parameters.push(parameter.description(Some(about)).schema(Some(schema)).build().into());
}

/// Each answer has a description; the format wants one.
fn describe(operation: &mut Operation) {
    for (status, response) in &mut operation.responses.responses {
        let RefOr::T(response) = response else { continue };
        if response.description.is_empty() {
            response.description = meaning(status).to_owned();
        }
    }
}

/// What is said of a status; nothing of one that no route gives.
fn meaning(status: &str) -> &'static str {
    MEANINGS.iter().chain(&ANSWERS).find(|(known, _)| *known == status).map_or("", |(_, meaning)| meaning)
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
