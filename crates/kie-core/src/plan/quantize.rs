//! Matrices of 16 or 32 bits quantised on request: every number rounded to nearest, the scale of a
//! group searched for the least squared error. What it costs is said.
//!
//! Sources: OCP 8-bit Floating Point Specification; OCP Microscaling Formats (MX) Specification.

use std::sync::Mutex;

use half::bf16;
use kie_kernels::abi::{Codes, Dtype, Encoding};
use kie_kernels::device::Stop;
use kie_kernels::host::allowed_cores;
use kie_kernels::matrix::{row_to_f32, Matrix};
use kie_kernels::numbers::e8m0_to_f32;
use kie_kernels::simd::{f8_to_f32, E2M1};

use crate::error::Result;

/// What 16-bit weights can be quantised to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// e4m3 with a float32 scale a block of 128 x 128.
    Fp8,
    /// 4-bit integers with a bfloat16 scale for 32 of a row.
    Int4,
    /// e2m1 with an e8m0 scale for 32 of a row.
    Mxfp4,
}

/// Rows that one thread takes at a time: those of a block.
const ROWS: usize = 128;

impl Scheme {
    /// By the name that users write.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "fp8" => Some(Self::Fp8),
            "int4" => Some(Self::Int4),
            "mxfp4" => Some(Self::Mxfp4),
            _ => None,
        }
    }

    /// The name that users write.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Int4 => "int4",
            Self::Mxfp4 => "mxfp4",
        }
    }

    /// How matrices are stored then.
    pub fn encoding(self) -> Encoding {
        match self {
            Self::Fp8 => Encoding::scaled(Codes::E4m3, [128, 128], Dtype::F32),
            Self::Int4 => Encoding::scaled(Codes::I4, [1, 32], Dtype::Bf16),
            Self::Mxfp4 => Encoding::scaled(Codes::E2m1, [1, 32], Dtype::F8E8m0),
        }
    }

    /// Whether rows of so many numbers are whole groups.
    pub fn fits(self, cols: u32) -> bool {
        match self {
            Self::Fp8 => true,
            Self::Int4 | Self::Mxfp4 => cols.is_multiple_of(32),
        }
    }
}

/// A quantised matrix.
pub struct Quantised {
    /// Its codes.
    pub codes: Vec<u8>,
    /// Their scales.
    pub scales: Vec<u8>,
    /// Sum of squared errors, and of squares.
    pub error: [f64; 2],
}

/// Quantises a matrix of a plain type, by all cores.
///
/// # Errors
/// [`crate::Error::GivenUp`].
pub fn quantise(scheme: Scheme, m: &Matrix<'_>, stop: &Stop) -> Result<Quantised> {
    let (encoding, cols) = (scheme.encoding(), m.cols);
    let row_bytes = encoding.codes.bytes_of(cols);
    let [_, across] = encoding.grid(m.rows as u32, cols as u32);
    let scale_rows = ROWS / encoding.group[0] as usize;
    let scale_bytes = scale_rows * across as usize * encoding.scale.bytes();
    let [down, _] = encoding.grid(m.rows as u32, cols as u32);
    let mut codes = vec![0; m.rows * row_bytes];
    let mut scales = vec![0; (down * across) as usize * encoding.scale.bytes()];
    let work = codes.chunks_mut(ROWS * row_bytes).zip(scales.chunks_mut(scale_bytes)).enumerate();
    let (work, error) = (Mutex::new(work), Mutex::new([0.0, 0.0]));
    let locked = "no thread panics with it";
    std::thread::scope(|scope| {
        let convert = || {
            let mut rows = vec![0.0; ROWS * cols];
            loop {
                let next = work.lock().expect(locked).next();
                let Some((chunk, (codes, scales))) = next else { return };
                if stop.check().is_err() {
                    return;
                }
                let rows = &mut rows[..codes.len() / row_bytes * cols];
                for (at, row) in rows.chunks_exact_mut(cols).enumerate() {
                    row_to_f32(m, chunk * ROWS + at, row);
                }
                let found = match scheme {
                    Scheme::Fp8 => fp8(rows, cols, codes, scales),
                    Scheme::Int4 => groups::<2>(rows, codes, scales, int4),
                    Scheme::Mxfp4 => groups::<1>(rows, codes, scales, mxfp4),
                };
                let mut error = error.lock().expect(locked);
                *error = [error[0] + found[0], error[1] + found[1]];
            }
        };
        for _ in 1..allowed_cores().min(m.rows.div_ceil(ROWS)) {
            // With fewer threads it takes longer.
            if std::thread::Builder::new().spawn_scoped(scope, convert).is_err() {
                break;
            }
        }
        convert();
    });
    stop.check()?;
    let error = error.into_inner().expect(locked);
    Ok(Quantised { codes, scales, error })
}

