// A producer of the sm90 forward kernel for keys of 8 bits: wgmma reads K and V from shared memory
// in fp16. One warp loads bytes by TMA into the slots in which K and V become fp16, and three warps
// convert them there. load_eight.cuh converts in registers, and src/family chooses between the two.
//
// 128 bytes of a row lie where the second of their two boxes of fp16 has the row. Eight lanes read
// them and write the row of both boxes, so a warp overwrites nothing that another still reads. The
// 64 bytes of a single last box lie in the row of that box.
//
// The loader is ahead of the converters by as many blocks as there are slots. It copies scales too,
// beside K's slot or the tile's, where the barrier of K's bytes counts them.

#include "device/attention/key_boxes.cuh"
#include "device/attention/key_scales.cuh"
#include "device/eight.cuh"
#include "device/layout/swizzle.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/shared.cuh"
#include "device/ptx/sync.cuh"
#include "sm90/forward/load.cuh"
#include "sm90/forward/loader_tiles.cuh"
#include "sm90/forward/units.cuh"

constexpr uint32 kSlotBoxBytes = kBlockN * kBoxRowBytes;

// The boxes of bytes in a slot of kBoxes_ boxes of fp16, for load_boxes: one for each pair of
// boxes, in the second of them, and one for a single last box, in its place.
template <int kBoxes_>
struct ByteTile {
    static constexpr int kBoxes = (kBoxes_ + 1) / 2;
    static constexpr uint32 kFirst = kBoxes_ > 1 ? kSlotBoxBytes : 0;
    static constexpr int kBoxBytes = (kBoxes_ == 3 ? 1 : 2) * kSlotBoxBytes;  // from one box of bytes to the next
    static constexpr uint32 kBytes = kBoxes * kSlotBoxBytes;  // that arrive
};
using BytesOfK = ByteTile<kBoxesQK>;
using BytesOfV = ByteTile<kBoxesV>;

// The copies of scales by the loader's lanes.
struct ScaleCopies {
    const Sequence& sequence;
    const ScaleRow k_row, v_row;
    const int lane;

    __device__ __forceinline__ ScaleCopies(const KernelParams& params, const Sequence& sequence, int head_kv, int lane)
        : sequence(sequence), k_row(params, scales_of_k(params), sequence, head_kv),
          v_row(params, scales_of_v(params), sequence, head_kv), lane(lane) {}

    // Those that all keys of a tile share.
    __device__ __forceinline__ void of_tile(uint32 to) const {
        if (kHasTileScales && lane < 2) cp_async<4>(to + lane * 4, lane == 0 ? k_row.data : v_row.data, true);
    }
    // Those of a block. Zeros stand for keys behind the sequence's end.
    __device__ __forceinline__ void of_block(uint32 to, const KeyPages<kBlockN>& pages, int block) const {
        if constexpr (kKeysPerScale == 1) {
            #pragma unroll
            for (int i = 0; i < (kBlockN + 31) / 32; ++i) {
                const int row = i * 32 + lane, key = block * kBlockN + row;
                if (kBlockN % 32 != 0 && row >= kBlockN) break;
                const bool exists = key < sequence.seqlen_k;
                const uint32 page = pages.pages[KeyPages<kBlockN>::kIsEven ? 0 : i];
                cp_async<4>(to + place_of_k_scale(row) * 4, k_row.place(exists ? key : 0, page), exists);
                cp_async<4>(to + kSlotScalesOfV + row * 4, v_row.place(exists ? key : 0, page), exists);
            }
        } else if constexpr (kHasSlotScales) {
            const float* const from = lane == 0 ? k_row.place(block * kBlockN, 0) : v_row.place(block * kBlockN, 0);
            if (lane < 2) cp_async<4>(to + lane * 4, from, true);
        }
    }
};

