// The shape of one decode program, as constants: what the model is (KIE_* definitions, generated at
// load) and how its work is cut. Host and device read the same header, so a plan and the kernel
// that runs it cannot disagree. All sizes are per lane unless they say otherwise.
#pragma once

// The sizes below are padded with zeros to what the work's cut needs; `Real` is the model's own.
constexpr int kLayers = KIE_LAYERS, kHidden = KIE_HIDDEN, kHeads = KIE_HEADS,
              kKvHeads = KIE_KV_HEADS;
constexpr int kHeadDim = KIE_HEAD_DIM, kFfn = KIE_FFN, kVocab = KIE_VOCAB, kLanes = KIE_LANES;
constexpr int kHiddenReal = KIE_HIDDEN_REAL, kHeadDimReal = KIE_HEAD_DIM_REAL;
constexpr int kBlocks = KIE_BLOCKS, kWarps = KIE_WARPS, kColumns = KIE_COLUMNS;
constexpr int kSlotBytes = KIE_SLOT_BYTES, kSplitsMax = KIE_SPLITS;
// How the head combines lanes: the mean of their norms, the norm of their sum, a slice of the
// vocabulary from each lane, or a matrix over all of them side by side. With one lane all the same.
enum HeadMode { kHeadMean = 0, kHeadSum = 1, kHeadPerLane = 2, kHeadConcat = 3 };
// Lanes of this machine, and of all that run the model together, the same number each.
constexpr int kRanks = KIE_RANKS, kLanesAll = kLanes * kRanks;
constexpr int kHeadMode = kLanesAll == 1 ? (int)kHeadPerLane : KIE_HEAD_MODE;
constexpr int kNormLanes = KIE_NORM_LANES;  // rows of a norm's weights: 1, or one a lane
constexpr bool kHeadNorm = KIE_HEAD_NORM;   // q and k heads are normed before they turn
constexpr bool kBias = KIE_BIAS;            // q, k, v have biases
constexpr int kMerge = KIE_MERGE;           // 1: attention parts are merged by owners first
// How vectors are gathered. 0: everything is asked for, and what was late once more; 1: one word a
// warp is waited for first.
constexpr int kPollMode = KIE_POLL;
// One column of a rank whose stream often stands still: stages side by side in the ring (ring.h).
constexpr bool kPacked = KIE_PACKED && KIE_COLUMNS == 1;
constexpr bool kStreamed = KIE_STREAMED;  // keys and values come through the ring: stream.h
// Measuring only, and garbage: what is computed without waits, without weights, or by ranks
// that take their own words for those of the others.
constexpr bool kNoWaits = KIE_NO_WAITS, kNoStream = KIE_NO_STREAM, kNoRanks = KIE_NO_RANKS,
               kGarbage = kNoWaits || kNoStream || kNoRanks;
// The lane, and the block, whose words are taken for those of another.
KIE_CONST_FN int heard_lane(int lane_all) { return kNoRanks ? lane_all % kLanes : lane_all; }
KIE_CONST_FN int heard_block(int block_all) {
    return kNoRanks ? block_all % KIE_BLOCKS : block_all;
}
constexpr unsigned kRestGather = KIE_REST_GATHER,
                   kRestMerge = KIE_REST_MERGE;  // ns before the first look
constexpr float kEps = KIE_EPS;

constexpr int kTeam = 32;  // threads that exchange registers; a machine's warp is one or two teams
constexpr int kThreads = kWarps * kTeam, kBlocksPerLane = kBlocks / kLanes;
constexpr int kBlocksAll = kBlocks * kRanks;
constexpr int kGroup = kHeads / kKvHeads, kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr int kAttn = kHeads * kHeadDim, kSplitBlocks = kBlocksPerLane / kKvHeads;
constexpr int kPage = 64, kPagesMax = KIE_PAGES_MAX;  // pages of a longest sequence
constexpr int kPools = 2;                             // layers that see all, layers with a window

