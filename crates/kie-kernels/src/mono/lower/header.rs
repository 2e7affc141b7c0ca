//! All that was decided, as the one header that stands in front of the kernels: constants of the
//! model and the machine, and of each class of layers a struct. Kernels compute no size.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use super::compressed::{row_bytes, CompressedPartition};
use super::extras::Extras;
use super::latent::{combine_sharers, group_heads, LatentPartition, HEADS_AT_ONCE, PART_HEAD};
use super::layout::{self, ClassLayout, Layout};
use super::matrix::Matrix;
use super::model::{Class, Model};
use super::partition::{ClassPartition, Partition};
use super::segments;
use super::tiling::{Stack, Tiling};
use crate::abi::{Gate, NormSpan, Scoring, PAGE};
use crate::lookup;
use crate::meter::Mode;
use crate::mono::wire;

/// Constants, one after another.
struct Text {
    out: String,
    indent: &'static str,
    columns: u32,
    parts: u32,
    /// Tilings that have been said, and their names.
    tilings: BTreeMap<String, String>,
}

impl Text {
    fn line(&mut self, what: impl Display) {
        let _ = writeln!(self.out, "{}{what}", self.indent);
    }

    fn put(&mut self, kind: &str, name: &str, value: impl Display) {
        let fixed = if self.indent.is_empty() { "" } else { "static " };
        self.line(format_args!("{fixed}constexpr {kind} {name} = {value};"));
    }

    fn ints<const N: usize>(&mut self, all: [(&str, u32); N]) {
        for (name, value) in all {
            self.put("int", name, value);
        }
    }

    fn longs<const N: usize>(&mut self, all: [(&str, u64); N]) {
        for (name, value) in all {
            self.put("long", name, value);
        }
    }

    fn bools<const N: usize>(&mut self, all: [(&str, bool); N]) {
        for (name, value) in all {
            self.put("bool", name, value);
        }
    }

    fn float(&mut self, name: &str, value: f64) {
        self.put("float", name, format_args!("{value:e}f"));
    }

    /// A tiling's struct, once for all that are alike, and its name.
    fn tiling(
        &mut self,
        t: &Tiling,
        layout: &Layout,
        prefetch_depth: u32,
        index_at: u32,
    ) -> String {
        self.stacked(t, None, layout, prefetch_depth, index_at)
    }

    /// The same of several experts as one: pieces of a stage lie as `t` has them.
    fn stacked(
        &mut self,
        piece: &Tiling,
        stack: Option<Stack>,
        layout: &Layout,
        prefetch_depth: u32,
        index_at: u32,
    ) -> String {
        let t = &stack.map_or(*piece, |stack| stack.tiling(piece));
        let columns = layout.kind.columns;
        let threads = t.row_warps * t.k_warps * layout::TEAM;
        let all = [
            ("rows", t.rows),
            ("k", t.k),
            ("tiles_all", t.rows.div_ceil(16)),
            ("row_warps", t.row_warps),
            ("k_warps", t.k_warps),
            ("tiles", t.tiles),
            ("pairs", t.pairs),
            ("chunk", t.chunk),
            ("stages", t.stages),
            ("stage_bytes", t.stage_bytes),
            ("prefetch_depth", t.stages.min(prefetch_depth)),
            ("pieces", stack.map_or(1, |stack| stack.experts)),
            ("piece_rows", piece.rows),
            ("row_pairs", t.row_pairs()),
            ("items", t.items((columns, self.parts), threads)),
            ("part_floats", t.part_floats(columns)),
            ("bits", t.encoding.bits as u32),
            ("row_bytes", t.encoding.row_bytes()),
            ("lane_bytes", t.encoding.lane_bytes()),
            ("unit_bytes", piece.unit_bytes()),
            ("code_bytes", piece.code_bytes()),
            ("codes_at", piece.codes_at()),
            ("scales_at", piece.scales_at()),
            ("chunks", t.chunks()),
            ("long_stages", piece.used().0),
            ("long_bytes", piece.used().1[0]),
            ("short_bytes", piece.used().1[1]),
            ("group", t.encoding.group),
            ("span", t.span),
            ("spans", t.chunk / t.span),
            ("scale_rows", t.encoding.scale_rows),
            ("scale_bytes", t.encoding.scale_bytes()),
            ("index_at", if t.encoding.scaled() { index_at } else { 0 }),
        ];
        let body: Vec<_> = all.iter().map(|(name, value)| format!("{name} = {value}")).collect();
        let body = body.join(", ");
        if let Some(name) = self.tilings.get(&body) {
            return name.clone();
        }
        let name = format!("Tiling{}", self.tilings.len());
        self.line(format_args!("struct {name} {{"));
        self.line(format_args!("    static constexpr int {body};"));
        self.line(format_args!("    static constexpr bool scaled = {};", t.encoding.scaled()));
        let per_row = t.encoding.bits.per_row();
        self.line(format_args!("    static constexpr bool per_row = {per_row};"));
        self.line(format_args!("    static constexpr bool uneven = {};", t.uneven));
        self.line("};");
        self.tilings.insert(body, name.clone());
        name
    }
}

