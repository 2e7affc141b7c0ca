//! What passes through a block's ring in a step, in order, and where each layer's own is: weights,
//! norms, biases, pages. Decoding, prefill and packing walk these tables; nothing multiplies a
//! layer's number by a layer's size.

use super::compressed::{entries_bytes, row_bytes, sums_bytes};
use super::extras::Extras;
use super::matrix::Matrix;
use super::model::{Layer, Model, MOST_POOLS};
use super::partition::Partition;
use super::tiling::Tiling;
use crate::abi::PAGE;
use crate::mono::wire;

/// Where the stages of a segment come from (args.h's `SegmentSource`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A block's weights: the same every step.
    Fixed,
    /// A block's pages of the layer: as many as positions ask for.
    Pages,
    /// A block's part of gate and up of the experts that the device chose, `stages` of each.
    GateUp,
    /// The same of down.
    Down,
}

/// A run of stages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where they come from.
    pub source: Source,
    /// The layer; of the head's, one behind the last.
    pub layer: u32,
    /// Bytes from the beginning of a block's stream; of experts, from that of the layer's first one
    /// to a block's part of the matrix.
    pub offset: u64,
    /// How many stages.
    pub stages: u32,
    /// Bytes of each.
    pub bytes: u32,
}

impl Segment {
    /// As launches have it.
    pub const fn wire(&self) -> wire::Segment {
        let Self { offset: at, stages, bytes, layer, .. } = *self;
        wire::Segment { at, stages, bytes, source: self.source as u32, layer }
    }
}

/// The segments of a step: of each layer its matrices and, behind the first one, its pages; then
/// the head's.
pub fn segments(model: &Model, partition: &Partition) -> Vec<Segment> {
    let offsets = layer_offsets(model, partition);
    let mut bank = 0;
    let mut all = Vec::new();
    for (layer, l) in model.layer.iter().enumerate() {
        let class = &partition.classes[l.class];
        let layer = layer as u32;
        for (matrix, t) in class.matrices() {
            let (stages, bytes) = (t.stages, t.stage_bytes);
            let (source, at) = match (class.is_chosen(matrix), matrix) {
                (true, Matrix::GateUp) => (Source::GateUp, bank),
                (true, _) => (Source::Down, bank),
                (false, _) => (Source::Fixed, offsets[layer as usize]),
            };
            let offset = at + matrix_offset(partition, l.class, matrix);
            all.push(Segment { source, layer, offset, stages, bytes });
            let queries = class.compressed.is_some() && matrix == Matrix::QueryUp;
            if matrix.is_before_pages() || queries {
                let source = Source::Pages;
                all.push(Segment { source, layer, offset: 0, stages: 0, bytes: 0 });
            }
        }
        let Some(experts) = &class.experts else { continue };
        bank += u64::from(experts.count) * u64::from(partition.blocks) * class.piece_bytes();
    }
    let mut offset = offsets[model.layer.len()];
    let passes = (0..partition.head_passes).map(|_| partition.head);
    for t in passes.chain(partition.tail) {
        let (layer, stages, bytes) = (model.layers(), t.stages, t.stage_bytes);
        all.push(Segment { source: Source::Fixed, layer, offset, stages, bytes });
        offset += t.bytes();
    }
    all
}

/// Segments of all layers: the first one of the head's.
pub fn head_segment(model: &Model, partition: &Partition) -> u32 {
    let of = |l: &Layer| 1 + partition.classes[l.class].matrices().count() as u32;
    model.layer.iter().map(of).sum()
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

/// Where a matrix begins in its layer's part of a block's stream, or in its part of an expert.
pub fn matrix_offset(partition: &Partition, class: usize, matrix: Matrix) -> u64 {
    let class = &partition.classes[class];
    let chosen = class.is_chosen(matrix);
    let before = class.matrices().take_while(|(other, _)| *other != matrix);
    let alike = before.filter(|(other, _)| class.is_chosen(*other) == chosen);
    alike.map(|(_, tiling)| tiling.bytes()).sum()
}

/// Where each layer's experts begin in the bank.
pub fn bank_offsets(model: &Model, partition: &Partition) -> Vec<u64> {
    let each = |l: &Layer| {
        let class = &partition.classes[l.class];
        let count = class.experts.map_or(0, |e| u64::from(e.count));
        count * u64::from(partition.blocks) * class.piece_bytes()
    };
    let ends = model.layer.iter().scan(0, |end, l| Some(std::mem::replace(end, *end + each(l))));
    ends.collect()
}

/// Slots of the ring that all layers of a step of one column take; a prompt's steps have no head.
pub fn layer_slots(model: &Model, partition: &Partition) -> u32 {
    let of_layer = |l: &Layer| -> u32 {
        let class = &partition.classes[l.class];
        let of = |(matrix, tiling): (Matrix, &Tiling)| {
            let chosen = class.experts.filter(|_| class.is_chosen(matrix)).map_or(1, |e| e.chosen);
            let stacked = partition.stack(model, class, matrix, 1).map_or(1, |stack| stack.experts);
            chosen / stacked * tiling.stages
        };
        class.matrices().map(of).sum()
    };
    model.layer.iter().map(of_layer).sum()
}

/// What a layer has of a page of one of its pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PageShare {
    pool: u32,
    /// Its number among the pool's layers.
    number: u32,
    bytes: u32,
    recurrent: bool,
}

/// What a layer has of pages: keys and values, or a copy of its state; first those that its
/// [`wire::Layer`] names, then running softmaxes, entries and index keys.
fn page_shares(model: &Model, partition: &Partition, layer: &Layer) -> Vec<PageShare> {
    let (class, [pool, number]) = (&model.classes[layer.class], layer.pool);
    let bytes = page_share(model, partition, layer);
    let mut all = vec![PageShare { pool, number, bytes, recurrent: class.delta.is_some() }];
    let part = partition.classes[layer.class].compressed;
    let Some((of, tensors)) = class.compressed.zip(layer.compressed) else { return all };
    let Some((entries, part)) = of.entries.zip(part) else { return all };
    let [sums, entry, keys] = tensors.places;
    let [_, width, index_width] = part.widths;
    let count = entries.sets * part.channels_all();
    let bytes_of = |width| entries_bytes(width, entries.every, model.parts);
    let mut add = |pool, number, bytes, recurrent| {
        all.push(PageShare { pool, number, bytes, recurrent });
    };
    add(entries.pools[0], sums, sums_bytes(count), true);
    add(entries.pools[1], entry, bytes_of(width), false);
    if let Some(index) = entries.index {
        add(index.pool, keys, bytes_of(index_width), false);
    }
    all
}

/// What all layers have of pages.
fn all_shares(model: &Model, partition: &Partition) -> Vec<PageShare> {
    model.layer.iter().flat_map(|layer| page_shares(model, partition, layer)).collect()
}

/// Where each of [`page_shares`] begins in a page: layers of a pool stand there in the order of
/// their numbers in it.
pub fn page_offsets(model: &Model, partition: &Partition, layer: &Layer) -> Vec<u32> {
    let all = all_shares(model, partition);
    let begin = |share: PageShare| {
        let before = |other: &&PageShare| other.pool == share.pool && other.number < share.number;
        all.iter().filter(before).map(|other| other.bytes).sum()
    };
    page_shares(model, partition, layer).into_iter().map(begin).collect()
}

/// Bytes of a layer in a page of its pool: keys and values, or a copy of its state.
fn page_share(model: &Model, partition: &Partition, layer: &Layer) -> u32 {
    let (class, part) = (&model.classes[layer.class], &partition.classes[layer.class]);
    if let Some(delta) = &part.delta {
        return delta.state_bytes();
    }
    if let Some(latent) = &class.latent {
        return latent.kept() * PAGE as u32 * 2 * model.parts;
    }
    if let Some(compressed) = &part.compressed {
        return row_bytes(compressed.widths[0], model.parts) * PAGE as u32;
    }
    model.lanes * class.kv_heads * part.head_dim * PAGE as u32 * 2 * 2 * model.parts
}

/// Bytes of a page of each pool: all its layers'.
pub fn page_bytes(model: &Model, partition: &Partition) -> [u32; MOST_POOLS] {
    let all = all_shares(model, partition);
    std::array::from_fn(|pool| {
        all.iter().filter(|share| share.pool as usize == pool).map(|share| share.bytes).sum()
    })
}

