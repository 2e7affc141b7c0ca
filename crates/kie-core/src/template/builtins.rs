//! The filters, tests, functions and methods that a template may use, each behind the charge for
//! what it does. What stands in no table here does not exist.

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{filters, tests, Environment, Error, ErrorKind, State};

use super::compiled::check;
use super::meter::{self, deep, length, shallow, spend, ITEM};
use crate::pyfmt::{py_json, py_str, strftime, JsonStyle};

/// Widest indentation of `tojson`.
const INDENT_MAX: usize = 64;

/// Widest field, indentation and the like: what a number in a template may multiply.
const WIDTH_MAX: u64 = 10_000;

type Result<T> = std::result::Result<T, Error>;

/// What a call costs, from its arguments.
#[derive(Clone, Copy)]
enum Cost {
    /// Looks at no more than a few items.
    One,
    /// Goes over the items, or the bytes of a text.
    Items,
    /// Reads all of its arguments, this many times.
    All(u64),
    /// Compares items with one another: reads all, times the logarithm of their number.
    Sorts,
    /// Writes a text for each match of another.
    Replaces,
    /// Writes a text between items.
    Joins,
    /// Makes lists of a number of items.
    Batches,
    /// Writes this many characters ahead of lines.
    Indents,
    /// Pads as its first text says.
    Formats,
}

const FILTERS: &[(&str, Cost)] = &[
    ("abs", Cost::One),
    ("attr", Cost::Items),
    ("batch", Cost::Batches),
    ("bool", Cost::One),
    ("capitalize", Cost::All(3)),
    ("chain", Cost::Items),
    ("count", Cost::One),
    ("d", Cost::One),
    ("default", Cost::One),
    ("dictsort", Cost::Sorts),
    ("e", Cost::All(8)),
    ("escape", Cost::All(8)),
    ("first", Cost::One),
    ("float", Cost::Items),
    ("format", Cost::Formats),
    ("groupby", Cost::Sorts),
    ("indent", Cost::Indents),
    ("int", Cost::Items),
    ("items", Cost::Items),
    ("join", Cost::Joins),
    ("last", Cost::Items),
    ("length", Cost::One),
    ("lines", Cost::All(ITEM)),
    ("list", Cost::Items),
    ("lower", Cost::All(3)),
    ("map", Cost::Items),
    ("max", Cost::All(1)),
    ("min", Cost::All(1)),
    ("reject", Cost::Items),
    ("rejectattr", Cost::Items),
    ("replace", Cost::Replaces),
    ("reverse", Cost::Items),
    ("round", Cost::One),
    ("safe", Cost::All(1)),
    ("select", Cost::Items),
    ("selectattr", Cost::Items),
    ("slice", Cost::Batches),
    ("sort", Cost::Sorts),
    ("split", Cost::All(ITEM)),
    ("sum", Cost::Items),
    ("title", Cost::All(3)),
    ("trim", Cost::All(2)),
    ("unique", Cost::Sorts),
    ("upper", Cost::All(3)),
    ("zip", Cost::Items),
];

/// The functions behind [`FILTERS`], in the same order.
fn filter_functions() -> Vec<Value> {
    use Value as V;
    vec![
        V::from_function(filters::abs),
        V::from_function(filters::attr),
        V::from_function(filters::batch),
        V::from_function(filters::bool),
        V::from_function(filters::capitalize),
        V::from_function(filters::chain),
        V::from_function(filters::length),
        V::from_function(filters::default),
        V::from_function(filters::default),
        V::from_function(filters::dictsort),
        V::from_function(filters::escape),
        V::from_function(filters::escape),
        V::from_function(filters::first),
        V::from_function(filters::float),
        V::from_function(filters::format),
        V::from_function(filters::groupby),
        V::from_function(filters::indent),
        V::from_function(filters::int),
        V::from_function(filters::items),
        V::from_function(filters::join),
        V::from_function(filters::last),
        V::from_function(filters::length),
        V::from_function(filters::lines),
        V::from_function(filters::list),
        V::from_function(filters::lower),
        V::from_function(filters::map),
        V::from_function(filters::max),
        V::from_function(filters::min),
        V::from_function(filters::reject),
        V::from_function(filters::rejectattr),
        V::from_function(filters::replace),
        V::from_function(filters::reverse),
        V::from_function(filters::round),
        V::from_function(filters::safe),
        V::from_function(filters::select),
        V::from_function(filters::selectattr),
        V::from_function(filters::slice),
        V::from_function(filters::sort),
        V::from_function(filters::split),
        V::from_function(filters::sum),
        V::from_function(filters::title),
        V::from_function(filters::trim),
        V::from_function(filters::unique),
        V::from_function(filters::upper),
        V::from_function(filters::zip),
    ]
}

