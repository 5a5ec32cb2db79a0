// Elements of a row in device memory to shared memory, in one asynchronous copy as wide as kVec
// elements.

#include "device/ptx/cp_async.cuh"
#include "device/ptx/shared.cuh"

// Writes zeros where `valid` is false; the source is not read then. Two bytes are too few for
// cp.async, so the thread stores them itself, and the caller's barrier orders that store.
template <int kVec, class T>
__device__ __forceinline__ void copy_elements(uint32 to, const T* from, bool valid) {
    if constexpr (kVec * sizeof(T) > 2) {
        cp_async<kVec * sizeof(T)>(to, from, valid);
    } else {
        const uint16 value = valid ? *from : uint16(0);
        store_half_word(to, value);
    }
}
