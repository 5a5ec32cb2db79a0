// The scales of groups of V's columns beside weights in fp16 (products/keys_four.cuh), under the
// names that key_scales.cuh has.
//
// A weight is at most 2^14 (softmax.cuh), and a weight times its key's scale must fit fp16.
// So a warp divides scales by a power of two where they need it, and O by it at the end. While the
// largest scales are between 2^-7 and 2, as most are, the power is 1. It then costs the ORs of the
// scales and a vote for four groups.

#include "device/attention/no_key_scales.cuh"
#include "device/ptx/eight.cuh"

struct KeyScales : NoKeyScales {
    int lane;
    uint32 watched = ~0u;         // bits of scales that force a new power; all while none is chosen or it is not 1
    int exponent = kNone;         // scales are divided by 2^exponent

    static constexpr int kNone = -64;

    __device__ __forceinline__ KeyScales(const KernelParams& params, const Sequence& sequence, int head_kv, int lane, int first, int second)
        : NoKeyScales(params, sequence, head_kv, lane, first, second), lane(lane) {}

    // Divides the scales of four groups by the power. First raises the power if a scale is at least
    // twice as large.
    template <int kM, int kO>
    __device__ __forceinline__ void fit(uint32 (&pairs)[4][2], float (&o)[kM][kO][4]) {
        uint32 all = 0;
        #pragma unroll
        for (int i = 0; i < 8; ++i) all |= pairs[i / 2][i % 2];
        if (__any_sync(0xffffffff, all & watched)) {
            uint32 largest = 0;  // bits of positive numbers are ordered as the numbers are
            #pragma unroll
            for (int i = 0; i < 8; ++i) largest = max(largest, max(pairs[i / 2][i % 2] & 0xffff, pairs[i / 2][i % 2] >> 16));
            const int found = int(largest_of_warp(largest) >> 10) - 15;
            if (found > exponent) {
                const int to = found >= -7 && found <= 0 ? 0 : found;
                if (exponent != kNone) {
                    const float factor = power_of_two(exponent - to);
                    #pragma unroll
                    for (int i = 0; i < kM * (kO - kZeroTiles) * 4; ++i) o[i / 4 / (kO - kZeroTiles)][i / 4 % (kO - kZeroTiles)][i % 4] *= factor;
                }
                exponent = to;
                watched = exponent == 0 ? 0x40004000 : ~0u;
            }
            if (exponent != 0) {
                const float factor = power_of_two(-exponent);
                const uint32 power = floats_to_fp16_pair(factor, factor);
                #pragma unroll
                for (int i = 0; i < 8; ++i) pairs[i / 2][i % 2] = multiply_fp16_pairs(pairs[i / 2][i % 2], power);
            }
        }
    }

    // Completes O: the power of two, what numbers lack (products/keys_four.cuh), and the zeros'
    // part, which lies in O's last tiles.
    template <int kM, int kO>
    __device__ __forceinline__ void scale_output(float (&o)[kM][kO][4]) const {
        constexpr int kTiles = kO - kZeroTiles;
        const float power = exponent == kNone ? 0.f : power_of_two(exponent) * 0x1p24f;
        #pragma unroll
        for (int m = 0; m < kM; ++m) {
            #pragma unroll
            for (int group = 0; group < kHeadDimV / kKeyGroup; ++group) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    // The group's zero is at 2 (group % 4) + 1 of 8 rows of mma.
                    const float zeros = __shfl_sync(0xffffffff, o[m][kTiles + group / 8][2 * r + group / 4 % 2], (group % 4 * 2 + 1) * 4 + lane % 4);
                    #pragma unroll
                    for (int n = group * kKeyGroup / 16; n < (group + 1) * kKeyGroup / 16; ++n) {
                        o[m][n][2 * r] = fmaf(o[m][n][2 * r], power, zeros);
                        o[m][n][2 * r + 1] = fmaf(o[m][n][2 * r + 1], power * 0x1p-4f, zeros);
                    }
                }
            }
        }
    }

private:
    static __device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32(exponent + 127) << 23); }
};
