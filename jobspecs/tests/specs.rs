//! The example specs, the schema file, and bad input of every kind.
//!
//! `VOLLEY_WRITE_EXPECTED=1` writes the `.expected` files of `examples/rejected` anew; read them before committing.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};
use volley_jobspecs::parse::{SPEC_BYTES_MAX, parse, parse_and_validate};
use volley_jobspecs::problem::Problems;
use volley_jobspecs::schema::{job_schema, job_schema_text};
use volley_jobspecs::spec::{Isolation, JobSpec};
use volley_jobspecs::validate::{Features, ValidJob, validate};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn specs(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(folder(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut paths: Vec<PathBuf> =
        entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.extension().is_some_and(|x| x == "json")).collect();
    paths.sort();
    paths.into_iter().map(|p| (p.clone(), fs::read(&p).unwrap_or_else(|e| panic!("{}: {e}", p.display())))).collect()
}

fn small_cluster() -> Features {
    Features::with_isolation(&[Isolation::Process])
}

#[test]
fn accepted_examples_are_accepted_and_come_back_the_same() {
    let all = specs("examples/accepted");
    assert!(all.len() >= 12, "{}", all.len());
    for (path, bytes) in all {
        let at = path.display();
        let job = parse_and_validate(&bytes, &Features::all()).unwrap_or_else(|e| panic!("{at}: {e}"));
        let text = job.to_json();
        let again = ValidJob::from_json(text.as_bytes()).unwrap_or_else(|e| panic!("{at}: {e}"));
        assert_eq!(job, again, "{at}");
        assert_eq!(text, again.to_json(), "{at}");
        assert_eq!(job.spec_hash(), again.spec_hash(), "{at}");
        assert_eq!(validate(job.spec(), &Features::all()).as_ref(), Ok(&job), "{at}");
    }
}

#[test]
fn rejected_examples_are_rejected_with_their_message() {
    let write = std::env::var_os("VOLLEY_WRITE_EXPECTED").is_some();
    let all = specs("examples/rejected");
    assert!(all.len() >= 30, "{}", all.len());
    for (path, bytes) in all {
        let Err(problems) = parse_and_validate(&bytes, &small_cluster()) else { panic!("{} is accepted", path.display()) };
        let message = format!("{problems}\n");
        let expected = path.with_extension("expected");
        if write {
            fs::write(&expected, &message).unwrap_or_else(|e| panic!("{}: {e}", expected.display()));
        }
        let wanted = fs::read_to_string(&expected).unwrap_or_default();
        assert_eq!(message, wanted, "{}", path.display());
    }
}

#[test]
fn the_schema_file_is_the_generated_one() {
    let file = fs::read_to_string(folder("schema/job.schema.json")).unwrap_or_default();
    assert!(file == job_schema_text(), "run `cargo run -p volley-jobspecs --example schema`");
}

#[test]
fn every_field_is_described_and_every_reference_leads_somewhere() {
    fn walk(schema: &Value, path: &str) {
        if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
            for (name, property) in properties {
                // One that only says "and not null" stands in a condition, beside the one that is described.
                let described = property.get("description").is_some() || property.get("not").is_some();
                assert!(described, "{path}.{name}");
                walk(property, &format!("{path}.{name}"));
            }
        }
        if let Some(pointer) = schema.get("$ref").and_then(Value::as_str) {
            assert!(job_schema().pointer(pointer.trim_start_matches('#')).is_some(), "{path}: {pointer}");
        }
        for branch in schema.get("anyOf").and_then(Value::as_array).into_iter().flatten() {
            walk(branch, path);
        }
        for (name, definition) in schema.get("$defs").and_then(Value::as_object).into_iter().flatten() {
            walk(definition, name);
        }
    }
    walk(job_schema(), "$");
}

fn problems(spec: &Value) -> Vec<String> {
    match parse_and_validate(spec.to_string().as_bytes(), &small_cluster()) {
        Ok(_) => vec![],
        Err(Problems(problems)) => problems.into_iter().map(|p| p.path).collect(),
    }
}

