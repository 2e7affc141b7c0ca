// y = W x for a block's rows: weights from the ring once, x (1 to 8 columns, halves) from shared
// memory, sums in float. Traffic: the matrix's bytes from memory, codes and scales, whatever the
// number of columns.
#pragma once

// Rows of a tile: 16, fewer in the last, 0 or less where a warp has no such tile.
template <class S>
KIE_DEVICE int rows_of(int tile) {
    if (S::rows % 16 == 0 && S::tiles * S::row_warps == S::tiles_all) return 16;
    const int rows = S::rows - 16 * tile;
    return rows > 16 ? 16 : rows;
}

// One stage of a warp's tiles, in registers, as the bits that are stored; its slot of the ring is
// free again. The first ones are taken before the vector has arrived, later ones while the products
// of those before are running.
template <class S>
struct WeightFragment {
    Quad bits[S::chunk][S::tiles][S::quads];
    float scale[S::scaled ? S::spans : 1][S::tiles][2];  // of rows 2g and 2g + 1
};

// Where a warp's tiles stand in a stage, worked out once a product.
template <class S>
struct Place {
    int lane, row_warp;
    u32 at;
    u32 scale_at[S::scaled ? S::tiles : 1];  // bytes behind the codes, 16 bits a row
};
// `first`: of the passes of one matrix, the row at which this one begins.
template <class S>
KIE_DEVICE Place<S> place_of(const Ring& ring, int first = 0) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam;
    const int row_warp = S::row_warps == 1 ? 0 : warp % S::row_warps;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    Place<S> p = {my, row_warp,
                  (u32)(k_warp * (S::chunk * S::unit_bytes) +
                        row_warp * S::tiles * (16 * S::row_bytes) + my * 16)};
    if constexpr (S::scaled) {
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const int row = (row_warp * S::tiles + i) * 16 + my / 4 * 2;
            const u8* index = ring.scale_index + S::index_at + first + (row < S::rows ? row : 0);
            const u32 base = k_warp * S::spans * S::scale_rows;
            p.scale_at[i] = (base + index[0]) * 4 | (base + index[1]) * 4 << 16;
        }
    }
    return p;
}
template <class S>
KIE_DEVICE void take_fragment(Ring& ring, WeightFragment<S>& f, bool here, const Place<S>& place) {
    const u8* stage = take_stage(ring, here, S::stage_bytes);
    KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const int rows = rows_of<S>(place.row_warp * S::tiles + i);
            const u8* p = stage + place.at + c * S::unit_bytes + i * (16 * S::row_bytes);
            KIE_UNROLL for (int q = 0; q < S::quads; ++q) {
                f.bits[c][i][q] = {{0, 0, 0, 0}};
                if (place.lane < 2 * rows) f.bits[c][i][q] = *(const Quad*)(p + q * (rows * 32));
            }
        }
    }
    if constexpr (S::scaled) {
        const u8* scales = stage + S::code_bytes;
        KIE_UNROLL for (int n = 0; n < S::spans; ++n) {
            KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
                const u8* from = scales + n * (S::scale_rows * 4);
                f.scale[n][i][0] = *(const float*)(from + (place.scale_at[i] & 0xffff));
                f.scale[n][i][1] = *(const float*)(from + (place.scale_at[i] >> 16));
            }
        }
    }
    release_stage(ring);
}
// The first stages, or some of them.
template <class S>
struct Lots {
    WeightFragment<S> v[S::ahead];
};
template <class S, int kFrom = 0, int kTo = S::ahead>
KIE_DEVICE void take_first(Ring& ring, Lots<S>& lots, int first = 0) {
    const Place<S> place = place_of<S>(ring, first);
    KIE_UNROLL for (int i = kFrom; i < kTo; ++i) take_fragment<S>(ring, lots.v[i], false, place);
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
// d += weights of a tile and unit, without their scales, times x.
template <class S>
KIE_DEVICE void add_unit(float (&d)[4], const Quad (&bits)[S::quads], const Quad& x) {
    if constexpr (S::bits == kBitsF16) {
        const Quad &l = bits[0], &h = bits[1];
        mma(d, l.v[0], l.v[1], l.v[2], l.v[3], x.v[0], x.v[1]);
        mma(d, h.v[0], h.v[1], h.v[2], h.v[3], x.v[2], x.v[3]);
    } else {
        const F8Halves a = decode_f8(bits[0]);
        mma(d, a.v[0], a.v[1], a.v[2], a.v[3], x.v[0], x.v[1]);
        mma(d, a.v[4], a.v[5], a.v[6], a.v[7], x.v[2], x.v[3]);
    }
}
// Scales multiply float sums, once for all columns that share them.
template <class S>
KIE_DEVICE void add_fragment(Sums<S>& s, const WeightFragment<S>& f, const Column<S>& x) {
    if constexpr (!S::scaled) {
        KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
            KIE_UNROLL for (int i = 0; i < S::tiles; ++i) add_unit<S>(s.v[i], f.bits[c][i], x.v[c]);
        }
    } else {
        KIE_UNROLL for (int n = 0; n < S::spans; ++n) {
            KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
                float d[4] = {0, 0, 0, 0};
                KIE_UNROLL for (int c = n * S::span; c < (n + 1) * S::span; ++c)
                    add_unit<S>(d, f.bits[c][i], x.v[c]);
                KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] += f.scale[n][i][j / 2] * d[j];
            }
        }
    }
}

