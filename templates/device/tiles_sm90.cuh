// Which tiles a persistent block of threads does, in which order, and how its producer tells its consumers.
//
// Order: heads in groups of which what their tiles share stays in L2 (kGroupMb), and within a group the longest tiles of all its
// heads first. Groups differ by a head at most: a last one of a head or two would begin its longest tiles when nothing else is left. And
// where tiles differ they have about as many as are done at a time, or more: of smaller groups the last would begin its longest just so.
//
// Which: every n-th tile, of n blocks or clusters. Where tiles differ in length (under a causal mask, a window or a block mask, of sequences of
// their own lengths), one takes the next tile that nobody has taken, by a counter in device memory. The last block of threads to finish sets the
// counter back to zero, as the next launch on its stream expects it (src/kernel/tile_counters.rs). Without a counter (null): every
// n-th tile.
//
// Sequences of their own lengths come one after the other, each with the tiles that it has. How many that are is in device memory, so
// whoever asks remembers where he is, and asks in rising order.

struct Tile {
    int first;     // query row, in the backward pass key, that it starts with; negative: no tile is left
    int head, batch;
    int blocks;    // blocks that the producer loads for it
    int begin;     // forward: the first of them; 0 without a window
};

// Whether a head's tiles may differ in length.
constexpr bool kTilesDiffer = kIsCausal || kHasWindow || kIsVarlen || kHasBlockMask;

// Tiles of some rows (or keys) of heads of one length, in the order in which they are started.
struct TileOrder {
    uint32 tiles_per_head, num_heads;
    uint32 group_heads, larger_groups;  // the first groups, which have a head more

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
    struct Place { uint32 turn, batch_head; };  // turn: of its head's tiles
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
    static __device__ __forceinline__ Tile at(const TileOrder& order, uint32 turn, int head, int batch, const KernelParams& params) {
        const int row = int(kIsCausal ? order.tiles_per_head - 1 - turn : turn) * kBlockM;
        const Sequence sequence(params, batch);
        if constexpr (kHasBlockMask) return {row, head, batch, KeyList(params, sequence, head, row).size(), 0};
        const BlockRange range = key_blocks<kBlockN>(row, kBlockM, sequence);
        return {row, head, batch, range.end - range.begin, range.begin};
    }
};

// Tiles of kBlockN keys, the backward pass's. The first keys are seen by most rows. kLastFirst: as device/turns.cuh wants them.
template <bool kLastFirst>
struct KeyTiles {
    static __device__ __forceinline__ TileOrder order(const KernelParams& params, const Sequence& sequence, int sequences, uint32 feeds) {
        return TileOrder(sequence.seqlen_k, kBlockN, sequences * params.num_heads_kv,
                         float(sequence.seqlen_q) * (kHeadDim * 6 + kHeadDimV * 2) * float(params.group_size), feeds);
    }
    static __device__ __forceinline__ int heads(const KernelParams& params) { return params.num_heads_kv; }
    static __device__ __forceinline__ Tile at(const TileOrder& order, uint32 turn, int head, int batch, const KernelParams& params) {
        const int key = int(kLastFirst ? order.tiles_per_head - 1 - turn : turn) * kBlockN;
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
        return Tiles::at(order, place.turn, int(place.batch_head % Tiles::heads(params)), int(place.batch_head / Tiles::heads(params)), params);
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
        return Tiles::at(order, place.turn, int(place.batch_head), batch, params);
    }
};

// The slots in shared memory through which tiles are passed on. Consumers hold a tile's slot to its end and look at the next
// one's before, so there are more than two.
struct TileSlots {
    static constexpr int kSlots = 4;
    static constexpr int kTileBytes = kHasWindow ? 32 : 16;
    static constexpr int kBytes = kSlots * (kTileBytes + 8 + 8);
    uint32 base;  // tiles, full barriers, empty barriers

    __device__ __forceinline__ uint32 place(uint32 turn) const { return base + turn % kSlots * kTileBytes; }
    __device__ __forceinline__ uint32 full(uint32 turn) const { return base + kSlots * kTileBytes + turn % kSlots * 8; }
    __device__ __forceinline__ uint32 empty(uint32 turn) const { return base + kSlots * (kTileBytes + 8) + turn % kSlots * 8; }
    static __device__ __forceinline__ uint32 parity(uint32 turn) { return turn / kSlots & 1; }

    __device__ __forceinline__ void init(int consumer_warps) const {
        for (int slot = 0; slot < kSlots; ++slot) barrier_init(full(slot), 1), barrier_init(empty(slot), consumer_warps);
    }
    __device__ __forceinline__ void put(uint32 turn, const Tile& tile) const {
        barrier_wait(empty(turn), parity(turn) ^ 1);
        asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" :: "r"(place(turn)), "r"(tile.first), "r"(tile.head), "r"(tile.batch), "r"(tile.blocks) : "memory");
        if constexpr (kHasWindow) asm volatile("st.shared.s32 [%0], %1;" :: "r"(place(turn) + 16), "r"(tile.begin) : "memory");
        barrier_arrive(full(turn));
    }
    __device__ __forceinline__ Tile get(uint32 turn) const {
        Tile tile;
        barrier_wait(full(turn), parity(turn));
        asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(tile.first), "=r"(tile.head), "=r"(tile.batch), "=r"(tile.blocks) : "r"(place(turn)) : "memory");
        tile.begin = 0;
        if constexpr (kHasWindow) asm volatile("ld.shared.s32 %0, [%1];" : "=r"(tile.begin) : "r"(place(turn) + 16) : "memory");
        return tile;
    }
    // By each consumer warp.
    __device__ __forceinline__ void release(uint32 turn, int lane) const {
        __syncwarp();  // every lane has read
        if (lane == 0) barrier_arrive(empty(turn));
    }
};

// The producer's source of tiles: of a block of threads, or of a cluster of kBlocks of them. It draws the next tile before it loads the last
// block of one, which hides the atomic's latency. One drawn any earlier would wait for a long tile to end where others have nothing
// left to do (DESIGN.md, tuning log).
// kByTicket: all tiles by the counter, the first one too, which its owner sets to zero before the launch, and none before the one before
// is loaded (device/turns.cuh says why).
template <typename Tiles, int kBlocks = 1, bool kByTicket = false>
struct TileFeed {
    const KernelParams& params;
    TileList<Tiles, kIsVarlen> tiles;
    uint32* const counter;
    uint32 index = blockIdx.x / kBlocks, next = 0;
    bool has_next = false;

    static __device__ __forceinline__ uint32 feeds() { return gridDim.x / kBlocks; }
    __device__ __forceinline__ TileFeed(const KernelParams& params, uint32* counter)
        : params(params), tiles(params, feeds()), counter(kTilesDiffer || kByTicket ? counter : nullptr) {
        if (kByTicket && this->counter) index = draw();
    }
    __device__ __forceinline__ uint32 draw() const { return (kByTicket ? 0 : feeds()) + atomicAdd(counter, 1u); }
    __device__ __forceinline__ Tile tile() { return tiles.at(index, params); }
    // Before a tile's last block; of one without a block advance() draws.
    __device__ __forceinline__ void draw_next() {
        if (!kByTicket && counter) next = draw(), has_next = true;
    }
    __device__ __forceinline__ void advance() {
        if (!counter) index += feeds();
        else index = has_next ? next : draw();
        has_next = false;
    }
    __device__ __forceinline__ void finish() const {
        if (kByTicket || !counter) return;
        __threadfence();  // this feed's draws come before its end
        if (atomicAdd(counter + 1, 1u) == feeds() - 1) counter[0] = 0, counter[1] = 0;
    }
};
