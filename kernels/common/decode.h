// The decode kernel: one block a multiprocessor, resident for `steps` tokens, a layer after
// another. A block belongs to one lane of the model and owns the same rows of every matrix. The
// residual rows it owns stay in registers as floats; what others need travels as LL words
// (exchange.h). Per layer: qkv -> attention -> o -> gate/up -> down, five exchanges (six with
// kCombineByOwners), and with experts one more, of the router's logits.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "control.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/attend.h"
#include "ops/attend_combine.h"
#include "ops/attend_exact.h"
#include "ops/attend_ring.h"
#include "ops/compressed.h"
#include "ops/delta.h"
#include "ops/experts_columns.h"
#include "ops/filter.h"
#include "ops/gather.h"
#include "ops/head.h"
#include "ops/hyper.h"
#include "ops/latent.h"
#include "ops/lookup.h"
#include "ops/matvec.h"
#include "ops/mtp.h"
#include "ops/project.h"
#include "ops/residual.h"
#include "ops/route.h"
#include "ops/sample.h"
#include "ops/shared.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"
#include "stream.h"

// What every layer or token looks at, into shared memory: layers, stop ids, page tables.
KIE_DEVICE void take_tables(const DecodeArgs& args, u8* shared) {
    constexpr int kAllThreads = kThreads + kHelpers * kWarp;
    const int me = thread();
    u32* layers = (u32*)(shared + kShLayers);
    for (int i = me; i < kLayers * (int)sizeof(Layer) / 4; i += kAllThreads)
        layers[i] = ((const u32*)args.layers)[i];
    u32* stops = (u32*)(shared + kShStops);
    for (int i = me; i < kColumns * kStopsMax; i += kAllThreads)
        stops[i] = args.stop_ids[args.column[i / kStopsMax].row * kStopsMax + i % kStopsMax];
    const u8* index = args.scale_index + block() * kIndexBytes;
    for (int i = me; i < kIndexBytes; i += kAllThreads) shared[kShIndex + i] = index[i];
    // What an earlier launch left there is no choice.
    if (kHasExperts)
        for (int i = me; i < kChoiceWords; i += kAllThreads) *choice_word(shared, i) = 0;
    if (!kTableShared) return;
    u32* table = (u32*)(shared + kShTable);
    constexpr int kEach = kPools * kPagesMax;
    for (int i = me; i < kTableWords; i += kAllThreads)
        table[i] = args.pages[(u64)args.column[i / kEach].row * kEach + i % kEach];
}

// Of the embedding, whose halves wait in the first place.
KIE_DEVICE void unpack_first(float (&v)[2]) {
    unpack_half2(bits(v[0]), v[0], v[1]);
    if (kResidualScaled) v[0] *= kResidualScale, v[1] *= kResidualScale;
}

