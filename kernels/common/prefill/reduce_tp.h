// Shards of one lane on several ranks (tensor parallelism): each rank's o and down make a part of
// every sum. The sums of a group of eight places go to the rank that owns it; it alone adds them to
// the residual, in order of rank, and gives all ranks what the next product takes: each number is
// made once, so all ranks hold the same bits, and crosses the links once.
#pragma once

#include "chiplets.h"
#include "lowered.h"
#include "platform.h"
#include "prefill/lanes.h"
#include "prefill/layout.h"
#include "prefill/tiles.h"
#include "shape.h"
#include "wide.h"

// Mixing, in units of a warp: 64 rows of a group of eight places that this rank owns.
constexpr int kReduceWarps = (int)kWorkers / (int)kTeam;
struct OwnedGroups {
    int first, count;  // the first of this rank's groups of eight, how many it has
};
KIE_DEVICE OwnedGroups groups_owned(const PrefillArgs& args, const Span& s) {
    const int from = s.first / 8,
              first = from + (int)(args.model.rank + kRanks - from % kRanks) % kRanks;
    return {first, over(max_i(over(s.to, 8) - first, 0), kRanks)};
}
// Units of a warp in a task, and the tasks of some places: at least one, for who counts them.
KIE_DEVICE int reduce_turns(const Span& s) { return s.to - s.first >= kGroupPlaces ? 4 : 1; }
KIE_DEVICE int reduce_tasks(const PrefillArgs& args, const Span& s) {
    return max_i(over(kFours * groups_owned(args, s).count, kReduceWarps * reduce_turns(s)), 1);
}

