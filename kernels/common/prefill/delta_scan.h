// The scan of a delta rule (ops/delta.h): a block takes a unit through all places of a chunk. S
// stays in its warps as results of the matrix unit, 16 columns by 16 keys a tile, and columns know
// nothing of each other. Places are taken by 16, in the chunkwise form (Yang, Wang, Zhang, Shen and
// Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024). With k
// and q divided by their lengths, b_i sigmoid(b), and l_i the logarithm of what places up to i, of
// these 16, keep of S:
//   u_i = b_i (v_i - e^l_i S^T k_i - sum over j < i of e^(l_i - l_j) (k_i k_j) u_j)
//   o_i = e^l_i S^T q_i + sum over j <= i of e^(l_i - l_j) (q_i k_j) u_j
//   S = e^l_15 S + sum over j of k_j (e^(l_15 - l_j) u_j)^T
// Products are of halves with sums of floats, as all of this kernel are; the u are solved for in
// floats, a column a lane; S itself is floats.
#pragma once

#include "lowered.h"
#include "ops/delta.h"
#include "ops/sigmoid.h"
#include "platform.h"
#include "prefill/delta.h"
#include "prefill/layout.h"
#include "shape.h"
#include "tile.h"
#include "wide.h"

constexpr int kScanPlaces = 16, kScanWarps = kWorkers / kTeam;
static_assert(kPage % kScanPlaces == 0, "states are kept between these");
// Earlier inputs of a convolution, oldest first.
template <class C>
constexpr int kEarlier = C::kTaps - 1;
// How a unit's S lies with the warps, and what stands in shared memory, where stages stand else.
template <class C>
struct Scan {
    static constexpr int kCols = over(C::kUnitCols, 16), kKeys = over(C::kKeyPadded, 16);  // tiles
    // Warps that share the tiles of 16 columns, turns of a warp that has several such, and its
    // tiles of each.
    static constexpr int kSides = kCols < kScanWarps ? kScanWarps / kCols : 1;
    static constexpr int kTurns = over(kCols, kScanWarps), kEach = over(kKeys, kSides);
    // Inputs of a place as floats: q, k, v, and v alone. While some are at work the next ones come,
    // where there is room.
    static constexpr int kRow = over(2 * C::kKeyDim + C::kUnitCols, 4) * 4;
    static constexpr int kAcross = over(C::kUnitCols, 4) * 4, kBuffers = kShortStages ? 1 : 2;
    // Some warps solve for u, of which a lane has a column, while the others convolve what comes
    // next: so many 32 channels of q and k each, and places of v.
    static constexpr int kSolvers = min_i(over(kCols, 2), kScanWarps / 2),
                         kOthers = kScanWarps - kSolvers;
    static constexpr int kOwnKeys = over(over(2 * C::kKeyDim, kTeam), kOthers),
                         kOwnValues = over(C::kUnitCols, kTeam);
    // Words of a row of halves: k or q of a place, or 16 places of a key or a column. So lanes of
    // a fragment ask different banks.
    static constexpr int kWide = 8 * kKeys + 4, kThin = 12, kSolved = kScanPlaces + 4;
    static constexpr int kAtK = 4 * kBuffers * kScanPlaces * kRow;
    static constexpr int kAtQ = kAtK + 4 * kScanPlaces * kWide;
    static constexpr int kAtKeys = kAtQ + 4 * kScanPlaces * kWide;           // k by keys
    static constexpr int kAtState = kAtKeys + 4 * 16 * kKeys * kThin;        // S as halves
    static constexpr int kAtSaid = kAtState + 512 * kCols * kKeys;           // S^T k by columns
    static constexpr int kAtBefore = kAtSaid + 4 * 16 * kCols * kSolved;     // of u_j, for each i
    static constexpr int kAtBeside = kAtBefore + 4 * kScanPlaces * kSolved;  // of u_j, in o_i
    static constexpr int kAtU = kAtBeside + 4 * kScanPlaces * kThin;         // by columns
    static constexpr int kAtChange = kAtU + 4 * 16 * kCols * kThin;          // u as S takes it
    static constexpr int kAtValues = kAtChange + 4 * 16 * kCols * kThin;     // v behind convolution
    static constexpr int kAtPast = kAtValues + 8 * kScanPlaces * kAcross;    // v of places before
    static constexpr int kAtGates = kAtPast + 16 * kAcross;
    static constexpr int kBytes = kAtGates + 2 * 16 * kScanPlaces;
    static_assert(kBytes <= kStages * kStageBytes, "a turn fits the ring's place");
    static_assert(C::kUnits > 0 && kThreads == (int)kWorkers && kLanes == 1,
                  "units are those of decoding");
    float s[kTurns][kEach][2][4];
    float past[kOwnKeys][4];  // earlier inputs of channels

