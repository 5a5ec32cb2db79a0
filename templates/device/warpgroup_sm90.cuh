// What a warpgroup (four warps) does together: ordering of wgmma, shared operand descriptors, registers, its own barrier.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory"); }

// Keeps plain arithmetic on an accumulator from moving across: the compiler does not know that wgmma runs on.
template <int kTiles>
__device__ __forceinline__ void pin(float (&acc)[kTiles][4]) {
    #pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) asm volatile("" : "+f"(acc[i / 4][i % 4]) :: "memory");
}

// The descriptor of a shared operand with the 128-byte swizzle (PTX ISA, "matrix descriptor"): address and leading
// offset in the low word, both in units of 16 bytes; 8 rows of 128 bytes lie 1024 apart.
constexpr uint32 kDescriptorHigh = (1024 / 16) | 1u << 30;
__device__ __forceinline__ uint32 descriptor_low(uint32 address, uint32 leading_bytes) {
    return (address & 0x3ffff) >> 4 | (leading_bytes / 16) << 16;
}
__device__ __forceinline__ uint64 descriptor(uint32 low) { return uint64(kDescriptorHigh) << 32 | low; }

template <int kRegisters>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters)); }

__device__ __forceinline__ void warpgroup_barrier(int id) { asm volatile("bar.sync %0, 128;" :: "r"(id) : "memory"); }
// Before wgmma reads shared memory that ordinary stores wrote.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before a copy that must come after what this thread knows to be done in device memory.
__device__ __forceinline__ void fence_async_proxy_of_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