fn test_functions() -> Vec<(&'static [&'static str], Cost, Value)> {
    use Value as V;
    vec![
        (&["undefined"], Cost::One, V::from_function(tests::is_undefined)),
        (&["defined"], Cost::One, V::from_function(tests::is_defined)),
        (&["none"], Cost::One, V::from_function(tests::is_none)),
        (&["safe", "escaped"], Cost::One, V::from_function(tests::is_safe)),
        (&["boolean"], Cost::One, V::from_function(tests::is_boolean)),
        (&["odd"], Cost::One, V::from_function(tests::is_odd)),
        (&["even"], Cost::One, V::from_function(tests::is_even)),
        (&["divisibleby"], Cost::One, V::from_function(tests::is_divisibleby)),
        (&["number"], Cost::One, V::from_function(tests::is_number)),
        (&["integer", "int"], Cost::One, V::from_function(tests::is_integer)),
        (&["float"], Cost::One, V::from_function(tests::is_float)),
        (&["string"], Cost::One, V::from_function(tests::is_string)),
        (&["sequence"], Cost::One, V::from_function(tests::is_sequence)),
        (&["iterable"], Cost::One, V::from_function(tests::is_iterable)),
        (&["mapping"], Cost::One, V::from_function(tests::is_mapping)),
        (&["true"], Cost::One, V::from_function(tests::is_true)),
        (&["false"], Cost::One, V::from_function(tests::is_false)),
        (&["filter"], Cost::One, V::from_function(tests::is_filter)),
        (&["test"], Cost::One, V::from_function(tests::is_test)),
        (&["startingwith"], Cost::All(1), V::from_function(tests::is_startingwith)),
        (&["endingwith"], Cost::All(1), V::from_function(tests::is_endingwith)),
        (&["lower"], Cost::All(1), V::from_function(tests::is_lower)),
        (&["upper"], Cost::All(1), V::from_function(tests::is_upper)),
        (&["sameas"], Cost::All(1), V::from_function(tests::is_sameas)),
        (&["eq", "equalto", "=="], Cost::All(1), V::from_function(tests::is_eq)),
        (&["ne", "!="], Cost::All(1), V::from_function(tests::is_ne)),
        (&["lt", "lessthan", "<"], Cost::All(1), V::from_function(tests::is_lt)),
        (&["le", "<="], Cost::All(1), V::from_function(tests::is_le)),
        (&["gt", "greaterthan", ">"], Cost::All(1), V::from_function(tests::is_gt)),
        (&["ge", ">="], Cost::All(1), V::from_function(tests::is_ge)),
        (&["in"], Cost::All(1), V::from_function(tests::is_in)),
    ]
}

/// An environment in which everything is charged.
pub(super) fn environment(fuel: u64) -> Environment<'static> {
    let mut env = Environment::empty();
    env.set_fuel(Some(fuel));
    env.set_unknown_method_callback(method);
    env.set_formatter(|out, _: &State, value| {
        let text = py_str(value)?;
        meter::write(text.len())?;
        Ok(out.write_str(&text)?)
    });
    for (&(name, cost), function) in FILTERS.iter().zip(filter_functions()) {
        env.add_filter(name, move |state: &State, args: Rest<Value>| {
            pay(cost, &args)?;
            meter::made(function.call(state, &args)?)
        });
    }
    env.add_filter("string", |value: Value| py_str(&value).map(std::borrow::Cow::into_owned));
    env.add_filter("tojson", tojson);
    env.add_filter("pprint", |value: Value| {
        spend(deep(&value)?.0.saturating_mul(DEBUG_FACTOR))?;
        Ok::<_, Error>(filters::pprint(&value))
    });
    for (names, cost, function) in test_functions() {
        for name in names {
            let function = function.clone();
            env.add_test(*name, move |state: &State, args: Rest<Value>| {
                pay(cost, &args)?;
                Ok::<_, Error>(function.call(state, &args)?.is_true())
            });
        }
    }
    add_functions(&mut env);
    add_checks(&mut env);
    env
}

