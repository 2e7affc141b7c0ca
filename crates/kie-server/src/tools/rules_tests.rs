//! What a grammar of calls lets through is read as calls, whatever the model would rather say.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use kie_core::request::{Prompt, Request};
use kie_core::{Engine, Grammar};
use serde_json::{json, Value};

use super::{Around, Call, Family, Forced, Parser, Part, Tools};

static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/kie/demo");
    Engine::builder(demo).threads(1).max_seq_len(512).build().unwrap()
});

/// Every family, with each of the forms that its template tells apart.
const FORMS: [(Family, &str); 8] = [
    (Family::Tagged, ""),
    (Family::Llama, ""),
    (Family::Mistral, ""),
    (Family::Mistral, "[ARGS]"),
    (Family::DeepSeek, ""),
    (Family::DeepSeek, "```json"),
    (Family::Kimi, ""),
    (Family::Harmony, ""),
];

fn tools(strict: bool, forced: Option<Forced>) -> Tools {
    let mut tools = Tools::default();
    let weather = json!({"type": "object", "required": ["city", "days"],
        "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
        "additionalProperties": false});
    let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
    for (name, schema) in [("weather", weather), ("stop-it", nothing)] {
        let tool = json!({"name": name, "parameters": schema, "strict": strict});
        tools.add("tools", tool.as_object().unwrap().clone(), "parameters").unwrap();
    }
    tools.forced = forced;
    tools.hold(&Ok(())).unwrap();
    tools
}

/// What the default model says under a grammar, read as the family's.
fn said(around: &Around<'_>, tools: Tools, body: Option<&Grammar>, seed: u64) -> Vec<Part> {
    let grammar = around.grammar(&tools, body).unwrap();
    let mut request = Request::new(Prompt::Text("def f".to_owned()));
    request.params.grammar = grammar;
    request.params.max_tokens = Some(160);
    request.params.temperature = Some(1.5);
    request.params.seed = Some(seed);
    let text = ENGINE.generate(request).unwrap().text;
    let mut parser = Parser::new(around.family, Arc::new(tools), around.reasons, around.inside);
    let mut parts = parser.push(&text);
    parts.extend(parser.finish());
    parts
}

fn around<'a>(family: Family, template: &'a str, marks: &'a BTreeMap<u32, String>) -> Around<'a> {
    Around { family, template, marks, reasons: false, inside: false }
}

fn calls(parts: &[Part]) -> Vec<&Call> {
    parts
        .iter()
        .filter_map(|part| if let Part::Call(call) = part { Some(call) } else { None })
        .collect()
}

fn is_legal(call: &Call) -> bool {
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
    let arguments = arguments.as_object().unwrap();
    match call.name.as_str() {
        "weather" => {
            let city = arguments["city"].as_str().unwrap();
            arguments.len() == 2
                && city.chars().count() <= 5
                && [json!(1), json!(2)].contains(&arguments["days"])
        }
        "stop-it" => arguments.is_empty(),
        _ => false,
    }
}

#[test]
fn a_forced_call_is_one_legal_call_in_every_family() {
    let marks = BTreeMap::new();
    for (family, template) in FORMS {
        let around = around(family, template, &marks);
        for seed in 1..4 {
            let parts = said(&around, tools(false, Some(Forced::Any)), None, seed);
            let calls = calls(&parts);
            assert!(calls.len() == 1 && is_legal(calls[0]), "{family:?}: {parts:?}");
            let text = |part: &Part| matches!(part, Part::Text(_));
            assert!(!parts.iter().any(text), "{family:?}: {parts:?}");
        }
        let named = Some(Forced::Tool("stop-it".to_owned()));
        let parts = said(&around, tools(false, named), None, 1);
        assert_eq!(calls(&parts)[0].name, "stop-it", "{family:?}");
    }
}

#[test]
fn strict_tools_are_called_legally_or_not_at_all() {
    let marks = BTreeMap::new();
    for (family, template) in FORMS {
        let around = around(family, template, &marks);
        for seed in 1..4 {
            let parts = said(&around, tools(true, None), None, seed);
            assert!(calls(&parts).into_iter().all(is_legal), "{family:?}: {parts:?}");
        }
        assert_eq!(around.grammar(&tools(false, None), None).unwrap(), None);
    }
}

#[test]
fn a_form_goes_with_tools_and_reasoning() {
    let marks = BTreeMap::new();
    let form = Grammar::json_schema(&json!({"enum": ["yes", "no"]}));
    for (family, template) in FORMS {
        let mut around = around(family, template, &marks);
        let plain = around.grammar(&Tools::default(), Some(&form)).unwrap();
        assert_eq!(plain.as_ref(), Some(&form), "{family:?}");
        for (reasons, inside) in [(false, false), (true, false), (true, true)] {
            (around.reasons, around.inside) = (reasons, inside);
            for body in [&form, &Grammar::Regex("a/b|[0-9]{2}".into())] {
                let parts = said(&around, tools(true, None), Some(body), 2);
                for part in &parts {
                    match part {
                        Part::Text(text) => assert!(
                            text.starts_with(|c: char| "\"a".contains(c) || c.is_ascii_digit()),
                            "{family:?}: {parts:?}"
                        ),
                        Part::Call(call) => assert!(is_legal(call), "{family:?}: {parts:?}"),
                        Part::Reasoning(_) | Part::Mark(_) => {}
                    }
                }
            }
        }
    }
}
