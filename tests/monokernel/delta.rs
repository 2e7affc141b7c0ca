//! Gated delta rules and gated attention: models of them with a dense mlp in each layer, as close
//! to the CPU as numbers allow, wherever units of heads fall; their bits alone, beside others,
//! taken up at any position, and behind copies of states.

use half::bf16;
use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{json, Value};

use super::failures::{all_are_found_out, Mutant};
use super::support::prompts::judge;
use super::support::{relative, Folder};
use super::{fixture, two_at_a_time, DECODE_GATE};

/// Sizes of a model: heads of k and of v, features of each, taps, and width of the residual.
#[derive(Clone, Copy)]
struct Sizes {
    keys: usize,
    values: usize,
    key_dim: usize,
    value_dim: usize,
    taps: usize,
    hidden: usize,
    /// Features of a head of attention, a quarter of which turn.
    head_dim: usize,
}

/// Heads that pad, and units of a few columns of one; q and k in which threads have few rows.
const PADDED: Sizes =
    Sizes { keys: 2, values: 4, key_dim: 20, value_dim: 24, taps: 3, hidden: 72, head_dim: 64 };
const WIDE: Sizes =
    Sizes { keys: 2, values: 2, key_dim: 16, value_dim: 64, taps: 4, hidden: 64, head_dim: 64 };

const FFN: usize = 96;
const LAYERS: usize = 3;

