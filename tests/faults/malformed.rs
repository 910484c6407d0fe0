//! Malformed specs and requests by the thousand: each is answered with a clear 4xx, nothing panics, nothing is created.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use volley_jobspecs::parse::parse_and_validate;
use volley_jobspecs::validate::Features;

use crate::cluster::{Cluster, Plan, http};
use crate::random::Random;
use crate::setting;

/// Requests under way at once.
const AT_ONCE: u64 = 16;

/// A request, and what it was made of.
struct Malformed {
    method: reqwest::Method,
    path: String,
    headers: Vec<(&'static str, Vec<u8>)>,
    body: Vec<u8>,
    /// May be answered with success: a reading request whose random words happened to fit.
    may_succeed: bool,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_input_is_refused_and_creates_nothing() {
    let cluster = Arc::new(Cluster::start(Plan { coordinators: 1, workers: vec![2], ..Plan::default() }).await);
    // An ended job, so that requests about jobs find one now and then.
    let spec = json!({
        "version": "volley/v1", "name": "there", "items": { "count": 20 },
        "task": { "isolation": "process", "command": "echo ${index}; echo x > \"$VOLLEY_OUTPUT_DIR/a b\"" },
    });
    let there = cluster.submit(&spec).await;
    cluster.wait(there, std::time::Duration::from_secs(60)).await;
    newest_level(&cluster).await;
    let before = inventory(&cluster).await;
    let requests = setting("VOLLEY_FAULTS_MALFORMED", 10_000);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let seed = setting("VOLLEY_FAULTS_SEED", now);
    println!("seed {seed}, {requests} requests");
    let begun = Instant::now();
    let bases = Arc::new(bases());
    let document: Value = http().get(format!("{}/openapi.json", cluster.endpoints[0])).send().await.unwrap().json().await.unwrap();
    let routes = Arc::new(routes(&document));
    assert!(routes.len() > 20, "{routes:?}");
    let mut workers = Vec::new();
    for lane in 0..AT_ONCE {
        let (cluster, bases, routes) = (Arc::clone(&cluster), Arc::clone(&bases), Arc::clone(&routes));
        workers.push(tokio::spawn(async move {
            let mut statuses: BTreeMap<u16, u32> = BTreeMap::new();
            for n in (lane..requests).step_by(AT_ONCE as usize) {
                let mut random = Random::new(seed ^ (n << 20));
                let request = if n % 2 == 0 {
                    malformed_spec(&mut random, &bases)
                } else {
                    malformed_request(&mut random, &routes, &bases, &there.to_string())
                };
                *statuses.entry(send(&cluster, request, seed, n).await).or_default() += 1;
            }
            statuses
        }));
    }
    let mut statuses: BTreeMap<u16, u32> = BTreeMap::new();
    for worker in workers {
        for (status, count) in worker.await.unwrap() {
            *statuses.entry(status).or_default() += count;
        }
    }
    println!("answers by status: {statuses:?} after {:.1} s", begun.elapsed().as_secs_f64());
    special(&cluster).await;
    assert_eq!(inventory(&cluster).await, before, "nothing was created");
    assert_eq!(cluster.coordinators[0].starts(), 1);
    let Ok(cluster) = Arc::try_unwrap(cluster) else { panic!("still in use") };
    cluster.stop().await;
}

/// Waits until the cluster knows that all of its coordinators know everything: before, it can rightly say of some requests that it can't
/// yet (503).
async fn newest_level(cluster: &Cluster) {
    let begun = Instant::now();
    let newest = volley_cli::sdk::jobspecs::wire::LEVEL;
    while cluster.get(&cluster.endpoints[0], "/v1/cluster").await.is_none_or(|view| view["level"] != newest) {
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "the level stays");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

/// Jobs, tenants and workers there are.
async fn inventory(cluster: &Cluster) -> Vec<Value> {
    let mut all = Vec::new();
    for (path, field) in [("/v1/jobs", "job"), ("/v1/tenants", "tenant"), ("/v1/workers", "worker")] {
        let found = cluster.get(&cluster.endpoints[0], path).await.unwrap_or_else(|| panic!("{path}"));
        let rows = if found.is_array() { &found } else { &found["rows"] };
        let mut names: Vec<Value> =
            rows.as_array().unwrap_or_else(|| panic!("{path}: {found}")).iter().map(|row| row[field].clone()).collect();
        names.sort_by_key(Value::to_string);
        all.push(names.into());
    }
    all
}

/// Sends it; whatever it is, the answer is no fault of the server's.
async fn send(cluster: &Cluster, request: Malformed, seed: u64, n: u64) -> u16 {
    let Malformed { method, path, headers, body, may_succeed } = request;
    let what =
        format!("request {n} of seed {seed}: {method} {path} {headers:?} {:?}", String::from_utf8_lossy(&body[..body.len().min(1_000)]));
    let mut call = http().request(method, format!("{}{path}", cluster.endpoints[0])).bearer_auth(&cluster.token).body(body);
    for (name, value) in headers {
        match reqwest::header::HeaderValue::from_bytes(&value) {
            Ok(value) => call = call.header(name, value),
            Err(_) => continue,
        }
    }
    let answer = match call.timeout(std::time::Duration::from_secs(30)).send().await {
        Ok(answer) => answer,
        // Text that is no URI never leaves this process.
        Err(error) if error.is_builder() => return 0,
        Err(error) => panic!("{what}: no answer: {error:?}\n{}", cluster.logs(20)),
    };
    let status = answer.status().as_u16();
    let text = answer.text().await.unwrap_or_default();
    assert!(status < 500, "{what}: {status} {text}\n{}", cluster.logs(20));
    if status < 400 {
        assert!(may_succeed, "{what}: accepted with {status} {text}");
        return status;
    }
    let body: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{what}: {status} {text:?}: {e}"));
    let said = body["message"].as_str().unwrap_or_default();
    assert!(!said.is_empty() && body["code"].is_string(), "{what}: {status} {text}");
    if body["code"] == "bad_spec" {
        let problems = body["problems"].as_array().map_or(0, Vec::len);
        assert!(problems > 0, "{what}: {text}");
    }
    status
}

/// Cases no generator finds.
async fn special(cluster: &Cluster) {
    let deep = |open: &str, n: usize| open.repeat(n).into_bytes();
    let spec = |text: &str| text.as_bytes().to_vec();
    let large = json!({ "version": "volley/v1", "name": "x", "task": { "isolation": "process", "command": "x".repeat(20_000_000) } });
    let bodies = [
        Vec::new(),
        deep("[", 1_000_000),
        deep("{\"a\":", 200_000),
        vec![0xff; 1_000],
        large.to_string().into_bytes(),
        spec(r#"{"version":"volley/v1","name":"x","items":{"jsonl":{"upload":"nothing"}},"task":{"isolation":"process","command":"x"}}"#),
        spec(
            r#"{"version":"volley/v1","name":"x","items":{"jsonl":{"s3":"s3://elsewhere/x"}},"task":{"isolation":"process","command":"x"}}"#,
        ),
        spec(
            r#"{"version":"volley/v1","name":"x","items":{"count":99999999999999999999999},"task":{"isolation":"process","command":"x"}}"#,
        ),
        spec(
            r#"{"version":"volley/v1","name":"x","items":{"range":{"from":-9223372036854775808,"to":9223372036854775807,"step":1}},"task":{"isolation":"process","command":"x"}}"#,
        ),
    ];
    for (n, body) in bodies.into_iter().enumerate() {
        let request =
            Malformed { method: reqwest::Method::POST, path: "/v1/jobs".to_owned(), headers: Vec::new(), body, may_succeed: false };
        let status = send(cluster, request, 0, n as u64).await;
        println!("special body {n}: {status}");
    }
    // Not HTTP at all, and HTTP that breaks off.
    let address = cluster.endpoints[0].trim_start_matches("http://").to_owned();
    let raw: [&[u8]; 5] = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000000000000000\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"version\"",
    ];
    for bytes in raw {
        let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        let read = tokio::time::timeout(std::time::Duration::from_secs(40), stream.read_to_end(&mut answer)).await;
        let text = String::from_utf8_lossy(&answer).into_owned();
        assert!(read.is_ok(), "{:?} is never answered nor cut", String::from_utf8_lossy(bytes));
        assert!(!text.starts_with("HTTP/1.1 5") && !text.starts_with("HTTP/1.1 2"), "{text}");
    }
}

/// Every spec of the examples, as JSON where it is any.
fn bases() -> Vec<Value> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/jobspecs/examples");
    let mut paths: Vec<_> = ["accepted", "rejected"]
        .into_iter()
        .flat_map(|dir| std::fs::read_dir(format!("{root}/{dir}")).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .collect();
    paths.sort();
    let read = |path: &std::path::PathBuf| serde_json::from_slice(&std::fs::read(path).unwrap()).ok();
    let bases: Vec<Value> = paths.iter().filter_map(read).collect();
    assert!(bases.len() > 20);
    bases
}

/// A spec that this build's own reader refuses; what it takes is mutated further.
fn malformed_spec(random: &mut Random, bases: &[Value]) -> Malformed {
    let features = Features::current();
    loop {
        let mut spec = bases[random.below(bases.len() as u64) as usize].clone();
        for _ in 0..random.between(1, 6) {
            mutate(random, &mut spec);
        }
        let mut body = spec.to_string().into_bytes();
        if random.one_in(4) {
            garble(random, &mut body);
        }
        if parse_and_validate(&body, &features).is_ok() {
            continue;
        }
        let query =
            if random.one_in(8) { format!("?dryRun={}", ["true", "false", "", "1"][random.below(4) as usize]) } else { String::new() };
        let mut headers = Vec::new();
        if random.one_in(4) {
            headers.push(("idempotency-key", word(random).into_bytes()));
        }
        return Malformed { method: reqwest::Method::POST, path: format!("/v1/jobs{query}"), headers, body, may_succeed: false };
    }
}

/// Every route of the document: method, path, and is it one that only reads?
fn routes(document: &Value) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        all.extend(methods.as_object().unwrap().keys().map(|method| (method.to_uppercase(), path.clone())));
    }
    all
}

fn malformed_request(random: &mut Random, routes: &[(String, String)], bases: &[Value], there: &str) -> Malformed {
    let (method, template) = &routes[random.below(routes.len() as u64) as usize];
    let method =
        if random.one_in(12) { ["GET", "PUT", "PATCH", "DELETE", "POST", "HEAD2"][random.below(6) as usize] } else { method.as_str() };
    let mut path = String::new();
    for segment in template.trim_start_matches('/').split('/') {
        path.push('/');
        let named = segment.starts_with('{');
        let text = match segment {
            _ if random.one_in(30) => word(random),
            // Its removal would be no mistake.
            "{job}" if method != "DELETE" && random.one_in(2) => there.to_owned(),
            "{index}" if random.one_in(2) => random.below(25).to_string(),
            "{job}" if random.one_in(2) => format!("j{}", random.below(1_000_000)),
            "{index}" if random.one_in(2) => random.below(5_000_000_000).to_string(),
            _ if named => word(random),
            _ => segment.to_owned(),
        };
        path.push_str(&escape(&text, random));
    }
    let names = ["limit", "after", "state", "label", "follow", "tenant", "attempt", "stream", "dryRun", "name", "all", "x"];
    let mut sign = '?';
    for _ in 0..random.below(4) {
        let value = match random.below(4) {
            0 => random.next().to_string(),
            1 => "true".to_owned(),
            _ => word(random),
        };
        path.push_str(&format!("{sign}{}={}", names[random.below(names.len() as u64) as usize], escape(&value, random)));
        sign = '&';
    }
    let mut headers = Vec::new();
    if random.one_in(6) {
        let names =
            ["volley-sequence", "idempotency-key", "content-type", "last-event-id", "range", "traceparent", "accept", "x-forwarded-for"];
        headers.push((names[random.below(names.len() as u64) as usize], word(random).into_bytes()));
    }
    let mut body = match random.below(4) {
        0 => Vec::new(),
        1 => word(random).into_bytes(),
        _ => small_body(random, bases).to_string().into_bytes(),
    };
    if random.one_in(3) {
        garble(random, &mut body);
    }
    let reads = method == "GET";
    // An upload takes any bytes, and a well-formed tenant is no malformed input: these bodies are broken for sure.
    if path.starts_with("/v1/uploads") && method == "POST" {
        path.push_str(&format!("{sign}unknown=1"));
    } else if !reads {
        body.extend_from_slice(b"}]");
    }
    let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
    Malformed { method, path, headers, body, may_succeed: reads }
}

fn small_body(random: &mut Random, bases: &[Value]) -> Value {
    let mut body = match random.below(4) {
        0 => json!({ "tenant": "a", "weight": 5, "activeTasksMax": 5, "activeJobsMax": 1, "concurrency": 1, "priorityMax": 3 }),
        1 => json!({ "tenant": "a", "operator": true }),
        2 => json!({ "now": true, "reason": "because" }),
        _ => bases[random.below(bases.len() as u64) as usize].clone(),
    };
    for _ in 0..random.between(1, 4) {
        mutate(random, &mut body);
    }
    body
}

/// Changes one place of a value.
fn mutate(random: &mut Random, value: &mut Value) {
    let here = random.one_in(4);
    match value {
        Value::Object(map) if !map.is_empty() && !here => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = &keys[random.below(keys.len() as u64) as usize];
            match random.below(8) {
                0 => _ = map.remove(key),
                1 => {
                    let moved = map.remove(key).unwrap_or_default();
                    map.insert(misspell(random, key), moved);
                }
                2 => _ = map.insert(word(random), strange(random)),
                _ => mutate(random, map.get_mut(key).expect("a key of it")),
            }
        }
        Value::Array(items) if !items.is_empty() && !here => {
            let at = random.below(items.len() as u64) as usize;
            match random.below(6) {
                0 => _ = items.remove(at),
                1 => items.push(items[at].clone()),
                _ => mutate(random, &mut items[at]),
            }
        }
        Value::String(text) if random.one_in(2) => *text = misspell(random, text),
        other => *other = strange(random),
    }
}