    KIE_DEVICE static u8* at(int bytes) { return prefill_shared() + kPfRing + bytes; }
    KIE_DEVICE static float* inputs(int place) {
        return (float*)at(0) + place / kScanPlaces % kBuffers * (kScanPlaces * kRow);
    }
    KIE_DEVICE static u32* halves_of(bool q) { return (u32*)at(q ? kAtQ : kAtK); }
    // Of each place: the logarithm of what is kept, b, what is kept, and what of u is left behind
    // the last place.
    KIE_DEVICE static float* gates(int place, int which) {
        return (float*)at(kAtGates) + (place / kScanPlaces % 2 * 4 + which) * kScanPlaces;
    }
    // v of the `t`th place from one on, and of those before what is to be convolved next.
    KIE_DEVICE static float* values(int place, int t) {
        return (float*)at(kAtValues) + (place / kScanPlaces % 2 * kScanPlaces + t) * kAcross;
    }
    KIE_DEVICE static float* past_values(int t) { return (float*)at(kAtPast) + t * kAcross; }
    KIE_DEVICE static bool solves() { return thread() < kSolvers * kTeam; }
    // A channel of q or k that the thread convolves, or one that there is not.
    KIE_DEVICE static int channel(int i) {
        return solves() ? 2 * C::kKeyDim : (int)thread() + (i * kOthers - kSolvers) * (int)kTeam;
    }
    // The warp's columns in a turn and its first tile of them, or none.
    KIE_DEVICE static int columns(int turn) {
        const int warp = thread() / kTeam, m = warp / kSides + turn * kScanWarps;
        return m < kCols ? m : -1;
    }
    KIE_DEVICE static int first_key() { return thread() / kTeam % kSides * kEach; }
    KIE_DEVICE static u8* published(int m, int k) {
        return at(kAtState) + ((m * kKeys + k) * kTeam + (int)lane()) * 16;
    }
};
enum ScanGate { kLogKept, kStrength, kKept, kLeft };

// Where a state is: behind a page's last position, or among those that the row goes on with.
KIE_DEVICE u8* kept_at(const PrefillArgs& args, const Layer& l, int page) {
    const u32 physical = args.model.pages[(args.row * kPools + l.pool) * kPagesMax + page];
    return args.model.pools[l.pool] + (u64)physical * args.model.page_bytes[l.pool] + l.page_at;
}
KIE_DEVICE u8* working_at(const PrefillArgs& args, const Layer& l, u32 half) {
    return delta_state(args.model, l, (u64)args.row * 2 + half);
}
template <class C>
KIE_DEVICE const u8* unit_from(const PrefillArgs& args, const Chunk& chunk, const Layer& l,
                               int unit) {
    const int first = chunk.base + chunk.from;
    if (first == 0) return nullptr;
    const u32 half = args.state & 1;
    const u8* from;
    if (first > (int)args.first)
        from = working_at(args, l, half);  // the chunk before left it
    else if (args.state & 2)
        from = kept_at(args, l, first / kPage - 1);
    else
        from = working_at(args, l, half ^ 1);
    return from + unit * C::kUnitBytes;
}

