// The copying warp of a decode kernel whose weights are computed ahead: TMA's copies of a walk's
// blocks, from rows or from pages that hold whole boxes.

#include "decode/ahead/shared.cuh"
#include "decode/segment_walk.cuh"

class KeyCopies {
    const KernelParams& params;
    const TensorMap &map_k, &map_v;
    const Memory& memory;
    const ThreadPlace& place;
    const int head_kv;
    MapRows rows_k, rows_v;
    KeyPages<kBlockN> pages;  // of the next block
    BlockWalk next;
    WalkRing ring;

public:
    __device__ __forceinline__ KeyCopies(const KernelParams& params, const TensorMap& map_k, const TensorMap& map_v, const Sequence& sequence,
                                         int head_kv, const KeyBlocks& blocks, const Memory& memory, const ThreadPlace& place)
        : params(params), map_k(map_k), map_v(map_v), memory(memory), place(place), head_kv(head_kv), pages(params, sequence), next(blocks, 0) {
        pages.fetch(next.block, next.end_of_pages(), place.lane);
        rows_k = map_rows_k(params, sequence, params.map_rows_k), rows_v = map_rows_k(params, sequence, params.map_rows_v);
    }
    __device__ __forceinline__ bool is_past() const { return next.is_past(); }

    // Copies the next block as soon as its slots are free. The whole warp calls it.
    __device__ __forceinline__ void load() {
        const bool issues = place.lane == 0;
        const uint32 slot = ring.slot, full_k = memory.full_k(slot), full_v = memory.full_v(slot);
        barrier_wait_as_warp(memory.empty_k(slot), ring.parity ^ 1);
        if (issues) barrier_expect(full_k, TileK::kBytes);
        load_boxes<TileK>(memory.tile_k(slot), map_k, full_k, pages, next.block, head_kv, rows_k, issues);
        barrier_wait_as_warp(memory.empty_v(slot), ring.parity ^ 1);
        if (issues) barrier_expect(full_v, TileV::kBytes);
        load_boxes<TileV>(memory.tile_v(slot), map_v, full_v, pages, next.block, head_kv, rows_v, issues, place.part * kCtaCols);
        ring.advance();
        next.advance();
        pages.fetch(next.block, next.end_of_pages(), place.lane);
    }
};
