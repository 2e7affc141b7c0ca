// Attention of one position over its pages, split over the blocks of a lane.
//   part = softmax(q k / sqrt(d)) v over the pages that a block owns, and log2 of its mass.
// Page p of column c belongs to split (p + c) % kSplitsMax for ever, so only the block that wrote a
// key reads it again. A page of one (layer, lane, kv head): 64 keys as rows, then the values
// transposed (feature x 64 positions): both are read as matrix fragments straight from memory.
// q carries 1 / sqrt(d) and log2 e. Traffic: 2 * positions * head_dim * 2 bytes a kv head.
#pragma once

constexpr int kPageHalf = kPage * kHeadDim * 2;  // bytes of the keys (or values) of a page
constexpr int kScoreWarps = 4, kValueWarps = kWarps - kScoreWarps;
constexpr int kValueTiles = (kHeadDim / 16 + kValueWarps - 1) / kValueWarps;
constexpr int kHeld = max_i(kHeadDim / 16, 4 * kValueTiles);

struct PageSpan {
    int first, last, position;
};  // pages a query sees
KIE_DEVICE PageSpan pages_of(int layer, int position) {
    int from = 0;
    if (layer < kWindowLayers && position >= kWindow) from = position - kWindow + 1;
    return {from / kPage, position / kPage, position};
}
KIE_DEVICE int first_page(const PageSpan& s, int split, int column) {
    const int r = (split + 64 * kSplitsMax - column - s.first) % kSplitsMax;
    return s.first + r;
}
KIE_DEVICE u8* page_at(const DecodeArgs& args, const u8* shared, int layer, int kv_index,
                       int column, int page) {
    const u64 at =
        (u64)((const u32*)(shared + kShTable))[column * kPagesMax + page] * (kAll* kKvHeads) +
        (u64)layer * (kLanes * kKvHeads) + kv_index;
    return args.pool + at * (2 * kPageHalf);
}

// What a warp holds of a page: 16 keys, or 16 (32) features of 64 values.
struct Held {
    Quad v[kHeld];
};
KIE_DEVICE void hold(Held& h, const u8* page) {
    const int me = thread(), warp = me / kWarp, g = me % kWarp / 4, t = me % 4;
    if (warp < kScoreWarps) {
        KIE_UNROLL for (int j = 0; j < kHeadDim / 32; ++j) {
            KIE_UNROLL for (int r = 0; r < 2; ++r) h.v[2 * j + r] =
                load_state(page + ((16 * warp + g + 8 * r) * kHeadDim + 32 * j + 8 * t) * 2);
        }
    } else {
        KIE_UNROLL for (int i = 0; i < kValueTiles; ++i) {
            const int tile = warp - kScoreWarps + i * kValueWarps;
            if (tile < kHeadDim / 16) KIE_UNROLL for (int j = 0; j < 2; ++j) {
                    KIE_UNROLL for (int r = 0; r < 2; ++r) h.v[4 * i + 2 * j + r] = load_state(
                        page + kPageHalf + ((16 * tile + 2 * g + r) * kPage + 32 * j + 8 * t) * 2);
                }
        }
    }
}
// `two` with its half number `which` (0 or 1; any other: none) replaced. Masks, because a choice of
// registers by index would put them into memory.
KIE_DEVICE u32 with_half(u32 two, int which, u32 half) {
    const u32 mask = which == 0 ? 0xffffu : which == 1 ? 0xffff0000u : 0u;
    return (two & ~mask) | ((half * 0x10001u) & mask);
}

// The current position's value into the features that a warp holds.
KIE_DEVICE void put_value(Held& h, const u16* value, int slot) {
    const int me = thread(), warp = me / kWarp, g = me % kWarp / 4, t = me % 4;
    KIE_UNROLL for (int i = 0; i < kValueTiles; ++i) {
        const int tile = warp - kScoreWarps + i * kValueWarps;
        if (tile >= kHeadDim / 16) continue;
        const u32 a = value[16 * tile + 2 * g], b = value[16 * tile + 2 * g + 1];
        KIE_UNROLL for (int j = 0; j < 2; ++j) {
            KIE_UNROLL for (int e = 0; e < 4; ++e) {
                const int which = slot - 32 * j - 8 * t - 2 * e;
                Quad &r0 = h.v[4 * i + 2 * j], &r1 = h.v[4 * i + 2 * j + 1];
                r0.v[e] = with_half(r0.v[e], which, a), r1.v[e] = with_half(r1.v[e], which, b);
            }
        }
    }
}

