// y = W x for a block's rows: weights from the ring once, x (1 to 8 vectors, ops/parts.h) from
// shared memory, sums in float. Traffic: the matrix's bytes from memory, codes and scales, whatever
// the number of columns.
#pragma once

#include "lowered.h"
#include "ops/decode_fp8.h"
#include "ops/decode_int4.h"
#include "ops/decode_int8.h"
#include "ops/decode_mxfp4.h"
#include "ops/parts.h"
#include "ops/unit.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"
#include "tile.h"

// Rows of a tile: 16, fewer in the last, 0 or less where a warp has no such tile.
template <class S>
KIE_DEVICE int rows_of(int tile) {
    if (S::rows % 16 == 0 && S::tiles * S::row_warps == S::tiles_all) return 16;
    const int rows = S::rows - 16 * tile;
    return rows > 16 ? 16 : rows;
}

// A lane's codes of a tile of so many rows.
template <int kBits>
KIE_DEVICE UnitCodes<kBits> take_codes(const u8* from, int rows) {
    if constexpr (kBits == kBitsF16)
        return {{*(const Quad*)from, *(const Quad*)(from + rows * 32)}};
    else if constexpr (is_bytes(kBits))
        return {*(const Quad*)from};
    else
        return *(const UnitCodes<kBits>*)from;
}
// `zeros`: of rows 2g and 2g + 1, where codes have zero points.
template <int kBits>
KIE_DEVICE UnitHalves decode_unit(const UnitCodes<kBits>& codes, u32 zero0 = 0, u32 zero1 = 0) {
    if constexpr (kBits == kBitsF8) {
        return decode_f8(codes.v);
    } else if constexpr (is_bytes(kBits)) {
        return decode_i8(codes.v);
    } else {
        UnitHalves h;
        KIE_UNROLL for (int row = 0; row < 2; ++row) {
            u32 halves[4];
            const u32 word = codes.v[row];
            if constexpr (kBits == kBitsI4 || kBits == kBitsI4Half)
                unpack_i4(word, halves);
            else if constexpr (kBits == kBitsI4Zeros)
                unpack_i4_zeros(word, row == 0 ? zero0 : zero1, halves);
            else
                unpack_e2m1(word, halves);
            KIE_UNROLL for (int j = 0; j < 4; ++j) h.v[2 * j + row] = halves[j];
        }
        return h;
    }
}
// The scales of rows 2g and 2g + 1: floats of any two places, or as they are stored, side by side;
// with zero points a word each, the zero point in its upper half.
template <int kWords>
struct ScalePair {
    float v[2];
};
template <>
struct ScalePair<1> {
    u32 v;
};
template <>
struct ScalePair<2> {
    u64 v;
};
template <class S>
using ScalesOf = ScalePair<S::bits == kBitsI4Zeros ? 2 : S::per_row>;
template <class S>
KIE_DEVICE u32 zero_of(const ScalesOf<S>& scale, int row) {
    if constexpr (S::bits == kBitsI4Zeros) return (u32)(scale.v >> (32 * row + 16)) & 0xffff;
    return 0;
}
template <class S>
KIE_DEVICE float scale_of(const ScalesOf<S>& scale, int row) {
    if constexpr (S::bits == kBitsI4Zeros) {
        float v, zero;
        unpack_half2((u32)(scale.v >> 32 * row), v, zero);
        return v;
    } else if constexpr (S::bits == kBitsI4Half || S::bits == kBitsI8Half) {
        float v[2];
        unpack_half2(scale.v, v[0], v[1]);
        return v[row];
    } else if constexpr (S::bits == kBitsI4)
        return number(row == 0 ? scale.v << 16 : scale.v & 0xffff0000);
    else if constexpr (S::bits == kBitsE2m1)
        return number(scale.v << (row == 0 ? 23 : 15) & 0x7f800000);
    else
        return scale.v[row];
}

// One stage of a warp's tiles, in registers, as the bits that are stored; its slot of the ring is
// free again. The first ones are taken before the vector has arrived, later ones while the products
// of those before are running.
template <class S>
struct WeightFragment {
    UnitCodes<S::bits> codes[S::chunk][S::tiles];
    ScalesOf<S> scale[S::scaled ? S::spans : 1][S::tiles];
};

// Where a warp's tiles stand in a stage, worked out once a product. Lanes of rows that there are
// not take the first lane's. A stage may be of several pieces (lower/tiling.rs, Stack), each as the
// tiling of one has it: some of a tile's rows belong to each.
template <class S>
struct FragmentOffset {
    int row_warp;
    u32 at[S::tiles];
    // Bytes behind the codes: of each tile's row pair where each row has its own, else 16 bits a
    // row.
    u32 scale_at[S::scaled ? S::tiles : 1];
};
// The same of a stage of several pieces.
template <class S>
KIE_DEVICE void piece_offset(const Ring& ring, int k_warp, FragmentOffset<S>& p) {
    static_assert(S::row_warps == 1 && S::rows <= 16, "lower/tiling.rs, stacks");
    const int my = lane() % kTeam, unit = k_warp * S::chunk;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        const int pair = i * 8 + my / 4, own = pair < S::row_pairs ? pair : 0;
        const int piece = own / (S::piece_rows / 2), row = own % (S::piece_rows / 2) * 2;
        const u32 base = piece * S::stage_bytes;
        p.at[i] = base + S::codes_at + unit * S::unit_bytes + (row * 2 + my % 4) * S::lane_bytes;
        if constexpr (S::scaled) {
            const u32 scale = unit / S::span * S::scale_rows;
            if constexpr (S::per_row) {
                p.scale_at[i] = base + (scale + row) * S::scale_bytes;
            } else {
                const u8* index = ring.scale_index + S::index_at + row;
                p.scale_at[i] = (base + (scale + index[0]) * 4) | (base + (scale + index[1]) * 4)
                                                                      << 16;
            }
        }
    }
}
// `first`: of the passes of one matrix, the row at which this one begins.
template <class S>
KIE_DEVICE FragmentOffset<S> fragment_offset(const Ring& ring, int first = 0) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam;
    const int row_warp = S::row_warps == 1 ? 0 : warp % S::row_warps;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    FragmentOffset<S> p;
    p.row_warp = row_warp;
    if constexpr (S::pieces > 1) {
        piece_offset<S>(ring, k_warp, p);
        return p;
    }
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        const int tile = row_warp * S::tiles + i, rows = rows_of<S>(tile);
        p.at[i] = S::codes_at + k_warp * (S::chunk * S::unit_bytes) +
                  (rows > 0 ? tile * (16 * S::row_bytes) : 0) +
                  (my < 2 * rows ? my * S::lane_bytes : 0);
    }
    if constexpr (S::scaled) {
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const int row = (row_warp * S::tiles + i) * 16 + my / 4 * 2;
            const int own = row < S::rows ? row : 0;
            const u32 base = k_warp * S::spans * S::scale_rows;
            if constexpr (S::per_row) {
                p.scale_at[i] = (base + own) * S::scale_bytes;
            } else {
                const u8* index = ring.scale_index + S::index_at + first + own;
                p.scale_at[i] = (base + index[0]) * 4 | (base + index[1]) * 4 << 16;
            }
        }
    }
    return p;
}
// The units of a stage that share their scales, from unit `n` of such on: read, or multiplied.
template <class S>
constexpr int kScaleRun = S::scaled ? S::span : 1;
template <class S>
constexpr int kScaleRuns = S::chunk / kScaleRun<S>;
template <class S>
KIE_DEVICE void load_run(WeightFragment<S>& f, const u8* stage, const FragmentOffset<S>& offset,
                         int n) {
    KIE_UNROLL for (int c = n * kScaleRun<S>; c < (n + 1) * kScaleRun<S>; ++c) {
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const int rows = S::piece_rows < S::rows
                                 ? S::piece_rows
                                 : max_i(rows_of<S>(offset.row_warp * S::tiles + i), 1);
            f.codes[c][i] = take_codes<S::bits>(stage + offset.at[i] + c * S::unit_bytes, rows);
        }
    }
    if constexpr (S::scaled) {
        const int behind = S::scales_at + n * (S::scale_rows * S::scale_bytes);
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const u32 at = offset.scale_at[i];
            const u8* from = stage + (S::per_row ? at : 0);
            if constexpr (S::bits == kBitsI4Zeros)
                f.scale[n][i] = {*(const u64*)(from + behind)};
            else if constexpr (S::per_row && S::scale_bytes == 2)
                f.scale[n][i] = {*(const u32*)(from + behind)};
            else if constexpr (S::bits == kBitsE2m1)
                f.scale[n][i] = {opaque(*(const u16*)(from + behind))};
            else
                f.scale[n][i] = {{*(const float*)(from + (at & 0xffff) + behind),
                                  *(const float*)(from + (at >> 16) + behind)}};
        }
    }
}
template <class S>
KIE_DEVICE void load_fragment(Ring& ring, WeightFragment<S>& f, bool here,
                              const FragmentOffset<S>& offset) {
    const u8* stage = take_stage(ring, here, S::stage_bytes);
    KIE_UNROLL for (int n = 0; n < kScaleRuns<S>; ++n) load_run<S>(f, stage, offset, n);
    release_stage(ring);
}
// The first stages, or some of them.
template <class S>
struct Prefetched {
    WeightFragment<S> v[S::prefetch_depth];
};
template <class S, int kFrom = 0, int kTo = S::prefetch_depth>
KIE_DEVICE void prefetch_weights(Ring& ring, Prefetched<S>& prefetched, int first = 0) {
    const FragmentOffset<S> offset = fragment_offset<S>(ring, first);
    KIE_UNROLL for (int i = kFrom; i < kTo; ++i)
        load_fragment<S>(ring, prefetched.v[i], false, offset);
}
template <class S>
struct Sums {
    float v[S::tiles][4];
};
template <class S>
struct Column {
    Quad v[S::chunk];
};
template <class S>
KIE_DEVICE Column<S> take_column(const u8* x) {
    Column<S> b;
    KIE_UNROLL for (int c = 0; c < S::chunk; ++c) b.v[c] = *(const Quad*)(x + c * 64);
    return b;
}
// Half of a unit's products. One column alone may go a shorter way to the same bits (tile.h).
KIE_DEVICE void add_product(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef KIE_MMA_ALONE
    if constexpr (kColumns == 1 && kParts == 1) return mma_alone(d, a0, a1, a2, a3, b0, b1);
#endif
    mma(d, a0, a1, a2, a3, b0, b1);
}
// Weights of a tile and unit, without their scales, times x: columns 8t to 8t + 3 are added to `d`,
// the four behind them to `e`, which may be the same.
template <class S>
KIE_DEVICE void add_unit(float (&d)[4], float (&e)[4], const UnitCodes<S::bits>& codes,
                         const Quad& x, u32 zero0 = 0, u32 zero1 = 0) {
    if constexpr (S::bits == kBitsF16) {
        const Quad &l = codes.v[0], &h = codes.v[1];
        add_product(d, l.v[0], l.v[1], l.v[2], l.v[3], x.v[0], x.v[1]);
        add_product(e, h.v[0], h.v[1], h.v[2], h.v[3], x.v[2], x.v[3]);
    } else {
        const UnitHalves a = decode_unit<S::bits>(codes, zero0, zero1);
        add_product(d, a.v[0], a.v[1], a.v[2], a.v[3], x.v[0], x.v[1]);
        add_product(e, a.v[4], a.v[5], a.v[6], a.v[7], x.v[2], x.v[3]);
    }
}
// Run `n` of a tile's units times x. Scales multiply float sums, once for all columns that share
// them. Where those are several units, two sums may take turns, so that a product waits for every
// other one only (tile.h).
template <class S, bool kTurns = kSumsByTurns>
KIE_DEVICE void add_tile_run(float (&s)[4], const WeightFragment<S>& f, int tile,
                             const Column<S>& x, int n) {
    if constexpr (!S::scaled) {
        add_unit<S>(s, s, f.codes[n][tile], x.v[n]);
    } else {
        const ScalesOf<S>& scale = f.scale[n][tile];
        constexpr bool kTwo = kTurns && S::span > 1;
        float d[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
        float (&e)[4] = kTwo ? second : d;
        KIE_UNROLL for (int c = n * S::span; c < (n + 1) * S::span; ++c)
            add_unit<S>(d, e, f.codes[c][tile], x.v[c], zero_of<S>(scale, 0), zero_of<S>(scale, 1));
        KIE_UNROLL for (int j = 0; j < 4; ++j) s[j] =
            fma_f(scale_of<S>(scale, j / 2), kTwo ? d[j] + e[j] : d[j], s[j]);
    }
}
template <class S>
KIE_DEVICE void add_run(Sums<S>& s, const WeightFragment<S>& f, const Column<S>& x, int n) {
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) add_tile_run<S>(s.v[i], f, i, x, n);
}
template <class S>
KIE_DEVICE void add_fragment(Sums<S>& s, const WeightFragment<S>& f, const Column<S>& x) {
    KIE_UNROLL for (int n = 0; n < kScaleRuns<S>; ++n) add_run<S>(s, f, x, n);
}
// The same; what has been multiplied makes room for the next stage's. Its loads then stand among
// the products, and are waited for together with the stage behind them.
template <class S>
KIE_DEVICE void add_and_load(Sums<S>& s, WeightFragment<S>& f, const Column<S>& x, const u8* stage,
                             const FragmentOffset<S>& offset) {
    KIE_UNROLL for (int n = 0; n < kScaleRuns<S>; ++n) {
        add_run<S>(s, f, x, n);
        load_run<S>(f, stage, offset, n);
    }
}

