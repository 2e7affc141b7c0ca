//! Storage types and encodings: how the numbers of a tensor lie in memory, and what they mean.
//!
//! A [`Dtype`] is the storage type of one number. An [`Encoding`] says how a matrix is stored: what
//! its codes stand for ([`Codes`]), which of them share a scale, and how scales are stored. A new
//! encoding is one row in [`CODES`] and one decoder a runner; `numbers.rs` has the reference.

/// Storage type of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// IEEE single.
    F32 = 0,
    /// IEEE half.
    F16 = 1,
    /// The upper half of a single.
    Bf16 = 2,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinity (OCP FP8).
    F8E4m3 = 3,
    /// 8-bit power of two, `2^(code - 127)`; 255 is NaN (OCP MX). A scale.
    F8E8m0 = 4,
}

impl Dtype {
    /// Bytes of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4m3 | Self::F8E8m0 => 1,
        }
    }

    /// Name as safetensors and users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E4m3 => "f8_e4m3",
            Self::F8E8m0 => "f8_e8m0",
        }
    }
}

/// What the codes of a matrix stand for and how they lie in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codes {
    /// IEEE single.
    F32 = 0,
    /// IEEE half.
    F16 = 1,
    /// The upper half of a single.
    Bf16 = 2,
    /// FP8 e4m3.
    E4m3 = 3,
    /// Signed bytes.
    I8 = 4,
    /// Two integers a byte, the first in the low half, each plus 8.
    I4 = 5,
    /// Two 4-bit floats a byte, the first in the low half: a sign, 2 exponent bits and 1 mantissa
    /// bit (OCP MX); 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    E2m1 = 6,
    /// GGUF: 32 signed bytes behind their float16 scale.
    Q8x0 = 7,
    /// GGUF: 32 integers of 4 bits, each plus 8, behind their float16 scale.
    Q4x0 = 8,
    /// GGUF: 256 integers of 4 bits in groups of 32 with a scale and a minimum of 6 bits each,
    /// behind two float16 that scale those.
    Q4k = 9,
    /// GGUF: 256 integers of 6 bits, each plus 32, in groups of 16 with a scale of 8 bits each,
    /// before the float16 that scales those.
    Q6k = 10,
}

/// A row of the table of encodings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodesRow {
    /// The codes that the row is about.
    pub codes: Codes,
    /// Name as messages have it.
    pub name: &'static str,
    /// Numbers of the smallest piece of a row that is whole bytes.
    pub numbers: u32,
    /// Bytes of that piece.
    pub bytes: u32,
    /// Numbers of a group whose scale lies among the codes; 0: scales lie beside them, if at all.
    pub group: u32,
}

const fn row(codes: Codes, name: &'static str, piece: (u32, u32), group: u32) -> CodesRow {
    CodesRow { codes, name, numbers: piece.0, bytes: piece.1, group }
}

/// All codes, in the order of their numbers.
pub const CODES: [CodesRow; 11] = [
    row(Codes::F32, "f32", (1, 4), 0),
    row(Codes::F16, "f16", (1, 2), 0),
    row(Codes::Bf16, "bf16", (1, 2), 0),
    row(Codes::E4m3, "f8_e4m3", (1, 1), 0),
    row(Codes::I8, "i8", (1, 1), 0),
    row(Codes::I4, "i4", (2, 1), 0),
    row(Codes::E2m1, "f4_e2m1", (2, 1), 0),
    row(Codes::Q8x0, "q8_0", (32, 34), 32),
    row(Codes::Q4x0, "q4_0", (32, 18), 32),
    row(Codes::Q4k, "q4_k", (256, 144), 32),
    row(Codes::Q6k, "q6_k", (256, 210), 16),
];

impl Codes {
    /// The codes' row in the table.
    pub const fn row(self) -> &'static CodesRow {
        &CODES[self as usize]
    }

    /// Name as messages have it.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Bytes of so many numbers of a row, which are whole pieces.
    pub const fn bytes_of(self, numbers: usize) -> usize {
        numbers / self.row().numbers as usize * self.row().bytes as usize
    }

    /// The codes that are plain numbers of a storage type.
    pub const fn plain(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::F16 => Some(Self::F16),
            Dtype::Bf16 => Some(Self::Bf16),
            Dtype::F8E4m3 => Some(Self::E4m3),
            Dtype::F8E8m0 => None,
        }
    }
}

/// How a matrix is stored. A number is its code, less its group's zero point if there is one, times
/// its group's scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Encoding {
    /// What the codes stand for.
    pub codes: Codes,
    /// Storage type of the scales.
    pub scale: Dtype,
    /// Whether each group has a zero point, a signed byte each, that is taken from its codes.
    pub zeros: bool,
    /// Rows and columns of a group that shares a scale; 0 where there are none beside the codes.
    pub group: [u32; 2],
}

impl Encoding {
    /// Codes without scales beside them.
    pub const fn plain(codes: Codes) -> Self {
        Self { codes, scale: Dtype::F32, zeros: false, group: [0, 0] }
    }

    /// Codes with a scale for each group of `group` rows x columns.
    pub const fn scaled(codes: Codes, group: [u32; 2], scale: Dtype) -> Self {
        Self { codes, scale, zeros: false, group }
    }

    /// Whether scales lie beside the codes.
    pub const fn has_scales(&self) -> bool {
        self.group[0] != 0
    }

    /// Whether numbers are codes that need scales, among them or beside them.
    pub const fn is_quantised(&self) -> bool {
        self.has_scales() || self.codes.row().group > 0
    }

    /// Groups of a matrix, `[rows, cols]`; zeros where there are no scales.
    pub const fn grid(&self, rows: u32, cols: u32) -> [u32; 2] {
        match self.group {
            [0, _] => [0, 0],
            [down, across] => [rows.div_ceil(down), cols.div_ceil(across)],
        }
    }

    /// Bits of a number, the scales' share of a whole group included.
    pub fn bits(&self) -> f64 {
        let row = self.codes.row();
        let codes = f64::from(8 * row.bytes) / f64::from(row.numbers);
        let [down, across] = self.group.map(f64::from);
        if !self.has_scales() {
            return codes;
        }
        let scale = self.scale.bytes() + usize::from(self.zeros);
        codes + 8.0 * scale as f64 / (down * across)
    }
}

impl std::fmt::Display for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.codes.name())?;
        let [down, across] = self.group;
        if self.has_scales() {
            write!(f, ", {} a group of {down} x {across}", self.scale.name())?;
        }
        f.write_str(if self.zeros { " with zero points" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_its_codes() {
        for (at, row) in CODES.iter().enumerate() {
            assert_eq!(row.codes as usize, at, "{}", row.name);
            assert!(row.numbers > 0 && row.bytes > 0);
        }
    }

    #[test]
    fn bits_count_the_scales() {
        assert_eq!(Encoding::plain(Codes::Bf16).bits(), 16.0);
        assert_eq!(Encoding::plain(Codes::Q8x0).bits(), 8.5);
        assert_eq!(Encoding::plain(Codes::Q4k).bits(), 4.5);
        assert_eq!(Encoding::scaled(Codes::I4, [1, 32], Dtype::Bf16).bits(), 4.5);
        assert_eq!(Encoding::scaled(Codes::E2m1, [1, 32], Dtype::F8E8m0).bits(), 4.25);
        let blocks = Encoding::scaled(Codes::E4m3, [128, 128], Dtype::F32);
        assert_eq!(blocks.bits(), 8.0 + 32.0 / 16384.0);
        assert_eq!(blocks.grid(129, 256), [2, 2]);
    }
}
