//! Every family, what is no call, and that cuts change nothing.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{json, Value};

use super::{Call, Family, Parser, Part, Tools};

fn tools() -> Arc<Tools> {
    let mut tools = Tools::default();
    let schema = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"},
    }});
    let tool = json!({"name": "weather", "parameters": schema});
    tools.add("tools[0]", tool.as_object().unwrap().clone(), "parameters").unwrap();
    Arc::new(tools)
}

/// What a text is read as, cut behind these characters; neighbours of one kind are joined.
fn read(family: Family, text: &str, cuts: &[usize]) -> Vec<Part> {
    let mut parser = Parser::new(family, tools(), true, false);
    let chars: Vec<char> = text.chars().collect();
    let (mut found, mut from) = (Vec::new(), 0);
    for cut in cuts.iter().copied().chain([chars.len()]) {
        let cut = cut.min(chars.len()).max(from);
        found.extend(parser.push(&chars[from..cut].iter().collect::<String>()));
        from = cut;
    }
    found.extend(parser.finish());
    let raw: String = found.iter().map(Part::raw).collect();
    assert_eq!(raw, text, "nothing is lost");
    joined(found)
}

fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut out: Vec<Part> = Vec::new();
    for part in parts {
        match (out.last_mut(), part) {
            (Some(Part::Text(all)), Part::Text(more))
            | (Some(Part::Reasoning(all)), Part::Reasoning(more))
            | (Some(Part::Mark(all)), Part::Mark(more)) => all.push_str(&more),
            (_, part) => out.push(part),
        }
    }
    out
}

