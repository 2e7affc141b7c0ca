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

// ---- The multiplying teams.
struct Share {
    Quad v[4];
};  // a warp's 16 rows of a stage: 64 of k
KIE_DEVICE void take_share(const Pipe& p, Share& a, int rows, bool whole) {
    while (!slot_filled(stage_slot(p.at), p.parity))
        if (*stop_word()) break;
    const int my = lane(), tile = thread() / kTeam;
    const u8* w = stage_bytes(p.at) + tile * 1024 + my * 16;
    KIE_UNROLL for (int i = 0; i < 4; ++i) {
        a.v[i] = {{0, 0, 0, 0}};
        if (my < 2 * rows && (i < 2 || whole))
            a.v[i] = *(const Quad*)(w + i / 2 * (kStageWeights / 2) + i % 2 * rows * 32);
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
// A run of pairs of k of one item. One group of products is always queued behind the one that runs.
template <int kN>
KIE_DEVICE void accumulate(Pipe& pipe, int from, int to, int pairs, int rows,
                           float (&d)[kWideN / 2]) {
    KIE_UNROLL for (int i = 0; i < kWideN / 2; ++i) d[i] = 0;
    Share a, b;
    take_share(pipe, a, rows, from + 1 < pairs);
    u32 last = kStages;  // whose products are still under way
    const auto step = [&](const Share& now, Share& next, int after) {
        multiply_share<kN>(pipe, now, d);
        wide_wait<1>();
        if (last < kStages && lane() == 0) slot_release(stage_slot(last));
        last = pipe.at;
        forward(pipe);
        if (after < to) take_share(pipe, next, rows, after + 1 < pairs);
    };
    KIE_NO_UNROLL for (int p = from; p < to; p += 4) {
        step(a, b, p + 2);
        if (p + 2 < to) step(b, a, p + 4);
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
    const long part_bytes = item.cut_width / 128 * kPartBytes;
    u8* mine = args.scratch + kScrParts + (long)item.tile * parts * part_bytes + thread() * 16;
    constexpr int kGroup8 = kWorkers * 16;  // bytes of a group of 8 places
    float* to = (float*)(mine + item.part * part_bytes);
    KIE_NO_UNROLL for (int b = batches_of(item.width); b > 0; --b, to += kBatch * kGroup8 / 4) {
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
        if (b >= batches_of(item.width)) continue;
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
    if (n >= kWideN) return;
    const float* from = (const float*)(args.scratch + kScrSquares) +
                        (long)item.lane_index * kRowTiles * kChunk + item.place + n;
    float sum = 0;
    KIE_UNROLL for (int r = 0; r < kRowTiles; ++r) sum += from[(long)r * kChunk];
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
                        const WideItem& item, const WideRows& rows, const float* scale,
                        float (&d)[kWideN / 2]) {
    const int my = lane(), g = my / 4, t = my % 4, row = rows.row + 2 * g;
    if (2 * g >= rows.live) return;
    const bool is_q = row < kAttn, is_v = row >= kAttn + kKvHeads * kHeadDim;
    const int head = row / kHeadDim, f = row % kHeadDim;
    const int kv_head = is_q ? 0 : is_v ? head - kHeads - kKvHeads : head - kHeads;
    const float factor = is_q && !kHeadNorm ? KIE_QUERY_SCALE : 1.0f;
    const int kv_index = item.lane_index * kKvHeads + kv_head;
    float bias[2] = {0, 0};
    if constexpr (kBias) {
        const float* from = args.model.biases +
                            ((long)layer * kLanes + item.lane_index) * (kRowsQkv * kBlocksPerLane);
        bias[0] = from[row] * factor, bias[1] = from[row + 1] * factor;
    }
    const u64* rope = (const u64*)(args.model.rope + f);
    const int last_page = (chunk.base + chunk.to - 1) / kPage;
    int place = item.place + 2 * t;
    scale += 2 * t;
    KIE_NO_UNROLL for (int n = 2 * batches_of(item.width); n > 0; --n, place += 32, scale += 32) {
        u64 turn[4][2];
        u8* page = nullptr;
        if (!is_q) {
            const int at = (chunk.base + place) / kPage;
            page = prefill_page(args, layer, kv_index, at < last_page ? at : last_page);
        }
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
                        const float* scale, float (&d)[kWideN / 2]) {
    const int my = lane(), g = my / 4, t = my % 4, odd = g & 1;
    const int f = (rows.row + 2 * g) / 2 - odd;  // of a pair: the even one stores the first place
    u8* to =
        args.scratch + kScrAct + operand_at(item.lane_index, kFfn, item.place + 2 * t + odd, f);
    scale += 2 * t;
    KIE_NO_UNROLL for (int n = batches_of(item.width); n > 0;
                       --n, to += kBatch * kCores, scale += 8 * kBatch) {
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
KIE_DEVICE long residual_at(const WideItem& item, int frag) {  // inside its lane
    return ((long)frag * kEights + item.place / 8) * 32 + lane();
}
KIE_DEVICE void add_halves(Quad& sum, u64 halves, float factor = 1) {
    float v[4];
    unpack_half2((u32)halves, v[0], v[1]), unpack_half2((u32)(halves >> 32), v[2], v[3]);
    KIE_UNROLL for (int i = 0; i < 4; ++i) sum.v[i] = bits(number(sum.v[i]) + factor * v[i]);
}
// A batch of the residual with the other lanes' sums: from memory, where parts of k were joined
// (nobody knew who would need it) ...
KIE_DEVICE const Quad* old_at(const PrefillArgs& args, int lane_index) {
    return (const Quad*)(args.scratch + kScrResidual) + lane_index * kLaneResidual;
}
KIE_DEVICE void take_old(const PrefillArgs& args, const WideItem& item, int kind, int layer,
                         long at, Quad (&old)[kBatch]) {
    const Quad* residual = old_at(args, item.lane_index) + at;
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] = residual[j * 32];
    const int delay = delay_of(args, kind, layer);
    if (delay < 0) return;
    const int mine = lane_of_model(args, item.lane_index);
    KIE_NO_UNROLL for (int l = 1; l < kLanesAll; ++l) {
        const u64* from = past_at(args, kind, layer - delay, (mine + l) % kLanesAll) + at;
        u64 v[kBatch];
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) v[j] = from[j * 32];
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) add_halves(old[j], v[j]);
    }
}
// ... or from the ring.
KIE_DEVICE void await_stage(const Pipe& p) {
    while (!slot_filled(stage_slot(p.at), p.parity))
        if (*stop_word()) break;
}
KIE_DEVICE void leave_stage(Pipe& p) {
    sync_warp();
    if (lane() == 0) slot_release(stage_slot(p.at));
    forward(p);
}
KIE_DEVICE void take_old(Pipe& pipe, bool others, Quad (&old)[kBatch]) {
    const int my = lane(), warp = thread() / kTeam, end = others ? kLanesAll : 1;
    await_stage(pipe);
    const u8* from = stage_bytes(pipe.at) + warp * (kBatch * 512) + my * 16;
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] = *(const Quad*)(from + j * 512);
    int room = kLanesFirst, at = kOldBytes;
    KIE_NO_UNROLL for (int l = 1; l < end; ++l) {
        if (room == 0) leave_stage(pipe), await_stage(pipe), room = kLanesNext, at = 0;
        from = stage_bytes(pipe.at) + at + warp * (kBatch * 256) + my * 8;
        KIE_UNROLL for (int j = 0; j < kBatch; ++j)
            add_halves(old[j], *(const u64*)(from + j * 256));
        --room, at += kLaneBytes;
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
                                const WideRows& rows) {
    const int my = lane(), g = my / 4, t = my % 4, row = rows.row + 2 * g;
    const int norm = kind == 2 ? 0 : 2 * layer + 1 + kind;
    const int norm_lane = kNormLanes > 1 ? lane_of_model(args, item.lane_index) : 0;
    Residual r = {
        item.lane_index, 2 * g < rows.live, 1, 0, 0, residual_at(item, rows.frag), nullptr,
        nullptr};
    if (kind < 2) r.keep = args.model.layers[layer].own[kind];
    if (r.live)
        unpack_half2(
            args.model.norms[(long)(norm * kNormLanes + norm_lane) * (kHidden / 2) + row / 2], r.n0,
            r.n1);
    r.x = args.scratch + kScrX + operand_at(item.lane_index, kHidden, item.place + 2 * t, row);
    r.squares =
        (u64*)(prefill_shared() + kPfSquares) + ((int)(thread() / kTeam) * kWideN + 2 * t) / 2;
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
KIE_DEVICE void put_squares(const PrefillArgs& args, const WideItem& item) {
    sync_consumers<kWorkers>();
    const int n = thread();
    if (n >= item.width) return;
    float sum = 0;
    KIE_UNROLL for (int w = 0; w < kWideTiles; ++w) sum +=
        ((const float*)(prefill_shared() + kPfSquares))[w * kWideN + n];
    float* to = (float*)(args.scratch + kScrSquares) +
                (long)(item.lane_index * kRowTiles + item.row_tile) * kChunk;
    to[item.place + n] = sum;
}
// What a lane added, for the lanes that will want it, on every rank.
KIE_DEVICE void share_sums(const PrefillArgs& args, u64* to, const float* d) {
    u64 v[kBatch];
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) v[j] =
        (u64)pack_half2(d[4 * j + 2], d[4 * j + 3]) << 32 | pack_half2(d[4 * j], d[4 * j + 1]);
    KIE_UNROLL for (int rank = 0; rank < kRanks; ++rank) {
        u64* there = (u64*)((u8*)to + (kRanks > 1 ? args.hops[rank] : 0));
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) there[j * 32] = v[j];
    }
}
KIE_DEVICE void put_sums(const PrefillArgs& args, Pipe& pipe, bool joined, int kind, int layer,
                         const WideItem& item, const WideRows& rows, float (&d)[kWideN / 2]) {
    Residual r = residual_of(args, kind, layer, item, rows);
    const int delay = delay_of(args, kind, layer);
    const bool shares = shares_of(args, kind, layer) && r.live;
    u64* to = past_at(args, kind, layer, lane_of_model(args, item.lane_index)) + r.at;
    KIE_NO_UNROLL for (int n = batches_of(item.width); n > 0; --n, to += kBatch * 32) {
        if (shares) share_sums(args, to, d);
        if (kLanesAll == 1 || delay != 0) {
            Quad old[kBatch];
            if (joined)
                take_old(args, item, kind, layer, r.at, old);
            else
                take_old(pipe, delay > 0, old);
            put_residual(args, r, old, d);
        }
        move_up<4 * kBatch>(d);
    }
    if (kLanesAll == 1 || delay != 0) put_squares(args, item);
}
// Without delay: every lane adds what all of them made, in one order, so that lanes that are alike
// stay alike to the bit.
KIE_DEVICE void mix_chunk(const PrefillArgs& args, const Chunk& chunk, int kind, int layer) {
    const Cut cut = {8 * kBatch, 1};
    const int items = items_of(kToO, chunk, cut), warp = thread() / kTeam;
    KIE_NO_UNROLL for (int i = block(); i < items; i += args.blocks) {
        WideItem item = item_at(kToO, chunk, cut, i);
        item.width = cut.width;
        const WideRows rows = residual_rows(item.row_tile, warp);
        const int mine = lane_of_model(args, item.lane_index);
        sync_consumers<kWorkers>();  // the last item's squares are read
        Residual r = residual_of(args, kind, layer, item, rows);
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
    KIE_NO_UNROLL for (int i = block() * warps + thread() / kTeam; i < kLanes * kFrags;
                       i += args.blocks * warps) {
        const int frag = i % kFrags, l = i / kFrags;
        const WideRows rows = residual_rows(frag / kWideTiles, frag % kWideTiles);
        const Quad v = load_state(old_at(args, l) + ((long)frag * kEights + place / 8) * 32 + my);
        if (2 * g >= rows.live || t != place % 8 / 2) continue;
        const u32 both = pack_half2(number(v.v[e]), number(v.v[2 + e]));
        const int pair = rows.row / 2 + g;
        if (kHeadMode == kHeadPerLane)
            publish(hidden_slot(args.model, 1, kLayers - 1, l) + pair, both, args.model.epoch);
        else
            publish_all(args.model, last_slot(args.model, lane_of_model(args, l)) + pair, both,
                        args.model.epoch);
    }
}

KIE_DEVICE WideRows rows_of_product(int product, int row_tile, int j) {
    return product == kToQkv      ? rows_at<SplitQkv, kQkv>(row_tile, j)
           : product == kToGateUp ? rows_at<SplitGu, 2 * kFfn>(row_tile, j)
                                  : residual_rows(row_tile, j);
}
// The rows of the embedding, in the order of a product's results.
KIE_DEVICE void embed_chunk(const PrefillArgs& args, const Chunk& chunk) {
    const Cut cut = {chunk.to <= 128 ? 128 : kWideN, 1};
    const int items = items_of(kToO, chunk, cut), warp = thread() / kTeam;
    KIE_NO_UNROLL for (int i = block(); i < items; i += args.blocks) {
        const WideItem item = item_at(kToO, chunk, cut, i);
        const WideRows rows = residual_rows(item.row_tile, warp);
        const int my = lane(), row = rows.row + my / 4 * 2;
        int place = item.place + my % 4 * 2;
        sync_consumers<kWorkers>();  // the last item's squares are read
        Residual r = residual_of(args, 2, 0, item, rows);
        KIE_NO_UNROLL for (int n = batches_of(item.width); n > 0; --n) {
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
        put_squares(args, item);
    }
}
KIE_DEVICE void product_phase(const PrefillArgs& args, Pipe& pipe, const Chunk& chunk, int product,
                              int layer) {
    const Cut cut = cut_at(chunk, product);
    const int items = items_of(product, chunk, cut), warp = thread() / kTeam;
    const int pairs = pairs_of(product);
    float d[kWideN / 2];
    int turn = 0;
    KIE_NO_UNROLL for (int i = block(); i < items; i += args.blocks, turn ^= 1) {
        const WideItem item = item_at(product, chunk, cut, i);
        const WideRows rows = rows_of_product(product, item.row_tile, warp);
        const bool normed = product == kToQkv || product == kToGateUp;
        float* scale = (float*)(prefill_shared() + kPfScale) + turn * kWideN;
        if (normed) take_scales(args, item, scale);
        const int from = 2 * part_from(product, cut, item.part),
                  to = 2 * part_from(product, cut, item.part + 1);
        Clock clock = {args.model.trace, 0};
        tick(clock, -1);
        if (item.width == kWideN)
            accumulate<kWideN>(pipe, from, to, pairs, rows.rows, d);
        else
            accumulate<128>(pipe, from, to, pairs, rows.rows, d);
        sync_consumers<kWorkers>();  // scales are there, the last item's squares are read
        tick(clock, 12 + product);
        if (cut.parts > 1 && !join_parts(args, item, cut.parts, d)) continue;
        if (product == kToQkv)
            put_qkv(args, chunk, layer, item, rows, scale, d);
        else if (product == kToGateUp)
            put_act(args, item, rows, scale, d);
        else
            put_sums(args, pipe, cut.parts > 1, product == kToDown, layer, item, rows, d);
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
                    mix_chunk(args, chunk, product == kToDown, layer);
                    if (!meet(watch, args, phase)) return;
                }
                if constexpr (kHeadNorm) {
                    if (product != kToQkv) continue;
                    norm_heads(args, chunk, layer);
                    if (!meet(watch, args, phase)) return;
                }
            }
        }
        if (args.model.epoch != 0 && c + 1 == chunks) put_last(args, chunk);
    }
}

KIE_KERNEL(kie_prefill, kPrefillThreads, PrefillArgs args) {
    if (thread() == 0) {
        for (int i = 0; i < kStages; ++i) slot_init(stage_slot(i), kWorkers / kTeam);
        for (int i = 0; i < kPageBuffers; ++i) slot_init(page_slot(i), kWorkers / kTeam);
        slots_ready();
        *stop_word() = *phase_word() = *passed_word() = 0;
    }
    sync_block();
    Pipe pipe = {0, 0, 0};
    if (thread() >= kWorkers) {
        fewer_registers<40>();
        pipe.parity = 1;
        feed_all(args, pipe);
        drain();
    } else {
        more_registers<232>();
        work_all(args, pipe);
    }
}
