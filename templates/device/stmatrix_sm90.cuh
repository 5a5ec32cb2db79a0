// Matrix stores to shared memory, Hopper on (PTX ISA, "stmatrix"): the counterpart of mma_sm80.cuh's loads.

// Four 8 x 8 matrices of 16-bit elements, each held as an accumulator is: lane l has elements [l / 4][l % 4 * 2 + 0, 1].
// Lane 8i + r gives the shared address of row r of matrix i. Columns are stored as rows.
__device__ __forceinline__ void stmatrix_x4_trans(uint32 address, const uint32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
