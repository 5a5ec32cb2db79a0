// Which columns of dK, dV and dQ each block of threads and consumer of a wide backward tile does. Columns come in boxes of 64, as TMA
// writes them.

constexpr int kBoxesK = (kHeadDim + kBoxCols - 1) / kBoxCols, kBoxesV = (kHeadDimV + kBoxCols - 1) / kBoxCols;
// Boxes of a half of the columns. Each block of threads does a half of dQ and, where dK or dV has four boxes, each consumer a half of
// both. The second half may have fewer; what is computed past its end, from whatever lies there, is dropped.
constexpr int kHalfK = (kBoxesK + 1) / 2, kHalfV = (kBoxesV + 1) / 2;
// A half of three boxes would be two. So consumer 0 has the first two boxes of dV and the third of dK, consumer 1 the other way
// round; where dK or dV has one or two, there is no third.
constexpr bool kByBoxes = kBoxesK <= 3 && kBoxesV <= 3;
// Of dQ's three boxes each block of threads then does one by consumer 0 and, over its own keys, the middle one by consumer 1, so
// that both have as much to do; both add to it. Not where additions have an order: the second would wait for the first.
constexpr bool kSharesDq = kByBoxes && kBoxesK == 3 && !kIsDeterministic;

// Tiles of 8 columns: of the first half or the first two boxes, and of a third box.
constexpr int first_tiles(int dim, int half) { return !kByBoxes ? half * 8 : dim < 2 * kBoxCols ? dim / 8 : 2 * kBoxCols / 8; }
constexpr int third_tiles(int dim) { return dim <= 2 * kBoxCols ? 0 : dim / 8 - 2 * kBoxCols / 8; }

// What a consumer has of dV, dK and dQ; of halves both have as much.
template <int kOf>
struct Share {
    static constexpr int kConsumer = kOf;
    static constexpr int kVTiles = kByBoxes && kConsumer == 1 ? third_tiles(kHeadDimV) : first_tiles(kHeadDimV, kHalfV);
    static constexpr int kKTiles = kByBoxes && kConsumer == 0 ? third_tiles(kHeadDim) : first_tiles(kHeadDim, kHalfK);
    static constexpr bool kHasDq = !kByBoxes || kConsumer < kHalfK;
    static constexpr bool kDqOfOwnKeys = kSharesDq && kConsumer == 1;
    // The boxes that they begin with; of halves it is known at run time whose they are.
    static __device__ __forceinline__ int box_v(int consumer) { return kByBoxes ? 2 * kConsumer : consumer * kHalfV; }
    static __device__ __forceinline__ int box_k(int consumer) { return kByBoxes ? 2 - 2 * kConsumer : consumer * kHalfK; }
};

// A consumer by its share: code of its own where shares differ. Both take their registers here, by one instruction, from which on
// src/kernel/sass.rs counts what consumers spill.
template <typename Consume>
__device__ __forceinline__ void with_share(int consumer, const Consume& consume) {
    more_registers<kConsumerRegisters>();
    if (kByBoxes && consumer == 1) consume(Share<1>{}); else consume(Share<0>{});
}

constexpr int at_least_one(int tiles) { return tiles > 0 ? tiles : 1; }  // C++ has no empty arrays
