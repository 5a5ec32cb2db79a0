// Teams: groups of warps of a CTA that share a ring of tiles in shared memory, and meet without the
// other warps.

#include "device/ptx/sync.cuh"

template <int kTeamWarps>
__device__ __forceinline__ void sync_team(int team) {
    if constexpr (kTeamWarps == 1) {
        __syncwarp();
    } else {
        // Barrier 0 is that of __syncthreads.
        named_barrier<kTeamWarps * 32>(team + 1);
    }
}
