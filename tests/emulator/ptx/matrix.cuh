// Stands in for device/ptx/matrix.cuh. The engine moves the matrices once all lanes have come.

#include "device/types.cuh"

__device__ __forceinline__ void ldmatrix_x4(uint32 (&r)[4], uint32 address) { emulator::load_matrices(r, 4, false, address); }
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&r)[4], uint32 address) { emulator::load_matrices(r, 4, true, address); }
__device__ __forceinline__ void ldmatrix_x2(uint32& r0, uint32& r1, uint32 address) {
    uint32 r[2];
    emulator::load_matrices(r, 2, false, address);
    r0 = r[0], r1 = r[1];
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32& r0, uint32& r1, uint32 address) {
    uint32 r[2];
    emulator::load_matrices(r, 2, true, address);
    r0 = r[0], r1 = r[1];
}

__device__ __forceinline__ void load_matrices(uint32 (&m)[4], uint32 address) { emulator::load_matrices(m, 4, false, address); }
__device__ __forceinline__ void store_matrices(uint32 address, const uint32 (&m)[4]) { emulator::store_matrices(m, 4, false, address); }
__device__ __forceinline__ void load_transposed(uint32 (&m)[4], uint32 address) { emulator::load_matrices(m, 4, true, address); }
__device__ __forceinline__ void store_transposed(uint32 address, const uint32 (&m)[4]) { emulator::store_matrices(m, 4, true, address); }

__device__ __forceinline__ uint32 transpose_matrix(uint32 m) {
    const int row = threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
    uint32 out = 0;
    for (int i = 0; i < 2; ++i) {
        const uint32 pair = __shfl_sync(0xffffffff, m, (col + i) * 4 + row / 2);
        out |= (pair >> (row % 2 * 16) & 0xffff) << (i * 16);
    }
    return out;
}
