//! What a model writes, into text, reasoning and calls, as it comes.
//!
//! A call is given out when it is whole, as only then it is known to be one. Text is held back
//! while it may be the beginning of a mark, and so is white space, which before a call belongs to
//! it.

use std::sync::Arc;

use super::harmony::Harmony;
use super::reader::{Progress, Reader};
use super::{Family, Part, Tools, THINK, THINK_END};

/// See the module.
pub(crate) struct Parser(Kind);

enum Kind {
    Marked(Marked),
    Harmony(Harmony),
}

impl Parser {
    /// A parser for a family's text. Calls are looked for where there are `tools`, reasoning where
    /// the template `reasons`; `inside` says that the prompt has its opening mark already.
    pub(crate) fn new(family: Family, tools: Arc<Tools>, reasons: bool, inside: bool) -> Self {
        if family == Family::Harmony {
            return Self(Kind::Harmony(Harmony::default()));
        }
        let state = match (inside, reasons) {
            (true, _) => State::Reasoning { begun: false },
            (false, true) => State::Start,
            (false, false) => State::First { drop_space: false },
        };
        let calls = !tools.is_empty();
        let flow = Flow::default();
        Self(Kind::Marked(Marked { family, tools, calls, state, flow }))
    }

    /// Whether what comes next is reasoning, unless it ends it.
    pub(crate) fn is_reasoning(&self) -> bool {
        match &self.0 {
            Kind::Marked(marked) => matches!(marked.state, State::Reasoning { .. }),
            Kind::Harmony(harmony) => harmony.is_reasoning(),
        }
    }

    /// Takes the next piece of text.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Part> {
        self.run(text, false)
    }

    /// The end of the text.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        self.run("", true)
    }

    fn run(&mut self, text: &str, at_end: bool) -> Vec<Part> {
        let mut out = Vec::new();
        match &mut self.0 {
            Kind::Marked(marked) => {
                marked.flow.buf.push_str(text);
                while marked.step(at_end, &mut out) {}
            }
            Kind::Harmony(harmony) => harmony.run(text, at_end, &mut out),
        }
        out
    }
}

/// Text that is not given out yet.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    pub(crate) buf: String,
    /// White space at its beginning that was looked at.
    quiet: usize,
}

impl Flow {
    /// Takes the text before the first of `marks`, without the white space in front of it; the mark
    /// then stands behind that white space, whose length comes with its index.
    pub(crate) fn until(
        &mut self,
        marks: &[&str],
        at_end: bool,
    ) -> (String, Option<(usize, usize)>) {
        let bytes = self.buf.as_bytes();
        let found = first_of(bytes, self.quiet, marks);
        let end = match found {
            Some((at, _)) => at,
            None if at_end => {
                self.quiet = 0;
                return (std::mem::take(&mut self.buf), None);
            }
            None => bytes.len() - begun(bytes, marks),
        };
        let mut cut = end;
        while cut > self.quiet && bytes[cut - 1].is_ascii_whitespace() {
            cut -= 1;
        }
        // All of it is white space.
        if cut == self.quiet {
            cut = 0;
        }
        let text = self.take(cut);
        self.quiet = end - cut;
        let found = found.map(|(_, which)| (which, std::mem::take(&mut self.quiet)));
        (text, found)
    }

    /// Takes the first `bytes`.
    pub(crate) fn take(&mut self, bytes: usize) -> String {
        self.quiet = 0;
        let rest = self.buf.split_off(bytes);
        std::mem::replace(&mut self.buf, rest)
    }

    fn space(&self) -> usize {
        self.buf.len() - self.buf.trim_ascii_start().len()
    }
}

/// Where the first of `marks` is from `from` on, and which.
fn first_of(bytes: &[u8], from: usize, marks: &[&str]) -> Option<(usize, usize)> {
    let is = |at: usize| marks.iter().position(|mark| bytes[at..].starts_with(mark.as_bytes()));
    (from..bytes.len()).find_map(|at| Some((at, is(at)?)))
}

/// Bytes at the end that may be the beginning of one of `marks`.
fn begun(bytes: &[u8], marks: &[&str]) -> usize {
    let longest = marks.iter().map(|mark| mark.len() - 1).max().unwrap_or(0).min(bytes.len());
    let begins = |n: usize| {
        let end = &bytes[bytes.len() - n..];
        marks.iter().any(|mark| mark.len() > n && mark.as_bytes().starts_with(end))
    };
    (1..=longest).rev().find(|n| begins(*n)).unwrap_or(0)
}

struct Marked {
    family: Family,
    tools: Arc<Tools>,
    /// Calls are looked for.
    calls: bool,
    state: State,
    flow: Flow,
}

enum State {
    /// Before anything, where reasoning may begin.
    Start,
    /// Before the first text.
    First {
        drop_space: bool,
    },
    Reasoning {
        begun: bool,
    },
    Text,
    /// In a call that began behind this much white space.
    Call(Reader, usize),
    /// Behind a call.
    After,
}

