//! The JSON Schema of a job spec, generated from the types in `spec`.
//!
//! Owns the schema as one constant value, what is smoothed in it for editors, and the form of it that a spec is walked along (`check`).
//! `schema/job.schema.json` is a copy of the schema that a test compares.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::spec::JobSpec;

/// The schema's own name.
pub const SCHEMA_ID: &str = "urn:volley:schema:job:v1";

static FORM: LazyLock<Value> = LazyLock::new(generate);
static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let mut schema = FORM.clone();
    take_null(&mut schema);
    schema
});

/// The JSON Schema (draft 2020-12) of a job spec.
#[must_use]
pub fn job_schema() -> &'static Value {
    &SCHEMA
}

/// The schema without the nulls: whoever walks along it takes them out first, and its messages name what a field holds.
pub(crate) fn form() -> &'static Value {
    &FORM
}

/// The schema as the file in `schema/` has it.
#[must_use]
pub fn job_schema_text() -> String {
    format!("{:#}\n", *SCHEMA)
}

fn generate() -> Value {
    let mut schema = SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<JobSpec>().to_value();
    smooth(&mut schema);
    if let Value::Object(root) = &mut schema {
        root.insert("$id".into(), json!(SCHEMA_ID));
        root.insert("title".into(), json!("Volley job spec, volley/v1"));
        if let Some(Value::Object(properties)) = root.get_mut("properties") {
            properties.insert(
                "$schema".into(),
                json!({ "type": "string", "description": "Where an editor finds this schema. Not part of the job." }),
            );
        }
    }
    schema
}

/// Takes out what says "may be null" (of some fields only: see [`take_null`]) and the number formats that only Rust knows.
fn smooth(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            drop_null(object);
            let rust_format = object.get("format").and_then(Value::as_str).is_some_and(|f| !f.starts_with("volley-"));
            if rust_format {
                object.remove("format");
            }
            if object.get("default").is_some_and(Value::is_null) {
                object.remove("default");
            }
            // Not into values that merely look like schemas.
            object.iter_mut().filter(|(key, _)| !matches!(key.as_str(), "examples" | "default")).for_each(|(_, v)| smooth(v));
        }
        Value::Array(array) => array.iter_mut().for_each(smooth),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Says of every field that may be left out that it may be null: to the reader both mean the same.
fn take_null(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            object.iter_mut().filter(|(key, _)| !matches!(key.as_str(), "examples" | "default")).for_each(|(_, v)| take_null(v));
            let required = object.get("required").cloned().unwrap_or_default();
            let must = |name: &str| required.as_array().is_some_and(|names| names.iter().any(|required| required == name));
            if let Some(Value::Object(properties)) = object.get_mut("properties") {
                properties.iter_mut().filter(|(name, _)| !must(name)).for_each(|(_, property)| or_null(property));
            }
        }
        Value::Array(array) => array.iter_mut().for_each(take_null),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn or_null(property: &mut Value) {
    let Value::Object(object) = property else { return };
    match object.get_mut("type") {
        Some(Value::Array(types)) => types.push(json!("null")),
        Some(only) => *only = json!([only.take(), "null"]),
        None => {
            if let Some(named) = object.remove("$ref") {
                object.insert("anyOf".into(), json!([{ "$ref": named }, { "type": "null" }]));
            }
        }
    }
}

fn drop_null(object: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = types.as_slice() {
            let only = only.clone();
            object.insert("type".into(), only);
        }
    }
    if let Some(Value::Array(branches)) = object.get_mut("anyOf") {
        branches.retain(|branch| branch != &json!({ "type": "null" }));
        if let [Value::Object(only)] = branches.as_slice() {
            let only = only.clone();
            object.remove("anyOf");
            for (key, value) in only {
                object.entry(key).or_insert(value);
            }
        }
    }
}
