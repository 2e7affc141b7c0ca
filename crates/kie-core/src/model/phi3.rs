//! Phi-3 and Phi-4 ("Phi-3 Technical Report", 2024): Llama with q, k and v in one matrix, gate and
//! up in another, and, in the small Phi-4, heads that turn in part.

use super::config::Config;
use super::spec::{Role, Spec, Stored};
use super::{mistral, transformer};
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits {
        partial_rope: true,
        windows: mistral::windows,
        harmless: &["embd_pdrop", "full_attn_mod", "interpolate_factor", "resid_pdrop"],
        ..transformer::Traits::LLAMA
    };
    let mut spec = transformer::spec(config, &traits)?;
    if config.flag_or("lm_head_bias", false)? {
        return config.unsupported("lm_head_bias", "true; only false");
    }
    if spec.quantization.is_some() {
        let detail = "matrices of several parts are read in 16 or 32 bits only";
        return config.unsupported("quantization_config", detail);
    }
    let rows = |spec: &Spec, role: Role| {
        let found = spec.tensors.iter().find(|tensor| tensor.role == role);
        found.map_or(0, |tensor| tensor.shape[0])
    };
    for layer in 0..spec.layers.len() {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let qkv = [Role::Q(layer), Role::K(layer), Role::V(layer)];
        let gate_up = [Role::Gate(layer), Role::Up(layer)];
        for (parts, name) in
            [(&qkv[..], name("self_attn.qkv_proj")), (&gate_up[..], name("mlp.gate_up_proj"))]
        {
            let of = parts.iter().map(|role| rows(&spec, *role)).sum();
            let mut first = 0;
            for tensor in spec.tensors.iter_mut().filter(|t| parts.contains(&t.role)) {
                tensor.name.clone_from(&name);
                tensor.stored = Stored::Rows { first, of };
                first += tensor.shape[0];
            }
        }
    }
    Ok(spec)
}
