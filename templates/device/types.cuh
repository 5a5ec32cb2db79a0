// Fixed-width integers, a bool and a choice between two types at compile time, 32-bit addresses of
// shared memory, and warp-uniform values. Every other device header builds on this file. It knows
// neither the problem nor the GPU.

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;

template <bool kValue>
struct Bool { static constexpr bool value = kValue; };

// Either<kIsFirst, A, B>::Type is A if kIsFirst, else B.
template <bool kIsFirst, class A, class B>
struct Either { using Type = A; };
template <class A, class B>
struct Either<false, A, B> { using Type = B; };

// The address of a byte in this CTA's shared memory, as PTX takes it: 32 bits.
__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Returns lane 0's value. All lanes of the warp hold the same value. The shuffle tells the compiler
// so, which then keeps the value in a uniform register.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }
