// The multiplying teams: a tile's sums in registers, from the stages of the ring.
#pragma once

#include "args.h"
#include "lowered.h"
#include "ops/matvec.h"
#include "ops/scale.h"
#include "ops/unit.h"
#include "platform.h"
#include "prefill/feed.h"
#include "prefill/layout.h"
#include "prefill/pipe.h"
#include "prefill/tiles.h"
#include "shape.h"
#include "wide.h"

struct Share {
    Quad v[4];
};  // a warp's 16 rows of a stage: 64 of k
KIE_CONST_FN int lane_bytes(int bits) { return bits == kBitsF16 || is_bytes(bits) ? 16 : 8; }
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
// `kJoined`: units that blocks bring one behind another, whole, or 0.
template <class S, int kJoined = 0>
KIE_DEVICE DenseRows dense_rows(const TileTask& task, int all, int turn = 0) {
    const int first = 16 * task.frag,
              row = first + 16 * result_tile(task, turn).tile + lane() / 4 * 2;
    if (row >= min_i(first + 16 * task.tiles, all)) return {0};
    const int in = row % S::rows, tile = in - in % 16, rows = min_i(S::rows - tile, 16);
    const int from = kJoined > 0 ? (row / S::rows - first / S::rows) * (kJoined * S::rows) + tile
                                 : row - in + tile - touched_by<S>(first, first + 16).first;
    constexpr int kRow = S::row_bytes;
    return {(u32)rows << 16 | (u32)(from * kRow + (in % 16 / 2 * 4 + lane() % 4) * S::lane_bytes)};
}
// Codes become halves times their scales (ops/scale.h): what sums of 256 positions are kept in
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
template <class C>
KIE_DEVICE int scale_offset(int product, int pair) {
    if constexpr (C::kDelta) {
        if (product == kToGates) return scale_offset<typename C::TilingGates>(pair);
    }
    if constexpr (C::kShares) {
        if (product == kToSharedUp) return scale_offset<typename C::TilingSharedGu>(pair);
        if (product == kToSharedDown) return scale_offset<typename C::TilingSharedDown>(pair);
    }
    return product == kToQkv      ? scale_offset<typename C::TilingQkv>(pair)
           : product == kToO      ? scale_offset<typename C::TilingO>(pair)
           : product == kToGateUp ? scale_offset<typename C::TilingFirst>(pair)
                                  : scale_offset<typename C::TilingDown>(pair);
}
// With zero points the word of both.
template <int kBits>
KIE_DEVICE float scale_at(const u8* from) {
    if constexpr (kBits == kBitsI4Half || kBits == kBitsI8Half) {
        float scale, none;
        unpack_half2(*(const u16*)from, scale, none);
        return scale;
    } else if constexpr (kBits == kBitsI4)
        return number((u32) * (const u16*)from << 16);
    else if constexpr (kBits == kBitsE2m1)
        return number((u32)*from << 23);
    else
        return *(const float*)from;
}
template <int kBits, int kTiles>
KIE_DEVICE void take_scales_at(const ScaleRows<kTiles>& r, int at, Scale (&s)[kTiles]) {
    KIE_UNROLL for (int m = 0; m < kTiles; ++m) {
        const u8* from = r.from[m] + at;
        s[m] = {{scale_at<kBits>(from), scale_at<kBits>(from + r.next[m])}};
    }
}
// Where the scales of each 32 of k stand takes divisions: it is worked out once for a product,
// where there is room, which there is in models with experts.
template <class C>
KIE_CONST_FN bool places_fit() {
    int most = 0;
    for (int product = kToQkv; product < kToExperts; ++product)
        most =
            max_i(most, (C::kHasMore || product < kToGates) && (!C::kRouted || product != kToDown)
                            ? pairs_of<C>(product)
                            : 0);
    return kHasExperts && kWideAsync && most * 4 <= kPfRing - kPfPlaces;
}
KIE_DEVICE u32* scale_places() { return (u32*)(prefill_shared() + kPfPlaces); }
template <class C>
KIE_DEVICE void find_scale_places(int product) {
    if constexpr (places_fit<C>()) {
        KIE_NO_UNROLL for (int p = thread(); p < pairs_of<C>(product); p += kWorkers)
            scale_places()[p] = scale_offset<C>(product, p);
        sync_consumers<kWorkers>();
    }
}
template <class C, int kBits, int kTiles>
KIE_DEVICE void ask_scales(const ScaleRows<kTiles>& r, int pair, Scale (&s)[kTiles]) {
    take_scales_at<kBits>(
        r, places_fit<C>() ? scale_places()[pair] : scale_offset<C>(r.product, pair), s);
}
template <int kBits>
KIE_DEVICE void decode_share(const UnitCodes<kBits>& codes, const Scale& scale, Quad& low,
                             Quad& high) {
    float by[2] = {scale.v[0], scale.v[1]}, none;
    u32 zeros[2] = {0, 0};
    if constexpr (kBits == kBitsI4Zeros) {
        KIE_UNROLL for (int i = 0; i < 2; ++i) zeros[i] = bits(scale.v[i]) >> 16,
                                               unpack_half2(bits(scale.v[i]), by[i], none);
    }
    UnitHalves h = decode_unit<kBits>(codes, zeros[0], zeros[1]);
    if constexpr (kBits == kBitsE2m1)
        times_powers(h, by);
    else
        times_scales(h, by);
    KIE_UNROLL for (int i = 0; i < 4; ++i) low.v[i] = h.v[i], high.v[i] = h.v[4 + i];
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
            decode_share<kBits>(take_codes<kBits>(from, 0), scale[i / 2][0], a.v[i], a.v[i + 1]);
        } else {
            const auto codes = take_codes<kBits>(from, rows.tile_rows());
            a.v[i] = codes.v[0], a.v[i + 1] = codes.v[1];
        }
    }
}
template <int kN>
KIE_DEVICE void multiply_share(const Pipe& p, const Share& a, float (&d)[kSums]) {
    const WideOperand x = wide_operand(stage_bytes(p.at) + kStageWeights, 128, kCores);
    wide_begin();
    KIE_UNROLL for (int i = 0; i < 4; ++i)
        multiply_wide<kN, 0>(d, a.v[i], wide_shift(x, i / 2 * kStagePart + i % 2 * 256), kCores);
    wide_commit();
}
// A run of pairs of k of one wide task. One group of products is always queued behind the one that
// runs.
template <class C, int kBits, int kN, class Rows>
KIE_DEVICE void accumulate(Pipe& pipe, int from, int to, int pairs, const Rows& rows,
                           const ScaleRows<1>& scales, float (&d)[kSums]) {
    KIE_UNROLL for (int i = 0; i < kSums; ++i) d[i] = 0;
    Share a, b;
    Scale ahead[2][1];  // of the stage that is taken next
    const auto ask = [&](int p) {
        if constexpr (kBits != kBitsF16)
            KIE_UNROLL for (int i = 0; i < 2; ++i)
                ask_scales<C, kBits>(scales, min_i(p + i, pairs - 1), ahead[i]);
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
// The same of a narrow task of up to kFourth times four row tiles, by pairs: more would not fit
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
            decode_share<kBits>(take_codes<kBits>(from, 0), scale[m], a.v[m][0], a.v[m][1]);
        } else {
            const auto codes = take_codes<kBits>(from, rows[m]);
            a.v[m][0] = codes.v[0], a.v[m][1] = codes.v[1];
        }
    }
}
// What is multiplied where it is asked for leaves its stage at once, other products with the next
// stage's, and tell by then that they are done.
KIE_DEVICE void leave_before(const Pipe& p, u32& last) {
    wide_wait<1>();
    if constexpr (kWideAsync) {
        if (last < kStages && lane() == 0) slot_release(stage_slot(last));
        last = p.at;
    }
}
KIE_DEVICE void leave_after(const Pipe& p) {
    wide_wait<1>();
    if constexpr (!kWideAsync) {
        if (lane() == 0) slot_release(stage_slot(p.at));
    }
}
// Short stages have one pair of k each: the second is at the beginning of the next one, elsewhere
// behind half of the weights.
KIE_CONST_FN int second_pair(int weights) { return kShortStages ? 0 : weights / 2; }
KIE_DEVICE void enter_second(Pipe& p) {
    if constexpr (kShortStages) {
        leave_after(p);
        forward(p);
        await_stage(p);
    }
}
KIE_DEVICE void leave_last(u32 last) {
    if (kWideAsync && lane() == 0) slot_release(stage_slot(last));
}
// Row tiles of a warp, each 16 of k (of the first or the second half of a pair), times the same kN
// positions.
#ifndef KIE_MULTIPLY_TILES
template <int kN, int kTurns, int kAll>
KIE_DEVICE void multiply_tiles(float (&d)[kAll], const Quad (&a)[kTurns][2], int half,
                               const WideOperand& x, u32 across) {
    multiply_wide<kN, 0>(d, a[0][half], x, across);
    if constexpr (kTurns > 1) multiply_wide<kN, kN / 2>(d, a[1][half], x, across);
    if constexpr (kTurns > 2) multiply_wide<kN, kN>(d, a[2][half], x, across);
}
#endif
template <int kFourth>
KIE_DEVICE void multiply_narrow(const NarrowShare<kFourth>& a, const WideOperand& x,
                                float (&d)[kSums]) {
    wide_begin();
    KIE_UNROLL for (int i = 0; i < 2; ++i) {
        const WideOperand at = wide_shift(x, i * 256);
        multiply_tiles<64, kFourth>(d, a.v, i, at, kCores);
    }
    wide_commit();
}
template <class C, int kBits, int kFourth, class Rows>
KIE_DEVICE void accumulate_narrow(Pipe& pipe, int from, int to, int pairs, Rows rows_of,
                                  const ScaleRows<kFourth>& scales, float (&d)[kSums]) {
    // Of short stages all: what a task before left would take registers.
    KIE_UNROLL for (int i = 0; i < (kShortStages ? kSums : 32 * kFourth); ++i) d[i] = 0;
    int rows[kFourth];
    KIE_UNROLL for (int m = 0; m < kFourth; ++m) rows[m] = rows_of(m);
    const u32 team = thread() / kCrew,
              mine = thread() / kTeam % 4 * tile_bytes(kBits) + lane() * lane_bytes(kBits),
              places = kNarrowWeights + team * (kNarrowPart / 2);
    NarrowShare<kFourth> a, b;
    Scale ahead[2][kFourth];
    const auto ask = [&](int p, Scale(&to)[kFourth]) {
        if constexpr (kBits != kBitsF16) ask_scales<C, kBits>(scales, min_i(p, pairs - 1), to);
    };
    ask(from, ahead[0]), ask(from + 1, ahead[1]);
    u32 last = kStages;
    KIE_NO_UNROLL for (int p = from; p < to; p += 2) {
        await_stage(pipe);
        const u8* stage = stage_bytes(pipe.at);
        const WideOperand x = wide_operand(stage + places, 128, kCores);
        take_narrow<kBits, kFourth>(stage + mine, rows, true, ahead[0], a);
        ask(p + 2, ahead[0]);
        multiply_narrow<kFourth>(a, x, d);
        leave_before(pipe, last);
        enter_second(pipe);
        if (kShortStages) stage = stage_bytes(pipe.at);
        take_narrow<kBits, kFourth>(stage + second_pair(kNarrowWeights) + mine, rows, p + 1 < pairs,
                                    ahead[1], b);
        ask(p + 3, ahead[1]);
        const WideOperand next =
            kShortStages ? wide_operand(stage + places, 128, kCores) : wide_shift(x, kNarrowPart);
        multiply_narrow<kFourth>(b, next, d);
        leave_after(pipe);
        forward(pipe);
    }
    wide_finish(d);
    leave_last(last);
}
// Results are taken from the front, a batch at a time, and the rest moves up: a loop of little code
// instead of one pass over all registers, whose instructions would come from memory each time.
template <int kBy, int kAll>
KIE_DEVICE void move_up(float (&d)[kAll]) {
    KIE_UNROLL for (int i = 0; i < kAll - kBy; ++i) d[i] = d[i + kBy];
}

