// Which block of the work a block of the grid is. Machines whose multiprocessors lie on several
// dies (chiplets), each with a second-level cache of its own, hand the grid's blocks to the dies in
// turn. The work's blocks are numbered die by die instead, so that the blocks of a lane, which
// exchange most, share a cache. With one die both numbers are the same.
#pragma once

#include "platform.h"

#ifndef KIE_CHIPLETS
#define KIE_CHIPLETS 1
#endif

KIE_DEVICE u32 block() {
    const u32 at = grid_block();
#if KIE_CHIPLETS > 1
    constexpr u32 kDies = KIE_CHIPLETS, kEach = KIE_BLOCKS / kDies, kMore = KIE_BLOCKS % kDies;
    const u32 die = at % kDies;
    return die * kEach + (die < kMore ? die : kMore) + at / kDies;
#else
    return at;
#endif
}
