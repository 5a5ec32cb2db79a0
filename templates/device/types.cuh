// Fixed-width integers, a bool as a type, a choice between types, and addresses within shared
// memory, which PTX takes as 32-bit numbers.

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;

template <bool kValue>
struct Bool { static constexpr bool value = kValue; };

// Either<kIsFirst, A, B>::Type: A, or else B.
template <bool kIsFirst, class A, class B>
struct Either { using Type = A; };
template <class A, class B>
struct Either<false, A, B> { using Type = B; };

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// A value that all lanes of a warp agree on. The compiler then knows it, too, and keeps it in a
// uniform register.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }
