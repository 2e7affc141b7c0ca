//! Qwen2 and Qwen2.5 ("Qwen2 Technical Report", 2024): biases on q, k and v, and a window on the
//! layers from `max_window_layers` on, only where `use_sliding_window` is true.

use super::config::Config;
use super::spec::Spec;
use super::transformer;
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits { qkv_bias: true, windows, ..transformer::Traits::LLAMA };
    transformer::spec(config, &traits)
}

/// The windows of a Qwen2 or Qwen3 model. `layer_types` decides where it is given, otherwise
/// `max_window_layers`; without `use_sliding_window` there are none.
pub(super) fn windows(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    let used = config.flag_or("use_sliding_window", false)?;
    let window = config.optional_size("sliding_window")?.filter(|_| used);
    let first = config.integer_or("max_window_layers", 28)?;
    let types = transformer::windowed(config, layers)?;
    if used && window.is_none() {
        return config.unsupported("use_sliding_window", "true without a sliding_window");
    }
    let Some(types) = types else {
        let windowed = |layer: usize| window.filter(|_| layer as i64 >= first);
        return Ok((0..layers).map(windowed).collect());
    };
    if window.is_none() && types.contains(&true) {
        return config.unsupported("layer_types", "a window that is switched off");
    }
    Ok(types.into_iter().map(|windowed| window.filter(|_| windowed)).collect())
}
