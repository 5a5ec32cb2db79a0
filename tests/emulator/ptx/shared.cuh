// Stands in for device/ptx/shared.cuh. Accesses are checked for bounds and alignment. Fresh
// shared memory holds NaN.

#include "device/types.cuh"

__device__ __forceinline__ float load_float(uint32 from) { return emulator::load<float>(from); }
__device__ __forceinline__ uint16 load_half_word(uint32 from) { return emulator::load<uint16>(from); }
__device__ __forceinline__ uint32 load_word(uint32 from) { return emulator::load<uint32>(from); }
__device__ __forceinline__ uint2 load_two_words(uint32 from) { return emulator::load<uint2>(from); }
__device__ __forceinline__ uint4 load_four_words(uint32 from) { return emulator::load<uint4>(from); }

__device__ __forceinline__ void store_half_word(uint32 to, uint16 value) { emulator::store(to, value); }
__device__ __forceinline__ void store_word(uint32 to, uint32 word) { emulator::store(to, word); }
__device__ __forceinline__ void store_two_floats(uint32 to, float first, float second) { emulator::store(to, float2{first, second}); }
__device__ __forceinline__ void store_zeros(uint32 to) { emulator::store(to, uint4{0, 0, 0, 0}); }

__device__ __forceinline__ uint32 load_word_in_order(uint32 from) { return emulator::load<uint32>(from); }
__device__ __forceinline__ void load_floats(float (&x)[2], uint32 address) {
    const float2 both = emulator::load<float2>(address);
    x[0] = both.x, x[1] = both.y;
}
__device__ __forceinline__ void store_floats(uint32 address, const float (&x)[4]) {
    emulator::store(address, float4{x[0], x[1], x[2], x[3]});
}
__device__ __forceinline__ uint4 load_chunk(uint32 address) { return emulator::load<uint4>(address); }
__device__ __forceinline__ int load_int(uint32 from) { return emulator::load<int>(from); }
__device__ __forceinline__ int2 load_two_ints(uint32 from) { return emulator::load<int2>(from); }
__device__ __forceinline__ int4 load_four_ints(uint32 from) { return emulator::load<int4>(from); }
__device__ __forceinline__ void store_int(uint32 to, int x) { emulator::store(to, x); }
__device__ __forceinline__ void store_two_ints(uint32 to, int a, int b) { emulator::store(to, int2{a, b}); }
__device__ __forceinline__ void store_four_ints(uint32 to, int a, int b, int c, int d) { emulator::store(to, int4{a, b, c, d}); }
