//! The text of `llvm-objdump -d`: functions, and of each line the address, the mnemonic, the
//! operands and the modifiers behind them.

use crate::Fault;

/// One instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line<'a> {
    /// Where it stands, in bytes.
    pub address: u64,
    /// What it does, such as `v_add_u32_e32`.
    pub name: &'a str,
    /// Registers and numbers, in order.
    pub operands: Vec<&'a str>,
    /// What follows them, such as `sc1` or `offset:16`.
    pub modifiers: Vec<&'a str>,
    /// All of it, as printed.
    pub text: &'a str,
}

/// A function, in order of addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function<'a> {
    /// Its symbol.
    pub name: &'a str,
    /// Its instructions and what pads them.
    pub lines: Vec<Line<'a>>,
}

impl Line<'_> {
    /// Whether it carries this modifier.
    pub fn has(&self, modifier: &str) -> bool {
        self.modifiers.contains(&modifier)
    }

    /// The value of `name:value`, or of `name(value)`.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.modifiers.iter().find_map(|word| {
            let rest = word.strip_prefix(name)?;
            rest.strip_prefix(':').or_else(|| rest.strip_prefix('(')?.strip_suffix(')'))
        })
    }

    /// A fault of this line.
    pub fn fault(&self, what: impl Into<String>) -> Fault {
        Fault::Line { address: self.address, text: self.text.to_owned(), what: what.into() }
    }

    /// The address that a branch goes to: its operand counts words from the next instruction.
    ///
    /// # Errors
    /// Where the operand is no such number.
    pub fn target(&self) -> Result<u64, Fault> {
        let words = self.operands.first().and_then(|word| word.parse::<u16>().ok());
        let words = words.ok_or_else(|| self.fault("a branch to nowhere"))?;
        Ok(self.address.wrapping_add_signed(4 + 4 * i64::from(words as i16)))
    }
}

/// Where the jump at `at` goes whose distance is too long for a branch: the compiler adds it to the
/// address behind an `s_getpc_b64` some lines before.
///
/// # Errors
/// For a jump that is not made so.
pub fn far(lines: &[Line<'_>], at: usize) -> Result<u64, Fault> {
    let strange = || lines[at].fault("a jump to an unknown place");
    let before = &lines[at.saturating_sub(6)..at];
    let find = |name: &str| before.iter().rev().find(|line| line.name == name);
    let number = |name: &str| -> Option<u64> {
        let word = find(name)?.operands.get(2)?;
        match word.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => word.parse::<i64>().ok().map(|number| number as u64 & 0xffff_ffff),
        }
    };
    let low = number("s_add_u32").ok_or_else(strange)?;
    let high = number("s_addc_u32").ok_or_else(strange)?;
    let from = find("s_getpc_b64").filter(|line| line.operands == lines[at].operands);
    let from = from.ok_or_else(strange)?.address + 4;
    Ok(from.wrapping_add(high << 32 | low))
}

fn is_modifier(word: &str) -> bool {
    let flags = ["sc0", "sc1", "nt", "clamp", "gds"];
    let named = |(name, _): (&str, &str)| {
        name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_' || b.is_ascii_digit())
    };
    flags.contains(&word) || word.contains("cnt(") || word.split_once(':').is_some_and(named)
}

fn line(text: &str, address: u64) -> Line<'_> {
    let (name, rest) = text.split_once(' ').unwrap_or((text, ""));
    let (mut operands, mut modifiers) = (Vec::new(), Vec::new());
    for part in rest.split(", ") {
        for word in part.split(' ').filter(|word| !word.is_empty()) {
            if is_modifier(word) {
                modifiers.push(word);
            } else {
                operands.push(word);
            }
        }
    }
    Line { address, name, operands, modifiers, text }
}

/// All functions of a listing.
///
/// # Errors
/// For an instruction without a readable address, or before any function.
pub fn functions(listing: &str) -> Result<Vec<Function<'_>>, Fault> {
    let mut found: Vec<Function<'_>> = Vec::new();
    for text in listing.lines() {
        if let Some((_, name)) = text.strip_suffix(">:").and_then(|t| t.split_once('<')) {
            found.push(Function { name, lines: Vec::new() });
        } else if let Some((code, tail)) = text.strip_prefix('\t').and_then(|t| t.split_once("//"))
        {
            let address = tail.trim().split(':').next().unwrap_or("");
            let address = u64::from_str_radix(address, 16);
            let (Ok(address), Some(function)) = (address, found.last_mut()) else {
                return Err(Fault::Listing(format!("no address, or no function: {text}")));
            };
            function.lines.push(line(code.trim(), address));
        }
    }
    Ok(found)
}
