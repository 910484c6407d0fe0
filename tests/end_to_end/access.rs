//! Tokens and tenants.

use serde_json::json;

use crate::support::Cluster;
use crate::support::http::request;
use crate::support::process::until;

#[test]
fn tenants_see_only_what_is_theirs() {
    let Some(cluster) = Cluster::up() else { return };
    let (url, operator) = cluster.access();
    let status = |method: &str, path: &str, token: Option<&str>| request(&url, method, path, token, b"").status;
    for path in ["/v1/jobs", "/v1/workers", "/v1/jobs/j1", "/v1/tenants"] {
        assert_eq!(status("GET", path, None), 401, "{path} without a token");
        assert_eq!(status("GET", path, Some("vt_wrong_token")), 401, "{path} with a wrong token");
    }
    cluster.volley(&["tenant", "add", "red"]).exits(0);
    cluster.volley(&["tenant", "add", "blue"]).exits(0);
    let token = |tenant: &str| {
        let made = cluster.ask(&["--tenant", tenant, "token", "create"]);
        (made["id"].as_str().unwrap().to_owned(), made["token"].as_str().unwrap().to_owned())
    };
    let ((red_id, red), (blue_id, blue)) = (token("red"), token("blue"));
    let spec = json!({ "version": "volley/v1", "name": "mine", "task": { "isolation": "process", "command": "true" } }).to_string();
    let made = request(&url, "POST", "/v1/jobs", Some(&red), spec.as_bytes());
    assert!(made.status < 300, "{made:?}");
    let job = made.json()["job"].as_str().unwrap().to_owned();
    let path = format!("/v1/jobs/{job}");
    assert_eq!(status("GET", &path, Some(&red)), 200);
    assert_eq!(status("GET", &path, Some(&operator)), 200);
    for path in [path.clone(), format!("{path}/tasks"), format!("{path}/results"), format!("{path}/tasks/0/logs"), format!("{path}/events")]
    {
        assert_eq!(status("GET", &path, Some(&blue)), 404, "{path}: another tenant's job is not even there");
    }
    assert_eq!(status("POST", &format!("{path}/cancel"), Some(&blue)), 404);
    let listed = request(&url, "GET", "/v1/jobs", Some(&blue), b"").json();
    assert_eq!(listed["rows"], json!([]));
    let add = json!({ "tenant": "green" }).to_string();
    assert_eq!(request(&url, "POST", "/v1/tenants", Some(&red), add.as_bytes()).status, 403, "only operators make tenants");
    cluster.volley(&["token", "revoke", &red_id]).exits(0);
    assert_eq!(status("GET", &path, Some(&red)), 401, "a revoked token");
    let listed = cluster.volley(&["token", "ls"]).exits(0).stdout;
    assert!(listed.contains(&blue_id) && !listed.contains(&red_id), "{listed}");
    assert!(!listed.contains(blue.rsplit('_').next().unwrap()), "no secret: {listed}");

    until("the level is raised", || cluster.http("GET", "/v1/cluster", b"").json()["level"].as_u64() >= Some(4));
    cluster.ended(&job);
    cluster.volley(&["tenant", "rm", "red"]).exits(0);
    cluster.volley(&["tenant", "rm", "red"]).exits(66);
    cluster.volley(&["tenant", "rm", "default"]).exits(65);
    cluster.volley(&["--tenant", "red", "jobs"]).exits(0);
}

#[test]
fn credentials_are_nobody_elses() {
    use std::os::unix::fs::PermissionsExt as _;
    let Some(cluster) = Cluster::up() else { return };
    for name in ["cluster.json", "cluster/secrets.json", "cluster/nats/server.conf"] {
        let mode = std::fs::metadata(cluster.path(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{name} is {mode:o}");
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: tasks run as the user of the test, who may read everything of it");
        return;
    }
    let files = ["cluster.json", "cluster/secrets.json", "cluster/nats/server.conf"].map(|name| cluster.path(name).display().to_string());
    let command = format!(
        "env | grep -i -e token -e secret -e aws_; cat {} 2>/dev/null; ls {}",
        files.join(" "),
        cluster.path("cluster/s3").display()
    );
    let job = cluster.submit(&cluster.spec(json!({ "count": 1 }), json!({ "command": command }), json!({})));
    cluster.ended(&job);
    let row = cluster.results(&job).remove(0);
    assert_eq!((&row["state"], &row["stdoutTail"].as_str().unwrap_or("")), (&json!("failed"), &""), "{row}");
}
