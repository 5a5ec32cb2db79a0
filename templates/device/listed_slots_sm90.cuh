// What the producer says of a listed tile, in shared memory beside the slot that the tile is loaded into: consumers read no list, and so cannot
// walk it otherwise. It is written before the arrival that fills the slot, and read before the slot is let go.

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
        asm volatile("st.shared.v2.s32 [%0], {%1, %2};" :: "r"(base + slot * kSlotBytes), "r"(word), "r"(head) : "memory");
    }
    // By a whole warp of the consumers, once the slot is full; its lanes agree as the compiler can see.
    __device__ __forceinline__ Entry get(uint32 slot) const {
        int word, head;
        asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(word), "=r"(head) : "r"(base + slot * kSlotBytes) : "memory");
        word = uniform(word), head = uniform(head);
        return {word >> 1, head, (word & 1) != 0};
    }
};
