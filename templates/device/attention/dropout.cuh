// The dropout mask. It equals src/dropout.rs bit for bit, which documents the counter and the key.
// Forward and backward kernels apply it to accumulators. It knows no tile in memory.
//
// One Philox4x32-10 draw gives 16 bits to each of eight elements: rows {r, r+8} x keys {c, c+1,
// c+8, c+9} of an aligned 16 x 16 block. Rows and keys are absolute within the sequence.

#include "device/params.cuh"

struct DropoutMask {
    uint32 key0, key1;       // Philox's key
    uint32 head;             // batch * num_heads_q + head
    uint32 offset;           // low half of the 64-bit offset
    uint32 threshold_high;   // params.dropout_threshold in the upper half of the word

    __device__ __forceinline__ DropoutMask(const KernelParams& params, uint32 batch_head) {
        const uint64 seed = params.dropout_seed_ptr ? *params.dropout_seed_ptr : params.dropout_seed;
        const uint64 offset64 = params.dropout_offset_ptr ? *params.dropout_offset_ptr : params.dropout_offset;
        // A broadcast from one lane makes the keys known to be uniform. The ten round keys then
        // stay in uniform registers. Otherwise each draw adds them up anew (18 of 80 instructions).
        key0 = __shfl_sync(0xffffffff, uint32(seed), 0);
        key1 = __shfl_sync(0xffffffff, uint32(seed >> 32) ^ uint32(offset64 >> 32), 0);
        head = batch_head;
        offset = uint32(offset64);
        threshold_high = params.dropout_threshold << 16;
    }

    // Draws the patch whose first row and key are (row, key), with row mod 16 < 8, key mod 16 < 8
    // and an even key. Word w covers row + 8 * (w % 2) and keys + 8 * (w / 2). Its low half belongs
    // to the even key.
    __device__ __forceinline__ void draw(uint32 (&words)[4], uint32 row, uint32 key) const {
        uint32 c0 = (key >> 4) * 4 + (key & 7) / 2, c1 = (row >> 4) * 8 + (row & 7), c2 = head, c3 = offset;
        uint32 k0 = key0, k1 = key1;
        #pragma unroll
        for (int round = 0; round < 10; ++round) {
            const uint64 a = uint64(0xD2511F53u) * c0;
            const uint64 b = uint64(0xCD9E8D57u) * c2;
            c0 = uint32(b >> 32) ^ c1 ^ k0;
            c2 = uint32(a >> 32) ^ c3 ^ k1;
            c1 = uint32(b);
            c3 = uint32(a);
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
    }

    // Whether a word keeps its even key (low half) and its odd key (high half). The threshold's low
    // half is zero, so the bits below a word's high half never change the comparison.
    __device__ __forceinline__ bool keeps_low(uint32 word) const { return (word << 16) >= threshold_high; }
    __device__ __forceinline__ bool keeps_high(uint32 word) const { return word >= threshold_high; }

    // Drops weights of an accumulator of 16 rows by 8 * kTiles keys. A lane holds rows `row` and
    // row + 8, and two of every 8 keys, the first two at `key`.
    template <int kTiles>
    __device__ __forceinline__ void drop(float (&acc)[kTiles][4], uint32 row, uint32 key) const {
        #pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32 words[4];
            draw(words, row, key + n * 8);
            #pragma unroll
            for (int w = 0; w < 4; ++w) {
                float(&weights)[4] = acc[n + w / 2];
                if (!keeps_low(words[w])) weights[w % 2 * 2] = 0.f;
                if (!keeps_high(words[w])) weights[w % 2 * 2 + 1] = 0.f;
            }
        }
    }

    // The same mask for transposed scores, 16 keys down and 16 query rows across. A lane holds keys
    // `key` and key + 8. It holds two of every 8 query rows, the first two at `row`. The two rows
    // lie in two patches, and the lane needs the half of one key of either patch. The lane with the
    // neighbouring key needs the other halves. Each of the two lanes draws one patch, and they
    // exchange halves.
    __device__ __forceinline__ void keeps_transposed(bool (&keeps)[2][4], uint32 row, uint32 key) const {
        const bool odd = key & 1;
        uint32 words[4], own[2], traded[2];
        draw(words, row + odd, key - odd);
        #pragma unroll
        for (int w = 0; w < 2; ++w) {
            own[w] = __byte_perm(words[2 * w], words[2 * w + 1], odd ? 0x7632 : 0x5410);
            traded[w] = __shfl_xor_sync(0xffffffff, __byte_perm(words[2 * w], words[2 * w + 1], odd ? 0x5410 : 0x7632), 4);
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32 halves = odd == (i % 2 != 0) ? own[i / 2] : traded[i / 2];
            keeps[0][i] = keeps_low(halves);
            keeps[1][i] = keeps_high(halves);
        }
    }
};
