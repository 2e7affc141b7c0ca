//! Templates that want too much of a machine, each of which hung, killed or filled the process, and
//! that metering changes nothing else.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{json, Map, Value};

use super::ChatTemplates;
use crate::{Error, Patience, Result};

fn templates(source: &str) -> ChatTemplates {
    ChatTemplates::new(BTreeMap::from([("default".to_owned(), source.to_owned())]), Vec::new())
}

fn render(source: &str) -> Result<String> {
    let messages = json!([{"role": "user", "content": "abc"}]);
    templates(source).render(&messages, true, &Map::new(), &Patience::ENDLESS)
}

/// Far above what a refusal takes, also on a busy machine.
const REFUSAL_TIME_MAX: Duration = Duration::from_secs(60);

fn refused(source: &str, says: &[&str]) {
    let begun = Instant::now();
    let shown: String = source.chars().take(120).collect();
    match render(source) {
        Err(Error::Template(what)) => {
            assert!(says.iter().any(|s| what.contains(s)), "{shown}: {what}");
        }
        other => panic!("{shown}: {other:?}"),
    }
    assert!(begun.elapsed() < REFUSAL_TIME_MAX, "{shown}");
}

/// Any bound will do where it depends on the machine which comes first.
const BOUNDS: &[&str] = &["work", "bytes", "takes more than"];

/// 50,000 times around a namespace, then what follows.
fn nested(inner: &str, after: &str) -> String {
    format!(
        "{{% set ns = namespace(x=0) %}}{{% for i in range(50000) %}}{{% set ns.x = {inner} %}}\
         {{% endfor %}}{{{{ {after} }}}}"
    )
}

#[test]
fn sources_that_nest_are_refused_before_they_are_parsed() {
    refused(&format!("{{{{ {} }}}}", ["1"; 50_000].join("~")), &["tokens"]);
    refused(&format!("{{{{ {}1 }}}}", "not ".repeat(50_000)), &["tokens"]);
    refused(&format!("{{{{ {}1 }}}}", "1 if 0 else ".repeat(20_000)), &["tokens"]);
    refused(&format!("{{{{ x{} }}}}", "[0]".repeat(50_000)), &["tokens"]);
    refused(&format!("{{{{ x{} }}}}", "|list".repeat(30_000)), &["tokens"]);
    let elifs = "{% elif 1 %}".repeat(10_000);
    refused(&format!("{{% if 0 %}}{elifs}{{% endif %}}"), &["elifs"]);
    refused("{{ (1)", &["line 1"]);
    refused(&"x".repeat(1 << 20), &["bytes"]);
    refused(&"{% if 1 %}".repeat(5_000), &["recursion"]);
    let folded = "{{ 'a' * 100000000 }}".repeat(2);
    refused(&folded, &["constants"]);
    refused("{% extends 'x' %}", &["line 1"]);
    refused("{% from 'x' import y %}", &["line 1"]);
    // As long and deep as is allowed.
    let sum = format!("{{{{ {} }}}}", ["1"; 1_000].join("+"));
    assert_eq!(render(&sum).unwrap(), "1000");
    let chain = format!("{{{{ messages|length{} }}}}", "+1".repeat(1_000));
    assert_eq!(render(&chain).unwrap(), "1001");
    let tail = "{% elif messages|length == 2 %}".repeat(400);
    assert_eq!(render(&format!("{{% if 0 %}}{tail}{{% else %}}e{{% endif %}}")).unwrap(), "e");
}

