// The tiles of a launch by index, for the persistent CTAs of a kernel. tile_feed.cuh hands out the
// indices. This file knows no counter, no barrier and no copy.
//
// Heads form groups, so that the data that their tiles share stays in L2 (kGroupMb). Within a group
// the longest tiles of all heads come first. Groups differ by at most one head: a small last group
// would begin its longest tiles when nothing else is left. If tiles differ in length, a group has
// at least as many tiles as run at a time, for the same reason.
//
// Varlen sequences come one after the other, each with its own number of tiles. Only the device
// knows these numbers. A TileList therefore remembers its sequence, and takes rising indices alone.

#include "device/attention/block_list.cuh"
#include "device/attention/block_range.cuh"
#include "device/attention/sequence.cuh"

struct Tile {
    // The first query row of the tile, or its first key in the backward pass, absolute within the
    // sequence. It is negative if no tile is left.
    int first;
    int head, batch;
    int blocks;       // blocks that the producer loads for the tile
    // Forward: the first of these blocks, 0 without a window unless kMaySplit. Backward: the steps
    // of the walk (schedule/group_walk.cuh) before the first of these blocks if kMaySplit. With
    // kAlternates, 1 if the walk begins with the first block. Else 0.
    int begin;
    // Which part of its rows' keys, or backward of its keys' walk, the tile does, 0 unless
    // kMaySplit. -1 if it does all and others of its head do parts.
    int split;
};

// With kMaySplit, params.num_splits tiles have the same rows (backward: keys).
__device__ __forceinline__ uint32 splits_of_tile(const KernelParams& params) { return kMaySplit ? uint32(params.num_splits) : 1; }

// The part of so many steps that a split does. The parts differ by at most one step, and may be
// empty.
struct SplitSteps {
    int begin, end;
    __device__ __forceinline__ SplitSteps(int steps, uint32 split, uint32 splits)
        : begin(int(int64(steps) * split / splits)), end(int(int64(steps) * (split + 1) / splits)) {}
};

// Whether a head's tiles may differ in length.
constexpr bool kTilesDiffer = kIsCausal || kHasWindow || kIsVarlen || kHasBlockMask;

// The tiles of `tile_rows` rows (or keys) of heads of one length, in the order in which they start.
struct TileOrder {
    static constexpr bool kHasParts = false;
    uint32 tiles_per_head, num_heads, feeds;
    uint32 group_heads, larger_groups;  // the first larger_groups groups have one more head

    // `head_bytes` counts the bytes that a head's tiles share, and `feeds` the tiles that run at a
    // time. `splits` tiles have the same rows (or keys), and consecutive ranks.
    __device__ __forceinline__ TileOrder(int rows, int tile_rows, uint32 num_heads, float head_bytes, uint32 feeds, uint32 splits = 1)
        : tiles_per_head(uint32(rows + tile_rows - 1) / tile_rows * splits), num_heads(num_heads), feeds(feeds) {
        group_heads = num_heads, larger_groups = 0;
        if constexpr (kGroupMb > 0) {
            const uint32 fit = uint32(fmaxf(1.f, fminf(float(kGroupMb << 20) / head_bytes, float(num_heads))));
            const uint32 most = kTilesDiffer ? max(fit, feeds / max(tiles_per_head, 1u)) : fit;
            const uint32 groups = (num_heads + most - 1) / most;
            group_heads = num_heads / groups, larger_groups = num_heads % groups;
        }
    }
    // A tile's rank among those of its head, and its wave. A wave has as many tiles as run at a
    // time. The last one of a group may have fewer, or up to half as many more, so that each group
    // begins a wave.
    struct Place { uint32 rank, batch_head, wave; };
    // Those of a group of so many heads.
    __device__ __forceinline__ uint32 waves(uint32 heads) const { return max((heads * tiles_per_head + feeds / 2) / feeds, 1u); }
    __device__ __forceinline__ uint32 tiles() const { return tiles_per_head * num_heads; }
    __device__ __forceinline__ Place at(uint32 index) const {
        const uint32 larger_tiles = larger_groups * (group_heads + 1) * tiles_per_head;
        const bool is_larger = index < larger_tiles;
        const uint32 heads = group_heads + is_larger, first = is_larger ? 0 : larger_groups * (group_heads + 1);
        if (!is_larger) index -= larger_tiles;
        const uint32 group = index / (tiles_per_head * heads), within = index % (tiles_per_head * heads);
        const uint32 waves_before = is_larger ? 0 : larger_groups * waves(group_heads + 1);
        const uint32 wave = waves_before + group * waves(heads) + min(within / feeds, waves(heads) - 1);
        return {within / heads, first + group * heads + within % heads, wave};
    }
};

