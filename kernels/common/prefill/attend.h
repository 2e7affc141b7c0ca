// Attention of a chunk over the pages, which already hold the chunk's own keys and values. A team
// takes 64 queries of a head; two teams share each page: two heads of a group, or, where groups are
// odd, two neighbouring runs of queries, or, of a wide head, the same queries, each with half of
// the values. The copying warps bring pages, 16 bytes a thread, straight into the matrix unit's
// cores. Scores stay in registers and become the second product's operand.
#pragma once

#include "exchange.h"
#include "lowered.h"
#include "platform.h"
#include "prefill/layout.h"
#include "prefill/tiles.h"
#include "shape.h"
#include "wide.h"

constexpr int kCopiers = (int)kCrew / kTeam;
// Of the class with the largest pages: those of the next layer's are brought while some are read.
constexpr int kPageBufferBytes = 2 * max_i(max_i(Class0::kPageHalf, Class1::kPageHalf),
                                           max_i(Class2::kPageHalf, ClassLast::kPageHalf));
// A copying warp a buffer; of two that are in use the first is free once the next one is there.
constexpr int kPageBuffers =
    kAnyQueriesShared ? 2 : min_i(kCopiers, kStages* kStageBytes / max_i(kPageBufferBytes, 1024));
static_assert(kPageBuffers >= (kWideAsync && !kAnyQueriesShared ? 3
                               : kShortStages                   ? 1
                                                                : 2),
              "pages fit the ring");
// Behind them the queries of a task, as cores.
constexpr int kPfQueries = kPfRing + kPageBuffers * kPageBufferBytes;
static_assert(!kAnyQueriesShared ||
                  kPfQueries + kPageBufferBytes / 2 <= kPfRing + kStages * kStageBytes,
              "as many queries as a page has keys fit the ring");

// Long runs first, dealt out there and back, so that blocks end together.
KIE_DEVICE int run_index(const PrefillArgs& args, int turn) {
    const int b = block(), n = args.blocks;
    return turn * n + (turn & 1 ? n - 1 - b : b);
}
struct Run {
    int lane_index, head, place, first, last;  // this team's queries; pages of the task
};
template <class C>
KIE_DEVICE int runs_of(const Span& s) {
    return (s.to - s.first + C::kTaskRun - 1) / C::kTaskRun * (kLanes * C::kTaskHeads);
}
template <class C>
KIE_DEVICE Run run_at(const PrefillArgs& args, const Chunk& c, const Span& s, int layer, int i,
                      int team) {
    const int runs = (s.to - s.first + C::kTaskRun - 1) / C::kTaskRun;
    const int start = s.first + (runs - 1 - i / (kLanes * C::kTaskHeads)) * C::kTaskRun;
    const int u = i % (kLanes * C::kTaskHeads), head = u % C::kTaskHeads;
    int first = 0, end = start + C::kTaskRun - 1;
    if (end >= c.to) end = c.to - 1;
    const int window = (int)args.model.layers[layer].window;
    const int seen = c.base + max_i(start, c.from) - window + 1;  // by the first that is alive
    if (window > 0 && seen > 0) first = seen / kPage;
    return {u / C::kTaskHeads, C::kPaired ? 2 * head + team : head,
            start + (C::kTaskRun == kRun ? 0 : team * kRun), first, (c.base + end) / kPage};
}