#[test]
fn values_that_nest_are_refused() {
    for after in ["1", "ns.x|tojson", "ns.x == ns.x", "ns.x ~ ''", "{ns.x: 1}", "ns.x in [ns.x]"] {
        refused(&nested("[ns.x]", after), &["nested"]);
    }
    for inner in ["{'a': ns.x}", "namespace(x=ns.x)", "ns.x[::1]|list|batch(1)", "[[ns.x] + [1]]"] {
        let says = ["nested", "within", "namespaces", "slice", "sliced", "iterable", "convert"];
        refused(&nested(inner, "1"), &says);
    }
    refused("{% set n = namespace() %}{% set n.n = n %}", &["within"]);
    refused("{% macro f(x, n) %}{{ f([[[[x]]]], n + 1) }}{% endmacro %}{{ f(1, 0) }}", &["nested"]);
    refused("{% for x in [[1]] recursive %}{{ loop([[x]]) }}{% endfor %}", &["nested", "recurs"]);
    // Lists that share their parts are small, and as a tree are not.
    let shared = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}\
        {% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    refused(shared, BOUNDS);
    let lazy = "{% set ns = namespace(x=[1]) %}{% for i in range(50000) %}\
        {% set ns.x = ns.x[::1] %}{% set ns.x = ns.x * 1 %}{% set ns.x = ns.x|reverse %}\
        {% endfor %}{{ ns.x }}";
    assert_eq!(render(&lazy.replace("50000", "500")).unwrap(), "[1]");
}

#[test]
fn operations_that_multiply_are_refused() {
    let doubled = |what: &str| {
        format!(
            "{{% set ns = namespace(x='ab') %}}{{% for i in range(100) %}}{{% set ns.x = {what} %}}\
             {{% endfor %}}"
        )
    };
    for what in [
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "[ns.x, ns.x]|join",
        "ns.x|replace('', ns.x)",
        "ns.x.replace('a', ns.x)",
        "ns.x.join([ns.x, ns.x])",
        "'%s%s'|format(ns.x, ns.x)",
        "'{}{}'.format(ns.x, ns.x)",
    ] {
        refused(&doubled(what), BOUNDS);
    }
    let captured = "{% set ns = namespace(x='ab') %}{% for i in range(100) %}\
        {% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}";
    refused(captured, BOUNDS);
    for source in [
        "{% set n = 1000000000 %}{{ ([1] * n)|list }}",
        "{% set n = 1000000000 %}{{ ([1] * n)|join }}",
        "{% set n = 1000000000 %}{{ 5 in [1] * n }}",
        "{% set n = 1000000000 %}{% set a, b = [1] * n %}",
        "{% set n = 1000000000 %}{{ range(*([1] * n)) }}",
        "{% set n = 99000000 %}{% for i in range(100000) %}{% set x = 'a' * n %}{% endfor %}",
        "{{ messages|tojson(indent=100000000000) }}",
        "{{ 'a\\nb'|indent(100000000000) }}",
        "{{ 'a\\nb'|indent(width=100000000000) }}",
        "{{ [1]|batch(100000000000) }}",
        "{{ [1]|batch(100000000000, 2) }}",
        "{{ [1]|slice(100000000000) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '%.*f'|format(1000000000, 1.5) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ ['a' * 1000]|map('replace', '', 'a' * 1000)|map('replace', '', 'a' * 1000)|list }}",
    ] {
        refused(source, &["work", "bytes", "width", "indent", "constants", "conversion"]);
    }
    let raw = format!("{{% for i in range(100000) %}}{}{{% endfor %}}", "x".repeat(10_000));
    refused(&raw, BOUNDS);
}

#[test]
fn counting_nothing_ends() {
    assert_eq!(render("{{ messages[0].content.count('') }}").unwrap(), "4");
    assert_eq!(render("{{ 'banana'.count('an') }}{{ [1, 2, 1].count(1) }}").unwrap(), "22");
    refused("{{ 'abc'.split('') }}", &["empty separator"]);
}

#[test]
fn loops_end_with_the_time_or_the_instructions() {
    let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{{ a }}{% endfor %}\
        {% endfor %}";
    refused(endless, &["instructions", "takes more than"]);
    let compared = "{% set x = 'a' * 1000000 %}{% set y = 'a' * 1000000 %}\
        {% for a in range(100000) %}{% if 0 < 1 < 2 and x == y < x %}1{% endif %}{% endfor %}";
    refused(compared, &["work", "constants"]);
}

