//! One call in a model's text, from its opening mark on, by family.
//!
//! A reader looks at each byte once, however the text comes, so it keeps where it is.

use serde_json::{Map, Value};

use super::json::{self, Extent, Seen};
use super::{Call, Family, Tools};

const CALL_END: &str = "</tool_call>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
/// Most bytes of a name and of what stands around it.
const HEAD_MAX: usize = 512;

/// What a reader found. Lengths are in bytes from the opening mark on.
pub(crate) enum Progress {
    /// Nothing yet.
    More,
    /// Calls, at least one, and where they end.
    Calls(usize, Vec<Call>),
    /// No call; so much is text.
    Broken(usize),
}

/// See the module.
pub(crate) struct Reader {
    family: Family,
    /// Bytes that were looked at.
    at: usize,
    stage: Stage,
}

enum Stage {
    /// Behind the opening mark, before what tells the format.
    Head,
    /// In a name that ends where JSON begins.
    Name { from: usize },
    /// In JSON, which began here; `name` is what stood before it.
    Json { from: usize, name: Option<(String, Option<String>)>, extent: Extent },
    /// In `<function=`.
    Function(Function),
    /// Until the end of what is no call.
    Junk,
}

/// Qwen3-Coder's form.
struct Function {
    tagged: bool,
    name: Option<String>,
    arguments: Map<String, Value>,
    /// Name of the argument whose value begins here.
    value: Option<(String, usize)>,
}

impl Function {
    fn stage(tagged: bool) -> Stage {
        Stage::Function(Self { tagged, name: None, arguments: Map::new(), value: None })
    }
}

impl Reader {
    /// For a call that begins with `opener`.
    pub(crate) fn new(family: Family, opener: &str) -> Self {
        let bare = opener == FUNCTION;
        let stage = if bare { Function::stage(false) } else { Stage::Head };
        Self { family, at: opener.len(), stage }
    }

    /// For an object that stands alone.
    pub(crate) fn object() -> Self {
        Self { family: Family::Llama, at: 0, stage: Stage::Head }
    }

    /// Looks at `raw`, which begins as it did before.
    pub(crate) fn advance(&mut self, raw: &str, tools: &Tools) -> Progress {
        loop {
            let moved = match &mut self.stage {
                Stage::Head => self.head(raw),
                Stage::Name { .. } => self.name(raw),
                Stage::Json { .. } => self.json(raw, tools),
                Stage::Function(_) => self.function(raw, tools),
                Stage::Junk => return self.junk(raw),
            };
            if let Some(progress) = moved {
                return progress;
            }
        }
    }

    /// What comes behind the mark decides the form; `None`: on to the next stage.
    fn head(&mut self, raw: &str) -> Option<Progress> {
        let rest = raw[self.at..].trim_ascii_start();
        self.at = raw.len() - rest.len();
        let first = rest.bytes().next();
        let json = Stage::Json { from: self.at, name: None, extent: Extent::default() };
        self.stage = match (self.family, first) {
            (_, None) => return Some(Progress::More),
            (Family::Tagged | Family::Llama, Some(b'{')) | (Family::Mistral, Some(b'[')) => json,
            (Family::Tagged, Some(b'<')) if rest.starts_with(FUNCTION) => {
                self.at += FUNCTION.len();
                Function::stage(true)
            }
            (Family::Tagged, Some(b'<')) if FUNCTION.starts_with(rest) => {
                return Some(Progress::More)
            }
            (Family::Mistral | Family::DeepSeek | Family::Kimi, _) => Stage::Name { from: self.at },
            (Family::Tagged, _) => Stage::Junk,
            (Family::Llama | Family::Harmony, _) => return Some(Progress::Broken(self.at)),
        };
        None
    }

    fn name(&mut self, raw: &str) -> Option<Progress> {
        let Stage::Name { from } = self.stage else { return None };
        let end = raw.as_bytes()[self.at..].iter().position(|byte| *byte == b'{');
        let end = end.map_or(raw.len(), |n| self.at + n);
        if end - from > HEAD_MAX {
            return Some(Progress::Broken(floor(raw, from + HEAD_MAX)));
        }
        self.at = end;
        if end == raw.len() {
            return Some(Progress::More);
        }
        let Some(name) = named(self.family, &raw[from..end]) else {
            return Some(Progress::Broken(end));
        };
        let extent = Extent::default();
        self.stage = Stage::Json { from: end, name: Some(name), extent };
        None
    }

    fn json(&mut self, raw: &str, tools: &Tools) -> Option<Progress> {
        let Stage::Json { from, name, extent } = &mut self.stage else { return None };
        for (n, byte) in raw.bytes().enumerate().skip(self.at) {
            self.at = n;
            match extent.take(byte) {
                Seen::More => {}
                // A `<` may be what a JSON of other families has as a fault of its own.
                Seen::Strange if self.family != Family::Tagged => {}
                Seen::Strange => {
                    self.stage = Stage::Junk;
                    return None;
                }
                Seen::End => {
                    self.at = n + 1;
                    let text = &raw[*from..self.at];
                    return match calls(self.family, text, name.take(), tools) {
                        Some(calls) => Some(Progress::Calls(self.at, calls)),
                        None if self.family == Family::Tagged => {
                            self.stage = Stage::Junk;
                            None
                        }
                        None => Some(Progress::Broken(self.at)),
                    };
                }
            }
        }
        self.at = raw.len();
        Some(Progress::More)
    }

    fn function(&mut self, raw: &str, tools: &Tools) -> Option<Progress> {
        let Stage::Function(call) = &mut self.stage else { return None };
        if call.name.is_none() {
            match short(raw, self.at) {
                Short::Name(name, end) => {
                    call.name = Some(name);
                    self.at = end;
                }
                Short::More => return Some(Progress::More),
                Short::Long => return self.strange(),
            }
        }
        loop {
            if let Some((name, from)) = &call.value {
                if upto(raw, &mut self.at, PARAMETER_END).is_none() {
                    return Some(Progress::More);
                }
                let end = self.at;
                let rest = raw[end..].trim_ascii_start();
                let next = [PARAMETER, FUNCTION_END];
                if next.iter().any(|mark| mark.starts_with(rest) && mark.len() > rest.len()) {
                    // What follows tells whether this was its end.
                    self.at -= PARAMETER_END.len();
                    return Some(Progress::More);
                }
                if !next.iter().any(|mark| rest.starts_with(mark)) {
                    continue;
                }
                let value = &raw[*from..end - PARAMETER_END.len()];
                let value = value.strip_prefix('\n').unwrap_or(value);
                let value = value.strip_suffix('\n').unwrap_or(value);
                let tool = call.name.as_deref().unwrap_or_default();
                let value = json::typed(tools, tool, name, value);
                call.arguments.insert(name.clone(), value);
                call.value = None;
            }
            let rest = raw[self.at..].trim_ascii_start();
            let here = raw.len() - rest.len();
            if rest.starts_with(FUNCTION_END) {
                self.at = here + FUNCTION_END.len();
                return self.called();
            }
            if rest.starts_with(PARAMETER) {
                match short(raw, here + PARAMETER.len()) {
                    Short::Name(name, end) => {
                        call.value = Some((name, end));
                        self.at = end;
                        continue;
                    }
                    Short::More => return Some(Progress::More),
                    Short::Long => return self.strange(),
                }
            }
            if [PARAMETER, FUNCTION_END].iter().any(|mark| mark.starts_with(rest)) {
                return Some(Progress::More);
            }
            self.at = here;
            return self.strange();
        }
    }

    /// The call in `<function=`, at its end.
    fn called(&mut self) -> Option<Progress> {
        let Stage::Function(call) = &mut self.stage else { return None };
        let name = call.name.take().unwrap_or_default();
        if name.is_empty() {
            return self.strange();
        }
        let arguments = serde_json::to_string(&call.arguments).unwrap_or_default();
        let call = Call { id: None, name, arguments, raw: String::new() };
        Some(Progress::Calls(self.at, vec![call]))
    }

