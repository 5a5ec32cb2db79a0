// The scales of a widened K and V (widened.cuh) that the producer of the sm90 forward kernel brings
// to shared memory.

#include "device/attention/scale_row.cuh"
#include "device/ptx/shared.cuh"

// Puts the scales that all keys of a tile share beside the tile's slot. The copy of the tile's
// first K publishes them.
__device__ __forceinline__ void put_tile_scales(uint32 to, const KernelParams& params, const Sequence& sequence, int head_kv) {
    const auto of = [&](const TensorView& view) { return __float_as_uint(ScaleRow(params, view, sequence, head_kv).of(0, 0)); };
    const uint32 k = of(scales_of_k(params)), v = of(scales_of_v(params));
    store_word(to, k), store_word(to + 4, v);
}

// The row of factors of a sequence and head.
__device__ __forceinline__ const float* factors_of_keys(const KernelParams& params, const Sequence& sequence, int head_kv) {
    return ScaleRow(params, scales_of_k(params), sequence, head_kv).data;
}