#[test]
fn form_and_meaning_are_reported_together_and_nothing_is_made_up() {
    // A misspelt field is one problem: nothing is concluded from what it leaves out.
    let task = json!({ "isolation": "process", "command": ["a", "${item.x}"] });
    let base = json!({ "version": "volley/v1", "name": "x", "items": { "inline": [{ "x": 1 }] }, "task": task });
    assert_eq!(problems(&base), Vec::<String>::new());
    let mut spec = base.clone();
    spec["limits"] = json!({ "maxFailure": 3, "failFast": "now" });
    assert_eq!(problems(&spec), ["$.limits.maxFailure"]);
    let mut spec = base.clone();
    spec["itmes"] = spec["items"].take();
    assert_eq!(problems(&spec), ["$.itmes"]);
    let mut spec = base.clone();
    spec["task"]["isolation"] = json!(7);
    spec["task"]["inputs"] = json!([{ "from": "s3://bucket/k", "path": "../x" }]);
    spec["nope"] = json!(1);
    assert_eq!(problems(&spec), ["$.nope", "$.task.isolation", "$.task.inputs[0].path"]);
}

#[test]
fn bounds_hold() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(parse(deep.as_bytes()).is_err());
    assert!(parse(&vec![b' '; SPEC_BYTES_MAX + 1]).is_err());
    let doubled = format!("{{{}\"a\":1}}", "\"a\":1,".repeat(100_000));
    assert!(parse(doubled.as_bytes()).is_err_and(|p| p.0.len() <= 200));
    let unknown: String = (0..100_000).map(|i| format!("\"f{i}\":1,")).collect();
    let Err(problems) = parse(format!("{{{unknown}\"name\":1}}").as_bytes()) else { panic!("accepted") };
    assert!(problems.to_string().lines().count() < 200);
}

#[test]
fn defaults_written_out_and_left_out_are_the_same_job() {
    let short = json!({ "version": "volley/v1", "name": "x", "task": { "isolation": "process", "command": "a" } });
    let mut long = short.clone();
    long["priority"] = json!(0);
    long["task"]["timeouts"] = json!({ "run": "60m", "start": "300s" });
    long["task"]["retry"] = json!({ "attempts": 1, "backoff": { "factor": 2.0 } });
    let hash = |spec: &Value| parse_and_validate(spec.to_string().as_bytes(), &small_cluster()).map(|job| job.spec_hash());
    assert_eq!(hash(&short), hash(&long));
    long["priority"] = json!(1);
    assert_ne!(hash(&short), hash(&long));
}

#[test]
fn an_items_numbers_keep_every_digit() {
    // Without serde_json's `float_roundtrip`, a tenth of all such numbers came back one unit in the last place off.
    let mut state = 1u64;
    let items = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    });
    let items: Vec<f64> = items.take(10_000).collect();
    let task = json!({ "isolation": "process", "command": ["x", "${item}"] });
    let spec = json!({ "version": "volley/v1", "name": "x", "items": { "inline": items }, "task": task });
    let job = parse_and_validate(spec.to_string().as_bytes(), &small_cluster()).unwrap_or_else(|e| panic!("{e}"));
    let again = ValidJob::from_json(job.to_json().as_bytes()).unwrap_or_else(|e| panic!("{e}"));
    for (index, wanted) in (0..).zip(&items) {
        assert_eq!(again.items().item(index), Some(json!(wanted)));
    }
}

fn seeds() -> Vec<Vec<u8>> {
    specs("examples/accepted").into_iter().chain(specs("examples/rejected")).map(|(_, bytes)| bytes).collect()
}

/// Reads the input in every way there is; the only wrong outcome is a panic.
fn poke(bytes: &[u8]) {
    match parse_and_validate(bytes, &Features::all()) {
        Ok(job) => {
            let text = job.to_json();
            assert_eq!(ValidJob::from_json(text.as_bytes()).map(|again| again.to_json()), Ok(text));
            for index in [0, 1, u64::from(u32::MAX)] {
                if let Some(item) = job.items().item(index) {
                    let _ = job.resolve(&item, 0, "j1", 1);
                }
            }
        }
        Err(problems) => assert!(!problems.0.is_empty() && !problems.to_string().is_empty()),
    }
}

#[test]
fn ten_thousand_bad_inputs_never_panic() {
    let seeds = seeds();
    // A small fixed generator: the same 10,000 inputs on every run.
    let mut state = 0x5eed_u64;
    let mut next = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below.max(1)
    };
    let pieces: [&[u8]; 14] =
        [b"\"", b"{", b"}", b"[", b"]", b",", b":", b"null", b"-1", b"1e999", b"99999999999999999999", b"${", b"\\u0000", b"\xff"];
    for round in 0..10_000 {
        let mut bytes = if round % 5 == 0 { (0..next(300)).map(|_| next(256) as u8).collect() } else { seeds[next(seeds.len())].clone() };
        for _ in 0..=next(4) {
            let at = next(bytes.len() + 1);
            match next(4) {
                0 => bytes.truncate(at),
                1 => {
                    let end = (at + next(20)).min(bytes.len());
                    bytes.drain(at..end);
                }
                2 => bytes.splice(at..at, pieces[next(pieces.len())].iter().copied()).for_each(drop),
                _ => {
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte = next(128) as u8;
                    }
                }
            }
        }
        poke(&bytes);
    }
}

