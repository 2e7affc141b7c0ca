//! A device that nobody has tried is tried before it serves: small kernels whose answers are known,
//! and a tiny model's logits and tokens beside the CPU's. What has passed is remembered.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kie_kernels::device::Options;
use kie_kernels::machine::cache::{Cache, Key};
use kie_kernels::machine::{Machine, Platform};
use kie_kernels::{devices, litmus};
use safetensors::tensor::TensorView;
use safetensors::Dtype;

use crate::compare::relative_error;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::request::{EngineConfig, LogitsPath, Prompt, Request, SamplingParams};

/// Messages between neighbours: some 50 ms of a GPU.
const ROUNDS: u32 = 10_000;
/// No wait of a small kernel is longer.
const BUDGET: Duration = Duration::from_secs(2);
/// Relative L2 of logits, as for fixtures.
const GATE: f64 = 2e-3;
const HIDDEN: usize = 64;
const FFN: usize = 128;
const HEAD_DIM: usize = 32;
const KV_ROWS: usize = 32;
const VOCAB: usize = 128;
const LAYERS: usize = 2;
const PROMPT: [u32; 6] = [1, 17, 92, 3, 64, 120];
/// Of a prompt for the prefill kernel, which the first one is too short for.
const LONG: u32 = 40;
const TOKENS: usize = 4;

/// What a person is told to report.
fn refusal(name: &str, machine: &dyn Machine, what: &str) -> Error {
    let about = machine.info().map_or_else(
        |why| why.to_string(),
        |info| {
            let (blocks, dies) = (info.multiprocessors, info.chiplets);
            format!("{} ({}), {blocks} multiprocessors on {dies} dies", info.model, info.arch)
        },
    );
    Error::Device(format!(
        "{name} failed kie's self-test and will not serve: {what}. Please report this at \
         https://github.com/kie-project/kie/issues with this message and the output of `kie \
         doctor`: kie {}, {about}",
        env!("CARGO_PKG_VERSION")
    ))
}

/// Tries AMD's GPUs, unless this version of kie has tried such a one here before, or
/// `KIE_SELF_TEST=skip` says that nothing be tried: a driver that computes nothing has no answers.
///
/// # Errors
/// [`Error::Device`] with what was wrong and what to report.
pub(crate) fn first_start(
    name: &str,
    machines: &[Arc<dyn Machine>],
    options: &Options,
) -> Result<()> {
    if std::env::var_os("KIE_SELF_TEST").is_some_and(|said| said == "skip") {
        return Ok(());
    }
    let cache = options.cache_dir.as_deref().map_or_else(Cache::usual, Cache::at);
    for machine in machines.iter().filter(|machine| machine.platform() == Platform::Hip) {
        let info = machine.info()?;
        let parts = ["self-test", env!("CARGO_PKG_VERSION"), &info.name, &info.model, &info.arch];
        let key = Key::of(&parts.map(str::as_bytes));
        if cache.get(key).is_none() {
            check(name, machine, ROUNDS)?;
            // Forgotten, it is made again.
            let _ = cache.put(key, b"passed");
        }
    }
    Ok(())
}

/// Tries one machine, with so many messages between each two neighbours.
///
/// # Errors
/// [`Error::Device`] with what was wrong and what to report.
pub fn check(name: &str, machine: &Arc<dyn Machine>, rounds: u32) -> Result<()> {
    let refused = |what: String| refusal(name, &**machine, &what);
    litmus::check(&**machine, rounds, BUDGET).map_err(|error| refused(error.to_string()))?;
    let folder = std::env::temp_dir().join(format!("kie-self-test-{}", std::process::id()));
    let answers = write_model(&folder).and_then(|()| {
        let device = devices::of_machines(name, vec![Arc::clone(machine)], &Options::default())?;
        let config = EngineConfig { max_batch: 1, ..EngineConfig::default() };
        let open = || Engine::builder(&folder).config(config.clone());
        Ok([answer(&open().device("cpu").build()?)?, answer(&open().runner(device).build()?)?])
    });
    // Some hundred kB in a folder of temporary files.
    let _ = std::fs::remove_dir_all(&folder);
    let [(wanted, tokens, long), (got, told, told_long)] =
        answers.map_err(|error| refused(error.to_string()))?;
    let error = relative_error(&got, &wanted);
    if error.is_nan() || error > GATE {
        let what =
            format!("logits of a tiny model are off the CPU's by {error:.1e}, gate {GATE:.0e}");
        return Err(refused(what));
    }
    if told != tokens {
        return Err(refused(format!("a tiny model's tokens are {told:?}, the CPU's {tokens:?}")));
    }
    if told_long != long {
        let what = format!("behind {LONG} positions: {told_long:?}, the CPU's {long:?}");
        return Err(refused(format!("a tiny model's tokens {what}")));
    }
    Ok(())
}

