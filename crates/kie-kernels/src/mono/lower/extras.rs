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
    /// Of attention over entries: norms of the key, of entries and of index keys, ...
    pub compressed_norms: [u32; 3],
    /// ... what scores of entries, and of index keys, are beside, by the place in an entry, ...
    pub entry_biases: [u32; 2],
    /// ... and where the layer's running softmaxes, entries and index keys stand in their pages, as
    /// integers.
    pub places: u32,
    /// The experts of each token, as integers.
    pub token_experts: u32,
    /// What attention, and the mlp, takes of several residual streams by (lower/hyper.rs).
    pub hyper: [u32; 2],
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
        let latents = match (&part.latent, &part.compressed) {
            (Some(latent), _) => [latent.query_rank, latent.rank],
            (None, Some(of)) => [of.query_rank, 0],
            (None, None) => [0; 2],
        };
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
        let compressed = part.compressed;
        let widths = compressed.map_or([0; 3], |of| of.widths);
        let compressed_norms = widths.map(|width| next(true, width));
        let of_entries = c.compressed.and_then(|of| of.entries);
        let places = of_entries.map_or(0, |of| of.sets * of.every);
        let entry_biases = [widths[1], widths[2]].map(|width| next(true, places * width));
        let places = next(compressed.is_some(), 3);
        let by_token = c.experts.filter(|e| e.by_token).map_or(0, |e| e.chosen);
        let token_experts = next(by_token > 0, model.vocab_all * by_token);
        let owned = partition.blocks * partition.residual;
        let module = model.hyper.map_or(0, |hyper| hyper.numbers(owned, true));
        let hyper = [0; 2].map(|_| next(module > 0, module));
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
            compressed_norms,
            entry_biases,
            places,
            token_experts,
            hyper,
            count: end,
        }
    }

    /// How many the head has, behind the last layer's.
    pub fn of_head(model: &Model, partition: &Partition) -> u32 {
        model.hyper.map_or(0, |hyper| hyper.numbers(partition.blocks * partition.residual, false))
    }
}
