// The tiles of a producer whose warps load together (load_pages.cuh, load_eight.cuh,
// convert_in_place.cuh): the first thread feeds them, and each warp takes them from their slots, as
// consumers do. It knows no copy.

#include "device/schedule/tile_feed.cuh"
#include "device/schedule/tile_slots.cuh"

// The feed over keys of 8 bits. Keys without pages have the feed of load.cuh's caller.
using EightFeed = Either<kPageSize == 0, DrawingFeed<ForwardTiles>, TileFeed<ForwardTiles>>::Type;

// A warp's next tile.
template <class Feed>
__device__ __forceinline__ Tile take_tile(const TileSlots& tiles, Feed& feed, uint32 nth, bool is_first, int lane) {
    if (is_first) feed.begin_tile();
    if (is_first) tiles.put(nth, feed.tile());
    __syncwarp();  // no lane waits for the tile before the first one has put it there
    const Tile tile = tiles.get(nth);
    tiles.release(nth, lane);
    return tile;
}
