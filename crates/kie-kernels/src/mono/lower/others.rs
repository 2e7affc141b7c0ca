//! Shared memory besides vectors, parts and the ring.

use super::latent::LatentPartition;
use super::model::Model;
use crate::mono::wire;

/// All of it, about: by this, slots are chosen; what fits in the end is the layout's to say.
pub const ABOUT_BYTES: u32 = 16 << 10;
/// The largest table of pages that stands in shared memory.
const TABLE_WORDS_MAX: u32 = 4096;

/// Besides vectors, parts, ring and table of pages, at most: what each layer says, scores of heads
/// that attend to latents, and what all models have.
pub fn model_bytes(model: &Model) -> u32 {
    let latents = model.classes.iter().any(|c| c.latent.is_some());
    let scores = if latents { 4 * LatentPartition::score_floats(model.parts) } else { 0 };
    (7 << 10) + scores + model.layers() * size_of::<wire::Layer>() as u32
}

/// Rotations of what so many threads own, a pair each.
pub const fn owned_bytes(threads: u32) -> u32 {
    8 * threads
}

/// A table of pages of so many words: none where there are too many.
pub const fn table_bytes(words: u32) -> u32 {
    if words <= TABLE_WORDS_MAX {
        4 * words
    } else {
        0
    }
}
