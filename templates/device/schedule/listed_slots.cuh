// Under a block mask the producer alone reads lists. It passes the number of a listed tile on to
// the consumers in shared memory, beside the slot that the tile is loaded into. An entry is written
// before the arrival that fills the slot, and read before the slot is released.

#include "device/attention/block_list.cuh"
#include "device/ptx/shared.cuh"

struct ListedSlots {
    static constexpr int kSlotBytes = 8;
    uint32 base;

    struct Entry {
        int tile, head;
        bool is_full;
    };

    // By the producer, once the slot is empty.
    __device__ __forceinline__ void put(uint32 slot, const ListedTile& listed, int head) const {
        const int word = listed.tile << 1 | (listed.is_full ? 1 : 0);
        store_two_ints(base + slot * kSlotBytes, word, head);
    }
    // By a whole warp of the consumers, once the slot is full. The result is uniform to the
    // compiler.
    __device__ __forceinline__ Entry get(uint32 slot) const {
        const int2 entry = load_two_ints(base + slot * kSlotBytes);
        const int word = uniform(entry.x), head = uniform(entry.y);
        return {word >> 1, head, (word & 1) != 0};
    }
};
