//! Configs as released, in both dialects, and broken in one way each.

#![allow(clippy::unwrap_used)]

use serde_json::{json, Value};

use super::*;

fn read(config: Value) -> Result<Spec> {
    Spec::from_config(&config, Path::new("config.json"))
}

/// The first layer's attention.
fn first(spec: &Spec) -> Attention {
    *spec.layers[0].mixer.attention().unwrap()
}

fn with(mut config: Value, key: &str, value: Value) -> Value {
    config[key] = value;
    config
}

/// The released Laneformer 2B, as far as it is public.
fn laneformer_2b() -> Value {
    json!({
        "model_type": "laneformer", "hidden_size": 3072, "num_hidden_layers": 15,
        "num_attention_heads": 32, "num_key_value_heads": 16, "intermediate_size": 12288,
        "vocab_size": 32000, "max_position_embeddings": 4096, "num_lanes": 8, "broadcast_delay": 2,
        "use_early_comm": false, "use_attention_comm": true, "use_mlp_comm": true,
        "lm_head_type": "vocab_parallel", "pre_norm_lane_agg": false,
        "replicated_rmsn_scale": true, "sliding_window": 512, "swa_layers": [0, 1, 2, 3, 4],
        "norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
    })
}

fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "vocab_size": 100, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    })
}

#[test]
fn laneformer_2b_has_the_published_size() {
    let spec = read(laneformer_2b()).unwrap();
    assert_eq!(spec.parameters(), 2_320_069_632);
    assert_eq!(spec.tensors.len(), 138);
    let silent = Join::Own { factor: 8f32.sqrt() };
    assert_eq!(spec.layers[1].mlp_join, silent);
    assert_eq!(spec.layers[2].mixer_join, Join::Delayed { layers: 2 });
    assert_eq!(spec.layers.iter().filter(|l| l.window() == Some(512)).count(), 5);
}

#[test]
fn laneformer_flags() {
    let mixed = with(laneformer_2b(), "use_mlp_comm", json!(false));
    let spec = read(mixed).unwrap();
    assert_eq!(spec.layers[5].mlp_join, Join::Own { factor: 8f32.sqrt() });
    assert_eq!(spec.layers[5].mixer_join, Join::Delayed { layers: 2 });
    let early = read(with(laneformer_2b(), "use_early_comm", json!(true))).unwrap();
    assert_eq!(early.layers[0].mixer_join, Join::Sum);
    for (key, value) in [
        ("broadcast_delay", json!(0)),
        ("use_comm", json!(true)),
        ("pre_norm_lane_agg", json!(true)),
        ("num_lanes", json!(5)),
        ("lm_head_type", json!("other")),
        ("swa_layers", json!([15])),
        ("tie_word_embeddings", json!(true)),
    ] {
        let error = read(with(laneformer_2b(), key, value)).unwrap_err();
        assert!(matches!(error.class(), "UnsupportedModelError" | "LoadError"), "{key}: {error}");
    }
}

#[test]
fn unknown_flags_are_refused_and_harmless_ones_are_not() {
    read(with(llama(), "use_cache", json!(true))).unwrap();
    let error = read(with(llama(), "attention_gate", json!(true))).unwrap_err();
    assert!(error.to_string().contains("attention_gate"), "{error}");
    let error = read(with(llama(), "model_type", json!("rwkv"))).unwrap_err();
    assert!(error.to_string().contains("rwkv"), "{error}");
    assert!(error.hint().contains("llama") && error.hint().contains("BF16"), "{}", error.hint());
}

#[test]
fn llama_variants() {
    let scaled = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    let spec = read(with(llama(), "rope_scaling", scaled.clone())).unwrap();
    let Scaling::Llama3(read_as) = first(&spec).rope.scaling else { panic!("llama3") };
    assert_eq!((read_as.factor, read_as.low_freq_factor), (8.0, 1.0));
    let new = with(scaled, "rope_theta", json!(5e5));
    let spec = read(with(llama(), "rope_parameters", new)).unwrap();
    assert_eq!(
        (first(&spec).rope.theta, first(&spec).rope.scaling),
        (5e5, Scaling::Llama3(read_as))
    );
    let tied = read(with(llama(), "tie_word_embeddings", json!(true))).unwrap();
    assert!(tied.tensors.iter().all(|t| t.role != Role::Head));
    for (key, value) in [
        ("rope_scaling", json!({"rope_type": "ntk", "factor": 2.0})),
        ("attention_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("quantization_config", json!({"quant_method": "bitsandbytes"})),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(15)),
        ("eos_token_id", json!(100)),
    ] {
        let error = read(with(llama(), key, value)).unwrap_err();
        assert_eq!(error.class(), "UnsupportedModelError", "{key}: {error}");
    }
    for (key, value) in [
        ("hidden_size", json!("64")),
        ("num_hidden_layers", json!(0)),
        ("vocab_size", json!(-1)),
        ("rms_norm_eps", json!(0)),
        ("num_hidden_layers", json!(1e30)),
    ] {
        let error = read(with(llama(), key, value)).unwrap_err();
        assert_eq!(error.class(), "LoadError", "{key}: {error}");
        assert!(error.to_string().contains(key), "{error}");
    }
}

#[test]
fn windows_follow_each_familys_rule() {
    let windowed = with(with(llama(), "sliding_window", json!(16)), "model_type", json!("mistral"));
    assert!(read(windowed).unwrap().layers.iter().all(|l| l.window() == Some(16)));
    let qwen = with(with(llama(), "sliding_window", json!(16)), "model_type", json!("qwen2"));
    let qwen = with(qwen, "max_window_layers", json!(1));
    assert!(read(qwen.clone()).unwrap().layers.iter().all(|l| l.window().is_none()));
    let used = read(with(qwen.clone(), "use_sliding_window", json!(true))).unwrap();
    assert_eq!(used.layers.iter().map(|l| l.window()).collect::<Vec<_>>(), [None, Some(16)]);
    let short = with(qwen, "layer_types", json!(["full_attention"]));
    assert_eq!(read(short).unwrap_err().class(), "UnsupportedModelError");
}

#[test]
fn both_dialects_of_every_fixture_agree() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let mut compared = 0;
    for entry in data.read_dir().unwrap() {
        let folder = entry.unwrap().path();
        let new = folder.join("config.transformers5.json");
        if !new.exists() {
            continue;
        }
        let old = Spec::from_config(&json::read(&folder.join("config.json")).unwrap(), &folder);
        let new = Spec::from_config(&json::read(&new).unwrap(), &folder).unwrap();
        assert_eq!(old.unwrap(), new, "{}", folder.display());
        compared += 1;
    }
    assert!(compared >= 5);
}

