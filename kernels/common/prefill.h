// The prefill kernel: a persistent grid takes a chunk of positions through all layers, over the
// same line of weights and the same pages that decoding uses. Per layer five phases (qkv,
// attention, o, gate/up, down) with a grid barrier behind each; a phase is a list of equal items
// (128 rows x 256 positions of a product), dealt out in turn. One team copies weights and
// activations into a ring of shared memory, two teams multiply 64 rows each. Every sum has one
// fixed order.
#pragma once

struct Pipe {
    u32 at, parity;
    u32 passed;  // residual stages so far, for the copying warps
};
KIE_DEVICE Slot* stage_slot(u32 at) { return (Slot*)(prefill_shared() + kPfSlots) + at; }
KIE_DEVICE u8* stage_bytes(u32 at) { return prefill_shared() + kPfRing + at * kStageBytes; }
KIE_DEVICE void forward(Pipe& p) {
    if (++p.at == kStages) p.at = 0, p.parity ^= 1;
}

// Ticks of a phase's work and of the wait behind it, by one thread of each block.
struct Clock {
    u64* trace;
    u64 at;
};
KIE_DEVICE void tick(Clock& c, int what) {
#ifdef KIE_TRACE
    if (thread() == 0) {
        const u64 now = clock_ticks();
        if (what >= 0) c.trace[block() * 16 + what] += now - c.at;
        c.at = now;
    }
#endif
}

// ---- The grid's barrier: arrivals are counted, a phase is over at blocks x its number.
struct Phase {
    u32 done;
};
KIE_DEVICE u64 arrivals_wanted(const PrefillArgs& args, const Phase& p) {
    return (u64)p.done * args.blocks;
}
// By one thread. What others wrote before they arrived may be read afterwards.
KIE_DEVICE void await_phase(Watch& w, const PrefillArgs& args, const Phase& p) {
    const u64 wanted = arrivals_wanted(args, p);
    w.polls = 0;
    for (u64 seen = load_word(args.arrivals); seen < wanted; seen = load_word(args.arrivals)) {
        if (!patient(w, 0x1000 | p.done % 5, (u32)wanted, (u32)seen)) break;
        pause_ns(40);
    }
    fence_device();
}
// By all workers, with their phase's writes behind them. False: somebody gave up.
KIE_DEVICE bool meet(Watch& w, const PrefillArgs& args, Phase& p) {
    ++p.done;
    writes_before_copies();
    sync_consumers<kWorkers>();
    if (thread() == 0) {
        fence_device();
        count_up(args.arrivals);
        await_phase(w, args, p);
        if (w.lost)
            *stop_word() = 1;
        else
            *phase_word() = p.done;
    }
    sync_consumers<kWorkers>();
    return *stop_word() == 0;
}

