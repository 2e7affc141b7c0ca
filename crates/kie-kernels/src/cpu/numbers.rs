//! Stored numbers to float32 and back, one row at a time: embeddings, norm scales, KV.

use half::{bf16, f16};

use super::matmul::Matrix;
use super::simd::f8_to_f32;
use crate::abi::{Codes, Dtype};

/// The number in `bytes`, which holds exactly one.
pub fn number_to_f32(dtype: Dtype, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (Dtype::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (Dtype::F8E4m3, &[a]) => f8_to_f32(a),
        (Dtype::F8E8m0, &[a]) => e8m0_to_f32(a),
        (Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::F8E4m3 | Dtype::F8E8m0, _) => {
            unreachable!("one {} is {} bytes, not {}", dtype.name(), dtype.bytes(), bytes.len())
        }
    }
}

/// Value of an e8m0 code: a power of two, or NaN for 255.
pub fn e8m0_to_f32(code: u8) -> f32 {
    match code {
        255 => f32::NAN,
        // 2^-127 is subnormal.
        0 => f32::from_bits(1 << 22),
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// The code at `col` of a row's bytes, before its scale.
pub fn code_to_f32(codes: Codes, row: &[u8], col: usize) -> f32 {
    let number = |dtype: Dtype| {
        let size = dtype.bytes();
        number_to_f32(dtype, &row[col * size..(col + 1) * size])
    };
    match codes {
        Codes::F32 => number(Dtype::F32),
        Codes::F16 => number(Dtype::F16),
        Codes::Bf16 => number(Dtype::Bf16),
        Codes::E4m3 => number(Dtype::F8E4m3),
    }
}

/// Row `row` of a matrix, scales applied, into `out[..cols]`.
pub fn row_to_f32(m: &Matrix<'_>, row: usize, out: &mut [f32]) {
    let bytes = m.row(row);
    for (col, out) in out[..m.cols].iter_mut().enumerate() {
        *out = code_to_f32(m.codes, bytes, col);
    }
    let Some(scales) = &m.scales else { return };
    let first = scales.first(row, m.cols);
    for (block, out) in out[..m.cols].chunks_mut(scales.block_cols).enumerate() {
        let (scale, zero) = (scales.at(first + block), scales.zero(first + block));
        out.iter_mut().for_each(|x| *x = (*x - zero) * scale);
    }
}

/// Stores `x` as F32 or F16 (the formats of KV pages). Float16 saturates rather than overflow, so
/// that one large key cannot turn a whole softmax into NaN.
pub fn store_f32(dtype: Dtype, x: &[f32], out: &mut [u8]) {
    match dtype {
        Dtype::F32 => {
            for (out, x) in out.chunks_exact_mut(4).zip(x) {
                out.copy_from_slice(&x.to_le_bytes());
            }
        }
        Dtype::F16 => {
            let most = f16::MAX.to_f32();
            for (out, x) in out.chunks_exact_mut(2).zip(x) {
                out.copy_from_slice(&f16::from_f32(x.clamp(-most, most)).to_le_bytes());
            }
        }
        Dtype::Bf16 | Dtype::F8E4m3 | Dtype::F8E8m0 => unreachable!("KV pages are F32 or F16"),
    }
}
