// Slices of one lane on several ranks (tensor parallelism): each rank's o and down make a part of
// every sum. The sums of a group of eight places go to the rank that owns it; it alone adds them to
// the residual, in order of rank, and gives all ranks what the next product takes: each number is
// made once, so all ranks hold the same bits, and crosses the links once.
//
// Of a long chunk, gate and up begin with as many places as give each block one item: theirs are
// sent first, and the others are under way meanwhile. Of a longer one, down takes the first half
// before gate and up take the second, so that its sums are under way meanwhile, too.
#pragma once

enum SliceWork { kMultiply, kAttend, kNormHeads, kMix };
// What a step ends with: nothing, the grid meets, the grids of all ranks do, or what a stream tells
// of is waited for.
enum SliceEnd { kGoOn, kMeet, kMeetRanks, kAwait };
// What is told of: what gate and up take of the places that they begin with and of the others,
// down's sums of the first half.
enum SliceStream { kOfBegun, kOfOthers, kOfSums, kOfNone };
enum SlicePlaces { kAllPlaces, kBegun, kNotBegun, kFirstHalf, kRestOfFirst, kSecondHalf };
struct SliceStep {
    int work, which;  // a product; of kMix 0 o's sums, 1 down's
    int places, end;
    int told;  // the stream that is told of behind the first item, or behind the mixing
};
KIE_CONST_FN u32 pack_step(int work, int which, int places, int end, int told = kOfNone) {
    return work | which << 2 | places << 4 | told << 7 | end << 9;
}
KIE_CONST_FN int steps_of(const Chunk& c) {
    return (c.middle > 0 ? 12 : c.begun > 0 ? 9 : 7) + (kHeadNorm ? 1 : 0);
}
KIE_DEVICE u32 packed_step(const Chunk& c, int n) {
    if (n == 0) return pack_step(kMultiply, kToQkv, kAllPlaces, kMeet);
    if (kHeadNorm && n == 1) return pack_step(kNormHeads, 0, kAllPlaces, kMeet);
    n -= kHeadNorm ? 1 : 0;
    if (n == 1) return pack_step(kAttend, 0, kAllPlaces, kMeet);
    if (n == 2) return pack_step(kMultiply, kToO, kAllPlaces, kMeetRanks);
    if (c.begun == 0) {
        if (n == 3) return pack_step(kMix, 0, kAllPlaces, kMeetRanks);
        if (n == 4) return pack_step(kMultiply, kToGateUp, kAllPlaces, kMeet);
        n += 2;
    }
    if (n == 3) return pack_step(kMix, 0, kBegun, kGoOn, kOfBegun);
    if (n == 4) return pack_step(kMix, 0, kNotBegun, kAwait + kOfBegun);
    if (n == 5) return pack_step(kMultiply, kToGateUp, kBegun, kAwait + kOfOthers, kOfOthers);
    if (c.middle == 0) {
        if (n == 6) return pack_step(kMultiply, kToGateUp, kNotBegun, kMeet);
        if (n == 7) return pack_step(kMultiply, kToDown, kAllPlaces, kMeetRanks);
        return pack_step(kMix, 1, kAllPlaces, kMeetRanks);
    }
    if (n == 6) return pack_step(kMultiply, kToGateUp, kRestOfFirst, kMeet);
    if (n == 7) return pack_step(kMultiply, kToDown, kFirstHalf, kGoOn);
    if (n == 8) return pack_step(kMultiply, kToGateUp, kSecondHalf, kAwait + kOfSums, kOfSums);
    if (n == 9) return pack_step(kMix, 1, kFirstHalf, kMeet);
    if (n == 10) return pack_step(kMultiply, kToDown, kSecondHalf, kMeetRanks);
    return pack_step(kMix, 1, kSecondHalf, kMeetRanks);
}
KIE_DEVICE SliceStep step_at(const Chunk& c, int n) {
    const u32 v = packed_step(c, n);
    return {(int)(v & 3), (int)(v >> 2 & 3), (int)(v >> 4 & 7), (int)(v >> 9), (int)(v >> 7 & 3)};
}
KIE_DEVICE Span span_of(const Chunk& c, int places) {
    const int first = places == kNotBegun || places == kRestOfFirst ? c.begun
                      : places == kSecondHalf                       ? c.middle
                                                                    : 0,
              to = places == kBegun                                 ? c.begun
                   : places == kFirstHalf || places == kRestOfFirst ? c.middle
                                                                    : c.to;
    return {first, to};
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
// What the block has sent is where it belongs, and all ranks hear of it once all blocks have said
// so. By all workers. The fence is quick where what was stored has had time to arrive.
KIE_DEVICE void tell(const PrefillArgs& args, int stream, u32 turn) {
    push_done();
    sync_consumers<kWorkers>();
    if (thread() == 0) tell_stream(args, stream, turn);
}
KIE_DEVICE bool end_step(Watch& w, const PrefillArgs& args, Phase& p, int end, u32 turn) {
    if (end == kGoOn) return true;
    if (end == kMeetRanks) push_done();
    if (end < kAwait) return meet(w, args, p, end == kMeetRanks);
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

// The owner's part. A warp takes 64 rows of a group of eight places at a time: a thread four pairs
// of rows of one place from each 32, which stand together in the operand. They go to the ranks from
// shared memory, so that nobody waits for the links.
struct Mixed {
    u64 sums[4][kRanks];
    int at[4];  // of the residual, in floats
    float old[4][2];
    u32 norm[4];
};
KIE_DEVICE void take_mixed(const PrefillArgs& args, const u32* norms, int kind, int layer, int c,
                           int eight, Mixed& m) {
    const int q = (int)lane() / 8, p = (int)lane() % 8;
    KIE_UNROLL for (int n = 0; n < 4; ++n) {
        const int row = c + 8 * n + 2 * q, in = row % SplitO::rows;
        const int frag = row / SplitO::rows * SplitO::tiles_all + in / 16;
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
KIE_DEVICE Quad add_mixed(const PrefillArgs& args, const Mixed& m, float& square) {
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
KIE_DEVICE void mix_places(const PrefillArgs& args, const Span& span, int kind, int layer) {
    const int my = lane(), warp = thread() / kTeam, warps = kWorkers / kTeam;
    const u32* norms = args.model.norms + (long)(2 * layer + 1 + kind) * (kHidden / 2);
    u8* slots = prefill_shared() + kPfTold + warp * (kPushSlots * kPushBytes);
    // Of the span's groups this rank has one in kRanks.
    const int from = span.first / 8,
              first = from + (int)(args.model.rank + kRanks - from % kRanks) % kRanks,
              own = over(max_i(over(span.to, 8) - first, 0), kRanks);
    int slot = 0;
    KIE_NO_UNROLL for (int i = block() * warps + warp; i < kFours * own; i += args.blocks * warps) {
        const int four = i / own, eight = first + i % own * kRanks, c = 64 * four;
        float square = 0;  // none of rows beyond the matrix, of which there may be squares, too
        if (c < kHidden) {
            const bool whole = c + 32 < kHidden;
            Mixed a, b;
            take_mixed(args, norms, kind, layer, c, eight, a);
            if (whole) take_mixed(args, norms, kind, layer, c + 32, eight, b);
            push_read<kPushSlots - 1>();  // this slot's last bytes are gone
            sync_warp();
            u8* here = slots + slot * kPushBytes;
            slot = slot + 1 < kPushSlots ? slot + 1 : 0;
            ((Quad*)here)[my] = add_mixed(args, a, square);
            if (whole) ((Quad*)here)[32 + my] = add_mixed(args, b, square);
            writes_before_tiles();
            sync_warp();
            if (my < kRanks) {  // a thread a rank
                const long at = kScrX + ((long)(c / 32) * kEights + eight) * kCores;
                u8* to = args.scratch + at + args.hops[my];
                push_copy(to, here, kCores);
                if (whole) push_copy(to + kEights * kCores, here + kCores, kCores);
            }
            push_commit();
        }
        square += shuffle_xor(square, 8), square += shuffle_xor(square, 16);
        u8* to = args.scratch + kScrSquares + ((long)four * kChunk + 8 * eight + my % 8) * 4;
        KIE_NO_UNROLL for (int r = my / 8; r < kRanks; r += 4) {
            float* there = (float*)(to + args.hops[r]);
            *there = square;
        }
    }
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
        if (args.from == 0) embed_chunk(args, chunk);
        if (!meet(watch, args, phase)) return;
        tick(clock, 31);
        KIE_NO_UNROLL for (int layer = args.from; layer < (int)args.to; ++layer) {
            watch.step = layer;
            turn += chunk.begun > 0;
            KIE_NO_UNROLL for (int n = 0; n < steps_of(chunk); ++n) {
                const SliceStep s = step_at(chunk, n);
                const Span span = span_of(chunk, s.places);
                int told = s.told;
                const auto tell_once = [&]() {
                    if (told != kOfNone) tell(args, told, turn);
                    told = kOfNone;
                };
                if (s.work == kMultiply) {
                    product_phase(args, pipe, chunk, span, s.which, layer, tell_once);
                } else if (s.work == kAttend) {
                    attend_chunk(args, chunk, span, layer, pages);
                } else if (s.work == kMix) {
                    mix_places(args, span, s.which, layer);
                } else {
                    norm_heads(args, chunk, layer);
                }
                tell_once();
                tick(clock, 2 * n);
                if (!end_step(watch, args, phase, s.end, turn)) return;
                tick(clock, 2 * n + 1);
            }
        }
        if (args.model.epoch != 0 && c + 1 == chunks) put_last(args, chunk);
    }
}

KIE_DEVICE bool feed_slice(Watch& w, const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                           const Span& span, int product, int layer) {
    const u8* x = args.scratch;
    long at = layer * kLayerBytes;
    if (product == kToQkv)
        return feed<SplitQkv>(w, args, pipe, chunk, span, kToQkv, layer, at, x + kScrX);
    at += product_bytes<SplitQkv>();
    if (product == kToO)
        return feed<SplitO>(w, args, pipe, chunk, span, kToO, layer, at, x + kScrAttn);
    at += product_bytes<SplitO>();
    if (product == kToGateUp)
        return feed<SplitGu>(w, args, pipe, chunk, span, kToGateUp, layer, at, x + kScrX);
    at += product_bytes<SplitGu>();
    return feed<SplitDown>(w, args, pipe, chunk, span, kToDown, layer, at, x + kScrAct);
}
KIE_DEVICE void feed_slices(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    Phase phase = {0, 0};
    const int chunks = chunks_of(args);
    u32 behind = 0;  // phases since the last that was waited for
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        ++behind;
        KIE_NO_UNROLL for (int layer = args.from; layer < (int)args.to; ++layer) {
            watch.step = layer;
            KIE_NO_UNROLL for (int n = 0; n < steps_of(chunk); ++n) {
                const SliceStep s = step_at(chunk, n);
                const Span span = span_of(chunk, s.places);
                if (s.work == kMultiply || s.work == kAttend) {
                    // Pages take the ring that stages do.
                    const bool all = s.work == kAttend || s.which == kToO;
                    if (!await_feed(watch, args, phase, behind, all)) return;
                    behind = 0;
                    const bool fed =
                        s.work == kMultiply
                            ? feed_slice(watch, args, pipe, chunk, span, s.which, layer)
                            : feed_pages(watch, args, pages, chunk, span, layer);
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
        for (int part = 0; part < (int)kEach; ++part)
            for (int i = 0; i < kPageBuffers; ++i)
                slot_init(page_slot(i, part), kWorkers / kTeam / kEach);
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
