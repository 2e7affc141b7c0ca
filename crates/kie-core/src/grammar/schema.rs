//! What of JSON Schema can be promised. llguidance takes unknown keywords for annotations; here
//! they are refused, with the place, and so is what it would read otherwise than the standard says.

use std::cell::Cell;
use std::collections::BTreeSet;

use serde_json::{json, Map, Value};

/// Deepest nesting of schemas, references not followed.
const DEPTH_MAX: usize = 64;
/// Most schemas in one: references are followed by recursion, through all of them at worst.
const SCHEMAS_MAX: usize = 10_000;

/// Steps of what follows references over and over; then it knows nothing more.
const FUEL: usize = 20_000;
/// Longest lists that are looked through for it.
const LIST_MAX: usize = 256;

/// Keywords whose value is one schema.
const ONE: [&str; 2] = ["additionalItems", "additionalProperties"];
/// A list of schemas.
const LISTS: [&str; 4] = ["anyOf", "oneOf", "allOf", "prefixItems"];
/// An object of schemas.
const MAPS: [&str; 2] = ["properties", "patternProperties"];
/// No schemas in it.
const PLAIN: [&str; 18] = [
    "const",
    "enum",
    "type",
    "minItems",
    "maxItems",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "format",
    "$ref",
];
/// What says nothing about a value. Definitions are looked at where they are referred to.
const ANNOTATIONS: [&str; 17] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
];
const FORMATS: [&str; 11] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "unknown",
    "uri",
    "uuid",
];
/// A schema as llguidance is to read it: compact JSON, alternatives that exclude each other said
/// as `anyOf`.
///
/// # Errors
/// Where it is no schema that can be kept to, and why.
pub(super) fn prepared(text: &str) -> Result<Value, String> {
    let mut schema: Value =
        serde_json::from_str(text).map_err(|e| format!("the schema is no JSON: {e}"))?;
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    let mut walk = Walk {
        root: &schema,
        schemas: 0,
        fuel: Cell::new(FUEL),
        referred: BTreeSet::new(),
        apart: Vec::new(),
    };
    walk.schema("", &schema, 0)?;
    while let Some(place) = walk.next() {
        let found = resolve(&schema, &place)
            .ok_or_else(|| format!("\"$ref\": \"#{place}\" is nowhere in the schema"))?;
        walk.schema(&place, found, 0)?;
    }
    let apart = std::mem::take(&mut walk.apart);
    for place in apart {
        if let Some(Value::Object(of)) = schema.pointer_mut(&place) {
            exclusive_to_any(of);
        }
    }
    if let Value::Object(of) = &mut schema {
        let options = json!({
            "whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?",
        });
        of.insert("x-guidance".to_owned(), options);
    }
    Ok(schema)
}

/// Bytes that opening one member or item of a schema makes the shortest ending longer, at most, as
/// far as they can be told.
pub(super) fn largest(schema: &Value) -> usize {
    let (mut most, fuel) = (0, Cell::new(FUEL));
    let mut left = vec![schema];
    while let Some(at) = left.pop() {
        match at {
            Value::Object(of) => {
                let members = of.get("properties").and_then(Value::as_object);
                for (name, member) in members.into_iter().flatten() {
                    most = most.max(name.len() + 5 + least(schema, member, 8, &fuel));
                }
                for key in ["items", "additionalProperties"] {
                    most =
                        most.max(of.get(key).map_or(0, |below| 6 + least(schema, below, 8, &fuel)));
                }
                left.extend(of.values());
            }
            Value::Array(list) => left.extend(list),
            _ => {}
        }
    }
    most
}