// One column. `fresh` = the block owns the page of the current position: it takes k and v from the
// words, uses them at once and stores them for later steps.
struct AttendAt {
    int layer, lane_index, kv_head, split, column;
};
// Takes the query heads and, where this split owns the newest page, the new key and value: into
// shared memory for this step, into the page for later ones.
KIE_DEVICE void take_heads(Watch& watch, const DecodeArgs& args, const AttendAt& at,
                           const PageSpan& span, u32 epoch, bool fresh, u8* shared) {
    const int me = thread(), slot = span.position % kPage;
    u32* q_sh = (u32*)(shared + kShQkv);
    const int kv_index = at.lane_index * kKvHeads + at.kv_head;
    const long unit = (long)at.layer * kLanes + at.lane_index;
    constexpr int kQ = kGroup * kHeadDim / 2, kHalf = kHeadDim / 2, kTake = kQ + 2 * kHalf;
    const u64* from = args.words + kAtQkv + unit * kVecQ + (long)at.column * (kQkv / 2);
    KIE_UNROLL for (int i = 0; i < (kTake + kThreads - 1) / kThreads; ++i) {
        const int n = i * kThreads + me;
        if (n < kQ || (fresh && n < kTake)) {
            const int j = n < kQ           ? at.kv_head * kQ + n
                          : n < kQ + kHalf ? kAttn / 2 + at.kv_head * kHalf + n - kQ
                                           : (kAttn + kKvHeads * kHeadDim) / 2 +
                                                 at.kv_head * kHalf + n - kQ - kHalf;
            watch.polls = 0;
            u64 v = load_word(from + j);
            while (!kNoWaits && epoch_of(v) != epoch &&
                   patient(watch, at.layer << 4 | 1, epoch, epoch_of(v)))
                v = load_word(from + j);
            q_sh[n] = (u32)v;
            if (n >= kQ) {
                u8* p = page_at(args, shared, at.layer, kv_index, at.column, span.last);
                if (n < kQ + kHalf) {
                    *(u32*)(p + (slot * kHalf + n - kQ) * 4) = (u32)v;
                } else {
                    u16* values = (u16*)(p + kPageHalf) + 2 * (n - kQ - kHalf) * kPage + slot;
                    values[0] = (u16)v, values[kPage] = (u16)((u32)v >> 16);
                }
            }
        }
    }
}

