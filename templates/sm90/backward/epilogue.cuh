// The end of dK and dV in a consumer's registers.

// Brings in the factors that weights and dS leave out: dropout_keep_scale, and of dK the scale of
// the scores.
template <int kTiles>
__device__ __forceinline__ void scale_gradient(float (&acc)[kTiles][4], float factor) {
    #pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= factor;
    }
}