/// The header of a decode kernel, or of the prefill kernel, which is one of a single column.
pub fn header(model: &Model, p: &Partition, layout: &Layout, mode: Mode) -> String {
    let (columns, parts) = (layout.kind.columns, model.parts);
    let (out, tilings) = ("#pragma once\n".to_owned(), BTreeMap::new());
    let mut text = Text { out, indent: "", columns, parts, tilings };
    text.out.push_str(&wire::declarations());
    sizes(&mut text, model, p, layout);
    measuring(&mut text, mode);
    exchange(&mut text, layout);
    shared(&mut text, p, layout);
    for at in 0..model.classes.len() {
        class(&mut text, (model, p, layout), at);
    }
    // Names for the classes that code may speak of: the others are never looked for.
    for at in model.classes.len()..3 {
        text.line(format_args!("using Class{at} = Class0;"));
    }
    text.line(format_args!("using ClassLast = Class{};", model.classes.len() - 1));
    let index = p.index_offset(p.classes.len(), Matrix::Qkv);
    let head = text.tiling(&p.head, layout, layout.prefetch_depth, index);
    let tail =
        text.tiling(p.tail.as_ref().unwrap_or(&p.head), layout, layout.prefetch_depth, index);
    text.line(format_args!("using TilingHead = {head};"));
    text.line(format_args!("using TilingTail = {tail};"));
    text.out
}

fn sizes(t: &mut Text, model: &Model, p: &Partition, layout: &Layout) {
    let each = p.blocks_a_lane(model);
    t.ints([
        ("kLayers", model.layers()),
        ("kPrefetchDepth", layout.prefetch_depth),
        ("kClasses", model.classes.len() as u32),
        ("kHidden", p.hidden),
        ("kHiddenReal", model.hidden),
        ("kVocab", model.vocab),
        ("kVocabAll", model.vocab_all),
        ("kRanks", model.ranks),
        ("kLanes", model.lanes),
        ("kLanesAll", model.lanes_all()),
        ("kFinalNorm", model.final_norm_row()),
        ("kFinalNormLanes", model.final_norm.rows),
        ("kHeadSegment", segments::head_segment(model, p)),
        ("kHeadMode", layout::head_mode(model) as u32),
        ("kBlocks", p.blocks),
        ("kBlocksPerLane", each),
        ("kBlocksAll", p.blocks * model.ranks),
        ("kTeam", layout::TEAM),
        ("kWarps", p.warps),
        ("kHelpers", p.helpers),
        ("kThreads", p.warps * layout::TEAM),
        ("kColumns", layout.kind.columns),
        ("kParts", model.parts),
        ("kSlotBytes", p.slot_bytes),
        ("kPage", PAGE as u32),
        ("kPagesMax", p.pages_max),
        ("kPools", model.pools),
        ("kRowsO", p.residual),
        ("kRowsHead", p.rows_head),
        ("kMaskWords", p.mask_words()),
        ("kMaskAll", model.mask_words()),
        ("kMaskRow", p.columns),
        ("kHeadPassRows", p.head.rows),
        ("kHeadPasses", p.head_passes),
        ("kHeadTail", p.tail.map_or(0, |tail| tail.rows)),
        ("kLayerSlots", segments::layer_slots(model, p)),
        ("kStopsMax", wire::STOPS as u32),
        ("kRing", wire::RING as u32),
    ]);
    t.longs([("kStreamBytes", p.stream_bytes(model))]);
    // Of what the residual is carried as.
    let scale = 0.5_f64.powi(model.residual_shift as i32);
    t.float("kEps", f64::from(model.eps) * scale * scale);
    t.float("kResidualScale", scale);
    t.bools([("kResidualScaled", model.residual_shift > 0), ("kHasExperts", p.has_experts())]);
    let retries = p.retries(model, layout.kind.columns);
    let delay = if retries { p.tuning.poll_delay_retries_ns } else { p.tuning.poll_delay_ns };
    t.line("// How vectors are gathered. 0: everything is asked for, and what was late once more;");
    t.line("// 1: one word a warp is waited for first. Nanoseconds before the first look.");
    t.ints([("kPollMode", u32::from(!retries))]);
    t.put("unsigned", "kPollDelayNs", delay);
    let kind = layout.kind;
    t.bools([
        ("kVariableStages", layout.variable_stages),
        ("kStreamed", kind.streamed && !kind.lookup),
        ("kWholePages", kind.streamed && kind.lookup),
    ]);
    t.line("// One layer, which predicts further tokens (ops/mtp.h).");
    t.bools([("kMtp", model.mtp.is_some())]);
    drafts(t, p, kind);
    streams(t, model, p, layout);
}

