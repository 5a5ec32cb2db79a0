// A producer of the sm90 forward kernel for keys of 8 bits: wgmma reads K and V from shared memory,
// so four warps convert them to fp16 on the way there, in registers. convert_in_place.cuh has the
// other producer, load.cuh the copies of Q, and scales.cuh what consumers do with the scales.
//
// A block is chunks of eight rows of 64 columns, and a chunk 16 bytes a lane. A warp has every
// fourth group of eight rows. Chunks come in the order of a block's K, its V, and the next block. A
// lane holds the bytes of the next kInFlight chunks, whose loads run while it converts. With more
// in flight the producer spills, and a trip to memory and back takes as long as kInFlight chunks.
// A spilled number comes back behind the loads of keys before it, so the loop must not spill.
//
// Rows behind the sequence's end are never read and become zeros, whatever a page holds there.

#include "device/attention/key_scales.cuh"
#include "device/eight.cuh"
#include "device/layout/swizzle.cuh"
#include "device/ptx/compiler.cuh"
#include "device/ptx/global.cuh"
#include "device/ptx/sync.cuh"
#include "sm90/forward/load.cuh"
#include "sm90/forward/loader_tiles.cuh"

constexpr int kRowGroups = kBlockN / 32;  // of eight rows, for each warp
constexpr int kChunksOfK = kRowGroups * kBoxesQK, kChunksOfV = kRowGroups * kBoxesV, kChunks = kChunksOfK + kChunksOfV;
static_assert(!kConverts || kLaunchBoxRows > 0 || kBlockN % 32 == 0, "four warps have equally many rows");
static_assert(!kConverts || kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "a row is whole accesses of 16 bytes");

// The most chunks up to eight that divide a block's, so that the registers of a chunk are the same
// in all blocks.
__device__ __forceinline__ constexpr int chunks_in_flight(int most) { return kChunks % most == 0 ? most : chunks_in_flight(most - 1); }
constexpr int kInFlight = chunks_in_flight(kKeysPerScale == 1 && (kPageSize > 0 || kConsumers == 2) ? 4 : 8);

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
    const ScaleRow scale_row;  // of K in a row's first lane, of V in the others

    __device__ __forceinline__ EightKeys(const KernelParams& params, const Sequence& sequence, int head_kv, int lane)
        : params(params), seqlen_k(sequence.seqlen_k), table(table_of(params, sequence)),
          k(static_cast<const uint16*>(params.k.data) + place_of_keys(params, params.k, sequence, head_kv) + lane % 4 * 8),
          v(static_cast<const uint16*>(params.v.data) + place_of_keys(params, params.v, sequence, head_kv) + lane % 4 * 8),
          scale_row(params, lane % 4 == 0 ? scales_of_k(params) : scales_of_v(params), sequence, head_kv) {}

    // The row of the table, as a pointer that is not computed again for each block.
    static __device__ __forceinline__ const int* table_of(const KernelParams& params, const Sequence& sequence) {
        const int* row = params.block_table + sequence.batch * params.block_table_stride;
        if constexpr (kPageSize > 0) make_opaque(row);
        return row;
    }

    // `fetch` reads the table's entries for the lane's rows of a block, from the row of key `key`
    // on. `take` turns entries into pages.
    __device__ __forceinline__ void fetch(Pages& entries, int key, bool exists, bool is_whole) const {
        #pragma unroll
        for (int i = 0; i < kLookups; ++i) {
            const bool is_there = kPageSize > 0 && exists && (is_whole || key + i * 32 < seqlen_k);
            entries[i] = is_there ? __ldg(table + uint32(key + i * 32) / kPageKeys) : 0;
        }
    }
    __device__ __forceinline__ void take(Pages& pages, const Pages& entries) const {
        // The minimum is unsigned, so a negative entry becomes the last page too.
        #pragma unroll
        for (int i = 0; i < kLookups; ++i) pages[i] = min(entries[i], uint32(params.num_pages - 1));
    }

    // The lane's first row of a block of one tensor, without pages.
    __device__ __forceinline__ const uint16* place(bool is_k, int key) const {
        return (is_k ? k : v) + key * (is_k ? params.k : params.v).stride_seqlen;
    }
    // The place of the lane's row of group `group`. The block's first row of the lane is the key
    // `key`, at `block` without pages.
    __device__ __forceinline__ const uint16* place(bool is_k, int group, const uint16* block, const Pages& pages, int key) const {
        const TensorView& view = is_k ? params.k : params.v;
        if constexpr (kPageSize == 0) return block + group * 32 * view.stride_seqlen;
        const uint32 row = uint32(kIsEven ? key : key + group * 32) % kPageKeys + (kIsEven ? group * 32 : 0);
        return (is_k ? k : v) + pages[kIsEven ? 0 : group] * view.stride_batch + int64(row) * view.stride_seqlen;
    }

    // The scales that the thread puts beside a slot. The first of a row's four lanes has those of K
    // and the second those of V. Without scales of keys, lanes 0 and 1 of the first warp have them.
    __device__ __forceinline__ void fetch_scales(Scales& scales, const Pages& pages, int key, bool exists, bool is_whole, int lane) const {
        const bool has_scales = (kKeysPerScale == 1 ? lane % 4 : int(threadIdx.x)) < 2;
        #pragma unroll
        for (int i = 0; i < kScales; ++i) {
            const bool is_there = exists && has_scales && (is_whole || key + i * 32 < seqlen_k);
            scales[i] = is_there ? scale_row.of(key + i * 32, pages[kLookups == 1 ? 0 : i]) : 0.f;
        }
    }
};