// Rows a block computes of each matrix; the residual rows it owns are those of `kRowsO`. The last
// blocks' rows may lie beyond the matrix: zeros, which nobody reads.
KIE_CONST_FN int share_of(int rows, int blocks, int unit) {
    return ((rows + blocks - 1) / blocks + unit - 1) / unit * unit;
}
constexpr int kHeadBlocks = kHeadMode == kHeadPerLane ? kBlocksPerLane : kBlocksAll;
constexpr int kHeadWidth = kHeadMode == kHeadConcat ? kLanesAll * kHidden : kHidden;
constexpr int kRowsQkv = share_of(kQkv, kBlocksPerLane, 2),
              kRowsO = share_of(kHidden, kBlocksPerLane, 2);
constexpr int kRowsGu = share_of(2 * kFfn, kBlocksPerLane, 4),
              kRowsHead = share_of(kVocab, kHeadBlocks, 2);
constexpr int kVocabAll = KIE_VOCAB_ALL;  // ids; a lane's last rows may lie beyond them
static_assert(kBlocksPerLane * kLanes == kBlocks && kGroup * kKvHeads == kHeads, "must divide");
static_assert(kSplitBlocks > 0 && kSplitsMax <= kSplitBlocks, "more splits than blocks");
static_assert(kGroup <= 8 && kHeadDim % 32 == 0 && kWarps > 4, "attention does not fit");
static_assert(kWarps <= (int)kRecordsBlock, "a record a warp");

KIE_CONST_FN int row_warps_of(int rows, int k) {
    const int tiles = (rows + 15) / 16;
    if (tiles >= kWarps) return kWarps;
    for (int w = 1; w < kWarps; ++w)
        if (kWarps % w == 0 && tiles % w == 0 && k % (32 * (kWarps / w)) == 0 &&
            rows * 64 * (kWarps / w) <= kSlotBytes)
            return w;
    return kWarps;
}
// A warp holds two stages in registers, or kAhead: at most so many tile pairs in each.
constexpr int kPairsHeld = KIE_HELD;
// Stages that are in registers before the vector has arrived.
constexpr int kAhead = kColumns > 1 ? 1 : KIE_AHEAD;
// There, more of gate and up, some of it even before attention's output has arrived, so that the
// stream goes on while everybody waits for that.
constexpr int kAheadGu = kPacked ? 7 : kAhead, kEarlyGu = kPacked ? 3 : 0;
KIE_CONST_FN int chunk_of(int pairs, int tiles, int bytes_a_pair) {
    int best = 1;
    for (int c = 1; c <= pairs; ++c)
        if (pairs % c == 0 && c * bytes_a_pair <= kSlotBytes && c * tiles <= kPairsHeld) best = c;
    return best;
}

// How the warps of a block share `kRows` rows of `kK` columns. A warp takes `tiles` tiles of 16
// rows over a contiguous range of columns; the stream brings one stage after another, each with
// `chunk` tile pairs (16 rows x 32 columns) for every warp. A stage holds, for each k-warp, for
// each pair, for each row tile: two 16 x 16 tiles of 32 bytes a row. Rows missing from the last
// tile take no bytes.
template <int kRows, int kK, int kMost, bool kByRows = false>
struct Split {
    static constexpr int rows = kRows, k = kK, tiles_all = (kRows + 15) / 16;
    static constexpr int row_warps = kByRows ? kWarps : row_warps_of(kRows, kK),
                         k_warps = kWarps / row_warps;
    static constexpr int tiles = (tiles_all + row_warps - 1) / row_warps;
    static constexpr int pairs = kK / 32 / k_warps,
                         chunk = chunk_of(pairs, tiles, k_warps * kRows * 64);
    static constexpr int stages = pairs / chunk, stage_bytes = k_warps * chunk * kRows * 64;
    static constexpr int ahead = stages < kMost ? stages : kMost;
    static constexpr int row_pairs = kRows / 2;
    // Results a thread ends up with: (row pair, column).
    static constexpr int items = k_warps == 1 ? tiles * (kColumns == 1 ? 1 : 2)
                                              : (row_pairs * kColumns + kThreads - 1) / kThreads;
    static constexpr int part_floats = k_warps == 1 ? 0 : k_warps * kRows * kColumns;
    static_assert(pairs * 32 * k_warps == kK && stage_bytes <= kSlotBytes,
                  "matrix does not fit the plan");
};
using SplitQkv = Split<kRowsQkv, kHidden, kAhead>;
// A thread owns the same residual rows in both: either of them by rows means both.
constexpr bool kOwnedByRows =
    row_warps_of(kRowsO, kAttn) == kWarps || row_warps_of(kRowsO, kFfn) == kWarps;