// A layer's mlp whose weights are all known.
template <class C>
KIE_DEVICE void decode_mlp(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b, int layer,
                           Owned& own, Prefetched<typename C::TilingGu>& gate_up,
                           const Reduction& of_down) {
    AllReduce<typename C::TilingDown> others_down;
    others_down.read_early(watch, args, b, reduction_of(b, 1, layer));
    others_down.ask_early(args, b, of_down);
    {
        prefetch_weights<typename C::TilingGu, C::kEarlyGu>(ring, gate_up);
        vector_free<typename C::TilingO>();
        Squares squares = gather_normed(watch, args, b, hidden_slot(args, 0, layer, b.lane_index),
                                        false, norm_row(b, layer, 1), b.seqno, layer << 4 | 5);
        stamp(b, 7);
        step_gate_up<C>(ring, args, b, layer, gate_up, squares);
    }
    Prefetched<typename C::TilingDown> prefetched;
    prefetch_weights<typename C::TilingDown>(ring, prefetched);
    const u64* act = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
    others_down.take_early(watch, args, b, of_down);
    if constexpr (!C::kDirectDown) {
        vector_free<typename C::TilingGu>();
        constexpr int kShare = C::kFfn / 2 / kWarps;
        const int first = (int)(thread() / kTeam) * kShare;
        Squares none;
        gather<kShare, false>(watch, act + first, C::kWordsF, b.seqno, layer << 4 | 6, live_of(b),
                              nullptr, (u32*)(b.shared + kShXb) + first, kStrideB / 2, none.v);
    }
    stamp(b, 10);
    step_residual<typename C::TilingDown>(
        watch, args, b, 1, layer, own, 11, others_down, DownAsItIs{}, [&]() {
            return multiply_output<typename C::TilingDown, C::kDirectDown>(
                ring, watch, prefetched, b, act, C::kWordsF, layer << 4 | 6);
        });
}
// The same of experts that are chosen here.
template <class C>
KIE_DEVICE void decode_experts(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                               int layer, Owned& own, const Reduction& of_down) {
    AllReduce<typename C::TilingDown> others_down;
    others_down.read_early(watch, args, b, of_down);
    others_down.ask_early(args, b, of_down);
    {
        Prefetched<typename C::TilingRouter> prefetched;
        prefetch_weights<typename C::TilingRouter>(ring, prefetched);
        vector_free<typename C::TilingO>();
        Squares squares = gather_normed(watch, args, b, hidden_slot(args, 0, layer, b.lane_index),
                                        false, norm_row(b, layer, 1), b.seqno, layer << 4 | 5);
        stamp(b, 7);
        step_route<C>(ring, args, b, layer, prefetched, squares);
    }
    if constexpr (C::kShared) step_shared_gate_up<C>(ring, args, b, layer);
    stamp(b, 8);
    choose_experts<C>(watch, args, b, layer);
    stamp(b, 9);
    step_experts_gate_up<C>(ring, args, b, layer);
    stamp(b, 10);
    Sums<typename C::TilingDown> sums = no_sums<typename C::TilingDown>();
    if constexpr (C::kShared) sums = multiply_shared<C>(ring, watch, args, b, layer);
    FirstOfDown<C> first;
    prefetch_first(ring, first);
    others_down.take_early(watch, args, b, of_down);
    DownAdjust<C> adjust;
    adjust.ask(args, b, layer);
    step_residual<typename C::TilingDown>(
        watch, args, b, 1, layer, own, 11, others_down, adjust,
        [&]() { return multiply_experts<C>(ring, watch, first, args, b, layer, sums); });
}

// Queries, keys and values, and what heads make of this block's pages.
template <class C>
KIE_DEVICE void decode_attention(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                                 int layer) {
    KvFragment<C> kv;
    {
        Prefetched<typename C::TilingQkv> prefetched;
        prefetch_weights<typename C::TilingQkv>(ring, prefetched);
        vector_free<typename C::TilingDown>();
        if (kVariableStages) early_page<C>(args, b, layer, kv);
        const u64* before =
            kMtp ? taken_in(args, b) : hidden_slot(args, 1, layer - 1, b.lane_index);
        Squares squares = gather_normed(watch, args, b, before, !kMtp && layer == 0,
                                        norm_row(b, layer, 0), b.seqno - 1, layer << 4);
        stamp(b, 0);
        step_qkv<C>(ring, args, b, layer, kv, prefetched, squares);
    }
    if constexpr (C::kNormAllHeads) square_heads<C>(watch, args, b, layer);
    if constexpr (kParts > 1) {
        attend_columns_exact<C>(watch, args, b, layer);
    } else if constexpr (kWholePages) {
        attend_there<C>(ring, watch, args, b, layer);
    } else if constexpr (kStreamed && kColumns == 1) {
        attend_stream<C>(ring, watch, args, b, layer);
    } else {
        // The positions of a prompt have many keys of this step among them: they stay with loads.
        const int first = kStreamed ? sequences_of(args) : 0;
        if constexpr (kStreamed) attend_sequences<C>(ring, watch, args, b, layer);
        if (first < live_of(b)) attend_columns<C>(watch, args, b, layer, first, kv);
    }
    stamp(b, 3);
}
// A delta rule in its place.
template <class C>
KIE_DEVICE void decode_delta(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                             int layer) {
    {
        Prefetched<typename C::TilingQkv> prefetched;
        prefetch_weights<typename C::TilingQkv>(ring, prefetched);
        vector_free<typename C::TilingDown>();
        Squares squares =
            gather_normed(watch, args, b, hidden_slot(args, 1, layer - 1, b.lane_index), layer == 0,
                          norm_row(b, layer, 0), b.seqno - 1, layer << 4);
        stamp(b, 0);
        step_delta_in<C>(ring, args, b, layer, prefetched, squares);
    }
    FirstUnit<C> first;
    first.ask(args, b, layer);
    step_gates<C>(ring, b);
    step_delta<C>(watch, args, b, layer, first);
    stamp(b, 3);
}
// Attention over latents.
template <class C>
KIE_DEVICE void decode_latents(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                               int layer) {
    {
        Prefetched<typename C::TilingLatentDown> prefetched;
        prefetch_weights<typename C::TilingLatentDown>(ring, prefetched);
        vector_free<typename C::TilingDown>();
        Squares squares =
            gather_normed(watch, args, b, hidden_slot(args, 1, layer - 1, b.lane_index), layer == 0,
                          norm_row(b, layer, 0), b.seqno - 1, layer << 4);
        stamp(b, 0);
        step_latents<C>(ring, args, b, layer, prefetched, squares);
    }
    latent_attention<C>(ring, watch, args, b, layer);
}

