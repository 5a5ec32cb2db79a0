// A team's ring of blocks that its threads copy by cp.async: when to wait and when to refill. Knows
// no layout of tiles.
//
// A block of the ring is one cp.async group of each thread. A thread waits for its own groups, and
// the team's barrier then says that the other threads' groups have arrived. `Keys` derives from
// this; its load(slot) starts the copy of the next block, or of zeros past the last one, so that
// every step has its group.

#include "decode/teams.cuh"
#include "device/schedule/team.cuh"

constexpr int kRingAlignment = 16;    // bytes
constexpr int kRingBarrierBytes = 0;  // groups of cp.async need no barriers

// The tensors that keys come from.
struct KeySource {};

template <class Keys>
class CpAsyncRing {
    const int team;

protected:
    int stage = 0;

    __device__ __forceinline__ CpAsyncRing(int team) : team(team) {}

public:
    // Groups of cp.async need no preparation. Q's group comes before the keys'.
    __device__ __forceinline__ void start(bool) {}
    // Returns when this thread's copies of Q have arrived.
    __device__ __forceinline__ void wait_for_q() const { cp_async_wait<kNumStages - 1>(); }

    // Returns when the block lies in its tiles, and refills the tiles of the block before.
    __device__ __forceinline__ void acquire(int) {
        cp_async_wait<kNumStages - 2>();
        // The other threads' copies of this block have arrived, and the team has read the block
        // before, whose tiles the next load overwrites.
        sync_team<kTeamWarps>(team);
        static_cast<Keys*>(this)->load(stage == 0 ? kNumStages - 1 : stage - 1);
    }
    // On to the next block. The next `acquire` frees this one's tiles.
    __device__ __forceinline__ void release() { stage = stage == kNumStages - 1 ? 0 : stage + 1; }
};
