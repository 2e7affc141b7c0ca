//! Checkpoints in every encoding that kie reads, against the same model in float32.
//!
//! Codes and scales are drawn, so what each number means is known without decoding: the twin has
//! those values. Scales have few digits, so that values are exact in float32 and an engine's only
//! freedom is the order of sums: within 1e-5 of the twin on the decode path of every level. Prefill
//! may round activations to bfloat16: within 1.5e-2, as in the conformance suite.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;

use half::{bf16, f16};
use kie_core::engine::{Engine, LogitsPath};
use kie_core::model::{Role, Spec};
use kie_core::plan::{save, Reads};
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams};
use kie_core::{Error, Result, Stop};
use kie_kernels::simd::{self, f8_to_f32, Level};
use serde_json::{json, Value};
use support::{relative, repository, Folder};

const HIDDEN: usize = 128;
const INNER: usize = 256;
const VOCAB: usize = 512;
const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// A tensor as a file has it: type, shape, bytes.
type Stored = (&'static str, Vec<usize>, Vec<u8>);

/// Numbers from a counter.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        self.0 >> 33
    }

    fn below(&mut self, n: u64) -> usize {
        (self.next() % n) as usize
    }
}

/// How the matrices of layers are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Scheme {
    Fp8 { scale: &'static str },
    FloatChannel,
    FloatTensor,
    Int8,
    Int4 { group: usize, scale: &'static str },
    Mxfp4,
    Awq { group: usize },
    Gptq { group: usize, v2: bool },
}

const SCHEMES: [Scheme; 16] = [
    Scheme::Fp8 { scale: "F32" },
    Scheme::Fp8 { scale: "BF16" },
    Scheme::Fp8 { scale: "F8_E8M0" },
    Scheme::FloatChannel,
    Scheme::FloatTensor,
    Scheme::Int8,
    Scheme::Int4 { group: 32, scale: "BF16" },
    Scheme::Int4 { group: 64, scale: "F16" },
    Scheme::Int4 { group: 128, scale: "BF16" },
    Scheme::Int4 { group: 0, scale: "BF16" },
    Scheme::Mxfp4,
    Scheme::Awq { group: 32 },
    Scheme::Awq { group: 128 },
    Scheme::Gptq { group: 32, v2: false },
    Scheme::Gptq { group: 64, v2: true },
    Scheme::Gptq { group: 128, v2: false },
];

impl Scheme {
    fn config(self) -> Value {
        let compressed = |format: &str, bits: u32, kind: &str, strategy: &str, group: Value| {
            json!({"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
                "quantization_status": "compressed", "kv_cache_scheme": null,
                "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null,
                    "output_activations": null, "weights": {"num_bits": bits, "type": kind,
                    "symmetric": true, "strategy": strategy, "group_size": group,
                    "dynamic": false, "actorder": null, "observer": "minmax"}}}})
        };
        match self {
            Self::Fp8 { .. } => json!({"quant_method": "fp8", "fmt": "e4m3",
                "activation_scheme": "dynamic", "weight_block_size": [64, 32]}),
            Self::FloatChannel => compressed("float-quantized", 8, "float", "channel", json!(null)),
            Self::FloatTensor => compressed("float-quantized", 8, "float", "tensor", json!(null)),
            Self::Int8 => compressed("int-quantized", 8, "int", "channel", json!(null)),
            Self::Int4 { group: 0, .. } => {
                compressed("pack-quantized", 4, "int", "channel", json!(null))
            }
            Self::Int4 { group, .. } => {
                compressed("pack-quantized", 4, "int", "group", json!(group))
            }
            Self::Mxfp4 => compressed("mxfp4-pack-quantized", 4, "float", "group", json!(32)),
            Self::Awq { group } => json!({"quant_method": "awq", "bits": 4, "group_size": group,
                "zero_point": true, "version": "gemm"}),
            Self::Gptq { group, v2 } => json!({"quant_method": "gptq", "bits": 4,
                "group_size": group, "desc_act": false, "sym": false,
                "checkpoint_format": if v2 { "gptq_v2" } else { "gptq" }}),
        }
    }

    /// Rows and columns that share a scale.
    fn group(self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            Self::Fp8 { .. } => [64, 32],
            Self::FloatTensor => [rows, cols],
            Self::FloatChannel | Self::Int8 | Self::Int4 { group: 0, .. } => [1, cols],
            Self::Int4 { group, .. } | Self::Awq { group } | Self::Gptq { group, .. } => [1, group],
            Self::Mxfp4 => [1, 32],
        }
    }
}

/// A scale of few digits and its bytes.
fn scale(random: &mut Random, kind: &str, size: f32) -> (f32, Vec<u8>) {
    let value = size * (1.0 + random.below(7) as f32 / 8.0);
    match kind {
        "F32" => (value, value.to_le_bytes().to_vec()),
        "BF16" => (value, bf16::from_f32(value).to_le_bytes().to_vec()),
        "F16" => (value, f16::from_f32(value).to_le_bytes().to_vec()),
        _ => {
            let code = (size.to_bits() >> 23) as u8 + random.below(2) as u8;
            (f32::from_bits(u32::from(code) << 23), vec![code])
        }
    }
}

fn words(words: Vec<u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// A random matrix: codes, the scales and zero points of groups, and what they mean.
struct Drawn {
    shape: [usize; 2],
    grid: [usize; 2],
    codes: Vec<u8>,
    scales: Vec<(f32, Vec<u8>)>,
    zeros: Vec<u32>,
    values: Vec<f32>,
}

/// A random code of a scheme and its value; `zero` is its group's zero point.
fn code(scheme: Scheme, zero: u32, random: &mut Random) -> (u8, f32) {
    match scheme {
        Scheme::Fp8 { .. } | Scheme::FloatChannel | Scheme::FloatTensor => {
            let code = random.below(0x7f) as u8 | (random.below(2) as u8) << 7;
            (code, f8_to_f32(code))
        }
        Scheme::Int8 => {
            let code = random.next() as u8;
            (code, f32::from(code as i8))
        }
        Scheme::Int4 { .. } => {
            let code = random.below(16) as u8;
            (code, f32::from(code) - 8.0)
        }
        Scheme::Mxfp4 => {
            let sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            let code = random.below(16) as u8;
            let sign = if code >= 8 { -1.0 } else { 1.0 };
            (code, sign * sizes[code as usize % 8])
        }
        Scheme::Awq { .. } | Scheme::Gptq { .. } => {
            let code = random.below(16) as u8;
            (code, f32::from(code) - zero as f32)
        }
    }
}

impl Drawn {
    fn new(scheme: Scheme, shape: [usize; 2], random: &mut Random) -> Self {
        let [rows, cols] = shape;
        let [down, across] = scheme.group(rows, cols);
        let grid = [rows.div_ceil(down), cols.div_ceil(across)];
        let (size, kind) = match scheme {
            Scheme::Fp8 { scale } => (1.0 / 1024.0, scale),
            Scheme::FloatChannel | Scheme::FloatTensor | Scheme::Int8 => (1.0 / 1024.0, "BF16"),
            Scheme::Int4 { scale, .. } => (1.0 / 64.0, scale),
            Scheme::Mxfp4 => (1.0 / 32.0, "E8M0"),
            Scheme::Awq { .. } | Scheme::Gptq { .. } => (1.0 / 64.0, "F16"),
        };
        let scales: Vec<_> = (0..grid[0] * grid[1]).map(|_| scale(random, kind, size)).collect();
        let zeros: Vec<u32> = scales.iter().map(|_| 6 + random.below(5) as u32).collect();
        let (mut codes, mut values) = (Vec::new(), Vec::new());
        for at in 0..rows * cols {
            let group = at / cols / down * grid[1] + at % cols / across;
            let (code, value) = code(scheme, zeros[group], random);
            codes.push(code);
            values.push(value * scales[group].0);
        }
        Self { shape, grid, codes, scales, zeros, values }
    }

    fn scale_bytes(&self) -> Vec<u8> {
        self.scales.iter().flat_map(|(_, bytes)| bytes.clone()).collect()
    }

    /// Codes of rows, with their scales beside them.
    fn by_rows(&self, scheme: Scheme, whole: &str) -> Vec<(String, Stored)> {
        let [rows, cols] = self.shape;
        let (codes, scales, grid) = (self.codes.clone(), self.scale_bytes(), self.grid.to_vec());
        let named = |end: &str, stored: Stored| (format!("{whole}{end}"), stored);
        let packed = || -> Vec<u8> { codes.chunks_exact(2).map(|c| c[0] | c[1] << 4).collect() };
        let shape = || [rows, cols].iter().flat_map(|n| (*n as u64).to_le_bytes()).collect();
        match scheme {
            Scheme::Fp8 { scale } => vec![
                named("", ("F8_E4M3", vec![rows, cols], codes)),
                named("_scale_inv", (scale, grid, scales)),
            ],
            Scheme::Int4 { scale, .. } => vec![
                named("_packed", ("I32", vec![rows, cols / 8], packed())),
                named("_scale", (scale, grid, scales)),
                named("_shape", ("I64", vec![2], shape())),
            ],
            Scheme::Mxfp4 => vec![
                named("_packed", ("U8", vec![rows, cols / 2], packed())),
                named("_scale", ("U8", grid, scales)),
            ],
            _ => {
                let kind = if scheme == Scheme::Int8 { "I8" } else { "F8_E4M3" };
                let shape = if scheme == Scheme::FloatTensor { vec![1] } else { vec![rows, 1] };
                vec![
                    named("", (kind, vec![rows, cols], codes)),
                    named("_scale", ("BF16", shape, scales)),
                ]
            }
        }
    }

    /// Codes of columns, as AWQ and GPTQ have them.
    fn by_columns(&self, scheme: Scheme, name: &str) -> Vec<(String, Stored)> {
        let ([rows, cols], groups) = (self.shape, self.grid[1]);
        let awq = matches!(scheme, Scheme::Awq { .. });
        let less = u32::from(matches!(scheme, Scheme::Gptq { v2: false, .. }));
        // Which of eight neighbours a word has from its lowest bits on.
        let order = if awq { [0, 2, 4, 6, 1, 3, 5, 7] } else { [0, 1, 2, 3, 4, 5, 6, 7] };
        let across_rows = |count: usize, code: &dyn Fn(usize, usize) -> u32| {
            let word = |at: usize| -> u32 {
                let (line, first) = (at / (rows / 8), at % (rows / 8) * 8);
                (0..8).map(|n| code(line, first + order[n]) << (4 * n)).sum()
            };
            words((0..count * rows / 8).map(word).collect())
        };
        let code = |k: usize, r: usize| u32::from(self.codes[r * cols + k]);
        let down = |at: usize| -> u32 {
            let (line, r) = (at / rows * 8, at % rows);
            (0..8).map(|n| code(line + n, r) << (4 * n)).sum()
        };
        let (shape, codes) = match awq {
            true => (vec![cols, rows / 8], across_rows(cols, &code)),
            false => (vec![cols / 8, rows], words((0..cols / 8 * rows).map(down).collect())),
        };
        let zero = |g: usize, r: usize| self.zeros[r * groups + g] - less;
        let by_group = (0..groups).flat_map(|g| (0..rows).map(move |r| r * groups + g));
        let scales = by_group.flat_map(|at| self.scales[at].1.clone()).collect();
        let zeros = across_rows(groups, &zero);
        let named = |end: &str, stored: Stored| (format!("{name}.{end}"), stored);
        let mut out = vec![
            named("qweight", ("I32", shape, codes)),
            named("qzeros", ("I32", vec![groups, rows / 8], zeros)),
            named("scales", ("F16", vec![groups, rows], scales)),
        ];
        if !awq {
            let order = words((0..cols).map(|k| (k / (cols / groups)) as u32).collect());
            out.push(named("g_idx", ("I32", vec![cols], order)));
        }
        out
    }
}

/// A random matrix named `name.weight`: what its file holds, and its values.
fn matrix(
    scheme: Scheme,
    name: &str,
    shape: [usize; 2],
    random: &mut Random,
) -> (Vec<(String, Stored)>, Vec<f32>) {
    let drawn = Drawn::new(scheme, shape, random);
    let stored = match scheme {
        Scheme::Awq { .. } | Scheme::Gptq { .. } => drawn.by_columns(scheme, name),
        _ => drawn.by_rows(scheme, &format!("{name}.weight")),
    };
    (stored, drawn.values)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

impl Folder {
    fn write(&self, tensors: &[(String, Stored)], quantization: Option<Value>) {
        let (mut header, mut body) = (serde_json::Map::new(), Vec::<u8>::new());
        for (name, (dtype, shape, bytes)) in tensors {
            let offsets = [body.len(), body.len() + bytes.len()];
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
            header.insert(name.clone(), entry);
            body.extend(bytes);
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text);
        file.extend(body);
        std::fs::write(self.0.join("model.safetensors"), file).unwrap();
        let mut config = json!({"model_type": "llama", "hidden_size": HIDDEN,
            "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": true, "bos_token_id": 505, "eos_token_id": 506});
        if let Some(quantization) = quantization {
            config["quantization_config"] = quantization;
        }
        std::fs::write(self.0.join("config.json"), config.to_string()).unwrap();
        let llama = repository().join("tests/data/llama");
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(llama.join(name), self.0.join(name)).unwrap();
        }
    }
}

/// A model in a scheme, and its twin in float32.
fn model(scheme: Scheme) -> [Vec<(String, Stored)>; 2] {
    let mut random = Random(7);
    let (mut stored, mut twin) = (Vec::new(), Vec::new());
    let mut plain = |name: String, shape: Vec<usize>, values: Vec<f32>| {
        stored.push((name.clone(), ("F32", shape.clone(), floats(&values))));
        twin.push((name, ("F32", shape, floats(&values))));
    };
    let mut noise = |len: usize, at: f32, size: f32| -> Vec<f32> {
        (0..len).map(|_| at + size * (random.below(2001) as f32 / 1000.0 - 1.0)).collect()
    };
    plain("model.embed_tokens.weight".into(), vec![VOCAB, HIDDEN], noise(VOCAB * HIDDEN, 0.0, 0.5));
    plain("model.norm.weight".into(), vec![HIDDEN], noise(HIDDEN, 1.0, 0.2));
    for layer in 0..LAYERS {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            let name = format!("model.layers.{layer}.{norm}.weight");
            plain(name, vec![HIDDEN], noise(HIDDEN, 1.0, 0.2));
        }
    }
    let kv = HIDDEN / HEADS * KV_HEADS;
    for layer in 0..LAYERS {
        for (part, shape) in [
            ("self_attn.q_proj", [HIDDEN, HIDDEN]),
            ("self_attn.k_proj", [kv, HIDDEN]),
            ("self_attn.v_proj", [kv, HIDDEN]),
            ("self_attn.o_proj", [HIDDEN, HIDDEN]),
            ("mlp.gate_proj", [INNER, HIDDEN]),
            ("mlp.up_proj", [INNER, HIDDEN]),
            ("mlp.down_proj", [HIDDEN, INNER]),
        ] {
            let name = format!("model.layers.{layer}.{part}");
            let (tensors, values) = matrix(scheme, &name, shape, &mut random);
            stored.extend(tensors);
            twin.push((format!("{name}.weight"), ("F32", shape.to_vec(), floats(&values))));
        }
    }
    [stored, twin]
}