// ---- The copying team: of each stage two warps bring the weights, two the positions.
template <class S>
KIE_DEVICE long unit_at(int pair) {  // bytes of 32 columns of a block's rows inside its product
    const int q = pair % S::pairs;
    return (long)(q / S::chunk) * S::stage_bytes +
           (pair / S::pairs * S::chunk + q % S::chunk) * (S::rows * 64);
}
// What a lane of a copying warp brings of every stage of an item: a run of one block's tiles, or
// (lane 0 of the others) the positions.
struct Load {
    const u8* from;
    u32 to, bytes, all;
};
template <class S>
KIE_DEVICE Load load_of(const PrefillArgs& args, const WideItem& item, long at, const u8* x) {
    const int my = lane(), warp = (int)(thread() - kWorkers) / (int)kTeam, pair = warp % 2;
    const int f = item.row_tile * kWideTiles + my, tile = f % S::tiles_all;
    const int left = S::tiles_all - tile, most = kWideTiles - my, run = left < most ? left : most;
    u32 bytes = 0;
    if (my < kWideTiles && f < frags_of<S>() && (my == 0 || tile == 0)) {
        bytes = S::rows * 64 - tile * 1024;
        if (bytes > (u32)run * 1024) bytes = run * 1024;
    }
    u32 all = bytes;
    KIE_UNROLL for (int m = 1; m < 8; m *= 2) all += shuffle_xor(all, m);
    all = 2 * all + 2 * item.width * 64;
    if (warp < 2)
        return {args.model.line +
                    (u64)(item.lane_index * kBlocksPerLane + f / S::tiles_all) * kLineBytes + at +
                    tile * 1024,
                (u32)(pair * (kStageWeights / 2) + my * 1024), bytes, all};
    return {x + ((long)item.lane_index * (S::k / 32) * kEights + item.place / 8) * kCores,
            (u32)(kStageWeights + pair * kStagePart), my == 0 ? item.width * 64 : 0u, all};
}
// By a whole warp, which goes on together: a thread that looked only after the slot had been filled
// and freed once more would take it for one that is still in use, and wait for good.
KIE_DEVICE bool await_free(Watch& w, const Pipe& pipe, u32 where, u32 wanted) {
    w.polls = 0;
    bool free = true;
    while (!slot_free(stage_slot(pipe.at), pipe.parity)) {
        free = *stop_word() == 0;
        if (!free) break;
        if (lane() == 0 && !patient(w, where, wanted, pipe.at)) *stop_word() = 1;
    }
    return ballot(free) == ~0u;
}
// The second warp has no part in a residual stage: the first, without whom it does not fill, lets
// it look first.
KIE_DEVICE void await_second(Watch& w, u32 stages) {
    w.polls = 0;
    while (*passed_word() < stages && *stop_word() == 0) {
        if (!patient(w, 0x2008, stages, *passed_word())) *stop_word() = 1;
        pause_ns(20);
    }
}
KIE_DEVICE u64* past_at(const PrefillArgs& args, int kind, int layer) {
    return (u64*)(args.scratch + kScrPast) + (long)(kind * kPast + layer % kPast) * kResidual;
}
// Layers since the others' output that a layer adds, or -1.
KIE_DEVICE int delay_of(const PrefillArgs& args, int kind, int layer) {
    return kLanes > 1 ? args.model.layers[layer].delay[kind] : -1;
}
// The old residual of an item and the other lanes' sums, batch after batch.
KIE_DEVICE bool feed_residual(Watch& w, const PrefillArgs& args, Pipe& pipe, const WideItem& item,
                              int kind, int layer) {
    // The two warps that wait for the phases before.
    const int warp = (int)(thread() - kWorkers) / (int)kTeam, copy = (int)lane() * 2 + warp - 2;
    const int left = kFrags - item.row_tile * kWideTiles,
              frags = left < kWideTiles ? left : kWideTiles;
    const int delay = delay_of(args, kind, layer), end = delay >= 0 ? kLanes : 1;
    KIE_NO_UNROLL for (int b = 0; b < batches_of(item.width); ++b) {
        const int group = item.place / 8 + b * kBatch;
        KIE_NO_UNROLL for (int l = 1, first = kWideTiles; first > 0 || l < end; first = 0) {
            const int room = first > 0 ? kLanesFirst : kLanesNext,
                      lanes = end - l < room ? end - l : room;
            if (!await_free(w, pipe, 0x2004 | kind, layer)) return false;
            const u32 all = frags * ((first > 0 ? kBatch * 512 : 0) + lanes * kBatch * 256);
            ++pipe.passed;
            if (warp == 1 && lane() == 0) *passed_word() = pipe.passed;
            if (warp == 0 && lane() == 0) {
                await_second(w, pipe.passed);
                stage_expect(stage_slot(pipe.at), all);
            }
            const int n = copy - first, frag = item.row_tile * kWideTiles + copy % kWideTiles;
            if (warp >= 2 && copy % kWideTiles < frags && n < lanes * kWideTiles) {
                const int from =
                    n < 0 ? item.lane_index : (item.lane_index + l + n / kWideTiles) % kLanes;
                const long at = (((long)from * kFrags + frag) * kEights + group) * 32;
                const u8* base = n < 0 ? args.scratch + kScrResidual + at * 16
                                       : (const u8*)(past_at(args, kind, layer - delay) + at);
                const u32 to = n < 0 ? copy * (kBatch * 512)
                                     : (first > 0 ? kOldBytes : 0) + n * (kBatch * 256);
                reads_before_copy();
                stage_copy(stage_slot(pipe.at), stage_bytes(pipe.at) + to, base,
                           n < 0 ? kBatch * 512 : kBatch * 256);
            }
            forward(pipe);
            l += lanes;
        }
    }
    return true;
}
// One product of one layer. `at`: the product in every block's line; `x`: its operand.
template <class S>
KIE_DEVICE bool feed(Watch& w, const PrefillArgs& args, Pipe& pipe, const Chunk& chunk, int product,
                     int layer, long at, const u8* x) {
    constexpr int kPairs = S::k / 32;
    const int my = lane(), warp = (int)(thread() - kWorkers) / (int)kTeam;
    const Cut cut = cut_at(chunk, product);
    const int items = items_of(product, chunk, cut);
    KIE_NO_UNROLL for (int i = block(); i < items; i += args.blocks) {
        const WideItem item = item_at(product, chunk, cut, i);
        const Load load = load_of<S>(args, item, at, x);
        const int end = 2 * part_from(product, cut, item.part + 1);
        KIE_NO_UNROLL for (int p = 2 * part_from(product, cut, item.part); p < end; p += 2) {
            if (!await_free(w, pipe, 0x2000 | product, p)) return false;
            Slot* s = stage_slot(pipe.at);
            const int mine = p + warp % 2 < kPairs ? p + warp % 2 : kPairs - 1;
            if (warp == 0 && my == 0) stage_expect(s, load.all);
            if (load.bytes > 0) {
                reads_before_copy();
                stage_copy(
                    s, stage_bytes(pipe.at) + load.to,
                    load.from + (warp < 2 ? unit_at<S>(mine) : (long)mine * kEights * kCores),
                    load.bytes);
            }
            forward(pipe);
        }
        if ((product == kToO || product == kToDown) && cut.parts == 1 &&
            !feed_residual(w, args, pipe, item, product == kToDown, layer))
            return false;
    }
    return true;
}
template <class S>
KIE_CONST_FN long product_bytes() {
    return (long)S::stages * S::stage_bytes;
}
// Weights depend on nobody: where the ring is not in use for pages, the warps that bring them go
// ahead, and only those that bring positions wait for the phases before. They hear of them from the
// workers; nobody here waits for another warp of the team, so each can give up by itself.
KIE_DEVICE bool await_feed(Watch& w, const PrefillArgs& args, Phase& p, u32 phases, bool all) {
    p.done += phases;
    if (!all && thread() - kWorkers < kCrew / 2) return *stop_word() == 0;
    if (lane() == 0) {
        w.polls = 0;
        while (*phase_word() < p.done && *stop_word() == 0) {
            if (!patient(w, 0x4000, p.done, *phase_word())) *stop_word() = 1;
            pause_ns(20);
        }
        fence_device();
    }
    sync_warp();
    writes_before_copies();
    return *stop_word() == 0;
}
KIE_DEVICE void feed_all(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    Phase phase = {0};
    const u8* s = args.scratch;
    const int chunks = chunks_of(args);
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        KIE_NO_UNROLL for (int layer = args.from; layer < (int)args.to; ++layer) {
            watch.step = layer;
            long at = layer * kLayerBytes;
            if (!await_feed(watch, args, phase, 1, false)) return;
            if (!feed<SplitQkv>(watch, args, pipe, chunk, kToQkv, layer, at, s + kScrX)) return;
            at += product_bytes<SplitQkv>();
            if (!await_feed(watch, args, phase, 1, true)) return;
            if (!feed_pages(watch, args, pages, chunk, layer)) return;
            if (!await_feed(watch, args, phase, 1, true)) return;
            if (!feed<SplitO>(watch, args, pipe, chunk, kToO, layer, at, s + kScrAttn)) return;
            at += product_bytes<SplitO>();
            if (!await_feed(watch, args, phase, 1, false)) return;
            if (!feed<SplitGu>(watch, args, pipe, chunk, kToGateUp, layer, at, s + kScrX)) return;
            at += product_bytes<SplitGu>();
            if (!await_feed(watch, args, phase, 1, false)) return;
            if (!feed<SplitDown>(watch, args, pipe, chunk, kToDown, layer, at, s + kScrAct)) return;
        }
        phase.done += args.hidden && args.to == kLayers ? 2 : 1;
    }
    await_feed(watch, args, phase, 0, true);  // the workers' waits look at `stop`, not the clock
}

