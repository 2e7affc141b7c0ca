//! Models whose kernels every platform's compiler is tried on: the sizes of real checkpoints, cut
//! for a real machine.

use super::cut::{Cut, Kind};
use super::machine::{MachineInfo, Platform, Source};
use super::model::{Layer, Model};
use super::prefill::Plan;
use super::source;
use crate::abi::{HeadMode, NONE};

/// `2b`: eight lanes of a laneformer; `lane`: one of them; `1b`, `8b`: dense models.
pub fn model(name: &str) -> Model {
    let dense = name == "1b" || name == "8b";
    Model {
        layers: [15, 16, 32][["1b", "8b"].iter().position(|n| *n == name).map_or(0, |n| n + 1)],
        ranks: 1,
        sliced: false,
        vocab_all: if dense {
            128_256
        } else if name == "2b" {
            32_000
        } else {
            4000
        },
        lanes: if name == "2b" { 8 } else { 1 },
        hidden: if name == "8b" {
            4096
        } else if dense {
            2048
        } else {
            3072
        },
        heads: if dense { 32 } else { 4 },
        kv_heads: if dense { 8 } else { 2 },
        head_dim: if name == "8b" {
            128
        } else if dense {
            64
        } else {
            96
        },
        ffn: if name == "8b" {
            14_336
        } else if dense {
            8192
        } else {
            1536
        },
        vocab: if dense { 128_256 } else { 4000 },
        head_mode: HeadMode::PerLane,
        interleaved: false,
        eps: 1e-5,
        norm_lanes: 1,
        head_norm: false,
        bias: false,
        layer: if name == "2b" { vec![delayed(); 15] } else { Vec::new() },
        whole: [0; 3],
        rope: 0,
        embed: 0,
        head: 0,
        final_norm: 0,
    }
}

/// A layer that sees a window, and other lanes' outputs of two layers before.
fn delayed() -> Layer {
    Layer {
        qkv: [0; 3],
        biases: [NONE; 3],
        head_norms: [NONE; 2],
        outputs: [0; 2],
        gate_up: [0; 2],
        norms: [0; 2],
        window: 512,
        pool: [1, 0],
        own: [1.0; 2],
        delay: [2; 2],
        shares: [true; 2],
    }
}

/// A H200.
pub fn nvidia() -> MachineInfo {
    MachineInfo {
        name: "cuda:0".into(),
        model: "H200".into(),
        arch: "sm_90a".into(),
        multiprocessors: 132,
        chiplets: 1,
        shared_bytes: 232_448,
        memory_bytes: 141 << 30,
        free_bytes: 140 << 30,
    }
}

/// A MI300X.
pub fn amd() -> MachineInfo {
    MachineInfo {
        name: "hip:0".into(),
        model: "MI300X".into(),
        arch: "gfx942".into(),
        multiprocessors: 304,
        chiplets: 8,
        shared_bytes: 65_520,
        memory_bytes: 192 << 30,
        free_bytes: 190 << 30,
    }
}

/// The decode kernel of a model on a machine, and its cut.
pub fn decode(
    model: &Model,
    machine: &MachineInfo,
    platform: Platform,
    kind: Kind,
) -> (Source, Cut) {
    let cut = Cut::new(model, machine, 33_280).expect("a cut");
    let defines = cut.defines(model, kind);
    (Source { defines, text: source::text(platform), entries: vec!["kie_decode"] }, cut)
}

/// The prefill kernels of a model on a H200, for many positions and for few, where they fit.
pub fn prefill(model: &Model) -> Vec<Source> {
    let machine = nvidia();
    let cut = Cut::new(model, &machine, 33_280).expect("a cut");
    let plan = Plan::new(model, &cut, (Platform::Cuda, &machine), (33_280, 512), false);
    plan.map_or_else(Vec::new, |plan| plan.sources(model, &cut))
}