/// A line for each item, indented by its depth.
const DEBUG_FACTOR: u64 = 4 * meter::DEPTH_MAX as u64;

fn add_functions(env: &mut Environment<'static>) {
    use minijinja::functions;
    let range = Value::from_function(functions::range);
    env.add_function("range", move |state: &State, args: Rest<Value>| {
        meter::made(range.call(state, &args)?)
    });
    let dict = Value::from_function(functions::dict);
    env.add_function("dict", move |state: &State, args: Rest<Value>| {
        args.iter().try_for_each(|arg| meter::deep(arg).map(drop))?;
        dict.call(state, &args)
    });
    let namespace = Value::from_function(functions::namespace);
    env.add_function("namespace", move |state: &State, args: Rest<Value>| {
        args.iter().try_for_each(meter::store)?;
        let made = namespace.call(state, &args)?;
        meter::note_namespace(&made)?;
        Ok::<_, Error>(made)
    });
    env.add_function("raise_exception", |what: Value| -> Result<Value> {
        Err(Error::new(ErrorKind::InvalidOperation, py_str(&what)?.into_owned()))
    });
    env.add_function("strftime_now", |format: String| {
        spend(format.len() as u64 * 16)?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        strftime(&format, now.map_or(0, |since| since.as_secs()))
    });
}

/// The operands as [`super::compiled`] unpacks them.
fn back(args: &[Value]) -> Value {
    match args {
        [one] => one.clone(),
        several => several.iter().rev().cloned().collect(),
    }
}

fn add_checks(env: &mut Environment<'static>) {
    let mut add = |name, pays: fn(&[Value]) -> Result<()>| {
        env.add_function(name, move |args: Rest<Value>| {
            pays(&args)?;
            Ok::<_, Error>(back(&args))
        });
    };
    add(check::ADD, |args| args.iter().try_for_each(shallow));
    add(check::MUL, multiplied);
    add(check::CONCAT, |args| args.iter().try_for_each(printed));
    add(check::COMPARE, compared);
    add(check::IN, |args| contains(&args[1], &args[0]));
    add(check::IN_PRESERVED, |args| {
        compared(args)?;
        contains(&args[1], &args[0])
    });
    add(check::ITEM, |args| {
        hashed(&args[1])?;
        match args[0].kind() {
            ValueKind::Iterable | ValueKind::String => shallow(&args[0]),
            _ => spend(1),
        }
    });
    add(check::SLICE, |args| shallow(&args[0]));
    add(check::MAP, |args| args.iter().step_by(2).try_for_each(hashed));
    add(check::UNPACK, |args| args.iter().try_for_each(shallow));
    add(check::KEEP, |args| meter::keep(&args[0]));
    // The value lies below the namespace.
    add(check::STORE, |args| meter::store(&args[0]));
    add(check::METHOD, |args| args.iter().skip(1).try_for_each(|arg| deep(arg).map(drop)));
    env.add_function(check::RAW, |bytes: usize| {
        meter::write(bytes)?;
        Ok::<_, Error>(Value::UNDEFINED)
    });
    env.add_function(check::MADE, |value: Rest<Value>| meter::made(back(&value)));
    // The number of arguments of a method is known only when it is called: in their order.
}

/// Texts and numbers that are printed are copied, other values read as well.
fn printed(value: &Value) -> Result<()> {
    match value.as_str() {
        Some(text) => spend(2 * text.len() as u64),
        None => spend(deep(value)?.0),
    }
}

