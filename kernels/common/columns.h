// What several columns do in their own way: many columns' words are on their way at once, and each
// result is added up in the order of the one-column kernel, so that a sequence's bits are the same
// alone and among others.
#pragma once

// Attention's parts, merged by owners: the blocks of a lane share all words of all columns, a word
// of one column a thread. Everybody gathers them afterwards.
constexpr int kMergeItems = (kColumns * kWordsA + kBlocksPerLane - 1) / kBlocksPerLane;
// How the one-column kernel's warps share the splits of a word (see merge).
constexpr int kMergeCount = kMerge == 1 ? kWordsA / kBlocksPerLane : kWordsA / kWarps;
constexpr int kMergeLow = kMergeCount & -kMergeCount,
              kMergeGroups = 32 / (kMergeLow < 32 ? kMergeLow : 32);

KIE_DEVICE void merge_one(Watch& watch, const u64* parts, int word, int column, int shift,
                          const PageSpan& span, u32 epoch, u32 where, u64* out) {
    constexpr int kGroups = kMergeGroups < kSplitsMax ? kMergeGroups : kSplitsMax;
    const int pages = span.last - span.first + 1, live = pages < kSplitsMax ? pages : kSplitsMax;
    const auto lot = [&](int split) {
        return parts + (long)(split * kColumns + column) * kPartWords + word / 8 * kPartLine;
    };
    u64 a[kSplitsMax], m[kSplitsMax];
    KIE_UNROLL for (int s = 0; s < kSplitsMax; ++s) a[s] = m[s] = 0;
    watch.polls = 0;
    for (;;) {
        bool ok = true;
        KIE_UNROLL for (int s = 0; s < kSplitsMax; ++s) if (s < live) {
            const u64* p = lot((span.first + s + shift) % kSplitsMax);
            m[s] = load_word(p + kPartMass), a[s] = load_word(p + word % 8);
        }
        KIE_UNROLL for (int s = 0; s < kSplitsMax; ++s) if (s < live) ok &=
            epoch_of(a[s]) == epoch && epoch_of(m[s]) == epoch;
        if (ok || kNoWaits || !patient(watch, where, epoch, epoch_of(a[0]))) break;
        pause_ns(20);
    }
    float top = -1e30f, total[kGroups], x0[kGroups], x1[kGroups];
    KIE_UNROLL for (int s = 0; s < kSplitsMax; ++s) if (s < live) top =
        max_f(top, number((u32)m[s]));
    KIE_UNROLL for (int g = 0; g < kGroups; ++g) total[g] = x0[g] = x1[g] = 0;
    KIE_UNROLL for (int s = 0; s < kSplitsMax; ++s) if (s < live) {
        const float f = exp2_f(number((u32)m[s]) - top);
        float v0, v1;
        unpack_half2((u32)a[s], v0, v1);
        total[s % kGroups] += f, x0[s % kGroups] += f * v0, x1[s % kGroups] += f * v1;
    }
    KIE_UNROLL for (int k = 1; k < kGroups; k *= 2) {
        KIE_UNROLL for (int g = 0; g + k < kGroups; g += 2 * k) total[g] += total[g + k],
            x0[g] += x0[g + k], x1[g] += x1[g + k];
    }
    const float inverse = reciprocal_f(total[0]);
    publish(out, pack_half2(x0[0] * inverse, x1[0] * inverse), epoch);
}
// This block's share.
KIE_DEVICE void merge_columns(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    const long unit = (long)layer * kLanes + b.lane_index;
    const u64* parts = args.words + kAtPart + unit * kSplitsMax * kColumns * kPartWords;
    KIE_NO_UNROLL for (int n = thread(); n < kMergeItems; n += kThreads) {
        const int item = b.seat * kMergeItems + n, column = item / kWordsA, word = item % kWordsA;
        if (column >= live_of(b)) continue;
        const PageSpan span = pages_of(layer_of(b, layer), (int)position_at(args, b.step, column));
        merge_one(watch, parts, word, column, shift_at(args, column), span, b.epoch,
                  layer << 4 | 2, args.words + kAtAttn + unit * kVecA + item);
    }
}
// A warp's share of all live columns, a few words of each, into shared memory.
template <int kCount>
KIE_DEVICE void gather_narrow(Watch& w, const u64* base, int base_stride, u32 epoch, u32 where,
                              int live, u32* x, int x_stride) {
    constexpr int kEach = kCount / 2, kLoads = (kEach * kColumns + kTeam - 1) / kTeam;
    const int my = lane();
    await_one(w, base + block() * 10 % kCount, epoch, where, kRestGather);
    u64 a[kLoads], b[kLoads];
    KIE_UNROLL for (int i = 0; i < kLoads; ++i) a[i] = b[i] = 0;
    w.polls = 0;
    for (;;) {
        bool ok = true;
        KIE_UNROLL for (int i = 0; i < kLoads; ++i) {
            const int n = i * kTeam + my;
            if (n / kEach < live)
                load_words(base + (long)(n / kEach) * base_stride + n % kEach * 2, a[i], b[i]);
        }
        KIE_UNROLL for (int i = 0; i < kLoads; ++i) if ((i * kTeam + my) / kEach < live) ok &=
            epoch_of(a[i]) == epoch && epoch_of(b[i]) == epoch;
        if (ok || kNoWaits || !patient(w, where, epoch, epoch_of(a[0]))) break;
    }
    KIE_UNROLL for (int i = 0; i < kLoads; ++i) {
        const int n = i * kTeam + my;
        if (n / kEach < live)
            *(u64*)(x + n / kEach * x_stride + n % kEach * 2) = b[i] << 32 | (u32)a[i];
    }
}