// Adds up this warp's tiles. `x`: column c, element k at halves x[c * stride + k]. `lots`: the
// first stages; `first` as place_of has it.
template <class S>
KIE_DEVICE Sums<S> multiply(Ring& ring, Lots<S>& lots, const u8* x, int stride, int first = 0) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam, g = my / 4, t = my % 4;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    const int column = kColumns == 1 ? 0 : (g < kColumns ? g : kColumns - 1);
    const u8* mine = x + (column * stride + k_warp * S::pairs * 32 + 8 * t) * 2;
    constexpr int kStep = S::chunk * 64, kMany = S::ahead;
    Sums<S> s;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
    const Place<S> place = place_of<S>(ring, first);
    if constexpr (kMany > 1) {
        Column<S> next = take_column<S>(mine);
        KIE_NO_UNROLL for (int stage = 0; stage < S::stages; stage += kMany) {
            KIE_UNROLL for (int i = 0; i < kMany; ++i) {
                if (S::stages % kMany != 0 && stage + i >= S::stages) continue;
                const Column<S> now = next;
                if (stage + i + 1 < S::stages) next = take_column<S>(mine += kStep);
                add_fragment<S>(s, lots.v[i], now);
                if (stage + i + kMany < S::stages) take_fragment<S>(ring, lots.v[i], false, place);
            }
        }
        return s;
    }
    WeightFragment<S>&lot = lots.v[0], other;
    bool here = S::stages > 1 && stage_here(ring);
    KIE_NO_UNROLL for (int stage = 0; stage + 1 < S::stages; stage += 2, mine += 2 * kStep) {
        const Column<S> x0 = take_column<S>(mine), x1 = take_column<S>(mine + kStep);
        take_fragment<S>(ring, other, here, place);
        const bool more = stage + 2 < S::stages;
        here = more && stage_here(ring);
        add_fragment<S>(s, lot, x0);
        if (more) {
            take_fragment<S>(ring, lot, here, place);
            here = stage + 3 < S::stages && stage_here(ring);
        }
        add_fragment<S>(s, other, x1);
    }
    if (S::stages % 2 == 1) add_fragment<S>(s, lot, take_column<S>(mine));
    return s;
}

// Hands every result to the thread that owns it: out(item, pair, column, v0, v1, live, lead) with
// the values of rows 2 pair and 2 pair + 1. Called by whole warps, so `out` may shuffle; `live`
// says that the row exists, `lead` that this thread is the one of several equals that should store.
// With more than one k-warp the parts are added in warp order behind one barrier, which `part` must
// survive.
template <class S, int kCopies = 1, class F>
KIE_DEVICE void finish(Sums<S>& s, float* part, F out) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam, g = my / 4, t = my % 4;
    const int row_warp = S::row_warps == 1 ? 0 : warp % S::row_warps;
    if constexpr (S::k_warps == 1) {
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const int pair = (row_warp * S::tiles + i) * 8 + g;
            if constexpr (kColumns == 1) {
                out(i, pair, 0, s.v[i][0], s.v[i][2], pair < S::row_pairs, t == 0);
            } else {
                KIE_UNROLL for (int c = 0; c < 2; ++c)
                    out(2 * i + c, pair, 2 * t + c, s.v[i][c], s.v[i][2 + c],
                        pair < S::row_pairs && 2 * t + c < kColumns, true);
            }
        }
    } else {
        const int k_warp = warp / S::row_warps;
        float* mine = part + k_warp * (S::rows * kColumns);
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const int pair = (row_warp * S::tiles + i) * 8 + g;
            KIE_UNROLL for (int c = 0; c < 2; ++c) {
                const int column = 2 * t + c;
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
            pair = (row_warp * S::tiles + (kColumns == 1 ? i : i / 2)) * 8 + g;
            column = kColumns == 1 ? 0 : 2 * t + i % 2;
        } else {
            pair = (i * kThreads + me) % S::row_pairs, column = (i * kThreads + me) / S::row_pairs;
        }
        visit(i, pair, column, pair < S::row_pairs && column < kColumns);
    }
}
// The same with `lead`, as `finish` tells it: visit(item, pair, column, live, lead). By whole
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
