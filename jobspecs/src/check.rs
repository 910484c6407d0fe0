//! Walks a JSON value along the schema and lists everything that doesn't fit.
//!
//! Owns unknown and missing fields, wrong types, ranges, lengths and text forms. Does not own reading bytes (`parse`) or anything
//! that needs more than one field to judge (`validate`). What doesn't fit is replaced by a stand-in, so that the rest can still be
//! judged.

use serde_json::{Map, Value, json};

use crate::problem::{Problem, join, list, suggest};
use crate::schema::form;
use crate::spec::scalars::{ScalarError, check_format};

/// What people write when they come from elsewhere, and what it is called here.
const SYNONYMS: [(&str, &str); 29] = [
    ("apiversion", "version"),
    ("args", "command"),
    ("argv", "command"),
    ("array", "items"),
    ("checksum", "sha256"),
    ("cmd", "command"),
    ("cwd", "workdir"),
    ("cpu", "cpus"),
    ("maxattempts", "attempts"),
    ("environment", "env"),
    ("entrypoint", "command"),
    ("foreach", "items"),
    ("maxparallel", "concurrency"),
    ("mem", "memory"),
    ("mount", "path"),
    ("nodeselector", "placement"),
    ("parallel", "concurrency"),
    ("parallelism", "concurrency"),
    ("ram", "memory"),
    ("retries", "retry"),
    ("run", "command"),
    ("script", "command"),
    ("source", "from"),
    ("src", "from"),
    ("tags", "labels"),
    ("target", "path"),
    ("timeout", "timeouts"),
    ("url", "from"),
    ("workingdir", "workdir"),
];

/// What a walk found.
pub(crate) struct Checked {
    /// The value, with a stand-in for whatever didn't fit.
    pub value: Value,
    /// What didn't fit.
    pub problems: Vec<Problem>,
    /// Places that hold a stand-in though no problem names them.
    pub stood_in: Vec<String>,
}

/// Checks a whole job spec.
pub(crate) fn check_job(mut value: Value) -> Checked {
    let root = form();
    let mut walk = Walk { root, problems: Vec::new(), stood_in: Vec::new() };
    if let Value::Object(object) = &mut value {
        object.remove("$schema").inspect(|schema| walk.visit_schema_name(schema));
    }
    walk.visit(&mut value, root, "$");
    Checked { value, problems: walk.problems, stood_in: walk.stood_in }
}

struct Walk {
    root: &'static Value,
    problems: Vec<Problem>,
    stood_in: Vec<String>,
}

impl Walk {
    fn visit_schema_name(&mut self, schema: &Value) {
        if !schema.is_string() && !schema.is_null() {
            self.problems.push(Problem::new("$.$schema", "wrong type").found(schema).allowed("text"));
        }
    }