/// A checkpoint of three layers, the second with attention, its numbers drawn.
fn made(name: &str, s: Sizes) -> Folder {
    let folder = Folder::new(name);
    let from = fixture("own_qwen3_next");
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(from.join(file), folder.0.join(file)).unwrap();
    }
    std::fs::write(folder.0.join("config.json"), config(s).to_string()).unwrap();
    let mut source = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        source ^= source << 13;
        source ^= source >> 7;
        source ^= source << 17;
        (source >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let all = tensors(s);
    let numbers = |(name, shape): &(String, Vec<usize>)| -> Vec<u8> {
        let plain = name.ends_with("A_log") || name.ends_with("dt_bias");
        let scale = match shape.last() {
            Some(cols) if shape.len() > 1 => 1.7 / (*cols as f32).sqrt(),
            _ if plain => 1.0,
            _ => 0.3,
        };
        // That of a head's output is stored as it is.
        let one = if name.ends_with("linear_attn.norm.weight") { 1.0 } else { 0.0 };
        let numbers = (0..shape.iter().product()).map(|_| one + scale * next());
        numbers.flat_map(|x: f32| bf16::from_f32(x).to_le_bytes()).collect()
    };
    let bytes: Vec<Vec<u8>> = all.iter().map(numbers).collect();
    let views = all
        .into_iter()
        .zip(&bytes)
        .map(|((name, shape), bytes)| (name, TensorView::new(Dtype::BF16, shape, bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.0.join("model.safetensors")).unwrap();
    folder
}

/// The fixture's, with other sizes.
fn config(s: Sizes) -> Value {
    let text = std::fs::read(fixture("own_qwen3_next").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    for (key, value) in [
        ("hidden_size", json!(s.hidden)),
        ("intermediate_size", json!(FFN)),
        ("mlp_only_layers", json!([0, 1, 2])),
        ("num_attention_heads", json!(4)),
        ("num_key_value_heads", json!(2)),
        ("head_dim", json!(s.head_dim)),
        ("max_position_embeddings", json!(1200)),
        ("tie_word_embeddings", json!(false)),
        ("linear_conv_kernel_dim", json!(s.taps)),
        ("linear_key_head_dim", json!(s.key_dim)),
        ("linear_value_head_dim", json!(s.value_dim)),
        ("linear_num_key_heads", json!(s.keys)),
        ("linear_num_value_heads", json!(s.values)),
    ] {
        config[key] = value;
    }
    assert_eq!(config["num_hidden_layers"], LAYERS);
    config
}

/// Names and shapes.
fn tensors(s: Sizes) -> Vec<(String, Vec<usize>)> {
    let width = s.values * s.value_dim;
    let channels = 2 * s.keys * s.key_dim + width;
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![512, s.hidden]),
        ("model.norm.weight".to_owned(), vec![s.hidden]),
        ("lm_head.weight".to_owned(), vec![512, s.hidden]),
    ];
    for layer in 0..LAYERS {
        let mut put = |name: &str, shape: &[usize]| {
            all.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        };
        put("input_layernorm.weight", &[s.hidden]);
        put("post_attention_layernorm.weight", &[s.hidden]);
        put("mlp.gate_proj.weight", &[FFN, s.hidden]);
        put("mlp.up_proj.weight", &[FFN, s.hidden]);
        put("mlp.down_proj.weight", &[s.hidden, FFN]);
        if layer == 1 {
            put("self_attn.q_proj.weight", &[2 * 4 * s.head_dim, s.hidden]);
            put("self_attn.k_proj.weight", &[2 * s.head_dim, s.hidden]);
            put("self_attn.v_proj.weight", &[2 * s.head_dim, s.hidden]);
            put("self_attn.o_proj.weight", &[s.hidden, 4 * s.head_dim]);
            put("self_attn.q_norm.weight", &[s.head_dim]);
            put("self_attn.k_norm.weight", &[s.head_dim]);
        } else {
            put("linear_attn.in_proj_qkvz.weight", &[channels + width, s.hidden]);
            put("linear_attn.in_proj_ba.weight", &[2 * s.values, s.hidden]);
            put("linear_attn.conv1d.weight", &[channels, 1, s.taps]);
            put("linear_attn.A_log", &[s.values]);
            put("linear_attn.dt_bias", &[s.values]);
            put("linear_attn.norm.weight", &[s.value_dim]);
            put("linear_attn.out_proj.weight", &[s.hidden, width]);
        }
    }
    all
}

fn open(folder: &Folder, device: &str, exact: bool) -> Engine {
    let config = EngineConfig { max_batch: 4, exact, ..EngineConfig::default() };
    Engine::builder(&folder.0).config(config).device(device).build().unwrap()
}

/// Ids that look random.
fn ids(count: u32) -> Vec<u32> {
    (0..count).map(|i| 3 + (i * i * 37 + i * 11) % 490).collect()
}

/// Blocks with one unit and with several, some without; slices of heads; warps of either width.
#[test]
fn mixers_are_as_on_the_cpu() {
    let jobs = [
        (PADDED, "sim:blocks=8,seed=1", true),
        (PADDED, "sim:blocks=3,seed=2,warp=64,hold=1", true),
        (WIDE, "sim:blocks=11,seed=3,warp=64", true),
        (WIDE, "sim:ranks=2,blocks=5,seed=4", true),
        (PADDED, "sim:ranks=2,blocks=6,seed=5,warp=64,hold=1", false),
        (WIDE, "sim:blocks=4,seed=6", false),
    ];
    let jobs = jobs.into_iter().enumerate().collect();
    two_at_a_time(jobs, |(at, (sizes, device, exact))| {
        let folder = made(&format!("mixers{at}"), sizes);
        let ids = ids(21);
        let cpu = open(&folder, "cpu", false).logits(&ids, LogitsPath::Decode).unwrap();
        let engine = open(&folder, device, exact);
        // Halves in a model as narrow as this.
        let gate = if exact { 1e-5 } else { 2.0 * DECODE_GATE };
        for path in [LogitsPath::Decode, LogitsPath::Prefill] {
            let ours = engine.logits(&ids, path).unwrap();
            let error = relative(&ours.values, &cpu.values);
            eprintln!("{device}, exact {exact}, {path:?}: relative L2 {error:.2e}");
            assert!(error <= gate, "{device}, exact {exact}, {path:?}: {error:.2e}");
        }
    });
}

/// Through the prefill kernel: of one chunk and of two; heads that two teams share; slices.
/// Of the lengths none ends where halves are far from float32, as the decode kernel's are, too.
#[test]
fn prompts_leave_the_state_that_decoding_goes_on_with() {
    let halved = Sizes { head_dim: 256, ..WIDE };
    let jobs = [
        (PADDED, "sim:blocks=8,seed=9", 1040),
        (halved, "sim:blocks=5,seed=10,warp=64", 149),
        (halved, "sim:ranks=2,blocks=4,seed=11", 333),
    ];
    let jobs = jobs.into_iter().enumerate().collect();
    two_at_a_time(jobs, |(at, (sizes, device, count))| {
        let folder = made(&format!("prompts{at}"), sizes);
        // Chunks are short where the time between tokens has a bound.
        let config = EngineConfig { max_itl_ms: Some(1.0), ..EngineConfig::default() };
        let builder = Engine::builder(&folder.0).config(config).device(device);
        let engine = builder.prefill_kernel(true).build().unwrap();
        assert!(engine.info().plan.contains("prompts   up to"), "{}", engine.info().plan);
        judge(device, &engine, &open(&folder, "cpu", false), &ids(count), 3);
    });
}

/// A sequence's bits are its own: taken up again at any of its positions, beside others, and where
/// the cache has a copy of its state.
#[test]
fn a_state_goes_on_with_its_bits_from_any_position() {
    let jobs =
        [(PADDED, "sim:blocks=8,seed=7", false), (WIDE, "sim:blocks=5,seed=8,warp=64", true)];
    let jobs = jobs.into_iter().enumerate().collect();
    two_at_a_time(jobs, |(at, (sizes, device, exact))| {
        let folder = made(&format!("states{at}"), sizes);
        let engine = open(&folder, device, exact);
        let ask = |ids: &[u32], count: usize| {
            let params = SamplingParams {
                max_tokens: Some(count),
                temperature: Some(0.0),
                logprobs: Some(2),
                ignore_eos: true,
                ..SamplingParams::default()
            };
            engine.stream(Request { prompt: Prompt::Ids(ids.to_vec()), params }).unwrap()
        };
        let bits = |mut stream: kie_core::TokenStream| -> (Vec<(u32, u32)>, usize) {
            let done = stream.completion().unwrap();
            let all = done.logprobs.unwrap();
            (all.iter().map(|t| (t.id, t.logprob.to_bits())).collect(), done.usage.cached_tokens)
        };
        let prompt = ids(61);
        let (whole, _) = bits(ask(&prompt, 8));
        let ids: Vec<u32> = prompt.iter().copied().chain(whole.iter().map(|t| t.0)).collect();
        let mut cached = Vec::new();
        for at in 1..8 {
            let (tokens, behind) = bits(ask(&ids[..61 + at], 8 - at));
            assert_eq!(tokens, whole[at..], "{device}: token {at}");
            cached.push(behind);
        }
        assert!(cached.contains(&64), "a copy of the state is used: {cached:?}");
        let beside: Vec<_> = [0, 3, 5, 6].map(|at| (at, ask(&ids[..61 + at], 8 - at))).into();
        for (at, stream) in beside {
            assert_eq!(bits(stream).0, whole[at..], "{device}: token {at} beside others");
        }
    });
}

/// Name, what the sources say, what they should not say.
const MUTANTS: &[Mutant] = &[
    (
        "a launch goes on from the state that it writes",
        "return {false, -1, state_of_row(args, sequence, half ^ 1)};",
        "return {false, -1, number};",
    ),
    (
        "a step goes on from the state before the launch",
        "if (b.step > 0) return {false, -1, number};",
        "if (b.step > 0) return {false, -1, number ^ 1};",
    ),
    (
        "each position of a prompt begins where the first one did",
        "return column > sequences_of(args);",
        "return false;",
    ),
    (
        "all units have the first one's factor",
        "factors[(4 * at + 2 * j) / C::kUnitCols];",
        "factors[0];",
    ),
    ("the convolution forgets the last position", "past[kLast - 1] = x;", "past[kLast - 1] = 0;"),
    (
        "gates of another head",
        "C::kWordsQ + C::kAtGates + word;",
        "C::kWordsQ + C::kAtGates + (word ^ C::kHalfHead);",
    ),
];

#[test]
fn every_mutant_of_a_delta_rule_is_found_out() {
    all_are_found_out("own_qwen3_next", "blocks=4", 4, MUTANTS);
}
