//! Prints the API's OpenAPI document; `cargo run --example openapi > coordinator/src/api/openapi.json` renews the one that is kept.

fn main() {
    print!("{}", volley_coordinator::api::openapi_json());
}