/// Bytes of a shortest value, about.
fn least(root: &Value, schema: &Value, depth: usize, fuel: &Cell<usize>) -> usize {
    const MOST: usize = 1 << 14;
    let left = fuel.get();
    let Some(of) = schema.as_object().filter(|_| depth > 0 && left > 0) else { return 1 };
    fuel.set(left - 1);
    let below = |schema: &Value| least(root, schema, depth - 1, fuel);
    let list = |key: &str| of.get(key).and_then(Value::as_array).map_or(&[][..], |l| &l[..]);
    let count = |key: &str| of.get(key).and_then(Value::as_u64).unwrap_or(0).min(1 << 10) as usize;
    if let Some(value) = of.get("const") {
        return size(value);
    }
    let shortest = list("enum").iter().take(LIST_MAX).map(size).min();
    if let Some(bytes) = shortest {
        return bytes;
    }
    let place = of.get("$ref").and_then(Value::as_str).and_then(|text| text.strip_prefix('#'));
    let referred = place.and_then(|place| resolve(root, place)).map_or(0, below);
    let any = list("anyOf").iter().chain(list("oneOf")).map(below).min().unwrap_or(0);
    let all = list("allOf").iter().map(below).max().unwrap_or(0);
    let member = |name: &str| of.get("properties").and_then(|all| all.get(name)).map_or(1, below);
    let names = list("required").iter().filter_map(Value::as_str);
    let object: usize = names.map(|name| name.len() + 5 + member(name)).sum();
    let item = of.get("items").map_or(1, below) + 2;
    let text = if of.contains_key("pattern") || of.contains_key("format") { 24 } else { 0 };
    let own = 4 + object + item * count("minItems") + text + count("minLength");
    own.max(referred).max(any).max(all).min(MOST)
}

/// Bytes of a constant, about.
fn size(value: &Value) -> usize {
    value.as_str().map_or(6, |text| text.len() + 2)
}

/// Alternatives of which no two hold for one value.
fn exclusive_to_any(of: &mut Map<String, Value>) {
    let Some(options) = of.remove("oneOf") else { return };
    if !of.contains_key("anyOf") {
        of.insert("anyOf".to_owned(), options);
        return;
    }
    let all = of.entry("allOf").or_insert_with(|| json!([]));
    if let Value::Array(all) = all {
        all.push(json!({"anyOf": options}));
    }
}

/// What a pointer behind `#` names; as llguidance looks it up, without escapes.
fn resolve<'a>(root: &'a Value, place: &str) -> Option<&'a Value> {
    let mut at = root;
    for segment in place.split('/').skip(1).filter(|_| place != "/") {
        at = match at {
            Value::Array(list) => list.get(segment.parse::<usize>().ok()?)?,
            Value::Object(of) => of.get(segment)?,
            _ => return None,
        };
    }
    Some(at)
}

struct Walk<'a> {
    root: &'a Value,
    /// Looked at so far.
    schemas: usize,
    fuel: Cell<usize>,
    /// Places that references name; true: looked at.
    referred: BTreeSet<(bool, String)>,
    /// Places of `oneOf` whose alternatives exclude each other.
    apart: Vec<String>,
}

impl<'a> Walk<'a> {
    /// A place that is referred to and was not looked at.
    fn next(&mut self) -> Option<String> {
        let (seen, place) = self.referred.pop_first()?;
        if seen {
            self.referred.insert((seen, place));
            return None;
        }
        self.referred.insert((true, place.clone()));
        Some(place)
    }

    fn schema(&mut self, place: &str, schema: &Value, depth: usize) -> Result<(), String> {
        let at = |what: String| format!("#{place}: {what}");
        self.schemas += 1;
        if self.schemas > SCHEMAS_MAX {
            return Err(at(format!("wanted at most {SCHEMAS_MAX} schemas")));
        }
        if depth > DEPTH_MAX {
            return Err(at(format!("schemas may nest {DEPTH_MAX} deep")));
        }
        let of = match schema {
            Value::Bool(_) => return Ok(()),
            Value::Object(of) => of,
            _ => return Err(at("wanted a schema (an object, true or false)".to_owned())),
        };
        for (key, value) in of {
            let below = format!("{place}/{key}");
            match key.as_str() {
                "items" if value.is_array() => self.list(&below, value, depth)?,
                "items" => self.schema(&below, value, depth + 1)?,
                "$ref" => self.refer(value).map_err(at)?,
                "$id" if place.is_empty() => {}
                "$id" => return Err(at("\"$id\" is supported at the root alone".to_owned())),
                "format" if !FORMATS.iter().any(|known| value == known) => {
                    return Err(at(format!("format {value} is not supported")));
                }
                k if ONE.contains(&k) => self.schema(&below, value, depth + 1)?,
                k if LISTS.contains(&k) => self.list(&below, value, depth)?,
                k if MAPS.contains(&k) => {
                    let map = value.as_object();
                    let map = map.ok_or_else(|| at(format!("\"{k}\" must be an object")))?;
                    for (name, value) in map {
                        let name = name.replace('~', "~0").replace('/', "~1");
                        self.schema(&format!("{below}/{name}"), value, depth + 1)?;
                    }
                }
                k if PLAIN.contains(&k) || ANNOTATIONS.contains(&k) => {}
                k if k.starts_with("x-") && k != "x-guidance" => {}
                k => return Err(at(format!("\"{k}\" is not supported"))),
            }
        }
        if let Some(options) = of.get("oneOf").and_then(Value::as_array) {
            let exclude =
                |(n, a): (usize, &Value)| options[n + 1..].iter().all(|b| self.excludes(a, b, 8));
            if options.iter().enumerate().all(exclude) {
                self.apart.push(place.to_owned());
            }
        }
        Ok(())
    }