#[test]
fn whoever_waits_is_heard() {
    let endless = templates(
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    );
    let messages = json!([]);
    let short = Patience::ENDLESS.at_most(Some(0.05));
    let late = endless.render(&messages, true, &Map::new(), &short).unwrap_err();
    assert!(matches!(late, Error::GivenUp { late: true, .. }), "{late}");
    let stop = || false;
    let asked = Patience::asking(&stop);
    let given_up = endless.render(&messages, true, &Map::new(), &asked).unwrap_err();
    assert!(matches!(given_up, Error::GivenUp { late: false, .. }), "{given_up}");
}

#[test]
fn long_chats_are_within_the_budget() {
    let source = "{%- set ns = namespace(all=[], text='') -%}\
        {%- for m in messages -%}\
        {%- if loop.index0 == messages|length - 1 -%}last{%- endif -%}\
        {%- set ns.all = ns.all + [m] -%}\
        {{- '<' ~ m.role ~ '>' + m['content'] + '\\n' -}}\
        {%- if 'b' in m.content and m.content is string %}!{% endif -%}\
        {%- endfor -%}{{ ns.all|length }}";
    let message = json!({"role": "user", "content": "ab ".repeat(300)});
    let messages = Value::Array(vec![message; 1_000]);
    let text = templates(source).render(&messages, true, &Map::new(), &Patience::ENDLESS).unwrap();
    assert!(text.ends_with("1000") && text.len() > 900_000, "{}", text.len());
}

#[test]
fn metering_changes_no_value() {
    let same = [
        ("{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ 1 in [1] }}{{ 'a' not in 'bc' }}", "TrueFalseTrueTrue"),
        ("{{ 2 in [1, 2] == true }}", "False"),
        ("{{ 'a' ~ 1 ~ [1, 'b'] }}", "a1[1, \"b\"]"),
        ("{{ {'k': [1, 2]}['k'][1] }}{{ [1, 2, 3][1:] }}{{ 'abc'[::-1] }}", "2[2, 3]cba"),
        ("{% set a, b = [1, 2] %}{{ b }}{{ a }}", "21"),
        ("{% set l = ['b', 'a'] %}{{ dict(x=1) }}{{ l|sort|join }}", "{'x': 1}ab"),
        ("{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}\
          {{ f(1) }}{{ f(*[3, 4]) }}{{ f(b=1, **{'a': 0}) }}{% call f(5) %}c{% endcall %}",
         "12340152c"),
        ("{% for x in [1, 2, 3] if x > 1 %}{{ loop.index }}{{ x }}{% else %}n{% endfor %}", "1223"),
        ("{% for x in [[1, [2]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}\
          {{ x }}{% endif %}{% endfor %}", "(1(2))"),
        ("{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}\
          {{ ns.n }}", "6"),
        ("{% filter upper %}a{% endfilter %}{% set x %}b{% endset %}{{ x * 3 }}", "Abbb"),
        ("{{ loop.cycle('a', 'b') if loop is defined }}{% for i in [1, 2] %}\
          {{ loop.cycle('a', 'b') }}{{ loop.changed(1) }}{% endfor %}", "aTruebFalse"),
        ("{{ messages[0].get('x', 'd') }}{{ messages[0].items()|list }}",
         "d[['role', 'user'], ['content', 'abc']]"),
        ("{{ 'a-b'.split('-')[-1] }}{{ ' x '.strip() }}{{ 'abc'|batch(2)|list }}",
         "bx[['a', 'b'], ['c']]"),
        ("{{ undefined_one is defined }}{{ (undefined_one or 'x') }}", "Falsex"),
        ("{% block b %}in{% endblock %}", "in"),
        ("{{ 'a' if true }}{{ 'b' if false }}", "a"),
        ("{{ '%05.1f'|format(2.25) }}{{ '{0}-{1:>3}'.format('a', 'b') }}", "002.2a-  b"),
    ];
    for (source, wanted) in same {
        assert_eq!(render(source).unwrap_or_else(|e| panic!("{source}: {e}")), wanted, "{source}");
    }
}