// The owner's part. A warp takes 64 rows of a group of eight places at a time: a thread four pairs
// of rows of one place from each 32, which stand together in the operand. They go to the ranks from
// shared memory, so that no thread waits for the links, or, where that has no room, from registers.
struct RankSums {
    u64 sums[4][kRanks];
    int at[4];  // of the residual, in floats
    float old[4][2];
    u32 norm[4];
};
KIE_DEVICE void take_sums(const PrefillArgs& args, const u32* norms, int kind, int layer, int c,
                          int eight, RankSums& m) {
    const int q = (int)lane() / 8, p = (int)lane() % 8;
    KIE_UNROLL for (int n = 0; n < 4; ++n) {
        const int row = c + 8 * n + 2 * q, in = row % TilingOwned::rows;
        const int frag = row / TilingOwned::rows * TilingOwned::tiles_all + in / 16;
        const int at = (frag * kEights + eight) * 32 + in % 16 / 2 * 4 + p / 2;
        KIE_UNROLL for (int r = 0; r < kRanks; ++r) m.sums[n][r] =
            past_at(args, kind, layer, r)[at];
        m.at[n] = 4 * at + p % 2;
        const float* residual = (const float*)old_at(args, 0) + m.at[n];
        m.old[n][0] = residual[0], m.old[n][1] = residual[2];
        m.norm[n] = norms[row / 2];
    }
}
// Adds up, keeps, and says what the next product takes; adds to the squares' sum.
KIE_DEVICE Quad add_sums(const PrefillArgs& args, const RankSums& m, float& square) {
    const bool odd = lane() % 2 != 0;
    Quad x;
    KIE_UNROLL for (int n = 0; n < 4; ++n) {
        float sum[2] = {0, 0}, n0, n1;
        KIE_UNROLL for (int r = 0; r < kRanks; ++r) {
            float a[2], b[2];
            unpack_half2((u32)m.sums[n][r], a[0], a[1]);
            unpack_half2((u32)(m.sums[n][r] >> 32), b[0], b[1]);
            sum[0] += odd ? a[1] : a[0], sum[1] += odd ? b[1] : b[0];
        }
        sum[0] += m.old[n][0], sum[1] += m.old[n][1];
        float* residual = (float*)old_at(args, 0) + m.at[n];
        residual[0] = sum[0], residual[2] = sum[1];
        square += sum[0] * sum[0] + sum[1] * sum[1];
        unpack_half2(m.norm[n], n0, n1);
        x.v[n] = pack_half2(sum[0] * n0, sum[1] * n1);
    }
    return x;
}
// Where in scratch 32 rows from `c` on of a group of eight places stand, the next product's
// operand.
KIE_DEVICE long operand_at(int c, int eight) {
    return kScrX + ((long)(c / 32) * kEights + eight) * kCores;
}
// A unit's rows to the ranks from registers, 32 at a time: both with eight ranks' sums would spill.
KIE_DEVICE void store_sums(const PrefillArgs& args, const u32* norms, int kind, int layer, int c,
                           int eight, float& square) {
    const int end = min_i(c + 64, kHidden);
    KIE_NO_UNROLL for (; c < end; c += 32) {
        RankSums m;
        take_sums(args, norms, kind, layer, c, eight, m);
        const Quad x = add_sums(args, m, square);
        u8* to = args.scratch + operand_at(c, eight) + 16 * lane();
        KIE_NO_UNROLL for (int r = 0; r < kRanks; ++r) store_state(to + args.peer_offset[r], x);
    }
}
KIE_DEVICE void reduce_places(const PrefillArgs& args, const Span& span, int kind, int layer,
                              int task) {
    const int my = lane(), warp = thread() / kTeam;
    const u32* norms = args.model.norms + (long)next_norm(args, kind, layer, 0) * (kHidden / 2);
    u8* slots = prefill_shared() + kPfPush + warp * (kPushSlots * kPushBytes);
    const OwnedGroups own = groups_owned(args, span);
    const int each = kReduceWarps * reduce_turns(span),
              end = min_i((task + 1) * each, kFours * own.count);
    int slot = 0;
    KIE_NO_UNROLL for (int i = task * each + warp; i < end; i += kReduceWarps) {
        const int four = i / own.count, eight = own.first + i % own.count * kRanks, c = 64 * four;
        float square = 0;  // none of rows beyond the matrix, of which there may be squares, too
        if (c < kHidden) {
            if constexpr (kPushSlots > 0) {
                const bool whole = c + 32 < kHidden;
                RankSums a, b;
                take_sums(args, norms, kind, layer, c, eight, a);
                if (whole) take_sums(args, norms, kind, layer, c + 32, eight, b);
                push_read<kPushSlots - 1>();  // this slot's last bytes are gone
                sync_warp();
                u8* here = slots + slot * kPushBytes;
                slot = slot + 1 < kPushSlots ? slot + 1 : 0;
                ((Quad*)here)[my] = add_sums(args, a, square);
                if (whole) ((Quad*)here)[32 + my] = add_sums(args, b, square);
                writes_before_tiles();
                sync_warp();
                if (my < kRanks) {  // a thread a rank
                    const long at = operand_at(c, eight);
                    u8* to = args.scratch + at + args.peer_offset[my];
                    push_copy(to, here, kCores);
                    if (whole) push_copy(to + kEights * kCores, here + kCores, kCores);
                }
                push_commit();
            } else {
                store_sums(args, norms, kind, layer, c, eight, square);
            }
        }
        square += shuffle_xor(square, 8), square += shuffle_xor(square, 16);
        u8* to = args.scratch + kScrSquares + ((long)four * kChunk + 8 * eight + my % 8) * 4;
        KIE_NO_UNROLL for (int r = my / 8; r < kRanks; r += 4) {
            float* there = (float*)(to + args.peer_offset[r]);
            *there = square;
        }
    }
}
// All places of a chunk, by all blocks, which meet behind it.
KIE_DEVICE void reduce_chunk(const PrefillArgs& args, const Chunk& chunk, int kind, int layer) {
    const Span all = all_of(chunk);
    const int tasks = reduce_tasks(args, all);
    KIE_NO_UNROLL for (int i = block(); i < tasks; i += args.blocks)
        reduce_places(args, all, kind, layer, i);
    push_done();
}
