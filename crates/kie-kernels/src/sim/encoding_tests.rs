//! Every code of every stored encoding, decoded as kernels do, against what the format says.

#![allow(clippy::unwrap_used)]

use super::tests::{fetch_u32, run_with};
use super::*;
use crate::abi::Codes;
use crate::mono::source::join;
use crate::numbers::code_to_f32;
use half::f16;

/// What a kernel makes of words: `count` words of `each` bytes of codes, `halves` words each.
fn decoded(call: &str, words: &[u32], halves: usize) -> Vec<f16> {
    let sim = Sim::open("sim:warp=32").unwrap();
    let decoders = ["decode_fp8", "decode_int4", "decode_mxfp4", "scale"]
        .map(|of| format!("#include \"ops/{of}.h\"\n"));
    let text = join(Platform::Sim, ("toy", &decoders.concat()));
    let kernel = format!(
        "struct Args {{ const u32* in; u32* out; u64 count; }};\n\
         KIE_KERNEL(toy, 32, Args a) {{\n\
         for (u64 i = thread(); i < a.count; i += 32) {{ {call} }}\n}}\n"
    );
    let source = Source { defines: vec![], text: text + &kernel, entries: vec!["toy"] };
    let module = sim.compile(&source).unwrap();
    let input = sim.alloc(words.len() * 4).unwrap();
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    sim.write(&input, 0, &bytes).unwrap();
    let out = sim.alloc(words.len() * halves * 4).unwrap();
    run_with(&sim, &module, "toy", &[input.address, out.address, words.len() as u64], (1, 32))
        .unwrap();
    let both = |word: u32| [word as u16, (word >> 16) as u16].map(f16::from_bits);
    fetch_u32(&sim, &out).into_iter().flat_map(both).collect()
}

#[test]
fn every_fp8_code_in_every_place() {
    let codes = |n: u32| [n, n.wrapping_mul(7) + 3, n.wrapping_mul(29) + 1, !n].map(|n| n as u8);
    let words: Vec<u32> = (0..256).map(|n| u32::from_le_bytes(codes(n))).collect();
    let got = decoded("unpack_f8(a.in[i], a.out[2 * i], a.out[2 * i + 1]);", &words, 2);
    for (n, got) in got.chunks_exact(4).enumerate() {
        for (code, got) in codes(n as u32).into_iter().zip(got) {
            let wanted = f64::from(code_to_f32(Codes::E4m3, &[code], 0));
            let (got, sign) = (got.to_f64(), got.is_sign_negative());
            let alike = got == wanted && sign == wanted.is_sign_negative();
            assert!(alike || (got.is_nan() && wanted.is_nan()), "{code:#x}: {got} {wanted}");
        }
    }
}

/// Every code at every place of a word, against the format, in the order that packing has.
#[test]
fn every_code_of_four_bits_in_every_place() {
    let mixed = |n: u32| n.wrapping_mul(0x9e37_79b9) ^ n.rotate_left(13) ^ (n * 0x1111);
    let words: Vec<u32> = (0..256).map(mixed).chain((0..16).map(|n| n * 0x1111_1111)).collect();
    // A number's code in a word: column `2 pair + odd`.
    let i4 = |word: u32, pair: usize, odd: usize| (word >> (4 * pair + 16 * odd) & 15) ^ 8;
    let e2m1 = |word: u32, pair: usize, odd: usize| {
        let [sign, rest] = [[15, 9], [12, 6], [14, 3], [13, 0]][pair];
        (word >> (sign + 16 * odd) & 1) << 3 | word >> (rest + 16 * odd) & 7
    };
    type Code = fn(u32, usize, usize) -> u32;
    let all: [(&str, Codes, f64, Code); 2] =
        [("i4", Codes::I4, 1.0, i4), ("e2m1", Codes::E2m1, 16384.0, e2m1)];
    for (name, codes, factor, code) in all {
        let call = format!(
            "u32 h[4]; unpack_{name}(a.in[i], h);\n\
             for (int j = 0; j < 4; ++j) a.out[4 * i + j] = h[j];"
        );
        let got = decoded(&call, &words, 4);
        for (word, got) in words.iter().zip(got.chunks_exact(8)) {
            for (column, got) in got.iter().enumerate() {
                let code = code(*word, column / 2, column % 2) as u8;
                let wanted = f64::from(code_to_f32(codes, &[code], 0));
                assert_eq!(got.to_f64() * factor, wanted, "{name}: {word:#x}, column {column}");
            }
        }
    }
}

/// Every scale of MXFP4 times every code, as halves multiply: what a float makes, rounded once.
#[test]
fn every_scale_of_mxfp4_with_every_code() {
    let call = "u32 h[4]; unpack_e2m1(a.in[i], h);\n\
                const float scale = number((u32)(i / 16) << 23);\n\
                UnitHalves unit = {{h[0], h[0]}};\n\
                times_powers(unit, {scale, 1.0f});\n\
                a.out[i] = unit.v[0];";
    let word = |code: u32| (code >> 3) << 15 | (code & 7) << 9;
    let words: Vec<u32> = (0..256 * 16).map(|n| word(n % 16)).collect();
    let got = decoded(call, &words, 1);
    for (n, got) in got.chunks_exact(2).enumerate() {
        let code = code_to_f32(Codes::E2m1, &[n as u8 % 16], 0) / 16384.0;
        let wanted = f16::from_f32(code * f32::from_bits((n as u32 / 16) << 23));
        let alike = got[0].to_bits() == wanted.to_bits() || (got[0].is_nan() && wanted.is_nan());
        assert!(alike, "scale {}, {code}: {} {wanted}", n / 16, got[0]);
    }
}

/// Scales of all sizes times every code of FP8: what a half keeps the bits of may round twice, and
/// beyond the largest half; others multiply floats.
#[test]
fn every_code_of_fp8_with_scales_of_all_sizes() {
    let call = "u32 low, high; unpack_f8(a.in[i] & 0xff, low, high);\n\
                UnitHalves unit = {{low, low}};\n\
                times_scales(unit, {number(a.in[i] & 0xffffff00), 1.0f});\n\
                a.out[i] = (unit.v[0] & 0xffff) | unit.v[1] << 16;";
    let parts = [0_u32, 0x12_3400, 0x40_0000, 0x7f_ff00];
    let sizes = (87..160).flat_map(|e| parts.map(|m| e << 23 | m));
    let scales = sizes.chain([0, 0x8000_0000, 0xbf80_0000, 0x7f80_0000]);
    let words: Vec<u32> = scales.flat_map(|s| (0..256).map(move |code| s | code)).collect();
    let got = decoded(call, &words, 1);
    for (word, got) in words.iter().zip(got.chunks_exact(2)) {
        let code = code_to_f32(Codes::E4m3, &[*word as u8], 0);
        let scale = f32::from_bits(word & 0xffff_ff00);
        let wanted = f16::from_f32(code * scale);
        let rounds = (6.2e-5..32768.0).contains(&scale) && f16::from_f32(scale).to_f32() != scale;
        let (size, off) = (wanted.to_f32().abs(), (got[0].to_f32() - wanted.to_f32()).abs());
        let near = rounds && (off <= size / 1024.0 + 6e-8 || size > 65_440.0);
        let alike = near || got[0] == wanted || (got[0].is_nan() && wanted.is_nan());
        assert!(alike, "{scale:e} times {code}: {} {wanted}", got[0]);
        let beside = f16::from_f32(code);
        assert!(got[1] == beside || (got[1].is_nan() && beside.is_nan()), "{code}: {}", got[1]);
    }
}