// The splits of k of a tile: each writes its sums, and who comes last adds all of them, in order.
// False: not the last.
KIE_DEVICE bool join_k_splits(const PrefillArgs& args, const TileTask& task, int k_splits,
                              float (&d)[kSums]) {
    volatile u32* last = (volatile u32*)(prefill_shared() + kPfLast);
    const long k_split_bytes = task.k_split_tiles * kKSplitBytes;
    u8* mine =
        args.scratch + kScrKSplits + (long)task.tile * k_splits * k_split_bytes + thread() * 16;
    constexpr int kGroup8 = kWorkers * 16;  // bytes of a group of 8 places
    float* to = (float*)(mine + task.k_split * k_split_bytes);
    KIE_NO_UNROLL for (int b = batches_of(task); b > 0; --b, to += kBatch * kGroup8 / 4) {
        KIE_UNROLL for (int i = 0; i < 4 * kBatch; ++i) to[i / 4 * (kGroup8 / 4) + i % 4] = d[i];
        move_up<4 * kBatch>(d);
    }
    writes_before_telling();
    sync_consumers<kWorkers>();
    if (thread() == 0) {
        u64* counter = args.arrivals + 1 + task.tile;
        fence_device();
        const bool all = count_in(counter) + 1 == (u64)k_splits;
        if (all) store_word(counter, 0);
        fence_device();
        *last = all;
    }
    sync_consumers<kWorkers>();
    if (!of_wave(*last)) return false;
    KIE_NO_UNROLL for (int b = 0; b < kSums / (4 * kBatch); ++b) {
        move_up<4 * kBatch>(d);
        float* sums = d + kSums - 4 * kBatch;
        KIE_UNROLL for (int i = 0; i < 4 * kBatch; ++i) sums[i] = 0;
        if (b >= batches_of(task)) continue;
        const u8* from = mine + b * (kBatch * kGroup8);
        KIE_NO_UNROLL for (int p = 0; p < k_splits; ++p, from += k_split_bytes) {
            Quad v[kBatch];
            KIE_UNROLL for (int i = 0; i < kBatch; ++i) v[i] = load_state(from + i * kGroup8);
            KIE_UNROLL for (int i = 0; i < 4 * kBatch; ++i) sums[i] += number(v[i / 4].v[i % 4]);
        }
    }
    return true;
}