KIE_DEVICE void attend(Watch& watch, const DecodeArgs& args, const AttendAt& at,
                       const PageSpan& span, u32 epoch, Held& held, int page, u8* shared) {
    const int me = thread(), warp = me / kWarp, g = me % kWarp / 4, t = me % 4;
    u32* q_sh = (u32*)(shared + kShQkv);
    float* scores = (float*)(shared + kShScores);
    const int kv_index = at.lane_index * kKvHeads + at.kv_head, slot = span.position % kPage;
    const bool fresh = (span.last + at.column) % kSplitsMax == at.split;
    const long unit = (long)at.layer * kLanes + at.lane_index;
    take_heads(watch, args, at, span, epoch, fresh, shared);
    sync_consumers<kThreads>();
    float best = -1e30f, mass = 0, sums[kValueTiles][4];
    KIE_UNROLL for (int i = 0; i < kValueTiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) sums[i][j] = 0;
    }
    const u8* q_bytes = (const u8*)q_sh;
    const u8* k_new = q_bytes + kGroup * kHeadDim * 2;
    const u16* v_new = (const u16*)(k_new + kHeadDim * 2);
    const int lowest = at.layer < kWindowLayers ? span.position - kWindow : -1;
    KIE_NO_UNROLL for (int turn = 0; page <= span.last; ++turn, page += kSplitsMax) {
        const bool here = fresh && page == span.last;
        float* sc = scores + (turn & 1) * (kGroup * kPage);
        if (warp < kScoreWarps) {
            float d[4] = {0, 0, 0, 0};
            KIE_UNROLL for (int j = 0; j < kHeadDim / 32; ++j) {
                const Quad b =
                    *(const Quad*)(q_bytes + ((g % kGroup) * kHeadDim + 32 * j + 8 * t) * 2);
                Quad r0 = held.v[2 * j], r1 = held.v[2 * j + 1];
                if (here && 16 * warp + g == slot)
                    r0 = *(const Quad*)(k_new + (32 * j + 8 * t) * 2);
                if (here && 16 * warp + g + 8 == slot)
                    r1 = *(const Quad*)(k_new + (32 * j + 8 * t) * 2);
                mma(d, r0.v[0], r1.v[0], r0.v[1], r1.v[1], b.v[0], b.v[1]);
                mma(d, r0.v[2], r1.v[2], r0.v[3], r1.v[3], b.v[2], b.v[3]);
            }
            KIE_UNROLL for (int i = 0; i < 4; ++i) {
                const int head = 2 * t + (i & 1), row = 16 * warp + g + (i & 2) * 4,
                          position = page * kPage + row;
                if (head < kGroup)
                    sc[head * kPage + row] =
                        position <= span.position && position > lowest ? d[i] : -1e30f;
            }
            if (page + kSplitsMax <= span.last)
                hold(held, page_at(args, shared, at.layer, kv_index, at.column, page + kSplitsMax));
        } else if (here) {
            put_value(held, v_new, slot);  // while the scores are being made
        }
        sync_consumers<kThreads>();
        if (warp >= kScoreWarps) {
            float s[16], top = -1e30f, sum = 0;
            u32 p[8];
            KIE_UNROLL for (int j = 0; j < 4; ++j) {
                const Quad f =
                    *(const Quad*)(sc + (g % kGroup) * kPage + (j / 2) * 32 + 8 * t + (j & 1) * 4);
                KIE_UNROLL for (int i = 0; i < 4; ++i) s[4 * j + i] = number(f.v[i]),
                                                                 top = max_f(top, s[4 * j + i]);
            }
            top = max_f(top, shuffle_xor(top, 1)), top = max_f(top, shuffle_xor(top, 2));
            top = max_f(top, best);
            const float keep = exp2_f(best - top);
            KIE_UNROLL for (int i = 0; i < 16; ++i) s[i] = exp2_f(s[i] - top), sum += s[i];
            KIE_UNROLL for (int i = 0; i < 8; ++i) p[i] = pack_half2(s[2 * i], s[2 * i + 1]);
            sum += shuffle_xor(sum, 1), sum += shuffle_xor(sum, 2);
            mass = mass * keep + sum, best = top;
            const float k0 = shuffle(keep, 8 * t), k1 = shuffle(keep, 8 * t + 4);
            KIE_UNROLL for (int i = 0; i < kValueTiles; ++i) {
                const int tile = warp - kScoreWarps + i * kValueWarps;
                if (tile >= kHeadDim / 16) continue;
                sums[i][0] *= k0, sums[i][1] *= k1, sums[i][2] *= k0, sums[i][3] *= k1;
                KIE_UNROLL for (int j = 0; j < 2; ++j) {
                    const Quad &r0 = held.v[4 * i + 2 * j], &r1 = held.v[4 * i + 2 * j + 1];
                    mma(sums[i], r0.v[0], r1.v[0], r0.v[1], r1.v[1], p[4 * j], p[4 * j + 1]);
                    mma(sums[i], r0.v[2], r1.v[2], r0.v[3], r1.v[3], p[4 * j + 2], p[4 * j + 3]);
                }
            }
            if (page + kSplitsMax <= span.last)
                hold(held, page_at(args, shared, at.layer, kv_index, at.column, page + kSplitsMax));
        }
    }
    if (warp >= kScoreWarps) {
        const float inverse = reciprocal_f(mass);
        const float i0 = shuffle(inverse, 8 * t), i1 = shuffle(inverse, 8 * t + 4);
        const long lot = (unit * kSplitsMax + at.split) * kColumns + at.column;
        u64* to = args.words + kAtPart + lot * kPartWords +
                  at.kv_head * kGroup * (kHeadDim / 16) * kPartLine;
        KIE_UNROLL for (int i = 0; i < kValueTiles; ++i) {
            const int tile = warp - kScoreWarps + i * kValueWarps;
            if (tile >= kHeadDim / 16) continue;
            constexpr int kHead = kHeadDim / 16 * kPartLine;
            u64* line = to + tile * kPartLine;
            if (2 * t < kGroup)
                publish(line + 2 * t * kHead + g, pack_half2(sums[i][0] * i0, sums[i][2] * i0),
                        epoch);
            if (2 * t + 1 < kGroup)
                publish(line + (2 * t + 1) * kHead + g,
                        pack_half2(sums[i][1] * i1, sums[i][3] * i1), epoch);
            if (t == 0 && g < kGroup)
                publish(line + g * kHead + kPartMass, bits(best + log2_f(mass)), epoch);
        }
    }
}