fn open(folder: &Path, device: &str, level: Option<Level>, dtype: &str) -> Result<Engine> {
    let config = EngineConfig { max_batch: 2, ..EngineConfig::default() };
    let builder = Engine::builder(folder).config(config).device(device).dtype(dtype);
    match level {
        Some(level) => builder.level(level).build(),
        None => builder.build(),
    }
}

fn ids() -> Vec<u32> {
    (0..24).map(|n| n * 97 % 500).collect()
}

fn logits(engine: &Engine, path: LogitsPath) -> Vec<f32> {
    engine.logits(&ids(), path).unwrap().values
}

#[test]
fn every_scheme_has_the_values_of_its_twin() {
    for scheme in SCHEMES {
        let [stored, twin] = model(scheme);
        let (folder, plain) = (Folder::new("scheme"), Folder::new("twin"));
        folder.write(&stored, Some(scheme.config()));
        plain.write(&twin, None);
        let wanted = logits(
            &open(&plain.0, "cpu", Some(Level::Scalar), "auto").unwrap(),
            LogitsPath::Decode,
        );
        let bytes = std::fs::metadata(folder.0.join("model.safetensors")).unwrap().len();
        for level in simd::available() {
            let engine = open(&folder.0, "cpu", Some(level), "auto").unwrap();
            assert!(engine.info().bytes_per_token < bytes, "{scheme:?}: stored bits are read");
            for (path, gate) in [(LogitsPath::Decode, 1e-5), (LogitsPath::Prefill, 1.5e-2)] {
                let gate = if level <= Level::Avx512 { 1e-5 } else { gate };
                let error = relative(&logits(&engine, path), &wanted);
                assert!(error <= gate, "{scheme:?} {level:?} {path:?}: {error:.1e}");
            }
        }
    }
}