fn largest(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.fold(0.0, |most, x| most.max(x.abs()))
}

/// One row of blocks.
fn fp8(rows: &[f32], cols: usize, codes: &mut [u8], scales: &mut [u8]) -> [f64; 2] {
    let mut error = [0.0, 0.0];
    for (block, scale_bytes) in scales.chunks_exact_mut(4).enumerate() {
        let span = block * 128..cols.min((block + 1) * 128);
        let part = |row: &'_ [f32]| largest(row[span.clone()].iter().copied());
        let most = largest(rows.chunks_exact(cols).map(part));
        let scale = if most > 0.0 { most / 448.0 } else { 1.0 };
        scale_bytes.copy_from_slice(&scale.to_le_bytes());
        for (row, codes) in rows.chunks_exact(cols).zip(codes.chunks_exact_mut(cols)) {
            for (x, code) in row[span.clone()].iter().zip(&mut codes[span.clone()]) {
                *code = f32_to_f8(x / scale);
                let kept = f8_to_f32(*code) * scale;
                error[0] += f64::from(kept - x).powi(2);
                error[1] += f64::from(*x).powi(2);
            }
        }
    }
    error
}

/// The nearest e4m3 code, ties to even; beyond 448 the largest.
pub fn f32_to_f8(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let size = x.abs().min(448.0);
    // Exponent of the number, or that of the subnormal ones; three bits of mantissa.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(-6);
    let step = f32::from_bits(((exponent - 3 + 127) as u32) << 23);
    let mantissa = (size / step).round_ties_even() as u32;
    // A mantissa of 16 carries into the exponent by itself.
    let code = ((exponent + 6) as u32 * 8 + mantissa) as u8;
    sign | code.min(0x7e)
}

/// A group's scale as stored and as a number, and what a code of it stands for.
type Group<const SIZE: usize> = ([u8; SIZE], f32, fn(u8) -> f32);

/// Groups of 32 of a row: `quantise` gives a scale of `SIZE` bytes and codes of 4 bits.
fn groups<const SIZE: usize>(
    rows: &[f32],
    codes: &mut [u8],
    scales: &mut [u8],
    quantise: fn(&[f32; 32], &mut [u8; 32]) -> Group<SIZE>,
) -> [f64; 2] {
    let mut error = [0.0, 0.0];
    let (groups, _) = rows.as_chunks::<32>();
    let (packed, _) = codes.as_chunks_mut::<16>();
    let (scales, _) = scales.as_chunks_mut::<SIZE>();
    for ((group, packed), scale) in groups.iter().zip(packed).zip(scales) {
        let mut codes = [0; 32];
        let (bytes, factor, value) = quantise(group, &mut codes);
        *scale = bytes;
        for (n, byte) in packed.iter_mut().enumerate() {
            *byte = codes[2 * n] | codes[2 * n + 1] << 4;
        }
        for (x, code) in group.iter().zip(codes) {
            error[0] += f64::from(value(code) * factor - x).powi(2);
            error[1] += f64::from(*x).powi(2);
        }
    }
    error
}

/// Of several scales the one with the least squared error.
fn best(
    group: &[f32; 32],
    scales: impl Iterator<Item = f32>,
    round: fn(f32) -> u8,
    value: fn(u8) -> f32,
) -> f32 {
    let mut found = (f32::INFINITY, 1.0);
    for scale in scales.filter(|scale| scale.is_normal()) {
        let error = |x: &f32| (value(round(x / scale)) * scale - x).powi(2);
        let error: f32 = group.iter().map(error).sum();
        if error < found.0 {
            found = (error, scale);
        }
    }
    found.1
}

