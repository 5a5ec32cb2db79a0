// The transposition of V blocks in shared memory, by the producer warpgroup of the sm90 forward
// kernel for e4m3.
//
// ldmatrix and stmatrix move units of 16 bits, here pairs of neighbouring columns of V. A lane
// loads, transposed, the pairs of two columns for keys 2t and 2t + 1 of each eight. Byte
// permutations turn the words of two such matrices into four keys of either column. In a slot of
// V^T a column therefore has the keys of each 16 in the order 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12,
// 13, 6, 7, 14, 15. A consumer's lane holds the scores of keys 2t, 2t + 1, 8 + 2t and 9 + 2t of
// each 16, which in this order are its four weights in a word of the A operand.
// sm90_transpose_v.cu.tera writes V^T in the same order. No other code knows it.

#include "device/ptx/matrix.cuh"
#include "device/ptx/sync.cuh"
#include "device/schedule/ring.cuh"
#include "sm90/forward_fp8/shared.cuh"

struct Transposer {
    const Shared& shared;
    const int nth, lane;  // nth: of kTransposers warps
    Ring<kVStages> ring_v;
    Ring<kVtStages> ring_vt;

    static constexpr int kChunks = kVtRows / 16;  // of 16 columns; each warp takes every kTransposers-th
    static constexpr int kSteps = kBlockN / 32;   // of 32 keys
    static constexpr int kTogether = 2;           // steps whose loads are in flight together

    // Transposes the next V block. Keys from `keys_left` on become zeros.
    __device__ __forceinline__ void next(int keys_left) {
        barrier_wait(shared.full_v(ring_v.slot), ring_v.parity);
        barrier_wait(shared.empty_vt(ring_vt.slot), ring_vt.parity ^ 1);
        const int row = lane % 8, matrix = lane / 8;
        // Rows 2 * row and 2 * row + 1 of a chunk change places in its second half, so that the
        // eight rows of a matrix lie in different banks.
        const int swaps = (row >= 4 ? 1 : 0), column = 2 * row + ((matrix & 1) ^ swaps);
        const uint32 v_row = shared.v_slot(ring_v.slot) + lane * kBoxRowBytes;
        const uint32 vt_row = shared.vt_slot(ring_vt.slot) + column * kBoxRowBytes + swizzled(matrix / 2, column % 8);
        const uint32 even = lane / 4 >= 4 ? 0x7531 : 0x6420, odd = even ^ (0x7531 ^ 0x6420);
        #pragma unroll
        for (int first_chunk = 0; first_chunk < kChunks; first_chunk += kTransposers) {
            const int chunk = first_chunk + nth;
            if (kChunks % kTransposers != 0 && chunk >= kChunks) break;
            const uint32 from = v_row + chunk / 8 * (kBlockN * kBoxRowBytes) + swizzled(chunk % 8, row);
            const uint32 to = vt_row + chunk * (16 * kBoxRowBytes);
            #pragma unroll
            for (int first = 0; first < kSteps; first += kTogether) {
                uint32 m[kTogether][4];
                #pragma unroll
                for (int i = 0; i < kTogether && first + i < kSteps; ++i) {
                    load_transposed(m[i], from + (first + i) * (32 * kBoxRowBytes));
                }
                #pragma unroll
                for (int i = 0; i < kTogether && first + i < kSteps; ++i) {
                    const int step = first + i;
                    if constexpr (kPageSize > 0) {
                        if (keys_left < kBlockN) clear_past(m[i], keys_left - step * 32);
                    }
                    const uint32 words[4] = {__byte_perm(m[i][0], m[i][1], even), __byte_perm(m[i][0], m[i][1], odd),
                                             __byte_perm(m[i][2], m[i][3], even), __byte_perm(m[i][2], m[i][3], odd)};
                    store_matrices((to ^ step % 4 * 32) + step / 4 * (kVtRows * kBoxRowBytes), words);
                }
            }
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.empty_v(ring_v.slot)), barrier_arrive(shared.full_vt(ring_vt.slot));
        ring_v.advance(), ring_vt.advance();
    }

private:
    // Clears the keys of 32 from `left` on. A page may hold NaN behind the sequence's last key.
    __device__ __forceinline__ void clear_past(uint32 (&m)[4], int left) const {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = i * 8 + lane % 4 * 2;
            if (key >= left) m[i] = 0;
            else if (key + 1 >= left) m[i] &= 0xffff;
        }
    }
};
