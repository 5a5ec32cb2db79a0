// The numbers of listed tiles, which the producer passes to the consumers under a block mask. Only
// the producer reads the lists. This file knows no barrier: the ring of loaded tiles orders its
// entries.
//
// Entries lie in shared memory as [slot][8 bytes], without a swizzle: one entry for each slot of
// the ring. The producer writes an entry before the arrival that fills the slot. Consumers read it
// before they release the slot.

#include "device/attention/block_list.cuh"
#include "device/ptx/shared.cuh"

struct ListedSlots {
    static constexpr int kSlotBytes = 8;
    uint32 base;

    struct Entry {
        int tile, head;
        bool is_full;
    };

    // The producer calls it, once the slot is empty.
    __device__ __forceinline__ void put(uint32 slot, const ListedTile& listed, int head) const {
        const int word = listed.tile << 1 | (listed.is_full ? 1 : 0);
        store_two_ints(base + slot * kSlotBytes, word, head);
    }
    // A whole consumer warp calls it, once the slot is full. The compiler knows the result to be
    // uniform.
    __device__ __forceinline__ Entry get(uint32 slot) const {
        const int2 entry = load_two_ints(base + slot * kSlotBytes);
        const int word = uniform(entry.x), head = uniform(entry.y);
        return {word >> 1, head, (word & 1) != 0};
    }
    // As get, without the head.
    __device__ __forceinline__ ListedTile listed(uint32 slot) const {
        const Entry entry = get(slot);
        return {entry.tile, entry.is_full};
    }
};