using SplitO = Split<kRowsO, kAttn, kAhead, kOwnedByRows>;
using SplitGu = Split<kRowsGu, kHidden, kAheadGu>;
using SplitDown = Split<kRowsO, kFfn, kAhead, kOwnedByRows>;
static_assert(SplitO::items == SplitDown::items, "owned rows");
constexpr int kHeadPassRows = kRowsHead < kWarps * 16 ? kRowsHead : kWarps * 16;
constexpr int kHeadPasses = kRowsHead / kHeadPassRows, kHeadTail = kRowsHead % kHeadPassRows;
using SplitHead = Split<kHeadPassRows, kHeadWidth, kAhead>;
using SplitTail = Split<(kHeadTail ? kHeadTail : kHeadPassRows), kHeadWidth, kAhead>;

KIE_CONST_FN long bytes_of(int stages, int bytes) { return (long)stages * bytes; }
constexpr long kLayerBytes = bytes_of(SplitQkv::stages, SplitQkv::stage_bytes) +
                             bytes_of(SplitO::stages, SplitO::stage_bytes) +
                             bytes_of(SplitGu::stages, SplitGu::stage_bytes) +
                             bytes_of(SplitDown::stages, SplitDown::stage_bytes);
constexpr int kLineStages = kLayers * (SplitQkv::stages + SplitO::stages + SplitGu::stages +
                                       SplitDown::stages);  // a prompt's steps have no head
constexpr long kLineBytes = kLayers * kLayerBytes +
                            kHeadPasses * bytes_of(SplitHead::stages, SplitHead::stage_bytes) +
                            (kHeadTail ? bytes_of(SplitTail::stages, SplitTail::stage_bytes) : 0);

// Words of the exchange, as offsets from one base. A column of a vector takes whole cache lines of
// words, the last of which may be padding. Layers take turns with few places, so that the words
// stay in the second-level cache: eight columns' words of all layers would not (exchange.h says why
// a place is free again). A block whose rows nobody waits for may lag as far as a step goes.
constexpr bool kAllAwaited = (kBlocksPerLane - 1) * kRowsQkv < kQkv ||
                             (kBlocksPerLane - 1) * kRowsO < kHidden ||
                             (kBlocksPerLane - 1) * kRowsGu < 2 * kFfn;
constexpr int kTurns = kAllAwaited && kLayers > 2 ? 2 : kLayers;
constexpr int kTurnsOther = KIE_TURNS_OTHER;  // of what other lanes want: as delays ask for
KIE_CONST_FN int lines_of(int words) { return (words + 15) / 16 * 16; }
constexpr int kWordsH = lines_of(kRowsO * kBlocksPerLane / 2);
constexpr int kWordsQ = lines_of(kRowsQkv * kBlocksPerLane / 2);
constexpr int kWordsA = kAttn / 2, kWordsF = lines_of(kRowsGu * kBlocksPerLane / 4);
constexpr long kVecH = (long)kColumns * kWordsH, kVecQ = (long)kColumns * kWordsQ;
constexpr long kVecA = (long)kColumns * kWordsA, kVecF = (long)kColumns * kWordsF;
constexpr long kAll = (long)kTurns * kLanes;
constexpr long kAtHidden = 0, kAtQkv = kAtHidden + 2 * kAll * kVecH,
               kAtPart = kAtQkv + kAll * kVecQ;
// A part of attention: for each head and each 16 features a line of its own, 8 words of the output
// and log2 of the mass. One mass for all would be one line that every warp of every block reads.
constexpr int kPartLine = 16, kPartMass = 8, kPartWords = kHeads * (kHeadDim / 16) * kPartLine;
constexpr long kAtAttn = kAtPart + kAll * kSplitsMax * kColumns * kPartWords;
constexpr long kAtAct = kAtAttn + kAll * kVecA, kAtOther = kAtAct + kAll * kVecF;
constexpr long kAtLast = kAtOther + (kLanesAll > 1 ? 2l * kTurnsOther * kLanesAll * kVecH : 0);
constexpr long kAtPick = kAtLast + (kHeadMode == kHeadPerLane ? 0 : kLanesAll * kVecH);
// Choosing a token: each block's offer, and the rounds that narrow a filter (sample.h).
constexpr int kRounds = 13, kBins = 16, kCountWords = 3 * kBins;
constexpr long kAtMore = kAtPick + 2l * kBlocksAll * kColumns;
constexpr long kAtOrder = kAtMore + 4l * kBlocksAll * kColumns;
// Offers are taken where steps meet, so nothing says that all have been when the next step's come:
// they have two places in turn.
constexpr long kOffers = kAtOrder + 2 - kAtPick, kAtTally = kAtPick + 2 * kOffers;
constexpr long kAtVerdict = kAtTally + 2l * kRounds * kBlocksAll * kColumns * kCountWords;
constexpr long kAtFinal = kAtVerdict + 2l * kRounds * kColumns * 8;
constexpr long kWords = kAtFinal + (long)kBlocksAll * kColumns * 4;
constexpr int kStopsMax = 64, kRing = 8192;

// Shared memory, in bytes. `A` serves qkv, gate/up and head, `B` the other two, so that a warp may
// fill the next vector while another still reads the last one. With several columns the ring needs
// the room more: both are one place, and who fills it waits for the readers (vector_free).
KIE_CONST_FN int max_i(int a, int b) { return a > b ? a : b; }
KIE_CONST_FN int min_i(int a, int b) { return a < b ? a : b; }
// Where every warp has a range of columns of its own, several columns' vectors need no room: the
// operands are taken from the words (columns.h).
constexpr bool kDirectO = kColumns > 1 && SplitO::row_warps == 1,
               kDirectDown = kColumns > 1 && SplitDown::row_warps == 1;
// Where word `n` of such a vector stands: see columns.h.
KIE_CONST_FN int direct_word(int n) { return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2; }
// Neighbouring columns stand 16 banks apart.
constexpr int kPad = kColumns > 1 ? 32 : 0;
constexpr int kStrideA = max_i(kHidden, kHeadWidth) + kPad;  // halves
constexpr int kStrideB = max_i(kDirectO ? 0 : kAttn, kDirectDown ? 0 : kFfn) + kPad;
constexpr int kPartA = max_i(max_i(SplitQkv::part_floats, SplitGu::part_floats),
                             max_i(SplitHead::part_floats, SplitTail::part_floats));
constexpr int kPartB = max_i(SplitO::part_floats, SplitDown::part_floats);
constexpr int kScores = 2 * kGroup * kPage;
// Other lanes' words of the owned rows, where threads bring them for each other (decode.h).
constexpr bool kBrought = kLanesAll > 1 && SplitO::k_warps > 1;
constexpr int kOtherWords = kBrought ? SplitO::row_pairs * kColumns * kLanesAll : 0;
constexpr int kNormSets = kHeadMode == kHeadMean || kHeadMode == kHeadConcat ? kLanesAll : 1;
// Page tables stand in shared memory where they are small.
constexpr int kTableWords = kColumns * kPools * kPagesMax;
constexpr bool kTableShared = kTableWords <= 4096;
// One column's vectors share a place, too, where that gives the ring more and nobody has to wait:
// every product's warps meet when its parts are added up, and what joins streamed pages needs no
// second place.
constexpr bool kAllMeet =
    SplitQkv::k_warps > 1 && SplitO::k_warps > 1 && SplitGu::k_warps > 1 && SplitDown::k_warps > 1;
