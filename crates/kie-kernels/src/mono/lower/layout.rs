//! Where a decode kernel has what: the words of the exchange, and a block's shared memory. Of one
//! kernel, since several columns need more of both.

use super::latent::LatentPartition;
use super::matrix::Matrix;
use super::model::{Class, Model};
use super::partition::{ClassPartition, Partition, PARTS_A, PARTS_B};
use super::segments;
use super::tiling::{Stack, Tiling};
use crate::abi::{HeadMode, NormSpan, PAGE};

use crate::error::{Error, Result};
use crate::mono::wire;

/// Threads that exchange registers; a machine's warp is one or two of these.
pub const TEAM: u32 = 32;
/// Rounds that narrow a filter, bins of a round, words of its counts (ops/filter.h).
pub const ROUNDS: u32 = 13;
/// See above.
pub const BINS: u32 = 16;
/// See above.
pub const COUNT_WORDS: u32 = 3 * BINS;
/// A partial of attention: for each head and each 16 features a cache line of its own, 8 words of
/// the output, then log2 of the mass. One mass for all would be one line that every warp of every
/// block reads.
pub const PARTIAL_LINE: u32 = 16;
/// See above.
pub const PARTIAL_LSE: u32 = 8;
/// Slots of a ring, at most.
const SLOTS_MAX: u32 = 64;
/// Of the layers' table, which has 8-byte numbers.
const LAYERS_ALIGN: u32 = 8;
/// Sums of squares where norms of q and k are over all heads: of the residual, of q, of k.
const NORM_SETS_HEADS: u32 = 3;
/// The same where a layer predicts further tokens: of the embedding, of the residual, and of that
/// normed.
const NORM_SETS_MTP: u32 = 3;
/// Neighbouring columns of a vector stand 16 banks apart: padding, in halves.
pub const COLUMN_PAD: u32 = 32;

/// Whole cache lines of words.
pub const fn lines_of(words: u64) -> u64 {
    words.next_multiple_of(16)
}

/// The words of the exchange, as offsets from one base; vectors of all columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// Buffers that layers use in rotation (exchange.h says why one is free again).
    pub num_buffers: u32,
    /// The same of what other lanes want.
    pub num_buffers_other: u32,
    /// Words of one column of the residual, all its parts: whole cache lines, the last may be
    /// padding.
    pub words_h: u64,
    /// Words of the residual, and of the widest class's q k v, partials, attention, activations.
    pub vec_h: u64,
    /// See above.
    pub vec_q: u64,
    /// See above.
    pub vec_partial: u64,
    /// See above.
    pub vec_a: u64,
    /// See above.
    pub vec_f: u64,
    /// Words of a column of the router's logits, and of all columns.
    pub words_logits: u64,
    /// See above.
    pub vec_logits: u64,
    /// Where each begins.
    pub at_qkv: u64,
    /// See above.
    pub at_partial: u64,
    /// See above.
    pub at_attn: u64,
    /// See above.
    pub at_act: u64,
    /// See above.
    pub at_logits: u64,
    /// See above.
    pub at_other: u64,
    /// Lanes' last residual.
    pub at_last: u64,
    /// Candidates for the token: each block's, ...
    pub at_candidate: u64,
    /// ... its masses, ...
    pub at_more: u64,
    /// ... the host's order.
    pub at_order: u64,
    /// Words of all three, which have two buffers: they are taken where steps meet, so nothing says
    /// that all have been when the next step's come.
    pub candidate_words: u64,
    /// Rounds that narrow a filter, and what is left at the end.
    pub at_tally: u64,
    /// See above.
    pub at_verdict: u64,
    /// See above.
    pub at_final: u64,
    /// What several residual streams are mixed by: each block's part of it, before attention and
    /// before the mlp.
    pub at_mix: u64,
    /// Words of one of those two, of all columns.
    pub vec_mix: u64,
    /// All words.
    pub words: u64,
}

/// Words of one column of a class's vectors, all its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassWords {
    /// q, k, v, gates; of a delta rule q, k, v, z.
    pub q: u64,
    /// Attention's output.
    pub a: u64,
    /// The mlp's activations.
    pub f: u64,
    /// One partial of attention; of a delta rule all units' squares.
    pub partial: u64,
}