/// A text, list or number times another.
fn multiplied(args: &[Value]) -> Result<()> {
    let size = |value: &Value| {
        let bytes = value.as_str().map_or(0, str::len) as u64;
        bytes.max(length(value).saturating_mul(ITEM))
    };
    let times = |value: &Value| value.as_usize().map_or(1, |n| n as u64);
    let (left, right) = (&args[0], &args[1]);
    spend(size(left).saturating_mul(times(right)))?;
    spend(size(right).saturating_mul(times(left)))
}

/// Equal texts, or the shorter beginning of two, are read once.
fn compared(args: &[Value]) -> Result<()> {
    match (args[0].as_str(), args[1].as_str()) {
        (Some(left), Some(right)) => spend(left.len().min(right.len()) as u64),
        _ => {
            args.iter().filter(|arg| arg.as_object().is_some()).try_for_each(|a| deep(a).map(drop))
        }
    }
}

fn hashed(value: &Value) -> Result<()> {
    match value.as_str() {
        Some(text) => spend(text.len() as u64),
        None if value.as_object().is_some() => deep(value).map(drop),
        None => Ok(()),
    }
}

fn contains(container: &Value, value: &Value) -> Result<()> {
    match container.kind() {
        ValueKind::String => {
            printed(value)?;
            shallow(container)
        }
        ValueKind::Map => hashed(value),
        ValueKind::Seq | ValueKind::Iterable if value.as_object().is_some() => {
            deep(value)?;
            deep(container).map(drop)
        }
        // A text is compared with texts: of another length they differ at once.
        _ => {
            let bytes = value.as_str().map_or(0, str::len) as u64;
            spend(length(container).saturating_mul(bytes + ITEM))
        }
    }
}

fn pay(cost: Cost, args: &[Value]) -> Result<()> {
    let all = |args: &[Value]| {
        args.iter().try_fold((0_u64, 0_u64), |sum, arg| {
            let size = deep(arg)?;
            Ok::<_, Error>((sum.0.saturating_add(size.0), sum.1.saturating_add(size.1)))
        })
    };
    let text = |at: usize| args.get(at).and_then(Value::as_str).unwrap_or_default();
    match cost {
        Cost::One => spend(1),
        Cost::Items => args.iter().try_for_each(shallow),
        Cost::All(times) => spend(all(args)?.0.saturating_mul(times)),
        Cost::Sorts => {
            let (bytes, items) = all(args)?;
            spend(bytes.saturating_mul(u64::from(items.max(2).ilog2())))
        }
        Cost::Replaces => {
            all(args)?;
            spend(replaced(text(0), text(1), text(2)))
        }
        Cost::Joins => {
            let (bytes, _) = all(args)?;
            let items = args.first().map_or(0, length).max(text(0).chars().count() as u64);
            spend(items.saturating_mul(text(1).len() as u64).saturating_add(bytes))
        }
        Cost::Batches => {
            args.iter().try_for_each(shallow)?;
            let count = args.get(1).and_then(Value::as_usize).map_or(0, |n| n as u64);
            let lists = count.saturating_add(args.first().map_or(0, length));
            spend(lists.saturating_mul(2 * ITEM))
        }
        Cost::Indents => {
            all(args)?;
            let lines = 1 + text(0).bytes().filter(|b| *b == b'\n').count() as u64;
            let widths = args.iter().skip(1).map(|arg| number_in(arg, "width"));
            spend(lines.saturating_mul(narrow(widths.max().unwrap_or(0))?))
        }
        Cost::Formats => {
            let (bytes, items) = all(args)?;
            spend(bytes.saturating_add(items.saturating_mul(narrow_format(args)?)))
        }
    }
}

/// An argument, or the keyword of this name.
fn number_in(arg: &Value, name: &str) -> u64 {
    let number = |value: &Value| value.as_usize().map_or(0, |n| n as u64);
    match Kwargs::try_from(arg.clone()) {
        Ok(keywords) if arg.is_kwargs() => {
            keywords.peek::<Value>(name).map_or(0, |value| number(&value))
        }
        _ => number(arg),
    }
}