/// Text, reasoning, and calls as `name arguments`.
fn told(family: Family, text: &str) -> (String, String, Vec<String>) {
    let (mut said, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for part in read(family, text, &[]) {
        match part {
            Part::Text(text) => said.push_str(&text),
            Part::Reasoning(text) => thought.push_str(&text),
            Part::Call(Call { name, arguments, .. }) => calls.push(format!("{name} {arguments}")),
            Part::Mark(_) => {}
        }
    }
    (said, thought, calls)
}

/// Answers in every family's form that are one call and the text `Let me see.`.
const CALLS: &[(Family, &str)] = &[
    (
        Family::Tagged,
        "Let me see.\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"B\
            </tool_call>\"}}\n</tool_call>\n",
    ),
    (
        Family::Tagged,
        "Let me see.<tool_call>\n<function=weather>\n<parameter=city>\nB</tool_call>\n</pa\
            rameter>\n</function>\n</tool_call>",
    ),
    (
        Family::Tagged,
        "Let me see.\n<function=weather>\n<parameter=city>\nB</tool_call>\n</parameter>\n<\
            /function>\n</tool_call>",
    ),
    (
        Family::Llama,
        "Let me see. <|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"B<\
            /tool_call>\"}}",
    ),
    (
        Family::Mistral,
        "Let me see.[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"B</t\
            ool_call>\"}, \"id\": \"abcdefghi\"}]",
    ),
    (Family::Mistral, "Let me see.[TOOL_CALLS]weather[ARGS]{\"city\": \"B</tool_call>\"}"),
    (
        Family::Mistral,
        "Let me see.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"B</tool_call>\"}",
    ),
    (
        Family::DeepSeek,
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n``\
            `json\n{\"city\": \"B</tool_call>\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        Family::DeepSeek,
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \
            \"B</tool_call>\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        Family::Kimi,
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|to\
            ol_call_argument_begin|>{\"city\": \"B</tool_call>\"}<|tool_call_end|><|tool_calls\
            _section_end|>",
    ),
    (
        Family::Harmony,
        "<|channel|>final<|message|>Let me see.<|end|><|start|>assistant<|channel|>comment\
            ary to=functions.weather <|constrain|>json<|message|>{\"city\": \"B</tool_call>\"}\
            <|call|>",
    ),
];

#[test]
fn every_family_calls() {
    for (family, text) in CALLS {
        let (said, _, calls) = told(*family, text);
        assert_eq!(said, "Let me see.", "{text}");
        assert_eq!(calls, ["weather {\"city\":\"B</tool_call>\"}"], "{text}");
    }
}

#[test]
fn several_calls_in_a_row() {
    let one = "{\"name\": \"weather\", \"arguments\": {\"days\": 2}}";
    let texts = [
        (Family::Tagged, format!("<tool_call>{one}</tool_call>\n<tool_call>\n{one}\n</tool_call>")),
        (Family::Llama, format!("{one}; {one}")),
        (Family::Mistral, format!("[TOOL_CALLS][{one}, {one}]")),
        (Family::Mistral, "[TOOL_CALLS]weather{\"days\": 2}[TOOL_CALLS]weather{\"days\":2}".into()),
    ];
    for (family, text) in texts {
        let (said, _, calls) = told(family, &text);
        assert_eq!((said.as_str(), calls.len()), ("", 2), "{text}");
        assert_eq!(calls[1], "weather {\"days\":2}");
    }
}

#[test]
fn arguments_have_the_types_of_the_schema() {
    let text = "<function=weather><parameter=days>3</parameter><parameter=city>12</parameter>\
        <parameter=tags>[1, \"a\"]</parameter><parameter=other>7</parameter></function>";
    let (_, _, calls) = told(Family::Tagged, text);
    let arguments: Value = serde_json::from_str(calls[0].split_once(' ').unwrap().1).unwrap();
    assert_eq!(arguments, json!({"days": 3, "city": "12", "tags": [1, "a"], "other": "7"}));
}

#[test]
fn what_is_no_call_is_text() {
    let texts = [
        (Family::Tagged, "a <tool_call>\nnot json\n</tool_call> b"),
        (Family::Tagged, "a <tool_call>{\"name\": \"weather\", \"arguments\": {</tool_call> b"),
        (Family::Tagged, "<tool_call>{\"name\": \"weather\", \"arguments\": 3}</tool_call>"),
        (Family::Tagged, "<tool_call>{\"name\": \"weather\", \"argu"),
        (Family::Tagged, "<tool_call><function=weather>nonsense</function></tool_call>"),
        (Family::Tagged, "a < b <tool"),
        (Family::Llama, "{\"answer\": 42}"),
        (Family::Llama, "{\"name\": \"unknown\", \"parameters\": {}} and more"),
        (Family::Llama, "<|python_tag|>print(1)"),
        (Family::Mistral, "[TOOL_CALLS]no call at all"),
        (Family::Kimi, "<|tool_call_begin|>x{}"),
        (Family::Harmony, "plain text"),
    ];
    for (family, text) in texts {
        assert_eq!(told(family, text), (text.into(), String::new(), Vec::new()));
    }
}

#[test]
fn reasoning_is_apart() {
    let call = "<tool_call>{\"name\": \"weather\"}</tool_call>";
    let text = format!("<think>\nhm <tool_call>\n</think>\n\nwell\n{call}");
    let wanted = ("well".to_owned(), "hm <tool_call>".to_owned(), vec!["weather {}".to_owned()]);
    assert_eq!(told(Family::Tagged, &text), wanted);
    let mut parser = Parser::new(Family::Tagged, Arc::default(), true, true);
    let mut parts = parser.push("so it is</thi");
    parts.extend(parser.push("nk>\nyes <think> <tool_call>"));
    parts.extend(parser.finish());
    let texts: Vec<&Part> = parts.iter().filter(|p| !matches!(p, Part::Mark(_))).collect();
    let yes = Part::Text("yes <think> <tool_call>".into());
    assert_eq!(texts, [&Part::Reasoning("so it is".into()), &yes]);
    let harmony = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final\
        <|message|>yes<|return|>";
    assert_eq!(told(Family::Harmony, harmony), ("yes".into(), "hm".into(), Vec::new()));
}

#[test]
fn families_are_known_by_their_templates() {
    let texts = [
        ("{{ '[TOOL_CALLS]' }}", Family::Mistral),
        ("<tool_call>\\n<function=", Family::Tagged),
        ("{\"name\": function name, \"parameters\": dictionary", Family::Llama),
        ("<|start|>assistant<|channel|>final", Family::Harmony),
        ("no tools", Family::Tagged),
    ];
    for (text, family) in texts {
        assert_eq!(Family::of(text), family);
    }
}

/// Text that is rich in marks and parts of them.
fn texts() -> impl Strategy<Value = (Family, String)> {
    let family = prop::sample::select(vec![
        Family::Tagged,
        Family::Llama,
        Family::Mistral,
        Family::DeepSeek,
        Family::Kimi,
        Family::Harmony,
    ]);
    family.prop_flat_map(|family| {
        let mut words: Vec<String> = family.special().into_iter().map(str::to_owned).collect();
        let own = CALLS.iter().filter(|(of, _)| *of == family).map(|(_, text)| (*text).to_owned());
        words.extend(own);
        let plain =
            "<|<function=|<parameter=city>|</parameter>|</function>|{\"name\": \"weather\", \
            \"arguments\": {\"days\": 1}}|{\"name\"|\"|\\|{|}|[|]| |\n|\n\n|ä▁|x|weather|;|<";
        words.extend(plain.split('|').map(str::to_owned));
        let word = (prop::sample::select(words), any::<bool>(), 0..40_usize);
        let word = word.prop_map(|(word, cut, at)| match cut && word.len() > 8 {
            true => word.chars().take(at).collect(),
            false => word,
        });
        (Just(family), prop::collection::vec(word, 0..12).prop_map(|words| words.concat()))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn cuts_change_nothing(
        (family, text) in texts(),
        mut cuts in prop::collection::vec(0..300_usize, 0..24),
    ) {
        cuts.sort_unstable();
        let whole = read(family, &text, &[]);
        prop_assert_eq!(&read(family, &text, &cuts), &whole);
        let each: Vec<usize> = (1..text.chars().count()).collect();
        prop_assert_eq!(&read(family, &text, &each), &whole);
    }
}
