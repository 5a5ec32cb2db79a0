// Warp-level tensor-core products from Ampere on (PTX ISA, "mma.m16n8k16", "mma.m16n8k8"). All
// products add to C. products/ builds tile products from them. This file knows fragments in
// registers but no shared memory.
//
// Fragments: lane l has g = l / 4 and t = l % 4.
// C (16 x 8):  c0, c1 = C[g][2t, 2t+1]; c2, c3 = C[g+8][2t, 2t+1]
// A (16 x 16): a0 = A[g][2t..], a1 = A[g+8][2t..], a2 = A[g][2t+8..], a3 = A[g+8][2t+8..]
// B (16 x 8):  b0 = B[2t..][g], b1 = B[2t+8..][g]
// Two neighbouring accumulators, packed, are therefore the A fragment of the next product.

#include "device/types.cuh"

__device__ __forceinline__ void mma_k16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    if constexpr (kIsBf16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// The same for fp16, whatever the dtype.
__device__ __forceinline__ void mma_k16_fp16(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The product over 8 inner indices, for the last eight of an inner dimension. It takes a0, a1 and
// b0 alone.
__device__ __forceinline__ void mma_k8(float (&c)[4], const uint32 (&a)[4], uint32 b0) {
    if constexpr (kIsBf16) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b0));
    } else {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b0));
    }
}

// The tf32 product over 8 inner indices. The low 13 bits of a register do not count.
// A (16 x 8): a0 = A[g][k], a1 = A[g+8][k], a2 = A[g][k'], a3 = A[g+8][k']
// B (8 x 8):  b0 = B[k][g], b1 = B[k'][g]
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
