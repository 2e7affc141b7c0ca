// What the generated header (mono/lower/header.rs) leaves to say of the shape of a decode program:
// what its numbers mean, and the names of the one class of layers. All sizes are per lane unless
// they say otherwise, and padded with zeros to what the partition needs; `Real` is the model's own.
#pragma once

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
// with `chunk` tile pairs (16 rows x 32 columns) for every warp. A stage holds, for each k-warp,
// for each pair, for each row tile: two 16 x 16 tiles of 32 bytes a row. Rows missing from the last
// tile take no bytes. A thread ends up with `items` results, each a (row pair, column).

// Where word `n` stands of a vector whose operands are taken from the words: see columns.h.
KIE_CONST_FN int direct_word(int n) { return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2; }

using TilingQkv = Class0::TilingQkv;
using TilingO = Class0::TilingO;
using TilingGu = Class0::TilingGu;
using TilingDown = Class0::TilingDown;
constexpr int kHeads = Class0::kHeads, kKvHeads = Class0::kKvHeads, kGroup = Class0::kGroup;
constexpr int kHeadDim = Class0::kHeadDim, kHeadDimReal = Class0::kHeadDimReal,
              kAttn = Class0::kAttn, kQkv = Class0::kQkv, kFfn = Class0::kFfn;
constexpr int kRowsQkv = Class0::kRowsQkv, kRowsGu = Class0::kRowsGu;
constexpr int kSplitBlocks = Class0::kSplitBlocks, kSplitsMax = Class0::kSplitsMax,
              kMerge = Class0::kMerge;
constexpr int kWordsQ = Class0::kWordsQ, kWordsA = Class0::kWordsA, kWordsF = Class0::kWordsF,
              kPartWords = Class0::kPartWords;
constexpr int kShTurn = Class0::kShTurn, kShHeads = Class0::kShHeads, kShJoin = Class0::kShJoin,
              kWarpHeads = Class0::kWarpHeads, kEarlyGu = Class0::kEarlyGu;
constexpr bool kHeadNorm = Class0::kHeadNorm, kBias = Class0::kBias, kDirectO = Class0::kDirectO,
               kDirectDown = Class0::kDirectDown;
constexpr float kQueryScale = Class0::kQueryScale;
constexpr long kLayerBytes = Class0::kLayerBytes;
constexpr int kHeadPairs = (kGroup + 1) / 2, kJoinTile = 8 * kHeadPairs;  // quads of 16 features
constexpr int kJoinWarp = kHeadDim / 16 * kJoinTile;

static_assert(kGroup <= 8 && kHeadDim % 32 == 0 && kWarps > 4, "attention does not fit");
static_assert(kWarps <= (int)kRecordsBlock, "a record a warp");
static_assert(kSharedBytes <= kSharedMax && kRingBytes >= 2 * kSlotBytes, "no room for the ring");
static_assert(sizeof(DecodeArgs) == kArgsBytes && sizeof(Layer) == kLayerWireBytes,
              "mono/wire.rs has the same");