impl Marked {
    /// One step; false if more text is needed.
    fn step(&mut self, at_end: bool, out: &mut Vec<Part>) -> bool {
        if self.flow.buf.is_empty() {
            return false;
        }
        match &mut self.state {
            State::Start => self.start(at_end, out),
            State::First { drop_space } => {
                let drop_space = *drop_space;
                self.first(drop_space, at_end, out)
            }
            State::Reasoning { begun } => {
                let begun = std::mem::replace(begun, true);
                self.reasoning(begun, at_end, out)
            }
            State::Text => self.text(at_end, out),
            State::Call(..) => self.call(at_end, out),
            State::After => self.after(at_end, out),
        }
    }

    fn start(&mut self, at_end: bool, out: &mut Vec<Part>) -> bool {
        let space = self.flow.space();
        let rest = &self.flow.buf[space..];
        if rest.starts_with(THINK) {
            out.push(Part::Mark(self.flow.take(space + THINK.len())));
            self.state = State::Reasoning { begun: false };
        } else if THINK.starts_with(rest) && !at_end {
            return false;
        } else {
            self.state = State::First { drop_space: false };
        }
        true
    }

    fn first(&mut self, drop_space: bool, at_end: bool, out: &mut Vec<Part>) -> bool {
        let may_call = self.calls && self.family == Family::Llama;
        let space = self.flow.space();
        if !drop_space && !may_call {
            self.state = State::Text;
            return true;
        }
        if space == self.flow.buf.len() && !at_end {
            return false;
        }
        if drop_space && space > 0 {
            out.push(Part::Mark(self.flow.take(space)));
        }
        let space = if drop_space { 0 } else { space };
        self.state = match may_call && self.flow.buf[space..].starts_with('{') {
            true => State::Call(Reader::object(), space),
            false => State::Text,
        };
        true
    }

    fn reasoning(&mut self, begun: bool, at_end: bool, out: &mut Vec<Part>) -> bool {
        if !begun {
            let space = self.flow.space();
            if space == self.flow.buf.len() && !at_end {
                self.state = State::Reasoning { begun: false };
                return false;
            }
            if space > 0 {
                out.push(Part::Mark(self.flow.take(space)));
            }
        }
        let (text, found) = self.flow.until(&[THINK_END], at_end);
        if !text.is_empty() {
            out.push(Part::Reasoning(text));
        }
        let Some((_, space)) = found else { return false };
        out.push(Part::Mark(self.flow.take(space + THINK_END.len())));
        self.state = State::First { drop_space: true };
        true
    }

    fn text(&mut self, at_end: bool, out: &mut Vec<Part>) -> bool {
        if !self.calls {
            let all = self.flow.buf.len();
            out.push(Part::Text(self.flow.take(all)));
            return false;
        }
        let marks = self.family.marks();
        let all = [marks.openers, marks.fronts].concat();
        let (text, found) = self.flow.until(&all, at_end);
        if !text.is_empty() {
            out.push(Part::Text(text));
        }
        let Some((which, space)) = found else { return false };
        if which < marks.openers.len() {
            self.state = State::Call(Reader::new(self.family, marks.openers[which]), space);
        } else {
            out.push(Part::Mark(self.flow.take(space + all[which].len())));
            self.state = State::After;
        }
        true
    }

    fn call(&mut self, at_end: bool, out: &mut Vec<Part>) -> bool {
        let State::Call(reader, space) = &mut self.state else { return false };
        let space = *space;
        match reader.advance(&self.flow.buf[space..], &self.tools) {
            Progress::More if !at_end => return false,
            Progress::More => {
                let all = self.flow.buf.len();
                out.push(Part::Text(self.flow.take(all)));
                self.state = State::Text;
            }
            Progress::Broken(length) => {
                out.push(Part::Text(self.flow.take(space + length)));
                self.state = State::Text;
            }
            Progress::Calls(length, calls) => {
                if space > 0 {
                    out.push(Part::Mark(self.flow.take(space)));
                }
                let mut raw = self.flow.take(length);
                for mut call in calls {
                    call.raw = std::mem::take(&mut raw);
                    out.push(Part::Call(call));
                }
                self.state = State::After;
            }
        }
        true
    }

    fn after(&mut self, at_end: bool, out: &mut Vec<Part>) -> bool {
        let space = self.flow.space();
        if space > 0 {
            out.push(Part::Mark(self.flow.take(space)));
            return true;
        }
        let closers = self.family.marks().closers;
        let rest = self.flow.buf.as_str();
        if let Some(closer) = closers.iter().find(|closer| rest.starts_with(**closer)) {
            out.push(Part::Mark(self.flow.take(closer.len())));
            return true;
        }
        if !at_end && closers.iter().any(|closer| closer.starts_with(rest)) {
            return false;
        }
        self.state = match self.family == Family::Llama && rest.starts_with('{') {
            true => State::Call(Reader::object(), 0),
            false => State::Text,
        };
        true
    }
}
