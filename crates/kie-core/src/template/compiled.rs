//! A template's source, checked and compiled to bytecode in which everything that may be dear is
//! charged first.
//!
//! What recurses over the source (parsing, folding of constants, code generation) is bounded by
//! what is counted before: tokens of a tag, `elif`s, and the bytes that constants may fold to. Then
//! a check goes before each instruction whose cost depends on its operands; it puts them back.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::machinery::{
    ast, parse, tokenize, CodeGenerator, Instruction, Instructions, Token, WhitespaceConfig,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Error, ErrorKind};

/// The largest published template has about 30 kB.
const SOURCE_BYTES_MAX: usize = 256 << 10;
/// Tokens between `{{` and `}}`, or `{%` and `%}`.
const TAG_TOKENS_MAX: usize = 2048;
/// Each is nested in the one before.
const ELIFS_MAX: usize = 500;
/// Bytes that constants of all tags may fold to.
const FOLDED_BYTES_MAX: u128 = 4 << 20;

const WHITE_SPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

/// Names of the checks, as functions of the environment. No template can name them.
pub(super) mod check {
    /// Two operands of `+`, `*`, `~`, a comparison, `in`.
    pub(crate) const ADD: &str = "<+>";
    pub(crate) const MUL: &str = "<*>";
    pub(crate) const CONCAT: &str = "<~>";
    pub(crate) const COMPARE: &str = "<==>";
    pub(crate) const IN: &str = "<in>";
    pub(crate) const IN_PRESERVED: &str = "<in, preserved>";
    /// An item and its container; a container and three numbers.
    pub(crate) const ITEM: &str = "<[]>";
    pub(crate) const SLICE: &str = "<[:]>";
    /// Keys and values in turn.
    pub(crate) const MAP: &str = "<{}>";
    /// Lists whose items go onto the stack.
    pub(crate) const UNPACK: &str = "<unpack>";
    /// What a variable, or a namespace, is to hold.
    pub(crate) const KEEP: &str = "<keep>";
    pub(crate) const STORE: &str = "<store>";
    /// Bytes of text as it stands in the source.
    pub(crate) const RAW: &str = "<raw>";
    /// Arguments of a method of an object.
    pub(crate) const METHOD: &str = "<method>";
    /// What came out.
    pub(crate) const MADE: &str = "<made>";
}

/// Bytecode of a template and its blocks.
pub(super) struct Compiled<'a> {
    pub(super) main: Instructions<'a>,
    pub(super) blocks: BTreeMap<&'a str, Instructions<'a>>,
}

fn refused(what: String, line: Option<usize>) -> Error {
    let place = line.map(|line| format!(" (line {line})")).unwrap_or_default();
    Error::new(ErrorKind::SyntaxError, format!("{what}{place}"))
}

/// Compiles a template.
pub(super) fn compile<'a>(name: &'a str, source: &'a str) -> Result<Compiled<'a>, Error> {
    check_source(source)?;
    let tree: ast::Stmt<'a> = parse(source, name, SyntaxConfig, WHITE_SPACE)?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&tree);
    let (main, blocks) = generator.finish();
    let blocks = blocks.into_iter().map(|(name, code)| Ok((name, metered(&code)?)));
    Ok(Compiled { main: metered(&main)?, blocks: blocks.collect::<Result<_, Error>>()? })
}

/// Counts what the compiler would recurse over.
fn check_source(source: &str) -> Result<(), Error> {
    if source.len() > SOURCE_BYTES_MAX {
        let got = source.len();
        return Err(refused(format!("{got} bytes, more than {SOURCE_BYTES_MAX}"), None));
    }
    let (mut elifs, mut folded) = (0, 0);
    let mut tag = Tag::default();
    for token in tokenize(source, false, SyntaxConfig, WHITE_SPACE) {
        // What is no token is told by the parser, with its line.
        let Ok((token, span)) = token else { return Ok(()) };
        let line = Some(usize::from(span.start_line));
        match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => continue,
            Token::VariableEnd | Token::BlockEnd => {
                folded += std::mem::take(&mut tag).folds_to();
                if folded > FOLDED_BYTES_MAX {
                    let what = format!("constants of {folded} bytes or more in the source");
                    return Err(refused(what, line));
                }
                continue;
            }
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        tag.take(&token, span.end_offset.saturating_sub(span.start_offset));
        if tag.tokens > TAG_TOKENS_MAX {
            return Err(refused(format!("a tag of more than {TAG_TOKENS_MAX} tokens"), line));
        }
        if elifs > ELIFS_MAX {
            return Err(refused(format!("more than {ELIFS_MAX} elifs"), line));
        }
    }
    Ok(())
}

/// What a tag consists of.
#[derive(Default)]
struct Tag {
    tokens: usize,
    /// Bytes of text that constants may be made of.
    bytes: u128,
    /// Product of all integers, where something is multiplied.
    factor: Option<u128>,
    product: u128,
}