// The loader's loop over tiles and their blocks, in the order of TileLoader (load.cuh), by one
// warp.
__device__ __forceinline__ void load_bytes(const KernelParams& params, const Shared& shared, const TensorMap& map_q,
                                           const TensorMap& map_k, const TensorMap& map_v, uint32* tile_counter) {
    const int lane = threadIdx.x;
    const bool is_first = lane == 0;
    Ring<kKStages> ring_k;
    Ring<kVStages> ring_v;
    Ring<kQStages> ring_q;
    EightFeed feed(params, tile_counter);
    for (uint32 nth = 0;; ++nth) {
        const Tile tile = take_tile(shared.tiles, feed, nth, is_first, lane);
        if (tile.first < 0) break;
        const int head_kv = tile.head / params.group_size, last = tile.begin + tile.blocks - 1;
        const Sequence sequence(params, tile.batch);
        const MapRows rows_k = map_rows_k(params, sequence, params.map_rows_k), rows_v = map_rows_k(params, sequence, params.map_rows_v);
        const ScaleCopies scales(params, sequence, head_kv, lane);
        // The table is read two blocks ahead, since a block's copies begin at once after those of
        // the block before.
        KeyPages<kBlockN> pages(params, sequence);
        KeyPages<kBlockN>::Entries entries;
        const auto fetch = [&](int block) {
            if constexpr (kPageSize > 0) pages.fetch_ahead(entries, block, block >= tile.begin ? block + 1 : block, lane);
        };
        const auto take = [&] {
            if constexpr (kPageSize > 0) pages.take(entries);
        };
        fetch(last), take(), fetch(last - 1);
        const bool draws_early = kPageSize == 0 && (kKStages <= 2 || feed.knows_second());
        for (int block = last; block >= tile.begin; --block) {
            if (is_first && block == min(last, tile.begin + draws_early)) feed.draw_next();
            barrier_wait_as_warp(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);
            if (is_first) barrier_expect(shared.bytes_k(ring_k.slot), BytesOfK::kBytes);
            load_boxes<BytesOfK>(shared.k_slot(ring_k.slot) + BytesOfK::kFirst, map_k, shared.bytes_k(ring_k.slot), pages, block, head_kv, rows_k, is_first);
            if (block == last) scales.of_tile(shared.tile_scales(nth));
            scales.of_block(shared.slot_scales(ring_k.slot), pages, block);
            cp_async_arrive(shared.bytes_k(ring_k.slot));
            ring_k.advance();
            if (is_first && block == last) load_q(ring_q, shared, map_q, tile, map_rows_q(params, sequence, params.map_rows_q));
            barrier_wait_as_warp(shared.empty_v(ring_v.slot), ring_v.parity ^ 1);
            if (is_first) barrier_expect(shared.bytes_v(ring_v.slot), BytesOfV::kBytes);
            load_boxes<BytesOfV>(shared.v_slot(ring_v.slot) + BytesOfV::kFirst, map_v, shared.bytes_v(ring_v.slot), pages, block, head_kv, rows_v, is_first);
            ring_v.advance();
            take(), fetch(block - 2);
        }
        if (is_first) feed.end_tile();
    }
    if (is_first) feed.finish();
}

// The conversions of a slot by one of three warps. kLanes lanes have a row of 16 * kLanes columns,
// and a warp has every third group of 32 / kLanes rows.
template <int kLanes>
struct RowConverter {
    static constexpr int kGroupRows = 32 / kLanes, kGroups = kBlockN / kGroupRows;
    static constexpr int kMostGroups = (kGroups + kConverterWarps - 1) / kConverterWarps;
    static constexpr int kStep = kConverterWarps * kGroupRows;  // rows from a group to the warp's next
    static_assert(kBlockN % kGroupRows == 0, "groups are whole");

    const int first_group;
    const int row;  // the lane's first
    // In bytes from the box on: of what the lane reads first and writes first. Half of the lanes
    // begin with the upper eight of their 16 bytes. So 16 lanes read, and eight lanes write, in
    // different banks.
    uint32 from, to;

