//! A linked code object: what is to lie in memory, and what the hardware is told of each kernel.

use crate::Fault;

/// The numbers of a kernel's descriptor that a launch follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// Shared memory besides what a launch asks for, in bytes.
    pub(crate) local_bytes: u32,
    /// Bytes of parameters.
    pub(crate) args_bytes: u32,
    /// How floats are rounded, and whether small ones are kept.
    pub(crate) float_mode: u32,
    /// Scalar registers that hold something when a wave begins.
    pub(crate) user_registers: u32,
    /// Which of `x`, `y` and `z` of the block's place a wave gets, by bit.
    pub(crate) places: u32,
    /// What stands in the user registers, by bit.
    pub(crate) properties: u32,
}

/// A code object.
pub(crate) struct Object<'a> {
    bytes: &'a [u8],
}

const LOADED: u32 = 1;
const SYMBOLS: u32 = 2;
const DYNAMIC_SYMBOLS: u32 = 11;

fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let mut word = [0; 8];
    word[..size].copy_from_slice(bytes.get(at..at.checked_add(size)?)?);
    Some(u64::from_le_bytes(word))
}

impl<'a> Object<'a> {
    /// # Errors
    /// For what is no ELF file of 64 bits.
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, Fault> {
        if !bytes.starts_with(b"\x7fELF\x02\x01") {
            return Err(Fault::Listing("the code object is no 64-bit ELF file".to_owned()));
        }
        Ok(Self { bytes })
    }

    fn get(&self, at: u64, size: usize) -> Option<u64> {
        number(self.bytes, usize::try_from(at).ok()?, size)
    }

    /// Places of the headers in a table: its offset, their size and their number.
    fn table(&self, [offset, size, count]: [u64; 3]) -> Option<Vec<u64>> {
        let (from, size) = (self.get(offset, 8)?, self.get(size, 2)?);
        (0..self.get(count, 2)?).map(|n| from.checked_add(n * size)).collect()
    }

    /// The bytes from address 0 on, as they lie in memory.
    pub(crate) fn image(&self) -> Option<Vec<u8>> {
        let mut image = Vec::new();
        for header in self.table([32, 54, 56])? {
            if self.get(header, 4)? != u64::from(LOADED) {
                continue;
            }
            let field = |at: u64| usize::try_from(self.get(header + at, 8)?).ok();
            let (from, to, bytes, all) = (field(8)?, field(16)?, field(32)?, field(40)?);
            let end = to.checked_add(all).filter(|end| *end < 1 << 28)?;
            image.resize(image.len().max(end), 0);
            image[to..to + bytes].copy_from_slice(self.bytes.get(from..from.checked_add(bytes)?)?);
        }
        Some(image)
    }

    /// The address of a symbol.
    fn symbol(&self, name: &str) -> Option<u64> {
        for header in self.table([40, 58, 60])? {
            let kind = self.get(header + 4, 4)? as u32;
            if kind != SYMBOLS && kind != DYNAMIC_SYMBOLS {
                continue;
            }
            let (from, bytes) = (self.get(header + 24, 8)?, self.get(header + 32, 8)?);
            let strings = self.table([40, 58, 60])?;
            let strings = *strings.get(self.get(header + 40, 4)? as usize)?;
            let names = self.get(strings + 24, 8)?;
            for at in (from..from.checked_add(bytes)?).step_by(24) {
                let start = usize::try_from(names + self.get(at, 4)?).ok()?;
                let found = self.bytes.get(start..)?.split(|byte| *byte == 0).next()?;
                if found == name.as_bytes() {
                    return self.get(at + 8, 8);
                }
            }
        }
        None
    }

    /// What the hardware is told of a kernel.
    pub(crate) fn descriptor(&self, kernel: &str) -> Option<Descriptor> {
        let at = usize::try_from(self.symbol(&format!("{kernel}.kd"))?).ok()?;
        let image = self.image()?;
        let word = |offset: usize, size: usize| number(&image, at + offset, size).map(|n| n as u32);
        let (first, second) = (word(48, 4)?, word(52, 4)?);
        Some(Descriptor {
            local_bytes: word(0, 4)?,
            args_bytes: word(8, 4)?,
            float_mode: first >> 12 & 0xff,
            user_registers: second >> 1 & 31,
            places: second >> 7 & 7,
            properties: word(56, 2)?,
        })
    }
}
