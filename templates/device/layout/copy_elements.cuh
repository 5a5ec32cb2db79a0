// Elements of a row in device memory to shared memory, in one asynchronous copy as wide as kVec
// 16-bit elements.

#include "device/ptx/cp_async.cuh"
#include "device/ptx/shared.cuh"

// Writes zeros where `valid` is false; the source is not read then. Two bytes are too few for
// cp.async, so the thread stores them itself, and the caller's barrier orders that store.
template <int kVec>
__device__ __forceinline__ void copy_elements(uint32 to, const uint16* from, bool valid) {
    if constexpr (kVec > 1) {
        cp_async<kVec * 2>(to, from, valid);
    } else {
        const uint16 value = valid ? *from : uint16(0);
        store_half_word(to, value);
    }
}