// The backward pass's tiles where the last ones of each head are split and the others are whole.
// The whole ones of all heads come first, so that parts fill the last wave. Parts come head by
// head.
struct OrderWithParts : TileOrder {
    static constexpr bool kHasParts = true;
    uint32 parts_per_head;

    __device__ __forceinline__ OrderWithParts(const TileOrder& whole, uint32 parts_per_head) : TileOrder(whole), parts_per_head(parts_per_head) {}
    __device__ __forceinline__ uint32 tiles() const { return (tiles_per_head + parts_per_head) * num_heads; }
    __device__ __forceinline__ Place at(uint32 index) const {
        const uint32 whole = tiles_per_head * num_heads;
        if (index < whole) return TileOrder::at(index);
        return {tiles_per_head + (index - whole) % parts_per_head, (index - whole) / parts_per_head, 0};
    }
};

// The rows of a head in tiles that are split where others of it are whole, else 0: with kIsCausal
// its last ones, else its first ones (src/family/split_rest.rs).
__device__ __forceinline__ uint32 split_rows_of_head(const KernelParams& params) {
    return kMaySplit && params.num_splits > 1 ? uint32(params.workspace_rows) : 0;
}

// The tiles of a head where some are split, in the order in which they start: nth counts them from
// the split ones on, and split is -1 for whole ones. Whole tiles come first and parts of split ones
// last. With kIsCausal the split tiles see most keys, and a part of one sees as many as a whole
// tile of middle length. So longer whole tiles come first. Then come groups of one whole tile and
// `splits` split ones, and at last the other whole tiles.
struct PartOfTile {
    uint32 nth;
    int split;
    static __device__ __forceinline__ PartOfTile at(uint32 rank, uint32 tiles, uint32 split_tiles, uint32 splits) {
        const uint32 whole = tiles - split_tiles, parts = split_tiles * splits;
        uint32 before = whole, among = 0;
        if constexpr (kIsCausal) {
            before -= min(whole, tiles / splits), among = (split_tiles + splits - 1) / splits;
            if (whole - before < among) among = 0;
        }
        if (rank < before) return {split_tiles + rank, -1};
        rank -= before;
        if (rank >= parts + among) return {split_tiles + before + rank - parts, -1};
        if (among > 0) {
            const uint32 period = splits * splits + 1, turn = rank / period;
            if (rank == turn * period) return {split_tiles + before + turn, -1};
            rank -= turn + 1;
        }
        return {rank / splits, int(rank % splits)};
    }
};

