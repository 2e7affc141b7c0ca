// The decode kernel: one block a multiprocessor, resident for `steps` tokens, a layer after
// another. A block belongs to one lane of the model and owns the same rows of every matrix. The
// residual rows it owns stay in registers as floats; what others need travels as epoch words
// (exchange.h). Per layer: qkv -> attention -> o -> gate/up -> down, five exchanges (six with
// kMerge).
#pragma once

struct Block {
    int lane_index, rank;  // lane of the model, block inside the lane
    u8* shared;
    u32 epoch;
    u64* trace;  // shared, or null for all threads but one
    u64 traced_at;
};
KIE_DEVICE void stamp(Block& b, int phase) {
#ifdef KIE_TRACE
    if (b.trace) {
        const u64 now = clock_ticks();
        b.trace[phase] += now - b.traced_at, b.traced_at = now;
    }
#endif
}
KIE_DEVICE u64* hidden_slot(const DecodeArgs& args, int kind, int layer, int lane_index) {
    return args.words + kAtHidden + (((long)kind * kLayers + layer) * kLanes + lane_index) * kVecH;
}
KIE_DEVICE u64* other_slot(const DecodeArgs& args, int kind, int layer, int lane_index) {
    return args.words + kAtOther + (((long)kind * kLayers + layer) * kLanes + lane_index) * kVecH;
}

// This warp's share of a normed vector into shared memory: words, or the embedding of the tokens.
KIE_DEVICE u32* tokens_of(const Block& b) { return (u32*)(b.shared + kShMisc) + 4; }
struct Squares {
    float v[kColumns];
};  // a lane's part of each column's sum of squares
KIE_DEVICE Squares gather_normed(Watch& watch, const DecodeArgs& args, const Block& b,
                                 const u64* from, bool embedded, int norm, u32 where) {
    constexpr int kShare = kHidden / 2 / kWarps;
    const int warp = thread() / kWarp;
    const u32* weights = args.norms + (long)norm * (kHidden / 2) + warp * kShare;
    Squares squares;
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) squares.v[c] = 0;
    u32* x = (u32*)(b.shared + kShXa) + warp * kShare;
    if (!embedded) {
        gather<kShare, true>(watch, from + warp * kShare, kHidden / 2, b.epoch, where, weights, x,
                             kStrideA / 2, squares.v);
        return squares;
    }
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) {
        const u32* e = args.embed + (long)tokens_of(b)[c] * (kHidden / 2) + warp * kShare;
        KIE_UNROLL for (int i = 0; i < (kShare + 31) / 32; ++i) {
            const int at = 32 * i + lane();
            if (at >= kShare) continue;
            float v0, v1, n0, n1;
            unpack_half2(e[at], v0, v1), unpack_half2(weights[at], n0, n1);
            squares.v[c] += v0 * v0 + v1 * v1;
            x[c * (kStrideA / 2) + at] = pack_half2(v0 * n0, v1 * n1);
        }
    }
    return squares;
}
KIE_DEVICE void add_squares(const Block& b, Squares& s) {
    float* all = (float*)(b.shared + kShNorm);
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) {
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) s.v[c] += shuffle_xor(s.v[c], m);
        if (lane() == 0) all[c * kWarps + thread() / kWarp] = s.v[c];
    }
}
// Behind a barrier after gather_normed: 1 / rms of a column.
KIE_DEVICE float rms_scale(const Block& b, int column) {
    const float* s = (const float*)(b.shared + kShNorm) + column * kWarps;
    float sum = 0;
    KIE_UNROLL for (int i = 0; i < kWarps; ++i) sum += s[i];
    return rsqrt_f(sum * (1.0f / kHidden) + kEps);
}
template <class S>
KIE_DEVICE void vector_ready() {
    if (S::row_warps > 1)
        sync_consumers<kThreads>();
    else
        sync_warp();
}
// The product with a normed vector; the squares are summed where nobody waits for them.
template <class S>
KIE_DEVICE Sums<S> multiply_normed(Ring& ring, Lot<S>& lot, const Block& b, Squares& squares) {
    if (S::row_warps > 1) add_squares(b, squares);
    vector_ready<S>();
    const Sums<S> s = multiply<S>(ring, lot, b.shared + kShXa, kStrideA);
    if (S::row_warps == 1) add_squares(b, squares);
    return s;
}

