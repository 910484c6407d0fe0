//! The OpenAPI document that is kept is the one the code makes, and says what a client needs.

use serde_json::Value;

#[test]
fn the_kept_document_is_the_codes() {
    let made = volley_coordinator::api::openapi_json();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/api/openapi.json");
    if std::env::var_os("VOLLEY_UPDATE").is_some() {
        std::fs::write(path, &made).expect("written");
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        made == kept,
        "coordinator/src/api/openapi.json is not what the code makes; run this test with VOLLEY_UPDATE=1 and look at the difference"
    );
}

#[test]
fn every_operation_is_described_and_every_reference_leads_somewhere() {
    let text = volley_coordinator::api::openapi_json();
    let document: Value = serde_json::from_str(&text).expect("JSON");
    let paths = document["paths"].as_object().expect("paths");
    assert!(paths.len() > 20);
    let mut ids = std::collections::BTreeSet::new();
    for (path, item) in paths {
        for (method, operation) in item.as_object().expect("an item") {
            let summary = operation["summary"].as_str().unwrap_or_default();
            assert!(!summary.is_empty(), "{method} {path}");
            for (status, response) in operation["responses"].as_object().expect("responses") {
                assert!(response["description"].as_str().is_some_and(|text| !text.is_empty()), "{method} {path} {status}");
            }
            let named: Vec<&str> = path.split(['{', '}']).skip(1).step_by(2).collect();
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let mut given: Vec<&str> = parameters.filter(|one| one["in"] == "path").filter_map(|one| one["name"].as_str()).collect();
            given.sort_by_key(|name| named.iter().position(|other| other == name));
            assert_eq!(named, given, "{method} {path}: what the path names and the parameters it has");
            assert!(ids.insert(operation["operationId"].as_str().expect("an id").to_owned()), "{method} {path}: id used twice");
        }
    }
    for part in text.split("\"$ref\": \"#/components/schemas/").skip(1) {
        let name = part.split('"').next().unwrap_or_default();
        assert!(document["components"]["schemas"][name].is_object(), "{name} is not there");
    }
}
