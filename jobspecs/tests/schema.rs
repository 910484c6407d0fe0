//! The JSON Schema and the reader judge alike: what a spec is taken with fits the schema, and null is the same as nothing to both.
//!
//! Owns a checker of the keywords that the schema uses. Patterns and formats aside: those of the schema are looser than the reader.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use volley_jobspecs::parse::{parse, parse_and_validate};
use volley_jobspecs::schema::job_schema;
use volley_jobspecs::validate::Features;

fn fits(value: &Value, schema: &Value) -> bool {
    let Value::Object(keywords) = schema else { return schema == &json!(true) };
    let list = |want: &Value| want.as_array().cloned().unwrap_or_else(|| panic!("a list: {want}"));
    let len = |size: Option<usize>, holds: fn(u64, u64) -> bool, want: &Value| {
        size.is_none_or(|size| want.as_u64().is_some_and(|want| holds(size as u64, want)))
    };
    let (least, most): (fn(u64, u64) -> bool, fn(u64, u64) -> bool) = (|size, want| size >= want, |size, want| size <= want);
    let (object, array) = (value.as_object(), value.as_array());
    let chars = value.as_str().map(|text| text.chars().count());
    keywords.iter().all(|(keyword, want)| match keyword.as_str() {
        "$ref" => fits(value, named(want)),
        "type" => want.as_array().map_or_else(|| is_a(value, want), |types| types.iter().any(|name| is_a(value, name))),
        "const" => value == want,
        "enum" => list(want).contains(value),
        "not" => !fits(value, want),
        "anyOf" => list(want).iter().any(|branch| fits(value, branch)),
        "oneOf" => list(want).iter().filter(|branch| fits(value, branch)).count() == 1,
        "required" => object.is_none_or(|object| list(want).iter().filter_map(Value::as_str).all(|name| object.contains_key(name))),
        "properties" => object.is_none_or(|object| object.iter().all(|(name, value)| want.get(name).is_none_or(|want| fits(value, want)))),
        "additionalProperties" => object.is_none_or(|object| {
            let known = keywords.get("properties").and_then(Value::as_object);
            object.iter().filter(|(name, _)| known.is_none_or(|known| !known.contains_key(*name))).all(|(_, value)| fits(value, want))
        }),
        "items" => array.is_none_or(|array| array.iter().all(|item| fits(item, want))),
        "minItems" => len(array.map(Vec::len), least, want),
        "maxItems" => len(array.map(Vec::len), most, want),
        "minProperties" => len(object.map(serde_json::Map::len), least, want),
        "maxProperties" => len(object.map(serde_json::Map::len), most, want),
        "minLength" => len(chars, least, want),
        "maxLength" => len(chars, most, want),
        "minimum" => value.as_f64().zip(want.as_f64()).is_none_or(|(value, want)| value >= want),
        "maximum" => value.as_f64().zip(want.as_f64()).is_none_or(|(value, want)| value <= want),
        "$defs" | "$id" | "$schema" | "title" | "description" | "default" | "examples" | "format" | "pattern" => true,
        other => panic!("a keyword that this checker does not know: {other}"),
    })
}

fn is_a(value: &Value, name: &Value) -> bool {
    match name.as_str() {
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        Some("string") => value.is_string(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        Some("number") => value.is_number(),
        Some("integer") => value.is_i64() || value.is_u64(),
        other => panic!("a type that this checker does not know: {other:?}"),
    }
}

fn named(reference: &Value) -> &'static Value {
    let pointer = reference.as_str().and_then(|name| name.strip_prefix('#'));
    pointer.and_then(|pointer| job_schema().pointer(pointer)).unwrap_or_else(|| panic!("{reference} leads nowhere"))
}