    fn list(&mut self, place: &str, list: &Value, depth: usize) -> Result<(), String> {
        let schemas = list.as_array().ok_or_else(|| format!("#{place}: must be a list"))?;
        let mut each = schemas.iter().enumerate();
        each.try_for_each(|(n, schema)| self.schema(&format!("{place}/{n}"), schema, depth + 1))
    }

    fn refer(&mut self, value: &Value) -> Result<(), String> {
        let place = value.as_str().and_then(|text| text.strip_prefix('#'));
        let Some(place) = place.filter(|p| p.is_empty() || p.starts_with('/')) else {
            return Err(format!("\"$ref\": {value} is not supported: wanted \"#/...\""));
        };
        if !self.referred.contains(&(true, place.to_owned())) {
            self.referred.insert((false, place.to_owned()));
        }
        Ok(())
    }

    /// Whether no value is valid by both, as far as types, constants and required members tell.
    fn excludes(&self, a: &Value, b: &Value, depth: usize) -> bool {
        let left = self.fuel.get();
        let (Some(a), Some(b)) = (self.object(a, 8), self.object(b, 8)) else { return false };
        let long = |of: &Map<String, Value>| {
            let lists = ["enum", "type", "required"].map(|key| of.get(key));
            let items = |v: &Value| v.as_array().map_or(0, Vec::len);
            let members = of.get("properties").and_then(Value::as_object).map_or(0, Map::len);
            members.max(lists.into_iter().flatten().map(items).max().unwrap_or(0)) > LIST_MAX
        };
        if left == 0 || long(a) || long(b) {
            return false;
        }
        self.fuel.set(left - 1);
        if let (Some(a), Some(b)) = (values(a), values(b)) {
            return a.iter().all(|value| !b.contains(value));
        }
        if let (Some(a), Some(b)) = (types(a), types(b)) {
            if a.iter().all(|t| !b.contains(t)) {
                return true;
            }
        }
        let required = |of: &Map<String, Value>, name: &str| {
            let list = of.get("required").and_then(Value::as_array);
            list.is_some_and(|list| list.iter().any(|n| n == name))
        };
        let is_object = |of: &Map<String, Value>| of.get("type").is_some_and(|t| t == "object");
        let members = a.get("properties").and_then(Value::as_object).into_iter().flatten();
        depth > 0
            && is_object(a)
            && is_object(b)
            && members.into_iter().any(|(name, value)| {
                let other = b.get("properties").and_then(|p| p.get(name));
                (required(a, name) || required(b, name))
                    && other.is_some_and(|other| self.excludes(value, other, depth - 1))
            })
    }

    /// A schema that is an object, behind its references.
    fn object<'b>(&'b self, schema: &'b Value, most: usize) -> Option<&'b Map<String, Value>> {
        let of = schema.as_object()?;
        match of.get("$ref").and_then(Value::as_str) {
            None => Some(of),
            Some(place) if most > 0 => {
                self.object(resolve(self.root, place.strip_prefix('#')?)?, most - 1)
            }
            Some(_) => None,
        }
    }
}

/// The values of a constant or an enumeration.
fn values(of: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (of.get("const"), of.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(Value::Array(list))) => Some(list.iter().collect()),
        (None, _) => None,
    }
}

/// Types that values have; numbers are one type, since each integer is a number.
fn types(of: &Map<String, Value>) -> Option<Vec<&str>> {
    let list = match of.get("type")? {
        Value::Array(list) => &list[..],
        single => std::slice::from_ref(single),
    };
    let names = list.iter().map(|value| value.as_str());
    names.map(|name| name.map(|n| if n == "integer" { "number" } else { n })).collect()
}