constexpr bool kOneVector =
    kColumns > 1 ? !(kDirectO && kDirectDown) : kPacked && kAllMeet && !kStreamed;
constexpr int kShXa = 0, kShXb = kShXa + (kOneVector ? 0 : kStrideA * kColumns * 2),
              kShPartA = kShXb + max_i(kOneVector ? kStrideA : 0, kStrideB) * kColumns * 2;
constexpr int kShPartB = kShPartA + kPartA * 4, kShNorm = kShPartB + kPartB * 4;
constexpr int kShScores = kShNorm + kWarps * kColumns * kNormSets * 4;
constexpr int kShQkv = (kShScores + kScores * 4 + 15) / 16 * 16;
constexpr int kShPick = kShQkv + (kGroup + 2) * kHeadDim * 2,
              kShMisc = (kShPick + (kWarps * kColumns + kColumns + kWarps) * 20 + 15) / 16 * 16;
constexpr int kShTokens = kShMisc + 64, kShEnds = kShTokens + kColumns * 4;
constexpr int kShTally = (kShEnds + kColumns * 4 + 63) / 64 * 64;
constexpr int kShSum = kShTally + kBins * 16, kShStops = kShSum + kCountWords * 8;
constexpr int kShLayers = kShStops + kColumns * kStopsMax * 4;
constexpr int kShTrace = (kShLayers + kLayers * 32 + 63) / 64 * 64, kShSlots = kShTrace + 16 * 8;
constexpr int kShSizes = kShSlots + 64 * 16, kShTurn = kShSizes + 64 * 4;
// Rotations of the results that threads own.
constexpr bool kTurnsOwned = kPacked && SplitQkv::k_warps > 1;  // of those alone
constexpr int kTurned = kTurnsOwned ? SplitQkv::row_pairs * kColumns : SplitQkv::items * kThreads;
constexpr int kShOthers = kShTurn + kTurned * 8, kShTable = kShOthers + kOtherWords * 4;
constexpr int kShOwn = (kShTable + (kTableShared ? kTableWords * 4 : 0) + 15) / 16 * 16;
// Attention out of the ring (attend_pages.h): each warp's heads, with several columns, and the join
// of the warps' parts. They stand where the vectors do, of which none is at work while a block
// attends, or, where those are small, have a place of their own.
constexpr int kHeadPairs = (kGroup + 1) / 2, kJoinTile = 8 * kHeadPairs;  // quads of 16 features
constexpr int kJoinWarp = kHeadDim / 16 * kJoinTile;
constexpr int kWarpHeads = kColumns > 1 ? (kGroup + 2) * kHeadDim * 2 : 0;  // bytes
constexpr int kRoom = kWarps * (kWarpHeads + kJoinWarp * 16);
constexpr bool kRoomThere =
    (kOneVector || kWarps * kWarpHeads <= kShXb - kShXa) && kRoom <= kShPartA - kShXa;
constexpr int kShHeads = kRoomThere ? kShXa : kShOwn, kShJoin = kShHeads + kWarps * kWarpHeads;
constexpr int kShRing = (kShOwn + (kStreamed && !kRoomThere ? kRoom : 0) + 1023) / 1024 * 1024;
constexpr int kSharedMax = KIE_SHARED_MAX;
constexpr int kRoomForRing = kSharedMax - kShRing;
// No more than a step has stages: see stream.h.
constexpr int kSlots = min_i(kPacked ? 64 : kRoomForRing / kSlotBytes, min_i(kLineStages, 64));
constexpr int kRingBytes = kPacked ? kRoomForRing / 1024 * 1024 : kSlots * kSlotBytes;
constexpr int kSharedBytes = kShRing + kRingBytes;
static_assert(kRingBytes >= 2 * kSlotBytes && kSlotBytes <= 0xffff, "no room for the ring");
