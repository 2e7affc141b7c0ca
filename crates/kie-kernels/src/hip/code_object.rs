//! What a code object for AMD's devices says of its kernels: registers, spills, memory, parameters.
//!
//! The file is ELF; a note of it holds a map in MessagePack. The runtime tells less, and not before
//! the code is on a device. Nothing here trusts the bytes: every length is checked, and maps nest
//! only so deep.

/// One kernel, as the compiler left it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Vector registers of a thread, of both kinds.
    pub registers: u32,
    /// Scalar registers of a wave.
    pub scalar_registers: u32,
    /// Vector registers that did not fit.
    pub spilled_registers: u32,
    /// Memory of a thread for arrays and registers that did not fit, in bytes.
    pub private_bytes: u32,
    /// Shared memory of a block besides what a launch asks for, in bytes.
    pub shared_bytes: u32,
    /// Most threads of a block.
    pub threads_max: u32,
    /// Lanes of a wave that it was compiled for.
    pub wave_lanes: u32,
    /// Bytes of each parameter that a launch gives.
    pub args_bytes: Vec<usize>,
}

/// All kernels of `code`.
///
/// # Errors
/// What is wrong with the bytes.
pub fn kernels(code: &[u8]) -> Result<Vec<Kernel>, String> {
    let note = metadata(code)?;
    let mut reader = Reader { bytes: note };
    let Value::Map(fields) = reader.value(0)? else { return Err("its note is no map".into()) };
    let list = fields.iter().find(|(key, _)| *key == "amdhsa.kernels");
    let Some((_, Value::List(list))) = list else { return Err("its note names no kernels".into()) };
    list.iter().map(kernel).collect()
}

fn kernel(value: &Value<'_>) -> Result<Kernel, String> {
    let Value::Map(fields) = value else { return Err("a kernel of its note is no map".into()) };
    let mut out = Kernel::default();
    for (key, value) in fields {
        match (*key, value) {
            (".name", Value::Text(name)) => out.name = (*name).into(),
            (".vgpr_count", &Value::Number(n)) => out.registers = number(n),
            (".sgpr_count", &Value::Number(n)) => out.scalar_registers = number(n),
            (".vgpr_spill_count", &Value::Number(n)) => out.spilled_registers = number(n),
            (".private_segment_fixed_size", &Value::Number(n)) => out.private_bytes = number(n),
            (".group_segment_fixed_size", &Value::Number(n)) => out.shared_bytes = number(n),
            (".max_flat_workgroup_size", &Value::Number(n)) => out.threads_max = number(n),
            (".wavefront_size", &Value::Number(n)) => out.wave_lanes = number(n),
            (".args", Value::List(args)) => {
                out.args_bytes = args.iter().filter_map(argument).collect();
            }
            _ => {}
        }
    }
    if out.name.is_empty() || out.wave_lanes == 0 {
        return Err("a kernel of its note has no name or no wave size".into());
    }
    Ok(out)
}

fn number(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Bytes of a parameter that the launch gives; none for those that the runtime fills in.
fn argument(value: &Value<'_>) -> Option<usize> {
    let Value::Map(fields) = value else { return None };
    let field = |name| fields.iter().find(|(key, _)| *key == name).map(|(_, value)| value);
    let hidden = matches!(field(".value_kind"), Some(Value::Text(kind)) if
        kind.starts_with("hidden_"));
    match field(".size") {
        Some(&Value::Number(size)) if !hidden => usize::try_from(size).ok(),
        _ => None,
    }
}

const NOTE_SEGMENT: u32 = 4;
const NOTE_METADATA: u32 = 32;

/// The note with the kernels.
fn metadata(code: &[u8]) -> Result<&[u8], String> {
    const CUT: &str = "it is cut short";
    if code.starts_with(b"__CLANG_OFFLOAD_BUNDLE__") {
        return Err("it is a bundle of code objects, not one".into());
    }
    if !code.starts_with(b"\x7fELF\x02\x01") {
        return Err("it is no 64-bit ELF file".into());
    }
    let (table, size, count) = (|| {
        Some((word64(code, 32)?, usize::from(word16(code, 54)?), usize::from(word16(code, 56)?)))
    })()
    .ok_or(CUT)?;
    for index in 0..count {
        let header = table.checked_add(index * size).ok_or(CUT)?;
        if word32(code, header).ok_or(CUT)? != NOTE_SEGMENT {
            continue;
        }
        let field = |at: usize| header.checked_add(at).and_then(|at| word64(code, at));
        let (at, bytes) = (field(8).ok_or(CUT)?, field(32).ok_or(CUT)?);
        let end = at.checked_add(bytes).ok_or(CUT)?;
        let notes = code.get(at..end).ok_or(CUT)?;
        if let Some(found) = note_of(notes) {
            return Ok(found);
        }
    }
    Err("it has no note about its kernels".into())
}

fn note_of(mut notes: &[u8]) -> Option<&[u8]> {
    loop {
        let name_bytes = word32(notes, 0)? as usize;
        let bytes = word32(notes, 4)? as usize;
        let kind = word32(notes, 8)?;
        let from = 12_usize.checked_add(name_bytes.checked_next_multiple_of(4)?)?;
        let name = notes.get(12..12 + name_bytes)?;
        let found = notes.get(from..from.checked_add(bytes)?)?;
        if kind == NOTE_METADATA && name == b"AMDGPU\0" {
            return Some(found);
        }
        notes = notes.get(from.checked_add(bytes.checked_next_multiple_of(4)?)?..)?;
    }
}

fn word16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn word64(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?)).ok()
}