// The merged output of up to 32 neighbouring words a warp pass: a lane takes one word (two features
// of a head) of some of the splits, lanes that share a word add up at the end, in a fixed order.
template <int kCount>  // words this warp takes, from `first` of the column's kAttn / 2
KIE_DEVICE void merge(Watch& watch, const DecodeArgs& args, int layer, int lane_index, int column,
                      const PageSpan& span, u32 epoch, int first, u32* x, u64* out, u32 rest_ns) {
    constexpr int kWide = kCount < 32 ? kCount : 32, kGroups = 32 / kWide;
    constexpr int kEach = (kSplitsMax + kGroups - 1) / kGroups;
    static_assert(kCount % kWide == 0 && 32 % kWide == 0, "merge share");
    const int pages = span.last - span.first + 1, live = pages < kSplitsMax ? pages : kSplitsMax;
    const long unit = (long)layer * kLanes + lane_index;
    const int my = lane(), group = my / kWide;
    KIE_NO_UNROLL for (int n = 0; n < kCount; n += kWide) {
        const int w = first + n + my % kWide;
        const int line = w / 8 * kPartLine;  // heads are whole numbers of lines
        u64 a[kEach], m[kEach];
        const u64* parts = args.words + kAtPart + unit * kSplitsMax * kColumns * kPartWords;
        const auto lot = [&](int split) {
            return parts + (long)(split * kColumns + column) * kPartWords + line;
        };
        if (n == 0)
            await_one(watch, lot((span.last + column) % kSplitsMax) + kPartMass, epoch,
                      layer << 4 | 2, rest_ns);
        watch.polls = 0;
        for (;;) {
            bool ok = true;
            KIE_UNROLL for (int i = 0; i < kEach; ++i) {
                const int s = group + i * kGroups;
                const u64* p = lot((span.first + s + column) % kSplitsMax);
                if (s < live) m[i] = load_word(p + kPartMass), a[i] = load_word(p + w % 8);
            }
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if (group + i * kGroups < live) ok &=
                epoch_of(a[i]) == epoch && epoch_of(m[i]) == epoch;
            if (ok || kNoWaits || !patient(watch, layer << 4 | 2, epoch, epoch_of(a[0]))) break;
        }
        float top = -1e30f, total = 0, x0 = 0, x1 = 0;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) if (group + i * kGroups < live) top =
            max_f(top, number((u32)m[i]));
        KIE_UNROLL for (int k = kWide; k < 32; k *= 2) top = max_f(top, shuffle_xor(top, k));
        KIE_UNROLL for (int i = 0; i < kEach; ++i) if (group + i * kGroups < live) {
            const float f = exp2_f(number((u32)m[i]) - top);
            float v0, v1;
            unpack_half2((u32)a[i], v0, v1);
            total += f, x0 += f * v0, x1 += f * v1;
        }
        KIE_UNROLL for (int k = kWide; k < 32; k *= 2) total += shuffle_xor(total, k),
            x0 += shuffle_xor(x0, k), x1 += shuffle_xor(x1, k);
        total = reciprocal_f(total);
        const u32 both = pack_half2(x0 * total, x1 * total);
        if (group == 0) {
            if (out)
                publish(out + w, both, epoch);
            else
                x[n + my % kWide] = both;
        }
    }
}
