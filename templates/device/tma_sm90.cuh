// Tensor copies by the copy engine (PTX ISA, "cp.async.bulk.tensor"). Maps are made by src/kernel/launch_maps.rs; a box is 64 columns
// of some rows, stored as rows of 128 bytes with the 128-byte swizzle. What lies outside the tensor arrives as zeros and counts as
// copied, and is never written.
//
// Maps are rank 4 (dim, seqlen, head, batch) or, where sequences have their own lengths (kIsVarlen), rank 5 (dim, row, back, end, head), so
// that what lies outside the sequence lies outside the tensor, too. There are kMapRows of the first rows: a sequence's row i is row
// i + kMapRows - length of them, which is inside for i < length alone. `end`, the row behind the sequence's last one counted from the
// tensor's first, goes on by rows, too; and kMapRows steps of `back` go back by kMapRows rows, modulo 2^64, so that the three meet at
// the row that is meant.

#include "device/sequence.cuh"

struct alignas(64) TensorMap { uint64 opaque[16]; };

constexpr int kBoxCols = 64;
constexpr int kBoxRowBytes = 128;

__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

constexpr int kMapRows = 1 << 30;  // as src/kernel/launch_maps.rs has it

// Where a map has the rows of a sequence.
struct MapRows {
    int batch;
    int shift, end;  // kIsVarlen
};
// `rows_between` is how many rows lie from one sequence's first to the next's in the tensor, where they do not lie end to end.
__device__ __forceinline__ MapRows map_rows_q(const KernelParams& params, const Sequence& sequence, int rows_between) {
    if (!kIsVarlen) return {sequence.batch, 0, 0};
    const int start = params.cu_seqlens_q ? int(sequence.offset_q) : sequence.batch * rows_between;
    return {0, kMapRows - sequence.seqlen_q, start + sequence.seqlen_q};
}
__device__ __forceinline__ MapRows map_rows_k(const KernelParams& params, const Sequence& sequence, int rows_between) {
    if (!kIsVarlen) return {sequence.batch, 0, 0};
    const int start = params.cu_seqlens_k ? int(sequence.offset_k) : sequence.batch * rows_between;
    return {0, kMapRows - sequence.seqlen_k, start + sequence.seqlen_k};
}

// Copies go to this block's own shared memory. Before PTX ISA 8.6 a cluster's is the only name for it; compilers that know GPUs past
// sm_90 have its own, without which sm_120 asks at each copy whose it is.
constexpr bool kNamesOwnShared = kArch >= 100;

// Through a map of rank 4.
__device__ __forceinline__ void tma_load_dense(uint32 to, const TensorMap& map, uint32 barrier, int col, int row, int head, int batch) {
    if constexpr (kNamesOwnShared) {
        asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                     :: "r"(to), "l"(&map), "r"(col), "r"(row), "r"(head), "r"(batch), "r"(barrier) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                     :: "r"(to), "l"(&map), "r"(col), "r"(row), "r"(head), "r"(batch), "r"(barrier) : "memory");
    }
}
__device__ __forceinline__ void tma_load(uint32 to, const TensorMap& map, uint32 barrier, int col, int row, int head, const MapRows& rows) {
    if constexpr (kIsVarlen && kNamesOwnShared) {
        asm volatile("cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                     :: "r"(to), "l"(&map), "r"(col), "r"(row + rows.shift), "r"(kMapRows), "r"(rows.end), "r"(head), "r"(barrier) : "memory");
    } else if constexpr (kIsVarlen) {
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                     :: "r"(to), "l"(&map), "r"(col), "r"(row + rows.shift), "r"(kMapRows), "r"(rows.end), "r"(head), "r"(barrier) : "memory");
    } else {
        tma_load_dense(to, map, barrier, col, row, head, rows.batch);
    }
}
// Contiguous bytes, a multiple of 16 and so aligned.
__device__ __forceinline__ void bulk_load(uint32 to, const void* from, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}
// Adds floats of shared memory to those in device memory; each call is a group of its own of this thread (PTX ISA, "cp.reduce.async.bulk").
__device__ __forceinline__ void bulk_add(float* to, uint32 from, uint32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\ncp.async.bulk.commit_group;"
                 :: "l"(__cvta_generic_to_global(to)), "r"(from), "r"(bytes) : "memory");
}
// Until this thread's groups have read shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Until what they write has arrived.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Of one thread: copies in the order of issue, grouped by each commit.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32 from, int col, int row, int head, const MapRows& rows) {
    if constexpr (kIsVarlen) {
        asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
                     :: "l"(&map), "r"(col), "r"(row + rows.shift), "r"(kMapRows), "r"(rows.end), "r"(head), "r"(from) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                     :: "l"(&map), "r"(col), "r"(row), "r"(head), "r"(rows.batch), "r"(from) : "memory");
    }
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Where a lane finds its row of the four matrices (device/shared_sm90.cuh) that an accumulator of 16 columns of a box, those of its
// warp, by 16 rows holds transposed; 16 rows further on lie 16 * kBoxRowBytes on. The swizzle trades a row's 16-byte chunks.
__device__ __forceinline__ uint32 transposed_place(int warp, int lane) {
    return (lane / 16 * 8 + lane % 8) * kBoxRowBytes + ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
}