/// A matrix of two e2m1 a byte in groups of 32: codes, scales, and the numbers.
fn fp4(count: usize, random: &mut Random) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let codes: Vec<usize> = (0..count).map(|_| random.below(16)).collect();
    let scales: Vec<u8> = (0..count / 32).map(|_| 123 + random.below(3) as u8).collect();
    let number = |(n, code): (usize, &usize)| {
        let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
        sign * e2m1[code & 7] * 2f32.powi(i32::from(scales[n / 32]) - 127)
    };
    let numbers = codes.iter().enumerate().map(number).collect();
    (codes.chunks(2).map(|two| (two[0] | two[1] << 4) as u8).collect(), scales, numbers)
}

/// One of e4m3 in blocks of 128 x 128, the same.
fn fp8([rows, cols]: [usize; 2], random: &mut Random) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    // Exponents about that of 1.
    let code = |random: &mut Random| (random.below(2) << 7 | (48 + random.below(12))) as u8;
    let codes: Vec<u8> = (0..rows * cols).map(|_| code(random)).collect();
    let grid = [rows, cols].map(|n| n.div_ceil(128));
    let scales = (0..grid[0] * grid[1]).map(|_| 124 + random.below(2) as u8);
    let scales: Vec<u8> = scales.collect();
    let number = |(n, code): (usize, &u8)| {
        let block = n / cols / 128 * grid[1] + n % cols / 128;
        f8_to_f32(*code) * 2f32.powi(i32::from(scales[block]) - 127)
    };
    let numbers = codes.iter().enumerate().map(number).collect();
    (codes, scales, numbers)
}

