// Which tiles a persistent block of threads does, in which order, and how its producer tells its consumers.
//
// Order: heads in groups whose K and V together stay in L2 (kGroupMb), and within a group the longest rows of all its heads
// first; under a causal mask the last rows are the longest.
//
// Which: every gridDim.x-th tile. Under a causal mask tiles differ in length, and a block takes the next tile that nobody
// has taken, by a counter in device memory. The last block of threads to finish sets the counter back to zero, as the next
// launch on its stream expects it (src/kernel/tile_counters.rs). Without a counter (null): every gridDim.x-th tile.

struct Tile {
    int row;       // first query row of the tile; negative: no tile is left
    int head, batch;
    int blocks;    // key blocks that the producer loads: [0, blocks), from the last to the first
};

struct TileOrder {
    uint32 num_m_blocks, num_heads, group_heads;

    __device__ __forceinline__ TileOrder(const KernelParams& params) {
        num_m_blocks = uint32(params.seqlen_q + kBlockM - 1) / kBlockM;
        num_heads = params.batch_size * params.num_heads_q;
        const float fitting = float(kGroupMb << 20) / (float(params.seqlen_k) * ((kHeadDim + kHeadDimV) * 2)) * float(params.group_size);
        group_heads = kGroupMb == 0 ? num_heads : uint32(fmaxf(1.f, fminf(fitting, float(num_heads))));
    }
    __device__ __forceinline__ Tile at(uint32 index, const KernelParams& params) const {
        if (index >= num_m_blocks * num_heads) return {-1, 0, 0, 0};
        const uint32 group = index / (num_m_blocks * group_heads), within = index % (num_m_blocks * group_heads);
        const uint32 heads = min(group_heads, num_heads - group * group_heads);
        const uint32 turn = within / heads, batch_head = group * group_heads + within % heads;
        const int row = int(kIsCausal ? num_m_blocks - 1 - turn : turn) * kBlockM;
        return {row, int(batch_head % params.num_heads_q), int(batch_head / params.num_heads_q), key_blocks<kBlockN>(row, kBlockM, params).end};
    }
};

// The slots in shared memory through which tiles are passed on. Consumers hold a tile's slot to its end and look at the next
// one's before, so there are more than two.
struct TileSlots {
    static constexpr int kSlots = 4;
    static constexpr int kBytes = kSlots * (16 + 8 + 8);
    uint32 base;  // tiles, full barriers, empty barriers

    __device__ __forceinline__ uint32 place(uint32 turn) const { return base + turn % kSlots * 16; }
    __device__ __forceinline__ uint32 full(uint32 turn) const { return base + kSlots * 16 + turn % kSlots * 8; }
    __device__ __forceinline__ uint32 empty(uint32 turn) const { return base + kSlots * 24 + turn % kSlots * 8; }
    static __device__ __forceinline__ uint32 parity(uint32 turn) { return turn / kSlots & 1; }

    __device__ __forceinline__ void init(int consumer_warps) const {
        for (int slot = 0; slot < kSlots; ++slot) barrier_init(full(slot), 1), barrier_init(empty(slot), consumer_warps);
    }
    __device__ __forceinline__ void put(uint32 turn, const Tile& tile) const {
        barrier_wait(empty(turn), parity(turn) ^ 1);
        asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" :: "r"(place(turn)), "r"(tile.row), "r"(tile.head), "r"(tile.batch), "r"(tile.blocks) : "memory");
        barrier_arrive(full(turn));
    }
    __device__ __forceinline__ Tile get(uint32 turn) const {
        Tile tile;
        barrier_wait(full(turn), parity(turn));
        asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(tile.row), "=r"(tile.head), "=r"(tile.batch), "=r"(tile.blocks) : "r"(place(turn)) : "memory");
        return tile;
    }
    // By each consumer warp.
    __device__ __forceinline__ void release(uint32 turn, int lane) const {
        __syncwarp();  // every lane has read
        if (lane == 0) barrier_arrive(empty(turn));
    }
};

// The producer's source of tiles.
struct TileFeed {
    const KernelParams& params;
    const TileOrder order;
    uint32* const counter;
    uint32 index = blockIdx.x;
    uint32 drawn;           // one ahead, so that the atomic's latency is hidden

    __device__ __forceinline__ TileFeed(const KernelParams& params, uint32* counter) : params(params), order(params), counter(kIsCausal ? counter : nullptr) { draw(); }
    __device__ __forceinline__ void draw() {
        if (counter) drawn = gridDim.x + atomicAdd(counter, 1u);
    }
    __device__ __forceinline__ Tile tile() const { return order.at(index, params); }
    __device__ __forceinline__ void advance() {
        if (counter) {
            index = drawn;
            draw();
        } else {
            index += gridDim.x;
        }
    }
    __device__ __forceinline__ void finish() const {
        if (!counter) return;
        __threadfence();  // this block's draws come before its end
        if (atomicAdd(counter + 1, 1u) == gridDim.x - 1) counter[0] = 0, counter[1] = 0;
    }
};
