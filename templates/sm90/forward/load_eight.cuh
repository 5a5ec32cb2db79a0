// The producer of the sm90 forward kernel for keys of 8 bits: wgmma reads K and V from shared
// memory, so four warps convert them to q's type on the way there. load.cuh has the copies of Q,
// and scales.cuh what consumers do with the scales.
//
// A block is chunks of eight rows of 64 columns, and a chunk 16 bytes a lane. A warp has every
// fourth group of eight rows. Chunks come in the order of a block's K, its V, and the next block. A
// lane holds the bytes of the next kInFlight chunks, whose loads run while it converts. With more
// in flight the producer spills, and a trip to memory and back takes as long as kInFlight chunks.
//
// Rows behind the sequence's end are never read and become zeros, whatever a page holds there.

#include "device/attention/key_scales.cuh"
#include "device/eight.cuh"
#include "device/layout/swizzle.cuh"
#include "device/ptx/global.cuh"
#include "device/ptx/sync.cuh"
#include "device/schedule/tile_feed.cuh"
#include "sm90/forward/load.cuh"

constexpr int kRowGroups = kBlockN / 32;  // of eight rows, for each warp
constexpr int kChunksOfK = kRowGroups * kBoxesQK, kChunksOfV = kRowGroups * kBoxesV, kChunks = kChunksOfK + kChunksOfV;
static_assert(!kConverts || kBlockN % 32 == 0, "four warps have equally many rows");
static_assert(!kConverts || kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "a row is whole accesses of 16 bytes");

// The most chunks up to eight that divide a block's, so that the registers of a chunk are the same
// in all blocks.
__device__ __forceinline__ constexpr int chunks_in_flight(int most) { return kChunks % most == 0 ? most : chunks_in_flight(most - 1); }
constexpr int kInFlight = chunks_in_flight(8);

// The keys of one tile: where its head's rows and scales lie.
struct EightKeys {
    // A thread looks up the page of each of its rows, or of the first where all are in one page.
    static constexpr bool kIsEven = kPageKeys % kBlockN == 0;
    static constexpr int kLookups = kPageSize == 0 || kIsEven ? 1 : kRowGroups;
    using Pages = uint32[kLookups];
    // Scales that a thread fetches for a block: of its rows, or one.
    static constexpr int kScales = kKeysPerScale == 1 ? kRowGroups : 1;
    using Scales = float[kScales];

    const KernelParams& params;
    const int seqlen_k;
    const int* const table;
    const uint16 *const k, *const v;  // the lane's columns of the head's row 0, of the sequence or of page 0
    const ScaleRow k_scales, v_scales;

    __device__ __forceinline__ EightKeys(const KernelParams& params, const Sequence& sequence, int head_kv, int lane)
        : params(params), seqlen_k(sequence.seqlen_k), table(params.block_table + sequence.batch * params.block_table_stride),
          k(static_cast<const uint16*>(params.k.data) + place_of_keys(params, params.k, sequence, head_kv) + lane % 4 * 8),
          v(static_cast<const uint16*>(params.v.data) + place_of_keys(params, params.v, sequence, head_kv) + lane % 4 * 8),
          k_scales(params, scales_of_k(params), sequence, head_kv), v_scales(params, scales_of_v(params), sequence, head_kv) {}

