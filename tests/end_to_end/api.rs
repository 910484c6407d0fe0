//! The API beside jobs: health, metrics, the OpenAPI document, events, paging.

use serde_json::json;

use crate::support::Cluster;
use crate::support::http::request;

#[test]
fn health_metrics_and_documents() {
    let Some(cluster) = Cluster::up() else { return };
    let (url, _) = cluster.access();
    for path in ["/healthz", "/readyz", "/openapi.json"] {
        assert_eq!(request(&url, "GET", path, None, b"").status, 200, "{path}");
    }
    let job = cluster.submit(&cluster.spec(json!({ "count": 5 }), json!({ "command": "true" }), json!({})));
    cluster.ended(&job);
    assert_eq!(request(&url, "GET", "/metrics", None, b"").status, 401, "tasks of this host read nothing");
    let metrics = cluster.http("GET", "/metrics", b"");
    assert!(metrics.status == 200 && metrics.body.contains("volley_"), "{metrics:?}");
    let view = cluster.ask(&["cluster"]);
    assert!(view["sequence"].as_u64().unwrap() > 3 && !view["leader"].as_str().unwrap().is_empty(), "{view}");
    let events = cluster.http("GET", &format!("/v1/jobs/{job}/events"), b"");
    assert!(events.body.contains("data:") && events.body.contains("succeeded"), "{events:?}");
    assert_eq!(cluster.http("GET", "/v1/nothing", b"").status, 404);
    assert_eq!(cluster.http("DELETE", "/v1/workers", b"").status, 405);
}

#[test]
fn the_document_says_which_routes_want_a_token() {
    let Some(cluster) = Cluster::up() else { return };
    let (url, _) = cluster.access();
    let document = request(&url, "GET", "/openapi.json", None, b"").json();
    let mut open = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let filled: Vec<&str> = path.split('/').map(|part| if part.starts_with('{') { "1" } else { part }).collect();
        for (method, operation) in item.as_object().unwrap() {
            let status = request(&url, &method.to_uppercase(), &filled.join("/"), None, b"").status;
            let said = operation["responses"]["401"]["content"]["application/json"]["schema"]["$ref"] == "#/components/schemas/ErrorBody";
            assert_eq!(status == 401, said, "{method} {path}: {status}");
            if !said {
                open.push(path.as_str());
            }
        }
    }
    assert_eq!(open, ["/healthz", "/openapi.json", "/readyz"]);
}

#[test]
fn lists_come_in_pages() {
    let Some(cluster) = Cluster::up() else { return };
    let spec = cluster.spec(json!({ "count": 1 }), json!({ "command": "true" }), json!({ "labels": { "kind": "page" } }));
    let submitted: Vec<String> = (0..5).map(|_| cluster.submit(&spec)).collect();
    let (mut seen, mut after) = (Vec::new(), String::new());
    loop {
        let page = cluster.http("GET", &format!("/v1/jobs?limit=2{after}"), b"").json();
        let rows = page["rows"].as_array().unwrap();
        assert!(rows.len() <= 2);
        seen.extend(rows.iter().map(|row| row["job"].as_str().unwrap().to_owned()));
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    seen.reverse();
    assert_eq!(seen, submitted, "newest first, each once");
    assert_eq!(cluster.http("GET", "/v1/jobs?limit=100000", b"").status, 400);
}