// The first page of the first column, asked for before its query is known.
KIE_DEVICE void early_page(const DecodeArgs& args, const Block& b, int layer,
                           const u32 (&position)[kColumns], Held& held) {
    const int kv_head = b.rank / kSplitBlocks, split = b.rank % kSplitBlocks;
    const PageSpan span = pages_of(layer, (int)position[0]);
    const int page = first_page(span, split, 0);
    if (split < kSplitsMax && page <= span.last)
        hold(held, page_at(args, b.shared, layer, b.lane_index * kKvHeads + kv_head, 0, page));
}
// The page tables into shared memory: a look-up stands before every key.
KIE_DEVICE void take_tables(const DecodeArgs& args, u8* shared) {
    u32* table = (u32*)(shared + kShTable);
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) for (int p = thread();
                                                       p < (int)args.pages_max && p < kPagesMax;
                                                       p += kThreads + kWarp)
        table[c * kPagesMax + p] = args.pages[c * args.pages_max + p];
}

KIE_DEVICE void step_qkv(Ring& ring, const DecodeArgs& args, Block& b, int layer,
                         const u32 (&position)[kColumns], Held& held, Lot<SplitQkv>& lot,
                         Squares& squares) {
    Sums<SplitQkv> s = multiply_normed<SplitQkv>(ring, lot, b, squares);
    stamp(b, 1);
    early_page(args, b, layer, position, held);
    u64* to = args.words + kAtQkv + ((long)layer * kLanes + b.lane_index) * kVecQ +
              b.rank * (kRowsQkv / 2);
    finish<SplitQkv>(
        s, (float*)(b.shared + kShPartA),
        [&](int item, int pair, int column, float v0, float v1, bool live, bool lead) {
            const float scale = rms_scale(b, live ? column : 0);
            const u64 turn = ((const u64*)(b.shared + kShTurn))[item * kThreads + thread()];
            const float c = number((u32)turn) * scale, d = number((u32)(turn >> 32)) * scale;
            if (live && lead)
                publish(to + (long)column * (kQkv / 2) + pair,
                        pack_half2(v0 * c - v1 * d, v0 * d + v1 * c), b.epoch);
        });
    stamp(b, 2);
}
// Rotation of each row pair that this thread will own, for the step's positions; the identity for
// v. Each thread keeps its own in shared memory. q also takes the softmax's 1 / sqrt(head_dim) and
// log2 e.
KIE_DEVICE void rotations(const DecodeArgs& args, const Block& b, const u32 (&position)[kColumns]) {
    each_item<SplitQkv>([&](int item, int pair, int column, bool live) {
        const int row = b.rank * kRowsQkv + 2 * pair;
        float c = 1, s = 0;
        if (live && row < kAttn + kKvHeads * kHeadDim) {
            const float* r =
                args.rope + ((long)position[column] * (kHeadDim / 2) + row % kHeadDim / 2) * 2;
            c = r[0], s = r[1];
            if (row < kAttn) {
                const float f = 1.44269504f * rsqrt_f((float)kHeadDim);
                c *= f, s *= f;
            }
        }
        ((u64*)(b.shared + kShTurn))[item * kThreads + thread()] = (u64)bits(s) << 32 | bits(c);
    });
}

