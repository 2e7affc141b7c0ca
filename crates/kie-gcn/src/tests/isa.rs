//! Instructions one by one: what AMD's description of the instruction set says that they make of
//! given numbers, worked out by hand.

use crate::inst::{code, Inst};
use crate::memory::Space;
use crate::text::functions;
use crate::wave::{Next, Wave, World, LANES};

fn world() -> World {
    World {
        space: Space::new(Vec::new()),
        local: vec![vec![0; 4096]],
        weak: None,
        changes: 0,
        local_changes: vec![0],
        image: 0x10_0000,
        now_ns: 1000,
        random: 1,
        fault: None,
    }
}

/// Runs lines, one after another, on a wave with the given registers.
fn run(lines: &str, prepare: impl FnOnce(&mut Wave, &mut World)) -> (Wave, World) {
    let one = |(at, line): (usize, &str)| format!("\t{} // {:012X}: 0\n", line.trim(), 8 * at);
    let all: String = lines.split(';').chain(["s_endpgm"]).enumerate().map(one).collect();
    let listing = format!("0000000000000000 <k>:\n{all}");
    let code = code(&functions(&listing).unwrap()[0]).unwrap();
    let (mut wave, mut world) = (Wave::new(0, 0, LANES as u32), world());
    prepare(&mut wave, &mut world);
    while let Some(inst) = code.insts.get(wave.pc) {
        let inst: &Inst = inst;
        assert!(!wave.awaits(inst), "{lines}");
        match (inst.run)(&mut wave, inst, &mut world) {
            Next::Go | Next::Rest => wave.pc += 1,
            Next::Jump | Next::Vain => {}
            Next::Again => assert!(world.tick(), "{lines}: nothing goes on"),
            Next::End => break,
            other => panic!("{lines}: {other:?} {:?}", world.fault),
        }
    }
    (wave, world)
}

const F: fn(f32) -> u32 = f32::to_bits;