impl ClassWords {
    fn new((class, p): (&Class, &ClassPartition), parts: u32, each: u32) -> Self {
        let parts = u64::from(parts);
        let rows = |m| u64::from(p.tiling(m).rows) * u64::from(each);
        let of = |m, a_word| parts * lines_of(rows(m) / a_word);
        let (heads, attn) = (class.heads, class.heads * p.head_dim / 2);
        // One behind the other: latents, queries, and what of these meets latents; what heads saw
        // of latents, and their values.
        let (q, a, dim) = match &p.latent {
            // Floats, which every unit takes as they are.
            None if p.delta.is_some() => {
                (lines_of(rows(Matrix::Qkv)), parts * u64::from(attn), p.head_dim)
            }
            None if p.compressed.is_some() => {
                let of = p.compressed.expect("it is there");
                let q = of.down_all() + of.query_rows(heads);
                let a = heads * of.head_dim / 2 + of.grouped() / 2;
                (parts * lines_of(u64::from(q / 2)), parts * u64::from(a), 0)
            }
            None => (of(Matrix::Qkv, 2), parts * u64::from(attn), p.head_dim),
            Some(l) => {
                let q = l.down() + heads * (l.query() + l.rank);
                let a = heads * l.rank / 2 + attn;
                (parts * lines_of(u64::from(q / 2)), parts * u64::from(a), l.rank)
            }
        };
        Self {
            q,
            a,
            f: match p.experts {
                Some(e) => parts * u64::from((p.activations() + e.shared) / 2),
                None => of(Matrix::GateUp, 4),
            },
            partial: match (&p.delta, &p.compressed) {
                (Some(delta), _) => lines_of(u64::from(delta.units)),
                // Channels of entries that end, then scores of all entries: floats.
                (None, Some(of)) => {
                    lines_of(u64::from(of.channels_all())) + lines_of(u64::from(of.entries[0]))
                }
                (None, None) => parts * u64::from(heads * (dim / 16) * PARTIAL_LINE),
            },
        }
    }
}

/// Whether everybody waits for some rows of every block in every layer of a class. A block whose
/// rows nobody waits for may lag as far as a step goes, so that buffers could not be used again.
fn all_awaited(class: &Class, p: &ClassPartition, partition: &Partition, each: u32) -> bool {
    let before = each - 1;
    // Latents go to other machines, which wait for rows of the residual; and everybody waits for
    // every block's part of what several residual streams are mixed by.
    if p.compressed.is_some() {
        return true;
    }
    if class.latent.is_some() {
        return before * partition.residual < partition.hidden;
    }
    let qkv = class.input_rows(p.head_dim);
    before * p.tiling(Matrix::Qkv).rows < qkv
        || before * partition.residual < partition.hidden
        || before * p.tiling(Matrix::GateUp).rows < 2 * p.ffn
}

/// Words of a router's logits, one each, of the class that has most.
fn logits(partition: &Partition, each: u32) -> u64 {
    let of = |p: &ClassPartition| {
        let rows = p.experts.map_or(0, |_| p.tiling(Matrix::Router).rows);
        lines_of(u64::from(rows) * u64::from(each))
    };
    partition.classes.iter().map(of).max().unwrap_or(0)
}

