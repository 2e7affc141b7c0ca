//! Products of row tiles and positions: by the matrix unit, as the prefill kernel has them, what
//! teams make of the same lanes by themselves; and what both take of a multiprocessor.

use super::*;
use crate::clocks::Clocks;

/// Two row tiles a team, times 64 positions, so many units of 32 of k that stand in shared memory;
/// by the matrix unit where threads are numbered for it.
const TEXT: &str = r#"
#include "platform.h"
#include "wide.h"
constexpr int kTurns = 2, kPlaces = 64, kCores = 512, kUnitBytes = 4096 + kPlaces / 8 * kCores;
struct WideArgs { const u32* from; float* out; u32 units; };
KIE_KERNEL(wide, 6 * kWarp, WideArgs a) {  // registers as the prefill kernel has
    KIE_SHARED_BYTES(shared);
    for (u32 i = thread(); i < 2 * kUnitBytes / 4; i += kWarp) ((u32*)shared)[i] = a.from[i];
    sync_block();
    float d[kTurns * kPlaces / 2];
    KIE_UNROLL for (int i = 0; i < kTurns * kPlaces / 2; ++i) d[i] = 0;
    const u32 team = thread() / kTeamLanes, g = lane() / 4, t = lane() % 4;
    KIE_NO_UNROLL for (u32 u = 0; u < a.units; ++u) {
        const u8 *unit = shared + u % 2 * kUnitBytes, *x = unit + 4096;
        Quad q[kTurns][2];
        KIE_UNROLL for (int m = 0; m < kTurns; ++m) {
            KIE_UNROLL for (int i = 0; i < 2; ++i)
                q[m][i] = *(const Quad*)(unit + (2 * m + team) * 1024 + i * 512 + lane() * 16);
        }
        KIE_UNROLL for (int half = 0; half < 2; ++half) {
#ifdef KIE_PREFILL
            const WideOperand at = wide_shift(wide_operand(x, 128, kCores), half * 256);
            multiply_tiles<kPlaces, kTurns>(d, q, half, at, kCores);
#else
            KIE_UNROLL for (int j = 0; j < kPlaces / 8; ++j) {
                const u8* core = x + j * kCores + half * 256 + g * 16 + 4 * t;
                const u32 low = *(const u32*)core, high = *(const u32*)(core + 128);
                KIE_UNROLL for (int m = 0; m < kTurns; ++m) {
                    float (&sum)[4] = *(float (*)[4])(d + m * (kPlaces / 2) + 4 * j);
                    const Quad& r = q[m][half];
                    mma(sum, r.v[0], r.v[1], r.v[2], r.v[3], low, high);
                }
            }
#endif
        }
    }
    KIE_UNROLL for (int i = 0; i < kTurns * kPlaces / 2; ++i) a.out[i * kWarp + thread()] = d[i];
}
"#;
const UNIT_BYTES: usize = 4096 + 8 * 512;
const SUMS: usize = 64 * 64;
/// Bytes of weights of a unit, in KB.
const UNIT_KB: f64 = 4.0;

fn compiled_with(unit: bool) -> Option<Compiled> {
    let text = join(Platform::Hip, ("wide_product.h", TEXT));
    let defines = if unit { vec![("KIE_PREFILL".to_owned(), "1".to_owned())] } else { Vec::new() };
    super::compiled("wide products", &Source { defines, text, entries: vec!["wide"] })
}

/// All threads' sums after so many units, and what was kept busy.
fn sums(compiled: &Compiled, units: u32) -> (Vec<f32>, Clocks) {
    let gcn = Gcn::open("gcn:blocks=1").unwrap();
    let (from, out) = (gcn.alloc(2 * UNIT_BYTES).unwrap(), gcn.alloc(4 * SUMS).unwrap());
    // Small whole numbers as halves: every sum is exact.
    let halves = (0..UNIT_BYTES as u32).flat_map(|i| {
        let whole = i.wrapping_mul(2_654_435_761) >> 13;
        [0xc000, 0xbc00, 0, 0x3c00, 0x4000_u16][whole as usize % 5].to_le_bytes()
    });
    gcn.write(&from, 0, &halves.collect::<Vec<u8>>()).unwrap();
    let mut args = [from.address, out.address].map(u64::to_le_bytes).concat();
    args.extend(units.to_le_bytes().into_iter().chain([0; 4]));
    let module = gcn.module(compiled, &["wide"]).unwrap();
    let shared_bytes = 2 * UNIT_BYTES as u32;
    let launch = Launch { entry: "wide", blocks: 1, threads: 64, shared_bytes, args: &args };
    wait_within(&mut *gcn.launch(&module, &launch).unwrap(), Duration::MAX).unwrap();
    let mut bytes = vec![0; 4 * SUMS];
    gcn.read(&out, 0, &mut bytes).unwrap();
    let sums = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    (sums.collect(), gcn.issued()[0])
}

/// Of a KB of weights of 16 bits and 64 positions: clocks of a vector unit, of its matrix unit and
/// of shared memory. docs/amd.md has them.
const BY_THE_UNIT: [f64; 3] = [89.0, 128.0, 16.0];
const BY_TEAMS: [f64; 3] = [1989.0, 0.0, 280.0];

#[test]
fn the_matrix_unit_makes_what_teams_make() {
    let (Some(unit), Some(teams)) = (compiled_with(true), compiled_with(false)) else { return };
    let run = |compiled: &Compiled| {
        let (wanted, few) = sums(compiled, 2);
        let (_, many) = sums(compiled, 4);
        let of =
            |clocks: fn(&Clocks) -> u64| (clocks(&many) - clocks(&few)) as f64 / (2.0 * UNIT_KB);
        (wanted, [of(|c| c.vector), of(|c| c.matrix), of(|c| c.local)])
    };
    let ((ours, by_unit), (wanted, by_teams)) = (run(&unit), run(&teams));
    assert!(wanted.iter().any(|sum| *sum != 0.0));
    assert_eq!(ours, wanted);
    for (got, written) in [(by_unit, BY_THE_UNIT), (by_teams, BY_TEAMS)] {
        // Another clang of the same version says the same.
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 0.05 * b;
        assert!(got.iter().zip(&written).all(near), "{got:?}, written: {written:?}");
    }
}