// The product with vectors that are nowhere but in the words: each warp has a range of columns of
// its own and takes its operands as they are needed, some stages ahead. Traffic: the words once.
template <class S>
struct WordStage {
    u64 v[S::chunk][4];
};
template <class S>
KIE_DEVICE void load_stage(WordStage<S>& w, const u64* from) {
    KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
        load_words(from + c * 16, w.v[c][0], w.v[c][1]);
        load_words(from + c * 16 + 2, w.v[c][2], w.v[c][3]);
    }
}
template <class S>
KIE_DEVICE Column<S> take_words(Watch& watch, WordStage<S>& w, const u64* from, u32 epoch,
                                u32 where) {
    watch.polls = 0;
    for (;;) {
        bool ok = true;
        KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
            KIE_UNROLL for (int i = 0; i < 4; ++i) ok &= epoch_of(w.v[c][i]) == epoch;
        }
        if (ok || kNoWaits || !patient(watch, where, epoch, epoch_of(w.v[0][0]))) break;
        load_stage<S>(w, from);
    }
    Column<S> x;
    KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
        KIE_UNROLL for (int i = 0; i < 4; ++i) x.v[c].v[i] = (u32)w.v[c][i];
    }
    return x;
}
template <class S>
KIE_DEVICE Sums<S> multiply_words(Ring& ring, Watch& watch, Lot<S>& lot, const u64* base,
                                  int stride, u32 epoch, u32 where, int live) {
    static_assert(S::row_warps == 1, "ranges of columns are a warp's own");
    constexpr int kMost = S::chunk == 1 ? 4 : 2, kAhead = S::stages < kMost ? S::stages : kMost;
    const int me = thread(), k_warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    const u64* mine = base + (long)(g < live ? g : 0) * stride + k_warp * S::pairs * 16 + 4 * t;
    constexpr int kStep = S::chunk * 16;
    await_one(watch, base + k_warp * S::pairs * 16 + block() * 10 % (S::pairs * 16), epoch, where,
              kRestGather);
    WordStage<S> ahead[kAhead];
    KIE_UNROLL for (int d = 0; d < kAhead; ++d) load_stage<S>(ahead[d], mine + d * kStep);
    Sums<S> s;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
    Lot<S> other;
    bool here = S::stages > 1 && stage_here(ring);
    KIE_NO_UNROLL for (int first = 0; first < S::stages; first += kAhead) {
        KIE_UNROLL for (int d = 0; d < kAhead; ++d) {
            const int stage = first + d;
            if (S::stages % kAhead != 0 && stage >= S::stages) continue;
            Lot<S>&now = d % 2 ? other : lot, &next = d % 2 ? lot : other;
            const Column<S> x = take_words<S>(watch, ahead[d], mine, epoch, where);
            if (stage + kAhead < S::stages) load_stage<S>(ahead[d], mine + kAhead * kStep);
            mine += kStep;
            if (stage + 1 < S::stages) {
                take_lot<S>(ring, next, here);
                here = stage + 2 < S::stages && stage_here(ring);
            }
            add_lot<S>(s, now, x);
        }
    }
    return s;
}

// Other lanes' words of the results that a thread owns alone: asked for before the product, looked
// at behind it. Who has no such result takes another's.
template <class S>
struct Far {
    u64 v[S::items][kLanesAll];
};
template <class S>
KIE_DEVICE void load_far(const DecodeArgs& args, const Block& b, const u64* from, Far<S>& far) {
    each_item<S>([&](int item, int pair, int column, bool live) {
        const long at = live && column < live_of(b) ? (long)column * kWordsH + pair : 0;
        KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) far.v[item][l] =
            load_word(from + l * kVecH + b.seat * (kRowsO / 2) + at);
    });
}
template <class S>
KIE_DEVICE void take_far(Watch& watch, const DecodeArgs& args, const Block& b, const u64* from,
                         u32 where, Far<S>& far) {
    watch.polls = 0;
    for (;;) {
        bool ok = true;
        u32 seen = b.epoch;
        int late = 0;
        KIE_UNROLL for (int i = 0; i < S::items; ++i) {
            KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) if (epoch_of(far.v[i][l]) != b.epoch)
                ok = false, seen = epoch_of(far.v[i][l]), late = l;
        }
        if (ok || kNoWaits || !patient(watch, of_rank(late) | where, b.epoch, seen)) break;
        load_far<S>(args, b, from, far);
    }
}
// Their sum in the order of the one-column kernel's four lanes. `alike`: this lane's own part, a
// word like the others', counts, too.
template <class S>
KIE_DEVICE void add_far(const Far<S>& far, const Block& b, int item, bool alike, float& a0,
                        float& a1) {
    float sum[4][2];
    KIE_UNROLL for (int t = 0; t < 4; ++t) {
        sum[t][0] = sum[t][1] = 0;
        KIE_UNROLL for (int l = t; l < kLanesAll; l += 4) {
            float x0, x1;
            unpack_half2((u32)far.v[item][l], x0, x1);
            if (l != b.lane_all || alike) sum[t][0] += x0, sum[t][1] += x1;
        }
    }
    a0 = (sum[0][0] + sum[1][0]) + (sum[2][0] + sum[3][0]);
    a1 = (sum[0][1] + sum[1][1]) + (sum[2][1] + sum[3][1]);
}
