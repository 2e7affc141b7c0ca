// Slices of one lane on several ranks (tensor parallelism): each rank's o and down make a part of
// every sum. The sums of a group of eight places go to the rank that owns it; it alone adds them to
// the residual, in order of rank, and gives all ranks what the next product takes: each number is
// made once, so all ranks hold the same bits, and crosses the links once.
//
// A long chunk goes through in two halves, so that one is under way between ranks while the other
// is multiplied:
//
//     attend 0, o 0, attend 1 | mix 0, o 1, half of gate/up 0 | mix 1, the rest of gate/up 0,
//     down 0, half of gate/up 1 | mix 0, the rest of gate/up 1, down 1 | mix 1 | qkv of both
//
// What is behind a `|` needs what other ranks sent before it. Where something was sent long before,
// a block says so once its next item is multiplied: the fence would wait for stores under way.
#pragma once

enum SliceWork { kMultiply, kAttend, kNormHeads, kMix };
// What a step ends with: nothing, the grid meets, the grids of all ranks do, or a stream is waited
// for.
enum SliceEnd { kGoOn, kMeet, kMeetRanks, kAwait };
// What is sent meanwhile: 0 o's operand of the first half, 1 o's sums of the second, 2 their
// operand, 3 down's sums of the first half.
enum SliceStream { kNone = 7 };
enum SliceHalf { kFirst, kSecond, kBoth };
struct SliceStep {
    int work, which;  // a product; of kMix 0 o's sums, 1 down's
    int half, round;
    int told, end;  // the stream that is told of behind the first item; see SliceEnd
};
KIE_CONST_FN u32 pack_step(int work, int which, int half, int end, int round = kAllRounds,
                           int told = kNone) {
    return work | which << 2 | half << 4 | round << 6 | told << 8 | end << 11;
}
KIE_CONST_FN int steps_of(bool halves) { return (halves ? 15 : 7) + (kHeadNorm ? 1 : 0); }
KIE_DEVICE SliceStep step_at(bool halves, int n) {
    u32 v = pack_step(kNormHeads, 0, kBoth, kMeet);
    if (n == 0) {
        v = pack_step(kMultiply, kToQkv, kBoth, kMeet);
    } else if (!kHeadNorm || n > 1) {
        n -= kHeadNorm ? 1 : 0;
        if (halves) {
            // clang-format off
            switch (n) {
            case 1: v = pack_step(kAttend, 0, kFirst, kMeet); break;
            case 2: v = pack_step(kMultiply, kToO, kFirst, kGoOn); break;
            case 3: v = pack_step(kAttend, 0, kSecond, kMeetRanks); break;
            case 4: v = pack_step(kMix, 0, kFirst, kGoOn); break;
            case 5: v = pack_step(kMultiply, kToO, kSecond, kAwait + 0, kAllRounds, 0); break;
            case 6: v = pack_step(kMultiply, kToGateUp, kFirst, kAwait + 1, kFirstRound, 1); break;
            case 7: v = pack_step(kMix, 0, kSecond, kGoOn); break;
            case 8: v = pack_step(kMultiply, kToGateUp, kFirst, kMeet, kOtherRounds, 2); break;
            case 9: v = pack_step(kMultiply, kToDown, kFirst, kAwait + 2); break;
            case 10: v = pack_step(kMultiply, kToGateUp, kSecond, kAwait + 3, kFirstRound, 3); break;
            case 11: v = pack_step(kMix, 1, kFirst, kGoOn); break;
            case 12: v = pack_step(kMultiply, kToGateUp, kSecond, kMeet, kOtherRounds); break;
            case 13: v = pack_step(kMultiply, kToDown, kSecond, kMeetRanks); break;
            default: v = pack_step(kMix, 1, kSecond, kMeetRanks);
            }
            // clang-format on
        } else {
            switch (n) {
                case 1:
                    v = pack_step(kAttend, 0, kBoth, kMeet);
                    break;
                case 2:
                    v = pack_step(kMultiply, kToO, kBoth, kMeetRanks);
                    break;
                case 3:
                    v = pack_step(kMix, 0, kBoth, kMeetRanks);
                    break;
                case 4:
                    v = pack_step(kMultiply, kToGateUp, kBoth, kMeet);
                    break;
                case 5:
                    v = pack_step(kMultiply, kToDown, kBoth, kMeetRanks);
                    break;
                default:
                    v = pack_step(kMix, 1, kBoth, kMeetRanks);
            }
        }
    }
    return {(int)(v & 3),      (int)(v >> 2 & 3), (int)(v >> 4 & 3),
            (int)(v >> 6 & 3), (int)(v >> 8 & 7), (int)(v >> 11)};
}
KIE_DEVICE Span span_of(const Chunk& c, int half) {
    return {half == kSecond ? c.middle : 0, half == kFirst ? c.middle : c.to};
}