/// What MessagePack says, as far as it matters here.
enum Value<'a> {
    Number(u64),
    Text(&'a str),
    List(Vec<Value<'a>>),
    Map(Vec<(&'a str, Value<'a>)>),
    Other,
}

/// Values within values, at most.
const DEPTH_MAX: usize = 16;

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (head, rest) = self.bytes.split_at_checked(count).ok_or("its note is cut short")?;
        self.bytes = rest;
        Ok(head)
    }

    /// A number of `count` bytes, the highest first.
    fn big(&mut self, count: usize) -> Result<u64, String> {
        Ok(self.take(count)?.iter().fold(0, |n, &byte| n << 8 | u64::from(byte)))
    }

    fn value(&mut self, depth: usize) -> Result<Value<'a>, String> {
        if depth > DEPTH_MAX {
            return Err("its note nests too deep".into());
        }
        let kind = self.take(1)?[0];
        match kind {
            0x00..=0x7f => Ok(Value::Number(u64::from(kind))),
            0x80..=0x8f => self.map(usize::from(kind & 15), depth),
            0x90..=0x9f => self.list(usize::from(kind & 15), depth),
            0xa0..=0xbf => self.text(usize::from(kind & 31)),
            0xcc..=0xcf => Ok(Value::Number(self.big(1 << (kind - 0xcc))?)),
            0xd9..=0xdb => {
                let count = self.big(1 << (kind - 0xd9))?;
                self.text(count as usize)
            }
            0xdc | 0xdd => {
                let count = self.big(2 << (kind - 0xdc))?;
                self.list(count as usize, depth)
            }
            0xde | 0xdf => {
                let count = self.big(2 << (kind - 0xde))?;
                self.map(count as usize, depth)
            }
            0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => Ok(Value::Other),
            // Numbers with a sign or a point.
            0xd0..=0xd3 => self.big(1 << (kind - 0xd0)).map(|_| Value::Other),
            0xca | 0xcb => self.big(4 << (kind - 0xca)).map(|_| Value::Other),
            _ => Err(format!("its note has a value of kind {kind:#x}")),
        }
    }

    fn text(&mut self, count: usize) -> Result<Value<'a>, String> {
        let bytes = self.take(count)?;
        std::str::from_utf8(bytes).map(Value::Text).map_err(|_| "its note has broken text".into())
    }

    fn list(&mut self, count: usize, depth: usize) -> Result<Value<'a>, String> {
        // Collected one by one: a count that lies does not take memory.
        let mut out = Vec::new();
        for _ in 0..count {
            out.push(self.value(depth + 1)?);
        }
        Ok(Value::List(out))
    }

    fn map(&mut self, count: usize, depth: usize) -> Result<Value<'a>, String> {
        let mut out = Vec::new();
        for _ in 0..count {
            match self.value(depth + 1)? {
                Value::Text(key) => out.push((key, self.value(depth + 1)?)),
                _ => return Err("its note has a key that is no text".into()),
            }
        }
        Ok(Value::Map(out))
    }
}
