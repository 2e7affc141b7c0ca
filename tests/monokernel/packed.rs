//! Stages side by side, and more of them in registers (`kVariableStages`): what large ranks
//! run, here on fixtures, which are too small to be cut that way.

use std::sync::Arc;

use kie_core::engine::LogitsPath;

use kie_kernels::mono::lower::tuning::{Tuning, H200};

use super::failures::{continue_greedily, edited_and_tuned, open_over};

/// All of it, with a ring that stages go around in several times a step.
pub const VARIABLE_STAGES: Tuning = Tuning { variable_stages_always: true, ring_most: 0, ..H200 };

#[test]
fn where_stages_stand_changes_no_bit() {
    for (name, machine) in [
        ("llama", "ranks=2,blocks=4"),
        ("qwen2", "blocks=3"),
        ("own_llama_f16", "warp=64,blocks=2"),
        ("laneformer_d2", "ranks=2,blocks=8"),
    ] {
        let ids: Vec<u32> = (0..70).map(|i| 3 + i * 7 % 90).collect();
        let run = |tuning| {
            let device = format!("sim:seed=9,{machine}");
            let runner =
                edited_and_tuned("kie_decode", &device, &[], &Arc::default(), Some(tuning));
            let engine = open_over(name, runner);
            let logits = engine.logits(&ids[..5], LogitsPath::Decode).unwrap().values;
            let bits: Vec<_> = logits.iter().map(|v| v.to_bits()).collect();
            (continue_greedily(&engine, &ids, 3).unwrap(), bits)
        };
        assert_eq!(run(VARIABLE_STAGES), run(H200), "{name} on {machine}");
    }
}