// A chunk of a block, by its number, which is known when the kernel is compiled.
struct Chunk {
    bool is_k;
    int group, box;
    int cols_left;  // from the box's first column on

    static __device__ __forceinline__ constexpr Chunk of(int nth) {
        const bool is_k = nth < kChunksOfK;
        const int in_tensor = is_k ? nth : nth - kChunksOfK, boxes = is_k ? kBoxesQK : kBoxesV, box = in_tensor % boxes;
        return {is_k, in_tensor / boxes, box, (is_k ? kHeadDim : kHeadDimV) - box * kBoxCols};
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
    Ring<kVStages> own_ring_v;
    uint4 bytes[kInFlight];  // of the chunks that come next
    const uint16 *at_k, *at_v;  // the lane's first row of the block, without pages
    EightKeys::Pages pages, next_pages, entries;  // of the block, of the next, and of the one after it
    EightKeys::Scales scales;

    // V's ring, which is K's where both have as many slots.
    __device__ __forceinline__ auto& ring_v() {
        if constexpr (kKStages == kVStages) return ring_k;
        else return own_ring_v;
    }

    // Starts the loads of a tile's first block, and looks up the pages of the second.
    __device__ __forceinline__ void begin_tile(const EightKeys& keys, int block, int begin) {
        const int key = block * kBlockN + row;
        keys.fetch(entries, key, block >= begin, false);
        keys.take(pages, entries);
        keys.fetch(entries, key - kBlockN, block - 1 >= begin, true);
        keys.fetch_scales(scales, pages, key, block >= begin, false, lane);
        at_k = keys.place(true, key), at_v = keys.place(false, key);
        #pragma unroll
        for (int nth = 0; nth < kInFlight; ++nth) load(nth, keys, key, block >= begin);
    }
    // The scales of a tile, before its first block is published.
    __device__ __forceinline__ void put_tile_scales(uint32 nth) const {
        if constexpr (kHasTileScales) put_one_each(shared.tile_scales(nth));
    }
    __device__ __forceinline__ void convert_k(const EightKeys& keys, int block, int begin) {
        keys.take(next_pages, entries);
        keys.fetch(entries, (block - 2) * kBlockN + row, block - 2 >= begin, true);
        barrier_wait(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);
        convert<0, kChunksOfK>(shared.k_slot(ring_k.slot), keys, block, begin);
        if constexpr (kHasSlotScales) {
            put(shared.slot_scales(ring_k.slot), kModifiesScores ? 1.f : fabsf(keys.params.softmax_scale_log2));
            keys.fetch_scales(scales, next_pages, (block - 1) * kBlockN + row, block - 1 >= begin, true, lane);
        }
        publish(shared.full_k(ring_k.slot));
        if constexpr (kKStages != kVStages) ring_k.advance();
    }
    __device__ __forceinline__ void convert_v(const EightKeys& keys, int block, int begin) {
        auto& ring = ring_v();
        barrier_wait(shared.empty_v(ring.slot), ring.parity ^ 1);
        convert<kChunksOfK, kChunks>(shared.v_slot(ring.slot), keys, block, begin);
        publish(shared.full_v(ring.slot));
        ring.advance();
        #pragma unroll
        for (int i = 0; i < EightKeys::kLookups; ++i) pages[i] = next_pages[i];
        at_k -= kBlockN * keys.params.k.stride_seqlen, at_v -= kBlockN * keys.params.v.stride_seqlen;
    }

private:
    // Loads a chunk of the block whose first row of the lane is the key `key` or, from kChunks on,
    // of the next block, whose rows are all there. A chunk that is not there is zeros or stays.
    __device__ __forceinline__ void load(int nth, const EightKeys& keys, int key, bool exists) {
        const bool is_next = nth >= kChunks;
        const Chunk chunk = Chunk::of(nth % kChunks);
        const TensorView& view = chunk.is_k ? keys.params.k : keys.params.v;
        const uint16* const block = (chunk.is_k ? at_k : at_v) - (is_next ? kBlockN * view.stride_seqlen : 0);
        const uint16* const from = keys.place(chunk.is_k, chunk.group, block, is_next ? next_pages : pages, key - (is_next ? kBlockN : 0)) +
                                   chunk.box * (kBoxCols / 2);
        if (is_next && chunk.cols_left >= kBoxCols) {
            load_read_only_into(bytes[nth % kInFlight], from, exists);
        } else {
            const bool is_there = (is_next || key + chunk.group * 32 < keys.seqlen_k) && (chunk.cols_left >= kBoxCols || lane % 4 * 16 < chunk.cols_left);
            bytes[nth % kInFlight] = load_read_only_if(from, exists && is_there);
        }
    }
    // Converts the chunks from kBegin to kEnd, those of one tensor. The loads of later chunks take
    // the registers that become free.
    template <int kBegin, int kEnd>
    __device__ __forceinline__ void convert(uint32 tile, const EightKeys& keys, int block, int begin) {
        const int key = block * kBlockN + row;
        // Neighbouring chunks of 16 bytes in the swizzle.
        const uint32 even = tile + first_chunk, odd = tile + (first_chunk ^ 16);
        #pragma unroll
        for (int nth = kBegin; nth < kEnd; ++nth) {
            const uint4& from = bytes[nth % kInFlight];
            uint4 first, second;  // eight numbers each
            eight_to_fp16_pairs<false>(from.x, first.x, first.y), eight_to_fp16_pairs<false>(from.y, first.z, first.w);
            eight_to_fp16_pairs<false>(from.z, second.x, second.y), eight_to_fp16_pairs<false>(from.w, second.z, second.w);
            const uint32 at = Chunk::of(nth).group * (32 * kBoxRowBytes) + Chunk::of(nth).box * (kBlockN * kBoxRowBytes);
            // Eight lanes write an even and an odd row, whose chunks lie in different banks.
            store_four_ints(even + at, first.x, first.y, first.z, first.w);
            store_four_ints(odd + at, second.x, second.y, second.z, second.w);
            load(nth + kInFlight, keys, key, nth + kInFlight < kChunks || block > begin);
        }
    }
    // The scales beside a slot: of K, then of V. Those of K of single keys are the softmax's
    // factors of scores, unless scores are modified before it.
    __device__ __forceinline__ void put(uint32 to, float factor_of_k) const {
        if constexpr (kKeysPerScale != 1) return put_one_each(to);
        const bool is_k = lane % 4 == 0, is_v = lane % 4 == 1;
        uint32 largest = 0;  // bits of positive numbers are ordered as the numbers are
        #pragma unroll
        for (int i = 0; i < EightKeys::kScales; ++i) {
            if (is_v) largest = max(largest, __float_as_uint(fabsf(scales[i])));
            const float scale = is_k ? scales[i] * factor_of_k : scales[i];
            if (is_k || is_v) store_word(to + (lane % 4 * kScalesOfSlot + row % 8 / 2 * kScaleRow + (row / 8 + i * 4) * 2 + row % 2) * 4, __float_as_uint(scale));
        }
        largest = largest_of_warp(largest);
        if (lane == 0) store_word(to + (2 * kScalesOfSlot + warp) * 4, largest);
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

// The producer's loop over tiles and their blocks, in the order of TileLoader (load.cuh). The first
// thread feeds tiles and loads Q. Every warp takes a tile from its slot, as consumers do.
__device__ __forceinline__ void load_eight(const KernelParams& params, const Shared& shared, const TensorMap& map_q, uint32* tile_counter) {
    const int thread = threadIdx.x, lane = thread % 32;
    const bool is_first = thread == 0;
    EightLoader loader{shared, lane};
    Ring<kQStages> ring_q;
    // The loop over blocks has no registers for it.
    EightFeed of_stack(params, tile_counter);
    EightFeed& feed = in_memory(of_stack);
    const bool draws_early = kKStages <= 2 || feed.knows_second();
    for (uint32 nth = 0;; ++nth) {
        const Tile tile = take_tile(shared.tiles, feed, nth, is_first, lane);
        if (tile.first < 0) break;
        const int last = tile.begin + tile.blocks - 1;
        const Sequence sequence(params, tile.batch);
        const EightKeys keys(params, sequence, tile.head / params.group_size, lane);
        loader.begin_tile(keys, last, tile.begin);
        if (last >= tile.begin) {
            loader.put_tile_scales(nth);
            // Two slots: this one is free long before the tile begins.
            if (kQStages > 1 && is_first) load_q(ring_q, shared, map_q, tile, map_rows_q(params, sequence, params.map_rows_q));
        }
        const int draws_at = is_first ? min(last, tile.begin + draws_early) : -1;
        for (int block = last; block >= tile.begin; --block) {
            if (block == draws_at) feed.draw_next();
            loader.convert_k(keys, block, tile.begin);
            if (kQStages == 1 && is_first && block == last) {
                load_q(ring_q, shared, map_q, tile, map_rows_q(params, sequence, params.map_rows_q));
            }
            loader.convert_v(keys, block, tile.begin);
        }
        if (is_first) feed.end_tile();
    }
    if (is_first) feed.finish();
}