/// Vector registers 1 to 4 and what the line makes of them in register 0, which was 0x55667788.
#[test]
fn one_lane_of_vector_instructions() {
    let half = |low: u32, high: u32| low | high << 16;
    #[rustfmt::skip]
    let table: &[(&str, [u32; 4], u32)] = &[
        ("v_bfe_u32 v0, v1, v2, v3", [0xabcd_1234, 8, 12, 0], 0xd12),
        ("v_bfe_i32 v0, v1, v2, v3", [0xabcd_1234, 16, 8, 0], 0xffff_ffcd),
        ("v_bfe_i32 v0, v1, v2, v3", [0xabcd_1234, 4, 0, 0], 0),
        ("v_bfi_b32 v0, v1, v2, v3", [0xff00_ff00, 0x1234_5678, 0x9abc_def0, 0], 0x12bc_56f0),
        ("v_alignbit_b32 v0, v1, v2, v3", [0x1111_2222, 0x3333_4444, 8, 0], 0x2233_3344),
        ("v_perm_b32 v0, v1, v2, v3", [0x1122_3344, 0x5566_7788, 0x0700_0c04, 0], 0x1188_0044),
        ("v_xad_u32 v0, v1, v2, v3", [0xf0, 0xff, 1, 0], 0x10),
        ("v_lshl_add_u32 v0, v1, v2, v3", [3, 4, 5, 0], 53),
        ("v_add_lshl_u32 v0, v1, v2, v3", [3, 4, 5, 0], 224),
        ("v_lshl_or_b32 v0, v1, v2, v3", [3, 4, 5, 0], 0x35),
        ("v_and_or_b32 v0, v1, v2, v3", [0xff, 0x1f0, 0xf, 0], 0xff),
        ("v_or3_b32 v0, v1, v2, v3", [1, 2, 4, 0], 7),
        ("v_lshrrev_b32_e32 v0, v1, v2", [36, 0x8000_0000, 0, 0], 0x0800_0000),
        ("v_ashrrev_i32_e32 v0, v1, v2", [4, 0x8000_0000, 0, 0], 0xf800_0000),
        ("v_ashrrev_i16_e32 v0, v1, v2", [4, 0x1234_8000, 0, 0], 0xf800),
        ("v_lshlrev_b16_e32 v0, v1, v2", [4, 0x1234_8765, 0, 0], 0x7650),
        ("v_sub_u16_e64 v0, v1, v2 clamp", [3, 5, 0, 0], 0),
        ("v_sub_u16_e32 v0, v1, v2", [3, 5, 0, 0], 0xfffe),
        ("v_mul_i32_i24_e32 v0, v1, v2", [0xff_ffff, 7, 0, 0], 0xffff_fff9),
        ("v_mul_hi_i32 v0, v1, v2", [0x8000_0000, 4, 0, 0], 0xffff_fffe),
        ("v_mad_u32_u24 v0, v1, v2, v3", [0xff00_0003, 5, 7, 0], 22),
        ("v_min3_i32 v0, v1, v2, v3", [5, 0xffff_fffe, 9, 0], 0xffff_fffe),
        ("v_subrev_u32_e32 v0, v1, v2", [3, 10, 0, 0], 7),
        ("v_pack_b32_f16 v0, v1, v2 op_sel:[1,0,0]", [0xaaaa_bbbb, 0xcccc_dddd, 0, 0], 0xdddd_aaaa),
        ("v_cvt_f16_f32_e32 v0, v1", [F(65519.0), 0, 0, 0], 0x7bff),
        ("v_cvt_f16_f32_e32 v0, v1", [F(65520.0), 0, 0, 0], 0x7c00),
        ("v_cvt_f32_f16_e32 v0, v1", [0x8001, 0, 0, 0], F(-5.960_464_5e-8)),
        ("v_cvt_u32_f32_e32 v0, v1", [F(-3.0), 0, 0, 0], 0),
        ("v_cvt_u32_f32_e32 v0, v1", [F(5e9), 0, 0, 0], u32::MAX),
        ("v_max_f32_e64 v0, |v1|, -v2", [F(-2.0), F(-3.0), 0, 0], F(3.0)),
        ("v_max_f32_e32 v0, v1, v2", [0x7fc0_0000, F(-3.0), 0, 0], F(-3.0)),
        ("v_add_f32_e64 v0, v1, v2 clamp", [F(0.75), F(0.5), 0, 0], F(1.0)),
        ("v_mul_f32_e64 v0, v1, v2 mul:2", [F(0.75), F(0.5), 0, 0], F(0.75)),
        ("v_mul_f32_e32 v0, 0.15915494, v1", [F(1.0), 0, 0, 0], 0x3e22_f983),
        ("v_fma_f32 v0, v1, v2, -v3", [F(1.0 + 1.0 / 4096.0), F(1.0 + 1.0 / 4096.0), F(1.0), 0],
            F(2.0 / 4096.0 + 1.0 / 16_777_216.0)),
        ("v_fmamk_f32 v0, v1, 0x40400000, v2", [F(2.0), F(1.0), 0, 0], F(7.0)),
        ("v_fmaak_f32 v0, v1, v2, 0x40400000", [F(2.0), F(4.0), 0, 0], F(11.0)),
        ("v_floor_f32_e32 v0, v1", [F(-1.5), 0, 0, 0], F(-2.0)),
        ("v_trunc_f32_e32 v0, v1", [F(-1.5), 0, 0, 0], F(-1.0)),
        ("v_exp_f32_e32 v0, v1", [F(-3.0), 0, 0, 0], F(0.125)),
        ("v_log_f32_e32 v0, v1", [F(8.0), 0, 0, 0], F(3.0)),
        ("v_rsq_f32_e32 v0, v1", [F(4.0), 0, 0, 0], F(0.5)),
        ("v_fma_mix_f32 v0, v1, v2, v3 op_sel:[1,0,0] op_sel_hi:[1,0,1]",
            [half(0, 0x4000), F(3.0), 0xbc00, 0], F(5.0)),
        ("v_fma_mixlo_f16 v0, v1, v2, v3", [F(2.0), F(3.0), F(1.0), 0], 0x5566_4700),
        ("v_fma_mixhi_f16 v0, v1, v2, v3", [F(2.0), F(3.0), F(1.0), 0], 0x4700_7788),
        ("v_pk_mul_f16 v0, v1, v2 op_sel_hi:[1,0]", [half(0x4000, 0x4200), 0x4000, 0, 0],
            half(0x4400, 0x4600)),
        ("v_mov_b32_sdwa v0, v1 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2",
            [0x0012_0000, 0, 0, 0], 0x5566_1288),
        ("v_add_u32_sdwa v0, sext(v1), v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 \
          src1_sel:WORD_1", [0xff, 0x0005_0000, 0, 0], 4),
        ("v_mbcnt_lo_u32_b32 v0, -1, v1", [7, 0, 0, 0], 7 + 9),
        ("v_mov_b32_dpp v0, v1 quad_perm:[3,3,3,3] row_mask:0xf bank_mask:0xf bound_ctrl:0",
            [77, 0, 0, 0], 77),
    ];
    for (line, given, wanted) in table {
        let (wave, _) = run(line, |wave, _| {
            wave.v[0] = [0x5566_7788; LANES];
            (0..4).for_each(|n| wave.v[n + 1] = [given[n]; LANES]);
        });
        let got = wave.v[0][9];
        assert_eq!(got, *wanted, "{line}: {got:#x}, wanted {wanted:#x}");
    }
}

/// Scalar registers 2 to 5, and what is then in 0 and 1, and the condition, which was set.
#[test]
fn scalar_instructions() {
    #[rustfmt::skip]
    let table: &[(&str, [u32; 4], u64, bool)] = &[
        ("s_add_u32 s0, s2, s3", [0xffff_ffff, 2, 0, 0], 1, true),
        ("s_addc_u32 s0, s2, s3", [1, 2, 0, 0], 4, false),
        ("s_subb_u32 s0, s2, s3", [1, 2, 0, 0], 0xffff_fffe, true),
        ("s_add_i32 s0, s2, s3", [0x7fff_ffff, 1, 0, 0], 0x8000_0000, true),
        ("s_bfe_u32 s0, s2, 0x80004", [0x1234, 0, 0, 0], 0x23, true),
        ("s_bfe_i32 s0, s2, 0x80004", [0x0f80, 0, 0, 0], 0xffff_fff8, true),
        ("s_ashr_i32 s0, s2, 4", [0x8000_0000, 0, 0, 0], 0xf800_0000, true),
        ("s_movk_i32 s0, 0x8000", [0; 4], 0xffff_8000, true),
        ("s_mul_hi_u32 s0, s2, s3", [0x8000_0000, 6, 0, 0], 3, true),
        ("s_min_i32 s0, s2, s3", [0xffff_ffff, 0, 0, 0], 0xffff_ffff, true),
        ("s_andn2_b64 s[0:1], s[2:3], s[4:5]", [15, 15, 5, 15], 10, true),
        ("s_orn2_b64 s[0:1], s[2:3], s[4:5]", [0, 0, !0, !1], 1 << 32, true),
        ("s_xnor_b32 s0, s2, s3", [0b1100, !0b1010, 0, 0], 0b0110, true),
        ("s_lshl_b64 s[0:1], s[2:3], 33", [3, 0, 0, 0], 3 << 33, true),
        ("s_bcnt1_i32_b64 s0, s[2:3]", [7, 1, 0, 0], 4, true),
        ("s_cselect_b32 s0, s2, s3", [4, 5, 0, 0], 4, true),
        ("s_not_b32 s0, s2", [!0, 0, 0, 0], 0, false),
        ("s_mov_b64 s[0:1], -1", [0; 4], !0, true),
        ("s_and_saveexec_b64 s[0:1], s[2:3]", [0, 1, 0, 0], !0, true),
        ("s_getpc_b64 s[0:1]", [0; 4], 0x10_0004, true),
        ("s_cmp_lt_i32 s2, s3", [!0, 0, 0, 0], 0, true),
        ("s_cmpk_gt_u32 s2, 0xfff0", [0xfff1, 0, 0, 0], 0, true),
        ("s_bitcmp0_b32 s2, 3", [8, 0, 0, 0], 0, false),
    ];
    for (line, given, wanted, scc) in table {
        let (wave, _) = run(line, |wave, _| {
            wave.scc = true;
            wave.s[2..6].copy_from_slice(given);
        });
        assert_eq!((wave.get64(0), wave.scc), (*wanted, *scc), "{line}");
    }
}

/// Masks: of lanes at work, and what goes from lane to lane.
#[test]
fn lanes_are_told_apart() {
    let lanes = |wave: &mut Wave, _: &mut World| {
        wave.v[1] = std::array::from_fn(|k| k as u32);
        wave.v[2] = [10; LANES];
        wave.set64(4, 0xff00);
    };
    let (wave, _) = run("v_cmp_gt_u32_e32 vcc, v2, v1", lanes);
    assert_eq!(wave.get64(106), 0x3ff);
    let (wave, _) = run("s_mov_b64 exec, s[4:5]; v_cmp_gt_u32_e64 s[0:1], v2, v1", lanes);
    assert_eq!(wave.get64(0), 0x300);
    let (wave, _) = run("s_mov_b64 exec, s[4:5]; v_readfirstlane_b32 s0, v1", lanes);
    assert_eq!(wave.s[0], 8);
    let (wave, _) = run("v_readlane_b32 s0, v1, 33; v_writelane_b32 v2, s0, 5", lanes);
    assert_eq!((wave.v[2][5], wave.v[2][6]), (33, 10));
    let (wave, _) = run("v_cndmask_b32_e64 v3, v2, v1, s[4:5]", lanes);
    assert_eq!((wave.v[3][7], wave.v[3][8]), (10, 8));
    let (wave, _) =
        run("v_add_co_u32_e32 v3, vcc, -5, v1; v_addc_co_u32_e32 v4, vcc, 0, v2, vcc", lanes);
    assert_eq!((wave.v[3][4], wave.v[4][4], wave.v[4][5]), (!0, 10, 11));
    let swap = "ds_swizzle_b32 v3, v1 offset:swizzle(SWAP,16); s_waitcnt lgkmcnt(0)";
    let (wave, _) = run(swap, lanes);
    assert_eq!((wave.v[3][3], wave.v[3][40]), (19, 56));
    let turn = "v_lshlrev_b32_e32 v4, 2, v2; s_mov_b64 exec, s[4:5]; \
                ds_bpermute_b32 v3, v4, v1; s_waitcnt lgkmcnt(0)";
    let (wave, _) = run(turn, lanes);
    assert_eq!((wave.v[3][8], wave.v[3][7]), (10, 0), "only lanes at work receive");
    let (wave, _) = run("v_mbcnt_hi_u32_b32 v3, -1, 0", lanes);
    assert_eq!((wave.v[3][31], wave.v[3][40]), (0, 8));
}

/// Shared memory: offsets, pairs, sums, and what is there only behind a wait.
#[test]
fn shared_memory_is_read_as_it_was_written() {
    let places = |wave: &mut Wave, _: &mut World| {
        wave.v[1] = std::array::from_fn(|k| 8 * k as u32);
        wave.v[2] = std::array::from_fn(|k| 100 + k as u32);
        wave.v[3] = [7; LANES];
    };
    let lines = "ds_write2_b32 v1, v2, v3 offset0:2 offset1:3; s_waitcnt lgkmcnt(0); \
                 ds_read_b64 v[4:5], v1 offset:8; ds_read2st64_b32 v[6:7], v1 offset1:1; \
                 s_waitcnt lgkmcnt(0)";
    let (wave, world) = run(lines, places);
    assert_eq!((wave.v[4][5], wave.v[5][5]), (105, 7));
    // 8 bytes a lane, and 256 further on.
    assert_eq!((wave.v[6][3], wave.v[7][3]), (102, 134));
    assert_eq!(world.local[0][8], 100);
    let lines = "v_mov_b32_e32 v1, 0; ds_add_rtn_u32 v4, v1, v3; s_waitcnt lgkmcnt(0)";
    let (wave, world) = run(lines, places);
    assert_eq!((wave.v[4][0], wave.v[4][63], world.local[0][0]), (0, 7 * 63, (7 * 64_u32) as u8));
}

/// The matrix unit: halves that tell rows, columns and places along k apart, for all lanes.
#[test]
fn the_matrix_unit_multiplies_sixteen_by_sixteen() {
    // Row or column n at k; all products and sums are whole numbers below 2048.
    let (a, b) = (
        |n: usize, k: usize| (n + 2 * (k % 5)) as f32,
        |n: usize, k: usize| (n % 7) as f32 - (k % 3) as f32,
    );
    let halves = |of: &dyn Fn(usize, usize) -> f32, lane: usize, word: usize| {
        let one = |e| crate::number::narrow(of(lane % 16, 4 * (lane / 16) + 2 * word + e));
        one(0) | one(1) << 16
    };
    let prepare = |wave: &mut Wave, _: &mut World| {
        for word in 0..2 {
            wave.v[4 + word] = std::array::from_fn(|lane| halves(&a, lane, word));
            wave.v[6 + word] = std::array::from_fn(|lane| halves(&b, lane, word));
        }
        for n in 0..4 {
            wave.v[n] = std::array::from_fn(|lane| F((100 * n + lane) as f32));
        }
        wave.set64(4, 0xff00);
    };
    let wanted = |lane: usize, n: usize| -> f32 {
        let (row, column) = (4 * (lane / 16) + n, lane % 16);
        (0..16).map(|k| a(row, k) * b(column, k)).sum()
    };
    // Whoever is at work.
    let line = "s_mov_b64 exec, s[4:5]; v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7]";
    for (c, onto) in [("v[0:3]", true), ("0", false)] {
        let (wave, _) = run(&format!("{line}, {c}"), prepare);
        for lane in 0..LANES {
            for n in 0..4 {
                let before = if onto { (100 * n + lane) as f32 } else { 0.0 };
                let got = f32::from_bits(wave.v[n][lane]);
                assert_eq!(got, before + wanted(lane, n), "lane {lane}, {n}, onto {c}");
            }
        }
    }
}

/// Sums in memory come one after another, and give back what was there where sc0 says so.
#[test]
fn words_in_memory_add_up() {
    for weak in [false, true] {
        let region = std::sync::Arc::new(crate::memory::Region::new(16).unwrap());
        region.write(0, &7_u64.to_le_bytes());
        let at = region.start() as u64;
        let prepare = |wave: &mut Wave, world: &mut World| {
            world.space = Space::new(vec![region.clone()]);
            world.weak = weak.then(|| Box::new(crate::weak::Weak::new(vec![0], 3)));
            wave.v[1] = [at as u32; LANES];
            wave.v[2] = [(at >> 32) as u32; LANES];
            (wave.v[3], wave.v[4]) = ([5; LANES], [0; LANES]);
            wave.set64(4, 0x30);
        };
        let lines = "s_mov_b64 exec, s[4:5]; \
                     global_atomic_add_x2 v[6:7], v[1:2], v[3:4], off sc0 sc1; \
                     s_waitcnt vmcnt(0); global_atomic_add_x2 v[1:2], v[3:4], off sc1; \
                     s_waitcnt vmcnt(0)";
        let (wave, _) = run(lines, prepare);
        let mut seen = [wave.v[6][4], wave.v[6][5]];
        seen.sort_unstable();
        assert_eq!(seen, [7, 12], "weak {weak}");
        assert_eq!(region.load(0, 8), 27, "weak {weak}");
    }
}
