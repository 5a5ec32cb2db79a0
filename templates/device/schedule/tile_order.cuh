// Which tiles the persistent CTAs of a kernel do, and in which order.
//
// Heads go in groups, so that what their tiles share stays in L2 (kGroupMb). Within a group the
// longest tiles of all heads come first. Groups differ by one head at most: a small last group
// would begin its longest tiles when nothing else is left. Where tiles differ in length, a group
// has at least as many tiles as are done at a time, for the same reason.
//
// Varlen sequences come one after the other, each with its own number of tiles. Only the device
// knows these numbers, so a TileList remembers its sequence and is asked for rising indices.

#include "device/attention/block_list.cuh"
#include "device/attention/block_range.cuh"
#include "device/attention/sequence.cuh"

struct Tile {
    int first;        // its first query row, in the backward pass its first key; negative: no tile is left
    int head, batch;
    int blocks;       // blocks that the producer loads for it
    int begin;        // forward: the first of these blocks; 0 without a window
};

// Whether a head's tiles may differ in length.
constexpr bool kTilesDiffer = kIsCausal || kHasWindow || kIsVarlen || kHasBlockMask;

// Tiles of some rows (or keys) of heads of one length, in the order in which they are started.
struct TileOrder {
    uint32 tiles_per_head, num_heads;
    uint32 group_heads, larger_groups;  // the first larger_groups groups have one head more

    // `head_bytes` is what a head's tiles share, `feeds` how many tiles are done at a time.
    __device__ __forceinline__ TileOrder(int rows, int tile_rows, uint32 num_heads, float head_bytes, uint32 feeds)
        : tiles_per_head(uint32(rows + tile_rows - 1) / tile_rows), num_heads(num_heads) {
        group_heads = num_heads, larger_groups = 0;
        if constexpr (kGroupMb > 0) {
            const uint32 fit = uint32(fmaxf(1.f, fminf(float(kGroupMb << 20) / head_bytes, float(num_heads))));
            const uint32 most = kTilesDiffer ? max(fit, feeds / max(tiles_per_head, 1u)) : fit;
            const uint32 groups = (num_heads + most - 1) / most;
            group_heads = num_heads / groups, larger_groups = num_heads % groups;
        }
    }
    struct Place { uint32 rank, batch_head; };  // rank: among its head's tiles
    __device__ __forceinline__ uint32 tiles() const { return tiles_per_head * num_heads; }
    __device__ __forceinline__ Place at(uint32 index) const {
        const uint32 larger_tiles = larger_groups * (group_heads + 1) * tiles_per_head;
        const bool is_larger = index < larger_tiles;
        const uint32 heads = group_heads + is_larger, first = is_larger ? 0 : larger_groups * (group_heads + 1);
        if (!is_larger) index -= larger_tiles;
        const uint32 group = index / (tiles_per_head * heads), within = index % (tiles_per_head * heads);
        return {within / heads, first + group * heads + within % heads};
    }
};

// Tiles of kBlockM query rows, the forward pass's. The last rows see most keys.
struct QueryTiles {
    static __device__ __forceinline__ TileOrder order(const KernelParams& params, const Sequence& sequence, int sequences, uint32 feeds) {
        return TileOrder(sequence.seqlen_q, kBlockM, sequences * params.num_heads_q,
                         float(sequence.seqlen_k) * ((kHeadDim + kHeadDimV) * 2) / float(params.group_size), feeds);
    }
    static __device__ __forceinline__ int heads(const KernelParams& params) { return params.num_heads_q; }
    static __device__ __forceinline__ Tile at(const TileOrder& order, uint32 rank, int head, int batch, const KernelParams& params) {
        const int row = int(kIsCausal ? order.tiles_per_head - 1 - rank : rank) * kBlockM;
        const Sequence sequence(params, batch);
        if constexpr (kHasBlockMask) return {row, head, batch, KeyList(params, sequence, head, row).size(), 0};
        const BlockRange range = key_blocks<kBlockN>(row, kBlockM, sequence);
        return {row, head, batch, range.end - range.begin, range.begin};
    }
};

// Tiles of kBlockN keys, the backward pass's. Most rows see the first keys. kLastFirst is the order
// that schedule/dq_turns.cuh needs.
template <bool kLastFirst>
struct KeyTiles {
    static __device__ __forceinline__ TileOrder order(const KernelParams& params, const Sequence& sequence, int sequences, uint32 feeds) {
        return TileOrder(sequence.seqlen_k, kBlockN, sequences * params.num_heads_kv,
                         float(sequence.seqlen_q) * (kHeadDim * 6 + kHeadDimV * 2) * float(params.group_size), feeds);
    }
    static __device__ __forceinline__ int heads(const KernelParams& params) { return params.num_heads_kv; }
    static __device__ __forceinline__ Tile at(const TileOrder& order, uint32 rank, int head, int batch, const KernelParams& params) {
        const int key = int(kLastFirst ? order.tiles_per_head - 1 - rank : rank) * kBlockN;
        const Sequence sequence(params, batch);
        const BlockRange range = query_blocks<kBlockM>(key, min(kBlockN, sequence.seqlen_k - key), sequence);
        if constexpr (kHasBlockMask) return {key, head, batch, QueryList::count(params, sequence, head, key, range), 0};
        return {key, head, batch, (range.end - range.begin) * params.group_size, 0};
    }
};

// All tiles of a launch by their index.
template <typename Tiles, bool kOfItsOwn>
struct TileList {
    const TileOrder order;
    __device__ __forceinline__ TileList(const KernelParams& params, uint32 feeds) : order(Tiles::order(params, Sequence(params, 0), params.batch_size, feeds)) {}
    __device__ __forceinline__ Tile at(uint32 index, const KernelParams& params) const {
        if (index >= order.tiles()) return {-1, 0, 0, 0, 0};
        const TileOrder::Place place = order.at(index);
        return Tiles::at(order, place.rank, int(place.batch_head % Tiles::heads(params)), int(place.batch_head / Tiles::heads(params)), params);
    }
};
template <typename Tiles>
struct TileList<Tiles, true> {
    TileOrder order;    // of the sequence `batch`
    int batch = 0;
    uint32 begin = 0;   // its first tile's index
    const uint32 feeds;
    __device__ __forceinline__ TileList(const KernelParams& params, uint32 feeds) : order(Tiles::order(params, Sequence(params, 0), 1, feeds)), feeds(feeds) {}
    __device__ __forceinline__ Tile at(uint32 index, const KernelParams& params) {
        while (index - begin >= order.tiles()) {
            begin += order.tiles();
            if (++batch >= params.batch_size) return {-1, 0, 0, 0, 0};
            order = Tiles::order(params, Sequence(params, batch), 1, feeds);
        }
        const TileOrder::Place place = order.at(index - begin);
        return Tiles::at(order, place.rank, int(place.batch_head), batch, params);
    }
};
