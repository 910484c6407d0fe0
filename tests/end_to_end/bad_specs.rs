//! Every spec under `examples/rejected` is refused by the API with a 4xx, and creates nothing.

use serde_json::json;

use crate::support::Cluster;

#[test]
fn what_is_refused_creates_nothing() {
    let Some(cluster) = Cluster::up() else { return };
    let mut specs = 0;
    for entry in std::fs::read_dir("jobspecs/examples/rejected").unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|ext| ext != "json") {
            continue;
        }
        let answer = cluster.http("POST", "/v1/jobs", &std::fs::read(&path).unwrap());
        assert!((400..500).contains(&answer.status), "{}: {answer:?}", path.display());
        let body = answer.json();
        assert_eq!((&body["code"], &body["retryable"]), (&json!("bad_spec"), &json!(false)), "{}: {body}", path.display());
        assert!(
            body["problems"]
                .as_array()
                .is_some_and(|problems| problems.iter().all(|p| p["path"].as_str().is_some_and(|p| p.starts_with('$')))),
            "{body}"
        );
        specs += 1;
    }
    assert!(specs >= 30, "{specs} specs");
    let huge = vec![b' '; 9 << 20];
    assert_eq!(cluster.http("POST", "/v1/jobs", &huge).status, 413);
    let spec = cluster.path("huge.json");
    std::fs::File::create(&spec).and_then(|file| file.set_len(20 << 20)).unwrap();
    let refused = cluster.volley(&["submit", &spec.display().to_string()]).exits(2).stderr;
    assert!(refused.contains("found 20 MiB; put the items in a file") && refused.contains("at most 4.0 MiB"), "{refused}");
    // Of a file's items the server knows what they have once it has read them.
    let (people, spec) = (cluster.path("people.csv").display().to_string(), cluster.path("people.json").display().to_string());
    std::fs::write(&people, "name,age\nanna,7\n").unwrap();
    let job = json!({"version": "volley/v1", "name": "people", "task": {"isolation": "process", "command": ["echo", "${item.nmae}"]}});
    std::fs::write(&spec, job.to_string()).unwrap();
    let refused = cluster.volley(&["submit", &spec, "--items", &people]).exits(2).stderr;
    assert!(refused.contains("task 0") && refused.contains("nmae"), "{refused}");
    assert_eq!(cluster.ask(&["jobs"])["rows"], json!([]));
}
