// Pages of keys and values. A page of one (layer, lane, kv head): 64 keys as rows, then the values
// transposed (feature x 64 positions): both are read as matrix fragments straight from memory.
// Page p of a column with shift s (block.h) belongs to split (p + s) % kSplitsMax for as long as a
// launch lasts, so only the block that wrote a key reads it again.
#pragma once

#include "args.h"
#include "block.h"
#include "lowered.h"
#include "platform.h"

struct PageSpan {
    int first, last, position;
};  // pages a query sees
KIE_DEVICE PageSpan pages_of(const Layer& layer, int position) {
    const int window = (int)layer.window;
    const int from = window > 0 && position >= window ? position - window + 1 : 0;
    return {from / kPage, position / kPage, position};
}
template <class C>
KIE_DEVICE int first_page(const PageSpan& s, int split, int shift) {
    const int r = (split + 64 * C::kSplitsMax - shift % C::kSplitsMax - s.first % C::kSplitsMax) %
                  C::kSplitsMax;
    return s.first + r;
}
// The pages of one sequence, layer, lane and kv head. Addresses are made anew where they are
// needed, rather than kept in registers.
struct Pages {
    int layer, kv_index, column;
};
// The layer's part of a column's page.
KIE_DEVICE u8* layer_page(const DecodeArgs& args, const u8* shared, int layer_index, int column,
                          int page) {
    const Layer& layer = ((const Layer*)(shared + kShLayers))[layer_index];
    const u32 entry = layer.pool * kPagesMax + page;
    const int whose = sequence_at(shared, column);
    u32 physical;
    if (kTableShared)
        physical = ((const u32*)(shared + kShTable))[whose * (kPools * kPagesMax) + entry];
    else
        physical = args.pages[(u64)args.column[whose].row * (kPools * kPagesMax) + entry];
    return args.pools[layer.pool] + (u64)physical * args.page_bytes[layer.pool] + layer.page_at;
}
// The same of another pool, where the layer's part begins `at` bytes behind a page's beginning.
template <int kPool>
KIE_DEVICE u8* pool_page(const DecodeArgs& args, const u8* shared, int column, int page, u32 at) {
    constexpr int kFirst = sizeof(DecodeArgs::pools) / sizeof(DecodeArgs::pools[0]);
    constexpr int kMore = kPool < kFirst ? 0 : kPool - kFirst, kHere = kPool < kFirst ? kPool : 0;
    const u32 entry = kPool * kPagesMax + page;
    const int whose = sequence_at(shared, column);
    u32 physical;
    if (kTableShared)
        physical = ((const u32*)(shared + kShTable))[whose * (kPools * kPagesMax) + entry];
    else
        physical = args.pages[(u64)args.column[whose].row * (kPools * kPagesMax) + entry];
    u8* pool = kPool < kFirst ? args.pools[kHere] : args.more_pools[kMore];
    const u32 bytes = kPool < kFirst ? args.page_bytes[kHere] : args.more_page_bytes[kMore];
    return pool + (u64)physical * bytes + at;
}
template <class C>
KIE_DEVICE u8* page_at(const DecodeArgs& args, const u8* shared, const Pages& at, int page) {
    return layer_page(args, shared, at.layer, at.column, page) + at.kv_index * (2 * C::kPageHalf);
}

// Before the page of the position at hand is read while its key and value are put there: readers
// take these from the words.
template <class C>
KIE_DEVICE void without_newest(const u8* page, int position) {
    const int slot = position % kPage;
    reads_without(0, page + slot * C::kHeadDim * 2, C::kHeadDim * 2, 0, 1);
    reads_without(1, page + C::kPageHalf + slot * 2, 2, kPage * 2, C::kHeadDim);
}
// Word `n` (a pair of features) of the key or value at hand into its page.
template <class C>
KIE_DEVICE void store_key(u8* page, int slot, int n, u32 v) {
    *(u32*)(page + (slot * C::kHalfHead + n) * 4) = v;
}
template <class C>
KIE_DEVICE void store_value(u8* page, int slot, int n, u32 v) {
    u16* values = (u16*)(page + C::kPageHalf) + 2 * n * kPage + slot;
    values[0] = (u16)v, values[kPage] = (u16)(v >> 16);
}
