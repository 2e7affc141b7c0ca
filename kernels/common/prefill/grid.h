// The grid's barrier: arrivals are counted, a phase is over at blocks x its number. Several ranks'
// grids meet where one needs what others made.
#pragma once

#include "exchange.h"
#include "lowered.h"
#include "platform.h"
#include "prefill/layout.h"
#include "wide.h"

struct Phase {
    u32 done;
};
// By one thread. What others wrote before they arrived may be read afterwards.
KIE_DEVICE void await_phase(Watch& w, const PrefillArgs& args, const Phase& p) {
    const u64 wanted = (u64)p.done * args.blocks;
    w.polls = 0;
    for (u64 seen = load_word(args.arrivals); seen < wanted; seen = load_word(args.arrivals)) {
        if (wait_expired(w, 0x1000 | p.done % 5, (u32)wanted, (u32)seen)) break;
        pause_ns(40);
    }
    fence_device();
}
// All ranks' grids: the last block to arrive tells the other ranks, in their counters.
KIE_DEVICE u64* rank_counter(const PrefillArgs& args, int of, int at) {
    return (u64*)((u8*)(args.arrivals + kCountRanks + of) + args.peer_offset[at]);
}
KIE_DEVICE void await_ranks(Watch& w, const PrefillArgs& args, const Phase& p, u32 behind) {
    const int mine = args.model.rank;
    fence_system();
    if (count_in(args.arrivals) + 1 == (u64)p.done * args.blocks) {
        fence_system();
        KIE_UNROLL for (int r = 0; r < kRanks; ++r)
            store_word_system(rank_counter(args, mine, r), p.done);
    }
    KIE_NO_UNROLL for (int r = 0; r < kRanks; ++r) {
        const u64* word = rank_counter(args, r, mine);
        const u32 wanted = r == mine ? p.done : p.done - behind;
        w.polls = 0;
        for (u64 seen = load_word_system(word); seen < wanted; seen = load_word_system(word)) {
            if (wait_expired(w, 0x5000 | r, wanted, (u32)seen)) break;
            pause_ns(40);
        }
    }
    fence_system();
}
// By all workers, with their phase's writes behind them; `ranks`: those of all ranks, where others
// may be so many phases behind. False: somebody gave up.
KIE_DEVICE bool meet(Watch& w, const PrefillArgs& args, Phase& p, bool ranks = false,
                     u32 behind = 0) {
    ++p.done;
    writes_before_copies();
    writes_before_telling();
    sync_consumers<kWorkers>();
    if (thread() == 0) {
        if (kRanks > 1 && ranks) {
            await_ranks(w, args, p, behind);
        } else {
            fence_device();
            count_up(args.arrivals);
            await_phase(w, args, p);
        }
        if (w.timed_out)
            *stop_word() = 1;
        else
            *phase_word() = p.done;
    }
    sync_consumers<kWorkers>();
    return of_wave(*stop_word()) == 0;
}