fn misspell(random: &mut Random, text: &str) -> String {
    let mut letters: Vec<char> = text.chars().collect();
    let at = random.below(letters.len() as u64 + 1) as usize;
    match random.below(4) {
        0 if at < letters.len() => _ = letters.remove(at),
        1 if at < letters.len() => letters.insert(at, letters[at]),
        2 => letters.splice(at..at, "${item.".chars()).for_each(drop),
        _ => letters.insert(at, char::from_u32(random.below(0x11_0000) as u32).unwrap_or('\0')),
    }
    letters.into_iter().collect()
}

fn strange(random: &mut Random) -> Value {
    match random.below(14) {
        0 => Value::Null,
        1 => json!(-1),
        2 => json!(u64::MAX),
        3 => json!(i64::MIN),
        4 => json!(1.0e308),
        5 => json!(0.1),
        6 => json!(true),
        7 => json!([]),
        8 => json!({}),
        9 => json!(""),
        10 => json!("x".repeat(random.between(1, 5_000) as usize)),
        11 => json!([[[[[[[[1]]]]]]]]),
        12 => json!(word(random)),
        _ => json!({ word(random): word(random) }),
    }
}

/// Text from nowhere in particular.
fn word(random: &mut Random) -> String {
    let known = [
        "",
        "-1",
        "0",
        "1e9",
        "99999999999999999999",
        "null",
        "../../etc/passwd",
        "..",
        "%00",
        "\u{0}",
        "a b",
        "ä",
        "\u{202e}",
        "'\"<>&;",
        "${item}",
        "${",
        "j1",
        "j18446744073709551615",
        "j01",
        "s3://",
        "upload:",
        "5 TiB",
        "-5s",
        "1h1h",
        "NaN",
        "*",
        "default",
        "true",
        "{\"a\":1}",
        "\r\nx: y",
    ];
    match random.below(3) {
        0 => (0..random.below(12)).map(|_| char::from_u32(random.below(0x300) as u32).unwrap_or('x')).collect(),
        1 => "w".repeat(random.below(300) as usize),
        _ => known[random.below(known.len() as u64) as usize].to_owned(),
    }
}

/// Percent-encodes; now and then not, or wrongly.
fn escape(text: &str, random: &mut Random) -> String {
    if random.one_in(10) {
        return format!("%{}", text.chars().filter(char::is_ascii_alphanumeric).collect::<String>());
    }
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.{}".contains(&b);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

/// Changes bytes.
fn garble(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..random.between(1, 5) {
        let at = random.below(bytes.len() as u64 + 1) as usize;
        match random.below(4) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.next() as u8),
            2 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            _ if at < bytes.len() => _ = bytes.remove(at),
            _ => bytes.extend_from_slice(b"\""),
        }
    }
}