// Residual rows: h += own (+ the other lanes' sums of kDelay layers ago), then publish both.
struct Owned {
    float v[SplitO::items][2];
};
constexpr bool kQuad = SplitO::k_warps == 1 && kColumns == 1;  // four lanes hold the same result
constexpr int kOthers = kLanes == 1 ? 1 : kQuad ? (kLanes + 3) / 4 : kLanes;
struct Others {
    u64 v[SplitO::items][kOthers];
};
KIE_DEVICE int other_lane(int i) { return kQuad ? (int)lane() % 4 + 4 * i : i; }
template <bool kAgain, class S>
KIE_DEVICE void take_others(Watch& watch, const DecodeArgs& args, const Block& b, int kind,
                            int layer, int item, int pair, int column, bool live, Others& o) {
    KIE_UNROLL for (int i = 0; i < kOthers; ++i) {
        const int from = other_lane(i);
        if (!live || from >= kLanes || from == b.lane_index) continue;
        const u64* p = other_slot(args, kind, layer - kDelay, from) + (long)column * (kHidden / 2) +
                       b.rank * (kRowsO / 2) + pair;
        if (!kAgain) {
            o.v[item][i] = load_word(p);
        } else {
            watch.polls = 0;
            while (!kNoWaits && epoch_of(o.v[item][i]) != b.epoch &&
                   patient(watch, layer << 4 | 3, b.epoch, epoch_of(o.v[item][i])))
                o.v[item][i] = load_word(p);
        }
    }
}
template <class S>
KIE_DEVICE void early_others(Watch& watch, const DecodeArgs& args, const Block& b, int kind,
                             int layer, Others& o) {
    if (kLanes == 1 || layer < kDelay) return;
    each_item<S>([&](int item, int pair, int column, bool live) {
        take_others<false, S>(watch, args, b, kind, layer, item, pair, column, live, o);
    });
}
template <class S>
KIE_DEVICE void step_residual(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b, int kind,
                              int layer, Owned& own, int phase, Lot<S>& lot) {
    Others others;
    early_others<S>(watch, args, b, kind, layer, others);
    vector_ready<S>();
    Sums<S> s = multiply<S>(ring, lot, b.shared + kShXb, kStrideB);
    stamp(b, phase);
    const float keep = kLanes > 1 && layer < kDelay ? 2.82842712f : 1.0f;  // sqrt(lanes), 8 of them
    static_assert(kLanes == 1 || kLanes == 8, "early factor");
    u64* to = hidden_slot(args, kind, layer, b.lane_index) + b.rank * (kRowsO / 2);
    u64* share = other_slot(args, kind, layer, b.lane_index) + b.rank * (kRowsO / 2);
    finish<S>(s, (float*)(b.shared + kShPartB),
              [&](int item, int pair, int column, float v0, float v1, bool live, bool lead) {
                  float a0 = 0, a1 = 0;
                  if (kLanes > 1 && layer >= kDelay) {
                      take_others<true, S>(watch, args, b, kind, layer, item, pair, column, live,
                                           others);
                      KIE_UNROLL for (int i = 0; i < kOthers; ++i) {
                          const int from = other_lane(i);
                          if (!live || from >= kLanes || from == b.lane_index) continue;
                          float x0, x1;
                          unpack_half2((u32)others.v[item][i], x0, x1);
                          a0 += x0, a1 += x1;
                      }
                      if (kQuad) {
                          a0 += shuffle_xor(a0, 1), a1 += shuffle_xor(a1, 1);
                          a0 += shuffle_xor(a0, 2), a1 += shuffle_xor(a1, 2);
                      }
                  }
                  own.v[item][0] += keep * v0 + a0, own.v[item][1] += keep * v1 + a1;
                  if (live && lead) {
                      const long at = (long)column * (kHidden / 2) + pair;
                      publish(to + at, pack_half2(own.v[item][0], own.v[item][1]), b.epoch);
                      if (kLanes > 1 && layer + kDelay < kLayers)
                          publish(share + at, pack_half2(v0, v1), b.epoch);
                  }
              });
    stamp(b, phase + 1);
}

KIE_DEVICE void step_gate_up(Ring& ring, const DecodeArgs& args, Block& b, int layer,
                             Lot<SplitGu>& lot, Squares& squares) {
    Sums<SplitGu> s = multiply_normed<SplitGu>(ring, lot, b, squares);
    stamp(b, 8);
    u64* to = args.words + kAtAct + ((long)layer * kLanes + b.lane_index) * kVecF +
              b.rank * (kRowsGu / 4);
    finish<SplitGu>(
        s, (float*)(b.shared + kShPartA),
        [&](int, int pair, int column, float v0, float v1, bool live, bool lead) {
            const float scale = rms_scale(b, live ? column : 0), gate = v0 * scale, up = v1 * scale;
            const float y = gate * up * reciprocal_f(1.0f + exp2_f(-1.44269504f * gate));
            const float next = shuffle_xor(y, neighbour<SplitGu>());
            if (live && lead && pair % 2 == 0)
                publish(to + (long)column * (kFfn / 2) + pair / 2, pack_half2(y, next), b.epoch);
        });
    stamp(b, 9);
}

// Best logit so far of one column, held by the thread that owns rows of it.
struct Pick {
    float best[2];
    u32 id[2];
};
KIE_DEVICE bool better(float a, u32 ia, float b, u32 ib) { return a > b || (a == b && ia < ib); }
template <class S>
KIE_DEVICE void step_head(const DecodeArgs& args, Block& b, Sums<S>& s, int row, u32 step,
                          Pick& pick) {
    finish<S>(
        s, (float*)(b.shared + kShPartA),
        [&](int item, int pair, int column, float v0, float v1, bool live, bool) {
            const float scale = rms_scale(b, live ? column : 0);
            const int local = b.rank * kRowsHead + row + 2 * pair, c = kColumns == 1 ? 0 : item & 1;
            KIE_UNROLL for (int i = 0; i < 2; ++i) {
                if (!live || local + i >= kVocab) continue;
                const float v = (i ? v1 : v0) * scale;
                const u32 id = b.lane_index * kVocab + local + i;
                if (args.logits && step < args.dump_steps)
                    args.logits[((long)step * kColumns + column) * (kLanes * kVocab) + id] = v;
                if (better(v, id, pick.best[c], pick.id[c])) pick.best[c] = v, pick.id[c] = id;
            }
        });
}

