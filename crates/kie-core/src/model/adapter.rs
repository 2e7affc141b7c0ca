//! `adapter_config.json` of a LoRA adapter (Hu et al. 2021), as the PEFT library writes it: which
//! ranks and factors its matrices have. Which modules it changes, its tensors say.

use std::path::Path;

use serde_json::{Map, Value};

use super::config::Config;
use crate::error::Result;
use crate::json;

/// What the file says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AdapterConfig {
    rank: usize,
    alpha: f64,
    /// The factor is alpha / sqrt(rank) instead of alpha / rank.
    rank_stabilised: bool,
    /// Ranks and alphas of some modules, by the ends of their names.
    ranks: Vec<(String, f64)>,
    alphas: Vec<(String, f64)>,
    /// Ends of module names; a pattern is not looked at.
    pub(crate) targets: Vec<String>,
}

/// Keys that change nothing in what is merged.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Keys that change what an adapter is: as long as they are off.
const OFF: &[(&str, &str)] = &[
    ("use_dora", "DoRA, which scales each row by its norm"),
    ("modules_to_save", "whole modules beside the adapter's matrices"),
    ("fan_in_fan_out", "weights that are stored by columns"),
    ("lora_bias", "biases of the adapter's matrices"),
    ("layer_replication", "layers that are used several times"),
    ("megatron_config", "Megatron's parallel layers"),
    ("target_parameters", "parameters that are no modules"),
    ("trainable_token_indices", "rows of the embedding"),
    ("alora_invocation_tokens", "adapters that begin inside a prompt"),
    ("arrow_config", "several adapters at once"),
    ("use_qalora", "QALoRA"),
    ("use_bdlora", "block-diagonal matrices"),
    ("monteclora_config", "a sampled adapter"),
];

impl AdapterConfig {
    /// Reads the file in a folder.
    ///
    /// # Errors
    /// [`crate::Error::Load`] and [`crate::Error::UnsupportedModel`] name the key.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let file = folder.join("adapter_config.json");
        let value = json::read(&file)?;
        let config = Config::new(&value, &file)?;
        if config.text("peft_type")? != Some("LORA") {
            let got = config.get("peft_type").map_or("nothing".to_owned(), Value::to_string);
            return config.unsupported("peft_type", format!("{got}; only \"LORA\""));
        }
        for (key, what) in OFF {
            if config.get(key).is_some_and(|value| !super::config::switched_off(value)) {
                return config.unsupported(key, format!("{what}; only off"));
            }
        }
        match config.text("bias")? {
            None | Some("none") => {}
            Some(other) => return config.unsupported("bias", format!("{other:?}; only \"none\"")),
        }
        // Others change the weights that the adapter was made for, too.
        match config.get("init_lora_weights") {
            None | Some(Value::Bool(_)) => {}
            Some(Value::String(how)) if ["gaussian", "eva", "orthogonal"].contains(&&**how) => {}
            Some(other) => {
                let detail = format!("{other}; only of weights that stay as they are");
                return config.unsupported("init_lora_weights", detail);
            }
        }
        let targets = match config.need("target_modules")? {
            Value::String(_) => Vec::new(),
            _ => config.texts("target_modules")?.into_iter().flatten().map(str::to_owned).collect(),
        };
        let read = Self {
            rank: config.size("r")?,
            alpha: config.positive("lora_alpha")?,
            rank_stabilised: config.flag_or("use_rslora", false)?,
            ranks: pattern(&config, "rank_pattern")?,
            alphas: pattern(&config, "alpha_pattern")?,
            targets,
        };
        config.finish(HARMLESS)?;
        Ok(read)
    }

    /// Rank of a module's matrices, and the factor on their product.
    pub(crate) fn of(&self, module: &str) -> (usize, f64) {
        let found = |list: &[(String, f64)]| {
            list.iter().find(|(end, _)| ends_with(module, end)).map(|(_, number)| *number)
        };
        let rank = found(&self.ranks).unwrap_or(self.rank as f64);
        let alpha = found(&self.alphas).unwrap_or(self.alpha);
        (rank as usize, alpha / if self.rank_stabilised { rank.sqrt() } else { rank })
    }
}

/// Whether a module's name is `end`, or ends with it behind a dot.
pub(crate) fn ends_with(module: &str, end: &str) -> bool {
    module.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Numbers by the ends of module names. PEFT takes the keys for regular expressions: those that
/// are more than a name are refused.
fn pattern(config: &Config<'_>, key: &str) -> Result<Vec<(String, f64)>> {
    let none = Map::new();
    let map = match config.get(key) {
        None => &none,
        Some(Value::Object(map)) => map,
        Some(other) => return config.unsupported(key, format!("{other}; an object is wanted")),
    };
    let entry = |(name, value): (&String, &Value)| {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        if !name.chars().all(plain) {
            return config.unsupported(key, format!("{name:?}; only ends of module names"));
        }
        let whole = key == "alpha_pattern" || value.as_u64().is_some();
        match value.as_f64().filter(|n| *n > 0.0 && n.is_finite() && whole) {
            Some(number) => Ok((name.clone(), number)),
            None => config.unsupported(key, format!("{name:?}: {value}; a number above 0")),
        }
    };
    map.iter().map(entry).collect()
}
