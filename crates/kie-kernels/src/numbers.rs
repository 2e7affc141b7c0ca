//! Stored numbers to float32 and back, one row at a time: embeddings, norm scales, KV.

use half::{bf16, f16};

use crate::abi::{Codes, Dtype};
use crate::simd::{f8_to_f32, E2M1};

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
    let half = |byte: u8, high: bool| if high { byte >> 4 } else { byte & 15 };
    let two = || half(row[col / 2], col % 2 == 1);
    match codes {
        Codes::F32 => number(Dtype::F32),
        Codes::F16 => number(Dtype::F16),
        Codes::Bf16 => number(Dtype::Bf16),
        Codes::E4m3 => number(Dtype::F8E4m3),
        Codes::I8 => f32::from(row[col] as i8),
        Codes::I4 => f32::from(two()) - 8.0,
        Codes::E2m1 => E2M1[two() as usize],
        Codes::Q8x0 => f32::from(row[col / 32 * 34 + 2 + col % 32] as i8),
        Codes::Q4x0 => {
            let at = col % 32;
            f32::from(half(row[col / 32 * 18 + 2 + at % 16], at >= 16)) - 8.0
        }
        Codes::Q4k => {
            let at = col % 256;
            let byte = row[col / 256 * 144 + 16 + at / 64 * 32 + at % 32];
            f32::from(half(byte, at % 64 >= 32))
        }
        Codes::Q6k => {
            let (at, block) = (col % 256, &row[col / 256 * 210..]);
            let (part, l) = (at / 128, at % 32);
            let quarter = at % 128 / 32;
            let low = half(block[64 * part + 32 * (quarter % 2) + l], quarter >= 2);
            let high = block[128 + 32 * part + l] >> (2 * quarter) & 3;
            f32::from(low | high << 4) - 32.0
        }
    }
}

/// Scale and minimum number `n` of eight, of 6 bits each in 12 bytes: of the first four the low six
/// bits of a byte, of the others four bits of a byte and the upper two of an earlier one.
pub(crate) fn six_bits(bytes: &[u8], n: usize) -> [u8; 2] {
    if n < 4 {
        return [bytes[n] & 63, bytes[n + 4] & 63];
    }
    let (low, [scale, min]) = (bytes[n + 4], [bytes[n - 4], bytes[n]]);
    [low & 15 | scale >> 6 << 4, low >> 4 | min >> 6 << 4]
}

/// The scales and the minima of [`six_bits`], a byte each.
#[inline(always)]
pub(crate) fn eight_pairs(bytes: &[u8; 12]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *bytes;
    let (first, second) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
    let third = u32::from_le_bytes([i, j, k, l]);
    let all = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let upper = |word: u32| word >> 2 & 0x3030_3030;
    let (low, high) = (third & 0x0f0f_0f0f, third >> 4 & 0x0f0f_0f0f);
    let mask = 0x3f3f_3f3f;
    [all(first & mask, low | upper(first)), all(second & mask, high | upper(second))]
}

/// Scale and offset of a group of a row whose scales lie among its codes: a number is
/// `scale * code + offset`.
pub fn scales_among(codes: Codes, row: &[u8], group: usize) -> [f32; 2] {
    let half = |at: usize| number_to_f32(Dtype::F16, &row[at..at + 2]);
    match codes {
        Codes::Q8x0 => [half(group * 34), 0.0],
        Codes::Q4x0 => [half(group * 18), 0.0],
        Codes::Q4k => {
            let block = group / 8 * 144;
            let [scale, min] = six_bits(&row[block + 4..block + 16], group % 8);
            [half(block) * f32::from(scale), -half(block + 2) * f32::from(min)]
        }
        Codes::Q6k => {
            let block = group / 16 * 210;
            let scale = row[block + 192 + group % 16] as i8;
            [half(block + 208) * f32::from(scale), 0.0]
        }
        Codes::F32
        | Codes::F16
        | Codes::Bf16
        | Codes::E4m3
        | Codes::I8
        | Codes::I4
        | Codes::E2m1 => [1.0, 0.0],
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