#[test]
fn wrong_values_anywhere_never_panic() {
    // Every value of every accepted spec is replaced by each of these in turn: valid JSON that is nearly a spec.
    let odd = [
        json!(null),
        json!(-1),
        json!(1e300),
        json!(""),
        json!("${item.a.b}"),
        json!([]),
        json!({}),
        json!([[[]]]),
        json!(u64::MAX),
        json!("../x"),
    ];
    fn pointers(value: &Value, at: &str, out: &mut Vec<String>) {
        out.push(at.to_owned());
        match value {
            Value::Object(object) => {
                object.iter().for_each(|(k, v)| pointers(v, &format!("{at}/{}", k.replace('~', "~0").replace('/', "~1")), out));
            }
            Value::Array(array) => array.iter().enumerate().for_each(|(i, v)| pointers(v, &format!("{at}/{i}"), out)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    for (path, bytes) in specs("examples/accepted") {
        let spec: Value = serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut places = Vec::new();
        pointers(&spec, "", &mut places);
        for place in places {
            for value in &odd {
                let mut changed = spec.clone();
                if let Some(slot) = changed.pointer_mut(&place) {
                    *slot = value.clone();
                }
                poke(changed.to_string().as_bytes());
            }
        }
    }
}

fn any_item() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from)
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[a-z]{1,4}", inner, 0..4)
                .prop_map(|m| m.into_iter().collect::<serde_json::Map<_, _>>().into()),
        ]
    })
}

fn any_spec() -> impl Strategy<Value = Value> {
    let items = prop_oneof![
        proptest::collection::vec(any_item(), 1..5).prop_map(|v| json!({ "inline": v })),
        (1u64..10_000_000).prop_map(|n| json!({ "count": n })),
        (-1000i64..1000, 1i64..1000, 1i64..50)
            .prop_map(|(from, len, step)| json!({ "range": { "from": from, "to": from + len, "step": step } })),
        (1u32..1000).prop_map(|n| json!({ "lines": { "s3": "s3://bucket/key" }, "chunk": n })),
    ];
    let task = (
        proptest::collection::vec("[a-z$ ]{1,6}", 1..4),
        proptest::option::of(1u64..100_000_000),
        proptest::option::of(1u32..64_000),
        1u16..100,
    )
        .prop_map(|(words, run, cpus, attempts)| {
            let mut task = json!({ "isolation": "process", "command": words, "retry": { "attempts": attempts } });
            if let Some(run) = run {
                task["timeouts"] = json!({ "run": format!("{run}ms") });
            }
            if let Some(cpus) = cpus {
                task["resources"] = json!({ "cpus": format!("{cpus}m"), "memory": format!("{}KiB", u64::from(cpus) + 4096) });
            }
            task
        });
    (items, task, -100i16..=100, proptest::option::of(1u32..=10_000)).prop_map(|(items, task, priority, share)| {
        let mut spec = json!({ "version": "volley/v1", "name": "p", "items": items, "task": task, "priority": priority });
        if let Some(share) = share {
            spec["limits"] = json!({ "maxFailures": format!("{}.{:02}%", share / 100, share % 100) });
        }
        spec
    })
}

proptest! {
    #[test]
    fn parsing_what_was_printed_gives_the_same(spec in any_spec()) {
        let job = parse_and_validate(spec.to_string().as_bytes(), &small_cluster()).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let printed = serde_json::to_string(job.spec()).unwrap_or_default();
        let again: JobSpec = parse(printed.as_bytes()).map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(job.spec(), &again);
        let canonical = ValidJob::from_json(job.to_json().as_bytes()).map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(&job, &canonical);
        // Expansion: the same item every time, whatever was asked for before.
        if let Some(count) = job.items().count() {
            for index in [count - 1, 0, count / 2, count - 1] {
                prop_assert_eq!(job.items().item(index), canonical.items().item(index));
                prop_assert!(job.items().item(index).is_some());
            }
            prop_assert_eq!(job.items().item(count), None);
        }
    }
}
