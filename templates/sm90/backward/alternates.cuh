// Whether every other wave of tiles walks its group's heads from the first rows on
// (device/schedule/group_walk.cuh). The kernels of the backward pass share this choice. It stands
// before device/schedule/tile_order.cuh, which reads it.

constexpr bool kAlternates = kIsCausal && !kHasWindow && !kIsVarlen && kMaskBlockQ == 0 && !kMaySplit && !kIsDeterministic && kDirectTiles == 0;