/// Several residual streams (ops/hyper.h).
fn streams(t: &mut Text, model: &Model, p: &Partition, layout: &Layout) {
    t.line("// Several residual streams.");
    t.ints([("kHyperStreams", model.hyper.map_or(1, |hyper| hyper.streams))]);
    let columns = layout.kind.columns;
    let Some(hyper) = &model.hyper else {
        let none = ["kMixWords", "kMixRounds", "kAtMixNumbers", "kAtMixSums", "kBesideMix"];
        t.ints(none.map(|name| (name, 0)));
        t.ints(["kBesideMixHead", "kShStreams"].map(|name| (name, 0)));
        t.longs(["kAtMix", "kVecMix", "kMixOfHead"].map(|name| (name, 0)));
        return t.float("kMixEps", 0.0);
    };
    let own = hyper.stream_floats(p.residual, columns);
    let before: u64 =
        model.layer.iter().map(|l| u64::from(Extras::new(model, p, l.class).count)).sum();
    t.ints([
        ("kMixWords", hyper.words()),
        ("kMixRounds", hyper.rounds),
        ("kAtMixNumbers", own),
        ("kAtMixSums", own + hyper.mix_floats(columns)),
        ("kBesideMix", hyper.beside_at(p.blocks * p.residual, true)),
        ("kBesideMixHead", hyper.beside_at(p.blocks * p.residual, false)),
        ("kShStreams", layout.at.states + 4 * (layout.vectors.states - layout.vectors.streams)),
    ]);
    t.longs([
        ("kAtMix", layout.exchange.at_mix),
        ("kVecMix", layout.exchange.vec_mix),
        ("kMixOfHead", before),
    ]);
    t.float("kMixEps", f64::from(hyper.eps));
}

fn drafts(t: &mut Text, p: &Partition, kind: layout::Kind) {
    t.line("// Drafts of tokens (lookup.rs, ops/lookup.h).");
    t.bools([("kLookup", kind.lookup)]);
    t.ints([
        ("kDraftMost", lookup::DRAFT_MAX as u32),
        ("kMatchLeast", lookup::MATCH_MIN as u32),
        ("kMatchMost", lookup::MATCH_MAX as u32),
        ("kMissesMost", lookup::REST_MAX.ilog2() + 1),
        ("kQuietMost", wire::QUIET_STEPS),
        ("kRecent", layout::RECENT),
        ("kTextPad", wire::TEXT_PAD as u32),
        ("kTextRow", wire::text_row(p.pages_max) as u32),
        ("kControlDrafts", wire::DRAFTS_AT as u32 / 4),
        ("kDraftsBytes", layout::drafts_bytes(p, kind)),
    ]);
}

fn measuring(t: &mut Text, mode: Mode) {
    t.line(
        "// Measuring only, and garbage: what is computed without waits, without weights, or by",
    );
    t.line("// ranks that take their own words for those of the others.");
    t.bools([
        ("kNoWaits", mode == Mode::StreamOnly),
        ("kNoStream", mode == Mode::ExchangeOnly),
        ("kNoRanks", mode == Mode::Alone),
        ("kGarbage", mode.is_garbage()),
    ]);
}

