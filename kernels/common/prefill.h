// The prefill kernel: a persistent grid takes a chunk of positions through all layers, over the
// same line of weights and the same pages that decoding uses. Per layer five phases (qkv,
// attention, o, gate/up, down; more for norms of heads and where lanes add each other's outputs of
// the same layer) with a grid barrier behind each; a phase is a list of equal items (128 rows x 256
// positions of a product), dealt out in turn. One team copies weights and activations into a ring
// of shared memory, two teams multiply 64 rows each. Every sum has one fixed order.
//
// Several ranks each run this over their own lanes. What a lane adds in a layer goes to all lanes
// that will want it, on every rank; behind such a phase the grids of all ranks meet.
#pragma once

#include "args.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "matvec.h"
#include "ops/unit.h"
#include "platform.h"
#include "prefill_attention.h"
#include "prefill_feed.h"
#include "prefill_mix.h"
#include "prefill_norm.h"
#include "prefill_shape.h"
#include "shape.h"
#include "wide.h"

// ---- The multiplying teams.
KIE_DEVICE void await_stage(const Pipe& p) {
    while (!slot_filled(stage_slot(p.at), p.parity))
        if (*stop_word()) break;
}
struct Share {
    Quad v[4];
};  // a warp's 16 rows of a stage: 64 of k
KIE_CONST_FN int lane_bytes(int bits) { return bits == kBitsF16 || bits == kBitsF8 ? 16 : 8; }
KIE_CONST_FN int tile_bytes(int bits) { return bits == kBitsF16 ? 1024 : 32 * lane_bytes(bits); }
// Where a thread's part of its warp's rows lies: of those that one block owns, or of the matrix's.
template <int kBits>
struct OwnRows {
    int rows;
    KIE_DEVICE bool live() const { return (int)lane() < 2 * rows; }
    KIE_DEVICE u32 at() const {
        return thread() / kTeam * tile_bytes(kBits) + lane() * lane_bytes(kBits);
    }
    KIE_DEVICE int tile_rows() const { return rows; }
};
struct DenseRows {
    u32 where;  // its tile's rows, its byte
    KIE_DEVICE bool live() const { return where != 0; }
    KIE_DEVICE u32 at() const { return where & 0xffff; }
    KIE_DEVICE int tile_rows() const { return where >> 16; }
};
template <class S>
KIE_DEVICE DenseRows dense_rows(const WideItem& item, int all) {
    const int first = 16 * item.frag, row = first + thread() / kTeam * 16 + lane() / 4 * 2;
    if (row >= min_i(first + 16 * item.tiles, all)) return {0};
    const int in = row % S::rows, tile = in - in % 16, rows = min_i(S::rows - tile, 16);
    const int from = row - in + tile - touched_by<S>(first, first + 16).first;
    constexpr int kRow = S::row_bytes;
    return {(u32)rows << 16 | (u32)(from * kRow + (in % 16 / 2 * 4 + lane() % 4) * S::lane_bytes)};
}
// Codes become halves times their scales, rounded once: what sums of 256 positions are kept in
// leaves no registers for sums without. The scales come straight from the stages that decoding has,
// each before the codes that it is for.
template <int kTiles>
struct ScaleRows {
    int product;
    const u8* from[kTiles];  // of each row tile: row 2g's first scale
    int next[kTiles];        // bytes from there to row 2g + 1's
};
struct Scale {
    float v[2];
};
template <class S>
KIE_CONST_FN int scale_offset(int pair) {
    const int q = pair % S::pairs, in = q % S::chunk;
    return q / S::chunk * S::stage_bytes +
           (pair / S::pairs * S::spans + in / S::span) * (S::scale_rows * S::scale_bytes);
}
KIE_DEVICE int scale_offset(int product, int pair) {
    return product == kToQkv      ? scale_offset<TilingQkv>(pair)
           : product == kToO      ? scale_offset<TilingO>(pair)
           : product == kToGateUp ? scale_offset<TilingGu>(pair)
                                  : scale_offset<TilingDown>(pair);
}
template <int kBits>
KIE_DEVICE float scale_at(const u8* from) {
    if constexpr (kBits == kBitsI4)
        return number((u32) * (const u16*)from << 16);
    else if constexpr (kBits == kBitsE2m1)
        return number((u32)*from << 23);
    else
        return *(const float*)from;
}
template <int kBits, int kTiles>
KIE_DEVICE void ask_scales(const ScaleRows<kTiles>& r, int pair, Scale (&s)[kTiles]) {
    const int at = scale_offset(r.product, pair);
    KIE_UNROLL for (int m = 0; m < kTiles; ++m) {
        const u8* from = r.from[m] + at;
        s[m] = {{scale_at<kBits>(from), scale_at<kBits>(from + r.next[m])}};
    }
}
KIE_DEVICE u32 times_scale(u32 halves, float scale) {
    float a, b;
    unpack_half2(halves, a, b);
    return pack_half2(a * scale, b * scale);
}
template <int kBits>
KIE_DEVICE void decode_share(const u8* from, const Scale& scale, Quad& low, Quad& high) {
    const UnitHalves h = decode_unit<kBits>(take_codes<kBits>(from, 0));
    KIE_UNROLL for (int i = 0; i < 4; ++i) {
        low.v[i] = times_scale(h.v[i], scale.v[i % 2]);
        high.v[i] = times_scale(h.v[4 + i], scale.v[i % 2]);
    }
}

template <int kBits, class Rows>
KIE_DEVICE void take_share(const Pipe& p, Share& a, const Rows& rows, bool whole,
                           const Scale (&scale)[2][1]) {
    await_stage(p);
    const u8* w = stage_bytes(p.at) + rows.at();
    KIE_UNROLL for (int i = 0; i < 4; i += 2) {
        a.v[i] = a.v[i + 1] = {{0, 0, 0, 0}};
        if (!rows.live() || (i == 2 && !whole)) continue;
        const u8* from = w + i / 2 * (kStageWeights / 2);
        if constexpr (kBits != kBitsF16) {
            decode_share<kBits>(from, scale[i / 2][0], a.v[i], a.v[i + 1]);
        } else {
            const auto codes = take_codes<kBits>(from, rows.tile_rows());
            a.v[i] = codes.v[0], a.v[i + 1] = codes.v[1];
        }
    }
}
template <int kN>
KIE_DEVICE void multiply_share(const Pipe& p, const Share& a, float (&d)[kWideN / 2]) {
    const WideOperand x = wide_operand(stage_bytes(p.at) + kStageWeights, 128, kCores);
    wide_begin();
    KIE_UNROLL for (int i = 0; i < 4; ++i)
        multiply_wide<kN, 0>(d, a.v[i], wide_shift(x, i / 2 * kStagePart + i % 2 * 256), kCores);
    wide_commit();
}
// A run of pairs of k of one wide item. One group of products is always queued behind the one that
// runs.
template <int kBits, int kN, class Rows>
KIE_DEVICE void accumulate(Pipe& pipe, int from, int to, int pairs, const Rows& rows,
                           const ScaleRows<1>& scales, float (&d)[kWideN / 2]) {
    KIE_UNROLL for (int i = 0; i < kWideN / 2; ++i) d[i] = 0;
    Share a, b;
    Scale ahead[2][1];  // of the stage that is taken next
    const auto ask = [&](int p) {
        if constexpr (kBits != kBitsF16)
            KIE_UNROLL for (int i = 0; i < 2; ++i)
                ask_scales<kBits>(scales, min_i(p + i, pairs - 1), ahead[i]);
    };
    ask(from);
    take_share<kBits>(pipe, a, rows, from + 1 < pairs, ahead);
    ask(from + 2);
    u32 last = kStages;  // whose products are still under way
    const auto step = [&](const Share& now, Share& next, int after) {
        multiply_share<kN>(pipe, now, d);
        wide_wait<1>();
        if (last < kStages && lane() == 0) slot_release(stage_slot(last));
        last = pipe.at;
        forward(pipe);
        if (after >= to) return;
        take_share<kBits>(pipe, next, rows, after + 1 < pairs, ahead);
        ask(after + 2);
    };
    KIE_NO_UNROLL for (int p = from; p < to; p += 4) {
        step(a, b, p + 2);
        if (p + 2 < to) step(b, a, p + 4);
    }
    wide_finish(d);
    if (lane() == 0) slot_release(stage_slot(last));
}
// The same of a narrow item of up to kFourth times four row tiles, by pairs: more would not fit
// the registers.
template <int kFourth>
struct NarrowShare {
    Quad v[kFourth][2];
};
template <int kBits, int kFourth>
KIE_DEVICE void take_narrow(const u8* weights, const int (&rows)[kFourth], bool there,
                            const Scale (&scale)[kFourth], NarrowShare<kFourth>& a) {
    const int my = lane();
    KIE_UNROLL for (int m = 0; m < kFourth; ++m) {
        a.v[m][0] = a.v[m][1] = {{0, 0, 0, 0}};
        if (my >= 2 * rows[m] || !there) continue;
        const u8* from = weights + m * (4 * tile_bytes(kBits));
        if constexpr (kBits != kBitsF16) {
            decode_share<kBits>(from, scale[m], a.v[m][0], a.v[m][1]);
        } else {
            const auto codes = take_codes<kBits>(from, rows[m]);
            a.v[m][0] = codes.v[0], a.v[m][1] = codes.v[1];
        }
    }
}
template <int kFourth>
KIE_DEVICE void multiply_narrow(const NarrowShare<kFourth>& a, const WideOperand& x,
                                float (&d)[kWideN / 2]) {
    wide_begin();
    KIE_UNROLL for (int i = 0; i < 2; ++i) {
        const WideOperand at = wide_shift(x, i * 256);
        multiply_wide<64, 0>(d, a.v[0][i], at, kCores);
        if constexpr (kFourth > 1) multiply_wide<64, 32>(d, a.v[1][i], at, kCores);
        if constexpr (kFourth > 2) multiply_wide<64, 64>(d, a.v[2][i], at, kCores);
    }
    wide_commit();
}
template <int kBits, int kFourth, class Rows>
KIE_DEVICE void accumulate_narrow(Pipe& pipe, int from, int to, int pairs, Rows rows_of,
                                  const ScaleRows<kFourth>& scales, float (&d)[kWideN / 2]) {
    KIE_UNROLL for (int i = 0; i < 32 * kFourth; ++i) d[i] = 0;
    int rows[kFourth];
    KIE_UNROLL for (int m = 0; m < kFourth; ++m) rows[m] = rows_of(m);
    const u32 team = thread() / kCrew,
              mine = thread() / kTeam % 4 * tile_bytes(kBits) + lane() * lane_bytes(kBits),
              places = kNarrowWeights + team * (kNarrowPart / 2);
    NarrowShare<kFourth> a, b;
    Scale ahead[2][kFourth];
    const auto ask = [&](int p) {
        if constexpr (kBits != kBitsF16)
            ask_scales<kBits>(scales, min_i(p, pairs - 1), ahead[(p - from) % 2]);
    };
    ask(from), ask(from + 1);
    u32 last = kStages;
    KIE_NO_UNROLL for (int p = from; p < to; p += 2) {
        await_stage(pipe);
        const u8* stage = stage_bytes(pipe.at);
        const WideOperand x = wide_operand(stage + places, 128, kCores);
        take_narrow<kBits, kFourth>(stage + mine, rows, true, ahead[0], a);
        ask(p + 2);
        multiply_narrow<kFourth>(a, x, d);
        wide_wait<1>();
        if (last < kStages && lane() == 0) slot_release(stage_slot(last));
        last = pipe.at;
        take_narrow<kBits, kFourth>(stage + kNarrowWeights / 2 + mine, rows, p + 1 < pairs,
                                    ahead[1], b);
        ask(p + 3);
        multiply_narrow<kFourth>(b, wide_shift(x, kNarrowPart), d);
        wide_wait<1>();
        forward(pipe);
    }
    wide_finish(d);
    if (lane() == 0) slot_release(stage_slot(last));
}
// Results are taken from the front, a batch at a time, and the rest moves up: a loop of little code
// instead of one pass over all registers, whose instructions would come from memory each time.
template <int kBy>
KIE_DEVICE void move_up(float (&d)[kWideN / 2]) {
    KIE_UNROLL for (int i = 0; i < kWideN / 2 - kBy; ++i) d[i] = d[i + kBy];
}

// The parts of a tile: each writes its sums, and who comes last adds all of them, in order. False:
// not the last.
KIE_DEVICE bool join_parts(const PrefillArgs& args, const WideItem& item, int parts,
                           float (&d)[kWideN / 2]) {
    volatile u32* last = (volatile u32*)(prefill_shared() + kPfLast);
    const long part_bytes = item.part_items * kPartBytes;
    u8* mine = args.scratch + kScrParts + (long)item.tile * parts * part_bytes + thread() * 16;
    constexpr int kGroup8 = kWorkers * 16;  // bytes of a group of 8 places
    float* to = (float*)(mine + item.part * part_bytes);
    KIE_NO_UNROLL for (int b = batches_of(item); b > 0; --b, to += kBatch * kGroup8 / 4) {
        KIE_UNROLL for (int i = 0; i < 4 * kBatch; ++i) to[i / 4 * (kGroup8 / 4) + i % 4] = d[i];
        move_up<4 * kBatch>(d);
    }
    sync_consumers<kWorkers>();
    if (thread() == 0) {
        u64* counter = args.arrivals + 1 + item.tile;
        fence_device();
        const bool all = count_in(counter) + 1 == (u64)parts;
        if (all) store_word(counter, 0);
        fence_device();
        *last = all;
    }
    sync_consumers<kWorkers>();
    if (!*last) return false;
    KIE_NO_UNROLL for (int b = 0; b < kWideN / 8 / kBatch; ++b) {
        move_up<4 * kBatch>(d);
        float* sums = d + kWideN / 2 - 4 * kBatch;
        KIE_UNROLL for (int i = 0; i < 4 * kBatch; ++i) sums[i] = 0;
        if (b >= batches_of(item)) continue;
        const u8* from = mine + b * (kBatch * kGroup8);
        KIE_NO_UNROLL for (int p = 0; p < parts; ++p, from += part_bytes) {
            Quad v[kBatch];
            KIE_UNROLL for (int i = 0; i < kBatch; ++i) v[i] = load_state(from + i * kGroup8);
            KIE_UNROLL for (int i = 0; i < 4 * kBatch; ++i) sums[i] += number(v[i / 4].v[i % 4]);
        }
    }
    return true;
}

// 1 / rms of each place of an item, into shared memory.
KIE_DEVICE void take_scales(const PrefillArgs& args, const WideItem& item, float* scale) {
    const int n = thread();
    if (n >= item.width) return;
    const float* from = (const float*)(args.scratch + kScrSquares) +
                        (long)item.lane_index * kFours * kChunk + item.place + n;
    float sum = 0;
    KIE_UNROLL for (int r = 0; r < kFours; ++r) sum += from[(long)r * kChunk];
    scale[n] = rsqrt_f(sum * (1.0f / kHiddenReal) + kEps);
}
// Two neighbouring places (v[place][row]) of two neighbouring rows of a head, f and f + 1.
KIE_DEVICE void put_query(const PrefillArgs& args, int lane_index, int head, int f, int place,
                          const float (&v)[2][2]) {
    u32* q = (u32*)(args.scratch + kScrQ + query_at(lane_index, head, place)) + f / 16 * 128 +
             place % 8 * 16 + f % 8 / 2 * 4 + place % 16 / 8 + f % 16 / 8 * 2;
    q[0] = pack_half2(v[0][0], v[0][1]), q[16] = pack_half2(v[1][0], v[1][1]);
}
KIE_DEVICE void put_state(u8* page, int f, int place, bool is_v, bool live0, bool live1,
                          const float (&v)[2][2]) {
    const int slot = place % kPage;
    if (!is_v) {
        u32* k = (u32*)(page + (slot * kHeadDim + f) * 2);
        if (live0) k[0] = pack_half2(v[0][0], v[0][1]);
        if (live1) k[kHeadDim / 2] = pack_half2(v[1][0], v[1][1]);
        return;
    }
    u16* p = (u16*)(page + kPageHalf) + f * kPage + slot;
    const u32 a = pack_half2(v[0][0], v[1][0]), b = pack_half2(v[0][1], v[1][1]);
    if (live0 && live1) {
        *(u32*)p = a, *(u32*)(p + kPage) = b;
    } else if (live0) {
        p[0] = (u16)a, p[kPage] = (u16)b;
    } else if (live1) {
        p[1] = (u16)(a >> 16), p[kPage + 1] = (u16)(b >> 16);
    }
}