impl Exchange {
    /// Of so many columns.
    pub fn new(model: &Model, partition: &Partition, columns: u32) -> Self {
        let each = partition.blocks_a_lane(model);
        let pairs = || model.classes.iter().zip(&partition.classes);
        let two = model.layers() > 2 && pairs().all(|(c, p)| all_awaited(c, p, partition, each));
        let num_buffers = if two || model.mtp.is_some() { 2 } else { model.layers() };
        let num_buffers_other = model.num_buffers_other();
        let (c, parts) = (u64::from(columns), model.parts);
        let words_h = u64::from(parts) * lines_of(u64::from(partition.residual * each) / 2);
        let widest = |of: &dyn Fn(ClassWords, u64) -> u64| {
            let words = pairs().map(|of_class| {
                of(ClassWords::new(of_class, parts, each), u64::from(of_class.1.kv_splits))
            });
            c * words.max().unwrap_or(0)
        };
        let (vec_h, vec_q) = (c * words_h, widest(&|w, _| w.q));
        let (vec_partial, vec_a) = (widest(&|w, splits| splits * w.partial), widest(&|w, _| w.a));
        let (vec_f, words_logits) = (lines_of(widest(&|w, _| w.f)), logits(partition, each));
        let vec_logits = c * words_logits;
        let (lanes_all, all) = (u64::from(model.lanes_all()), u64::from(num_buffers * model.lanes));
        let blocks = u64::from(partition.blocks * model.ranks);
        let at_qkv = 2 * all * vec_h;
        let at_partial = at_qkv + all * vec_q;
        let at_attn = at_partial + all * vec_partial;
        let at_act = at_attn + all * vec_a;
        let at_logits = at_act + all * vec_f;
        let at_other = at_logits + all * vec_logits;
        let others = u64::from(lanes_all > 1) * 2 * u64::from(num_buffers_other);
        let at_last = at_other + others * lanes_all * vec_h;
        let last = if head_mode(model) == HeadMode::PerLane { 0 } else { lanes_all * vec_h };
        let at_candidate = at_last + last;
        let at_more = at_candidate + 2 * blocks * c;
        let at_order = at_more + 4 * blocks * c;
        let candidate_words = at_order + 2 - at_candidate;
        let at_tally = at_candidate + 2 * candidate_words;
        let rounds = 2 * u64::from(ROUNDS);
        let at_verdict = at_tally + rounds * blocks * c * u64::from(COUNT_WORDS);
        let at_final = at_verdict + rounds * c * 8;
        let at_mix = at_final + blocks * c * 4;
        let vec_mix = model.hyper.map_or(0, |hyper| c * u64::from(hyper.words() * each));
        let words = at_mix + 2 * all * vec_mix;
        Self {
            num_buffers,
            num_buffers_other,
            words_h,
            vec_h,
            vec_q,
            vec_partial,
            vec_a,
            vec_f,
            words_logits,
            vec_logits,
            at_qkv,
            at_partial,
            at_attn,
            at_act,
            at_logits,
            at_other,
            at_last,
            at_candidate,
            at_more,
            at_order,
            candidate_words,
            at_tally,
            at_verdict,
            at_final,
            at_mix,
            vec_mix,
            words,
        }
    }
}

/// How the head combines lanes; with one lane all ways are the same.
pub fn head_mode(model: &Model) -> HeadMode {
    if model.lanes_all() == 1 {
        HeadMode::PerLane
    } else {
        model.head_mode
    }
}

/// A class's part of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassLayout {
    /// Words of its vectors.
    pub words: ClassWords,
    /// Every warp has a range of attention's columns of its own, so several columns' vectors need
    /// no room: the operands are taken from the words (ops/matvec_words.h).
    pub direct_o: bool,
    /// The same of the mlp's activations.
    pub direct_down: bool,
    /// Shared memory: rotations of the results that threads own.
    pub rotations: u32,
    /// Each warp's heads, where several columns' pages come through the ring, and the join of the
    /// warps' partials.
    pub heads: u32,
    /// See above.
    pub join: u32,
    /// Bytes of one warp's heads.
    pub warp_heads: u32,
    /// Stages of a product in registers before its vector is there: of gate and up, and how many of
    /// these even before attention's output is.
    pub prefetch_gu: u32,
    /// See above.
    pub early_gu: u32,
}

/// What stands in shared memory, and how large it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vectors {
    /// Vectors A (q k v, gate/up, head) and B (o, down) have one place: who fills it waits for the
    /// readers. Otherwise a warp may fill the next vector while another still reads the last one.
    pub one_vector: bool,
    /// Halves from a vector of A to the next, and of B; a column has one for each part.
    pub stride_a: u32,
    /// See above.
    pub stride_b: u32,
    /// Floats of the parts that warps leave for each other: of products with A, and with B.
    pub parts_a: u32,
    /// See above.
    pub parts_b: u32,
    /// How other lanes' outputs are read.
    pub all_reduce: AllReduceRead,
    /// Other lanes' words of the owned rows, where threads may bring them for each other.
    pub other_words: u32,
    /// Sums of squares of one column.
    pub norm_sets: u32,
    /// Words of page tables that stand in shared memory, or 0.
    pub table_words: u32,
    /// Floats of attention's scores.
    pub scores: u32,
    /// Halves of one column's query heads, key and value, all parts of them.
    pub heads: u32,
    /// Rotations are kept for the results that exist, not one a thread.
    pub rotations_owned: bool,
    /// Most experts of a column that have factors of their own.
    pub chosen: u32,
    /// Halves of activations of experts, which stand in B's place: those of one column, or of some
    /// pairs of an expert and one of several columns.
    pub activations: u32,
    /// Floats of a delta rule.
    pub delta: u32,
    /// Of attention over entries and several residual streams.
    pub states: u32,
    /// Of these the streams', the last ones.
    pub streams: u32,
}

