//! What passes through a block's ring in a step, in order, and where each layer of the stream
//! begins: decoding, prefill and packing walk this one table.

use super::model::Model;
use super::partition::{Matrix, Partition};

/// A run of stages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Bytes from the beginning of a block's stream.
    pub offset: u64,
    /// How many stages.
    pub stages: u32,
    /// Bytes of each.
    pub bytes: u32,
}

/// The segments of a step: four a layer, then the head's.
pub fn segments(model: &Model, partition: &Partition) -> Vec<Segment> {
    let layers = model.layer.iter().flat_map(|l| partition.classes[l.class].tilings);
    let passes = (0..partition.head_passes).map(|_| partition.head);
    let mut offset = 0;
    let all = layers.chain(passes).chain(partition.tail);
    all.map(|t| {
        let segment = Segment { offset, stages: t.stages, bytes: t.stage_bytes };
        offset += t.bytes();
        segment
    })
    .collect()
}

/// Where each layer begins in a block's stream, and behind the last one the head.
pub fn layer_offsets(model: &Model, partition: &Partition) -> Vec<u64> {
    let mut offset = 0;
    let mut offsets = vec![0];
    for layer in &model.layer {
        offset += partition.classes[layer.class].layer_bytes();
        offsets.push(offset);
    }
    offsets
}

/// Where a matrix begins in its layer's part of a block's stream.
pub fn matrix_offset(partition: &Partition, class: usize, matrix: Matrix) -> u64 {
    let before = &partition.classes[class].tilings[..matrix as usize];
    before.iter().map(|t| t.bytes()).sum()
}

/// Stages of all layers of a step; a prompt's steps have no head.
pub fn layer_stages(model: &Model, partition: &Partition) -> u32 {
    let layers = model.layer.iter().flat_map(|l| partition.classes[l.class].tilings);
    layers.map(|t| t.stages).sum()
}