// q and k rotated (those with norms later, behind the norms), k and v into their pages.
KIE_DEVICE void put_qkv(const PrefillArgs& args, const Chunk& chunk, int layer,
                        const WideItem& item, const WideRows& rows, int place, int batches,
                        const float* scale, float (&d)[kWideN / 2]) {
    const int my = lane(), g = my / 4, t = my % 4, row = rows.row + 2 * g;
    const bool live = 2 * g < rows.live;
    const bool is_q = row < kAttn, is_v = row >= kAttn + kKvHeads * kHeadDim;
    const int head = row / kHeadDim, f = row % kHeadDim;
    const int kv_head = is_q ? 0 : is_v ? head - kHeads - kKvHeads : head - kHeads;
    const float factor = is_q && !kHeadNorm ? kQueryScale : 1.0f;
    const int kv_index = item.lane_index * kKvHeads + kv_head;
    float bias[2] = {0, 0};
    if constexpr (kBias) {
        const float* from = args.model.biases + args.model.layers[layer].biases +
                            item.lane_index * (TilingQkv::rows * kBlocksPerLane);
        bias[0] = from[row] * factor, bias[1] = from[row + 1] * factor;
    }
    const u64* rope = (const u64*)(args.model.rope + f);
    const int last_page = (chunk.base + chunk.to - 1) / kPage;
    place += 2 * t, scale += 2 * t;
    const auto page_of = [&](int place) -> u8* {
        const int at = (chunk.base + place) / kPage;
        return is_q ? nullptr
                    : prefill_page(args, layer, kv_index, at < last_page ? at : last_page);
    };
    u8* next = page_of(place);
    KIE_NO_UNROLL for (int n = 2 * batches; n > 0; --n, place += 32, scale += 32) {
        u64 turn[4][2];
        u8* page = next;
        next = page_of(place + 32);  // asked for before this one's stores
        KIE_UNROLL for (int i = 0; i < 8; ++i) {
            const int at = place + i / 2 * 8 + i % 2,
                      to = chunk.base + (at < chunk.to ? at : chunk.to - 1);
            turn[i / 2][i % 2] = is_v || kHeadNorm ? 0x3f800000u : rope[(long)to * (kHeadDim / 2)];
        }
        KIE_UNROLL for (int j = 0; j < 4; ++j) {
            const int at = place + 8 * j;
            float v[2][2];  // [place][row]
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                const float s = scale[8 * j + e] * factor, a = d[4 * j + e] * s + bias[0],
                            b = d[4 * j + 2 + e] * s + bias[1], c = number((u32)turn[j][e]),
                            i = number((u32)(turn[j][e] >> 32));
                v[e][0] = a * c - b * i, v[e][1] = a * i + b * c;
            }
            if (!live) continue;
            if (is_q)
                put_query(args, item.lane_index, head, f, at, v);
            else
                put_state(page, f, at, is_v, at >= chunk.from && at < chunk.to,
                          at + 1 >= chunk.from && at + 1 < chunk.to, v);
        }
        move_up<16>(d);
    }
}

KIE_DEVICE void put_act(const PrefillArgs& args, const WideItem& item, const WideRows& rows,
                        int place, int batches, const float* scale, float (&d)[kWideN / 2]) {
    const int my = lane(), g = my / 4, t = my % 4, odd = g & 1;
    const int f = (rows.row + 2 * g) / 2 - odd;  // of a pair: the even one stores the first place
    u8* to = args.scratch + kScrAct + operand_at(item.lane_index, kFfn, place + 2 * t + odd, f);
    scale += 2 * t;
    KIE_NO_UNROLL for (; batches > 0; --batches, to += kBatch * kCores, scale += 8 * kBatch) {
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
            float y[2];
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                const float s = scale[8 * j + e], gate = d[4 * j + e] * s,
                            up = d[4 * j + 2 + e] * s;
                y[e] = gate * up * reciprocal_f(1.0f + exp2_f(-1.44269504f * gate));
            }
            const float mine = odd ? y[1] : y[0], other = shuffle_xor(odd ? y[0] : y[1], 4);
            if (2 * g < rows.live)
                *(u32*)(to + j * kCores) = odd ? pack_half2(other, mine) : pack_half2(mine, other);
        }
        move_up<4 * kBatch>(d);
    }
}