// What attention (0) or the mlp (1) of a layer takes of several residual streams.
template <class C>
KIE_DEVICE void take_layer_streams(Watch& watch, const DecodeArgs& args, const Block& b, int kind,
                                   int layer) {
    const float* numbers = extras_of(args, b, layer) + (kind == 0 ? C::kAtMixer : C::kAtMlp);
    take_streams<true>(watch, args, b, numbers, kBesideMix, kind, layer,
                       hidden_slot(args, 1 - kind, layer, b.lane_index),
                       layer << 4 | (kind == 0 ? 0 : 5));
}
// Attention over a window and entries.
template <class C>
KIE_DEVICE void decode_entries(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                               int layer) {
    take_layer_streams<C>(watch, args, b, 0, layer);
    {
        Prefetched<typename C::TilingLatentDown> prefetched;
        prefetch_weights<typename C::TilingLatentDown>(ring, prefetched);
        vector_free<typename C::TilingDown>();
        Squares squares = gather_normed(watch, args, b, hidden_slot(args, 1, layer, b.lane_index),
                                        false, norm_row(b, layer, 0), b.seqno, layer << 4);
        stamp(b, 0);
        step_latents<C>(ring, args, b, layer, prefetched, squares);
    }
    join_wave();  // some of the words that are waited for next are this wave's
    compressed_attention<C>(ring, watch, args, b, layer);
}

template <class C>
KIE_DEVICE void decode_layer(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b, int layer,
                             Owned& own) {
    if constexpr (kMtp) step_mtp_in<C>(ring, args, b, own);
    const Reduction of_o = reduction_of(b, 0, layer), of_down = reduction_of(b, 1, layer);
    AllReduce<typename C::TilingO> others_o;
    others_o.ask_early(args, b, of_o);
    if constexpr (C::kLatent)
        decode_latents<C>(ring, watch, args, b, layer);
    else if constexpr (C::kCompressed)
        decode_entries<C>(ring, watch, args, b, layer);
    else if constexpr (C::kDelta)
        decode_delta<C>(ring, watch, args, b, layer);
    else
        decode_attention<C>(ring, watch, args, b, layer);
    if constexpr (kHyperStreams == 1 && !kMtp)
        if (layer == 0)
            KIE_UNROLL for (int i = 0; i < C::TilingO::items; ++i) unpack_first(own.v[i]);
    const long buffer = buffer_of(layer, b.lane_index);
    Prefetched<typename C::TilingGu> gate_up;
    {
        Prefetched<typename C::TilingO> prefetched;
        prefetch_weights<typename C::TilingO>(ring, prefetched);
        prefetch_weights<typename C::TilingGu, 0, C::kEarlyGu>(ring, gate_up);
        others_o.read_early(watch, args, b, reduction_of(b, 0, layer));
        others_o.take_early(watch, args, b, of_o);
        OutputAdjust<C> adjust;
        adjust.ask(args, b, layer);
        if constexpr (C::kLatent || C::kCompressed)
            gather_values<C>(watch, args, b, layer);
        else if constexpr (C::kDelta)
            gather_delta<C>(watch, args, b, layer);
        else
            gather_attention<C>(watch, args, b, layer);
        step_residual<typename C::TilingO>(
            watch, args, b, 0, layer, own, 5, others_o, adjust, [&]() {
                return multiply_output<typename C::TilingO, C::kDirectO>(
                    ring, watch, prefetched, b, args.ll_words + kAtAttn + buffer * kVecA,
                    C::kWordsA, layer << 4 | 4);
            });
    }
    if constexpr (kHyperStreams > 1) {
        give_streams(b, own);
        take_layer_streams<C>(watch, args, b, 1, layer);
    }
    if constexpr (C::kExperts > 0)
        decode_experts<C>(ring, watch, args, b, layer, own, of_down);
    else
        decode_mlp<C>(ring, watch, args, b, layer, own, gate_up, of_down);
    if constexpr (kHyperStreams > 1) give_streams(b, own);
}