    /// Checks `value`; replaces it when it doesn't fit itself.
    fn visit(&mut self, value: &mut Value, schema: &'static Value, path: &str) {
        let schema = self.resolve(schema);
        if let Some(problem) = misfit(value, schema, path) {
            self.problems.push(problem);
            *value = self.stand_in(schema);
            return;
        }
        match value {
            Value::Object(object) => self.visit_object(object, schema, path),
            Value::Array(array) => {
                if let Some(items) = schema.get("items").filter(|items| items.is_object()) {
                    for (index, item) in array.iter_mut().enumerate() {
                        self.visit(item, items, &format!("{path}[{index}]"));
                    }
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    fn visit_object(&mut self, object: &mut Map<String, Value>, schema: &'static Value, path: &str) {
        let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
            if let Some(values) = schema.get("additionalProperties").filter(|values| values.is_object()) {
                for (key, value) in object.iter_mut() {
                    self.visit(value, values, &join(path, key));
                }
            }
            return;
        };
        // What is null is left out. A field that isn't known is named all the same: it may be one that was meant.
        object.retain(|name, value| !value.is_null() || !properties.contains_key(name));
        let known: Vec<&String> = properties.keys().filter(|name| object.contains_key(*name)).collect();
        self.take_unknown(object, properties, path);
        for name in known {
            if let (Some(value), Some(property)) = (object.get_mut(name), properties.get(name)) {
                self.visit(value, property, &join(path, name));
            }
        }
        let required = schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
        for name in required {
            if !object.contains_key(name)
                && let Some(property) = properties.get(name)
            {
                let resolved = self.resolve(property);
                self.problems.push(Problem::new(join(path, name), "missing").allowed(wanted(resolved)));
                object.insert(name.to_owned(), self.stand_in(property));
            }
        }
    }

    /// Takes out and reports unknown fields. One that was probably meant to be a field that isn't there counts as that field: it is
    /// checked as it, and nothing is concluded from the absence of the right name.
    fn take_unknown(&mut self, object: &mut Map<String, Value>, properties: &'static Map<String, Value>, path: &str) {
        let unknown: Vec<String> = object.keys().filter(|key| !properties.contains_key(*key)).cloned().collect();
        for key in unknown {
            let Some(mut value) = object.remove(&key) else { continue };
            let plain = key.replace(['_', '-'], "").to_lowercase();
            let names = properties.keys().map(String::as_str).filter(|name| *name != "$schema");
            let synonym = SYNONYMS.iter().find(|(name, _)| *name == plain).map(|(_, meant)| *meant);
            let meant = synonym.filter(|meant| properties.contains_key(*meant)).or_else(|| suggest(&key, names.clone()));
            let place = join(path, &key);
            let mut problem = Problem::new(&place, "unknown field").allowed(list(names));
            if let Some(meant) = meant {
                problem = problem.hint(format!("did you mean \"{meant}\"?"));
            }
            self.problems.push(problem);
            let Some((meant, property)) = meant.and_then(|meant| Some((meant, properties.get(meant)?))) else { continue };
            if object.contains_key(meant) {
                continue;
            }
            if misfit(&value, self.resolve(property), &place).is_none() {
                self.visit(&mut value, property, &place);
            } else {
                value = self.stand_in(property);
                self.stood_in.push(join(path, meant));
            }
            object.insert(meant.to_owned(), value);
        }
    }

    fn resolve(&self, schema: &'static Value) -> &'static Value {
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|name| name.strip_prefix('#'));
        target.and_then(|pointer| self.root.pointer(pointer)).unwrap_or(schema)
    }

    /// Some value that fits.
    fn stand_in(&self, schema: &'static Value) -> Value {
        let own = schema.get("examples").and_then(|examples| examples.get(0));
        let schema = self.resolve(schema);
        let choices = choices(schema);
        if let Some(example) = own.or_else(|| schema.get("examples").and_then(|examples| examples.get(0))) {
            return example.clone();
        }
        if let Some(first) = choices.first() {
            return json!(first);
        }
        match types(schema).first() {
            Some(&"string") => json!("x"),
            Some(&("integer" | "number")) => schema.get("minimum").cloned().unwrap_or(json!(1)),
            Some(&"boolean") => json!(false),
            Some(&"array") => json!([]),
            Some(&"object") => {
                let mut object = Map::new();
                let required = schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
                for name in required {
                    if let Some(property) = schema.get("properties").and_then(|properties| properties.get(name)) {
                        object.insert(name.to_owned(), self.stand_in(property));
                    }
                }
                Value::Object(object)
            }
            _ => Value::Null,
        }
    }
}

/// The JSON types a schema allows; none: any.
fn types(schema: &Value) -> Vec<&str> {
    match schema.get("type") {
        Some(Value::String(one)) => vec![one.as_str()],
        Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// The texts a schema allows; none: any.
fn choices(schema: &Value) -> Vec<&str> {
    let listed = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    let branches = schema.get("oneOf").and_then(Value::as_array).into_iter().flatten();
    let described = branches.flat_map(|branch| {
        let one = branch.get("const").into_iter();
        one.chain(branch.get("enum").and_then(Value::as_array).into_iter().flatten())
    });
    listed.chain(described).chain(schema.get("const")).filter_map(Value::as_str).collect()
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn type_word(name: &str) -> &str {
    match name {
        "string" => "a text",
        "integer" => "a whole number",
        "number" => "a number",
        "boolean" => "true or false",
        "array" => "a list",
        "object" => "an object",
        other => other,
    }
}

/// What a schema wants, in words.
fn wanted(schema: &'static Value) -> String {
    if let Some(Err((_, allowed))) = schema.get("format").and_then(Value::as_str).and_then(|f| check_format(f, &Value::Null)) {
        return allowed.to_owned();
    }
    let choices = choices(schema);
    if !choices.is_empty() {
        return list(choices.into_iter());
    }
    let types: Vec<&str> = types(schema).into_iter().map(type_word).collect();
    let mut text = types.join(" or ");
    let bounds = ["minimum", "maximum"].map(|name| schema.get(name));
    match bounds {
        [Some(min), Some(max)] => text.push_str(&format!(" from {min} to {max}")),
        [Some(min), None] => text.push_str(&format!(" of at least {min}")),
        [None, Some(max)] => text.push_str(&format!(" of at most {max}")),
        [None, None] => {}
    }
    text
}

/// Does the value itself, whatever is in it, not fit?
fn misfit(value: &Value, schema: &'static Value, path: &str) -> Option<Problem> {
    if let Some(Err((error, allowed))) = schema.get("format").and_then(Value::as_str).and_then(|f| check_format(f, value)) {
        return Some(format_problem(value, error, allowed, path));
    }
    let choices = choices(schema);
    // A choice among described texts has its type in each branch, not at the top.
    let allowed_types = if choices.is_empty() { types(schema) } else { vec!["string"] };
    let fits = allowed_types.is_empty()
        || allowed_types.iter().any(|name| *name == type_of(value) || (*name == "number" && type_of(value) == "integer"));
    if !fits {
        let problem = Problem::new(path, "wrong type").found(value).allowed(wanted(schema));
        let quoted = allowed_types.contains(&"string") && (value.is_number() || value.is_boolean());
        return Some(if quoted { problem.hint(format!("write \"{value}\" with quotation marks")) } else { problem });
    }
    match value {
        Value::String(text) if !choices.is_empty() && !choices.contains(&text.as_str()) => {
            let problem = Problem::new(path, "unknown value").found(value).allowed(list(choices.iter().copied()));
            Some(match suggest(text, choices.into_iter()) {
                Some(meant) => problem.hint(format!("did you mean \"{meant}\"?")),
                None => problem,
            })
        }
        Value::String(text) => length_problem("character", text.chars().count(), schema, ["minLength", "maxLength"], path),
        Value::Array(array) => length_problem("element", array.len(), schema, ["minItems", "maxItems"], path),
        Value::Object(object) => length_problem("field", object.len(), schema, ["minProperties", "maxProperties"], path),
        Value::Number(number) => {
            let number = number.as_f64().unwrap_or(f64::MAX);
            let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
            let low = bound("minimum").is_some_and(|min| number < min);
            let high = bound("maximum").is_some_and(|max| number > max);
            (low || high).then(|| Problem::new(path, "out of range").found(value).allowed(wanted(schema)))
        }
        Value::Null | Value::Bool(_) => None,
    }
}

fn format_problem(value: &Value, error: ScalarError, allowed: &str, path: &str) -> Problem {
    let problem = Problem::new(path, error.to_string()).found(value).allowed(allowed);
    match error {
        ScalarError::UnknownUnit if value.as_str().is_some_and(|text| text.ends_with("min")) => problem.hint("minutes are \"m\""),
        ScalarError::UnknownUnit if value.as_str().is_some_and(|text| text.chars().any(|c| matches!(c, 'b' | 'k' | 'g'))) => {
            problem.hint("upper and lower case matter")
        }
        _ => problem,
    }
}

fn length_problem(what: &str, len: usize, schema: &Value, names: [&str; 2], path: &str) -> Option<Problem> {
    let [min, max] = names.map(|name| schema.get(name).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok()));
    let plural = |n: usize| if n == 1 { "" } else { "s" };
    let found = format!("{len} {what}{}", plural(len));
    if let Some(min) = min.filter(|min| len < *min) {
        let message = if len == 0 { "empty" } else { "too short" };
        return Some(Problem::new(path, message).allowed(format!("at least {min} {what}{}", plural(min))));
    }
    let max = max.filter(|max| len > *max)?;
    Some(Problem::new(path, "too long").found(found).allowed(format!("at most {max} {what}{}", plural(max))))
}
