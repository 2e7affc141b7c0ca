// What the generated header (mono/lower/header.rs) leaves to say of the shape of a decode program:
// what its numbers mean, and how code finds a layer's class. All sizes are per lane unless they say
// otherwise, and padded with zeros to what the partition needs; `Real` is the model's own.
#pragma once

#include "args.h"
#include "lowered.h"
#include "platform.h"

// How the head combines lanes: the mean of their norms, the norm of their sum, a slice of the
// vocabulary from each lane, or a matrix over all of them side by side. With one lane all the same.
enum HeadMode { kHeadMean = 0, kHeadSum = 1, kHeadPerLane = 2, kHeadConcat = 3 };
// The lane, and the block, whose words are taken for those of another.
KIE_CONST_FN int heard_lane(int lane_all) { return kNoRanks ? lane_all % kLanes : lane_all; }
KIE_CONST_FN int heard_block(int block_all) { return kNoRanks ? block_all % kBlocks : block_all; }

KIE_CONST_FN int max_i(int a, int b) { return a > b ? a : b; }
KIE_CONST_FN int min_i(int a, int b) { return a < b ? a : b; }

// How the warps of a block share `rows` rows of `k` columns (a Tiling). A warp takes `tiles` tiles
// of 16 rows over a contiguous range of columns; the stream brings one stage after another, each
// with `chunk` units (32 columns of all rows) for every warp. A stage holds, for each k-warp, for
// each unit, for each row tile: 16 or 8 bytes a lane (codes, which are decoded in registers: ops/),
// or twice 16 (halves: two 16 x 16 tiles of 32 bytes a row). Rows missing from the last tile take
// no bytes. Behind the codes stand each k-warp's scales: runs of `span` units share one, and a
// block has `scale_rows` of them for its rows: one a row (`per_row`), or a byte a row, from
// `index_at` on, says which. A thread ends up with `items` results, each a (row pair, column).

// Where word `n` stands of a vector whose operands are taken from the words: see
// ops/matvec_words.h.
KIE_CONST_FN int direct_word(int n) { return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2; }

// What threads own of the residual is the same in all classes: rows of either product's results.
using TilingOwned = Class0::TilingO;

// visit(Class{}) with the class of a layer: `layers` is the table of them in shared memory.
template <class F>
KIE_DEVICE auto of_class(const u8* shared, int layer, F visit) {
    if constexpr (kClasses == 1) {
        return visit(Class0{});
    } else {
        const u32 kind = ((const Layer*)(shared + kShLayers))[layer].kind;
        if (kind == 0) return visit(Class0{});
        if constexpr (kClasses > 2) {
            if (kind == 1) return visit(Class1{});
        }
        if constexpr (kClasses > 3) {
            if (kind == 2) return visit(Class2{});
        }
        return visit(ClassLast{});
    }
}
// visit(Class{}) with each class.
template <class F>
KIE_DEVICE void each_class(F visit) {
    visit(Class0{});
    if constexpr (kClasses > 2) visit(Class1{});
    if constexpr (kClasses > 3) visit(Class2{});
    if constexpr (kClasses > 1) visit(ClassLast{});
}

static_assert(kWarps <= (int)kRecordsBlock && kWarps > 4, "a record a warp; attention");
static_assert(kSharedBytes <= kSharedMax && kRingBytes >= 2 * kSlotBytes, "no room for the ring");
