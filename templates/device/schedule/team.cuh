// Teams: groups of warps of a CTA that share a ring of tiles in shared memory, and meet without the
// other warps. Decode uses them. It knows no tile.

#include "device/ptx/sync.cuh"

// Waits for all warps of the team. Accesses to shared memory before the call come before those
// after it, for the whole team.
template <int kTeamWarps>
__device__ __forceinline__ void sync_team(int team) {
    if constexpr (kTeamWarps == 1) {
        __syncwarp();
    } else {
        // Team t uses named barrier t + 1, since barrier 0 is that of __syncthreads.
        named_barrier<kTeamWarps * 32>(team + 1);
    }
}
