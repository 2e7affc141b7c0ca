//! Every fixture × every level of the CPU that this machine has: logits at every position within
//! the gate, the greedy continuation token by token, decode against prefill.
//!
//! Fixtures are the folders of `tests/data`, and those under `KIE_FIXTURES` where it is set.
//!
//! Gates are relative L2 norms over a prompt: 1e-5 for float32 weights; 2e-3 for 16-bit and FP8
//! weights on the decode path, 1.5e-2 on the prefill path (which may use 16-bit activations).

#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use kie_core::engine::{Engine, LogitsPath};
use kie_core::model::{Role, Spec};
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams};
use kie_core::{Error, Result};
use kie_kernels::simd::{self, Level};
use support::{fixtures, float32, goldens, greedy, relative, repository, Folder};

fn open(folder: &Path, level: Level, threads: usize) -> Engine {
    open_as("cpu", folder, level, threads).unwrap()
}

fn open_as(device: &str, folder: &Path, level: Level, threads: usize) -> Result<Engine> {
    let config = EngineConfig { threads: Some(threads), max_batch: 4, ..EngineConfig::default() };
    Engine::builder(folder).config(config).device(device).level(level).build()
}

fn check(folder: &Path, level: Level) {
    check_engine(folder, level, &open(folder, level, 2));
}

fn check_engine(folder: &Path, level: Level, engine: &Engine) {
    let device = engine.info().device;
    let name = format!("{} {device}", folder.file_name().unwrap().to_string_lossy());
    let gates = if float32(folder) { [1e-5, 1e-5] } else { [2e-3, 1.5e-2] };
    let goldens = goldens(folder, "");
    assert!(!goldens.is_empty());
    for (i, golden) in goldens.iter().enumerate() {
        for (path, gate) in [LogitsPath::Decode, LogitsPath::Prefill].into_iter().zip(gates) {
            let ours = engine.logits(&golden.ids, path).unwrap();
            assert_eq!(ours.values.len(), golden.ids.len() * ours.vocab);
            let error = golden.error(&ours.values);
            let place = format!("{name} {level:?} prompt {i} {path:?}");
            assert!(error <= gate, "{place}: {error:.2e} > {gate:.1e}");
        }
        let generated = greedy(engine, &golden.ids, golden.generated.len());
        assert_eq!(generated, golden.generated, "{name} {level:?} prompt {i}");
    }
}

#[test]
fn every_fixture_at_every_level() {
    for folder in fixtures() {
        for level in simd::available() {
            check(&folder, level);
        }
    }
}

