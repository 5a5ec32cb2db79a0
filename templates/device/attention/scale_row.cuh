// Where the scales of 8-bit q, k and v lie.
//
// kKeysPerScale says how many keys share one: all of a sequence (0), one each (1), or a block of
// 128 from the sequence's first key on.
//
// Only the backward pass has gradients, so the views of the scales take their places in
// KernelParams.

#include "device/attention/key_pages.cuh"

__device__ __forceinline__ const TensorView& scales_of_q(const KernelParams& params) { return params.dq; }
__device__ __forceinline__ const TensorView& scales_of_k(const KernelParams& params) { return params.dk; }
__device__ __forceinline__ const TensorView& scales_of_v(const KernelParams& params) { return params.dv; }

// A head's scales of one tensor.
struct ScaleRow {
    const float* data;
    const TensorView& view;

    __device__ __forceinline__ ScaleRow(const KernelParams& params, const TensorView& view, const Sequence& sequence, int head_kv)
        : data(static_cast<const float*>(view.data)), view(view) {
        if constexpr (kKeysPerScale == 1) {
            data += place_of_keys(params, view, sequence, head_kv);
        } else {
            data += sequence.batch * view.stride_batch + head_kv * view.stride_head;
        }
    }

    // Where the scale of a key lies, given its page, and the scale.
    __device__ __forceinline__ const float* place(int key, uint32 page) const {
        if constexpr (kKeysPerScale == 0) return data;
        if constexpr (kKeysPerScale == 128) return data + key / 128 * view.stride_seqlen;
        if constexpr (kPageSize > 0) return data + page * view.stride_batch + int64(uint32(key) % kPageKeys) * view.stride_seqlen;
        return data + key * view.stride_seqlen;
    }
    __device__ __forceinline__ float of(int key, uint32 page) const { return __ldg(place(key, page)); }
};