// The pages of all runs as one sequence, through kPageBuffers slots; one copying warp a slot.
struct PagePipe {
    u32 at;
};
KIE_DEVICE Slot* page_slot(u32 at) {
    return (Slot*)(prefill_shared() + kPfPages) + at % kPageBuffers;
}
KIE_DEVICE u8* page_bytes(u32 at) {
    return prefill_shared() + kPfRing + at % kPageBuffers * kPageBufferBytes;
}
KIE_DEVICE void await_page(u32 at) {
    while (!of_wave(slot_filled(page_slot(at), at / kPageBuffers & 1)))
        if (of_wave(*stop_word())) break;
}
KIE_DEVICE void release_page(u32 at) {
    if (lane() == 0) slot_release(page_slot(at));
}
// By a warp: a page's keys as 64 columns x head_dim, its values as head_dim columns x 64.
template <class C>
KIE_DEVICE void fetch_page(const u8* page, u8* to) {
    const int my = lane(), row = my % 8, core = my / 8;  // 8 rows x 4 neighbouring cores at a time
    to += my * 16;
    if constexpr (C::kHeadDim % 32 == 0) {
        constexpr int kAcross = C::kHeadDim / 32;
        const u8* k = page + (row * C::kHeadDim + core * 8) * 2;
        const u8* v = page + C::kPageHalf + (row * kPage + core * 8) * 2;
        KIE_UNROLL for (int n = 0; n < C::kPageQuads / 32; ++n) {
            quad_copy(to + n * 512, k + n / kAcross * (16 * C::kHeadDim) + n % kAcross * 64);
            quad_copy(to + C::kPageHalf + n * 512, v + n / 2 * (16 * kPage) + n % 2 * 64);
        }
    } else {
        KIE_NO_UNROLL for (int n = 0; n < C::kPageQuads / 32; ++n) {
            const int ck = 4 * n + core, rk = ck / (C::kHeadDim / 8) * 8 + row;
            quad_copy(to + n * 512, page + (rk * C::kHeadDim + ck % (C::kHeadDim / 8) * 8) * 2);
            quad_copy(to + C::kPageHalf + n * 512,
                      page + C::kPageHalf + ((n / 2 * 8 + row) * kPage + ck % 8 * 8) * 2);
        }
    }
}
template <class C>
KIE_DEVICE bool feed_run(Watch& w, const PrefillArgs& args, PagePipe& pipe, int layer,
                         const Run& run) {
    const int warp = (int)(thread() - kWorkers) / (int)kTeam;
    const int kv = run.lane_index * C::kKvHeads + run.head / C::kGroup;
    KIE_NO_UNROLL for (int page = run.first; page <= run.last; ++page, ++pipe.at) {
        if ((int)(pipe.at % kPageBuffers) != warp) continue;
        Slot* slot = page_slot(pipe.at);
        const u8* from = prefill_page<C>(args, layer, kv, page);  // before the wait, not behind it
        w.polls = 0;
        while (!slot_free(slot, (pipe.at / kPageBuffers & 1) ^ 1)) {
            if (*stop_word()) return false;
            if (lane() == 0 && wait_expired(w, 0x3000 | layer, page, run.last)) *stop_word() = 1;
        }
        fetch_page<C>(from, page_bytes(pipe.at));
        quads_here();
        writes_before_tiles();
        sync_warp();
        if (lane() == 0) slot_fill(slot);
    }
    return true;
}
template <class C>
KIE_DEVICE bool feed_pages(Watch& w, const PrefillArgs& args, PagePipe& pipe, const Chunk& chunk,
                           int layer) {
    const Span span = all_of(chunk);
    const int runs = runs_of<C>(span);
    KIE_NO_UNROLL for (int turn = 0; turn * (int)args.blocks < runs; ++turn) {
        const int i = run_index(args, turn);
        if (i >= runs) continue;
        if (!feed_run<C>(w, args, pipe, layer, run_at<C>(args, chunk, span, layer, i, 0)))
            return false;
    }
    return true;
}

