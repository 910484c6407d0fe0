//! Ten thousand malformed requests: every one is answered with a clear refusal, none with a fault of the server, and nothing is
//! created. The seed is printed; `VOLLEY_SEED` repeats a run.

mod support;

use axum::body::Body;
use axum::http::{HeaderValue, Method, Request};
use serde_json::{Value, json};
use support::{BOOTSTRAP, Cluster, World};

/// Requests made.
const REQUESTS: u64 = 10_000;

/// splitmix64: small, seeded, good enough to choose mutations.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn pick<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }

    fn text(&mut self) -> String {
        const PIECES: [&str; 24] = [
            "",
            "0",
            "-1",
            "j1",
            "j1042",
            "j99999999999999999999",
            "a",
            "..",
            "%2e%2e",
            "%00",
            "%ff",
            "true",
            "NaN",
            "1e999",
            "4294967296",
            "18446744073709551616",
            "é",
            "\u{202e}",
            "x.y",
            "${item}",
            "null",
            "operator",
            "1.2.3",
            "'\"",
        ];
        let mut text = String::new();
        for _ in 0..=self.below(3) {
            text.push_str(PIECES[self.below(PIECES.len())]);
        }
        text
    }
}

/// Percent-encodes what a URI can't carry, leaving what is encoded already.
fn segment(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() || b"-._~%".contains(&b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

fn path(random: &mut Random, job: &str) -> String {
    const ROUTES: [&str; 24] = [
        "/v1/jobs",
        "/v1/jobs/{}",
        "/v1/jobs/{}/spec",
        "/v1/jobs/{}/cancel",
        "/v1/jobs/{}/pause",
        "/v1/jobs/{}/resume",
        "/v1/jobs/{}/rerun",
        "/v1/jobs/{}/tasks",
        "/v1/jobs/{}/tasks/{}",
        "/v1/jobs/{}/tasks/{}/attempts",
        "/v1/jobs/{}/tasks/{}/explain",
        "/v1/jobs/{}/results",
        "/v1/jobs/{}/tasks/{}/logs",
        "/v1/jobs/{}/logs",
        "/v1/jobs/{}/tasks/{}/outputs",
        "/v1/jobs/{}/tasks/{}/outputs/{}",
        "/v1/jobs/{}/events",
        "/v1/workers",
        "/v1/workers/{}/drain",
        "/v1/tokens/{}",
        "/v1/cluster",
        "/readyz",
        "/metrics",
        "/{}",
    ];
    const PARAMETERS: [&str; 12] =
        ["limit", "after", "state", "label", "name", "tenant", "follow", "stream", "attempt", "dryRun", "x", "%00"];
    let mut path = random.pick(&ROUTES).to_owned();
    for real in [job, "0", "a.txt"] {
        // Half of the time what is really there, so that what lies behind it is reached.
        let text = if random.below(2) == 0 { real.to_owned() } else { random.text() };
        path = path.replacen("{}", &segment(&text), 1);
    }
    for n in 0..random.below(4) {
        let (name, value) = (random.pick(&PARAMETERS), random.text());
        path.push_str(&format!("{}{name}={}", if n == 0 { '?' } else { '&' }, segment(&value)));
    }
    path
}

fn good_spec() -> Value {
    json!({
        "version": "volley/v1", "name": "fuzz", "labels": { "a": "b" }, "items": { "inline": [{ "a": 1 }, { "a": 2 }] },
        "task": { "isolation": "process", "command": ["echo", "${item.a}"], "env": { "A": "b" }, "inputs": [{ "from": "s3://bucket/key", "path": "p" }],
            "resources": { "cpus": 1, "memory": "1GiB" }, "timeouts": { "run": "1m" },
            "retry": { "attempts": 2, "rules": [{ "match": { "classes": ["oom"] }, "action": "fail" }] } },
        "limits": { "concurrency": 5, "rate": "5/s", "maxFailures": "5%" }, "priority": 3, "retention": { "job": "1d" }
    })
}

/// Replaces one value somewhere in a document by something odd that is never allowed there.
fn spoil(value: &mut Value, random: &mut Random) {
    match value {
        Value::Object(map) if !map.is_empty() && random.below(5) > 0 => {
            let at = random.below(map.len());
            if let Some(inner) = map.values_mut().nth(at) {
                spoil(inner, random);
            }
        }
        Value::Array(list) if !list.is_empty() && random.below(5) > 0 => {
            let at = random.below(list.len());
            spoil(&mut list[at], random);
        }
        _ => *value = json!({ "odd\u{0}": [1e300, null, random.text()] }),
    }
}

fn body(random: &mut Random) -> Vec<u8> {
    let text = good_spec().to_string().into_bytes();
    match random.below(6) {
        0 => Vec::new(),
        1 => (0..random.below(400)).map(|_| random.next() as u8).collect(),
        // Cut anywhere but at the end.
        2 => text[..random.below(text.len() - 1)].to_vec(),
        // A byte that no JSON text may hold, somewhere.
        3 => {
            let (mut text, at) = (text.clone(), random.below(text.len()));
            text[at] = 0xff;
            text
        }
        4 => format!("{}{}", "[".repeat(1 + random.below(3_000)), random.text()).into_bytes(),
        _ => {
            let mut spec = good_spec();
            spec["unknown"] = json!(random.text());
            for _ in 0..=random.below(3) {
                spoil(&mut spec, random);
            }
            spec.to_string().into_bytes()
        }
    }
}

fn request(random: &mut Random, job: &str) -> Request<Body> {
    let (method, path) = match random.below(3) {
        // Bodies matter most where they are read.
        0 => {
            (Method::POST, random.pick(&["/v1/jobs", "/v1/jobs?dryRun=true", "/v1/tenants", "/v1/tokens", "/v1/jobs/j1/cancel"]).to_owned())
        }
        _ => {
            let path = path(random, job);
            let method = random
                .pick(&[&Method::GET, &Method::GET, &Method::GET, &Method::POST, &Method::DELETE, &Method::PUT, &Method::HEAD])
                .clone();
            // Removing the job that is there is no malformed request.
            if method == Method::DELETE && path.split('?').next() == Some(&format!("/v1/jobs/{job}")) {
                (Method::GET, path)
            } else {
                (method, path)
            }
        }
    };
    let token = match random.below(10) {
        0 => "vt_bootstrap_wrong".to_owned(),
        1 => random.text(),
        _ => BOOTSTRAP.to_owned(),
    };
    let mut builder = Request::builder().method(method).uri(path);
    if let Ok(value) = HeaderValue::from_str(&format!("Bearer {token}")) {
        builder = builder.header("authorization", value);
    }
    for name in ["idempotency-key", "volley-sequence", "traceparent", "content-length", "accept"] {
        if random.below(12) == 0 {
            let bytes: Vec<u8> = random.text().into_bytes().into_iter().filter(|b| *b >= b' ' && *b != 0x7f).collect();
            // A sequence that is far ahead is waited for; that is tested elsewhere and would take hours here.
            let ahead = name == "volley-sequence" && bytes.iter().all(u8::is_ascii_digit);
            if let Ok(value) = HeaderValue::from_bytes(&bytes)
                && !ahead
            {
                builder = builder.header(name, value);
            }
        }
    }
    builder.body(Body::from(body(random))).unwrap_or_else(|_| Request::new(Body::empty()))
}

async fn inventory(cluster: &Cluster) -> String {
    let jobs = cluster.get("/v1/jobs").await.expect(200).text();
    let tenants = cluster.get("/v1/tenants").await.expect(200).text();
    let objects = cluster.store.list("", None, 1_000).await.expect("a list").objects;
    let tokens = cluster.running.handle.read(|state, _, _| (state.tokens.len(), state.keys.len())).await.expect("read");
    format!("{jobs} {tenants} {tokens:?} {:?}", objects.iter().map(|o| &o.key).collect::<Vec<_>>())
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_are_refused_and_create_nothing() {
    let Some(world) = World::new().await else { return };
    let cluster = world.cluster().await;
    let stop = tokio_util::sync::CancellationToken::new();
    support::worker(&cluster.world.nats.url, "w1", 2, stop.clone(), |name| Some(support::success(name))).await;
    // It has ended well, so nothing that may be asked of it changes anything.
    let job = cluster
        .submit(
            &json!({ "version": "volley/v1", "name": "done", "items": { "count": 2 }, "task": { "isolation": "null", "command": "x" } }),
        )
        .await;
    assert_eq!(cluster.ended(&job).await["state"], "succeeded");
    while cluster.store.head(&volley_jobspecs::keys::job_manifest(support::id(&job), 1)).await.is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    stop.cancel();
    let seed = std::env::var("VOLLEY_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| u64::from(std::process::id()));
    println!("VOLLEY_SEED={seed}");
    let mut random = Random(seed);
    let before = inventory(&cluster).await;
    let mut statuses = std::collections::BTreeMap::new();
    for n in 0..REQUESTS {
        let request = request(&mut random, &job);
        let shown = format!("{n}: {} {}", request.method(), request.uri());
        let head = request.method() == Method::HEAD;
        let answer = tokio::time::timeout(std::time::Duration::from_secs(10), cluster.send(request))
            .await
            .unwrap_or_else(|_| panic!("no answer: {shown}"));
        let status = answer.status.as_u16();
        *statuses.entry(status).or_insert(0) += 1;
        assert!(answer.headers.contains_key("volley-sequence"), "{shown}");
        if status >= 400 && !head {
            let body = answer.json();
            assert!(body["code"].is_string() && !body["message"].as_str().unwrap_or_default().is_empty(), "{shown} {body}");
            assert!(status < 500 || (status == 503 && body["retryable"] == true), "{shown} {body}");
        } else {
            assert!(status < 500, "{shown}");
        }
    }
    println!("{statuses:?}");
    assert_eq!(inventory(&cluster).await, before);
    assert!(statuses.get(&400).is_some_and(|count| *count > 1_000), "{statuses:?}");
    cluster.stop().await;
}