/// What `read` says of a config with one key changed.
fn refusal(config: Value, key: &str, value: Value) -> Error {
    let shown = format!("{key}: {value}");
    match read(with(config, key, value)) {
        Ok(_) => panic!("{shown} was read"),
        Err(error) => error,
    }
}

#[test]
fn sizes_that_make_no_model() {
    for (key, value, class) in [
        ("num_hidden_layers", json!(16_777_216), "UnsupportedModelError"),
        ("num_attention_heads", json!(128), "UnsupportedModelError"),
        ("rms_norm_eps", json!(1e-60), "UnsupportedModelError"),
        ("rms_norm_eps", json!(1e60), "UnsupportedModelError"),
        ("rope_theta", json!("10000"), "LoadError"),
        ("max_position_embeddings", json!(1.5), "LoadError"),
        ("eos_token_id", json!([1, -2]), "LoadError"),
    ] {
        assert_eq!(refusal(llama(), key, value).class(), class, "{key}");
    }
}

#[test]
fn keys_that_must_be_off() {
    for (key, off, on) in [
        ("attention_bias", json!(false), json!(true)),
        ("mlp_bias", json!(null), json!(true)),
        ("is_encoder_decoder", json!(false), json!(true)),
        ("pruned_heads", json!({}), json!({"0": [1]})),
        ("sliding_window", json!(null), json!(4096)),
        ("pretraining_tp", json!(1), json!(2)),
        ("suppress_tokens", json!(null), json!([5])),
    ] {
        read(with(llama(), key, off)).unwrap();
        let error = refusal(llama(), key, on);
        assert_eq!(error.class(), "UnsupportedModelError", "{error}");
        assert!(error.to_string().contains(key), "{error}");
    }
    let nested = json!({"rope_type": "default", "return_dict": true});
    let error = refusal(llama(), "rope_parameters", nested);
    assert!(error.to_string().contains("rope_parameters.return_dict"), "{error}");
}

#[test]
fn rope_is_said_once() {
    let default = json!({"rope_type": "default", "rope_theta": 5e5});
    let twice = with(with(llama(), "rope_parameters", default), "rope_scaling", json!(null));
    assert_eq!(
        read(with(twice.clone(), "rope_theta", json!(5e5))).map(|s| first(&s).rope.theta).unwrap(),
        5e5
    );
    for (key, value) in [
        ("rope_theta", json!(1e4)),
        ("rope_scaling", json!({"type": "default"})),
        ("rope_parameters", json!({"rope_type": "default", "type": "llama3"})),
        ("rope_parameters", json!({"rope_type": "default", "factor": 2.0})),
    ] {
        assert_eq!(refusal(twice.clone(), key, value).class(), "UnsupportedModelError", "{key}");
    }
    let swapped = json!({"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
        "high_freq_factor": 1.0, "original_max_position_embeddings": 64});
    assert_eq!(refusal(llama(), "rope_scaling", swapped).class(), "UnsupportedModelError");
}

#[test]
fn qwen_windows_are_not_guessed() {
    let qwen = with(with(llama(), "model_type", json!("qwen3")), "use_sliding_window", json!(true));
    assert_eq!(
        refusal(qwen.clone(), "sliding_window", json!(null)).class(),
        "UnsupportedModelError"
    );
    let qwen = with(qwen, "sliding_window", json!(16));
    let types = json!(["sliding_attention", "full_attention"]);
    let spec = read(with(qwen.clone(), "layer_types", types.clone())).unwrap();
    assert_eq!(spec.layers.iter().map(|l| l.window()).collect::<Vec<_>>(), [Some(16), None]);
    let unused = with(qwen.clone(), "use_sliding_window", json!(false));
    assert_eq!(refusal(unused, "layer_types", types).class(), "UnsupportedModelError");
    let other = json!(["full_attention", "linear_attention"]);
    assert_eq!(refusal(qwen, "layer_types", other).class(), "UnsupportedModelError");
}

#[test]
fn fp8_blocks_are_read_and_nothing_else_of_them() {
    let fp8 = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]});
    let wanted = Quantization::Fp8(Group::Block(128, 128));
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let config =
            with(with(llama(), "model_type", json!(family)), "quantization_config", fp8.clone());
        assert_eq!(read(config).unwrap().quantization, Some(wanted), "{family}");
    }
    for (key, value) in [
        ("quant_method", json!("bitsandbytes")),
        ("fmt", json!("e5m2")),
        ("activation_scheme", json!("static")),
        ("weight_block_size", json!(null)),
        ("weight_block_size", json!([128])),
        ("bits", json!(4)),
    ] {
        let config = with(fp8.clone(), key, value);
        let error = refusal(llama(), "quantization_config", config);
        assert_eq!(error.class(), "UnsupportedModelError", "{key}: {error}");
    }
}