    /// No call: text up to where the call's own mark ends, or up to here where it has none.
    fn strange(&mut self) -> Option<Progress> {
        let tagged = matches!(&self.stage, Stage::Function(call) if call.tagged);
        if !tagged {
            return Some(Progress::Broken(self.at));
        }
        self.stage = Stage::Junk;
        None
    }

    fn junk(&mut self, raw: &str) -> Progress {
        match upto(raw, &mut self.at, CALL_END) {
            Some(_) => Progress::Broken(self.at),
            None => Progress::More,
        }
    }
}

/// Text from `at` to `mark`, behind which `at` then stands; else as far as none can begin.
fn upto<'a>(raw: &'a str, at: &mut usize, mark: &str) -> Option<&'a str> {
    let from = *at;
    match raw[from..].find(mark) {
        Some(n) => {
            *at = from + n + mark.len();
            Some(&raw[from..from + n])
        }
        None => {
            let least = raw.len().saturating_sub(mark.len() - 1);
            *at = floor(raw, least).max(from);
            None
        }
    }
}

/// The character boundary at or before `at`.
fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// A name that ends with `>`.
enum Short {
    /// It, and where the text goes on.
    Name(String, usize),
    More,
    Long,
}

fn short(raw: &str, at: usize) -> Short {
    match raw[at..].find('>') {
        Some(n) if n <= HEAD_MAX => Short::Name(raw[at..at + n].trim().to_owned(), at + n + 1),
        None if raw.len() - at <= HEAD_MAX => Short::More,
        Some(_) | None => Short::Long,
    }
}

/// Name and id of a call from what stands before its arguments.
fn named(family: Family, head: &str) -> Option<(String, Option<String>)> {
    let sound = |name: &str| {
        let plain = |c: char| c.is_alphanumeric() || "_-.:".contains(c);
        let name = name.trim();
        (!name.is_empty() && name.chars().all(plain)).then(|| name.to_owned())
    };
    match family {
        Family::Mistral => {
            let (name, marks) = head.split_once('[').unwrap_or((head, ""));
            let id = marks.strip_prefix("CALL_ID]").map(|id| id.split('[').next().unwrap_or(id));
            Some((sound(name)?, id.map(|id| id.trim().to_owned())))
        }
        Family::Kimi => {
            let id = head.trim().strip_suffix("<|tool_call_argument_begin|>")?.trim();
            let name = id.strip_prefix("functions.").unwrap_or(id);
            let name = name.rsplit_once(':').map_or(name, |(name, _)| name);
            Some((sound(name)?, Some(id.to_owned())))
        }
        Family::DeepSeek => {
            let (first, second) = head.split_once("<｜tool▁sep｜>")?;
            // The older form: `function`, the separator, the name, and JSON in a fence.
            let name = match first.trim() == "function" && !second.trim().is_empty() {
                true => second.lines().next().unwrap_or_default(),
                false => first,
            };
            Some((sound(name)?, None))
        }
        Family::Tagged | Family::Llama | Family::Harmony => None,
    }
}

/// The calls that a whole JSON value is.
fn calls(
    family: Family,
    text: &str,
    named: Option<(String, Option<String>)>,
    tools: &Tools,
) -> Option<Vec<Call>> {
    if let Some((name, id)) = named {
        let arguments = json::arguments(text)?;
        return Some(vec![Call { id, name, arguments, raw: String::new() }]);
    }
    let value: Value = serde_json::from_str(text).ok()?;
    let found: Vec<Call> = match &value {
        Value::Array(list) => list.iter().map(json::call).collect::<Option<_>>()?,
        value => vec![json::call(value)?],
    };
    // An object without a mark may be an answer in JSON.
    let known = |call: &Call| family != Family::Llama || tools.has(&call.name);
    (!found.is_empty() && found.iter().all(known)).then_some(found)
}
