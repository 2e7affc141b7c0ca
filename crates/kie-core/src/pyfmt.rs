//! Values as Python writes them, for chat templates: `str`, `json.dumps`, `strftime`.

use std::borrow::Cow;
use std::fmt::Write as _;

use minijinja::value::{Value as Jinja, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value;

use crate::template::meter::spend;

/// Nested lists deeper than this are refused.
const DEPTH_MAX: usize = 128;

/// `str(value)`; nothing for an undefined value.
pub(crate) fn py_str(value: &Jinja) -> Result<Cow<'_, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.into());
    }
    let mut out = String::new();
    if !value.is_undefined() {
        repr(value, &mut out, 0)?;
    }
    Ok(out.into())
}

fn repr(value: &Jinja, out: &mut String, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "lists nested too deeply to print"));
    }
    let bytes = value.as_str().map_or(0, str::len);
    spend(32 + bytes as u64)?;
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&py_float(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::String => quote(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            out.push('[');
            for (at, item) in value.try_iter()?.enumerate() {
                out.push_str(if at == 0 { "" } else { ", " });
                repr(&item, out, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                out.push_str(if at == 0 { "" } else { ", " });
                repr(&key, out, depth + 1)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out, depth + 1)?;
            }
            out.push('}');
        }
        // Numbers that are whole, and kinds that a template has no literal for.
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// `repr` of a string: single quotes unless only double ones avoid an escape.
fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == mark => out.extend(['\\', c]),
            c if u32::from(c) < 0x20 || (0x7F..0xA0).contains(&u32::from(c)) => {
                out.push_str(&format!("\\x{:02x}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out.push(mark);
}

/// `repr` of a float: shortest digits, exponents below -4 and from 16 on.
fn py_float(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() { "nan".into() } else { format!("{number}") };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    format!("{number:?}")
}

/// Keyword arguments of `json.dumps`.
#[derive(Debug, Default)]
pub(crate) struct JsonStyle {
    pub(crate) ensure_ascii: bool,
    pub(crate) indent: Option<usize>,
    pub(crate) sort_keys: bool,
    pub(crate) separators: Option<Vec<String>>,
}

/// `json.dumps(value)`.
pub(crate) fn py_json(value: &Value, style: &JsonStyle) -> String {
    let mut out = String::new();
    dump(value, style, 0, &mut out);
    out
}

fn dump(value: &Value, style: &JsonStyle, depth: usize, out: &mut String) {
    match value {
        Value::Null | Value::Bool(_) => out.push_str(&value.to_string()),
        Value::Number(n) if n.is_f64() => {
            out.push_str(&n.as_f64().map_or_else(|| n.to_string(), py_float));
        }
        Value::Number(n) => out.push_str(&n.to_string()),
        Value::String(s) => dump_string(s, style, out),
        Value::Array(items) => {
            group(('[', ']'), items.iter(), style, depth, out, |item, out| {
                dump(item, style, depth + 1, out);
            });
        }
        Value::Object(map) => {
            let mut items: Vec<_> = map.iter().collect();
            if style.sort_keys {
                items.sort_by_key(|(key, _)| key.as_str());
            }
            let colon = style.separators.as_ref().and_then(|s| s.get(1)).map_or(": ", |s| s);
            group(('{', '}'), items.into_iter(), style, depth, out, |(key, item), out| {
                dump_string(key, style, out);
                out.push_str(colon);
                dump(item, style, depth + 1, out);
            });
        }
    }
}

fn group<T>(
    (open, close): (char, char),
    items: impl ExactSizeIterator<Item = T>,
    style: &JsonStyle,
    depth: usize,
    out: &mut String,
    mut each: impl FnMut(T, &mut String),
) {
    let break_line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    let comma = match style.separators.as_ref().and_then(|s| s.first()) {
        Some(comma) => comma,
        None if style.indent.is_some() => ",",
        None => ", ",
    };
    let count = items.len();
    out.push(open);
    for (at, item) in items.enumerate() {
        out.push_str(if at == 0 { "" } else { comma });
        break_line(out, depth + 1);
        each(item, out);
    }
    if count > 0 {
        break_line(out, depth);
    }
    out.push(close);
}

fn dump_string(text: &str, style: &JsonStyle, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{C}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 || (style.ensure_ascii && !(' '..='~').contains(&c)) => {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// `strftime` of Python in the C locale for seconds since 1970, in UTC.
pub(crate) fn strftime(format: &str, unix_s: u64) -> Result<String, Error> {
    let time = Time::new(unix_s);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        let bare = code == Some('-');
        if bare {
            code = chars.next();
        }
        if let Some((number, width)) = code.and_then(|c| time.number(c)) {
            let width = if bare { 0 } else { width };
            write!(out, "{number:0width$}")?;
        } else if let Some(word) = code.and_then(|c| time.word(c)) {
            out.push_str(word);
        } else {
            match code {
                Some('F') => out.push_str(&strftime("%Y-%m-%d", unix_s)?),
                Some('T') => out.push_str(&strftime("%H:%M:%S", unix_s)?),
                _ => {
                    let what = format!("strftime_now: unknown code in {format:?}");
                    return Err(Error::new(ErrorKind::InvalidOperation, what));
                }
            }
        }
    }
    Ok(out)
}

/// A second, as a calendar and a clock show it.
struct Time {
    unix_s: u64,
    year: u64,
    /// From 1 on, as the day and the day of the year.
    month: usize,
    day: u64,
    day_of_year: u64,
}

impl Time {
    fn new(unix_s: u64) -> Self {
        let (year, month, day, day_of_year) = civil(unix_s / 86_400);
        Self { unix_s, year, month, day, day_of_year }
    }

    /// What a code that prints a number prints, and how many digits that takes.
    fn number(&self, code: char) -> Option<(u64, usize)> {
        let hour = self.unix_s / 3_600 % 24;
        Some(match code {
            'Y' => (self.year, 4),
            'y' => (self.year % 100, 2),
            'm' => (self.month as u64, 2),
            'd' => (self.day, 2),
            'j' => (self.day_of_year, 3),
            'H' => (hour, 2),
            'I' => ((hour + 11) % 12 + 1, 2),
            'M' => (self.unix_s / 60 % 60, 2),
            'S' => (self.unix_s % 60, 2),
            _ => return None,
        })
    }

    fn word(&self, code: char) -> Option<&'static str> {
        const MONTHS: [&str; 12] = [
            "January",
            "February",
            "March",
            "April",
            "May",
            "June",
            "July",
            "August",
            "September",
            "October",
            "November",
            "December",
        ];
        const DAYS: [&str; 7] =
            ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
        let month = MONTHS[self.month - 1];
        let day = DAYS[(self.unix_s / 86_400 % 7) as usize];
        Some(match code {
            'B' => month,
            'b' | 'h' => &month[..3],
            'A' => day,
            'a' => &day[..3],
            'p' if self.unix_s / 3_600 % 24 < 12 => "AM",
            'p' => "PM",
            'Z' => "UTC",
            'z' => "+0000",
            '%' => "%",
            _ => return None,
        })
    }
}

/// Year, month, day and day of the year of a day since 1970.
fn civil(mut days: u64) -> (u64, usize, u64, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // 400 years have 146,097 days.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let february = 28 + u64::from(leap(year));
    for (at, length) in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30].into_iter().enumerate() {
        if days < length {
            return (year, at + 1, days + 1, day_of_year);
        }
        days -= length;
    }
    (year, 12, days + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn floats_read_as_in_python() {
        let cases = [
            (0.0, "0.0"),
            (-1.0, "-1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
        ];
        for (number, text) in cases {
            assert_eq!(py_float(number), text);
        }
    }

    #[test]
    fn days_have_dates() {
        let date = |s| strftime("%a %A %d %-d %b %B %Y %y %j %H:%M:%S %I %p %F %T %%", s).unwrap();
        // Both as `date -u -d @N` prints them.
        let leap_day = "Thu Thursday 29 29 Feb February 2024 24 060 12:34:56 12 PM \
             2024-02-29 12:34:56 %";
        assert_eq!(date(1_709_210_096), leap_day);
        assert_eq!(
            date(0),
            "Thu Thursday 01 1 Jan January 1970 70 001 00:00:00 12 AM 1970-01-01 00:00:00 %"
        );
        assert_eq!(strftime("%F %a", 4_102_358_400).unwrap(), "2099-12-31 Thu");
        assert!(strftime("%q", 0).is_err());
        assert!(strftime("%", 0).is_err());
    }
}