    // `fetch` reads the table's entries for the lane's rows of a block, from the row of key `key`
    // on. `take` turns entries into pages.
    __device__ __forceinline__ void fetch(Pages& entries, int key, bool exists) const {
        #pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const bool is_there = kPageSize > 0 && exists && key + i * 32 < seqlen_k;
            entries[i] = is_there ? __ldg(table + uint32(key + i * 32) / kPageKeys) : 0;
        }
    }
    __device__ __forceinline__ void take(Pages& pages, const Pages& entries) const {
        // The minimum is unsigned, so a negative entry becomes the last page too.
        #pragma unroll
        for (int i = 0; i < kLookups; ++i) pages[i] = min(entries[i], uint32(params.num_pages - 1));
    }

    // The end of the keys to load of a block. A block that does not exist may begin before key 0.
    __device__ __forceinline__ int end_if(bool exists) const { return exists ? seqlen_k : -kBlockN; }

    // The lane's 16 bytes of a block's chunk `nth`. The block's first row of the lane is the key
    // `key`; keys from `end` on are not there.
    __device__ __forceinline__ uint4 load(int nth, const Pages& pages, int key, int end, int lane) const {
        const bool is_k = nth < kChunksOfK;
        const int boxes = is_k ? kBoxesQK : kBoxesV, cols = is_k ? kHeadDim : kHeadDimV;
        const int in_tensor = is_k ? nth : nth - kChunksOfK, group = in_tensor / boxes, box = in_tensor % boxes;
        const bool is_there = key + group * 32 < end && (cols % kBoxCols == 0 || box * kBoxCols + lane % 4 * 16 < cols);
        const TensorView& view = is_k ? params.k : params.v;
        // The distance to a group is the same in all lanes.
        const uint16* from = (is_k ? k : v) + key * view.stride_seqlen + group * 32 * view.stride_seqlen;
        if constexpr (kPageSize > 0) {
            const uint32 row = uint32(kIsEven ? key : key + group * 32) % kPageKeys + (kIsEven ? group * 32 : 0);
            from = (is_k ? k : v) + pages[kIsEven ? 0 : group] * view.stride_batch + int64(row) * view.stride_seqlen;
        }
        return load_read_only_if(from + box * (kBoxCols / 2), is_there);
    }

    // The scales that the thread puts beside a slot. The first of a row's four lanes has those of K
    // and the second those of V. Without scales of keys, lanes 0 and 1 of the first warp have them.
    __device__ __forceinline__ void fetch_scales(Scales& scales, const Pages& pages, int key, bool exists, int lane) const {
        const bool is_k = lane % 4 == 0;
        #pragma unroll
        for (int i = 0; i < kScales; ++i) {
            const bool is_there = exists && (kKeysPerScale == 1 ? lane % 4 : int(threadIdx.x)) < 2 && key + i * 32 < seqlen_k;
            const uint32 page = pages[kLookups == 1 ? 0 : i];
            scales[i] = !is_there ? 0.f : is_k ? k_scales.of(key + i * 32, page) : v_scales.of(key + i * 32, page);
        }
    }
};

// The conversions of all tiles' keys, by one thread of four warps.
struct EightLoader {
    const Shared& shared;
    const int lane;
    const int warp = uniform(threadIdx.x / 32);
    const int row = warp * 8 + lane / 4;  // the thread's first row of a block; the others are 32, 64, ... behind
    const uint32 first_chunk = row * kBoxRowBytes + swizzled(lane % 4 * 2, lane / 4);
    Ring<kKStages> ring_k;
    Ring<kVStages> ring_v;
    uint4 bytes[kInFlight];  // of the chunks that come next
    EightKeys::Pages pages, next_pages, entries;  // of the block, of the next, and of the one after it
    EightKeys::Scales scales;

