// The producer's source of tiles, for one CTA or a cluster of kCtas. tile_order.cuh gives the tile
// of an index; this file gives the next index. It knows no slot and no copy.
//
// If all tiles have one length, each of n feeds takes every n-th tile. If tiles differ in length
// (causal mask, window, block mask, varlen), a feed draws the next free tile from a counter in
// device memory. With kDrawsEqual it draws tiles of one length too: SMs do not share memory's rate
// evenly, so they are not equally fast. The last feed to finish sets the counter back to zero, as
// the next launch on the stream expects it (src/kernel/tile_counters.rs). Without a counter (null)
// a feed takes every n-th tile.
//
// A feed draws the next tile before it loads the last block or two of the current tile, which hides
// the atomic's latency. A tile drawn earlier would wait for a long tile to end while other CTAs are
// idle.
//
// With kByTicket (schedule/dq_turns.cuh) the counter gives all tiles, the first one too. The
// counter's owner sets it to zero before the launch. A feed draws no tile before it has loaded the
// previous one.
//
// Where CTAs may start late (Tiles::kMayStartLate), the counter gives the first tile too, so that
// the longest tiles do not wait for the last CTAs. advance() then comes before the first tile.
//
// With kWholeHeads a feed takes all tiles of a head, one after the other, and then those of every
// n-th head. With kMaySplit they are those that do the same part of their walks.

#include "device/schedule/tile_order.cuh"

template <typename Tiles, int kCtas = 1, bool kByTicket = false, bool kWholeHeads = false, bool kDrawsEqual = false>
struct TileFeed {
    const KernelParams& params;
    TileList<Tiles, kIsVarlen> tiles;
    uint32* const counter;
    // One turn back where begin_tile() makes the first step, which without a counter ends here.
    uint32 index = blockIdx.x / kCtas - (Tiles::kMayStartLate ? feeds() : 0), next = 0;
    bool has_next = false;

    static __device__ __forceinline__ uint32 feeds() { return gridDim.x / kCtas; }
    __device__ __forceinline__ TileFeed(const KernelParams& params, uint32* counter)
        : params(params), tiles(params, feeds()), counter(kTilesDiffer || kByTicket || kDrawsEqual ? counter : nullptr) {
        if (kByTicket && this->counter) index = draw();
        if constexpr (kWholeHeads) index *= tiles.order.tiles_per_head / splits_of_tile(params);
    }
    // Whether a feed knows its second tile from the start: all tiles have one length.
    __device__ __forceinline__ bool knows_second() const {
        if constexpr (!kDrawsEqual || kIsVarlen || kHasBlockMask || Tiles::Order::kHasParts) return false;
        return !kTilesDiffer || tiles.order.tiles_per_head == splits_of_tile(params);
    }
    __device__ __forceinline__ uint32 draw() const {
        if (knows_second() && index < feeds()) return index + feeds();
        const uint32 taken = kByTicket || Tiles::kMayStartLate ? 0 : knows_second() ? 2 * feeds() : feeds();
        return taken + atomicAdd(counter, 1u);
    }
    __device__ __forceinline__ Tile tile() { return tiles.at(index, params); }
    // Called before the last blocks of a tile are loaded. For a tile without blocks, advance()
    // draws instead.
    __device__ __forceinline__ void draw_next() {
        if (!kByTicket && counter) next = draw(), has_next = true;
    }
    __device__ __forceinline__ void advance() {
        if constexpr (kWholeHeads) {
            const uint32 per_head = tiles.order.tiles_per_head / splits_of_tile(params);
            if (++index % per_head == 0) index += (feeds() - 1) * per_head;
            return;
        }
        if (!counter) index += feeds();
        else index = has_next ? next : draw();
        has_next = false;
    }
    // advance() comes before each tile where CTAs may start late, and else after it.
    __device__ __forceinline__ void begin_tile() {
        if constexpr (Tiles::kMayStartLate) advance();
    }
    __device__ __forceinline__ void end_tile() {
        if constexpr (!Tiles::kMayStartLate) advance();
    }
    __device__ __forceinline__ void finish() const {
        if (kByTicket || !counter) return;
        __threadfence();  // orders this feed's draws before its end
        if (atomicAdd(counter + 1, 1u) == feeds() - 1) counter[0] = 0, counter[1] = 0;
    }
};

// A feed that draws tiles of one length, too.
template <typename Tiles>
using DrawingFeed = TileFeed<Tiles, 1, false, false, true>;