/// Logits of a prompt, the tokens behind it, and those behind a longer one.
fn answer(engine: &Engine) -> Result<(Vec<f32>, Vec<u32>, Vec<u32>)> {
    let logits = engine.logits(&PROMPT, LogitsPath::Decode)?.values;
    let params = SamplingParams {
        max_tokens: Some(TOKENS),
        temperature: Some(0.0),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let behind = |ids: Vec<u32>| {
        let request = Request { prompt: Prompt::Ids(ids), params: params.clone() };
        Ok::<_, Error>(engine.generate(request)?.token_ids)
    };
    let tokens = behind(PROMPT.to_vec())?;
    let long = behind((0..LONG).map(|i| 1 + (i * i + 7 * i) % (VOCAB as u32 - 1)).collect())?;
    engine.close();
    Ok((logits, tokens, long))
}

/// A Llama of two layers, whose weights are drawn.
fn write_model(folder: &Path) -> Result<()> {
    let fail = |why: std::io::Error| Error::Write { file: folder.into(), detail: why.to_string() };
    std::fs::create_dir_all(folder).map_err(fail)?;
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN / HEAD_DIM, "num_key_value_heads": KV_ROWS / HEAD_DIM,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": VOCAB,
        "eos_token_id": 0
    });
    let tokenizer = serde_json::json!({
        "version": "1.0", "added_tokens": [], "truncation": null, "padding": null,
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    });
    for (name, text) in [
        ("config.json", config),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", serde_json::json!({})),
    ] {
        std::fs::write(folder.join(name), text.to_string()).map_err(fail)?;
    }
    let tensors = tensors();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes);
        (name.as_str(), view.expect("as many bytes as the shape has"))
    });
    let file = folder.join("model.safetensors");
    safetensors::serialize_to_file(views, None, &file)
        .map_err(|why| Error::Write { file, detail: why.to_string() })
}

/// Names, shapes and bytes in bfloat16.
fn tensors() -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let mut state = 0x9e37_79b9_u32;
    let mut drawn = |name: &str, shape: &[usize], least: f32, most: f32| {
        let one = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = least + (most - least) * (state >> 8) as f32 / (1 << 24) as f32;
            ((x.to_bits() >> 16) as u16).to_le_bytes()
        };
        let bytes: Vec<u8> = (0..shape.iter().product::<usize>()).flat_map(one).collect();
        (name.to_owned(), shape.to_vec(), bytes)
    };
    let mut all = vec![
        drawn("model.embed_tokens.weight", &[VOCAB, HIDDEN], -1.0, 1.0),
        drawn("lm_head.weight", &[VOCAB, HIDDEN], -0.5, 0.5),
        drawn("model.norm.weight", &[HIDDEN], 0.5, 1.5),
    ];
    for layer in 0..LAYERS {
        for (part, shape) in [
            ("self_attn.q_proj", [HIDDEN, HIDDEN]),
            ("self_attn.k_proj", [KV_ROWS, HIDDEN]),
            ("self_attn.v_proj", [KV_ROWS, HIDDEN]),
            ("self_attn.o_proj", [HIDDEN, HIDDEN]),
            ("mlp.gate_proj", [FFN, HIDDEN]),
            ("mlp.up_proj", [FFN, HIDDEN]),
            ("mlp.down_proj", [HIDDEN, FFN]),
        ] {
            all.push(drawn(&format!("model.layers.{layer}.{part}.weight"), &shape, -0.2, 0.2));
        }
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            all.push(drawn(&format!("model.layers.{layer}.{norm}.weight"), &[HIDDEN], 0.5, 1.5));
        }
    }
    all
}