/// Whether each of so many ranks would have something to do: lanes, or whole kv heads, or a part of
/// the query heads of one.
fn divides(folder: &Path, ranks: u64) -> bool {
    let config = std::fs::read(folder.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let lanes = config["num_lanes"].as_u64().unwrap_or(1);
    if lanes > 1 {
        return lanes.is_multiple_of(ranks);
    }
    if config["model_type"] == "olmo2" || config["model_type"] == "olmoe" {
        // q and k are normed over all heads at once.
        return ranks == 1;
    }
    let recurrent = config["linear_num_key_heads"].as_u64().unwrap_or(0);
    if !recurrent.is_multiple_of(ranks) {
        return false;
    }
    if let Some(groups) = config["o_groups"].as_u64() {
        return groups.is_multiple_of(ranks);
    }
    let layers = config["layers"].as_array().cloned().unwrap_or_else(|| vec![config.clone()]);
    layers.iter().all(|layer| heads_divide(layer, ranks))
}

fn heads_divide(layer: &serde_json::Value, ranks: u64) -> bool {
    let number = |key: &str| layer[key].as_u64();
    let heads = number("num_attention_heads").unwrap();
    let kv_heads = number("num_key_value_heads").unwrap_or(heads);
    // What all but the last take, one more each than they would evenly.
    let left = |all: u64, takers: u64| all > (takers - 1) * all.div_ceil(takers);
    match ranks / kv_heads {
        0 => left(kv_heads, ranks),
        sharers => {
            let group = heads / kv_heads;
            ranks == kv_heads || (ranks.is_multiple_of(kv_heads) && left(group, sharers))
        }
    }
}

fn ranks_of_cpu(ranks: u64) -> String {
    let numbers: Vec<String> = (0..ranks).map(|rank| rank.to_string()).collect();
    format!("cpu:{}", numbers.join(","))
}

#[test]
fn every_fixture_on_virtual_ranks() {
    let mut counts = [0; 9];
    for folder in fixtures() {
        for ranks in 1..=8 {
            let (device, level) = (ranks_of_cpu(ranks), simd::detect());
            match open_as(&device, &folder, level, 2) {
                Ok(engine) => {
                    assert!(divides(&folder, ranks), "{folder:?} on {device}");
                    check_engine(&folder, level, &engine);
                    counts[ranks as usize] += 1;
                }
                Err(error) => {
                    assert!(!divides(&folder, ranks), "{folder:?} on {device}: {error}");
                    let wanted = format!("do not divide by {ranks} ranks");
                    let typed = error.class() == "UnsupportedModelError";
                    let told = error.to_string().contains(&wanted);
                    assert!(typed && told, "{folder:?} {device}: {error}");
                }
            }
        }
    }
    assert!([1, 2, 3, 4, 8].iter().all(|ranks| counts[*ranks] > 0), "{counts:?}");
}

/// Fixtures with experts: a tensor each, in one tensor as MXFP4 and as columns; a residual stream
/// beyond what halves hold; groups of experts, and one that all positions go to.
const SPARSE: [&str; 8] = [
    "qwen3_moe",
    "gpt_oss_mxfp4",
    "own_gpt_oss",
    "own_mixtral",
    "own_olmoe",
    "own_qwen3_next",
    "own_deepseek_v3",
    "own_deepseek_v4",
];

/// Their folders, and those with experts under `KIE_FIXTURES`.
fn sparse() -> Vec<PathBuf> {
    let data = repository().join("tests/data");
    let mut folders: Vec<_> = SPARSE.iter().map(|name| data.join(name)).collect();
    let given = fixtures().into_iter().filter(|folder| !folder.starts_with(&data));
    folders.extend(given.filter(|folder| {
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        config.contains("num_experts_per_tok")
    }));
    folders
}

/// The strongest level whose prefill has float32 activations.
fn float32_level() -> Level {
    simd::available().into_iter().filter(|level| *level < Level::Avx512Bf16).max().unwrap()
}

/// All choices are the golden's: one that is not shows as 1e-2.
#[test]
fn experts_in_float32_are_the_goldens() {
    let folders = sparse();
    for (folder, device) in folders.iter().flat_map(|f| [(f, "cpu"), (f, "cpu:0,1")]) {
        let name = folder.file_name().unwrap().to_string_lossy();
        let engine = match open_as(device, folder, float32_level(), 2) {
            Ok(engine) => engine,
            Err(error) => {
                assert!(!divides(folder, 2), "{name} on {device}: {error}");
                continue;
            }
        };
        for golden in goldens(folder, "") {
            for path in [LogitsPath::Decode, LogitsPath::Prefill] {
                let ours = engine.logits(&golden.ids, path).unwrap();
                let error = golden.error(&ours.values);
                assert!(error <= 1e-5, "{name} {device} {path:?}: {error:.2e}");
            }
        }
    }
}

#[test]
fn experts_are_read_as_dtype_says() {
    let open = |name: &str, dtype: &str| {
        let folder = repository().join("tests/data").join(name);
        Engine::builder(folder).device("cpu").threads(2).dtype(dtype).build()
    };
    let logits = |name: &str, dtype: &str| {
        let (folder, engine) = (repository().join("tests/data").join(name), open(name, dtype));
        let golden = goldens(&folder, "").pop().unwrap();
        let engine = engine.unwrap();
        let values = engine.logits(&golden.ids, LogitsPath::Decode).unwrap().values;
        (values, engine.info())
    };
    for (name, dtype, least, most) in [
        ("qwen3_moe", "f32", 0.0, 1e-5),
        ("qwen3_moe", "fp8", 1e-3, 0.3),
        ("qwen3_moe", "int4", 1e-3, 0.6),
        ("own_gpt_oss", "f32", 0.0, 1e-5),
        ("own_qwen3_next", "f32", 0.0, 1e-5),
        ("own_qwen3_next", "fp8", 1e-3, 0.3),
        ("own_deepseek_v4", "f32", 0.0, 1e-5),
        ("own_deepseek_v4", "bf16", 0.0, 1e-2),
        ("gpt_oss_mxfp4", "f32", 0.0, 1e-5),
        ("gpt_oss_mxfp4", "bf16", 0.0, 1e-5),
    ] {
        let ((wanted, before), (ours, after)) = (logits(name, "auto"), logits(name, dtype));
        let error = relative(&ours, &wanted);
        assert!((least..=most).contains(&error), "{name} as {dtype}: {error:.2e}");
        let grown = dtype == "f32" || before.bytes_per_token > after.bytes_per_token;
        assert!(grown || dtype == "bf16", "{name} as {dtype}");
    }
    let error = open("gpt_oss_mxfp4", "int4").err().unwrap();
    assert_eq!(error.class(), "InvalidRequestError", "{error}");
    assert!(error.to_string().contains("quantised already"), "{error}");
}

/// A token reads the experts that it goes to, and all else once.
#[test]
fn plans_count_the_experts_of_one_token() {
    let folder = repository().join("tests/data/qwen3_moe");
    let engine = open(&folder, simd::detect(), 1);
    let info = engine.info();
    let (attention, expert, router) = (2 * 64 * 128 + 2 * 64 * 64, 3 * 48 * 64, 8 * 64);
    let layer = attention + 3 * expert + router + 2 * 64 + 2 * 32;
    assert_eq!(info.bytes_per_token, 2 * (3 * layer + 64 + 512 * 64), "{}", info.plan);
}

/// A safetensors file of so many bytes without weights; but tokens' experts, which are read for a
/// plan, are the first ones for each of V4-Flash's tokens.
fn write_header(path: &Path, header: &serde_json::Map<String, serde_json::Value>, bytes: u64) {
    let text = serde_json::to_string(header).unwrap();
    let begin = 8 + text.len() as u64;
    std::fs::write(path, [&(begin - 8).to_le_bytes(), text.as_bytes()].concat()).unwrap();
    let mut file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(begin + bytes).unwrap();
    let table = (0..6_i64).flat_map(i64::to_le_bytes).collect::<Vec<u8>>().repeat(129_280);
    for (_, entry) in header.iter().filter(|(name, _)| name.ends_with("tid2eid")) {
        let at = entry["data_offsets"][0].as_u64().unwrap();
        file.seek(SeekFrom::Start(begin + at)).unwrap();
        file.write_all(&table).unwrap();
    }
}

/// DeepSeek-V4-Flash, of which a header and no weight is there: what it would take at 128k.
#[test]
fn a_model_of_156_gigabytes_is_planned_from_its_header() {
    let own = repository().join("tests/data/own_deepseek_v4");
    let folder = Folder::new("flash");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(own.join(name), folder.0.join(name)).unwrap();
    }
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(own.join("config.json")).unwrap()).unwrap();
    let ratios: Vec<usize> = (0..43).map(|n| [4, 128][n % 2] * usize::from(n > 1)).collect();
    let sizes = [("hidden_size", 4096), ("num_hidden_layers", 43), ("num_attention_heads", 64)];
    let heads = [("head_dim", 512), ("qk_rope_head_dim", 64), ("q_lora_rank", 1024)];
    let groups = [("o_groups", 8), ("o_lora_rank", 1024), ("sliding_window", 128)];
    let index = [("index_n_heads", 64), ("index_head_dim", 128), ("index_topk", 512)];
    let experts = [("n_routed_experts", 256), ("num_experts_per_tok", 6), ("num_hash_layers", 3)];
    let others = [("moe_intermediate_size", 2048), ("hc_mult", 4), ("vocab_size", 129_280)];
    let all = [sizes, heads, groups, index, experts, others];
    for (key, size) in all.into_iter().flatten().chain([("max_position_embeddings", 1 << 17)]) {
        config[key] = serde_json::json!(size);
    }
    config["compress_ratios"] = serde_json::json!(ratios);
    config["tie_word_embeddings"] = false.into();
    config["quantization_config"] = serde_json::json!({"quant_method": "fp8", "fmt": "e4m3",
        "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "expert_dtype": "fp4"});
    std::fs::write(folder.0.join("config.json"), config.to_string()).unwrap();
    let spec = Spec::from_config(&config, &folder.0).unwrap();
    assert_eq!(spec.parameters(), 284_334_567_511);
    let (mut header, mut end) = (serde_json::Map::new(), 0_u64);
    let mut add = |name: String, dtype: &str, shape: &[usize], bytes: u64| {
        let entry = serde_json::json!({"dtype": dtype, "shape": shape,
            "data_offsets": [end, end + bytes]});
        end += bytes;
        header.insert(name, entry);
    };
    for tensor in spec.tensors.iter().flat_map(|tensor| tensor.each().collect::<Vec<_>>()) {
        let (name, shape) = (tensor.name, &tensor.shape[..]);
        let count = shape.iter().product::<usize>() as u64;
        let scale = || format!("{}.scale", name.strip_suffix(".weight").unwrap());
        match (tensor.role, shape) {
            (Role::ExpertGate(_) | Role::ExpertUp(_) | Role::ExpertDown(_), &[rows, cols]) => {
                add(scale(), "F8_E8M0", &[rows, cols / 32], count / 32);
                add(name, "I8", &[rows, cols / 2], count / 2);
            }
            (role, &[rows, cols]) if role.is_linear() => {
                let grid = [rows.div_ceil(128), cols.div_ceil(128)];
                add(scale(), "F8_E8M0", &grid, (grid[0] * grid[1]) as u64);
                add(name, "F8_E4M3", shape, count);
            }
            (Role::TokenExperts(_), _) => add(name, "I64", shape, 8 * count),
            (role, _) if role.is_matrix() || role.is_norm() => add(name, "BF16", shape, 2 * count),
            _ => add(name, "F32", shape, 4 * count),
        }
    }
    assert_eq!(end, 156_015_698_140);
    write_header(&folder.0.join("model.safetensors"), &header, end);
    let config = EngineConfig { max_batch: 1, ..EngineConfig::default() };
    let planned = Engine::builder(&folder.0).config(config).device("cpu").threads(2).plan(None);
    let plan = match planned {
        Ok(run) => run.plan,
        // Few machines have so much memory.
        Err(Error::OutOfMemory { plan, .. }) => plan,
        Err(other) => panic!("{other}"),
    };
    assert!(plan.contains("weights 156.0 GB"), "{plan}");
}

/// Logits of a router that overflow make no token.
#[test]
fn a_router_that_is_not_finite_ends_the_request() {
    let (from, folder) = (repository().join("tests/data/qwen3_moe"), Folder::new("loud-router"));
    for entry in from.read_dir().unwrap().map(|entry| entry.unwrap()) {
        std::fs::copy(entry.path(), folder.0.join(entry.file_name())).unwrap();
    }
    let path = folder.0.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = &entries["model.layers.1.mlp.gate.weight"]["data_offsets"];
    let [begin, end] = [0, 1].map(|n| 8 + header + at[n].as_u64().unwrap() as usize);
    // The largest number of BF16, in both signs.
    let loud = [0x7f7f_u16, 0xff7f].map(u16::to_le_bytes).concat();
    bytes[begin..end].copy_from_slice(&loud.repeat((end - begin) / 4));
    std::fs::write(&path, bytes).unwrap();
    let engine = open(&folder.0, simd::detect(), 2);
    let error = engine.generate(support::greedy_request(&[5, 6, 7], 4)).unwrap_err();
    assert!(error.to_string().contains("not finite"), "{}: {error}", error.class());
}

#[test]
fn bits_of_virtual_ranks_are_of_their_number_alone() {
    let level = simd::detect();
    let logits = |name: &str, device: &str, threads: usize| -> Vec<u32> {
        let folder = repository().join("tests/data").join(name);
        let golden = goldens(&folder, "").pop().unwrap();
        let engine = open_as(device, &folder, level, threads).unwrap();
        let mut all = Vec::new();
        for path in [LogitsPath::Decode, LogitsPath::Prefill] {
            let values = engine.logits(&golden.ids, path).unwrap().values;
            all.extend(values.iter().map(|value| value.to_bits()));
        }
        all
    };
    for (name, ranks) in
        [("qwen2", 4), ("own_llama_fp8_tied", 3), ("gpt_oss_mxfp4", 2), ("own_deepseek_v4", 2)]
    {
        let device = ranks_of_cpu(ranks);
        let first = logits(name, &device, 2);
        assert!(first != logits(name, "cpu", 2), "{name}: sums are cut");
        for threads in [1, 2, 3] {
            assert!(first == logits(name, &device, threads), "{name} on {device}, {threads}");
        }
    }
    // Lanes are the same on any number of ranks.
    let name = "laneformer_d2";
    assert!(logits(name, "cpu", 2) == logits(name, "cpu:0,1,2,3", 2));
}

#[test]
fn bits_do_not_depend_on_threads_chunks_or_neighbours() {
    for name in ["laneformer_d2", "gpt_oss_mxfp4", "own_deepseek_v3", "own_deepseek_v4"] {
        bits_are_of_the_column_alone(&repository().join("tests/data").join(name));
    }
}

fn bits_are_of_the_column_alone(folder: &Path) {
    let level = simd::detect();
    let golden = goldens(folder, "").pop().unwrap();
    let logits = |threads: usize| {
        open(folder, level, threads).logits(&golden.ids, LogitsPath::Prefill).unwrap().values
    };
    let one = logits(1);
    for threads in [2, 3, 5] {
        assert!(one.iter().zip(&logits(threads)).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
    let engine = open(folder, level, 2);
    let sampled = |seed: u64| SamplingParams {
        max_tokens: Some(40),
        temperature: Some(1.3),
        seed: Some(seed),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let stream = |seed: u64| {
        let prompt = Prompt::Ids(golden.ids.clone());
        engine.stream(Request { prompt, params: sampled(seed) }).unwrap()
    };
    let alone: Vec<_> = (0..4).map(|s| stream(s).completion().unwrap().token_ids).collect();
    let mut together: Vec<_> = (0..4).map(stream).collect();
    for (seed, stream) in together.iter_mut().enumerate() {
        assert_eq!(stream.completion().unwrap().token_ids, alone[seed], "seed {seed}");
    }
    assert!(alone[1..].iter().any(|ids| *ids != alone[0]), "seeds must matter");
}

/// The yardstick of `tools/fixtures/rope.py`: `own_llama_f16` with every rope scaling.
#[test]
fn every_rope_scaling_at_every_level() {
    let data = repository().join("tests/data");
    let read = |path: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(data.join(path)).unwrap()).unwrap()
    };
    let (base, cases) = (read("own_llama_f16/config.json"), read("rope/cases.json"));
    let bytes = std::fs::read(data.join("rope/golden_turns.safetensors")).unwrap();
    let golden = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| {
        let tensor = golden.tensor(name).unwrap();
        tensor.data().as_chunks::<4>().0.to_vec()
    };
    let ids: Vec<u32> = words("ids").into_iter().map(u32::from_le_bytes).collect();
    for (name, case) in cases.as_object().unwrap() {
        let folder = Folder::new(name);
        for file in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(data.join("own_llama_f16").join(file), folder.0.join(file)).unwrap();
        }
        let mut config = base.clone();
        config.as_object_mut().unwrap().extend(case["changes"].as_object().unwrap().clone());
        std::fs::write(folder.0.join("config.json"), config.to_string()).unwrap();
        let wanted = words(&format!("{name}.logits"));
        let wanted: Vec<f32> = wanted.into_iter().map(f32::from_le_bytes).collect();
        let served = case["max_seq_len"].as_u64().unwrap() as usize;
        let ids = &ids[..ids.len().min(served)];
        for level in simd::available() {
            let config = EngineConfig { max_seq_len: Some(served), ..EngineConfig::default() };
            let builder = Engine::builder(&folder.0).config(config).device("cpu").level(level);
            let engine = builder.build().unwrap();
            for (path, gate) in [(LogitsPath::Decode, 2e-3), (LogitsPath::Prefill, 1.5e-2)] {
                let ours = engine.logits(ids, path).unwrap();
                let rows = ours.values.chunks_exact(ours.vocab);
                let kept: Vec<f32> = rows.flat_map(|row| row.iter().step_by(32)).copied().collect();
                let error = relative(&kept, &wanted);
                assert!(error <= gate, "{name} {level:?} {path:?}: {error:.2e} > {gate:.1e}");
            }
        }
    }
}

fn open_adapted(adapter: &Path, base: &str, dtype: &str) -> Result<Engine> {
    let config = EngineConfig {
        adapter: Some(adapter.to_owned()),
        dtype: dtype.to_owned(),
        threads: Some(2),
        ..EngineConfig::default()
    };
    let base = repository().join("tests/data").join(base);
    Engine::builder(base).config(config).device("cpu").build()
}

/// A copy of the adapter, its configuration changed in one key.
fn adapter_with(name: &str, key: &str, value: serde_json::Value) -> Folder {
    let (from, folder) = (repository().join("tests/data/adapter"), Folder::new(name));
    let file = "adapter_model.safetensors";
    std::fs::copy(from.join(file), folder.0.join(file)).unwrap();
    let text = std::fs::read(from.join("adapter_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
    config[key] = value;
    std::fs::write(folder.0.join("adapter_config.json"), config.to_string()).unwrap();
    folder
}

/// The yardstick of `tools/fixtures/adapter.py`: `own_llama_f16` with an adapter merged into it.
#[test]
fn an_adapter_is_merged() {
    let adapter = repository().join("tests/data/adapter");
    let bytes = std::fs::read(adapter.join("golden_merged.safetensors")).unwrap();
    let golden = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| golden.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    let ids: Vec<u32> = words("ids").into_iter().map(u32::from_le_bytes).collect();
    let logits = |engine: &Engine| {
        let ours = engine.logits(&ids, LogitsPath::Decode).unwrap();
        let rows = ours.values.chunks_exact(ours.vocab);
        rows.flat_map(|row| row.iter().step_by(32)).copied().collect::<Vec<f32>>()
    };
    let stabilised = adapter_with("rslora", "use_rslora", true.into());
    for (folder, name) in [(&adapter, "logits"), (&stabilised.0, "rslora.logits")] {
        let wanted = words(name).into_iter().map(f32::from_le_bytes).collect::<Vec<f32>>();
        let engine = open_adapted(folder, "own_llama_f16", "auto").unwrap();
        let error = relative(&logits(&engine), &wanted);
        assert!(error <= 1e-4, "{name}: {error:.2e}");
        let info = engine.info();
        assert_eq!(info.adapter.as_deref(), folder.file_name().unwrap().to_str());
        assert!(info.plan.contains("merged into 9 matrices"), "{}", info.plan);
        // Rounded to what is asked for instead.
        let wide = open_adapted(folder, "own_llama_f16", "f32").unwrap();
        let error = relative(&logits(&wide), &wanted);
        assert!(error > 1e-6 && error <= 2e-3, "{name} in float32: {error:.2e}");
        // Quantised behind the merge.
        let coarse = open_adapted(folder, "own_llama_f16", "int4").unwrap();
        let error = relative(&logits(&coarse), &wanted);
        assert!(error > 1e-3 && error <= 0.6, "{name} in int4: {error:.2e}");
    }
    let plain = open(&repository().join("tests/data/own_llama_f16"), simd::detect(), 2);
    let wanted = words("logits").into_iter().map(f32::from_le_bytes).collect::<Vec<f32>>();
    assert!(relative(&logits(&plain), &wanted) > 0.1, "an adapter shows");
}

#[test]
fn adapters_that_cannot_be_merged_are_named() {
    use serde_json::json;
    for (key, value, told) in [
        ("peft_type", json!("LOHA"), "only \"LORA\""),
        ("use_dora", json!(true), "DoRA"),
        ("modules_to_save", json!(["lm_head"]), "modules_to_save"),
        ("bias", json!("all"), "only \"none\""),
        ("fan_in_fan_out", json!(true), "fan_in_fan_out"),
        ("init_lora_weights", json!("pissa"), "pissa"),
        ("target_modules", json!(["q_proj", "w_pack"]), "\"w_pack\"; no matrix of llama"),
        ("target_modules", json!(null), "target_modules"),
        ("rank_pattern", json!({"down_.*": 2}), "only ends of module names"),
        ("alpha_pattern", json!({"q_proj": 0}), "a number above 0"),
        ("rank_pattern", json!({}), "down_proj.lora_A.weight: wanted shape [4, 96], got [2, 96]"),
        ("r", json!(8), "wanted shape [8, 64], got [4, 64]"),
        ("lora_alpha", json!("8"), "lora_alpha"),
        ("use_unknown", json!(1), "use_unknown"),
    ] {
        let folder = adapter_with("named", key, value);
        let Err(error) = open_adapted(&folder.0, "own_llama_f16", "auto") else {
            panic!("{key} was merged")
        };
        assert!(matches!(error.class(), "LoadError" | "UnsupportedModelError"), "{key}: {error}");
        assert!(error.to_string().contains(told), "{told:?} in {:?}", error.to_string());
    }
    let adapter = repository().join("tests/data/adapter");
    let refused = |base: &str, dtype: &str, told: &str| {
        let error = open_adapted(&adapter, base, dtype).err().unwrap().to_string();
        assert!(error.contains(told), "{told:?} in {error:?}");
    };
    refused("qwen3", "auto", "wanted shape");
    refused("laneformer_d2", "auto", "no matrix of laneformer");
    let nowhere = open_adapted(Path::new("no/such/adapter"), "own_llama_f16", "auto").err();
    assert!(nowhere.unwrap().to_string().contains("adapter_config.json"));
}

/// A quantised base is merged into only where `dtype` says what becomes of it.
#[test]
fn adapters_of_quantised_models_need_a_dtype() {
    use safetensors::{tensor::TensorView, Dtype};
    let folder = adapter_with("quantised", "target_modules", serde_json::json!(["q_proj"]));
    let (a, b) = ([1.0f32 / 32.0; 4 * 136], [1.0f32 / 16.0; 128 * 4]);
    let bytes = |all: &[f32]| all.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (a, b) = (bytes(&a), bytes(&b));
    let name =
        |part: &str| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight");
    let views = [
        (name("A"), TensorView::new(Dtype::F32, vec![4, 136], &a).unwrap()),
        (name("B"), TensorView::new(Dtype::F32, vec![128, 4], &b).unwrap()),
    ];
    let file = folder.0.join("adapter_model.safetensors");
    std::fs::write(&file, safetensors::serialize(views, None).unwrap()).unwrap();
    let base = "own_llama_fp8_tied";
    let error = open_adapted(&folder.0, base, "auto").err().unwrap();
    assert_eq!(error.class(), "InvalidRequestError");
    assert!(error.to_string().contains("dtype must be") && error.to_string().contains("q_proj"));
    let ids = goldens(&repository().join("tests/data").join(base), "").pop().unwrap().ids;
    let with = open_adapted(&folder.0, base, "f32").unwrap();
    let without = {
        let config = EngineConfig { dtype: "f32".to_owned(), ..EngineConfig::default() };
        let base = repository().join("tests/data").join(base);
        Engine::builder(base).config(config).device("cpu").build().unwrap()
    };
    let logits = |engine: &Engine| engine.logits(&ids, LogitsPath::Decode).unwrap().values;
    assert!(relative(&logits(&with), &logits(&without)) > 1e-3);
}

/// A copy of a fixture whose matrices have the types that `choose` names for them, in a folder of
/// its own.
fn retyped(fixture: &str, choose: impl Fn(&str) -> safetensors::Dtype) -> PathBuf {
    let source = repository().join("tests/data").join(fixture);
    let folder = std::env::temp_dir().join(format!("kie-retyped-{fixture}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(name), folder.join(name)).unwrap();
    }
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<_> = stored
        .iter()
        .map(|(name, tensor)| {
            assert_eq!(tensor.dtype(), safetensors::Dtype::BF16, "{name}");
            let halves = tensor.data().as_chunks::<2>().0.iter();
            let floats = halves.map(|b| half::bf16::from_le_bytes(*b).to_f32());
            let dtype = choose(name);
            let data: Vec<u8> = match dtype {
                safetensors::Dtype::BF16 => {
                    floats.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect()
                }
                safetensors::Dtype::F16 => {
                    floats.flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect()
                }
                _ => floats.flat_map(f32::to_le_bytes).collect(),
            };
            (name.to_owned(), dtype, tensor.shape().to_vec(), data)
        })
        .collect();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap())
        .unwrap();
    folder
}

/// Matrices that share an input need not share a type: each meets activations packed for its own.
#[test]
fn matrices_of_one_step_may_differ_in_type() {
    use safetensors::Dtype::{BF16, F16, F32};
    let types: [(&str, [safetensors::Dtype; 3]); 3] =
        [("q", [F32, BF16, F16]), ("k", [BF16, F32, BF16]), ("gate", [F16, BF16, F32])];
    for turn in 0..3 {
        let folder = retyped("llama", |name| {
            let of = |part: &str| types.iter().find(|(t, _)| *t == part).map(|(_, t)| t[turn]);
            let part = name.rsplit('.').nth(1).unwrap_or_default();
            part.strip_suffix("_proj").and_then(of).unwrap_or(BF16)
        });
        let ids = goldens(&repository().join("tests/data/llama"), "").pop().unwrap().ids;
        for level in simd::available() {
            for device in ["cpu", "cpu:0,1"] {
                let logits = |dtype: &str, path: LogitsPath| {
                    let config = EngineConfig {
                        threads: Some(2),
                        dtype: dtype.to_owned(),
                        ..EngineConfig::default()
                    };
                    let builder = Engine::builder(&folder).config(config).device(device);
                    builder.level(level).build().unwrap().logits(&ids, path).unwrap().values
                };
                for (path, gate) in [(LogitsPath::Decode, 2e-3), (LogitsPath::Prefill, 1.5e-2)] {
                    let error = relative(&logits("auto", path), &logits("f32", path));
                    let place = format!("types {turn} {device} {level:?} {path:?}");
                    assert!(error <= gate, "{place}: {error:.2e} > {gate:.1e}");
                }
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn default_model_continues_as_recorded() {
    let folder = repository().join("python/kie/demo");
    let text = std::fs::read_to_string(folder.join("golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let engine = open(&folder, simd::detect(), 2);
    for prompt in golden["prompts"].as_array().unwrap() {
        let numbers = |key: &str| prompt[key].as_array().unwrap().clone();
        let ids: Vec<u32> =
            numbers("prompt_ids").iter().map(|v| v.as_u64().unwrap() as u32).collect();
        let text = prompt["prompt"].as_str().unwrap();
        let special = !text.starts_with("<s>");
        assert_eq!(engine.tokenize(text, special).unwrap(), ids);
        let wanted = numbers("greedy_ids");
        let ours = greedy(&engine, &ids, wanted.len());
        let sure = numbers("margins").iter().take_while(|m| m.as_f64().unwrap() >= 0.15).count();
        assert!(sure > 0, "{text:?}");
        for step in 0..sure {
            assert_eq!(u64::from(ours[step]), wanted[step].as_u64().unwrap(), "{text:?} {step}");
        }
    }
}