// S and the channels' earlier inputs, from `from` or (null) before the first position: of a tile
// lanes have columns' pairs of keys, and two neighbours a quad of each of two columns, of which
// each takes one to or from memory.
template <class C>
KIE_DEVICE bool is_held(int column, int quad) {
    return column < C::kUnitCols && quad < C::kKeyPadded / 4;
}
template <class C, class Visit>
KIE_DEVICE void each_quad(Scan<C>& scan, Visit visit) {
    using S = Scan<C>;
    const int my = lane(), odd = my & 1;
    KIE_UNROLL for (int turn = 0; turn < S::kTurns; ++turn) {
        const int column = 16 * S::columns(turn) + my / 4 + 8 * odd;
        KIE_UNROLL for (int i = 0; i < S::kEach; ++i) {
            KIE_UNROLL for (int n = 0; n < 2; ++n) {
                const int key = S::first_key() + i, quad = 4 * key + 2 * n + my % 4 / 2;
                const bool is_there =
                    S::columns(turn) >= 0 && key < S::kKeys && is_held<C>(column, quad);
                visit(scan.s[turn][i][n], is_there ? state_quad<C>(column, quad) : -1, odd);
            }
        }
    }
}
template <class C>
KIE_DEVICE void load_scan(Scan<C>& scan, const u8* from) {
    each_quad<C>(scan, [&](float (&s)[4], int quad, int odd) {
        Quad q = {{0, 0, 0, 0}};
        if (from && quad >= 0) q = load_state(from + quad * 16);
        // The even lane has the first column's quad and keeps its lower half.
        KIE_UNROLL for (int j = 0; j < 2; ++j) {
            const float other = shuffle_xor(number(odd ? q.v[j] : q.v[2 + j]), 1);
            const float mine = number(odd ? q.v[2 + j] : q.v[j]);
            s[j] = odd ? other : mine, s[2 + j] = odd ? mine : other;
        }
    });
    using S = Scan<C>;
    KIE_UNROLL for (int i = 0; i < S::kOwnKeys; ++i)
        take_quad(from, S::channel(i) < 2 * C::kKeyDim, past_quad<C>(S::channel(i)), scan.past[i]);
    KIE_NO_UNROLL for (int c = thread(); c < C::kUnitCols; c += kWorkers) {
        float v[4];
        take_quad(from, true, past_quad<C>(2 * C::kKeyDim + c), v);
        KIE_UNROLL for (int j = 0; j < 4; ++j) S::past_values(j)[c] = v[j];
    }
}
template <class C>
KIE_DEVICE void store_past(const Scan<C>& scan, u8* to) {
    using S = Scan<C>;
    KIE_UNROLL for (int i = 0; i < S::kOwnKeys; ++i) {
        if (S::channel(i) < 2 * C::kKeyDim) put_quad(to, past_quad<C>(S::channel(i)), scan.past[i]);
    }
    KIE_NO_UNROLL for (int c = thread(); c < C::kUnitCols; c += kWorkers) {
        float v[4];
        KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] = S::past_values(j)[c];
        put_quad(to, past_quad<C>(2 * C::kKeyDim + c), v);
    }
}
template <class C>
KIE_DEVICE void store_scan(Scan<C>& scan, u8* to) {
    each_quad<C>(scan, [&](float (&s)[4], int quad, int odd) {
        Quad q;
        KIE_UNROLL for (int j = 0; j < 2; ++j) {
            const u32 other = bits(shuffle_xor(odd ? s[j] : s[2 + j], 1));
            q.v[j] = odd ? other : bits(s[j]), q.v[2 + j] = odd ? bits(s[2 + j]) : other;
        }
        if (quad >= 0) store_state(to + quad * 16, q);
    });
}
// S as halves, to where all warps find it: what the matrix unit leaves is what it takes.
template <class C>
KIE_DEVICE void publish_scan(const Scan<C>& scan) {
    using S = Scan<C>;
    KIE_UNROLL for (int turn = 0; turn < S::kTurns; ++turn) {
        KIE_UNROLL for (int i = 0; i < S::kEach; ++i) {
            const int m = S::columns(turn), key = S::first_key() + i;
            if (m < 0 || key >= S::kKeys) continue;
            Quad q;
            KIE_UNROLL for (int j = 0; j < 4; ++j) {
                const float (&s)[4] = scan.s[turn][i][j / 2];
                q.v[j] = pack_half2(s[j % 2 * 2], s[j % 2 * 2 + 1]);
            }
            *(Quad*)S::published(m, key) = q;
        }
    }
}

