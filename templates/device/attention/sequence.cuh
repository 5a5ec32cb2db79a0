// One sequence of the batch: its lengths, its place in the tensors, and the diagonals between which
// a row sees keys. Without kIsVarlen the launch's parameters hold them. With kIsVarlen the lengths
// come from device memory. This file knows no tile and no mask.

#include "device/params.cuh"

// Bounds that are the same for all sequences are references into the constant bank. Copies in
// registers would make kernels spill.
template <bool kOfItsOwn>
struct SequenceBounds {
    const int &seqlen_q, &seqlen_k;
    const int& right_shift;   // row i sees keys j <= i + right_shift (kIsCausal), both absolute
    const int& left_shift;    // row i sees keys j >= i + left_shift (kHasWindow), both absolute
    // Rows before the sequence's first row, in packed tensors without a batch dimension.
    static constexpr int64 offset_q = 0, offset_k = 0;
    static constexpr int entry_k = 0;  // read with kHasKeyStarts alone, which has other bounds

    __device__ __forceinline__ SequenceBounds(const KernelParams& params, int)
        : seqlen_q(params.seqlen_q), seqlen_k(params.seqlen_k), right_shift(params.right_shift), left_shift(params.left_shift) {}
};

template <>
struct SequenceBounds<true> {
    int seqlen_q, seqlen_k, right_shift, left_shift;
    int64 offset_q = 0, offset_k = 0;
    int entry_k = 0;  // with kHasKeyStarts: the entry of k and v, whose row offset_k is key 0

    __device__ __forceinline__ SequenceBounds(const KernelParams& params, int batch) {
        seqlen_q = params.seqlen_q, seqlen_k = params.seqlen_k;
        // The host has not seen these lengths, so they are clamped to what the host was told. A
        // longer sequence loses its last rows.
        if (params.cu_seqlens_q) {
            offset_q = params.cu_seqlens_q[batch];
            seqlen_q = min(seqlen_q, params.cu_seqlens_q[batch + 1] - int(offset_q));
        }
        if (params.cu_seqlens_k) {
            offset_k = params.cu_seqlens_k[batch];
            seqlen_k = min(seqlen_k, params.cu_seqlens_k[batch + 1] - int(offset_k));
        }
        if (params.seqused_q) seqlen_q = min(seqlen_q, params.seqused_q[batch]);
        if (params.seqused_k) seqlen_k = min(seqlen_k, params.seqused_k[batch]);
        seqlen_q = max(0, seqlen_q), seqlen_k = max(0, seqlen_k);
        if constexpr (kHasKeyStarts) {
            entry_k = batch;
            // The minimum is unsigned, so a negative number becomes the last entry too.
            if (params.cache_batch_idx) entry_k = min(uint32(params.cache_batch_idx[batch]), uint32(params.num_pages - 1));
            if (params.leftpad_k) offset_k = min(max(0, params.leftpad_k[batch]), seqlen_k);
            seqlen_k -= int(offset_k);
        }
        const int shift = params.aligns_ends ? seqlen_k - seqlen_q : 0;
        right_shift = params.right_shift + shift, left_shift = params.left_shift + shift;
    }
};

struct Sequence : SequenceBounds<kIsVarlen> {
    int batch;

    __device__ __forceinline__ Sequence(const KernelParams& params, int batch) : SequenceBounds(params, batch), batch(batch) {}

    // Elements from a tensor's start to row 0 of this sequence and head.
    __device__ __forceinline__ int64 place_q(const KernelParams& params, const TensorView& view, int head) const {
        return place(view, head, kIsVarlen && params.cu_seqlens_q, offset_q);
    }
    __device__ __forceinline__ int64 place_k(const KernelParams& params, const TensorView& view, int head_kv) const {
        if constexpr (kHasKeyStarts) {
            return entry_k * view.stride_batch + offset_k * view.stride_seqlen + head_kv * view.stride_head;
        } else {
            return place(view, head_kv, kIsVarlen && params.cu_seqlens_k, offset_k);
        }
    }

    // The index of row 0 in lse and dlse.
    __device__ __forceinline__ int64 lse_row(const KernelParams& params, int head) const {
        if (kIsVarlen && params.cu_seqlens_q) return head * params.total_q + offset_q;
        return int64(batch * params.num_heads_q + head) * params.seqlen_q;
    }
    // The index of row 0 in the workspace's row arrays, a multiple of 16. Each sequence of packed
    // tensors has 128 rows of padding.
    __device__ __forceinline__ int64 workspace_row(const KernelParams& params, int head) const {
        if (kIsVarlen && params.cu_seqlens_q) return head * params.workspace_rows_of_head + (offset_q + batch * 128) / 16 * 16;
        return int64(batch * params.num_heads_q + head) * params.workspace_rows;
    }
    // The distance, in workspace rows, from a head's rows to the next head's.
    __device__ __forceinline__ int64 workspace_rows_between_heads(const KernelParams& params) const {
        return kIsVarlen && params.cu_seqlens_q ? params.workspace_rows_of_head : int64(params.workspace_rows);
    }

private:
    __device__ __forceinline__ int64 place(const TensorView& view, int head, bool is_packed, int64 offset) const {
        return (is_packed ? offset * view.stride_seqlen : batch * view.stride_batch) + head * view.stride_head;
    }
};
