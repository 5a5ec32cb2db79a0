// The rows of new keys and values that an append kernel copies: the part of its argument that both
// kernels have, the type of an access, a thread's walk through a sequence's rows, and the check of
// a sequence's pages. This file knows neither rotations nor lengths.

#include "device/params.cuh"

// The twin of KvAppendParams in src/ops/kv_append/kernel.rs. Tensor strides and row lengths count
// accesses.
struct KvAppendParams {
    TensorView k_new, v_new;     // (batch, seqlen_new, heads, dim)
    TensorView k_cache, v_cache; // (batch, seqlen_cache, heads, dim), or (num_pages, page_size, heads, dim)
    const int* seqlens;          // (batch): keys before
    int* seqused;                // (batch): keys afterwards; may be null
    const int* block_table;      // (batch, pages)
    int64 block_table_stride;
    int batch_size, num_heads;
    int seqlen_new, seqlen_cache;
    int row_k, row_v;
    int page_size;               // 0: no pages
    int num_pages;
};
static_assert(sizeof(KvAppendParams) == 4 * 32 + 4 * 8 + 8 * 4,
              "KvAppendParams differs from src/ops/kv_append/kernel.rs");

using Narrow = Either<kAccessBytes == 4, uint32, uint16>::Type;
using Access = Either<kAccessBytes == 16, uint4, Either<kAccessBytes == 8, uint2, Narrow>::Type>::Type;
static_assert(sizeof(Access) == kAccessBytes, "an access is of 16, 8, 4 or 2 bytes");

// One access of a sequence's new keys or values. A thread advances to its next without dividing.
struct Cursor {
    uint32 position, head, col;

    __device__ __forceinline__ Cursor(uint32 index, uint32 heads, uint32 row)
        : position(index / row / heads), head(index / row % heads), col(index % row) {}

    __device__ __forceinline__ void advance(const Cursor& step, uint32 heads, uint32 row) {
        col += step.col, head += step.head, position += step.position;
        if (col >= row) col -= row, ++head;
        if (head >= heads) head -= heads, ++position;
    }
};

// Whether a page of the sequence's `count` new keys is missing from its row of the table. All
// threads of the CTA call it.
__device__ __forceinline__ bool is_page_missing(
    const KvAppendParams& params, const int* table, uint32 before, int count) {
    const uint32 page_size = params.page_size, end = before + count;
    bool missing = false;
    for (uint32 page = before / page_size + threadIdx.x; page * uint64(page_size) < end;
         page += kThreads) {
        // A negative entry becomes a large one.
        missing |= uint32(__ldg(table + page)) >= uint32(params.num_pages);
    }
    return __syncthreads_or(missing);
}
