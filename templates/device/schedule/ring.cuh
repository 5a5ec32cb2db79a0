// A position in a ring of slots in shared memory, with the parity that its barriers have there
// (ptx/mbarrier.cuh).

#include "device/ptx/mbarrier.cuh"

template <int kSlots>
struct Ring {
    uint32 slot = 0, parity = 0;  // the slot, and the parity of its current round
    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    // The parity of the round that the slot before is in.
    __device__ __forceinline__ uint32 parity_before() const { return parity ^ (slot == 0 ? 1 : 0); }
};