fn narrow(width: u64) -> Result<u64> {
    if width > WIDTH_MAX {
        let what = format!("a width of {width}, more than {WIDTH_MAX}");
        return Err(Error::new(ErrorKind::InvalidOperation, what));
    }
    Ok(width)
}

/// The largest number in a format, or among what it may take as a width.
fn narrow_format(args: &[Value]) -> Result<u64> {
    let format = args.first().and_then(Value::as_str).unwrap_or_default();
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|run| !run.is_empty());
    let written = numbers.map(|run| run.parse::<u64>().unwrap_or(u64::MAX)).max().unwrap_or(0);
    // `*`, or braces within braces, take the width from an argument.
    let taken = format.contains('*')
        || format.matches('{').count() > format.matches('}').count()
        || format.contains(":{");
    let given = args.iter().skip(1).filter_map(Value::as_usize).max().unwrap_or(0) as u64;
    narrow(written.max(if taken { given } else { 0 }))
}

/// Bytes of a text in which one text takes the place of another.
fn replaced(text: &str, from: &str, to: &str) -> u64 {
    let matches = match from.len() {
        0 => text.len() + 1,
        _ => text.matches(from).count(),
    };
    (matches as u64).saturating_mul(to.len() as u64).saturating_add(text.len() as u64)
}

/// Methods of Python's texts, lists and dicts.
fn method(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value> {
    let text = |at: usize| args.get(at).and_then(Value::as_str).unwrap_or_default();
    let refuse = |what: &str| Err(Error::new(ErrorKind::InvalidOperation, what.to_owned()));
    shallow(value)?;
    args.iter().try_for_each(|arg| deep(arg).map(drop))?;
    match (value.as_str(), name) {
        // Python counts the places between characters.
        (Some(whole), "count") if args.len() == 1 && args[0].as_str() == Some("") => {
            return Ok(Value::from(whole.chars().count() + 1));
        }
        (Some(_), "split") if args.first().and_then(Value::as_str) == Some("") => {
            return refuse("split: empty separator");
        }
        (Some(whole), "replace") => spend(replaced(whole, text(0), text(1)))?,
        (Some(whole), "split" | "splitlines") => spend(whole.len() as u64 * ITEM)?,
        (Some(joiner), "join") => {
            let items = args.first().map_or(0, length);
            spend(items.saturating_mul(joiner.len() as u64))?;
        }
        (Some(whole), "format") => {
            let all = std::iter::once(Value::from(whole)).chain(args.iter().cloned());
            pay(Cost::Formats, &all.collect::<Vec<_>>())?;
        }
        (Some(whole), _) => spend(3 * whole.len() as u64)?,
        // Each item is compared.
        (None, "count") => deep(value).map(drop)?,
        (None, _) => {}
    }
    meter::made(minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)?)
}

/// `json.dumps` of Python without ASCII escapes, as transformers sets it up.
fn tojson(value: Value, options: Kwargs) -> Result<String> {
    let refuse = |kind: ErrorKind, what: String| Err(Error::new(kind, what));
    let style = JsonStyle {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: options.get("indent")?,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators: options.get("separators")?,
    };
    options.assert_all_used()?;
    if value.is_undefined() {
        return refuse(ErrorKind::UndefinedError, "tojson: the value is undefined".to_owned());
    }
    if let Some(indent) = style.indent.filter(|indent| *indent > INDENT_MAX) {
        let what = format!("tojson: indent must be at most {INDENT_MAX}, got {indent}");
        return refuse(ErrorKind::InvalidOperation, what);
    }
    let (bytes, items) = meter::deep(&value)?;
    let between = style.separators.iter().flatten().map(String::len).sum::<usize>();
    let indent = style.indent.map_or(0, |indent| indent * meter::DEPTH_MAX);
    // A character is 6 bytes of an escape at most.
    let most = bytes.saturating_mul(6).saturating_add(items * (8 + between + indent) as u64);
    meter::spend(most)?;
    let json = serde_json::to_value(&value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(py_json(&json, &style))
}
