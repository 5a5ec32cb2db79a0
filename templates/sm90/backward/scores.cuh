// Weights from scores that stand transposed, keys down and queries across.

#include "device/ptx/math.cuh"
#include "device/ptx/shared.cuh"

// P^T = 2^(S^T * scale - LSE). The LSE of a block lies with the slot of its Q; a lane holds of each
// 8 queries the two from lane % 4 * 2 on. The address is written out at each load: kept over the
// loop, its parts would take registers.
template <int kTiles>
__device__ __forceinline__ void weigh_transposed(float (&acc_s)[kTiles][4], uint32 lse_of_slots, uint32 slot, float scale_log2, int lane) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        float lse[2];
        load_floats(lse, lse_of_slots + slot * kBytesStats + (n * 8 + lane % 4 * 2) * 4);
        #pragma unroll
        for (int i = 0; i < 4; ++i) acc_s[n][i] = exp2_approx(fmaf(acc_s[n][i], scale_log2, -lse[i % 2]));
    }
}