#[test]
fn laneformer_heads_norms_and_windows() {
    let shape = |spec: &Spec, role: Role| {
        spec.tensors.iter().find(|t| t.role == role).map(|t| (t.name.clone(), t.shape.clone()))
    };
    let wanted = |name: &str, shape: &[usize]| Some((name.to_owned(), shape.to_vec()));
    let spec = read(laneformer_2b()).unwrap();
    assert_eq!(shape(&spec, Role::Head), wanted("lm_head.weight", &[8, 4000, 3072]));
    assert_eq!(
        shape(&spec, Role::O(14)),
        wanted("model.layers.14.attention.wo.weight", &[8, 3072, 384])
    );
    let lane = read(with(laneformer_2b(), "lm_head_type", json!("lane"))).unwrap();
    assert_eq!(shape(&lane, Role::Head), wanted("lm_head.linear.weight", &[32000, 24576]));
    assert_eq!(lane.head, HeadKind::Concat);
    let own = with(laneformer_2b(), "replicated_rmsn_scale", json!(false));
    let spec = read(own.clone()).unwrap();
    assert_eq!(shape(&spec, Role::FinalNorm), wanted("model.norm.scale", &[8, 3072]));
    let summed =
        with(with(own, "lm_head_type", json!("replicate")), "pre_norm_lane_agg", json!(true));
    let spec = read(summed).unwrap();
    assert_eq!(spec.head, HeadKind::SumThenNorm);
    assert_eq!(shape(&spec, Role::FinalNorm), wanted("model.norm.weight", &[3072]));
    let mlp_norm = wanted("model.layers.0.ffn_norm.scale", &[8, 3072]);
    assert_eq!(shape(&spec, Role::MlpNorm(0)), mlp_norm);
}

/// The earlier dialect: counts from either end, layers taken out again, comm off as a whole.
#[test]
fn laneformer_in_the_earlier_dialect() {
    let mut config = laneformer_2b();
    for key in RELEASED_ONLY {
        config.as_object_mut().unwrap().remove(key);
    }
    let config = with(config, "model_type", json!("laneformer_tp"));
    let windowed = |spec: Spec| {
        let windows = spec.layers.iter().enumerate().filter(|(_, l)| l.window().is_some());
        windows.map(|(i, _)| i).collect::<Vec<_>>()
    };
    let counted = |n: i64| with(config.clone(), "sliding_window_n_layers", json!(n));
    assert!(windowed(read(counted(0)).unwrap()).is_empty());
    assert_eq!(windowed(read(counted(3)).unwrap()), [0, 1, 2]);
    let last = with(counted(-3), "unclamped_layers", json!([13]));
    assert_eq!(windowed(read(last).unwrap()), [12, 14]);
    let silent = read(with(config.clone(), "use_comm", json!(false))).unwrap();
    assert!(silent.layers.iter().all(|l| l.mlp_join == Join::Own { factor: 8f32.sqrt() }));
    let early = with(with(config.clone(), "use_comm", json!(false)), "use_early_comm", json!(true));
    let early = read(early).unwrap();
    assert_eq!(early.layers[1].mixer_join, Join::Sum);
    assert_eq!(early.layers[2].mixer_join, Join::Own { factor: 8f32.sqrt() });
    assert_eq!(refusal(counted(3), "swa_layers", json!([])).class(), "UnsupportedModelError");
    let one = read(with(config, "num_lanes", json!(1))).unwrap();
    assert!(one.layers.iter().all(|l| l.mixer_join == Join::Sum && l.mlp_join == Join::Sum));
}

/// Qwen3-30B-A3B as released, shapes alone.
fn qwen3_moe() -> Value {
    json!({
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "output_router_logits": false, "router_aux_loss_coef": 0.001, "use_sliding_window": false,
        "sliding_window": null, "max_window_layers": 48, "attention_bias": false,
    })
}

/// GPT-OSS-20B as released, shapes alone.
fn gpt_oss() -> Value {
    json!({
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
        "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "attention_bias": true, "sliding_window": 128, "swiglu_limit": 7.0,
        "initial_context_length": 4096, "rope_theta": 150000, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": false, "original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    })
}

/// Qwen3-Coder-Next as released, shapes alone.
fn qwen3_next() -> Value {
    json!({
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 256,
        "num_attention_heads": 16, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "intermediate_size": 5120, "moe_intermediate_size": 512, "num_experts": 512,
        "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936, "max_position_embeddings": 262144, "rope_theta": 5000000,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "attention_bias": false,
        "use_sliding_window": false, "quantization_config": {"quant_method": "fp8",
            "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"]},
    })
}

#[test]
fn recurrent_layers_between_gated_attention() {
    let spec = read(qwen3_next()).unwrap();
    let delta = Delta { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, taps: 4 };
    for (at, layer) in spec.layers.iter().enumerate() {
        match layer.mixer {
            Mixer::Delta(found) => assert_eq!((at % 4 != 3, found), (true, delta)),
            Mixer::Latent(_) | Mixer::Compressed(_) => panic!("{:?}", layer.mixer),
            Mixer::Attention(a) => {
                let head = (a.heads, a.kv_heads, a.head_dim, a.rope.features, a.gated);
                assert_eq!((at % 4, head), (3, (16, 2, 256, 64, true)));
            }
        }
    }
    assert_eq!(experts(&spec, 0).unwrap().shared.unwrap().each.ffn, 512);
    let find = |role| spec.tensors.iter().find(|t| t.role == role).unwrap();
    let shape = |role| find(role).shape.clone();
    assert_eq!(shape(Role::DeltaIn(0)), [12288, 2048]);
    assert_eq!(shape(Role::DeltaGates(0)), [64, 2048]);
    assert_eq!(shape(Role::DeltaConv(0)), [8192, 1, 4]);
    assert_eq!(shape(Role::O(0)), [2048, 4096]);
    assert_eq!(shape(Role::Q(3)), [8192, 2048]);
    let less = Stored::Less { one: 1.0, factor: 1.0 };
    let stored = [Role::AttentionNorm(0), Role::QNorm(3), Role::FinalNorm, Role::DeltaNorm(0)];
    assert_eq!(stored.map(|role| find(role).stored), [less, less, less, Stored::Whole]);
    let shown = spec.to_string();
    let said = "36 of 32/16 recurrent heads of 128x128, 10 of 512 experts of 512 + 512";
    assert!(shown.contains(said), "{shown}");
    let with_mtp = read(qwen3_next()).unwrap().predicting().unwrap();
    assert_eq!((with_mtp.layers.len(), with_mtp.model_layers().len()), (49, 48));
    assert!(with_mtp.ignored_below.is_empty() && with_mtp.layers[48].mixer.attention().is_some());
    let own = with_mtp.tensors.iter().find(|t| t.role == Role::Q(48)).unwrap();
    assert_eq!((&*own.name, own.shape[0]), ("mtp.layers.0.self_attn.q_proj.weight", 8192));
    let mut types = vec!["full_attention"; 48];
    types[47] = "linear_attention";
    let other = read(with(qwen3_next(), "layer_types", json!(types))).unwrap();
    let recurrent = |layer: &LayerSpec| layer.mixer.attention().is_none();
    assert_eq!(other.layers.iter().position(recurrent), Some(47));
    for (key, value) in [
        ("layer_types", json!(["linear_attention"])),
        ("layer_types", json!(vec!["sliding_attention"; 48])),
        ("linear_num_value_heads", json!(24)),
        ("linear_conv_kernel_dim", json!(1)),
        ("linear_key_head_dim", json!(4096)),
        ("full_attention_interval", json!(0)),
        ("attention_bias", json!(true)),
        ("shared_expert_intermediate_size", json!(null)),
    ] {
        let error = refusal(qwen3_next(), key, value.clone()).to_string();
        let named = if key == "linear_num_value_heads" { "linear_num_key_heads" } else { key };
        assert!(error.contains(named), "{key} {value}: {error}");
    }
}

fn deepseek_v3() -> Value {
    json!({
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
        "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8,
        "topk_group": 4, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
        "vocab_size": 129280, "max_position_embeddings": 163840, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "attention_bias": false,
    })
}

#[test]
fn latents_before_experts_in_groups() {
    let spec = read(deepseek_v3()).unwrap();
    assert_eq!(spec.parameters(), 671_026_419_200);
    assert!(experts(&spec, 2).is_none());
    let of = experts(&spec, 3).unwrap();
    assert_eq!((of.correction, of.factor, of.shared.unwrap().each.ffn), (true, 2.5, 2048));
    let groups = of.groups.unwrap();
    assert_eq!((groups.count, groups.chosen), (8, 4));
    assert!(spec.ignored_below.iter().any(|below| below == "model.layers.61."));
    // Queries may come straight of the residual.
    let straight = read(with(deepseek_v3(), "q_lora_rank", json!(null))).unwrap();
    assert!(matches!(straight.layers[0].mixer, Mixer::Latent(l) if l.query_rank.is_none()));
    // Of a model that sees, the part that reads.
    let seeing = read(json!({
        "model_type": "kimi_k25", "text_config": deepseek_v3(), "vision_config": {},
    }));
    let seeing = seeing.unwrap();
    assert_eq!(seeing.parameters(), spec.parameters());
    assert!(seeing.tensors.iter().all(|t| t.name.starts_with("language_model.")));
    for (key, value) in [
        ("num_key_value_heads", json!(64)),
        ("kv_lora_rank", json!(0)),
        ("qk_rope_head_dim", json!(63)),
        ("v_head_dim", json!(null)),
        ("scoring_func", json!("softmax")),
        ("topk_method", json!("greedy")),
        ("n_group", json!(7)),
        ("topk_group", json!(9)),
        ("n_shared_experts", json!(257)),
        ("routed_scaling_factor", json!(-1.0)),
        ("first_k_dense_replace", json!(null)),
        ("num_nextn_predict_layers", json!(-1)),
        ("moe_layer_freq", json!(2)),
    ] {
        let error = refusal(deepseek_v3(), key, value.clone()).to_string();
        assert!(error.contains(key), "{key} {value}: {error}");
    }
}