// Structs, since NVRTC knows no generic lambdas.
struct RunLayer {
    Ring& ring;
    Watch& watch;
    const DecodeArgs& args;
    Block& b;
    int layer;
    Owned& own;
    template <class C>
    KIE_DEVICE void operator()(C) const {
        decode_layer<C>(ring, watch, args, b, layer, own);
    }
};
struct Rotate {
    const DecodeArgs& args;
    const Block& b;
    u32 step;
    template <class C>
    KIE_DEVICE void operator()(C) const {
        if constexpr (!C::kLatent && !C::kCompressed && !C::kDelta) rotations<C>(args, b, step);
    }
};
// What a layer has behind the draft `kept` becomes its sequence's.
struct KeepLayer {
    const DecodeArgs& args;
    const Block& b;
    int layer, sequence, kept;
    template <class C>
    KIE_DEVICE void operator()(C) const {
        if constexpr (C::kDelta) keep_units<C>(args, b, layer, sequence, kept);
        if constexpr (C::kCompressed)
            if constexpr (C::kEntries) keep_channels<C>(args, b, layer, sequence, kept);
    }
};
// Behind a launch's last step, of sequences that go on behind a draft.
KIE_DEVICE void keep_states(const DecodeArgs& args, const Block& b) {
    KIE_NO_UNROLL for (int s = 0; s < (int)args.live; ++s) {
        const int kept = (int)drafts_of(b).sequence[s].kept;
        if (kept < (int)args.live) continue;
        KIE_NO_UNROLL for (int layer = 0; layer < kLayers; ++layer)
            of_class(b.shared, layer, KeepLayer{args, b, layer, s, kept});
    }
}
KIE_DEVICE void decode_step(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b) {
    Owned own;
    each_item<TilingOwned>([&](int item, int pair, int column, bool live) {
        const int row = b.block_in_lane * (kRowsO / 2) + pair;
        own.v[item][0] = number(live && row < kHidden / 2
                                    ? args.embed[(long)tokens_of(b)[column] * (kHidden / 2) + row]
                                    : 0u);
    });
    if constexpr (kHyperStreams > 1) begin_streams(b, own);
    const int first = begins_at_head(args, b.step) ? kLayers : 0;
    b.seqno = seqno_at(args.seqno + b.step, first);
    KIE_NO_UNROLL for (int layer = first; layer < kLayers; ++layer)
        of_class(b.shared, layer, RunLayer{ring, watch, args, b, layer, own}),
        ++b.seqno;
    Candidate candidate = {kLowest, kNone};
    const bool heads = kMtp ? args.predicts != 0 : sequences_of(args) > 0 || args.logits;
    if constexpr (kHyperStreams > 1)
        if (heads)
            take_streams<false>(watch, args, b, args.extras + kMixOfHead, kBesideMixHead, 0,
                                kLayers, hidden_slot(args, 1, kLayers, b.lane_index), 0xffe);
    if (heads) decode_head(ring, watch, args, b, candidate);
    stamp(b, 14);
    if (watch.timed_out) timed_out_of(b) = 1;
    publish_candidate(args, b, candidate);
    // The next step's, while the candidates travel, which say where it is if there are drafts.
    if constexpr (!kLookup) each_class(Rotate{args, b, b.step + 1});
    reduce_candidates(watch, args, b);
    stamp(b, 15);
}

// The first token of each column, or the step's share of a prompt.
KIE_DEVICE void take_tokens(const DecodeArgs& args, const u8* shared, u32 step) {
    u32* tokens = (u32*)(shared + kShTokens);
    const u32 c = thread();
    if (c >= (u32)kColumns) return;
    if (args.prompt && (int)c >= sequences_of(args)) {
        const u32 at = prompt_at(args, step, c);
        tokens[c] = at < args.count ? args.prompt[at] : 0;
    } else if (step == 0) {
        tokens[c] = c < args.live ? args.column[c].token : 0;
    }
}