    // Starts the loads of a tile's first block, and looks up the pages of the second.
    __device__ __forceinline__ void begin_tile(const EightKeys& keys, int block, int begin) {
        const int key = block * kBlockN + row;
        keys.fetch(entries, key, block >= begin);
        keys.take(pages, entries);
        keys.fetch(entries, key - kBlockN, block - 1 >= begin);
        keys.fetch_scales(scales, pages, key, block >= begin, lane);
        #pragma unroll
        for (int nth = 0; nth < kInFlight; ++nth) bytes[nth] = keys.load(nth, pages, key, keys.end_if(block >= begin), lane);
    }
    // Converts a block's K. The scales of a tile go with its first block.
    __device__ __forceinline__ void convert_k(const EightKeys& keys, int block, int begin, bool is_first, uint32 nth_tile) {
        keys.take(next_pages, entries);
        keys.fetch(entries, (block - 2) * kBlockN + row, block - 2 >= begin);
        barrier_wait(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);
        convert<0, kChunksOfK, kBoxesQK>(shared.k_slot(ring_k.slot), keys, block, begin);
        if constexpr (kHasTileScales) {
            if (is_first) put_one_each(shared.tile_scales(nth_tile));
        } else {
            put(shared.slot_scales(ring_k.slot));
            keys.fetch_scales(scales, next_pages, (block - 1) * kBlockN + row, block - 1 >= begin, lane);
        }
        publish(shared.full_k(ring_k.slot));
        ring_k.advance();
    }
    __device__ __forceinline__ void convert_v(const EightKeys& keys, int block, int begin) {
        barrier_wait(shared.empty_v(ring_v.slot), ring_v.parity ^ 1);
        convert<kChunksOfK, kChunks, kBoxesV>(shared.v_slot(ring_v.slot), keys, block, begin);
        publish(shared.full_v(ring_v.slot));
        ring_v.advance();
        #pragma unroll
        for (int i = 0; i < EightKeys::kLookups; ++i) pages[i] = next_pages[i];
    }

private:
    // Converts the chunks from kBegin to kEnd, those of one tensor. The loads of later chunks take
    // the registers that become free.
    template <int kBegin, int kEnd, int kBoxes>
    __device__ __forceinline__ void convert(uint32 tile, const EightKeys& keys, int block, int begin) {
        const int key = block * kBlockN + row, next_end = keys.end_if(block > begin);
        // Neighbouring chunks of 16 bytes in the swizzle.
        const uint32 even = tile + first_chunk, odd = tile + (first_chunk ^ 16);
        #pragma unroll
        for (int nth = kBegin; nth < kEnd; ++nth) {
            const uint4 from = bytes[nth % kInFlight];
            const int later = nth + kInFlight;
            bytes[nth % kInFlight] = later < kChunks ? keys.load(later, pages, key, keys.seqlen_k, lane)
                                                     : keys.load(later - kChunks, next_pages, key - kBlockN, next_end, lane);
            uint4 first, second;  // eight numbers each
            eight_to_elements(from.x, first.x, first.y), eight_to_elements(from.y, first.z, first.w);
            eight_to_elements(from.z, second.x, second.y), eight_to_elements(from.w, second.z, second.w);
            const int group = (nth - kBegin) / kBoxes, box = (nth - kBegin) % kBoxes;
            const uint32 at = group * (32 * kBoxRowBytes) + box * (kBlockN * kBoxRowBytes);
            // Eight lanes write an even and an odd row, whose chunks lie in different banks.
            store_four_ints(even + at, first.x, first.y, first.z, first.w);
            store_four_ints(odd + at, second.x, second.y, second.z, second.w);
        }
    }
    // The scales beside a slot: of K, then of V.
    __device__ __forceinline__ void put(uint32 to) const {
        if constexpr (kKeysPerScale != 1) return put_one_each(to);
        if (lane % 4 >= 2) return;
        #pragma unroll
        for (int i = 0; i < EightKeys::kScales; ++i) store_word(to + (lane % 4 * kScalesOfSlot + row + i * 32) * 4, __float_as_uint(scales[i]));
    }
    __device__ __forceinline__ void put_one_each(uint32 to) const {
        if (warp == 0 && lane < 2) store_word(to + lane * 4, __float_as_uint(scales[0]));
    }
    // wgmma reads what the warp's lanes have stored: each lane fences its own stores, and one
    // arrives for all.
    __device__ __forceinline__ void publish(uint32 full) const {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
    }
};

// The producer's loop over tiles and their blocks, in the order of load.cuh's caller. The first
// thread feeds tiles and loads Q. Every warp takes a tile from its slot, as consumers do.
__device__ __forceinline__ void load_eight(const KernelParams& params, const Shared& shared, const TensorMap& map_q, uint32* tile_counter) {
    const int thread = threadIdx.x, lane = thread % 32;
    const bool is_first = thread == 0;
    EightLoader loader{shared, lane};
    Ring<kQStages> ring_q;
    // Keys without pages have the feed of load.cuh's caller.
    using Tiles = QueryTiles<kDecodeRows>;
    using Feed = Either<kPageSize == 0, DrawingFeed<Tiles>, TileFeed<Tiles>>::Type;
    Feed feed(params, tile_counter);
    const bool draws_early = kKStages <= 2 || feed.knows_second();
    for (uint32 nth = 0;; ++nth) {
        if (is_first && feed.kAdvancesFirst) feed.advance();
        if (is_first) shared.tiles.put(nth, feed.tile());
        __syncwarp();  // no lane waits for the tile before the first one has put it there
        const Tile tile = shared.tiles.get(nth);
        shared.tiles.release(nth, lane);
        if (tile.first < 0) break;
        const int last = tile.begin + tile.blocks - 1;
        const Sequence sequence(params, tile.batch);
        const EightKeys keys(params, sequence, tile.head / params.group_size, lane);
        loader.begin_tile(keys, last, tile.begin);
        for (int block = last; block >= tile.begin; --block) {
            if (is_first && block == min(last, tile.begin + draws_early)) feed.draw_next();
            loader.convert_k(keys, block, tile.begin, block == last, nth);
            if (is_first && block == last) load_q(ring_q, shared, map_q, tile, map_rows_q(params, sequence, params.map_rows_q));
            loader.convert_v(keys, block, tile.begin);
        }
        if (is_first && !feed.kAdvancesFirst) feed.advance();
    }
    if (is_first) feed.finish();
}
