//! Stored numbers to float32 and back, one row at a time: embeddings, norm scales, KV.

use half::{bf16, f16};

use super::matmul::Matrix;
use super::simd::f8_to_f32;
use crate::abi::Dtype;

/// The number in `bytes`, which holds exactly one.
pub fn number_to_f32(dtype: Dtype, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (Dtype::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (Dtype::F8E4m3, &[a]) => f8_to_f32(a),
        (Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::F8E4m3, _) => {
            unreachable!("one {} is {} bytes, not {}", dtype.name(), dtype.bytes(), bytes.len())
        }
    }
}

/// Row `row` of a matrix, scales applied, into `out[..cols]`.
pub fn row_to_f32(m: &Matrix<'_>, row: usize, out: &mut [f32]) {
    let size = m.dtype.bytes();
    let bytes = &m.data[row * m.cols * size..(row + 1) * m.cols * size];
    for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(size)) {
        *out = number_to_f32(m.dtype, bytes);
    }
    let Some(scales) = &m.scales else { return };
    let grid = m.cols.div_ceil(scales.block_cols);
    let first = row / scales.block_rows * grid;
    for (block, out) in out[..m.cols].chunks_mut(scales.block_cols).enumerate() {
        let at = (first + block) * 4;
        let scale = number_to_f32(Dtype::F32, &scales.data[at..at + 4]);
        out.iter_mut().for_each(|x| *x *= scale);
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
        Dtype::Bf16 | Dtype::F8E4m3 => unreachable!("KV pages are F32 or F16"),
    }
}
