// A position in a ring of slots in shared memory, and the parity of the slot's barriers
// (ptx/mbarrier.cuh). Producers and consumers each keep one. It knows neither the barriers'
// addresses nor the slots' contents.

#include "device/ptx/mbarrier.cuh"

template <int kSlots>
struct Ring {
    uint32 slot = 0, parity = 0;  // the slot, and the parity of its current phase
    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    // The parity of the phase of the slot before this one.
    __device__ __forceinline__ uint32 parity_before() const { return parity ^ (slot == 0 ? 1 : 0); }
};

// A ring of one slot, which takes no register for its position.
struct OneSlot {
    static constexpr uint32 slot = 0;
    uint32 parity = 0;
    __device__ __forceinline__ void advance() { parity ^= 1; }
};