// What a step adds to the residual: its own, times a factor, and with several lanes what the others
// made some layers ago.
KIE_DEVICE long residual_at(int frag, int place) {  // inside its lane
    return ((long)frag * kEights + place / 8) * 32 + lane();
}
KIE_DEVICE void add_halves(Quad& sum, u64 halves, float factor = 1) {
    float v[4];
    unpack_half2((u32)halves, v[0], v[1]), unpack_half2((u32)(halves >> 32), v[2], v[3]);
    KIE_UNROLL for (int i = 0; i < 4; ++i) sum.v[i] = bits(number(sum.v[i]) + factor * v[i]);
}
KIE_DEVICE void add_quad(Quad& sum, const Quad& v) {
    KIE_UNROLL for (int i = 0; i < 4; ++i) sum.v[i] = bits(number(sum.v[i]) + number(v.v[i]));
}
// What all lanes made in the layers whose outputs are added in this one, added up once for all of
// them; while others attend, by blocks without queries, if those are not few.
KIE_DEVICE void add_lanes(const PrefillArgs& args, const Chunk& chunk, int layer) {
    if (kLanesAll == 1) return;
    const int busy = runs_of(all_of(chunk)), blocks = (int)args.blocks, warps = kWorkers / kTeam,
              first = 4 * busy <= 3 * blocks ? busy : 0, seat = (int)block() - first;
    const int groups = over(chunk.to, 8), units = kFrags * groups;
    if (seat < 0) return;
    KIE_NO_UNROLL for (int i = seat * warps + thread() / kTeam; i < 2 * units;
                       i += (blocks - first) * warps) {
        const int kind = i / units, n = i % units, delay = delay_of(args, kind, layer);
        if (delay <= 0) continue;
        const long at = ((long)(n / groups) * kEights + n % groups) * 32 + lane();
        u64 v[kLanesAll];
        KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) v[l] =
            past_at(args, kind, layer - delay, l)[at];
        Quad sum = {{0, 0, 0, 0}};
        KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) add_halves(sum, v[l]);
        totals_at(args, kind)[at] = sum;
    }
}
// A batch of the residual with the other lanes' sums: from memory, where parts of k were joined
// (nobody knew who would need it) ...
KIE_DEVICE void take_old(const PrefillArgs& args, const WideItem& item, int kind, int layer,
                         long at, Quad (&old)[kBatch]) {
    const Quad* residual = old_at(args, item.lane_index) + at;
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] = residual[j * 32];
    const int delay = delay_of(args, kind, layer);
    if (delay < 0) return;
    const u64* own = own_past(args, kind, layer - delay, item.lane_index) + at;
    const Quad* totals = totals_at(args, kind) + at;
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) add_halves(old[j], own[j * 32], -1.0f);
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) add_quad(old[j], totals[j * 32]);
}
// ... or from the ring.
KIE_DEVICE void leave_stage(Pipe& p) {
    sync_warp();
    if (lane() == 0) slot_release(stage_slot(p.at));
    forward(p);
}
KIE_DEVICE void take_old(Pipe& pipe, bool others, Quad (&old)[kBatch]) {
    const u32 my = lane(), warp = thread() / kTeam, at = warp * (kBatch * 512) + my * 16;
    await_stage(pipe);
    const u8* from = stage_bytes(pipe.at);
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] = *(const Quad*)(from + at + j * 512);
    if (others) {
        KIE_UNROLL for (int j = 0; j < kBatch; ++j)
            add_halves(old[j], *(const u64*)(from + kOldBytes + at / 2 + j * 256), -1.0f);
        leave_stage(pipe);
        await_stage(pipe);
        from = stage_bytes(pipe.at);
        KIE_UNROLL for (int j = 0; j < kBatch; ++j)
            add_quad(old[j], *(const Quad*)(from + at + j * 512));
    }
    leave_stage(pipe);
}
// The new residual, and what the next norm's product takes: residual x norm weight as halves, and
// the sum of squares over this item's rows. kind: 0 o, 1 down, 2 the embedding.
struct Residual {
    int lane_index;
    bool live;     // this thread's row pair exists
    float keep;    // factor on it
    float n0, n1;  // norm weights of the pair
    long at;
    u8* x;
    u64* squares;
};
KIE_DEVICE Residual residual_of(const PrefillArgs& args, int kind, int layer, const WideItem& item,
                                const WideRows& rows, int turn) {
    const int my = lane(), g = my / 4, t = my % 4, row = rows.row + 2 * g;
    const u32 norm = next_norm(args, kind, layer, lane_of_model(args, item.lane_index));
    const int place = turn_at(item, turn).place, warp = (int)(thread() / kTeam);
    Residual r = {
        item.lane_index, 2 * g < rows.live, 1, 0, 0, residual_at(rows.frag, place), nullptr,
        nullptr};
    if (kind < 2) r.keep = args.model.layers[layer].own[kind];
    if (r.live) unpack_half2(args.model.norms[(long)norm * (kHidden / 2) + row / 2], r.n0, r.n1);
    r.x = args.scratch + kScrX + operand_at(item.lane_index, kHidden, place + 2 * t, row);
    r.squares = (u64*)(prefill_shared() + kPfSquares) +
                (is_narrow(item) ? (4 * turn + warp % 4) * kNarrowN : warp * kWideN) / 2 +
                (place - item.place + 2 * t) / 2;
    return r;
}
KIE_DEVICE void put_residual(const PrefillArgs& args, Residual& r, const Quad (&old)[kBatch],
                             const float* d) {
    Quad* residual = (Quad*)old_at(args, r.lane_index) + r.at;
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
        float v[4];
        KIE_UNROLL for (int i = 0; i < 4; ++i) v[i] = r.live ? d[4 * j + i] : 0;
        KIE_UNROLL for (int i = 0; i < 4; ++i) v[i] =
            r.live ? r.keep * v[i] + number(old[j].v[i]) : 0;
        if (r.live) {
            residual[j * 32] = {{bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3])}};
            *(u32*)(r.x + j * kCores) = pack_half2(v[0] * r.n0, v[2] * r.n1);
            *(u32*)(r.x + j * kCores + 16) = pack_half2(v[1] * r.n0, v[3] * r.n1);
        }
        float s0 = v[0] * v[0] + v[2] * v[2], s1 = v[1] * v[1] + v[3] * v[3];
        KIE_UNROLL for (int m = 4; m < 32; m *= 2) s0 += shuffle_xor(s0, m),
            s1 += shuffle_xor(s1, m);
        if (lane() < 4) r.squares[4 * j] = (u64)bits(s1) << 32 | bits(s0);
    }
    r.at += kBatch * 32, r.x += kBatch * kCores, r.squares += 4 * kBatch;
}
// Sums over four row tiles each.
KIE_DEVICE void put_squares(const PrefillArgs& args, const WideItem& item) {
    sync_consumers<kWorkers>();
    const int stride = is_narrow(item) ? kNarrowN : kWideN, n = (int)thread() % stride,
              first = is_narrow(item) ? (int)(thread() / kNarrowN) : 0,
              step = is_narrow(item) ? (int)kWorkers / kNarrowN : 1;
    if (n >= item.width) return;
    float* to = (float*)(args.scratch + kScrSquares) +
                ((long)item.lane_index * kFours + item.frag / 4) * kChunk + item.place + n;
    const float* from = (const float*)(prefill_shared() + kPfSquares) + n;
    KIE_NO_UNROLL for (int m = first; 4 * m < item.tiles; m += step) {
        float sum = 0;
        KIE_UNROLL for (int w = 0; w < 4; ++w) sum += from[(4 * m + w) * stride];
        to[(long)m * kChunk] = sum;
    }
}
// What a lane added, for the lanes that will want it, on every rank; slices' sums of a group of
// eight places for its owner alone.
KIE_DEVICE void share_sums(const PrefillArgs& args, u64* to, int eight, const float* d) {
    u64 v[kBatch];
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) v[j] =
        (u64)pack_half2(d[4 * j + 2], d[4 * j + 3]) << 32 | pack_half2(d[4 * j], d[4 * j + 1]);
    if constexpr (kSliced) {
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
            const long hop = args.hops[owner_of(kBatch % kRanks == 0 ? j : eight + j)];
            *(u64*)((u8*)(to + j * 32) + hop) = v[j];
        }
        return;
    }
    KIE_UNROLL for (int rank = 0; rank < kRanks; ++rank) {
        u64* there = (u64*)((u8*)to + (kRanks > 1 ? args.hops[rank] : 0));
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) there[j * 32] = v[j];
    }
}
KIE_DEVICE void put_sums(const PrefillArgs& args, Pipe& pipe, bool joined, int kind, int layer,
                         const WideItem& item, const WideRows& rows, int turn, int batches,
                         float (&d)[kWideN / 2]) {
    Residual r = residual_of(args, kind, layer, item, rows, turn);
    const int delay = delay_of(args, kind, layer);
    const bool shares = shares_of(args, kind, layer) && r.live;
    u64* to = past_at(args, kind, layer, lane_of_model(args, item.lane_index)) + r.at;
    int eight = turn_at(item, turn).place / 8;
    KIE_NO_UNROLL for (; batches > 0; --batches, to += kBatch * 32, eight += kBatch) {
        if (shares) share_sums(args, to, eight, d);
        if (!kSliced && (kLanesAll == 1 || delay != 0)) {
            Quad old[kBatch];
            if (joined)
                take_old(args, item, kind, layer, r.at, old);
            else
                take_old(pipe, delay > 0, old);
            put_residual(args, r, old, d);
        }
        move_up<4 * kBatch>(d);
    }
}
// Without delay: every lane adds what all of them made, in one order, so that lanes that are alike
// stay alike to the bit.
KIE_DEVICE void mix_chunk(const PrefillArgs& args, const Chunk& chunk, int kind, int layer) {
    const Cut cut = {8 * kBatch, kWideTiles, 1};
    const int items = items_of(kToO, all_of(chunk), cut);
    KIE_NO_UNROLL for (int i = block(); i < items; i += args.blocks) {
        WideItem item = item_at(kToO, all_of(chunk), cut, i);
        item.width = cut.width;
        const WideRows rows = residual_rows(item.frag + turn_at(item, 0).tile);
        const int mine = lane_of_model(args, item.lane_index);
        sync_consumers<kWorkers>();  // the last item's squares are read
        Residual r = residual_of(args, kind, layer, item, rows, 0);
        Quad sum[kBatch];
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) sum[j] = {{0, 0, 0, 0}};
        KIE_NO_UNROLL for (int l = 0; l < kLanesAll; ++l) {
            const u64* from = past_at(args, kind, layer, l) + r.at;
            u64 v[kBatch];
            KIE_UNROLL for (int j = 0; j < kBatch; ++j) v[j] = from[j * 32];
            KIE_UNROLL for (int j = 0; j < kBatch; ++j)
                add_halves(sum[j], v[j], l == mine ? r.keep : 1.0f);
        }
        const Quad* from = old_at(args, item.lane_index) + r.at;
        float d[4 * kBatch];
        Quad old[kBatch];
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] = from[j * 32];
        KIE_UNROLL for (int n = 0; n < 4 * kBatch; ++n) d[n] = number(sum[n / 4].v[n % 4]);
        r.keep = 1;
        put_residual(args, r, old, d);
        put_squares(args, item);
    }
}
// The last position's residual, as the words in which the head of a decode launch looks for it: its
// first token takes no step through the layers.
KIE_DEVICE void put_last(const PrefillArgs& args, const Chunk& chunk) {
    const int my = lane(), g = my / 4, t = my % 4, warps = kWorkers / kTeam;
    const int place = chunk.to - 1, e = place % 2;
    const u32 epoch = epoch_at(args.model.epoch, kLayers - 1);
    if (kSliced && owner_of(place / 8) != (int)args.model.rank) return;
    KIE_NO_UNROLL for (int i = block() * warps + thread() / kTeam; i < kLanes * kFrags;
                       i += args.blocks * warps) {
        const int frag = i % kFrags, l = i / kFrags;
        const WideRows rows = residual_rows(frag);
        const Quad v = load_state(old_at(args, l) + ((long)frag * kEights + place / 8) * 32 + my);
        if (2 * g >= rows.live || t != place % 8 / 2) continue;
        const u32 both = pack_half2(number(v.v[e]), number(v.v[2 + e]));
        const int pair = rows.row / 2 + g;
        if (kSliced)
            publish_all(args.model, hidden_slot(args.model, 1, kLayers - 1, 0) + pair, both, epoch);
        else if (kHeadMode == kHeadPerLane)
            publish(hidden_slot(args.model, 1, kLayers - 1, l) + pair, both, epoch);
        else
            publish_all(args.model, last_slot(args.model, lane_of_model(args, l)) + pair, both,
                        epoch);
    }
}

