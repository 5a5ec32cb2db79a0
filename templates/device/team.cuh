// Teams: groups of warps of a block of threads that share a ring of tiles in shared memory, and meet without the others.

template <int kTeamWarps>
__device__ __forceinline__ void sync_team(int team) {
    if constexpr (kTeamWarps == 1) {
        __syncwarp();
    } else {
        // Barrier 0 is __syncthreads'.
        asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeamWarps * 32) : "memory");
    }
}
