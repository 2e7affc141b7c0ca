//! Stages side by side, and more of them in registers (`KIE_PACKED`): what large ranks
//! run, here on fixtures, which are too small to be cut that way.

use std::sync::Arc;

use kie_core::engine::LogitsPath;

use super::failures::{continue_greedily, edited_by, open_over, Edit};

/// All of it, with a ring that stages go around in several times a step.
pub const PACKED: [Edit; 2] = [
    ("kPacked = KIE_PACKED &&", "kPacked = true &&"),
    ("kPacked ? kRoomForRing / 1024 * 1024", "kPacked ? 2 * kSlotBytes + 512"),
];

#[test]
fn where_stages_stand_changes_no_bit() {
    for (name, machine) in [
        ("llama", "ranks=2,blocks=4"),
        ("qwen2", "blocks=3"),
        ("own_llama_f16", "warp=64,blocks=2"),
        ("laneformer_d2", "ranks=2,blocks=8"),
    ] {
        let ids: Vec<u32> = (0..70).map(|i| 3 + i * 7 % 90).collect();
        let run = |edits: &[Edit]| {
            let device = format!("sim:seed=9,{machine}");
            let engine = open_over(name, edited_by("kie_decode", &device, edits, &Arc::default()));
            let logits = engine.logits(&ids[..5], LogitsPath::Decode).unwrap().values;
            let bits: Vec<_> = logits.iter().map(|v| v.to_bits()).collect();
            (continue_greedily(&engine, &ids, 3).unwrap(), bits)
        };
        assert_eq!(run(&PACKED), run(&[]), "{name} on {machine}");
    }
}
