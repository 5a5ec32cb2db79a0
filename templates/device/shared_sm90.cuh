// Two floats out of, four into, 16 bytes out of, and 8 x 8 matrices of 16-bit elements in and out of shared memory (PTX ISA, "ld.shared", "stmatrix", "ldmatrix").
// Lane 8i + r gives the address of row r of matrix i.

__device__ __forceinline__ void load_floats(float (&x)[2], uint32 address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_floats(uint32 address, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
__device__ __forceinline__ uint4 load_chunk(uint32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

// Four matrices as they lie.
__device__ __forceinline__ void load_matrices(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_matrices(uint32 address, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}
// Transposed on the way: what a lane holds of a row, elements 2t and 2t + 1 as an accumulator does, comes from two rows or goes there.
__device__ __forceinline__ void load_transposed(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_transposed(uint32 address, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}