// Stages in which a warp has units: where columns do not divide, the last warps have fewer, and
// none of their codes is in the others (lower/tiling.rs).
template <class S>
KIE_DEVICE int own_stages(int k_warp) {
    return S::uneven ? min_i(S::stages, max_i(0, S::chunks - k_warp * S::stages)) : S::stages;
}

// What this warp's tiles make of a stage's columns is added to `s`. `mine`: the lane's first ones
// of the vector that it has of the matrix unit's eight. `prefetched`: the first stages; `first` as
// fragment_offset has it.
template <class S>
KIE_DEVICE void multiply_onto(Sums<S>& s, Ring& ring, Prefetched<S>& prefetched, const u8* mine,
                              int first = 0) {
    const int k_warp = S::k_warps == 1 ? 0 : (int)uniform(thread() / kTeam) / S::row_warps;
    constexpr int kStep = S::chunk * 64, kMany = S::prefetch_depth;
    const FragmentOffset<S> offset = fragment_offset<S>(ring, first);
    const int own = own_stages<S>(k_warp);
    if constexpr (kMany > 1) {
        Column<S> next = take_column<S>(mine);
        KIE_NO_UNROLL for (int stage = 0; stage < S::stages; stage += kMany) {
            KIE_UNROLL for (int i = 0; i < kMany; ++i) {
                if (S::stages % kMany != 0 && stage + i >= S::stages) continue;
                const Column<S> now = next;
                if (stage + i + 1 < S::stages) next = take_column<S>(mine += kStep);
                if (!S::uneven || stage + i < own) add_fragment<S>(s, prefetched.v[i], now);
                if (stage + i + kMany < S::stages)
                    load_fragment<S>(ring, prefetched.v[i], false, offset);
            }
        }
        return;
    }
    // Where a warp has no units it reads what it had, or the vector's first columns.
    const u8* from = !S::uneven || own > 0 ? mine : mine - k_warp * (S::pairs * 64);
    WeightFragment<S>& f = prefetched.v[0];
    Column<S> x = take_column<S>(from);
    const bool gives = lane() == 0;
    Slot* held = nullptr;  // the first stage went back when it was taken
    KIE_NO_UNROLL for (int stage = 1; stage < S::stages; ++stage) {
        const HeldStage next = hold_stage(ring, S::stage_bytes);
        give_back(held, gives && stage > 1);
        held = next.slot;
        if (!S::uneven || stage < own) from += kStep;
        if (!S::uneven || stage <= own) {
            add_and_load<S>(s, f, x, next.bytes, offset);
            x = take_column<S>(from);
        }
    }
    if (S::stages > 1) give_back(held, gives);
    if (!S::uneven || S::stages <= own) add_fragment<S>(s, f, x);
}
// Adds up this warp's tiles. `x`: vector v, element k at halves x[v * stride + k].
template <class S>
KIE_DEVICE Sums<S> multiply(Ring& ring, Prefetched<S>& prefetched, const u8* x, int stride,
                            int first = 0) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam, g = my / 4, t = my % 4;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    // By hand for one part, which other forms cost some instructions.
    const int vector = kParts > 1      ? vector_of(g)
                       : kColumns == 1 ? 0
                                       : (g < kColumns ? g : kColumns - 1);
    Sums<S> s;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
    multiply_onto<S>(s, ring, prefetched,
                     x + (vector * stride + k_warp * S::pairs * 32 + 8 * t) * 2, first);
    return s;
}