/// Bytes of a state that a sequence goes on with, all its layers.
pub fn state_bytes(model: &Model, partition: &Partition) -> u64 {
    working_at(model, partition, u32::MAX)
}

/// How many of them so many sequences have: one is read, the other written.
pub const fn states_of_rows(slots: u32) -> u32 {
    2 * slots
}

/// Bytes of those, and of one behind each column that may be a draft.
pub fn working_bytes(model: &Model, partition: &Partition, slots: u32) -> u64 {
    u64::from(states_of_rows(slots) + partition.columns - 1) * state_bytes(model, partition)
}

/// Where a pool's states begin in one of those: behind the pools before it.
pub fn working_at(model: &Model, partition: &Partition, pool: u32) -> u64 {
    let all = all_shares(model, partition).into_iter();
    all.filter(|s| s.recurrent && s.pool < pool).map(|s| u64::from(s.bytes)).sum()
}

/// What differs between layers, as launches have it.
pub fn layers(model: &Model, partition: &Partition) -> Vec<wire::Layer> {
    let offsets = layer_offsets(model, partition);
    let (mut norm, mut head_norms, mut biases, mut extras) = (0, 0, 0, 0);
    let one = |(at, l): (usize, &Layer)| {
        let (class, part) = (&model.classes[l.class], &partition.classes[l.class]);
        let bit = |i: usize| u8::from(l.norms[i].rows > 1) << i;
        let wire = wire::Layer {
            stream: offsets[at],
            window: l.window,
            page_at: page_offsets(model, partition, l)[0],
            norm: [norm, norm + l.norms[0].rows],
            head_norms,
            biases,
            own: l.own,
            delay: l.delay,
            kind: l.class as u8,
            pool: l.pool[0] as u8,
            shares: u8::from(l.shares[0]) | u8::from(l.shares[1]) << 1,
            norm_lanes: bit(0) | bit(1),
            extras,
        };
        norm += l.norms[0].rows + l.norms[1].rows;
        head_norms += model.parts * class.head_norm_words(part.head_dim);
        if class.bias {
            biases += part.tiling(Matrix::Qkv).rows * partition.blocks;
        }
        extras += Extras::new(model, partition, l.class).count;
        wire
    };
    model.layer.iter().enumerate().map(one).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::abi::NormSpan;
    use crate::mono::lower::layout::{Kind, Layout};
    use crate::mono::lower::model::Class;
    use crate::mono::shapes::{model, nvidia};

    /// The usual shapes, and each with a second class for every third layer.
    fn models() -> Vec<Model> {
        let mut all: Vec<Model> = ["2b", "lane", "1b", "8b"].map(model).into();
        for mut hybrid in all.clone() {
            let one = hybrid.classes[0];
            let (heads, kv_heads) = (one.heads / 2, one.kv_heads / 2);
            let (head_dim, ffn) = (2 * one.head_dim, one.ffn / 2);
            let head_norm = Some(NormSpan::Head);
            let other = Class { heads, kv_heads, head_dim, ffn, bias: true, head_norm, ..one };
            hybrid.classes.push(other);
            for (at, layer) in hybrid.layer.iter_mut().enumerate() {
                layer.class = usize::from(at % 3 == 1);
                layer.norms[1].rows = if at % 2 == 1 { hybrid.lanes } else { 1 };
            }
            all.push(hybrid);
        }
        for model in &mut all {
            for (at, layer) in model.layer.iter_mut().enumerate() {
                layer.pool = [(at % 2) as u32, at as u32 / 2];
            }
        }
        all
    }

    /// Ranges that neither meet nor leave anything of `0..end`.
    fn covers(mut ranges: Vec<(u64, u64)>, end: u64, what: &str) {
        ranges.sort_unstable();
        let mut at = 0;
        for (from, bytes) in ranges {
            assert_eq!(from, at, "{what}");
            at += bytes;
        }
        assert_eq!(at, end, "{what}");
    }

    #[test]
    fn offsets_meet_nowhere_and_leave_nothing() {
        for model in models() {
            let partition = Partition::new(&model, &nvidia(), 4096).unwrap();
            let fixed = segments(&model, &partition).into_iter();
            let fixed = fixed.filter(|s| s.source == Source::Fixed);
            let bytes = |s: Segment| (s.offset, u64::from(s.stages) * u64::from(s.bytes));
            let end = partition.stream_bytes(&model);
            covers(fixed.map(bytes).collect(), end, "the stream");

            let layers = layers(&model, &partition);
            let each = model.layer.iter().zip(&layers);
            let norms = each.clone().flat_map(|(l, wire)| {
                [0, 1].map(|i| (u64::from(wire.norm[i]), u64::from(l.norms[i].rows)))
            });
            let rows = u64::from(model.norm_rows() - model.final_norm.rows);
            covers(norms.collect(), rows, "norms");
            for pool in 0..MOST_POOLS {
                let its = each.clone().filter(|(l, _)| l.pool[0] as usize == pool);
                let pages = its.map(|(l, wire)| {
                    (wire.page_at.into(), page_share(&model, &partition, l).into())
                });
                let end = page_bytes(&model, &partition)[pool].into();
                covers(pages.collect(), end, "pages");
            }
            let rows = |l: &Layer| partition.classes[l.class].tiling(Matrix::Qkv).rows;
            let biases = each
                .filter(|(l, _)| model.classes[l.class].bias)
                .map(|(l, wire)| (u64::from(wire.biases), u64::from(rows(l) * partition.blocks)));
            let all: Vec<_> = biases.collect();
            let end = all.iter().map(|(_, count)| count).sum();
            covers(all, end, "biases");
        }
    }

    #[test]
    fn layers_begin_where_their_first_segment_does() {
        for model in models() {
            let partition = Partition::new(&model, &nvidia(), 4096).unwrap();
            let all = segments(&model, &partition);
            for (at, layer) in layers(&model, &partition).iter().enumerate() {
                let class = model.layer[at].class;
                let its: Vec<_> = all.iter().filter(|s| s.layer == at as u32).collect();
                assert_eq!(its.len(), 5);
                assert_eq!(its[1].source, Source::Pages);
                let matrices = partition.classes[class].matrices();
                for ((matrix, tiling), s) in matrices.zip([its[0], its[2], its[3], its[4]]) {
                    let offset = layer.stream + matrix_offset(&partition, class, matrix);
                    assert_eq!(s.offset, offset, "{matrix:?} of layer {at}");
                    assert_eq!((s.stages, s.bytes), (tiling.stages, tiling.stage_bytes));
                }
            }
            assert_eq!(all[head_segment(&model, &partition) as usize].layer, model.layers());
        }
    }

    #[test]
    fn buffers_and_shared_memory_follow_each_other_and_fit_the_widest_class() {
        for model in models() {
            let partition = Partition::new(&model, &nvidia(), 4096).unwrap();
            for kind in [1, partition.columns].map(|columns| Kind::plain(columns, false)) {
                let layout = Layout::new(&model, &partition, kind).unwrap();
                let x = &layout.exchange;
                let at = [x.at_qkv, x.at_partial, x.at_attn, x.at_act, x.at_other, x.at_last];
                let more =
                    [x.at_candidate, x.at_more, x.at_order, x.at_tally, x.at_verdict, x.words];
                let order: Vec<_> = at.into_iter().chain(more).collect();
                assert!(order.is_sorted(), "{order:?}");
                let columns = u64::from(kind.columns);
                for (class, part) in layout.classes.iter().zip(&partition.classes) {
                    assert!(columns * class.words.q <= x.vec_q);
                    assert!(columns * class.words.a <= x.vec_a);
                    assert!(columns * class.words.f <= x.vec_f);
                    let partials = columns * u64::from(part.kv_splits) * class.words.partial;
                    assert!(partials <= x.vec_partial);
                    let down = part.tiling(Matrix::Down);
                    assert!(class.direct_down || down.k <= layout.vectors.stride_b);
                }
                let end = layout.ring.at + layout.ring.bytes;
                assert!(layout.at.end <= layout.ring.at && end <= partition.shared_max);
            }
        }
    }
}