/// Which thread reads which of the other lanes' words (ops/all_reduce.h says it of each).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AllReduceRead {
    Nothing,
    ByFour,
    ByOwner,
    ByColumns,
    ByAll,
}

impl AllReduceRead {
    /// `owned`: the product whose results' rows threads own. With one k-warp its threads have
    /// results as the matrix unit leaves them: of one column four have the same.
    const fn new(lanes_all: u32, owned: &Tiling, columns: u32) -> Self {
        match (lanes_all, owned.k_warps, columns) {
            (1, ..) => Self::Nothing,
            (_, 1, 1) => Self::ByFour,
            (_, _, 1) => Self::ByOwner,
            (_, 1, _) => Self::ByColumns,
            _ => Self::ByAll,
        }
    }
}

/// The largest of a number that each class has.
fn most(model: &Model, p: &Partition, of: impl Fn(&Class, &ClassPartition) -> u32) -> u32 {
    model.classes.iter().zip(&p.classes).map(|(c, p)| of(c, p)).max().unwrap_or(0)
}

/// Whether several columns' operands are taken from the words (ops/matvec_words.h).
fn is_direct(t: &Tiling, columns: u32) -> bool {
    columns > 1 && t.row_warps == 1 && !t.uneven
}

/// Sums of squares of one column.
fn norm_sets(model: &Model) -> u32 {
    let of_heads = |c: &Class| c.head_norm == Some(NormSpan::AllHeads);
    match head_mode(model) {
        HeadMode::Mean | HeadMode::Concat => model.lanes_all(),
        HeadMode::PerLane | HeadMode::SumThenNorm if model.mtp.is_some() => NORM_SETS_MTP,
        HeadMode::PerLane | HeadMode::SumThenNorm if model.classes.iter().any(of_heads) => {
            NORM_SETS_HEADS
        }
        HeadMode::PerLane | HeadMode::SumThenNorm => 1,
    }
}

/// Halves from a vector of B to the next at least: heads that attend to latents stand where both
/// kinds of vectors do, of which A has so many halves.
fn latent_stride(p: &Partition, parts: u32, there: u32, vectors: u32) -> u32 {
    let of = |c: &ClassPartition| c.attend_bytes(parts, p.warps) / 2;
    let halves = p.classes.iter().map(of).max().unwrap_or(0);
    halves.saturating_sub(there).div_ceil(vectors).next_multiple_of(32)
}