fn exchange(t: &mut Text, layout: &Layout) {
    let x = &layout.exchange;
    t.line("// Words of the exchange, as offsets from one base (lower/layout.rs).");
    t.ints([
        ("kNumBuffers", x.num_buffers),
        ("kNumBuffersOther", x.num_buffers_other),
        ("kWordsH", x.words_h as u32),
        ("kWordsLogits", x.words_logits as u32),
        ("kPartialLine", layout::PARTIAL_LINE),
        ("kPartialLse", layout::PARTIAL_LSE),
        ("kRounds", layout::ROUNDS),
        ("kBins", layout::BINS),
        ("kCountWords", layout::COUNT_WORDS),
    ]);
    t.longs([
        ("kVecH", x.vec_h),
        ("kVecQ", x.vec_q),
        ("kVecPartial", x.vec_partial),
        ("kVecA", x.vec_a),
        ("kVecF", x.vec_f),
        ("kVecLogits", x.vec_logits),
        ("kAtHidden", 0),
        ("kAtQkv", x.at_qkv),
        ("kAtPartial", x.at_partial),
        ("kAtAttn", x.at_attn),
        ("kAtAct", x.at_act),
        ("kAtLogits", x.at_logits),
        ("kAtOther", x.at_other),
        ("kAtLast", x.at_last),
        ("kAtCandidate", x.at_candidate),
        ("kAtMore", x.at_more),
        ("kAtOrder", x.at_order),
        ("kCandidateWords", x.candidate_words),
        ("kAtTally", x.at_tally),
        ("kAtVerdict", x.at_verdict),
        ("kAtFinal", x.at_final),
        ("kWords", x.words),
    ]);
}

fn shared(t: &mut Text, p: &Partition, l: &Layout) {
    t.line("// Shared memory, in bytes (lower/layout.rs).");
    t.bools([
        ("kOneVector", l.vectors.one_vector),
        ("kTableShared", l.vectors.table_words > 0),
        ("kRotationsOwned", l.vectors.rotations_owned),
    ]);
    t.ints([
        ("kStrideA", l.vectors.stride_a),
        ("kStrideB", l.vectors.stride_b),
        ("kScores", l.vectors.scores),
        ("kAllReduceRead", l.vectors.all_reduce as u32),
        ("kOtherWords", l.vectors.other_words),
        ("kNormSets", l.vectors.norm_sets),
        ("kTableWords", l.vectors.table_words),
        ("kShXa", 0),
        ("kShXb", l.at.xb),
        ("kShPartA", l.at.part_a),
        ("kShPartB", l.at.part_b),
        ("kShNorm", l.at.norm),
        ("kShScores", l.at.scores),
        ("kShQkv", l.at.qkv),
        ("kShCandidates", l.at.candidates),
        ("kShMisc", l.at.misc),
        ("kShTokens", l.at.tokens),
        ("kShEnds", l.at.ends),
        ("kShTally", l.at.tally),
        ("kShSum", l.at.sum),
        ("kShStops", l.at.stops),
        ("kShLayers", l.at.layers),
        ("kShTrace", l.at.trace),
        ("kShSlots", l.at.slots),
        ("kShSizes", l.at.sizes),
        ("kShOthers", l.at.others),
        ("kShTable", l.at.table),
        ("kShIndex", l.at.index),
        ("kShChoice", l.at.choice),
        ("kShFactors", l.at.factors),
        ("kShIds", l.at.ids),
        ("kShPairs", l.at.pairs),
        ("kShDelta", l.at.delta),
        ("kShStates", l.at.states),
        ("kShMasks", l.at.masks),
        ("kShDrafts", l.at.drafts),
        ("kChosenMost", l.vectors.chosen),
        ("kChoiceWords", l.vectors.choice_words(l.kind.columns)),
        ("kStackMost", Stack::MOST),
        ("kIndexBytes", p.index_bytes()),
        ("kShRing", l.ring.at),
        ("kSharedMax", p.shared_max),
        ("kSlots", l.ring.slots),
        ("kRingBytes", l.ring.bytes),
        ("kSharedBytes", l.ring.at + l.ring.bytes),
    ]);
}