// The streams: what blocks have sent is counted here, and the last one tells all ranks. `turn`:
// how often this stream has been told of, this time included.
KIE_DEVICE u64* stream_counter(const PrefillArgs& args, int stream) {
    return args.arrivals + kCountStreams + stream * kStreamWords;
}
KIE_DEVICE u64* stream_word(const PrefillArgs& args, int stream, int of, int at) {
    return (u64*)((u8*)(stream_counter(args, stream) + 16 + of) + args.hops[at]);
}
// By one thread, behind a barrier of the workers that have sent.
KIE_DEVICE void tell_stream(const PrefillArgs& args, int stream, u32 turn) {
    fence_system();
    if (count_in(stream_counter(args, stream)) + 1 != (u64)turn * args.blocks) return;
    fence_system();
    KIE_UNROLL for (int r = 0; r < kRanks; ++r)
        store_word_system(stream_word(args, stream, args.model.rank, r), turn);
}
KIE_DEVICE void await_stream(Watch& w, const PrefillArgs& args, int stream, u32 turn) {
    KIE_NO_UNROLL for (int r = 0; r < kRanks; ++r) {
        const u64* word = stream_word(args, stream, r, args.model.rank);
        w.polls = 0;
        for (u64 seen = load_word_system(word); seen < turn; seen = load_word_system(word)) {
            if (!patient(w, 0x6000 | stream << 4 | r, turn, (u32)seen)) break;
            pause_ns(40);
        }
    }
    fence_system();
}
KIE_DEVICE bool end_step(Watch& w, const PrefillArgs& args, Phase& p, int end, u32 turn) {
    if (end == kGoOn) return true;
    if (end == kMeet || end == kMeetRanks) return meet(w, args, p, end == kMeetRanks);
    ++p.done, ++p.apart;
    sync_consumers<kWorkers>();
    if (thread() == 0) {
        await_stream(w, args, end - kAwait, turn);
        if (w.lost)
            *stop_word() = 1;
        else
            *phase_word() = p.done;
    }
    sync_consumers<kWorkers>();
    return *stop_word() == 0;
}