// Nothing is in flight when the block leaves: the workers have taken every stage; where they gave
// up, copies land within microseconds, and a stage that lacks some never counts as filled.
KIE_DEVICE void drain() {
    if (*stop_word() == 0) return;
    const u64 since = clock_ns();
    while (clock_ns() - since < 1000000) pause_ns(1000);
}

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

// q and k rotated, k and v into their pages.
KIE_DEVICE void put_qkv(const PrefillArgs& args, const Chunk& chunk, int layer,
                        const WideItem& item, const WideRows& rows, const float* scale,
                        float (&d)[kWideN / 2]) {
    const int my = lane(), g = my / 4, t = my % 4, row = rows.row + 2 * g;
    if (2 * g >= rows.live) return;
    const bool is_q = row < kAttn, is_v = row >= kAttn + kKvHeads * kHeadDim;
    const int head = row / kHeadDim, f = row % kHeadDim;
    const int kv_head = is_q ? 0 : is_v ? head - kHeads - kKvHeads : head - kHeads;
    const float factor = is_q ? KIE_QUERY_SCALE : 1.0f;
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
            turn[i / 2][i % 2] = is_v ? 0x3f800000u : rope[(long)to * (kHeadDim / 2)];
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
KIE_DEVICE long residual_at(const WideItem& item, int frag) {
    return (((long)item.lane_index * kFrags + frag) * kEights + item.place / 8) * 32 + lane();
}
KIE_DEVICE void add_halves(Quad& sum, u64 halves) {
    float v[4];
    unpack_half2((u32)halves, v[0], v[1]), unpack_half2((u32)(halves >> 32), v[2], v[3]);
    KIE_UNROLL for (int i = 0; i < 4; ++i) sum.v[i] = bits(number(sum.v[i]) + v[i]);
}
// A batch of the residual with the other lanes' sums: from memory, where parts of k were joined
// (nobody knew who would need it) ...
KIE_DEVICE void take_old(const PrefillArgs& args, const WideItem& item, int kind, int layer,
                         long at, Quad (&old)[kBatch]) {
    const Quad* residual = (const Quad*)(args.scratch + kScrResidual) + at;
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] = residual[j * 32];
    const int delay = delay_of(args, kind, layer);
    if (delay < 0) return;
    const u64* past = past_at(args, kind, layer - delay) + at;
    KIE_NO_UNROLL for (int l = 1; l < kLanes; ++l) {
        const u64* from = past + (long)((item.lane_index + l) % kLanes - item.lane_index) *
                                     (kFrags * kEights * 32);
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
    const int my = lane(), warp = thread() / kTeam, end = others ? kLanes : 1;
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
    int kind, layer;
    bool live;     // this thread's row pair exists
    bool shares;   // other lanes will want what is added
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
    const int norm_row = norm * kNormLanes + (kNormLanes > 1 ? item.lane_index : 0);
    Residual r = {kind,    layer,  2 * g < rows.live, false, 1, 0, 0, residual_at(item, rows.frag),
                  nullptr, nullptr};
    if (kind < 2) {
        const Layer& l = args.model.layers[layer];
        r.keep = l.own[kind], r.shares = kLanes > 1 && (l.shares >> kind & 1) != 0;
    }
    if (r.live)
        unpack_half2(args.model.norms[(long)norm_row * (kHidden / 2) + row / 2], r.n0, r.n1);
    r.x = args.scratch + kScrX + operand_at(item.lane_index, kHidden, item.place + 2 * t, row);
    r.squares =
        (u64*)(prefill_shared() + kPfSquares) + ((int)(thread() / kTeam) * kWideN + 2 * t) / 2;
    return r;
}
KIE_DEVICE void put_residual(const PrefillArgs& args, Residual& r, const Quad (&old)[kBatch],
                             const float* d) {
    Quad* residual = (Quad*)(args.scratch + kScrResidual) + r.at;
    KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
        float v[4];
        KIE_UNROLL for (int i = 0; i < 4; ++i) v[i] = r.live ? d[4 * j + i] : 0;
        if (kLanes > 1 && r.live && r.shares)
            past_at(args, r.kind, r.layer)[r.at + j * 32] =
                (u64)pack_half2(v[2], v[3]) << 32 | pack_half2(v[0], v[1]);
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
KIE_DEVICE void put_sums(const PrefillArgs& args, Pipe& pipe, bool joined, int kind, int layer,
                         const WideItem& item, const WideRows& rows, float (&d)[kWideN / 2]) {
    Residual r = residual_of(args, kind, layer, item, rows);
    const bool others = delay_of(args, kind, layer) >= 0;
    KIE_NO_UNROLL for (int n = batches_of(item.width); n > 0; --n) {
        Quad old[kBatch];
        if (joined)
            take_old(args, item, kind, layer, r.at, old);
        else
            take_old(pipe, others, old);
        put_residual(args, r, old, d);
        move_up<4 * kBatch>(d);
    }
    put_squares(args, item);
}
// The last layer's residual as rows, for whoever wants logits of the prompt.
KIE_DEVICE void put_hidden(const PrefillArgs& args, const Chunk& chunk) {
    const int my = lane(), g = my / 4, t = my % 4, warps = kWorkers / kTeam;
    const int groups = over(chunk.to, 8), all = kLanes * kFrags * groups;
    KIE_NO_UNROLL for (int i = block() * warps + thread() / kTeam; i < all;
                       i += args.blocks * warps) {
        const int j = i % groups, frag = i / groups % kFrags, l = i / groups / kFrags;
        const WideRows rows = residual_rows(frag / kWideTiles, frag % kWideTiles);
        const Quad v = load_state((const Quad*)(args.scratch + kScrResidual) +
                                  ((long)(l * kFrags + frag) * kEights + j) * 32 + my);
        if (2 * g >= rows.live) continue;
        KIE_UNROLL for (int e = 0; e < 2; ++e) {
            const int place = 8 * j + 2 * t + e;
            if (place < chunk.from || place >= chunk.to) continue;
            const long p = chunk.base + place - (int)args.first;
            float* h = args.hidden + (p * kLanes + l) * kHidden + rows.row + 2 * g;
            h[0] = number(v.v[e]), h[1] = number(v.v[2 + e]);
        }
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
        if (!meet(watch, args, phase)) return;
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
                if (!meet(watch, args, phase)) return;
                tick(clock, 2 * product + 1);
            }
        }
        if (args.hidden && args.to == kLayers) {
            put_hidden(args, chunk);
            if (!meet(watch, args, phase)) return;  // before it is overwritten
        }
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