/// The tilings of a class's matrices and of stacks of its experts: names in the class, and theirs.
fn tilings(
    t: &mut Text,
    (model, p, layout): (&Model, &Partition, &Layout),
    at: usize,
) -> Vec<(String, String)> {
    let part = &p.classes[at];
    let ahead = |m: Matrix| match m {
        Matrix::GateUp => layout.classes[at].prefetch_gu,
        m if m.is_by_head() => 1,
        _ => layout.prefetch_depth,
    };
    let mut named = Vec::new();
    for (m, of) in part.matrices() {
        let index = p.index_offset(at, m);
        named.push((format!("Tiling{}", name(m)), t.tiling(of, layout, ahead(m), index)));
        if m == Matrix::GateUp && part.experts.is_some() {
            let stack = p.stack(model, part, m, layout.kind.columns);
            let stacked = t.stacked(of, stack, layout, layout.prefetch_depth, index);
            named.push((format!("Stacked{}", name(m)), stacked));
        }
    }
    named
}

fn class(t: &mut Text, (model, p, layout): (&Model, &Partition, &Layout), at: usize) {
    let (class, part): (&Class, &ClassPartition) = (&model.classes[at], &p.classes[at]);
    let l: &ClassLayout = &layout.classes[at];
    let named = tilings(t, (model, p, layout), at);
    let each = p.blocks_a_lane(model);
    t.line(format_args!("struct Class{at} {{"));
    t.indent = "    ";
    for (name, tiling) in named {
        t.line(format_args!("using {name} = {tiling};"));
    }
    experts(t, (model, p, layout), at);
    delta(t, (model, p, layout), at);
    t.ints([
        ("kHeads", class.heads),
        ("kKvHeads", class.kv_heads),
        ("kGroup", class.group()),
        ("kHeadDim", part.head_dim),
        ("kHeadDimReal", class.head_dim),
        ("kAttn", part.compressed.map_or(class.heads * part.head_dim, |of| of.grouped())),
        ("kAtGates", (class.heads + 2 * class.kv_heads) * part.head_dim / 2),
        ("kFfn", part.ffn),
        ("kRowsGu", part.tiling(Matrix::GateUp).rows),
        ("kSplitBlocks", each / class.kv_heads),
        ("kSplitsMax", part.kv_splits),
        ("kCombineByOwners", u32::from(part.combine_by_owners)),
        ("kWordsQ", l.words.q as u32),
        ("kWordsA", l.words.a as u32),
        ("kWordsF", l.words.f as u32),
        ("kPartialWords", l.words.partial as u32),
        ("kShRotations", l.rotations),
        ("kShHeads", l.heads),
        ("kShJoin", l.join),
        ("kWarpHeads", l.warp_heads),
        ("kEarlyGu", l.early_gu),
    ]);
    t.bools([
        ("kHeadNorm", class.head_norm.is_some()),
        ("kNormAllHeads", class.head_norm == Some(NormSpan::AllHeads)),
        ("kBias", class.bias),
        ("kGated", class.gated),
        ("kDirectO", l.direct_o),
        ("kDirectDown", l.direct_down),
    ]);
    t.bools([("kLatent", part.latent.is_some()), ("kCompressed", part.compressed.is_some())]);
    let extras = Extras::new(model, p, at);
    if model.hyper.is_some() {
        let [mixer, mlp] = extras.hyper;
        t.ints([("kAtMixer", mixer), ("kAtMlp", mlp)]);
    }
    match &part.latent {
        None if part.delta.is_some() => {}
        None if part.compressed.is_some() => compressed(t, (model, p), at, extras),
        None => attention(t, (class, part), p, each),
        Some(latent) => {
            latents(t, (class, latent), extras, (each, part.kv_splits, p.warps * layout::TEAM))
        }
    }
    t.float("kQueryScale", std::f64::consts::LOG2_E / f64::from(class.head_dim).sqrt());
    beginnings(t, p, at);
    t.indent = "";
    t.line("};");
}

/// Where a class's rotations begin in their table, and its matrices in a layer's stream.
fn beginnings(t: &mut Text, p: &Partition, at: usize) {
    let before = p.classes[..at].iter().map(|c| u64::from(c.rope_dim));
    let rope = before.sum::<u64>() * u64::from(p.positions);
    let offset = |m| segments::matrix_offset(p, at, m);
    t.longs([
        ("kRope", rope),
        ("kStreamO", offset(Matrix::Output)),
        ("kStreamGu", offset(Matrix::GateUp)),
        ("kStreamDown", offset(Matrix::Down)),
    ]);
}