KIE_DEVICE void best_of_warp(float& v, u32& id) {
    KIE_UNROLL for (int m = 1; m < 32; m *= 2) {
        const float v2 = shuffle_xor(v, m);
        const u32 id2 = shuffle_xor(id, m);
        if (better(v2, id2, v, id)) v = v2, id = id2;
    }
}

// The step's one release and acquire: every block offers its best row, all choose the same token.
KIE_DEVICE void offer(const DecodeArgs& args, Block& b, Pick& pick) {
    const int warp = thread() / kWarp;
    u64* mine = (u64*)(b.shared + kShPick);  // [kWarps][kColumns]
    static_assert(kColumns == 1 || SplitHead::k_warps == 1, "columns of a thread in the head");
    static_assert(kColumns <= kWarps, "a warp chooses a column's token");
    KIE_UNROLL for (int c = 0; c < (kColumns == 1 ? 1 : 2); ++c) {
        float v = pick.best[c];
        u32 id = pick.id[c];
        KIE_UNROLL for (int m = kColumns == 1 ? 1 : 4; m < 32; m *= 2) {
            const float v2 = shuffle_xor(v, m);
            const u32 id2 = shuffle_xor(id, m);
            if (better(v2, id2, v, id)) v = v2, id = id2;
        }
        const int column = kColumns == 1 ? 0 : 2 * ((int)lane() % 4) + c;
        if (lane() < 4 && column < kColumns) mine[warp * kColumns + column] = word(bits(v), id);
    }
    sync_consumers<kThreads>();
    u64* offers = args.words + kAtPick;
    if (warp < kColumns) {  // one warp a column; a fence drains, so few do
        const int c = warp, my = lane();
        const u64 m = my < kWarps ? mine[my * kColumns + c] : word(bits(-1e30f), ~0u);
        float v = number((u32)m);
        u32 id = (u32)(m >> 32);
        best_of_warp(v, id);
        if (my == 0) {
            fence_device();
            u64* to = offers + ((long)block() * kColumns + c) * 2;
            publish(to, bits(v), b.epoch), publish(to + 1, id, b.epoch);
        }
        if (id < (u32)(kLanes * kVocab))  // should it win, its embedding is near
            for (int i = my; i < kHidden / 64; i += 32)
                prefetch(args.embed + (long)id * (kHidden / 2) + i * 32);
    }
}
KIE_DEVICE void accept(Watch& watch, const DecodeArgs& args, Block& b) {
    const int c = thread() / kWarp;
    const u64* offers = args.words + kAtPick;
    if (c < kColumns) {
        float v = -1e30f;
        u32 id = ~0u;
        constexpr int kEach = (kBlocks + 31) / 32;
        u64 x[kEach], y[kEach];
        sync_warp();
        watch.polls = 0;
        for (;;) {
            bool ok = true;
            KIE_UNROLL for (int i = 0; i < kEach; ++i) {
                const int from = 32 * i + (int)lane();
                if (from < kBlocks)
                    load_words(offers + ((long)from * kColumns + c) * 2, x[i], y[i]);
            }
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if (32 * i + (int)lane() < kBlocks) ok &=
                epoch_of(x[i]) == b.epoch && epoch_of(y[i]) == b.epoch;
            if (ok || kNoWaits || !patient(watch, 0xfff, b.epoch, epoch_of(x[0]))) break;
        }
        KIE_UNROLL for (int i = 0; i < kEach; ++i) if (32 * i + (int)lane() < kBlocks &&
                                                       better(number((u32)x[i]), (u32)y[i], v, id))
            v = number((u32)x[i]),
            id = (u32)y[i];
        best_of_warp(v, id);
        fence_device();
        if (lane() == 0) tokens_of(b)[c] = id < (u32)(kLanes * kVocab) ? id : 0;
    }
    sync_consumers<kThreads>();
}