impl Vectors {
    fn new(model: &Model, p: &Partition, kind: Kind, variable_stages: bool) -> Self {
        let columns = kind.columns;
        let pair = |c: &ClassPartition| [Matrix::Output, Matrix::Down].map(|m| *c.tiling(m));
        let all_meet = p.classes.iter().all(|c| c.matrices().all(|(_, t)| t.k_warps > 1));
        let direct = |t: &Tiling| is_direct(t, columns);
        // What others have is scaled on its way, or not one vector.
        let dense = |c: &ClassPartition| c.experts.is_none() && c.attends();
        let all_direct = p.classes.iter().all(|c| dense(c) && pair(c).iter().all(direct));
        let one_vector =
            if columns > 1 { !all_direct } else { variable_stages && all_meet && !kind.streamed };
        let pad = if columns * model.parts > 1 { COLUMN_PAD } else { 0 };
        let kept = |t: Tiling| if direct(&t) { 0 } else { t.k };
        // Experts' activations stand elsewhere.
        let narrow = |c: &ClassPartition| match (c.experts, pair(c).map(kept)) {
            (Some(e), [output, _]) => output.max(e.shared),
            (None, [output, down]) => output.max(down),
        };
        let other = |c: &ClassPartition| {
            let output = if c.attends() { 0 } else { c.tiling(Matrix::Output).k };
            output.max(c.widest())
        };
        let narrow = most(model, p, |_, c| narrow(c).max(other(c)));
        let parts = |t: &Tiling| t.part_floats(columns);
        let of_head = parts(&p.head).max(p.tail.as_ref().map_or(0, parts));
        let of_layers = |all: &[Matrix]| {
            most(model, p, |_, c| all.iter().map(|m| c.part_floats(*m, columns)).max().unwrap_or(0))
        };
        let of_experts = most(model, p, |_, c| c.expert_floats(columns, p.slot_bytes));
        let owned = p.classes[0].tiling(Matrix::Output);
        let brought = model.lanes_all() > 1 && owned.k_warps > 1;
        let stride_a = model.widest_input(p.hidden) + pad;
        let there = if one_vector { 0 } else { stride_a * columns * model.parts };
        let of_latents = latent_stride(p, model.parts, there, columns * model.parts);
        Self {
            one_vector,
            stride_a,
            stride_b: (narrow + pad).max(of_latents),
            parts_a: of_head.max(of_layers(PARTS_A)).max(of_experts),
            parts_b: of_layers(PARTS_B),
            all_reduce: AllReduceRead::new(model.lanes_all(), owned, columns),
            other_words: match brought {
                true => owned.row_pairs() * columns * model.parts * model.lanes_all(),
                false => 0,
            },
            norm_sets: norm_sets(model),
            table_words: p.table_bytes(model, columns) / 4,
            scores: most(model, p, |c, p| match (p.latent, p.compressed) {
                (Some(_), _) => LatentPartition::score_floats(model.parts),
                (None, Some(_)) => 0,
                (None, None) => 2 * c.group() * PAGE as u32,
            }),
            heads: most(model, p, |c, p| {
                let whole = p.latent.is_none() && p.compressed.is_none();
                u32::from(whole) * (c.group() + 2) * p.head_dim * model.parts
            }),
            rotations_owned: variable_stages
                && p.classes.iter().all(|c| c.tiling(Matrix::Qkv).k_warps > 1),
            chosen: most(model, p, |c, _| {
                c.experts.map_or(0, |e| e.chosen + u32::from(e.logits() > e.count))
            }),
            activations: most(model, p, |_, c| match c.experts {
                Some(_) if columns > 1 => (columns + c.gathered()) * (c.ffn + COLUMN_PAD),
                Some(_) => model.parts * c.activations(),
                None => 0,
            }),
            delta: most(model, p, |_, c| c.delta.map_or(0, |d| d.floats(p.warps, columns))),
            states: p.state_floats(model, columns),
            streams: model.hyper.map_or(0, |hyper| hyper.floats(p.residual, columns)),
        }
    }

    /// Words of the choice of experts: of several columns behind the last expert those of a stack.
    pub const fn choice_words(&self, columns: u32) -> u32 {
        match (self.chosen, columns) {
            (0, _) => 0,
            (chosen, 1) => chosen,
            (chosen, _) => columns * chosen + Stack::MOST,
        }
    }
}

/// Where it stands, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Shared {
    pub xb: u32,
    pub part_a: u32,
    pub part_b: u32,
    pub norm: u32,
    pub scores: u32,
    pub qkv: u32,
    pub candidates: u32,
    pub misc: u32,
    pub tokens: u32,
    pub ends: u32,
    pub tally: u32,
    pub sum: u32,
    pub stops: u32,
    pub layers: u32,
    pub trace: u32,
    pub slots: u32,
    pub sizes: u32,
    /// Rotations of the results that threads own, of each class.
    pub rotations: Vec<u32>,
    pub others: u32,
    pub table: u32,
    /// Which of a stage's scales each row has.
    pub index: u32,
    /// Words of the experts that columns chose, and factors; of several columns also ids, and
    /// pairs of an expert and a column, behind the number of experts.
    pub choice: u32,
    /// See above.
    pub factors: u32,
    /// See above.
    pub ids: u32,
    /// See above.
    pub pairs: u32,
    /// What a delta rule works on.
    pub delta: u32,
    /// What attention over entries works on, then several residual streams.
    pub states: u32,
    /// What grammars allow of a block's rows (ops/mask.h).
    pub masks: u32,
    /// What is kept of drafts of tokens.
    pub drafts: u32,
    /// Behind all this.
    pub end: u32,
}

/// Ids of a text's end that blocks keep of each sequence (ops/drafts.h).
pub const RECENT: u32 = 32;

/// Bytes of what blocks keep of drafts (ops/drafts.h).
pub fn drafts_bytes(p: &Partition, kind: Kind) -> u32 {
    match kind.lookup {
        true => 4 * (2 * kind.columns + 2 + 2 * p.warps + (14 + 3 + RECENT) * kind.columns),
        false => 0,
    }
}

