// How the decode kernel loads the keys of several heads together, by cp.async. A row of int4 has 48
// to 160 bytes, mostly neither whole sectors nor whole lines. TMA takes as long for it as for two
// or three aligned pieces of 64 bytes. A row of 8 bits at head dim 64 is one such piece, which
// takes TMA more than half of the time of 128 bytes. The rows of a key's heads mostly lie one after
// the other. So a team has a warp for each head, and its threads copy the heads' rows as one.
// keys_tma.cuh has the same interface. From sm_90 on, keys_heads_tma.cuh copies such rows by TMA if
// they make whole lines together.
//
// Each thread copies chunks of 16 bytes of one key of the block: every kHeads-th of the heads' rows
// together. 32 / kHeads keys belong to one warp, so that its lanes read kHeads chunks of each.

#include "decode/cp_async_ring.cuh"
#include "device/attention/key_pages.cuh"

// A stage's tile of all heads: a key's heads lie one after the other, as they mostly do in device
// memory, and rows are padded. The columns are those of one head, from its first on.
template <int kRows_, int kCols_>
struct HeadsTile {
    using All = Tile<kRows_, kHeads * kCols_>;
    static constexpr int kRows = kRows_, kCols = kCols_;
    static constexpr bool kMoves = true;
    static constexpr int kRowBytes = All::kRowBytes, kStride = All::kStride, kBytes = All::kBytes;
    static_assert(kCols % 8 == 0, "rows are whole chunks");

    static __device__ __forceinline__ uint32 place(uint32 tile, int row, int chunk) { return All::place(tile, row, chunk); }
    static __device__ __forceinline__ uint32 moved(uint32 at, int rows, int cols) { return All::moved(at, rows, cols); }
    static __device__ __forceinline__ uint32 part(uint32 tile, int row, int col) { return All::part(tile, row, col); }
};
using TileK = HeadsTile<kBlockN, key_cols(kHeadDim)>;
using TileV = HeadsTile<kBlockN, key_cols(kWarpCols)>;
constexpr bool kSharesBoxes = false;

static_assert(kHeadWarps == 1 && kTransposes && !kModifiesScores && kMostRows == 0, "a warp has all rows of its head");
static_assert(kBlockN == 32 && kVec == 8, "each thread has a key of the block, and copies chunks of 16 bytes");

// A thread's chunks of a tensor's rows: as many as a row of one head has.
template <class Tile>
struct KeyChunks {
    static constexpr int kChunks = Tile::kCols / 8;
    const uint16* row;    // the first head's row 0, of the sequence or of page 0
    const int64& stride;  // elements from head to head; a reference into the constant bank saves registers
    const int first;      // the first chunk, of a key's heads together; the others are kHeads chunks apart
    const uint32 to;      // bytes from a stage's tile to the first chunk
    const int last_head;  // the last one that exists
    const bool is_packed;

    // `key` is the block's.
    __device__ __forceinline__ KeyChunks(const KernelParams& params, const TensorView& view, const Sequence& sequence, int head_kv, int key, int first)
        : row(static_cast<const uint16*>(view.data) + place_of_keys(params, view, sequence, head_kv)), stride(view.stride_head), first(first),
          to(key * Tile::kRowBytes + first * 16), last_head(params.num_heads_kv - 1 - head_kv),
          is_packed(view.stride_head == Tile::kCols && last_head >= kHeads - 1) {}

    __device__ __forceinline__ void copy(uint32 stage, int64 place, bool is_valid) const {
        const uint16* const from = row + place;
        if (is_packed) {
            #pragma unroll
            for (int i = 0; i < kChunks; ++i) cp_async<16>(stage + to + i * kHeads * 16, from + (first + i * kHeads) * 8, is_valid);
        } else {
            #pragma unroll 1
            for (int i = 0; i < kChunks; ++i) {
                // A head behind the last one has the last one's rows.
                const int chunk = first + i * kHeads, head = min(chunk / kChunks, last_head);
                cp_async<16>(stage + to + i * kHeads * 16, from + head * stride + chunk % kChunks * 8, is_valid);
            }
        }
    }
};

// The blocks of a walk, as one team's ring takes them.
class Keys : public CpAsyncRing<Keys> {
    const KernelParams& params;
    const Sequence& sequence;
    const ThreadPlace& place;
    const TeamRing& ring;
    const int key;  // the thread's, in a block
    const KeyChunks<TileK> chunks_k;
    const KeyChunks<TileV> chunks_v;
    BlockPages pages;  // of the next block
    BlockWalk next;           // its block is loaded next

    static constexpr int kKeysOfWarp = 32 / kHeads;

    __device__ __forceinline__ int64 place_of_key(const TensorView& view) const {
        if constexpr (BlockPages::kIsEven) return pages.place(view, next.block) + key * view.stride_seqlen;
        else return pages.place(view, next.block, key);
    }

public:
    // Starts the copy of the next block. Past the last block it writes zeros.
    __device__ __forceinline__ void load(int slot) {
        const bool is_valid = !next.is_past() && key < sequence.seqlen_k - next.block * kBlockN;
        chunks_k.copy(ring.k + slot * TileK::kBytes, place_of_key(params.k), is_valid);
        chunks_v.copy(ring.v + slot * TileV::kBytes, place_of_key(params.v), is_valid);
        cp_async_commit();
        next.advance();
        pages.fetch(next.block, next.end_of_pages(), place.lane);
    }

    __device__ __forceinline__ Keys(const KernelParams& params, const KeySource&, const Sequence& sequence, int head_kv,
                                    const KeyBlocks& blocks, const TeamRing& ring, const ThreadPlace& place)
        : CpAsyncRing(place.team), params(params), sequence(sequence), place(place), ring(ring), key(place.head * kKeysOfWarp + place.lane % kKeysOfWarp),
          chunks_k(params, params.k, sequence, head_kv, key, place.lane / kKeysOfWarp),
          chunks_v(params, params.v, sequence, head_kv, key, place.lane / kKeysOfWarp), pages(params, sequence), next(blocks, place.team) {
        pages.fetch(next.block, next.end_of_pages(), place.lane);
    }

    // The tiles of the acquired block that the warp's head has.
    __device__ __forceinline__ uint32 k() const { return ring.k + stage * TileK::kBytes + place.head * TileK::kCols * 2; }
    __device__ __forceinline__ uint32 v() const { return ring.v + stage * TileV::kBytes + place.head * TileV::kCols * 2; }
};