// The same of slices of one lane (tensor parallelism): who owns a group of eight places adds all
// ranks' sums to its residual, which is nowhere else, and gives every rank what the next product
// takes. A warp takes 64 rows of a group at a time: a thread four pairs of rows of one place, which
// stand together in the operand.
KIE_DEVICE void mix_places(const PrefillArgs& args, const Span& span, int kind, int layer) {
    const int my = lane(), q = my / 8, p = my % 8, e = p % 2, warps = kWorkers / kTeam;
    // Of the span's groups this rank has one in kRanks.
    const int from = span.first / 8,
              first = from + (int)(args.model.rank + kRanks - from % kRanks) % kRanks,
              own = over(max_i(over(span.to, 8) - first, 0), kRanks);
    const u32* norms = args.model.norms + (long)(2 * layer + 1 + kind) * (kHidden / 2);
    KIE_NO_UNROLL for (int i = block() * warps + thread() / kTeam; i < kFours * own;
                       i += args.blocks * warps) {
        const int four = i / own, eight = first + i % own * kRanks;
        float square = 0;
        KIE_UNROLL for (int b = 0; b < 2; ++b) {
            const int c = 64 * four + 32 * b;
            if (c >= kHidden) continue;
            u64 v[4][kRanks];
            float *residual[4], old[4][2];
            u32 norm[4];
            KIE_UNROLL for (int n = 0; n < 4; ++n) {
                const int row = c + 8 * n + 2 * q, in = row % SplitO::rows;
                const int frag = row / SplitO::rows * SplitO::tiles_all + in / 16;
                const long at = ((long)frag * kEights + eight) * 32 + in % 16 / 2 * 4 + p / 2;
                KIE_UNROLL for (int r = 0; r < kRanks; ++r) v[n][r] =
                    past_at(args, kind, layer, r)[at];
                residual[n] = (float*)(old_at(args, 0) + at) + e;
                old[n][0] = residual[n][0], old[n][1] = residual[n][2];
                norm[n] = norms[c / 2 + 4 * n + q];
            }
            Quad x;
            KIE_UNROLL for (int n = 0; n < 4; ++n) {
                float sum[2] = {0, 0}, n0, n1;
                KIE_UNROLL for (int r = 0; r < kRanks; ++r) {
                    float a[2], b[2];
                    unpack_half2((u32)v[n][r], a[0], a[1]);
                    unpack_half2((u32)(v[n][r] >> 32), b[0], b[1]);
                    sum[0] += e ? a[1] : a[0], sum[1] += e ? b[1] : b[0];
                }
                sum[0] += old[n][0], sum[1] += old[n][1];
                residual[n][0] = sum[0], residual[n][2] = sum[1];
                square += sum[0] * sum[0] + sum[1] * sum[1];
                unpack_half2(norm[n], n0, n1);
                x.v[n] = pack_half2(sum[0] * n0, sum[1] * n1);
            }
            u8* to = args.scratch + kScrX + ((long)(c / 32) * kEights + eight) * kCores + q * 128 +
                     p * 16;
            KIE_UNROLL for (int r = 0; r < kRanks; ++r) store_state(to + args.hops[r], x);
        }
        square += shuffle_xor(square, 8), square += shuffle_xor(square, 16);
        u8* to = args.scratch + kScrSquares + ((long)four * kChunk + 8 * eight + p) * 4;
        KIE_NO_UNROLL for (int r = q; r < kRanks; r += 4) * (float*)(to + args.hops[r]) = square;
    }
    writes_before_copies();
}

KIE_DEVICE void work_slices(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    Phase phase = {0, 0};
    Clock clock = {args.model.trace, 0};
    const int chunks = chunks_of(args);
    u32 turn = 0;
    tick(clock, -1);
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        const bool halves = chunk.middle > 0;
        if (args.from == 0) embed_chunk(args, chunk);
        if (!meet(watch, args, phase)) return;
        tick(clock, 31);
        KIE_NO_UNROLL for (int layer = args.from; layer < (int)args.to; ++layer) {
            watch.step = layer;
            turn += halves;
            KIE_NO_UNROLL for (int n = 0; n < steps_of(halves); ++n) {
                const SliceStep s = step_at(halves, n);
                const Span span = span_of(chunk, s.half);
                if (s.work == kMultiply) {
                    int told = s.told;
                    const auto tell = [&]() {
                        if (told == kNone) return;
                        if (thread() == 0) tell_stream(args, told, turn);
                        told = kNone;
                    };
                    product_phase(args, pipe, chunk, span, s.which, layer, (Round)s.round, tell);
                    if (told != kNone) sync_consumers<kWorkers>();
                    tell();
                } else if (s.work == kAttend) {
                    attend_chunk(args, chunk, span, layer, pages);
                } else if (s.work == kMix) {
                    mix_places(args, span, s.which, layer);
                } else {
                    norm_heads(args, chunk, layer);
                }
                tick(clock, 2 * n);
                if (!end_step(watch, args, phase, s.end, turn)) return;
                tick(clock, 2 * n + 1);
            }
        }
        if (args.model.epoch != 0 && c + 1 == chunks) put_last(args, chunk);
    }
}