/// Offsets, given out one after another.
struct Offsets(u32);

impl Offsets {
    fn next(&mut self, bytes: u32, align: u32) -> u32 {
        let at = self.0.next_multiple_of(align);
        self.0 = at + bytes;
        at
    }
}

impl Shared {
    fn new(model: &Model, p: &Partition, kind: Kind, v: &Vectors) -> Self {
        let columns = kind.columns;
        let (threads, vectors) = (p.warps * TEAM, columns * model.parts);
        let rotations = |c: &ClassPartition| {
            // Where latents are, who takes a head turns it.
            let Some(t) = c.tilings[Matrix::Qkv as usize].as_ref().filter(|_| c.attends()) else {
                return 0;
            };
            let owned = t.row_pairs() * columns;
            let items = t.items((columns, model.parts), threads);
            8 * if v.rotations_owned { owned } else { items * threads }
        };
        // Masks stand in the place of vector A, behind the logits that do (ops/sample.h), or where
        // there is no room for both, elsewhere.
        let near = if columns > 1 && v.stride_a >= 2 * p.rows_head { p.rows_head * 4 } else { 0 };
        let (near, masks) = (near * columns, (p.mask_words() + 1) * 4 * columns);
        let inside = near + masks <= v.stride_a * vectors * 2;
        let mut at = Offsets(0);
        if !v.one_vector {
            at.next(v.stride_a * vectors * 2, 1);
        }
        let wide = if v.one_vector { v.stride_a } else { 0 };
        let several = columns > 1 && v.chosen > 0;
        Self {
            xb: at.next((wide.max(v.stride_b) * vectors).max(v.activations) * 2, 1),
            part_a: at.next(v.parts_a * 4, 1),
            part_b: at.next(v.parts_b * 4, 1),
            norm: at.next(p.warps * columns * v.norm_sets * 4, 1),
            scores: at.next(v.scores * 4, 1),
            qkv: at.next(v.heads * 2, 16),
            candidates: at.next((p.warps * columns + columns + p.warps) * 20, 1),
            misc: at.next(64, 16),
            tokens: at.next(columns * 4, 1),
            ends: at.next(columns * 4, 1),
            tally: at.next(BINS * 16, 64),
            sum: at.next(COUNT_WORDS * 8, 1),
            stops: at.next(columns * wire::STOPS as u32 * 4, 1),
            layers: at.next(model.layers() * size_of::<wire::Layer>() as u32, LAYERS_ALIGN),
            trace: at.next(16 * 8, 64),
            slots: at.next(SLOTS_MAX * 16, 1),
            sizes: at.next(SLOTS_MAX * 4, 1),
            rotations: p.classes.iter().map(|c| at.next(rotations(c), 1)).collect(),
            others: at.next(v.other_words * 4, 1),
            table: at.next(v.table_words * 4, 1),
            index: at.next(p.index_bytes(), 1),
            choice: at.next(v.choice_words(columns) * 8, if v.chosen > 0 { 16 } else { 1 }),
            factors: at.next(columns * v.chosen * 4, 1),
            ids: at.next(if columns > 1 { columns * v.chosen * 4 } else { 0 }, 1),
            pairs: at.next(if several { (1 + columns * v.chosen) * 4 } else { 0 }, 1),
            delta: at.next(v.delta * 4, if v.delta > 0 { 16 } else { 1 }),
            states: at.next(v.states * 4, if v.states > 0 { 16 } else { 1 }),
            drafts: at.next(drafts_bytes(p, kind), if kind.lookup { 16 } else { 1 }),
            masks: if inside { near } else { at.next(masks, 4) },
            end: at.next(0, 16),
        }
    }
}

/// The ring of a block's shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// Where it begins.
    pub at: u32,
    /// Slots.
    pub slots: u32,
    /// Bytes.
    pub bytes: u32,
}

