// Results of products that change the residual, and the embedding, which begins it.
#pragma once

#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "platform.h"
#include "prefill/attend.h"
#include "prefill/lanes.h"
#include "prefill/layout.h"
#include "prefill/multiply.h"
#include "prefill/pipe.h"
#include "prefill/tiles.h"
#include "shape.h"
#include "wide.h"

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
template <class C>
KIE_DEVICE void add_lanes(const PrefillArgs& args, const Chunk& chunk, int layer) {
    if (kLanesAll == 1) return;
    const int busy = runs_of<C>(all_of(chunk)), blocks = (int)args.blocks, warps = kWorkers / kTeam,
              first = 4 * busy <= 3 * blocks ? busy : 0, block_in_lane = (int)block() - first;
    const int groups = over(chunk.to, 8), units = kFrags * groups;
    if (block_in_lane < 0) return;
    KIE_NO_UNROLL for (int i = block_in_lane * warps + thread() / kTeam; i < 2 * units;
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
// A batch of the residual with the other lanes' sums: from memory, where splits of k were joined
// (nobody knew who would need it) or stages are short ...
KIE_DEVICE void take_old(const PrefillArgs& args, const TileTask& task, int kind, int layer,
                         long at, Quad (&old)[kBatch]) {
    const Quad* residual = old_at(args, task.lane_index) + at;
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] = residual[j * 32];
    const int delay = delay_of(args, kind, layer);
    if (delay < 0) return;
    const u64* own = own_past(args, kind, layer - delay, task.lane_index) + at;
    const Quad* totals = totals_at(args, kind) + at;
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) add_halves(old[j], own[j * 32], -1.0f);
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) add_quad(old[j], totals[j * 32]);
}
// ... or from the ring.
KIE_DEVICE void take_old(Pipe& pipe, bool others, Quad (&old)[kBatch]) {
    const u32 my = lane(), warp = thread() / kTeam, at = warp * (kBatch * 512) + my * 16;
    await_stage(pipe);
    const u8* from = stage_bytes(pipe.at);
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] = *(const Quad*)(from + at + j * 512);
    if (others) {
        if constexpr (kOldStages == 3) {
            leave_stage(pipe);
            await_stage(pipe);
            from = stage_bytes(pipe.at);
        }
        KIE_UNROLL for (int j = 0; j < kBatch; ++j)
            add_halves(old[j], *(const u64*)(from + kOldOwn + at / 2 + j * 256), -1.0f);
        leave_stage(pipe);
        await_stage(pipe);
        from = stage_bytes(pipe.at);
        KIE_UNROLL for (int j = 0; j < kBatch; ++j)
            add_quad(old[j], *(const Quad*)(from + at + j * 512));
    }
    leave_stage(pipe);
}
// The new residual, and what the next norm's product takes: residual x norm weight as halves, and
// the sum of squares over this task's rows. kind: 0 o, 1 down, 2 the embedding.
struct Residual {
    int lane_index;
    bool live;     // this thread's row pair exists
    float keep;    // factor on it
    float n0, n1;  // norm weights of the pair
    long at;
    u8* x;
    u64* squares;
};
KIE_DEVICE Residual residual_of(const PrefillArgs& args, int kind, int layer, const TileTask& task,
                                const WideRows& rows, int turn) {
    const int my = lane(), g = my / 4, t = my % 4, row = rows.row + 2 * g;
    const u32 norm = next_norm(args, kind, layer, lane_of_model(args, task.lane_index));
    const int place = result_tile(task, turn).place, warp = (int)(thread() / kTeam);
    Residual r = {
        task.lane_index, 2 * g < rows.live, 1, 0, 0, residual_at(rows.frag, place), nullptr,
        nullptr};
    if (kind < 2) r.keep = args.model.layers[layer].own[kind];
    if (r.live) unpack_half2(args.model.norms[(long)norm * (kHidden / 2) + row / 2], r.n0, r.n1);
    r.x = args.scratch + kScrX + operand_at(task.lane_index, kHidden, place + 2 * t, row);
    r.squares = (u64*)(prefill_shared() + kPfSquares) +
                (is_narrow(task) ? (4 * turn + warp % 4) * kNarrowN : warp * kWideN) / 2 +
                (place - task.place + 2 * t) / 2;
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
KIE_DEVICE void put_squares(const PrefillArgs& args, const TileTask& task) {
    sync_consumers<kWorkers>();
    const bool narrow = kAllNarrow || is_narrow(task);
    const int stride = narrow ? kNarrowN : kWideN, n = (int)thread() % stride,
              first = narrow ? (int)(thread() / kNarrowN) : 0,
              step = narrow ? (int)kWorkers / kNarrowN : 1;
    if (n >= task.width) return;
    float* to = (float*)(args.scratch + kScrSquares) +
                ((long)task.lane_index * kFours + task.frag / 4) * kChunk + task.place + n;
    const float* from = (const float*)(prefill_shared() + kPfSquares) + n;
    KIE_NO_UNROLL for (int m = first; 4 * m < task.tiles; m += step) {
        float sum = 0;
        KIE_UNROLL for (int w = 0; w < 4; ++w) sum += from[(4 * m + w) * stride];
        to[(long)m * kChunk] = sum;
    }
}
// What a lane added, for the lanes that will want it, on every rank; shards' sums of a group of
// eight places for its owner alone.
KIE_DEVICE void share_sums(const PrefillArgs& args, u64* to, int eight, const float* d) {
    u64 v[kBatch];
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) v[j] =
        (u64)pack_half2(d[4 * j + 2], d[4 * j + 3]) << 32 | pack_half2(d[4 * j], d[4 * j + 1]);
    if constexpr (kTensorParallel) {
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
            const long hop = args.peer_offset[owner_of(kBatch % kRanks == 0 ? j : eight + j)];
            *(u64*)((u8*)(to + j * 32) + hop) = v[j];
        }
        return;
    }
    KIE_UNROLL for (int rank = 0; rank < kRanks; ++rank) {
        u64* there = (u64*)((u8*)to + (kRanks > 1 ? args.peer_offset[rank] : 0));
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) there[j * 32] = v[j];
    }
}
template <class C>
KIE_DEVICE void put_sums(const PrefillArgs& args, Pipe& pipe, bool joined, int kind, int layer,
                         const TileTask& task, const WideRows& rows, int turn, int batches,
                         float (&d)[kSums]) {
    Residual r = residual_of(args, kind, layer, task, rows, turn);
    const int delay = delay_of(args, kind, layer);
    const bool shares = shares_of(args, kind, layer) && r.live;
    u64* to = past_at(args, kind, layer, lane_of_model(args, task.lane_index)) + r.at;
    int eight = result_tile(task, turn).place / 8;
    float bias[2] = {0, 0};
    if constexpr (C::kOutputBias) {
        const float* from = extras_of(args, layer) + C::kAtOutputBias + rows.row;
        if (kind == 0 && r.live) bias[0] = from[lane() / 4 * 2], bias[1] = from[lane() / 4 * 2 + 1];
    }
    KIE_NO_UNROLL for (; batches > 0; --batches, to += kBatch * 32, eight += kBatch) {
        if constexpr (C::kOutputBias || kResidualScaled)
            KIE_UNROLL for (int i = 0; i < 4 * kBatch; ++i) d[i] =
                (d[i] + bias[i / 2 % 2]) * kResidualScale;
        if (shares) share_sums(args, to, eight, d);
        if (!kTensorParallel && (kLanesAll == 1 || delay != 0)) {
            Quad old[kBatch];
            if (kOldStages == 0 || joined)
                take_old(args, task, kind, layer, r.at, old);
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
    const TileConfig config = {8 * kBatch, kWideTiles, 1};
    const int tasks = tasks_of<Prefill0>(kToO, all_of(chunk), config);
    KIE_NO_UNROLL for (int i = block(); i < tasks; i += args.blocks) {
        TileTask task = task_at<Prefill0>(kToO, all_of(chunk), config, i);
        task.width = config.width;
        const WideRows rows = residual_rows(task.frag + result_tile(task, 0).tile);
        const int mine = lane_of_model(args, task.lane_index);
        sync_consumers<kWorkers>();  // the last task's squares are read
        Residual r = residual_of(args, kind, layer, task, rows, 0);
        Quad sum[kBatch];
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) sum[j] = {{0, 0, 0, 0}};
        KIE_NO_UNROLL for (int l = 0; l < kLanesAll; ++l) {
            const u64* from = past_at(args, kind, layer, l) + r.at;
            u64 v[kBatch];
            KIE_UNROLL for (int j = 0; j < kBatch; ++j) v[j] = from[j * 32];
            KIE_UNROLL for (int j = 0; j < kBatch; ++j)
                add_halves(sum[j], v[j], l == mine ? r.keep : 1.0f);
        }
        const Quad* from = old_at(args, task.lane_index) + r.at;
        float d[4 * kBatch];
        Quad old[kBatch];
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] = from[j * 32];
        KIE_UNROLL for (int n = 0; n < 4 * kBatch; ++n) d[n] = number(sum[n / 4].v[n % 4]);
        r.keep = 1;
        put_residual(args, r, old, d);
        put_squares(args, task);
    }
}
// The last position's residual, as the words in which the head of a decode launch looks for it: its
// first token takes no step through the layers.
KIE_DEVICE void put_last(const PrefillArgs& args, const Chunk& chunk) {
    const int my = lane(), g = my / 4, t = my % 4, warps = kWorkers / kTeam;
    const int place = chunk.to - 1, e = place % 2;
    const u32 seqno = seqno_at(args.model.seqno, kLayers - 1);
    if (kTensorParallel && owner_of(place / 8) != (int)args.model.rank) return;
    KIE_NO_UNROLL for (int i = block() * warps + thread() / kTeam; i < kLanes * kFrags;
                       i += args.blocks * warps) {
        const int frag = i % kFrags, l = i / kFrags;
        const WideRows rows = residual_rows(frag);
        const Quad v = load_state(old_at(args, l) + ((long)frag * kEights + place / 8) * 32 + my);
        if (2 * g >= rows.live || t != place % 8 / 2) continue;
        const u32 both = pack_half2(number(word_at(v, e)), number(word_at(v, 2 + e)));
        const int pair = rows.row / 2 + g;
        if (kTensorParallel)
            publish_all(args.model, hidden_slot(args.model, 1, kLayers - 1, 0) + pair, both, seqno);
        else if (kHeadMode == kHeadPerLane)
            publish(hidden_slot(args.model, 1, kLayers - 1, l) + pair, both, seqno);
        else
            publish_all(args.model, last_slot(args.model, lane_of_model(args, l)) + pair, both,
                        seqno);
    }
}
// All positions' residual as words, as decode launches leave their columns': what predicts further
// tokens goes on from them (ops/mtp.h). [place][kWordsH] on every rank.
KIE_DEVICE void put_all(const PrefillArgs& args, const Chunk& chunk) {
    const int my = lane(), g = my / 4, t = my % 4, warps = kWorkers / kTeam,
              eights = over(chunk.to, 8);
    KIE_NO_UNROLL for (int i = block() * warps + thread() / kTeam; i < kFrags * eights;
                       i += args.blocks * warps) {
        const int frag = i / eights, eight = i % eights;
        if (kTensorParallel && owner_of(eight) != (int)args.model.rank) continue;
        const WideRows rows = residual_rows(frag);
        const Quad v = load_state(old_at(args, 0) + ((long)frag * kEights + eight) * 32 + my);
        if (2 * g >= rows.live) continue;
        KIE_UNROLL for (int e = 0; e < 2; ++e) {
            const long at = (long)(8 * eight + 2 * t + e) * kWordsH + rows.row / 2 + g;
            publish_all(args.model, args.model.residuals + at,
                        pack_half2(number(word_at(v, e)), number(word_at(v, 2 + e))), 0);
        }
    }
}
// What others take of a chunk that is through all layers.
KIE_DEVICE void put_behind(const PrefillArgs& args, const Chunk& chunk, bool last) {
    if (args.model.seqno != 0 && last) put_last(args, chunk);
    if constexpr (kLeavesResiduals)
        if ((int)args.to == kLayers) put_all(args, chunk);
}
// The rows of the embedding, in the order of a product's results.
KIE_DEVICE void embed_chunk(const PrefillArgs& args, const Chunk& chunk) {
    const TileConfig config = {chunk.to <= kNarrowN ? kNarrowN : kWideN, kWideTiles, 1};
    const int tasks = tasks_of<Prefill0>(kToO, all_of(chunk), config);
    KIE_NO_UNROLL for (int i = block(); i < tasks; i += args.blocks) {
        const TileTask task = task_at<Prefill0>(kToO, all_of(chunk), config, i);
        sync_consumers<kWorkers>();  // the last task's squares are read
        KIE_NO_UNROLL for (int turn = 0; turn < result_tiles(task); ++turn) {
            const ResultTile at = result_tile(task, turn);
            const WideRows rows = residual_rows(task.frag + at.tile);
            const int my = lane(), row = rows.row + my / 4 * 2;
            int place = at.place + my % 4 * 2;
            Residual r = residual_of(args, 2, 0, task, rows, turn);
            KIE_NO_UNROLL for (int n = at.batches; n > 0; --n) {
                float d[4 * kBatch];
                KIE_UNROLL for (int j = 0; j < kBatch; ++j, place += 8) {
                    KIE_UNROLL for (int e = 0; e < 2; ++e) {
                        u32 v = 0;
                        if (r.live && chunk.has(place + e)) {
                            const u32 token = args.tokens[chunk.base + place + e - (int)args.first];
                            v = args.model.embed[(long)token * (kHidden / 2) + row / 2];
                        }
                        unpack_half2(v, d[4 * j + e], d[4 * j + 2 + e]);
                        if (kResidualScaled)
                            d[4 * j + e] *= kResidualScale, d[4 * j + 2 + e] *= kResidualScale;
                    }
                }
                Quad none[kBatch];
                KIE_UNROLL for (int j = 0; j < kBatch; ++j) none[j] = {{0, 0, 0, 0}};
                put_residual(args, r, none, d);
            }
        }
        put_squares(args, task);
    }
}