KIE_DEVICE bool feed_slice(Watch& w, const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                           const SliceStep& s, int layer) {
    const Span span = span_of(chunk, s.half);
    const Round round = (Round)s.round;
    const u8* x = args.scratch;
    long at = layer * kLayerBytes;
    if (s.which == kToQkv)
        return feed<SplitQkv>(w, args, pipe, chunk, span, kToQkv, layer, at, x + kScrX, round);
    at += product_bytes<SplitQkv>();
    if (s.which == kToO)
        return feed<SplitO>(w, args, pipe, chunk, span, kToO, layer, at, x + kScrAttn, round);
    at += product_bytes<SplitO>();
    if (s.which == kToGateUp)
        return feed<SplitGu>(w, args, pipe, chunk, span, kToGateUp, layer, at, x + kScrX, round);
    at += product_bytes<SplitGu>();
    return feed<SplitDown>(w, args, pipe, chunk, span, kToDown, layer, at, x + kScrAct, round);
}
// Pages follow a product's stages, which the block has not met since.
KIE_DEVICE bool await_ring(Watch& w, const Pipe& pipe, u32 layer) {
    Pipe at = pipe;
    KIE_NO_UNROLL for (int i = 0; i < kStages; ++i) {
        if (!await_free(w, at, 0x2009, layer)) return false;
        forward(at);
    }
    return true;
}
KIE_DEVICE void feed_slices(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    Phase phase = {0, 0};
    const int chunks = chunks_of(args);
    u32 behind = 0;  // phases since the last that was waited for
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        const bool halves = chunk.middle > 0;
        ++behind;
        KIE_NO_UNROLL for (int layer = args.from; layer < (int)args.to; ++layer) {
            watch.step = layer;
            KIE_NO_UNROLL for (int n = 0; n < steps_of(halves); ++n) {
                const SliceStep s = step_at(halves, n);
                if (s.work == kMultiply || s.work == kAttend) {
                    // Pages take the ring that stages do.
                    const bool all = s.work == kAttend || s.which == kToO;
                    if (!await_feed(watch, args, phase, behind, all)) return;
                    behind = 0;
                    if (s.work == kAttend && s.half == kSecond && !await_ring(watch, pipe, layer))
                        return;
                    const bool fed =
                        s.work == kMultiply
                            ? feed_slice(watch, args, pipe, chunk, s, layer)
                            : feed_pages(watch, args, pages, chunk, span_of(chunk, s.half), layer);
                    if (!fed) return;
                }
                behind += s.end != kGoOn;
            }
        }
    }
    await_feed(watch, args, phase, behind, true);  // workers' waits look at `stop`, not the clock
}

KIE_KERNEL(kie_prefill, kPrefillThreads, PrefillArgs args) {
    if (thread() == 0) {
        for (int i = 0; i < kStages; ++i) slot_init(stage_slot(i), kWorkers / kTeam);
        for (int i = 0; i < kPageBuffers; ++i) slot_init(page_slot(i), kWorkers / kTeam / kEach);
        slots_ready();
        *stop_word() = *phase_word() = *passed_word() = 0;
    }
    sync_block();
    Pipe pipe = {0, 0, 0};
    if (thread() >= kWorkers) {
        fewer_registers<40>();
        pipe.parity = 1;
        if constexpr (kSliced)
            feed_slices(args, pipe);
        else
            feed_all(args, pipe);
        drain();
    } else {
        more_registers<232>();
        if constexpr (kSliced)
            work_slices(args, pipe);
        else
            work_all(args, pipe);
    }
}