impl Tag {
    fn take(&mut self, token: &Token<'_>, bytes: u32) {
        self.tokens += 1;
        match token {
            Token::Str(_) | Token::String(_) | Token::Tilde => self.bytes += u128::from(bytes) + 40,
            Token::Int(n) => self.product = self.product.max(1).saturating_mul((*n).max(1).into()),
            Token::Int128(n) => self.product = self.product.max(1).saturating_mul((**n).max(1)),
            Token::Mul => self.factor = Some(1),
            _ => {}
        }
    }

    /// Bytes that constants fold to, at most, where they are multiplied.
    fn folds_to(&self) -> u128 {
        let factor = self.factor.map_or(0, |_| self.product.max(1));
        self.bytes.saturating_mul(factor)
    }
}

/// The same code with checks.
fn metered<'a>(code: &Instructions<'a>) -> Result<Instructions<'a>, Error> {
    let length = u32::try_from(code.len()).unwrap_or(u32::MAX);
    let get = |at: u32| code.get(at).expect("below the length");
    let targets: BTreeSet<u32> = (0..length).filter_map(|at| target(get(at))).collect();
    let mut places = Vec::with_capacity(code.len() + 1);
    let mut new: Vec<(Instruction<'a>, u16)> = Vec::new();
    for at in 0..length {
        places.push(new.len() as u32);
        let line = code.get_line(at);
        let before = at.checked_sub(1).filter(|_| !targets.contains(&at)).map(get);
        let (ahead, behind) =
            checks(get(at), before).map_err(|what| refused(what.to_owned(), line))?;
        let line = u16::try_from(line.unwrap_or_default()).unwrap_or(u16::MAX);
        new.extend(ahead.into_iter().map(|instruction| (instruction, line)));
        new.push((get(at).clone(), line));
        new.extend(behind.map(|instruction| (instruction, line)));
    }
    places.push(new.len() as u32);
    let mut out = Instructions::new(code.name(), code.source());
    for (mut instruction, line) in new {
        if let Some(target) = target_mut(&mut instruction) {
            *target = places[*target as usize];
        }
        out.add_with_line(instruction, line);
    }
    Ok(out)
}

fn target(instruction: &Instruction<'_>) -> Option<u32> {
    target_mut(&mut instruction.clone()).copied()
}

/// Where an instruction may go on.
fn target_mut<'a>(instruction: &'a mut Instruction<'_>) -> Option<&'a mut u32> {
    match instruction {
        Instruction::Iterate(to)
        | Instruction::Jump(to)
        | Instruction::JumpIfFalse(to)
        | Instruction::JumpIfFalseOrPop(to)
        | Instruction::JumpIfTrueOrPop(to)
        | Instruction::BuildMacro(_, to, _) => Some(to),
        _ => None,
    }
}

type Checks<'a> = (Vec<Instruction<'a>>, Option<Instruction<'a>>);

/// What goes ahead of an instruction and behind it. `before` surely came before it.
fn checks<'a>(
    instruction: &Instruction<'a>,
    before: Option<&Instruction<'a>>,
) -> Result<Checks<'a>, &'static str> {
    use minijinja::machinery::Instruction as I;
    // The check takes the top of the stack and puts it back: several in the order that unpacking
    // them wants.
    let operands = |name: &'static str, count: usize| {
        let call = I::CallFunction(name, u16::try_from(count).ok());
        if count == 1 {
            vec![call]
        } else {
            vec![call, I::UnpackList(count)]
        }
    };
    let made = Some(I::CallFunction(check::MADE, Some(1)));
    let only = |ahead| (ahead, None);
    Ok(match instruction {
        I::Add => (operands(check::ADD, 2), made),
        I::Mul => (operands(check::MUL, 2), made),
        I::Slice => (operands(check::SLICE, 4), made),
        I::StringConcat => only(operands(check::CONCAT, 2)),
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte => only(operands(check::COMPARE, 2)),
        I::In => only(operands(check::IN, 2)),
        // Chains such as `a < b in c`, the container on top.
        I::CompareAndPreserve(_) => only(operands(check::IN_PRESERVED, 2)),
        I::GetItem => match before {
            Some(I::LoadConst(key)) if key.as_str().is_some() => only(Vec::new()),
            _ => only(operands(check::ITEM, 2)),
        },
        I::BuildMap(pairs) if *pairs > 0 => match 2 * *pairs {
            count if count <= usize::from(u16::MAX) => only(operands(check::MAP, count)),
            _ => return Err("a map of more than 32,767 items"),
        },
        I::UnpackList(_) => only(operands(check::UNPACK, 1)),
        I::UnpackLists(count) if *count > 0 => only(operands(check::UNPACK, *count)),
        I::StoreLocal(_) => only(operands(check::KEEP, 1)),
        I::SetAttr(_) => only(operands(check::STORE, 2)),
        I::EmitRaw(text) => only(vec![
            I::LoadConst(Value::from(text.len())),
            I::CallFunction(check::RAW, Some(1)),
            I::DiscardTop,
        ]),
        I::CallMethod(_, Some(count)) => (operands(check::METHOD, usize::from(*count)), made),
        I::CallMethod(_, None) => {
            (vec![I::CallFunction(check::METHOD, None), I::UnpackLists(1)], made)
        }
        I::LoadBlocks | I::Include(_) => {
            return Err("extends, include and import: there is only this template")
        }
        _ => only(Vec::new()),
    })
}
