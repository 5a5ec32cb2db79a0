// Moves 8 x 8 matrices of 16-bit elements between shared memory and a warp's registers (PTX ISA,
// "ldmatrix", "stmatrix", "movmatrix").
//
// Lane 8i + r gives the shared address of row r of matrix i. The transposed forms hand out columns
// as rows. This file knows no tile: layouts compute the addresses.
//
// Kernels that fill shared memory by cp.async and wait at a CTA barrier use ldmatrix_*. `volatile`
// keeps these loads on their side of the barrier. The schedules of the sm90 kernels need more:
// load_* and store_* also stay in order with every other access to memory.

#include "device/types.cuh"

__device__ __forceinline__ void ldmatrix_x4(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x2(uint32& r0, uint32& r1, uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32& r0, uint32& r1, uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address));
}

// The transpose of a matrix in a warp's registers: a lane holds elements 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32 transpose_matrix(uint32 m) {
    uint32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(m));
    return out;
}

// Four matrices, not transposed.
__device__ __forceinline__ void load_matrices(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_matrices(uint32 address, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}
// Four matrices, transposed on the way. A lane holds elements 2t and 2t + 1 of a row, as in an
// accumulator. The two elements come from two rows of shared memory, or go to two rows.
__device__ __forceinline__ void load_transposed(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_transposed(uint32 address, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}