template <class C>
KIE_DEVICE WideRows rows_of_product(int product, int f) {
    if constexpr (C::kDelta) {
        if (product == kToGates) return rows_at<typename C::TilingGates, 2 * C::kUnits>(f);
    }
    if constexpr (C::kShares) {
        if (product == kToSharedUp)
            return rows_at<typename C::TilingSharedGu, 2 * C::kSharedFfn>(f);
    }
    return product == kToQkv      ? product_rows<C, typename C::TilingQkv, C::kRowsIn>(f)
           : product == kToGateUp ? product_rows<C, typename C::TilingFirst, C::kRowsFirst>(f)
                                  : residual_rows(f);
}
template <class C>
KIE_DEVICE MatrixAt product_at(const PrefillArgs& args, int product, int layer) {
    return in_stream(args, (long)args.model.layers[layer].stream + product_offset<C>(product));
}
template <class S, int kTiles>
KIE_DEVICE void find_scales(const PrefillArgs& args, const MatrixAt& matrix, const TileTask& task,
                            int rows, bool dense, ScaleRows<kTiles>& found) {
    KIE_UNROLL for (int m = 0; m < kTiles; ++m) {
        const int f = task.frag + result_tile(task, m).tile, pair = lane() / 4 * 2;
        int block = f / S::tiles_all, row = f % S::tiles_all * 16 + pair;
        if (dense) block = (16 * f + pair) / S::rows, row = (16 * f + pair) % S::rows;
        if (row >= S::rows || block * S::rows + row >= rows) block = row = 0;
        block += task.lane_index * kBlocksPerLane;
        const u8* from = matrix.at + block * matrix.stride + S::scales_at;
        if constexpr (S::per_row) {
            found.from[m] = from + row * S::scale_bytes, found.next[m] = S::scale_bytes;
        } else {
            const u8* index = args.model.scale_index + block * kIndexBytes + S::index_at + row;
            found.from[m] = from + index[0] * 4, found.next[m] = (index[1] - index[0]) * 4;
        }
    }
}
template <class C, int kBits, int kTiles>
KIE_DEVICE ScaleRows<kTiles> scale_rows(const PrefillArgs& args, const TileTask& task, int product,
                                        int layer) {
    ScaleRows<kTiles> found = {product};
    if constexpr (kBits != kBitsF16) {
        const MatrixAt at = product_at<C>(args, product, layer);
        if constexpr (C::kDelta) {
            if (product == kToGates) {
                find_scales<typename C::TilingGates>(args, at, task, 2 * C::kUnits, false, found);
                return found;
            }
        }
        if constexpr (C::kShares) {
            if (product == kToSharedUp) {
                find_scales<typename C::TilingSharedGu>(args, at, task, 2 * C::kSharedFfn, false,
                                                        found);
                return found;
            }
            if (product == kToSharedDown) {
                find_scales<typename C::TilingSharedDown>(args, at, task, kHidden, false, found);
                return found;
            }
        }
        if (product == kToQkv)
            find_scales<typename C::TilingQkv>(args, at, task, C::kRowsIn, C::kDense, found);
        else if (product == kToO)
            find_scales<typename C::TilingO>(args, at, task, kHidden, false, found);
        else if (product == kToGateUp)
            find_scales<typename C::TilingFirst>(args, at, task, C::kRowsFirst, C::kDense, found);
        else
            find_scales<typename C::TilingDown>(args, at, task, kHidden, false, found);
    }
    return found;
}
template <class C, int kBits, int kFourth>
KIE_DEVICE void multiply_narrow_task(const PrefillArgs& args, Pipe& pipe, int from, int to,
                                     int product, int layer, const TileTask& task,
                                     float (&d)[kSums]) {
    const auto rows_of = [&](int turn) {
        return rows_of_product<C>(product, task.frag + result_tile(task, turn).tile).rows;
    };
    const auto scales = scale_rows<C, kBits, kFourth>(args, task, product, layer);
    accumulate_narrow<C, kBits, kFourth>(pipe, from, to, pairs_of<C>(product), rows_of, scales, d);
}
template <class C, int kBits>
KIE_DEVICE void multiply_stored(const PrefillArgs& args, Pipe& pipe, const TileConfig& config,
                                int product, int layer, const TileTask& task, float (&d)[kSums]) {
    const int pairs = pairs_of<C>(product),
              from = 2 * k_split_from<C>(product, config, task.k_split),
              to = 2 * k_split_from<C>(product, config, task.k_split + 1);
    if (!kAllNarrow && (C::kDense || !is_narrow(task))) {
        const auto scales = scale_rows<C, kBits, 1>(args, task, product, layer);
        const int f = task.frag + result_tile(task, 0).tile;
        const OwnRows<kBits> own = {rows_of_product<C>(product, f).rows};
        if constexpr (kAllNarrow) {
            // No such tiles.
        } else if constexpr (C::kDense) {
            const DenseRows rows =
                product == kToQkv      ? dense_rows<typename C::TilingQkv>(task, C::kRowsIn)
                : product == kToGateUp ? dense_rows<typename C::TilingFirst>(task, C::kRowsFirst)
                                       : DenseRows{own.live() ? (u32)own.rows << 16 | own.at() : 0};
            accumulate<C, kBits, kWideN>(pipe, from, to, pairs, rows, scales, d);
        } else {
            accumulate<C, kBits, kWideN>(pipe, from, to, pairs, own, scales, d);
        }
    } else if constexpr (kFew || kAllNarrow) {
        constexpr int kMost = min_i(kNarrowTiles / 4, 3);
        if (task.tiles <= 4)
            multiply_narrow_task<C, kBits, 1>(args, pipe, from, to, product, layer, task, d);
        else if (kMost < 3 || task.tiles <= 8)
            multiply_narrow_task<C, kBits, 2>(args, pipe, from, to, product, layer, task, d);
        else
            multiply_narrow_task<C, kBits, kMost>(args, pipe, from, to, product, layer, task, d);
    }
}
// Whether a product has such codes; then it is done.
template <class C, int kBits>
KIE_DEVICE bool multiply_if(const PrefillArgs& args, Pipe& pipe, const TileConfig& config,
                            int product, int layer, const TileTask& task, float (&d)[kSums]) {
    if constexpr (any_has<C>(kBits)) {
        if (!all_have<C>(kBits) && bits_of<C>(product) != kBits) return false;
        multiply_stored<C, kBits>(args, pipe, config, product, layer, task, d);
        return true;
    }
    return false;
}
template <class C>
KIE_DEVICE void multiply_task(const PrefillArgs& args, Pipe& pipe, const TileConfig& config,
                              int product, int layer, const TileTask& task, float (&d)[kSums]) {
    if (multiply_if<C, kBitsF8>(args, pipe, config, product, layer, task, d)) return;
    if (multiply_if<C, kBitsI4>(args, pipe, config, product, layer, task, d)) return;
    if (multiply_if<C, kBitsE2m1>(args, pipe, config, product, layer, task, d)) return;
    if (multiply_if<C, kBitsI4Half>(args, pipe, config, product, layer, task, d)) return;
    if (multiply_if<C, kBitsI4Zeros>(args, pipe, config, product, layer, task, d)) return;
    if (multiply_if<C, kBitsI8>(args, pipe, config, product, layer, task, d)) return;
    if (multiply_if<C, kBitsI8Half>(args, pipe, config, product, layer, task, d)) return;
    multiply_if<C, kBitsF16>(args, pipe, config, product, layer, task, d);
}