fn int4(group: &[f32; 32], codes: &mut [u8; 32]) -> Group<2> {
    let round: fn(f32) -> u8 = |x| (x.round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8;
    let value: fn(u8) -> f32 = |code| f32::from(code) - 8.0;
    let most = group.iter().fold(0.0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    // The largest is 5 to 9 steps, of either sign: codes reach from -8 to 7.
    let steps = (0..33).map(|n| 5.0 + n as f32 / 8.0);
    let scales = steps.flat_map(|step| [most / step, -most / step]);
    let stored = scales.map(|scale| bf16::from_f32(scale).to_f32());
    let scale = best(group, stored, round, value);
    for (code, x) in codes.iter_mut().zip(group) {
        *code = round(x / scale);
    }
    (bf16::from_f32(scale).to_le_bytes(), scale, value)
}

fn mxfp4(group: &[f32; 32], codes: &mut [u8; 32]) -> Group<1> {
    let value: fn(u8) -> f32 = |code| E2M1[code as usize];
    let round: fn(f32) -> u8 = |x| {
        // Halfway between neighbours; ties go to the even code.
        const EDGES: [(f32, bool); 7] = [
            (0.25, false),
            (0.75, true),
            (1.25, false),
            (1.75, true),
            (2.5, false),
            (3.5, true),
            (5.0, false),
        ];
        let above = |(edge, up): &&(f32, bool)| x.abs() > *edge || (*up && x.abs() == *edge);
        let code = EDGES.iter().take_while(above).count() as u8;
        if x < 0.0 {
            code | 8
        } else {
            code
        }
    };
    let most = largest(group.iter().copied());
    // The largest e2m1 is 6 = 1.5 * 2^2 (MX specification, 6.3), or the neighbours of that scale.
    let exponent = (most.to_bits() >> 23) as i32 - 2;
    let near = (exponent - 1..=exponent + 1).map(|e| e8m0_to_f32(e.clamp(1, 254) as u8));
    let scale = best(group, near, round, value);
    for (code, x) in codes.iter_mut().zip(group) {
        *code = round(x / scale);
    }
    ([(scale.to_bits() >> 23) as u8], scale, value)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_value_is_its_own_code_and_others_go_to_the_nearest() {
        let values: Vec<f32> = (0..0x7f).map(f8_to_f32).collect();
        for (code, value) in (0..0x7f).zip(&values) {
            assert_eq!([f32_to_f8(*value), f32_to_f8(-value)], [code, code | 0x80]);
        }
        for at in 0..200_000 {
            let x = at as f32 * 0.0025;
            let got = f8_to_f32(f32_to_f8(x));
            let least = values.iter().map(|v| (v - x).abs()).fold(f32::INFINITY, f32::min);
            assert_eq!((got - x).abs(), least, "{x}");
        }
        assert_eq!([f32_to_f8(1e9), f32_to_f8(-1e9)], [0x7e, 0xfe]);
    }

    #[test]
    fn a_quantised_matrix_is_near_and_its_own_values_stay() {
        let wave = |n: usize| ((n * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.1;
        let (rows, cols) = (130, 160);
        let bytes: Vec<u8> = (0..rows * cols).flat_map(|n| wave(n).to_le_bytes()).collect();
        let m = Matrix { data: &bytes, codes: Codes::F32, rows, cols, row_step: 1, scales: None };
        for (scheme, most) in [(Scheme::Fp8, 0.03), (Scheme::Int4, 0.08), (Scheme::Mxfp4, 0.14)] {
            let once = quantise(scheme, &m, &Stop::default()).unwrap();
            let relative = (once.error[0] / once.error[1]).sqrt();
            assert!(relative > 0.0 && relative < most, "{scheme:?}: {relative}");
            let encoding = scheme.encoding();
            let tensor = kie_kernels::abi::Tensor {
                buffer: 0,
                encoding,
                layout: kie_kernels::abi::Layout::RowMajor,
                lanes: 1,
                rows: rows as u32,
                cols: cols as u32,
                row_step: 1,
                scale_buffer: 0,
                offset: 0,
                scale_offset: 0,
                zero_offset: 0,
            };
            assert_eq!(once.codes.len() as u64, tensor.lane_bytes());
            assert_eq!(once.scales.len() as u64, tensor.scale_bytes());
            let stored = Matrix::described(&tensor, &once.codes, || &once.scales, || &[]);
            let mut row = vec![0.0; cols];
            let mut error = 0.0;
            let mut again = Vec::new();
            for at in 0..rows {
                row_to_f32(&stored, at, &mut row);
                for (n, x) in row.iter().enumerate() {
                    error += f64::from(x - wave(at * cols + n)).powi(2);
                    again.extend(x.to_le_bytes());
                }
            }
            assert!((error - once.error[0]).abs() <= 1e-6 * error, "{scheme:?}: as it is read");
            let m = Matrix { data: &again, ..m };
            let twice = quantise(scheme, &m, &Stop::default()).unwrap();
            let relative = (twice.error[0] / twice.error[1]).sqrt();
            assert!(relative < 1e-3, "{scheme:?}: quantised values are kept, {relative}");
        }
    }
}
