// Single words and matrices in and out of shared memory (PTX ISA, "ld.shared", "stmatrix"): the counterpart of mma_sm80.cuh's loads.

__device__ __forceinline__ void load_pair_f32(float& x, float& y, uint32 address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, of which a lane holds elements 2t and 2t + 1 of a row as an accumulator does. Lane
// 8i + r gives the address of row r of matrix i as it is stored.
__device__ __forceinline__ void store_matrices(uint32 address, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}
// Transposed on the way: what a lane holds of a row goes to two rows.
__device__ __forceinline__ void store_matrices_trans(uint32 address, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}