// The forward pass's tiles of kBlockM query rows. Under a causal mask the last rows see most keys,
// so they come first. With kMaySplit a tile does a part of the blocks that its rows see, or some
// tiles do (PartOfTile). Sequences of up to kLeftRows packed rows, over the heads of a group, have
// no tiles: another kernel takes them. It may still run when this one starts.
template <int kLeftRows>
struct QueryTiles {
    using Order = TileOrder;
    static constexpr bool kMayStartLate = kLeftRows > 0;
    static __device__ __forceinline__ TileOrder order(const KernelParams& params, const Sequence& sequence, int sequences, uint32 feeds) {
        const bool is_left = kLeftRows > 0 && sequence.seqlen_q <= kLeftRows / params.group_size;
        const float head_bytes = float(sequence.seqlen_k) * ((kHeadDim + kHeadDimV) * 2) / float(params.group_size);
        const uint32 heads = sequences * params.num_heads_q;
        if constexpr (kMaySplit) {
            if (const uint32 split_rows = split_rows_of_head(params); split_rows > 0) {
                // All heads are one group, so that no part comes before a whole tile.
                TileOrder order(sequence.seqlen_q, kBlockM, heads, head_bytes, feeds);
                order.group_heads = heads, order.larger_groups = 0;
                order.tiles_per_head += (split_rows + kBlockM - 1) / kBlockM * (splits_of_tile(params) - 1);
                return order;
            }
        }
        return TileOrder(is_left ? 0 : sequence.seqlen_q, kBlockM, heads, head_bytes, feeds, splits_of_tile(params));
    }
    static __device__ __forceinline__ int heads(const KernelParams& params) { return params.num_heads_q; }
    // So many sequences from this one on are known to have no tiles. Their lengths are loaded side
    // by side: a walk from sequence to sequence takes the latency of a load for each.
    static __device__ __forceinline__ int without_tiles(const KernelParams& params, int from) {
        constexpr int kAhead = 8;
        int count = 0;
        if constexpr (kLeftRows > 0) {
            if (!params.cu_seqlens_q) return 0;
            for (; from + count + kAhead <= params.batch_size; count += kAhead) {
                const int* starts = params.cu_seqlens_q + from + count;
                int longest = 0;
                #pragma unroll
                for (int i = 0; i < kAhead; ++i) longest = max(longest, starts[i + 1] - starts[i]);
                if (longest > kLeftRows / params.group_size) break;
            }
        }
        return count;
    }
    static __device__ __forceinline__ Tile at(const TileOrder& order, uint32 rank, int head, int batch, uint32, const KernelParams& params) {
        PartOfTile part_of = {rank / splits_of_tile(params), 0};
        uint32 tiles = order.tiles_per_head / splits_of_tile(params);
        if constexpr (kMaySplit) {
            part_of.split = int(rank % splits_of_tile(params));
            if (const uint32 split_rows = split_rows_of_head(params); split_rows > 0) {
                tiles = uint32(params.seqlen_q + kBlockM - 1) / kBlockM;
                part_of = PartOfTile::at(rank, tiles, (split_rows + kBlockM - 1) / kBlockM, splits_of_tile(params));
            }
        }
        const int row = int(kIsCausal ? tiles - 1 - part_of.nth : part_of.nth) * kBlockM;
        const Sequence sequence(params, batch);
        if constexpr (kHasBlockMask) return {row, head, batch, KeyList(params, sequence, head, row).size(), 0, 0};
        const BlockRange range = key_blocks<kBlockN>(row, kBlockM, sequence);
        const int blocks = range.end - range.begin;
        if constexpr (!kMaySplit) return {row, head, batch, blocks, range.begin, 0};
        if (part_of.split < 0) return {row, head, batch, blocks, range.begin, -1};
        const SplitSteps part(blocks, part_of.split, splits_of_tile(params));
        return {row, head, batch, part.end - part.begin, range.begin + part.begin, part_of.split};
    }
};

// The backward pass's tiles of kBlockN keys. Under a causal mask most rows see the first keys, so
// these come first. kLastFirst gives the order that schedule/dq_turns.cuh needs. With kHeadByHead
// the tiles of a head have consecutive indices, from the first keys on.
//
// With kMaySplit a tile does a part of its keys' walk through the blocks of queries. With
// kHeadByHead the tiles of a head that do the same part have consecutive indices.
template <bool kLastFirst, bool kHeadByHead = false>
struct KeyTiles {
    using Order = TileOrder;
    static constexpr bool kMayStartLate = false;
    static __device__ __forceinline__ TileOrder order(const KernelParams& params, const Sequence& sequence, int sequences, uint32 feeds) {
        TileOrder order(sequence.seqlen_k, kBlockN, sequences * params.num_heads_kv,
                        float(sequence.seqlen_q) * (kHeadDim * 6 + kHeadDimV * 2) * float(params.group_size), feeds, splits_of_tile(params));
        if constexpr (kHeadByHead) order.group_heads = 1, order.larger_groups = 0;
        return order;
    }
    static __device__ __forceinline__ int heads(const KernelParams& params) { return params.num_heads_kv; }
    static __device__ __forceinline__ int without_tiles(const KernelParams&, int) { return 0; }
    static __device__ __forceinline__ Tile at(const TileOrder& order, uint32 rank, int head, int batch, uint32 wave, const KernelParams& params) {
        uint32 key_rank = rank / splits_of_tile(params), split = rank % splits_of_tile(params);
        if constexpr (kHeadByHead && kMaySplit) {
            const uint32 tiles = order.tiles_per_head / splits_of_tile(params);
            key_rank = rank % tiles, split = rank / tiles;
        }
        const int key = int(kLastFirst ? order.tiles_per_head / splits_of_tile(params) - 1 - key_rank : key_rank) * kBlockN;
        const Sequence sequence(params, batch);
        const BlockRange range = query_blocks<kBlockM>(key, min(kBlockN, sequence.seqlen_k - key), sequence);
        if constexpr (kHasBlockMask) return {key, head, batch, QueryList::count(params, sequence, head, key, range), 0, 0};
        const int steps = (range.end - range.begin) * params.group_size;
        if constexpr (!kMaySplit) return {key, head, batch, steps, kAlternates ? int(wave & 1) : 0, 0};
        const SplitSteps part(steps, split, splits_of_tile(params));
        return {key, head, batch, part.end - part.begin, part.begin, int(split)};
    }
};