KIE_DEVICE WideRows rows_of_product(int product, int f) {
    return product == kToQkv      ? product_rows<TilingQkv, kQkv>(f)
           : product == kToGateUp ? product_rows<TilingGu, 2 * kFfn>(f)
                                  : residual_rows(f);
}
// The rows of the embedding, in the order of a product's results.
KIE_DEVICE void embed_chunk(const PrefillArgs& args, const Chunk& chunk) {
    const Cut cut = {chunk.to <= kNarrowN ? kNarrowN : kWideN, kWideTiles, 1};
    const int items = items_of(kToO, all_of(chunk), cut);
    KIE_NO_UNROLL for (int i = block(); i < items; i += args.blocks) {
        const WideItem item = item_at(kToO, all_of(chunk), cut, i);
        sync_consumers<kWorkers>();  // the last item's squares are read
        KIE_NO_UNROLL for (int turn = 0; turn < turns_of(item); ++turn) {
            const Turn at = turn_at(item, turn);
            const WideRows rows = residual_rows(item.frag + at.tile);
            const int my = lane(), row = rows.row + my / 4 * 2;
            int place = at.place + my % 4 * 2;
            Residual r = residual_of(args, 2, 0, item, rows, turn);
            KIE_NO_UNROLL for (int n = at.batches; n > 0; --n) {
                float d[4 * kBatch];
                KIE_UNROLL for (int j = 0; j < kBatch; ++j, place += 8) {
                    KIE_UNROLL for (int e = 0; e < 2; ++e) {
                        u32 v = 0;
                        if (r.live && place + e >= chunk.from && place + e < chunk.to) {
                            const u32 token = args.tokens[chunk.base + place + e - (int)args.first];
                            v = args.model.embed[(long)token * (kHidden / 2) + row / 2];
                        }
                        unpack_half2(v, d[4 * j + e], d[4 * j + 2 + e]);
                    }
                }
                Quad none[kBatch];
                KIE_UNROLL for (int j = 0; j < kBatch; ++j) none[j] = {{0, 0, 0, 0}};
                put_residual(args, r, none, d);
            }
        }
        put_squares(args, item);
    }
}
// Where a product stands in a block's line.
KIE_DEVICE long product_at(const PrefillArgs& args, int product, int layer) {
    return (long)args.model.layers[layer].stream +
           (product > kToQkv ? product_bytes<TilingQkv>() : 0) +
           (product > kToO ? product_bytes<TilingO>() : 0) +
           (product > kToGateUp ? product_bytes<TilingGu>() : 0);
}
template <class S, int kTiles>
KIE_DEVICE void find_scales(const PrefillArgs& args, const WideItem& item, int rows, bool dense,
                            int layer, ScaleRows<kTiles>& found) {
    KIE_UNROLL for (int m = 0; m < kTiles; ++m) {
        const int f = item.frag + turn_at(item, m).tile, pair = lane() / 4 * 2;
        int block = f / S::tiles_all, row = f % S::tiles_all * 16 + pair;
        if (dense) block = (16 * f + pair) / S::rows, row = (16 * f + pair) % S::rows;
        if (row >= S::rows || block * S::rows + row >= rows) block = row = 0;
        block += item.lane_index * kBlocksPerLane;
        const u8* from = args.model.line + (u64)block * kLineBytes +
                         product_at(args, found.product, layer) + S::code_bytes;
        if constexpr (S::per_row) {
            found.from[m] = from + row * S::scale_bytes, found.next[m] = S::scale_bytes;
        } else {
            const u8* index = args.model.scale_index + block * kIndexBytes + S::index_at + row;
            found.from[m] = from + index[0] * 4, found.next[m] = (index[1] - index[0]) * 4;
        }
    }
}
template <int kBits, int kTiles>
KIE_DEVICE ScaleRows<kTiles> scale_rows(const PrefillArgs& args, const WideItem& item, int product,
                                        int layer) {
    ScaleRows<kTiles> found = {product};
    if constexpr (kBits != kBitsF16) {
        if (product == kToQkv)
            find_scales<TilingQkv>(args, item, kQkv, kDense, layer, found);
        else if (product == kToO)
            find_scales<TilingO>(args, item, kHidden, false, layer, found);
        else if (product == kToGateUp)
            find_scales<TilingGu>(args, item, 2 * kFfn, kDense, layer, found);
        else
            find_scales<TilingDown>(args, item, kHidden, false, layer, found);
    }
    return found;
}
template <int kBits, int kFourth>
KIE_DEVICE void multiply_narrow_item(const PrefillArgs& args, Pipe& pipe, int from, int to,
                                     int product, int layer, const WideItem& item,
                                     float (&d)[kWideN / 2]) {
    const auto rows_of = [&](int turn) {
        return rows_of_product(product, item.frag + turn_at(item, turn).tile).rows;
    };
    const auto scales = scale_rows<kBits, kFourth>(args, item, product, layer);
    accumulate_narrow<kBits, kFourth>(pipe, from, to, pairs_of(product), rows_of, scales, d);
}
template <int kBits>
KIE_DEVICE void multiply_stored(const PrefillArgs& args, Pipe& pipe, const Cut& cut, int product,
                                int layer, const WideItem& item, float (&d)[kWideN / 2]) {
    const int pairs = pairs_of(product), from = 2 * part_from(product, cut, item.part),
              to = 2 * part_from(product, cut, item.part + 1);
    if (kDense || !is_narrow(item)) {
        const auto scales = scale_rows<kBits, 1>(args, item, product, layer);
        const int f = item.frag + turn_at(item, 0).tile;
        const OwnRows<kBits> own = {rows_of_product(product, f).rows};
        if constexpr (kDense) {
            const DenseRows rows = product == kToQkv ? dense_rows<TilingQkv>(item, kQkv)
                                   : product == kToGateUp
                                       ? dense_rows<TilingGu>(item, 2 * kFfn)
                                       : DenseRows{own.live() ? (u32)own.rows << 16 | own.at() : 0};
            accumulate<kBits, kWideN>(pipe, from, to, pairs, rows, scales, d);
        } else {
            accumulate<kBits, kWideN>(pipe, from, to, pairs, own, scales, d);
        }
    } else if (item.tiles <= 4)
        multiply_narrow_item<kBits, 1>(args, pipe, from, to, product, layer, item, d);
    else if (item.tiles <= 8)
        multiply_narrow_item<kBits, 2>(args, pipe, from, to, product, layer, item, d);
    else
        multiply_narrow_item<kBits, 3>(args, pipe, from, to, product, layer, item, d);
}
// Whether a product has such codes; then it is done.
template <int kBits>
KIE_DEVICE bool multiply_if(const PrefillArgs& args, Pipe& pipe, const Cut& cut, int product,
                            int layer, const WideItem& item, float (&d)[kWideN / 2]) {
    if constexpr (any_has(kBits)) {
        if (!all_have(kBits) && bits_of(product) != kBits) return false;
        multiply_stored<kBits>(args, pipe, cut, product, layer, item, d);
        return true;
    }
    return false;
}
KIE_DEVICE void multiply_item(const PrefillArgs& args, Pipe& pipe, const Cut& cut, int product,
                              int layer, const WideItem& item, float (&d)[kWideN / 2]) {
    if (multiply_if<kBitsF8>(args, pipe, cut, product, layer, item, d)) return;
    if (multiply_if<kBitsI4>(args, pipe, cut, product, layer, item, d)) return;
    if (multiply_if<kBitsE2m1>(args, pipe, cut, product, layer, item, d)) return;
    multiply_if<kBitsF16>(args, pipe, cut, product, layer, item, d);
}
// False: of an item in parts others have yet to make theirs.
KIE_DEVICE bool product_item(const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                             const Cut& cut, const WideItem& item, int product, int layer,
                             float* scale, float (&d)[kWideN / 2]) {
    if (kListed) await_stage(pipe);  // what the squares are of is there, too
    if (product == kToQkv || product == kToGateUp) take_scales(args, item, scale);
    Clock clock = {args.model.trace, 0};
    tick(clock, -1);
    multiply_item(args, pipe, cut, product, layer, item, d);
    sync_consumers<kWorkers>();  // scales are there, the last item's squares are read
    tick(clock, 12 + product);
    ask_next();
    if (cut.parts > 1 && !join_parts(args, item, cut.parts, d)) return false;
    KIE_NO_UNROLL for (int turn = 0; turn < turns_of(item); ++turn) {
        const Turn at = turn_at(item, turn);
        const WideRows rows = rows_of_product(product, item.frag + at.tile);
        const float* scales = scale + (at.place - item.place);
        if (product == kToQkv)
            put_qkv(args, chunk, layer, item, rows, at.place, at.batches, scales, d);
        else if (product == kToGateUp)
            put_act(args, item, rows, at.place, at.batches, scales, d);
        else
            put_sums(args, pipe, cut.parts > 1, product == kToDown, layer, item, rows, turn,
                     at.batches, d);
    }
    const bool adds = product == kToO || product == kToDown;
    if (adds && !is_mixed(args, product, layer)) put_squares(args, item);
    return true;
}
KIE_DEVICE void product_phase(const PrefillArgs& args, Pipe& pipe, const Chunk& chunk, int product,
                              int layer) {
    const Cut cut = cut_at(chunk, product);
    const int items = items_of(product, all_of(chunk), cut);
    float d[kWideN / 2];
    int turn = 0;
    KIE_NO_UNROLL for (int i = block(); i < items; i += args.blocks, turn ^= 1) {
        float* scale = (float*)(prefill_shared() + kPfScale) + turn * kWideN;
        const WideItem item = item_at(product, all_of(chunk), cut, i);
        product_item(args, pipe, chunk, cut, item, product, layer, scale, d);
    }
}
// Whether ranks meet behind a phase: who reads others' outputs is done with them before these are
// written over, and what others wrote is there.
KIE_DEVICE bool is_shared(const PrefillArgs& args, int product, int layer) {
    if (kRanks == 1 || (product != kToO && product != kToDown)) return false;
    const int kind = product == kToDown;
    if (kSlack > 0) return true;  // so that layers can be counted
    return delay_of(args, kind, layer) >= 0 || shares_of(args, kind, layer);
}
KIE_DEVICE void work_all(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    Phase phase = {0};
    Clock clock = {args.model.trace, 0};
    const int chunks = chunks_of(args);
    tick(clock, -1);
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        if (args.from == 0) embed_chunk(args, chunk);
        tick(clock, 10);
        // Nobody starts while others still read the last layers' outputs of the chunk before.
        if (!meet(watch, args, phase, kSlack > 0)) return;
        tick(clock, 11);
        KIE_NO_UNROLL for (int layer = args.from; layer < (int)args.to; ++layer) {
            watch.step = layer;
            KIE_NO_UNROLL for (int product = kToQkv; product <= kToDown; ++product) {
                if (product == kToO) {
                    attend_chunk(args, chunk, layer, pages);
                    add_lanes(args, chunk, layer);
                    tick(clock, 8);
                    if (!meet(watch, args, phase)) return;
                    tick(clock, 9);
                }
                product_phase(args, pipe, chunk, product, layer);
                tick(clock, 2 * product);
                const u32 behind = kPhases * min_i(kSlack, layer - (int)args.from);
                if (!meet(watch, args, phase, is_shared(args, product, layer), behind)) return;
                tick(clock, 2 * product + 1);
                if (is_mixed(args, product, layer)) {
                    if (kSliced)
                        mix_slices(args, chunk, product == kToDown, layer);
                    else
                        mix_chunk(args, chunk, product == kToDown, layer);
                    if (!meet(watch, args, phase, kSliced)) return;
                }
                if constexpr (kHeadNorm) {
                    if (product != kToQkv) continue;
                    norm_heads(args, chunk, all_of(chunk), layer, block(), (int)args.blocks);
                    if (!meet(watch, args, phase)) return;
                }
            }
        }
        if (args.model.epoch != 0 && c + 1 == chunks) put_last(args, chunk);
    }
}
