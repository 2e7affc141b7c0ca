//! `quantization_config`: how matrices are stored, in the forms that the field writes.
//!
//! Sources: transformers' `FineGrainedFP8Config`, `AwqConfig` and `GPTQConfig`; the
//! compressed-tensors package, `quantization_config.py` and its `pack_quantized` and
//! `mxfp4_pack_quantized` compressors. Which modules are not quantised shows in the checkpoint.

use super::config::Config;
use crate::error::Result;

/// How the matrices of a checkpoint are stored. A matrix of a plain type is none of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantization {
    /// `fp8`: `X` is e4m3, `X_scale_inv` has its scales.
    Fp8(Group),
    /// `fp8` of DeepSeek-V4: `X.weight` is e4m3, or, of experts, two e2m1 a byte in groups of 32;
    /// `X.scale` has its scales, an e8m0 each.
    Fp8Fp4(Group),
    /// compressed-tensors `float-quantized`: `X` is e4m3, `X_scale` has its scales.
    Float(Group),
    /// compressed-tensors `int-quantized`: `X` is signed bytes, `X_scale` has their scales.
    Int8(Group),
    /// compressed-tensors `pack-quantized`: `X_packed` has eight 4-bit integers a word, each plus
    /// 8, `X_scale` their scales, `X_shape` the shape.
    Int4(Group),
    /// compressed-tensors `mxfp4-pack-quantized`: `X_packed` has two e2m1 a byte, `X_scale` an e8m0
    /// for 32 of them.
    Mxfp4,
    /// `mxfp4`, as GPT-OSS has it: of experts alone, `X_blocks` has two e2m1 a byte, in groups of
    /// 32, `X_scales` an e8m0 for each.
    Mxfp4Experts,
    /// `awq`: `qweight`, `qzeros` and `scales`, column by column.
    Awq {
        /// Numbers of a column that share a scale and a zero point.
        group: usize,
    },
    /// `gptq`: the same, packed along columns, and `g_idx`.
    Gptq {
        /// Numbers of a column that share a scale and a zero point.
        group: usize,
        /// Zero points are stored less one (`checkpoint_format: gptq`).
        less_one: bool,
    },
}

/// Which numbers of a matrix share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// All.
    Tensor,
    /// Those of a row.
    Channel,
    /// So many of a row.
    Columns(usize),
    /// Blocks of so many rows and columns.
    Block(usize, usize),
}

impl Group {
    /// Rows and columns of a group of a matrix.
    pub fn of(self, [rows, cols]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Tensor => [rows, cols],
            Self::Channel => [1, cols],
            Self::Columns(group) => [1, group.min(cols)],
            Self::Block(down, across) => [down, across],
        }
    }
}

/// Longest side of a block.
const MOST: usize = 4096;

/// `quantization_config`, where there is one.
pub(super) fn read(config: &Config<'_>) -> Result<Option<Quantization>> {
    let Some(q) = config.object("quantization_config")? else { return Ok(None) };
    match q.text("quant_method")? {
        Some("fp8") => fp8(&q).map(Some),
        Some("compressed-tensors") => compressed(&q).map(Some),
        Some("awq") => awq(&q).map(Some),
        Some("gptq") => gptq(&q).map(Some),
        Some("mxfp4") => {
            q.texts("modules_to_not_convert")?;
            q.finish(&[])?;
            Ok(Some(Quantization::Mxfp4Experts))
        }
        method => {
            let method = method.map_or("nothing".to_owned(), |m| format!("{m:?}"));
            let known = "fp8, compressed-tensors, awq, gptq and mxfp4";
            q.unsupported("quant_method", format!("{method}; {known}"))
        }
    }
}

fn block(q: &Config<'_>, key: &str) -> Result<Group> {
    match q.sizes(key)?.as_deref() {
        Some(&[rows, cols]) if rows <= MOST && cols <= MOST => Ok(Group::Block(rows, cols)),
        Some(_) | None => {
            q.unsupported(key, format!("two sizes up to {MOST} are needed, such as [128, 128]"))
        }
    }
}

fn fp8(q: &Config<'_>) -> Result<Quantization> {
    if let Some(other) = q.text("fmt")?.filter(|fmt| *fmt != "e4m3") {
        return q.unsupported("fmt", format!("{other:?}; e4m3"));
    }
    if let Some(other) = q.text("scale_fmt")?.filter(|fmt| !["ue8m0", "float"].contains(fmt)) {
        return q.unsupported("scale_fmt", format!("{other:?}; ue8m0 and float"));
    }
    let group = block(q, "weight_block_size")?;
    q.texts("modules_to_not_convert")?;
    if let Some(other) = q.text("expert_dtype")?.filter(|kind| !["fp4", "fp8"].contains(kind)) {
        return q.unsupported("expert_dtype", format!("{other:?}; fp4 and fp8"));
    }
    // Static scales of activations would be tensors of their own.
    if let Some(other) = q.text("activation_scheme")?.filter(|scheme| *scheme != "dynamic") {
        return q.unsupported("activation_scheme", format!("{other:?}; dynamic"));
    }
    q.finish(&[])?;
    Ok(Quantization::Fp8(group))
}

/// Keys of compressed-tensors that change nothing at inference.
const COMPRESSED: &[&str] = &[
    "global_compression_ratio",
    "ignore",
    "kv_cache_scheme",
    "quantization_status",
    "sparsity_config",
    "transform_config",
    "version",
];
const WEIGHTS: &[&str] =
    &["observer", "observer_kwargs", "scale_dtype", "symmetric", "zp_dtype", "dynamic", "actorder"];