// Whether this block had pages to attend to.
KIE_DEVICE bool attend_columns(Watch& watch, const DecodeArgs& args, Block& b, int layer,
                               const u32 (&position)[kColumns], Held& held) {
    const int kv_head = b.rank / kSplitBlocks, split = b.rank % kSplitBlocks;
    bool any = false;
    KIE_NO_UNROLL for (int c = 0; c < kColumns; ++c) {
        const PageSpan span = pages_of(layer, (int)position[c]);
        const int page = first_page(span, split, c);
        if (split >= kSplitsMax || page > span.last) continue;
        if (c > 0) {
            sync_consumers<kThreads>();
            hold(held, page_at(args, b.shared, layer, b.lane_index * kKvHeads + kv_head, c, page));
        }
        any = true;
        attend(watch, args, {layer, b.lane_index, kv_head, split, c}, span, b.epoch, held, page,
               b.shared);
    }
    stamp(b, 3);
    return any;
}
// The merged attention output, this warp's share of it, into shared memory.
KIE_DEVICE void gather_attention(Watch& watch, const DecodeArgs& args, Block& b, int layer,
                                 const u32 (&position)[kColumns], bool attended) {
    const int warp = thread() / kWarp;
    constexpr int kShare = kAttn / 2 / kWarps;
    const long unit = (long)layer * kLanes + b.lane_index;
    u32* x = (u32*)(b.shared + kShXb) + warp * kShare;
    constexpr int kPart = kAttn / 2 / kBlocksPerLane;
    u64* to = args.words + kAtAttn + unit * kVecA;
    KIE_NO_UNROLL for (int c = 0; c < kColumns; ++c) {
        const PageSpan span = pages_of(layer, (int)position[c]);
        if constexpr (kMerge == 0)
            merge<kShare>(watch, args, layer, b.lane_index, c, span, b.epoch, warp * kShare,
                          x + c * (kStrideB / 2), nullptr, attended || c > 0 ? 0 : kRestMerge);
        else if (warp == c % kWarps)
            merge<kPart>(watch, args, layer, b.lane_index, c, span, b.epoch, b.rank * kPart,
                         nullptr, to + (long)c * (kAttn / 2), attended ? 0 : kRestMerge);
    }
    if constexpr (kMerge == 1) {
        Squares none;
        gather<kShare, false>(watch, to + warp * kShare, kAttn / 2, b.epoch, layer << 4 | 4,
                              nullptr, x, kStrideB / 2, none.v);
    }
    stamp(b, 4);
}

KIE_DEVICE void decode_layer(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b, int layer,
                             const u32 (&position)[kColumns], Owned& own) {
    Held held;
    {
        Lot<SplitQkv> lot;
        take_lot<SplitQkv>(ring, lot, false);
        Squares squares =
            gather_normed(watch, args, b, hidden_slot(args, 1, layer - 1, b.lane_index), layer == 0,
                          2 * layer, layer << 4);
        stamp(b, 0);
        step_qkv(ring, args, b, layer, position, held, lot, squares);
    }
    if (layer == 0)
        KIE_UNROLL for (int i = 0; i < SplitO::items; ++i)
            unpack_half2(bits(own.v[i][0]), own.v[i][0], own.v[i][1]);
    {
        const bool attended = attend_columns(watch, args, b, layer, position, held);
        Lot<SplitO> lot;
        take_lot<SplitO>(ring, lot, false);
        gather_attention(watch, args, b, layer, position, attended);
        step_residual<SplitO>(ring, watch, args, b, 0, layer, own, 5, lot);
    }
    {
        Lot<SplitGu> lot;
        take_lot<SplitGu>(ring, lot, false);
        Squares squares = gather_normed(watch, args, b, hidden_slot(args, 0, layer, b.lane_index),
                                        false, 2 * layer + 1, layer << 4 | 5);
        stamp(b, 7);
        step_gate_up(ring, args, b, layer, lot, squares);
    }
    Lot<SplitDown> lot;
    take_lot<SplitDown>(ring, lot, false);
    constexpr int kShare = kFfn / 2 / kWarps;
    const int first = (int)(thread() / kWarp) * kShare;
    Squares none;
    gather<kShare, false>(
        watch, args.words + kAtAct + ((long)layer * kLanes + b.lane_index) * kVecF + first,
        kFfn / 2, b.epoch, layer << 4 | 6, nullptr, (u32*)(b.shared + kShXb) + first, kStrideB / 2,
        none.v);
    stamp(b, 10);
    step_residual<SplitDown>(ring, watch, args, b, 1, layer, own, 11, lot);
}