/// DeepSeek-V4-Flash, shapes alone.
fn deepseek_v4() -> Value {
    let ratios: Vec<usize> = (0..44).map(|n| [4, 128][n % 2] * usize::from(n > 1)).collect();
    let mut config = json!({
        "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43,
        "compress_ratios": ratios, "compress_rope_theta": 160_000, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
        "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 512, "vocab_size": 129_280,
        "max_position_embeddings": 1_048_576, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "attention_bias": false,
    });
    let more = json!({
        "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "num_hash_layers": 3, "num_nextn_predict_layers": 1, "norm_topk_prob": true,
        "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0,
        "topk_method": "noaux_tc", "expert_dtype": "fp4",
        "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 65536},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

#[test]
fn entries_behind_a_window_and_experts_by_token() {
    let spec = read(deepseek_v4()).unwrap();
    assert_eq!(spec.parameters(), 284_334_567_511);
    assert_eq!(spec.quantization, Some(Quantization::Fp8Fp4(Group::Block(128, 128))));
    assert_eq!(spec.hyper.map(|hyper| (hyper.streams, hyper.rounds)), Some((4, 20)));
    let of = |layer: usize| match spec.layers[layer].mixer {
        Mixer::Compressed(of) => of,
        other => panic!("{other:?}"),
    };
    assert!([0, 1].iter().all(|at| of(*at).entries.is_none() && of(*at).rope.theta == 1e4));
    let (chosen, all) = (of(2).entries.unwrap(), of(3).entries.unwrap());
    assert_eq!((chosen.every, chosen.overlap, chosen.index.unwrap().chosen), (4, true, 512));
    assert_eq!((all.every, all.overlap, all.index), (128, false, None));
    // Its length is left alone, whatever the factor says.
    assert!(matches!(of(2).rope.scaling, Scaling::Yarn(yarn) if yarn.attention == 1.0));
    assert!((0..43).all(|at| experts(&spec, at).unwrap().by_token == (at < 3)));
    assert!(spec.ignored_below.iter().any(|below| below == "mtp."));
    let names = |part: &str| spec.tensors.iter().filter(|t| t.name.ends_with(part)).count();
    assert_eq!((names("gate.tid2eid"), names("gate.bias"), names("ape")), (3, 40, 62));
    let shown = spec.to_string();
    let said = "20 of 64 heads on keys of 512, an entry for 128 positions";
    assert!(shown.contains(said) && shown.contains("4 residual streams"), "{shown}");
}

#[test]
fn entries_as_transformers_5_writes_them() {
    let spec = read(deepseek_v4()).unwrap();
    let mut new = deepseek_v4();
    let kinds = ["compressed_sparse_attention", "heavily_compressed_attention"];
    let kind = |n: usize| if n < 2 { "sliding_attention" } else { kinds[n % 2] };
    let experts: Vec<_> = (0..43).map(|n| if n < 3 { "hash_moe" } else { "moe" }).collect();
    let mut scaling = new["rope_scaling"].clone();
    scaling["rope_theta"] = json!(160_000);
    scaling["partial_rotary_factor"] = json!(0.125);
    for (key, value) in [
        ("compress_ratios", json!(null)),
        ("num_hash_layers", json!(null)),
        ("rope_scaling", json!(null)),
        ("layer_types", (0..43).map(kind).collect::<Vec<_>>().into()),
        ("compress_rates", json!({(kinds[0]): 4, (kinds[1]): 128})),
        ("mlp_layer_types", json!(experts)),
        ("rope_parameters", json!({"main": {"rope_theta": 10000}, "compress": scaling})),
        ("partial_rotary_factor", json!(0.125)),
    ] {
        new[key] = value;
    }
    assert_eq!(read(new.clone()).unwrap(), spec);
    for (key, value) in [
        ("layer_types", json!(["sliding_attention"])),
        ("layer_types", json!(vec!["full_attention"; 43])),
        ("compress_rates", json!(null)),
        ("mlp_layer_types", json!(vec!["dense"; 43])),
        ("partial_rotary_factor", json!(0.25)),
    ] {
        let error = refusal(new.clone(), key, value.clone()).to_string();
        assert!(error.contains(key), "{key} {value}: {error}");
    }
}

#[test]
fn entries_that_cannot_be_are_refused() {
    for (key, value) in [
        ("compress_ratios", json!(null)),
        ("compress_ratios", json!([0, 4])),
        ("compress_ratios", json!(vec![96; 43])),
        ("compress_ratios", json!(vec![-4; 43])),
        ("num_key_value_heads", json!(8)),
        ("qk_rope_head_dim", json!(63)),
        ("qk_rope_head_dim", json!(1024)),
        ("o_groups", json!(7)),
        ("index_head_dim", json!(32)),
        ("index_topk", json!(0)),
        ("sliding_window", json!(0)),
        ("hc_mult", json!(17)),
        ("hc_sinkhorn_iters", json!(0)),
        ("scoring_func", json!("sigmoid")),
        ("topk_method", json!("greedy")),
        ("num_experts_per_tok", json!(257)),
        ("swiglu_limit", json!(-1.0)),
        ("n_shared_experts", json!(257)),
        ("surprise", json!(1)),
    ] {
        let error = refusal(deepseek_v4(), key, value.clone()).to_string();
        assert!(error.contains(key), "{key} {value}: {error}");
    }
}

fn experts(spec: &Spec, layer: usize) -> Option<Experts> {
    match spec.layers[layer].mlp {
        Mlp::Experts(experts) => Some(experts),
        Mlp::Gated(_) => None,
    }
}

#[test]
fn mixtures_of_experts_have_the_published_sizes() {
    let qwen = read(qwen3_moe()).unwrap();
    assert_eq!(qwen.parameters(), 30_532_122_624);
    let big = [
        ("hidden_size", 4096),
        ("num_hidden_layers", 94),
        ("num_attention_heads", 64),
        ("moe_intermediate_size", 1536),
    ];
    let big = big.iter().fold(qwen3_moe(), |config, (key, size)| with(config, key, json!(size)));
    assert_eq!(read(big).unwrap().parameters(), 235_093_634_560);
    let oss = read(gpt_oss()).unwrap();
    assert_eq!(oss.parameters(), 20_914_757_184);
    let bigger =
        with(with(gpt_oss(), "num_hidden_layers", json!(36)), "num_local_experts", json!(128));
    assert_eq!(read(bigger).unwrap().parameters(), 116_829_156_672);
    assert_eq!(oss.quantization, Some(Quantization::Mxfp4Experts));
    let windows: Vec<_> = oss.layers.iter().take(3).map(LayerSpec::window).collect();
    assert_eq!(windows, [Some(128), None, Some(128)]);
    let shown = format!("{qwen}{oss}");
    for said in ["8 of 128 experts of 768", "4 of 32 experts of 2880", "window 128 on 12 layers"] {
        assert!(shown.contains(said), "{said}: {shown}");
    }
}

#[test]
fn routers_are_what_their_configs_say() {
    let of = |config: Value| experts(&read(config).unwrap(), 0).unwrap();
    assert_eq!(of(qwen3_moe()).scoring, Scoring::SoftmaxOfChosen);
    assert_eq!(
        of(with(qwen3_moe(), "norm_topk_prob", json!(false))).scoring,
        Scoring::SoftmaxOfAll
    );
    let olmoe = with(llama(), "num_experts", json!(8));
    let olmoe = with(with(olmoe, "num_experts_per_tok", json!(2)), "model_type", json!("olmoe"));
    assert_eq!(of(olmoe.clone()).scoring, Scoring::SoftmaxOfAll);
    assert_eq!(of(olmoe.clone()).each.ffn, 96);
    assert_eq!(refusal(olmoe, "clip_qkv", json!(8.0)).class(), "UnsupportedModelError");
    let gate = |config: Value| of(config).each.gate;
    assert_eq!(gate(gpt_oss()), Gate::ClampedSwiglu { alpha: 1.702, limit: 7.0 });
    let limit = with(gpt_oss(), "swiglu_limit", json!(5.0));
    assert_eq!(gate(limit), Gate::ClampedSwiglu { alpha: 1.702, limit: 5.0 });
    // Dense layers among them.
    let every =
        with(with(qwen3_moe(), "decoder_sparse_step", json!(2)), "mlp_only_layers", json!([3]));
    let spec = read(every).unwrap();
    let sparse: Vec<_> = (0..6).filter(|layer| experts(&spec, *layer).is_some()).collect();
    assert_eq!(sparse, [1, 5]);
    assert!(matches!(spec.layers[3].mlp, Mlp::Gated(Gated { ffn: 6144, .. })));
}

#[test]
fn routers_that_are_not_understood_are_refused() {
    for (config, key, value) in [
        (qwen3_moe(), "num_experts_per_tok", json!(129)),
        (qwen3_moe(), "num_experts", json!(0)),
        (qwen3_moe(), "num_experts", json!(1 << 18)),
        (qwen3_moe(), "moe_intermediate_size", json!(null)),
        (qwen3_moe(), "mlp_only_layers", json!([48])),
        (qwen3_moe(), "decoder_sparse_step", json!(0)),
        (qwen3_moe(), "n_shared_experts", json!(1)),
        (qwen3_moe(), "hidden_act", json!("gelu")),
        (gpt_oss(), "experts_per_token", json!(5)),
        (gpt_oss(), "attention_bias", json!(false)),
        (gpt_oss(), "swiglu_limit", json!(0)),
        (gpt_oss(), "layer_types", json!(["full_attention"])),
        (gpt_oss(), "quantization_config", json!({"quant_method": "mxfp4", "bits": 3})),
    ] {
        let error = refusal(config, key, value);
        assert!(matches!(error.class(), "UnsupportedModelError" | "LoadError"), "{key}: {error}");
        assert!(error.to_string().contains(key), "{key}: {error}");
    }
}

const RELEASED_ONLY: [&str; 3] = ["use_attention_comm", "use_mlp_comm", "swa_layers"];

/// A temporary folder with a config and, beside it, what it recommends.
fn folder_with(test: &str, generation: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("kie-model-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    let config = with(with(llama(), "eos_token_id", json!(2)), "bos_token_id", json!(1));
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    std::fs::write(path.join(GENERATION), generation).unwrap();
    path
}

#[test]
fn generation_config_is_merged_and_checked() {
    let text = r#"{"eos_token_id": [7, 9], "bos_token_id": 3, "do_sample": true, "temperature": 0.6,
        "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "max_length": 50}"#;
    let folder = folder_with("generation", text);
    let spec = Spec::read(&folder).unwrap();
    assert_eq!((spec.bos, spec.eos), (Some(3), vec![7, 9]));
    let generation = Generation::read(&folder).unwrap();
    let wanted = Generation {
        bos: Some(3),
        eos: vec![7, 9],
        do_sample: Some(true),
        temperature: Some(0.6),
        top_p: Some(0.95),
        top_k: Some(20),
        min_p: Some(0.1),
        repetition_penalty: Some(1.05),
    };
    assert_eq!(generation, wanted);
    for (text, named) in [
        (r#"{"eos_token_id": 100}"#, "100"),
        (r#"{"top_k": 2.5}"#, "top_k"),
        (r#"{"temperature": -1}"#, "temperature"),
        (r#"{"do_sample": "yes"}"#, "do_sample"),
        (r#"{"eos_token_id": 1, "eos_token_id": 2}"#, "twice"),
        ("[]", "a list"),
    ] {
        std::fs::write(folder.join(GENERATION), text).unwrap();
        let error = Spec::read(&folder).unwrap_err();
        assert_eq!(error.class(), "LoadError");
        let message = error.to_string();
        assert!(message.contains(named) && message.contains(GENERATION), "{message}");
    }
    std::fs::remove_file(folder.join(GENERATION)).unwrap();
    let spec = Spec::read(&folder).unwrap();
    assert_eq!((spec.bos, spec.eos), (Some(1), vec![2]));
    std::fs::remove_dir_all(folder).unwrap();
}

/// Two layers of different shapes, in the project's own dialect.
fn hybrid() -> Value {
    let narrow = json!({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "rope_theta": 1e4});
    let wide = json!({"num_attention_heads": 2, "head_dim": 32, "intermediate_size": 64,
        "rope_theta": 5e2, "sliding_window": 8, "attention_bias": true, "qk_norm": true});
    json!({"model_type": "kie_hybrid", "hidden_size": 64, "num_hidden_layers": 2,
        "vocab_size": 100, "max_position_embeddings": 128, "layers": [narrow, wide]})
}

#[test]
fn layers_of_different_shapes() {
    let spec = read(hybrid()).unwrap();
    let second = spec.layers[1].mixer.attention().unwrap();
    assert_eq!((second.heads, second.kv_heads, second.window), (2, 2, Some(8)));
    assert_eq!((first(&spec).head_dim, first(&spec).window), (16, None));
    let shape = |role: Role| {
        spec.tensors.iter().find(|tensor| tensor.role == role).map(|tensor| tensor.shape.clone())
    };
    assert_eq!(
        [shape(Role::K(0)), shape(Role::K(1))],
        [[32, 64], [64, 64]].map(|s| Some(s.into()))
    );
    assert_eq!(shape(Role::Down(1)), Some(vec![64, 64]));
    assert_eq!([shape(Role::QBias(0)), shape(Role::QBias(1))], [None, Some(vec![64])]);
    assert_eq!([shape(Role::KNorm(0)), shape(Role::KNorm(1))], [None, Some(vec![32])]);
    let text = spec.to_string();
    for part in ["1 of 4/2 heads of 16, MLP 96 + 1 of 2/2 heads of 32, MLP 64", "window 8 on 1"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn layers_that_make_no_model() {
    let cases = [
        (
            "num_key_value_heads",
            json!(3),
            "num_key_value_heads: not supported (4 query heads on 3)",
        ),
        ("head_dim", json!(15), "head_dim: not supported (15"),
        ("rope_theta", json!(0), "layers[0].rope_theta"),
        ("intermediate_size", json!(null), "layers[0].intermediate_size"),
        ("rope_scaling", json!({"factor": 2}), "layers[0].rope_scaling"),
    ];
    for (key, value, told) in cases {
        let mut config = hybrid();
        config["layers"][0][key] = value;
        let error = read(config).unwrap_err().to_string();
        assert!(error.contains(told), "{told:?} in {error:?}");
    }
    for (value, told) in [
        (json!([hybrid()["layers"][0]]), "1 entries for 2"),
        (json!([1, 2]), "an object layers[0]."),
        (json!({}), "a list of objects"),
    ] {
        let error = refusal(hybrid(), "layers", value).to_string();
        assert!(error.contains(told), "{told:?} in {error:?}");
    }
}

#[test]
fn a_spec_reads_well() {
    let text = read(laneformer_2b()).unwrap().to_string();
    for part in ["laneformer", "2320.1 M", "15 layers x 3072", "8 lanes", "window 512 on 5 layers"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
}

/// The yardstick of `tools/fixtures/rope.py`: what turns by how much, in float64.
#[test]
fn rotary_tables_are_those_of_the_float64_reference() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let base = json::read(&data.join("own_llama_f16/config.json")).unwrap();
    let cases = json::read(&data.join("rope/cases.json")).unwrap();
    let bytes = std::fs::read(data.join("rope/golden_turns.safetensors")).unwrap();
    let golden = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let numbers = |name: &str| -> Vec<f64> {
        let tensor = golden.tensor(name).unwrap();
        tensor.data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
    };
    let mut seen = std::collections::BTreeSet::new();
    for (name, case) in cases.as_object().unwrap() {
        let mut config = base.clone();
        config.as_object_mut().unwrap().extend(case["changes"].as_object().unwrap().clone());
        let spec = read(config).unwrap();
        let (attention, served) = (first(&spec), case["max_seq_len"].as_u64().unwrap() as usize);
        assert!(served <= spec.stretched, "{name}: {}", spec.stretched);
        let turns = attention.rope.turns(attention.head_dim, &spec.rope_factors, served);
        let wanted = numbers(&format!("{name}.frequencies"));
        assert_eq!(turns.frequencies.len(), wanted.len(), "{name}");
        for (got, wanted) in turns.frequencies.iter().zip(&wanted) {
            assert!((got - wanted).abs() <= 1e-13 * wanted, "{name}: {got} {wanted}");
        }
        let length = numbers(&format!("{name}.length"))[0];
        assert!((turns.length - length).abs() <= 1e-13, "{name}: {} {length}", turns.length);
        seen.insert(format!("{:?}", std::mem::discriminant(&attention.rope.scaling)));
    }
    assert_eq!(seen.len(), 5, "every scaling");
}

/// `llama()` with an object of rope scaling.
fn scaled(scaling: Value) -> Value {
    with(llama(), "rope_scaling", scaling)
}

#[test]
fn contexts_are_stretched_by_what_the_scaling_says() {
    let stretched = |scaling: Value| read(scaled(scaling)).unwrap().stretched;
    assert_eq!(stretched(json!({"type": "linear", "factor": 4.0})), 128, "the stated context");
    assert_eq!(stretched(json!({"type": "dynamic", "factor": 4.0})), 512);
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64});
    assert_eq!(stretched(yarn.clone()), 512);
    let short = with(yarn, "factor", json!(1.5));
    assert_eq!(stretched(short), 128, "no less than is stated");
}

#[test]
fn a_bad_rope_scaling_is_named() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    let long = json!({"rope_type": "longrope", "short_factor": vec![1.0; 8],
        "long_factor": vec![2.0; 8],
        "original_max_position_embeddings": 32});
    read(scaled(yarn.clone())).unwrap();
    read(scaled(long.clone())).unwrap();
    for (scaling, key, value, told) in [
        (&yarn, "factor", json!(0.5), "rope_scaling.factor"),
        (&yarn, "factor", json!("4"), "rope_scaling.factor"),
        (&yarn, "factor", json!(null), "rope_scaling.factor"),
        (&yarn, "beta_fast", json!(0.5), "below beta_slow"),
        (&yarn, "truncate", json!(1), "rope_scaling.truncate"),
        (&yarn, "attention_factor", json!(-1), "rope_scaling.attention_factor"),
        (&yarn, "attention_factor", json!(1e300), "attention_factor"),
        (&yarn, "beta_medium", json!(2), "rope_scaling.beta_medium"),
        (&yarn, "rope_type", json!("ntk"), "linear, dynamic, llama3, yarn and longrope"),
        (&yarn, "type", json!("linear"), "rope_scaling.type"),
        (&yarn, "partial_rotary_factor", json!(0.5), "rope_scaling.partial_rotary_factor"),
        (&long, "short_factor", json!([1.0]), "1 numbers; one a pair wanted, 8"),
        (&long, "long_factor", json!(vec![0.0; 8]), "a list of numbers above 0"),
        (&long, "long_factor", json!(vec![0.01; 8]), "radians a position"),
        (&long, "long_factor", json!(null), "rope_scaling.long_factor"),
        (&long, "original_max_position_embeddings", json!(null), "or a factor"),
    ] {
        let error = read(scaled(with(scaling.clone(), key, value))).unwrap_err();
        assert!(matches!(error.class(), "UnsupportedModelError" | "LoadError"), "{error}");
        assert!(error.to_string().contains(told), "{told:?} in {:?}", error.to_string());
    }
}

fn gemma3() -> Value {
    json!({"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 2048,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24,
        "sliding_window": 16, "rms_norm_eps": 1e-6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
}

#[test]
fn gemma3_layers_norms_and_bases() {
    let spec = read(gemma3()).unwrap();
    let windows: Vec<_> = spec.layers.iter().map(LayerSpec::window).collect();
    let slides = Some(16);
    assert_eq!(windows, [slides, slides, slides, slides, slides, None, slides]);
    let ropes: Vec<_> = spec
        .layers
        .iter()
        .map(|l| {
            let attention = l.mixer.attention().unwrap();
            (attention.rope.theta, attention.rope.scaling)
        })
        .collect();
    let local = (1e4, Scaling::None);
    let global = (1e6, Scaling::Linear { factor: 8.0 });
    assert_eq!(ropes, [local, local, local, local, local, global, local]);
    assert_eq!(spec.embedding_factor, 8.0);
    assert!(spec.tied && spec.ignored.is_empty(), "tied unless something else is said");
    let stored = |role| spec.tensors.iter().find(|t| t.role == role).unwrap();
    let norm = stored(Role::MlpOutNorm(3));
    assert_eq!(norm.name, "model.layers.3.post_feedforward_layernorm.weight");
    assert_eq!(norm.stored, Stored::Less { one: 1.0, factor: 1.0 });
    let factor = (32.0f64 / 24.0).sqrt() as f32;
    assert_eq!(stored(Role::QNorm(0)).stored, Stored::Less { one: 1.0, factor });
    assert_eq!(stored(Role::Down(0)).stored, Stored::Whole);
    for (key, value, told) in [
        ("final_logit_softcapping", json!(30.0), "soft caps"),
        ("hidden_activation", json!("gelu"), "only gelu_pytorch_tanh"),
        ("use_bidirectional_attention", json!(true), "only false"),
        ("layer_types", json!(["full_attention"]), "1 entries for 7"),
        ("query_pre_attn_scalar", json!(0), "query_pre_attn_scalar"),
    ] {
        let error = refusal(gemma3(), key, value).to_string();
        assert!(error.contains(told), "{told:?} in {error:?}");
    }
}

#[test]
fn phi3_matrices_of_several_parts() {
    let phi3 =
        with(with(llama(), "model_type", json!("phi3")), "partial_rotary_factor", json!(0.75));
    let spec = read(phi3.clone()).unwrap();
    assert_eq!(first(&spec).rope.features, 12);
    let stored = |role| {
        let tensor = spec.tensors.iter().find(|t| t.role == role).unwrap();
        (tensor.name.as_str(), tensor.shape[0], tensor.stored)
    };
    let qkv = "model.layers.1.self_attn.qkv_proj.weight";
    assert_eq!(stored(Role::Q(1)), (qkv, 64, Stored::Rows { first: 0, of: 128 }));
    assert_eq!(stored(Role::V(1)), (qkv, 32, Stored::Rows { first: 96, of: 128 }));
    let gate_up = "model.layers.0.mlp.gate_up_proj.weight";
    assert_eq!(stored(Role::Up(0)), (gate_up, 96, Stored::Rows { first: 96, of: 192 }));
    // A window that sees the whole context is none.
    let windowed = with(phi3.clone(), "sliding_window", json!(128));
    assert!(read(windowed).unwrap().layers.iter().all(|l| l.window().is_none()));
    let windowed = with(phi3.clone(), "sliding_window", json!(127));
    assert!(read(windowed).unwrap().layers.iter().all(|l| l.window() == Some(127)));
    for (key, value, told) in [
        ("partial_rotary_factor", json!(0.7), "11 of 16 features turn"),
        ("partial_rotary_factor", json!(1.5), "24 of 16 features turn"),
        ("lm_head_bias", json!(true), "lm_head_bias"),
        (
            "quantization_config",
            json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
            "matrices of several parts",
        ),
    ] {
        let error = refusal(phi3.clone(), key, value).to_string();
        assert!(error.contains(told), "{told:?} in {error:?}");
    }
}

#[test]
fn olmo2_norms_stand_behind() {
    let spec = read(with(llama(), "model_type", json!("olmo2"))).unwrap();
    assert!(spec.layers.iter().all(|l| l.norms == Norms::Behind));
    let shape = |role| spec.tensors.iter().find(|t| t.role == role).map(|t| t.shape.clone());
    assert_eq!(shape(Role::QNorm(0)), Some(vec![64]));
    assert_eq!(shape(Role::KNorm(0)), Some(vec![32]));
    assert_eq!([shape(Role::AttentionNorm(0)), shape(Role::MlpNorm(1))], [None, None]);
    assert_eq!(shape(Role::MlpOutNorm(1)), Some(vec![64]));
}

#[test]
fn smollm3_layers_without_positions() {
    let smollm3 = with(with(llama(), "model_type", json!("smollm3")), "pretraining_tp", json!(2));
    let turned = |spec: Spec| {
        let features = spec.layers.iter().map(|l| {
            let attention = l.mixer.attention().unwrap();
            attention.rope.features
        });
        features.collect::<Vec<_>>()
    };
    assert_eq!(
        turned(read(with(smollm3.clone(), "no_rope_layers", json!([1, 0]))).unwrap()),
        [16, 0]
    );
    let four = with(smollm3.clone(), "num_hidden_layers", json!(4));
    assert_eq!(turned(read(four).unwrap()), [16, 16, 16, 0], "every fourth");
    for value in [json!([1]), json!([1, 2]), json!("1, 0")] {
        let error = refusal(smollm3.clone(), "no_rope_layers", value).to_string();
        assert!(error.contains("no_rope_layers"), "{error}");
    }
}
