// What the sm90 forward kernel demands of its config and its problem. src/family/sm90 has the same
// constraints with their reasons, so that no such text is rendered.

#include "device/attention/key_boxes.cuh"
#include "sm90/forward/shared.cuh"

static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0 && kBlockN <= 256, "shapes of wgmma");
static_assert(kHeadDim % 8 == 0 && kHeadDimV % 8 == 0 && kHeadDim <= 256 && kHeadDimV <= 256, "TMA's strides; O in registers");
static_assert(!kStaleMax || kIsBf16 || kConverts, "weights without a bound need bf16's exponents");
static_assert(!kStaleMax || !kHasDropout, "exact_rows.cuh draws no mask");
static_assert(!kStaleMax || !kModifiesScores, "exact_rows.cuh takes scores as they are");
static_assert(kCtasPerSm == 1 || kConsumers == 1 || kCtasPerSm == 2 && kConsumers == 2 && kHeadDimV <= 64, "registers of CTAs that share an SM");
static_assert(!kStoresFromQ || kBoxesV <= kBoxesQK, "O lies in Q's slot");
static_assert(!kHasWindow || kHasBlockMask || kVStages > (kBlockM - 64 + kBlockN - 1) / kBlockN, "a warpgroup holds one slot of V until it knows the next tile, and blocks that its window hides fill others");
static_assert(!kStoresApart || kBoxesO > 0 && !kIsBatchInvariant, "half of the boxes; a merged O takes all shared memory");
static_assert(!kMaySplit || !kTmaStore, "a partial O is fp32, which no slot holds");
static_assert(!kMaySplit || !kHasBlockMask, "splits are ranges of keys, and a list is none");
static_assert(!kIsBatchInvariant || kBlockN == 64 && !kStaleMax, "device/attention/fixed_order.cuh");
static_assert(!kPagesByTma || kKeyBoxRows % 8 == 0, "a box begins where the swizzle's pattern does");
static_assert(kConverts && kLaunchBoxRows == 0 || kLaunchBoxRows == (kPagesByThreads ? 0 : kKeyBoxRows), "src/family computes the same");
static_assert(!kConvertsInPlace || kKeyBoxRows % 8 == 0, "a box begins where the swizzle's pattern does");
static_assert(kDecodeRows == 0 || kPageSize > 0 || kReadsWidened, "the source of tiles draws the first one");
static_assert(!kReadsWidened || kKeyFormat == 0 && kPageSize == 0 && !kHasKeyStarts && !kHasBlockMask, "rows of the workspace");
static_assert(!kHasKeyFactors || kIsBf16, "V times scales needs bf16's range");
static_assert(!kConverts || !kHasBlockMask && !kIsBatchInvariant, "the walks of load_eight.cuh and convert_in_place.cuh");
static_assert(!kHasSlotScales || !kStaleMax || kIsBf16, "exact_rows.cuh has no unit for weights times scales in fp16");