// A unit's inputs of 16 places, as products left them, on their way to shared memory, two places a
// warp; of those behind the last its own again.
template <class C>
KIE_DEVICE void ask_inputs(const PrefillArgs& args, const Chunk& chunk, const Unit& u, int place,
                           float* to) {
    constexpr bool kQuads = C::kKeyDim % 2 == 0 && C::kUnitCols % 4 == 0 && C::kHeadDim % 4 == 0 &&
                            C::kKeyRows % 4 == 0;
    constexpr int kBy = kQuads ? 4 : 1, kTurns = over(C::kUnitChannels, kBy * (int)kTeam);
    if (place >= chunk.to) return;
    KIE_UNROLL for (int e = 0; e < 2; ++e) {
        const int t = (int)thread() / kTeam * 2 + e;
        const float* row = delta_row<C>(args, min_i(place + t, chunk.to - 1), u.key, 0);
        KIE_UNROLL for (int i = 0; i < kTurns; ++i) {
            const int n = (i * kTeam + (int)lane()) * kBy;
            if (n >= C::kUnitChannels) continue;
            float* there = to + t * Scan<C>::kRow + n;
            if constexpr (kQuads)
                quad_copy(there, row + input_of<C>(u, n));
            else
                *there = row[input_of<C>(u, n)];
        }
    }
}
// Their convolution: of q and k in their places, a channel a thread.
template <class C>
KIE_DEVICE void convolve_keys(const Chunk& chunk, int place, float* in,
                              const float (&taps)[Scan<C>::kOwnKeys][C::kTaps], Scan<C>& scan) {
    using S = Scan<C>;
    KIE_UNROLL for (int i = 0; i < S::kOwnKeys; ++i) {
        if (S::channel(i) >= 2 * C::kKeyDim) continue;
        float* own = in + S::channel(i);
        if (place >= chunk.from && place + kScanPlaces <= chunk.to) {
            float raw[kScanPlaces];
            KIE_UNROLL for (int t = 0; t < kScanPlaces; ++t) raw[t] = own[t * S::kRow];
            KIE_UNROLL for (int t = 0; t < kScanPlaces; ++t) own[t * S::kRow] =
                convolve<C::kTaps>(taps[i], scan.past[i], raw[t]);
            continue;
        }
        KIE_NO_UNROLL for (int t = 0; t < kScanPlaces; ++t) {
            float& x = own[t * S::kRow];
            const bool live = chunk.has(place + t);
            x = live ? convolve<C::kTaps>(taps[i], scan.past[i], x) : 0;
        }
    }
}
// v of a place as products left it, or of one before the first that is alive.
template <class C>
KIE_DEVICE float raw_value(const Chunk& chunk, int place, const float* in, int t, int column) {
    const int dead = max_i(chunk.from - place, 0);
    return t >= dead ? in[t * Scan<C>::kRow + 2 * C::kKeyDim + column]
                     : Scan<C>::past_values(kEarlier<C> + t - dead)[column];
}
template <class C>
KIE_DEVICE void convolve_values(const Chunk& chunk, int place, const float* in,
                                const float (&taps)[Scan<C>::kOwnValues][C::kTaps]) {
    using S = Scan<C>;
    const int first = (int)thread() / (int)kTeam - S::kSolvers;
    KIE_UNROLL for (int i = 0; i < S::kOwnValues; ++i) {
        const int c = i * kTeam + (int)lane();
        if (c >= C::kUnitCols) continue;
        KIE_NO_UNROLL for (int t = first; t < kScanPlaces; t += S::kOthers) {
            const bool live = chunk.has(place + t);
            float past[4], y = 0;
            if (live) {
                KIE_UNROLL for (int j = 0; j < kEarlier<C>; ++j) past[j] =
                    raw_value<C>(chunk, place, in, t - kEarlier<C> + j, c);
                y = convolve<C::kTaps>(taps[i], past, raw_value<C>(chunk, place, in, t, c));
            }
            S::values(place, t)[c] = y;
        }
    }
}
// The last ones that are alive are those before the next; by a warp.
template <class C>
KIE_DEVICE void keep_values(const Chunk& chunk, int place, const float* in) {
    if (thread() / kTeam != 0) return;
    const int to = min_i(chunk.to - place, kScanPlaces);
    KIE_UNROLL for (int i = 0; i < Scan<C>::kOwnValues; ++i) {
        const int c = i * kTeam + (int)lane();
        if (c >= C::kUnitCols) continue;
        float v[kEarlier<C>];
        KIE_UNROLL for (int j = 0; j < kEarlier<C>; ++j) v[j] =
            raw_value<C>(chunk, place, in, to - kEarlier<C> + j, c);
        KIE_UNROLL for (int j = 0; j < kEarlier<C>; ++j) Scan<C>::past_values(j)[c] = v[j];
    }
}
// How S moves on, by the last warp; a dead place keeps it.
template <class C>
KIE_DEVICE void make_gates(const Chunk& chunk, int place, u64 gates, const float (&decay)[2]) {
    using S = Scan<C>;
    if (thread() / kTeam != kScanWarps - 1) return;
    const int t = lane() % kScanPlaces;
    const bool live = chunk.has(place + t);
    float kept = live ? log2_kept(decay[0], number((u32)(gates >> 32)) + decay[1]) : 0;
    KIE_UNROLL for (int m = 1; m < kScanPlaces; m *= 2) {
        const float before = shuffle(kept, (int)lane() - (t >= m ? m : 0));
        kept += t >= m ? before : 0;
    }
    const float all = shuffle(kept, (int)lane() | (kScanPlaces - 1));
    if ((int)lane() >= kScanPlaces) return;
    S::gates(place, kLogKept)[t] = kept, S::gates(place, kKept)[t] = exp2_f(kept);
    S::gates(place, kStrength)[t] = live ? sigmoid_f(number((u32)gates)) : 0;
    S::gates(place, kLeft)[t] = exp2_f(all - kept);
}
// q and k divided by their lengths, as halves: of two places by a warp.
template <class C>
KIE_DEVICE void make_halves(const float* in) {
    using S = Scan<C>;
    constexpr int kOwn = over(16 * S::kKeys, kTeam);
    const int warp = thread() / kTeam, my = lane();
    float v[4][kOwn];  // q, k of the first place, of the second
    KIE_UNROLL for (int n = 0; n < 4; ++n) {
        const float* from = in + (2 * warp + n / 2) * S::kRow + n % 2 * C::kKeyDim;
        float by = 0;
        KIE_UNROLL for (int i = 0; i < kOwn; ++i) {
            const int key = i * kTeam + my;
            v[n][i] = key < C::kKeyDim ? from[key] : 0;
            by += v[n][i] * v[n][i];
        }
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) by += shuffle_xor(by, m);
        by = rsqrt_f(by + kLengthEps) * (n % 2 == 0 ? rsqrt_f((float)C::kKeyDim) : 1.0f);
        KIE_UNROLL for (int i = 0; i < kOwn; ++i) v[n][i] *= by;
    }
    KIE_UNROLL for (int i = 0; i < kOwn; ++i) {
        const int key = i * kTeam + my;
        if (key >= 16 * S::kKeys) continue;
        KIE_UNROLL for (int n = 0; n < 4; ++n) {
            u32* row = S::halves_of(n % 2 == 0) + (2 * warp + n / 2) * S::kWide;
            ((u16*)row)[key] = (u16)pack_half2(v[n][i], 0);
        }
        ((u32*)S::at(S::kAtKeys))[key * S::kThin + warp] = pack_half2(v[1][i], v[3][i]);
    }
}
// Rows g and g + 8 of 16 by so many words, as the first operand of a product.
template <int kRowWords>
KIE_DEVICE void add_product(float (&d)[4], const u32* rows, const u32* columns) {
    mma(d, rows[0], rows[8 * kRowWords], rows[4], rows[8 * kRowWords + 4], columns[0], columns[4]);
}
// What k or q of eight places say to each other's k: of u_j in u_i, or in o_i.
template <class C>
KIE_DEVICE void multiply_places(int place, bool q, int half) {
    using S = Scan<C>;
    const int my = lane(), g = my / 4, t = my % 4;
    const u32 *rows = S::halves_of(q) + g * S::kWide + t,
              *columns = S::halves_of(false) + (8 * half + g) * S::kWide + t;
    float d[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    KIE_UNROLL for (int k = 0; k < S::kKeys; ++k)
        add_product<S::kWide>(d[k % 2], rows + 8 * k, columns + 8 * k);
    const float* kept = S::gates(place, kLogKept);
    KIE_UNROLL for (int e = 0; e < 4; e += 2) {
        const int i = g + 4 * e, j = 8 * half + 2 * t;
        float v[2];
        KIE_UNROLL for (int n = 0; n < 2; ++n) {
            const bool counts = j + n < i + (q ? 1 : 0);
            v[n] = (d[0][e + n] + d[1][e + n]) * exp2_f(counts ? kept[i] - kept[j + n] : 0);
            if (!counts) v[n] = 0;
        }
        if (q) {
            ((u32*)S::at(S::kAtBeside))[i * S::kThin + 4 * half + t] = pack_half2(v[0], v[1]);
        } else {
            float* to = (float*)S::at(S::kAtBefore) + j * S::kSolved + i;
            const float strength = S::gates(place, kStrength)[i];
            to[0] = v[0] * strength, to[S::kSolved] = v[1] * strength;
        }
    }
}
// What S says to k or q of eight places, of 16 columns.
template <class C>
KIE_DEVICE void multiply_state(int m, bool q, int half, float (&out)[4]) {
    using S = Scan<C>;
    const int my = lane(), g = my / 4, t = my % 4;
    const u32* columns = S::halves_of(q) + (8 * half + g) * S::kWide + t;
    float d[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    KIE_UNROLL for (int k = 0; k < S::kKeys; ++k) {
        const Quad s = *(const Quad*)S::published(m, k);
        mma(d[k % 2], s.v[0], s.v[1], s.v[2], s.v[3], columns[8 * k], columns[8 * k + 4]);
    }
    KIE_UNROLL for (int e = 0; e < 4; ++e) out[e] = d[0][e] + d[1][e];
}
// The u of a column a lane, one place after another.
KIE_DEVICE void take_places(const float* from, int first, float (&to)[kScanPlaces]) {
    KIE_UNROLL for (int i = first / 4 * 4; i < kScanPlaces; i += 4) {
        const Quad q = *(const Quad*)(from + i);
        KIE_UNROLL for (int j = 0; j < 4; ++j) to[i + j] = number(q.v[j]);
    }
}
KIE_DEVICE void put_places(const float (&v)[kScanPlaces], u32* to) {
    KIE_UNROLL for (int i = 0; i < kScanPlaces; i += 8) {
        Quad q;
        KIE_UNROLL for (int j = 0; j < 4; ++j) q.v[j] = pack_half2(v[i + 2 * j], v[i + 2 * j + 1]);
        *(Quad*)(to + i / 2) = q;
    }
}
template <class C>
KIE_DEVICE void solve_columns(int place) {
    using S = Scan<C>;
    KIE_NO_UNROLL for (int column = thread(); column < 16 * S::kCols;
                       column += S::kSolvers * kTeam) {
        const float* v = S::values(place, 0) + min_i(column, C::kUnitCols - 1);
        float u[kScanPlaces], strength[kScanPlaces], by[kScanPlaces];
        take_places((const float*)S::at(S::kAtSaid) + column * S::kSolved, 0, u);
        take_places(S::gates(place, kStrength), 0, strength),
            take_places(S::gates(place, kKept), 0, by);
        KIE_UNROLL for (int i = 0; i < kScanPlaces; ++i) u[i] =
            strength[i] * (v[i * S::kAcross] - by[i] * u[i]);
        KIE_UNROLL for (int j = 0; j + 1 < kScanPlaces; ++j) {
            take_places((const float*)S::at(S::kAtBefore) + j * S::kSolved, j + 1, by);
            KIE_UNROLL for (int i = j + 1; i < kScanPlaces; ++i) u[i] -= by[i] * u[j];
        }
        put_places(u, (u32*)S::at(S::kAtU) + column * S::kThin);
        take_places(S::gates(place, kLeft), 0, by);
        KIE_UNROLL for (int i = 0; i < kScanPlaces; ++i) u[i] *= by[i];
        put_places(u, (u32*)S::at(S::kAtChange) + column * S::kThin);
    }
}
template <class C>
KIE_DEVICE void move_state(Scan<C>& scan, int place) {
    using S = Scan<C>;
    const int my = lane(), g = my / 4, t = my % 4;
    const float kept = S::gates(place, kKept)[kScanPlaces - 1];
    KIE_UNROLL for (int turn = 0; turn < S::kTurns; ++turn) {
        const int m = max_i(S::columns(turn), 0);
        const u32* rows = (const u32*)S::at(S::kAtChange) + (16 * m + g) * S::kThin + t;
        KIE_UNROLL for (int i = 0; i < S::kEach; ++i) {
            const int key = min_i(S::first_key() + i, S::kKeys - 1);
            KIE_UNROLL for (int n = 0; n < 2; ++n) {
                float (&s)[4] = scan.s[turn][i][n];
                KIE_UNROLL for (int e = 0; e < 4; ++e) s[e] *= kept;
                add_product<S::kThin>(
                    s, rows, (const u32*)S::at(S::kAtKeys) + (16 * key + 8 * n + g) * S::kThin + t);
            }
        }
    }
}
// A warp's outputs: of 16 columns at eight places, as S makes them, then what the places add.
template <class C>
struct ScanOutputs {
    static constexpr int kAll = 4 * Scan<C>::kCols, kTurns = over(kAll, kScanWarps);
    float d[kTurns][4];
};
template <class C>
KIE_DEVICE void multiply_all(int place, ScanOutputs<C>& outputs) {
    using S = Scan<C>;
    const int warp = thread() / kTeam, my = lane(), t = my % 4;
    KIE_UNROLL for (int turn = 0; turn < ScanOutputs<C>::kTurns; ++turn) {
        const int i = warp + turn * kScanWarps, half = i % 2, q = i / 2 % 2, m = i / 4;
        if (m >= S::kCols) break;
        float (&d)[4] = outputs.d[turn];
        multiply_state<C>(m, q != 0, half, d);
        if (q != 0) {
            const float* kept = S::gates(place, kKept) + 8 * half + 2 * t;
            KIE_UNROLL for (int e = 0; e < 4; ++e) d[e] *= kept[e % 2];
        } else {
            float* to =
                (float*)S::at(S::kAtSaid) + (16 * m + my / 4) * S::kSolved + 8 * half + 2 * t;
            KIE_UNROLL for (int e = 0; e < 4; ++e) to[e / 2 * (8 * S::kSolved) + e % 2] = d[e];
        }
    }
    // By those that have one product less where units have few columns.
    if (warp >= 4 && warp < 8) multiply_places<C>(place, warp / 2 % 2 != 0, warp % 2);
}
template <class C>
KIE_DEVICE void put_outputs(const PrefillArgs& args, const Chunk& chunk, const Unit& u, int place,
                            ScanOutputs<C>& outputs) {
    using S = Scan<C>;
    const int warp = thread() / kTeam, my = lane(), g = my / 4, t = my % 4;
    KIE_UNROLL for (int turn = 0; turn < ScanOutputs<C>::kTurns; ++turn) {
        const int i = warp + turn * kScanWarps, half = i % 2, m = i / 4;
        if (i / 2 % 2 == 0 || m >= S::kCols) continue;
        float (&d)[4] = outputs.d[turn];
        add_product<S::kThin>(d, (const u32*)S::at(S::kAtU) + (16 * m + g) * S::kThin + t,
                              (const u32*)S::at(S::kAtBeside) + (8 * half + g) * S::kThin + t);
        const int first = place + 8 * half + 2 * t, column = 16 * m + g;
        float* to = delta_row<C>(args, first, u.key, input_of<C>(u, 2 * C::kKeyDim) + column);
        KIE_UNROLL for (int e = 0; e < 4; ++e) {
            if (chunk.has(first + e % 2) && column + e / 2 * 8 < C::kUnitCols)
                to[e % 2 * C::kRowsIn + e / 2 * 8] = d[e];
        }
    }
}
template <class C>
KIE_DEVICE void scan_unit(const PrefillArgs& args, const Chunk& chunk, int layer, const Unit& u) {
    using S = Scan<C>;
    const Layer& l = args.model.layers[layer];
    const float* extras = extras_of(args, layer);
    float key_taps[S::kOwnKeys][C::kTaps], value_taps[S::kOwnValues][C::kTaps];
    KIE_UNROLL for (int i = 0; i < S::kOwnKeys; ++i)
        take_taps<C>(extras, u, S::channel(i), key_taps[i]);
    KIE_UNROLL for (int i = 0; i < S::kOwnValues; ++i)
        take_taps<C>(extras, u, 2 * C::kKeyDim + i * kTeam + (int)lane(), value_taps[i]);
    const float decay[2] = {extras[C::kAtDecay + u.head], extras[C::kAtDecayBias + u.head]};
    const auto gates_at = [&](int place) {
        const int own = min_i(place + (int)lane() % kScanPlaces, chunk.to - 1);
        return *delta_gates(args, C::kHeads, own, u.head);
    };
    int place = chunk.from / kScanPlaces * kScanPlaces;
    sync_consumers<kWorkers>();  // what stood there has been used
    ask_inputs<C>(args, chunk, u, place, S::inputs(place));
    u64 gates = gates_at(place);
    Scan<C> scan;
    load_scan<C>(scan, unit_from<C>(args, chunk, l, u.number));
    publish_scan<C>(scan);
    quads_here();
    sync_consumers<kWorkers>();
    if (S::kBuffers > 1)
        ask_inputs<C>(args, chunk, u, place + kScanPlaces, S::inputs(place + kScanPlaces));
    const auto convolve_all = [&](int at) {
        make_gates<C>(chunk, at, gates, decay);
        gates = gates_at(at + kScanPlaces);
        convolve_keys<C>(chunk, at, S::inputs(at), key_taps, scan);
        convolve_values<C>(chunk, at, S::inputs(at), value_taps);
    };
    if (!S::solves()) convolve_all(place);
    KIE_NO_UNROLL for (int next; place < chunk.to; place = next) {
        next = place + kScanPlaces;
        const float* in = S::inputs(place);
        sync_consumers<kWorkers>();
        make_halves<C>(in);
        keep_values<C>(chunk, place, in);
        sync_consumers<kWorkers>();
        // The next ones are on their way since the last turn, or from here on.
        if (S::kBuffers > 1) quads_here();
        const int ahead = place + S::kBuffers * kScanPlaces;
        ask_inputs<C>(args, chunk, u, ahead, S::inputs(ahead));
        u8* kept = nullptr;  // where S is to stay
        if (next <= chunk.to && (chunk.base + next) % kPage == 0)
            kept = kept_at(args, l, (chunk.base + next) / kPage - 1) + u.number * C::kUnitBytes;
        if (kept) store_past<C>(scan, kept);
        ScanOutputs<C> outputs;
        multiply_all<C>(place, outputs);
        if (S::kBuffers == 1) quads_here();
        sync_consumers<kWorkers>();
        if (S::solves())
            solve_columns<C>(place);
        else if (next < chunk.to)
            convolve_all(next);
        sync_consumers<kWorkers>();
        move_state<C>(scan, place);
        publish_scan<C>(scan);
        put_outputs<C>(args, chunk, u, place, outputs);
        if (kept) store_scan<C>(scan, kept);
    }
    u8* left = working_at(args, l, args.state & 1) + u.number * C::kUnitBytes;
    store_past<C>(scan, left);
    store_scan<C>(scan, left);
}
template <class C>
KIE_DEVICE void scan_units(const PrefillArgs& args, const Chunk& chunk, int layer) {
    KIE_NO_UNROLL for (int i = block(); i < C::kUnits; i += args.blocks)
        scan_unit<C>(args, chunk, layer, unit_of<C>(i));
}