/// What a value that isn't null is held against.
fn of_value(schema: &'static Value) -> &'static Value {
    if let Some(reference) = schema.get("$ref") {
        return named(reference);
    }
    let branches = schema.get("anyOf").and_then(Value::as_array).into_iter().flatten();
    branches.filter_map(|branch| branch.get("$ref")).map(named).next().unwrap_or(schema)
}

/// Every object of a document that has fields of ours: where it is, and its schema.
fn objects(value: &Value, schema: &'static Value, at: &str, out: &mut Vec<(String, &'static Value)>) {
    let schema = of_value(schema);
    match value {
        Value::Object(object) => {
            let properties = schema.get("properties");
            out.extend(properties.map(|_| (at.to_owned(), schema)));
            for (name, value) in object {
                let inner = properties.map_or_else(|| schema.get("additionalProperties"), |properties| properties.get(name));
                if let Some(inner) = inner {
                    objects(value, inner, &format!("{at}/{}", name.replace('~', "~0").replace('/', "~1")), out);
                }
            }
        }
        Value::Array(array) => {
            if let Some(items) = schema.get("items") {
                array.iter().enumerate().for_each(|(i, value)| objects(value, items, &format!("{at}/{i}"), out));
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn accepted() -> Vec<(String, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/accepted");
    let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let read =
        |path: &Path| serde_json::from_slice(&fs::read(path).unwrap_or_default()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    entries.filter_map(|entry| Some(entry.ok()?.path())).map(|path| (path.display().to_string(), read(&path))).collect()
}

/// Has every kind of object that there is, whether or not they go together.
fn whole() -> Value {
    let from = json!({ "upload": "u", "s3": null });
    json!({
        "$schema": "x", "version": "volley/v1", "name": "x",
        "items": { "matrix": { "axes": { "a": [1] }, "include": [{ "a": 2 }] }, "range": { "to": 3 }, "jsonl": from, "lines": from,
            "csv": { "upload": "u" }, "results": { "stage": "t" } },
        "task": {
            "isolation": "microvm", "image": "i", "command": ["a", "b"], "env": { "A": "b" }, "stdin": "x",
            "resources": { "cpus": 1, "memory": "1GiB", "pids": 4 }, "outputs": ["o"],
            "inputs": [{ "from": "s3://bucket/k", "path": "p", "executable": true }],
            "volumes": [{ "volume": "v", "path": "/v", "access": "clone", "keep": { "name": "k" } }],
            "network": { "allow": [{ "host": "h", "ports": [1] }] }, "secrets": [{ "name": "n", "env": "N" }],
            "timeouts": { "run": "1s" }, "warmUp": [{ "command": ["c"], "env": { "A": "b" } }], "keepProcesses": true, "keepFailed": "30m",
            "retry": { "backoff": { "factor": 2 }, "rules": [{ "match": { "classes": ["oom"] }, "action": "fail" }] }
        },
        "stages": [{ "name": "s", "needs": [{ "stage": "t", "by": "index" }], "task": { "command": "x" } }],
        "schedule": { "cron": "* * * * *", "overlap": "skip" }, "notify": [{ "webhook": "http://x", "on": ["failed"] }],
        "retention": { "job": "1d" }, "limits": { "failFast": "now", "maxFailures": 1 }, "placement": { "labels": { "a": "b" } }
    })
}

#[test]
fn what_is_accepted_fits_the_schema() {
    for (path, spec) in accepted() {
        assert!(fits(&spec, job_schema()), "{path}");
    }
}

/// Each field of each object is set to null, and taken out: what may be left out may be null, and what must be there may not.
#[test]
fn a_field_that_is_null_is_one_that_is_left_out() {
    let (mut left_out, mut needed) = (0, 0);
    for (path, spec) in accepted().into_iter().chain([("whole".to_owned(), whole())]) {
        let mut all = Vec::new();
        objects(&spec, job_schema(), "", &mut all);
        for (at, schema) in all {
            let required = schema.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
            for name in schema["properties"].as_object().unwrap_or_else(|| panic!("{schema}")).keys() {
                let (mut null, mut without) = (spec.clone(), spec.clone());
                null.pointer_mut(&at).unwrap_or_else(|| panic!("{at}"))[name] = Value::Null;
                without.pointer_mut(&at).and_then(Value::as_object_mut).unwrap_or_else(|| panic!("{at}")).remove(name);
                let [one, other] = [null, without].map(|spec| {
                    let bytes = spec.to_string().into_bytes();
                    let taken = parse_and_validate(&bytes, &Features::all()).map_err(|problems| problems.to_string());
                    (fits(&spec, job_schema()), parse(&bytes).map_err(|problems| problems.to_string()), taken)
                });
                let place = format!("{path} {at}/{name}");
                assert_eq!(one, other, "{place}");
                let (fitting, form, taken) = one;
                assert!(taken.is_err() || fitting, "{place} is taken, and does not fit the schema");
                assert!(!fitting || form.is_ok(), "{place} fits the schema: {form:?}");
                match required.iter().any(|required| required == name) {
                    true => {
                        needed += 1;
                        assert!(!fitting && form.is_err(), "{place} must be there");
                    }
                    false => {
                        left_out += 1;
                        assert!(form.is_ok(), "{place}: {form:?}");
                    }
                }
            }
        }
    }
    assert!(left_out > 500 && needed > 50, "{left_out} {needed}");
}

#[test]
fn a_field_that_is_not_known_is_refused_though_it_is_null() {
    for (path, spec) in accepted() {
        let mut all = Vec::new();
        objects(&spec, job_schema(), "", &mut all);
        for (at, _) in all {
            let mut odd = spec.clone();
            odd.pointer_mut(&at).unwrap_or_else(|| panic!("{at}"))["odd"] = Value::Null;
            let refused = parse(odd.to_string().as_bytes()).map_err(|problems| problems.to_string());
            assert!(refused.is_err_and(|why| why.contains("odd: unknown field")) && !fits(&odd, job_schema()), "{path} {at}");
        }
    }
}

/// Every kind of object of the schema is in the document that is judged.
#[test]
fn no_kind_of_object_is_left_out() {
    let mut all = Vec::new();
    objects(&whole(), job_schema(), "", &mut all);
    for (name, definition) in job_schema()["$defs"].as_object().into_iter().flatten() {
        let met = definition.get("properties").is_none() || all.iter().any(|(_, schema)| std::ptr::eq(*schema, definition));
        assert!(met, "{name}");
    }
}