/// DeepSeek-V4 as it is released, FP8 in blocks and FP4 experts, and its twin in BF16, which has
/// the very same numbers: scales are powers of two.
fn deepseek_v4() -> (Value, [Vec<(String, Stored)>; 2]) {
    let own = repository().join("tests/data/own_deepseek_v4/config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&own).unwrap()).unwrap();
    for (key, size) in [("hidden_size", 64), ("moe_intermediate_size", 32), ("o_lora_rank", 72)] {
        config[key] = json!(size);
    }
    let spec = Spec::from_config(&config, &own).unwrap();
    let mut random = Random(11);
    let [mut stored, mut twin]: [Vec<(String, Stored)>; 2] = [Vec::new(), Vec::new()];
    let halves = |numbers: &[f32]| -> Vec<u8> {
        numbers.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect()
    };
    for tensor in spec.tensors.iter().flat_map(|tensor| tensor.each().collect::<Vec<_>>()) {
        let (name, shape, role) = (tensor.name, tensor.shape, tensor.role);
        let (rows, cols) = (shape[0], *shape.last().unwrap());
        let count: usize = shape.iter().product();
        let expert = matches!(role, Role::ExpertGate(_) | Role::ExpertUp(_) | Role::ExpertDown(_));
        if role.is_linear() {
            let (grid, kind, width, (codes, scales, numbers)) = match expert {
                true => ([rows, cols / 32], "I8", cols / 2, fp4(count, &mut random)),
                false => {
                    let grid = [rows, cols].map(|n| n.div_ceil(128));
                    (grid, "F8_E4M3", cols, fp8([rows, cols], &mut random))
                }
            };
            let scale = format!("{}.scale", name.strip_suffix(".weight").unwrap());
            stored.push((scale, ("F8_E8M0", grid.to_vec(), scales)));
            stored.push((name.clone(), (kind, vec![rows, width], codes)));
            twin.push((name, ("BF16", shape, halves(&numbers))));
            continue;
        }
        let drawn: Stored = if matches!(role, Role::TokenExperts(_)) {
            let ids = (0..count as i64).map(|n| (n / cols as i64 + n % cols as i64) % 3);
            ("I64", shape, ids.flat_map(i64::to_le_bytes).collect())
        } else {
            let at = if role.is_norm() { 1.0 } else { 0.0 };
            let mut unit = || random.below(2001) as f32 / 1000.0 - 1.0;
            let numbers: Vec<f32> = (0..count).map(|_| at + 0.3 * unit()).collect();
            match role.is_norm() || role.is_matrix() {
                true => ("BF16", shape, halves(&numbers)),
                false => ("F32", shape, floats(&numbers)),
            }
        };
        stored.push((name.clone(), drawn.clone()));
        twin.push((name, drawn));
    }
    (config, [stored, twin])
}

#[test]
fn deepseek_v4s_fp8_and_fp4_have_the_values_of_their_twin() {
    let (config, [stored, twin]) = deepseek_v4();
    let make = |name: &str, tensors: &[(String, Stored)], quantization: Option<Value>| {
        let folder = Folder::new(name);
        folder.write(tensors, None);
        let mut config = config.clone();
        config["quantization_config"] = quantization.unwrap_or_default();
        std::fs::write(folder.0.join("config.json"), config.to_string()).unwrap();
        folder
    };
    let scheme = json!({"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic", "weight_block_size": [128, 128], "expert_dtype": "fp4"});
    let coded = make("v4-coded", &stored, Some(scheme.clone()));
    let plain = make("v4-plain", &twin, None);
    let at = |folder: &Folder, device: &str| open(&folder.0, device, None, "auto").unwrap();
    let (wanted, ours) = (at(&plain, "cpu"), at(&coded, "cpu"));
    assert!(ours.info().bytes_per_token < wanted.info().bytes_per_token);
    for path in [LogitsPath::Decode, LogitsPath::Prefill] {
        for engine in [&ours, &at(&coded, "cpu:0,1")] {
            let error = relative(&logits(engine, path), &logits(&wanted, path));
            assert!(error <= 1e-5, "{path:?}: {error:.1e}");
        }
    }
    let refused = |end: &str, change: &dyn Fn(&mut Stored)| {
        let mut other = stored.clone();
        change(&mut other.iter_mut().find(|(name, _)| name.ends_with(end)).unwrap().1);
        let folder = make("v4-broken", &other, Some(scheme.clone()));
        let error = open(&folder.0, "cpu", None, "auto").err().unwrap();
        assert_eq!(error.class(), "LoadError", "{error}");
        assert!(error.to_string().contains(end), "{end}: {error}");
    };
    refused("gate.tid2eid", &|(_, _, bytes)| bytes[8] = 3);
    refused("gate.tid2eid", &|(_, _, bytes)| bytes[8] = bytes[0]);
    refused("gate.tid2eid", &|(_, _, bytes)| bytes[7] = 0xff);
    refused("gate.tid2eid", &|(dtype, _, bytes)| {
        (*dtype, *bytes) = ("F32", bytes[..bytes.len() / 2].to_vec());
    });
    refused("experts.0.w1.scale", &|(dtype, ..)| *dtype = "U16");
    refused("attn.wq_b.scale", &|(_, shape, bytes)| {
        (shape[0], *bytes) = (2, bytes.repeat(2));
    });
}

/// Two lanes in one address space: columns and groups are cut.
#[test]
fn virtual_ranks_cut_codes_and_their_scales() {
    for scheme in SCHEMES {
        let [stored, _] = model(scheme);
        let folder = Folder::new("ranks");
        folder.write(&stored, Some(scheme.config()));
        let wanted = logits(&open(&folder.0, "cpu", None, "auto").unwrap(), LogitsPath::Decode);
        let two = open(&folder.0, "cpu:0,1", None, "auto").unwrap();
        let error = relative(&logits(&two, LogitsPath::Decode), &wanted);
        assert!(error <= 1e-5, "{scheme:?}: {error:.1e}");
    }
}

/// A model, and its twin in float16, which has the very same numbers.
fn model_in_halves(scheme: Scheme) -> [Vec<(String, Stored)>; 2] {
    let [mut stored, mut twin] = model(scheme);
    // Devices of 16 bits a weight take no matrix in float32, and round norms.
    for (_, (dtype, _, bytes)) in
        [&mut stored, &mut twin].into_iter().flatten().filter(|(name, _)| !name.contains("proj"))
    {
        let values = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        let rounded = values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect();
        (*dtype, *bytes) = ("BF16", rounded);
    }
    for (name, (dtype, _, bytes)) in &mut twin {
        if name.contains("proj") {
            let values = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            let halves: Vec<f16> = values.clone().map(f16::from_f32).collect();
            assert!(halves.iter().zip(values).all(|(h, v)| h.to_f32() == v), "exact in halves");
            (*dtype, *bytes) = ("F16", halves.iter().flat_map(|h| h.to_le_bytes()).collect());
        }
    }
    [stored, twin]
}

/// The likeliest ids at the first place behind a prompt, with their log-probabilities.
fn first_likeliest(engine: &Engine, ids: &[u32]) -> Vec<(u32, f32)> {
    let params = SamplingParams {
        max_tokens: Some(1),
        temperature: Some(0.0),
        logprobs: Some(20),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let request = Request { prompt: Prompt::Ids(ids.to_vec()), params };
    let mut stream = engine.stream(request).unwrap();
    let token = stream.next().unwrap().unwrap();
    token.top_logprobs.iter().map(|top| (top.id, top.logprob)).collect()
}

fn simulator(n: usize, warp: [u32; 2]) -> String {
    format!("sim:seed={n},blocks=4,warp={}", warp[n % 2])
}

#[test]
fn the_simulator_decodes_what_it_carries() {
    decodes_what_it_carries(|n| simulator(n, [32, 64]));
}

/// By `make gpu-encodings`.
#[test]
#[ignore = "needs a GPU"]
fn a_gpu_decodes_what_it_carries() {
    decodes_what_it_carries(|_| "cuda:0".to_owned());
}

/// What the stream carries as it is stored, beside a twin in halves on the same device: only the
/// order of float32 sums differs, and what that moves when results become halves.
fn decodes_what_it_carries(device: impl Fn(usize) -> String) {
    let all = [
        (Scheme::Fp8 { scale: "BF16" }, true),
        (Scheme::Fp8 { scale: "F8_E8M0" }, false),
        (Scheme::Int4 { group: 32, scale: "BF16" }, true),
        (Scheme::Int4 { group: 128, scale: "BF16" }, false),
        (Scheme::Mxfp4, true),
        (Scheme::Awq { group: 128 }, true),
        (Scheme::Int8, true),
    ];
    for (n, (scheme, prefill)) in all.into_iter().enumerate() {
        let [stored, twin] = model_in_halves(scheme);
        let (folder, plain) = (Folder::new("carried"), Folder::new("carried-twin"));
        folder.write(&stored, Some(scheme.config()));
        plain.write(&twin, None);
        let device = device(n);
        let [ours, wanted] = [&folder, &plain].map(|folder| {
            let config =
                EngineConfig { max_batch: 2, prefix_cache: false, ..EngineConfig::default() };
            let builder = Engine::builder(&folder.0).config(config).device(&device);
            let engine = builder.prefill_kernel(prefill).build().unwrap();
            assert!(!engine.info().plan.contains("as halves"), "{scheme:?}");
            engine
        });
        let decode = [&ours, &wanted].map(|engine| logits(engine, LogitsPath::Decode));
        let error = relative(&decode[0], &decode[1]);
        // Long enough for the prefill kernel.
        let ids: Vec<u32> = (0..150).map(|n| n * 97 % 500).collect();
        let [likeliest, others] = [&ours, &wanted].map(|engine| first_likeliest(engine, &ids));
        let off = |(id, logprob): &(u32, f32)| {
            let near = others.iter().find(|(other, _)| other == id);
            near.map_or(0.0, |(_, other)| (logprob - other).abs() / other.abs())
        };
        let behind = likeliest.iter().map(off).fold(0.0, f32::max);
        eprintln!("{scheme:?} {device}: {error:.1e}, behind a prompt {behind:.1e}");
        assert!(error <= 2e-3 && behind <= 5e-3, "{scheme:?} {device}: {error:.1e} {behind:.1e}");
        assert_eq!(likeliest[0].0, others[0].0, "{scheme:?} {device}");
    }
}

#[test]
fn an_exact_simulator_has_the_cpus_numbers() {
    exact_has_the_cpus_numbers(|n| simulator(n, [64, 32]));
}

/// By `make gpu-encodings`.
#[test]
#[ignore = "needs a GPU"]
fn an_exact_gpu_has_the_cpus_numbers() {
    exact_has_the_cpus_numbers(|_| "cuda:0".to_owned());
}

/// With two halves a number nothing but the order of sums is left between a GPU's kernels and the
/// CPU, which has every scheme's values.
fn exact_has_the_cpus_numbers(device: impl Fn(usize) -> String) {
    let all = [
        Scheme::Fp8 { scale: "BF16" },
        Scheme::Int4 { group: 32, scale: "BF16" },
        Scheme::Int4 { group: 128, scale: "BF16" },
        Scheme::Int4 { group: 64, scale: "F16" },
        Scheme::Mxfp4,
        Scheme::Awq { group: 32 },
        Scheme::Awq { group: 128 },
        Scheme::Gptq { group: 64, v2: true },
        Scheme::Int8,
    ];
    for (n, scheme) in all.into_iter().enumerate() {
        let ([stored, _], folder) = (model_in_halves(scheme), Folder::new("exact"));
        folder.write(&stored, Some(scheme.config()));
        let config = EngineConfig { max_batch: 2, exact: true, ..EngineConfig::default() };
        let engine = Engine::builder(&folder.0).config(config).device(device(n)).build().unwrap();
        let plan = engine.info().plan;
        assert!(!plan.contains("as halves") && !plan.contains("rounded"), "{scheme:?}: {plan}");
        let engines = [engine, open(&folder.0, "cpu", Some(Level::Scalar), "auto").unwrap()];
        let [bytes, stored] = engines.each_ref().map(|engine| engine.info().bytes_per_token);
        assert_eq!(bytes, stored, "{scheme:?}: what is stored is read");
        let [ours, wanted] =
            engines.map(|engine| engine.logits(&ids()[..8], LogitsPath::Decode).unwrap().values);
        let error = relative(&ours, &wanted);
        eprintln!("{scheme:?}, exact: {error:.1e}");
        assert!(error <= 1e-5, "{scheme:?}: {error:.1e}");
    }
}

#[test]
fn sixteen_bits_are_quantised_on_request() {
    let [_, twin] = model(SCHEMES[0]);
    let plain = Folder::new("quantise");
    plain.write(&twin, None);
    let engine = open(&plain.0, "cpu", None, "auto").unwrap();
    let (wanted, before) = (logits(&engine, LogitsPath::Decode), engine.info());
    for (dtype, most) in [("fp8", 0.1), ("int4", 0.4), ("mxfp4", 0.6)] {
        let engine = open(&plain.0, "cpu", None, dtype).unwrap();
        let error = relative(&logits(&engine, LogitsPath::Decode), &wanted);
        assert!(error > 1e-4 && error < most, "{dtype}: {error:.1e}");
        let info = engine.info();
        assert!(info.bytes_per_token < before.bytes_per_token * 3 / 4, "{dtype}");
        assert!(info.plan.contains(&format!("14 matrices to {dtype}")), "{}", info.plan);
        assert!(info.plan.contains("tokens): relative error "), "{}", info.plan);
    }
    let error = open(&plain.0, "cpu", None, "int3").err().unwrap();
    assert!(error.to_string().contains("mxfp4, got \"int3\""), "{error}");
}

fn quantise(folder: &Path, out: &Path, to: &str, stop: &Stop) -> Result<String> {
    save::quantize(folder, out, to, &Reads { progress: &|_, _, _| (), stop })
}

/// A folder that was written quantised has the bits of the same quantised at load, also where
/// matrices have a dimension of lanes, or each expert has its own.
#[test]
fn a_folder_written_quantised_has_the_bits_of_dtype() {
    let [_, twin] = model(SCHEMES[0]);
    let (plain, out) = (Folder::new("plain"), Folder::new("written"));
    plain.write(&twin, None);
    std::fs::write(plain.0.join("LICENSE"), "as you like").unwrap();
    let recorded =
        ["laneformer_d2", "qwen3_moe"].map(|name| repository().join("tests/data").join(name));
    for folder in [&plain.0, &recorded[0], &recorded[1]] {
        for dtype in ["fp8", "int4", "mxfp4"] {
            let _ = std::fs::remove_dir_all(&out.0);
            let note = quantise(folder, &out.0, dtype, &Stop::default()).unwrap();
            assert!(note.contains(&format!("matrices to {dtype}: ")), "{note}");
            let [ours, wanted] = [(&out.0, "auto"), (folder, dtype)].map(|(folder, dtype)| {
                logits(&open(folder, "cpu", None, dtype).unwrap(), LogitsPath::Decode)
            });
            assert!(ours == wanted, "{dtype}: {:.1e}", relative(&ours, &wanted));
            assert!(out.0.join("tokenizer.json").is_file());
            assert_eq!(out.0.join("LICENSE").exists(), *folder == plain.0);
        }
    }
}

#[test]
fn what_cannot_be_written_quantised_is_told_and_leaves_nothing() {
    let scheme = Scheme::Int4 { group: 32, scale: "BF16" };
    let [stored, twin] = model(scheme);
    let (plain, coded, out) = (Folder::new("from"), Folder::new("coded"), Folder::new("to"));
    plain.write(&twin, None);
    coded.write(&stored, Some(scheme.config()));
    let refusal = |folder: &Path, out: &Path, to: &str, class: &str, what: &str| {
        let error = quantise(folder, out, to, &Stop::default()).unwrap_err();
        assert!(error.class() == class && error.to_string().contains(what), "{error}");
    };
    refusal(&plain.0, &out.0, "fp8", "InvalidRequestError", "exists");
    std::fs::remove_dir(&out.0).unwrap();
    refusal(&plain.0, &out.0, "int3", "InvalidRequestError", "got \"int3\"");
    refusal(&coded.0, &out.0, "fp8", "InvalidRequestError", "q_proj.weight is quantised already");
    refusal(&coded.0.join("none"), &out.0, "fp8", "LoadError", "config.json");
    let stacks = repository().join("tests/data/gpt_oss_mxfp4");
    refusal(&stacks, &out.0, "fp8", "UnsupportedModelError", "a matrix of several parts");
    refusal(&plain.0, &out.0.join("deep"), "fp8", "KieError", "deep.partial: not written");
    let error = open(&coded.0, "cpu", None, "fp8").err().unwrap();
    assert!(error.to_string().contains("is quantised already (i4"), "{error}");
    let stop = Stop::default();
    stop.set();
    assert!(matches!(quantise(&plain.0, &out.0, "fp8", &stop), Err(Error::GivenUp { .. })));
    let left = std::fs::read_dir(out.0.parent().unwrap()).unwrap();
    let name = out.0.file_name().unwrap().to_str().unwrap();
    let mut left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!left.any(|left| left.starts_with(name)), "nothing is left behind");
}

#[test]
fn what_is_not_as_its_scheme_says_is_refused_by_name() {
    let refusal = |tensors: &[(String, Stored)], config: Value| {
        let folder = Folder::new("refusal");
        folder.write(tensors, Some(config));
        open(&folder.0, "cpu", None, "auto").err().unwrap().to_string()
    };
    let int4 = Scheme::Int4 { group: 32, scale: "BF16" };
    let [stored, _] = model(int4);
    let without = |end: &str| -> Vec<_> {
        let first = stored.iter().position(|(name, _)| name.ends_with(end)).unwrap();
        stored.iter().enumerate().filter(|(n, _)| *n != first).map(|(_, t)| t.clone()).collect()
    };
    let name = "model.layers.0.self_attn.q_proj.weight";
    let told = refusal(&without("weight_scale"), int4.config());
    assert!(told.contains(&format!("{name}_scale")), "{told}");
    let told = refusal(&without("weight_shape"), int4.config());
    assert!(told.contains(&format!("{name}_shape")), "{told}");
    let told = refusal(&without("weight_packed"), int4.config());
    assert!(told.contains(name), "{told}");
    let mut other = stored.clone();
    let (_, (_, shape, bytes)) =
        other.iter_mut().find(|(n, _)| n.ends_with("q_proj.weight_shape")).unwrap();
    assert_eq!(shape[..], [2]);
    bytes[0] ^= 1;
    let told = refusal(&other, int4.config());
    assert!(told.contains(&format!("{name}_shape")) && told.contains("[129, 128]"), "{told}");
    let mut other = stored.clone();
    other.push((format!("{name}_zero_point"), ("I32", vec![16, 4], vec![0; 256])));
    let told = refusal(&other, int4.config());
    assert!(told.contains(&format!("{name}_zero_point")), "{told}");
    let gptq = Scheme::Gptq { group: 32, v2: false };
    let [mut ordered, _] = model(gptq);
    let (_, (_, _, bytes)) = ordered.iter_mut().find(|(n, _)| n.ends_with("g_idx")).unwrap();
    bytes[0] = 3;
    let told = refusal(&ordered, gptq.config());
    assert!(told.contains("q_proj.g_idx") && told.contains("no activation order"), "{told}");
    // A scale that is no number.
    let mut broken = stored.clone();
    let (_, (_, _, bytes)) = broken.iter_mut().find(|(n, _)| n.ends_with("weight_scale")).unwrap();
    bytes[..2].copy_from_slice(&0x7fc0_u16.to_le_bytes());
    let told = refusal(&broken, int4.config());
    assert!(told.contains(name) && told.contains("NaN or infinity at number 0"), "{told}");
    for (key, value) in [
        ("format", json!("marlin-24")),
        ("format", json!("int-quantized")),
        ("kv_cache_scheme", json!({"num_bits": 8})),
        ("config_groups", json!({})),
        ("surprise", json!(1)),
    ] {
        let mut config = int4.config();
        config[key] = value;
        let told = refusal(&stored, config);
        assert!(told.contains(key), "{key}: {told}");
    }
    for (key, value) in [
        ("symmetric", json!(false)),
        ("actorder", json!("group")),
        ("num_bits", json!(3)),
        ("strategy", json!("token")),
        ("group_size", json!(48)),
        ("surprise", json!(true)),
    ] {
        let mut config = int4.config();
        config["config_groups"]["group_0"]["weights"][key] = value;
        let told = refusal(&stored, config);
        let at = if ["num_bits", "group_size"].contains(&key) { "format" } else { key };
        assert!(told.contains(at), "{key}: {told}");
    }
}