    __device__ __forceinline__ RowConverter(int warp, int lane)
        : first_group(warp), row(warp * kGroupRows + lane / 8 + (kLanes == 4 ? lane / 4 % 2 * 4 : 0)) {
        const int is_upper = (lane / 4 ^ lane / 8) & 1;
        from = row * kBoxRowBytes + swizzled(lane % kLanes, row % 8) + is_upper * 8;
        to = lane % kLanes / 4 * kSlotBoxBytes + row * kBoxRowBytes + swizzled(lane % 4 * 2 + is_upper, row % 8);
    }

    // Converts the bytes of kTimes boxes, the first at `bytes_tile`, to the boxes from `tile` on.
    // Rows from `rows_left` on become zeros. With kIsScaled a row is multiplied by its scale at
    // `scales` times `factor`.
    template <int kTimes, bool kIsWhole, bool kIsScaled>
    __device__ __forceinline__ void convert(uint32 bytes_tile, uint32 tile, int rows_left, uint32 scales, float factor) const {
        constexpr int kChunks = kMostGroups * kTimes, kAhead = kChunks < 3 ? kChunks : 3;
        // Four rows on, the swizzle flips the third bit of a chunk.
        constexpr bool kFlips = kStep % 8 != 0;
        const uint32 low = bytes_tile + from, high = low ^ 8, first = tile + to, second = first ^ 16;
        const auto moved = [&](uint32 at, int nth) {
            const int group = nth / kTimes;
            return (kFlips && group % 2 ? at ^ 64 : at) + group * kStep * kBoxRowBytes + nth % kTimes * (2 * kSlotBoxBytes);
        };
        const auto exists = [&](int group) {
            return kGroups % kConverterWarps == 0 || group < kMostGroups - 1 || first_group + group * kConverterWarps < kGroups;
        };
        uint2 bytes[kAhead][2];
        const auto load = [&](int nth) {
            if (!exists(nth / kTimes)) return;
            bytes[nth % kAhead][0] = load_two_words(moved(low, nth)), bytes[nth % kAhead][1] = load_two_words(moved(high, nth));
        };
        uint32 scale_pair = 0;
        #pragma unroll
        for (int nth = 0; nth < kAhead; ++nth) load(nth);
        __syncwarp();
        #pragma unroll
        for (int nth = 0; nth < kChunks; ++nth) {
            const int group = nth / kTimes;
            if (exists(group)) {
                uint2 one = bytes[nth % kAhead][0], other = bytes[nth % kAhead][1];
                if (!kIsWhole && row + group * kStep >= rows_left) one = other = make_uint2(0, 0);
                uint4 numbers, others;  // eight each
                eight_to_fp16_pairs<false>(one.x, numbers.x, numbers.y), eight_to_fp16_pairs<false>(one.y, numbers.z, numbers.w);
                eight_to_fp16_pairs<false>(other.x, others.x, others.y), eight_to_fp16_pairs<false>(other.y, others.z, others.w);
                if constexpr (kIsScaled) {
                    if (nth % kTimes == 0) {
                        const float scale = load_float(scales + (row + group * kStep) * 4) * factor;
                        scale_pair = floats_to_fp16_pair(scale, scale);
                    }
                    multiply_numbers(numbers, scale_pair), multiply_numbers(others, scale_pair);
                }
                store_four_ints(moved(first, nth), numbers.x, numbers.y, numbers.z, numbers.w);
                store_four_ints(moved(second, nth), others.x, others.y, others.z, others.w);
            }
            if (nth + kAhead < kChunks) load(nth + kAhead);
            __syncwarp();  // bytes are read before another lane overwrites them
        }
    }
};

// The conversions of slots of K and V.
struct SlotConverter {
    const RowConverter<8> pairs;   // of boxes
    const RowConverter<4> single;  // a last box

    __device__ __forceinline__ SlotConverter(int warp, int lane) : pairs(warp, lane), single(warp, lane) {}

