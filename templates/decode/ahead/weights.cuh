// Weights between the warps of a decode kernel that computes them ahead: a block's scoring warp
// puts them into the block's slot, and all multiplying warps take them.
//
// References pass from block to block. A block's scoring warp has its scores, and the rows' maxima
// of the block, before it needs the references of the block before. A lane holds the same elements
// of each accumulator in all warps, so that the exchange keeps their places.

#include "decode/products.cuh"
#include "decode/segment_walk.cuh"
#include "device/ptx/shared.cuh"

// The references after the block before this one in the walk, of a lane's rows.
__device__ __forceinline__ void take_references(float (&reference)[2], const Memory& memory, const WalkRing& before, int lane) {
    barrier_wait(memory.full_references(before.slot), before.parity);
    const uint32 at = memory.references + before.slot * kBytesReferences + lane / 4 * 4;
    reference[0] = load_float(at), reference[1] = load_float(at + 32);
}
__device__ __forceinline__ void put_references(const float (&reference)[2], const Memory& memory, const WalkRing& ring, int lane) {
    const uint32 at = memory.references + ring.slot * kBytesReferences + lane / 4 * 4;
    if (lane % 4 == 0) store_word(at, __float_as_uint(reference[0])), store_word(at + 32, __float_as_uint(reference[1]));
    __syncwarp();  // orders the stores of every lane before the arrival
    if (lane == 0) barrier_arrive(memory.full_references(ring.slot));
}

// `s` has weights, and `added` their sums.
__device__ __forceinline__ void put_weights(const Scores& s, const float (&added)[2], const SegmentRows& rows, const Memory& memory,
                                            const WalkRing& ring, int lane) {
    // Orders the multiplying warps' reads of the slot's previous weights before the stores below.
    barrier_wait(memory.empty_weights(ring.slot), ring.parity ^ 1);
    const uint32 slot = memory.weights + ring.slot * kBytesWeights, at = slot + lane * 16;
    #pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) {
        Weights p;
        pack_step(p, s, k);
        store_four_ints(at + k * 512, p[0][0], p[0][1], p[0][2], p[0][3]);
    }
    store_floats(at + kBytesP, {added[0], added[1], rows.factor[0], rows.factor[1]});
    store_two_floats(slot + kBytesP + 512 + lane * 8, rows.reference[0], rows.reference[1]);
    __syncwarp();  // orders the stores of every lane before the arrival
    if (lane == 0) barrier_arrive(memory.full_weights(ring.slot));
}

// A block's weights in a multiplying warp.
struct BlockWeights {
    Weights p[kBlockN / 16];
    float added[2], factor[2], reference[2];

    __device__ __forceinline__ void take(const Memory& memory, const WalkRing& ring, int lane) {
        barrier_wait(memory.full_weights(ring.slot), ring.parity);
        const uint32 slot = memory.weights + ring.slot * kBytesWeights, at = slot + lane * 16;
        const uint4 of_rows = load_chunk(at + kBytesP);
        #pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) {
            const uint4 words = load_chunk(at + k * 512);
            p[k][0][0] = words.x, p[k][0][1] = words.y, p[k][0][2] = words.z, p[k][0][3] = words.w;
        }
        added[0] = __uint_as_float(of_rows.x), added[1] = __uint_as_float(of_rows.y);
        factor[0] = __uint_as_float(of_rows.z), factor[1] = __uint_as_float(of_rows.w);
        load_floats(reference, slot + kBytesP + 512 + lane * 8);
        __syncwarp();  // orders the reads of every lane before the arrival
        if (lane == 0) barrier_arrive(memory.empty_weights(ring.slot));
    }
};