// The same where the last tiles of each head are split, those of keys from
// params.first_split_key on, and the others are whole.
struct LastSplitTiles {
    using Order = OrderWithParts;
    static constexpr bool kMayStartLate = false;
    static __device__ __forceinline__ Order order(const KernelParams& params, const Sequence& sequence, int sequences, uint32 feeds) {
        const int whole_keys = params.num_splits > 1 ? params.first_split_key : sequence.seqlen_k;
        const uint32 parts = uint32(sequence.seqlen_k - whole_keys + kBlockN - 1) / kBlockN * params.num_splits;
        const float head_bytes = float(sequence.seqlen_q) * (kHeadDim * 6 + kHeadDimV * 2) * float(params.group_size);
        return {TileOrder(whole_keys, kBlockN, sequences * params.num_heads_kv, head_bytes, feeds), parts};
    }
    static __device__ __forceinline__ int heads(const KernelParams& params) { return params.num_heads_kv; }
    static __device__ __forceinline__ Tile at(const Order& order, uint32 rank, int head, int batch, uint32, const KernelParams& params) {
        const uint32 whole = order.tiles_per_head, part = rank - min(rank, whole), splits = params.num_splits;
        const int key = int(min(rank, whole) + part / splits) * kBlockN;
        const Sequence sequence(params, batch);
        const BlockRange range = query_blocks<kBlockM>(key, min(kBlockN, sequence.seqlen_k - key), sequence);
        const int steps = (range.end - range.begin) * params.group_size;
        if (rank < whole) return {key, head, batch, steps, 0, -1};
        const SplitSteps of_part(steps, part % splits, splits);
        return {key, head, batch, of_part.end - of_part.begin, of_part.begin, int(part % splits)};
    }
};

// All tiles of a launch by index. The second form is for varlen batches.
template <typename Tiles, bool kOfItsOwn>
struct TileList {
    const typename Tiles::Order order;
    __device__ __forceinline__ TileList(const KernelParams& params, uint32 feeds) : order(Tiles::order(params, Sequence(params, 0), params.batch_size, feeds)) {}
    __device__ __forceinline__ Tile at(uint32 index, const KernelParams& params) const {
        if (index >= order.tiles()) return {-1, 0, 0, 0, 0, 0};
        const TileOrder::Place place = order.at(index);
        return Tiles::at(order, place.rank, int(place.batch_head % Tiles::heads(params)), int(place.batch_head / Tiles::heads(params)), place.wave, params);
    }
};
template <typename Tiles>
struct TileList<Tiles, true> {
    TileOrder order;    // of sequence `batch`
    int batch = 0;
    uint32 begin = 0;   // index of the sequence's first tile
    __device__ __forceinline__ TileList(const KernelParams& params, uint32 feeds) : order(Tiles::order(params, Sequence(params, 0), 1, feeds)) {}
    __device__ __forceinline__ Tile at(uint32 index, const KernelParams& params) {
        while (index - begin >= order.tiles()) {
            begin += order.tiles();
            ++batch;
            batch += Tiles::without_tiles(params, batch);
            if (batch >= params.batch_size) return {-1, 0, 0, 0, 0, 0};
            order = Tiles::order(params, Sequence(params, batch), 1, order.feeds);
        }
        const TileOrder::Place place = order.at(index - begin);
        return Tiles::at(order, place.rank, int(place.batch_head), batch, place.wave, params);
    }
};