struct Softmax {
    float best[2], exp_sum[2];  // of this thread's two queries
};
// Scores to weights, in place; what was summed before shrinks by `keep`.
KIE_DEVICE void weigh(Softmax& m, float (&s)[kPage / 2], float (&keep)[2]) {
    KIE_UNROLL for (int r = 0; r < 2; ++r) {
        float top = -1e30f, sum = 0;
        KIE_UNROLL for (int j = 0; j < kPage / 8; ++j) top =
            max_f(top, max_f(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        top = max_f(top, shuffle_xor(top, 1)), top = max_f(top, shuffle_xor(top, 2));
        top = max_f(top, m.best[r]);
        keep[r] = exp2_f(m.best[r] - top), m.best[r] = top;
        KIE_UNROLL for (int j = 0; j < kPage / 8; ++j) {
            float &a = s[4 * j + 2 * r], &b = s[4 * j + 2 * r + 1];
            a = exp2_f(a - top), b = exp2_f(b - top);
            sum += a + b;
        }
        m.exp_sum[r] = m.exp_sum[r] * keep[r] + sum;
    }
}
KIE_DEVICE void mask_scores(float (&s)[kPage / 2], int key, int query, int lowest) {
    KIE_UNROLL for (int j = 0; j < kPage / 8; ++j) {
        KIE_UNROLL for (int i = 0; i < 4; ++i) {
            const int k = key + 8 * j + (i & 1), q = query + (i & 2) * 4;
            if (k > q || k <= q - lowest) s[4 * j + i] = -1e30f;
        }
    }
}
// Two values of a head, times the sigmoids of their gates, which stand where the values will.
template <class C>
KIE_DEVICE u32 gate_values(u32 gates, float a, float b) {
    if constexpr (C::kGated) {
        float g0, g1;
        unpack_half2(gates, g0, g1);
        a *= reciprocal_f(1.0f + exp2_f(-1.44269504f * g0));
        b *= reciprocal_f(1.0f + exp2_f(-1.44269504f * g1));
    }
    return pack_half2(a, b);
}
// The merged heads as operand of the o product.
template <class C>
KIE_DEVICE void put_attention(const PrefillArgs& args, const Run& run, int layer, Softmax& m,
                              float (&o)[C::kValues / 2]) {
    const int my = lane(), g = my / 4, t = my % 4, warp = thread() / kTeam % 4;
    const int first = run.head * C::kHeadDim + (C::kHalved ? thread() / kCrew * C::kValues : 0);
    KIE_UNROLL for (int r = 0; r < 2; ++r) {
        float exp_sum = m.exp_sum[r];
        exp_sum += shuffle_xor(exp_sum, 1), exp_sum += shuffle_xor(exp_sum, 2);
        if constexpr (C::kSinks)  // a score beside the keys', whose value is 0
            exp_sum += exp2_f(extras_of(args, layer)[C::kAtSinks + run.head] - m.best[r]);
        const float f = reciprocal_f(exp_sum);
        const int place = run.place + 16 * warp + g + 8 * r;
        u8* to = args.scratch + kScrAttn;
        if constexpr (C::kValues % 32 == 0) {
            to += operand_at(run.lane_index, C::kAttn, place, first + 2 * t);
            KIE_UNROLL for (int b = 0; b < C::kValues / 32; ++b) {
                Quad* there = (Quad*)(to + (long)b * kEights * kCores);
                Quad v = {{0, 0, 0, 0}};
                if constexpr (C::kGated) v = *there;
                KIE_UNROLL for (int i = 0; i < 4; ++i) v.v[i] = gate_values<C>(
                    v.v[i], o[16 * b + 4 * i + 2 * r] * f, o[16 * b + 4 * i + 2 * r + 1] * f);
                *there = v;
            }
        } else {
            KIE_UNROLL for (int j = 0; j < C::kValues / 8; ++j) {
                u32* there =
                    (u32*)(to + operand_at(run.lane_index, C::kAttn, place, first + 8 * j + 2 * t));
                *there = gate_values<C>(*there, o[4 * j + 2 * r] * f, o[4 * j + 2 * r + 1] * f);
            }
        }
    }
}

// A team's queries: a warp's rows of 16 as fragments, or where all rows' cores are.
template <class C, bool kShared = C::kQueriesShared>
struct Queries {
    Quad v[C::kSteps];
    KIE_DEVICE const Quad& step(int i) const { return v[i]; }
};
template <class C>
struct Queries<C, true> {
    WideOperand at;
    KIE_DEVICE WideOperand step(int i) const { return wide_shift(at, 256 * i); }
};
template <class C>
KIE_DEVICE void take_queries(const PrefillArgs& args, const Run& run, Queries<C>& q) {
    const int my = lane(), warp = thread() / kTeam % 4;
    const u8* from = args.scratch + kScrQ + my * 16 +
                     query_at<C>(run.lane_index, run.head, run.place + 16 * warp);
    if constexpr (C::kQueriesShared) {
        // Each team brings half of them, as lanes of a fragment have them, for both.
        constexpr int kHalf = C::kSteps / 2, kAcross = C::kHeadDim / 8 * 128;
        const int first = thread() / kCrew * kHalf;
        u8* to = prefill_shared() + kPfQueries;
        q.at = wide_operand(to, 128, kAcross);
        to += 2 * warp * kAcross + my * 4;
        sync_consumers<kWorkers>();  // those before have been used
        KIE_UNROLL for (int i = 0; i < kHalf; ++i) {
            const Quad v = load_state(from + (first + i) * 512);
            KIE_UNROLL for (int n = 0; n < 4; ++n) {
                const int core = 2 * (first + i) + n / 2;
                *(u32*)(to + n % 2 * kAcross + core * 128) = v.v[n];
            }
        }
        writes_before_tiles();
        sync_consumers<kWorkers>();
    } else {
        KIE_UNROLL for (int i = 0; i < C::kSteps; ++i) q.v[i] = load_state(from + i * 512);
    }
}

// A page's scores, under way when this returns.
template <class C>
KIE_DEVICE void score_page(const Queries<C>& q, const u8* keys, float (&s)[kPage / 2]) {
    const WideOperand k = wide_operand(keys, 128, C::kHeadDim / 8 * 128);
    wide_begin();
    multiply_wide<kPage, 0, true>(s, q.step(0), k, C::kHeadDim / 8 * 128);
    KIE_UNROLL for (int i = 1; i < C::kSteps; ++i)
        multiply_wide<kPage, 0>(s, q.step(i), wide_shift(k, 256 * i), C::kHeadDim / 8 * 128);
    wide_commit();
}
template <class C>
KIE_DEVICE void add_values(const u32 (&p)[kPage / 4], const u8* values,
                           float (&o)[C::kValues / 2]) {
    // Of a half the team's own: 8 values by a page are 1,024 bytes.
    if constexpr (C::kHalved) values += thread() / kCrew * (C::kValues / 8 * 1024);
    const WideOperand v = wide_operand(values, 128, 1024);
    wide_begin();
    KIE_UNROLL for (int i = 0; i < kPage / 16; ++i) {
        const Quad a = {{p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]}};
        multiply_wide<C::kValues, 0>(o, a, wide_shift(v, 256 * i), 1024);
    }
    wide_commit();
}

// A page at a time: where products are done as they are asked for, there is nothing to do
// meanwhile, and of a wide head two teams multiply in turns.
template <class C>
KIE_DEVICE void attend_in_turn(const PrefillArgs& args, const Chunk& chunk, int layer,
                               const Run& run, PagePipe& pipe) {
    const int my = lane(), g = my / 4, t = my % 4, warp = thread() / kTeam % 4;
    const int query = chunk.base + run.place + 16 * warp + g;  // and 8 more
    const int window = (int)args.model.layers[layer].window;
    const int lowest = window > 0 ? window : 1 << 30;
    Queries<C> q;
    take_queries<C>(args, run, q);
    float o[C::kValues / 2];
    KIE_UNROLL for (int i = 0; i < C::kValues / 2; ++i) o[i] = 0;
    Softmax m = {{-1e30f, -1e30f}, {0, 0}};
    KIE_NO_UNROLL for (int page = run.first; page <= run.last; ++page, ++pipe.at) {
        float s[kPage / 2], keep[2];
        u32 p[kPage / 4];
        KIE_UNROLL for (int i = 0; i < kPage / 2; ++i) s[i] = 0;
        await_page(pipe.at);
        const u8* keys = page_bytes(pipe.at);
        score_page<C>(q, keys, s);
        wide_finish(s);
        if (page * kPage + kPage > query || page * kPage <= query + 8 - lowest)
            mask_scores(s, page * kPage + 2 * t, query, lowest);
        weigh(m, s, keep);
        KIE_UNROLL for (int i = 0; i < kPage / 4; ++i) p[i] = pack_half2(s[2 * i], s[2 * i + 1]);
        KIE_UNROLL for (int i = 0; i < C::kValues / 2; ++i) o[i] *= keep[i / 2 % 2];
        add_values<C>(p, keys + C::kPageHalf, o);
        wide_finish(o);
        release_page(pipe.at);
    }
    ask_next();
    put_attention<C>(args, run, layer, m, o);
}
// While a page's scores are weighed, the values of the one before are added.
template <class C>
KIE_DEVICE void attend_run(const PrefillArgs& args, const Chunk& chunk, int layer, const Run& run,
                           PagePipe& pipe) {
    if constexpr (!kWideAsync || C::kQueriesShared) {
        attend_in_turn<C>(args, chunk, layer, run, pipe);
        return;
    }
    const int my = lane(), g = my / 4, t = my % 4, warp = thread() / kTeam % 4;
    const int query = chunk.base + run.place + 16 * warp + g;  // and 8 more
    const int window = (int)args.model.layers[layer].window;
    const int lowest = window > 0 ? window : 1 << 30;
    const u32 end = pipe.at + (run.last - run.first);
    Queries<C> q;
    take_queries<C>(args, run, q);
    float o[C::kValues / 2], s[kPage / 2], keep[2];
    KIE_UNROLL for (int i = 0; i < C::kValues / 2; ++i) o[i] = 0;
    KIE_UNROLL for (int i = 0; i < kPage / 2; ++i) s[i] = 0;
    Softmax m = {{-1e30f, -1e30f}, {0, 0}};
    u32 p[kPage / 4];
    const auto weigh_page = [&](u32 at) {
        const int page = run.last - (int)(end - at);
        if (page * kPage + kPage > query || page * kPage <= query + 8 - lowest)
            mask_scores(s, page * kPage + 2 * t, query, lowest);
        weigh(m, s, keep);
        // Here, since a loop keeps what was weighed from being put off behind the wait to come.
        if (at != end) await_page(at + 1);
    };
    const auto pack = [&]() {
        KIE_UNROLL for (int i = 0; i < kPage / 4; ++i) p[i] = pack_half2(s[2 * i], s[2 * i + 1]);
    };
    u32 at = pipe.at;
    await_page(at);
    score_page<C>(q, page_bytes(at), s);
    wide_finish(s);
    weigh_page(at);
    pack();
    KIE_NO_UNROLL for (; at != end; ++at) {
        score_page<C>(q, page_bytes(at + 1), s);
        add_values<C>(p, page_bytes(at) + C::kPageHalf, o);
        wide_wait<1>(s);
        weigh_page(at + 1);
        wide_finish(o);
        release_page(at);
        pack();
        KIE_UNROLL for (int i = 0; i < C::kValues / 2; ++i) o[i] *= keep[i / 2 % 2];
    }
    add_values<C>(p, page_bytes(at) + C::kPageHalf, o);
    wide_finish(o);
    release_page(at);
    pipe.at = end + 1;
    ask_next();
    put_attention<C>(args, run, layer, m, o);
}
template <class C>
KIE_DEVICE void attend_chunk(const PrefillArgs& args, const Chunk& chunk, int layer,
                             PagePipe& pipe) {
    const Span span = all_of(chunk);
    const int runs = runs_of<C>(span), team = thread() / kCrew;
    KIE_NO_UNROLL for (int turn = 0; turn * (int)args.blocks < runs; ++turn) {
        const int i = run_index(args, turn);
        if (i < runs)
            attend_run<C>(args, chunk, layer, run_at<C>(args, chunk, span, layer, i, team), pipe);
    }
}
