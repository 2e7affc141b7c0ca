// Attention of a chunk over the pages, which already hold the chunk's own keys and values. A team
// takes 64 queries of a head; two teams share each page: two heads of a group, or, where groups are
// odd, two neighbouring runs of queries. Pages come 16 bytes a thread, straight into the matrix
// unit's cores, one page ahead. Scores stay in registers and become the second product's operand.
#pragma once

constexpr bool kPaired = kGroup % 2 == 0;
constexpr int kRun = 64, kItemRun = kPaired ? kRun : 2 * kRun;  // queries of a team, of an item
constexpr int kItemHeads = kPaired ? kHeads / 2 : kHeads;
constexpr int kPageBuffers = 4;
static_assert(kPageBuffers * 2 * kPageHalf <= kStages * kStageBytes, "pages fit the ring");
constexpr int kSteps = kHeadDim / 16, kPageQuads = 8 * kHeadDim;  // quads of keys, of values
static_assert(kHeadDim % 16 == 0, "whole fragments");

struct Run {
    int lane_index, head, place, first, last;  // this team's queries; pages of the item
};
// Long runs first, dealt out there and back, so that blocks end together.
KIE_DEVICE int runs_of(const Chunk& c) {
    return (c.to + kItemRun - 1) / kItemRun * (kLanes * kItemHeads);
}
KIE_DEVICE Run run_at(const Chunk& c, int layer, int i, int team) {
    const int runs = (c.to + kItemRun - 1) / kItemRun;
    const int start = (runs - 1 - i / (kLanes * kItemHeads)) * kItemRun;
    const int u = i % (kLanes * kItemHeads), head = u % kItemHeads;
    int first = 0, end = start + kItemRun - 1;
    if (end >= c.to) end = c.to - 1;
    if (layer < kWindowLayers && c.base + start >= kWindow)
        first = (c.base + start - kWindow + 1) / kPage;
    return {u / kItemHeads, kPaired ? 2 * head + team : head, start + (kPaired ? 0 : team * kRun),
            first, (c.base + end) / kPage};
}

// A page's keys as 64 columns x head_dim, its values as head_dim columns x 64.
KIE_DEVICE void fetch_page(const u8* page, u8* to) {
    KIE_NO_UNROLL for (int i = thread(); i < kPageQuads; i += kWorkers) {
        const int row = i % 8;
        const int ck = i / 8 % (kHeadDim / 8), rk = i / kHeadDim * 8 + row;
        quad_copy(to + i * 16, page + (rk * kHeadDim + ck * 8) * 2);
        const int cv = i / 8 % 8, rv = i / 64 * 8 + row;
        quad_copy(to + kPageHalf + i * 16, page + kPageHalf + (rv * kPage + cv * 8) * 2);
    }
}

struct Softmax {
    float best[2], mass[2];  // of this thread's two queries
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
        m.mass[r] = m.mass[r] * keep[r] + sum;
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
// The merged heads as operand of the o product.
KIE_DEVICE void put_attention(const PrefillArgs& args, const Run& run, Softmax& m,
                              float (&o)[kHeadDim / 2]) {
    const int my = lane(), g = my / 4, t = my % 4, warp = thread() / kWarp % 4;
    KIE_UNROLL for (int r = 0; r < 2; ++r) {
        float mass = m.mass[r];
        mass += shuffle_xor(mass, 1), mass += shuffle_xor(mass, 2);
        const float f = reciprocal_f(mass);
        const int place = run.place + 16 * warp + g + 8 * r;
        u8* to = args.scratch + kScrAttn;
        if constexpr (kHeadDim % 32 == 0) {
            to += operand_at(run.lane_index, kAttn, place, run.head * kHeadDim + 2 * t);
            KIE_UNROLL for (int b = 0; b < kHeadDim / 32; ++b) {
                Quad v;
                KIE_UNROLL for (int i = 0; i < 4; ++i) v.v[i] =
                    pack_half2(o[16 * b + 4 * i + 2 * r] * f, o[16 * b + 4 * i + 2 * r + 1] * f);
                *(Quad*)(to + (long)b * kEights * kCores) = v;
            }
        } else {
            KIE_UNROLL for (int j = 0; j < kHeadDim / 8; ++j)
                *(u32*)(to + operand_at(run.lane_index, kAttn, place,
                                        run.head * kHeadDim + 8 * j + 2 * t)) =
                    pack_half2(o[4 * j + 2 * r] * f, o[4 * j + 2 * r + 1] * f);
        }
    }
}

// A page's scores, under way when this returns.
KIE_DEVICE void score_page(const Quad (&q)[kSteps], const u8* keys, float (&s)[kPage / 2]) {
    const WideOperand k = wide_operand(keys, 128, kHeadDim / 8 * 128);
    wide_begin();
    multiply_wide<kPage, 0, true>(s, q[0], k, kHeadDim / 8 * 128);
    KIE_UNROLL for (int i = 1; i < kSteps; ++i)
        multiply_wide<kPage, 0>(s, q[i], wide_shift(k, 256 * i), kHeadDim / 8 * 128);
    wide_commit();
}
KIE_DEVICE void add_values(const u32 (&p)[kPage / 4], const u8* values, float (&o)[kHeadDim / 2]) {
    const WideOperand v = wide_operand(values, 128, 1024);
    wide_begin();
    KIE_UNROLL for (int i = 0; i < kPage / 16; ++i) {
        const Quad a = {{p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]}};
        multiply_wide<kHeadDim, 0>(o, a, wide_shift(v, 256 * i), 1024);
    }
    wide_commit();
}