// Whether the step that has just been accepted was the last: some sequence ended, the host asked,
// or somebody gave up. All blocks decide alike, from the same words.
KIE_DEVICE bool at_the_end(const DecodeArgs& args, const Block& b) {
    if (((volatile u32*)(b.shared + kShMisc))[2] != kGoOn) return true;
    for (int c = 0; c < sequences_of(args); ++c)
        if (ends_of(b)[c] != 0) return true;
    // Where drafts are rare narrower kernels are faster.
    return kLookup && !kMtp && drafts_of(b).quiet >= kQuietMost;
}

KIE_DEVICE void run_steps(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                          volatile u32* stop) {
    KIE_NO_UNROLL for (u32 step = 0; step < args.steps; ++step) {
        if (thread() == 0 && block() == 0 && args.stamps) args.stamps[step] = clock_ns();
        watch.step = b.step = step;
        works_at(seqno_at(args.seqno + step, kLayers));
        b.live = live_at(args, step);
        if constexpr (kLookup) b.live = (int)columns_of(b.shared).live;
        decode_step(ring, watch, args, b);
        if constexpr (kLookup) accept_drafts(args, b);
        if (watch.timed_out) *stop = step + 1;
        take_tokens(args, b.shared, step + 1);
        if (thread() == 0 && (step + 1 == args.steps || at_the_end(args, b))) *stop = step + 1;
        sync_consumers<kThreads>();  // the step barrier: see exchange.h
        if (*stop) break;
        if constexpr (kLookup) {
            draft(args, b);
            each_class(Rotate{args, b, 0});
        }
    }
    if constexpr (kLookup) keep_states(args, b), report_drafts(args, b);
    if (thread() == 0 && kRanks > 1 && timed_out_of(b)) abort_all(args);
    if (thread() == 0 && block() == 0 && args.stamps) args.stamps[args.steps] = clock_ns();
}

// Behind the consumers two warps of the machine's with work of their own: who copies, and one
// thread that watches the host. On some machines a warp runs one side of a branch after the other,
// and neither of these ever ends first.
static_assert(kThreads % kWarp == 0, "consumers share no warp with others");
// With fewer who copies spills where experts are chosen, with more consumers of dense layers do.
constexpr u32 kHelperRegisters = kHasExperts ? 56 : 40;
KIE_KERNEL(kie_decode, kThreads + kHelpers * kWarp, DecodeArgs args) {
    KIE_SHARED_BYTES(shared);
    Slot* slots = (Slot*)(shared + kShSlots);
    // The number of steps once the last is done, order seen, order agreed, lost (block.h). Whoever
    // meets nobody polls some of these: each says all that it has to say.
    volatile u32* misc = (volatile u32*)(shared + kShMisc);
    u64* trace = (u64*)(shared + kShTrace);
    if (thread() == 0) {
        for (int i = 0; i < kSlots; ++i) slot_init(slots + i, kWarps);
        slots_ready();
        misc[0] = misc[3] = 0, misc[1] = misc[2] = kGoOn;
        for (int i = 0; i < 16; ++i) trace[i] = 0;
    }
    take_tables(args, shared);
    take_tokens(args, shared, 0);
    sync_block();
    if (thread() >= kThreads) {
        be_helper<kWarps, kHelpers, kHelperRegisters>();
        if (thread() < kThreads + kCopyThreads)
            feed_stream(args, shared, misc);
        else if (thread() == kThreads + kWarp && block_all(args) == 0)
            watch_host(args, misc + 1, misc);
        return;
    }
    be_consumer<kWarps, kHelpers, kHelperRegisters>();
    Ring ring = {slots, shared + kShRing, 0, 0, 0, shared + kShIndex};
    Watch watch = {args, 0, 0, 0, false};
    Block b = {(int)block() / kBlocksPerLane,
               (int)block() % kBlocksPerLane,
               (int)args.rank * kLanes + (int)block() / kBlocksPerLane,
               shared,
               0,
               0,
               0,
               nullptr,
               0};
    if (thread() == 0 && args.trace) b.trace = trace, b.traced_at = clock_ticks();
    if constexpr (kLookup) begin_drafts(args, b);
    each_class(Rotate{args, b, 0});
    run_steps(ring, watch, args, b, misc);
    if (b.trace)
        for (int i = 0; i < 16; ++i) args.trace[block() * 16 + i] = trace[i];
}