// The sums of a column's parts: they stand side by side, so a lane has both.
template <class S>
KIE_DEVICE void add_parts(Sums<S>& s) {
    if constexpr (kParts > 1) {
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) s.v[i][0] += kRestScale * s.v[i][1],
            s.v[i][2] += kRestScale * s.v[i][3];
    }
}
// Columns of which lane t of four has results; with one column all four have the same.
constexpr int kLaneColumns = kColumns == 1 || kParts > 1 ? 1 : 2;

// Hands every result to the thread that owns it: out(item, pair, column, v0, v1, live, leader) with
// the values of rows 2 pair and 2 pair + 1. Called by whole warps, so `out` may shuffle; `live`
// says that the row exists, `leader` that this thread is the one of several equals that should
// store. With more than one k-warp the parts are added in warp order behind one barrier, which
// `part` must survive.
template <class S, int kCopies = 1, class F>
KIE_DEVICE void finish(Sums<S>& s, float* part, F out) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam, g = my / 4, t = my % 4;
    const int row_warp = S::row_warps == 1 ? 0 : warp % S::row_warps;
    add_parts<S>(s);
    if constexpr (S::k_warps == 1) {
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const int pair = (row_warp * S::tiles + i) * 8 + g;
            if constexpr (kColumns == 1) {
                out(i, pair, 0, s.v[i][0], s.v[i][2], pair < S::row_pairs, t == 0);
            } else {
                KIE_UNROLL for (int c = 0; c < kLaneColumns; ++c)
                    out(kLaneColumns * i + c, pair, kLaneColumns * t + c, s.v[i][c], s.v[i][2 + c],
                        pair < S::row_pairs && kLaneColumns * t + c < kColumns, true);
            }
        }
    } else {
        const int k_warp = warp / S::row_warps;
        float* mine = part + k_warp * (S::rows * kColumns);
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const int pair = (row_warp * S::tiles + i) * 8 + g;
            KIE_UNROLL for (int c = 0; c < kLaneColumns; ++c) {
                const int column = (kParts > 1 ? 1 : 2) * t + c;
                if (pair < S::row_pairs && column < kColumns)
                    *(u64*)(mine + column * S::rows + 2 * pair) =
                        (u64)bits(s.v[i][2 + c]) << 32 | bits(s.v[i][c]);
            }
        }
        sync_consumers<kThreads>();
        KIE_UNROLL for (int i = 0; i < S::items; ++i) {
            if (kCopies > 1 && warp >= kCopies) continue;
            const int item = kCopies > 1 ? my : i * kThreads + me;
            if ((item & ~31) < S::row_pairs * kColumns) {
                const bool live = item < S::row_pairs * kColumns;
                const int at = live ? item : 0, pair = at % S::row_pairs,
                          column = at / S::row_pairs;
                float a = 0, b = 0;
                KIE_UNROLL for (int k = 0; k < S::k_warps; ++k) {
                    const u64 v = *(const u64*)(part + k * (S::rows * kColumns) + column * S::rows +
                                                2 * pair);
                    a += number((u32)v), b += number((u32)(v >> 32));
                }
                out(i, pair, column, a, b, live, kCopies == 1 || warp == 0);
            }
        }
    }
}
// The results that this thread will own, without the sums: visit(item, pair, column, live).
template <class S, class F>
KIE_DEVICE void each_item(F visit) {
    const int me = thread(), warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    KIE_UNROLL for (int i = 0; i < S::items; ++i) {
        int pair, column;
        if constexpr (S::k_warps == 1) {
            const int row_warp = S::row_warps == 1 ? 0 : warp % S::row_warps;
            pair = (row_warp * S::tiles + i / kLaneColumns) * 8 + g;
            column = kColumns == 1 ? 0 : kLaneColumns * t + i % kLaneColumns;
        } else {
            pair = (i * kThreads + me) % S::row_pairs, column = (i * kThreads + me) / S::row_pairs;
        }
        visit(i, pair, column, pair < S::row_pairs && column < kColumns);
    }
}
// The same with `leader`, as `finish` says: visit(item, pair, column, live, leader). By whole
// warps.
template <class S, class F>
KIE_DEVICE void each_owned(F visit) {
    each_item<S>([&](int item, int pair, int column, bool live) {
        const bool alone = S::k_warps > 1 || kColumns > 1;
        visit(item, pair, column, live, alone || lane() % 4 == 0);
    });
}
// The lane that holds the neighbouring pair (pair ^ 1) of the same column.
template <class S>
KIE_CONST_FN u32 neighbour() {
    return S::k_warps == 1 ? 4 : 1;
}