// While a page's scores are weighed, the values of the one before are added. Of the four page
// buffers two are being filled, one is scored, one has its values in use.
KIE_DEVICE void attend_run(const PrefillArgs& args, const Chunk& chunk, int layer, const Run& run,
                           u8* pages) {
    const int my = lane(), g = my / 4, t = my % 4, warp = thread() / kWarp % 4;
    const int kv = run.lane_index * kKvHeads + run.head / kGroup;
    const int query = chunk.base + run.place + 16 * warp + g;  // and 8 more
    const int lowest = layer < kWindowLayers ? kWindow : 1 << 30;
    const auto buffer = [&](int page) { return pages + page % kPageBuffers * (2 * kPageHalf); };
    const auto fetch = [&](int page) {
        if (page <= run.last) fetch_page(prefill_page(args, layer, kv, page), buffer(page));
        quads_commit();
    };
    const auto page_here = [&]() {  // all but the newest
        quads_here<1>();
        writes_before_tiles();
        sync_consumers<kWorkers>();
    };
    fetch(run.first);
    fetch(run.first + 1);
    Quad q[kSteps];
    const u8* from =
        args.scratch + kScrQ + query_at(run.lane_index, run.head, run.place + 16 * warp);
    KIE_UNROLL for (int i = 0; i < kSteps; ++i) q[i] = load_state(from + i * 512 + my * 16);
    float o[kHeadDim / 2], s[kPage / 2], keep[2];
    KIE_UNROLL for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0;
    KIE_UNROLL for (int i = 0; i < kPage / 2; ++i) s[i] = 0;
    Softmax m = {{-1e30f, -1e30f}, {0, 0}};
    u32 p[kPage / 4];
    const auto weigh_page = [&](int page) {
        if (page * kPage + kPage > query || page * kPage <= query + 8 - lowest)
            mask_scores(s, page * kPage + 2 * t, query, lowest);
        weigh(m, s, keep);
        fetch(page + 2);  // a loop: what was weighed is not put off behind the wait that follows
    };
    const auto pack = [&]() {
        KIE_UNROLL for (int i = 0; i < kPage / 4; ++i) p[i] = pack_half2(s[2 * i], s[2 * i + 1]);
    };
    page_here();
    score_page(q, buffer(run.first), s);
    wide_finish(s);
    weigh_page(run.first);
    pack();
    KIE_NO_UNROLL for (int page = run.first; page < run.last; ++page) {
        page_here();
        score_page(q, buffer(page + 1), s);
        add_values(p, buffer(page) + kPageHalf, o);
        wide_wait<1>(s);
        weigh_page(page + 1);
        wide_finish(o);
        pack();
        KIE_UNROLL for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= keep[i / 2 % 2];
    }
    add_values(p, buffer(run.last) + kPageHalf, o);
    wide_finish(o);
    put_attention(args, run, m, o);
    quads_here<0>();
    sync_consumers<kWorkers>();  // all page buffers are free
}
KIE_DEVICE void attend_chunk(const PrefillArgs& args, const Chunk& chunk, int layer, u8* shared) {
    const int runs = runs_of(chunk), team = thread() / kTeam;
    int turn = 0;
    KIE_NO_UNROLL for (int i = 0; i < runs; i += args.blocks, turn ^= 1) {
        const int at = i + (turn ? (int)args.blocks - 1 - (int)block() : (int)block());
        if (at >= runs) continue;
        attend_run(args, chunk, layer, run_at(chunk, layer, at, team), shared + kPfRing);
    }
}