KIE_DEVICE void decode_step(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                            u32 (&position)[kColumns]) {
    Owned own;
    each_item<SplitO>([&](int item, int pair, int column, bool live) {
        own.v[item][0] = number(live ? args.embed[(long)tokens_of(b)[column] * (kHidden / 2) +
                                                  b.rank * (kRowsO / 2) + pair]
                                     : 0u);
    });
    KIE_NO_UNROLL for (int layer = 0; layer < kLayers; ++layer)
        decode_layer(ring, watch, args, b, layer, position, own);
    Pick pick = {{-1e30f, -1e30f}, {~0u, ~0u}};
    {
        Lot<SplitHead> lot;
        take_lot<SplitHead>(ring, lot, false);
        Squares squares =
            gather_normed(watch, args, b, hidden_slot(args, 1, kLayers - 1, b.lane_index), false,
                          2 * kLayers, 0xffe);
        stamp(b, 13);
        Sums<SplitHead> s = multiply_normed<SplitHead>(ring, lot, b, squares);
        step_head<SplitHead>(args, b, s, 0, watch.step, pick);
    }
    KIE_NO_UNROLL for (int p = 1; p < kHeadPasses; ++p) {
        if (SplitHead::k_warps > 1) sync_consumers<kThreads>();
        Lot<SplitHead> lot;
        take_lot<SplitHead>(ring, lot, false);
        Sums<SplitHead> s = multiply<SplitHead>(ring, lot, b.shared + kShXa, kStrideA);
        step_head<SplitHead>(args, b, s, p * kHeadPassRows, watch.step, pick);
    }
    if constexpr (kHeadTail > 0) {
        Lot<SplitTail> lot;
        take_lot<SplitTail>(ring, lot, false);
        Sums<SplitTail> s = multiply<SplitTail>(ring, lot, b.shared + kShXa, kStrideA);
        step_head<SplitTail>(args, b, s, kHeadPasses * kHeadPassRows, watch.step, pick);
    }
    stamp(b, 14);
    offer(args, b, pick);
    KIE_UNROLL for (int c = 0; c < kColumns; ++c)++ position[c];
    rotations(args, b, position);  // the next step's, while the offers travel
    accept(watch, args, b);
    stamp(b, 15);
}

KIE_KERNEL(kie_decode, kThreads + 32, DecodeArgs args) {
    KIE_SHARED_BYTES(shared);
    Slot* slots = (Slot*)(shared + kShSlots);
    volatile u32* stop = (volatile u32*)(shared + kShMisc);
    u64* trace = (u64*)(shared + kShTrace);
    if (thread() == 0) {
        for (int i = 0; i < kSlots; ++i) slot_init(slots + i, kWarps);
        slots_ready();
        *stop = 0;
        for (int c = 0; c < kColumns; ++c) ((u32*)(shared + kShMisc))[4 + c] = args.token[c];
        for (int i = 0; i < 16; ++i) trace[i] = 0;
    }
    take_tables(args, shared);
    sync_block();
    if (thread() / kWarp == kWarps) {
        if (lane() == 0)
            stream_weights(args, slots, shared + kShRing, (u32*)(shared + kShSizes), stop);
        return;
    }
    Ring ring = {slots, shared + kShRing, 0, 0};
    Watch watch = {args, 0, 0, 0, false};
    Block b = {(int)block() / kBlocksPerLane,
               (int)block() % kBlocksPerLane,
               shared,
               args.epoch,
               nullptr,
               0};
    if (thread() == 0 && args.trace) b.trace = trace, b.traced_at = clock_ticks();
    u32 position[kColumns];
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) position[c] = args.position[c];
    rotations(args, b, position);
    KIE_NO_UNROLL for (u32 step = 0; step < args.steps; ++step) {
        if (thread() == 0 && block() == 0) args.stamps[step] = clock_ns();
        watch.step = step;
        b.epoch = args.epoch + step;
        decode_step(ring, watch, args, b, position);
        if (watch.lost) *stop = 1;
        sync_consumers<kThreads>();  // the edge: see exchange.h
        if (*stop) break;
        if (block() == 0 && thread() == 0)
            KIE_UNROLL for (int c = 0; c < kColumns; ++c) args.tokens[step * kColumns + c] =
                tokens_of(b)[c];
    }
    if (thread() == 0 && block() == 0) args.stamps[args.steps] = clock_ns();
    if (b.trace)
        for (int i = 0; i < 16; ++i) args.trace[block() * 16 + i] = trace[i];
}
