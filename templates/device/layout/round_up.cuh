// Rounding of tiles' sizes at compile time. It knows no tile.

__device__ __forceinline__ constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }
