//! What partitions come to on machines of some sizes: stages held, shares of ranks, bytes streamed.

use super::*;
use crate::machine::Platform;
use crate::meter::Mode;
use crate::mono::lower::layout::{Kind, Layout};
use crate::mono::shapes::{amd, model, nvidia, with_class};

#[test]
fn short_steps_hold_more_stages_before_the_words_are_there() {
    for (name, max_tiles, ahead, retries) in
        [("lane", 2, 4, true), ("1b", 2, 4, false), ("2b", 2, 1, false), ("8b", 4, 1, false)]
    {
        let cut = Partition::new(&model(name), &nvidia(), 4096).unwrap();
        let ahead_of = |columns| Layout::new(&model(name), &cut, Kind::plain(columns, false));
        let (one, eight) = (ahead_of(1).unwrap(), ahead_of(8).unwrap());
        let seen = (cut.max_tiles, one.prefetch_depth, cut.retries(&model(name), 1));
        assert_eq!(seen, (max_tiles, ahead, retries), "{name}");
        assert_eq!(eight.prefetch_depth, 1, "{name}");
        assert!(!cut.retries(&model(name), 8), "{name}: several columns wait for one word");
    }
}

/// What each of so many machines has of a model: heads, mlp and vocabulary, or lanes.
fn rank(name: &str, ranks: u32) -> Model {
    let whole = match name {
        "plain" => {
            let sizes = |c: &mut Class| *c = Class { heads: 32, kv_heads: 16, ffn: 12_288, ..*c };
            Model { vocab: 32_000, ..with_class(model("lane"), sizes) }
        }
        _ => model(name),
    };
    if whole.lanes > 1 {
        return Model { ranks, lanes: whole.lanes / ranks, ..whole };
    }
    let share = |c: &mut Class| {
        (c.heads, c.kv_heads, c.ffn) = (c.heads / ranks, c.kv_heads / ranks, c.ffn / ranks);
    };
    Model { ranks, vocab: whole.vocab / ranks, ..with_class(whole, share) }
}

#[test]
fn a_rank_is_cut_by_what_it_holds() {
    // Name, ranks: KB of a slot, KB in flight, stages ahead, first position with pages through
    // the ring, whether a gather asks for all at once.
    for (name, ranks, wanted) in [
        ("8b", 1, (16, 144, 1, 0, false)),
        ("8b", 2, (16, 144, 1, 0, false)),
        ("8b", 4, (16, 144, 4, 512, true)),
        ("1b", 1, (16, 56, 4, 1024, false)),
        ("1b", 4, (16, 36, 4, 512, true)),
        ("2b", 1, (24, 72, 1, 0, false)),
        ("2b", 4, (24, 72, 4, 512, true)),
        ("2b", 8, (18, 36, 4, 512, true)),
        ("plain", 4, (24, 72, 4, 512, true)),
        ("lane", 1, (18, 36, 4, 512, true)),
    ] {
        let model = rank(name, ranks);
        let cut = Partition::new(&model, &nvidia(), 4096).unwrap();
        let seen = (
            cut.slot_bytes >> 10,
            cut.in_flight_bytes >> 10,
            cut.prefetch_depth(&model),
            cut.streams_from(&model),
            cut.retries(&model, 1),
        );
        assert_eq!(seen, wanted, "{name} on {ranks}: {cut}");
    }
}

#[test]
fn ranks_whose_stream_stands_hold_more_of_it() {
    let all = [("8b", 1), ("8b", 2), ("8b", 4), ("plain", 4), ("1b", 4), ("2b", 4), ("2b", 8)];
    for (name, ranks) in all {
        let model = rank(name, ranks);
        let cut = Partition::new(&model, &nvidia(), 4096).unwrap();
        assert_eq!(
            cut.variable_stages(&model),
            (name, ranks) == ("8b", 4),
            "{name} on {ranks}: {cut}"
        );
    }
}

#[test]
fn gate_and_up_begin_early_behind_all_of_attentions_output() {
    let tuning = Tuning { variable_stages_always: true, ..super::super::tuning::H200 };
    // Stages of attention's output, those in registers, and gate and up's before and in all.
    for (name, ranks, wanted) in
        [("8b", 1, (16, 1, 0, 1)), ("8b", 4, (4, 4, 3, 7)), ("8b-fp8", 1, (8, 1, 0, 1))]
    {
        let model = rank(name, ranks);
        let p = Partition::tuned(&model, &nvidia(), 4096, tuning).unwrap();
        let of = Layout::new(&model, &p, Kind::plain(1, true)).unwrap();
        let (stages, class) = (p.classes[0].tiling(Matrix::Output).stages, &of.classes[0]);
        assert!(of.variable_stages);
        let seen = (stages, of.prefetch_depth, class.early_gu, class.prefetch_gu);
        assert_eq!(seen, wanted, "{name} on {ranks}");
    }
}

#[test]
fn four_bits_keep_all_warps_busy() {
    for (name, ranks) in [("8b-int4", 1), ("8b-mxfp4", 1)] {
        let model = rank(name, ranks);
        let p = Partition::new(&model, &nvidia(), 4096).unwrap();
        let gate_up = p.classes[0].tiling(Matrix::GateUp);
        assert_eq!((gate_up.row_warps, gate_up.tiles, gate_up.k_warps), (2, 7, 4), "{p}");
        let down = p.classes[0].tiling(Matrix::Down);
        assert_eq!((down.chunk, p.max_tiles, p.prefetch_depth(&model)), (4, 4, 1), "{p}");
    }
}

/// What a token streams are the stored bits, and a scale a group or stage.
#[test]
fn a_token_streams_what_is_stored() {
    let bytes = |name: &str| {
        let (model, p) = (model(name), Partition::new(&model(name), &nvidia(), 4096).unwrap());
        assert!(p.as_halves.is_empty(), "{name}: {p}");
        (p.stream_bytes(&model) - p.head_bytes()) as f64
    };
    // Bits a weight as stored, and how much more a block may have: padding. A stage has two
    // units of 4 bits, or one of 8, and scales of its own.
    for (name, stored, most) in [
        ("8b-fp8", 8.0, 1.03),
        ("8b-int4", 4.5, 1.03),
        ("8b-awq", 4.0 + 32.0 / 64.0, 1.05),
        ("8b-int8", 8.0 + 32.0 / 32.0, 1.05),
        ("8b-q8", 8.5, 1.03),
        ("8b-q4", 4.5, 1.03),
    ] {
        let bits = 16.0 * bytes(name) / bytes("8b");
        assert!(bits <= stored * most, "{name}: {bits:.2} bits of {stored:.2}");
    }
}

#[test]
fn blocks_are_numbered_die_by_die() {
    let cut = |model: &Model, machine: &MachineInfo| Partition::new(model, machine, 4096).unwrap();
    for name in ["2b", "lane", "1b"] {
        let model = model(name);
        for chiplets in 1..=12 {
            let cut = Partition { chiplets, ..cut(&model, &amd()) };
            let mut seen: Vec<_> = (0..cut.blocks).map(|block| cut.block_of(block)).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..cut.blocks), "{name}, {chiplets}");
        }
    }
    // Eight lanes on eight dies: each has one, so nothing of a gather inside a lane leaves it.
    let model = model("2b");
    let amd = cut(&model, &amd());
    assert_eq!(amd.chiplets, 8);
    for lane in 0..8 {
        assert_eq!(amd.dies_of(&model, lane), BTreeSet::from([lane]), "{amd}");
    }
    let wide = |lane| {
        Partition { chiplets: 8, ..amd.clone() }.dies_of(&Model { lanes: 2, ..model.clone() }, lane)
    };
    assert_eq!(wide(1), BTreeSet::from([4, 5, 6, 7]));
    assert!(amd.placement(&model).starts_with("placed    8 chiplets: lane 0 on 0, lane 1 on 1"));
    let nvidia = cut(&model, &nvidia());
    assert!((0..nvidia.blocks).all(|block| nvidia.block_of(block) == block));
    assert_eq!(nvidia.placement(&model), "");
    let named = |cut: &Partition| {
        let kind = Kind::plain(1, false);
        let (platform, of) = (Platform::Hip, (&model, cut));
        let source = crate::mono::source::decode(platform, of, kind, Mode::Full).unwrap();
        source.defines.iter().any(|(name, _)| name == "KIE_CHIPLETS")
    };
    assert!(named(&amd) && !named(&nvidia));
}

#[test]
fn slots_widen_only_where_a_stage_needs_it() {
    let cut = |m: &Model| Partition::new(m, &nvidia(), 4096).unwrap();
    for (name, slot_bytes) in [("2b", 24), ("lane", 18), ("1b", 16), ("8b", 16)] {
        assert_eq!(cut(&model(name)).slot_bytes, slot_bytes << 10, "{name}");
    }
    let sizes = |hidden, heads, kv_heads, ffn| {
        let sizes = |c: &mut Class| *c = Class { heads, kv_heads, ffn, ..*c };
        Model { hidden, ..with_class(model("8b"), sizes) }
    };
    // The widths of dense models of 24 and 32 thousand million weights.
    for wide in [sizes(5120, 32, 8, 32_768), sizes(5120, 40, 8, 27_648)] {
        let cut = cut(&wide);
        assert!((24..=48).contains(&(cut.slot_bytes >> 10)), "{cut}");
    }
    let error = Partition::new(&sizes(4096, 32, 2, 14_336), &nvidia(), 4096).unwrap_err();
    assert!(error.to_string().contains("32/2 heads"), "{error}");
}

/// Vectors of an 8B take 36 of an MI300X's 64 KB, words 11 more: a table is the first to go.
#[test]
fn beside_long_vectors_two_small_slots_fit() {
    for (positions, slots) in [(8192, (7, true)), (33_280, (8, false)), (131_072, (8, false))] {
        let model = model("8b");
        let cut = Partition::new(&model, &amd(), positions).unwrap();
        assert_eq!((cut.slot_bytes >> 10, cut.table), slots, "{cut}");
        assert_eq!(cut.classes[0].tiling(Matrix::Down).k_warps, 8, "{cut}");
        for kind in cut.kernels(&model, Platform::Hip) {
            assert!(Layout::new(&model, &cut, kind).unwrap().ring.slots >= 2, "{kind:?}");
        }
        let error = Partition::new(&Model { parts: 2, ..model }, &amd(), positions).unwrap_err();
        assert!(error.to_string().contains("no partition fits"), "{error}");
    }
}

/// The multiprocessors of an L4, an A10, RTX 3090, 4090 and 5090, an L40S and a PRO 6000. The rows
/// that a block of few has of 8B in 16 bits leave no room for two of their stages.
#[test]
fn cards_with_99_kb_a_block_run_what_the_table_of_cards_names() {
    for multiprocessors in [58, 72, 82, 128, 142, 170, 188] {
        let card = MachineInfo { multiprocessors, shared_bytes: 99 << 10, ..nvidia() };
        for name in ["1b", "2b", "8b", "8b-fp8", "8b-int4"] {
            let model = model(name);
            let cut = Partition::new(&model, &card, 4096);
            if name == "8b" && multiprocessors <= 72 {
                let error = cut.unwrap_err().to_string();
                assert!(error.contains("no partition fits"), "{error}");
                continue;
            }
            let cut = cut.unwrap();
            for kind in cut.kernels(&model, Platform::Cuda) {
                let layout = Layout::new(&model, &cut, kind);
                assert!(layout.is_ok(), "{name} on {multiprocessors}: {layout:?}\n{cut}");
            }
        }
    }
}