impl Ring {
    /// From `end` on.
    fn new(
        model: &Model,
        p: &Partition,
        (variable_stages, columns): (bool, u32),
        end: u32,
    ) -> Result<Self> {
        let at = end.next_multiple_of(1024);
        let room = p.shared_max.saturating_sub(at);
        // No more than a step takes: see stream.h.
        let most = SLOTS_MAX.min(segments::layer_slots(model, p));
        let (slots, bytes) = if variable_stages {
            let bytes = p.tuning.ring_most.max(2 * p.slot_bytes + 512);
            (most, (room / 1024 * 1024).min(bytes))
        } else {
            let slots = (room / p.slot_bytes).min(most);
            (slots, slots * p.slot_bytes)
        };
        if bytes < 2 * p.slot_bytes || p.slot_bytes > 0xffff {
            let detail = format!(
                "for the monokernel: {columns} columns need {at} bytes of shared memory and two \
                 slots of {} for weights; there are {}",
                p.slot_bytes, p.shared_max
            );
            return Err(Error::InvalidProgram { step: usize::MAX, detail });
        }
        Ok(Self { at, slots, bytes })
    }
}

/// One of the decode kernels of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Columns of a step.
    pub columns: u32,
    /// Sequences' keys and values come through the ring (stream.h); with drafts they are used in
    /// the same order.
    pub streamed: bool,
    /// It makes drafts of tokens and checks them (ops/lookup.h).
    pub lookup: bool,
}

impl Kind {
    /// Without drafts.
    pub const fn plain(columns: u32, streamed: bool) -> Self {
        Self { columns, streamed, lookup: false }
    }
}

/// The layout of one decode kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// Of which kernel.
    pub kind: Kind,
    /// Stages of different sizes stand side by side in the ring (ring.h).
    pub variable_stages: bool,
    /// Stages in registers before a product's vector has arrived.
    pub prefetch_depth: u32,
    /// The exchange.
    pub exchange: Exchange,
    /// Of each class.
    pub classes: Vec<ClassLayout>,
    /// What stands in shared memory.
    pub vectors: Vectors,
    /// Where.
    pub at: Shared,
    /// The ring, behind.
    pub ring: Ring,
}

impl Layout {
    /// Of a kernel of a partition.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] where shared memory has no room for two slots of the ring.
    pub fn new(model: &Model, p: &Partition, kind: Kind) -> Result<Self> {
        let columns = kind.columns;
        let variable_stages = p.variable_stages(model) && columns == 1 && model.parts == 1;
        let prefetch_depth = if columns > 1 { 1 } else { p.prefetch_depth(model) };
        let vectors = Vectors::new(model, p, kind, variable_stages);
        let at = Shared::new(model, p, kind, &vectors);
        // Attention out of the ring (ops/attend_ring.h) stands where the vectors do, of which none
        // is at work while a block attends, or, where those are small, has a place of its own.
        let warp_heads = |c: &Class, p: &ClassPartition| {
            if columns > 1 {
                (c.group() + 2) * p.head_dim * 2
            } else {
                0
            }
        };
        let join = |c: &Class, p: &ClassPartition| p.head_dim / 16 * 8 * c.group().div_ceil(2) * 16;
        let room = p.warps * most(model, p, |c, p| warp_heads(c, p) + join(c, p));
        let all_heads = p.warps * most(model, p, warp_heads);
        let there = (vectors.one_vector || all_heads <= at.xb) && room <= at.part_a;
        let heads = if there { 0 } else { at.end };
        let own = if kind.streamed && !there { room } else { 0 };
        let ring = Ring::new(model, p, (variable_stages, columns), at.end + own)?;
        let each = p.blocks_a_lane(model);
        let of_class = |((c, part), rotations): ((&Class, &ClassPartition), &u32)| {
            // Stages are taken in order: gate and up's once all of attention's output's are.
            let early = variable_stages && part.tiling(Matrix::Output).stages <= prefetch_depth;
            ClassLayout {
                words: ClassWords::new((c, part), model.parts, each),
                direct_o: part.attends() && is_direct(part.tiling(Matrix::Output), columns),
                direct_down: part.experts.is_none()
                    && is_direct(part.tiling(Matrix::Down), columns),
                rotations: *rotations,
                heads,
                join: heads + p.warps * warp_heads(c, part),
                warp_heads: warp_heads(c, part),
                prefetch_gu: if early { 7 } else { prefetch_depth },
                early_gu: if early { part.tiling(Matrix::GateUp).stages.min(3) } else { 0 },
            }
        };
        let classes =
            model.classes.iter().zip(&p.classes).zip(&at.rotations).map(of_class).collect();
        let exchange = Exchange::new(model, p, columns);
        Ok(Self { kind, variable_stages, prefetch_depth, exchange, classes, vectors, at, ring })
    }
}
