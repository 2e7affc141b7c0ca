//! A layer's numbers that are in no product, as floats: sinks, biases of attention's output, of the
//! router and of experts, norms of latents, and what a delta rule has. Each layer has its own one
//! after another (`wire::Layer::extras`).

use super::matrix::Matrix;
use super::model::Model;
use super::partition::Partition;

/// Where each begins in a layer's, and how many there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extras {
    /// Of each head, in the base that scores have.
    pub sinks: u32,
    /// Of each row of the residual that blocks have.
    pub output_bias: u32,
    /// Of each row of the router that blocks have.
    pub router_bias: u32,
    /// Norms of the latents of queries, and of keys and values.
    pub latent_norms: [u32; 2],
    /// Corrections of experts' scores.
    pub correction: u32,
    /// Of each expert, of each row that blocks have: gate and up in turn.
    pub gate_up_bias: u32,
    /// Of each expert, as of attention's output.
    pub down_bias: u32,
    /// Of a delta rule: taps of each channel of q, k and v of each key head, ...
    pub conv: u32,
    /// ... each head's minus e^decay, ...
    pub decay: u32,
    /// ... its bias, ...
    pub decay_bias: u32,
    /// ... and the scale of the norm of its output, all heads have one.
    pub output_norm: u32,
    /// All.
    pub count: u32,
}

impl Extras {
    /// Of the layers of a class.
    pub fn new(model: &Model, partition: &Partition, class: usize) -> Self {
        let (c, part) = (&model.classes[class], &partition.classes[class]);
        let mut end = 0;
        let mut next = |is_there: bool, count: u32| {
            let count = if is_there { count } else { 0 };
            let at = end;
            end += count;
            at
        };
        let rows = |m| part.tiling(m).rows * partition.blocks;
        let sinks = next(c.sinks, c.heads.next_multiple_of(2));
        let output_bias = next(c.output_bias, rows(Matrix::Output));
        let latents = part.latent.map_or([0; 2], |latent| [latent.query_rank, latent.rank]);
        let latent_norms = latents.map(|count| next(true, count));
        let router = c.experts.map_or(0, |_| rows(Matrix::Router));
        let router_bias = next(c.experts.is_some_and(|e| e.router_bias), router);
        let count = c.experts.map_or(0, |e| e.count);
        let correction = next(c.experts.is_some_and(|e| e.correction), count);
        let biased = c.experts.is_some_and(|e| e.bias);
        let gate_up_bias = next(biased, count * rows(Matrix::GateUp));
        let down_bias = next(biased, count * rows(Matrix::Down));
        let (taps, key_dim) = c.delta.map_or((0, 0), |delta| (delta.taps, delta.key_dim));
        let is_delta = c.delta.is_some();
        let channels = 2 * key_dim + c.group() * part.head_dim;
        let conv = next(is_delta, c.kv_heads * channels * taps);
        let decay = next(is_delta, c.heads);
        let decay_bias = next(is_delta, c.heads);
        let output_norm = next(is_delta, part.head_dim);
        Self {
            sinks,
            output_bias,
            router_bias,
            latent_norms,
            correction,
            gate_up_bias,
            down_bias,
            conv,
            decay,
            decay_bias,
            output_norm,
            count: end,
        }
    }
}