/// A matrix's name in kernels.
const fn name(matrix: Matrix) -> &'static str {
    match matrix {
        Matrix::MtpIn => "MtpIn",
        Matrix::Qkv => "Qkv",
        Matrix::Gates => "Gates",
        Matrix::LatentDown => "LatentDown",
        Matrix::QueryUp => "QueryUp",
        Matrix::KeyUp => "KeyUp",
        Matrix::ValueUp => "ValueUp",
        Matrix::Output => "O",
        Matrix::Router => "Router",
        Matrix::SharedGateUp => "SharedGu",
        Matrix::GateUp => "Gu",
        Matrix::SharedDown => "SharedDown",
        Matrix::Down => "Down",
    }
}

/// Of a class's experts, and what it has besides products.
fn experts(t: &mut Text, (model, p, layout): (&Model, &Partition, &Layout), at: usize) {
    let (class, part) = (&model.classes[at], &p.classes[at]);
    let extras = Extras::new(model, p, at);
    t.bools([("kSinks", class.sinks), ("kOutputBias", class.output_bias)]);
    t.ints([
        ("kExperts", part.experts.map_or(0, |e| e.count)),
        ("kAtSinks", extras.sinks),
        ("kAtOutputBias", extras.output_bias),
    ]);
    let Some(of) = &class.experts else { return };
    let (gate, alpha, limit) = match of.gate {
        Gate::Silu | Gate::GeluTanh => (0, 1.0, 0.0),
        Gate::ClampedSwiglu { alpha, limit } => (1, alpha, limit),
        Gate::ClampedSilu { limit } => (2, 1.0, limit),
    };
    let softplus = matches!(of.scoring, Scoring::SqrtSoftplus { .. });
    let normed = match of.scoring {
        Scoring::Sigmoid { normed } | Scoring::SqrtSoftplus { normed } => normed,
        Scoring::SoftmaxOfAll | Scoring::SoftmaxOfChosen => false,
    };
    t.bools([
        ("kOverAll", of.scoring == Scoring::SoftmaxOfAll),
        ("kByScores", matches!(of.scoring, Scoring::Sigmoid { .. }) || softplus),
        ("kSoftplus", softplus),
        ("kFactorsNormed", normed),
        ("kByToken", of.by_token),
        ("kCorrection", of.correction),
        ("kShared", of.shared.is_some()),
        ("kSharedScaled", of.shared.is_some_and(|shared| shared.scaled)),
        ("kRouterBias", of.router_bias),
        ("kExpertBias", of.bias),
    ]);
    t.ints([
        ("kChosen", of.chosen),
        ("kStrideAct", part.ffn + layout::COLUMN_PAD),
        ("kBatch", part.batch(layout.kind.columns, p.slot_bytes)),
        ("kGathered", part.gathered()),
        ("kGate", gate),
        ("kGroups", of.groups.map_or(1, |groups| groups.count)),
        ("kGroupsChosen", of.groups.map_or(1, |groups| groups.chosen)),
        ("kSharedFfn", part.experts.map_or(0, |e| e.shared)),
        ("kAtRouterBias", extras.router_bias),
        ("kAtCorrection", extras.correction),
        ("kAtTokenExperts", extras.token_experts),
        ("kAtGateUpBias", extras.gate_up_bias),
        ("kAtDownBias", extras.down_bias),
    ]);
    t.float("kRouteFactor", f64::from(of.factor));
    t.float("kGateExponent", -std::f64::consts::LOG2_E * f64::from(alpha));
    t.float("kGateLimit", f64::from(limit));
    let piece = part.piece_bytes();
    t.longs([("kPieceBytes", piece), ("kExpertBytes", u64::from(p.blocks) * piece)]);
}

/// Of a class's attention over latents.
fn latents(
    t: &mut Text,
    (class, part): (&Class, &LatentPartition),
    extras: Extras,
    (each, splits, threads): (u32, u32, u32),
) {
    let Some(of) = &class.latent else { return };
    let words = class.heads * part.rank / 2;
    let group = group_heads(class.heads);
    let at_query = part.down() / 2;
    let [query_norm, latent_norm] = extras.latent_norms;
    let [keys, values] = part.heads;
    t.ints([
        ("kQueryRank", part.query_rank),
        ("kQueryRankReal", of.query_rank),
        ("kRank", part.rank),
        ("kRankReal", of.rank),
        ("kPlain", part.plain),
        ("kTurned", of.turned),
        ("kRopeDim", part.turned),
        ("kQueryHead", part.query()),
        ("kKept", part.kept),
        ("kKeptPadded", part.kept_padded()),
        ("kHeadsAtOnce", HEADS_AT_ONCE),
        ("kGroupHeads", group),
        ("kHeadGroups", class.heads.div_ceil(group)),
        ("kHeadStride", part.head_stride()),
        ("kPartHead", PART_HEAD),
        ("kKeyHeads", keys),
        ("kValueHeads", values),
        ("kWordsLatent", at_query),
        ("kAtQuery", at_query),
        ("kWordsQueries", class.heads * part.query() / 2),
        ("kAtAbsorbed", at_query + class.heads * part.query() / 2),
        ("kAtValues", words),
        ("kAtQueryNorm", query_norm),
        ("kAtLatentNorm", latent_norm),
        ("kPageHalf", 0),
        ("kHalfHead", part.rank / 2),
        ("kPartialHead", part.rank / 16 * layout::PARTIAL_LINE),
        ("kCombineWords", (t.columns * words).div_ceil(each)),
        ("kCombineSharers", combine_sharers(splits, words.div_ceil(each), threads)),
    ]);
    t.float("kLatentEps", f64::from(of.eps));
    t.float("kScoreScale", std::f64::consts::LOG2_E * f64::from(of.scale));
}

/// Of a class's attention over a window and entries (ops/compressed.h).
fn compressed(t: &mut Text, (model, p): (&Model, &Partition), at: usize, extras: Extras) {
    let (class, part) = (&model.classes[at], &p.classes[at]);
    let Some((of, sizes)) = class.compressed.zip(part.compressed) else { return };
    let CompressedPartition { down, widths, group, .. } = sizes;
    let [key_norm, entry_norm, index_norm] = extras.compressed_norms;
    let [entry_bias, index_bias] = extras.entry_biases;
    let index = of.entries.and_then(|entries| entries.index);
    t.bools([("kEntries", of.entries.is_some()), ("kIndexed", index.is_some())]);
    t.ints([
        ("kQueryRank", sizes.query_rank),
        ("kQueryRankReal", of.query_rank),
        ("kAtQueryNorm", extras.latent_norms[0]),
        ("kWordsLatent", sizes.down_all() / 2),
        ("kAtQuery", sizes.down_all() / 2),
        ("kWordsQueries", sizes.query_rows(class.heads) / 2),
        ("kAtValues", class.heads * part.head_dim / 2),
        ("kPageHalf", 0),
        ("kDim", widths[0]),
        ("kTurned", of.turned),
        ("kRopeDim", of.turned),
        ("kAtKey", down[1] / 2),
        ("kOutGroups", sizes.groups),
        ("kGroupRank", group[0]),
        ("kGroupWords", group[1] / 2),
        ("kBlockGroups", sizes.block_groups),
        ("kAtKeyNorm", key_norm),
        ("kAtPlaces", extras.places),
        ("kNewRow", sizes.row_bytes(1, t.parts)),
        ("kNewEntry", row_bytes(widths[0], t.parts)),
        ("kNewIndex", row_bytes(widths[0] + widths[1], t.parts)),
        ("kAtChosen", sizes.row_bytes(t.columns, t.parts) / 4),
    ]);
    t.float("kLatentEps", f64::from(model.eps));
    let Some(entries) = of.entries else { return };
    t.ints([
        ("kEvery", entries.every),
        ("kSets", entries.sets),
        ("kPoolSums", entries.pools[0]),
        ("kPoolEntries", entries.pools[1]),
        ("kAtEntry", down[2]),
        ("kAtEntryScore", down[3]),
        ("kAtEntryNorm", entry_norm),
        ("kAtEntryBias", entry_bias),
        ("kChannels", sizes.channels),
        ("kChannelsAll", sizes.channels_all()),
    ]);
    t.longs([
        ("kStatesBytes", segments::state_bytes(model, p)),
        ("kAtStates", segments::working_at(model, p, entries.pools[0])),
    ]);
    let Some(index) = index else { return };
    t.ints([
        ("kIndexHeads", index.heads),
        ("kIndexDim", index.dim),
        ("kIndexChosen", index.chosen),
        ("kPoolIndex", index.pool),
        ("kAtIndex", down[4]),
        ("kAtIndexScore", down[5]),
        ("kAtIndexWeights", down[6] / 2),
        ("kAtIndexNorm", index_norm),
        ("kAtIndexBias", index_bias),
        ("kAtScores", layout::lines_of(u64::from(sizes.channels_all())) as u32),
        ("kWordsScores", sizes.entries[0]),
    ]);
    let factor = 1.0 / f64::from(index.dim * index.heads).sqrt();
    t.float("kIndexFactor", factor);
}

/// Of a class's delta rule (ops/delta.h).
fn delta(t: &mut Text, (model, p, layout): (&Model, &Partition, &Layout), at: usize) {
    let (class, part) = (&model.classes[at], &p.classes[at]);
    t.bools([("kDelta", part.delta.is_some())]);
    let (Some(of), Some(delta)) = (&class.delta, &part.delta) else { return };
    let (extras, unit) = (Extras::new(model, p, at), &delta.unit);
    t.ints([
        ("kKeyDim", of.key_dim),
        ("kTaps", of.taps),
        ("kKeyRows", of.rows(class.group(), part.head_dim)),
        ("kUnits", delta.units),
        ("kUnitsEach", delta.each),
        ("kPageHalf", 0),
        ("kUnitSplits", unit.splits),
        ("kUnitCols", unit.cols),
        ("kUnitLanes", unit.lanes),
        ("kUnitHeld", unit.held),
        ("kUnitTurns", unit.turns),
        ("kUnitThreads", unit.threads),
        ("kUnitChannels", unit.channels),
        ("kUnitPast", unit.past()),
        ("kUnitBytes", unit.bytes),
        ("kKeyPadded", delta.key()),
        ("kAtConv", extras.conv),
        ("kAtDecay", extras.decay),
        ("kAtDecayBias", extras.decay_bias),
        ("kAtOutputNorm", extras.output_norm),
        ("kAtSquares", delta.squares_at()),
        ("kAtOutput", delta.output_at(p.warps)),
        ("kAtUnitGates", delta.gates_at(p.warps)),
        ("kAtFactors", delta.factors_at(p.warps, layout.kind.columns)),
    ]);
}

/// Of a class's attention: pages, what a warp holds of them, and how partials are combined.
fn attention(t: &mut Text, (class, part): (&Class, &ClassPartition), p: &Partition, each: u32) {
    let (group, dim) = (class.group(), part.head_dim);
    // Four warps make scores, the others take values.
    let value_tiles = (dim / 16).div_ceil(p.warps - 4);
    let words = class.heads * dim / 2;
    let page_half = PAGE as u32 * dim * 2 * t.parts;
    let page_stages = match page_half {
        half if 2 * half <= p.slot_bytes => 1,
        half if half <= p.slot_bytes => 2,
        _ => 0,
    };
    // A word of one column a thread; of the one-column kernel a word of some of the splits. With
    // many partials two warps of an owner share its words: all of one warp's looks are in flight.
    // The fewest that leave each block as many or none.
    let own = (words.div_ceil(each)..words).find(|own| words.is_multiple_of(*own)).unwrap_or(words);
    let sharers = if part.kv_splits > 8 && own.is_multiple_of(16) { 2 } else { 1 };
    let count = if part.combine_by_owners { own / sharers } else { words / p.warps };
    let low = 1 << count.trailing_zeros();
    let matrix = part.tiling(Matrix::Qkv);
    t.ints([
        ("kQkv", (class.heads + 2 * class.kv_heads) * dim),
        ("kRowsQkv", matrix.rows),
        ("kPageHalf", page_half),
        ("kPageStages", page_stages),
        ("kPageStageBytes", 2 * page_half / page_stages.max(1)),
        ("kValueTiles", value_tiles),
        ("kKvQuads", (dim / 16).max(4 * value_tiles)),
        ("kQWords", group * dim / 2),
        ("kHalfHead", dim / 2),
        ("kTake", group * dim / 2 + dim),
        ("kPartialHead", dim / 16 * layout::PARTIAL_LINE),
        ("kHeadPairs", group.div_ceil(2)),
        ("kJoinTile", 8 * group.div_ceil(2)),
        ("kJoinWarp", dim / 16 * 8 * group.div_ceil(2)),
        ("kCombineWords", (t.columns * words).div_ceil(each)),
        ("kCombineOwn", own),
        ("kCombineBlocks", words / own),
        ("kCombineSharers", sharers),
        ("kCombineCount", count),
        ("kCombineGroups", 32 / low.min(32)),
    ]);
}
