//! Which texts schemas of draft 2020-12 allow, keyword by keyword, in the manner of the standard's
//! own test suite: of what constrains a text that is written from left to right. Members come in
//! the order of `properties`.

use super::*;

/// A schema, texts that it allows, texts that it does not.
type Case = (&'static str, &'static [&'static str], &'static [&'static str]);

const CASES: &[Case] = &[
    // Types.
    (
        r#"{"type": "integer"}"#,
        &["0", "-3", "1234567"],
        &["1.5", "\"1\"", "true", "null", "[1]", "01"],
    ),
    (r#"{"type": "number"}"#, &["1", "-1.5", "0.25", "1e3"], &["\"1\"", "{}", ".5", "+1", "1."]),
    (
        r#"{"type": "string"}"#,
        &["\"\"", "\"a b\"", "\"\\n\\\"é\""],
        &["1", "a", "\"\n\"", "\"\\x\"", "\"a"],
    ),
    (r#"{"type": "boolean"}"#, &["true", "false"], &["0", "\"true\"", "null", "True"]),
    (r#"{"type": "null"}"#, &["null"], &["0", "false", "\"\"", "nul"]),
    (
        r#"{"type": "object"}"#,
        &["{}", "{\"a\":1}", "{\"a\":{\"b\":[]}}"],
        &["[]", "1", "{a:1}", "{\"a\":}"],
    ),
    (r#"{"type": "array"}"#, &["[]", "[1,\"a\",null]"], &["{}", "[1,]", "[,1]", "1"]),
    (r#"{"type": ["integer", "string"]}"#, &["1", "\"a\""], &["1.5", "null", "{}"]),
    (
        r#"{"type": ["array", "null"], "items": {"type": "integer"}}"#,
        &["[1]", "null"],
        &["[null]", "1"],
    ),
    ("true", &["1", "{\"a\":[null]}", "\"x\""], &["", "{", "tru"]),
    ("{}", &["false", "[[]]"], &["undefined"]),
    // One value, or some.
    (r#"{"const": 2}"#, &["2"], &["3", "\"2\"", "[2]"]),
    (
        r#"{"const": {"foo": "bar", "baz": [1, false]}}"#,
        &["{\"foo\":\"bar\",\"baz\":[1,false]}"],
        &["{\"foo\":\"bar\"}", "{\"foo\":\"bar\",\"baz\":[1,0]}", "{}"],
    ),
    (r#"{"const": false}"#, &["false"], &["0", "\"\"", "true"]),
    (r#"{"const": 0}"#, &["0"], &["false", "null", "\"\""]),
    (r#"{"const": "hello\u0000there"}"#, &["\"hello\\u0000there\""], &["\"hellothere\""]),
    (r#"{"enum": [1, 2, 3]}"#, &["1", "3"], &["4", "12", "\"1\""]),
    (
        r#"{"enum": [6, "foo", [], true, {"foo": 12}]}"#,
        &["6", "\"foo\"", "[]", "true", "{\"foo\":12}"],
        &["null", "{\"foo\":false}", "{}", "[0]", "false"],
    ),
    (
        r#"{"enum": ["foo\nbar", "foo\rbar"]}"#,
        &["\"foo\\nbar\"", "\"foo\\rbar\""],
        &["\"abc\"", "\"foonbar\""],
    ),
    (r#"{"type": "string", "enum": ["a", 1]}"#, &["\"a\""], &["1"]),
    (r#"{"enum": ["é", "日本"]}"#, &["\"é\"", "\"日本\""], &["\"e\"", "\"日\""]),
    // Members of objects.
    (
        r#"{"properties": {"foo": {"type": "integer"}, "bar": {"type": "string"}},
        "type": "object"}"#,
        &["{\"foo\":1,\"bar\":\"baz\"}", "{\"bar\":\"\"}", "{}", "{\"quux\":[]}"],
        &["{\"foo\":1,\"bar\":{}}", "{\"foo\":[]}", "{\"foo\":\"1\"}"],
    ),
    (
        r#"{"type": "object", "properties": {"foo": {}, "bar": {}}, "required": ["foo"]}"#,
        &["{\"foo\":1}", "{\"foo\":null,\"bar\":2}"],
        &["{}", "{\"bar\":1}"],
    ),
    (
        r#"{"type": "object", "properties": {"foo\"bar": {"type": "integer"}},
        "required": ["foo\"bar"]}"#,
        &["{\"foo\\\"bar\":1}"],
        &["{\"foobar\":1}", "{\"foo\\\"bar\":\"1\"}"],
    ),
    (
        r#"{"type": "object", "properties": {"foo": {}, "bar": {}},
        "additionalProperties": false}"#,
        &["{\"foo\":1}", "{}"],
        &["{\"foo\":1,\"quux\":2}", "{\"quux\":true}"],
    ),
    (
        r#"{"type": "object", "properties": {"foo": {"type": "null"}},
        "additionalProperties": {"type": "boolean"}}"#,
        &["{\"foo\":null}", "{\"foo\":null,\"quux\":true}", "{\"a\":false,\"b\":true}"],
        &["{\"foo\":null,\"quux\":12}", "{\"foo\":true}"],
    ),
    (
        r#"{"type": "object", "patternProperties": {"^v": {"type": "integer"}},
        "additionalProperties": false}"#,
        &["{}", "{\"v1\":1}", "{\"v\":1,\"vroom\":2}"],
        &["{\"v\":\"1\"}", "{\"foo\":1}"],
    ),
    (
        r#"{"type": "object", "properties": {"a": {"type": "object",
        "properties": {"b": {"const": 1}},
        "required": ["b"]}}, "required": ["a"]}"#,
        &["{\"a\":{\"b\":1}}"],
        &["{\"a\":{}}", "{\"a\":{\"b\":2}}"],
    ),
    // Items of arrays.
    (
        r#"{"type": "array", "items": {"type": "integer"}}"#,
        &["[1,2,3]", "[]"],
        &["[1,\"x\"]", "[null]"],
    ),
    (
        r#"{"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}"#,
        &["[1,\"foo\"]", "[1]", "[]", "[1,\"foo\",true]"],
        &["[\"foo\",1]", "[1,2]"],
    ),
    (
        r#"{"type": "array", "prefixItems": [{"type": "integer"}, {}], "items": false}"#,
        &["[1]", "[1,\"a\"]"],
        &["[1,2,3]", "[\"1\"]"],
    ),
    (
        r#"{"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}}"#,
        &["[\"x\",2,3]"],
        &["[\"x\",\"y\"]"],
    ),
    (r#"{"type": "array", "minItems": 1, "items": {"const": 0}}"#, &["[0]", "[0,0]"], &["[]"]),
    (r#"{"type": "array", "maxItems": 2, "items": {"const": 0}}"#, &["[]", "[0,0]"], &["[0,0,0]"]),
    (
        r#"{"type": "array", "items": {"type": "array", "items": {"type": "number"}}}"#,
        &["[[1],[2,3]]"],
        &["[1]", "[[\"a\"]]"],
    ),
    // Strings.
    (
        r#"{"type": "string", "minLength": 2}"#,
        &["\"foo\"", "\"fo\"", "\"éé\""],
        &["\"f\"", "\"\"", "\"é\""],
    ),
    (r#"{"type": "string", "maxLength": 2}"#, &["\"f\"", "\"fo\"", "\"日本\""], &["\"foo\""]),
    (r#"{"type": "string", "pattern": "^a*$"}"#, &["\"aaa\"", "\"\""], &["\"abc\"", "1"]),
    (r#"{"type": "string", "pattern": "a+"}"#, &["\"xxaayy\""], &["\"xyz\""]),
    (
        r#"{"type": "string", "pattern": "^\\d{3}-[A-F]$"}"#,
        &["\"012-C\""],
        &["\"12-C\"", "\"012-G\""],
    ),
    (
        r#"{"type": "string", "format": "date"}"#,
        &["\"2020-02-28\""],
        &["\"2020-13-01\"", "\"20-02-28\"", "\"x\""],
    ),
    (
        r#"{"type": "string", "format": "uuid"}"#,
        &["\"2eb8aa08-aa98-11ea-b4aa-73b441d16380\""],
        &["\"2eb8aa08-aa98-11ea-b4aa-73b441d1638\"", "\"2eb8aa08aa9811eab4aa73b441d16380\""],
    ),
    (
        r#"{"type": "string", "format": "ipv4"}"#,
        &["\"192.168.0.1\""],
        &["\"256.0.0.1\"", "\"127.0.0\""],
    ),
    (
        r#"{"type": "string", "format": "time"}"#,
        &["\"08:30:06Z\""],
        &["\"8:30:06 Z\"", "\"24:00:00Z\""],
    ),
    // Numbers.
    (r#"{"type": "number", "minimum": 1.1}"#, &["2.6", "1.1", "10"], &["0.6", "1", "-3"]),
    (r#"{"type": "integer", "minimum": -2}"#, &["-1", "0", "-2"], &["-3"]),
    (r#"{"type": "number", "maximum": 3.0}"#, &["2.6", "3", "-100"], &["3.5", "30"]),
    (
        r#"{"type": "number", "exclusiveMinimum": 1.1, "maximum": 9}"#,
        &["1.2", "9"],
        &["1.1", "0.6", "9.5"],
    ),
    (r#"{"type": "integer", "exclusiveMaximum": 3, "minimum": 0}"#, &["2", "0"], &["3", "-1"]),
    (r#"{"type": "integer", "multipleOf": 2}"#, &["10", "0", "-4"], &["7", "11"]),
    (
        r#"{"type": "integer", "multipleOf": 3, "minimum": 1, "maximum": 10}"#,
        &["3", "9"],
        &["0", "4", "12"],
    ),
    // Schemas of schemas.
    (
        r#"{"anyOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}"#,
        &["1", "2.5", "3"],
        &["1.5"],
    ),
    (
        r#"{"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]}"#,
        &["\"fo\"", "\"foobar\""],
        &["\"foo\"", "3"],
    ),
    (
        r#"{"anyOf": [{"type": "object", "properties": {"bar": {"type": "integer"}},
        "required": ["bar"],
        "additionalProperties": false}, {"type": "null"}]}"#,
        &["{\"bar\":2}", "null"],
        &["{\"bar\":\"2\"}", "{}"],
    ),
    (r#"{"oneOf": [{"const": "a"}, {"type": "integer"}]}"#, &["\"a\"", "7"], &["\"b\"", "1.5"]),
    (
        r#"{"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}"#,
        &["3", "5"],
        &["2", "6", "\"3\""],
    ),
    (
        r#"{"type": "object", "allOf": [{"properties": {"bar": {"type": "integer"}},
        "required": ["bar"]},
        {"properties": {"foo": {"type": "string"}}, "required": ["foo"]}]}"#,
        &["{\"bar\":2,\"foo\":\"baz\"}"],
        &["{\"bar\":2}", "{\"foo\":\"baz\"}", "{\"bar\":\"x\",\"foo\":\"y\"}"],
    ),
    (
        r##"{"type": "object", "properties": {"foo": {"$ref": "#"}},
        "additionalProperties": false}"##,
        &["{\"foo\":{\"foo\":{}}}", "{}"],
        &["{\"bar\":{}}", "{\"foo\":{\"bar\":{}}}", "{\"foo\":1}"],
    ),
    (
        r##"{"$defs": {"dashed-field": {"type": "integer"}, "dotted.field": {"type": "null"}},
        "type": "array", "prefixItems": [{"$ref": "#/$defs/dashed-field"},
        {"$ref": "#/$defs/dotted.field"}],
        "items": false}"##,
        &["[1,null]", "[1]"],
        &["[null]", "[1,1]"],
    ),
    (
        r##"{"$ref": "#/$defs/c", "$defs": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/a"},
        "c": {"$ref": "#/$defs/b"}}}"##,
        &["5"],
        &["\"a\"", "1.5"],
    ),
    (
        r##"{"type": "array", "items": {"$ref": "#/$defs/node"},
        "$defs": {"node": {"type": "object",
        "properties": {"value": {"type": "number"}, "subtree": {"type": "array",
        "items": {"$ref": "#/$defs/node"}}},
        "required": ["value"], "additionalProperties": false}}}"##,
        &["[{\"value\":1,\"subtree\":[{\"value\":1.5}]}]", "[]"],
        &["[{\"subtree\":[]}]", "[{\"value\":1,\"subtree\":[{\"value\":\"x\"}]}]"],
    ),
];

/// Whether a grammar allows a text and that it ends there.
fn allows(compiled: &Compiled, text: &str) -> bool {
    let ids = tokenizer(false).encode(text, false).unwrap();
    assert_eq!(tokenizer(false).decode(&ids, true).unwrap(), text, "the tokenizer keeps it");
    let mut matcher = compiled.begin();
    matcher.validate_tokens(&ids).unwrap() == ids.len()
        && matcher.try_consume_tokens(&ids).unwrap() == ids.len()
        && matcher.is_accepting().unwrap()
}

#[test]
fn schemas_allow_what_the_standard_does_and_nothing_else() {
    let all = grammars();
    let mut wrong = Vec::new();
    for (text, good, bad) in CASES {
        let compiled = match compile(&all, &Grammar::JsonSchema((*text).into())) {
            Ok(compiled) => compiled,
            Err(why) => {
                wrong.push(format!("{text}: {why}"));
                continue;
            }
        };
        for (instances, wanted) in [(good, true), (bad, false)] {
            let other = instances.iter().filter(|one| allows(&compiled, one) != wanted);
            wrong.extend(other.map(|one| format!("{text}: {one} should be {wanted}")));
        }
        // What comes of it at random is a value, whole within its budget.
        for seed in 1..4 {
            let made = walk(&compiled, 120, 0, seed).text;
            let value: Result<Value, _> = serde_json::from_str(&made);
            // Numbers may be larger than this reader's.
            if let Err(why) = value.map_err(|e| e.to_string()) {
                if !why.contains("number out of range") {
                    wrong.push(format!("{text}: made {made}: {why}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