fn compressed(q: &Config<'_>) -> Result<Quantization> {
    for key in ["kv_cache_scheme", "sparsity_config", "transform_config"] {
        if q.get(key).is_some_and(|v| v.as_object().is_none_or(|o| !o.is_empty())) {
            return q.unsupported(key, "only switched off");
        }
    }
    let groups = q.get("config_groups").and_then(|groups| groups.as_object());
    let Some(name) = groups.filter(|groups| groups.len() == 1).and_then(|g| g.keys().next()) else {
        return q.unsupported("config_groups", "one group is needed");
    };
    let groups = q.object("config_groups")?;
    let group = groups.as_ref().map(|g| g.object(name)).transpose()?.flatten();
    let Some(group) = group else { return q.unsupported("config_groups", "an object is needed") };
    for key in ["input_activations", "output_activations"] {
        let activations = group.object(key)?;
        if activations.is_some_and(|a| a.flag_or("dynamic", false).is_ok_and(|dynamic| !dynamic)) {
            return group.unsupported(key, "static scales; only dynamic ones");
        }
    }
    let targets = group.texts("targets")?.unwrap_or_default();
    if targets != ["Linear"] {
        return group.unsupported("targets", format!("{targets:?}; [\"Linear\"]"));
    }
    let format = group.text("format")?.or(q.text("format")?);
    let Some(w) = group.object("weights")? else { return group.unsupported("weights", "nothing") };
    group.finish(&[])?;
    q.finish(COMPRESSED)?;
    let (bits, kind) = (w.size("num_bits")?, w.text("type")?);
    if !w.flag_or("symmetric", true)? {
        return w.unsupported("symmetric", "false; only symmetric weights");
    }
    if let Some(order) = w.text("actorder")? {
        return w.unsupported("actorder", format!("{order:?}; no activation order"));
    }
    let size = w.get("group_size").and_then(serde_json::Value::as_u64);
    let group = match (w.text("strategy")?, size) {
        (Some("tensor"), _) => Group::Tensor,
        (Some("channel"), _) => Group::Channel,
        (Some("group"), Some(group)) => Group::Columns(group as usize),
        (Some("block"), _) => block(&w, "block_structure")?,
        (strategy, size) => {
            let got = format!("{strategy:?} with group_size {size:?}");
            return w.unsupported("strategy", format!("{got}; tensor, channel, group and block"));
        }
    };
    w.get("block_structure");
    w.finish(WEIGHTS)?;
    match (format, bits, kind, group) {
        (Some("pack-quantized"), 4, Some("int"), Group::Columns(32 | 64 | 128))
        | (Some("pack-quantized"), 4, Some("int"), Group::Channel) => Ok(Quantization::Int4(group)),
        (Some("int-quantized"), 8, Some("int"), Group::Channel | Group::Tensor) => {
            Ok(Quantization::Int8(group))
        }
        (Some("float-quantized"), 8, Some("float"), _) => Ok(Quantization::Float(group)),
        (Some("mxfp4-pack-quantized"), 4, Some("float"), Group::Columns(32)) => {
            Ok(Quantization::Mxfp4)
        }
        (format, bits, kind, group) => {
            let format = format.unwrap_or("nothing");
            let kind = kind.unwrap_or("nothing");
            let got = format!("{format:?} of {bits} bits, type {kind:?}, {group:?}");
            let known = "pack-quantized int4 in groups of 32, 64 or 128, int-quantized int8 a \
                         channel, float-quantized fp8, mxfp4-pack-quantized";
            q.unsupported("format", format!("{got}; {known}"))
        }
    }
}

/// `bits` and `group_size` of the older methods.
fn four_bits(q: &Config<'_>) -> Result<usize> {
    match (q.size("bits")?, q.size("group_size")?) {
        (4, group @ (32 | 64 | 128)) => Ok(group),
        (4, group) => q.unsupported("group_size", format!("{group}; 32, 64 and 128")),
        (bits, _) => q.unsupported("bits", format!("{bits}; 4")),
    }
}

fn awq(q: &Config<'_>) -> Result<Quantization> {
    let group = four_bits(q)?;
    if let Some(other) = q.text("version")?.filter(|v| !v.eq_ignore_ascii_case("gemm")) {
        return q.unsupported("version", format!("{other:?}; gemm"));
    }
    if !q.flag_or("zero_point", true)? {
        return q.unsupported("zero_point", "false; with zero points");
    }
    q.texts("modules_to_not_convert")?;
    q.finish(&["backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"])?;
    Ok(Quantization::Awq { group })
}

/// Keys of GPTQ that say how the weights were found.
const GPTQ: &[&str] = &[
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_percent",
    "dataset",
    "exllama_config",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "pack_dtype",
    "pad_token_id",
    "quantizer",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
];

fn gptq(q: &Config<'_>) -> Result<Quantization> {
    let group = four_bits(q)?;
    // The order itself is in g_idx, which is looked at.
    q.flag_or("desc_act", false)?;
    let less_one = match q.text("checkpoint_format")? {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        Some(other) => {
            return q.unsupported("checkpoint_format", format!("{other:?}; gptq and gptq_v2"));
        }
    };
    if q.flag_or("lm_head", false)? {
        return q.unsupported("lm_head", "true; an lm_head of a plain type");
    }
    q.finish(GPTQ)?;
    Ok(Quantization::Gptq { group, less_one })
}
