// The prefill kernel: a persistent grid takes a chunk of positions through all layers, over the
// same streams of weights and the same pages that decoding uses. Per layer five phases (qkv,
// attention, o, gate/up, down; more for norms of heads and where lanes add each other's outputs of
// the same layer) with a grid barrier behind each; a phase is a list of equal tasks (128 rows x 256
// positions of a product), dealt out in turn. One team copies weights and activations into a ring
// of shared memory, two teams multiply 64 rows each. Every sum has one fixed order. Where no unit
// multiplies for a team, tiles are up to 192 rows x 128 positions (kAllNarrow, prefill/layout.h).
//
// Several ranks each run this over their own lanes. What a lane adds in a layer goes to all lanes
// that will want it, on every rank; behind such a phase the grids of all ranks meet.
#pragma once

#define KIE_PREFILL  // some platforms number threads for it

#include "platform.h"
#include "prefill/attend.h"
#include "prefill/feed.h"
#include "prefill/layout.h"
#include "prefill/phases.h"
#include "prefill/pipe.h"
#include "prefill/tasks.h"
#include "wide.h"

KIE_KERNEL(kie_prefill, kPrefillThreads, PrefillArgs args) {
    if (thread() == 0) {
        for (int i = 0; i < kStages; ++i)
            slot_init(stage_slot(i), kWorkers / kTeam, kTeamStages ? kCrew : 1);
        for (int i = 0; i < kPageBuffers; ++i) slot_init(page_slot(i), kWorkers / kTeam, 1);
        slots_ready();
        *stop_word() = *phase_word() = *passed_word() = *begun_word() = *asked_word() = 0;
        for (int i = 0; i < kCopiers; ++i) *seen_word(i) = *task_word(i) = 0;
        *ready_word() = 0, *limit_word() = ~0u;
    }
    sync_block();
    Pipe pipe = {0, 0, 0};
    if (thread() >= kWorkers) {
        fewer_registers<40>();
        pipe.parity = 1;
        if constexpr (kQueued)
            feed_tasks(args, pipe);
        else
            feed_all(args, pipe);
        drain();
    } else {
        more_registers<232>();
        if constexpr (kQueued)
            run_tasks(args, pipe);
        else
            work_all(args, pipe);
    }
}
