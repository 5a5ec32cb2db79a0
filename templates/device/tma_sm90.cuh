// Tensor copies by the copy engine (PTX ISA, "cp.async.bulk.tensor"). Maps are rank 4 (dim, seqlen, head, batch), made by
// src/cuda/tensor_map.rs; a box is 64 columns of some rows, stored as rows of 128 bytes with the 128-byte swizzle. What
// lies outside the tensor arrives as zeros and counts as copied, and is never written.

struct alignas(64) TensorMap { uint64 opaque[16]; };

constexpr int kBoxCols = 64;
constexpr int kBoxRowBytes = 128;

__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}
__device__ __forceinline__ void tma_load(uint32 to, const TensorMap& map, uint32 barrier, int col, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :: "r"(to), "l"(&map), "r"(col), "r"(row), "r"(head), "r"(batch), "r"(barrier) : "memory");
}
// Contiguous bytes, a multiple of 16 and so aligned.
__device__ __forceinline__ void bulk_load(uint32 to, const void* from, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}
// Of one thread: copies in the order of issue, grouped by each commit.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32 from, int col, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 :: "l"(&map), "r"(col), "r"(row), "r"(head), "r"(batch), "r"(from) : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's stores have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Where a lane finds its row of the four matrices (device/shared_sm90.cuh) that an accumulator of 16 columns of a box, those of its
// warp, by 16 rows holds transposed; 16 rows further on lie 16 * kBoxRowBytes on. The swizzle trades a row's 16-byte chunks.
__device__ __forceinline__ uint32 transposed_place(int warp, int lane) {
    return (lane / 16 * 8 + lane % 8) * kBoxRowBytes + ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
}