    template <int kBoxes, bool kIsScaled>
    __device__ __forceinline__ void convert(uint32 tile, int rows_left, bool is_whole, uint32 scales, float factor) const {
        if (is_whole) convert_rows<kBoxes, true, kIsScaled>(tile, rows_left, scales, factor);
        else convert_rows<kBoxes, false, kIsScaled>(tile, rows_left, scales, factor);
    }

private:
    template <int kBoxes, bool kIsWhole, bool kIsScaled>
    __device__ __forceinline__ void convert_rows(uint32 tile, int rows_left, uint32 scales, float factor) const {
        constexpr uint32 kLast = (kBoxes - 1) * kSlotBoxBytes;
        if constexpr (kBoxes > 1) pairs.convert<kBoxes / 2, kIsWhole, kIsScaled>(tile + kSlotBoxBytes, tile, rows_left, scales, factor);
        if constexpr (kBoxes % 2) single.convert<1, kIsWhole, kIsScaled>(tile + kLast, tile + kLast, rows_left, scales, factor);
    }
};

// What the converters do with the scales beside K's slot where each key has its own.
struct SlotScales {
    const int warp, lane;
    uint32 unit = 0;  // of V's scales, as bits

    // Makes factors of the exponents of K's scales, and finds the unit of V's.
    __device__ __forceinline__ void prepare(uint32 scales, const KernelParams& params) {
        uint32 largest = 0;  // bits of positive numbers are ordered as the numbers are
        #pragma unroll
        for (int i = 0; i < (kBlockN + 31) / 32; ++i) {
            const int row = i * 32 + lane;
            if (kBlockN % 32 != 0 && row >= kBlockN) break;
            largest = max(largest, __float_as_uint(fabsf(load_float(scales + kSlotScalesOfV + row * 4))));
            if (!kModifiesScores && warp == 0) {
                const uint32 of_k = scales + place_of_k_scale(row) * 4;
                store_word(of_k, __float_as_uint(load_float(of_k) * fabsf(params.softmax_scale_log2)));
            }
        }
        unit = raised_unit(unit, largest_of_warp(largest));
        if (warp == 0 && lane == 0) store_word(scales + kSlotUnit, unit);
    }
    __device__ __forceinline__ float inverse() const { return inverse_of_unit(unit); }
};

// The converters' loop over tiles and their blocks, by three warps.
__device__ __forceinline__ void convert_in_place(const KernelParams& params, const Shared& shared) {
    const int warp = uniform(threadIdx.x / 32) - 1, lane = threadIdx.x % 32;
    const SlotConverter converter(warp, lane);
    Ring<kKStages> ring_k;
    Ring<kVStages> ring_v;
    // wgmma reads what the warp's lanes have stored: each lane fences its own stores, and one
    // arrives for all.
    const auto publish = [&](uint32 full) {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
    };
    for (uint32 nth = 0;; ++nth) {
        const Tile tile = shared.tiles.get(nth);
        shared.tiles.release(nth, lane);
        if (tile.first < 0) break;
        // TMA has written zeros behind the end of rows without pages.
        const int keys = kPageSize > 0 ? Sequence(params, tile.batch).seqlen_k : 0;
        SlotScales scales{warp, lane};
        for (int block = tile.begin + tile.blocks - 1; block >= tile.begin; --block) {
            const int rows_left = keys - block * kBlockN;
            const bool is_whole = kPageSize == 0 || rows_left >= kBlockN;
            const uint32 slot_scales = shared.slot_scales(ring_k.slot);
            barrier_wait(shared.bytes_k(ring_k.slot), ring_k.parity);
            if constexpr (kFoldsScalesOfV) scales.prepare(slot_scales, params);
            converter.convert<kBoxesQK, false>(shared.k_slot(ring_k.slot), rows_left, is_whole, 0, 0.f);
            publish(shared.full_k(ring_k.slot));

            barrier_wait(shared.bytes_v(ring_v.slot), ring_v.parity);
            constexpr bool kIsScaled = kFoldsScalesOfV;
            converter.convert<kBoxesV, kIsScaled>(shared.v_slot(ring_v.slot), rows_left, is_whole, slot_scales + kSlotScalesOfV, kIsScaled ? scales.inverse() : 0.f);
            publish(shared.full_v(ring_v.slot));
            if (kIsScaled && lane == 0) barrier_arrive(shared.empty_k(ring_k.slot));
            ring_k.advance(), ring_v.advance();
        }
    }
}
