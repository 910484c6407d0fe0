//! The HTTP API against a real log and a real bucket, from submit to results.

mod support;

use std::time::Duration;

use axum::http::Method;
use serde_json::{Value, json};
use support::{BOOTSTRAP, Cluster, World, id, success, worker};
use tokio_util::sync::CancellationToken;
use volley_coordinator::config::CoordinatorConfig;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::keys;
use volley_jobspecs::wire;
use volley_jobspecs::wire::report::{AttemptEnd, Ending, Outputs, Stream};

fn spec(name: &str, items: Value) -> Value {
    json!({ "version": "volley/v1", "name": name, "labels": { "team": name }, "items": items,
        "task": { "isolation": "process", "command": ["echo", "${item}"] } })
}

async fn cluster() -> Option<Cluster> {
    Some(World::new().await?.cluster().await)
}

async fn with_worker() -> Option<(Cluster, CancellationToken)> {
    let cluster = cluster().await?;
    let stop = CancellationToken::new();
    worker(&cluster.world.nats.url, "w1", 4, stop.clone(), |name| Some(success(name))).await;
    Some((cluster, stop))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_goes_from_submit_to_manifest() {
    let Some((cluster, _stop)) = with_worker().await else { return };
    let answer = cluster.post("/v1/jobs", spec("first", json!({ "inline": ["a", "b", "c"] })).to_string()).await.expect(201);
    assert!(answer.headers.contains_key("volley-sequence"));
    let submitted = answer.json();
    assert_eq!((&submitted["tasks"], &submitted["existed"]), (&json!(3), &json!(false)));
    let job = submitted["job"].as_str().expect("a job").to_owned();

    let rows = cluster.get(&format!("/v1/jobs/{job}/results?follow=true")).await.expect(200).lines();
    let mut indexes: Vec<_> = rows.iter().map(|row| row["index"].as_u64()).collect();
    indexes.sort_unstable();
    assert_eq!(indexes, [Some(0), Some(1), Some(2)]);
    assert!(rows.iter().all(|row| row["state"] == "succeeded" && row["valid"] == true && row["attempts"] == 1), "{rows:?}");
    let after = rows[1]["cursor"].as_str().expect("a cursor");
    assert_eq!(cluster.get(&format!("/v1/jobs/{job}/results?after={after}")).await.expect(200).lines(), rows[2..]);

    let view = cluster.ended(&job).await;
    assert_eq!((&view["state"], &view["exitCode"], &view["tasks"]["succeeded"]), (&json!("succeeded"), &json!(0), &json!(3)));
    assert_eq!(cluster.get(&format!("/v1/jobs/{job}/spec")).await.expect(200).json()["name"], "first");
    let tasks = cluster.get(&format!("/v1/jobs/{job}/tasks?limit=2")).await.expect(200).json();
    assert_eq!((tasks["rows"].as_array().map(Vec::len), &tasks["next"]), (Some(2), &json!("1")));
    let tasks = cluster.get(&format!("/v1/jobs/{job}/tasks?after=1")).await.expect(200).json();
    assert_eq!((&tasks["rows"][0]["index"], &tasks["next"]), (&json!(2), &Value::Null));
    let attempts = cluster.get(&format!("/v1/jobs/{job}/tasks/1/attempts")).await.expect(200).json();
    assert_eq!((&attempts[0]["worker"], &attempts[0]["runMs"]), (&json!("w1"), &json!(2)));
    cluster.get(&format!("/v1/jobs/{job}/tasks/3")).await.expect(404);
    let explanation = cluster.get(&format!("/v1/jobs/{job}/tasks/0/explain")).await.expect(200).json();
    assert!(explanation["summary"].as_str().is_some_and(|s| s.contains("succeeded in try 1 on worker w1")), "{explanation}");
    let explanation = cluster.get(&format!("/v1/jobs/{job}/explain")).await.expect(200).json();
    assert!(explanation["summary"].as_str().is_some_and(|s| s.contains("3 of 3 tasks succeeded")), "{explanation}");

    let manifest = wait_for(&cluster, &keys::job_manifest(id(&job), 1)).await;
    let manifest: Value = serde_json::from_slice(&manifest).expect("JSON");
    assert_eq!((&manifest["job"]["state"], &manifest["pages"][0]["rows"]), (&json!("succeeded"), &json!(3)));
    let page = cluster.store.get(manifest["pages"][0]["key"].as_str().expect("a key"), 1 << 20).await.expect("the page");
    assert_eq!(page.iter().filter(|b| **b == b'\n').count(), 3);

    cluster.call(Method::DELETE, &format!("/v1/jobs/{job}"), Some(BOOTSTRAP), &[], "").await.expect(202);
    for _ in 0..200 {
        if cluster.get(&format!("/v1/jobs/{job}")).await.status == 404 {
            assert!(cluster.store.list(&keys::job_prefix(id(&job)), None, 10).await.expect("a list").objects.is_empty());
            return cluster.stop().await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the job was not forgotten");
}

async fn wait_for(cluster: &Cluster, key: &str) -> bytes::Bytes {
    for _ in 0..200 {
        if let Ok(bytes) = cluster.store.get(key, 1 << 20).await {
            return bytes;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{key} did not come");
}

#[tokio::test(flavor = "multi_thread")]
async fn items_from_a_file_are_cut_into_pages() {
    let Some((cluster, _stop)) = with_worker().await else { return };
    let lines: String = (0..2_500).map(|i| format!("{{\"n\":{i}}}\n")).collect();
    let upload = cluster.post("/v1/uploads", lines.clone()).await.expect(201).json();
    assert_eq!(upload["bytes"], lines.len());
    let of_upload = spec("file", json!({ "jsonl": { "upload": upload["id"] } })).to_string().replace("${item}", "${item.n}");

    let plan = cluster.post("/v1/jobs?dryRun=true", of_upload.clone()).await.expect(200).json();
    assert_eq!(
        (&plan["tasks"], &plan["last"][2]["command"][1], &plan["first"][0]["command"][1]),
        (&json!(2500), &json!("2499"), &json!("0"))
    );
    assert!(cluster.get("/v1/jobs").await.expect(200).json()["rows"].as_array().is_some_and(Vec::is_empty));

    let job = cluster.post("/v1/jobs", of_upload).await.expect(201).json()["job"].as_str().expect("a job").to_owned();
    let view = cluster.ended(&job).await;
    assert_eq!(view["tasks"]["succeeded"], 2_500);
    let (facts, _) = volley_coordinator::state::rows::header(cluster.running.handle.rows(), id(&job)).expect("rows").expect("a job");
    let hash = facts.plan.items.expect("pages");
    let index = cluster.store.get(&keys::items_index(&hash), 1 << 20).await.expect("the index");
    let index = volley_jobspecs::pages::ItemsIndex::from_json(&index).expect("an index");
    assert_eq!((index.count, index.pages.len(), hash.split('-').next()), (2_500, 3, Some(index.hash().as_str())));
    cluster.store.get(&keys::items_page(&hash, 2), 1 << 20).await.expect("the last page");

    let bad = cluster.post("/v1/uploads", "{}\n{\n").await.expect(201).json();
    let of = |source: Value| spec("bad", json!({ "jsonl": source })).to_string();
    let refused = cluster.post("/v1/jobs", of(json!({ "upload": bad["id"] }))).await.expect(400).json();
    assert_eq!((&refused["code"], &refused["problems"][0]["path"]), (&json!("bad_spec"), &json!("$.items.jsonl.upload")));
    assert!(refused["message"].as_str().is_some_and(|m| m.contains("line 2")), "{refused}");
    for source in [
        json!({ "upload": "nothing" }),
        json!({ "s3": "s3://cell/nothing" }),
        json!({ "s3": "s3://cell/specs/x" }),
        json!({ "s3": "s3://other/x" }),
    ] {
        let refused = cluster.post("/v1/jobs", of(source.clone())).await.expect(400).json();
        assert_eq!(refused["code"], "bad_spec", "{source} {refused}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_key_is_the_same_job() {
    let Some(cluster) = cluster().await else { return };
    let (one, two) = (spec("one", json!({ "count": 2 })).to_string(), spec("two", json!({ "count": 2 })).to_string());
    let submit =
        async |body: &str| cluster.call(Method::POST, "/v1/jobs", Some(BOOTSTRAP), &[("idempotency-key", "k1")], body.to_owned()).await;
    let first = submit(&one).await.expect(201).json();
    let again = submit(&one).await.expect(200).json();
    assert_eq!((&first["job"], &again["existed"]), (&again["job"], &json!(true)));
    let refused = submit(&two).await.expect(409).json();
    assert!(refused["code"] == "conflict" && refused["retryable"] == false, "{refused}");
    for bad in ["", "a b", &"x".repeat(200)] {
        cluster.call(Method::POST, "/v1/jobs", Some(BOOTSTRAP), &[("idempotency-key", bad)], one.clone()).await.expect(400);
    }
    assert_eq!(cluster.get("/v1/jobs").await.json()["rows"].as_array().map(Vec::len), Some(1));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_see_their_own_and_operators_all() {
    let Some(cluster) = cluster().await else { return };
    for bad in [None, Some("x"), Some("vt_bootstrap_wrong"), Some("vt_nobody_0123"), Some("vt__")] {
        let refused = cluster.call(Method::GET, "/v1/jobs", bad, &[], "").await.expect(401);
        assert_eq!((refused.json()["code"].as_str(), refused.headers.contains_key("www-authenticate")), (Some("unauthorized"), true));
    }
    cluster.post("/v1/tokens", json!({ "tenant": "acme" }).to_string()).await.expect(404);
    cluster.post("/v1/tenants", json!({ "tenant": "acme", "activeTasksMax": 10 }).to_string()).await.expect(201);
    let token = cluster.post("/v1/tokens", json!({ "tenant": "acme" }).to_string()).await.expect(201).json();
    let (secret, token_id) = (token["token"].as_str().expect("a token"), token["id"].as_str().expect("an id"));

    let theirs = cluster.submit(&spec("theirs", json!({ "count": 1 }))).await;
    let ours =
        cluster.call(Method::POST, "/v1/jobs", Some(secret), &[], spec("ours", json!({ "count": 1 })).to_string()).await.expect(201).json();
    let ours = ours["job"].as_str().expect("a job");
    for path in ["", "/spec", "/tasks", "/results", "/tasks/0", "/tasks/0/attempts", "/tasks/0/logs", "/tasks/0/outputs", "/events"] {
        cluster.call(Method::GET, &format!("/v1/jobs/{theirs}{path}"), Some(secret), &[], "").await.expect(404);
    }
    for verb in ["cancel", "pause", "resume", "rerun"] {
        cluster.call(Method::POST, &format!("/v1/jobs/{theirs}/{verb}"), Some(secret), &[], "").await.expect(404);
    }
    let listed = async |path: &str, token: &str| {
        let rows = cluster.call(Method::GET, path, Some(token), &[], "").await.expect(200).json();
        rows["rows"].as_array().expect("rows").iter().map(|row| row["name"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(listed("/v1/jobs", secret).await, ["ours"]);
    assert_eq!(listed("/v1/jobs", BOOTSTRAP).await, ["ours", "theirs"]);
    assert_eq!(listed("/v1/jobs?tenant=acme", BOOTSTRAP).await, ["ours"]);
    assert_eq!(listed("/v1/jobs?label=team=theirs", BOOTSTRAP).await, ["theirs"]);
    assert_eq!(listed("/v1/jobs?limit=1", BOOTSTRAP).await, ["ours"]);
    assert_eq!(listed(&format!("/v1/jobs?after={ours}"), BOOTSTRAP).await, ["theirs"]);
    assert_eq!(listed("/v1/jobs?state=succeeded", BOOTSTRAP).await, Vec::<String>::new());

    let forbidden = [
        (Method::GET, "/v1/tenants"),
        (Method::POST, "/v1/tenants"),
        (Method::DELETE, "/v1/tenants/acme"),
        (Method::GET, "/v1/tokens"),
        (Method::POST, "/v1/tokens"),
        (Method::DELETE, "/v1/tokens/x"),
        (Method::POST, "/v1/workers/w/drain"),
        (Method::GET, "/metrics"),
        (Method::GET, "/v1/jobs?tenant=default"),
    ];
    for (method, path) in forbidden {
        cluster.call(method, path, Some(secret), &[], "{}").await.expect(403);
    }
    let quota =
        cluster.call(Method::POST, "/v1/jobs", Some(secret), &[], spec("big", json!({ "count": 10 })).to_string()).await.expect(429).json();
    assert!(quota["code"] == "quota" && quota["retryable"] == true, "{quota}");
    let huge = cluster.call(Method::POST, "/v1/jobs", Some(secret), &[], spec("huge", json!({ "count": 11 })).to_string()).await;
    let huge = huge.expect(400).json();
    assert!(huge["retryable"] == false && huge["problems"][0]["path"] == "$.items", "{huge}");
    cluster.post(&format!("/v1/jobs/{ours}/pause"), "").await.expect(200);
    cluster
        .call(Method::POST, &format!("/v1/jobs/{ours}/cancel"), Some(secret), &[], json!({ "reason": "enough" }).to_string())
        .await
        .expect(200);

    cluster.call(Method::DELETE, &format!("/v1/tokens/{token_id}"), Some(BOOTSTRAP), &[], "").await.expect(204);
    cluster.call(Method::GET, "/v1/jobs", Some(secret), &[], "").await.expect(401);
    removing_a_tenant(&cluster, theirs).await;
    let metrics = cluster.get("/metrics").await.expect(200).text();
    assert!(metrics.contains("volley_accept_jobs_total 3\n"), "{metrics}");
    cluster.stop().await;
}

/// `acme` has only ended jobs.
async fn removing_a_tenant(cluster: &Cluster, theirs: String) {
    cluster.level(wire::LEVEL_TENANTS).await;
    let delete = async |path: &str| cluster.call(Method::DELETE, path, Some(BOOTSTRAP), &[], "").await;
    let token = cluster.post("/v1/tokens", json!({ "tenant": "acme" }).to_string()).await.expect(201).json();
    let secret = token["token"].as_str().expect("a token");
    let listed = cluster.get("/v1/tokens").await.expect(200).text();
    let rows: Value = serde_json::from_str(&listed).expect("JSON");
    assert_eq!((rows.as_array().map(Vec::len), &rows[0]["id"], &rows[0]["tenant"]), (Some(1), &token["id"], &json!("acme")), "{rows}");
    assert!(rows[0]["created"].is_string() && !listed.contains(secret.rsplit('_').next().unwrap_or_default()), "{listed}");
    assert_eq!(cluster.get("/v1/tokens?tenant=default").await.expect(200).json(), json!([]));

    let job = cluster.call(Method::POST, "/v1/jobs", Some(secret), &[], spec("held", json!({ "count": 1 })).to_string()).await;
    let job = job.expect(201).json()["job"].as_str().expect("a job").to_owned();
    let busy = delete("/v1/tenants/acme").await.expect(409).json();
    assert!(busy["message"].as_str().is_some_and(|text| text.contains("1 job that has not ended")), "{busy}");
    delete("/v1/tenants/default").await.expect(409);
    delete("/v1/tenants/nobody").await.expect(404);
    cluster.post(&format!("/v1/jobs/{job}/cancel"), "").await.expect(200);
    delete("/v1/tenants/acme").await.expect(204);
    delete("/v1/tenants/acme").await.expect(404);
    cluster.call(Method::GET, "/v1/jobs", Some(secret), &[], "").await.expect(401);
    assert_eq!(cluster.get("/v1/tokens").await.expect(200).json(), json!([]));
    // What it left is seen by operators, and does not begin again.
    cluster.get(&format!("/v1/jobs/{job}")).await.expect(200);
    cluster.post(&format!("/v1/jobs/{job}/rerun"), "").await.expect(404);
    cluster.get(&format!("/v1/jobs/{theirs}")).await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_accounts_for_every_task() {
    let Some(cluster) = cluster().await else { return };
    let job = cluster.submit(&spec("idle", json!({ "count": 1_500 }))).await;
    let explanation = cluster.get(&format!("/v1/jobs/{job}/tasks/7/explain")).await.expect(200).json();
    assert!(explanation["summary"].as_str().is_some_and(|s| s.contains("no worker has joined")), "{explanation}");
    cluster.call(Method::DELETE, &format!("/v1/jobs/{job}"), Some(BOOTSTRAP), &[], "").await.expect(409);
    cluster.post(&format!("/v1/jobs/{job}/rerun"), "").await.expect(409);
    let view = cluster.post(&format!("/v1/jobs/{job}/cancel"), json!({ "reason": "enough" }).to_string()).await.expect(200).json();
    assert_eq!((&view["state"], &view["reason"], &view["exitCode"]), (&json!("cancelled"), &json!("enough"), &json!(4)));
    cluster.post(&format!("/v1/jobs/{job}/cancel"), "").await.expect(409);
    let rows = cluster.get(&format!("/v1/jobs/{job}/results?follow=true")).await.expect(200).lines();
    assert!(rows.iter().zip(0..).all(|(row, index)| row["index"] == index && row["state"] == "cancelled" && row["valid"] == false));
    assert_eq!(rows.len(), 1_500);
    let after = rows[1_400]["cursor"].as_str().expect("a cursor");
    assert_eq!(cluster.get(&format!("/v1/jobs/{job}/results?after={after}")).await.lines().len(), 99);
    let page = cluster.get(&format!("/v1/jobs/{job}/tasks?state=waiting")).await.expect(200).json();
    assert_eq!((page["rows"].as_array().map(Vec::len), &page["next"]), (Some(0), &Value::Null));
    let events = cluster.get(&format!("/v1/jobs/{job}/events")).await.expect(200).text();
    assert!(events.contains("event: job\n") && events.contains("\"cancelled\""), "{events}");
    let manifest: Value = serde_json::from_slice(&wait_for(&cluster, &keys::job_manifest(id(&job), 1)).await).expect("JSON");
    assert_eq!(manifest["neverStarted"]["count"], 1_500);
    let view = cluster.post(&format!("/v1/jobs/{job}/rerun"), "").await.expect(200).json();
    assert_eq!((&view["round"], &view["tasks"]["waiting"]), (&json!(2), &json!(1_500)));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rerun_supersedes_the_rows_of_what_it_runs_again() {
    let Some(cluster) = cluster().await else { return };
    cluster.level(wire::LEVEL_ROUNDS).await;
    let stop = CancellationToken::new();
    // Task 1 fails until its third try, so twice in the first round of two.
    worker(&cluster.world.nats.url, "w1", 4, stop, |name| {
        let fails = name.index == 1 && name.number < 3;
        Some(if fails { AttemptEnd { ending: Ending::Failed(FailureClass::ExitCode), ..success(name) } } else { success(name) })
    })
    .await;
    let mut spec = spec("again", json!({ "count": 3 }));
    spec["task"]["retry"] = json!({ "attempts": 2, "backoff": { "initial": "1ms" } });
    let job = cluster.submit(&spec).await;
    assert_eq!(cluster.ended(&job).await["tasks"]["failed"], 1);
    let states = async |query: &str| {
        let rows = cluster.get(&format!("/v1/jobs/{job}/results{query}")).await.expect(200).lines();
        let mut states: Vec<_> = rows.iter().map(|row| (row["index"].as_u64(), row["state"].clone(), row["superseded"] == true)).collect();
        states.sort_by_key(|(index, state, _)| (*index, state.to_string()));
        states
    };
    let good = |index| (Some(index), json!("succeeded"), false);
    assert_eq!(states("").await, [good(0), (Some(1), json!("failed"), false), good(2)]);
    cluster.post(&format!("/v1/jobs/{job}/rerun"), "").await.expect(200);
    assert_eq!(cluster.ended(&job).await["state"], "succeeded");
    assert_eq!(states("").await, [good(0), good(1), good(2)]);
    assert_eq!(states("?follow=true").await, [good(0), good(1), good(2)]);
    assert_eq!(states("?superseded=true").await, [good(0), (Some(1), json!("failed"), true), good(1), good(2)]);
    let manifest: Value = serde_json::from_slice(&wait_for(&cluster, &keys::job_manifest(id(&job), 2)).await).expect("JSON");
    assert_eq!(manifest["pages"][0]["rows"], 3, "{manifest}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_deadline_says_what_was_waited_for() {
    let Some(cluster) = cluster().await else { return };
    cluster.level(wire::LEVEL_ROUNDS).await;
    let mut spec = spec("late", json!({ "count": 3 }));
    spec["task"]["timeouts"] = json!({ "queue": "300ms" });
    let job = cluster.submit(&spec).await;
    let waiting = cluster.get(&format!("/v1/jobs/{job}/explain")).await.expect(200).json();
    assert!(
        waiting["summary"].as_str().is_some_and(|s| s.contains("no worker has joined"))
            && waiting["details"][0] == "3 of 3 tasks wait for a worker",
        "{waiting}"
    );
    let view = cluster.ended(&job).await;
    assert_eq!((&view["tasks"]["infraFailed"], &view["exitCode"]), (&json!(3), &json!(3)), "{view}");
    let rows = cluster.get(&format!("/v1/jobs/{job}/results")).await.expect(200).lines();
    let told = |text: &Value| text.as_str().is_some_and(|text| text.contains("within 300 ms") && text.contains("no worker had joined"));
    assert!(rows.len() == 3 && rows.iter().all(|row| row["class"] == "queue_timeout" && told(&row["message"])), "{rows:?}");
    for path in ["tasks/1/explain", "explain"] {
        let explained = cluster.get(&format!("/v1/jobs/{job}/{path}")).await.expect(200).json();
        assert!(told(&explained["summary"]) && !explained["next"].as_array().expect("a list").is_empty(), "{path}: {explained}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_told_clearly() {
    let Some(cluster) = cluster().await else { return };
    let too_large = cluster.post("/v1/jobs", vec![b' '; 4 * 1024 * 1024 + 1]).await.expect(413).json();
    assert!(too_large["message"].as_str().is_some_and(|m| m.contains("items.jsonl")), "{too_large}");
    cluster.post("/v1/tenants", vec![b' '; 70_000]).await.expect(413);
    cluster.post("/v1/jobs", spec("x", json!({ "count": 10_000_001 })).to_string()).await.expect(400);
    cluster.get(&format!("/v1/jobs?name={}", "x".repeat(20_000))).await.expect(414);
    cluster.call(Method::GET, "/v1/jobs", Some(BOOTSTRAP), &[("x-long", &"x".repeat(40_000))], "").await.expect(431);
    for bad in ["limit=0", "limit=1001", "limit=x", "after=x", "state=x", "label=x", "unknown=1", "tenant=a.b"] {
        let refused = cluster.get(&format!("/v1/jobs?{bad}")).await.expect(400).json();
        assert_eq!(refused["code"], "bad_request", "{bad}");
    }
    cluster.call(Method::PATCH, "/v1/jobs", Some(BOOTSTRAP), &[], "").await.expect(405);
    cluster.get("/v1/nothing").await.expect(404);
    cluster.get("/v1/jobs/42").await.expect(404);
    cluster.get("/v1/jobs/j42").await.expect(404);
    cluster.get("/v1/jobs/%ff").await.expect(404);
    cluster.call(Method::GET, "/v1/jobs", Some(BOOTSTRAP), &[("volley-sequence", "x")], "").await.expect(400);
    let behind = cluster.call(Method::GET, "/v1/jobs", Some(BOOTSTRAP), &[("volley-sequence", "999999999")], "").await.expect(503);
    assert!(behind.json()["retryable"] == true && behind.headers.contains_key("retry-after"));
    let problems = cluster
        .post("/v1/jobs", r#"{"version":"volley/v1","name":"a b","task":{"isolation":"process","comand":"x"}}"#)
        .await
        .expect(400)
        .json();
    assert!(problems["problems"].as_array().is_some_and(|p| p.len() >= 2), "{problems}");
    // A spec that is too large for the log lies in the bucket.
    let big = spec("big", json!({ "inline": (0..200).map(|i| format!("{i}{}", "x".repeat(1_000))).collect::<Vec<_>>() }));
    let job = cluster.submit(&big).await;
    assert_eq!(
        cluster.get(&format!("/v1/jobs/{job}/spec")).await.expect(200).json()["items"]["inline"].as_array().map(Vec::len),
        Some(200)
    );
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_and_kept_logs_come_back_and_failed_ones_are_swept() {
    let Some(cluster) = cluster().await else { return };
    let stop = CancellationToken::new();
    let kept = |bytes: &[u8], stored| {
        Some(Stream { bytes: bytes.len() as u64, tail: bytes[bytes.len().saturating_sub(4)..].to_vec().into(), stored, truncated: false })
    };
    worker(&cluster.world.nats.url, "w1", 2, stop, move |name| {
        let mut end = success(name);
        end.stdout = kept(b"whole stdout\n", true);
        end.stderr = kept(b"err\n", false);
        end.outputs = Some(Outputs { files: 1, bytes: 5 });
        if name.number == 1 {
            end.ending = Ending::Failed(FailureClass::ExitCode);
            end.code = Some(3);
        }
        Some(end)
    })
    .await;
    let mut spec = spec("files", json!({ "count": 1 }));
    spec["task"]["retry"] = json!({ "attempts": 2, "backoff": { "initial": "1ms" } });
    let job = cluster.submit(&spec).await;
    cluster.ended(&job).await;
    let ended = volley_coordinator::state::rows::attempts(cluster.running.handle.rows(), id(&job), 0).expect("rows");
    let names: Vec<_> = ended.iter().map(|(_, row)| row.end.name).collect();
    assert_eq!(names.len(), 2);
    for name in &names {
        let put = async |key: String, bytes: &'static [u8]| _ = cluster.store.put(&key, bytes.into()).await.expect("put");
        put(keys::attempt_manifest(name), br#"[{"path":"a/b.txt","bytes":5,"sha256":"00"}]"#).await;
        put(keys::attempt_output(name, "a/b.txt"), b"hello").await;
        put(keys::attempt_log(name, "stdout"), b"whole stdout\n").await;
    }
    let at = format!("/v1/jobs/{job}/tasks/0");
    assert_eq!(cluster.get(&format!("{at}/outputs")).await.expect(200).json()[0]["path"], "a/b.txt");
    let file = cluster.get(&format!("{at}/outputs/a/b.txt")).await.expect(200);
    assert_eq!((file.text().as_str(), file.headers["content-length"].to_str().ok()), ("hello", Some("5")));
    for none in ["outputs/nothing", "outputs/a/../a/b.txt", "outputs/a//b.txt", "outputs?attempt=9", "logs?attempt=9"] {
        cluster.get(&format!("{at}/{none}")).await.expect(404);
    }
    cluster.get(&format!("{at}/logs?stream=x")).await.expect(400);
    assert_eq!(cluster.get(&format!("{at}/logs?stream=stdout")).await.expect(200).text(), "whole stdout\n");
    assert_eq!(cluster.get(&format!("{at}/logs")).await.expect(200).text(), "whole stdout\nerr\n");
    assert_eq!(cluster.get(&format!("{at}/logs?follow=true&attempt=1")).await.expect(200).text(), "whole stdout\nerr\n");

    use volley_coordinator::trail::Trailer;
    let objects = volley_coordinator::io::objects::Objects::new(
        cluster.store.clone(),
        cluster.running.handle.rows().clone(),
        Default::default(),
        cluster.running.app.volumes.clone(),
    );
    assert!(objects.trail(id(&job), volley_jobspecs::wire::record::Trailing::FailedObjects).await);
    let left = cluster.store.list(&format!("jobs/{job}/main/"), None, 100).await.expect("a list");
    assert!(left.objects.len() == 3 && left.objects.iter().all(|o| o.key.starts_with(&keys::attempt_prefix(&names[1]))), "{left:?}");
    // What retention took leaves its tail.
    assert_eq!(cluster.get(&format!("{at}/logs?attempt=1&stream=stdout")).await.expect(200).text(), "out\n");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_do_not_flood_and_the_last_one_says_the_end() {
    let Some(cluster) = cluster().await else { return };
    const TASKS: usize = 3_000;
    let job = cluster.submit(&spec("flood", json!({ "count": TASKS }))).await;
    let (plain, tasks) = (format!("/v1/jobs/{job}/events"), format!("/v1/jobs/{job}/events?tasks=true"));
    let started = std::time::Instant::now();
    let work = worker(&cluster.world.nats.url, "w1", 4, CancellationToken::new(), |name| Some(success(name)));
    let both = async { tokio::join!(work, cluster.get(&plain), cluster.get(&tasks)) };
    let (_, plain, tasks) = tokio::time::timeout(Duration::from_secs(60), both).await.expect("in time");
    let took = started.elapsed();
    let events =
        |text: String| -> Vec<Value> { text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect() };
    let (plain, tasks) = (events(plain.expect(200).text()), events(tasks.expect(200).text()));
    let most = took.as_millis() as usize / 250 + 2;
    for events in [&plain, &tasks] {
        let of_job: Vec<_> = events.iter().filter(|event| event["kind"] == "job").collect();
        assert!((2..=most).contains(&of_job.len()), "{} events in {took:?}", of_job.len());
        let last = of_job.last().expect("an event");
        assert_eq!((&last["job"]["state"], &last["job"]["tasks"]["succeeded"]), (&json!("succeeded"), &json!(TASKS)));
        assert_eq!(events.last().expect("an event")["kind"], "job");
    }
    assert!(plain.iter().all(|event| event["kind"] == "job"));
    let mut ended: Vec<_> = tasks.iter().filter_map(|event| event["task"]["index"].as_u64()).collect();
    ended.sort_unstable();
    assert_eq!(ended, (0..TASKS as u64).collect::<Vec<_>>());
    assert!(tasks.iter().filter(|event| event["kind"] == "task").all(|event| event["job"].is_null()));
    cluster.get(&format!("/v1/jobs/{job}/events?tasks=x")).await.expect(400);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_results_stream_fast_and_whole() {
    let Some((cluster, _stop)) = with_worker().await else { return };
    const TASKS: usize = 20_000;
    let mut spec = spec("many", json!({ "count": TASKS }));
    spec["task"] = json!({ "isolation": "null", "command": "x" });
    let job = cluster.submit(&spec).await;
    let (stop, url) = (CancellationToken::new(), cluster.world.nats.url.clone());
    worker(&url, "w2", 64, stop, |name| Some(success(name))).await;
    // A slow follower from the beginning gets every row too.
    let followed =
        tokio::time::timeout(Duration::from_secs(120), cluster.get(&format!("/v1/jobs/{job}/results?follow=true"))).await.expect("in time");
    let mut seen: Vec<u64> = followed.expect(200).lines().iter().filter_map(|row| row["index"].as_u64()).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..TASKS as u64).collect::<Vec<_>>());
    let started = std::time::Instant::now();
    let answer = cluster.get(&format!("/v1/jobs/{job}/results")).await.expect(200);
    let took = started.elapsed();
    assert_eq!(answer.bytes.iter().filter(|b| **b == b'\n').count(), TASKS);
    println!("{TASKS} result rows in {took:?}: {:.0} rows a second", TASKS as f64 / took.as_secs_f64());
    assert!(took < Duration::from_secs(5), "{took:?}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn local_metrics_are_for_this_host_only() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let Some(world) = World::new().await else { return };
    let config = CoordinatorConfig { local_metrics: true, ..world.config() };
    let cluster = world.cluster_with(config).await;
    for (header, status) in [("accept: */*", "200"), ("x-forwarded-for: 1.2.3.4", "401"), ("forwarded: for=1.2.3.4", "401")] {
        let mut stream = tokio::net::TcpStream::connect(cluster.running.addr).await.expect("connected");
        let text = format!("GET /metrics HTTP/1.1\r\nhost: x\r\n{header}\r\nconnection: close\r\n\r\n");
        stream.write_all(text.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("read");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{header}: {answer}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_answers_over_tcp_and_stops_with_streams_open() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let Some(cluster) = cluster().await else { return };
    let job = cluster.submit(&spec("open", json!({ "count": 1 }))).await;
    let ask = async |text: String| {
        let mut stream = tokio::net::TcpStream::connect(cluster.running.addr).await.expect("connected");
        stream.write_all(text.as_bytes()).await.expect("sent");
        stream
    };
    let mut answer = String::new();
    ask("GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".into()).await.read_to_string(&mut answer).await.expect("read");
    assert!(answer.starts_with("HTTP/1.1 401"), "tasks of this host read nothing: {answer}");
    answer.clear();
    ask(format!("GET /metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {BOOTSTRAP}\r\nconnection: close\r\n\r\n"))
        .await
        .read_to_string(&mut answer)
        .await
        .expect("read");
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("volley_leader 1\n") && answer.contains("volley_jobs{state=\"queued\"} 1\n"),
        "{answer}"
    );
    answer.clear();
    ask("GET /v1/jobs HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n".into()).await.read_to_string(&mut answer).await.expect("read");
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    let view = cluster.get("/v1/cluster").await.expect(200).json();
    assert!(view["id"] == cluster.running.cluster.as_str() && view["term"] == 1 && view["bucket"] == "s3://cell/", "{view}");
    let mut open = ask(format!("GET /v1/jobs/{job}/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {BOOTSTRAP}\r\n\r\n")).await;
    let mut some = [0; 64];
    assert!(open.read(&mut some).await.expect("read") > 0);
    let started = std::time::Instant::now();
    cluster.stop().await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
}
